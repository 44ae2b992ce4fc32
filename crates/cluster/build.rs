//! Compiles the protobuf definitions, without a protobuf compiler on the machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let etcd = "etcd/rpc.proto";
    let root = "../../proto";
    println!("cargo:rerun-if-changed={root}/{etcd}");
    let files = protox::compile([etcd], [root])?;
    tonic_prost_build::configure().build_server(false).compile_fds(files)?;
    Ok(())
}
