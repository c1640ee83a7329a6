//! Who waits where in this instance, who of them sleeps, and who is woken by what.
//!
//! Whoever is told of more room wakes as many as it may be enough for, the first in line first, and tells those who are awake already to
//! look once more before they sleep. One who is awake passes that on: granted, to the next, because there may be room for him, too;
//! not granted, to a few behind him, who may need something else.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    ops::Bound,
    sync::Arc,
};

use tokio::sync::Notify;

use crate::{
    domain::{
        line::{MUCH, QueuePosition},
        resource::Dimension,
    },
    store::waiting::{Freed, SpotKey},
};

use super::wake::Wake;

/// How many waiters at a spot are woken if nobody knows how much room there is; each that is granted wakes another.
const WAKE_MAX: usize = 16;

/// How many are woken at most by the tickets that ended at a spot: about as many as one commit can serve.
const SERVED_MAX: u32 = 512;

/// How many others look at each poll, in turn.
const TURN_MAX: usize = 64;

/// How many who sleep behind somebody are asked whether they need something else.
const NEAR_MAX: usize = 64;

/// How many pieces of news are remembered for those who are just about to stand in line.
const NEWS_MAX: usize = 4096;

/// One of the sets in which waiters stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Queue {
    At(SpotKey),
    /// Those for whom any EM will do.
    Anywhere,
}

/// More room somewhere, and up to whom everybody has been woken by it; `None` if nobody was left to be woken.
#[derive(Debug)]
struct News {
    queue: Queue,
    up_to: Option<QueuePosition>,
}

/// Who waits where.
#[derive(Debug, Default)]
pub(super) struct Index {
    /// How many callers wait, those that have no position yet included.
    pub callers: usize,
    waiters: BTreeMap<QueuePosition, Waiter>,
    at: HashMap<SpotKey, BTreeSet<QueuePosition>>,
    anywhere: BTreeSet<QueuePosition>,
    /// The last of those whose turn it was to look again although nothing is known to have changed for them.
    turn: Option<QueuePosition>,
    news: VecDeque<News>,
    /// How many pieces of news there have been.
    news_count: u64,
}

#[derive(Debug)]
struct Waiter {
    sleeper: Sleeper,
    keys: Vec<SpotKey>,
    state: State,
    /// Whether he has gone to the committer since he last slept: what he is told meanwhile he may have met there.
    tries: bool,
}

/// Somebody who is to be woken, and what he waits for.
#[derive(Debug, Clone, Default)]
pub(super) struct Sleeper {
    /// Wakes him.
    pub wake: Arc<Notify>,
    /// Whether any EM will do.
    pub any_em: bool,
    /// The dimensions of which he needs anything.
    pub needs: Arc<[Dimension]>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Asleep,
    /// What it was woken by and has not yet been told, or what came when it was awake already.
    Awake(Option<Wake>),
}

impl Index {
    /// Somebody stands in line, or is to be woken elsewhere than before, since a commit that began after the news number `since`. What was
    /// told meanwhile may have missed him: then he has to look once more before he sleeps.
    pub fn insert(
        &mut self,
        position: QueuePosition,
        sleeper: Sleeper,
        keys: impl IntoIterator<Item = SpotKey>,
        since: u64,
    ) {
        let any_em = sleeper.any_em;
        let before = self.take(position);
        let keys: Vec<SpotKey> = keys.into_iter().collect();
        for key in &keys {
            self.at.entry(*key).or_default().insert(position);
        }
        if any_em {
            self.anywhere.insert(position);
        }
        let again = match before {
            Some(State::Awake(again)) => again,
            _ => None,
        };
        let missed = self.has_missed(position, &keys, any_em, since).then_some(Wake::NEWS);
        let again = missed.map(|wake| wake.and(again)).or(again);
        self.waiters.insert(position, Waiter { sleeper, keys, state: State::Awake(again), tries: false });
    }

    /// How many pieces of news there have been until now.
    pub fn news_count(&self) -> u64 {
        self.news_count
    }

    fn has_missed(&self, position: QueuePosition, keys: &[SpotKey], any_em: bool, since: u64) -> bool {
        let count = usize::try_from(self.news_count.saturating_sub(since)).unwrap_or(usize::MAX);
        let concerns = |news: &News| {
            let is_there = match news.queue {
                Queue::At(key) => keys.contains(&key),
                Queue::Anywhere => any_em,
            };
            is_there && news.up_to.is_none_or(|up_to| position < up_to)
        };
        count > self.news.len() || self.news.iter().rev().take(count).any(concerns)
    }

    /// Somebody leaves the line.
    pub fn remove(&mut self, position: QueuePosition) {
        self.take(position);
    }

    fn take(&mut self, position: QueuePosition) -> Option<State> {
        let waiter = self.waiters.remove(&position)?;
        for key in waiter.keys {
            if let Some(positions) = self.at.get_mut(&key) {
                positions.remove(&position);
                if positions.is_empty() {
                    self.at.remove(&key);
                }
            }
        }
        self.anywhere.remove(&position);
        Some(waiter.state)
    }

    /// Whether anybody waits for whom any EM will do.
    pub fn is_anywhere_empty(&self) -> bool {
        self.anywhere.is_empty()
    }

    /// Somebody is going to sleep, unless there is something that he has not been told yet.
    pub fn rest(&mut self, position: QueuePosition) -> Option<Wake> {
        let waiter = self.waiters.get_mut(&position)?;
        waiter.tries = false;
        if let State::Awake(Some(wake)) = waiter.state {
            waiter.state = State::Awake(None);
            return Some(wake);
        }
        waiter.state = State::Asleep;
        None
    }

    /// Somebody goes to the committer.
    pub fn tries(&mut self, position: QueuePosition) {
        if let Some(waiter) = self.waiters.get_mut(&position) {
            waiter.tries = true;
        }
    }

    /// What somebody who has been woken was woken by.
    pub fn woken_by(&mut self, position: QueuePosition) -> Wake {
        match self.waiters.get_mut(&position).map(|waiter| &mut waiter.state) {
            Some(State::Awake(told)) => told.take().unwrap_or(Wake::NEWS),
            _ => Wake::NEWS,
        }
    }

    fn wake(&mut self, position: QueuePosition, wake: Wake) {
        let Some(waiter) = self.waiters.get_mut(&position) else { return };
        match waiter.state {
            State::Asleep => {
                waiter.state = State::Awake(Some(wake));
                waiter.sleeper.wake.notify_one();
            }
            State::Awake(told) => waiter.state = State::Awake(Some(wake.and(told))),
        }
    }

    fn state(&self, position: QueuePosition) -> Option<State> {
        self.waiters.get(&position).map(|waiter| waiter.state)
    }

    fn is_asleep(&self, position: QueuePosition) -> bool {
        self.state(position) == Some(State::Asleep)
    }

    /// Who is told of room for `count` in a queue: so many who are not yet told of any, and those before them who are just being judged
    /// by what may be older.
    fn first(&mut self, queue: Queue, count: usize) -> Vec<QueuePosition> {
        let (mut first, mut told) = (Vec::new(), 0);
        let positions = match queue {
            Queue::At(key) => self.at.get(&key),
            Queue::Anywhere => Some(&self.anywhere),
        };
        for position in positions.into_iter().flatten() {
            if told == count {
                break;
            }
            match self.waiters.get(position).map(|waiter| (waiter.state, waiter.tries)) {
                // He was told of other room, and has yet to be judged by what is newer than both.
                Some((State::Awake(Some(wake)), _)) if wake.is_news && !wake.is_poll => continue,
                Some((State::Awake(None), false)) => {}
                _ => told += 1,
            }
            first.push(*position);
        }
        let up_to = first.last().copied().filter(|_| told == count);
        if self.callers > 0 {
            self.news_count += 1;
            self.news.push_back(News { queue, up_to });
            if self.news.len() > NEWS_MAX {
                self.news.pop_front();
            }
        }
        first
    }

    /// A ticket is about to end at a spot: wakes the first who sleeps there.
    pub fn room_comes(&mut self, key: SpotKey) {
        let mut near = self.at.get(&key).into_iter().flatten().take(NEAR_MAX);
        if let Some(first) = near.find(|position| self.is_asleep(**position)).copied() {
            self.wake(first, Wake::COMING);
        }
    }

    /// What a commit leaves, which this instance has seen: those who were granted have left the line, and where it made more room than
    /// they took, others are woken. If others wait elsewhere, there may be more than was seen.
    pub fn committed(&mut self, mut freed: Freed, granted: impl Iterator<Item = QueuePosition>, others_wait: bool) {
        for position in granted {
            for key in self.waiters.get(&position).into_iter().flat_map(|waiter| &waiter.keys) {
                if let Some(requests) = freed.spots.get_mut(key).filter(|requests| **requests != MUCH) {
                    *requests = requests.saturating_sub(1);
                }
            }
            self.wake_next(position, Wake::GRANT, |_| true);
            self.remove(position);
        }
        for position in self.first_at(&freed) {
            // With him, this instance has seen all who stand before him, too.
            let tries = self.waiters.get(&position).is_some_and(|waiter| waiter.tries);
            self.wake(position, if tries && !others_wait { Wake::SEEN } else { Wake::NEWS });
        }
    }

    /// Wakes the first waiters where there is more room, as many as there may be room for.
    pub fn wake_at(&mut self, freed: &Freed) {
        for position in self.first_at(freed) {
            self.wake(position, Wake::NEWS);
        }
    }

    /// Wakes the first of those for whom any EM will do.
    pub fn wake_anywhere(&mut self) {
        for position in self.first(Queue::Anywhere, WAKE_MAX) {
            self.wake(position, Wake::NEWS);
        }
    }

    fn first_at(&mut self, freed: &Freed) -> BTreeSet<QueuePosition> {
        let enough = |requests: u32| match requests {
            MUCH => WAKE_MAX,
            requests => requests.min(SERVED_MAX) as usize,
        };
        let mut woken = BTreeSet::new();
        for (key, requests) in &freed.spots {
            woken.extend(self.first(Queue::At(*key), enough(*requests)));
        }
        if !freed.ems.is_empty() {
            let requests = freed.spots.values().copied().max().unwrap_or(MUCH);
            woken.extend(self.first(Queue::Anywhere, enough(requests).max(freed.ems.len().min(WAKE_MAX))));
        }
        woken
    }

    /// Wakes the first waiters everywhere, and some of the others, all of them in turn.
    pub fn wake_some(&mut self, count: usize, wake: Wake) {
        let queues: Vec<Queue> = self.at.keys().map(|key| Queue::At(*key)).chain([Queue::Anywhere]).collect();
        let mut some = BTreeSet::new();
        for queue in queues {
            some.extend(self.first(queue, count));
        }
        for position in some {
            self.wake(position, wake);
        }
        let others = |from: Bound<QueuePosition>| self.waiters.range((from, Bound::Unbounded)).map(|(other, _)| *other);
        let turn: Vec<_> = others(self.turn.map_or(Bound::Unbounded, Bound::Excluded)).take(TURN_MAX).collect();
        self.turn = turn.last().copied().filter(|_| turn.len() == TURN_MAX);
        for position in turn.into_iter().filter(|position| self.is_asleep(*position)).collect::<Vec<_>>() {
            self.wake(position, Wake::TURN);
        }
    }

    /// Wakes the first waiters everywhere: what was told while nobody listened is not known.
    pub fn wake_first(&mut self) {
        self.wake_some(WAKE_MAX, Wake::NEWS);
    }

    /// There was no room for somebody who was woken; there may be for others, who need something else: whoever needs the same behind him
    /// would find less.
    pub fn pass_on(&mut self, position: QueuePosition, wake: Wake) {
        let needs = self.waiters.get(&position).map(|waiter| waiter.sleeper.needs.clone());
        if let (Some(wake), Some(needs)) = (wake.passed(), needs) {
            self.wake_next(position, wake, |other| other.sleeper.needs != needs);
        }
    }

    /// Wakes the next one who sleeps behind `position`, wherever it stands, of those who stand near; at spots, one whom it `concerns`.
    fn wake_next(&mut self, position: QueuePosition, wake: Wake, concerns: impl Fn(&Waiter) -> bool) {
        let Some(waiter) = self.waiters.get(&position) else { return };
        let behind = |positions: &BTreeSet<QueuePosition>, everybody: bool| {
            let behind = positions.range((Bound::Excluded(position), Bound::Unbounded));
            let mut asleep = behind.filter(|other| self.is_asleep(**other)).take(NEAR_MAX);
            asleep.find(|other| everybody || self.waiters.get(other).is_some_and(&concerns)).copied()
        };
        let anywhere = waiter.sleeper.any_em.then(|| behind(&self.anywhere, true));
        let queues = waiter.keys.iter().filter_map(|key| self.at.get(key));
        let next: BTreeSet<_> = queues.map(|queue| behind(queue, false)).chain(anywhere).flatten().collect();
        for position in next {
            self.wake(position, wake);
        }
    }
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;
