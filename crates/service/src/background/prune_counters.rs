//! Pruning: deletes the counters of scopes without tickets.
//!
//! Never: deletes a counter that a batch may be using; the statement checks it under its lock.
//! Caller: the task driver (`background`).

use std::time::Duration;

use rm_store::{
    StoreError, Work, label_resource,
    session::{Session, within_timeout},
};

use super::{Step, Task};

/// Maximum number of counters per step: more than a million in the half hour for which counters may be empty.
const PAGE: i64 = 500;

/// Maximum number of counters that one statement locks, because batches wait for these rows.
const BITE: usize = 32;

/// Background task that scans all counters repeatedly and deletes the empty ones.
#[derive(Debug, Default)]
pub struct PruneCounters {
    /// Key of the last scanned counter; empty to begin anew.
    after: Vec<u8>,
}

impl Task for PruneCounters {
    const NAME: &'static str = "pruning";
    const WORK: Work = Work::Long;
    const PERIOD: Duration = Duration::from_millis(700);
    const LEASED: bool = true;

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        let (idle, last) = within_timeout(label_resource::idle(session.get().await?, &self.after, PAGE)).await?;
        for some in idle.chunks(BITE) {
            within_timeout(label_resource::remove_idle(session.get().await?, some)).await?;
        }
        self.after = last.unwrap_or_default();
        Ok(Step::Done)
    }
}
