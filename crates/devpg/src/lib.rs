//! Private PostgreSQL server, started and stopped with this process.
//!
//! The server listens on a Unix socket in a directory that only its account may enter; TCP is off. Peer authentication
//! admits only that account and root. The data persists between runs with every durability setting on, and the server
//! stops in order even if this process is killed.
//!
//! Callers: the server and the offline commands of the program, if no database URL is given; tests and benchmarks.
//!
//! Submodules: `cluster`: files; `binaries`: programs; `account`: system account; `server`: process; `error`: errors.

#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unreachable,
    clippy::print_stdout,
    clippy::too_many_lines
)]

mod account;
mod binaries;
mod cluster;
mod error;
mod server;

use std::env;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::thread;

use sqlx::postgres::PgConnectOptions;
use tokio::sync::oneshot;

use cluster::PostgresCluster;
use server::PostgresProcess;

pub use error::EmbeddedError;

/// Port in the name of the socket. Clients that read `PGPORT` need it.
pub const PORT: u16 = 5432;
/// Database user to connect as.
pub const USER: &str = "postgres";
/// Database that exists from the start.
pub const DATABASE: &str = "postgres";

/// Directory of the database files, below the state directory.
const DATA_DIR: &str = "data";
const NAME: &str = "linkis-rm";

/// Directory and options of the server.
#[derive(Debug, Clone)]
pub struct EmbeddedSettings {
    /// State directory: lock, database, socket, server log and downloaded binaries.
    pub data_dir: PathBuf,
    /// Further server options by name and value, which override the built-in ones.
    pub server_options: Vec<(String, String)>,
}

/// Returns the name of the account with this user id; `None` if it has none, or the system cannot name it.
#[must_use]
pub fn user_name(uid: u32) -> Option<String> {
    account::Account::name_of(uid).ok().flatten()
}

/// Returns the default state directory: below `/var/lib` for root, else below the user's data directory.
///
/// # Errors
/// [`EmbeddedError::NoHome`] if the user has no home directory.
pub fn default_data_dir() -> Result<PathBuf, EmbeddedError> {
    if account::is_root() {
        return Ok(Path::new("/var/lib").join(NAME));
    }
    let chosen = env::var_os("XDG_DATA_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || env::home_dir().filter(|path| path.is_absolute()).map(|path| path.join(".local/share"));
    chosen.or_else(home).map(|path| path.join(NAME)).ok_or(EmbeddedError::NoHome)
}

/// Returns whether a state directory contains a database.
#[must_use]
pub fn has_database(state_dir: &Path) -> bool {
    cluster::has_database(state_dir)
}

/// Returns the connect options of the server that runs in a state directory, for its account and for root; `None` if
/// none runs.
#[must_use]
pub fn running(state_dir: &Path) -> Option<PgConnectOptions> {
    // PostgreSQL writes its socket directory into the fifth line.
    let pid_file = fs::read_to_string(state_dir.join(DATA_DIR).join("postmaster.pid")).ok()?;
    pid_file.lines().nth(4).filter(|dir| !dir.is_empty()).map(|dir| options(Path::new(dir)))
}

fn options(socket_dir: &Path) -> PgConnectOptions {
    let options = PgConnectOptions::new_without_pgpass().socket(socket_dir).port(PORT);
    options.username(USER).database(DATABASE)
}

/// Way in which the server ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopResult {
    /// Orderly stop, with a last checkpoint.
    InOrder(ExitStatus),
    /// Stop without a last checkpoint; the next start replays the log. No committed data is lost.
    AtOnce(ExitStatus),
    /// Killed, because it ignored the other signals; the next start recovers. No committed data is lost.
    ByForce(ExitStatus),
    /// Ended before this process stopped it.
    Before(ExitStatus),
}

impl fmt::Display for StopResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InOrder(status) => write!(f, "stopped in order ({status})"),
            Self::AtOnce(status) => write!(f, "stopped without a checkpoint ({status}); the next start recovers"),
            Self::ByForce(status) => write!(f, "stopped by force ({status}); the next start recovers"),
            Self::Before(status) => write!(f, "had ended on its own ({status})"),
        }
    }
}

/// A running private server.
///
/// Dropping it signals the server to stop without waiting; [`EmbeddedPostgres::stop`] waits.
#[derive(Debug)]
pub struct EmbeddedPostgres {
    server: PostgresProcess,
    cluster: PostgresCluster,
}

impl EmbeddedPostgres {
    /// Starts the server and returns when it accepts connections.
    ///
    /// The first start creates the database. A machine without server binaries downloads them first, which takes up to
    /// minutes. Dropping the future abandons the start; the next start repeats unfinished steps.
    ///
    /// # Errors
    /// [`EmbeddedError`]; no server runs after any of them.
    pub async fn start(settings: EmbeddedSettings) -> Result<Self, EmbeddedError> {
        let (sender, receiver) = oneshot::channel();
        // A separate thread, because the runtime's shutdown would wait for one of its own.
        spawn_thread("postgres-prepare", move || drop(sender.send(PostgresCluster::prepare(settings))))?;
        let lost = |_| EmbeddedError::Thread(io::Error::other("it ended early"));
        let cluster = receiver.await.map_err(lost)??;
        let server = PostgresProcess::start(&cluster).await?;
        Ok(Self { server, cluster })
    }

    /// Returns the socket directory: connect with it as the host, as [`USER`], on [`PORT`].
    #[must_use]
    pub fn socket_dir(&self) -> &Path {
        &self.cluster.socket_dir
    }

    /// Returns the options for connecting to the server.
    #[must_use]
    pub fn connect_options(&self) -> PgConnectOptions {
        options(self.socket_dir())
    }

    /// Returns the directory of the server's programs.
    #[must_use]
    pub fn bin_dir(&self) -> &Path {
        &self.cluster.binaries.bin_dir
    }

    /// Returns the path of the server log.
    #[must_use]
    pub fn log_path(&self) -> PathBuf {
        self.cluster.log_path()
    }

    /// Waits until the server ends, which happens only after a failure. May be dropped and called again at any time.
    pub async fn died(&self) -> ExitStatus {
        self.server.ended().await
    }

    /// Stops the server and returns how it ended. Connected clients are disconnected.
    ///
    /// The server has 10 s for an orderly stop, then 5 s for a stop without a checkpoint, and is then killed (SIGKILL).
    pub async fn stop(self) -> StopResult {
        self.server.stop().await
    }
}

fn spawn_thread(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), EmbeddedError> {
    thread::Builder::new().name(name.to_owned()).spawn(work).map(drop).map_err(EmbeddedError::Thread)
}
