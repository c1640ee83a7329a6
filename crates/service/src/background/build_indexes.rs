//! Indexes of the history: creates the indexes by user, EM and actor on partitions that have ended.
//!
//! Never: indexes the current partition, because each grant would pay for it.
//! Caller: the task driver (`background`).

use std::time::Duration;

use rm_store::{StoreError, Work, history_partition, session::Session};

use super::{Step, Task, lease::LeaseFlag};

/// Background task that creates one index per step.
#[derive(Debug)]
pub struct BuildIndexes {
    holder: LeaseFlag,
    schema: Option<Session>,
}

impl BuildIndexes {
    /// Creates the task. `schema` is the session for schema changes; `None` to use the session of the step.
    pub fn new(holder: LeaseFlag, schema: Option<Session>) -> Self {
        Self { holder, schema }
    }
}

impl Task for BuildIndexes {
    const NAME: &'static str = "history_indexes";
    const WORK: Work = Work::Long;
    const PERIOD: Duration = Duration::from_secs(60);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        if !self.holder.holds() {
            return Ok(Step::Done);
        }
        let schema = self.schema.as_mut().unwrap_or(session);
        let made = match history_partition::index_oldest(schema.get().await?).await {
            Ok(made) => made,
            Err(error) => {
                schema.reset();
                return Err(error);
            }
        };
        Ok(if made { Step::More } else { Step::Done })
    }
}
