//! The ledger: what is read under the locks goes in, operations are applied one after another, and what has to be written
//! comes out. Operations of one batch see each other's effects; one that is rejected leaves no trace.
//!
//! Kept here: an EM is never over-committed by a grant, its counters move only together with a ticket, and a ticket ends once.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    drain::Drain,
    em::{Counted, Em, EmInstance},
    external::{ClusterDelta, ClusterTicketDelta, Clusters},
    judgement::{admit, beyond_watched, fits, judge},
    limit::{LimitedScope, Limits},
    line::{FreedSpots, Line, MUCH, QueuePosition, Spot, Spots, ViewedSpots},
    name::Name,
    operation::{Grant, Operation, Outcome, Register, Rejection, Released, Request, RequestRecord},
    principal::{Actor, Principal},
    refusal::{Refusal, ScopeShortage},
    report::ReportNumber,
    resource::{Resource, ResourceError},
    scope::{Counter, Tally, TicketLabels, Usage},
    ticket::{End, EndedTicket, Ticket, TicketState},
    ticket_digest::TicketDigest,
};

mod adopting;
mod draining;
mod in_use;
mod queueing;
mod steps;

pub use draining::DrainDelta;

/// What the store holds of everything that a batch touches, read under the locks.
#[derive(Debug)]
pub struct Snapshot {
    /// The database's clock, read after the locks.
    pub now: OffsetDateTime,
    /// The EMs that exist.
    pub ems: HashMap<EmInstance, Em>,
    /// The tickets that live.
    pub tickets: HashMap<Uuid, Ticket>,
    /// The parts of the tickets of EMs that operations go through.
    pub pages: HashMap<EmInstance, TicketPage>,
    /// The tickets that history remembers.
    pub ended: HashMap<Uuid, EndedTicket>,
    /// Those of the EMs that register which have live tickets.
    pub inhabited: HashSet<EmInstance>,
    /// The last reports of the EMs that may be given up, but for those that never reported.
    pub reports: HashMap<EmInstance, ReportNumber>,
    /// The drains of those of the EMs that register, or are drained or resumed, which are drained.
    pub drains: HashMap<EmInstance, Arc<Drain>>,
    /// With what use the tickets were adopted that are to be adopted and live, as far as that is remembered.
    pub adopted: HashMap<Uuid, Resource>,
    /// The request ids that were used.
    pub request_ids: HashMap<Name, RequestRecord>,
    /// The limits in force.
    pub limits: Arc<Limits>,
    /// What the counters hold that the operations' tickets belong to; one that is missing holds nothing.
    pub scopes: HashMap<Counter, Usage>,
    /// Who waits where.
    pub line: LineView,
    /// The clusters whose queues the operations are about.
    pub clusters: Clusters,
}

/// A part of an EM's tickets in the order of their ids, all of which are among those that were read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TicketPage {
    /// They are behind this one.
    pub after: Uuid,
    /// The last of them; `None` if there are none behind them.
    pub last: Option<Uuid>,
}

/// A part of the waiting line.
#[derive(Debug, Default)]
pub struct LineView {
    /// Who stands at the spots that were looked at; and all spots of those who are in the batch themselves.
    pub line: Line,
    /// The spots that were looked at, and how much of each; `None` if nobody waits anywhere.
    pub spots: Option<ViewedSpots>,
}

/// What has to be written. The fields stand in the order in which they have to be written.
#[derive(Debug, Default)]
pub struct Deltas {
    /// EMs whose counters changed, with the version that was read.
    pub ems_counted: Vec<Em>,
    /// EMs that registered again with the same amounts, with the version that was read.
    pub ems_updated: Vec<Em>,
    /// EMs that registered again with other amounts, with the version that was read.
    pub ems_resized: Vec<Em>,
    /// EMs whose tickets were ended or counted in part, or that hold adopted engines beyond what they provide, with the version that was read.
    pub ems_stepped: Vec<Em>,
    /// EMs that are new.
    pub ems_inserted: Vec<Em>,
    /// EMs whose rows go, with the version that was read.
    pub ems_deleted: Vec<Em>,
    /// EMs that began to go: nothing to write, but something to remember. With how they went, and by whom.
    pub ems_gone: Vec<(Em, End, Principal)>,
    /// Who registered the EMs that registered.
    pub registered_by: HashMap<EmInstance, Principal>,
    /// EMs whose reports are over: those that went, also if they came again.
    pub reports_ended: Vec<EmInstance>,
    /// Tickets whose rows are to say what they use.
    pub in_use: Vec<Ticket>,
    /// Tickets that were adopted, as they were then, and by whom: a line of the history each, also of one that ended since.
    pub adopted: Vec<(Ticket, Actor)>,
    /// Tickets whose engine reported in, as they were then, and who told: a line of the history each, also of one that ended since.
    pub inited: Vec<(Ticket, Principal)>,
    /// Likewise tickets whose engine reported to use something else, in order.
    pub reported: Vec<(Ticket, Principal)>,
    /// Tickets that ended.
    pub ended: Vec<EndedDelta>,
    /// EMs whose drains changed, and how they are drained now, if at all.
    pub drains: Vec<(EmInstance, Option<Arc<Drain>>)>,
    /// EMs that were drained or resumed, in order: a line of the history each.
    pub drain_lines: Vec<DrainDelta>,
    /// Request ids that are new.
    pub request_ids: Vec<RequestRecord>,
    /// What scopes hold that changed.
    pub scopes: Vec<(Counter, Usage)>,
    /// Requests that are new in line.
    pub waiting: Vec<WaitingDelta>,
    /// Requests that now stand elsewhere.
    pub moved: Vec<MovedDelta>,
    /// Requests that left the line, by their tickets.
    pub left_line: Vec<Uuid>,
    /// Tickets that are new, and locked.
    pub granted: Vec<Ticket>,
    /// Tickets that are new, and in use from the start.
    pub new_in_use: Vec<Ticket>,
    /// Clusters whose queues hold something else.
    pub clusters: Vec<ClusterDelta>,
    /// What tickets hold, or held, in such queues.
    pub cluster_tickets: Vec<ClusterTicketDelta>,
    /// How many operations went beyond limits that only watch: nothing to write, but something to count.
    pub over_watched: u64,
    /// Where there is more room now, or a position less ahead: nothing to write, but something to tell those who wait.
    pub freed: FreedSpots,
}

impl Deltas {
    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.ems_counted.is_empty()
            && self.ems_updated.is_empty()
            && self.ems_resized.is_empty()
            && self.ems_stepped.is_empty()
            && self.ems_inserted.is_empty()
            && self.ems_deleted.is_empty()
            && self.ems_gone.is_empty()
            && self.reports_ended.is_empty()
            && self.in_use.is_empty()
            && self.adopted.is_empty()
            && self.inited.is_empty()
            && self.reported.is_empty()
            && self.ended.is_empty()
            && self.drain_lines.is_empty()
            && self.granted.is_empty()
            && self.new_in_use.is_empty()
            && self.request_ids.is_empty()
            && self.scopes.is_empty()
            && self.waiting.is_empty()
            && self.moved.is_empty()
            && self.left_line.is_empty()
            && self.clusters.is_empty()
    }
}

/// How EMs and scopes stand after a batch.
#[derive(Debug)]
pub struct PostCommitState {
    /// The EMs that are registered.
    pub ems: Vec<Em>,
    /// The EMs that are not.
    pub gone: Vec<EmInstance>,
    /// What scopes hold.
    pub scopes: Vec<(Counter, Usage)>,
    /// The limits that were in force.
    pub limits: Arc<Limits>,
    /// Who waits where.
    pub line: LineView,
}

/// A request that is new in line.
#[derive(Debug)]
pub struct WaitingDelta {
    /// Its position.
    pub position: QueuePosition,
    /// Since when it waits.
    pub since: OffsetDateTime,
    /// What it asks for, where and how it waits.
    pub request: Request,
    /// Where it stands.
    pub spots: Spots,
}

/// A request that stands elsewhere than before.
#[derive(Debug)]
pub struct MovedDelta {
    /// Its position.
    pub position: QueuePosition,
    /// The EM where it was judged last.
    pub em: EmInstance,
    /// Where it stands.
    pub spots: Spots,
}

/// A ticket that ended.
#[derive(Debug)]
pub struct EndedDelta {
    /// As it was.
    pub ticket: Ticket,
    /// How it ended.
    pub end: End,
    /// False if it was granted in this very batch.
    pub stored: bool,
    /// Who ended it.
    pub by: Actor,
    /// Why, if an operator did.
    pub reason: Option<Name>,
}

/// The state of one batch.
#[derive(Debug)]
pub struct Ledger {
    now: OffsetDateTime,
    /// Who asked for the operation that is being carried out.
    by: Actor,
    ems: HashMap<EmInstance, EmSlot>,
    tickets: HashMap<Uuid, TicketSlot>,
    pages: HashMap<EmInstance, TicketPage>,
    ended: HashMap<Uuid, EndedTicket>,
    inhabited: HashSet<EmInstance>,
    reports: HashMap<EmInstance, ReportNumber>,
    drains: HashMap<EmInstance, Arc<Drain>>,
    drains_changed: HashSet<EmInstance>,
    adopted: HashMap<Uuid, Resource>,
    request_ids: HashMap<Name, RequestRecord>,
    limits: Arc<Limits>,
    scopes: HashMap<Counter, ScopeSlot>,
    line: LineView,
    clusters: Clusters,
    deltas: Deltas,
}

#[derive(Debug, Default)]
struct EmSlot {
    stored_version: Option<i64>,
    /// As it was before its row went.
    before: Option<Em>,
    current: Option<Em>,
    /// Whether it went, if only for a moment.
    went: bool,
    registered: bool,
    resized: bool,
    stepped: bool,
    /// Whether engines were adopted that it has no room for.
    exceeded: bool,
    counted: bool,
}

impl EmSlot {
    /// Whether its row is written, or made.
    fn is_written(&self) -> bool {
        self.registered || self.resized || self.stepped || self.counted || self.stored_version.is_none()
    }
}

#[derive(Debug, Default)]
struct ScopeSlot {
    usage: Usage,
    changed: bool,
}

#[derive(Debug)]
struct TicketSlot {
    ticket: Ticket,
    stored: bool,
    /// Whether its row has yet to say what it uses.
    in_use: bool,
}

impl Ledger {
    /// Starts from what was read.
    pub fn new(snapshot: Snapshot) -> Self {
        let em_slot = |em: Em| EmSlot { stored_version: Some(em.version), current: Some(em), ..EmSlot::default() };
        let scope_slot = |usage| ScopeSlot { usage, changed: false };
        let ticket_slot = |ticket| TicketSlot { ticket, stored: true, in_use: false };
        Self {
            now: snapshot.now,
            by: Principal::Anonymous.into(),
            ems: snapshot.ems.into_iter().map(|(key, em)| (key, em_slot(em))).collect(),
            tickets: snapshot.tickets.into_iter().map(|(id, ticket)| (id, ticket_slot(ticket))).collect(),
            pages: snapshot.pages,
            ended: snapshot.ended,
            inhabited: snapshot.inhabited,
            reports: snapshot.reports,
            drains: snapshot.drains,
            drains_changed: HashSet::new(),
            adopted: snapshot.adopted,
            request_ids: snapshot.request_ids,
            limits: snapshot.limits,
            scopes: snapshot.scopes.into_iter().map(|(scope, usage)| (scope, scope_slot(usage))).collect(),
            line: snapshot.line,
            clusters: snapshot.clusters,
            deltas: Deltas::default(),
        }
    }

    /// Carries out what `by` asks for, or rejects it and changes nothing.
    pub fn apply(&mut self, by: &Actor, operation: &Operation) -> Result<Outcome, Rejection> {
        self.by = by.clone();
        match operation {
            Operation::Register(op) => self.register(op),
            Operation::Unregister(op) => self.unregister(op),
            Operation::Request(op) => self.request(op),
            Operation::Adopt(op) => self.adopt(op),
            Operation::Inited(op) => self.inited(op),
            Operation::Reported(op) => self.reported(op),
            Operation::Released(op) => self.released(op),
            Operation::Force(op) => self.force(op),
            Operation::Drain(op) => self.drain(op),
            Operation::Resume(op) => self.resume(op),
            Operation::Expire(op) => self.expire(op),
            Operation::Lost(op) => self.lost(op),
            Operation::Reap(op) => self.reap(op),
            Operation::EndTickets(em) => self.end_tickets(em),
            Operation::CountTickets(op) => self.count_tickets(op),
        }
    }

    /// What has to be written, and how everything that was read stands after it.
    pub fn finish(mut self) -> (Deltas, PostCommitState) {
        let mut ems = Vec::with_capacity(self.ems.len());
        let mut gone = Vec::new();
        for (instance, slot) in self.ems {
            match &slot.current {
                // With the version that its row then has.
                Some(em) if em.is_registered() => {
                    ems.push(Em { version: em.version + i64::from(slot.is_written()), ..em.clone() });
                }
                _ if slot.stored_version.is_some() => gone.push(instance.clone()),
                _ => {}
            }
            if slot.went && slot.stored_version.is_some() {
                self.deltas.reports_ended.push(instance);
            }
            match (slot.stored_version, slot.current) {
                (Some(version), Some(em)) if slot.resized => self.deltas.ems_resized.push(Em { version, ..em }),
                (Some(version), Some(em)) if slot.registered => self.deltas.ems_updated.push(Em { version, ..em }),
                (Some(version), Some(em)) if slot.stepped || slot.exceeded => {
                    self.deltas.ems_stepped.push(Em { version, ..em })
                }
                (Some(version), Some(em)) if slot.counted => self.deltas.ems_counted.push(Em { version, ..em }),
                (None, Some(em)) => self.deltas.ems_inserted.push(em),
                (Some(version), None) => self.deltas.ems_deleted.extend(slot.before.map(|em| Em { version, ..em })),
                _ => {}
            }
        }
        for em in self.drains_changed {
            let drain = self.drains.remove(&em);
            self.deltas.drains.push((em, drain));
        }
        for slot in self.tickets.into_values() {
            match (slot.stored, slot.in_use) {
                (false, _) if slot.ticket.is_locked() => self.deltas.granted.push(slot.ticket),
                (false, _) => self.deltas.new_in_use.push(slot.ticket),
                (true, true) => self.deltas.in_use.push(slot.ticket),
                (true, false) => {}
            }
        }
        (self.deltas.clusters, self.deltas.cluster_tickets) = self.clusters.finish();
        let mut scopes = Vec::with_capacity(self.scopes.len());
        for (scope, slot) in self.scopes {
            if slot.changed {
                self.deltas.scopes.push((scope.clone(), slot.usage.clone()));
            }
            scopes.push((scope, slot.usage));
        }
        (self.deltas, PostCommitState { ems, gone, scopes, limits: self.limits, line: self.line })
    }

    fn register(&mut self, op: &Register) -> Result<Outcome, Rejection> {
        let slot = self.ems.entry(op.em.clone()).or_default();
        let mut em = match &slot.current {
            None => Em {
                instance: op.em.clone(),
                total: op.total.clone(),
                protected: op.protected.clone(),
                used: op.total.zero_like(),
                locked: op.total.zero_like(),
                used_tickets: TicketDigest::default(),
                labels: op.labels.clone(),
                reserved: op.reserved.clone(),
                // It may have gone in this very batch.
                epoch: slot.before.as_ref().map_or(0, |before| before.epoch),
                register_time: self.now,
                version: slot.stored_version.unwrap_or(0),
                going: None,
                counted: Counted { to: self.limits.newest_label_set(), under_way: None },
                drain: self.drains.get(&op.em).cloned(),
            },
            Some(em) => em.clone(),
        };
        if !em.is_counted_like(&op.total) {
            // Not idle counters, but no tickets: one that holds nothing here may hold something of the other kind.
            let is_inhabited = self.inhabited.contains(&op.em) || self.tickets.values().any(|t| t.ticket.em == op.em);
            if is_inhabited {
                let (current, wanted) = (em.resource_type(), op.total.resource_type());
                return Err(Rejection::EmHasTickets { em: op.em.clone(), current, wanted });
            }
            em.used = op.total.zero_like();
            em.locked = op.total.zero_like();
            em.used_tickets = TicketDigest::default();
        }
        let resized = slot.current.as_ref().is_some_and(Em::is_registered)
            && (em.total != op.total || em.protected != op.protected);
        em.total = op.total.clone();
        em.protected = op.protected.clone();
        em.labels = op.labels.clone();
        em.reserved = op.reserved.clone();
        // From the clock, so that it also grows over an unregistration, which leaves nothing to count on from.
        let micros = i64::try_from(self.now.unix_timestamp_nanos() / 1000).unwrap_or(i64::MAX);
        em.epoch = micros.max(em.epoch.saturating_add(1));
        em.register_time = self.now;
        em.left().map_err(|source| Rejection::Overflow { field: "total", source })?;
        slot.registered = true;
        slot.resized |= resized;
        slot.current = Some(em.clone());
        self.deltas.registered_by.insert(op.em.clone(), self.by.principal.clone());
        self.free(&op.em, &[], MUCH);
        Ok(Outcome::Registered(Box::new(em)))
    }

    fn request(&mut self, op: &Request) -> Result<Outcome, Rejection> {
        if let Some(request_id) = &op.ask.request_id
            && let Some(record) = self.request_ids.get(&request_id.id)
        {
            if record.request_id.body_hash != request_id.body_hash {
                return Err(Rejection::RequestIdReused(request_id.id.to_string()));
            }
            let grant = record.grant.clone();
            if let Some(ended) = self.ended.get(&grant.ticket_id).cloned().map(Box::new) {
                return Err(Rejection::TicketEnded { request_id: request_id.id.to_string(), ended });
            }
            self.leave_line(op, Spots::new());
            return Ok(Outcome::Granted(grant));
        }
        let position = self.position(op)?;
        let em = registered_em(&mut self.ems, &op.em)?;
        let (epoch, in_counters) = (em.current.epoch, em.current.counted);
        admit(em.current, &self.limits, &op.ask)?;
        let all = op.scopes(&self.limits);
        let counts = |limited: &&LimitedScope| in_counters.counts(limited.counter.label_set_id, op.ask.ticket_id);
        let scopes: Vec<LimitedScope> = all.iter().filter(counts).cloned().collect();
        let usage = |counter: &Counter| self.scopes.get(counter).map(|slot| &slot.usage);
        let judged = judge(em.current, &scopes, usage, &self.line.line, position, &op.ask)?;
        debug_assert!(
            position.is_some() || fits(em.current, &scopes, usage, &self.line.line, &op.ask) == judged.is_ok(),
            "both ways to judge agree"
        );
        let judged = self.clusters.judge(judged, op, &self.limits, &self.line.line, self.now);
        let (share, queue) = match judged {
            Ok(judged) => judged,
            Err(short) => return Ok(self.wait_or_refuse(op, position, *short)),
        };
        let over_watched = beyond_watched(&scopes, usage, &op.ask.resource.zero_like(), &op.ask.resource);
        let overflow = |source| Rejection::Overflow { field: "resource", source };
        let em_locked = em.current.locked.add(&share).map_err(overflow)?;
        let mut counted = HashMap::new();
        self.count(&mut counted, &scopes, |at, usage| usage.locked.add(at.share(&op.ask.resource), 1))?;
        self.apply_usage(counted);
        let em = registered_em(&mut self.ems, &op.em)?;
        em.current.locked = em_locked;
        *em.counted = true;
        let expires_at = self.now.saturating_add(duration(op));
        let grant =
            Grant { ticket_id: op.ask.ticket_id, em: op.em.clone(), expires_at, over_watched: Vec::new(), queue: None };
        let ticket = self.new_ticket(op, epoch, grant.expires_at);
        self.clusters.count(&ticket);
        self.tickets.insert(op.ask.ticket_id, TicketSlot { ticket, stored: false, in_use: false });
        if let Some(request_id) = &op.ask.request_id {
            let record = RequestRecord { request_id: request_id.clone(), grant: grant.clone(), create_time: self.now };
            self.request_ids.insert(request_id.id.clone(), record.clone());
            self.deltas.request_ids.push(record);
        }
        let granted_at = scopes.into_iter().map(|limited| Spot::Scope(limited.counter.scope));
        let granted_at = granted_at.chain([Spot::Em(op.em.clone())]).chain(self.clusters.spots_of(op.ask.ticket_id));
        let granted_at = granted_at.map(|spot| (spot, false));
        self.leave_line(op, granted_at.collect());
        self.deltas.over_watched += u64::from(!over_watched.is_empty());
        Ok(Outcome::Granted(Grant { over_watched, queue, ..grant }))
    }

    /// Notes where there is more room now: about as much as `requests` have held.
    fn free(&mut self, em: &EmInstance, scopes: &[LimitedScope], requests: u32) {
        self.deltas.freed.note(Spot::Em(em.clone()), requests);
        // Also where no rule decides: somebody may wait there for a cap of his own.
        scopes.iter().for_each(|limited| self.deltas.freed.note(Spot::Scope(limited.scope().clone()), requests));
    }

    /// The same in the queue that a ticket is in, before it ends there.
    fn free_queue(&mut self, ticket_id: Uuid) {
        self.clusters.spots_of(ticket_id).into_iter().for_each(|spot| self.deltas.freed.note(spot, 1));
    }

    fn released(&mut self, op: &Released) -> Result<Outcome, Rejection> {
        if let Some(ended) = self.ended.get(&op.ticket_id) {
            check_owner(op.ticket_id, (&ended.user, &ended.em), (&op.user, &op.em))?;
            return Ok(Outcome::Released);
        }
        owned(&mut self.tickets, &self.ended, op.ticket_id, &op.user, &op.em)?;
        self.end(op.ticket_id, End::Released)?;
        Ok(Outcome::Released)
    }

    /// Rolls a ticket back whose deadline has passed. Whatever happened to it meanwhile wins.
    fn expire(&mut self, op: &Released) -> Result<Outcome, Rejection> {
        let due = self.tickets.get(&op.ticket_id).is_some_and(|slot| match &slot.ticket.state {
            TicketState::Locked { expires_at, .. } => slot.ticket.em == op.em && *expires_at <= self.now,
            TicketState::Used { .. } => false,
        });
        if due {
            self.end(op.ticket_id, End::Expired)?;
        }
        Ok(Outcome::Expired(due))
    }

    /// Gives a ticket up that its EM's reports did not name. One that is locked expires.
    fn lost(&mut self, op: &Released) -> Result<Outcome, Rejection> {
        let is_used = |ticket: &Ticket| ticket.em == op.em && !ticket.is_locked();
        let lost = self.tickets.get(&op.ticket_id).is_some_and(|slot| is_used(&slot.ticket));
        if lost {
            self.end(op.ticket_id, End::Lost)?;
        }
        Ok(Outcome::Lost(lost))
    }

    /// Takes back what a live ticket holds.
    fn end(&mut self, ticket_id: Uuid, end: End) -> Result<(), Rejection> {
        let not_found = || Rejection::TicketNotFound { ticket_id, ended: None };
        let ticket = self.tickets.get(&ticket_id).ok_or_else(not_found)?.ticket.clone();
        let mut em = stored_em(&mut self.ems, &ticket.em)?.current.clone();
        let inconsistent = |source| Rejection::Inconsistent { what: format!("the EM {}", ticket.em), source };
        let share = em.share(ticket.resource()).map_err(inconsistent)?;
        let held = if ticket.is_locked() { &mut em.locked } else { &mut em.used };
        *held = held.minus(&share).map_err(inconsistent)?;
        if !ticket.is_locked() {
            em.used_tickets.remove(ticket_id);
        }
        let mut counted = HashMap::new();
        let scopes = counters(&self.limits, em.counted, ticket_id, &ticket.ticket_labels());
        self.count(&mut counted, &scopes, |at, usage| give_back(at, usage, &ticket))?;
        self.apply_usage(counted);
        let slot = stored_em(&mut self.ems, &ticket.em)?;
        *slot.current = em;
        *slot.counted = true;
        self.free(&ticket.em, &scopes, 1);
        self.free_queue(ticket_id);
        self.clusters.end(ticket_id);
        self.end_ticket(ticket_id, end);
        Ok(())
    }

    /// Moves a ticket from those that live to those that ended.
    fn end_ticket(&mut self, ticket_id: Uuid, end: End) {
        if let Some(TicketSlot { ticket, stored, .. }) = self.tickets.remove(&ticket_id) {
            let (user, em) = (ticket.user.clone(), ticket.em.clone());
            self.ended.insert(ticket_id, EndedTicket { id: ticket_id, user, em, end, at: self.now });
            self.deltas.ended.push(EndedDelta { ticket, end, stored, by: self.by.clone(), reason: None });
        }
    }

    /// What is short in the scopes for a resource that was `from` to become `to`.
    fn short_in_scopes(
        &self,
        scopes: &[LimitedScope],
        from: &Resource,
        to: &Resource,
        ahead: &Tally,
    ) -> Option<Refusal> {
        let nothing = Usage::default();
        let short = |limited: &LimitedScope| {
            let usage = self.scopes.get(&limited.counter).map_or(&nothing, |slot| &slot.usage);
            ScopeShortage::of(limited, usage, from, to, ahead)
        };
        Refusal::of_scopes(scopes.iter().map(short).collect())
    }

    /// What scopes will hold after a change, on top of what was counted before.
    fn count(
        &self,
        counted: &mut HashMap<Counter, Usage>,
        scopes: &[LimitedScope],
        change: impl Fn(&LimitedScope, &mut Usage) -> Result<(), ResourceError>,
    ) -> Result<(), Rejection> {
        for limited in scopes {
            let counter = &limited.counter;
            let stored = || self.scopes.get(counter).map(|slot| slot.usage.clone()).unwrap_or_default();
            let usage = counted.entry(counter.clone()).or_insert_with(stored);
            change(limited, usage).map_err(|source| match source {
                ResourceError::Overflow { .. } => Rejection::Overflow { field: "resource", source },
                _ => Rejection::Inconsistent { what: format!("the scope {}", counter.scope), source },
            })?;
        }
        Ok(())
    }

    /// Makes what was counted hold.
    fn apply_usage(&mut self, counted: HashMap<Counter, Usage>) {
        let slots = counted.into_iter().map(|(counter, usage)| (counter, ScopeSlot { usage, changed: true }));
        self.scopes.extend(slots);
    }

    fn new_ticket(&self, op: &Request, em_epoch: i64, expires_at: OffsetDateTime) -> Ticket {
        Ticket {
            id: op.ask.ticket_id,
            user: op.ask.user.clone(),
            creator: op.ask.creator.clone(),
            engine_type: op.ask.engine_type.clone(),
            em: op.em.clone(),
            labels: op.ask.labels.clone(),
            locked_time: self.now,
            state: TicketState::Locked { resource: op.ask.resource.clone(), expires_at },
            principal: op.ask.principal.clone(),
            em_epoch,
        }
    }
}

fn give_back(at: &LimitedScope, usage: &mut Usage, ticket: &Ticket) -> Result<(), ResourceError> {
    let held = if ticket.is_locked() { &mut usage.locked } else { &mut usage.used };
    held.minus(at.share(ticket.resource()))
}

/// The counters that a ticket is in, if it lives: all but those that are just being made and have not come to it.
fn counters(limits: &Limits, counted: Counted, ticket_id: Uuid, labels: &TicketLabels<'_>) -> Vec<LimitedScope> {
    let mut counters = limits.scopes(labels);
    counters.retain(|limited| counted.counts(limited.counter.label_set_id, ticket_id));
    counters
}

/// An EM that has a row, and the mark that its counters have to be written.
struct StoredEm<'a> {
    current: &'a mut Em,
    counted: &'a mut bool,
}

fn stored_em<'a>(ems: &'a mut HashMap<EmInstance, EmSlot>, instance: &EmInstance) -> Result<StoredEm<'a>, Rejection> {
    match ems.get_mut(instance) {
        Some(EmSlot { current: Some(current), counted, .. }) => Ok(StoredEm { current, counted }),
        _ => Err(Rejection::EmNotRegistered(instance.clone())),
    }
}

/// An EM that can be used.
fn registered_em<'a>(
    ems: &'a mut HashMap<EmInstance, EmSlot>,
    instance: &EmInstance,
) -> Result<StoredEm<'a>, Rejection> {
    let em = stored_em(ems, instance)?;
    if em.current.is_registered() { Ok(em) } else { Err(Rejection::EmNotRegistered(instance.clone())) }
}

/// Refuses the word of an older incarnation of an EM, and of one that is yet to come.
fn check_epoch(em: &Em, told: Option<i64>) -> Result<(), Rejection> {
    let registered = em.epoch;
    match told {
        Some(told) if told < registered => Err(Rejection::StaleEpoch { em: em.instance.clone(), told, registered }),
        Some(told) if told > registered => Err(Rejection::EpochAhead { registered }),
        _ => Ok(()),
    }
}

/// A live ticket that `user` holds on `em`.
fn owned<'a>(
    tickets: &'a mut HashMap<Uuid, TicketSlot>,
    ended: &HashMap<Uuid, EndedTicket>,
    ticket_id: Uuid,
    user: &Name,
    em: &EmInstance,
) -> Result<&'a mut TicketSlot, Rejection> {
    let Some(slot) = tickets.get_mut(&ticket_id) else {
        let ended = ended.get(&ticket_id).cloned().map(Box::new);
        return Err(Rejection::TicketNotFound { ticket_id, ended });
    };
    check_owner(ticket_id, (&slot.ticket.user, &slot.ticket.em), (user, em))?;
    Ok(slot)
}

fn check_owner(ticket_id: Uuid, owner: (&Name, &EmInstance), caller: (&Name, &EmInstance)) -> Result<(), Rejection> {
    if owner.0 != caller.0 {
        return Err(Rejection::TicketNotOwned { ticket_id, what: "user" });
    }
    if owner.1 != caller.1 {
        return Err(Rejection::TicketNotOwned { ticket_id, what: "EM" });
    }
    Ok(())
}

fn duration(op: &Request) -> time::Duration {
    time::Duration::try_from(op.ask.lock_ttl).unwrap_or(time::Duration::MAX)
}
