//! Indexing: parts of the history that are over get the indexes by which lines are found by user, EM and actor. While a part is being
//! written it has none, because every grant would pay for them.

use std::time::Duration;

use crate::store::{StoreError, history_part, session::Session};

use super::{Step, Task, lease::Holder};

/// Has indexes made, one in each step.
#[derive(Debug)]
pub struct Indexing {
    holder: Holder,
}

impl Indexing {
    /// Where the lease is held.
    pub fn new(holder: Holder) -> Self {
        Self { holder }
    }
}

impl Task for Indexing {
    const NAME: &'static str = "history_indexes";
    const PERIOD: Duration = Duration::from_secs(60);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        let made = self.holder.holds() && history_part::index_oldest(session.get().await?).await?;
        Ok(if made { Step::More } else { Step::Done })
    }
}
