//! Tests of the choice and the plan of engines that end because requests wait.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use rm_model::{
    em::{Em, EmInstance},
    ledger::{WaitQueueView, counters},
    limit::{CountingRule, LabelPattern, LabelSet, Limits, Rule},
    limit_mode::LimitMode,
    name::{Labels, Name},
    operation::{PlacedRequest, RequestScopes, RequestSpec, WaitParameters},
    order::{QueueRules, RankedRequest},
    principal::Principal,
    priority::{Priorities, PriorityRule},
    reclaim::{ReclaimPolicies, ReclaimPolicy},
    resource::{Dimension, Resource},
    scope::ScopeHoldings,
    selector::EmSelector,
    ticket::EngineInstance,
    wait_queue::{QueueEntry, QueuePosition, WaitKey},
};

use super::{super::reclaim_choice::short_keys, *};

fn name(text: &str) -> Name {
    Name::parse("name", text).unwrap()
}

fn em_instance(em: &str) -> EmInstance {
    EmInstance::parse("em", "ecm", em).unwrap()
}

fn id(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

fn at(seconds: i64) -> OffsetDateTime {
    OffsetDateTime::UNIX_EPOCH + time::Duration::seconds(seconds)
}

const NOW: i64 = 10_000;

/// A cluster of EMs with the same number of cores, whose users have a limit, and whose tickets may end after a minute without a task.
struct World {
    limits: Arc<Limits>,
    total: Resource,
    tickets: BTreeMap<Uuid, Ticket>,
    requests: Vec<TriedRequest>,
    rows: Vec<Reclaim>,
    unavailable: Vec<&'static str>,
    held: Vec<u128>,
}

fn pattern(labels: &[(&str, Option<&str>)]) -> LabelPattern {
    LabelPattern::new(labels.iter().map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned))).collect())
}

fn policy(labels: &[(&str, Option<&str>)], mode: ReclaimMode) -> ReclaimPolicy {
    let (idle_after, grace) = (Duration::from_secs(60), Duration::from_secs(30));
    ReclaimPolicy { idle_after, grace, ..ReclaimPolicy::new(pattern(labels), mode) }
}

/// A policy that also ends busy engines, ten minutes after their grants.
fn busy_policy(labels: &[(&str, Option<&str>)]) -> ReclaimPolicy {
    ReclaimPolicy { busy: true, ..policy(labels, ReclaimMode::Stop) }
}

impl World {
    fn new(cores: i64, of_user: i64) -> Self {
        Self::guaranteed(cores, of_user, 0)
    }

    /// As [`World::new`], and each user is guaranteed some cores.
    fn guaranteed(cores: i64, of_user: i64, guarantee: i64) -> Self {
        let [max, guarantee] = [of_user, guarantee].map(|cores| BTreeMap::from([(Dimension::Cores, cores)]));
        let rule = Rule { pattern: pattern(&[("user", None)]), mode: LimitMode::Enforced, max, guarantee };
        let counting = CountingRule::wanted([rule.label_set()].into(), &BTreeMap::new()).pop_first().unwrap();
        let limits = Limits::new(Uuid::nil(), vec![LabelSet { id: 1, counting, is_counted: true }], [rule]);
        let world = Self {
            limits: limits.into(),
            total: Resource::cpu(cores).unwrap(),
            tickets: BTreeMap::new(),
            requests: vec![],
            rows: vec![],
            unavailable: vec![],
            held: vec![],
        };
        world.with_policies([policy(&[("user", None)], ReclaimMode::Stop)])
    }

    fn with_policies(mut self, policies: impl IntoIterator<Item = ReclaimPolicy>) -> Self {
        let rules = QueueRules { reclaim: ReclaimPolicies::new(policies), ..QueueRules::default() };
        self.limits = Limits::clone(&self.limits).with_queue_rules(rules).into();
        self
    }

    /// Adds a ticket of one core; `idle_since` is `None` for a busy engine.
    fn ticket(&mut self, number: u128, em: &str, (user, engine_type): (&str, &str), idle_since: Option<i64>) {
        let state = TicketState::Used {
            resource: Resource::cpu(1).unwrap(),
            engine: EngineInstance { application_name: name("engine"), instance: name("engine:1") },
            used_time: at(0),
            idle_since: idle_since.map(at),
        };
        let ticket = Ticket {
            id: id(number),
            user: name(user),
            creator: name("IDE"),
            engine_type: engine_type.to_owned(),
            em: em_instance(em),
            labels: Labels::default(),
            locked_time: at(0),
            state,
            principal: Principal::Anonymous,
            em_epoch: 1,
        };
        self.tickets.insert(ticket.id, ticket);
    }

    /// Gives a ticket some cores.
    fn enlarge(&mut self, number: u128, cores: i64) {
        self.resize(number, Resource::cpu(cores).unwrap());
    }

    /// Gives a ticket another resource.
    fn resize(&mut self, number: u128, to: Resource) {
        let ticket = self.tickets.get_mut(&id(number)).unwrap();
        if let TicketState::Used { resource, .. } = &mut ticket.state {
            *resource = to;
        }
    }

    /// Adds a waiting request, behind all others.
    fn request(&mut self, number: u128, em: &str, (user, engine_type): (&str, &str), cores: i64) {
        let position = QueuePosition::new(0, at(i64::try_from(self.requests.len()).unwrap()), id(number));
        let wait = WaitParameters {
            claim: id(number),
            instance_id: Uuid::nil(),
            remaining: Duration::ZERO,
            is_elsewhere: false,
            priority: Some(0),
            position: Some(position),
        };
        let spec = RequestSpec {
            principal: Principal::Anonymous,
            ticket_id: id(number),
            user: name(user),
            creator: name("IDE"),
            engine_type: engine_type.to_owned(),
            resource: Resource::cpu(cores).unwrap(),
            labels: Labels::default(),
            selector: EmSelector::default(),
            caps: vec![],
            lock_ttl: Duration::ZERO,
            request_id: None,
            return_counters: false,
            priority: 0,
            may_wait: true,
        };
        let (em, wait, scopes) = (em_instance(em), Some(wait), RequestScopes::default());
        let place = PlacedRequest { em, ask: spec.into(), wait, any_em: false, is_em_unavailable: false, scopes };
        self.requests.push(TriedRequest { ticket_id: id(number), wait_until: at(NOW + 600), places: vec![place] });
    }

    /// Lets the last request be tried at another EM, too.
    fn also_at(&mut self, em: &str) {
        let places = &mut self.requests.last_mut().unwrap().places;
        let scopes = RequestScopes::default();
        places.push(PlacedRequest { em: em_instance(em), scopes, ..places[0].clone() });
    }

    fn row(&mut self, ticket: u128, request: u128, progress: ReclaimProgress, state: ReclaimFor) {
        let (ticket_id, for_ticket_id, mode) = (id(ticket), id(request), ReclaimMode::Stop);
        let due_time = if progress == CHOSEN { at(NOW + 20) } else { at(NOW - 1) };
        let for_em = em_instance("a");
        let busy = false;
        self.rows.push(Reclaim { ticket_id, for_ticket_id, for_em, mode, busy, due_time, progress, request: state });
    }

    fn em(&self, em: &str) -> Em {
        let (none, total) = (self.total.zero_like(), self.total.clone());
        let on_em = self.tickets.values().filter(|ticket| ticket.em == em_instance(em));
        let used = on_em.fold(none.clone(), |sum, ticket| sum.add(ticket.resource()).unwrap());
        Em {
            instance: em_instance(em),
            total,
            protected: none.clone(),
            used,
            locked: none,
            used_tickets: Default::default(),
            labels: Labels::default(),
            reserved: Labels::default(),
            epoch: 1,
            register_time: at(0),
            version: 1,
            going: None,
            counted: rm_model::em::LabelSetProgress { to: 1, under_way: None },
            drain: None,
            is_held: false,
        }
    }

    fn state(&self) -> CheckState {
        let ems = ["a", "b"].map(|em| (em_instance(em), self.em(em)));
        let ems = HashMap::from(ems);
        let mut scopes = HashMap::<_, ScopeHoldings>::new();
        for ticket in self.tickets.values() {
            for at in counters(&self.limits, ems[&ticket.em].counted, ticket.id, &ticket.ticket_labels()) {
                scopes.entry(at.counter.clone()).or_default().used.add(at.share(ticket.resource()), 1).unwrap();
            }
        }
        let mut line = WaitQueueView { wait_keys: Some(BTreeMap::new()), ..WaitQueueView::default() };
        let (limits, now) = (self.limits.clone(), Some(at(NOW)));
        let mut state = CheckState { ems, limits, scopes, now, ..CheckState::default() };
        for request in self.requests.iter().map(|request| &request.places[0]) {
            let short = short_keys(&state, &PlacedRequest { wait: None, ..request.clone() });
            // A request that fits is about to be granted.
            let wait_keys = if short.is_empty() { [WaitKey::Em(request.em.clone())].into() } else { short };
            let position = request.position().unwrap();
            let mut ranked = RankedRequest::new(position.ticket_id(), None, position.since(), 0);
            (ranked.short_at, ranked.was_shared) = (wait_keys.clone(), true);
            line.ranks.own.insert(ranked);
            for wait_key in wait_keys {
                let entry = QueueEntry { resource: request.resource().clone(), is_short: true };
                line.line.insert(wait_key, position, entry);
            }
            state.line = line.clone();
        }
        state.line = line;
        state
    }

    fn plan(&self) -> ReclaimPlan {
        let view = ReclaimView {
            state: self.state(),
            requests: self.requests.clone(),
            tickets: self.tickets.clone(),
            unavailable: self.unavailable.iter().map(|em| em_instance(em)).collect(),
            held: self.held.iter().map(|ticket| id(*ticket)).collect(),
            rows: self.rows.clone(),
            rows_max: 10,
            now: at(NOW),
        };
        view.plan()
    }

    /// Returns the new choices: ticket and request.
    fn chosen(&self) -> Vec<(u128, u128)> {
        self.plan().new.iter().map(|new| (new.ticket_id.as_u128(), new.for_ticket_id.as_u128())).collect()
    }

    fn withdrawn(&self) -> Vec<u128> {
        self.plan().withdrawn.iter().map(|row| row.ticket_id.as_u128()).collect()
    }

    fn due(&self) -> Vec<u128> {
        self.plan().due.into_iter().flat_map(|due| due.choice.tickets).map(|ticket| ticket.id.as_u128()).collect()
    }
}

const SQL: (&str, &str) = ("ann", "sql");
const SPARK: (&str, &str) = ("ann", "spark");
const BOB: (&str, &str) = ("bob", "spark");
const CHOSEN: ReclaimProgress = ReclaimProgress::Chosen { is_due: false };
const DUE: ReclaimProgress = ReclaimProgress::Chosen { is_due: true };

#[test]
fn longest_idle_engine_of_user_at_limit_is_chosen() {
    let mut world = World::new(10, 3);
    world.ticket(1, "a", SPARK, Some(200));
    world.ticket(2, "b", SPARK, Some(100));
    world.ticket(3, "a", SPARK, None);
    world.ticket(4, "a", BOB, Some(1));
    world.request(100, "a", SQL, 1);
    assert_eq!(world.chosen(), [(2, 100)]);
}

#[test]
fn engine_that_request_could_use_is_chosen_last() {
    let mut world = World::new(10, 2);
    world.ticket(1, "a", SPARK, Some(100));
    world.ticket(2, "a", SQL, Some(200));
    world.request(100, "a", SPARK, 1);
    assert_eq!(world.chosen(), [(2, 100)]);
}

#[test]
fn full_em_takes_as_many_idle_engines_as_request_needs() {
    let mut world = World::new(4, 10);
    for (number, idle_since) in [(1, 400), (2, 100), (3, 300), (4, 200)] {
        world.ticket(number, "a", BOB, Some(idle_since));
    }
    world.request(100, "a", SQL, 2);
    assert_eq!(world.chosen(), [(2, 100), (4, 100)]);
}

/// The longest idle engine on the EM does not help at the limit. An engine that frees both is enough.
#[test]
fn choice_contains_no_unneeded_ticket() {
    let mut world = World::new(2, 1);
    world.ticket(1, "a", BOB, Some(100));
    world.ticket(2, "a", SPARK, Some(200));
    world.request(100, "a", SQL, 1);
    assert_eq!(world.chosen(), [(2, 100)]);
}

/// The idle engines of a user stay as far as its guarantee. Its own request may use what it frees.
#[test]
fn choice_takes_no_scope_below_its_guarantee() {
    let mut world = World::guaranteed(3, 10, 2);
    for (number, idle_since) in [(1, 300), (2, 100), (3, 200)] {
        world.ticket(number, "a", BOB, Some(idle_since));
    }
    world.request(100, "a", SQL, 2);
    assert_eq!(world.chosen(), [], "two would take the user below its guarantee");
    world.requests.clear();
    world.request(101, "a", SPARK, 1);
    assert_eq!(world.chosen(), [(2, 101)]);
    world.tickets.remove(&id(1));
    world.ticket(4, "a", SQL, None);
    world.requests.clear();
    world.request(102, "a", SPARK, 1);
    assert_eq!(world.chosen(), []);
    world.requests.clear();
    world.request(103, "a", BOB, 1);
    assert_eq!(world.chosen(), [(2, 103)]);
    // Also where the user is below its guarantee.
    world.tickets.remove(&id(3));
    world.ticket(5, "a", SQL, None);
    assert_eq!(world.chosen(), [(2, 103)]);
}

/// A small engine that ends first would take what the guarantee leaves, and the large one alone suffices.
#[test]
fn small_engine_hides_no_large_one_of_guaranteed_user() {
    let mut world = World::guaranteed(6, 10, 3).with_policies([busy_policy(&[("user", None)])]);
    for (number, cores, idle_since) in [(1, 1, Some(100)), (2, 3, Some(200)), (3, 2, None)] {
        world.ticket(number, "a", BOB, idle_since);
        world.enlarge(number, cores);
    }
    world.tickets.get_mut(&id(3)).unwrap().locked_time = at(NOW - 1);
    world.request(100, "a", SQL, 3);
    assert_eq!(world.chosen(), [(2, 100)]);
    // The large one is busy, and its grace period continues.
    world.ticket(2, "a", BOB, None);
    world.enlarge(2, 3);
    world.row(2, 100, CHOSEN, ReclaimFor::Present);
    world.rows[0].busy = true;
    assert_eq!(world.plan(), ReclaimPlan::default());
}

/// A guarantee of 5 cores of 9 leaves 4: the smaller idle engine alone does not suffice, and the larger one does.
#[test]
fn busy_engine_stays_beside_sufficient_idle_engine() {
    let mut world = World::guaranteed(15, 10, 5).with_policies([busy_policy(&[("user", None)])]);
    for (number, cores, idle_since) in [(1, 2, Some(100)), (2, 3, Some(200)), (3, 4, None)] {
        world.ticket(number, "a", BOB, idle_since);
        world.enlarge(number, cores);
    }
    // Busy engines of another user, of which one and the smaller idle one would suffice.
    for number in 10..16 {
        world.ticket(number, "a", ("carol", "sql"), None);
    }
    world.request(100, "a", SQL, 3);
    assert_eq!(world.chosen(), [(2, 100)]);
    world.tickets.retain(|ticket_id, _| ticket_id.as_u128() < 10);
    world.total = Resource::cpu(9).unwrap();
    assert_eq!(world.chosen(), [(2, 100)], "the busy engine is the largest one");
}

/// A guarantee of one core leaves 4, of which the first engine would use up one.
#[test]
fn largest_engine_has_most_of_what_request_needs() {
    let load = |memory, cores| Resource::load(memory, cores).unwrap();
    let mut world = World::guaranteed(0, 10, 1);
    world.total = load(14, 5);
    for (number, since, resource) in [(1, 100, load(8, 1)), (2, 200, load(6, 4))] {
        world.ticket(number, "a", BOB, Some(since));
        world.resize(number, resource);
    }
    world.request(100, "a", SQL, 0);
    Arc::make_mut(&mut world.requests[0].places[0].ask).resource = load(6, 4);
    assert_eq!(world.chosen(), [(2, 100)]);
}

/// Busy engines end for an entitled request, if idle ones do not suffice: the newest first, and only those beyond the guarantee of their
/// user.
#[test]
fn busy_engines_end_for_entitled_request_alone() {
    let mut world = World::guaranteed(4, 10, 2).with_policies([busy_policy(&[("user", None)])]);
    for (number, granted) in [(1, 100), (2, 300), (3, 200), (4, NOW - 599)] {
        world.ticket(number, "a", BOB, None);
        world.tickets.get_mut(&id(number)).unwrap().locked_time = at(granted);
    }
    world.request(100, "a", SQL, 3);
    assert_eq!(world.chosen(), [], "the request is not entitled");
    world.requests.clear();
    world.request(101, "a", SQL, 2);
    assert_eq!(world.chosen(), [(2, 101), (3, 101)]);
    world.request(102, "a", ("carol", "sql"), 1);
    assert_eq!(world.chosen(), [(2, 101), (3, 101)], "a third one is within the guarantee");
    world.ticket(1, "a", BOB, Some(100));
    assert_eq!(world.chosen(), [(1, 101), (2, 101)], "idle engines come first");
    world.requests.pop();
    let world = world.with_policies([policy(&[("user", None)], ReclaimMode::Stop)]);
    assert_eq!(world.chosen(), [], "one idle engine does not suffice");
}

/// A busy engine of its own user, or of the scope that is guaranteed, does not end for a request. No guarantee relies on a ticket that may
/// still end.
#[test]
fn busy_engines_of_own_user_and_guarantee_stay() {
    let mut world = World::guaranteed(1, 10, 2).with_policies([busy_policy(&[("user", None)])]);
    world.ticket(1, "a", SPARK, None);
    world.request(100, "a", SQL, 1);
    assert_eq!(world.chosen(), []);
    let mut world = World::guaranteed(4, 10, 2).with_policies([busy_policy(&[("user", None)])]);
    for number in 1..=4 {
        world.ticket(number, "a", BOB, None);
    }
    world.request(100, "a", SQL, 2);
    assert_eq!(world.chosen().len(), 2);
    world.row(4, 99, ReclaimProgress::Unanswered { is_over: false }, ReclaimFor::Gone);
    world.rows[0].busy = true;
    assert_eq!(world.chosen(), [], "bob would have one engine if the recalled one ends late");
    world.rows[0].progress = ReclaimProgress::Withdrawn { was_recalled: true, is_over: false };
    assert_eq!(world.chosen(), [], "the EM may have read the recall before the withdrawal");
    world.rows[0].progress = ReclaimProgress::Withdrawn { was_recalled: false, is_over: false };
    assert_eq!(world.chosen().len(), 2, "an engine that was not recalled stays");
}

/// An engine that ran no task for a short time ends before those that run one.
#[test]
fn busy_engines_without_task_end_first() {
    let mut world = World::guaranteed(2, 10, 1).with_policies([busy_policy(&[("user", None)])]);
    world.ticket(1, "a", BOB, Some(NOW - 59));
    world.ticket(2, "a", BOB, None);
    world.tickets.get_mut(&id(2)).unwrap().locked_time = at(500);
    world.request(100, "a", SQL, 1);
    assert_eq!(world.plan().new.iter().map(|new| (new.ticket_id, new.busy)).collect::<Vec<_>>(), [(id(1), true)]);
    // An earlier choice stays.
    world.row(2, 100, CHOSEN, ReclaimFor::Present);
    world.rows[0].busy = true;
    assert_eq!(world.plan(), ReclaimPlan::default());
}

/// A busy engine that was chosen stays once an idle one suffices. Its grace period continues until then, because the idle one may get a task.
#[test]
fn chosen_busy_engine_is_replaced_by_idle_one() {
    let mut world = World::guaranteed(2, 10, 1).with_policies([busy_policy(&[("user", None)])]);
    world.ticket(1, "a", BOB, None);
    world.ticket(2, "a", BOB, Some(100));
    world.request(100, "a", SQL, 1);
    world.row(1, 100, DUE, ReclaimFor::Present);
    world.rows[0].busy = true;
    assert_eq!((world.chosen(), world.withdrawn(), world.due()), (vec![(2, 100)], vec![], vec![]));
    world.row(2, 100, CHOSEN, ReclaimFor::Present);
    world.ticket(2, "a", BOB, None);
    assert_eq!((world.chosen(), world.withdrawn(), world.due()), (vec![], vec![2], vec![1]), "the busy one ends");
    world.ticket(2, "a", BOB, Some(100));
    world.rows[1].progress = DUE;
    assert_eq!((world.chosen(), world.withdrawn(), world.due()), (vec![], vec![1], vec![2]), "the idle one ends");
}

#[test]
fn busy_engines_of_lowest_priority_end_first() {
    let mut world = World::guaranteed(3, 10, 1).with_policies([busy_policy(&[("user", None)])]);
    for (number, granted) in [(1, 100), (2, 300)] {
        world.ticket(number, "a", BOB, None);
        world.tickets.get_mut(&id(number)).unwrap().locked_time = at(granted);
    }
    world.ticket(3, "a", ("bob", "batch"), None);
    world.request(100, "a", SQL, 1);
    assert_eq!(world.chosen(), [(2, 100)]);
    let batch = PriorityRule { pattern: pattern(&[("engine_type", Some("batch"))]), default: -60, max: 0 };
    let mut rules = world.limits.queue_rules().clone();
    rules.priorities = Priorities::new([batch]);
    world.limits = Limits::clone(&world.limits).with_queue_rules(rules).into();
    assert_eq!(world.chosen(), [(3, 100)]);
}

/// A row of an idle engine gives a busy one no shorter grace period. A recall of a busy engine ends with its rule.
#[test]
fn busy_engine_is_chosen_with_its_own_grace_period() {
    let mut world = World::guaranteed(1, 10, 1).with_policies([busy_policy(&[("user", None)])]);
    world.ticket(1, "a", ("bob", "spark"), None);
    world.ticket(2, "b", ("bob", "spark"), None);
    world.request(100, "a", SQL, 1);
    world.row(1, 100, ReclaimProgress::Continued, ReclaimFor::Present);
    let plan = world.plan();
    assert_eq!((plan.withdrawn.len(), plan.added, plan.due.len()), (1, 1, 0));
    assert_eq!(plan.new.iter().map(|new| (new.ticket_id, new.busy)).collect::<Vec<_>>(), [(id(1), true)]);
    // As if its idle time had become too short.
    world.rows[0].progress = DUE;
    let plan = world.plan();
    assert_eq!((plan.new.len(), plan.added, plan.due.len()), (1, 0, 0));
    world.rows[0].busy = true;
    for (progress, due) in [(CHOSEN, vec![]), (DUE, vec![1])] {
        world.rows[0].progress = progress;
        assert_eq!((world.chosen(), world.due()), (vec![], due));
    }
    world.rows[0].progress = ReclaimProgress::Recalled;
    assert_eq!(world.plan(), ReclaimPlan::default());
    let world = world.with_policies([policy(&[("user", None)], ReclaimMode::Stop)]);
    assert_eq!(world.withdrawn(), [1]);
}

#[test]
fn request_that_idle_engines_cannot_serve_chooses_none() {
    let mut world = World::new(3, 10);
    world.ticket(1, "a", BOB, Some(100));
    world.ticket(2, "a", BOB, None);
    world.ticket(3, "a", BOB, Some(NOW - 59));
    world.request(100, "a", SQL, 2);
    assert_eq!(world.chosen(), []);
    world.request(101, "a", SQL, 1);
    assert_eq!(world.chosen(), [], "what comes back goes to the first request");
}

#[test]
fn two_requests_choose_different_tickets_for_both() {
    let mut world = World::new(3, 10);
    for (number, idle_since) in [(1, 300), (2, 100), (3, 200)] {
        world.ticket(number, "a", BOB, Some(idle_since));
    }
    world.request(100, "a", SQL, 1);
    world.request(101, "a", SPARK, 1);
    assert_eq!(world.chosen(), [(2, 100), (3, 101)]);
}

#[test]
fn stored_choice_stays_and_is_due_after_grace() {
    let mut world = World::new(2, 10);
    world.ticket(1, "a", BOB, Some(200));
    world.ticket(2, "a", BOB, Some(100));
    world.request(100, "a", SQL, 1);
    world.row(1, 100, CHOSEN, ReclaimFor::Present);
    assert_eq!(world.plan(), ReclaimPlan::default(), "although another one is idle for longer");
    world.rows[0].progress = DUE;
    assert_eq!(world.due(), [1]);
    // In another mode, the grace period begins anew; only shown tickets are never due.
    let world = world.with_policies([policy(&[("user", None)], ReclaimMode::Observe)]);
    assert_eq!((world.chosen(), world.due()), (vec![(1, 100)], vec![]));
}

#[test]
fn set_is_due_when_all_its_tickets_are() {
    let mut world = World::new(2, 10);
    world.ticket(1, "a", BOB, Some(100));
    world.ticket(2, "a", BOB, Some(200));
    world.request(100, "a", SQL, 2);
    world.row(1, 100, DUE, ReclaimFor::Present);
    world.row(2, 100, CHOSEN, ReclaimFor::Present);
    assert_eq!(world.due(), []);
    world.rows[1].progress = DUE;
    assert_eq!(world.due(), [1, 2]);
}

#[test]
fn recalled_ticket_counts_as_coming() {
    let mut world = World::new(2, 10);
    world.ticket(1, "a", BOB, Some(100));
    world.ticket(2, "a", BOB, Some(200));
    world.request(100, "a", SQL, 1);
    world.row(1, 99, ReclaimProgress::Recalled, ReclaimFor::Gone);
    assert_eq!(world.plan(), ReclaimPlan::default());
    // A ticket that serves another request does not serve this one.
    for request in [ReclaimFor::Absent, ReclaimFor::Present] {
        world.rows.clear();
        world.row(1, 99, CHOSEN, request);
        assert_eq!((world.chosen(), world.withdrawn()), (vec![(2, 100)], vec![]), "{request:?}");
    }
    // An engine that stays in spite of its recall is neither chosen nor counted.
    world.rows.clear();
    world.row(1, 99, ReclaimProgress::Unanswered { is_over: false }, ReclaimFor::Gone);
    assert_eq!((world.chosen(), world.withdrawn()), (vec![(2, 100)], vec![]));
    world.rows[0].progress = ReclaimProgress::Unanswered { is_over: true };
    assert_eq!((world.chosen(), world.withdrawn()), (vec![(1, 100)], vec![1]), "it is chosen again, as a new row");
    // The grace period of a ticket continues if another request needs it.
    world.rows.clear();
    world.row(1, 99, CHOSEN, ReclaimFor::Gone);
    assert_eq!((world.chosen(), world.plan().added, world.withdrawn()), (vec![(1, 100)], 0, vec![]));
}

#[test]
fn row_without_need_is_withdrawn() {
    let mut world = World::new(2, 10);
    world.ticket(1, "a", BOB, Some(100));
    for (progress, request) in [
        (CHOSEN, ReclaimFor::Gone),
        (DUE, ReclaimFor::Absent),
        (ReclaimProgress::Continued, ReclaimFor::Present),
        (ReclaimProgress::Ended { was_recalled: true }, ReclaimFor::Present),
    ] {
        world.rows.clear();
        world.row(1, 100, progress, request);
        assert_eq!(world.withdrawn(), [1], "{progress:?}");
    }
    // The request fits by now.
    world.rows.clear();
    world.row(1, 100, DUE, ReclaimFor::Present);
    world.request(100, "a", SQL, 1);
    assert_eq!((world.withdrawn(), world.due()), (vec![1], vec![]));
    // No policy allows the end any more.
    world.requests.clear();
    let mut world = world.with_policies([policy(&[("user", Some("bob"))], ReclaimMode::Off)]);
    for progress in [DUE, ReclaimProgress::Recalled, ReclaimProgress::Unanswered { is_over: false }] {
        world.rows[0].progress = progress;
        assert_eq!(world.withdrawn(), [1], "{progress:?}");
    }
}

#[test]
fn request_without_em_chooses_at_another_em() {
    let mut world = World::new(1, 10);
    world.ticket(1, "a", BOB, None);
    world.ticket(2, "b", BOB, Some(100));
    world.request(100, "a", SQL, 1);
    assert_eq!(world.chosen(), []);
    world.also_at("b");
    assert_eq!(world.chosen(), [(2, 100)]);
    // The other EM lacks a required label.
    let place = &mut world.requests[0].places[1];
    let required = Labels::parse("labels", BTreeMap::from([("zone".to_owned(), "a".to_owned())])).unwrap();
    let selector = EmSelector { required, ..EmSelector::default() };
    let without = place.ask.clone();
    place.ask = RequestSpec { selector, ..RequestSpec::clone(&without) }.into();
    assert_eq!(world.chosen(), []);
    world.requests[0].places[1].ask = without;
    // Nothing ends for a request that fits elsewhere.
    world.tickets.remove(&id(1));
    world.ticket(1, "b", BOB, Some(100));
    assert_eq!(world.chosen(), []);
}

#[test]
fn chosen_tickets_are_bounded_by_whole_requests() {
    let mut world = World::new(12, 100);
    for number in 1..=12 {
        world.ticket(number, "a", BOB, Some(100));
    }
    world.request(100, "a", SQL, 7);
    world.request(101, "a", SPARK, 4);
    world.request(102, "a", SPARK, 1);
    let for_requests = world.chosen().into_iter().map(|(_, request)| request).collect::<Vec<_>>();
    assert_eq!(for_requests, [[100; 7].as_slice(), &[102]].concat(), "11 rows would be more than 10");
}

/// A busy engine is kept as a reserve only where the rows of the idle ones have room beside it: else no grace period would end.
#[test]
fn reserve_leaves_room_for_idle_engines() {
    let mut world = World::guaranteed(20, 100, 10).with_policies([busy_policy(&[("user", None)])]);
    for number in 1..=20 {
        world.ticket(number, "a", BOB, (number > 10).then_some(100));
    }
    world.request(100, "a", SQL, 10);
    for number in 1..=10 {
        world.row(number, 100, CHOSEN, ReclaimFor::Present);
        world.rows.last_mut().unwrap().busy = true;
    }
    assert_eq!((world.chosen(), world.withdrawn()), (vec![], (1..=10).collect()));
    world.rows.clear();
    assert_eq!(world.chosen().len(), 10);
}

/// Observed tickets do not come back, so they neither take the place of others nor count for other requests.
#[test]
fn observed_tickets_are_chosen_last_and_beside_others() {
    let policies =
        [policy(&[("user", None)], ReclaimMode::Stop), policy(&[("user", Some("ann"))], ReclaimMode::Observe)];
    let mut world = World::new(2, 10).with_policies(policies);
    world.ticket(1, "a", SPARK, Some(100));
    world.ticket(2, "a", BOB, Some(200));
    world.request(100, "a", ("carol", "sql"), 1);
    assert_eq!(world.chosen(), [(2, 100)]);
    world.request(101, "a", ("dave", "sql"), 1);
    assert_eq!(world.chosen(), [(2, 100), (1, 101)]);
    world.rows.push(Reclaim {
        ticket_id: id(1),
        for_ticket_id: id(99),
        for_em: em_instance("a"),
        mode: ReclaimMode::Observe,
        busy: false,
        due_time: at(NOW),
        progress: CHOSEN,
        request: ReclaimFor::Present,
    });
    world.requests.pop();
    assert_eq!(world.chosen(), [(2, 100)], "an observed ticket of another page serves no request");
}

/// A request that enters in front takes the oldest choice over, and the others move on, with their grace periods.
#[test]
fn request_in_front_takes_earlier_choices_first() {
    let mut world = World::new(3, 10);
    for (number, idle_since) in [(1, 300), (2, 200), (3, 100)] {
        world.ticket(number, "a", BOB, Some(idle_since));
    }
    world.request(99, "a", SPARK, 1);
    world.request(100, "a", SQL, 1);
    world.row(1, 100, CHOSEN, ReclaimFor::Present);
    let plan = world.plan();
    assert_eq!(world.chosen(), [(1, 99), (3, 100)]);
    assert_eq!(plan.added, 1);
}

#[test]
fn ticket_that_cannot_end_in_time_is_not_chosen() {
    let mut world = World::new(1, 10);
    world.ticket(1, "a", BOB, Some(100));
    world.request(100, "a", SQL, 1);
    world.requests[0].wait_until = at(NOW + 30);
    assert_eq!(world.chosen(), [], "the grace period ends at the deadline");
    world.requests[0].wait_until = at(NOW + 31);
    world.unavailable.push("a");
    assert_eq!(world.chosen(), [], "the EM stops no engine");
    world.unavailable.clear();
    world.held.push(1);
    assert_eq!(world.chosen(), [], "an operator holds its EM or its user");
    world.held.clear();
    assert_eq!(world.chosen(), [(1, 100)]);
    // The grace period of a chosen ticket does not begin anew.
    world.row(1, 100, CHOSEN, ReclaimFor::Present);
    world.requests[0].wait_until = at(NOW + 21);
    assert_eq!(world.plan(), ReclaimPlan::default());
    world.rows.clear();
    world.row(1, 100, DUE, ReclaimFor::Present);
    world.requests[0].wait_until = at(NOW + 1);
    assert_eq!(world.due(), [1]);
}

/// A request without an EM that is served elsewhere keeps nothing at the EM where it is queued.
#[test]
fn request_served_at_another_em_leaves_its_own() {
    let mut world = World::new(1, 10);
    world.ticket(1, "a", BOB, Some(300));
    world.ticket(2, "b", BOB, Some(100));
    world.request(100, "a", SQL, 1);
    world.also_at("b");
    world.request(101, "a", SPARK, 1);
    world.row(2, 100, CHOSEN, ReclaimFor::Present);
    world.rows[0].for_em = em_instance("b");
    assert_eq!(world.chosen(), [(1, 101)]);
    assert_eq!(world.withdrawn(), []);
}

/// At the EM of its choice alone, the request would need another ticket.
#[test]
fn own_em_is_preferred_where_earlier_choices_suffice() {
    let mut world = World::new(2, 1);
    world.ticket(1, "b", SPARK, Some(100));
    world.ticket(2, "b", BOB, Some(50));
    world.ticket(3, "b", BOB, None);
    world.request(100, "a", SQL, 1);
    world.also_at("b");
    world.row(1, 100, CHOSEN, ReclaimFor::Present);
    assert_eq!(world.plan(), ReclaimPlan::default());
}
