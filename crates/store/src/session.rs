//! Sessions: the database connections of tasks, and the timeouts that bound every wait on them.
//!
//! A session opens or borrows its connection at first use and replaces a broken one. PostgreSQL enforces the bounds by
//! session settings (statement, lock and idle timeouts), so a frozen or dead process cannot keep its locks. The
//! settings are read back after they are set: a connection behind a transaction pooler is rejected.
//!
//! Invariant: a connection whose state is in doubt is closed and never reused. Callers: the committer and all tasks of
//! `rm-service` that use the database.

use std::{collections::BTreeMap, future::poll_fn, io, pin::pin, sync::Arc, task::Poll, time::Duration};

use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, Postgres, Row as _,
    pool::PoolConnection,
    postgres::{PgConnectOptions, PgConnection},
};
use time::OffsetDateTime;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, timeout},
};

use super::{
    StoreError,
    primary::{Lender, Primary, Seat, TakenSeat},
};

/// Timeout of opening a connection.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum time that a batch waits for one resource lock before it moves the operations on that key to the
/// contended-key queue. Longer than a batch of another instance takes, and short enough for the other operations to
/// wait once.
pub const LOCK_TIMEOUT: Duration = Duration::from_millis(100);

/// Timeout of the ping of a pooled connection. A call on a silently lost connection waits this long, which leaves time
/// for a new connection.
pub(super) const ALIVE_TIMEOUT: Duration = Duration::from_secs(1);

/// Timeout of one statement. The timeout bounds the sum of lock waits, which `lock_timeout` does not.
const STATEMENT_TIMEOUT: &str = "10s";

/// Maximum idle time of a transaction before PostgreSQL ends it: a frozen process must not keep its locks.
const IDLE_IN_TRANSACTION_TIMEOUT: &str = "5s";

/// Time without a reply after which the other hosts are probed for a new primary. Longer than most batches take.
pub(super) const LATE_AFTER: Duration = Duration::from_millis(200);

/// Timeout of the reply to a batch of statements. Longer than `statement_timeout`, so that it expires only if the
/// database is unreachable.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// Timeout of the reply to a statement that takes no locks and reads by an index.
const SOON: Duration = Duration::from_secs(3);

/// Maximum time to wait for the end of a transaction whose connection broke. Longer than the idle timeout of
/// transactions.
const FATE_TIMEOUT: Duration = Duration::from_secs(8);

/// Maximum duration of a chain of transactions (`COMMIT AND CHAIN`). PostgreSQL updates its statistics only between
/// transactions, at most once a second, and vacuums by these statistics.
const CHAIN_MAX: Duration = Duration::from_secs(2);

/// Interval between polls of a transaction's status.
const FATE_POLL: Duration = Duration::from_millis(50);

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
                let why = format!("it rejects BEGIN: {}", crate::database_text(&error));
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

/// Initial lock timeout of an operation that other operations wait behind.
pub const HURRY: Duration = Duration::from_millis(40);

/// Limits the lock waits of the current transaction of `connection` to `longest`, because other operations wait behind
/// it.
pub async fn hurried(connection: &mut PgConnection, longest: Duration) -> Result<(), StoreError> {
    sqlx::query(
        "-- session::hurried
        SELECT set_config('lock_timeout', $1, true)",
    )
    .bind(format!("{}ms", longest.as_millis()))
    .execute(connection)
    .await?;
    Ok(())
}

/// Extends the timeouts of the current transaction of `connection` for a repair: locks 10 s, statements 60 s.
pub async fn patient(connection: &mut PgConnection) -> Result<(), StoreError> {
    sqlx::query(
        "-- session::patient
        SELECT set_config('lock_timeout', '10s', true), set_config('statement_timeout', '60s', true)",
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Prepares the current transaction of `connection` for reading whole tables: statements 120 s, locks 10 s, idle 60 s,
/// and sequential scans allowed. Returns the clock of the database. The clock is the moment of the snapshot under a
/// stronger isolation level.
pub async fn thorough(connection: &mut PgConnection) -> Result<OffsetDateTime, StoreError> {
    // The caller's own work between two statements may also take long.
    let now = sqlx::query_scalar(
        "-- session::thorough
        SELECT clock_timestamp(), set_config('statement_timeout', '120s', true), set_config('lock_timeout', '10s', true),
            set_config('idle_in_transaction_session_timeout', '60s', true), set_config('enable_seqscan', 'on', true)",
    )
    .fetch_one(connection)
    .await?;
    Ok(now)
}

/// Limits the statements of the current transaction of `connection` to `longest`, and its lock waits to 10 s.
pub async fn for_as_long_as(connection: &mut PgConnection, longest: Duration) -> Result<(), StoreError> {
    sqlx::query(
        "-- session::for_as_long_as
        SELECT set_config('statement_timeout', $1, true), set_config('lock_timeout', '10s', true)",
    )
    .bind(format!("{}ms", longest.as_millis()))
    .execute(connection)
    .await?;
    Ok(())
}

/// Returns the start time of the PostgreSQL server. A restarted server or another host returns another time.
pub async fn server_start(connection: &mut PgConnection) -> Result<OffsetDateTime, StoreError> {
    Ok(sqlx::query_scalar("SELECT pg_postmaster_start_time()").fetch_one(connection).await?)
}

/// Returns the clock of the database.
pub async fn clock(connection: &mut PgConnection) -> Result<OffsetDateTime, StoreError> {
    Ok(sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(connection).await?)
}

tokio::task_local! {
    /// The primary whose change ends the waits of the task.
    static LEAVES: Primary;
}

/// Runs `task` so that its database waits fail as soon as another host becomes the primary. The old primary is then
/// down, or no longer authoritative.
pub fn leaving<T: Future>(primary: Primary, task: T) -> impl Future<Output = T::Output> {
    LEAVES.scope(primary, task)
}

/// Pings the other end of a connection.
///
/// # Errors
/// Fails without a reply within `ALIVE_TIMEOUT`.
pub async fn check(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    timeout(ALIVE_TIMEOUT, connection.ping()).await.unwrap_or(Err(sqlx::Error::PoolTimedOut))
}

/// Waits for the database for up to `ANSWER_TIMEOUT`. After an error the caller must not reuse the connection: a reply
/// may still arrive.
pub fn within_timeout<T, E: From<sqlx::Error>>(
    wait: impl Future<Output = Result<T, E>>,
) -> impl Future<Output = Result<T, E>> {
    answered_within(ANSWER_TIMEOUT, wait)
}

/// Like [`within_timeout`], with a shorter timeout, for a statement that takes no locks and reads by an index. A late reply
/// means that the connection was lost silently; a new connection is faster.
pub fn within_short_timeout<T, E: From<sqlx::Error>>(
    wait: impl Future<Output = Result<T, E>>,
) -> impl Future<Output = Result<T, E>> {
    answered_within(SOON, wait)
}

/// Like [`within_timeout`], with the timeout `longest`, for long work.
pub async fn answered_within<T, E: From<sqlx::Error>>(
    longest: Duration,
    wait: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    let (mut silence, mut wait) = (pin!(silence(longest)), pin!(wait));
    // Compiled once for each statement, so the timers are in a function of their own.
    poll_fn(|context| match wait.as_mut().poll(context) {
        Poll::Pending => silence.as_mut().poll(context).map(|error| Err(error.into())),
        answered => answered,
    })
    .await
}

/// Returns the error that ends a wait which began now: after `longest`, or as soon as another host is the primary.
fn silence(longest: Duration) -> impl Future<Output = sqlx::Error> + Send {
    let leaves = LEAVES.try_with(|primary| (primary.clone(), primary.moved()));
    async move {
        if let Ok((primary, moved)) = leaves {
            let late = async {
                sleep(longest.min(LATE_AFTER)).await;
                // The host may be silently lost, and another may be the primary already.
                primary.ask();
                sleep(longest.saturating_sub(LATE_AFTER)).await;
            };
            tokio::select! {
                () = moved => return left_behind(),
                () = late => {}
            }
        } else {
            sleep(longest).await;
        }
        sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, format!("no reply within {longest:?}")))
    }
}

/// Returns the error for a connection to a host that is no longer the primary.
fn left_behind() -> sqlx::Error {
    let why = "another database host is the primary now";
    sqlx::Error::Io(io::Error::new(io::ErrorKind::ConnectionAborted, why))
}

/// Waits until everything that `connection` sees is as durable as a new commit. A host with a synchronous standby may
/// show data after a crash that exists on no other host, and could be lost with it.
pub async fn durable(connection: &mut PgConnection) -> Result<(), StoreError> {
    sqlx::query(
        "-- session::durable
        SELECT pg_logical_emit_message(true, 'linkis-rm', '')",
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// The database connection of one task: opened or borrowed at first use, and replaced after it broke.
///
/// The end of each transaction begins the next one on a connection of the task's own, which saves a round trip.
#[derive(Debug)]
pub struct Session {
    primary: Primary,
    source: Source,
    link: Option<Link>,
    /// Generation of the primary that the connection belongs to.
    generation: u64,
    transaction: Transaction,
    /// Start of the current chain of transactions.
    chained_since: Instant,
}

/// Source of the connection of a session.
#[derive(Debug)]
pub(super) enum Source {
    /// A connection of the session's own. An instance is ready when each such session has one.
    Own(Seat),
    /// A connection borrowed from a pool for one piece of work, under a permit. The duration bounds the wait for the
    /// permit.
    Lent(Lender, Arc<Semaphore>, Option<Duration>),
    /// A connection of the session's own, in addition to those that an instance needs.
    Extra,
}

#[derive(Debug)]
enum Link {
    Own { connection: PgConnection, _taken: Option<TakenSeat> },
    Lent { connection: PoolConnection<Postgres>, _permit: OwnedSemaphorePermit },
}

impl Link {
    fn connection(&mut self) -> &mut PgConnection {
        match self {
            Self::Own { connection, .. } => connection,
            Self::Lent { connection, .. } => connection,
        }
    }
}

/// State of the connection's transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Transaction {
    None,
    /// Begun and empty: it has no locks and no snapshot.
    Begun,
    /// Used: may own locks, or have failed.
    InUse,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.close();
    }
}

impl Session {
    pub(super) fn new(primary: Primary, source: Source) -> Self {
        let generation = primary.generation();
        let (transaction, chained_since) = (Transaction::None, Instant::now());
        Self { primary, source, link: None, generation, transaction, chained_since }
    }

    /// Returns the number of pooled connections that stopped responding, over all sessions. A constant number means
    /// that the database was reachable.
    pub fn losses(&self) -> u64 {
        self.primary.losses()
    }

    /// Returns the connection outside a transaction. Opens it if there is none, and rolls an open transaction back.
    ///
    /// # Errors
    /// Errors of opening the connection; database errors.
    pub async fn get(&mut self) -> Result<&mut PgConnection, StoreError> {
        self.leave();
        if self.transaction != Transaction::None {
            within_timeout(self.control("ROLLBACK", Transaction::None)).await?;
        }
        self.connection().await
    }

    /// Like [`Session::get`], but everything that the connection sees is as durable as a new commit: see [`durable`].
    pub async fn get_durable(&mut self) -> Result<&mut PgConnection, StoreError> {
        self.leave();
        let is_new = self.link.is_none();
        let connection = self.get().await?;
        if is_new {
            within_timeout(durable(&mut *connection)).await?;
        }
        Ok(connection)
    }

    /// Returns the connection in a new transaction. An uncommitted transaction is rolled back first.
    pub async fn begin(&mut self) -> Result<&mut PgConnection, StoreError> {
        self.leave();
        match self.transaction {
            Transaction::None => {
                self.control("BEGIN", Transaction::Begun).await?;
                self.chained_since = Instant::now();
            }
            Transaction::Begun => {}
            Transaction::InUse => self.roll_back().await?,
        }
        self.transaction = Transaction::InUse;
        self.connection().await
    }

    /// Commits the transaction.
    ///
    /// # Errors
    /// Fails if the primary has changed; database errors. The commit may have taken effect in spite of the error.
    pub async fn commit(&mut self) -> Result<(), StoreError> {
        if self.leave() {
            return Err(left_behind().into());
        }
        // A borrowed connection is returned outside a transaction.
        match matches!(self.link, Some(Link::Own { .. })) && self.chained_since.elapsed() < CHAIN_MAX {
            true => self.control("COMMIT AND CHAIN", Transaction::Begun).await,
            false => self.control("COMMIT", Transaction::None).await,
        }
    }

    /// Rolls the transaction back.
    pub async fn roll_back(&mut self) -> Result<(), StoreError> {
        self.control("ROLLBACK AND CHAIN", Transaction::Begun).await
    }

    /// Rolls back an open transaction and begins no new one until it is needed: PostgreSQL ends connections that are
    /// idle in a transaction.
    pub async fn idle(&mut self) {
        if self.transaction != Transaction::None
            && within_timeout(self.control("ROLLBACK", Transaction::None)).await.is_err()
        {
            self.reset();
        }
    }

    /// Rolls back an open transaction and returns a borrowed connection.
    pub async fn give_back(&mut self) {
        self.idle().await;
        if matches!(self.link, Some(Link::Lent { .. })) {
            self.close();
        }
    }

    /// Drops the connection if its host is no longer the primary. Returns whether it did.
    fn leave(&mut self) -> bool {
        let is_left = self.link.is_some() && self.generation != self.primary.generation();
        if is_left {
            self.reset();
        }
        is_left
    }

    async fn control(&mut self, statement: &'static str, then: Transaction) -> Result<(), StoreError> {
        sqlx::raw_sql(statement).execute(self.connection().await?).await?;
        self.transaction = then;
        Ok(())
    }

    async fn connection(&mut self) -> Result<&mut PgConnection, StoreError> {
        let link = match self.link.take() {
            Some(link) => link,
            // Boxed: otherwise every future that uses a session would contain the size of opening one.
            None => Box::pin(self.open()).await?,
        };
        Ok(self.link.insert(link).connection())
    }

    async fn open(&mut self) -> Result<Link, StoreError> {
        self.transaction = Transaction::None;
        let (link, generation) = match &self.source {
            Source::Own(seat) => {
                let (connection, generation) = match self.primary.reserved(*seat).await {
                    Some(reserved) => reserved,
                    None => self.primary.connect_with(&[]).await?,
                };
                (Link::Own { connection, _taken: Some(self.primary.take(*seat)) }, generation)
            }
            Source::Lent(lender, permits, longest) => {
                let permit = permits.clone().acquire_owned();
                let permit = match longest {
                    Some(longest) => timeout(*longest, permit).await.map_err(|_| StoreError::OperatorsBusy)?,
                    None => permit.await,
                };
                let permit = permit.map_err(|_| sqlx::Error::PoolClosed)?;
                let (connection, generation) = self.primary.lend(*lender).await?;
                (Link::Lent { connection, _permit: permit }, generation)
            }
            Source::Extra => {
                let (connection, generation) = self.primary.connect_with(&[]).await?;
                (Link::Own { connection, _taken: None }, generation)
            }
        };
        self.generation = generation;
        Ok(link)
    }

    /// Returns whether the session has a connection that was used before, and so may have broken since.
    pub fn is_open(&self) -> bool {
        self.link.is_some()
    }

    /// Waits for the end of a transaction whose connection broke during its commit. Returns a new connection, or `None`
    /// if the database does not return within `FATE_TIMEOUT`.
    ///
    /// The status of the commit is not used: after a crash the transaction number may be reused, and another worker of
    /// Citus has other numbers.
    pub async fn settled(&mut self, transaction_id: &str) -> Option<&mut PgConnection> {
        let give_up = Instant::now() + FATE_TIMEOUT;
        while Instant::now() < give_up {
            if self.is_over(transaction_id).await {
                return self.get().await.ok();
            }
            tokio::time::sleep(FATE_POLL).await;
        }
        None
    }

    async fn is_over(&mut self, transaction_id: &str) -> bool {
        let Ok(connection) = self.get().await else { return false };
        let status = sqlx::query_scalar(
            "-- session::is_over
            SELECT pg_xact_status($1::text::xid8)",
        )
        .bind(transaction_id)
        .fetch_one(connection);
        match within_timeout::<Option<String>, sqlx::Error>(status).await {
            Ok(status) => status.is_none_or(|status| status != "in progress"),
            // PostgreSQL does not know the number: the database crashed and lost the transaction.
            Err(error) if error.as_database_error().is_some_and(|error| error.code().as_deref() == Some("22023")) => {
                true
            }
            Err(_) => {
                self.reset();
                false
            }
        }
    }

    /// Drops the connection until one is needed again. A pool takes back only a connection outside a transaction.
    pub fn close(&mut self) {
        if let (Some(Link::Lent { connection, .. }), true) = (&mut self.link, self.transaction != Transaction::None) {
            connection.close_on_drop();
        }
        self.link = None;
        self.transaction = Transaction::None;
    }

    /// Drops the connection after `error`. A full disk makes the instance not ready.
    pub fn reset_after(&mut self, error: &StoreError) {
        self.primary.note_failure(error);
        self.reset();
    }

    /// Drops the connection after an error that leaves its state in doubt, and requests a probe of the hosts.
    pub fn reset(&mut self) {
        if let Some(link) = &mut self.link {
            if let Link::Lent { connection, .. } = link {
                connection.close_on_drop();
            }
            self.primary.ask();
        }
        self.close();
    }
}
