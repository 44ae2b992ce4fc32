//! Compiles the messages of the local socket, without a protobuf compiler on the machine. The
//! services belong to the daemons: no gRPC code is generated here.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let proto = "dquant/v1/control.proto";
    let root = "../../proto";
    println!("cargo:rerun-if-changed={root}/{proto}");
    let files = protox::compile([proto], [root])?;
    let messages = tonic_prost_build::configure().build_client(false).build_server(false);
    messages.btree_map(".").compile_fds(files)?;
    Ok(())
}
