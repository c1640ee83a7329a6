//! What a batch comes to: what has to be written, and how everything stands then.

use std::sync::Arc;

use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    super::{
        drain::Drain,
        em::{Em, EmInstance},
        end::End,
        external::{ClusterDelta, ClusterTicketDelta},
        limit::Limits,
        line::{FreedSpots, QueuePosition, Spots},
        name::Name,
        operation::{Request, RequestRecord},
        principal::{Actor, Principal},
        scope::{Counter, Usage},
        ticket::Ticket,
    },
    draining::DrainDelta,
    snapshot::LineView,
};

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
    /// The history lines of the batch, in the order decided.
    pub lines: Vec<HistoryLine>,
    /// EMs whose reports are over: those that went, also if they came again.
    pub reports_ended: Vec<EmInstance>,
    /// Tickets whose rows are to say what they use.
    pub in_use: Vec<Ticket>,
    /// Tickets that ended, in the order decided; each has one [`HistoryLine::Ended`].
    pub ended: Vec<EndedDelta>,
    /// EMs whose drains changed, and how they are drained now, if at all.
    pub drains: Vec<(EmInstance, Option<Arc<Drain>>)>,
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
    /// Tickets that are new, and locked; in the order decided.
    pub granted: Vec<Ticket>,
    /// Tickets that are new, and in use from the start.
    pub new_in_use: Vec<Ticket>,
    /// Clusters whose queues hold something else.
    pub clusters: Vec<ClusterDelta>,
    /// What tickets hold, or held, in such queues.
    pub cluster_tickets: Vec<ClusterTicketDelta>,
    /// How many operations went beyond limits that only watch: nothing to write, but something to count.
    pub over_watched: u64,
    /// The number of requests whose check and decision differ on one state: nothing to write, but something to count.
    pub check_mismatches: u64,
    /// Where there is more room now, or a position less ahead: nothing to write, but something to tell those who wait.
    pub freed: FreedSpots,
}

impl Deltas {
    /// Adds a ticket that ended, and its history line.
    pub fn end(&mut self, ended: EndedDelta) {
        self.lines.push(HistoryLine::Ended);
        self.ended.push(ended);
    }

    /// Whether there is nothing to write.
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
            && self.clusters.is_empty()
    }
}

/// One history line of a batch.
#[derive(Debug)]
pub enum HistoryLine {
    /// An EM registered: the EM as it was then, whether it was resized, and the actor.
    Registered(Box<Em>, bool, Principal),
    /// An EM was unregistered or lost: the EM as it was then, and the actor.
    Gone(Box<Em>, End, Principal),
    /// The next ticket of [`Deltas::granted`] was granted.
    Granted,
    /// A ticket was granted that is no longer locked at the end of the batch: the ticket as it was granted.
    GrantedBefore(Box<Ticket>),
    /// A ticket was adopted: the ticket as it was then.
    Adopted(Box<Ticket>, Actor),
    /// The engine of a ticket was confirmed: the ticket as it was then.
    Inited(Box<Ticket>, Principal),
    /// The engine of a ticket reported another use: the ticket as it was then.
    Reported(Box<Ticket>, Principal),
    /// The next ticket of [`Deltas::ended`] ended.
    Ended,
    /// An EM was drained or resumed.
    Drain(Box<DrainDelta>),
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
