//! Compiles the protobuf definitions, without a protobuf compiler on the machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = "../../proto";
    let (own, etcd) = ("dquant/v1/cluster.proto", "etcd/rpc.proto");
    for (proto, has_server) in [(own, true), (etcd, false)] {
        println!("cargo:rerun-if-changed={root}/{proto}");
        let files = protox::compile([proto], [root])?;
        tonic_prost_build::configure().build_server(has_server).compile_fds(files)?;
    }
    Ok(())
}
