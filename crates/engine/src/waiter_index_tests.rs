//! Tests of the waiter index: order, number and reasons of wake-ups.

use time::OffsetDateTime;
use uuid::Uuid;

use super::*;
use rm_model::{name::Labels, resource::Resource, selector::EmSelector, visits};

fn id(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

fn position(number: u128) -> QueuePosition {
    QueuePosition::new(0, OffsetDateTime::UNIX_EPOCH, id(number))
}

const A: WaitKeyHash = WaitKeyHash(1 << 32);
const B: WaitKeyHash = WaitKeyHash(1 << 33);

/// Key of the EM with this number.
fn em(number: u64) -> WaitKeyHash {
    WaitKeyHash(number)
}

fn freed(em: WaitKeyHash, requests: u32) -> FreedCapacity {
    FreedCapacity { wait_keys: [(em, requests)].into(), ems: [em].into() }
}

fn awake(index: &WaiterIndex<()>) -> Vec<u128> {
    let awake = index.waiters.iter().filter(|(_, waiter)| waiter.state != WaiterState::Asleep);
    awake.map(|(ticket_id, _)| ticket_id.as_u128()).collect()
}

/// Each tenth waiter needs memory, the others need cores.
fn sleeper(number: u128) -> WaiterProfile<()> {
    let resource = if number.is_multiple_of(10) { Resource::memory(1) } else { Resource::cpu(1) };
    WaiterProfile {
        needs: Needs::of(&resource.unwrap(), &Labels::default(), &EmSelector::default()),
        ..WaiterProfile::default()
    }
}

/// The first waiter is at EM b, the others at EM a; all are parked.
fn line(count: u128) -> WaiterIndex<()> {
    let mut index = WaiterIndex { callers: 1, ..WaiterIndex::default() };
    for number in 0..count {
        let at = if number == 0 { B } else { A };
        index.insert(position(number), sleeper(number), [at], 0, OffsetDateTime::UNIX_EPOCH);
        assert_eq!(index.rest(id(number)), None);
    }
    index
}

#[test]
fn waiters_wake_by_capacity_and_each_grant_wakes_one() {
    let mut index = line(100);
    index.wake_at(&freed(A, 3));
    assert_eq!(awake(&index), [1, 2, 3]);
    index.woken_by(id(1));
    commit(&mut index, FreedCapacity::default(), &[(1, A)]);
    assert_eq!(awake(&index), [2, 3, 4]);
    index.wake_at(&freed(A, MUCH));
    // The fourth waiter had no counted capacity and is the first of sixteen.
    assert_eq!(awake(&index), (2..=3 + 16).collect::<Vec<_>>());
}

#[test]
fn awake_waiter_with_news_checks_again_before_sleep() {
    let mut index = line(10);
    index.wake_at(&freed(A, 1));
    assert_eq!(index.woken_by(id(1)), WakeReason::NEWS);
    index.wake_at(&freed(A, 1));
    assert_eq!(awake(&index), [1, 2], "the awake waiter and the next one");
    assert_eq!(index.rest(id(1)), Some(WakeReason::NEWS), "the last check may be older than the release");
    assert_eq!(index.rest(id(1)), None);
    assert_eq!(awake(&index), [2]);
}

#[test]
fn end_of_hold_wakes_waiters_for_any_em() {
    let mut index = line(3);
    for number in 3..50 {
        let sleeper = WaiterProfile { any_em: true, ..sleeper(number) };
        index.insert(position(number), sleeper, [A], 0, OffsetDateTime::UNIX_EPOCH);
        assert_eq!(index.rest(id(number)), None);
    }
    index.wake_anywhere();
    assert_eq!(awake(&index), (3..3 + 16).collect::<Vec<_>>());
}

#[test]
fn expected_release_wakes_first_sleeping_waiter() {
    let (mut index, key) = (line(10), A);
    index.room_comes(key);
    index.room_comes(key);
    assert_eq!(awake(&index), [1, 2]);
    for number in [1, 2] {
        let wake = index.woken_by(id(number));
        assert!(wake.is_coming && !wake.is_news, "{wake:?}");
        index.tries(id(number));
    }
    // Both requests used the freed capacity. Only the next waiters check for more.
    commit(&mut index, freed(A, 2), &[(1, A), (2, A)]);
    assert_eq!(awake(&index), [3, 4]);
    assert!([3, 4].map(|number| index.woken_by(id(number))).iter().all(|wake| !wake.is_news));
}

/// A batch with a release and a grant to a later waiter may leave capacity for an earlier one.
#[test]
fn waiter_ahead_of_granted_one_is_woken() {
    let mut index = line(10);
    commit(&mut index, freed(A, 1), &[(5, A)]);
    assert_eq!(awake(&index), [1, 6]);
}

#[test]
fn unsuccessful_try_after_release_wakes_only_its_waiter() {
    let mut index = line(10);
    index.room_comes(A);
    index.woken_by(id(1));
    index.tries(id(1));
    index.committed(freed(A, 1), std::iter::empty(), false);
    assert_eq!(awake(&index), [1], "the try was before the release or after it");
    assert_eq!(index.rest(id(1)), Some(WakeReason::SEEN));
    assert_eq!(index.rest(id(1)), None);
    index.tries(id(1));
    index.committed(freed(A, 1), std::iter::empty(), true);
    assert_eq!(index.rest(id(1)), Some(WakeReason::NEWS), "earlier entries of other EMs were not checked here");
}

#[test]
fn waiter_without_capacity_passes_news_to_few_later_waiters() {
    let mut index = line(100);
    index.wake_at(&freed(A, 1));
    let mut looked = vec![];
    while let Some(&number) = awake(&index).first() {
        let wake = index.woken_by(id(number));
        assert_eq!(wake.is_news, looked.is_empty(), "one check is enough for all waiters");
        looked.push(number);
        index.pass_on(id(number), wake);
        assert_eq!(index.rest(id(number)), None);
    }
    assert_eq!(looked, [1, 10], "one later waiter with other needs; all others would find less");
}

/// A grant leaves a part of the freed capacity, which no waiter for any EM keeps: one with other amounts may use it.
#[test]
fn waiter_for_any_em_with_other_amounts_tries_what_grant_left() {
    let mut index = WaiterIndex { callers: 1, ..WaiterIndex::default() };
    for (number, cores) in [(1, 5), (2, 3), (3, 3), (4, 1)] {
        let needs = Needs::of(&Resource::cpu(cores).unwrap(), &Labels::default(), &EmSelector::default());
        index.insert(
            position(number),
            WaiterProfile { any_em: true, needs, ..WaiterProfile::default() },
            [B],
            0,
            OffsetDateTime::UNIX_EPOCH,
        );
        index.rest(id(number));
    }
    index.wake_at(&freed(A, 1));
    index.woken_by(id(1));
    commit(&mut index, FreedCapacity::default(), &[(1, A)]);
    assert_eq!(awake(&index), [2]);
    let wake = index.woken_by(id(2));
    index.pass_on(id(2), wake);
    index.rest(id(2));
    assert_eq!(awake(&index), [4]);
}

#[test]
fn waiter_at_insert_misses_no_news() {
    let mut index = line(10);
    let since = index.news_count();
    let late = |index: &mut WaiterIndex<()>, number| {
        index.insert(position(number), WaiterProfile::default(), [A], since, OffsetDateTime::UNIX_EPOCH);
        index.rest(id(number))
    };
    index.wake_at(&freed(B, MUCH));
    assert_eq!(late(&mut index, 100), None, "another EM has more capacity");
    index.wake_at(&freed(A, 2));
    assert_eq!(late(&mut index, 101), None, "earlier waiters were woken");
    index.wake_at(&freed(A, 100));
    assert_eq!(late(&mut index, 102), Some(WakeReason::NEWS), "capacity may be left beyond the woken waiters");
}

#[test]
fn waiter_is_woken_for_key_checked_before_insert() {
    let mut index = WaiterIndex { callers: 1, ..WaiterIndex::default() };
    let keys = [A, B];
    index.insert(position(1), sleeper(1), [keys[0]], 0, OffsetDateTime::UNIX_EPOCH);
    let since = index.news_count();
    index.wake_at(&freed(B, 1));
    // The event during the check is not missed.
    index.insert(position(1), sleeper(1), keys, since, OffsetDateTime::UNIX_EPOCH);
    assert!(index.rest(id(1)).is_some() && index.rest(id(1)).is_none());
    index.wake_at(&freed(B, 1));
    assert_eq!(awake(&index), [1]);
}

/// Commits a batch that grants requests at EMs.
fn commit(index: &mut WaiterIndex<()>, freed: FreedCapacity, granted: &[(u128, WaitKeyHash)]) {
    index.committed(freed, granted.iter().map(|(number, em)| (id(*number), *em)), false);
}

#[test]
fn waiter_index_with_many_awake_finds_next_sleeper_directly() {
    let visits = |count: u128| {
        let mut index = line(count + 50);
        let news = freed(A, u32::try_from(count).unwrap());
        index.wake_at(&news);
        index.woken_by(id(1));
        let visits = visits::count(|| commit(&mut index, FreedCapacity::default(), &[(1, A)]));
        assert_eq!(
            index.waiters[&id(count + 1)].state,
            WaiterState::Awake(Some(WakeReason::GRANT)),
            "the next sleeper"
        );
        visits
    };
    let [few, many] = [visits(50), visits(500)];
    assert!(many * 10 <= few * 13, "{few} visits with 50 awake, {many} with 500");
}

#[test]
fn waiter_index_without_capacity_left_publishes_nothing() {
    let mut index = line(10);
    let since = index.news_count();
    // One request was freed, and one was granted.
    commit(&mut index, freed(A, 1), &[(1, A)]);
    assert_eq!(awake(&index), [2], "the next after a grant");
    index.insert(position(100), sleeper(1), [A], since, OffsetDateTime::UNIX_EPOCH);
    assert_eq!(index.rest(id(100)), None, "an earlier waiter checks for it");
}

#[test]
fn waiter_index_without_waiters_counts_no_capacity() {
    let mut index = WaiterIndex { callers: 1, ..WaiterIndex::default() };
    for number in 0..10_000 {
        commit(&mut index, freed(em(number as u64), 1), &[]);
    }
    assert_eq!((index.anywhere.room.sum(), index.anywhere.room.by_em.len(), index.at.len()), (0, 0, 0));
}

/// Step of a waiter in the model.
#[derive(Debug, Clone, Copy)]
enum Step {
    Parked,
    Checking(WakeReason),
    Submitted(WakeReason, usize),
}

/// A model of the service around the index: EMs with free capacity for a number of requests, and waiters that check and are
/// granted.
struct Model {
    index: WaiterIndex<()>,
    free: Vec<u32>,
    /// Waiters by position: step, home EM, whether the waiter accepts any EM, and the accepted EMs.
    waiters: BTreeMap<u128, (Step, usize, bool, Vec<usize>)>,
    checks: u64,
    served: u64,
}

impl Model {
    fn new(ems: usize, waiters: impl IntoIterator<Item = (usize, bool, Vec<usize>)>) -> Self {
        let mut model = Self {
            index: WaiterIndex { callers: 1, ..WaiterIndex::default() },
            free: vec![0; ems],
            waiters: BTreeMap::new(),
            checks: 0,
            served: 0,
        };
        for (number, (home, any_em, accepted)) in (0..).zip(waiters) {
            let sleeper = WaiterProfile { any_em, ..sleeper(1) };
            model.index.insert(position(number), sleeper, [em(home as u64)], 0, OffsetDateTime::UNIX_EPOCH);
            assert_eq!(model.index.rest(id(number)), None);
            model.waiters.insert(number, (Step::Parked, home, any_em, accepted));
        }
        model
    }

    fn park(&mut self, number: u128) {
        let step = self.index.rest(id(number)).map_or(Step::Parked, Step::Checking);
        if let Some(waiter) = self.waiters.get_mut(&number) {
            waiter.0 = step;
        }
    }

    /// Whether a request fits behind the earlier waiters of the EM.
    fn fits(&self, free: &[u32], at: usize, number: u128) -> bool {
        let earlier = self.waiters.range(..number).filter(|(_, (_, home, ..))| *home == at).count();
        free[at] as usize > earlier
    }

    fn numbers(&self) -> Vec<u128> {
        self.waiters.keys().copied().collect()
    }

    /// Commits releases at EMs and the submitted requests, and lets each awake waiter check once.
    fn advance(&mut self, released: &[usize]) {
        let (mut freed, mut granted, mut refused) = (FreedCapacity::default(), vec![], vec![]);
        let mut frees = |at: usize| {
            *freed.wait_keys.entry(em(at as u64)).or_default() += 1;
            freed.ems.insert(em(at as u64));
        };
        for &at in released {
            self.free[at] += 1;
            frees(at);
        }
        for number in self.numbers() {
            let (step, home, ..) = self.waiters[&number];
            match step {
                Step::Submitted(_, at) if self.fits(&self.free, at, number) => {
                    self.free[at] -= 1;
                    if at != home {
                        frees(home);
                    }
                    granted.push((number, em(at as u64)));
                    self.waiters.remove(&number);
                    self.served += 1;
                }
                Step::Submitted(wake, _) => refused.push((number, wake)),
                _ => {}
            }
        }
        commit(&mut self.index, freed, &granted);
        for (number, wake) in refused {
            self.checks += 1;
            self.index.pass_on(id(number), wake);
            self.park(number);
        }
        let mut seen = self.free.clone();
        for number in self.numbers() {
            let (step, home, _, accepted) = self.waiters[&number].clone();
            match step {
                Step::Checking(wake) => {
                    self.checks += 1;
                    // A check counts capacity as used, so that not all waiters submit to the same EM.
                    let best =
                        accepted.into_iter().filter(|at| self.fits(&seen, *at, number)).max_by_key(|at| seen[*at]);
                    if let Some(at) = best {
                        // The reservation at the home EM is counted already.
                        seen[at] -= u32::from(at != home);
                        self.index.tries(id(number));
                        self.waiters.get_mut(&number).unwrap().0 = Step::Submitted(wake, at);
                    } else {
                        self.index.pass_on(id(number), wake);
                        self.park(number);
                    }
                }
                Step::Parked if self.index.waiters[&id(number)].state != WaiterState::Asleep => {
                    let wake = self.index.woken_by(id(number));
                    self.waiters.get_mut(&number).unwrap().0 = Step::Checking(wake);
                }
                _ => {}
            }
        }
    }

    /// Returns a waiter that fits on some EM.
    fn fitting(&self) -> Option<u128> {
        let fits = |number: u128, accepted: &[usize]| accepted.iter().any(|at| self.fits(&self.free, *at, number));
        self.waiters.iter().find(|(number, waiter)| fits(**number, &waiter.3)).map(|(number, _)| *number)
    }

    fn advance_until_parked(&mut self) {
        while self.waiters.values().any(|waiter| !matches!(waiter.0, Step::Parked))
            || self.numbers().iter().any(|number| self.index.waiters[&id(*number)].state != WaiterState::Asleep)
        {
            self.advance(&[]);
        }
    }
}

/// All tickets of 100 EMs are released, and as many requests wait for any EM.
#[test]
fn waiter_index_when_all_is_released_checks_few_times() {
    const EMS: usize = 100;
    let costs = |count: usize| {
        // Most requests wait at the EM that was closest when they entered.
        let any_em = (0..count).map(|number| (number % 3, true, (0..EMS).collect()));
        let mut model = Model::new(EMS, any_em);
        let released: Vec<usize> = (0..count).map(|number| number % EMS).collect();
        let visits = visits::count(|| {
            released.chunks(512).for_each(|part| model.advance(part));
            model.advance_until_parked();
        });
        assert_eq!(model.served, count as u64, "all are served");
        let per_served = |cost: u64| cost as f64 / count as f64;
        (per_served(model.checks), per_served(visits))
    };
    let [few, many] = [costs(1000), costs(3000)];
    assert!(many.0 <= few.0 * 1.3 && many.1 <= few.1 * 1.3, "{few:?} of 1,000, {many:?} of 3,000");
    assert!(many.0 <= 3.0, "{many:?}");
}

/// Few waiters of all kinds, and releases in random order: each waiter that fits is woken without a poll.
#[test]
fn waiter_index_after_random_releases_leaves_no_fitting_waiter() {
    const EMS: usize = 4;
    // The last two seeds needed a waiter before the last awake one, and capacity whose first waiter wakes elsewhere.
    for seed in (0..2000_u64).chain([6734, 39538]) {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            usize::try_from(random >> 33).unwrap() % below
        };
        let mut kinds = vec![];
        for _ in 0..10 {
            let (home, any_em) = (next(EMS), next(2) == 0);
            let others: Vec<usize> = (0..EMS).filter(|at| *at == home || next(3) == 0).collect();
            kinds.push((home, any_em, if any_em { others } else { vec![home] }));
        }
        let mut model = Model::new(EMS, kinds.clone());
        for _ in 0..6 {
            let released: Vec<usize> = (0..next(4)).map(|_| next(EMS)).collect();
            model.advance(&released);
            if next(2) == 0 {
                model.advance_until_parked();
            }
        }
        model.advance_until_parked();
        let left = model.fitting();
        assert!(left.is_none(), "seed {seed}: {left:?} fits at {:?}; {kinds:?}", model.free);
    }
}

#[test]
fn waiter_index_poll_with_many_keys_visits_some_in_turn() {
    let line = |count: u128| {
        let mut index = WaiterIndex { callers: 1, ..WaiterIndex::default() };
        for number in 0..count {
            index.insert(position(number), sleeper(1), [em(number as u64)], 0, OffsetDateTime::UNIX_EPOCH);
            assert_eq!(index.rest(id(number)), None);
        }
        index
    };
    let [few, many] = [1000, 4000].map(|count| visits::count(|| line(count).poll()));
    assert!(many * 10 <= few * 13, "{few} visits of 1,000 keys, {many} of 4,000");
    let mut index = line(1500);
    let (mut checked, news) = (BTreeSet::new(), index.news_count());
    for _ in 0..1500_usize.div_ceil(POLLED_MAX) {
        index.poll();
        for number in awake(&index) {
            checked.insert(number);
            assert!(index.woken_by(id(number)).is_poll);
            assert_eq!(index.rest(id(number)), None);
        }
    }
    assert_eq!((checked.len(), index.news_count()), (1500, news), "all have checked, and nothing is published");
}

/// Waiters that no EM can serve any more leave those that accept any EM, and forward the wake-up that they got there to all others.
#[test]
fn freed_em_wakes_waiter_behind_blocked_crowd() {
    let mut index = line(1);
    let any_em = |number| WaiterProfile { any_em: true, ..sleeper(number) };
    for number in 1..=41 {
        index.insert(position(number), any_em(number), [A], 0, OffsetDateTime::UNIX_EPOCH);
        assert_eq!(index.rest(id(number)), None);
    }
    // Capacity for one: each of the crowd finds that its user is at a limit.
    index.wake_at(&freed(em(7), 1));
    for number in 1..=40 {
        assert_eq!(awake(&index), [number]);
        let wake = index.woken_by(id(number));
        index.insert(
            position(number),
            WaiterProfile { any_em: false, ..any_em(number) },
            [B],
            index.news_count(),
            OffsetDateTime::UNIX_EPOCH,
        );
        index.pass_on(id(number), wake);
        assert_eq!(index.rest(id(number)), None);
    }
    assert_eq!(awake(&index), [41]);
    index.woken_by(id(41));
    assert_eq!(index.rest(id(41)), None);
    index.wake_at(&freed(em(7), 1));
    assert_eq!(awake(&index), [41], "an EM wakes none of the crowd");
}

/// A waiter gets a position before or behind all others, awake or asleep: it is in each set once, and wakes in its new order.
#[test]
fn waiter_at_other_position_wakes_in_new_order() {
    let at = |number: u128, seconds: i64| {
        QueuePosition::new(0, OffsetDateTime::UNIX_EPOCH + time::Duration::seconds(seconds), id(number))
    };
    for (seconds, is_awake) in [(-1, false), (1, false), (-1, true), (1, true)] {
        let mut index = line(5);
        if is_awake {
            index.wake_at(&freed(A, 3));
        }
        let since = index.news_count();
        index.insert(at(3, seconds), sleeper(3), [A], since, OffsetDateTime::UNIX_EPOCH);
        assert_eq!(index.rest(id(3)).is_some(), is_awake, "the wake-up remains");
        let waiters = &index.at[&A];
        assert_eq!((waiters.len(), waiters.has(position(3)), waiters.has(at(3, seconds))), (4, false, true));
        for number in [1, 2, 3] {
            index.woken_by(id(number));
            index.rest(id(number));
        }
        assert_eq!(awake(&index), [0; 0]);
        index.wake_at(&freed(A, 1));
        assert_eq!(awake(&index), if seconds < 0 { [3] } else { [1] });
        index.remove(id(3));
        assert_eq!(index.at[&A].len(), 3);
    }
}

/// A removed waiter checks once. It takes no wake-up any more, and hands on a wake-up that it has not taken.
#[test]
fn removed_waiter_wakes_next() {
    let mut index = line(5);
    assert_eq!(index.removed([id(1)]).len(), 1);
    assert_eq!((awake(&index), index.at[&A].len()), (vec![], 3), "its reservation wakes others, and it is no waiter");
    index.wake_at(&freed(A, 1));
    assert_eq!(awake(&index), [2]);
    index.removed([id(2)]);
    assert_eq!(awake(&index), [3], "the wake-up of the removed one");
    index.remove(id(1));
    assert_eq!(index.rest(id(1)), None);
}

/// A waiter that leaves while it checks hands its wake-up on: it may be for a key at which the waiter has no entry.
#[test]
fn leaving_waiter_hands_its_wake_up_on() {
    for (has_taken, is_removed) in [(false, false), (true, false), (true, true)] {
        let mut index = line(4);
        index.wake_at(&freed(A, 1));
        assert_eq!(awake(&index), [1]);
        if has_taken {
            index.woken_by(id(1));
        }
        if is_removed {
            index.removed([id(1)]);
        } else {
            index.remove(id(1));
        }
        assert_eq!(awake(&index), [2], "{has_taken} {is_removed}");
    }
    let mut index = line(4);
    index.remove(id(1));
    assert_eq!(awake(&index), [0; 0], "a waiter asleep has none");
}

/// A request that enters while it is removed checks once more.
#[test]
fn waiter_at_insert_misses_no_removal() {
    let mut index = line(3);
    let since = index.news_count();
    assert!(index.removed([id(100), id(101)]).is_empty());
    index.insert(position(100), sleeper(1), [B], since, OffsetDateTime::UNIX_EPOCH);
    assert_eq!(index.rest(id(100)), Some(WakeReason::NEWS));
    index.insert(position(102), sleeper(1), [B], since, OffsetDateTime::UNIX_EPOCH);
    assert_eq!(index.rest(id(102)), None, "another one was removed");
}
