//! Silence: an EM that used to report and is not heard of any more is given up, with its tickets.
//!
//! Whether an EM is silent is told by the database's clock; that alone is never enough to give it up, because a clock can jump, and
//! because nobody can report while the service or its database is away. So every instance also watches for itself: only an EM of
//! which it saw the same last sign, look after look without a gap, for as long as `lost_after` exceeds `silent_after`, is given up.
//! As that is at least `silent_after`, every EM had the time to report to a service that was there. The removal itself is an
//! operation like any other, judged again under the locks; so it does not matter how many instances propose it. It may take long, of an EM
//! that somebody holds, and is done beside the looks: these go on, and nobody else's watch has a gap.

use std::{collections::HashMap, time::Duration};

use tokio::{
    task::{self, JoinSet},
    time::{Instant, timeout_at},
};

use crate::{
    domain::{
        em::EmInstance,
        operation::{Operation, Outcome, Reap},
        report::LastSign,
    },
    service::{admission::Surveys, committer::Committer, heartbeat::LivenessTimeouts},
    store::{
        StoreError, em_report,
        session::{Session, answered_soon},
    },
};

use super::{
    Step, Task,
    lease::Holder,
    turns::{Turn, Turns},
};

/// How many silent EMs one statement reads.
const LOOK_PAGE: i64 = 1000;

/// Two looks further apart than this are no unbroken watch: the instance itself was away.
const GAP_MAX: Duration = Duration::from_secs(5);

/// How many EMs are given up at once.
const REAPS_MAX: usize = 64;

/// How long giving one up may wait for its locks; it has another turn later.
const REAP_TIMEOUT: Duration = Duration::from_secs(5);

/// Gives silent EMs up.
#[derive(Debug)]
pub struct Silence {
    committer: Committer,
    patience: LivenessTimeouts,
    holder: Holder,
    watch: Watch,
    turns: Turns,
    under_way: JoinSet<Turn>,
    surveys: Surveys,
    /// Number of lost connections at the last look. Another number means that the database was away between two looks.
    losses: u64,
}

impl Silence {
    /// Of EMs that are silent for longer than `patience` allows. Every instance watches; the one that holds the lease gives up. `surveys` get
    /// the silent EMs that each look finds.
    pub fn new(committer: Committer, patience: LivenessTimeouts, holder: Holder, surveys: Surveys) -> Self {
        let watch = Watch::new(patience.lost_after.saturating_sub(patience.silent_after));
        let (turns, under_way) = (Turns::new(REAPS_MAX), JoinSet::new());
        Self { committer, patience, holder, watch, turns, under_way, surveys, losses: 0 }
    }

    fn note(&mut self, ended: Result<(task::Id, Turn), task::JoinError>) {
        let (id, turn) = ended.unwrap_or_else(|error| (error.id(), Turn::Stuck));
        self.turns.ended(id, turn, Instant::now());
    }

    /// Notes those that have ended, without waiting for any.
    fn note_ended(&mut self) {
        while let Some(ended) = self.under_way.try_join_next_with_id() {
            self.note(ended);
        }
    }

    /// Gives up so many at once, until it is time for the next look or there is nothing more to do.
    async fn reap(&mut self, lost: Vec<Reap>) -> Step {
        let until = Instant::now() + Self::PERIOD;
        let mut lost: HashMap<EmInstance, Reap> = lost.into_iter().map(|reap| (reap.em.clone(), reap)).collect();
        self.turns.look(lost.keys().cloned().collect(), Instant::now());
        loop {
            for em in self.turns.take() {
                let Some(reap) = lost.remove(&em) else { continue };
                let id = self.under_way.spawn(give_up(self.committer.clone(), reap)).id();
                self.turns.begun(id, em);
            }
            match timeout_at(until, self.under_way.join_next_with_id()).await {
                Ok(Some(ended)) => self.note(ended),
                Ok(None) => return Step::Done,
                Err(_) => return Step::More,
            }
            // Those of one batch end together.
            self.note_ended();
        }
    }
}

impl Task for Silence {
    const NAME: &'static str = "silence";
    const PERIOD: Duration = Duration::from_secs(1);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        self.note_ended();
        let began = Instant::now();
        let silent = poll(session, self.patience.silent_after).await;
        session.give_back().await;
        let silent = silent.inspect_err(|_| self.watch.clear())?;
        let losses = session.losses();
        if std::mem::replace(&mut self.losses, losses) != losses {
            self.watch.clear();
        }
        self.surveys.note_silent(began, silent.iter().map(|(em, _)| em.clone()).collect());
        let lost = self.watch.observe(Instant::now(), silent);
        if !self.holder.holds() {
            return Ok(Step::Done);
        }
        Ok(self.reap(lost).await)
    }
}

async fn give_up(committer: Committer, reap: Reap) -> Turn {
    let em = reap.em.clone();
    match committer.submit_in_background(Operation::Reap(reap), Instant::now() + REAP_TIMEOUT).await {
        Ok(Outcome::Reaped(Some(ended_tickets))) => {
            tracing::warn!(%em, ended_tickets, "an EM is lost: it was silent for too long, and is unregistered");
            Turn::Done
        }
        Ok(_) => Turn::Done,
        Err(error) => {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(%em, error, "a silent EM could not be given up yet");
            Turn::Stuck
        }
    }
}

async fn poll(session: &mut Session, silent_after: Duration) -> Result<Vec<(EmInstance, LastSign)>, StoreError> {
    let (connection, mut silent) = (session.get().await?, Vec::new());
    loop {
        let after = silent.last().map(|(em, _)| em);
        let page = answered_soon(em_report::silent(&mut *connection, silent_after, after, LOOK_PAGE)).await?;
        let is_last = i64::try_from(page.len()).is_ok_and(|len| len < LOOK_PAGE);
        silent.extend(page);
        if is_last {
            return Ok(silent);
        }
    }
}

/// What one instance has seen of silent EMs, without a gap.
#[derive(Debug)]
struct Watch {
    /// How long the same has to be seen of an EM.
    patience: Duration,
    /// The last sign of each, and since when it is seen.
    seen: HashMap<EmInstance, (LastSign, Instant)>,
    last_look: Option<Instant>,
}

impl Watch {
    fn new(patience: Duration) -> Self {
        Self { patience, seen: HashMap::new(), last_look: None }
    }

    /// The look failed, or what was seen does not count any more: the watch begins anew.
    fn clear(&mut self) {
        self.seen.clear();
    }

    /// Sees, at `now`, which EMs are silent; answers with those that were for long enough.
    fn observe(&mut self, now: Instant, silent: Vec<(EmInstance, LastSign)>) -> Vec<Reap> {
        if self.last_look.is_some_and(|last| now.saturating_duration_since(last) > GAP_MAX) {
            self.clear();
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
        lost.map(|(em, (last, _))| Reap { em: em.clone(), last: *last }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::report::ReportNumber;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn em(host: &str) -> EmInstance {
        EmInstance::parse("em", "ecm", host).unwrap()
    }

    fn sign(registered: i64, sequence: i64) -> LastSign {
        LastSign { registered, reported: ReportNumber { epoch: 1, sequence } }
    }

    /// Looks each second and always sees `sign` of one EM; answers at which look it is lost.
    fn lost_at(watch: &mut Watch, start: Instant, looks: std::ops::Range<u64>, sign: LastSign) -> Option<u64> {
        looks.into_iter().find(|second| {
            let reaps = watch.observe(start + Duration::from_secs(*second), vec![(em("a"), sign)]);
            assert!(reaps.iter().all(|reap| *reap == Reap { em: em("a"), last: sign }));
            !reaps.is_empty()
        })
    }

    #[test]
    fn the_same_sign_has_to_be_seen_for_long_enough() {
        let (mut watch, start) = (Watch::new(PATIENCE), Instant::now());
        assert_eq!(lost_at(&mut watch, start, 0..100, sign(1, 1)), Some(10));
        assert_eq!(lost_at(&mut watch, start, 11..100, sign(1, 1)), Some(11), "until it is done");
    }

    #[test]
    fn any_sign_of_life_begins_the_watch_anew() {
        let (mut watch, start) = (Watch::new(PATIENCE), Instant::now());
        assert_eq!(lost_at(&mut watch, start, 0..9, sign(1, 1)), None);
        assert_eq!(lost_at(&mut watch, start, 9..18, sign(1, 2)), None, "a report");
        assert_eq!(lost_at(&mut watch, start, 18..27, sign(2, 2)), None, "a registration");
        assert!(watch.observe(start + Duration::from_secs(27), vec![]).is_empty(), "not silent for a moment");
        assert_eq!(lost_at(&mut watch, start, 28..100, sign(2, 2)), Some(38));
    }

    #[test]
    fn a_look_that_fails_begins_the_watch_anew() {
        let (mut watch, start) = (Watch::new(PATIENCE), Instant::now());
        assert_eq!(lost_at(&mut watch, start, 0..10, sign(1, 1)), None);
        watch.clear();
        assert_eq!(lost_at(&mut watch, start, 10..100, sign(1, 1)), Some(20));
    }

    #[test]
    fn a_gap_between_looks_begins_the_watch_anew() {
        let (mut watch, start) = (Watch::new(PATIENCE), Instant::now());
        assert_eq!(lost_at(&mut watch, start, 0..5, sign(1, 1)), None);
        assert_eq!(lost_at(&mut watch, start, 60..100, sign(1, 1)), Some(70));
    }

    #[test]
    fn each_em_is_watched_for_itself() {
        let (mut watch, start) = (Watch::new(PATIENCE), Instant::now());
        for second in 0..10 {
            let mut silent = vec![(em("a"), sign(1, 1))];
            silent.extend((second >= 5).then(|| (em("b"), sign(1, 1))));
            assert!(watch.observe(start + Duration::from_secs(second), silent).is_empty());
        }
        let both = vec![(em("a"), sign(1, 1)), (em("b"), sign(1, 1))];
        let reaps = watch.observe(start + PATIENCE, both);
        assert_eq!(reaps, [Reap { em: em("a"), last: sign(1, 1) }]);
    }
}
