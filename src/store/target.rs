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

/// The largest file that is read for a URL.
const URL_BYTES_MAX: u64 = 64 << 10;

/// How to connect to a database; clones share what it is told later. Shows no password.
#[derive(Clone)]
pub struct Target {
    options: Arc<ArcSwap<PgConnectOptions>>,
    file: Option<Arc<Path>>,
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
}

impl Target {
    /// What a URL says.
    ///
    /// # Errors
    /// [`UrlError::Url`].
    pub fn parse(url: &str) -> Result<Self, UrlError> {
        parse(url).map(Self::from)
    }

    /// What the URL in a file says, also when it changes.
    ///
    /// # Errors
    /// If there is none.
    pub fn in_file(path: PathBuf) -> Result<Self, UrlError> {
        let options = Arc::new(ArcSwap::from_pointee(read(&path)?));
        Ok(Self { options, file: Some(path.into()) })
    }

    /// As it is told now.
    pub fn options(&self) -> PgConnectOptions {
        PgConnectOptions::clone(&self.options.load())
    }

    /// The same, with what `change` adds; later changes of the file are not told to it.
    pub(super) fn map(&self, change: impl FnOnce(PgConnectOptions) -> PgConnectOptions) -> Self {
        Self { options: Arc::new(ArcSwap::from_pointee(change(self.options()))), file: self.file.clone() }
    }

    /// Tells everybody who connects from now on.
    pub(super) fn set(&self, options: PgConnectOptions) {
        self.options.store(Arc::new(options));
    }

    /// The file in which it stands.
    pub(super) fn file(&self) -> Option<Arc<Path>> {
        self.file.clone()
    }

    /// Whether what is said to the database goes to another machine that has not shown who it is.
    pub fn is_unverified(&self) -> bool {
        let options = self.options.load();
        let is_here = || {
            let host = options.get_host();
            host == "localhost" || host.starts_with('/') || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
        };
        options.get_socket().is_none() && !is_here() && !matches!(options.get_ssl_mode(), PgSslMode::VerifyFull)
    }
}

impl From<PgConnectOptions> for Target {
    fn from(options: PgConnectOptions) -> Self {
        Self { options: Arc::new(ArcSwap::from_pointee(options)), file: None }
    }
}

/// Where it is, for people.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let options = self.options.load();
        let database = options.get_database().unwrap_or("its default database");
        match options.get_socket() {
            Some(socket) => write!(f, "{} ({database})", socket.display()),
            None => write!(f, "{}:{} ({database})", options.get_host(), options.get_port()),
        }
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({self})")
    }
}

fn parse(url: &str) -> Result<PgConnectOptions, UrlError> {
    let is_postgres = url.starts_with("postgres://") || url.starts_with("postgresql://");
    url.parse().ok().filter(|_| is_postgres).ok_or(UrlError::Url)
}

/// What the URL in a file says.
pub(super) fn read(path: &Path) -> Result<PgConnectOptions, UrlError> {
    let mut text = String::new();
    File::open(path)?.take(URL_BYTES_MAX).read_to_string(&mut text)?;
    parse(text.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_does_not_show_itself() {
        let target = Target::parse("postgres://me:hunter2@db.example:5433/rm").unwrap();
        assert_eq!(format!("{target:?}"), "Target(db.example:5433 (rm))");
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
        ] {
            assert_eq!(Target::parse(url).unwrap().is_unverified(), is_unverified, "{url}");
        }
    }
}
