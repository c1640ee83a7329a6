//! Scenes of the order model: fixed orders of events that a short search does not reach. Every state is checked as in a search.

use super::{
    invariants::check_state,
    setting::{Kind, Setting, Spec, dimensions},
    world::{
        Event::{self, Absent, Check, Enter, Leave, Release, Return},
        Mistake, Model, Phase, World,
    },
};

pub const KINDS: [Kind; 3] = [Kind::Em, Kind::Creator, Kind::Private];

/// Applies the events, and returns the last state.
pub fn play(setting: &Setting, events: &[Event]) -> World {
    try_play(setting, None, events).unwrap_or_else(|broken| panic!("{broken}"))
}

/// # Errors
/// The first broken invariant.
fn try_play(setting: &Setting, mistake: Option<Mistake>, events: &[Event]) -> Result<World, String> {
    let model = Model { setting, mistake, checks_part: true };
    let mut world = World::new(setting);
    for (number, event) in events.iter().enumerate() {
        assert!(model.events(&world).contains(event), "{event:?} is possible after {:?}", &events[..number]);
        let at = |broken| format!("{broken}, at {event:?}, number {number}");
        world = model.step(&world, *event).map_err(at)?;
        check_state(&model, &world).map_err(at)?;
    }
    Ok(world)
}

fn is_granted(world: &World, request: usize) -> bool {
    matches!(world.requests[request], Phase::Granted(_))
}

/// An EM of one, which request 0 uses; requests 1 to 3 of one user wait, then request 4 of another one.
fn crowd() -> (Setting, Vec<Event>) {
    let requests = [2, 0, 0, 0, 1].map(|user| Spec::new(user, [1, 0, 0]));
    (Setting::new("crowd", KINDS, [1, 9, 9], requests.into()), (0..5).map(|request| Enter(request, 0)).collect())
}

#[test]
fn order_after_leaving_keeps_turn_of_others() {
    let (setting, mut events) = crowd();
    events.extend([Release(0), Check(1), Leave(2), Release(1), Check(3)]);
    assert!(!is_granted(&play(&setting, &events), 3));
    events.push(Check(4));
    assert!(is_granted(&play(&setting, &events), 4));
}

#[test]
fn order_after_absence_keeps_turn_of_others() {
    let (setting, mut events) = crowd();
    events.extend([Release(0), Check(1), Absent(2), Release(1), Check(3)]);
    assert!(!is_granted(&play(&setting, &events), 3));
    // The absent request returns to the rank time of the turn that it had.
    events.extend([Return(2), Check(2), Check(4)]);
    let world = play(&setting, &events);
    assert!(!is_granted(&world, 2) && is_granted(&world, 4));
}

#[test]
fn order_with_lost_connections_gives_one_turn() {
    let (setting, mut events) = crowd();
    // Request 2 is granted in the turn of request 1, and request 1 returns behind request 4.
    events.extend([Absent(1), Release(0), Check(2), Release(2), Check(3)]);
    assert!(!is_granted(&play(&setting, &events), 3));
    events.extend([Absent(3), Return(1), Check(1)]);
    assert!(!is_granted(&play(&setting, &events), 1));
    events.push(Check(4));
    assert!(is_granted(&play(&setting, &events), 4));
}

/// Request 3 has taken the turn, stops being short at the EM, and waits for the creator's limit alone.
#[test]
fn order_after_one_key_is_free_keeps_turn_there() {
    let amounts = [(2, [2, 0, 0]), (2, [0, 1, 0]), (0, [1, 0, 0]), (0, [1, 1, 0]), (0, [1, 0, 0]), (1, [1, 0, 0])];
    let requests = amounts.map(|(user, amounts)| Spec::new(user, amounts));
    let setting = Setting::new("two keys", KINDS, [2, 1, 9], requests.into());
    let mut events: Vec<Event> = (0..6).map(|request| Enter(request, 0)).collect();
    events.extend([Release(0), Check(2), Absent(5), Check(3), Return(5), Check(4)]);
    let world = play(&setting, &events);
    assert!(!world.get(3).short.has(0) && world.get(3).short.has(1) && !is_granted(&world, 4));
    events.push(Check(5));
    assert!(is_granted(&play(&setting, &events), 5));
}

/// Request 1 waits for its user's own limit while request 3 enters, and then fits at once.
#[test]
fn order_at_own_limit_gives_no_second_turn() {
    let amounts = [(0, [1, 0, 1]), (0, [1, 0, 1]), (2, [2, 0, 0]), (1, [1, 0, 0]), (0, [1, 0, 0])];
    let requests = amounts.map(|(user, amounts)| Spec::new(user, amounts));
    let setting = Setting::new("own limit", KINDS, [2, 9, 1], requests.into());
    let events = [Enter(0, 0), Enter(1, 0), Release(0), Enter(2, 0), Enter(4, 0), Enter(3, 0), Release(2), Check(1)];
    assert!(!is_granted(&play(&setting, &events), 1));
    let events = [&events[..], &[Check(4)]].concat();
    assert!(is_granted(&play(&setting, &events), 4));
    assert!(try_play(&setting, Some(Mistake::OwnLimitAges), &events).is_err_and(|broken| broken.starts_with("5:")));
}

#[test]
fn newcomer_beside_waiting_own_request_waits() {
    let setting = dimensions();
    // Request 2 is behind request 1 for cores, and needs all memory.
    let mut events = vec![Enter(0, 0), Enter(1, 0), Enter(2, 0)];
    let before = play(&setting, &events);
    // A small request of the same user would fit beside request 1; one of another user does not pass request 1.
    events.extend([Enter(3, 0), Check(3), Enter(4, 0)]);
    let world = play(&setting, &events);
    assert!(before.get(2).short.has(0) && world.get(3).short.has(0) && world.get(4).short.has(0));
    events.extend([Leave(1), Check(2)]);
    assert!(is_granted(&play(&setting, &events), 2));
}
