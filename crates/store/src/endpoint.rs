//! Endpoints: how to connect to one database host, and the settings of every session there.
//!
//! PostgreSQL enforces the bounds of a session by its settings (statement, lock and idle timeouts), so a frozen or dead
//! process cannot keep its locks. The settings are read back after they are set: a connection behind a transaction
//! pooler is rejected.
//!
//! Never: keeps a connection. Callers: `primary`, which connects; `url`, which parses settings.

use std::collections::BTreeMap;

use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, Row as _,
    postgres::{PgConnectOptions, PgConnection},
};
use tokio::time::timeout;

use super::{
    StoreError,
    session::{ALIVE_TIMEOUT, LOCK_TIMEOUT},
};

/// Timeout of one statement. The timeout bounds the sum of lock waits, which `lock_timeout` does not.
const STATEMENT_TIMEOUT: &str = "10s";

/// Maximum idle time of a transaction before PostgreSQL ends it: a frozen process must not keep its locks.
const IDLE_IN_TRANSACTION_TIMEOUT: &str = "5s";

/// Settings of every session of the service, set by a statement, because a pooler may drop startup parameters.
const BOUNDS: [(&str, &str); 15] = [
    ("statement_timeout", STATEMENT_TIMEOUT),
    ("idle_in_transaction_session_timeout", IDLE_IN_TRANSACTION_TIMEOUT),
    // PostgreSQL notices within this time that the client has disconnected, also during a lock wait.
    ("client_connection_check_interval", "500ms"),
    // A stronger isolation level would show rows as of before the lock wait.
    ("default_transaction_isolation", "read committed"),
    (KEEPALIVES[0], "5"),
    (KEEPALIVES[1], "2"),
    (KEEPALIVES[2], "3"),
    // Every statement reads by key. A generic plan suffices, and a plan made on an empty table must not scan a full
    // one.
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    // Pages follow an index. The planner does not know how short they are.
    ("enable_sort", "off"),
    ("jit", "off"),
    // The parser of PostgreSQL's text values expects these forms.
    ("DateStyle", "ISO, MDY"),
    ("TimeZone", "UTC"),
];

/// Settings that PostgreSQL reports as 0 on a Unix socket.
const KEEPALIVES: [&str; 3] = ["tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count"];

/// Settings of a connection for long work. Later callers wait behind its locks for at most this `lock_timeout`.
pub const UNBOUNDED: &[(&str, &str)] = &[
    ("lock_timeout", "2s"),
    ("statement_timeout", "0"),
    ("enable_seqscan", "on"),
    ("enable_hashjoin", "on"),
    ("enable_sort", "on"),
];

/// Number of checks for a shared PostgreSQL process at the first connection to a host.
const PROBES: usize = 3;

/// Session settings by name. A later value replaces an earlier one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings(BTreeMap<String, String>);

impl Settings {
    /// Returns the settings of the service on top of those of the database URL, which `options` may also contain.
    pub(super) fn bounded(options: &PgConnectOptions, of_url: &Self) -> Self {
        let at_start = options.get_options().map(Self::parse).unwrap_or_default();
        let lock_timeout = format!("{}ms", LOCK_TIMEOUT.as_millis());
        let bounds = BOUNDS.into_iter().chain([("lock_timeout", lock_timeout.as_str())]);
        at_start.and(of_url.clone()).with(bounds)
    }

    /// Adds settings. Each replaces the setting of the same name.
    #[must_use]
    pub(super) fn with(mut self, settings: impl IntoIterator<Item = (impl AsRef<str>, impl AsRef<str>)>) -> Self {
        for (name, value) in settings {
            // PostgreSQL compares names case-insensitively.
            self.0.retain(|known, _| !known.eq_ignore_ascii_case(name.as_ref()));
            self.0.insert(name.as_ref().to_owned(), value.as_ref().to_owned());
        }
        self
    }

    /// Adds `later`, whose settings take precedence.
    #[must_use]
    pub(super) fn and(self, later: Self) -> Self {
        self.with(later.0)
    }

    /// Parses PostgreSQL command-line options: `-c name=value`, `-cname=value` and `--name=value`.
    pub(super) fn parse(options: &str) -> Self {
        let (mut words, mut word, mut is_escaped) = (vec![], None::<String>, false);
        for letter in options.chars() {
            match letter {
                '\\' if !is_escaped => {
                    is_escaped = true;
                    continue;
                }
                letter if letter.is_ascii_whitespace() && !is_escaped => words.extend(word.take()),
                letter => word.get_or_insert_default().push(letter),
            }
            is_escaped = false;
        }
        words.extend(word);
        let (mut settings, mut words) = (Self::default(), words.into_iter());
        while let Some(word) = words.next() {
            let setting = match (word.as_str(), word.strip_prefix("--").or_else(|| word.strip_prefix("-c"))) {
                ("-c", _) => words.next(),
                (_, setting) => setting.map(str::to_owned),
            };
            if let Some((name, value)) = setting.as_deref().and_then(|setting| setting.split_once('=')) {
                settings = settings.with([(name.replace('-', "_"), value)]);
            }
        }
        settings
    }

    /// Returns the statement that applies the settings and returns the values as PostgreSQL accepted them.
    fn set(&self) -> String {
        let columns =
            self.0.iter().map(|(name, value)| format!(", set_config({}, {}, false)", quoted(name), quoted(value)));
        format!("SELECT pg_backend_pid(){}", columns.collect::<String>())
    }

    /// Returns the statement that reads the settings back, with the encoding of the database.
    fn shown(&self) -> String {
        let columns = self.0.keys().map(|name| format!(", current_setting({}, true)", quoted(name)));
        format!("SELECT pg_backend_pid(){}, getdatabaseencoding()", columns.collect::<String>())
    }
}

/// Quotes a text as an SQL literal for either value of `standard_conforming_strings`.
fn quoted(text: &str) -> String {
    format!(" E'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
}

/// A database host: address, credentials and session settings. No `Debug`, because it contains a password.
#[derive(Clone)]
pub struct DatabaseEndpoint {
    /// Address and credentials.
    pub options: PgConnectOptions,
    settings: Settings,
}

impl DatabaseEndpoint {
    /// Creates an endpoint whose sessions have `settings`.
    pub(super) fn new(options: PgConnectOptions, settings: Settings) -> Self {
        // No startup parameters that a pooler would have to support.
        Self { options: options.application_name("linkis-rm").extra_float_digits(None), settings }
    }

    /// Returns this host with further session settings.
    pub(super) fn with(&self, settings: &[(&str, &str)]) -> Self {
        Self { options: self.options.clone(), settings: self.settings.clone().with(settings.iter().copied()) }
    }

    /// Opens a connection and applies its settings.
    ///
    /// # Errors
    /// [`StoreError::Unfit`]; [`StoreError::Encoding`]; database errors.
    pub(super) async fn connect(&self) -> Result<PgConnection, StoreError> {
        let mut connection = self.options.connect().await?;
        self.prepare(&mut connection).await?;
        Ok(connection)
    }

    /// Applies the settings of a new connection and reads them back. Returns the process id of the PostgreSQL backend.
    ///
    /// # Errors
    /// [`StoreError::Unfit`] if a setting or the process differs; [`StoreError::Encoding`]; database errors.
    pub(super) async fn prepare(&self, connection: &mut PgConnection) -> Result<i32, StoreError> {
        // Plain text, not prepared: behind a pooler the next statement may run in another process.
        let set = sqlx::raw_sql(AssertSqlSafe(self.settings.set())).fetch_one(&mut *connection).await?;
        let shown = sqlx::raw_sql(AssertSqlSafe(self.settings.shown())).fetch_one(&mut *connection).await?;
        let (pid, pid_after): (i32, i32) = (set.try_get(0)?, shown.try_get(0)?);
        if pid != pid_after {
            return Err(shared());
        }
        for (index, (name, wanted)) in self.settings.0.iter().enumerate() {
            let (taken, found): (Option<String>, Option<String>) = (set.try_get(index + 1)?, shown.try_get(index + 1)?);
            let is_ours = BOUNDS.iter().any(|(bound, _)| bound == name) || name == "lock_timeout";
            let is_exact = is_ours && !KEEPALIVES.contains(&name.as_str());
            let wanted = if is_exact { Some(wanted) } else { taken.as_ref() };
            if wanted != found.as_ref() {
                let text =
                    |value: Option<&String>| value.map_or_else(|| "nothing".to_owned(), |value| format!("{value:?}"));
                let (wanted, found) = (text(wanted), text(found.as_ref()));
                return Err(StoreError::Unfit { why: format!("{name} is {found} after it was set to {wanted}") });
            }
        }
        let encoding: String = shown.try_get(self.settings.0.len() + 1)?;
        // SQL_ASCII stores the bytes of any text unchanged.
        match encoding.as_str() {
            "UTF8" | "SQL_ASCII" => Ok(pid),
            _ => Err(StoreError::Encoding { encoding }),
        }
    }

    /// Checks whether other connections share the backend process `pid` of `connection`, as behind a transaction or
    /// statement pooler. A second connection pins a process by a transaction; the first connection must keep its own
    /// process.
    ///
    /// # Errors
    /// [`StoreError::Unfit`] if the process is shared; database errors on the first connection.
    pub(super) async fn probe(&self, connection: &mut PgConnection, pid: i32) -> Result<(), StoreError> {
        // A failed second connection skips the check; each probe of the host compares the process anyway.
        let Ok(Ok(mut second)) = timeout(ALIVE_TIMEOUT, self.options.connect()).await else { return Ok(()) };
        let pinned = sqlx::raw_sql("BEGIN; SELECT pg_backend_pid()").fetch_one(&mut second).await;
        let pinned = match pinned.map_err(StoreError::from) {
            // A statement pooler rejects BEGIN.
            Err(StoreError::Database(error)) if code(&error).is_some_and(|code| code == "08P01") => {
                let why = format!("it rejects BEGIN: {}", crate::error::database_text(&error));
                return Err(StoreError::Unfit { why });
            }
            pinned => pinned?,
        };
        let mut is_shared = pinned.try_get::<i32, _>(0)? == pid;
        for _ in 0..PROBES {
            is_shared = is_shared || process(connection).await? != pid;
        }
        // A clean close, so that the other end knows that the transaction was not lost.
        let _ = timeout(ALIVE_TIMEOUT, second.close()).await;
        if is_shared { Err(shared()) } else { Ok(()) }
    }
}

/// Returns the SQLSTATE of an error, if the database sent one.
fn code(error: &sqlx::Error) -> Option<String> {
    error.as_database_error()?.code().map(String::from)
}

/// Returns the process id of the PostgreSQL backend of a connection.
async fn process(connection: &mut PgConnection) -> Result<i32, StoreError> {
    Ok(sqlx::raw_sql("SELECT pg_backend_pid()").fetch_one(connection).await?.try_get(0)?)
}

/// Returns the error for a connection that shares its PostgreSQL process.
pub(super) fn shared() -> StoreError {
    StoreError::Unfit { why: "several connections share one PostgreSQL process".to_owned() }
}
