//! Index of the waiters of this instance, by ticket id, by wait key and by position.
//!
//! A freed event names a wait key and about how many requests now fit. The index wakes that many parked waiters, from the head
//! of the queue; at an EM, also waiters that accept any EM. An awake waiter gets a new wake reason and checks again before it
//! parks. A granted waiter wakes the next one, because capacity may remain. A refused waiter wakes a few later ones, which may
//! need other dimensions, unless enough waiters for the counted capacity are awake.
//!
//! Invariant: parked waiters are in sets of their own, so the next one is found regardless of the number of awake ones.
//! Never: decides a grant; notifies a waiter itself: [`WaiterIndex::take_woken`] returns the handles of those to notify.
//! Caller: `rm_service::waiting`.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    mem,
    ops::Bound,
};

use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    visits::visit,
    wait_queue::{MUCH, QueuePosition, RerankedRequest, WaitKeyHash},
};

use crate::wake_reason::{Needs, WakeReason};

/// Maximum number of waiters to wake at a key if the freed capacity is unknown. Each granted waiter wakes another.
const WAKE_MAX: usize = 16;

/// Maximum number of waiters to wake by one freed event: about as many as one commit can grant.
const SERVED_MAX: u32 = 512;

/// Maximum number of waiters besides the queue heads that check at one poll, in rotation.
const TURN_MAX: usize = 16;

/// Maximum number of later idle waiters to examine for other dimensions. With as many awake waiters at a key, an expected
/// release wakes no other.
const NEAR_MAX: usize = 64;

/// Maximum number of wait keys whose first waiter checks at one poll, in rotation.
const POLLED_MAX: usize = 64;

/// Maximum number of stored freed events, for requests that are about to enter the queue.
const NEWS_MAX: usize = 4096;

/// Freed capacity of one commit or notification.
#[derive(Debug, Clone, Default)]
pub struct FreedCapacity {
    /// Wait keys, each with about how many requests freed capacity there; [`MUCH`] if unknown.
    pub wait_keys: BTreeMap<WaitKeyHash, u32>,
    /// The EMs among the wait keys.
    pub ems: BTreeSet<WaitKeyHash>,
}

/// Location of freed capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WaiterSet {
    /// A scope or an external queue.
    At(WaitKeyHash),
    /// An EM; also concerns waiters that accept any EM.
    Em(WaitKeyHash),
    /// Any EM: concerns waiters that accept any EM.
    Anywhere,
    /// Unknown: concerns all waiters.
    Everywhere,
    /// No capacity: the position under this ticket id changed or ended.
    Ticket(Uuid),
}

/// Freed event. All concerned waiters up to `up_to` have been woken; `None` if all of them have been.
#[derive(Debug)]
struct FreedEvent {
    queue: WaiterSet,
    up_to: Option<QueuePosition>,
    /// Whether a waiter at the key itself has been woken. The others accept any EM, and may not match this one.
    has_local: bool,
}

/// The waiters of one wait key, or all waiters that accept any EM. Each is `idle`, `hinted` or `assigned`.
#[derive(Debug, Default)]
struct Waiters {
    asleep: BTreeSet<QueuePosition>,
    /// Waiters that are parked, or that check and then park.
    idle: BTreeSet<QueuePosition>,
    /// Waiters that check next without counted capacity.
    hinted: BTreeSet<QueuePosition>,
    /// Waiters that check next with counted capacity: further capacity wakes others.
    assigned: BTreeSet<QueuePosition>,
    /// Capacity that was freed and not granted since. Reset when the last awake waiter parks: all that may fit have then
    /// checked.
    room: Room,
    /// Wake-up of the waiters that found nothing and woke no other, because enough were awake. The last awake waiter forwards it.
    unpassed: Option<ForwardedWake>,
}

/// Freed capacity that was not granted since, as a number of requests.
#[derive(Debug, Default)]
struct Room {
    /// Capacity by EM, for waiters that accept any EM: a grant uses the capacity of its own EM only.
    by_em: BTreeMap<WaitKeyHash, u64>,
    by_em_sum: u64,
    /// Capacity without a known EM.
    other: u64,
}

impl Room {
    fn sum(&self) -> u64 {
        self.by_em_sum + self.other
    }

    fn add(&mut self, em: Option<WaitKeyHash>, requests: u32) {
        let requests = u64::from(requests);
        match em {
            Some(em) => {
                *self.by_em.entry(em).or_default() += requests;
                self.by_em_sum += requests;
            }
            None => self.other += requests,
        }
    }

    /// Subtracts the capacity of one request.
    fn take(&mut self, em: WaitKeyHash) {
        match self.by_em.get_mut(&em) {
            Some(requests) => {
                *requests -= 1;
                self.by_em_sum -= 1;
                if *requests == 0 {
                    self.by_em.remove(&em);
                }
            }
            None => self.other = self.other.saturating_sub(1),
        }
    }
}

/// A wake-up that an unsuccessful waiter forwards.
#[derive(Debug, Clone, Copy)]
struct ForwardedWake {
    /// Position behind which the next waiter is.
    behind: QueuePosition,
    wake: WakeReason,
    /// Whether counted capacity is left. Without, the grants may have left some dimensions of it, for waiters with other needs.
    is_counted: bool,
}

impl Waiters {
    /// Adds a waiter, or moves it between the sets.
    fn set(&mut self, position: QueuePosition, state: WaiterState) {
        let (is_assigned, is_idle) = match state {
            WaiterState::Asleep | WaiterState::Awake(None) => (false, true),
            WaiterState::Awake(Some(wake)) => (wake.is_room, false),
        };
        for (set, is_in) in [
            (&mut self.asleep, state == WaiterState::Asleep),
            (&mut self.idle, is_idle),
            (&mut self.hinted, !is_idle && !is_assigned),
            (&mut self.assigned, is_assigned),
        ] {
            if is_in {
                set.insert(position);
            } else {
                set.remove(&position);
            }
        }
        self.settle();
    }

    fn remove(&mut self, position: QueuePosition) {
        for set in [&mut self.asleep, &mut self.idle, &mut self.hinted, &mut self.assigned] {
            set.remove(&position);
        }
    }

    fn settle(&mut self) {
        if self.awake() == 0 {
            self.room = Room::default();
            self.unpassed = None;
        }
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn len(&self) -> usize {
        self.idle.len() + self.hinted.len() + self.assigned.len()
    }

    fn awake(&self) -> usize {
        self.len() - self.asleep.len()
    }

    fn has(&self, position: QueuePosition) -> bool {
        [&self.idle, &self.hinted, &self.assigned].iter().any(|set| set.contains(&position))
    }

    /// Returns whether fewer than [`WAKE_MAX`] waiters precede a position.
    fn are_few_before(&self, position: QueuePosition) -> bool {
        let before =
            [&self.idle, &self.hinted, &self.assigned].into_iter().flat_map(|set| set.range(..position).take(WAKE_MAX));
        before.inspect(|_| visit()).take(WAKE_MAX).count() < WAKE_MAX
    }

    /// Returns the next waiter after `after` without assigned capacity.
    fn next_unassigned(&self, after: Option<QueuePosition>) -> Option<QueuePosition> {
        let behind = (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let next = [&self.idle, &self.hinted].map(|set| set.range(behind).next());
        next.into_iter().inspect(|_| visit()).flatten().min().copied()
    }

    /// Forwards a wake-up behind a position. Returns what to forward now; `None` if enough waiters are awake for the counted
    /// capacity.
    fn forward(&mut self, behind: QueuePosition, wake: WakeReason) -> Option<ForwardedWake> {
        let before = self.unpassed.take();
        let room = self.room.sum();
        let forwarded = ForwardedWake {
            behind: before.map_or(behind, |before| before.behind.min(behind)),
            wake: wake.and(before.map(|before| before.wake)),
            is_counted: room > 0 || wake.is_poll,
        };
        if wake.is_poll || self.awake() as u64 <= room.max(1) {
            return Some(forwarded);
        }
        self.unpassed = Some(forwarded);
        None
    }

    /// Returns the wake-up that the last awake waiter forwards before it parks, if there is one.
    fn take_unpassed(&mut self) -> Option<ForwardedWake> {
        if self.awake() == 1 { self.unpassed.take() } else { None }
    }
}

/// The waiters of one instance. `H` is the handle by which a waiter is notified.
#[derive(Debug)]
pub struct WaiterIndex<H> {
    /// Number of waiting requests, including those without a position.
    pub callers: usize,
    /// Waiters by the ticket that a grant creates. The sets have them by position.
    waiters: BTreeMap<Uuid, Waiter<H>>,
    at: BTreeMap<WaitKeyHash, Waiters>,
    anywhere: Waiters,
    /// The last waiter that was polled in rotation.
    turn: Option<Uuid>,
    /// The last wait key whose first waiter was polled.
    polled: Option<WaitKeyHash>,
    news: VecDeque<FreedEvent>,
    /// Sequence number of the last freed event.
    news_count: u64,
    /// Handles of parked waiters that were woken and are not notified yet.
    woken: Vec<H>,
}

impl<H> Default for WaiterIndex<H> {
    fn default() -> Self {
        Self {
            callers: 0,
            waiters: BTreeMap::new(),
            at: BTreeMap::new(),
            anywhere: Waiters::default(),
            turn: None,
            polled: None,
            news: VecDeque::new(),
            news_count: 0,
            woken: Vec::new(),
        }
    }
}

#[derive(Debug)]
struct Waiter<H> {
    position: QueuePosition,
    sleeper: WaiterProfile<H>,
    keys: Vec<WaitKeyHash>,
    state: WaiterState,
    /// Time of the decision that stored the position.
    decided_at: OffsetDateTime,
    /// Whether the waiter was submitted since it last parked. The submission may have met later events.
    tries: bool,
    /// Former keys, at which the waiter is until it parks: its wake-up may have come from there, and must be forwarded. `None`
    /// means those that accept any EM.
    leaving: Vec<Option<WaitKeyHash>>,
}

impl<H> Waiter<H> {
    /// Returns the keys at which the waiter is, former ones last; `None` means those that accept any EM.
    fn all_keys(&self) -> Vec<Option<WaitKeyHash>> {
        let keys = self.keys.iter().copied().map(Some).chain(self.sleeper.any_em.then_some(None));
        keys.chain(self.leaving.iter().copied()).collect()
    }

    /// Whether the waiter checks now, by a state that may be older than the last event, and was not submitted.
    fn is_checking(&self) -> bool {
        self.state == WaiterState::Awake(None) && !self.tries
    }
}

/// Handle of a waiter, with its requirements.
#[derive(Debug, Clone, Default)]
pub struct WaiterProfile<H> {
    /// Handle by which the waiter is notified.
    pub wake: H,
    /// Whether the waiter accepts any EM.
    pub any_em: bool,
    /// Dimensions that the waiter needs.
    pub needs: Needs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WaiterState {
    Asleep,
    /// Awake, with the reason that the waiter has not taken yet, if any.
    Awake(Option<WakeReason>),
}

impl<H: Clone + PartialEq> WaiterIndex<H> {
    /// Adds a waiter, or changes its position or wait keys, after a decision at `decided_at` that began at the freed event `since`. A
    /// position by a later decision stays.
    ///
    /// Events since then may have missed the waiter. A concerned waiter must check once more before it parks. If several calls
    /// have one ticket id, the last one is the waiter; the one before is woken, and checks whether it still owns its position.
    pub fn insert(
        &mut self,
        position: QueuePosition,
        sleeper: WaiterProfile<H>,
        keys: impl IntoIterator<Item = WaitKeyHash>,
        since: u64,
        decided_at: OffsetDateTime,
    ) {
        let any_em = sleeper.any_em;
        let keys: Vec<WaitKeyHash> = keys.into_iter().collect();
        let before = self.waiters.remove(&position.ticket_id());
        let later =
            before.as_ref().filter(|before| before.sleeper.wake == sleeper.wake && before.decided_at > decided_at);
        let (position, decided_at) = later.map_or((position, decided_at), |later| (later.position, later.decided_at));
        let replaced = before.as_ref().map(|before| &before.sleeper.wake).filter(|wake| **wake != sleeper.wake);
        self.woken.extend(replaced.cloned());
        if let Some(moved) = before.as_ref().filter(|before| before.position != position) {
            // Below, the waiter is in all of these sets again.
            for key in moved.all_keys() {
                if let Some(waiters) = self.waiters_at(key) {
                    waiters.remove(moved.position);
                }
            }
        }
        let is_kept = |key: &Option<WaitKeyHash>| key.map_or(any_em, |key| keys.contains(&key));
        let leaving = before.iter().flat_map(Waiter::all_keys).filter(|key| !is_kept(key)).collect();
        let again = match &before {
            Some(Waiter { state: WaiterState::Awake(again), .. }) => *again,
            _ => None,
        };
        let missed = self.has_missed(position, &keys, any_em, since).then_some(WakeReason::NEWS);
        let again = missed.map(|wake| wake.and(again)).or(again);
        for key in &keys {
            self.at.entry(*key).or_default();
        }
        let waiter = Waiter { position, sleeper, keys, decided_at, state: WaiterState::Asleep, tries: false, leaving };
        self.waiters.insert(position.ticket_id(), waiter);
        self.set_state(position, WaiterState::Awake(again));
    }

    /// Returns the handles of the parked waiters that were woken since the last call. The caller notifies them.
    pub fn take_woken(&mut self) -> Vec<H> {
        mem::take(&mut self.woken)
    }

    /// Returns the sequence number of the last freed event.
    pub fn news_count(&self) -> u64 {
        self.news_count
    }

    fn has_missed(&self, position: QueuePosition, keys: &[WaitKeyHash], any_em: bool, since: u64) -> bool {
        let count = usize::try_from(self.news_count.saturating_sub(since)).unwrap_or(usize::MAX);
        let concerns = |news: &FreedEvent| {
            let is_covered = news.up_to.is_some_and(|up_to| up_to <= position);
            match news.queue {
                WaiterSet::At(key) => keys.contains(&key) && !is_covered,
                WaiterSet::Em(key) => any_em && !is_covered || keys.contains(&key) && !(is_covered && news.has_local),
                WaiterSet::Anywhere => any_em && !is_covered,
                WaiterSet::Everywhere => !is_covered,
                WaiterSet::Ticket(ticket_id) => ticket_id == position.ticket_id(),
            }
        };
        count > self.news.len() || self.news.iter().rev().take(count).any(concerns)
    }

    /// Removes a waiter, and hands its wake-up to the next ones.
    pub fn remove(&mut self, ticket_id: Uuid) {
        if let Some(waiter) = self.take(ticket_id) {
            self.leave_to_next(vec![waiter]);
        }
    }

    /// Hands the wake-ups of removed waiters to the next ones, as news if they are taken: the check may not have begun. The removal
    /// of the entry frees its reservations; a wake-up may be for another key.
    fn leave_to_next(&mut self, mut left: Vec<Waiter<H>>) {
        for waiter in left.iter_mut().filter(|waiter| waiter.state == WaiterState::Awake(None)) {
            waiter.state = WaiterState::Awake(Some(WakeReason::NEWS));
        }
        self.hand_on_all(left.iter().filter(|waiter| waiter.state != WaiterState::Asleep), &FreedCapacity::default());
        left.iter().for_each(|waiter| self.settle(waiter));
    }

    fn take(&mut self, ticket_id: Uuid) -> Option<Waiter<H>> {
        let waiter = self.waiters.remove(&ticket_id)?;
        waiter.all_keys().into_iter().for_each(|key| self.leave(key, waiter.position));
        Some(waiter)
    }

    /// Resets the counted capacity where the last awake waiter has left.
    fn settle(&mut self, left: &Waiter<H>) {
        for key in left.all_keys() {
            if let Some(waiters) = self.waiters_at(key) {
                waiters.settle();
            }
        }
    }

    fn leave(&mut self, key: Option<WaitKeyHash>, position: QueuePosition) {
        let Some(waiters) = self.waiters_at(key) else { return };
        waiters.remove(position);
        if let Some(key) = key
            && waiters.is_empty()
        {
            self.at.remove(&key);
        }
    }

    fn set_state(&mut self, position: QueuePosition, state: WaiterState) {
        let Some(waiter) = self.waiters.get_mut(&position.ticket_id()) else { return };
        waiter.state = state;
        for key in waiter.all_keys() {
            if let Some(waiters) = self.waiters_at(key) {
                waiters.set(position, state);
            }
        }
    }

    /// Whether no waiter accepts any EM.
    pub fn is_anywhere_empty(&self) -> bool {
        self.anywhere.is_empty()
    }

    /// Parks a waiter. Returns an untaken wake reason instead, if there is one.
    pub fn rest(&mut self, ticket_id: Uuid) -> Option<WakeReason> {
        let waiter = self.waiters.get_mut(&ticket_id)?;
        waiter.tries = false;
        let position = waiter.position;
        let reason = match waiter.state {
            WaiterState::Awake(None) => self.forward_unpassed(position),
            WaiterState::Awake(reason) => reason,
            WaiterState::Asleep => None,
        };
        self.set_state(position, reason.map_or(WaiterState::Asleep, |_| WaiterState::Awake(None)));
        let left =
            self.waiters.get_mut(&ticket_id).filter(|_| reason.is_none()).map(|waiter| mem::take(&mut waiter.leaving));
        left.into_iter().flatten().for_each(|key| self.leave(key, position));
        reason
    }

    /// Forwards the wake-ups at the keys where a waiter is the last awake one. Returns the reason if they reach the waiter itself.
    fn forward_unpassed(&mut self, position: QueuePosition) -> Option<WakeReason> {
        let mut own: Option<WakeReason> = None;
        let keys = self.waiter(position).map(Waiter::all_keys).unwrap_or_default();
        for key in keys {
            let Some(forwarded) = self.waiters_at(key).and_then(Waiters::take_unpassed) else { continue };
            match self.next_served(key, &forwarded, key.is_none(), None) {
                Some(next) if next == position => own = Some(forwarded.wake.and(own)),
                Some(next) => self.wake(next, forwarded.wake),
                None => {}
            }
        }
        own
    }

    /// Returns the waiters at a key; `None` means those that accept any EM.
    fn waiters_at(&mut self, key: Option<WaitKeyHash>) -> Option<&mut Waiters> {
        key.map_or(Some(&mut self.anywhere), |key| self.at.get_mut(&key))
    }

    /// Records that a waiter was submitted to the committer.
    pub fn tries(&mut self, ticket_id: Uuid) {
        if let Some(waiter) = self.waiters.get_mut(&ticket_id) {
            waiter.tries = true;
        }
    }

    /// Takes the wake reason of a woken waiter.
    pub fn woken_by(&mut self, ticket_id: Uuid) -> WakeReason {
        let waiter = self.waiters.get(&ticket_id).map(|waiter| (waiter.position, waiter.state));
        let Some((position, WaiterState::Awake(Some(reason)))) = waiter else { return WakeReason::NEWS };
        self.set_state(position, WaiterState::Awake(None));
        reason
    }

    fn wake(&mut self, position: QueuePosition, wake: WakeReason) {
        let Some(waiter) = self.waiter(position) else { return };
        let reason = match waiter.state {
            WaiterState::Asleep => {
                self.woken.push(waiter.sleeper.wake.clone());
                wake
            }
            WaiterState::Awake(reason) => wake.and(reason),
        };
        self.set_state(position, WaiterState::Awake(Some(reason)));
    }

    fn waiter(&self, position: QueuePosition) -> Option<&Waiter<H>> {
        self.waiters.get(&position.ticket_id())
    }

    fn publish(&mut self, queue: WaiterSet, up_to: Option<QueuePosition>, has_local: bool) {
        if self.callers > 0 {
            self.news_count += 1;
            self.news.push_back(FreedEvent { queue, up_to, has_local });
            if self.news.len() > NEWS_MAX {
                self.news.pop_front();
            }
        }
    }

    /// Wakes the first `count` waiters without assigned capacity that can use what was freed at `queue` for `room` requests.
    ///
    /// An EM wakes at least one waiter of its own queue, because waiters that accept any EM may not match it. `wake` returns
    /// the reason for each waiter.
    fn wake_first_of(
        &mut self,
        queue: WaiterSet,
        (count, room): (usize, u32),
        wake: impl Fn(&Waiter<H>) -> WakeReason,
    ) -> Vec<QueuePosition> {
        let (mut woken, is_anywhere) = (Vec::new(), matches!(queue, WaiterSet::Em(_) | WaiterSet::Anywhere));
        if count == 0 {
            return woken;
        }
        let key = match queue {
            WaiterSet::At(key) | WaiterSet::Em(key) => Some(key),
            WaiterSet::Anywhere | WaiterSet::Everywhere | WaiterSet::Ticket(_) => None,
        };
        let at = key.and_then(|key| self.at.get(&key));
        let anywhere = Some(&self.anywhere).filter(|_| is_anywhere);
        let next = |after| at.iter().chain(&anywhere).filter_map(|waiters| waiters.next_unassigned(after)).min();
        // A waiter that checks now may be granted older capacity; another one must then wake.
        let (mut checking, mut counted) = (0, 0);
        while counted < count
            && let Some(position) = next(woken.last().copied())
        {
            if checking < count && self.waiter(position).is_some_and(Waiter::is_checking) {
                checking += 1;
            } else {
                counted += 1;
            }
            woken.push(position);
        }
        let is_enough = counted == count;
        let has_local = at.is_some_and(|at| woken.iter().any(|position| at.has(*position)));
        let local = at.filter(|_| !has_local).and_then(|at| at.next_unassigned(None));
        let has_local = has_local || local.is_some();
        woken.extend(local);
        self.publish(queue, woken.iter().max().copied().filter(|_| is_enough), has_local);
        for position in &woken {
            if let Some(wake) = self.waiter(*position).map(&wake) {
                self.wake(*position, wake);
            }
        }
        if let Some(waiters) = key.and_then(|key| self.at.get_mut(&key)) {
            waiters.room.add(None, room);
        }
        // An empty set has no waiter that would ever reset the count.
        if is_anywhere && !self.anywhere.is_empty() {
            self.anywhere.room.add(key, room);
        }
        woken
    }

    /// Wakes the first parked waiter at a key: an operation that frees capacity there is in the commit queue.
    pub fn room_comes(&mut self, key: WaitKeyHash) {
        let Some(waiters) = self.at.get(&key).filter(|waiters| waiters.awake() < NEAR_MAX) else { return };
        visit();
        if let Some(first) = waiters.asleep.first().copied() {
            self.wake(first, WakeReason::COMING);
        }
    }

    /// Handles a committed batch that the cache has observed. Removes the granted requests, each at the EM with that key.
    ///
    /// Wakes others where the batch freed more than the grants used. Other instances may have freed more if `others_wait`.
    pub fn committed(
        &mut self,
        mut freed: FreedCapacity,
        granted: impl IntoIterator<Item = (Uuid, WaitKeyHash)>,
        others_wait: bool,
    ) {
        let mut left = Vec::new();
        for (ticket_id, em) in granted {
            let Some(waiter) = self.take(ticket_id) else { continue };
            let is_home = waiter.keys.contains(&em);
            for key in &waiter.keys {
                self.granted_at(*key, *key == em, &mut freed);
            }
            if !is_home {
                self.granted_at(em, true, &mut FreedCapacity::default());
            }
            left.push(waiter);
        }
        self.hand_on_all(&left, &freed);
        // The cache has observed a submitted waiter and all earlier ones.
        self.wake_freed(
            &freed,
            |waiter| if waiter.tries && !others_wait { WakeReason::SEEN } else { WakeReason::NEWS },
        );
        left.iter().for_each(|waiter| self.settle(waiter));
    }

    /// Returns the handle of a waiter.
    pub fn handle(&self, ticket_id: Uuid) -> Option<&H> {
        self.waiters.get(&ticket_id).map(|waiter| &waiter.sleeper.wake)
    }

    /// Whether the call with this handle is the waiter under a ticket id.
    pub fn has(&self, ticket_id: Uuid, wake: &H) -> bool {
        self.handle(ticket_id) == Some(wake)
    }

    /// Handles the end of calls by an operator or by a takeover: they are no waiters any more, so that what they leave wakes those
    /// behind them. Returns the handles of the waiters among them, which must check once.
    pub fn removed(&mut self, ticket_ids: impl IntoIterator<Item = Uuid>) -> Vec<H> {
        let mut left = Vec::new();
        for ticket_id in ticket_ids {
            match self.take(ticket_id) {
                Some(waiter) => left.push(waiter),
                // The waiter may be about to enter.
                None => self.publish(WaiterSet::Ticket(ticket_id), None, false),
            }
        }
        let handles = left.iter().map(|waiter| waiter.sleeper.wake.clone()).collect();
        self.leave_to_next(left);
        handles
    }

    /// Moves waiters to their new positions: before freed capacity is offered, so that it reaches the first one. Wakes those that may
    /// be granted now, and those whose positions a check has to compute. A waiter far behind is reached by wake-ups at its new place.
    pub fn rerank(&mut self, requests: impl IntoIterator<Item = RerankedRequest>) {
        for RerankedRequest { position, decided_at } in requests {
            if self.waiter(position).is_none() {
                // The waiter may be about to enter.
                self.publish(WaiterSet::Ticket(position.ticket_id()), None, false);
                continue;
            }
            if let Some(decided_at) = decided_at {
                self.place(position, decided_at);
            }
            if decided_at.is_none() || self.is_near(position.ticket_id()) {
                self.wake(position, WakeReason::NEWS);
            }
        }
    }

    /// Returns the position of a waiter.
    pub fn position_of(&self, ticket_id: Uuid) -> Option<QueuePosition> {
        self.waiters.get(&ticket_id).map(|waiter| waiter.position)
    }

    /// Returns whether a waiter is one of the first at one of its keys.
    fn is_near(&mut self, ticket_id: Uuid) -> bool {
        let Some(waiter) = self.waiters.get(&ticket_id) else { return false };
        let (position, keys) = (waiter.position, waiter.all_keys());
        keys.into_iter().any(|key| self.waiters_at(key).is_some_and(|waiters| waiters.are_few_before(position)))
    }

    /// Moves a waiter to a position, unless a later decision has stored another one.
    pub fn place(&mut self, position: QueuePosition, decided_at: OffsetDateTime) {
        let Some(waiter) = self.waiters.get_mut(&position.ticket_id()).filter(|waiter| waiter.decided_at <= decided_at)
        else {
            return;
        };
        waiter.decided_at = decided_at;
        if waiter.position == position {
            return;
        }
        let (before, state) = (mem::replace(&mut waiter.position, position), waiter.state);
        for key in waiter.all_keys() {
            if let Some(waiters) = self.waiters_at(key) {
                waiters.remove(before);
            }
        }
        self.set_state(position, state);
    }

    /// Hands the wake-ups of waiters that have left to the next ones. All of them have left, so that none is the next one.
    fn hand_on_all<'a>(&mut self, left: impl IntoIterator<Item = &'a Waiter<H>>, freed: &FreedCapacity)
    where
        H: 'a,
    {
        let mut last = BTreeSet::new();
        for waiter in left {
            last.extend(self.hand_on(waiter, freed));
        }
        // A request that enters now has no waiter before it that would wake it.
        last.into_iter().for_each(|key| self.publish(key.map_or(WaiterSet::Anywhere, WaiterSet::At), None, false));
    }

    /// Subtracts the capacity of one granted request: from `freed` of the same commit, or from the capacity that was freed
    /// before.
    fn granted_at(&mut self, key: WaitKeyHash, is_em: bool, freed: &mut FreedCapacity) {
        match freed.wait_keys.get_mut(&key) {
            Some(requests) if *requests == MUCH => {}
            Some(requests) if *requests > 0 => *requests -= 1,
            _ => {
                let anywhere = Some(&mut self.anywhere).filter(|_| is_em);
                for waiters in self.at.get_mut(&key).into_iter().chain(anywhere) {
                    waiters.room.take(key);
                }
            }
        }
    }

    /// Wakes the next waiter behind a waiter that has left, with the wake reason that the latter did not take. Where the batch freed
    /// capacity, also wakes the first waiter ahead, which may fit in what is left. Returns the keys without a next waiter; `None`
    /// means the waiters that accept any EM.
    fn hand_on(&mut self, granted: &Waiter<H>, freed: &FreedCapacity) -> Vec<Option<WaitKeyHash>> {
        let position = granted.position;
        let reason = match granted.state {
            WaiterState::Awake(reason) => reason.map(WakeReason::handed_on),
            WaiterState::Asleep => None,
        };
        let (mut woken, mut last) = (BTreeSet::new(), Vec::new());
        for key in granted.all_keys() {
            let waiters = self.waiters_at(key);
            let is_freed = key.map_or(!freed.ems.is_empty(), |key| freed.wait_keys.contains_key(&key));
            if is_freed && let Some(waiters) = &waiters {
                woken.extend(waiters.idle.first().filter(|first| **first < position));
            }
            let unpassed = waiters.and_then(|waiters| waiters.unpassed.take());
            let behind = unpassed.map_or(position, |unpassed| unpassed.behind.min(position));
            match self.next_idle(key, behind, |_, _| true) {
                Some(next) => {
                    woken.insert(next);
                }
                None => last.push(key),
            }
        }
        woken.into_iter().for_each(|next| self.wake(next, WakeReason::GRANT.and(reason)));
        last
    }

    /// Wakes the first waiters where capacity was freed, as many as may fit.
    pub fn wake_at(&mut self, freed: &FreedCapacity) {
        self.wake_freed(freed, |_| WakeReason::NEWS);
    }

    /// Wakes the first waiters that accept any EM.
    pub fn wake_anywhere(&mut self) {
        self.wake_first_of(WaiterSet::Anywhere, (WAKE_MAX, SERVED_MAX), |_| WakeReason::NEWS);
    }

    fn wake_freed(&mut self, freed: &FreedCapacity, wake: impl Fn(&Waiter<H>) -> WakeReason) {
        let enough = |requests: u32| match requests.min(SERVED_MAX) {
            room if requests == MUCH => (WAKE_MAX, room),
            room => (room as usize, room),
        };
        // Also if the same batch has granted as much: the grants may have used other capacity.
        let mut is_any_told = freed.ems.is_empty();
        for (key, requests) in &freed.wait_keys {
            let queue = if freed.ems.contains(key) { WaiterSet::Em(*key) } else { WaiterSet::At(*key) };
            let woken = self.wake_first_of(queue, enough(*requests), &wake);
            is_any_told |= woken.iter().any(|position| self.anywhere.has(*position));
        }
        // The waiters of the EMs may not fit there.
        if !is_any_told {
            self.wake_first_of(WaiterSet::Anywhere, (1, 1), &wake);
        }
    }

    /// Wakes the first waiter of some keys and some other waiters, both in rotation, without a known change.
    pub fn poll(&mut self) {
        let mut keys = self.at.range((self.polled.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded));
        let mut queues: Vec<&Waiters> = vec![&self.anywhere];
        self.polled = None;
        for (key, waiters) in keys.by_ref().take(POLLED_MAX) {
            queues.push(waiters);
            self.polled = Some(*key);
        }
        self.polled.take_if(|_| keys.next().is_none());
        let first = queues.into_iter().inspect(|_| visit()).filter_map(|waiters| waiters.asleep.first().copied());
        for position in first.collect::<BTreeSet<_>>() {
            self.wake(position, WakeReason::POLL);
        }
        let others = self.turn.map_or(Bound::Unbounded, Bound::Excluded);
        let others = self.waiters.range((others, Bound::Unbounded)).inspect(|_| visit()).take(TURN_MAX);
        let turn: Vec<_> = others.map(|(_, waiter)| (waiter.position, waiter.state)).collect();
        self.turn = turn.last().map(|(position, _)| position.ticket_id()).filter(|_| turn.len() == TURN_MAX);
        for (position, _) in turn.into_iter().filter(|(_, state)| *state == WaiterState::Asleep) {
            self.wake(position, WakeReason::TURN);
        }
    }

    /// Wakes the first waiters of all keys, after notifications may have been lost.
    pub fn wake_first(&mut self) {
        let at = self.at.values_mut().chain([&mut self.anywhere]);
        let first = |waiters: &mut Waiters| {
            waiters.room = Room { other: SERVED_MAX.into(), ..Room::default() };
            let next = |last: &QueuePosition| waiters.next_unassigned(Some(*last));
            std::iter::successors(waiters.next_unassigned(None), next).take(WAKE_MAX).collect::<Vec<_>>()
        };
        let first: BTreeSet<QueuePosition> = at.flat_map(first).collect();
        first.into_iter().for_each(|position| self.wake(position, WakeReason::NEWS));
        self.publish(WaiterSet::Everywhere, None, false);
    }

    /// Forwards a wake-up without a grant to later waiters that need other dimensions; those with the same needs would find
    /// less.
    ///
    /// A waiter that must check again keeps the reason and forwards it only afterwards.
    pub fn pass_on(&mut self, ticket_id: Uuid, wake: WakeReason) {
        let Some(waiter) = self.waiters.get(&ticket_id) else { return };
        let position = waiter.position;
        let (passed, leaving) = (wake.passed(waiter.sleeper.needs), waiter.leaving.clone());
        if let WaiterState::Awake(Some(reason)) = waiter.state {
            let passed = passed.or(leaving.first().map(|_| wake.unused()));
            self.set_state(
                position,
                WaiterState::Awake(Some(passed.map_or(reason, |passed| reason.and(Some(passed))))),
            );
            return;
        }
        let (keys, mut next) = (waiter.all_keys(), Vec::new());
        for key in keys {
            let passed = if leaving.contains(&key) { Some(wake.unused()) } else { passed };
            let (Some(waiters), Some(passed)) = (self.waiters_at(key), passed) else { continue };
            let Some(forwarded) = waiters.forward(position, passed) else { continue };
            // Waiters for any EM may match other EMs, and those before this one have not checked.
            let is_unchecked = key.is_none() || forwarded.behind < position;
            let served = self.next_served(key, &forwarded, is_unchecked, Some(position));
            next.extend(served.map(|next| (next, forwarded.wake)));
        }
        for (next, wake) in next {
            self.wake(next, wake);
        }
    }

    /// Returns the next idle waiter but `except` that a forwarded wake-up may serve at a key. `is_unchecked` states whether counted
    /// capacity may be for it. A waiter for any EM keeps capacity only at the EM of its entry, so one with other amounts is the next
    /// choice.
    fn next_served(
        &self,
        key: Option<WaitKeyHash>,
        forwarded: &ForwardedWake,
        is_unchecked: bool,
        except: Option<QueuePosition>,
    ) -> Option<QueuePosition> {
        let next = |accepts: &dyn Fn(Needs) -> bool| {
            self.next_idle(key, forwarded.behind, |at, other| Some(at) != except && accepts(other.sleeper.needs))
        };
        let other_amounts = || next(&|needs| !forwarded.wake.has_tried(needs)).filter(|_| key.is_none());
        let may_serve = |needs| is_unchecked && forwarded.is_counted || !forwarded.wake.has_tried_dimensions(needs);
        next(&may_serve).or_else(other_amounts)
    }

    /// Returns the next idle waiter behind `position` at a key, or of those that accept any EM: the first of the nearest
    /// [`NEAR_MAX`] that `concerns` accepts.
    fn next_idle(
        &self,
        key: Option<WaitKeyHash>,
        position: QueuePosition,
        concerns: impl Fn(QueuePosition, &Waiter<H>) -> bool,
    ) -> Option<QueuePosition> {
        let waiters = key.map_or(Some(&self.anywhere), |key| self.at.get(&key))?;
        let behind = waiters.idle.range((Bound::Excluded(position), Bound::Unbounded));
        let mut near = behind.take(NEAR_MAX).inspect(|_| visit());
        near.find(|other| self.waiter(**other).is_some_and(|waiter| concerns(**other, waiter))).copied()
    }
}

#[cfg(test)]
#[path = "waiter_index_tests.rs"]
mod tests;
