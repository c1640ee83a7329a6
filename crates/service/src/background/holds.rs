//! Expired holds: deletes them. An operation that needs the key deletes an expired hold itself; this task deletes the others.
//!
//! Caller: the task driver (`background`).

use std::time::Duration;

use crate::holds;
use rm_store::{StoreError, session::Session};

use super::{Step, Task, lease::LeaseFlag};

/// Background task that deletes expired holds.
#[derive(Debug)]
pub struct EndHolds {
    holder: LeaseFlag,
}

impl EndHolds {
    /// Creates the task of the instance with `holder`.
    pub fn new(holder: LeaseFlag) -> Self {
        Self { holder }
    }
}

impl Task for EndHolds {
    const NAME: &'static str = "holds";
    const PERIOD: Duration = Duration::from_secs(1);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        if self.holder.holds() {
            holds::clear(session).await?;
        }
        Ok(Step::Done)
    }
}
