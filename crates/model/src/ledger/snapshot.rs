//! What a batch starts from.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use time::OffsetDateTime;
use uuid::Uuid;

use super::super::{
    drain::Drain,
    em::{Em, EmInstance},
    external::Clusters,
    limit::Limits,
    line::{Line, ViewedSpots},
    operation::{RequestKey, RequestRecord},
    report::ReportNumber,
    resource::Resource,
    scope::{Counter, Usage},
    ticket::{EndedTicket, Ticket},
};

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
    pub request_ids: HashMap<RequestKey, RequestRecord>,
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
