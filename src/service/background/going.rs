//! EMs that go: their tickets end in steps, each an operation like any other; their rows go last. What one instance has begun, any
//! other goes on with: the EM's row says what is to be done, and how far it is.

use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;
use tokio::{task::JoinSet, time::Instant};

use crate::{
    domain::{
        em::EmInstance,
        operation::{Operation, Outcome},
    },
    service::committer::Committer,
    store::{
        StoreError, em_resource,
        session::{Session, answered_soon},
    },
};

use super::{Step, Task, lease::Holder};

/// How many EMs take a step at once; the others have their turn when one of these is gone.
const AT_ONCE: i64 = 16;

/// How many are counted, where they are only told.
const TOLD_MAX: i64 = 1000;

/// How long one step may wait for its locks; the next one tries again.
const STEP_TIMEOUT: Duration = Duration::from_secs(5);

/// Ends the tickets of EMs that go.
#[derive(Debug)]
pub struct Going {
    committer: Committer,
    holder: Holder,
    left: Gauge,
}

impl Going {
    /// Tells in `left` how many are left.
    pub fn new(committer: Committer, holder: Holder, left: Gauge) -> Self {
        Self { committer, holder, left }
    }
}

impl Task for Going {
    const NAME: &'static str = "em_goes";
    const PERIOD: Duration = Duration::from_millis(500);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        let going = answered_soon(em_resource::going(session.get().await?, TOLD_MAX)).await?;
        self.left.set(i64::try_from(going.len()).unwrap_or(i64::MAX));
        if going.is_empty() || !self.holder.holds() {
            return Ok(Step::Done);
        }
        let mut steps: JoinSet<bool> = JoinSet::new();
        for em in going.into_iter().take(usize::try_from(AT_ONCE).unwrap_or(1)) {
            steps.spawn(end_tickets(self.committer.clone(), em));
        }
        let mut any = false;
        while let Some(stepped) = steps.join_next().await {
            any |= stepped.unwrap_or(false);
        }
        if any {
            return Ok(Step::More);
        }
        // Another instance may do better, or another moment.
        self.holder.hand_over();
        Ok(Step::Done)
    }
}

/// Ends tickets of an EM, step after step for a while; false if it could not.
async fn end_tickets(committer: Committer, em: EmInstance) -> bool {
    /// How many steps one EM takes before the others have their turn.
    const STEPS_MAX: usize = 32;
    for _ in 0..STEPS_MAX {
        let step = Operation::EndTickets(em.clone());
        match committer.submit_in_background(step, Instant::now() + STEP_TIMEOUT).await {
            Ok(Outcome::Stepped { more: true, .. }) => {}
            Ok(_) => return true,
            Err(error) => {
                tracing::warn!(%em, error = &error as &dyn std::error::Error, "the tickets of an EM that goes cannot end yet");
                return false;
            }
        }
    }
    true
}
