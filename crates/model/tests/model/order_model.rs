//! Model of the order of waiting requests. The test visits small worlds, with every order of entering, checks, grants, ends,
//! lost connections and returns, and asserts the invariants at every state.
//!
//! - `setting`: keys and requests of a world; `world`: its state and events; `invariants`; `part`; `search`: all orders of
//!   events;
//! - `examples`: worked examples with exact times; `scenes`: orders of events that a short search does not reach;
//! - `takeover`: the calls of one request id.

mod examples;
mod invariants;
mod part;
mod scenes;
mod search;
mod setting;
mod takeover;
mod world;

use std::time::{Duration, Instant};

use self::{
    search::{Broken, Found, explore},
    setting::Setting,
    world::Mistake,
};

/// Maximum number of events of one search.
const EVENTS_MAX: usize = 12;

/// Duration of the search in seconds, instead of the default.
const SECONDS: &str = "LINKIS_RM_ORDER_SECONDS";

fn duration() -> Duration {
    let seconds = std::env::var(SECONDS).ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(4))
}

fn is_long() -> bool {
    std::env::var_os(SECONDS).is_some()
}

/// Searches with more and more events until the deadline. Returns the number of states and of events of the last complete
/// search.
fn deepen(setting: &Setting, deadline: Instant) -> (usize, usize) {
    let (mut states, mut complete) = (0, 0);
    for events in 4..=EVENTS_MAX {
        let Found { states: visited, is_complete, broken } = explore(setting, None, events, deadline);
        if let Some(Broken { invariant, events }) = broken {
            let Setting { name, kinds, max, guarantee, requests, .. } = setting;
            panic!("{invariant}, after {events:?} in {name}: {kinds:?}, {max:?}, {guarantee:?}, {requests:?}");
        }
        states = states.max(visited);
        if !is_complete {
            break;
        }
        complete = events;
    }
    (states, complete)
}

/// Half of the time is for the named settings, and half for those of random numbers.
#[test]
fn order_after_any_events_keeps_invariants() {
    let (begin, duration) = (Instant::now(), duration());
    let named = setting::named();
    let (mut settings, mut states, count) = (0, 0, named.len() as u32);
    let mut visit = |setting: &Setting, deadline| {
        let (visited, complete) = deepen(setting, deadline);
        (settings, states) = (settings + 1, states + visited);
        eprintln!("{}: {visited} states, all of {complete} events", setting.name);
    };
    for (setting, at) in named.iter().zip(1..) {
        visit(setting, begin + duration / 2 * at / count);
    }
    for seed in 1.. {
        if begin.elapsed() >= duration {
            break;
        }
        visit(&setting::random(seed), Instant::now() + duration / 40);
    }
    eprintln!("{states} states in {settings} settings");
}

#[test]
fn order_without_any_rule_breaks_invariant() {
    for (mistake, name) in [
        (Mistake::OrderByKey, "two shared keys"),
        (Mistake::AbsentKeeps, "one key"),
        (Mistake::NewcomerPassesOwn, "two dimensions"),
        (Mistake::OwnLimitKeeps, "own limit"),
        (Mistake::OnlyThoseAheadPromise, "guarantee of a tenant"),
        (Mistake::StoredYesIsTrusted, "guarantee at any EM"),
        (Mistake::EntitlementIsNotConfirmed, "guarantee and a limit"),
    ] {
        let setting = setting::named().into_iter().find(|setting| setting.name == name).unwrap();
        let deadline = Instant::now() + Duration::from_secs(300);
        let mut found = (4..=EVENTS_MAX).map(|events| explore(&setting, Some(mistake), events, deadline));
        let Broken { invariant, events } = found.find_map(|found| found.broken).expect(name);
        eprintln!("{mistake:?}: {invariant}, after {events:?}");
    }
}
