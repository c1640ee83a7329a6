//! The tables as maps, which apply the writes of the ledger as the SQL does.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use rm_model::{
    em::{Em, EmInstance},
    em_drain::EmDrain,
    external::{
        CheckRules, ClusterSnapshot, ClusterTicket, Clusters, LockedCluster, QueueCapacities, UnavailablePolicy, along,
    },
    hold::Holds,
    ledger::{Deltas, HistoryLine, LedgerSnapshot, TicketPage, WaitQueueView},
    limit::Limits,
    name::{Labels, Name},
    operation::{KeptPosition, RequestId, RequestKey, RequestRecord},
    order::{Class, QueueRanks, RankedRequest},
    queue::{ExternalQueue, QueueAmounts, QueueNaming, QueueState, QueueTree},
    report::{LastSignOfLife, ReportNumber},
    resource::{Dimension, Resource},
    scope::{ScopeCounter, ScopeHoldings},
    ticket::{EndedTicket, Ticket, TicketState},
    ticket_digest::TicketDigest,
    ticket_end::TicketEnd,
    wait_queue::{QueueEntry, QueuePosition, WaitKeys, WaitQueues, WaitingRequest},
};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::harness::name;

use super::{model::*, ticket_references::*};

/// The stored state of the cluster.
#[derive(Default)]
pub(super) struct StoredCluster {
    pub(super) snapshot: Option<Arc<ClusterSnapshot>>,
    pub(super) changes: i64,
    pub(super) unseen: BTreeMap<String, QueueAmounts>,
    pub(super) tickets: HashMap<Uuid, ClusterTicket>,
}

impl StoredCluster {
    pub(super) fn read(&self) -> Clusters {
        let Some(snapshot) = &self.snapshot else { return Clusters::default() };
        let long = time::Duration::days(3650);
        let rules = CheckRules {
            max_age: long,
            when_away: UnavailablePolicy::Refuse,
            last_known_for: long,
            refresh_interval: time::Duration::seconds(5),
        };
        let rooms = QueueCapacities::stored(snapshot.clone(), self.unseen.clone());
        let changes = self.changes;
        let cluster = LockedCluster { id: CLUSTER_ID, provider: provider(), rules, is_known: true, changes, rooms };
        Clusters::new(vec![(CLUSTER_ID, provider())], [cluster], self.tickets.clone())
    }

    /// Installs a later snapshot.
    pub(super) fn install(&mut self, now: OffsetDateTime, max: [i64; PLACES], used: [i64; PLACES], shown: &[i64]) {
        let amounts = |cores| QueueAmounts { memory: 0, cores };
        let queue = |place: usize| ExternalQueue {
            path: path_of(place),
            max: amounts(max[place]),
            used: amounts(used[place]),
            state: QueueState::Running,
            running_applications: None,
            pending_applications: None,
            custom: Default::default(),
        };
        let shown = shown.iter().enumerate().map(|(number, cores)| (application_id(number), amounts(*cores))).collect();
        let queues = QueueTree::new(QueueNaming::Fair, (0..PLACES).map(queue)).unwrap();
        let snapshot = Arc::new(ClusterSnapshot::stored(now, queues, shown));
        let live = self.tickets.values().map(|ticket| (ticket.path.as_str(), &ticket.held));
        self.unseen = QueueCapacities::new(snapshot.clone(), live).all_unseen().clone();
        self.snapshot = Some(snapshot);
    }

    pub(super) fn check(&self, model: &Model) {
        for (place, path) in (0..PLACES).map(path_of).enumerate() {
            let unseen = self.unseen.get(&path).copied().unwrap_or_default();
            assert_eq!((unseen.cores, unseen.memory), (model.unseen(place), 0), "{path}");
        }
        let counted = model.tickets.iter().filter(|t| t.alive && t.counted).count();
        assert_eq!(self.tickets.len(), counted);
        assert!(self.tickets.values().all(|ticket| along(&ticket.path).next() == Some("root")));
    }
}

/// The stored entries of a waiting request.
pub(super) struct StoredWaiting {
    pub(super) resource: Resource,
    pub(super) wait_keys: WaitKeys,
    pub(super) claim: Uuid,
    pub(super) request_id: Option<(RequestKey, RequestId)>,
    pub(super) rank: RankedRequest,
}

/// Returns the row of a waiting request; a removal uses nothing of it but the claim and the history line.
fn waiting((position, stored): (&QueuePosition, &StoredWaiting)) -> (Uuid, WaitingRequest) {
    let waiting = WaitingRequest {
        ticket_id: position.ticket_id(),
        waiting_since: position.since(),
        user: name("user"),
        creator: name("IDE"),
        engine_type: String::new(),
        em: instance(0),
        any_em: false,
        resource: stored.resource.clone(),
        labels: Labels::default(),
        caps: Vec::new(),
        wait_until: position.since(),
        claim: Some(stored.claim),
        kept_until: None,
        class: Class::First,
        priority: 0,
        ahead: BTreeMap::new(),
    };
    (waiting.ticket_id, waiting)
}

/// The tables as maps, which apply the writes of the ledger as the SQL does.
#[derive(Default)]
pub(super) struct Tables {
    pub(super) ems: HashMap<EmInstance, Em>,
    pub(super) drains: HashMap<EmInstance, Arc<EmDrain>>,
    pub(super) tickets: HashMap<Uuid, Ticket>,
    pub(super) ended: HashMap<Uuid, EndedTicket>,
    pub(super) request_ids: HashMap<RequestKey, RequestRecord>,
    pub(super) limits: Arc<Limits>,
    pub(super) scopes: HashMap<ScopeCounter, ScopeHoldings>,
    pub(super) waiting: HashMap<QueuePosition, StoredWaiting>,
    /// Reasons of the removals.
    pub(super) removed: HashMap<Uuid, Name>,
    pub(super) reports: HashMap<EmInstance, ReportNumber>,
    pub(super) adopted: HashMap<Uuid, Resource>,
    pub(super) cluster: StoredCluster,
}

impl Tables {
    pub(super) fn snapshot(&self, now: OffsetDateTime) -> LedgerSnapshot {
        let of_em = |em: &Em| Em { drain: self.drains.get(&em.instance).cloned(), ..em.clone() };
        LedgerSnapshot {
            now,
            ems: self.ems.iter().map(|(instance, em)| (instance.clone(), of_em(em))).collect(),
            holds: Holds::default(),
            drains: self.drains.clone(),
            tickets: self.tickets.clone(),
            // One page with all tickets of each EM.
            pages: self.ems.keys().map(|em| (em.clone(), TicketPage { after: Uuid::nil(), last: None })).collect(),
            ended: self.ended.clone(),
            inhabited: self.tickets.values().map(|ticket| ticket.em.clone()).collect(),
            reports: self.reports.clone(),
            adopted: self.adopted.clone(),
            request_ids: self.request_ids.clone(),
            limits: self.limits.clone(),
            scopes: self.scopes.clone(),
            line: self.line(),
            waiting: self.waiting.iter().map(waiting).collect(),
            kept: self.kept(),
            waiting_counts: HashMap::new(),
            removed: self.removed.clone(),
            clusters: self.cluster.read(),
        }
    }

    fn kept(&self) -> HashMap<RequestKey, KeptPosition> {
        let kept = |(position, stored): (&QueuePosition, &StoredWaiting)| {
            let (key, request_id) = stored.request_id.clone()?;
            let (position, claim) = (*position, Some(stored.claim));
            Some((key, KeptPosition { body_hash: request_id.body_hash, claim, position }))
        };
        self.waiting.iter().filter_map(kept).collect()
    }

    pub(super) fn line(&self) -> WaitQueueView {
        let mut line = WaitQueues::default();
        for (position, stored) in &self.waiting {
            for (wait_key, is_short) in &stored.wait_keys {
                let entry = QueueEntry { resource: stored.resource.clone(), is_short: *is_short };
                line.insert(wait_key.clone(), *position, entry);
            }
        }
        let mut ranks = QueueRanks::default();
        self.waiting.values().for_each(|stored| ranks.own.insert(stored.rank.clone()));
        ranks.latest = self.waiting.values().map(|stored| stored.rank.rank_time).max();
        WaitQueueView { line, wait_keys: None, ranks }
    }

    pub(super) fn leave(&mut self, ticket_id: Uuid) {
        self.waiting.retain(|position, _| position.ticket_id() != ticket_id);
    }

    /// Returns the next report of an EM, if the EM is registered.
    pub(super) fn report(&mut self, instance: EmInstance) {
        if let Some(em) = self.ems.get(&instance) {
            let sequence = self.reports.get(&instance).map_or(1, |last| last.sequence + 1);
            self.reports.insert(instance, ReportNumber { epoch: em.epoch, sequence });
        }
    }

    /// Returns the last signs of life of the EMs that have reported.
    pub(super) fn signs(&self) -> BTreeMap<usize, LastSignOfLife> {
        let sign = |number: usize| {
            let (em, reported) = (self.ems.get(&instance(number))?, self.reports.get(&instance(number))?);
            Some((number, LastSignOfLife { registered: em.epoch, reported: *reported }))
        };
        (0..EMS).filter_map(sign).collect()
    }

    /// Replaces the limits. Counters of a new label set start from the true sums; those of a removed one are deleted.
    pub(super) fn set_limits(&mut self, limits: Limits) {
        if limits.is_empty() {
            self.scopes.clear();
        } else if self.limits.is_empty() {
            for ticket in self.tickets.values() {
                for limited in limits.scopes(&ticket.ticket_labels()) {
                    let usage = self.scopes.entry(limited.counter.clone()).or_default();
                    let held = if ticket.is_locked() { &mut usage.locked } else { &mut usage.used };
                    held.add(limited.share(ticket.resource()), 1).unwrap();
                }
            }
        }
        for em in self.ems.values_mut() {
            em.counted.to = em.counted.to.max(limits.newest_label_set());
        }
        self.limits = Arc::new(limits);
    }

    pub(super) fn remember(&mut self, ticket: &Ticket, end: TicketEnd, at: OffsetDateTime) {
        let ended = EndedTicket { id: ticket.id, user: ticket.user.clone(), em: ticket.em.clone(), end, at };
        assert!(self.ended.insert(ticket.id, ended).is_none(), "a ticket ends once");
    }

    /// Replays the history lines of a batch in order. No line exceeds the capacity of its EM, and the last line leaves the live
    /// tickets of the batch.
    fn replay(&self, deltas: &Deltas) {
        let cores = |resource: &Resource| resource.get(&Dimension::Cores);
        let provides = |em: &Em| cores(&em.total) - cores(&em.protected);
        let mut provided: HashMap<_, _> = self.ems.values().map(|em| (em.instance.clone(), provides(em))).collect();
        let held = |ticket: &Ticket| (ticket.id, (ticket.em.clone(), cores(ticket.resource())));
        let mut live: HashMap<_, _> = self.tickets.values().map(held).collect();
        let (mut granted, mut ended) = (deltas.granted.iter(), deltas.ended.iter());
        for line in &deltas.lines {
            let ticket: &Ticket = match line {
                HistoryLine::Registered(em, ..) => {
                    provided.insert(em.instance.clone(), provides(em));
                    continue;
                }
                HistoryLine::Ended => {
                    assert!(live.remove(&ended.next().unwrap().ticket.id).is_some(), "a ticket that lives ends");
                    continue;
                }
                HistoryLine::Gone(..) | HistoryLine::Drain(_) => continue,
                HistoryLine::RemovedFromQueue(ticket, ..) => {
                    assert!(!live.contains_key(&ticket.id), "a request that waits has no ticket");
                    continue;
                }
                HistoryLine::Granted => granted.next().unwrap(),
                HistoryLine::GrantedBefore(ticket) => ticket,
                HistoryLine::Adopted(ticket, _) => ticket,
                HistoryLine::Inited(ticket, _) | HistoryLine::Reported(ticket, _) => ticket,
            };
            let before = live.insert(ticket.id, held(ticket).1).map_or(0, |(_, cores)| cores);
            if cores(ticket.resource()) > before && !matches!(line, HistoryLine::Adopted(..)) {
                let on_em = live.values().filter(|(em, _)| *em == ticket.em).map(|(_, cores)| cores).sum::<i64>();
                assert!(on_em <= provided[&ticket.em], "{line:?} grants what others hold");
            }
        }
        assert_eq!((granted.len(), ended.len()), (0, 0), "each has its line");
        let mut left: HashMap<_, _> = self.tickets.values().map(held).collect();
        deltas.ended.iter().for_each(|ended| drop(left.remove(&ended.ticket.id)));
        left.extend(deltas.granted.iter().chain(&deltas.new_in_use).chain(&deltas.in_use).map(held));
        assert_eq!(live, left, "the lines lead to what the batch leaves");
    }

    pub(super) fn write(&mut self, deltas: Deltas, now: OffsetDateTime) {
        self.replay(&deltas);
        let ems = deltas.ems_counted.into_iter().chain(deltas.ems_updated).chain(deltas.ems_resized);
        for mut em in ems.chain(deltas.ems_stepped) {
            em.version += 1;
            let before = self.ems.insert(em.instance.clone(), em.clone()).expect("updated rows exist");
            assert_eq!(before.version + 1, em.version, "the version that was read");
        }
        for em in deltas.ems_inserted {
            assert!(self.ems.insert(em.instance.clone(), em).is_none(), "inserted rows are new");
        }
        for em in deltas.ems_deleted {
            assert_eq!(self.ems.remove(&em.instance).unwrap().version, em.version);
        }
        for (em, drain) in deltas.drains {
            match drain {
                Some(drain) => drop(self.drains.insert(em, drain)),
                None => drop(self.drains.remove(&em)),
            }
        }
        for em in deltas.reports_ended {
            self.reports.remove(&em);
        }
        for ticket in deltas.in_use {
            assert!(self.tickets.insert(ticket.id, ticket).is_some(), "updated rows exist");
        }
        for ended in deltas.ended {
            assert_eq!(self.tickets.remove(&ended.ticket.id).is_some(), ended.stored);
            self.remember(&ended.ticket, ended.end, now);
        }
        self.scopes.extend(deltas.scopes);
        for line in deltas.lines {
            match line {
                HistoryLine::Adopted(ticket, _) => drop(self.adopted.insert(ticket.id, ticket.resource().clone())),
                HistoryLine::RemovedFromQueue(ticket, reason, _) => {
                    assert!(self.removed.insert(ticket.id, reason).is_none(), "a request is removed once");
                }
                _ => {}
            }
        }
        for ticket in deltas.granted.into_iter().chain(deltas.new_in_use) {
            assert!(self.tickets.insert(ticket.id, ticket).is_none(), "inserted rows are new");
        }
        for left in deltas.left_line {
            let owners = self.waiting.iter().map(|(position, stored)| (position.ticket_id(), Some(stored.claim)));
            assert!(owners.into_iter().any(|owner| owner == (left.ticket_id, left.claim)), "deleted rows exist");
            self.leave(left.ticket_id);
        }
        for new in deltas.waiting {
            let (ask, wait_keys) = (&new.request.ask, new.wait_keys);
            let (resource, claim) = (ask.resource.clone(), new.request.claim().expect("the request waits"));
            let request_id = ask.request_key().zip(ask.request_id.clone());
            let position = new.rank.position();
            let stored = StoredWaiting { resource, wait_keys, claim, request_id, rank: new.rank };
            assert!(self.waiting.insert(position, stored).is_none(), "inserted rows are new");
        }
        for moved in deltas.moved {
            let stored = self.waiting.get_mut(&moved.rank.position()).expect("without turns, no position changes");
            assert_eq!(Some(stored.claim), moved.claim, "the call owns the row");
            (stored.wait_keys, stored.rank) = (moved.wait_keys, moved.rank);
        }
        for delta in deltas.clusters {
            assert_eq!(
                (delta.cluster_id, delta.changes_before),
                (CLUSTER_ID, self.cluster.changes),
                "the version that was read"
            );
            self.cluster.changes = delta.changes;
            self.cluster.unseen.extend(delta.unseen);
        }
        for delta in deltas.cluster_tickets {
            match delta.ended {
                true => drop(self.cluster.tickets.remove(&delta.ticket_id)),
                false => drop(self.cluster.tickets.insert(delta.ticket_id, delta.ticket)),
            }
        }
        for record in deltas.request_ids {
            assert!(self.request_ids.insert(record.key(), record).is_none());
        }
    }

    /// Asserts that counters and tickets equal those of the model.
    pub(super) fn check(&self, model: &Model) {
        assert_eq!(self.ems.len(), model.ems.len());
        assert_eq!(self.reports.len(), model.reported.len());
        assert!(model.reported.iter().all(|number| self.reports.contains_key(&instance(*number))));
        for (number, ModelEm { total, protected, .. }) in &model.ems {
            let em = &self.ems[&instance(*number)];
            let held = |used| model.on_em(*number, used).map(|t| t.held).sum::<i64>();
            let counted = [&em.total, &em.protected, &em.used, &em.locked].map(|r| r.get(&Dimension::Cores));
            assert_eq!(counted, [*total, *protected, held(true), held(false)]);
            let engines = |used| i64::try_from(model.on_em(*number, used).count()).unwrap();
            let counted = [&em.used, &em.locked].map(|r| r.get(&Dimension::Instances));
            assert_eq!(counted, [engines(true), engines(false)]);
            assert_eq!(em.used_tickets, TicketDigest::of(model.on_em(*number, true).map(|ticket| &ticket.id)));
        }
        let reason = |(number, reason): (&usize, &bool)| (instance(*number), *reason);
        let drained: HashMap<_, _> = model.drained.iter().map(reason).collect();
        let stored = self.drains.iter().map(|(em, drain)| (em.clone(), drain.reason == name("a disk")));
        assert_eq!(stored.collect::<HashMap<_, _>>(), drained);
        let mut alive = 0;
        for expected in model.tickets.iter().filter(|t| t.alive) {
            let ticket = &self.tickets[&expected.id];
            assert_eq!(ticket.resource().get(&Dimension::Cores), expected.held);
            assert_eq!(matches!(ticket.state, TicketState::Used { .. }), expected.used);
            let application = ticket.resource().application_id().filter(|id| !id.is_empty());
            assert_eq!(application, expected.application.map(application_id).as_deref());
            alive += 1;
        }
        let held = self.scopes.iter().filter(|(_, usage)| !usage.is_nothing());
        assert_eq!(held.map(|(at, usage)| (at.clone(), usage.clone())).collect::<BTreeMap<_, _>>(), counted(model));
        assert_eq!(self.tickets.len(), alive);
        for w in model.waiting.iter().filter(|w| w.is_queued) {
            let stored =
                self.waiting.iter().find(|(position, _)| position.ticket_id() == w.id).map(|(_, stored)| stored);
            assert_eq!(stored.expect("the request waits").wait_keys, w.wait_keys());
        }
        assert_eq!(self.waiting.len(), model.waiting.iter().filter(|w| w.is_queued).count());
        assert_eq!(self.ended.len(), model.tickets.len() - alive);
        self.cluster.check(model);
    }
}

/// The sums of every scope. Amounts of queues count only where the labels name the queue.
fn counted(model: &Model) -> BTreeMap<ScopeCounter, ScopeHoldings> {
    let mut counted = BTreeMap::<ScopeCounter, ScopeHoldings>::new();
    for ticket in model.tickets.iter().filter(|t| t.alive && !model.limits.is_empty()) {
        for set in 0..SETS.len() {
            let Some(values) = ticket.who.values(set, ticket.em) else { continue };
            let counter = ScopeCounter { label_set_id: label_set_id(set), scope: scope_of(set, values) };
            let usage = counted.entry(counter).or_default();
            let in_queue = (set == QUEUE_SET).then_some((Dimension::QueueCores, ticket.held));
            let amounts = [(Dimension::Cores, ticket.held), (Dimension::Instances, 1)].into_iter().chain(in_queue);
            let held = if ticket.used { &mut usage.used } else { &mut usage.locked };
            held.add(amounts, 1).unwrap();
        }
    }
    counted
}
