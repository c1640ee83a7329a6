//! The ledger against a plain reference model: random operations, in batches of random size, through a store of maps.

mod assessment;
mod database;
mod model;
mod operations;
mod steps;
mod ticket_references;

use std::collections::{BTreeMap, HashSet};

use proptest::{prelude::*, test_runner::RngSeed};
use rm_model::{
    external::place_of,
    ledger::Ledger,
    limit_mode::LimitMode,
    operation::{Operation, Outcome, RequestKey},
    principal::Principal,
    scope::ScopeCounter,
    ticket::Ticket,
    wait_queue::{FreedKeys, WaitKey},
};
use uuid::Uuid;

use self::{assessment::*, database::*, model::*, operations::rules, steps::*, ticket_references::*};

/// A request that fits after the batches, and did not before, is notified at its short wait keys.
fn assert_woken(model: &Model, settled: &[usize], freed: &[FreedKeys]) {
    for number in settled.iter().copied().filter(|number| model.is_servable(*number)) {
        let w = &model.waiting[number];
        let is_freed = |key: &WaitKey| freed.iter().any(|freed| freed.contains(key));
        let is_woken = w.wait_keys().iter().any(|(key, is_short)| *is_short && is_freed(key));
        assert!(is_woken, "no freed key wakes {w:?}: {freed:?}");
    }
}

/// Rows that concurrent batches share: the second batch waits for the commit of the first.
#[derive(Debug, PartialEq, Eq, Hash)]
enum Shared {
    Scope(ScopeCounter),
    RequestId(RequestKey),
    /// An adoption can name a ticket of another EM.
    Ticket(Uuid),
    /// A request that waits for any EM can have an entry at each.
    Line,
    Cluster,
}

impl Shared {
    /// Rows that an operation shares with operations on other EMs.
    fn of(operation: &Operation, tables: &Tables, somebody_waits: bool) -> HashSet<Self> {
        let named = operation.ticket_id().and_then(|id| tables.tickets.get(&id));
        let of_em = tables.tickets.values().filter(|t| operation.steps_from().is_some() && t.em == *operation.em());
        let tickets: Vec<&Ticket> = named.into_iter().chain(of_em).collect();
        let held = tickets.iter().flat_map(|ticket| tables.limits.scopes(&ticket.ticket_labels()));
        let adopted = operation.adopts().map(|adopt| tables.limits.scopes(&adopt.ticket_labels()));
        let scopes = held.chain(adopted.into_iter().flatten()).map(|limited| limited.counter);
        let asked = operation.request().map(|request| request.counters(&tables.limits));
        let scopes = scopes.chain(asked.into_iter().flatten()).map(Self::Scope);
        let id = operation.request().and_then(|request| request.ask.request_key()).map(Self::RequestId);
        let id = id.into_iter().chain(operation.ticket_id().map(Self::Ticket));
        let id = id.chain(operation.request().map(|request| Self::Ticket(request.ask.ticket_id)));
        let waits = somebody_waits || operation.request().is_some_and(|request| request.wait.is_some());
        let in_queue = tickets.iter().any(|ticket| place_of(ticket.resource()).is_some());
        let in_queue = in_queue || operation.asks_queue().is_some();
        scopes.chain(id).chain(waits.then_some(Self::Line)).chain(in_queue.then_some(Self::Cluster)).collect()
    }
}

/// A batch that is not committed yet, and what it has locked beside its EMs.
struct Batch {
    ledger: Ledger,
    shares: HashSet<Shared>,
}

/// The model, and the store and ledgers that it is compared with.
struct Comparison {
    model: Model,
    tables: Tables,
    /// The uncommitted batch of each ledger.
    batches: Vec<Option<Batch>>,
    /// Waiting requests that did not fit before these batches.
    settled: Vec<usize>,
    /// The epochs since then.
    epochs: BTreeMap<usize, i64>,
}

impl Comparison {
    fn new(ledgers: usize) -> Self {
        let (model, batches) = (Model::default(), (0..ledgers).map(|_| None).collect());
        let tables = Tables { limits: rules(&model).into(), ..Tables::default() };
        Self { settled: model.settled(), model, tables, batches, epochs: BTreeMap::new() }
    }

    /// Applies the operation of a step. Returns false if the step has none.
    fn apply(&mut self, number: usize, step: &Step) -> bool {
        let new_id = Uuid::from_u128(u128::try_from(number).unwrap() + 1);
        let Some(operation) = self.model.operation(step, new_id) else { return false };
        let ledger = (0..EMS).find(|em| instance(*em) == *operation.em()).unwrap() % self.batches.len();
        let mut shares = Shared::of(&operation, &self.tables, self.model.waiting.iter().any(|w| w.is_queued));
        let others = self.batches.iter().enumerate().filter(|(other, _)| *other != ledger);
        let is_shared = others.into_iter().any(|(_, other)| other.iter().any(|b| !b.shares.is_disjoint(&shares)));
        if is_shared {
            self.commit();
            shares = Shared::of(&operation, &self.tables, self.model.waiting.iter().any(|w| w.is_queued));
        }
        // Operations of the next batch use the state after the commit.
        let operation = self.model.operation(step, new_id).unwrap();
        let (model, tables) = (&mut self.model, &self.tables);
        let begin = || Batch { ledger: Ledger::new(tables.snapshot(time_of(model.now))), shares: HashSet::new() };
        let batch = self.batches[ledger].get_or_insert_with(begin);
        batch.shares.extend(shares);
        let held_before: Vec<_> = (0..EMS).map(|em| model.left(em)).collect();
        let expected = model.step(step, new_id);
        let outcome = batch.ledger.apply(&Principal::Anonymous.into(), &operation);
        if let (Step::Register { em, .. }, Ok(Outcome::Registered(registered))) = (step, &outcome) {
            let before = self.epochs.insert(*em, registered.epoch);
            assert!(before.is_none_or(|before| before < registered.epoch), "an epoch never comes back");
            model.epochs.insert(*em, registered.epoch);
        }
        assert_eq!(answer(outcome), expected, "step {number}: {step:?}, left {held_before:?}");
        true
    }

    /// Commits all batches and compares everything.
    fn commit(&mut self) {
        self.epochs.clear();
        let mut freed = Vec::new();
        for batch in self.batches.iter_mut().filter_map(Option::take) {
            let deltas = batch.ledger.finish().0;
            freed.push(deltas.freed.clone());
            self.tables.write(deltas, time_of(self.model.now));
        }
        self.tables.check(&self.model);
        assert_woken(&self.model, &self.settled, &freed);
        self.begin();
    }

    /// Begins the next batches.
    fn begin(&mut self) {
        self.model.registered.clear();
        self.model.entered.clear();
        self.model.signs = self.tables.signs();
        self.settled = self.model.settled();
    }

    /// Changes without an operation happen between batches.
    fn between(&mut self, step: &Step) {
        let (model, tables) = (&mut self.model, &mut self.tables);
        model.step(step, Uuid::nil());
        match step {
            Step::Leave { ago } => {
                if let Some(number) = model.waiter(*ago) {
                    tables.leave(model.waiting[number].id);
                }
            }
            Step::Limit { .. } | Step::Policy { .. } => tables.set_limits(rules(model)),
            Step::Report { em } => tables.report(instance(*em)),
            Step::Cluster { max, used, shown } => tables.cluster.install(time_of(model.now), *max, *used, shown),
            _ => {}
        }
        self.begin();
    }
}

/// Assigns operations to `ledgers` ledgers by their EMs. Batches of different ledgers are in progress concurrently, unless they share rows.
fn run(steps: Vec<Step>, ledgers: usize) {
    let mut comparison = Comparison::new(ledgers);
    for (number, step) in steps.iter().chain([&Step::Commit { seconds: 0 }]).enumerate() {
        if !comparison.apply(number, step) {
            comparison.commit();
            comparison.between(step);
        }
    }
}

/// The number of runs and their seed: the same 2,000 runs each time, or as many random ones as `LINKIS_RM_MODEL_CASES` says.
fn runs(share: u32) -> ProptestConfig {
    let wanted = std::env::var("LINKIS_RM_MODEL_CASES").ok().and_then(|text| text.parse().ok());
    let rng_seed = wanted.map_or(RngSeed::Fixed(1), |_: u32| RngSeed::Random);
    ProptestConfig {
        cases: wanted.unwrap_or(2000) / share,
        rng_seed,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(runs(1))]

    #[test]
    fn ledger_replies_and_counters_match_model(steps in prop::collection::vec(step(), 1..80)) {
        run(steps, 1);
    }
}

proptest! {
    #![proptest_config(runs(4))]

    #[test]
    fn concurrent_ledgers_match_model(steps in prop::collection::vec(step(), 1..80), ledgers in 2..=3usize) {
        run(steps, ledgers);
    }
}

/// A release is notified at the key of a cap, even if no limit decides there.
#[test]
fn cap_release_wakes_waiter_without_deciding_limit() {
    let request = |wait, cap| {
        let (who, requires, request_id) = (NEW.who, None, None);
        Step::Request { em: 0, who, requires, amount: 5, ttl: 9, request_id, wait, cap }
    };
    let off = ModelRule { scarce: Some(0), instances: None, mode: LimitMode::Off };
    let steps = vec![
        Step::Register { em: 0, total: 30, protected: 0, reserved: false, zone: false },
        Step::Limit { set: USER_SET, values: [None; 2], rule: Some(off) },
        request(false, None),
        request(true, Some(9)),
        Step::Commit { seconds: 1 },
        Step::Released { ago: 0, user: 0 },
    ];
    run(steps, 1);
}

/// A ticket that names an application which the cluster has shown frees the amounts that its queue kept for it.
#[test]
fn named_application_wakes_waiter_of_queue() {
    let who = Who { queue: Some(0), ..NEW.who };
    let started = || Step::Adopt { em: 0, who, used: 2, application: None, again: None };
    let named =
        Step::Reported { ago: 0, in_use: false, used: 2, application: Some(1), stolen: false, epoch: Said::Nothing };
    let steps = vec![
        Step::Register { em: 0, total: 11, protected: 0, reserved: false, zone: false },
        Step::Cluster { max: [13, 12, 5], used: [0, 4, 0], shown: [0, 3, 0] },
        started(),
        started(),
        Step::Request { em: 0, who, requires: None, amount: 5, ttl: 1, request_id: None, wait: true, cap: None },
        Step::Commit { seconds: 0 },
        named,
    ];
    run(steps, 1);
}
