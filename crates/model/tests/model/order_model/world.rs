//! State of the order model, and every event that can come next.
//!
//! A waiting request is checked at its stored position, against the entries of present requests with earlier positions.
//! The ranks come from `rm_model::order` and `guarantee`; entries and reservations are those of `wait_queue.rs`, for small amounts.

use std::collections::BTreeSet;

use rm_model::{
    guarantee::PromisedAmounts,
    order::{Class, OwnRequests, QueueRanks, RankedRequest, is_private},
    scope::{ScopeCounter, ScopeHoldings, Tally},
    wait_queue::WaitKey,
};
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use super::setting::{Amounts, DIMENSIONS, KEYS, Kind, Setting, counted};

/// A planted mistake outside of `rm_model::order`, which the model must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mistake {
    /// A request is a first at one key and behind at another one.
    OrderByKey,
    /// An absent request keeps capacity.
    AbsentKeeps,
    /// A newcomer passes own requests that are behind.
    NewcomerPassesOwn,
    /// The time at an own limit counts for a request that fits at the EM when that limit is free.
    OwnLimitAges,
    /// A request that is short at its own limit alone keeps capacity elsewhere.
    OwnLimitKeeps,
    /// A decision counts only the entitled requests that precede the request.
    OnlyThoseAheadPromise,
    /// A request stays entitled when its scope has grown.
    StoredYesIsTrusted,
    /// A request is entitled as if all later own requests at its keys fell behind it.
    EntitlementIsNotConfirmed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    /// A request enters, and prefers this EM if it names none.
    Enter(usize, usize),
    /// A waiting request is checked where it is queued.
    Check(usize),
    /// A waiting request is checked on the other EM.
    Move(usize),
    Leave(usize),
    Absent(usize),
    Return(usize),
    /// A ticket ends.
    Release(usize),
}

/// Seconds since the start.
pub type Seconds = i32;

/// No time: the request is not short at the key.
const NEVER: Seconds = Seconds::MIN;

/// Class, time and number of a request, which sort as its stored position does.
pub type Position = (Class, Seconds, usize);

/// A set of keys.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct KeySet(u8);

impl KeySet {
    pub fn has(self, key: usize) -> bool {
        self.0 & (1 << key) != 0
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..KEYS).filter(move |key| self.has(*key))
    }
}

impl FromIterator<usize> for KeySet {
    fn from_iter<I: IntoIterator<Item = usize>>(keys: I) -> Self {
        Self(keys.into_iter().fold(0, |set, key| set | (1 << key)))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Waiting {
    /// Key of the EM where a request that names none is queued.
    pub em: usize,
    pub entered: Seconds,
    pub rank_time: Seconds,
    pub class: Class,
    pub is_absent: bool,
    pub was_shared: bool,
    pub short: KeySet,
    /// Keys with an entry, short or reserved.
    pub entries: KeySet,
    /// Time since which the request is short at each key.
    pub came: [Seconds; KEYS],
    /// Turns of other users that went before the request at each key since its rank time, while it was a first.
    pub passed: [u8; KEYS],
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Phase {
    New,
    Waiting(Waiting),
    /// Granted on the EM of a key.
    Granted(usize),
    Ended,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct World {
    now: Seconds,
    pub requests: Vec<Phase>,
}

/// A setting with the rules that apply there.
#[derive(Debug, Clone, Copy)]
pub struct Model<'a> {
    pub setting: &'a Setting,
    pub mistake: Option<Mistake>,
    /// Whether each event is also applied to the part of the requests that a batch reads.
    pub checks_part: bool,
}

fn time(at: Seconds) -> OffsetDateTime {
    OffsetDateTime::UNIX_EPOCH + Duration::seconds(at.into())
}

fn seconds(time: OffsetDateTime) -> Seconds {
    time.unix_timestamp().try_into().unwrap()
}

pub fn ticket_id(request: usize) -> Uuid {
    Uuid::from_u128(request as u128)
}

impl World {
    pub fn new(setting: &Setting) -> Self {
        Self { now: 0, requests: vec![Phase::New; setting.requests.len()] }
    }

    pub fn now(&self) -> Seconds {
        self.now
    }

    pub fn waiting(&self) -> impl Iterator<Item = (usize, &Waiting)> {
        self.requests.iter().enumerate().filter_map(|(request, phase)| match phase {
            Phase::Waiting(waiting) => Some((request, waiting)),
            _ => None,
        })
    }

    pub fn present(&self) -> impl Iterator<Item = (usize, &Waiting)> {
        self.waiting().filter(|(_, waiting)| !waiting.is_absent)
    }

    /// Returns the granted requests, each with the key of its EM.
    pub fn granted(&self) -> impl Iterator<Item = (usize, usize)> {
        self.requests.iter().enumerate().filter_map(|(request, phase)| match phase {
            Phase::Granted(em) => Some((request, *em)),
            _ => None,
        })
    }

    pub fn waiting_mut(&mut self, request: usize) -> &mut Waiting {
        match &mut self.requests[request] {
            Phase::Waiting(waiting) => waiting,
            phase => panic!("request {request} does not wait: {phase:?}"),
        }
    }

    pub fn get(&self, request: usize) -> &Waiting {
        match &self.requests[request] {
            Phase::Waiting(waiting) => waiting,
            phase => panic!("request {request} does not wait: {phase:?}"),
        }
    }

    /// Moves the times together where no comparison can change, so that equal states have equal times. A comparison can
    /// change up to `spread`, the largest difference of two priorities.
    fn compress(&mut self, spread: Seconds) {
        let mut times = BTreeSet::from([self.now]);
        for (_, waiting) in self.waiting() {
            times.extend([waiting.entered, waiting.rank_time]);
            times.extend(waiting.came.iter().filter(|came| **came != NEVER));
        }
        let times: Vec<Seconds> = times.into_iter().collect();
        let mut moved = vec![0; times.len()];
        for at in 1..times.len() {
            moved[at] = moved[at - 1] + (times[at] - times[at - 1]).min(spread + 1);
        }
        let replace = |time: &mut Seconds| {
            if let Ok(at) = times.binary_search(time) {
                *time = moved[at];
            }
        };
        replace(&mut self.now);
        for phase in &mut self.requests {
            if let Phase::Waiting(waiting) = phase {
                [&mut waiting.entered, &mut waiting.rank_time].into_iter().chain(&mut waiting.came).for_each(replace);
            }
        }
    }
}

impl Model<'_> {
    pub fn user(&self, request: usize) -> usize {
        self.setting.requests[request].user
    }

    /// Whether two requests are own requests of each other.
    pub fn is_own(&self, one: usize, two: usize) -> bool {
        let turn = |request| &self.setting.turns[self.user(request)];
        one != two && turn(one).is_some() && turn(one) == turn(two)
    }

    /// Returns the events that can come next. Equal requests enter in the order of their numbers.
    pub fn events(&self, world: &World) -> Vec<Event> {
        let mut events = vec![];
        for (request, phase) in world.requests.iter().enumerate() {
            let spec = &self.setting.requests[request];
            let is_equal_new =
                |other: usize| world.requests[other] == Phase::New && self.setting.requests[other] == *spec;
            match phase {
                Phase::New if (0..request).any(is_equal_new) => {}
                Phase::New => {
                    events.push(Event::Enter(request, 0));
                    events.extend(spec.any_em.then_some(Event::Enter(request, 1)));
                }
                Phase::Waiting(waiting) if waiting.is_absent => {
                    events.extend([Event::Return(request), Event::Leave(request)]);
                }
                Phase::Waiting(_) => {
                    events.extend([Event::Check(request), Event::Absent(request), Event::Leave(request)]);
                    events.extend(spec.any_em.then_some(Event::Move(request)));
                }
                Phase::Granted(_) => events.push(Event::Release(request)),
                Phase::Ended => {}
            }
        }
        events
    }

    /// Returns the state after an event.
    ///
    /// # Errors
    /// The broken invariant, if the event breaks one.
    pub fn step(&self, world: &World, event: Event) -> Result<World, String> {
        let mut next = world.clone();
        next.now += self.setting.step;
        match event {
            Event::Enter(request, em) => self.enter(&mut next, request, em)?,
            Event::Check(request) => {
                let em = next.get(request).em;
                self.check(&mut next, request, em)?;
            }
            Event::Move(request) => {
                let em = 1 - next.get(request).em;
                self.check(&mut next, request, em)?;
            }
            Event::Leave(request) => {
                self.change(&mut next, request, KeySet::default(), |own, ticket_id| own.left(ticket_id));
                next.requests[request] = Phase::Ended;
            }
            Event::Absent(request) => {
                let waiting = next.waiting_mut(request);
                // A promise ends with the absence.
                (waiting.is_absent, waiting.class) = (true, waiting.class.max(Class::First));
                self.change(&mut next, request, KeySet::default(), |own, ticket_id| own.absent(ticket_id));
            }
            Event::Return(request) => {
                next.waiting_mut(request).is_absent = false;
                self.change(&mut next, request, KeySet::default(), |own, ticket_id| own.returned(ticket_id));
                next.waiting_mut(request).class = self.decided_class(&next, request, None, false);
            }
            Event::Release(request) => next.requests[request] = Phase::Ended,
        }
        super::invariants::check_event(self, world, &next, event)?;
        next.compress(self.setting.spread());
        Ok(next)
    }

    /// Decides a request that enters: as a first with a new rank time.
    fn enter(&self, world: &mut World, request: usize, em: usize) -> Result<(), String> {
        let spec = &self.setting.requests[request];
        let newcomer = RankedRequest {
            any_em: spec.any_em.then_some(self.setting.any_em),
            class: self.decided_class(world, request, Some(em), false),
            ..RankedRequest::new(ticket_id(request), self.turn(request), time(world.now), spec.priority)
        };
        let own = self.own_requests(world, request);
        let now = world.now;
        let position = |key| self.position_of(request, self.entering_class(&own, &newcomer, key), now);
        let short = |world: &World, em| self.short_at(world, request, em, position, None);
        let ems = if spec.any_em { vec![em, 1 - em] } else { vec![em] };
        if let Some(em) = ems.iter().find(|em| short(world, **em).is_empty()) {
            super::invariants::check_newcomer(self, world, request, *em, |_| true)?;
            super::invariants::check_guarantee(self, world, (request, *em), newcomer.class, false)?;
            world.requests[request] = Phase::Granted(*em);
            return Ok(());
        }
        let of_others = self.short_at(world, request, em, position, Some((&own, &newcomer)));
        let short = if of_others.is_empty() { short(world, em) } else { of_others };
        world.requests[request] = Phase::Waiting(Waiting {
            em,
            entered: world.now,
            rank_time: world.now,
            class: newcomer.class,
            is_absent: false,
            was_shared: false,
            short: KeySet::default(),
            entries: KeySet::default(),
            came: [NEVER; KEYS],
            passed: [0; KEYS],
        });
        self.requeue(world, request, em, short, false);
        Ok(())
    }

    /// Returns the class of a request by a decision on an EM, or without one after own requests fell behind it. The guarantees are
    /// compared with the amounts that the scopes hold, and that entitled requests wait for.
    pub fn decided_class(&self, world: &World, request: usize, em: Option<usize>, was_entitled: bool) -> Class {
        let stored = world.waiting().find(|(other, _)| *other == request).map(|(_, stored)| stored);
        let Setting { keys, requests, placed, limits, .. } = self.setting;
        let Some(decided) = placed.get(request) else { return stored.map_or(Class::First, |stored| stored.class) };
        let mut ranks = QueueRanks { own: self.own_requests(world, request), ..QueueRanks::default() };
        let here = self.position_of(request, Class::Entitled, stored.map_or(world.now, |stored| stored.rank_time));
        let counts_all = self.mistake != Some(Mistake::OnlyThoseAheadPromise);
        let promises = |(other, its): &(usize, &Waiting)| match its.class {
            Class::Entitled if *other == request => was_entitled,
            Class::Entitled => counts_all || self.position(world, *other, 0) < here,
            _ => false,
        };
        for placed in world.present().filter(promises).map(|(other, _)| &placed[other]) {
            let (ticket_id, resource) = (Some(placed.ask.ticket_id), placed.resource());
            for scope in placed.guaranteed_scopes(limits) {
                ranks.promises.add(scope, PromisedAmounts { ticket_id, resource: resource.clone(), requests: 1 });
            }
        }
        let is_trusted = was_entitled && self.mistake == Some(Mistake::StoredYesIsTrusted);
        let held = if is_trusted { Amounts::default() } else { self.held(world) };
        let held = |key| ScopeHoldings { locked: Tally::new(counted(key, &held)), ..ScopeHoldings::default() };
        let held: [ScopeHoldings; KEYS] = std::array::from_fn(held);
        let usage = |counter: &ScopeCounter| {
            let is_at = |wait_key: &WaitKey| matches!(wait_key, WaitKey::Scope(scope) if *scope == counter.scope);
            keys.iter().position(is_at).map(|key| &held[key])
        };
        let amounts = em.map_or(Amounts::default(), |em| requests[request].amounts_on(em));
        let keys = (0..KEYS).filter(|key| amounts[*key] != [0; DIMENSIONS]).map(|key| keys[key].clone());
        let stored = stored.map(|_| ticket_id(request));
        ranks.decide(decided, stored, keys, (limits, time(world.now)), usage).rank.class
    }

    /// Returns the class with which a newcomer is compared at a key: behind where an own request precedes it.
    fn entering_class(&self, own: &OwnRequests, newcomer: &RankedRequest, key: usize) -> Class {
        let precedes = own.has_earlier_at(newcomer, &self.setting.keys[key]);
        match precedes && self.mistake != Some(Mistake::NewcomerPassesOwn) {
            true => Class::Behind,
            false => newcomer.class,
        }
    }

    /// Whether a check at a key compares the request as a newcomer: it has been short at private keys alone.
    pub fn is_new_at(&self, waiting: &Waiting, key: usize) -> bool {
        let is_private_key = is_private(self.setting.turns[0].as_deref(), &self.setting.keys[key]);
        !waiting.was_shared && !is_private_key && self.mistake != Some(Mistake::OwnLimitAges)
    }

    /// Returns the position that a check of a waiting request at `now` compares at a key.
    pub fn checked_position(&self, world: &World, request: usize, key: usize, now: Seconds) -> Position {
        let waiting = world.get(request);
        match self.is_new_at(waiting, key) {
            true => {
                let entering = self.ranked(world, request).at_shared_key(time(now));
                let own = self.own_requests(world, request);
                self.position_of(request, self.entering_class(&own, &entering, key), now)
            }
            false => self.position(world, request, key),
        }
    }

    /// Decides a waiting request at its position.
    fn check(&self, world: &mut World, request: usize, em: usize) -> Result<(), String> {
        let was_entitled = world.get(request).class == Class::Entitled;
        world.waiting_mut(request).class = self.decided_class(world, request, Some(em), was_entitled);
        let waiting = world.get(request).clone();
        let is_new_at = |key: usize| self.is_new_at(&waiting, key);
        let (own, ranked) = (self.own_requests(world, request), self.ranked(world, request));
        let position = |key| self.checked_position(world, request, key, world.now);
        let short = self.short_at(world, request, em, position, None);
        let of_others = self.short_at(world, request, em, position, Some((&own, &ranked)));
        let short = if of_others.is_empty() { short } else { of_others };
        if short.is_empty() {
            super::invariants::check_newcomer(self, world, request, em, is_new_at)?;
        }
        if !short.is_empty() {
            self.requeue(world, request, em, short, was_entitled);
            return Ok(());
        }
        super::invariants::check_guarantee(self, world, (request, em), waiting.class, was_entitled)?;
        super::invariants::log_grant(self, world, request, em)?;
        let now = time(world.now);
        self.change(world, request, KeySet::default(), |own, ticket_id| own.granted(ticket_id, now));
        world.requests[request] = Phase::Granted(em);
        Ok(())
    }

    fn requeue(&self, world: &mut World, request: usize, em: usize, short: KeySet, was_entitled: bool) {
        world.waiting_mut(request).em = em;
        let (now, setting) = (time(world.now), self.setting);
        let keys: BTreeSet<_> = short.iter().map(|key| setting.keys[key].clone()).collect();
        self.change(world, request, short, |own, ticket_id| {
            own.requeue(ticket_id, keys.clone(), now);
        });
        let now = world.now;
        let waiting = world.waiting_mut(request);
        for key in 0..KEYS {
            match (short.has(key), waiting.came[key]) {
                (false, _) => (waiting.came[key], waiting.passed[key]) = (NEVER, 0),
                (true, NEVER) => waiting.came[key] = now,
                (true, _) => {}
            }
        }
        waiting.short = short;
        if world.get(request).class == Class::Entitled && self.mistake != Some(Mistake::EntitlementIsNotConfirmed) {
            world.waiting_mut(request).class = self.decided_class(world, request, None, was_entitled);
        }
        let is_head = |key: usize| {
            let here = self.position(world, request, key);
            let mut others = world.present().filter(|(other, waiting)| *other != request && waiting.short.has(key));
            others.all(|(other, _)| self.position(world, other, key) > here)
        };
        let is_private_key = |key: usize| is_private(setting.turns[0].as_deref(), &setting.keys[key]);
        let is_own_limit = short.iter().all(is_private_key) && self.mistake != Some(Mistake::OwnLimitKeeps);
        let keeps_all = !is_own_limit && short.iter().any(is_head);
        let amounts = setting.requests[request].amounts_on(em);
        let entries =
            (0..KEYS).filter(|key| short.has(*key) || keeps_all && amounts[*key] != [0; DIMENSIONS]).collect();
        world.waiting_mut(request).entries = entries;
    }

    fn turn(&self, request: usize) -> Option<std::sync::Arc<str>> {
        self.setting.turns[self.user(request)].clone()
    }

    pub fn ranked(&self, world: &World, request: usize) -> RankedRequest {
        let short = world.get(request).short.iter();
        let short_at = short.map(|key| self.setting.keys[key].clone()).collect();
        RankedRequest { short_at, ..self.ranked_nowhere(world, request) }
    }

    /// Returns a waiting request without its keys.
    fn ranked_nowhere(&self, world: &World, request: usize) -> RankedRequest {
        let (waiting, spec) = (world.get(request), &self.setting.requests[request]);
        RankedRequest {
            ticket_id: ticket_id(request),
            turn: self.turn(request),
            entered: time(waiting.entered),
            rank_time: time(waiting.rank_time),
            priority: spec.priority,
            class: waiting.class,
            is_absent: waiting.is_absent,
            any_em: spec.any_em.then_some(self.setting.any_em),
            short_at: BTreeSet::new(),
            was_shared: waiting.was_shared,
        }
    }

    /// Returns the waiting requests of the user of a request.
    fn own_requests(&self, world: &World, request: usize) -> OwnRequests {
        let mut own = OwnRequests::default();
        let of_user = |other: &usize| self.user(*other) == self.user(request);
        let waiting = world.waiting().map(|(other, _)| other).filter(of_user);
        waiting.for_each(|other| own.insert(self.ranked(world, other)));
        own
    }

    /// Applies an event of a request to the ranks of its user's requests.
    fn change(&self, world: &mut World, request: usize, after: KeySet, event: impl Fn(&mut OwnRequests, Uuid)) {
        let mut own = self.own_requests(world, request);
        event(&mut own, ticket_id(request));
        if self.checks_part {
            self.check_part(world, request, after, &event, &own);
        }
        let mut positions = vec![];
        for (other, phase) in world.requests.iter_mut().enumerate() {
            if let (Phase::Waiting(waiting), Some(ranked)) = (phase, own.get(ticket_id(other)))
                && self.user(other) == self.user(request)
            {
                waiting.entered = seconds(ranked.entered);
                let rank_time = seconds(ranked.rank_time);
                if std::mem::replace(&mut waiting.rank_time, rank_time) != rank_time {
                    waiting.passed = [0; KEYS];
                }
                (waiting.class, waiting.was_shared) = (ranked.class, ranked.was_shared);
                positions.push((other, ranked.position()));
            }
        }
        self.check_positions(world, positions);
    }

    /// Returns the position of a waiting request at a key.
    pub fn position(&self, world: &World, request: usize, key: usize) -> Position {
        let waiting = world.get(request);
        let mut class = waiting.class;
        if self.mistake == Some(Mistake::OrderByKey) {
            let ranked = self.ranked_nowhere(world, request);
            let mut own = world.present().filter(|(other, _)| self.is_own(*other, request));
            let is_earlier = own.any(|(other, waiting)| {
                waiting.short.has(key) && self.ranked_nowhere(world, other).own_order() < ranked.own_order()
            });
            class = if is_earlier { Class::Behind } else { Class::First };
        }
        let time = if class == Class::Behind { waiting.entered } else { waiting.rank_time };
        self.position_of(request, class, time)
    }

    pub fn position_of(&self, request: usize, class: Class, time: Seconds) -> Position {
        (class, time - Seconds::from(self.setting.requests[request].priority), request)
    }

    pub fn held(&self, world: &World) -> Amounts {
        let mut held = Amounts::default();
        for (request, em) in world.granted() {
            add(&mut held, self.setting.requests[request].amounts_on(em));
        }
        held
    }

    /// Returns the keys where a request is short on an EM, at its position at each key. A later own request
    /// that precedes it keeps nothing.
    fn short_at(
        &self,
        world: &World,
        request: usize,
        em: usize,
        position: impl Fn(usize) -> Position,
        own: Option<(&OwnRequests, &RankedRequest)>,
    ) -> KeySet {
        let (amounts, held) = (self.setting.requests[request].amounts_on(em), self.held(world));
        let is_short = |key: &usize| {
            let key = *key;
            if amounts[key] == [0; DIMENSIONS] {
                return false;
            }
            let position = position(key);
            let here = RankedRequest::new(ticket_id(request), None, time(position.1), 0);
            let here = RankedRequest { class: position.0, ..here }.position();
            let later_own = own.and_then(|(own, its)| own.later_own_at(its, &self.setting.keys[key], here));
            let mut needed = held[key];
            for (other, waiting) in
                world.waiting().filter(|(other, waiting)| *other != request && waiting.entries.has(key))
            {
                let keeps = !waiting.is_absent || self.mistake == Some(Mistake::AbsentKeeps);
                if keeps && later_own != Some(ticket_id(other)) && self.position(world, other, key) < position {
                    let kept = self.setting.requests[other].amounts_on(waiting.em)[key];
                    (0..DIMENSIONS).for_each(|at| needed[at] += kept[at]);
                }
            }
            (0..DIMENSIONS).any(|at| amounts[key][at] > 0 && needed[at] + amounts[key][at] > self.setting.max[key][at])
        };
        (0..KEYS).filter(is_short).collect()
    }

    pub fn is_private(&self, key: usize) -> bool {
        self.setting.kinds[key] == Kind::Private
    }
}

pub fn add(sum: &mut Amounts, amounts: Amounts) {
    for (sum, amount) in sum.iter_mut().flatten().zip(amounts.into_iter().flatten()) {
        *sum += amount;
    }
}
