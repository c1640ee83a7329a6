//! Connections, and what bounds their waits: whatever dies or hangs, the database ends it by itself.

use std::{io, pin::pin, time::Duration};

use sqlx::{
    Connection as _,
    postgres::{PgConnectOptions, PgConnection},
};
use time::OffsetDateTime;
use tokio::time::{Instant, timeout};

use super::{StoreError, primary::Primary};

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

/// Adds what every connection of the service is bounded by.
pub fn bounded(options: PgConnectOptions) -> PgConnectOptions {
    options.application_name("linkis-rm").options([
        ("lock_timeout", format!("{}ms", LOCK_TIMEOUT.as_millis()).as_str()),
        ("statement_timeout", STATEMENT_TIMEOUT),
        ("idle_in_transaction_session_timeout", IDLE_IN_TRANSACTION_TIMEOUT),
        // Notices within this time that its client is gone, also while it waits for a lock.
        ("client_connection_check_interval", "500ms"),
        // Under a stronger isolation, rows would be read as they were before the wait for the locks.
        ("default_transaction_isolation", "read committed"),
        ("tcp_keepalives_idle", "5"),
        ("tcp_keepalives_interval", "2"),
        ("tcp_keepalives_count", "3"),
        // Every statement looks rows up by key: planned once, and never by scanning a table that was empty when it was planned.
        ("plan_cache_mode", "force_generic_plan"),
        ("enable_seqscan", "off"),
        ("enable_hashjoin", "off"),
        ("enable_mergejoin", "off"),
        // Pages go along an index, although the plan does not know how short they are.
        ("enable_sort", "off"),
        ("jit", "off"),
    ])
}

/// Takes the bounds off again, for work that may take its time; but whoever comes later waits behind it for no longer than this for
/// a lock that it does not get.
pub fn unbounded(options: PgConnectOptions) -> PgConnectOptions {
    options.options([
        ("lock_timeout", "2s"),
        ("statement_timeout", "0"),
        ("enable_seqscan", "on"),
        ("enable_hashjoin", "on"),
        ("enable_sort", "on"),
    ])
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

/// A connection that one task keeps to itself, opened when it is first needed and again after it broke. A pool would ask the
/// server for a sign of life each time it is given back.
///
/// One transaction follows the other: the end of each begins the next, so that none waits for its beginning.
#[derive(Debug)]
pub struct Session {
    primary: Primary,
    connection: Option<PgConnection>,
    /// Of the host that the connection is to.
    generation: u64,
    transaction: Transaction,
    /// Whether anybody waits for what is done on it.
    is_called: bool,
    /// When a transaction last began that none before it had begun.
    chained_since: Instant,
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

impl Session {
    pub(super) fn new(primary: Primary) -> Self {
        let generation = primary.generation();
        let (transaction, chained_since) = (Transaction::None, Instant::now());
        Self { primary, connection: None, generation, transaction, is_called: true, chained_since }
    }

    /// For what nobody waits for.
    pub(super) fn in_background(self) -> Self {
        Self { is_called: false, ..self }
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
        let is_new = self.connection.is_none();
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
        match self.chained_since.elapsed() < CHAIN_MAX {
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

    /// Gives a connection up whose host is used no more; true if it did.
    fn leave(&mut self) -> bool {
        let is_left = self.connection.is_some() && self.generation != self.primary.generation();
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
        let connection = match self.connection.take() {
            Some(connection) => connection,
            // Apart: everything that is done on a session would take the room of opening it.
            None => Box::pin(self.open()).await?,
        };
        Ok(self.connection.insert(connection))
    }

    async fn open(&mut self) -> Result<PgConnection, StoreError> {
        self.transaction = Transaction::None;
        let _turn = if self.is_called { None } else { self.primary.turn().await };
        let (connection, generation) = self.primary.connect_with(|options| options).await?;
        self.generation = generation;
        Ok(connection)
    }

    /// Whether there is a connection that was used before, and so may have broken since.
    pub fn is_open(&self) -> bool {
        self.connection.is_some()
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

    /// Gives the connection up, until one is needed again.
    pub fn close(&mut self) {
        self.connection = None;
        self.transaction = Transaction::None;
    }

    /// Forgets the connection: after an error that leaves its state in doubt.
    pub fn reset(&mut self) {
        if self.connection.is_some() {
            self.primary.ask();
        }
        self.close();
    }
}
