//! What a batch comes to: what has to be written, and how everything stands then.

use std::{collections::HashMap, sync::Arc};

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
    /// The number of requests whose check and decision differ on one state: nothing to write, but something to count.
    pub check_mismatches: u64,
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
