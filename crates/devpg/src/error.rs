//! Errors of starting the private PostgreSQL server. Each text names the next action. Callers: all modules of this crate.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

use super::binaries::OLDEST_MAJOR;

/// Error of starting the private server. Each text states the next action.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddedError {
    /// The user has no home directory, so there is no default place for the data.
    #[error("this user has no home directory to keep the data in: choose a directory with --data-dir")]
    NoHome,
    /// A file or directory of the state directory cannot be created, read or changed.
    #[error("cannot use {}: make it a folder that this account can write, or choose another with --data-dir", path.display())]
    Directory {
        /// Path of the operation.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The state directory contains unknown files.
    #[error(
        "{} contains {found:?}, which is not part of a database: choose an empty or new folder with --data-dir",
        path.display()
    )]
    OtherFiles {
        /// State directory.
        path: PathBuf,
        /// Name of one unknown file.
        found: PathBuf,
    },
    /// Another process has locked the state directory.
    #[error("{} is in use by another linkis-rm: stop that one, or choose another directory with --data-dir", path.display())]
    InUse {
        /// State directory.
        path: PathBuf,
    },
    /// PostgreSQL does not run for a user id without an account.
    #[error(
        "user id {uid} has no account on this machine, which PostgreSQL requires: \
         run as a user listed by `getent passwd`, or set DATABASE_URL to a running server"
    )]
    NoAccount {
        /// User id of this process.
        uid: u32,
    },
    /// Root started the process, the machine has no suitable account, and none could be created.
    #[error(
        "PostgreSQL does not run as root, neither `linkis-rm` nor `postgres` is an account here, and making one failed \
         ({detail}): type `useradd --system linkis-rm`, or start linkis-rm as an ordinary user"
    )]
    NoServerAccount {
        /// Error output of `useradd`.
        detail: String,
    },
    /// Root started the process, and the account of the server cannot reach a path.
    #[error(
        "PostgreSQL runs as `{account}`, to whom {} is closed, so {} is out of its reach: \
         choose another directory with --data-dir, for example below /var/lib, or open it with `chmod o+x {}`",
        closed.display(), path.display(), closed.display()
    )]
    OutOfReach {
        /// Path that the server needs.
        path: PathBuf,
        /// Directory on the path that denies access.
        closed: PathBuf,
        /// Account that the server runs as.
        account: String,
    },
    /// `PG_BINDIR` has no working server binaries.
    #[error("PG_BINDIR={} has no working `postgres` and `initdb`: correct or unset PG_BINDIR", path.display())]
    BadBinDir {
        /// Value of `PG_BINDIR`.
        path: PathBuf,
    },
    /// The machine has no server binaries, and the download failed.
    #[error(
        "there are no PostgreSQL server binaries on this machine and fetching them failed ({detail}): \
         type `apt-get install postgresql` (as root, or after sudo), set PG_BINDIR to where its `postgres` is, \
         or set DATABASE_URL to a running server"
    )]
    NoBinaries {
        /// Last lines of the download's output.
        detail: String,
    },
    /// All installed servers are too old for the schema.
    #[error(
        "PostgreSQL {OLDEST_MAJOR} or newer is needed and only {found} is on this machine: \
         install a newer one and set PG_BINDIR to its bin directory, or set DATABASE_URL to a running server"
    )]
    TooOld {
        /// Versions found, with their paths.
        found: String,
    },
    /// The binaries of the major version that created the data are not installed.
    #[error(
        "{} was made by PostgreSQL {wanted} and only {found} is on this machine: \
         type `apt-get install postgresql-{wanted}` (as root, or after sudo), or start afresh with another --data-dir",
        data_dir.display()
    )]
    OtherVersion {
        /// Data directory.
        data_dir: PathBuf,
        /// Major version that created the data.
        wanted: u32,
        /// Versions found, with their paths.
        found: String,
    },
    /// A required program cannot be run.
    #[error("cannot run `{program}`: type `apt-get install {package}` (as root, or after sudo)")]
    Run {
        /// Program.
        program: &'static str,
        /// Debian package that contains the program.
        package: &'static str,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The operating system refused to create a thread.
    #[error("cannot start a thread that supervises PostgreSQL: raise the limit on processes (`ulimit -u`)")]
    Thread(#[source] io::Error),
    /// `initdb` failed.
    #[error("creating the database in {} failed: {detail}; correct that, then start again", path.display())]
    Initdb {
        /// Directory of the new database.
        path: PathBuf,
        /// Error output of `initdb`.
        detail: String,
    },
    /// The server ended before it accepted connections.
    #[error("PostgreSQL ended while starting ({status}): {detail}; the whole log is {}", log.display())]
    Ended {
        /// Exit status.
        status: ExitStatus,
        /// Last complaints in its log.
        detail: String,
        /// Log file of the server.
        log: PathBuf,
    },
    /// The server neither accepted connections nor ended in time.
    #[error("PostgreSQL was not ready after {waited_s} s: see {}, then start again", log.display())]
    NotReady {
        /// Time waited, in seconds.
        waited_s: u64,
        /// Log file of the server.
        log: PathBuf,
    },
}

impl EmbeddedError {
    /// Returns a function for `map_err` on operations on `path`.
    pub(super) fn directory(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Directory { path, source }
    }
}

/// Returns the last `count` lines of a program's output in one line, for an error text.
pub(super) fn last_lines(output: &str, count: usize) -> String {
    let lines: Vec<&str> = output.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let text = lines[lines.len().saturating_sub(count)..].join("; ");
    if text.is_empty() { "it said nothing".to_owned() } else { text }
}

/// Returns the first complaints of a PostgreSQL program in one line, because later ones often follow from them.
pub(super) fn first_complaints(output: &str) -> String {
    const MARKS: [&str; 6] = ["ERROR: ", "FATAL: ", "PANIC: ", "DETAIL: ", "HINT: ", "error: "];
    let complaints = output.lines().filter(|line| MARKS.iter().any(|mark| line.contains(mark))).take(3);
    let complaints: Vec<&str> = complaints.map(str::trim).collect();
    if complaints.is_empty() { last_lines(output, 3) } else { complaints.join("; ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_detail_quotes_first_errors_or_last_lines() {
        let output = "creating\nFATAL:  no space\nHINT:  free some\nPANIC:  torn\nERROR:  later\nremoving\n";
        assert_eq!(first_complaints(output), "FATAL:  no space; HINT:  free some; PANIC:  torn");
        assert_eq!(first_complaints("a\nb\n\nc\nd\n"), "b; c; d");
        assert_eq!(first_complaints(""), "it said nothing");
    }
}
