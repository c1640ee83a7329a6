//! Generates the gRPC code from the `.proto` files with a compiler written in Rust, so that building needs no protoc.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message as _;

/// The folder of the `.proto` files.
const FOLDER: &str = "../../proto";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed={FOLDER}");
    let files = [
        "linkis/rm/v1/resource.proto",
        "linkis/rm/v1/resource_manager.proto",
        "linkis/rm/v1/usage.proto",
        "linkis/rm/v1/admin.proto",
        "linkis/rm/v1/external_resource.proto",
    ];
    let descriptors = protox::compile(files, [FOLDER])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    // Ordered maps: equal messages have equal bytes, which is what a request id is checked by.
    let messages = tonic_prost_build::configure().btree_map(".").codec_path("crate::codec::ProtobufCodec");
    // Few want them, and they are larger than all the rest of an answer.
    let messages = messages.boxed(".linkis.rm.v1.AvailableResource.counters");
    let has_transport = env::var_os("CARGO_FEATURE_TRANSPORT").is_some();
    messages.build_transport(has_transport).compile_fds(descriptors)?;
    Ok(())
}
