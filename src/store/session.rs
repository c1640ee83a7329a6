//! Connections, and what bounds their waits: whatever dies or hangs, the database ends it by itself.

use std::{collections::BTreeMap, io, pin::pin, sync::Arc, time::Duration};

use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, Postgres, Row as _,
    pool::PoolConnection,
    postgres::{PgConnectOptions, PgConnection},
};
use time::OffsetDateTime;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout},
};

use crate::telemetry;

use super::{
    StoreError,
    primary::{Lender, Primary, Seat, Taken},
};

/// How long to try for a connection.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a batch waits for one resource lock before the operations on it are set aside: longer than another instance's batch
/// takes, short enough for the others to bear once.
pub const LOCK_TIMEOUT: Duration = Duration::from_millis(100);

/// How long a connection from the pool has to show that it is alive: so long a call waits for one that was lost without a word, which
/// leaves it time for a new one.
pub(super) const ALIVE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long one statement may take; it bounds the sum of its waits, which `lock_timeout` does not.
const STATEMENT_TIMEOUT: &str = "10s";

/// How long a transaction may sit idle before the database ends it: a process that froze must not keep its locks.
const IDLE_IN_TRANSACTION_TIMEOUT: &str = "5s";

/// After how long without an answer it is looked whether another host takes the writes: longer than most batches take.
pub(super) const LATE_AFTER: Duration = Duration::from_millis(200);

/// How long the database may leave a batch of statements unanswered: more than `statement_timeout`, so that it is passed only
/// if the database cannot be reached at all.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// The same for a statement that waits for nobody and finds what it wants by an index.
const SOON: Duration = Duration::from_secs(3);

/// How long to wait for the end of a transaction whose connection broke: longer than the database lets it sit idle.
const FATE_TIMEOUT: Duration = Duration::from_secs(8);

/// For how long one transaction may begin the next. The database counts what was done only between transactions, at most once a
/// second, and vacuums by what it has counted.
const CHAIN_MAX: Duration = Duration::from_secs(2);

/// How often to ask.
const FATE_POLL: Duration = Duration::from_millis(50);

/// The settings that every session of the service needs. They are set by statement: a pooler may drop what a connection asks for at
/// its start.
const BOUNDS: [(&str, &str); 15] = [
    ("statement_timeout", STATEMENT_TIMEOUT),
    ("idle_in_transaction_session_timeout", IDLE_IN_TRANSACTION_TIMEOUT),
    // Notices within this time that its client is gone, also while it waits for a lock.
    ("client_connection_check_interval", "500ms"),
    // Under a stronger isolation, rows would be read as they were before the wait for the locks.
    ("default_transaction_isolation", "read committed"),
    (KEEPALIVES[0], "5"),
    (KEEPALIVES[1], "2"),
    (KEEPALIVES[2], "3"),
    // Every statement looks rows up by key: planned once, and never by scanning a table that was empty when it was planned.
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    // Pages go along an index, although the plan does not know how short they are.
    ("enable_sort", "off"),
    ("jit", "off"),
    // Text of PostgreSQL is read in these forms.
    ("DateStyle", "ISO, MDY"),
    ("TimeZone", "UTC"),
];

/// Settings that a Unix socket does not have: PostgreSQL shows them as 0 there.
const KEEPALIVES: [&str; 3] = ["tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count"];

/// Settings of a connection for long work. A caller that comes later waits behind it for at most this `lock_timeout`.
pub const UNBOUNDED: &[(&str, &str)] = &[
    ("lock_timeout", "2s"),
    ("statement_timeout", "0"),
    ("enable_seqscan", "on"),
    ("enable_hashjoin", "on"),
    ("enable_sort", "on"),
];

/// How often the sharing of PostgreSQL's processes is probed when a host is first connected to.
const PROBES: usize = 3;

/// Settings of a session, by name; a later value replaces an earlier one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings(BTreeMap<String, String>);

impl Settings {
    /// The settings of every session of the service on top of those in the database's URL, which `options` may hold, too.
    pub(super) fn bounded(options: &PgConnectOptions, of_url: &Self) -> Self {
        let at_start = options.get_options().map(Self::parse).unwrap_or_default();
        let lock_timeout = format!("{}ms", LOCK_TIMEOUT.as_millis());
        let bounds = BOUNDS.into_iter().chain([("lock_timeout", lock_timeout.as_str())]);
        at_start.and(of_url.clone()).with(bounds)
    }

    /// Adds settings; each replaces one of the same name.
    #[must_use]
    pub(super) fn with(mut self, settings: impl IntoIterator<Item = (impl AsRef<str>, impl AsRef<str>)>) -> Self {
        for (name, value) in settings {
            // PostgreSQL compares names without case.
            self.0.retain(|known, _| !known.eq_ignore_ascii_case(name.as_ref()));
            self.0.insert(name.as_ref().to_owned(), value.as_ref().to_owned());
        }
        self
    }

    /// Adds settings that replace those of the same name.
    #[must_use]
    pub(super) fn and(self, later: Self) -> Self {
        self.with(later.0)
    }

    /// Reads the settings out of command-line options of PostgreSQL: `-c name=value`, `-cname=value` and `--name=value`.
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

    /// The statement that sets them; its columns show the values as PostgreSQL took them.
    fn set(&self) -> String {
        let columns =
            self.0.iter().map(|(name, value)| format!(", set_config({}, {}, false)", quoted(name), quoted(value)));
        format!("SELECT pg_backend_pid(){}", columns.collect::<String>())
    }

    /// The statement that reads them back, with the encoding of the database.
    fn shown(&self) -> String {
        let columns = self.0.keys().map(|name| format!(", current_setting({}, true)", quoted(name)));
        format!("SELECT pg_backend_pid(){}, getdatabaseencoding()", columns.collect::<String>())
    }
}

/// A text as SQL says it, with either value of `standard_conforming_strings`.
fn quoted(text: &str) -> String {
    format!(" E'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
}

/// A host of the database: the address, and the settings of a session there. Not shown: it holds a password.
#[derive(Clone)]
pub struct Endpoint {
    /// The address and the credentials.
    pub options: PgConnectOptions,
    settings: Settings,
}

impl Endpoint {
    /// One whose sessions have `settings`.
    pub(super) fn new(options: PgConnectOptions, settings: Settings) -> Self {
        // Nothing that a pooler would have to know is asked for at the start of a connection.
        Self { options: options.application_name("linkis-rm").extra_float_digits(None), settings }
    }

    /// This host for other work.
    pub(super) fn with(&self, settings: &[(&str, &str)]) -> Self {
        Self { options: self.options.clone(), settings: self.settings.clone().with(settings.iter().copied()) }
    }

    /// Opens a connection, and puts its settings in force.
    ///
    /// # Errors
    /// [`StoreError::Unfit`]; [`StoreError::Encoding`]; those of the database.
    pub(super) async fn connect(&self) -> Result<PgConnection, StoreError> {
        let mut connection = self.options.connect().await?;
        self.prepare(&mut connection).await?;
        Ok(connection)
    }

    /// Puts the settings of a new connection in force and reads them back. Returns the number of PostgreSQL's process.
    ///
    /// # Errors
    /// [`StoreError::Unfit`]; [`StoreError::Encoding`]; those of the database.
    pub(super) async fn prepare(&self, connection: &mut PgConnection) -> Result<i32, StoreError> {
        // As plain text, not prepared: the next statement may be another process's.
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
        // SQL_ASCII takes the bytes of every text as they are.
        match encoding.as_str() {
            "UTF8" | "SQL_ASCII" => Ok(pid),
            _ => Err(StoreError::Encoding { encoding }),
        }
    }

    /// Finds out whether other connections share the process of PostgreSQL that `connection` has, `pid`, as behind a pooler that pools
    /// transactions or statements. A second connection pins a process, and the first must still have its own.
    ///
    /// # Errors
    /// [`StoreError::Unfit`]; those of the database on the first connection.
    pub(super) async fn probe(&self, connection: &mut PgConnection, pid: i32) -> Result<(), StoreError> {
        // Without a second connection, every look at the host still compares the process.
        let Ok(Ok(mut second)) = timeout(ALIVE_TIMEOUT, self.options.connect()).await else { return Ok(()) };
        let pinned = sqlx::raw_sql("BEGIN; SELECT pg_backend_pid()").fetch_one(&mut second).await;
        let pinned = match pinned.map_err(StoreError::from) {
            // As statement pooling does.
            Err(StoreError::Database(error)) if code(&error).is_some_and(|code| code == "08P01") => {
                let why = format!("it takes no BEGIN: {}", telemetry::terse(&error));
                return Err(StoreError::Unfit { why });
            }
            pinned => pinned?,
        };
        let mut is_shared = pinned.try_get::<i32, _>(0)? == pid;
        for _ in 0..PROBES {
            is_shared = is_shared || process(connection).await? != pid;
        }
        // The other end has to know that its transaction is not lost.
        let _ = timeout(ALIVE_TIMEOUT, second.close()).await;
        if is_shared { Err(shared()) } else { Ok(()) }
    }
}

/// The SQLSTATE of an error, if the database gave it.
fn code(error: &sqlx::Error) -> Option<String> {
    error.as_database_error()?.code().map(String::from)
}

/// The number of PostgreSQL's process that a connection has.
async fn process(connection: &mut PgConnection) -> Result<i32, StoreError> {
    Ok(sqlx::raw_sql("SELECT pg_backend_pid()").fetch_one(connection).await?.try_get(0)?)
}

/// The error of a connection that shares a process of PostgreSQL with others.
pub(super) fn shared() -> StoreError {
    StoreError::Unfit { why: "several connections share one process of PostgreSQL".to_owned() }
}

/// The error of a new connection as a pool takes it.
pub(super) fn unfit(error: StoreError) -> sqlx::Error {
    match error {
        StoreError::Database(error) => error,
        error => sqlx::Error::Configuration(error.into()),
    }
}

/// How long one that others wait behind waits for a lock at first.
pub const HURRY: Duration = Duration::from_millis(40);

/// Has the transaction that `connection` is in wait no longer for a lock, because others wait behind it.
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

/// Lets the transaction that `connection` is in wait longer: it repairs what others may hold.
pub async fn patient(connection: &mut PgConnection) -> Result<(), StoreError> {
    sqlx::query(
        "-- session::patient
        SELECT set_config('lock_timeout', '10s', true), set_config('statement_timeout', '60s', true)",
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Lets the transaction that `connection` is in go through whole tables: for two minutes per statement, scanning and hashing as the
/// planner sees fit, and waiting up to ten seconds for a lock. Answers with the database's clock; under a stronger isolation,
/// that is the moment that everything is seen at.
pub async fn thorough(connection: &mut PgConnection) -> Result<OffsetDateTime, StoreError> {
    // Its own work between two statements may take a while, too.
    let now = sqlx::query_scalar(
        "-- session::thorough
        SELECT clock_timestamp(), set_config('statement_timeout', '120s', true), set_config('lock_timeout', '10s', true),
            set_config('idle_in_transaction_session_timeout', '60s', true), set_config('enable_seqscan', 'on', true)",
    )
    .fetch_one(connection)
    .await?;
    Ok(now)
}

/// Lets the statements of the transaction that `connection` is in take so long, and wait for locks for up to ten seconds.
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

/// When the database's server was started: another one than before tells another moment.
pub async fn server_start(connection: &mut PgConnection) -> Result<OffsetDateTime, StoreError> {
    Ok(sqlx::query_scalar("SELECT pg_postmaster_start_time()").fetch_one(connection).await?)
}

/// The database's clock.
pub async fn clock(connection: &mut PgConnection) -> Result<OffsetDateTime, StoreError> {
    Ok(sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(connection).await?)
}

tokio::task_local! {
    /// The host that a task's waits are for.
    static LEAVES: Primary;
}

/// Has the waits of a task for the database end as soon as another of its hosts takes the writes: the one that did is gone, or answers for
/// nobody any more.
pub fn leaving<T: Future>(primary: Primary, task: T) -> impl Future<Output = T::Output> {
    LEAVES.scope(primary, task)
}

/// Fails if the other end of a connection does not answer within [`ALIVE_TIMEOUT`].
pub async fn check(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    timeout(ALIVE_TIMEOUT, connection.ping()).await.unwrap_or(Err(sqlx::Error::PoolTimedOut))
}

/// Bounds a wait for the database. After an error the connection must not be used again: an answer may still come.
pub async fn answered<T, E: From<sqlx::Error>>(wait: impl Future<Output = Result<T, E>>) -> Result<T, E> {
    answered_within(ANSWER_TIMEOUT, wait).await
}

/// The same, for a statement that waits for nobody and finds what it wants by an index: if its answer is late, its connection was lost
/// without a word, and a new one is sooner there.
pub async fn answered_soon<T, E: From<sqlx::Error>>(wait: impl Future<Output = Result<T, E>>) -> Result<T, E> {
    answered_within(SOON, wait).await
}

/// The same, for work that takes its time.
pub async fn answered_within<T, E: From<sqlx::Error>>(
    longest: Duration,
    wait: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    let silent = |_| {
        Err(sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {longest:?}"))).into())
    };
    let Ok((primary, moved)) = LEAVES.try_with(|primary| (primary.clone(), primary.moved())) else {
        return timeout(longest, wait).await.unwrap_or_else(silent);
    };
    let answered = async {
        let mut wait = pin!(wait);
        if let Ok(answered) = timeout(longest.min(LATE_AFTER), &mut wait).await {
            return answered;
        }
        // The host may be gone without a word, and another may be there already.
        primary.ask();
        timeout(longest.saturating_sub(LATE_AFTER), wait).await.unwrap_or_else(silent)
    };
    tokio::select! {
        biased;
        answered = answered => answered,
        () = moved => Err(left_behind().into()),
    }
}

/// Why a connection is given up whose host is used no more.
fn left_behind() -> sqlx::Error {
    let why = "another host of the database takes the writes now";
    sqlx::Error::Io(io::Error::new(io::ErrorKind::ConnectionAborted, why))
}

/// Waits until everything that `connection` sees is as safe as what is committed from now on: with a synchronous standby, what a host
/// shows after a crash may be on no other, and would be gone with it.
pub async fn durable(connection: &mut PgConnection) -> Result<(), StoreError> {
    sqlx::query(
        "-- session::durable
        SELECT pg_logical_emit_message(true, 'linkis-rm', '')",
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// The connection that a task works on, opened or lent when it is first needed and again after it broke.
///
/// On a connection of the task's own, one transaction follows the other: the end of each begins the next, so that none waits for its
/// beginning.
#[derive(Debug)]
pub struct Session {
    primary: Primary,
    source: Source,
    link: Option<Link>,
    /// Of the host that the connection is to.
    generation: u64,
    transaction: Transaction,
    /// When a transaction last began that none before it had begun.
    chained_since: Instant,
}

/// The source of the connection of a session.
#[derive(Debug)]
pub(super) enum Source {
    /// A connection of its own. An instance is ready when there is one for each such session.
    Own(Seat),
    /// A connection that a pool lends for a piece of work, with a permit that is waited for, so long at most.
    Lent(Lender, Arc<Semaphore>, Option<Duration>),
    /// A connection of its own beside those that an instance needs.
    Extra,
}

#[derive(Debug)]
enum Link {
    Own { connection: PgConnection, _taken: Option<Taken> },
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

/// The transaction that a connection is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Transaction {
    None,
    /// Nothing has been done in it yet: it holds and sees nothing.
    Begun,
    /// It may hold locks, or have failed.
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

    /// Number of pooled connections that no longer answered, of all sessions: while it is the same, the database was not away.
    pub fn losses(&self) -> u64 {
        self.primary.losses()
    }

    /// The connection, opened if there is none; in no transaction.
    pub async fn get(&mut self) -> Result<&mut PgConnection, StoreError> {
        self.leave();
        if self.transaction != Transaction::None {
            answered(self.control("ROLLBACK", Transaction::None)).await?;
        }
        self.connection().await
    }

    /// The same, where only what is as safe as a new commit is seen: see [`durable`].
    pub async fn get_durable(&mut self) -> Result<&mut PgConnection, StoreError> {
        self.leave();
        let is_new = self.link.is_none();
        let connection = self.get().await?;
        if is_new {
            answered(durable(&mut *connection)).await?;
        }
        Ok(connection)
    }

    /// The connection in a new transaction; if it was in one that nobody has committed, that is undone.
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
    pub async fn commit(&mut self) -> Result<(), StoreError> {
        if self.leave() {
            return Err(left_behind().into());
        }
        // A connection that is lent goes back in no transaction.
        match matches!(self.link, Some(Link::Own { .. })) && self.chained_since.elapsed() < CHAIN_MAX {
            true => self.control("COMMIT AND CHAIN", Transaction::Begun).await,
            false => self.control("COMMIT", Transaction::None).await,
        }
    }

    /// Undoes the transaction.
    pub async fn roll_back(&mut self) -> Result<(), StoreError> {
        self.control("ROLLBACK AND CHAIN", Transaction::Begun).await
    }

    /// Undoes the transaction, if there is one, and begins none until one is needed: the database ends connections that sit in one
    /// for long.
    pub async fn rest(&mut self) {
        if self.transaction != Transaction::None && answered(self.control("ROLLBACK", Transaction::None)).await.is_err()
        {
            self.reset();
        }
    }

    /// Undoes the transaction, if there is one, and returns a connection that was lent.
    pub async fn give_back(&mut self) {
        self.rest().await;
        if matches!(self.link, Some(Link::Lent { .. })) {
            self.close();
        }
    }

    /// Gives a connection up whose host is used no more; true if it did.
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
            // Apart: everything that is done on a session would take the room of opening it.
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

    /// Whether there is a connection that was used before, and so may have broken since.
    pub fn is_open(&self) -> bool {
        self.link.is_some()
    }

    /// Waits until a transaction has ended whose connection broke while it committed; answers with a new connection, or `None` if
    /// the database does not come back in time.
    ///
    /// How it ended is not asked: after a crash of the database, its number may be another's by now; and on another worker of Citus it is.
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
        match answered::<Option<String>, sqlx::Error>(status).await {
            Ok(status) => status.is_none_or(|status| status != "in progress"),
            // Known to nobody: the database has crashed, and lost it.
            Err(error) if error.as_database_error().is_some_and(|error| error.code().as_deref() == Some("22023")) => {
                true
            }
            Err(_) => {
                self.reset();
                false
            }
        }
    }

    /// Gives the connection up, until one is needed again. A pool takes one back that is in no transaction.
    pub fn close(&mut self) {
        if let (Some(Link::Lent { connection, .. }), true) = (&mut self.link, self.transaction != Transaction::None) {
            connection.close_on_drop();
        }
        self.link = None;
        self.transaction = Transaction::None;
    }

    /// Forgets the connection after `error`. A full disk makes the instance not ready.
    pub fn reset_after(&mut self, error: &StoreError) {
        self.primary.note_failure(error);
        self.reset();
    }

    /// Forgets the connection: after an error that leaves its state in doubt.
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
