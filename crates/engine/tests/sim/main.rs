//! The simulator: requests of several instances over one store, in an order that a seed decides, with faults. The real ledger
//! decides all grants.
//!
//! After each commit, no EM is over-committed, and counters equal tickets. Each request has one reply. When nothing happens
//! any more, no waiting request would be granted by the ledger. The transitions that occur are those of ARCHITECTURE.md.

mod instance;
mod store;
mod world;

use std::{fs, path::Path};

use world::{Shape, Transitions, World};

const ONE_INSTANCE: Shape = Shape { instances: 1, ems: 3, requests: 60, faults: false };
const SEVERAL_INSTANCES: Shape = Shape { instances: 3, ems: 4, requests: 80, faults: false };
const FAULTS: Shape = Shape { instances: 3, ems: 4, requests: 80, faults: true };

/// Number of seeds of each shape; `LINKIS_RM_SIM_SEEDS` raises it.
fn seeds() -> u64 {
    std::env::var("LINKIS_RM_SIM_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(100)
}

/// Heading of the table of transitions.
const HEADING: &str = "| stage | result → next stage |\n|---|---|\n";

/// Runs a shape with several seeds, and adds the transitions that occurred.
fn run(shape: Shape, seeds: u64, transitions: &mut Transitions) {
    let (mut steps, mut grants) = (0, 0);
    for seed in 0..seeds {
        let run = std::panic::catch_unwind(|| {
            let mut world = World::new(seed, shape);
            world.run();
            world
        });
        let Ok(world) = run else { panic!("seed {seed} of {shape:?}") };
        (steps, grants) = (steps + world.steps, grants + world.grants);
        for (transition, stages) in world.transitions {
            transitions.entry(transition).or_default().extend(stages);
        }
    }
    println!("{shape:?}: {steps} steps, {grants} grants");
    assert!(grants > 0);
}

#[test]
fn requests_of_one_instance_are_all_served() {
    run(ONE_INSTANCE, seeds(), &mut Transitions::new());
}

#[test]
fn requests_of_several_instances_are_all_served() {
    run(SEVERAL_INSTANCES, seeds(), &mut Transitions::new());
}

/// Requests beside faults leave no waiter forgotten. They go through all stages and results of the table in ARCHITECTURE.md, and no
/// others.
#[test]
fn requests_beside_faults_follow_transition_table() {
    let mut found = Transitions::new();
    run(FAULTS, 4 * seeds(), &mut found);
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/ARCHITECTURE.md");
    let document = fs::read_to_string(document).unwrap();
    let table = documented(&document);
    let unknown: Vec<_> =
        found.iter().filter(|(row, next)| !table.get(*row).is_some_and(|all| all.is_superset(next))).collect();
    let missed: Vec<_> = table.keys().filter(|row| !found.contains_key(*row)).collect();
    assert!(unknown.is_empty() && missed.is_empty(), "not in the table: {unknown:?}; did not occur: {missed:?}");
}

/// Returns the transitions that a document lists.
fn documented(document: &str) -> Transitions {
    let table = document.split_once(HEADING).expect("the table has its heading").1;
    let mut transitions = Transitions::new();
    for line in table.lines().take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        for result in cells[1].split("; ") {
            let (result, next) = result.split_once(" → ").expect(result);
            let next = next.split(", ").map(|next| next.trim_matches('`').to_owned()).collect();
            transitions.insert((cells[0].trim_matches('`').to_owned(), result.to_owned()), next);
        }
    }
    transitions
}
