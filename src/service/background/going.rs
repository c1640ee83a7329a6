//! EMs that go: their tickets end in steps, each an operation like any other; their rows go last. What one instance has begun, any
//! other goes on with: the EM's row says what is to be done, and how far it is.
//!
//! Some EMs go at once, each for a turn of some steps. One that cannot go on waits for longer and longer until its next turn, and those
//! that can come first. The lease on this work goes to another instance only when here no step of any EM succeeds any more.

use std::{
    collections::{HashMap, HashSet},
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

use super::{
    Step, Task,
    lease::Holder,
    steps::{self, STEP_TIMEOUT},
};

/// How many EMs go at once; the others have their turn when a turn of one of these is over.
const AT_ONCE: usize = 16;

/// How many are known, and counted where they are only told.
const KNOWN_MAX: i64 = 1000;

/// How many steps one EM takes in a turn.
const STEPS_PER_TURN: usize = 32;

/// How long one that could not go on waits for its next turn at first, and at most.
const STUCK_FIRST: Duration = Duration::from_secs(1);
const STUCK_MAX: Duration = Duration::from_secs(10);

/// Ends the tickets of EMs that go.
#[derive(Debug)]
pub struct Going {
    committer: Committer,
    holder: Holder,
    left: Gauge,
    turns: Turns,
    under_way: JoinSet<Turn>,
    progress: Progress,
}

/// How the turn of an EM ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// It is gone; or somebody else goes on.
    Done,
    /// Others have theirs, before it goes on.
    Over,
    /// It could not go on, after so many steps.
    Stuck(usize),
}

impl Going {
    /// Tells in `left` how many are left.
    pub fn new(committer: Committer, holder: Holder, left: Gauge) -> Self {
        let (turns, under_way, progress) = (Turns::default(), JoinSet::new(), Progress::new());
        Self { committer, holder, left, turns, under_way, progress }
    }

    fn begin(&mut self, em: EmInstance) {
        let turn = end_tickets(self.committer.clone(), em.clone(), self.holder.clone(), self.progress.steps.clone());
        let id = self.under_way.spawn(turn).id();
        self.turns.begun(id, em);
    }

    /// Notes how a turn ended; answers whose it was if that has more to do at once.
    fn note(&mut self, ended: Result<(task::Id, Turn), task::JoinError>) -> Option<EmInstance> {
        let (id, turn) = ended.unwrap_or_else(|error| (error.id(), Turn::Stuck(0)));
        if matches!(turn, Turn::Stuck(_)) && self.progress.is_none() {
            // Another instance may do better.
            self.holder.hand_over();
        }
        self.turns.ended(id, turn, Instant::now()).filter(|_| turn == Turn::Over)
    }
}

impl Task for Going {
    const NAME: &'static str = "em_goes";
    const PERIOD: Duration = Duration::from_millis(500);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        while let Some(ended) = self.under_way.try_join_next_with_id() {
            drop(self.note(ended));
        }
        let going = answered_soon(em_resource::going(session.get().await?, KNOWN_MAX)).await?;
        self.left.set(i64::try_from(going.len()).unwrap_or(i64::MAX));
        if going.is_empty() || !self.holder.holds() {
            self.progress = Progress::new();
            return Ok(Step::Done);
        }
        let (mut next, until) = (self.turns.look(going), Instant::now() + Self::PERIOD);
        loop {
            for em in self.turns.take(&mut next, Instant::now()) {
                self.begin(em);
            }
            // Others may have begun to go meanwhile.
            match timeout_at(until, self.under_way.join_next_with_id()).await {
                Ok(Some(ended)) => next.extend(self.note(ended)),
                Ok(None) => return Ok(Step::Done),
                Err(_) => return Ok(Step::More),
            }
        }
    }
}

/// Ends tickets of an EM, step after step for a while, as long as this instance does so for all.
async fn end_tickets(committer: Committer, em: EmInstance, holder: Holder, steps: Arc<AtomicU64>) -> Turn {
    let step = Operation::EndTickets(em);
    for done in 0..STEPS_PER_TURN {
        if !holder.holds() {
            return Turn::Done;
        }
        match steps::carry_out(&committer, &step).await {
            Ok(outcome) => {
                steps.fetch_add(1, Ordering::Relaxed);
                if !matches!(outcome, Outcome::Stepped { more: true, .. }) {
                    return Turn::Done;
                }
            }
            Err(error) => {
                let (em, error): (_, &dyn std::error::Error) = (step.em(), &error);
                tracing::warn!(%em, error, "the tickets of an EM that goes cannot end yet");
                return Turn::Stuck(done);
            }
        }
    }
    Turn::Over
}

/// Whether any step succeeds.
#[derive(Debug)]
struct Progress {
    /// How many have.
    steps: Arc<AtomicU64>,
    /// How many that were when it was last looked, and since when there were no more.
    seen: (u64, Instant),
}

impl Progress {
    fn new() -> Self {
        Self { steps: Arc::default(), seen: (0, Instant::now()) }
    }

    /// Whether none has for as long as one is tried; counts from here on if so.
    fn is_none(&mut self) -> bool {
        let (now, steps) = (Instant::now(), self.steps.load(Ordering::Relaxed));
        let is_none = steps == self.seen.0 && now.duration_since(self.seen.1) >= STEP_TIMEOUT;
        if is_none || steps != self.seen.0 {
            self.seen = (steps, now);
        }
        is_none
    }
}

/// Whose turn it is.
#[derive(Debug, Default)]
struct Turns {
    under_way: HashMap<task::Id, EmInstance>,
    /// Of EMs that go, and had a turn: as many as are known.
    had: HashMap<EmInstance, Had>,
    /// How many turns there were.
    count: u64,
}

/// What an EM has had.
#[derive(Debug, Clone, Copy)]
struct Had {
    /// In which turn it had its last one.
    last: u64,
    /// In how many turns, one after another, it could not go on, since any step of it succeeded; and when it is tried again.
    stuck: u32,
    not_before: Instant,
}

impl Turns {
    /// Those of these EMs, which are all that go, that have no turn just now.
    fn look(&mut self, going: Vec<EmInstance>) -> Vec<EmInstance> {
        let under_way: HashSet<&EmInstance> = self.under_way.values().collect();
        let next: Vec<EmInstance> = going.into_iter().filter(|em| !under_way.contains(em)).collect();
        let known: HashSet<&EmInstance> = next.iter().chain(under_way).collect();
        self.had.retain(|em, _| known.contains(em));
        next
    }

    /// Takes those whose turn comes now from `next`: first those that could go on, and of these who has waited longest.
    fn take(&self, next: &mut Vec<EmInstance>, now: Instant) -> Vec<EmInstance> {
        let room = AT_ONCE.saturating_sub(self.under_way.len());
        let order = |em: &EmInstance| self.had.get(em).map_or((0, 0), |had| (had.stuck, had.last));
        let is_ready = |em: &EmInstance| self.had.get(em).is_none_or(|had| had.not_before <= now);
        next.sort_by_key(order);
        let mut taken = 0;
        let take = |em: &mut EmInstance| {
            let takes = taken < room && is_ready(em);
            taken += usize::from(takes);
            takes
        };
        next.extract_if(.., take).collect()
    }

    fn begun(&mut self, id: task::Id, em: EmInstance) {
        self.under_way.insert(id, em);
    }

    /// Answers whose turn it was.
    fn ended(&mut self, id: task::Id, turn: Turn, now: Instant) -> Option<EmInstance> {
        let em = self.under_way.remove(&id)?;
        self.count += 1;
        let before = match turn {
            Turn::Stuck(0) => self.had.get(&em).map_or(0, |had| had.stuck),
            _ => 0,
        };
        let (stuck, not_before) = match turn {
            Turn::Done | Turn::Over => (0, now),
            Turn::Stuck(_) => (before + 1, now + (STUCK_FIRST * (1 << before.min(5))).min(STUCK_MAX)),
        };
        self.had.insert(em.clone(), Had { last: self.count, stuck, not_before });
        Some(em)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ems(count: usize) -> Vec<EmInstance> {
        (0..count).map(|n| EmInstance::parse("em", "ecm", &format!("host{n:03}")).unwrap()).collect()
    }

    /// Begins the turns that come now, and answers whose they are.
    fn begin(turns: &mut Turns, going: &[EmInstance], now: Instant) -> Vec<(task::Id, EmInstance)> {
        let mut next = turns.look(going.to_vec());
        let begun = turns.take(&mut next, now).into_iter().map(|em| (tokio::spawn(async {}).id(), em));
        let begun: Vec<_> = begun.collect();
        begun.iter().for_each(|(id, em)| turns.begun(*id, em.clone()));
        begun
    }

    #[tokio::test]
    async fn each_em_that_goes_has_its_turn() {
        let (mut turns, going, now) = (Turns::default(), ems(AT_ONCE + 4), Instant::now());
        let first = begin(&mut turns, &going, now);
        assert_eq!(first.iter().map(|(_, em)| em).collect::<Vec<_>>(), going[..AT_ONCE].iter().collect::<Vec<_>>());
        assert!(begin(&mut turns, &going, now).is_empty(), "there is no room");
        for (id, _) in &first[..6] {
            assert!(turns.ended(*id, Turn::Over, now).is_some());
        }
        // Those that had none, and then those whose turn was over first.
        let next: Vec<_> = begin(&mut turns, &going, now).into_iter().map(|(_, em)| em).collect();
        assert_eq!(next, [&going[AT_ONCE..], &going[..2]].concat());
    }

    #[tokio::test]
    async fn one_that_cannot_go_on_waits_longer_and_longer_behind_those_that_can() {
        let (mut turns, going, mut now) = (Turns::default(), ems(2 * AT_ONCE), Instant::now());
        for (id, _) in begin(&mut turns, &going[..AT_ONCE], now) {
            drop(turns.ended(id, Turn::Stuck(0), now));
        }
        assert!(begin(&mut turns, &going[..AT_ONCE], now).is_empty(), "they wait");
        now += STUCK_FIRST;
        let next: Vec<_> = begin(&mut turns, &going, now).into_iter().map(|(_, em)| em).collect();
        assert_eq!(next, going[AT_ONCE..], "those that can come first");
        let ids: Vec<_> = turns.under_way.keys().copied().collect();
        ids.into_iter().for_each(|id| drop(turns.ended(id, Turn::Over, now)));
        // Nobody else is there any more: they are tried again, and are waited for no longer than at most.
        for wait in [2, 4, 8, 10, 10, 10] {
            let tried = begin(&mut turns, &going[..AT_ONCE], now);
            assert_eq!(tried.len(), AT_ONCE);
            tried.iter().for_each(|(id, _)| drop(turns.ended(*id, Turn::Stuck(0), now)));
            assert!(begin(&mut turns, &going[..AT_ONCE], now + Duration::from_millis(wait * 1000 - 1)).is_empty());
            now += Duration::from_secs(wait);
        }
        assert_eq!(turns.had.len(), AT_ONCE, "those that are gone are forgotten");
        // Some steps of one succeed before it is stuck again: what was before is over.
        let tried = begin(&mut turns, &going[..AT_ONCE], now);
        tried.iter().for_each(|(id, _)| drop(turns.ended(*id, Turn::Stuck(7), now)));
        assert!(begin(&mut turns, &going[..AT_ONCE], now).is_empty());
        assert_eq!(begin(&mut turns, &going[..AT_ONCE], now + STUCK_FIRST).len(), AT_ONCE);
    }

    #[tokio::test]
    async fn the_lease_is_kept_while_any_step_succeeds() {
        let mut progress = Progress::new();
        assert!(!progress.is_none(), "not at once");
        progress.seen.1 -= STEP_TIMEOUT;
        progress.steps.fetch_add(1, Ordering::Relaxed);
        assert!(!progress.is_none(), "one has");
        progress.seen.1 -= STEP_TIMEOUT;
        assert!(progress.is_none());
        assert!(!progress.is_none(), "another has it now, or this one tries as long again");
    }
}
