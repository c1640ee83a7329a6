//! Jobs of the ledger in steps, against the invariants of every commit: EMs are unregistered and label sets are counted while tickets
//! are granted and released. The store is a set of maps that reads few tickets at a time.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use proptest::prelude::*;
use rm_model::{
    adoption::AdoptTicket,
    em::{Em, EmInstance},
    external::Clusters,
    hold::Holds,
    ledger::{Deltas, Ledger, LedgerSnapshot, TicketPage, WaitQueueView},
    limit::{CountingRule, LabelSet, Limits},
    operation::{
        CountTickets, Operation, Outcome, PlacedRequest, ReleaseTicket, StepCursor, UnregisterEm, UpdateTicket,
    },
    principal::Principal,
    resource::{Dimension, Resource},
    scope::{ScopeCounter, ScopeHoldings},
    ticket::Ticket,
    ticket_digest::TicketDigest,
};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::harness::{em, engine, name, registration, spec};

/// Number of tickets that one step reads.
const PAGE: usize = 2;

#[derive(Clone, Debug)]
enum Step {
    Register(usize),
    Unregister(usize),
    /// EM, user, and whether the ticket's id is older than those of others.
    Request(usize, usize, bool),
    /// As `Request`, for an adopted engine.
    Adopt(usize, usize, bool),
    Inited(usize),
    /// Ticket and use of an engine.
    Reported(usize, i64),
    Release(usize),
    EndTickets(usize),
    CountTickets(usize),
    Commit,
    /// Starts the counting of a label set.
    NewSet,
    /// Activates label sets that are counted on all EMs; earlier ones are no longer counted.
    Decide,
}

fn step() -> impl Strategy<Value = Step> {
    let (em, user, ago) = (0..3usize, 0..2usize, 0..12usize);
    prop_oneof![
        2 => em.clone().prop_map(Step::Register),
        1 => em.clone().prop_map(Step::Unregister),
        3 => (em.clone(), user.clone(), any::<bool>()).prop_map(|(em, user, is_old)| Step::Adopt(em, user, is_old)),
        10 => (em.clone(), user, any::<bool>()).prop_map(|(em, user, is_old)| Step::Request(em, user, is_old)),
        3 => ago.clone().prop_map(Step::Inited),
        3 => (ago.clone(), 0..4i64).prop_map(|(ago, used)| Step::Reported(ago, used)),
        3 => ago.prop_map(Step::Release),
        4 => em.clone().prop_map(Step::EndTickets),
        4 => em.prop_map(Step::CountTickets),
        8 => Just(Step::Commit),
        1 => Just(Step::NewSet),
        1 => Just(Step::Decide),
    ]
}

fn instance(number: usize) -> EmInstance {
    em(&format!("host{number}"))
}

#[derive(Default)]
struct Tables {
    ems: HashMap<EmInstance, Em>,
    tickets: BTreeMap<Uuid, Ticket>,
    ended: Vec<Uuid>,
    counters: HashMap<ScopeCounter, ScopeHoldings>,
    sets: Vec<LabelSet>,
    sets_made: i64,
    now: i64,
}

impl Tables {
    fn limits(&self) -> Arc<Limits> {
        Arc::new(Limits::new(Uuid::nil(), self.sets.clone(), []))
    }

    /// Reads as the store does: for the first step through the tickets of an EM, the next few tickets.
    fn snapshot(&self, batch: &[Operation]) -> LedgerSnapshot {
        let (mut pages, mut tickets) = (HashMap::new(), HashMap::new());
        for operation in batch {
            tickets.extend(operation.ticket_id().and_then(|id| Some((id, self.tickets.get(&id)?.clone()))));
            let Some((from, em)) = operation.steps_from().zip(self.ems.get(operation.em())) else { continue };
            let after = match from {
                StepCursor::First => Some(Uuid::nil()),
                StepCursor::Ended => em.going.map(|going| going.after),
                StepCursor::Counted => Some(em.counted.under_way.map_or(Uuid::nil(), |(_, after)| after)),
            };
            let Some(after) = after.filter(|_| !pages.contains_key(operation.em())) else { continue };
            let behind = self.tickets.values().filter(|ticket| ticket.em == em.instance && ticket.id > after);
            let page: Vec<Ticket> = behind.take(PAGE).cloned().collect();
            let last = page.last().filter(|_| page.len() == PAGE).map(|ticket| ticket.id);
            pages.insert(em.instance.clone(), TicketPage { after, last });
            tickets.extend(page.into_iter().map(|ticket| (ticket.id, ticket)));
        }
        LedgerSnapshot {
            now: OffsetDateTime::from_unix_timestamp(self.now).unwrap(),
            ems: self.ems.clone(),
            tickets,
            pages,
            ended: HashMap::new(),
            inhabited: self.tickets.values().map(|ticket| ticket.em.clone()).collect(),
            reports: HashMap::new(),
            holds: Holds::default(),
            drains: HashMap::new(),
            adopted: HashMap::new(),
            request_ids: HashMap::new(),
            limits: self.limits(),
            scopes: self.counters.clone(),
            line: WaitQueueView::default(),
            kept: HashMap::new(),
            waiting: HashMap::new(),
            waiting_counts: HashMap::new(),
            removed: HashMap::new(),
            clusters: Clusters::default(),
        }
    }

    fn write(&mut self, deltas: Deltas) {
        for ems in [deltas.ems_counted, deltas.ems_updated, deltas.ems_resized, deltas.ems_stepped, deltas.ems_inserted]
        {
            for em in ems {
                let version = em.version + 1;
                self.ems.insert(em.instance.clone(), Em { version, ..em });
            }
        }
        for em in deltas.ems_deleted {
            assert!(self.ems.remove(&em.instance).is_some());
        }
        for ticket in deltas.in_use {
            assert!(self.tickets.insert(ticket.id, ticket).is_some());
        }
        for ended in deltas.ended {
            assert_eq!(self.tickets.remove(&ended.ticket.id).is_some(), ended.stored);
            assert!(!self.ended.contains(&ended.ticket.id), "a ticket ends once");
            self.ended.push(ended.ticket.id);
        }
        for ticket in deltas.granted.into_iter().chain(deltas.new_in_use) {
            assert!(self.tickets.insert(ticket.id, ticket).is_none());
        }
        self.counters.extend(deltas.scopes);
    }

    /// Applies a batch, and asserts all invariants.
    fn commit(&mut self, batch: &[Operation]) -> Vec<Option<Outcome>> {
        self.now += 1;
        let mut ledger = Ledger::new(self.snapshot(batch));
        let outcomes =
            batch.iter().map(|operation| ledger.apply(&Principal::Anonymous.into(), operation).ok()).collect();
        self.write(ledger.finish().0);
        self.check();
        outcomes
    }

    fn check(&self) {
        for em in self.ems.values() {
            let on_em = || self.tickets.values().filter(|ticket| ticket.em == em.instance);
            let sum = |is_locked| {
                on_em().filter(|t| t.is_locked() == is_locked).map(|t| t.resource().get(&Dimension::Cores)).sum::<i64>()
            };
            assert_eq!((em.locked.get(&Dimension::Cores), em.used.get(&Dimension::Cores)), (sum(true), sum(false)));
            let used: Vec<Uuid> = on_em().filter(|ticket| !ticket.is_locked()).map(|ticket| ticket.id).collect();
            assert_eq!(em.used_tickets, TicketDigest::of(&used));
        }
        assert!(self.tickets.values().all(|ticket| self.ems.contains_key(&ticket.em)), "an EM's row goes last");
        let mut sums: HashMap<ScopeCounter, ScopeHoldings> = HashMap::new();
        for ticket in self.tickets.values() {
            let counted = self.ems[&ticket.em].counted;
            for limited in self.limits().scopes(&ticket.ticket_labels()) {
                if counted.counts(limited.counter.label_set_id, ticket.id) {
                    let usage = sums.entry(limited.counter.clone()).or_default();
                    let held = if ticket.is_locked() { &mut usage.locked } else { &mut usage.used };
                    held.add(limited.share(ticket.resource()), 1).unwrap();
                }
            }
        }
        let live = |counter: &ScopeCounter| self.sets.iter().any(|set| set.id == counter.label_set_id);
        for (counter, usage) in self.counters.iter().filter(|(counter, _)| live(counter)) {
            assert_eq!(*usage, sums.remove(counter).unwrap_or_default(), "{counter:?}");
        }
        assert!(sums.is_empty(), "{sums:?}");
        for set in self.sets.iter().filter(|set| set.is_counted) {
            assert!(self.ems.values().all(|em| em.counted.to >= set.id), "nothing decides by what is half counted");
        }
    }

    fn new_set(&mut self) {
        self.sets_made += 1;
        self.sets.retain(|set| set.is_counted);
        let counting = CountingRule { keys: ["user".to_owned()].into(), exempt: [].into() };
        self.sets.push(LabelSet { id: self.sets_made, counting, is_counted: false });
    }

    fn decide(&mut self) {
        let Some(set) = self.sets.iter_mut().find(|set| !set.is_counted) else { return };
        if self.ems.values().all(|em| em.counted.to >= set.id) {
            set.is_counted = true;
            let decides = set.id;
            self.sets.retain(|set| set.id == decides);
        }
    }

    fn count_tickets(&self, em: usize) -> Operation {
        let to = self.sets.iter().map(|set| set.id).max().unwrap_or(0);
        Operation::CountTickets(CountTickets { em: instance(em), to, tickets_max: PAGE })
    }

    fn operation(&self, step: &Step, number: u128) -> Option<Operation> {
        let named = |ago: usize| self.tickets.values().rev().nth(ago);
        Some(match *step {
            Step::Register(em) => Operation::Register(registration(instance(em), Resource::cpu(100).unwrap())),
            Step::Unregister(em) => Operation::Unregister(UnregisterEm { em: instance(em), epoch: None }),
            Step::Request(em, user, is_old) => {
                let ticket_id = Uuid::from_u128(if is_old { number } else { number + (1 << 64) });
                let spec = spec(ticket_id, &format!("user{user}"), Resource::cpu(1).unwrap());
                Operation::Request(PlacedRequest::new(instance(em), &Arc::new(spec), false))
            }
            Step::Adopt(em, user, is_old) => Operation::Adopt(AdoptTicket {
                ticket_id: Uuid::from_u128(if is_old { number } else { number + (1 << 64) }),
                user: name(&format!("user{user}")),
                creator: name("IDE"),
                engine_type: String::new(),
                em: instance(em),
                labels: Default::default(),
                engine: engine("host"),
                used: Resource::cpu(1).unwrap(),
            }),
            Step::Inited(ago) => {
                let ticket = named(ago)?;
                Operation::Inited(rm_model::operation::ConfirmTicket {
                    ticket_id: ticket.id,
                    user: ticket.user.clone(),
                    em: ticket.em.clone(),
                    used: None,
                    engine: engine("host"),
                    epoch: None,
                })
            }
            Step::Reported(ago, used) => {
                let ticket = named(ago)?;
                let (ticket_id, user, em) = (ticket.id, ticket.user.clone(), ticket.em.clone());
                let used = Resource::cpu(used).unwrap();
                Operation::Reported(UpdateTicket { ticket_id, user, em, used, epoch: None })
            }
            Step::Release(ago) => {
                let ticket = named(ago)?;
                let (ticket_id, user, em) = (ticket.id, ticket.user.clone(), ticket.em.clone());
                Operation::Released(ReleaseTicket { ticket_id, user, em })
            }
            Step::EndTickets(em) => Operation::EndTickets(instance(em)),
            Step::CountTickets(em) => self.count_tickets(em),
            Step::Commit | Step::NewSet | Step::Decide => return None,
        })
    }

    /// Completes the remaining steps.
    fn go_on(&mut self) {
        for _ in 0..1000 {
            let steps: Vec<Operation> =
                (0..3).flat_map(|em| [Operation::EndTickets(instance(em)), self.count_tickets(em)]).collect();
            let more = steps.iter().any(|step| {
                let outcome = self.commit(std::slice::from_ref(step)).pop().flatten();
                matches!(outcome, Some(Outcome::Stepped { more: true, .. }))
            });
            if !more {
                break;
            }
        }
        assert!(self.ems.values().all(|em| em.going.is_none()), "{:?}", self.ems);
        self.decide();
        assert!(self.sets.iter().all(|set| set.is_counted));
        self.check();
    }
}

fn run(steps: Vec<Step>) {
    let (mut tables, mut batch) = (Tables::default(), Vec::new());
    for (number, step) in steps.iter().enumerate() {
        match tables.operation(step, u128::try_from(number).unwrap() + 1) {
            Some(operation) => batch.push(operation),
            None => {
                tables.commit(&std::mem::take(&mut batch));
                match step {
                    Step::NewSet => tables.new_set(),
                    Step::Decide => tables.decide(),
                    _ => {}
                }
            }
        }
    }
    tables.commit(&batch);
    tables.go_on();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ledger_steps_keep_counters_and_end(steps in prop::collection::vec(step(), 1..100)) {
        run(steps);
    }
}
