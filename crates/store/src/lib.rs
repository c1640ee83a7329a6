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
//! - Hosts and connections: [`connect_target`], [`url`], [`primary`], [`endpoint`], [`session`], [`operators`].
//! - All other modules: one table each, named in their first line.

#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unreachable,
    clippy::print_stdout,
    clippy::too_many_lines
)]

use std::{sync::Arc, time::Duration};

use async_recursion::async_recursion as boxed;
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
pub mod endpoint;
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
pub mod queue_order;
pub mod queue_priority;
pub mod reclaim;
pub mod reclaim_policy;
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
pub mod user_sum;
pub mod waiting;

mod error;
mod rows;

pub use error::StoreError;

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
        Ok(self.primary.connect_with(endpoint::UNBOUNDED).await?.0)
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
        let (mut connection, _) = schema.connect_with(endpoint::UNBOUNDED).await?;
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
            (connection, _) = primary.connect_with(endpoint::UNBOUNDED).await?;
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

/// Checks that a write changed the expected number of rows.
fn expect_rows(table: &'static str, expected: usize, touched: u64) -> Result<(), StoreError> {
    if u64::try_from(expected).is_ok_and(|expected| expected == touched) {
        Ok(())
    } else {
        Err(StoreError::RowCount { table, expected, touched })
    }
}
