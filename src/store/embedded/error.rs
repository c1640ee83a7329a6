//! Why the private server could not be started, and what to do next.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

use super::binaries::OLDEST_MAJOR;

/// Why the private server could not be started; each text says what to do next.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddedError {
    /// The user has no home directory, so there is no default place for the data.
    #[error("this user has no home directory to keep the data in: choose a directory with --data-dir")]
    NoHome,
    /// A file or directory of the state directory cannot be created, read or changed.
    #[error("cannot use {}: make it a folder that this account can write, or choose another with --data-dir", path.display())]
    Directory {
        /// What was being used.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The folder for the state holds something else.
    #[error(
        "{} holds {found:?}, which is no part of a database: choose an empty folder, or one that is not there yet, with --data-dir",
        path.display()
    )]
    OtherFiles {
        /// The folder.
        path: PathBuf,
        /// The name of something in it.
        found: PathBuf,
    },
    /// Another process holds the state directory.
    #[error("{} is in use by another linkis-rm: stop that one, or choose another directory with --data-dir", path.display())]
    InUse {
        /// The state directory.
        path: PathBuf,
    },
    /// PostgreSQL refuses to run for a user id without an account.
    #[error(
        "user id {uid} has no account on this machine, which PostgreSQL requires: \
         run as a user listed by `getent passwd`, or set DATABASE_URL to a running server"
    )]
    NoAccount {
        /// The user id of this process.
        uid: u32,
    },
    /// Started by root, and the machine has no account to run the server as, nor could one be made.
    #[error(
        "PostgreSQL does not run as root, neither `linkis-rm` nor `postgres` is an account here, and making one failed \
         ({detail}): type `useradd --system linkis-rm`, or start linkis-rm as an ordinary user"
    )]
    NoServerAccount {
        /// What `useradd` said.
        detail: String,
    },
    /// Started by root, and the account the server runs as cannot get to a path.
    #[error(
        "PostgreSQL runs as `{account}`, to whom {} is closed, so {} is out of its reach: \
         choose another directory with --data-dir, for example below /var/lib, or open it with `chmod o+x {}`",
        closed.display(), path.display(), closed.display()
    )]
    OutOfReach {
        /// What the server needs.
        path: PathBuf,
        /// The directory on the way that stops it.
        closed: PathBuf,
        /// The account the server runs as.
        account: String,
    },
    /// `PG_BINDIR` does not hold server binaries that run.
    #[error("PG_BINDIR={} holds no working `postgres` and `initdb`: correct or unset PG_BINDIR", path.display())]
    BadBinDir {
        /// The value of `PG_BINDIR`.
        path: PathBuf,
    },
    /// No server binaries on the machine, and they could not be fetched.
    #[error(
        "there are no PostgreSQL server binaries on this machine and fetching them failed ({detail}): \
         type `apt-get install postgresql` (as root, or after sudo), set PG_BINDIR to where its `postgres` is, \
         or set DATABASE_URL to a running server"
    )]
    NoBinaries {
        /// The last words of the attempt.
        detail: String,
    },
    /// Only servers too old for the schema are there.
    #[error(
        "PostgreSQL {OLDEST_MAJOR} or newer is needed and only {found} is on this machine: \
         install a newer one and set PG_BINDIR to its bin directory, or set DATABASE_URL to a running server"
    )]
    TooOld {
        /// The versions found and where.
        found: String,
    },
    /// The data was written by a major version whose binaries are not on this machine.
    #[error(
        "{} was made by PostgreSQL {wanted} and only {found} is on this machine: \
         type `apt-get install postgresql-{wanted}` (as root, or after sudo), or start afresh with another --data-dir",
        data_dir.display()
    )]
    OtherVersion {
        /// The data directory.
        data_dir: PathBuf,
        /// The major version that made it.
        wanted: u32,
        /// The versions found and where.
        found: String,
    },
    /// A program this needs cannot be run at all.
    #[error("cannot run `{program}`: type `apt-get install {package}` (as root, or after sudo)")]
    Run {
        /// The program.
        program: &'static str,
        /// The Debian package that brings it.
        package: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The system refused a thread.
    #[error("cannot start a thread to watch over PostgreSQL: raise the limit on processes (`ulimit -u`)")]
    Thread(#[source] io::Error),
    /// `initdb` failed.
    #[error("creating the database in {} failed: {detail}; remedy that, then start again", path.display())]
    Initdb {
        /// The directory it was to be created in.
        path: PathBuf,
        /// What `initdb` said.
        detail: String,
    },
    /// The server ended before it accepted connections.
    #[error("PostgreSQL ended while starting ({status}): {detail}; the whole log is {}", log.display())]
    Ended {
        /// How it ended.
        status: ExitStatus,
        /// The last words in its log.
        detail: String,
        /// The server's log file.
        log: PathBuf,
    },
    /// The server neither became ready nor ended in the time allowed.
    #[error("PostgreSQL was not ready after {waited_s} s: see {}, then start again", log.display())]
    NotReady {
        /// How long it was waited for, in seconds.
        waited_s: u64,
        /// The server's log file.
        log: PathBuf,
    },
}

impl EmbeddedError {
    /// For `map_err` on file operations.
    pub(super) fn directory(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Directory { path, source }
    }
}

/// The last `count` lines of a program's output, in one line, for an error's text.
pub(super) fn last_lines(output: &str, count: usize) -> String {
    let lines: Vec<&str> = output.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let text = lines[lines.len().saturating_sub(count)..].join("; ");
    if text.is_empty() { "it said nothing".to_owned() } else { text }
}

/// What a PostgreSQL program complained of first, in one line: later complaints often follow from it.
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
    fn the_first_complaints_are_told_and_else_the_last_lines() {
        let output = "creating\nFATAL:  no space\nHINT:  free some\nPANIC:  torn\nERROR:  later\nremoving\n";
        assert_eq!(first_complaints(output), "FATAL:  no space; HINT:  free some; PANIC:  torn");
        assert_eq!(first_complaints("a\nb\n\nc\nd\n"), "b; c; d");
        assert_eq!(first_complaints(""), "it said nothing");
    }
}
