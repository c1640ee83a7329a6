//! Connect target: the hosts and credentials of a database, re-read from a file because passwords change.
//!
//! The module parses a URL and never connects. Display and errors never contain a password. Callers: `config` of the
//! program, and [`super::Store`].

use std::{
    fmt,
    fs::File,
    io::{self, Read as _},
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use arc_swap::ArcSwap;
use sqlx::postgres::{PgConnectOptions, PgSslMode};

use super::{
    citus::Cell,
    url::{self, HOSTS_MAX, SessionAttrs, UrlHosts},
};

/// Maximum size of a URL file, in bytes.
const URL_BYTES_MAX: u64 = 64 << 10;

/// Connection options of a database. Clones share later updates. `Debug` and `Display` show no password.
#[derive(Clone)]
pub struct ConnectTarget {
    hosts: Arc<ArcSwap<UrlHosts>>,
    file: Option<Arc<Path>>,
    cell: Option<Cell>,
}

/// Reason why a URL, or a file with one, is rejected.
#[derive(Debug, thiserror::Error)]
pub enum UrlError {
    /// The file cannot be read.
    #[error("cannot be read: {0}")]
    Read(#[from] io::Error),
    /// The text is no PostgreSQL URL. The error does not repeat the text, which may contain a password.
    #[error("is not a PostgreSQL URL; for example postgres://user:password@host/database")]
    Url,
    /// The number of ports or addresses differs from the number of hosts.
    #[error("names {hosts} hosts and {count} {what}; give one for each host, or one port for all")]
    Counts {
        /// Number of hosts.
        hosts: usize,
        /// The other list: ports or addresses.
        what: &'static str,
        /// Length of the other list.
        count: usize,
    },
    /// A host of several has an empty name.
    #[error("names several hosts, and one of them without a name")]
    NamelessHost,
    /// More than `HOSTS_MAX` hosts.
    #[error("names {0} hosts; at most {HOSTS_MAX} are tried")]
    TooManyHosts(usize),
    /// `target_session_attrs` has no value of libpq.
    #[error("target_session_attrs must be any, read-write, read-only, primary, standby or prefer-standby")]
    SessionAttrs,
    /// `target_session_attrs` excludes the primary.
    #[error("target_session_attrs={0} selects a read-only host, but the service writes; set read-write")]
    NoWriter(SessionAttrs),
    /// A cell needs a coordinator with a host name and port; this URL names a socket.
    #[error("names a socket, but the workers of Citus have other addresses; name the coordinator by host")]
    CellAtSocket,
    /// `connect_timeout` is no number of seconds.
    #[error("connect_timeout is not a number of seconds")]
    Timeout,
    /// The user or password contains an unescaped character that ends it.
    #[error(
        "has an @ after the host, or one of / ? # in the user or the password; write @ as %40, / as %2F, ? as %3F \
            and # as %23"
    )]
    Unescaped,
}

impl ConnectTarget {
    /// Parses a URL.
    ///
    /// # Errors
    /// [`UrlError`], except [`UrlError::Read`].
    pub fn parse(url: &str) -> Result<Self, UrlError> {
        Ok(parse(url)?.into())
    }

    /// Reads the URL from a file. [`Store::follow`](super::Store::follow) applies later changes of the
    /// file.
    ///
    /// # Errors
    /// [`UrlError`].
    pub fn in_file(path: PathBuf) -> Result<Self, UrlError> {
        let hosts = Arc::new(ArcSwap::from_pointee(read(&path)?));
        Ok(Self { hosts, file: Some(path.into()), cell: None })
    }

    /// Reads the file again. Returns `None` if the target has no file.
    ///
    /// # Errors
    /// [`UrlError`].
    pub(super) async fn read_again(&self) -> Option<Result<UrlHosts, UrlError>> {
        let path = self.file.clone()?;
        // Blocking: the file may be on a disk that does not respond.
        tokio::task::spawn_blocking(move || read(&path)).await.ok()
    }

    /// Sets the cell; the target is then the coordinator of Citus.
    ///
    /// # Errors
    /// [`UrlError::CellAtSocket`].
    pub fn with_cell(self, cell: Cell) -> Result<Self, UrlError> {
        let is_socket =
            |options: &PgConnectOptions| options.get_socket().is_some() || options.get_host().starts_with('/');
        match self.hosts.load().options.iter().any(is_socket) {
            true => Err(UrlError::CellAtSocket),
            false => Ok(Self { cell: Some(cell), ..self }),
        }
    }

    /// Returns the cell; `None` for a database without cells.
    pub fn cell(&self) -> Option<Cell> {
        self.cell.clone()
    }

    /// Returns the present hosts.
    pub fn hosts(&self) -> Arc<UrlHosts> {
        self.hosts.load_full()
    }

    /// Replaces the hosts for all later connections.
    pub(super) fn set(&self, hosts: UrlHosts) {
        self.hosts.store(Arc::new(hosts));
    }

    /// Returns the path of the URL file, if any.
    pub(super) fn file(&self) -> Option<Arc<Path>> {
        self.file.clone()
    }

    /// Returns whether a host is on another machine and its certificate is not verified.
    pub fn is_unverified(&self) -> bool {
        let is_unverified = |options: &PgConnectOptions| {
            let host = options.get_host();
            let is_here =
                host == "localhost" || host.starts_with('/') || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
            options.get_socket().is_none() && !is_here && !matches!(options.get_ssl_mode(), PgSslMode::VerifyFull)
        };
        self.hosts.load().options.iter().any(is_unverified)
    }
}

impl From<PgConnectOptions> for ConnectTarget {
    fn from(options: PgConnectOptions) -> Self {
        UrlHosts::from(options).into()
    }
}

impl From<UrlHosts> for ConnectTarget {
    fn from(hosts: UrlHosts) -> Self {
        Self { hosts: Arc::new(ArcSwap::from_pointee(hosts)), file: None, cell: None }
    }
}

/// Addresses and database name, for display.
impl fmt::Display for ConnectTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts = self.hosts.load();
        let places: Vec<_> = hosts.options.iter().map(place).collect();
        let database = hosts.options.first().and_then(PgConnectOptions::get_database);
        write!(f, "{} ({})", places.join(", "), database.unwrap_or("its default database"))
    }
}

/// Returns the address of a host, for display.
pub(super) fn place(options: &PgConnectOptions) -> String {
    match options.get_socket() {
        Some(socket) => socket.display().to_string(),
        None => format!("{}:{}", options.get_host(), options.get_port()),
    }
}

impl fmt::Debug for ConnectTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({self})")
    }
}

/// Parses a URL and checks that its `target_session_attrs` admits the primary.
fn parse(url: &str) -> Result<UrlHosts, UrlError> {
    let hosts = url::parse(url)?;
    if hosts.attrs.may_write() { Ok(hosts) } else { Err(UrlError::NoWriter(hosts.attrs)) }
}

/// Reads and parses the URL in a file.
fn read(path: &Path) -> Result<UrlHosts, UrlError> {
    let mut text = String::new();
    File::open(path)?.take(URL_BYTES_MAX).read_to_string(&mut text)?;
    parse(text.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connect_target_debug_hides_password() {
        let target = ConnectTarget::parse("postgres://me:hunter2@db.example:5433/rm").unwrap();
        assert_eq!(format!("{target:?}"), "Target(db.example:5433 (rm))");
        let several =
            ConnectTarget::parse("postgres://me:hunter2@db1:5433,db2/rm?target_session_attrs=read-write").unwrap();
        assert_eq!(several.to_string(), "db1:5433, db2:5432 (rm)");
        assert!(!ConnectTarget::parse("mysql://me:hunter2@x").unwrap_err().to_string().contains("hunter2"));
    }

    #[test]
    fn remote_host_without_verification_is_warned_of() {
        for (url, is_unverified) in [
            ("postgres://localhost/rm", false),
            ("postgres://127.0.0.1/rm", false),
            ("postgres://x/rm?host=/run/postgresql", false),
            ("postgres://db.example/rm", true),
            ("postgres://db.example/rm?sslmode=disable", true),
            ("postgres://db.example/rm?sslmode=require", true),
            ("postgres://db.example/rm?sslmode=verify-full", false),
            ("postgres://localhost,db.example/rm", true),
        ] {
            assert_eq!(ConnectTarget::parse(url).unwrap().is_unverified(), is_unverified, "{url}");
        }
    }

    #[test]
    fn service_url_for_read_only_hosts_is_refused() {
        for attrs in ["any", "read-write", "primary"] {
            assert!(
                ConnectTarget::parse(&format!("postgres://h1,h2/rm?target_session_attrs={attrs}")).is_ok(),
                "{attrs}"
            );
        }
        for attrs in ["read-only", "standby", "prefer-standby"] {
            let error = ConnectTarget::parse(&format!("postgres://h1,h2/rm?target_session_attrs={attrs}")).unwrap_err();
            assert!(error.to_string().contains(&format!("target_session_attrs={attrs} selects")), "{error}");
        }
    }
}
