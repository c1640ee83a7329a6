//! Selection of the PostgreSQL server binaries, and their download if the machine has none.
//!
//! The data of a database fixes the major version. Never: installs a package on the machine. Caller: `cluster`.

use std::collections::HashSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::account::{Account, clean_command, setpriv_failed};
use super::error::{EmbeddedError, last_lines};

/// Oldest PostgreSQL major version that the schema supports (`NULLS NOT DISTINCT`).
pub(super) const OLDEST_MAJOR: u32 = 15;

/// Directory where Debian and its derivatives install each version: `<root>/<major>/bin`.
const SYSTEM_ROOT: &str = "/usr/lib/postgresql";

/// Timeout of the download in seconds. A slow network needs minutes for some 30 MB of package lists and packages.
const FETCH_SECONDS_MAX: u32 = 600;

const FETCH_SCRIPT: &str = include_str!("fetch.sh");

/// A directory with working server binaries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Binaries {
    pub(super) bin_dir: PathBuf,
    pub(super) major: u32,
    /// Shared libraries downloaded with the server, for its programs only.
    library_dir: Option<PathBuf>,
}

impl Binaries {
    /// Selects the binaries for `state_dir`: of version `wanted` if the data has one, else the first suitable ones.
    ///
    /// # Errors
    /// Fails if no suitable binaries exist and none can be downloaded; the error names the command to type.
    pub(super) fn find(state_dir: &Path, wanted: Option<u32>) -> Result<Self, EmbeddedError> {
        if let Some(path) = env::var_os("PG_BINDIR").filter(|value| !value.is_empty()).map(PathBuf::from) {
            let found = probe(&path, None).ok_or(EmbeddedError::BadBinDir { path })?;
            return select(vec![found], state_dir, wanted);
        }
        let mut found = installed(state_dir);
        if found.is_empty() {
            fetch(state_dir)?;
            found = fetched(state_dir);
        }
        if found.is_empty() {
            return Err(EmbeddedError::NoBinaries { detail: "the fetched binaries do not run".to_owned() });
        }
        select(found, state_dir, wanted)
    }

    pub(super) fn program(&self, name: &str) -> PathBuf {
        self.bin_dir.join(name)
    }

    /// Sets the library path of a command to the downloaded libraries.
    pub(super) fn set_environment(&self, command: &mut Command) {
        if let Some(dir) = &self.library_dir {
            command.env("LD_LIBRARY_PATH", dir);
        }
    }
}

fn select(found: Vec<Binaries>, state_dir: &Path, wanted: Option<u32>) -> Result<Binaries, EmbeddedError> {
    let list: Vec<String> = found.iter().map(|b| format!("{} ({})", b.major, b.bin_dir.display())).collect();
    let list = list.join(", ");
    if let Some(binaries) = found.into_iter().find(|binaries| suits(binaries.major, wanted)) {
        return Ok(binaries);
    }
    Err(match wanted {
        Some(wanted) => EmbeddedError::OtherVersion { data_dir: state_dir.join(super::DATA_DIR), wanted, found: list },
        None => EmbeddedError::TooOld { found: list },
    })
}

/// Returns whether a version suits the data. A data directory works only with the major version that created it.
fn suits(major: u32, wanted: Option<u32>) -> bool {
    wanted.map_or(major >= OLDEST_MAJOR, |wanted| major == wanted)
}

/// Returns all working binaries, in order of preference.
fn installed(state_dir: &Path) -> Vec<Binaries> {
    let mut found: Vec<Binaries> =
        versions_below(Path::new(SYSTEM_ROOT)).iter().filter_map(|dir| probe(dir, None)).collect();
    found.extend(fetched(state_dir));
    let path = env::var_os("PATH").unwrap_or_default();
    found.extend(env::split_paths(&path).filter(|dir| dir.is_absolute()).filter_map(|dir| probe(&dir, None)));
    // PATH often leads, directly or by links, to binaries that are listed already.
    let mut seen = HashSet::new();
    found.retain(|binaries| seen.insert(binaries.bin_dir.clone()));
    found
}

fn fetched(state_dir: &Path) -> Vec<Binaries> {
    let tree = state_dir.join("postgresql");
    let libraries = tree.join("libraries");
    versions_below(&tree.join("usr/lib/postgresql")).iter().filter_map(|dir| probe(dir, Some(&libraries))).collect()
}

/// Returns the `bin` directories of the versions below `root`, newest first.
fn versions_below(root: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(root) else { return Vec::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    newest_first(names).into_iter().map(|major| root.join(major.to_string()).join("bin")).collect()
}

fn newest_first(names: impl Iterator<Item = String>) -> Vec<u32> {
    let mut majors: Vec<u32> = names.filter_map(|name| name.parse().ok()).collect();
    majors.sort_unstable_by(|a, b| b.cmp(a));
    majors
}

/// Runs the server in `dir` for its version; `None` if there is none that runs.
fn probe(dir: &Path, library_dir: Option<&Path>) -> Option<Binaries> {
    // Links are resolved, so that the programs beside the real one are found, too.
    let bin_dir = fs::canonicalize(dir.join("postgres")).ok()?.parent()?.to_owned();
    if !bin_dir.join("initdb").exists() {
        return None;
    }
    let mut binaries = Binaries { bin_dir, major: 0, library_dir: library_dir.map(Path::to_owned) };
    let mut command = clean_command(binaries.program("postgres"));
    binaries.set_environment(&mut command);
    let output = command.arg("--version").output().ok()?;
    match major_version(&String::from_utf8_lossy(&output.stdout)) {
        Some(major) => binaries.major = major,
        None => {
            let said = last_lines(&String::from_utf8_lossy(&output.stderr), 1);
            tracing::warn!(bin_dir = %binaries.bin_dir.display(), "skipping a PostgreSQL that does not run: {said}");
            return None;
        }
    }
    Some(binaries)
}

/// Parses `postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)`, also for a pre-release such as `18beta1`.
fn major_version(text: &str) -> Option<u32> {
    let version = text.split_whitespace().nth(2)?;
    let digits = version.find(|c: char| !c.is_ascii_digit()).map_or(version, |end| &version[..end]);
    digits.parse().ok()
}

fn fetch(state_dir: &Path) -> Result<(), EmbeddedError> {
    tracing::info!(
        "no PostgreSQL server binaries found; fetching the distribution's packages into {}, once; nothing outside it \
            changes",
        state_dir.join("postgresql").display()
    );
    // `timeout` leads a process group and forwards the death signal to all of it.
    let itself = Account { name: String::new(), uid: 0, gid: 0, switch: false };
    let mut command = itself.command(Path::new("timeout"), "TERM");
    command.args(["--kill-after=10", &FETCH_SECONDS_MAX.to_string(), "sh", "-c", FETCH_SCRIPT, "fetch"]);
    command.arg(state_dir).arg(OLDEST_MAJOR.to_string());
    for name in ["http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "APT_CONFIG"] {
        if let Some(value) = env::var_os(name) {
            command.env(name, value);
        }
    }
    let output = command.output().map_err(setpriv_failed)?;
    let said = last_lines(&String::from_utf8_lossy(&output.stderr), 2);
    tracing::debug!(stdout = %String::from_utf8_lossy(&output.stdout), stderr = %String::from_utf8_lossy(&output.stderr));
    match output.status.code() {
        Some(0) => {
            tracing::info!("PostgreSQL server binaries fetched");
            Ok(())
        }
        Some(124 | 137) => {
            Err(EmbeddedError::NoBinaries { detail: format!("not done after {FETCH_SECONDS_MAX} s: {said}") })
        }
        _ => Err(EmbeddedError::NoBinaries { detail: said }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn major_version_is_parsed_from_server_output() {
        assert_eq!(major_version("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n"), Some(15));
        assert_eq!(major_version("postgres (PostgreSQL) 18beta1"), Some(18));
        assert_eq!(major_version("postgres: command not found"), None);
        assert_eq!(major_version(""), None);
    }

    #[test]
    fn versions_are_ordered_as_numbers() {
        let names = ["9.6", "15", "9", "common", "100"].map(str::to_owned);
        assert_eq!(newest_first(names.into_iter()), vec![100, 15, 9]);
    }

    #[test]
    fn binaries_of_data_version_are_selected() {
        let of = |major: u32| Binaries { bin_dir: PathBuf::from("/bin"), major, library_dir: None };
        let state = Path::new("/state");
        assert_eq!(select(vec![of(17), of(15)], state, Some(15)).unwrap().major, 15);
        assert_eq!(select(vec![of(14), of(17), of(15)], state, None).unwrap().major, 17);
        assert!(matches!(select(vec![of(17)], state, Some(15)), Err(EmbeddedError::OtherVersion { wanted: 15, .. })));
        assert!(matches!(select(vec![of(13)], state, None), Err(EmbeddedError::TooOld { .. })));
    }
}
