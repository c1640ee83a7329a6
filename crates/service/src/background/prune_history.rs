//! Retention: deletes history, request ids and sums that are older than the retention period, and creates future partitions.
//!
//! Never: locks more than `BITE` rows in one statement.
//! Caller: the task driver (`background`).

use std::time::Duration;

use rm_store::{
    StoreError, Work, action_record, history_partition, refusal, request_id,
    session::{Session, within_timeout},
    usage_hour,
};

use super::{Step, Task};

/// Maximum number of rows that one statement deletes, so that no batch waits long.
const BITE: i64 = 1000;

/// Minimum retention of usage per hour, regardless of that of the history: three months and the rest of a day.
const USAGE_KEPT: Duration = Duration::from_secs(93 * 24 * 3600);

/// Background task that deletes what exceeds the retention period, and creates partitions.
#[derive(Debug)]
pub struct PruneHistory {
    history: Duration,
    schema: Option<Session>,
}

impl PruneHistory {
    /// Creates the task with the retention period `history`. `schema` is the session for schema changes; `None` to use the
    /// session of the step.
    pub fn new(history: Duration, schema: Option<Session>) -> Self {
        Self { history, schema }
    }
}

impl Task for PruneHistory {
    const NAME: &'static str = "retention";
    const WORK: Work = Work::Long;
    const PERIOD: Duration = Duration::from_secs(20);
    const LEASED: bool = true;

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        let (history, usage_kept) = (self.history, self.history.max(USAGE_KEPT));
        let mut left = RetentionStep { more: false, failed: None };
        left.parts(history, self.schema.as_mut().unwrap_or(session)).await?;
        left.note(
            within_timeout(action_record::delete_unpartitioned(session.get().await?, history, BITE)).await,
            session,
        )?;
        left.note(within_timeout(request_id::delete_expired(session.get().await?, history, BITE)).await, session)?;
        left.note(within_timeout(refusal::delete_expired(session.get().await?, history, BITE)).await, session)?;
        left.note(within_timeout(usage_hour::delete_expired(session.get().await?, usage_kept, BITE)).await, session)?;
        match left.failed {
            Some(error) => Err(error),
            None => Ok(if left.more { Step::More } else { Step::Done }),
        }
    }
}

/// Result of a step.
struct RetentionStep {
    more: bool,
    failed: Option<StoreError>,
}

impl RetentionStep {
    /// Creates and drops partitions of the history.
    async fn parts(&mut self, history: Duration, session: &mut Session) -> Result<(), StoreError> {
        let made = within_timeout(history_partition::make(session.get().await?, history)).await;
        self.note(made.map(|()| false), session)?;
        let dropped = within_timeout(history_partition::drop_oldest(session.get().await?, history)).await;
        self.note(dropped, session)
    }

    /// Records the result of one deletion. A contended table does not stop the others; without a database, the step fails.
    fn note(&mut self, done: Result<bool, StoreError>, session: &mut Session) -> Result<(), StoreError> {
        match done {
            Ok(more) => self.more |= more,
            Err(error) if error.is_unavailable() => return Err(error),
            Err(error) => {
                session.reset();
                self.failed.get_or_insert(error);
            }
        }
        Ok(())
    }
}
