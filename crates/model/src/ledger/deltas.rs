//! Deltas: the rows that a batch writes, and the state after its commit.
//!
//! The ledger fills [`Deltas`]; the store writes them in one transaction. [`PostCommitState`] updates the state cache after
//! the commit. Invariant: each history line is recorded once, in the order of the decisions.
//! Callers: the other modules of the ledger, `rm_store::batch_write` and the committer.

use std::{collections::BTreeMap, sync::Arc};

use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    super::{
        em::{Em, EmInstance},
        em_drain::EmDrain,
        external::{ClusterDelta, ClusterTicketDelta},
        limit::Limits,
        name::Name,
        operation::{PlacedRequest, RequestRecord},
        order::RankedRequest,
        principal::{Actor, Principal},
        scope::{Scope, ScopeCounter, ScopeHoldings},
        ticket::Ticket,
        ticket_end::TicketEnd,
        wait_queue::{FreedKeys, OwnedPosition, QueuePosition, WaitKeys},
    },
    draining::DrainDelta,
    snapshot::WaitQueueView,
};

/// Rows to write, in the order of the writes.
#[derive(Debug, Default)]
pub struct Deltas {
    /// EMs with changed counters; with the version that was read.
    pub ems_counted: Vec<Em>,
    /// EMs registered again with the same amounts; with the version that was read.
    pub ems_updated: Vec<Em>,
    /// EMs registered again with other amounts; with the version that was read.
    pub ems_resized: Vec<Em>,
    /// EMs with a step of ending or counting tickets, or over-committed by an adoption; with the version that was read.
    pub ems_stepped: Vec<Em>,
    /// New EMs.
    pub ems_inserted: Vec<Em>,
    /// EMs whose rows are deleted; with the version that was read.
    pub ems_deleted: Vec<Em>,
    /// History lines of the batch, in the order of the decisions.
    pub lines: Vec<HistoryLine>,
    /// EMs whose reports are deleted: unregistered or lost, even if they registered again.
    pub reports_ended: Vec<EmInstance>,
    /// Stored tickets with changed use.
    pub in_use: Vec<Ticket>,
    /// Ended tickets, in the order of the decisions. Each has one [`HistoryLine::Ended`].
    pub ended: Vec<EndedDelta>,
    /// EMs with changed drains, and the new drain; `None` if the drain ended.
    pub drains: Vec<(EmInstance, Option<Arc<EmDrain>>)>,
    /// New request ids.
    pub request_ids: Vec<RequestRecord>,
    /// Scopes with changed counters.
    pub scopes: Vec<(ScopeCounter, ScopeHoldings)>,
    /// New queue entries.
    pub waiting: Vec<EnqueuedDelta>,
    /// Queue entries with other wait keys.
    pub moved: Vec<RequeuedDelta>,
    /// Rows of the wait queue that are deleted, before new ones are inserted: a call that takes a position over replaces the row.
    pub left_line: Vec<OwnedPosition>,
    /// Other waiting requests with new ranks.
    pub reranked: Vec<RerankedDelta>,
    /// Turns that were used while own requests were absent, with their new rank times.
    pub turns_used: BTreeMap<Arc<str>, OffsetDateTime>,
    /// New positions of waiting requests, which check again; not written.
    pub woken: BTreeMap<Uuid, QueuePosition>,
    /// Positions whose calls end, because an operator removed them or a later call took them over; not written.
    pub ended_waits: Vec<OwnedPosition>,
    /// New locked tickets, in the order of the decisions.
    pub granted: Vec<Ticket>,
    /// New tickets that are used already.
    pub new_in_use: Vec<Ticket>,
    /// External clusters with changed unseen amounts.
    pub clusters: Vec<ClusterDelta>,
    /// Tickets with changed amounts in external queues.
    pub cluster_tickets: Vec<ClusterTicketDelta>,
    /// Number of operations that violated advisory limits; only for the metrics.
    pub advisory_violations: u64,
    /// Wait keys with more capacity or fewer reservations; not written, but used to wake waiters.
    pub freed: FreedKeys,
}

impl Deltas {
    /// Adds an ended ticket with its history line.
    pub fn end(&mut self, ended: EndedDelta) {
        self.lines.push(HistoryLine::Ended);
        self.ended.push(ended);
    }

    /// Returns whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.ems_counted.is_empty()
            && self.ems_updated.is_empty()
            && self.ems_resized.is_empty()
            && self.ems_stepped.is_empty()
            && self.ems_inserted.is_empty()
            && self.ems_deleted.is_empty()
            && self.lines.is_empty()
            && self.reports_ended.is_empty()
            && self.in_use.is_empty()
            && self.request_ids.is_empty()
            && self.scopes.is_empty()
            && self.waiting.is_empty()
            && self.moved.is_empty()
            && self.left_line.is_empty()
            && self.reranked.is_empty()
            && self.clusters.is_empty()
    }
}

/// One history line of a batch.
#[derive(Debug)]
pub enum HistoryLine {
    /// An EM registered: the EM at that moment, whether it was resized, and the actor.
    Registered(Box<Em>, bool, Principal),
    /// An EM was unregistered or lost: the EM at that moment, and the actor.
    Gone(Box<Em>, TicketEnd, Principal),
    /// The next ticket of [`Deltas::granted`] was granted.
    Granted,
    /// A granted ticket that is no longer locked at the end of the batch: its state at the grant.
    GrantedBefore(Box<Ticket>),
    /// A ticket was adopted: its state at that moment.
    Adopted(Box<Ticket>, Actor),
    /// A ticket was confirmed: its state at that moment.
    Inited(Box<Ticket>, Principal),
    /// A ticket reported another use: its state at that moment.
    Reported(Box<Ticket>, Principal),
    /// The next ticket of [`Deltas::ended`] ended.
    Ended,
    /// An EM was drained or resumed.
    Drain(Box<DrainDelta>),
    /// A waiting request was removed: the ticket that a grant would have created, the reason and the actor.
    RemovedFromQueue(Box<Ticket>, Name, Actor),
}

/// State of the EMs, scopes and wait queues after a batch.
#[derive(Debug)]
pub struct PostCommitState {
    /// Registered EMs.
    pub ems: Vec<Em>,
    /// EMs that are no longer registered.
    pub gone: Vec<EmInstance>,
    /// Scope counters.
    pub scopes: Vec<(ScopeCounter, ScopeHoldings)>,
    /// Limits that the batch used.
    pub limits: Arc<Limits>,
    /// Wait queues that the batch read.
    pub line: WaitQueueView,
}

/// A request that enters the wait queue.
#[derive(Debug)]
pub struct EnqueuedDelta {
    /// Rank of the request, with the keys where it is short.
    pub rank: RankedRequest,
    /// Start of waiting.
    pub since: OffsetDateTime,
    /// Deadline of the call.
    pub until: OffsetDateTime,
    /// The request with its waiting parameters.
    pub request: PlacedRequest,
    /// Wait keys of the request.
    pub wait_keys: WaitKeys,
    /// Scopes of the request where a limit counts waiting requests.
    pub waiting_scopes: Vec<Scope>,
    /// Scopes of the request with guarantees.
    pub guaranteed_scopes: Vec<Scope>,
}

/// A queued request with other wait keys, or with a new rank.
#[derive(Debug)]
pub struct RequeuedDelta {
    /// Rank of the request, with the keys where it is short.
    pub rank: RankedRequest,
    /// Call that owns the position.
    pub claim: Option<Uuid>,
    /// EM of the latest decision.
    pub em: EmInstance,
    /// New wait keys.
    pub wait_keys: WaitKeys,
    /// Scopes of the request with guarantees.
    pub guaranteed_scopes: Vec<Scope>,
}

/// A waiting request that another one has promoted or moved behind.
#[derive(Debug)]
pub struct RerankedDelta {
    /// Position that was read.
    pub before: QueuePosition,
    /// Rank of the request.
    pub rank: RankedRequest,
}

/// A ticket that ended.
#[derive(Debug)]
pub struct EndedDelta {
    /// Last state of the ticket.
    pub ticket: Ticket,
    /// Reason of the end.
    pub end: TicketEnd,
    /// Whether the ticket has a row; false if this batch granted it.
    pub stored: bool,
    /// Actor that ended it.
    pub by: Actor,
    /// Reason that an operator gave.
    pub reason: Option<Name>,
}
