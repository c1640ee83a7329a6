//! Indexing: parts of the history that are over get the indexes by which lines are found by user, EM and actor. While a part is being
//! written it has none, because every grant would pay for them.

use std::time::Duration;

use crate::store::{StoreError, Work, history_part, session::Session};

use super::{Step, Task, lease::Holder};

/// Has indexes made, one in each step.
#[derive(Debug)]
pub struct Indexing {
    holder: Holder,
    schema: Option<Session>,
}

impl Indexing {
    /// Where the lease is held; by `schema`, if what changes the schema is done elsewhere.
    pub fn new(holder: Holder, schema: Option<Session>) -> Self {
        Self { holder, schema }
    }
}

impl Task for Indexing {
    const NAME: &'static str = "history_indexes";
    const WORK: Work = Work::Long;
    const PERIOD: Duration = Duration::from_secs(60);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        if !self.holder.holds() {
            return Ok(Step::Done);
        }
        let schema = self.schema.as_mut().unwrap_or(session);
        let made = match history_part::index_oldest(schema.get().await?).await {
            Ok(made) => made,
            Err(error) => {
                schema.reset();
                return Err(error);
            }
        };
        Ok(if made { Step::More } else { Step::Done })
    }
}
