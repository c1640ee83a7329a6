//! Names the revision of the source, for the first line of the log.

use std::{env, process::Command};

fn main() {
    println!("cargo:rustc-env=REVISION={}", revision());
}

/// Returns the revision of the source, for the first line of the log.
///
/// Only a release has one: a debug build would be built again after each commit. `REVISION` names it where the source has no Git folder.
fn revision() -> String {
    println!("cargo:rerun-if-changed=src/build.rs");
    println!("cargo:rerun-if-env-changed=REVISION");
    if env::var("PROFILE").as_deref() != Ok("release") {
        return "dev".to_owned();
    }
    let named = env::var("REVISION").ok().filter(|revision| is_plain(revision));
    named.or_else(revision_of_git).unwrap_or_else(|| "unknown".to_owned())
}

/// Returns the commit of the source's own repository, and requests a new build after the next commit.
fn revision_of_git() -> Option<String> {
    let arguments = ["rev-parse", "--show-prefix", "--git-path", "logs/HEAD", "--short=12", "HEAD"];
    let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
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
