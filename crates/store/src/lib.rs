//! PostgreSQL store: every SQL statement of the service, with one module per table.
//!
//! A function that writes takes a connection, so that the caller's transaction decides what commits together. A write
//! compares the number of changed rows with the expected one and fails with [`StoreError::RowCount`]. All functions
//! return database errors; `# Errors` names the others. Never: decides a grant. Callers: `rm-service`, and the server and
//! the offline commands of the program.
//!
//! - Writes of a batch: [`batch_write`], [`resource_lock`]. Rows to values of the model and back: `rows`.
//! - Reads across tables: [`overview`], [`audit_reader`] (audit), [`ended_use`], [`history_tail`].
//! - Schema and history partitions: [`schema`], [`history_partition`]. Cells on Citus: [`citus`].
//! - Hosts and connections: [`connect_target`], [`url`], [`primary`], [`session`], [`operators`].
//! - All other modules: one table each, named in their first line.

#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unreachable,
    clippy::print_stdout,
    clippy::too_many_lines
)]

use std::{fmt, sync::Arc, time::Duration};

use async_recursion::async_recursion as boxed;
use rm_telemetry::metrics::components::DatabaseFailure;
use sqlx::{PgConnection, postgres::PgPool};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use rm_model::FILE_POLL_INTERVAL;

pub mod action_record;
pub mod audit_reader;
pub mod batch_write;
pub mod citus;
pub mod cluster_figure;
pub mod connect_target;
pub mod em_drain;
pub mod em_observed;
pub mod em_report;
pub mod em_resource;
pub mod ended_use;
pub mod external_queue;
pub mod external_refresh;
pub mod external_resource_provider;
pub mod external_snapshot;
pub mod external_ticket;
pub mod history_horizon;
pub mod history_partition;
pub mod history_tail;
pub mod label_resource;
pub mod label_set;
pub mod lease;
pub mod limit;
pub mod limit_change;
pub mod operators;
pub mod overview;
pub mod policy;
pub mod primary;
pub mod refusal;
pub mod request_id;
pub mod resource_hold;
pub mod resource_lock;
pub mod schema;
pub mod server_instance;
pub mod session;
pub mod token;
pub mod url;
pub mod usage_hour;
pub mod user_resource;
pub mod waiting;

mod rows;

use connect_target::ConnectTarget;
use operators::OperatorPool;
use primary::{Lender, NoPrimaryReason, Primary, Seat};
use session::{Session, Source};
use url::UrlHosts;

/// Maximum time that [`Store::close`] waits for connections to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The database connections of one instance: hosts, sessions and permits. Clones share them.
#[derive(Clone, Debug)]
pub struct Store {
    target: ConnectTarget,
    /// Host for schema changes: the coordinator of a cell; the primary itself without cells.
    schema: Primary,
    primary: Primary,
    operators: OperatorPool,
    turns: Turns,
}

/// Kind of background work. An instance runs one step of each kind at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Steps of milliseconds that an instance depends on: deadlines, leases, liveness rows.
    Vital,
    /// Steps shorter than a second, not vital.
    Short,
    /// Steps of up to minutes.
    Long,
    /// Snapshots of external clusters: reading, preparing and installing them.
    Refresh,
}

/// Permits of sessions that borrow a connection.
#[derive(Clone, Debug)]
struct Turns {
    lanes: Arc<Semaphore>,
    vital: Arc<Semaphore>,
    short: Arc<Semaphore>,
    long: Arc<Semaphore>,
    refresh: Arc<Semaphore>,
}

impl Default for Turns {
    fn default() -> Self {
        let turns = |most| Arc::new(Semaphore::new(most));
        let lanes = turns(primary::LANES_MAX as usize);
        Self { lanes, vital: turns(1), short: turns(1), long: turns(1), refresh: turns(1) }
    }
}

/// A database whose primary may be unknown yet; [`PendingStore::prepare`] makes a [`Store`] of it.
#[derive(Clone, Debug)]
pub struct PendingStore {
    target: ConnectTarget,
    schema: Primary,
    primary: Primary,
}

impl PendingStore {
    /// Searches for the primary of `target`. The inner result is the reason if no host accepts writes yet.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] if waiting for a primary cannot help; [`StoreError::NoCell`].
    #[boxed]
    pub async fn find(target: ConnectTarget) -> Result<(Self, Result<(), NoPrimaryReason>), StoreError> {
        if target.is_unverified() {
            tracing::warn!(%target, "the database is remote and its identity is not verified; set sslmode=verify-full");
        }
        let schema = Primary::watch(target.clone());
        let found = schema.at_start().await?;
        let (primary, found) = match target.cell() {
            None => (schema.clone(), found),
            Some(cell) => {
                let hosts = match &found {
                    Ok(_) => citus::owner(&schema, &cell).await?,
                    // The host of the cell is read from the coordinator once the coordinator is found.
                    Err(_) => UrlHosts { options: Vec::new(), ..(*target.hosts()).clone() },
                };
                let primary = Primary::of_cell(schema.clone(), cell, hosts);
                let found = if found.is_ok() { primary.at_start().await? } else { found };
                (primary, found)
            }
        };
        Ok((Self { target, schema, primary }, found.map(|_| ())))
    }

    /// Waits until a host accepts writes.
    #[boxed]
    pub async fn found(&self) {
        self.primary.awaited().await;
    }

    /// Checks whether a host accepts writes, as of the last probe.
    pub fn standing(&self) -> Result<(), StoreError> {
        match self.primary.standing() {
            Ok(_) => Ok(()),
            // The hosts of a cell are named by its coordinator, so the coordinator's error comes first.
            Err(_) => Err(self
                .schema
                .hopeless()
                .or_else(|| self.primary.hopeless())
                .unwrap_or_else(|| self.primary.missing())),
        }
    }

    /// Returns the error for a call that finds no primary now.
    pub fn missing(&self) -> StoreError {
        self.primary.missing()
    }

    /// Opens a connection without statement timeout, for long work that changes no table.
    ///
    /// # Errors
    /// Database errors.
    pub async fn connect(&self) -> Result<PgConnection, StoreError> {
        Ok(self.primary.connect_with(session::UNBOUNDED).await?.0)
    }

    /// Prepares the schema and returns the store.
    ///
    /// Applies missing migrations if `migrates` is true, and creates the next history partitions. The retention
    /// `history` determines their length.
    ///
    /// # Errors
    /// [`StoreError::SchemaTooOld`] if migrations are missing and `migrates` is false; [`StoreError::Denied`] if the
    /// role lacks a privilege; database errors.
    #[boxed]
    pub async fn prepare(&self, history: Duration, migrates: bool) -> Result<Store, StoreError> {
        let Self { target, schema, primary } = self.clone();
        let (mut connection, _) = schema.connect_with(session::UNBOUNDED).await?;
        let prepared = async {
            match migrates {
                true => drop(schema::migrate(&mut connection).await?),
                false => match schema::missing(&mut connection).await? {
                    0 => {}
                    missing => return Err(StoreError::SchemaTooOld { missing }),
                },
            }
            history_partition::make(&mut connection, history).await
        };
        prepared.await.map_err(StoreError::or_denied)?;
        // The tables of a cell are locked and written on the worker that owns the cell.
        if let Some(cell) = target.cell() {
            (connection, _) = primary.connect_with(session::UNBOUNDED).await?;
            citus::make_usable(&mut connection, &cell).await.map_err(StoreError::or_denied)?;
        }
        let operators = OperatorPool::new(primary.clone());
        Ok(Store { target, schema, primary, operators, turns: Turns::default() })
    }
}

impl Store {
    /// Opens the database at `target`: waits for a primary, applies missing migrations, and creates the next history
    /// partitions for the retention `history`. Several instances may open a database concurrently.
    ///
    /// # Errors
    /// Errors of [`PendingStore::find`] and [`PendingStore::prepare`].
    pub async fn open(target: impl Into<ConnectTarget>, history: Duration) -> Result<Self, StoreError> {
        let (opening, _) = PendingStore::find(target.into()).await?;
        opening.found().await;
        opening.prepare(history, true).await
    }

    /// Returns the primary, the host that accepts writes.
    pub fn primary(&self) -> &Primary {
        &self.primary
    }

    /// Returns the connection pool for short reads by key and for paths that are not hot. Lists for operators use
    /// [`Store::operators`] instead.
    pub async fn pool(&self) -> Result<PgPool, StoreError> {
        Ok(self.primary.found().await?.pool.clone())
    }

    /// Returns the connections for operators' lists. Lists delay only one another.
    pub fn operators(&self) -> &OperatorPool {
        &self.operators
    }

    /// Returns a session with its own connection, for a committer.
    pub fn committer_session(&self) -> Session {
        self.of(Source::Own(Seat::Committer))
    }

    /// Returns a session with its own connection, for a task that keeps one.
    pub fn session(&self) -> Session {
        self.of(Source::Own(Seat::Other))
    }

    /// Returns a session that borrows a connection while operations wait for a contended key.
    pub fn lane_session(&self) -> Session {
        self.of(Source::Lent(Lender::Lanes, self.turns.lanes.clone(), None))
    }

    /// Returns a session that borrows a connection for one step of background work.
    pub fn background_session(&self, work: Work) -> Session {
        let turns = match work {
            Work::Vital => &self.turns.vital,
            Work::Short => &self.turns.short,
            Work::Long => &self.turns.long,
            Work::Refresh => &self.turns.refresh,
        };
        self.of(Source::Lent(Lender::Pool, turns.clone(), None))
    }

    /// Returns a session that borrows a connection for the reads of one task.
    pub fn lent_session(&self) -> Session {
        self.of(Source::Lent(Lender::Pool, Arc::new(Semaphore::new(1)), None))
    }

    /// Returns a session that borrows a connection for one operator's call: a change, or a read of everything.
    pub fn operator_session(&self) -> Session {
        self.of(Source::Lent(Lender::Operators, self.operators.connections(), Some(operators::WAIT_MAX)))
    }

    fn of(&self, source: Source) -> Session {
        Session::new(self.primary.clone(), source)
    }

    /// Returns a session for schema changes through the coordinator of a cell; `None` without cells, where any session
    /// serves.
    pub fn schema_session(&self) -> Option<Session> {
        self.target.cell().map(|_| Session::new(self.schema.clone(), Source::Extra))
    }

    /// Polls the file of the database URL and applies its changes, until `stopping`.
    ///
    /// New connections use the new credentials and hosts. An invalid URL is logged once and ignored.
    #[boxed]
    pub async fn follow(self, stopping: CancellationToken) {
        let Some(file) = self.target.file() else { return };
        let mut failed = false;
        while stopping.run_until_cancelled(tokio::time::sleep(FILE_POLL_INTERVAL)).await.is_some() {
            match stopping.run_until_cancelled(self.target.read_again()).await {
                Some(Some(Ok(hosts))) => {
                    failed = false;
                    self.target.set(hosts.clone());
                    self.schema.show(hosts);
                }
                Some(Some(Err(error))) if !failed => {
                    failed = true;
                    tracing::warn!(path = %file.display(), %error, "the new database URL is ignored; the previous \
                        one stays in use");
                }
                Some(_) => {}
                None => return,
            }
        }
    }

    /// Closes all connections. Connections that the database does not close within `CLOSE_TIMEOUT` end with the
    /// process.
    #[boxed]
    pub async fn close(&self) {
        let closed = async { tokio::join!(self.primary.close(), self.schema.close()) };
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, closed).await;
    }
}

/// Error of the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A statement or connection failed in the driver or in PostgreSQL.
    #[error("the database failed: {}", database_text(.0))]
    Database(sqlx::Error),
    /// No permit for an operator's call became free in time.
    #[error("too many operator calls are in progress; retry the call")]
    OperatorsBusy,
    /// The database does not exist, or rejects the connection; waiting does not help.
    #[error("cannot use the PostgreSQL at {address}; check DATABASE_URL")]
    Unreachable {
        /// Address of the database.
        address: String,
        /// Cause.
        source: Arc<StoreError>,
    },
    /// No host of the database accepts writes now.
    #[error("{why}: {hosts}")]
    NoPrimary {
        /// Reason, from the host that is nearest to accepting writes.
        why: NoPrimaryReason,
        /// State of each host at its last probe, for display.
        hosts: String,
    },
    /// The session does not suit the service: its settings have no effect, or a pooler shares its PostgreSQL process.
    #[error(
        "a database connection does not have its own session ({why}); name PostgreSQL itself, or a pooler that pools \
            sessions (PgBouncer: pool_mode = session)"
    )]
    Unfit {
        /// Observed difference.
        why: String,
    },
    /// The encoding of the database cannot store every name.
    #[error("the database has encoding {encoding}, but UTF8 is needed; create another with ENCODING 'UTF8'")]
    Encoding {
        /// Encoding of the database, as PostgreSQL names it.
        encoding: String,
    },
    /// The cell does not exist or cannot be used.
    #[error("there is no cell {cell}: {why}")]
    NoCell {
        /// Name of the cell.
        cell: String,
        /// Reason and next action.
        why: String,
    },
    /// A migration failed.
    #[error("the migration of the database's schema failed: migration {version}: {}", database_text(.error))]
    Migration {
        /// Version of the migration.
        version: i64,
        /// Cause.
        error: sqlx::Error,
    },
    /// The tables were not created by the migrations of this release, so no migration applies to them.
    #[error(
        "the database has tables of an unsupported earlier release ({what}); name an empty database, register the \
            EMs there, and adopt running engines by AdoptTicket (docs/UPGRADING.md)"
    )]
    EarlierState {
        /// Observed difference.
        what: String,
    },
    /// Migrations are missing and the caller does not allow applying them.
    #[error(
        "the database's schema is older than this release ({missing} migrations are missing); type linkis-rm migrate \
            with the DATABASE_URL of a role that owns it, and start again"
    )]
    SchemaTooOld {
        /// Number of missing migrations.
        missing: usize,
    },
    /// The database role lacks a privilege.
    #[error(
        "the database role lacks a privilege; migrate as the owner of the tables, or serve with --no-migrate and the \
            grants of docs/SECURITY.md"
    )]
    Denied(#[source] Box<StoreError>),
    /// A row holds values that the service never writes.
    #[error("a row of {table} is inconsistent: {what}")]
    Inconsistent {
        /// Table name.
        table: &'static str,
        /// Row, column and contradiction, for display.
        what: String,
    },
    /// A later release changed how tickets are counted, so this release must not write.
    #[error(
        "a later release ({oldest_writer}) has changed how tickets are counted, so this release ({}) can only read; \
            start the later one",
        limit::WRITER
    )]
    TooOld {
        /// Oldest release that may write.
        oldest_writer: i32,
    },
    /// A new limit would exceed the maximum number of label sets that each ticket is counted by.
    #[error(
        "limits with {most} label sets exist, which is the maximum; delete all limits with one of these label sets \
            first"
    )]
    TooManyLabelSets {
        /// Maximum number of label sets with limits.
        most: usize,
    },
    /// A write changed another number of rows than expected: another writer ignored the locks.
    #[error("{table}: {touched} rows were written instead of {expected}; another program writes without the locks")]
    RowCount {
        /// Table name.
        table: &'static str,
        /// Expected number of rows.
        expected: usize,
        /// Number of rows changed.
        touched: u64,
    },
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(error)
    }
}

/// Returns the message of PostgreSQL alone, without the line of its own source; the error with its causes if PostgreSQL sent none.
fn database_text(error: &sqlx::Error) -> String {
    error.as_database_error().map_or_else(|| rm_telemetry::with_causes(error), |error| error.message().to_owned())
}

impl StoreError {
    /// Returns the error for an invalid row of `table`.
    pub fn inconsistent(table: &'static str, what: impl fmt::Display) -> Self {
        Self::Inconsistent { table, what: what.to_string() }
    }

    /// Returns the kind of the failure, for the metrics of the database.
    pub fn failure(&self) -> DatabaseFailure {
        match self {
            error if error.is_cancelled() => DatabaseFailure::Cancelled,
            error if error.is_lock_timeout() => DatabaseFailure::LockTimeout,
            error if error.is_race() => DatabaseFailure::Race,
            error if error.is_unavailable() => DatabaseFailure::Away,
            Self::Inconsistent { .. } => DatabaseFailure::Inconsistent,
            _ => DatabaseFailure::Other,
        }
    }

    /// Returns whether the database is unavailable. A retry may succeed; the statement itself is not at fault.
    pub fn is_unavailable(&self) -> bool {
        match self {
            Self::NoPrimary { .. } | Self::Unfit { .. } | Self::Encoding { .. } => true,
            Self::Database(error) => match error {
                sqlx::Error::Io(_)
                | sqlx::Error::PoolTimedOut
                | sqlx::Error::PoolClosed
                | sqlx::Error::WorkerCrashed => true,
                sqlx::Error::Protocol(_) | sqlx::Error::Tls(_) => true,
                // - 08: connection exceptions; 25P03: idle in transaction; 25006: a standby after a failover.
                // - 57: shutdown, crash, cannot connect now, statement timeout.
                // - 53: too many connections, disk or memory full.
                // - 28: a changed password that this instance has not read yet.
                // - 42P01: only with a cell, which has moved to another worker.
                _ => {
                    self.code().is_some_and(|code| {
                        ["08", "57", "53", "28"].iter().any(|class| code.starts_with(class))
                            || code == "25P03"
                            || code == "25006"
                    }) || self.is_undefined() && citus::is_served()
                }
            },
            _ => false,
        }
    }

    /// Returns whether waiting cannot help. The role is rejected (28), the database does not exist (3D000), the
    /// certificates do not match, or the database does not suit the service.
    pub fn is_hopeless(&self) -> bool {
        match self {
            Self::Unfit { .. } | Self::Encoding { .. } | Self::Unreachable { .. } => true,
            Self::Database(sqlx::Error::Tls(_) | sqlx::Error::Configuration(_)) => true,
            _ => self.code().is_some_and(|code| code.starts_with("28") || code == "3D000"),
        }
    }

    /// Returns whether the database is unavailable and may become available without intervention.
    pub fn may_be_waited_for(&self) -> bool {
        self.is_unavailable() && !self.is_hopeless()
    }

    /// Returns the reason to report to a caller while the database is unavailable.
    pub fn missing(&self) -> NoPrimaryReason {
        match self {
            Self::NoPrimary { why, .. } => why.clone(),
            Self::Unfit { .. } | Self::Encoding { .. } => NoPrimaryReason::Unfit(self.to_string().into()),
            Self::Database(error) if self.is_crowded() => primary::full(&database_text(error)),
            Self::Database(error) if self.is_disk_full() => primary::disk_full(&database_text(error)),
            _ => NoPrimaryReason::Away,
        }
    }

    /// Returns whether the search for a primary has already logged this error. All calls without a primary fail with
    /// it.
    pub fn is_logged(&self) -> bool {
        matches!(self, Self::NoPrimary { .. })
    }

    /// Returns whether PostgreSQL cancelled the statement (57014): it exceeded `statement_timeout`, or an operator
    /// cancelled it.
    pub fn is_cancelled(&self) -> bool {
        self.has_code(&["57014"])
    }

    /// Returns whether the database is starting or stopping (57P03).
    pub fn is_starting(&self) -> bool {
        self.has_code(&["57P03"])
    }

    /// Returns whether a table does not exist (42P01).
    pub fn is_undefined(&self) -> bool {
        self.has_code(&["42P01"])
    }

    /// Returns whether the database has no free connection slot (53300).
    pub fn is_crowded(&self) -> bool {
        self.has_code(&["53300"])
    }

    /// Returns whether the disk of the database is full (53100).
    pub fn is_disk_full(&self) -> bool {
        self.has_code(&["53100"])
    }

    /// Returns whether a table exists already (42P07), also under another name (42P17), or another session is creating
    /// it (23505).
    pub fn is_made_already(&self) -> bool {
        self.has_code(&["42P07", "42P17", "23505"])
    }

    /// Returns whether a row violates a check constraint (23514).
    pub fn is_check_violation(&self) -> bool {
        self.has_code(&["23514"])
    }

    /// Returns whether a lock wait timed out (55P03) or was a deadlock (40P01).
    pub fn is_lock_timeout(&self) -> bool {
        self.has_code(&["55P03", "40P01"])
    }

    /// Converts a missing privilege (42501) into [`StoreError::Denied`], whose text names the next action.
    pub fn or_denied(self) -> Self {
        if self.has_code(&["42501"]) { Self::Denied(Box::new(self)) } else { self }
    }

    /// Returns whether a concurrent write caused the error. The request id was used on another EM at the same moment
    /// (23505), or rows changed without the locks. A retry reads the other write.
    pub fn is_race(&self) -> bool {
        matches!(self, Self::RowCount { .. }) || self.has_code(&["23505"])
    }

    /// Returns whether the database ended the connection with this error: it shuts down, or an operator terminated the
    /// session.
    pub fn is_going_down(error: &dyn sqlx::error::DatabaseError) -> bool {
        error.code().is_none_or(|code| code.starts_with("08") || code.starts_with("57P"))
    }

    /// Returns whether the database sent one of these SQLSTATEs.
    fn has_code(&self, codes: &[&str]) -> bool {
        self.code().is_some_and(|code| codes.contains(&code.as_str()))
    }

    /// Returns the SQLSTATE, if the database sent one.
    fn code(&self) -> Option<String> {
        match self {
            Self::Database(error) | Self::Migration { error, .. } => {
                error.as_database_error()?.code().map(String::from)
            }
            _ => None,
        }
    }
}

/// Checks that a write changed the expected number of rows.
fn expect_rows(table: &'static str, expected: usize, touched: u64) -> Result<(), StoreError> {
    if u64::try_from(expected).is_ok_and(|expected| expected == touched) {
        Ok(())
    } else {
        Err(StoreError::RowCount { table, expected, touched })
    }
}
