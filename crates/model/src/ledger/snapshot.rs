//! Ledger snapshot: the rows that a batch reads under its locks.
//!
//! The committer reads it from the store and creates the ledger from it. A missing entry means that the row does not exist,
//! so the snapshot must contain every row that the operations of the batch touch.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use time::OffsetDateTime;
use uuid::Uuid;

use super::super::{
    em::{Em, EmInstance},
    em_drain::EmDrain,
    external::Clusters,
    hold::Holds,
    limit::Limits,
    name::Name,
    operation::{KeptPosition, RequestKey, RequestRecord},
    order::QueueRanks,
    report::ReportNumber,
    resource::Resource,
    scope::{Scope, ScopeCounter, ScopeHoldings},
    ticket::{EndedTicket, Ticket},
    wait_queue::{ViewedKeys, WaitQueues, WaitingRequest},
};

/// Rows of everything that a batch touches, read under the locks.
#[derive(Debug)]
pub struct LedgerSnapshot {
    /// Database time, read after the locks.
    pub now: OffsetDateTime,
    /// Existing EMs.
    pub ems: HashMap<EmInstance, Em>,
    /// Live tickets.
    pub tickets: HashMap<Uuid, Ticket>,
    /// Ticket pages of the EMs whose tickets an operation processes in steps.
    pub pages: HashMap<EmInstance, TicketPage>,
    /// Ended tickets that the history still contains.
    pub ended: HashMap<Uuid, EndedTicket>,
    /// EMs that register in this batch and have live tickets.
    pub inhabited: HashSet<EmInstance>,
    /// Latest reports of the EMs that this batch may mark as lost; without EMs that never reported.
    pub reports: HashMap<EmInstance, ReportNumber>,
    /// Drains of the EMs that this batch registers, drains or resumes.
    pub drains: HashMap<EmInstance, Arc<EmDrain>>,
    /// Holds in effect on the EMs and users of the batch.
    pub holds: Holds,
    /// Use at adoption of the live tickets that this batch adopts again, if recorded.
    pub adopted: HashMap<Uuid, Resource>,
    /// Known request ids.
    pub request_ids: HashMap<RequestKey, RequestRecord>,
    /// Limits in force.
    pub limits: Arc<Limits>,
    /// Counters that the tickets of the batch belong to. A missing counter is zero.
    pub scopes: HashMap<ScopeCounter, ScopeHoldings>,
    /// Wait queues that the batch needs.
    pub line: WaitQueueView,
    /// Positions that belong to the request ids of the batch.
    pub kept: HashMap<RequestKey, KeptPosition>,
    /// Number of waiting requests of each scope in which a request of the batch may enter the queue and a limit counts them.
    pub waiting_counts: HashMap<Scope, i64>,
    /// Waiting requests that the batch removes, by ticket id. Their rows are locked.
    pub waiting: HashMap<Uuid, WaitingRequest>,
    /// Reasons of the removals of those requests that are no longer queued, while the history contains them.
    pub removed: HashMap<Uuid, Name>,
    /// External clusters that the batch touches.
    pub clusters: Clusters,
}

/// A page of an EM's tickets in order of their ids. All its live tickets are in the snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TicketPage {
    /// Id before the first ticket of the page.
    pub after: Uuid,
    /// Last id of the page; `None` if the page extends to the last ticket.
    pub last: Option<Uuid>,
}

/// Part of the wait queues that a batch reads.
#[derive(Debug, Clone, Default)]
pub struct WaitQueueView {
    /// Entries at the keys that were read, and all keys of the queued requests of the batch.
    pub line: WaitQueues,
    /// Keys that were read, and the extent of each; `None` if no request waits anywhere.
    pub wait_keys: Option<ViewedKeys>,
    /// Ranks of the requests of the batch and of their own requests.
    pub ranks: QueueRanks,
}
