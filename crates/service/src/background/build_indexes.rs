//! Indexes of the history: creates the indexes by user, EM and actor on partitions that have ended.
//!
//! Never: indexes the current partition, because each grant would pay for it.
//! Caller: the task driver (`background`).

use std::time::Duration;

use rm_store::{StoreError, Work, history_partition, session::Session};

use super::{Step, Task};

/// Background task that creates one index per step.
#[derive(Debug)]
pub struct BuildIndexes {
    schema: Option<Session>,
}

impl BuildIndexes {
    /// Creates the task. `schema` is the session for schema changes; `None` to use the session of the step.
    pub fn new(schema: Option<Session>) -> Self {
        Self { schema }
    }
}

impl Task for BuildIndexes {
    const NAME: &'static str = "history_indexes";
    const WORK: Work = Work::Long;
    const PERIOD: Duration = Duration::from_secs(60);
    const LEASED: bool = true;

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        let schema = self.schema.as_mut().unwrap_or(session);
        let made = history_partition::index_oldest(schema.get().await?).await.inspect_err(|_| schema.reset())?;
        Ok(if made { Step::More } else { Step::Done })
    }
}
