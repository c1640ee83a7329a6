//! Refusal sums: writes the refusals of this instance every two seconds, in one statement.
//!
//! Caller: the task driver (`background`).

use std::time::Duration;

use uuid::Uuid;

use crate::refusals::{PeriodSums, RefusalRecorder};
use rm_store::{
    StoreError, refusal,
    session::{Session, clock, within_short_timeout, within_timeout},
};
use rm_telemetry::metrics::Metrics;

use super::{Step, Task};

/// Background task that writes the refusal sums.
#[derive(Debug)]
pub struct FlushRefusals {
    refusals: RefusalRecorder,
    instance_id: Uuid,
    kept: PeriodSums,
    metrics: Metrics,
}

impl FlushRefusals {
    /// Creates the task, which writes the sums of `refusals` for the instance `instance_id`.
    pub fn new(refusals: RefusalRecorder, instance_id: Uuid, metrics: Metrics) -> Self {
        Self { refusals, instance_id, kept: PeriodSums::default(), metrics }
    }

    async fn write(&mut self, session: &mut Session) -> Result<(), StoreError> {
        let Some((period_start, rows)) = self.kept.unwritten() else { return Ok(()) };
        within_timeout(refusal::write(session.get().await?, period_start, self.instance_id, &rows)).await?;
        self.kept.written();
        Ok(())
    }

    async fn write_all(&mut self, session: &mut Session) -> Result<(), StoreError> {
        // Refusals of a failed write belong to the period in which they occurred.
        self.write(session).await?;
        if self.refusals.is_empty() {
            return Ok(());
        }
        let now = clock(session.get().await?).await?;
        let no_room = self.kept.count(self.refusals.take(), now);
        self.metrics.requests.refusals_other.inc_by(no_room);
        self.write(session).await
    }
}

impl Task for FlushRefusals {
    const NAME: &'static str = "refusals";
    const PERIOD: Duration = Duration::from_secs(2);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        self.write_all(session).await.map(|()| Step::Done)
    }

    /// Writes the last refusals at shutdown; without a database, they are lost.
    async fn end(&mut self, session: &mut Session) {
        let _ = within_short_timeout(self.write_all(session)).await;
    }
}
