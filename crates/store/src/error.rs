//! Errors of the store, and what their SQLSTATE means for the service.

use std::{fmt, sync::Arc};

use rm_telemetry::metrics::components::DatabaseFailure;

use super::{
    citus, limit,
    primary::{self, NoPrimaryReason},
};

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
pub(super) fn database_text(error: &sqlx::Error) -> String {
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
