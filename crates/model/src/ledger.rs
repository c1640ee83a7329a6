//! The ledger: applies the operations of one batch to the rows read under the locks, and returns the rows to write.
//!
//! Operations of a batch see the effects of earlier ones. A rejected operation changes nothing. Invariants 1, 3 and 11 of
//! ARCHITECTURE.md: a grant never over-commits an EM; counters change only together with a ticket; a ticket ends once.
//! Never: performs I/O or reads a clock. Caller: the committer.
//!
//! - `snapshot`: input of a batch; `slots`: state of an EM, a scope and a ticket; `deltas`: output;
//! - `queueing`: wait queue entries; `ranking`: their order; `usage`: confirmations and reported use; `ending`: ends of tickets;
//! - `adopting`: adoption; `draining`: drains and forced releases; `steps`: operations on all tickets of an EM.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    assessment::{advisory_violations, assess, check_em},
    em::{Em, EmInstance, LabelSetProgress},
    em_drain::EmDrain,
    external::Clusters,
    hold::Holds,
    limit::{LimitedScope, Limits},
    name::Name,
    operation::{
        Grant, KeptPosition, Operation, Outcome, PlacedRequest, RegisterEm, Rejection, RequestKey, RequestRecord,
    },
    order::DecidedRank,
    principal::{Actor, Principal},
    report::ReportNumber,
    resource::{Resource, ResourceError},
    scope::{Scope, ScopeCounter, ScopeHoldings, TicketLabels},
    ticket::{EndedTicket, Ticket, TicketState},
    ticket_digest::TicketDigest,
    wait_queue::{AssessedPosition, MUCH, QueuePosition, WaitKey, WaitKeys, WaitingRequest},
};

mod adopting;
mod deltas;
mod draining;
mod ending;
mod queueing;
mod ranking;
mod slots;
mod snapshot;
mod steps;
mod usage;

use slots::{EmSlot, ScopeSlot, TicketSlot, check_epoch, owned, registered_em, stored_em};

pub use deltas::{Deltas, EndedDelta, EnqueuedDelta, HistoryLine, PostCommitState, RequeuedDelta, RerankedDelta};
pub use draining::DrainDelta;
pub use snapshot::{LedgerSnapshot, TicketPage, WaitQueueView};

/// State of one batch.
#[derive(Debug)]
pub struct Ledger {
    now: OffsetDateTime,
    /// Actor of the current operation.
    by: Actor,
    ems: HashMap<EmInstance, EmSlot>,
    tickets: HashMap<Uuid, TicketSlot>,
    pages: HashMap<EmInstance, TicketPage>,
    ended: HashMap<Uuid, EndedTicket>,
    inhabited: HashSet<EmInstance>,
    reports: HashMap<EmInstance, ReportNumber>,
    drains: HashMap<EmInstance, Arc<EmDrain>>,
    drains_changed: HashSet<EmInstance>,
    holds: Holds,
    adopted: HashMap<Uuid, Resource>,
    request_ids: HashMap<RequestKey, RequestRecord>,
    limits: Arc<Limits>,
    scopes: HashMap<ScopeCounter, ScopeSlot>,
    line: WaitQueueView,
    kept: HashMap<RequestKey, KeptPosition>,
    waiting_counts: HashMap<Scope, i64>,
    waiting: HashMap<Uuid, WaitingRequest>,
    removed: HashMap<Uuid, Name>,
    clusters: Clusters,
    /// Positions, as read, of other requests whose ranks have changed.
    reranked: BTreeMap<Uuid, QueuePosition>,
    deltas: Deltas,
}

impl Ledger {
    /// Creates the ledger from the rows that a batch read.
    pub fn new(snapshot: LedgerSnapshot) -> Self {
        let em_slot = |em: Em| EmSlot { stored_version: Some(em.version), current: Some(em), ..EmSlot::default() };
        let scope_slot = |usage| ScopeSlot { usage, changed: false };
        let ticket_slot = |ticket| TicketSlot { ticket, stored: true, granted_line: None, in_use: false };
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
            holds: snapshot.holds,
            adopted: snapshot.adopted,
            request_ids: snapshot.request_ids,
            limits: snapshot.limits,
            scopes: snapshot.scopes.into_iter().map(|(scope, usage)| (scope, scope_slot(usage))).collect(),
            line: snapshot.line,
            kept: snapshot.kept,
            waiting_counts: snapshot.waiting_counts,
            waiting: snapshot.waiting,
            removed: snapshot.removed,
            clusters: snapshot.clusters,
            reranked: BTreeMap::new(),
            deltas: Deltas::default(),
        }
    }

    /// Applies an operation of the actor `by`, unless its EM or its user is held.
    ///
    /// # Errors
    /// [`Rejection`] if the operation is not valid in the current state; nothing is changed.
    pub fn apply(&mut self, by: &Actor, operation: &Operation) -> Result<Outcome, Rejection> {
        self.by = by.clone();
        if let Some(key) = self.holds.key_of(operation)
            && !operation.may_queue()
        {
            return Ok(Outcome::Held(key));
        }
        match operation {
            Operation::Register(op) => self.register(op),
            Operation::Unregister(op) => self.unregister(op),
            Operation::Request(op) => self.request(op),
            Operation::Adopt(op) => self.adopt(op),
            Operation::Inited(op) => self.inited(op),
            Operation::Reported(op) => self.reported(op),
            Operation::Released(op) => self.released(op),
            Operation::Undo(op) => self.undo(op),
            Operation::Force(op) => self.force(op),
            Operation::Remove(op) => self.remove_waiting(op),
            Operation::Drain(op) => self.drain(op),
            Operation::Resume(op) => self.resume(op),
            Operation::Expire(op) => self.expire(op),
            Operation::Lost(op) => self.lost(op),
            Operation::Reap(op) => self.reap(op),
            Operation::EndTickets(em) => self.end_tickets(em),
            Operation::CountTickets(op) => self.count_tickets(op),
        }
    }

    /// Returns the rows to write and the resulting state of everything that was read.
    pub fn finish(mut self) -> (Deltas, PostCommitState) {
        self.rank_deltas();
        let mut ems = Vec::with_capacity(self.ems.len());
        let mut gone = Vec::new();
        for (instance, slot) in self.ems {
            match &slot.current {
                // Version of the row after the write.
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
        let mut granted = Vec::new();
        for slot in self.tickets.into_values() {
            match (slot.granted_line, slot.stored, slot.in_use) {
                (Some(line), ..) => granted.push((line, slot.ticket)),
                (None, false, _) => self.deltas.new_in_use.push(slot.ticket),
                (None, true, true) => self.deltas.in_use.push(slot.ticket),
                (None, true, false) => {}
            }
        }
        granted.sort_unstable_by_key(|(line, _)| *line);
        self.deltas.granted = granted.into_iter().map(|(_, ticket)| ticket).collect();
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

    fn register(&mut self, op: &RegisterEm) -> Result<Outcome, Rejection> {
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
                // An earlier operation of this batch may have removed the EM.
                epoch: slot.before.as_ref().map_or(0, |before| before.epoch),
                register_time: self.now,
                version: slot.stored_version.unwrap_or(0),
                going: None,
                counted: LabelSetProgress { to: self.limits.newest_label_set(), under_way: None },
                drain: self.drains.get(&op.em).cloned(),
                is_held: false,
            },
            Some(em) => em.clone(),
        };
        if !em.is_counted_like(&op.total) {
            // Checks for tickets, not for zero counters: a ticket with zero amounts here can have amounts of the other
            // type.
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
        // The clock keeps the epoch increasing across an unregistration, which deletes the earlier epoch.
        let micros = i64::try_from(self.now.unix_timestamp_nanos() / 1000).unwrap_or(i64::MAX);
        em.epoch = micros.max(em.epoch.saturating_add(1));
        em.register_time = self.now;
        em.left().map_err(|source| Rejection::Overflow { field: "total", source })?;
        slot.registered = true;
        slot.resized |= resized;
        slot.current = Some(em.clone());
        let line = HistoryLine::Registered(Box::new(em.clone()), resized, self.by.principal.clone());
        self.deltas.lines.push(line);
        self.free(&op.em, &[], MUCH);
        Ok(Outcome::Registered(Box::new(em)))
    }

    fn request(&mut self, op: &PlacedRequest) -> Result<Outcome, Rejection> {
        if let (Some(request_id), Some(key)) = (&op.ask.request_id, op.ask.request_key())
            && let Some(record) = self.request_ids.get(&key)
        {
            if record.request_id.body_hash != request_id.body_hash {
                return Err(Rejection::RequestIdReused(request_id.id.to_string()));
            }
            let grant = record.grant.clone();
            if let Some(ended) = self.ended.get(&grant.ticket_id).cloned().map(Box::new) {
                return Err(Rejection::TicketEnded { request_id: request_id.id.to_string(), ended });
            }
            let own = self.entry(op).ok().flatten().filter(|entry| entry.is_own);
            self.dequeue(op, own, WaitKeys::new());
            self.leave_turn(op.ask.ticket_id);
            return Ok(Outcome::Granted(grant));
        }
        let entry = self.entry(op)?;
        let other_ticket = entry.map(|entry| entry.position.ticket_id()).filter(|id| *id != op.ask.ticket_id);
        let renamed = other_ticket.map(|ticket_id| op.with_ticket(ticket_id));
        let op = renamed.as_ref().unwrap_or(op);
        let decided = self.decided(op, entry);
        let em = registered_em(&mut self.ems, &op.em)?;
        let (epoch, in_counters) = (em.current.epoch, em.current.counted);
        check_em(em.current, &self.limits, &op.ask)?;
        if entry.is_none() {
            self.limits.queue_rules().priorities.check(op)?;
        }
        let all = op.scopes(&self.limits);
        let counts = |limited: &&LimitedScope| in_counters.counts(limited.counter.label_set_id, op.ask.ticket_id);
        let scopes: Vec<LimitedScope> = all.iter().filter(counts).cloned().collect();
        let usage = |counter: &ScopeCounter| self.scopes.get(counter).map(|slot| &slot.usage);
        let assess_at = |position: &AssessedPosition| {
            let judged = assess(em.current, &scopes, usage, &self.line.line, position, &op.ask)?;
            Ok(self.clusters.judge(judged, op, position, &self.limits, &self.line.line, self.now))
        };
        let judged = match &decided {
            Some(decided) => decided.assess(assess_at)?,
            None => assess_at(&AssessedPosition::default())?,
        };
        let judged = self.holds.or_block(em.current, judged, op);
        let (share, queue) = match judged {
            Ok(judged) => judged,
            Err(short) => return self.wait_or_refuse(op, entry, decided, *short),
        };
        let advisory_violations = advisory_violations(&scopes, usage, &op.resource().zero_like(), op.resource());
        let overflow = |source| Rejection::Overflow { field: "resource", source };
        let em_locked = em.current.locked.add(&share).map_err(overflow)?;
        let mut counted = HashMap::new();
        self.count(&mut counted, &scopes, |at, usage| usage.locked.add(at.share(op.resource()), 1))?;
        self.apply_usage(counted);
        let em = registered_em(&mut self.ems, &op.em)?;
        em.current.locked = em_locked;
        *em.counted = true;
        let expires_at = self.now.saturating_add(duration(op));
        let (ticket_id, em) = (op.ask.ticket_id, op.em.clone());
        let grant = Grant { ticket_id, em, expires_at, advisory_violations: Vec::new(), queue: None, counters: None };
        let ticket = self.new_ticket(op, epoch, grant.expires_at);
        self.clusters.count(&ticket);
        let granted_line = Some(self.deltas.lines.len());
        self.deltas.lines.push(HistoryLine::Granted);
        self.tickets.insert(op.ask.ticket_id, TicketSlot { ticket, stored: false, granted_line, in_use: false });
        if let Some(request_id) = &op.ask.request_id {
            let (user, request_id) = (op.ask.user.clone(), request_id.clone());
            let record = RequestRecord { user, request_id, grant: grant.clone(), create_time: self.now };
            self.request_ids.insert(record.key(), record.clone());
            self.deltas.request_ids.push(record);
        }
        let granted_at = scopes.into_iter().map(|limited| WaitKey::Scope(limited.counter.scope));
        let granted_at =
            granted_at.chain([WaitKey::Em(op.em.clone())]).chain(self.clusters.wait_keys_of(op.ask.ticket_id));
        let granted_at = granted_at.map(|wait_key| (wait_key, false));
        self.dequeue(op, entry, granted_at.collect());
        if let Some(DecidedRank { rank, .. }) = decided {
            self.use_turn(&rank);
        }
        self.deltas.advisory_violations += u64::from(!advisory_violations.is_empty());
        Ok(Outcome::Granted(Grant { advisory_violations, queue, ..grant }))
    }

    /// Adds the scope counters after `change` to `counted`, which may contain earlier changes of the same operation.
    fn count(
        &self,
        counted: &mut HashMap<ScopeCounter, ScopeHoldings>,
        scopes: &[LimitedScope],
        change: impl Fn(&LimitedScope, &mut ScopeHoldings) -> Result<(), ResourceError>,
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

    /// Stores the scope counters that [`Ledger::count`] computed.
    fn apply_usage(&mut self, counted: HashMap<ScopeCounter, ScopeHoldings>) {
        let slots = counted.into_iter().map(|(counter, usage)| (counter, ScopeSlot { usage, changed: true }));
        self.scopes.extend(slots);
    }

    fn new_ticket(&self, op: &PlacedRequest, em_epoch: i64, expires_at: OffsetDateTime) -> Ticket {
        Ticket {
            id: op.ask.ticket_id,
            user: op.ask.user.clone(),
            creator: op.ask.creator.clone(),
            engine_type: op.ask.engine_type.clone(),
            em: op.em.clone(),
            labels: op.ask.labels.clone(),
            locked_time: self.now,
            state: TicketState::Locked { resource: op.resource().clone(), expires_at },
            principal: op.ask.principal.clone(),
            em_epoch,
        }
    }
}

fn give_back(at: &LimitedScope, usage: &mut ScopeHoldings, ticket: &Ticket) -> Result<(), ResourceError> {
    let held = if ticket.is_locked() { &mut usage.locked } else { &mut usage.used };
    held.minus(at.share(ticket.resource()))
}

/// Returns the counters that include a live ticket. Label sets that are still being counted are included only if they have
/// reached it.
pub fn counters(
    limits: &Limits,
    counted: LabelSetProgress,
    ticket_id: Uuid,
    labels: &TicketLabels<'_>,
) -> Vec<LimitedScope> {
    let mut counters = limits.scopes(labels);
    counters.retain(|limited| counted.counts(limited.counter.label_set_id, ticket_id));
    counters
}

fn duration(op: &PlacedRequest) -> time::Duration {
    time::Duration::try_from(op.ask.lock_ttl).unwrap_or(time::Duration::MAX)
}
