//! Compiles the cluster's protobuf definitions, without a protobuf compiler on the machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let proto = "dquant/v1/cluster.proto";
    let root = "../../proto";
    println!("cargo:rerun-if-changed={root}/{proto}");
    let files = protox::compile([proto], [root])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
