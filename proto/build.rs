//! Generates the gRPC code from the `.proto` files with a compiler written in Rust, so that building needs no protoc, and names the revision
//! of the source.

use std::{env, error::Error, fs, path::PathBuf, process::Command};

use prost::Message as _;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    println!("cargo:rerun-if-changed=migrations");
    println!("cargo:rustc-env=REVISION={}", revision());
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
    let messages = tonic_prost_build::configure().btree_map(".").codec_path("crate::transport::codec::ProtobufCodec");
    // Few want them, and they are larger than all the rest of an answer.
    let messages = messages.boxed(".linkis.rm.v1.AvailableResource.counters");
    messages.build_client(with_stubs).build_server(with_stubs).compile_fds(descriptors)?;
    Ok(())
}

/// Returns the revision of the source, for the first line of the log.
///
/// Only a release has one: a debug build would be built again after each commit. `REVISION` names it where the source has no Git folder.
fn revision() -> String {
    println!("cargo:rerun-if-env-changed=REVISION");
    if env::var("PROFILE").as_deref() != Ok("release") {
        return "dev".to_owned();
    }
    let named = env::var("REVISION").ok().filter(|revision| is_plain(revision));
    named.or_else(revision_of_git).unwrap_or_else(|| "unknown".to_owned())
}

/// Returns the commit of the source's own repository, and requests a new build after the next commit.
fn revision_of_git() -> Option<String> {
    let asked = ["rev-parse", "--show-prefix", "--git-path", "logs/HEAD", "--short=12", "HEAD"];
    let output = Command::new("git").args(asked).output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    // A prefix means that the source is a folder of another repository.
    let mut lines = text.lines();
    let (prefix, log, revision) = (lines.next()?, lines.next()?, lines.next()?);
    println!("cargo:rerun-if-changed={log}");
    (prefix.is_empty() && is_plain(revision)).then(|| revision.to_owned())
}

fn is_plain(revision: &str) -> bool {
    !revision.is_empty() && revision.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
}
