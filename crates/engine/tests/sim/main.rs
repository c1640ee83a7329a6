//! The simulator: requests of several instances over one store, in an order that a seed decides, with faults. The real ledger
//! decides all grants.
//!
//! After each commit, no EM is over-committed, and counters equal tickets. A drained EM grants nothing. Each request has one reply.
//! When nothing happens any more, no waiting request would be granted by the ledger. The transitions that occur are those of ARCHITECTURE.md.
//!
//! A failing run is shortened, and printed as a test for `regressions`. `LINKIS_RM_SIM_SEEDS` sets the number of fixed seeds,
//! `LINKIS_RM_SIM_SECONDS` the time for new ones, `LINKIS_RM_SIM_FIRST_SEED` the first of the new ones.

mod choices;
mod faults;
mod instance;
mod regressions;
mod store;
mod world;

use std::{
    any::Any,
    collections::BTreeMap,
    fs,
    ops::Range,
    panic::{self, AssertUnwindSafe},
    path::Path,
    time::{Duration, Instant, SystemTime},
};

use choices::{Choices, Record};
use world::{Faults, Shape, Transitions, World};

const ONE_INSTANCE: Shape =
    Shape { instances: 1, ems: 3, requests: 60, faults: Faults::None, users: 1, polls: false, guarantee: 0 };
const SEVERAL_INSTANCES: Shape =
    Shape { instances: 3, ems: 4, requests: 80, faults: Faults::None, users: 1, polls: false, guarantee: 0 };
const ORDERLY_FAULTS: Shape =
    Shape { instances: 2, ems: 4, requests: 80, faults: Faults::Orderly, users: 1, polls: false, guarantee: 0 };
const FAULTS: Shape =
    Shape { instances: 3, ems: 4, requests: 80, faults: Faults::All, users: 1, polls: true, guarantee: 0 };
/// With more EMs than a request checks after one wake-up: the next poll checks others.
const LIMITED_USERS: Shape =
    Shape { instances: 1, ems: 8, requests: 100, faults: Faults::None, users: 12, polls: true, guarantee: 0 };
const LIMITED_USERS_OF_SEVERAL_INSTANCES: Shape =
    Shape { instances: 2, ems: 4, requests: 120, users: 6, polls: false, ..LIMITED_USERS };
const ORDERLY_FAULTS_OF_LIMITED_USERS: Shape = Shape { faults: Faults::Orderly, ..LIMITED_USERS_OF_SEVERAL_INSTANCES };
const FAULTS_OF_LIMITED_USERS: Shape = Shape { faults: Faults::All, polls: true, ..LIMITED_USERS_OF_SEVERAL_INSTANCES };

/// Users of which some have a guarantee.
const GUARANTEED_USERS: Shape = Shape { guarantee: 2, ..LIMITED_USERS };
const GUARANTEED_USERS_OF_SEVERAL_INSTANCES: Shape = Shape { guarantee: 2, ..LIMITED_USERS_OF_SEVERAL_INSTANCES };
const FAULTS_OF_GUARANTEED_USERS: Shape = Shape { guarantee: 2, ..FAULTS_OF_LIMITED_USERS };

/// Time to shorten a failing run.
const SHORTENING_MAX: Duration = Duration::from_secs(30);

/// Reads a number from the environment.
fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Fixed seeds of each shape: `LINKIS_RM_SIM_SEEDS` of them.
fn seeds(factor: u64) -> Range<u64> {
    0..factor * setting("LINKIS_RM_SIM_SEEDS").unwrap_or(100)
}

/// Heading of the table of transitions.
const HEADING: &str = "| stage | result → next stage |\n|---|---|\n";

/// Runs a world. Returns it, and the message of a failure.
fn run(choices: Choices, shape: Shape) -> (World, Option<String>) {
    let mut world = World::new(choices, shape);
    let result = panic::catch_unwind(AssertUnwindSafe(|| world.run()));
    (world, result.err().map(|panic| message(&*panic)))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

/// Replays a recorded run, and prints its steps.
fn replay(shape: Shape, record: &str) {
    let mut world = World::new(Choices::replayed(record.parse().unwrap()), shape);
    world.is_printed = true;
    world.run();
}

/// Removes steps from a failing run as long as it fails.
fn shortened(shape: Shape, mut record: Record) -> Record {
    let fails = |record: &Record| run(Choices::replayed(record.clone()), shape).1.is_some();
    let (mut chunk, begin) = (record.0.len() / 2, Instant::now());
    while chunk > 0 {
        let mut at = 1;
        while at < record.0.len() && begin.elapsed() < SHORTENING_MAX {
            let mut shorter = record.clone();
            shorter.0.drain(at..(at + chunk).min(record.0.len()));
            match fails(&shorter) {
                true => record = shorter,
                false => at += chunk,
            }
        }
        chunk /= 2;
    }
    record
}

/// Runs a shape with several seeds, and adds the transitions that occurred.
///
/// Returns the numbers of steps and grants.
fn run_all(shape: Shape, seeds: Range<u64>, transitions: &mut Transitions) -> (u64, u64) {
    let (mut steps, mut grants) = (0, 0);
    for seed in seeds {
        let (world, failure) = run(Choices::random(seed), shape);
        if let Some(failure) = failure {
            panic::set_hook(Box::new(|_| {}));
            let record = shortened(shape, world.choices.record);
            drop(panic::take_hook());
            panic!(
                "seed {seed} of {shape:?}: {failure}\n\n#[test]\nfn NAME() {{\n    replay({shape:?}, \"{record}\");\n}}\n"
            );
        }
        (steps, grants) = (steps + world.steps, grants + world.grants);
        for (transition, stages) in world.transitions {
            transitions.entry(transition).or_default().extend(stages);
        }
    }
    assert!(grants > 0, "no request was granted");
    (steps, grants)
}

#[test]
fn requests_of_one_instance_are_all_served() {
    run_all(ONE_INSTANCE, seeds(1), &mut Transitions::new());
}

#[test]
fn requests_of_several_instances_are_all_served() {
    run_all(SEVERAL_INSTANCES, seeds(1), &mut Transitions::new());
}

#[test]
fn requests_of_limited_users_are_all_served() {
    run_all(LIMITED_USERS, seeds(1), &mut Transitions::new());
    run_all(LIMITED_USERS_OF_SEVERAL_INSTANCES, seeds(1), &mut Transitions::new());
}

#[test]
fn requests_of_guaranteed_users_are_all_served() {
    for shape in [GUARANTEED_USERS, GUARANTEED_USERS_OF_SEVERAL_INSTANCES, FAULTS_OF_GUARANTEED_USERS] {
        run_all(shape, seeds(1), &mut Transitions::new());
    }
    let entitled = |seed| run(Choices::random(seed), GUARANTEED_USERS_OF_SEVERAL_INSTANCES).0.store.entitled;
    assert!((0..10).map(entitled).sum::<usize>() > 10, "requests are entitled");
}

/// A changed order leaves no waiter without a wake-up, and no two requests move each other for ever.
#[test]
fn requests_beside_changed_orders_are_all_served() {
    for shape in [SEVERAL_INSTANCES, LIMITED_USERS, LIMITED_USERS_OF_SEVERAL_INSTANCES] {
        run_all(Shape { faults: Faults::Orders, ..shape }, seeds(1), &mut Transitions::new());
    }
}

/// No waiter depends on a poll while all notifications arrive.
#[test]
fn requests_beside_orderly_faults_are_all_served() {
    run_all(ORDERLY_FAULTS, seeds(1), &mut Transitions::new());
    run_all(ORDERLY_FAULTS_OF_LIMITED_USERS, seeds(1), &mut Transitions::new());
}

/// A failed action loses no wake-up.
#[test]
fn requests_beside_failures_are_all_served() {
    for shape in [ORDERLY_FAULTS, ORDERLY_FAULTS_OF_LIMITED_USERS] {
        run_all(Shape { faults: Faults::Failing, ..shape }, seeds(1), &mut Transitions::new());
    }
}

/// Requests beside faults leave no waiter forgotten. They go through all stages and results of the table in ARCHITECTURE.md, and no
/// others.
#[test]
fn requests_beside_faults_follow_transition_table() {
    let mut found = Transitions::new();
    run_all(FAULTS, seeds(6), &mut found);
    assert_documented(&found);
    assert_eq!(documented().keys().find(|row| !found.contains_key(*row)), None, "did not occur");
}

/// Runs that find known bugs of the wait queues, by shape and seed. Another simulator needs others.
const CHOSEN: [(Shape, u64); 8] = [
    (ORDERLY_FAULTS_OF_LIMITED_USERS, 1879),
    // A failed attempt did not forward its wake-up.
    (Shape { faults: Faults::Failing, ..ORDERLY_FAULTS }, 100_434),
    (SEVERAL_INSTANCES, 138),
    (SEVERAL_INSTANCES, 267),
    (ONE_INSTANCE, 169),
    (ONE_INSTANCE, 217),
    // A request at a closed EM was behind there, and a first at the limit of its user, in turn and without end.
    (FAULTS_OF_LIMITED_USERS, 30_130_137_018_139_772),
    // A guarantee was promised twice: an own request did not fall behind the new one, because they share no key.
    (FAULTS_OF_GUARANTEED_USERS, 802_000_001_225),
];

#[test]
fn requests_of_chosen_seeds_are_all_served() {
    for (shape, seed) in CHOSEN {
        run_all(shape, seed..seed + 1, &mut Transitions::new());
    }
}

/// Runs seeds that no run had before, for `LINKIS_RM_SIM_SECONDS`.
#[test]
fn requests_of_new_seeds_are_all_served() {
    let time = Duration::from_secs(setting("LINKIS_RM_SIM_SECONDS").unwrap_or(1));
    let begin = Instant::now();
    let clock = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() << 24;
    let mut seed = setting("LINKIS_RM_SIM_FIRST_SEED").unwrap_or_else(clock);
    let (first, mut steps, mut grants) = (seed, 0, 0);
    let mut found = Transitions::new();
    while begin.elapsed() < time {
        for shape in [
            ONE_INSTANCE,
            SEVERAL_INSTANCES,
            ORDERLY_FAULTS,
            FAULTS,
            LIMITED_USERS,
            FAULTS_OF_LIMITED_USERS,
            FAULTS_OF_GUARANTEED_USERS,
        ] {
            // In about one of 200 runs, a waiter depends on the next poll: the wake-ups of a release end before it, or it looks
            // while capacity is assumed for another request, which does not take it. To wake waiters in each of these cases would
            // cost more.
            let shape = Shape { polls: true, ..shape };
            let ran = run_all(shape, seed..seed + 20, &mut found);
            (steps, grants) = (steps + ran.0, grants + ran.1);
        }
        seed += 20;
    }
    println!("seeds {first} to {seed}: {steps} steps, {grants} grants in {:.0?}", begin.elapsed());
    assert_documented(&found);
}

/// Equal choices give equal runs: a failing seed can be repeated.
#[test]
fn run_repeats_with_its_seed_and_its_record() {
    for seed in 0..20 {
        let (world, failure) = run(Choices::random(seed), FAULTS);
        assert_eq!(failure, None);
        let again = run(Choices::random(seed), FAULTS).0;
        assert_eq!(
            (again.steps, again.grants, &again.choices.record),
            (world.steps, world.grants, &world.choices.record)
        );
        let record = world.choices.record.to_string();
        let replayed = run(Choices::replayed(record.parse().unwrap()), FAULTS).0;
        assert_eq!((replayed.steps, replayed.grants), (world.steps, world.grants));
    }
}

/// Asserts that the table has the transitions.
fn assert_documented(found: &Transitions) {
    let table = documented();
    let unknown = found.iter().find(|(row, next)| !table.get(*row).is_some_and(|all| all.is_superset(next)));
    assert_eq!(unknown, None, "not in the table");
}

/// Returns the transitions that ARCHITECTURE.md lists.
fn documented() -> Transitions {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/ARCHITECTURE.md");
    let document: &str = fs::read_to_string(document).unwrap().leak();
    let table = document.split_once(HEADING).expect("the table has its heading").1;
    let mut transitions = BTreeMap::new();
    for line in table.lines().take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        for result in cells[1].split("; ") {
            let (result, next) = result.split_once(" → ").expect(result);
            let next = next.split(", ").map(|next| next.trim_matches('`')).collect();
            transitions.insert((cells[0].trim_matches('`'), result), next);
        }
    }
    transitions
}
