//! Compiles the protobuf definitions, without a protobuf compiler on the machine.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = "../../proto";
    let (own, etcd) = ("dquant/v1/cluster.proto", "etcd/rpc.proto");
    for proto in [own, etcd] {
        println!("cargo:rerun-if-changed={root}/{proto}");
        let files = protox::compile([proto], [root])?;
        tonic_prost_build::configure().build_server(false).compile_fds(files)?;
    }
    // Brains answer with replies that are serialised already where many callers get the same.
    let folder = Path::new(&std::env::var("OUT_DIR")?).join("server");
    std::fs::create_dir_all(&folder)?;
    let mut server = tonic_prost_build::configure()
        .build_client(false)
        .out_dir(folder)
        .extern_path(".dquant.cluster.v1", "crate::proto");
    for reply in ["ViewReply", "TopologyReply"] {
        let path = format!(".dquant.cluster.v1.{reply}");
        server = server.extern_path(path, "crate::proto::Serialised");
    }
    server.compile_fds(protox::compile([own], [root])?)?;
    Ok(())
}
