//! Holds that are over: whoever needs their keys removes them; the others are removed here.

use std::time::Duration;

use crate::{
    service::holds,
    store::{StoreError, session::Session},
};

use super::{Step, Task, lease::Holder};

/// Removes what is over.
#[derive(Debug)]
pub struct EndHolds {
    holder: Holder,
}

impl EndHolds {
    /// Where the lease is held.
    pub fn new(holder: Holder) -> Self {
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
