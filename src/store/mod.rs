//! The PostgreSQL store: SQL and nothing else, one file per table.
//!
//! - [`em_resource`], [`em_report`], [`em_observed`], [`em_drain`], [`user_resource`], [`label_set`], [`label_resource`], [`limit`],
//!   [`limit_change`], [`policy`], [`request_id`], [`action_record`], [`history_horizon`], [`resource_lock`], [`waiting`], [`lease`],
//!   [`token`], [`refusal`], [`usage_hour`], [`cluster_figure`], [`server_instance`], [`external_resource_provider`],
//!   [`external_queue`], [`external_ticket`], [`external_refresh`], [`external_snapshot`]: the tables;
//! - [`schema`]: which tables there are; [`history_part`]: the parts of the history; [`resource_hold`]: lock rows that outlive a call;
//! - [`settlement`]: what nearly every batch writes to several of them at once; `rows`: columns as values of the domain, and back;
//! - [`overview`], [`books`], [`ended_use`], [`history_end`]: what is read of several of them: for an overview, an audit, use over time,
//!   and whoever follows the history;
//! - [`target`], [`url`]: where the database is; [`primary`]: which of its hosts takes writes; [`citus`]: cells, each on a worker of Citus;
//!   [`session`]: connections, and what bounds their waits; [`standby`]: a host that follows it, for reads that may be a little old;
//! - [`operators`]: the few connections that operators' calls share;
//! - [`embedded`]: the private PostgreSQL that is started when no other is named.
//!
//! Functions that change something take a connection: the caller's transaction decides what belongs together. Every write checks
//! how many rows it touched.

use std::{fmt, sync::Arc, time::Duration};

use sqlx::{PgConnection, migrate::MigrateError, postgres::PgPool};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::files::LOOK_INTERVAL;

pub mod action_record;
pub mod books;
pub mod citus;
pub mod cluster_figure;
pub mod em_drain;
pub mod em_observed;
pub mod em_report;
pub mod em_resource;
pub mod embedded;
pub mod ended_use;
pub mod external_queue;
pub mod external_refresh;
pub mod external_resource_provider;
pub mod external_snapshot;
pub mod external_ticket;
pub mod history_end;
pub mod history_horizon;
pub mod history_part;
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
pub mod settlement;
pub mod standby;
pub mod target;
pub mod token;
pub mod url;
pub mod usage_hour;
pub mod user_resource;
pub mod waiting;

mod rows;

use operators::Operators;
use primary::{Lender, Missing, Primary, Seat};
use session::{Session, Source};
use target::Target;
use url::Hosts;

/// How long to wait for connections to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The database, as one instance of the service uses it.
#[derive(Clone, Debug)]
pub struct Store {
    target: Target,
    /// Where the schema is changed: the coordinator of a cell, or the same.
    schema: Primary,
    primary: Primary,
    operators: Operators,
    turns: Turns,
}

/// The kind of background work, of which one step of each runs at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Steps of milliseconds on which an instance depends: deadlines, leases, signs of life.
    Vital,
    /// Other steps of less than seconds.
    Short,
    /// Steps of up to minutes.
    Long,
    /// Snapshots of external clusters.
    Refresh,
}

/// Permits of sessions that have a connection lent.
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

/// A database that may have to be waited for until one of its hosts takes writes.
#[derive(Clone, Debug)]
pub struct Opening {
    target: Target,
    schema: Primary,
    primary: Primary,
}

impl Opening {
    /// Looks for the database at `target`; says why if none of its hosts takes writes yet.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] if waiting for one is of no use; [`StoreError::NoCell`].
    pub async fn find(target: Target) -> Result<(Self, Result<(), Missing>), StoreError> {
        if target.is_unverified() {
            tracing::warn!(%target, "the database is on another machine and has not to show who it is: see sslmode=verify-full");
        }
        let schema = Primary::watch(target.clone());
        let found = schema.at_start().await?;
        let (primary, found) = match target.cell() {
            None => (schema.clone(), found),
            Some(cell) => {
                let hosts = match &found {
                    Ok(_) => citus::owner(&schema, &cell).await?,
                    // As soon as there is a coordinator, it says where the cell is.
                    Err(_) => Hosts { options: Vec::new(), ..(*target.hosts()).clone() },
                };
                let primary = Primary::of_cell(schema.clone(), cell, hosts);
                let found = if found.is_ok() { primary.at_start().await? } else { found };
                (primary, found)
            }
        };
        Ok((Self { target, schema, primary }, found.map(|_| ())))
    }

    /// Waits until it takes writes.
    pub async fn found(&self) {
        self.primary.awaited().await;
    }

    /// Whether one takes writes, as of the last look; why not.
    ///
    /// # Errors
    /// [`StoreError::NoPrimary`]; [`StoreError::Unreachable`] if waiting for one is of no use.
    pub fn standing(&self) -> Result<(), StoreError> {
        match self.primary.standing() {
            Ok(_) => Ok(()),
            // The coordinator of a cell names the hosts.
            Err(_) => Err(self
                .schema
                .hopeless()
                .or_else(|| self.primary.hopeless())
                .unwrap_or_else(|| self.primary.missing())),
        }
    }

    /// The error of a call that finds no host now.
    pub fn missing(&self) -> StoreError {
        self.primary.missing()
    }

    /// A connection for work that may take its time, and that changes no table.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn connect(&self) -> Result<PgConnection, StoreError> {
        Ok(self.primary.connect_with(session::UNBOUNDED).await?.0)
    }

    /// Brings its schema up to date, if it `migrates`, with room for a history that reaches back so far; otherwise the schema has to be.
    ///
    /// # Errors
    /// [`StoreError::SchemaTooOld`]; [`StoreError::Denied`] if the role may do too little; those of the database.
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
            history_part::make(&mut connection, history).await
        };
        prepared.await.map_err(StoreError::or_denied)?;
        // A cell's tables are locked and written on the worker that has it.
        if let Some(cell) = target.cell() {
            (connection, _) = primary.connect_with(session::UNBOUNDED).await?;
            citus::make_usable(&mut connection, &cell).await.map_err(StoreError::or_denied)?;
        }
        schema::keep_earlier_out(&mut connection).await.map_err(StoreError::or_denied)?;
        let operators = Operators::new(primary.clone());
        Ok(Store { target, schema, primary, operators, turns: Turns::default() })
    }
}

impl Store {
    /// Prepares to use the database at `target`, and brings its schema up to date, with room for a history that reaches back so far.
    /// Several instances may do so at once. A database that takes no writes yet is waited for.
    pub async fn open(target: impl Into<Target>, history: Duration) -> Result<Self, StoreError> {
        let (opening, _) = Opening::find(target.into()).await?;
        opening.found().await;
        opening.prepare(history, true).await
    }

    /// The host that takes writes.
    pub fn primary(&self) -> &Primary {
        &self.primary
    }

    /// For short reads by key, and for whatever is not a hot path; never for what an operator lists.
    ///
    /// # Errors
    /// [`StoreError::NoPrimary`].
    pub async fn pool(&self) -> Result<PgPool, StoreError> {
        Ok(self.primary.found().await?.pool.clone())
    }

    /// For what operators list, who must stand in nobody's way but each other's.
    pub fn operators(&self) -> &Operators {
        &self.operators
    }

    /// A connection of its own for a committer.
    pub fn committer_session(&self) -> Session {
        self.of(Source::Own(Seat::Committer))
    }

    /// A connection of its own for one of the tasks that keep one.
    pub fn session(&self) -> Session {
        self.of(Source::Own(Seat::Other))
    }

    /// A connection for operations that wait for a contended key, lent for as long as they do.
    pub fn lane_session(&self) -> Session {
        self.of(Source::Lent(Lender::Lanes, self.turns.lanes.clone(), None))
    }

    /// A connection for background work, lent for a step.
    pub fn background_session(&self, work: Work) -> Session {
        let turns = match work {
            Work::Vital => &self.turns.vital,
            Work::Short => &self.turns.short,
            Work::Long => &self.turns.long,
            Work::Refresh => &self.turns.refresh,
        };
        self.of(Source::Lent(Lender::Pool, turns.clone(), None))
    }

    /// A connection for one task, lent while it reads.
    pub fn lent_session(&self) -> Session {
        self.of(Source::Lent(Lender::Pool, Arc::new(Semaphore::new(1)), None))
    }

    /// A connection for one operator's call that changes something, or reads everything.
    pub fn operator_session(&self) -> Session {
        self.of(Source::Lent(Lender::Operators, self.operators.connections(), Some(operators::WAIT_MAX)))
    }

    fn of(&self, source: Source) -> Session {
        Session::new(self.primary.clone(), source)
    }

    /// A connection for what changes the schema, through the coordinator of a cell; `None` where any will do.
    pub fn schema_session(&self) -> Option<Session> {
        self.target.cell().map(|_| Session::new(self.schema.clone(), Source::Extra))
    }

    /// Takes up what its file says when that changes, until the server stops: connections that are made from then on show it. What is no
    /// URL leaves things as they are.
    pub async fn follow(self, stopping: CancellationToken) {
        let Some(file) = self.target.file() else { return };
        let mut failed = false;
        while stopping.run_until_cancelled(tokio::time::sleep(LOOK_INTERVAL)).await.is_some() {
            match stopping.run_until_cancelled(self.target.read_again()).await {
                Some(Some(Ok(hosts))) => {
                    failed = false;
                    self.target.set(hosts.clone());
                    self.schema.show(hosts);
                }
                Some(Some(Err(error))) if !failed => {
                    failed = true;
                    tracing::warn!(path = %file.display(), %error, "the database's URL stays as it was");
                }
                Some(_) => {}
                None => return,
            }
        }
    }

    /// Closes what is open; what the database does not answer is left to the end of the process.
    pub async fn close(&self) {
        let closed = async { tokio::join!(self.primary.close(), self.schema.close()) };
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, closed).await;
    }
}

/// Why the store could not do as asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database refused, or is away.
    #[error("the database could not do it")]
    Database(#[from] sqlx::Error),
    /// Too many operators ask at once.
    #[error("too many operators' calls are under way")]
    OperatorsBusy,
    /// There is no database there, or none that lets us in.
    #[error("cannot use the PostgreSQL at {address}; check DATABASE_URL")]
    Unreachable {
        /// Where it should be.
        address: String,
        /// Why not.
        source: Arc<StoreError>,
    },
    /// No host of the database takes writes now.
    #[error("{why}: {hosts}")]
    NoPrimary {
        /// Why not, by the one that comes nearest.
        why: Missing,
        /// How each was last seen.
        hosts: String,
    },
    /// A session is not what the service needs: its bounds are not in force, or it is not its own.
    #[error(
        "a connection to the database is no session of its own ({why}); name PostgreSQL itself, or a pooler that pools sessions \
         (PgBouncer: pool_mode = session)"
    )]
    Unfit {
        /// How that shows.
        why: String,
    },
    /// The database cannot hold every name.
    #[error("the database has encoding {encoding}: UTF8 is needed; make another with ENCODING 'UTF8'")]
    Encoding {
        /// Its encoding, as PostgreSQL names it.
        encoding: String,
    },
    /// There is no such cell.
    #[error("there is no cell {cell}: {why}")]
    NoCell {
        /// Which.
        cell: String,
        /// Why not, and what to do.
        why: String,
    },
    /// The schema could not be brought up to date.
    #[error("the database's schema could not be brought up to date")]
    Migration(#[source] MigrateError),
    /// The tables are of a state that the migrations do not lead on from.
    #[error(
        "the database holds tables of an earlier state of linkis-rm ({what}), which cannot be taken over; name an empty database, register \
         the EMs there, and adopt running engines by AdoptTicket (docs/UPGRADING.md)"
    )]
    EarlierState {
        /// How that shows.
        what: String,
    },
    /// The schema is not up to date, and is to be left as it is.
    #[error(
        "the database's schema is older than this release ({missing} migrations are missing), and --no-migrate leaves it as it is; type \
         linkis-rm migrate with the DATABASE_URL of a role that may change it, and start again"
    )]
    SchemaTooOld {
        /// How many migrations are missing.
        missing: usize,
    },
    /// The role of the connection may do too little.
    #[error(
        "the database does not let its role do this; a role that migrates owns the tables, and docs/SECURITY.md says what to grant to one \
         that serves with --no-migrate"
    )]
    Denied(#[source] Box<StoreError>),
    /// A row says something that the service never wrote.
    #[error("a row of {table} contradicts itself: {what}")]
    Inconsistent {
        /// Which table.
        table: &'static str,
        /// Which row and column, and how.
        what: String,
    },
    /// A later release has written what this one would count wrongly.
    #[error(
        "a later release ({oldest_writer}) has changed how the database counts, and this one ({}) may only read: start the later one",
        limit::WRITER
    )]
    TooOld {
        /// The oldest release that may write.
        oldest_writer: i32,
    },
    /// More sets of labels would have limits than every ticket is to be counted by.
    #[error(
        "limits are for {most} sets of labels already, which is the most; delete all limits with one of these first"
    )]
    TooManyLabelSets {
        /// How many may have limits.
        most: usize,
    },
    /// Rows had changed since they were read under the locks: somebody wrote without taking them.
    #[error(
        "{table}: {touched} rows were written where {expected} should have been; somebody else writes without the locks"
    )]
    RowCount {
        /// Which table.
        table: &'static str,
        /// How many rows should have been written.
        expected: usize,
        /// How many were.
        touched: u64,
    },
}

impl StoreError {
    /// A row of `table` that cannot be.
    pub fn inconsistent(table: &'static str, what: impl fmt::Display) -> Self {
        Self::Inconsistent { table, what: what.to_string() }
    }

    /// Whether the database is away: trying again later may help, and nothing else is wrong.
    pub fn is_unavailable(&self) -> bool {
        match self {
            Self::NoPrimary { .. } | Self::Unfit { .. } | Self::Encoding { .. } => true,
            Self::Database(error) => match error {
                sqlx::Error::Io(_)
                | sqlx::Error::PoolTimedOut
                | sqlx::Error::PoolClosed
                | sqlx::Error::WorkerCrashed => true,
                sqlx::Error::Protocol(_) | sqlx::Error::Tls(_) => true,
                // 08: connection exceptions; 57: shutdown, crash, cannot connect now, and a statement that took too long;
                // 25P03: idle in transaction; 25006: a standby after a failover; 53: too many connections, disk or memory full;
                // 28: a password that was changed and is not known here yet; 42P01: of a cell, which is on another worker now, and not otherwise.
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

    /// Whether waiting is of no use. The role is not let in (28), the database is not there (3D000), the certificates do not fit, or the
    /// database does not suit the service.
    pub fn is_hopeless(&self) -> bool {
        match self {
            Self::Unfit { .. } | Self::Encoding { .. } | Self::Unreachable { .. } => true,
            Self::Database(sqlx::Error::Tls(_) | sqlx::Error::Configuration(_)) => true,
            _ => self.code().is_some_and(|code| code.starts_with("28") || code == "3D000"),
        }
    }

    /// Whether the database is away, and may come back.
    pub fn may_be_waited_for(&self) -> bool {
        self.is_unavailable() && !self.is_hopeless()
    }

    /// The reason that a caller gets while the database is away.
    pub fn missing(&self) -> Missing {
        match self {
            Self::NoPrimary { why, .. } => why.clone(),
            Self::Unfit { .. } | Self::Encoding { .. } => Missing::Unfit(self.to_string().into()),
            Self::Database(error) if self.is_crowded() => primary::full(&crate::telemetry::terse(error)),
            Self::Database(error) if self.is_disk_full() => primary::disk_full(&crate::telemetry::terse(error)),
            _ => Missing::Away,
        }
    }

    /// Whether it was told already, by whoever looks for a host that takes writes: everybody who needs one fails with this.
    pub fn is_told(&self) -> bool {
        matches!(self, Self::NoPrimary { .. })
    }

    /// Whether the database gave the statement up (57014): it took longer than `statement_timeout`, or an operator cancelled it.
    pub fn is_cancelled(&self) -> bool {
        self.code().is_some_and(|code| code == "57014")
    }

    /// Whether the database just starts or stops (57P03).
    pub fn is_starting(&self) -> bool {
        self.code().is_some_and(|code| code == "57P03")
    }

    /// Whether a table is not there (42P01).
    pub fn is_undefined(&self) -> bool {
        self.code().is_some_and(|code| code == "42P01")
    }

    /// Whether the database has no room for a connection more (53300).
    pub fn is_crowded(&self) -> bool {
        matches!(self, Self::Database(error) if Self::is_full(error))
    }

    /// Whether the disk of the database is full (53100).
    pub fn is_disk_full(&self) -> bool {
        self.code().is_some_and(|code| code == "53100")
    }

    /// Whether an error of the database says so.
    fn is_full(error: &sqlx::Error) -> bool {
        error.as_database_error().is_some_and(|error| error.code().as_deref() == Some("53300"))
    }

    /// Whether a table is there already (42P07), or just being made by somebody else (23505), also under another name (42P17).
    pub fn is_made_already(&self) -> bool {
        self.code().is_some_and(|code| ["42P07", "42P17", "23505"].contains(&code.as_str()))
    }

    /// Whether a row contradicts a constraint (23514).
    pub fn is_check_violation(&self) -> bool {
        self.code().is_some_and(|code| code == "23514")
    }

    /// Whether a lock was not to be had in time (55P03), or waiting for it would never have ended (40P01).
    pub fn is_lock_timeout(&self) -> bool {
        self.code().is_some_and(|code| code == "55P03" || code == "40P01")
    }

    /// Says what to do if the role may not do what was tried (42501).
    pub fn or_denied(self) -> Self {
        if self.code().is_some_and(|code| code == "42501") { Self::Denied(Box::new(self)) } else { self }
    }

    /// Whether somebody else wrote the same rows meanwhile: a request id that was used on another EM at the same moment (23505),
    /// or rows changed without the locks. Trying again reads what the other wrote.
    pub fn is_race(&self) -> bool {
        matches!(self, Self::RowCount { .. }) || self.code().is_some_and(|code| code == "23505")
    }

    /// Whether the database ended the connection with this error, by shutting down or by an operator's hand.
    pub fn is_going_down(error: &dyn sqlx::error::DatabaseError) -> bool {
        error.code().is_none_or(|code| code.starts_with("08") || code.starts_with("57P"))
    }

    /// The SQLSTATE, if the database gave one.
    fn code(&self) -> Option<String> {
        match self {
            Self::Database(error)
            | Self::Migration(MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _)) => {
                error.as_database_error()?.code().map(String::from)
            }
            _ => None,
        }
    }
}

/// Checks that a write touched as many rows as it named.
fn expect_rows(table: &'static str, expected: usize, touched: u64) -> Result<(), StoreError> {
    if u64::try_from(expected).is_ok_and(|expected| expected == touched) {
        Ok(())
    } else {
        Err(StoreError::RowCount { table, expected, touched })
    }
}
