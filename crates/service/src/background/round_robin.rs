//! Round robin among EMs with background work: a bounded number of EMs have a turn at once.
//!
//! An EM whose step fails, mostly because its key is contended, waits with exponential back-off. EMs that can progress come
//! first.
//!
//! Never: runs the work itself; the task does.
//! Callers: `unregister` and `lost_ems`.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::Duration,
};

use tokio::{task, time::Instant};

use rm_model::em::EmInstance;

/// Initial and maximum back-off of an EM whose step failed.
const STUCK_FIRST: Duration = Duration::from_secs(1);
const STUCK_MAX: Duration = Duration::from_secs(10);

/// How the turn of an EM ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TurnEnd {
    /// No work is left, or another instance continues.
    Done,
    /// Work is left; other EMs come first.
    Over,
    /// Some steps succeeded, and then one failed.
    Halted,
    /// The first step failed.
    Stuck,
}

/// Scheduler of the turns.
#[derive(Debug)]
pub struct RoundRobin {
    /// Maximum number of EMs in a turn at once.
    at_once: usize,
    under_way: HashMap<task::Id, EmInstance>,
    /// EMs that have had a turn and still have work.
    had: HashMap<EmInstance, TurnRecord>,
    /// Number of turns so far.
    count: u64,
    /// EMs in order of their next turn: those whose last step succeeded, and after them those whose last step failed.
    able: VecDeque<EmInstance>,
    stuck: VecDeque<EmInstance>,
}

/// Record of an EM's last turn.
#[derive(Debug, Clone, Copy)]
struct TurnRecord {
    /// Number of its last turn.
    last: u64,
    /// Number of consecutive turns without success, and the end of the back-off.
    stuck: u32,
    not_before: Instant,
}

impl RoundRobin {
    /// Creates a scheduler for `at_once` concurrent turns.
    pub fn new(at_once: usize) -> Self {
        let (under_way, had, able, stuck) = (HashMap::new(), HashMap::new(), VecDeque::new(), VecDeque::new());
        Self { at_once, under_way, had, count: 0, able, stuck }
    }

    /// Sets the EMs with work. EMs outside a turn and a back-off are queued: first those that can progress, the longest waiting
    /// first.
    ///
    /// Sorts here, and not at each end of a turn, because there may be very many EMs.
    pub fn update(&mut self, known: Vec<EmInstance>, now: Instant) {
        let under_way: HashSet<&EmInstance> = self.under_way.values().collect();
        let all: HashSet<&EmInstance> = known.iter().chain(under_way.iter().copied()).collect();
        self.had.retain(|em, _| all.contains(em));
        let order = |em: &EmInstance| self.had.get(em).map_or((0, 0), |had| (had.stuck, had.last));
        let is_next =
            |em: &EmInstance| !under_way.contains(em) && self.had.get(em).is_none_or(|had| had.not_before <= now);
        let mut next: Vec<EmInstance> = known.into_iter().filter(is_next).collect();
        next.sort_by_cached_key(order);
        let able = next.partition_point(|em| order(em).0 == 0);
        self.stuck = next.split_off(able).into();
        self.able = next.into();
    }

    /// Removes and returns the EMs whose turn begins now.
    pub fn take(&mut self) -> Vec<EmInstance> {
        let room = self.at_once.saturating_sub(self.under_way.len());
        (0..room).map_while(|_| self.able.pop_front().or_else(|| self.stuck.pop_front())).collect()
    }

    /// Records that the turn of an EM has begun in the task `id`.
    pub fn begun(&mut self, id: task::Id, em: EmInstance) {
        self.under_way.insert(id, em);
    }

    /// Records the end of the turn in the task `id`. An EM with work left is queued again.
    pub fn ended(&mut self, id: task::Id, turn: TurnEnd, now: Instant) {
        let Some(em) = self.under_way.remove(&id) else { return };
        self.count += 1;
        let before = self.had.get(&em).map_or(0, |had| had.stuck);
        let (stuck, not_before) = match turn {
            TurnEnd::Done | TurnEnd::Over => (0, now),
            TurnEnd::Halted => (1, now + STUCK_FIRST),
            TurnEnd::Stuck => (before + 1, now + (STUCK_FIRST * (1 << before.min(5))).min(STUCK_MAX)),
        };
        self.had.insert(em.clone(), TurnRecord { last: self.count, stuck, not_before });
        if turn == TurnEnd::Over {
            self.able.push_back(em);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT_ONCE: usize = 16;

    fn ems(count: usize) -> Vec<EmInstance> {
        (0..count).map(|n| EmInstance::parse("em", "ecm", &format!("host{n:05}")).unwrap()).collect()
    }

    /// Begins the turns that are due after an update, and returns their EMs.
    fn begin(turns: &mut RoundRobin, going: &[EmInstance], now: Instant) -> Vec<(task::Id, EmInstance)> {
        turns.update(going.to_vec(), now);
        follow(turns)
    }

    /// Begins the turns that are due without an update.
    fn follow(turns: &mut RoundRobin) -> Vec<(task::Id, EmInstance)> {
        let begun = turns.take().into_iter().map(|em| (tokio::spawn(async {}).id(), em));
        let begun: Vec<_> = begun.collect();
        begun.iter().for_each(|(id, em)| turns.begun(*id, em.clone()));
        begun
    }

    #[tokio::test]
    async fn round_robin_gives_each_em_a_turn() {
        let (mut turns, going, now) = (RoundRobin::new(AT_ONCE), ems(AT_ONCE + 4), Instant::now());
        let first = begin(&mut turns, &going, now);
        assert_eq!(first.iter().map(|(_, em)| em).collect::<Vec<_>>(), going[..AT_ONCE].iter().collect::<Vec<_>>());
        assert!(begin(&mut turns, &going, now).is_empty(), "no entry is free");
        for (id, _) in &first[..6] {
            turns.ended(*id, TurnEnd::Over, now);
        }
        // First the EMs without a turn, and then the EMs whose turn ended first.
        let next: Vec<_> = begin(&mut turns, &going, now).into_iter().map(|(_, em)| em).collect();
        assert_eq!(next, [&going[AT_ONCE..], &going[..2]].concat());
    }

    #[tokio::test]
    async fn round_robin_failing_em_backs_off_behind_others() {
        let (mut turns, going, mut now) = (RoundRobin::new(AT_ONCE), ems(2 * AT_ONCE), Instant::now());
        for (id, _) in begin(&mut turns, &going[..AT_ONCE], now) {
            turns.ended(id, TurnEnd::Stuck, now);
        }
        assert!(begin(&mut turns, &going[..AT_ONCE], now).is_empty(), "they wait");
        now += STUCK_FIRST;
        let next: Vec<_> = begin(&mut turns, &going, now).into_iter().map(|(_, em)| em).collect();
        assert_eq!(next, going[AT_ONCE..], "EMs without a failure come first");
        let ids: Vec<_> = turns.under_way.keys().copied().collect();
        ids.into_iter().for_each(|id| turns.ended(id, TurnEnd::Over, now));
        // No other EM has work: the failed EMs are tried again, with a bounded back-off.
        for wait in [2, 4, 8, 10, 10, 10] {
            let tried = begin(&mut turns, &going[..AT_ONCE], now);
            assert_eq!(tried.len(), AT_ONCE);
            tried.iter().for_each(|(id, _)| turns.ended(*id, TurnEnd::Stuck, now));
            assert!(begin(&mut turns, &going[..AT_ONCE], now + Duration::from_millis(wait * 1000 - 1)).is_empty());
            now += Duration::from_secs(wait);
        }
        assert_eq!(turns.had.len(), AT_ONCE, "unregistered EMs are removed");
        // A turn with some success resets the back-off.
        begin(&mut turns, &going[..AT_ONCE], now).iter().for_each(|(id, _)| turns.ended(*id, TurnEnd::Halted, now));
        assert!(begin(&mut turns, &going[..AT_ONCE], now).is_empty());
        assert_eq!(begin(&mut turns, &going[..AT_ONCE], now + STUCK_FIRST).len(), AT_ONCE);
    }

    #[tokio::test]
    async fn round_robin_succeeding_em_precedes_failed_ones() {
        let (mut turns, known, mut now) = (RoundRobin::new(2), ems(4), Instant::now());
        begin(&mut turns, &known[..2], now).iter().for_each(|(id, _)| turns.ended(*id, TurnEnd::Stuck, now));
        now += STUCK_FIRST;
        let first = begin(&mut turns, &known, now);
        assert_eq!(first.iter().map(|(_, em)| em).collect::<Vec<_>>(), [&known[2], &known[3]]);
        turns.ended(first[0].0, TurnEnd::Over, now);
        turns.ended(first[1].0, TurnEnd::Done, now);
        let next: Vec<_> = follow(&mut turns).into_iter().map(|(_, em)| em).collect();
        assert_eq!(next, [known[2].clone(), known[0].clone()]);
    }

    #[tokio::test]
    async fn round_robin_with_many_ems_sorts_once() {
        let (mut turns, known, now) = (RoundRobin::new(AT_ONCE), ems(10_000), Instant::now());
        let (mut under_way, mut order) = (VecDeque::from(begin(&mut turns, &known, now)), Vec::new());
        while let Some((id, em)) = under_way.pop_front() {
            turns.ended(id, TurnEnd::Done, now);
            order.push(em);
            under_way.extend(follow(&mut turns));
        }
        assert_eq!(order, known);
        // Sorting at each end of a turn would take minutes here.
        assert!(now.elapsed() < Duration::from_secs(10), "{:?}", now.elapsed());
    }
}
