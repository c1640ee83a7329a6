//! Common parts of all test targets: the root of the repository, and the program under test, which is built on first use.

use std::{env, path::Path, process::Command, sync::LazyLock};

/// Returns the root of the repository.
#[must_use]
pub fn repo_root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// The program, built with the profile of the tests.
///
/// Cargo builds the program before the tests only if all packages are tested, so the first use builds it. The build is that of the root
/// package's tests, so that all libraries have equal features and compile once. Without Cargo, the existing program is used.
pub static PROGRAM: LazyLock<&str> = LazyLock::new(|| {
    let tests = env::current_exe().unwrap_or_default();
    let folder = tests.ancestors().nth(2).unwrap_or(repo_root());
    if let Some(cargo) = env::var_os("CARGO") {
        let mut build = Command::new(cargo);
        build.args(["test", "--quiet", "--no-run", "--test", "workspace", "--target-dir"]).arg(folder.join(".."));
        // Variables that Cargo sets for a test. They would rerun build scripts, and rebuild everything that depends on these.
        let of_test = |name: &str| ["CARGO_MANIFEST_", "CARGO_PKG_"].iter().any(|prefix| name.starts_with(prefix));
        for (name, _) in env::vars().filter(|(name, _)| of_test(name)) {
            build.env_remove(name);
        }
        build.args(folder.ends_with("release").then_some("--release")).current_dir(repo_root());
        assert!(build.status().is_ok_and(|status| status.success()), "the program cannot be built");
    }
    folder.join("linkis-rm").display().to_string().leak()
});
