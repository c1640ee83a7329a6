//! Lost EMs: unregisters EMs that reported and have been silent for longer than allowed.
//!
//! The database's clock alone never makes an EM lost: a clock can jump, and no EM can report during an outage. Each instance
//! therefore observes silent EMs itself, once per second. An EM is lost only if its last sign stays unchanged, without a gap,
//! for `lost_after - silent_after`. The difference is at least `silent_after`, so each EM had time to report to a running
//! service. The removal is an operation that is decided again under the locks, so several instances may propose it. A removal
//! on a contended EM runs beside the observations and causes no gap.
//!
//! Never: removes an EM after an observation with a gap.
//! Caller: the task driver (`background`).

use std::{collections::HashMap, time::Duration};

use tokio::{
    task::{self, JoinSet},
    time::{Instant, timeout_at},
};

use crate::{admission::Surveys, committer::Committer, heartbeat::LivenessTimeouts};
use rm_model::{
    em::EmInstance,
    operation::{MarkEmLost, Operation, Outcome},
    report::LastSignOfLife,
};
use rm_store::{
    StoreError, em_report,
    session::{Session, within_short_timeout},
};
use rm_telemetry::cause;

use super::{
    Step, Task,
    lease::LeaseFlag,
    round_robin::{RoundRobin, TurnEnd},
};

/// Maximum number of silent EMs per statement.
const LOOK_PAGE: i64 = 1000;

/// Longest interval between two observations without a gap. A longer interval means that the instance itself was suspended.
const GAP_MAX: Duration = Duration::from_secs(5);

/// Maximum number of removals at once.
const REAPS_MAX: usize = 64;

/// Timeout of one removal, lock waits included; the EM then gets another turn.
const REAP_TIMEOUT: Duration = Duration::from_secs(5);

/// Background task that detects lost EMs and unregisters them.
#[derive(Debug)]
pub struct DetectLostEms {
    committer: Committer,
    patience: LivenessTimeouts,
    holder: LeaseFlag,
    watch: SilenceWatch,
    turns: RoundRobin,
    under_way: JoinSet<TurnEnd>,
    surveys: Surveys,
    /// Number of lost connections at the last observation. A different number means that the database was away in between.
    losses: u64,
}

impl DetectLostEms {
    /// Creates the task with the timeouts `patience`. All instances observe; the lease owner unregisters. Each observation
    /// records the silent EMs in `surveys`.
    pub fn new(committer: Committer, patience: LivenessTimeouts, holder: LeaseFlag, surveys: Surveys) -> Self {
        let watch = SilenceWatch::new(patience.lost_after.saturating_sub(patience.silent_after));
        let (turns, under_way) = (RoundRobin::new(REAPS_MAX), JoinSet::new());
        Self { committer, patience, holder, watch, turns, under_way, surveys, losses: 0 }
    }

    fn note(&mut self, ended: Result<(task::Id, TurnEnd), task::JoinError>) {
        let (id, turn) = ended.unwrap_or_else(|error| (error.id(), TurnEnd::Stuck));
        self.turns.ended(id, turn, Instant::now());
    }

    /// Records the removals that have ended, without waiting.
    fn note_ended(&mut self) {
        while let Some(ended) = self.under_way.try_join_next_with_id() {
            self.note(ended);
        }
    }

    /// Unregisters `lost`, several at once, until the next observation is due or all are done.
    async fn reap(&mut self, lost: Vec<MarkEmLost>) -> Step {
        let until = Instant::now() + Self::PERIOD;
        let mut lost: HashMap<EmInstance, MarkEmLost> = lost.into_iter().map(|reap| (reap.em.clone(), reap)).collect();
        self.turns.update(lost.keys().cloned().collect(), Instant::now());
        loop {
            for em in self.turns.take() {
                let Some(reap) = lost.remove(&em) else { continue };
                let id = self.under_way.spawn(mark_lost(self.committer.clone(), reap)).id();
                self.turns.begun(id, em);
            }
            match timeout_at(until, self.under_way.join_next_with_id()).await {
                Ok(Some(ended)) => self.note(ended),
                Ok(None) => return Step::Done,
                Err(_) => return Step::More,
            }
            // Removals of one batch end together.
            self.note_ended();
        }
    }
}

impl Task for DetectLostEms {
    const NAME: &'static str = "silence";
    const PERIOD: Duration = Duration::from_secs(1);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        self.note_ended();
        let began = Instant::now();
        let silent = poll(session, self.patience.silent_after).await;
        session.give_back().await;
        let silent = silent.inspect_err(|_| self.watch.reset())?;
        let losses = session.losses();
        if std::mem::replace(&mut self.losses, losses) != losses {
            self.watch.reset();
        }
        self.surveys.note_silent(began, silent.iter().map(|(em, _)| em.clone()).collect());
        let lost = self.watch.observe(Instant::now(), silent);
        if !self.holder.holds() {
            return Ok(Step::Done);
        }
        Ok(self.reap(lost).await)
    }
}

async fn mark_lost(committer: Committer, reap: MarkEmLost) -> TurnEnd {
    let em = reap.em.clone();
    match committer.submit_in_background(Operation::Reap(reap), Instant::now() + REAP_TIMEOUT).await {
        Ok(Outcome::Reaped(Some(ended_tickets))) => {
            tracing::warn!(%em, ended_tickets, "an EM is lost: it was silent for too long and is unregistered");
            TurnEnd::Done
        }
        Ok(_) => TurnEnd::Done,
        Err(error) => {
            let error = cause(&error);
            tracing::warn!(%em, error, "a lost EM could not be unregistered yet");
            TurnEnd::Stuck
        }
    }
}

async fn poll(session: &mut Session, silent_after: Duration) -> Result<Vec<(EmInstance, LastSignOfLife)>, StoreError> {
    let (connection, mut silent) = (session.get().await?, Vec::new());
    loop {
        let after = silent.last().map(|(em, _)| em);
        let page = within_short_timeout(em_report::silent(&mut *connection, silent_after, after, LOOK_PAGE)).await?;
        let is_last = i64::try_from(page.len()).is_ok_and(|len| len < LOOK_PAGE);
        silent.extend(page);
        if is_last {
            return Ok(silent);
        }
    }
}

/// Observations of silent EMs by one instance, without a gap.
#[derive(Debug)]
struct SilenceWatch {
    /// Time for which the last sign of an EM must stay unchanged.
    patience: Duration,
    /// Last sign of each silent EM, and the time since which it is observed.
    seen: HashMap<EmInstance, (LastSignOfLife, Instant)>,
    last_look: Option<Instant>,
}

impl SilenceWatch {
    fn new(patience: Duration) -> Self {
        Self { patience, seen: HashMap::new(), last_look: None }
    }

    /// Restarts all observations, after an error or a gap.
    fn reset(&mut self) {
        self.seen.clear();
    }

    /// Records the silent EMs at `now`. Returns the EMs that are lost.
    fn observe(&mut self, now: Instant, silent: Vec<(EmInstance, LastSignOfLife)>) -> Vec<MarkEmLost> {
        if self.last_look.is_some_and(|last| now.saturating_duration_since(last) > GAP_MAX) {
            self.reset();
        }
        self.last_look = Some(now);
        let before = std::mem::take(&mut self.seen);
        let since = |em: &EmInstance, sign| match before.get(em) {
            Some((last, since)) if *last == sign => *since,
            _ => now,
        };
        self.seen = silent.into_iter().map(|(em, sign)| (em.clone(), (sign, since(&em, sign)))).collect();
        let is_lost = |since: Instant| now.saturating_duration_since(since) >= self.patience;
        let lost = self.seen.iter().filter(|(_, (_, since))| is_lost(*since));
        lost.map(|(em, (last, _))| MarkEmLost { em: em.clone(), last: *last }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rm_model::report::ReportNumber;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn em(host: &str) -> EmInstance {
        EmInstance::parse("em", "ecm", host).unwrap()
    }

    fn sign(registered: i64, sequence: i64) -> LastSignOfLife {
        LastSignOfLife { registered, reported: ReportNumber { epoch: 1, sequence } }
    }

    /// Observes `sign` of one EM each second. Returns the second at which the EM is lost.
    fn lost_at(
        watch: &mut SilenceWatch,
        start: Instant,
        looks: std::ops::Range<u64>,
        sign: LastSignOfLife,
    ) -> Option<u64> {
        looks.into_iter().find(|second| {
            let reaps = watch.observe(start + Duration::from_secs(*second), vec![(em("a"), sign)]);
            assert!(reaps.iter().all(|reap| *reap == MarkEmLost { em: em("a"), last: sign }));
            !reaps.is_empty()
        })
    }

    #[test]
    fn em_with_constant_sign_is_lost_after_timeout() {
        let (mut watch, start) = (SilenceWatch::new(PATIENCE), Instant::now());
        assert_eq!(lost_at(&mut watch, start, 0..100, sign(1, 1)), Some(10));
        assert_eq!(lost_at(&mut watch, start, 11..100, sign(1, 1)), Some(11), "until it is done");
    }

    #[test]
    fn em_sign_of_life_restarts_watch() {
        let (mut watch, start) = (SilenceWatch::new(PATIENCE), Instant::now());
        assert_eq!(lost_at(&mut watch, start, 0..9, sign(1, 1)), None);
        assert_eq!(lost_at(&mut watch, start, 9..18, sign(1, 2)), None, "a report");
        assert_eq!(lost_at(&mut watch, start, 18..27, sign(2, 2)), None, "a registration");
        assert!(watch.observe(start + Duration::from_secs(27), vec![]).is_empty(), "the silence was interrupted");
        assert_eq!(lost_at(&mut watch, start, 28..100, sign(2, 2)), Some(38));
    }

    #[test]
    fn failed_poll_restarts_watch() {
        let (mut watch, start) = (SilenceWatch::new(PATIENCE), Instant::now());
        assert_eq!(lost_at(&mut watch, start, 0..10, sign(1, 1)), None);
        watch.reset();
        assert_eq!(lost_at(&mut watch, start, 10..100, sign(1, 1)), Some(20));
    }

    #[test]
    fn gap_between_polls_restarts_watch() {
        let (mut watch, start) = (SilenceWatch::new(PATIENCE), Instant::now());
        assert_eq!(lost_at(&mut watch, start, 0..5, sign(1, 1)), None);
        assert_eq!(lost_at(&mut watch, start, 60..100, sign(1, 1)), Some(70));
    }

    #[test]
    fn silent_ems_are_watched_separately() {
        let (mut watch, start) = (SilenceWatch::new(PATIENCE), Instant::now());
        for second in 0..10 {
            let mut silent = vec![(em("a"), sign(1, 1))];
            silent.extend((second >= 5).then(|| (em("b"), sign(1, 1))));
            assert!(watch.observe(start + Duration::from_secs(second), silent).is_empty());
        }
        let both = vec![(em("a"), sign(1, 1)), (em("b"), sign(1, 1))];
        let reaps = watch.observe(start + PATIENCE, both);
        assert_eq!(reaps, [MarkEmLost { em: em("a"), last: sign(1, 1) }]);
    }
}
