//! A private PostgreSQL server, started and stopped with this program.
//!
//! The server listens on a Unix socket in a directory only its own account may enter; TCP is off; and it lets nobody connect
//! but that account and root, by the system's word on who it is. It keeps its data between runs with every durability setting on, and
//! stops in order even when this program is killed.
//!
//! Reading order: [`Embedded`] here; `cluster` for the files, `binaries` for the programs, `account` for who runs
//! them, `server` for the process, `error` for what may go wrong.

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

use cluster::Cluster;
use server::Server;

pub use error::EmbeddedError;

/// The port in the socket's name; clients that read `PGPORT` must be told it.
pub const PORT: u16 = 5432;
/// The database user to connect as.
pub const USER: &str = "postgres";
/// The database there is from the start.
pub const DATABASE: &str = "postgres";

/// The database's files, below the state directory.
const DATA_DIR: &str = "data";
const NAME: &str = "linkis-rm";

/// Where and how to run the server.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The state directory; holds the lock, the database, the socket, the server's log and fetched binaries.
    pub data_dir: PathBuf,
    /// Further server options, as name and value; they override the ones chosen here.
    pub server_options: Vec<(String, String)>,
}

/// The name of the account with this user id; `None` if it has none, or the system does not tell.
#[must_use]
pub fn user_name(uid: u32) -> Option<String> {
    account::Account::name_of(uid).ok().flatten()
}

/// The state directory to use when none is chosen: below `/var/lib` for root, else below the user's data directory.
///
/// # Errors
/// [`EmbeddedError::NoHome`] when the user has no home directory.
pub fn default_data_dir() -> Result<PathBuf, EmbeddedError> {
    if account::is_root() {
        return Ok(Path::new("/var/lib").join(NAME));
    }
    let chosen = env::var_os("XDG_DATA_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || env::home_dir().filter(|path| path.is_absolute()).map(|path| path.join(".local/share"));
    chosen.or_else(home).map(|path| path.join(NAME)).ok_or(EmbeddedError::NoHome)
}

/// Whether a state directory holds a database.
#[must_use]
pub fn has_database(state_dir: &Path) -> bool {
    cluster::has_database(state_dir)
}

/// How to connect to the server that runs in a state directory, for its account and for root; `None` if none does.
#[must_use]
pub fn running(state_dir: &Path) -> Option<PgConnectOptions> {
    // PostgreSQL writes down where its socket is, on the fifth line.
    let told = fs::read_to_string(state_dir.join(DATA_DIR).join("postmaster.pid")).ok()?;
    told.lines().nth(4).filter(|dir| !dir.is_empty()).map(|dir| options(Path::new(dir)))
}

fn options(socket_dir: &Path) -> PgConnectOptions {
    let options = PgConnectOptions::new_without_pgpass().socket(socket_dir).port(PORT);
    options.username(USER).database(DATABASE)
}

/// How the server ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// In order, with everything written out.
    InOrder(ExitStatus),
    /// Without a last checkpoint; the next start replays what is missing. Nothing committed is lost.
    AtOnce(ExitStatus),
    /// By force, as it heeded nothing else; the next start recovers. Nothing committed is lost.
    ByForce(ExitStatus),
    /// By itself, before it was told to.
    Before(ExitStatus),
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InOrder(status) => write!(f, "stopped in order ({status})"),
            Self::AtOnce(status) => write!(f, "stopped without a checkpoint ({status}); the next start recovers"),
            Self::ByForce(status) => write!(f, "stopped by force ({status}); the next start recovers"),
            Self::Before(status) => write!(f, "had ended by itself ({status})"),
        }
    }
}

/// A running private server.
///
/// Dropping it tells the server to stop without waiting for it; [`Embedded::stop`] waits.
#[derive(Debug)]
pub struct Embedded {
    server: Server,
    cluster: Cluster,
}

impl Embedded {
    /// Starts the server and returns when it accepts connections.
    ///
    /// On first use this creates the database, and if the machine has no server binaries it first fetches them, which
    /// takes up to minutes. Dropping the future abandons the start; what it left half done is redone the next time.
    ///
    /// # Errors
    /// See [`EmbeddedError`]. No server runs after any of them.
    pub async fn start(settings: Settings) -> Result<Self, EmbeddedError> {
        let (sender, receiver) = oneshot::channel();
        // A thread of its own rather than the runtime's, whose shutdown would wait for it.
        spawn_thread("postgres-prepare", move || drop(sender.send(Cluster::prepare(settings))))?;
        let lost = |_| EmbeddedError::Thread(io::Error::other("it ended early"));
        let cluster = receiver.await.map_err(lost)??;
        let server = Server::start(&cluster).await?;
        Ok(Self { server, cluster })
    }

    /// The directory of the server's socket: connect with it as the host, as [`USER`], on [`PORT`].
    #[must_use]
    pub fn socket_dir(&self) -> &Path {
        &self.cluster.socket_dir
    }

    /// How to connect to it.
    #[must_use]
    pub fn connect_options(&self) -> PgConnectOptions {
        options(self.socket_dir())
    }

    /// The directory of the server's programs.
    #[must_use]
    pub fn bin_dir(&self) -> &Path {
        &self.cluster.binaries.bin_dir
    }

    /// The server's log file.
    #[must_use]
    pub fn log_path(&self) -> PathBuf {
        self.cluster.log_path()
    }

    /// Waits until the server ends, which it does by itself only in trouble; for use beside the work that needs it.
    ///
    /// May be dropped and called again at any time.
    pub async fn died(&self) -> ExitStatus {
        self.server.ended().await
    }

    /// Stops the server and says how it ended. Clients still connected are cut off.
    ///
    /// In order within 10 s; failing that without a checkpoint within 5 s; failing that by force.
    pub async fn stop(self) -> Stopped {
        self.server.stop().await
    }
}

fn spawn_thread(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), EmbeddedError> {
    thread::Builder::new().name(name.to_owned()).spawn(work).map(drop).map_err(EmbeddedError::Thread)
}
