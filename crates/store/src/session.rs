//! Sessions: the database connections of tasks, and the timeouts that bound every wait on them.
//!
//! A session opens or borrows its connection at first use and replaces a broken one. `endpoint` has the timeouts that
//! PostgreSQL enforces.
//!
//! Invariant: a connection whose state is in doubt is closed and never reused. Callers: the committer and all tasks of
//! `rm-service` that use the database.

use std::{future::poll_fn, io, pin::pin, sync::Arc, task::Poll, time::Duration};

use sqlx::{Connection as _, Postgres, pool::PoolConnection, postgres::PgConnection};
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

/// Lets all later reads of the transaction of `connection`, which has not read yet, see the same state. It writes nothing.
pub async fn snapshot(connection: &mut PgConnection) -> Result<(), StoreError> {
    sqlx::query("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY").execute(connection).await?;
    Ok(())
}

/// Begins a part of a transaction of `connection` whose locks [`roll_back_to_savepoint`] releases.
pub async fn savepoint(connection: &mut PgConnection) -> Result<(), StoreError> {
    sqlx::query("SAVEPOINT part").execute(connection).await?;
    Ok(())
}

/// Rolls back the part of a transaction since [`savepoint`], and releases the locks that it has acquired.
pub async fn roll_back_to_savepoint(connection: &mut PgConnection) -> Result<(), StoreError> {
    sqlx::query("ROLLBACK TO SAVEPOINT part").execute(connection).await?;
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

    /// Returns whether the session has a connection to the present primary.
    pub fn is_current(&self) -> bool {
        self.link.is_some() && self.generation == self.primary.generation()
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
