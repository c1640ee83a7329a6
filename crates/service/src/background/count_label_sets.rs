//! Counting of new label sets, and deletion of the counters of retired ones.
//!
//! Tickets are counted EM by EM, in steps that are operations of the committer. A label set decides requests only after all EMs
//! are counted.
//!
//! Never: writes counters outside the committer; deletes only those of retired label sets.
//! Caller: the task driver (`background`); `limits` wakes the task.

use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;
use tokio::{task::JoinSet, time::Instant};

use crate::{committer::Committer, error::Error, limits};
use rm_model::{
    em::EmInstance,
    operation::{CountTickets, Operation, Outcome, STEP_COUNTED_MAX},
};
use rm_store::{
    StoreError, em_resource, label_resource,
    label_set::{self, LabelSetState},
    session::{Session, within_timeout},
    user_resource,
};
use rm_telemetry::cause;

use super::{
    Step, Task,
    lease::LeaseFlag,
    steps::{self, STEP_TIMEOUT},
};

/// Maximum number of EMs per step.
const PAGE: i64 = 256;

/// Maximum number of counters that one statement deletes.
const BITE: i64 = 1000;

/// Background task that counts new label sets and deletes the counters of retired ones.
#[derive(Debug)]
pub struct CountLabelSets {
    committer: Committer,
    holder: LeaseFlag,
    left: Gauge,
    /// Progress of the pass through all EMs.
    round: Option<CountingRound>,
}

#[derive(Debug)]
struct CountingRound {
    to: i64,
    after: Option<EmInstance>,
    all_counted: bool,
}

impl CountLabelSets {
    /// Creates the task. `left` shows the number of label sets left.
    pub fn new(committer: Committer, holder: LeaseFlag, left: Gauge) -> Self {
        Self { committer, holder, left, round: None }
    }

    /// Counts the tickets of the next EMs, or activates the label sets if all EMs are counted.
    async fn count(&mut self, session: &mut Session, counting: &[i64]) -> Result<Step, StoreError> {
        let Some(to) = counting.iter().copied().max() else { return Ok(Step::Done) };
        let same = self.round.take().filter(|round| round.to == to);
        let mut round = same.unwrap_or(CountingRound { to, after: None, all_counted: true });
        let page = within_timeout(em_resource::counted(session.get().await?, round.after.as_ref(), PAGE)).await?;
        let is_last = i64::try_from(page.len()).is_ok_and(|len| len < PAGE);
        round.after = page.last().map(|(em, _)| em.clone());
        let left: Vec<EmInstance> = page.into_iter().filter(|(_, to)| *to < round.to).map(|(em, _)| em).collect();
        if !left.is_empty() {
            round.all_counted &= self.count_on(session, &left, (to, counting.len())).await?;
        }
        if !is_last {
            self.round = Some(round);
            return Ok(Step::More);
        }
        if round.all_counted {
            let decided = limits::decide(session, counting, Instant::now() + STEP_TIMEOUT).await;
            return Ok(or_later(decided, "counted label sets cannot be activated yet"));
        }
        // EMs that could not be counted are tried again in the next pass.
        Ok(Step::Done)
    }

    /// Counts the tickets of `ems` up to label set `to`, for `label_sets` sets. Returns false if some EM could not be counted.
    async fn count_on(
        &self,
        session: &mut Session,
        ems: &[EmInstance],
        (to, label_sets): (i64, usize),
    ) -> Result<bool, StoreError> {
        let sizes = within_timeout(user_resource::count_on(session.get().await?, ems, STEP_COUNTED_MAX)).await?;
        session.give_back().await;
        let mut steps: JoinSet<bool> = JoinSet::new();
        for (em, tickets) in sizes {
            // Adds an eighth for tickets that are granted meanwhile, so that one step is enough.
            let tickets_max = (tickets + tickets / 8 + 1).min((STEP_COUNTED_MAX / label_sets.max(1)).max(1));
            steps.spawn(count_em(self.committer.clone(), CountTickets { em, to, tickets_max }));
        }
        let mut all = true;
        while let Some(counted) = steps.join_next().await {
            all &= counted.unwrap_or(false);
        }
        Ok(all)
    }
}

impl Task for CountLabelSets {
    const NAME: &'static str = "label_sets";
    const PERIOD: Duration = Duration::from_millis(500);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        let counting = within_timeout(label_set::in_state(session.get().await?, LabelSetState::Counting)).await?;
        let retired = within_timeout(label_set::in_state(session.get().await?, LabelSetState::Retired)).await?;
        self.left.set(i64::try_from(counting.len() + retired.len()).unwrap_or(i64::MAX));
        if !self.holder.holds() {
            return Ok(Step::Done);
        }
        if !counting.is_empty() {
            return self.count(session, &counting).await;
        }
        let Some(id) = retired.first() else { return Ok(Step::Done) };
        if !within_timeout(label_resource::delete_of_set(session.get().await?, *id, BITE)).await? {
            within_timeout(label_set::delete(session.get().await?, *id)).await?;
        }
        Ok(Step::More)
    }
}

/// Logs an error; the next step after the period retries.
fn or_later(done: Result<(), Error>, why_not: &'static str) -> Step {
    match done {
        Ok(()) => Step::More,
        Err(error) => {
            tracing::warn!(error = cause(&error), why_not);
            Step::Done
        }
    }
}

/// Counts the tickets of an EM, step after step. Returns false if a step failed.
async fn count_em(committer: Committer, step: CountTickets) -> bool {
    let step = Operation::CountTickets(step);
    loop {
        match steps::carry_out(&committer, &step).await {
            Ok(Outcome::Stepped { more: true, .. }) => {}
            Ok(_) => return true,
            Err(error) => {
                let (em, error) = (step.em(), cause(&error));
                tracing::warn!(%em, error, "the tickets of an EM cannot be counted yet");
                return false;
            }
        }
    }
}
