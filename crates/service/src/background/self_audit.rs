//! Scheduled audit: compares the stored counters with the tickets every hour, on one instance.
//!
//! Each instance publishes the result as metrics (`cluster_figures`).
//!
//! Never: repairs.
//! Caller: the task driver (`background`).

use std::time::Duration;

use tokio::time::Instant;

use crate::audit::AuditService;
use rm_store::{
    Store, StoreError,
    cluster_figure::{self, AUDIT},
    session::{Session, within_short_timeout},
};
use rm_telemetry::cause;

use super::{Step, Task};

/// Interval between audits.
const INTERVAL: Duration = Duration::from_secs(3600);

/// Delay of the first audit after start, if there has never been one.
const FIRST_AFTER: Duration = Duration::from_secs(600);

/// Background task that audits when the last audit is old.
#[derive(Debug)]
pub struct ScheduledAudit {
    store: Store,
    audit: AuditService,
    first_due: Instant,
}

impl ScheduledAudit {
    /// Creates the task.
    pub fn new(store: Store, audit: AuditService) -> Self {
        Self { store, audit, first_due: Instant::now() + FIRST_AFTER }
    }

    async fn is_due(&self) -> Result<bool, StoreError> {
        let is_old = within_short_timeout(cluster_figure::is_older(&self.store.pool().await?, AUDIT, INTERVAL)).await?;
        Ok(is_old.unwrap_or_else(|| Instant::now() >= self.first_due))
    }
}

impl Task for ScheduledAudit {
    const NAME: &'static str = "audit";
    const PERIOD: Duration = Duration::from_secs(10);
    const LEASED: bool = true;

    async fn step(&mut self, _: &mut Session) -> Result<Step, StoreError> {
        if !self.is_due().await? {
            return Ok(Step::Done);
        }
        match self.audit.audit().await {
            Ok(report) if report.differences.count > 0 => {
                let (differences, first) = (report.differences.count, &report.differences.first);
                tracing::error!(
                    differences,
                    ?first,
                    "the stored counters differ from the tickets; see AdminService/Audit"
                );
            }
            Ok(report) => tracing::info!(tickets = report.tickets, "audited: the stored counters equal the tickets"),
            // Too many operator queries, or no database: the next step tries again.
            Err(error) => tracing::warn!(error = cause(&error), "the hourly audit is delayed"),
        }
        Ok(Step::Done)
    }
}
