//! Common parts of all test targets: the root of the repository, the program under test, which is built on first use, a PostgreSQL,
//! and waits for conditions.

use std::{
    env, fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::LazyLock,
    time::{Duration, Instant},
};

pub use database::{execute, new_database, start_postgres, start_postgres_on_port};

mod database;
pub mod proxy;

/// Longest wait for an event that must come.
pub const LONG: Duration = Duration::from_secs(60);

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

/// Waits until `condition` holds; fails if a check that begins after `longest` fails. The pauses between checks grow, so that a long
/// wait costs little.
pub async fn eventually<F: Future<Output = bool>>(
    what: &str,
    longest: Duration,
    condition: impl Fn() -> F,
) -> Duration {
    let start = Instant::now();
    loop {
        let is_last = start.elapsed() >= longest;
        if condition().await {
            return start.elapsed();
        }
        assert!(!is_last, "not within {longest:?}: {what}");
        tokio::time::sleep((start.elapsed() / 20).clamp(Duration::from_millis(5), Duration::from_millis(50))).await;
    }
}

/// Removes a folder after the end of this process and its PostgreSQL.
pub fn remove_at_end(folder: &Path) {
    let script = r#"(while [ -d "/proc/$1" ] || [ -e "$2/data/postmaster.pid" ]; do sleep 0.2; done; rm -rf "$2") &"#;
    let pid = std::process::id().to_string();
    let mut watcher = Command::new("sh");
    watcher.args(["-c", script, "sh", &pid]).arg(folder).process_group(0);
    assert!(watcher.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success());
}

/// A folder of this run. Folders of ended runs are removed.
pub fn scratch(name: &str) -> PathBuf {
    scratch_in(&std::env::temp_dir(), name)
}

/// [`scratch`] in another folder for temporary files.
pub fn scratch_in(temp: &Path, name: &str) -> PathBuf {
    const PREFIX: &str = "linkis-rm-test-";
    for entry in fs::read_dir(temp).unwrap().flatten() {
        let file_name = entry.file_name().to_string_lossy().into_owned();
        let pid = file_name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if pid.is_some_and(|pid| !PathBuf::from(format!("/proc/{pid}")).exists()) {
            // The folder may belong to another user or be removed by another run.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    temp.join(format!("{PREFIX}{}-{name}", std::process::id()))
}
