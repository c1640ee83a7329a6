//! Where the database is, and what it is shown: read again where it stands in a file, because passwords change.

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
    url::{self, HOSTS_MAX, Hosts, SessionAttrs},
};

/// The largest file that is read for a URL.
const URL_BYTES_MAX: u64 = 64 << 10;

/// How to connect to a database, at one of its hosts; clones share what it is told later. Shows no password.
#[derive(Clone)]
pub struct Target {
    hosts: Arc<ArcSwap<Hosts>>,
    file: Option<Arc<Path>>,
    purpose: Purpose,
    cell: Option<Cell>,
}

/// What a database is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To keep everything: of its hosts, the one that takes writes is meant.
    Writes,
    /// To be read from, where it may be a little behind: one of its hosts that follows another is meant.
    OldReads,
}

/// Why a file tells of no database.
#[derive(Debug, thiserror::Error)]
pub enum UrlError {
    /// It cannot be read.
    #[error("cannot be read: {0}")]
    Read(#[from] io::Error),
    /// What stands there is none. It is not repeated: it may hold a password.
    #[error("is not a PostgreSQL URL; for example postgres://user:password@host/database")]
    Url,
    /// As many hosts as ports have to be named, or one port for all.
    #[error("names {hosts} hosts and {count} {what}; name one for each host, or one port for all")]
    Counts {
        /// How many hosts.
        hosts: usize,
        /// What else is counted.
        what: &'static str,
        /// How many of these.
        count: usize,
    },
    /// One of several hosts is empty.
    #[error("names several hosts, and one of them without a name")]
    NamelessHost,
    /// More hosts than anybody has.
    #[error("names {0} hosts; at most {HOSTS_MAX} are tried")]
    TooManyHosts(usize),
    /// Not one of libpq's words.
    #[error("target_session_attrs is none of any, read-write, read-only, primary, standby and prefer-standby")]
    SessionAttrs,
    /// A host that is of no use here.
    #[error("target_session_attrs={0} asks for a host that takes no writes, and a service writes: say read-write")]
    NoWriter(SessionAttrs),
    /// Likewise.
    #[error(
        "target_session_attrs={0} asks for a host that takes writes, and this is where to read from a standby: say standby"
    )]
    NoStandby(SessionAttrs),
    /// The workers of Citus are found by name and port.
    #[error(
        "names a socket, and the workers of Citus that have cells are at other addresses: name the coordinator by host"
    )]
    CellAtSocket,
    /// Not a number of seconds.
    #[error("connect_timeout is not a number of seconds")]
    Timeout,
    /// A character that ends the user and the password stands in one of them.
    #[error(
        "has an @ behind the host, or a user or a password with one of / ? # in it: write @ as %40, / as %2F, ? as %3F and # as %23"
    )]
    Unescaped,
}

impl Target {
    /// What a URL says of a database that is written to.
    ///
    /// # Errors
    /// [`UrlError::Url`].
    pub fn parse(url: &str) -> Result<Self, UrlError> {
        Self::parse_for(Purpose::Writes, url)
    }

    /// The same of one that is for something.
    ///
    /// # Errors
    /// [`UrlError::Url`].
    pub fn parse_for(purpose: Purpose, url: &str) -> Result<Self, UrlError> {
        Ok(Self { purpose, ..Self::from(parse(purpose, url)?) })
    }

    /// What the URL in a file says of a database that is written to, also when it changes.
    ///
    /// # Errors
    /// If there is none.
    pub fn in_file(path: PathBuf) -> Result<Self, UrlError> {
        Self::in_file_for(Purpose::Writes, path)
    }

    /// The same of one that is for something.
    ///
    /// # Errors
    /// If there is none.
    pub fn in_file_for(purpose: Purpose, path: PathBuf) -> Result<Self, UrlError> {
        let hosts = Arc::new(ArcSwap::from_pointee(read(purpose, &path)?));
        Ok(Self { hosts, file: Some(path.into()), purpose, cell: None })
    }

    /// What its file says now; `None` if it stands in none.
    ///
    /// # Errors
    /// If there is no URL.
    pub(super) async fn read_again(&self) -> Option<Result<Hosts, UrlError>> {
        let (path, purpose) = (self.file.clone()?, self.purpose);
        // It may be on a disk that does not answer.
        tokio::task::spawn_blocking(move || read(purpose, &path)).await.ok()
    }

    /// A cell of the Citus whose coordinator this is.
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

    /// The cell; `None` where the database is one's own.
    pub fn cell(&self) -> Option<Cell> {
        self.cell.clone()
    }

    /// As it is told now.
    pub fn hosts(&self) -> Arc<Hosts> {
        self.hosts.load_full()
    }

    /// Tells everybody who connects from now on.
    pub(super) fn set(&self, hosts: Hosts) {
        self.hosts.store(Arc::new(hosts));
    }

    /// The file in which it stands.
    pub(super) fn file(&self) -> Option<Arc<Path>> {
        self.file.clone()
    }

    /// Whether what is said to the database goes to another machine that has not shown who it is.
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

impl From<PgConnectOptions> for Target {
    fn from(options: PgConnectOptions) -> Self {
        Hosts::from(options).into()
    }
}

impl From<Hosts> for Target {
    fn from(hosts: Hosts) -> Self {
        Self { hosts: Arc::new(ArcSwap::from_pointee(hosts)), file: None, purpose: Purpose::Writes, cell: None }
    }
}

/// Where it is, for people.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts = self.hosts.load();
        let places: Vec<_> = hosts.options.iter().map(place).collect();
        let database = hosts.options.first().and_then(PgConnectOptions::get_database);
        write!(f, "{} ({})", places.join(", "), database.unwrap_or("its default database"))
    }
}

/// Where a host is, for people.
pub(super) fn place(options: &PgConnectOptions) -> String {
    match options.get_socket() {
        Some(socket) => socket.display().to_string(),
        None => format!("{}:{}", options.get_host(), options.get_port()),
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({self})")
    }
}

/// What a URL says of a database that is for something.
fn parse(purpose: Purpose, url: &str) -> Result<Hosts, UrlError> {
    let hosts = url::parse(url)?;
    match purpose {
        Purpose::Writes if !hosts.attrs.may_write() => Err(UrlError::NoWriter(hosts.attrs)),
        Purpose::OldReads if !hosts.attrs.may_read_only() => Err(UrlError::NoStandby(hosts.attrs)),
        _ => Ok(hosts),
    }
}

/// What the URL in a file says.
fn read(purpose: Purpose, path: &Path) -> Result<Hosts, UrlError> {
    let mut text = String::new();
    File::open(path)?.take(URL_BYTES_MAX).read_to_string(&mut text)?;
    parse(purpose, text.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_does_not_show_itself() {
        let target = Target::parse("postgres://me:hunter2@db.example:5433/rm").unwrap();
        assert_eq!(format!("{target:?}"), "Target(db.example:5433 (rm))");
        let several = Target::parse("postgres://me:hunter2@db1:5433,db2/rm?target_session_attrs=read-write").unwrap();
        assert_eq!(several.to_string(), "db1:5433, db2:5432 (rm)");
        assert!(!Target::parse("mysql://me:hunter2@x").unwrap_err().to_string().contains("hunter2"));
    }

    #[test]
    fn only_another_machine_has_to_show_who_it_is() {
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
            assert_eq!(Target::parse(url).unwrap().is_unverified(), is_unverified, "{url}");
        }
    }

    #[test]
    fn a_service_is_given_no_host_that_takes_no_writes() {
        for attrs in ["any", "read-write", "primary"] {
            assert!(Target::parse(&format!("postgres://h1,h2/rm?target_session_attrs={attrs}")).is_ok(), "{attrs}");
        }
        for attrs in ["read-only", "standby", "prefer-standby"] {
            let error = Target::parse(&format!("postgres://h1,h2/rm?target_session_attrs={attrs}")).unwrap_err();
            assert!(error.to_string().contains(&format!("target_session_attrs={attrs} asks")), "{error}");
        }
        let standby = |attrs: &str| {
            let url = format!("postgres://h1,h2/rm?target_session_attrs={attrs}");
            Target::parse_for(Purpose::OldReads, &url).map_err(|error| error.to_string())
        };
        assert!(["any", "standby", "prefer-standby", "read-only"].into_iter().all(|attrs| standby(attrs).is_ok()));
        assert!(["read-write", "primary"].into_iter().all(|attrs| standby(attrs).unwrap_err().contains("say standby")));
    }
}
