//! Expired holds: deletes them, and wakes the requests that wait for their end.
//!
//! Caller: the task driver (`background`).

use std::time::Duration;

use crate::{admission::Admission, holds};
use rm_store::{StoreError, session::Session};

use super::{Step, Task};

/// Background task that deletes expired holds.
#[derive(Debug)]
pub struct EndHolds(pub Admission);

impl Task for EndHolds {
    const NAME: &'static str = "holds";
    const PERIOD: Duration = Duration::from_secs(1);
    const LEASED: bool = true;

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        holds::clear(session, &self.0).await.map(|()| Step::Done)
    }
}
