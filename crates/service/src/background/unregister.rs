//! Unregistered EMs: ends their tickets in steps, and then deletes their rows.
//!
//! Each step is an operation of the committer. The EM's row stores the progress, so any instance can continue. Up to `AT_ONCE`
//! EMs have a turn at once. The lease is released only when no step of any EM succeeds on this instance any more.
//!
//! Never: ends a ticket outside the committer.
//! Caller: the task driver (`background`).

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use prometheus_client::metrics::gauge::Gauge;
use tokio::{
    task::{self, JoinSet},
    time::{Instant, timeout_at},
};

use crate::committer::Committer;
use rm_model::{
    em::EmInstance,
    operation::{Operation, Outcome},
};
use rm_store::{
    StoreError, em_resource,
    session::{Session, within_short_timeout},
};
use rm_telemetry::cause;

use super::{
    Step, Task,
    lease::LeaseFlag,
    round_robin::{RoundRobin, TurnEnd},
    steps::{self, STEP_TIMEOUT},
};

/// Maximum number of EMs in a turn at once. The next EM begins when one of these turns ends.
const AT_ONCE: usize = 16;

/// Maximum number of unregistered EMs that are read and counted.
const KNOWN_MAX: i64 = 1000;

/// Maximum number of steps in a turn.
const STEPS_PER_TURN: usize = 32;

/// Background task that ends the tickets of unregistered EMs.
#[derive(Debug)]
pub struct FinishUnregistrations {
    committer: Committer,
    holder: LeaseFlag,
    left: Gauge,
    turns: RoundRobin,
    under_way: JoinSet<TurnEnd>,
    progress: StepProgress,
}

impl FinishUnregistrations {
    /// Creates the task. `left` shows the number of EMs left.
    pub fn new(committer: Committer, holder: LeaseFlag, left: Gauge) -> Self {
        let (turns, under_way, progress) = (RoundRobin::new(AT_ONCE), JoinSet::new(), StepProgress::new());
        Self { committer, holder, left, turns, under_way, progress }
    }

    fn begin(&mut self, em: EmInstance) {
        let turn = end_tickets(self.committer.clone(), em.clone(), self.holder.clone(), self.progress.steps.clone());
        let id = self.under_way.spawn(turn).id();
        self.turns.begun(id, em);
    }

    fn note(&mut self, ended: Result<(task::Id, TurnEnd), task::JoinError>) {
        let (id, turn) = ended.unwrap_or_else(|error| (error.id(), TurnEnd::Stuck));
        if turn == TurnEnd::Stuck && self.progress.is_none() {
            // Another instance may succeed.
            self.holder.step_down();
        }
        self.turns.ended(id, turn, Instant::now());
    }
}

impl Task for FinishUnregistrations {
    const NAME: &'static str = "em_goes";
    const PERIOD: Duration = Duration::from_millis(500);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        while let Some(ended) = self.under_way.try_join_next_with_id() {
            self.note(ended);
        }
        let going = within_short_timeout(em_resource::going(session.get().await?, KNOWN_MAX)).await?;
        session.give_back().await;
        self.left.set(i64::try_from(going.len()).unwrap_or(i64::MAX));
        if going.is_empty() || !self.holder.holds() {
            self.progress = StepProgress::new();
            return Ok(Step::Done);
        }
        let now = Instant::now();
        self.turns.update(going, now);
        let until = now + Self::PERIOD;
        loop {
            for em in self.turns.take() {
                self.begin(em);
            }
            // The list is read again after the period, for EMs that were unregistered meanwhile.
            match timeout_at(until, self.under_way.join_next_with_id()).await {
                Ok(Some(ended)) => self.note(ended),
                Ok(None) => return Ok(Step::Done),
                Err(_) => return Ok(Step::More),
            }
        }
    }
}

/// Ends tickets of an EM, step after step, until the turn ends or this instance loses the lease.
async fn end_tickets(committer: Committer, em: EmInstance, holder: LeaseFlag, steps: Arc<AtomicU64>) -> TurnEnd {
    let step = Operation::EndTickets(em);
    for done in 0..STEPS_PER_TURN {
        if !holder.holds() {
            return TurnEnd::Done;
        }
        match steps::carry_out(&committer, &step).await {
            Ok(outcome) => {
                steps.fetch_add(1, Ordering::Relaxed);
                if !matches!(outcome, Outcome::Stepped { more: true, .. }) {
                    return TurnEnd::Done;
                }
            }
            Err(error) => {
                let (em, error) = (step.em(), cause(&error));
                tracing::warn!(%em, error, "the tickets of an unregistered EM cannot be ended yet");
                return if done == 0 { TurnEnd::Stuck } else { TurnEnd::Halted };
            }
        }
    }
    TurnEnd::Over
}

/// Whether any step succeeds.
#[derive(Debug)]
struct StepProgress {
    /// Number of successful steps.
    steps: Arc<AtomicU64>,
    /// Number at the last check, and the time since which it is unchanged.
    seen: (u64, Instant),
}

impl StepProgress {
    fn new() -> Self {
        Self { steps: Arc::default(), seen: (0, Instant::now()) }
    }

    /// Whether no step has succeeded for [`STEP_TIMEOUT`]. Starts a new period if so.
    fn is_none(&mut self) -> bool {
        let (now, steps) = (Instant::now(), self.steps.load(Ordering::Relaxed));
        let is_none = steps == self.seen.0 && now.duration_since(self.seen.1) >= STEP_TIMEOUT;
        if is_none || steps != self.seen.0 {
            self.seen = (steps, now);
        }
        is_none
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lease_is_kept_while_any_step_succeeds() {
        let mut progress = StepProgress::new();
        assert!(!progress.is_none(), "not immediately");
        progress.seen.1 -= STEP_TIMEOUT;
        progress.steps.fetch_add(1, Ordering::Relaxed);
        assert!(!progress.is_none(), "one has");
        progress.seen.1 -= STEP_TIMEOUT;
        assert!(progress.is_none());
        assert!(!progress.is_none(), "another instance has the lease now, or this one retries as long again");
    }
}
