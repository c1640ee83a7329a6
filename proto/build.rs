//! Generates the gRPC code from the `.proto` files with a compiler written in Rust, so that building needs no protoc.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message as _;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    println!("cargo:rerun-if-changed=migrations");
    let files = [
        "linkis/rm/v1/resource.proto",
        "linkis/rm/v1/resource_manager.proto",
        "linkis/rm/v1/usage.proto",
        "linkis/rm/v1/admin.proto",
        "linkis/rm/v1/external_resource.proto",
    ];
    let descriptors = protox::compile(files, ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    // The client has its own way to call (`client/call.rs`): it needs the messages alone.
    let with_stubs = env::var_os("CARGO_FEATURE_SERVER").is_some();
    // Ordered maps: equal messages have equal bytes, which is what a request id is checked by.
    let messages = tonic_prost_build::configure().btree_map(".").codec_path("crate::transport::codec::Protobuf");
    // Few want them, and they are larger than all the rest of an answer.
    let messages = messages.boxed(".linkis.rm.v1.AvailableResource.counters");
    messages.build_client(with_stubs).build_server(with_stubs).compile_fds(descriptors)?;
    Ok(())
}
