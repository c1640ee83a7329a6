//! Who is woken by what, in which order, and how many.

use time::OffsetDateTime;
use uuid::Uuid;

use super::*;
use crate::domain::{
    em::EmInstance,
    line::{FreedSpots, Spot},
};

fn position(number: u128) -> QueuePosition {
    QueuePosition::new(0, OffsetDateTime::UNIX_EPOCH, Uuid::from_u128(number))
}

fn em(host: &str) -> Spot {
    Spot::Em(EmInstance::parse("em", "ecm", host).unwrap())
}

fn freed(spot: Spot, requests: u32) -> Freed {
    let mut spots = FreedSpots::default();
    spots.note(spot, requests);
    Freed::at(&spots).remove(0)
}

fn awake(index: &Index) -> Vec<u128> {
    let awake = index.waiters.iter().filter(|(_, waiter)| waiter.state != State::Asleep);
    awake.map(|(position, _)| position.ticket_id().as_u128()).collect()
}

/// Every tenth needs memory, the others cores.
fn sleeper(number: u128) -> Sleeper {
    let needs = [if number.is_multiple_of(10) { Dimension::Memory } else { Dimension::Cores }];
    Sleeper { needs: needs.into(), ..Sleeper::default() }
}

/// The first waits at b, the others at a; all of them sleep.
fn line(count: u128) -> Index {
    let mut index = Index { callers: 1, ..Index::default() };
    for number in 0..count {
        let spot = em(if number == 0 { "b" } else { "a" });
        index.insert(position(number), sleeper(number), [SpotKey::of(&spot)], 0);
        assert_eq!(index.rest(position(number)), None);
    }
    index
}

#[test]
fn as_many_wake_as_there_is_room_for_and_each_grant_one_more() {
    let mut index = line(100);
    index.wake_at(&freed(em("a"), 3));
    assert_eq!(awake(&index), [1, 2, 3]);
    index.committed(Freed::default(), [position(1)].into_iter(), false);
    assert_eq!(awake(&index), [2, 3, 4]);
    index.wake_at(&freed(em("a"), MUCH));
    // The fourth was not told of any room, and is the first of sixteen.
    assert_eq!(awake(&index), (2..=3 + 16).collect::<Vec<_>>());
}

#[test]
fn who_is_awake_when_there_is_news_looks_again_before_he_sleeps() {
    let mut index = line(10);
    index.wake_at(&freed(em("a"), 1));
    assert_eq!(index.woken_by(position(1)), Wake::NEWS);
    index.wake_at(&freed(em("a"), 1));
    assert_eq!(awake(&index), [1, 2], "the next one, and he who is awake already");
    assert_eq!(index.rest(position(1)), Some(Wake::NEWS), "what he saw may be older than that");
    assert_eq!(index.rest(position(1)), None);
    assert_eq!(awake(&index), [2]);
}

#[test]
fn where_an_em_is_held_no_more_those_wake_whom_any_will_do() {
    let mut index = line(3);
    for number in 3..50 {
        let sleeper = Sleeper { any_em: true, ..sleeper(number) };
        index.insert(position(number), sleeper, [SpotKey::of(&em("a"))], 0);
        assert_eq!(index.rest(position(number)), None);
    }
    index.wake_anywhere();
    assert_eq!(awake(&index), (3..3 + 16).collect::<Vec<_>>());
}

#[test]
fn a_release_is_followed_by_the_first_who_sleeps() {
    let (mut index, key) = (line(10), SpotKey::of(&em("a")));
    index.room_comes(key);
    index.room_comes(key);
    assert_eq!(awake(&index), [1, 2]);
    for number in [1, 2] {
        let wake = index.woken_by(position(number));
        assert!(wake.is_coming && !wake.is_news, "{wake:?}");
        index.tries(position(number));
    }
    // Both met it: what was freed was taken again, and only the one behind looks whether there is more.
    index.committed(freed(em("a"), 2), [1, 2].map(position).into_iter(), false);
    assert_eq!(awake(&index), [3, 4]);
    assert!([3, 4].map(|number| index.woken_by(position(number))).iter().all(|wake| !wake.is_news));
}

#[test]
fn who_followed_a_release_in_vain_is_told_of_it_and_nobody_else() {
    let mut index = line(10);
    index.room_comes(SpotKey::of(&em("a")));
    index.woken_by(position(1));
    index.tries(position(1));
    index.committed(freed(em("a"), 1), std::iter::empty(), false);
    assert_eq!(awake(&index), [1], "he was before it, or comes after it");
    assert_eq!(index.rest(position(1)), Some(Wake::SEEN));
    assert_eq!(index.rest(position(1)), None);
    index.tries(position(1));
    index.committed(freed(em("a"), 1), std::iter::empty(), true);
    assert_eq!(index.rest(position(1)), Some(Wake::NEWS), "who stands before him elsewhere, nobody here has seen");
}

#[test]
fn who_finds_no_room_passes_the_news_to_a_few_behind_him() {
    let mut index = line(100);
    index.wake_at(&freed(em("a"), 1));
    let mut looked = vec![];
    while let Some(&number) = awake(&index).first() {
        let wake = index.woken_by(position(number));
        assert_eq!(wake.is_news, looked.is_empty(), "one look is enough for all of them");
        looked.push(number);
        index.pass_on(position(number), wake);
        assert_eq!(index.rest(position(number)), None);
    }
    assert_eq!(looked[..5], [1, 10, 11, 20, 21], "those behind who need something else");
    assert_eq!(looked.len(), 16);
}

#[test]
fn who_is_about_to_stand_misses_nothing() {
    let mut index = line(10);
    let since = index.news_count();
    let late = |index: &mut Index, number| {
        index.insert(position(number), Sleeper::default(), [SpotKey::of(&em("a"))], since);
        index.rest(position(number))
    };
    index.wake_at(&freed(em("b"), MUCH));
    assert_eq!(late(&mut index, 100), None, "there is more room elsewhere");
    index.wake_at(&freed(em("a"), 2));
    assert_eq!(late(&mut index, 101), None, "others were woken, who stand before him");
    index.wake_at(&freed(em("a"), 100));
    assert_eq!(late(&mut index, 102), Some(Wake::NEWS), "there may be room for more than could be woken");
}

#[test]
fn somebody_hears_of_room_where_he_does_not_stand() {
    let mut index = Index { callers: 1, ..Index::default() };
    let keys = ["a", "b"].map(|host| SpotKey::of(&em(host)));
    index.insert(position(1), sleeper(1), [keys[0]], 0);
    let since = index.news_count();
    index.wake_at(&freed(em("b"), 1));
    // What was told while he was looking there is not missed.
    index.insert(position(1), sleeper(1), keys, since);
    assert!(index.rest(position(1)).is_some() && index.rest(position(1)).is_none());
    index.wake_at(&freed(em("b"), 1));
    assert_eq!(awake(&index), [1]);
}
