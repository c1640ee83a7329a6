//! External clusters in the ledger: the queues that a batch touches, their granted amounts, and the resulting writes.
//!
//! A batch locks the rows of its clusters and reads them into [`Clusters`]. Each grant, change and end of a ticket is
//! counted here; [`Clusters::finish`] returns the deltas. The module never queries a cluster. Caller: the ledger.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use crate::{
    assessment::{self, BlockedRequest},
    limit::Limits,
    name::Labels,
    operation::PlacedRequest,
    provider::{self, Provider},
    queue::QueueAmounts,
    refusal::Refusal,
    resource::{Dimension, Resource},
    ticket::{Ticket, TicketState},
    wait_queue::{AssessedPosition, WaitKey, WaitQueues},
};

use super::{
    HoldingChange, QueueCapacities, QueueHolding, TicketPhase, along,
    demand::{QueueDemand, full_path},
};

/// Provider type of YARN clusters, as Linkis names it.
pub const YARN: &str = "Yarn";

/// Provider type of Kubernetes clusters, as Linkis names it.
pub const KUBERNETES: &str = "Kubernetes";

/// Returns the provider type and the queue or namespace that a resource names; `None` if it names neither.
pub fn place_of(resource: &Resource) -> Option<(&'static str, &str)> {
    let queue = resource.queue_name().map(|name| (YARN, name));
    queue.or_else(|| resource.namespace().map(|name| (KUBERNETES, name)))
}

text_enum! {
    /// Result of a request while no snapshot of its cluster is recent enough. Provider configurations contain the texts.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum UnavailablePolicy {
        /// The request is refused.
        Refuse = "refuse",
        /// The request is granted without a check of the queue.
        Allow = "allow",
        /// The last snapshot decides, up to a maximum age.
        LastKnown = "last_known",
    }
}

/// Rules for the use of a cluster's snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckRules {
    /// Maximum age of a snapshot.
    pub max_age: Duration,
    /// Policy beyond the maximum age.
    pub when_away: UnavailablePolicy,
    /// Maximum age for [`UnavailablePolicy::LastKnown`].
    pub last_known_for: Duration,
    /// Interval between snapshots.
    pub refresh_interval: Duration,
}

/// Basis of a decision about a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueCheckBasis {
    /// A snapshot within its maximum age.
    Snapshot,
    /// The last snapshot, older than its maximum age.
    LastKnown,
    /// No check: the cluster is unreachable and its policy is [`UnavailablePolicy::Allow`].
    Unchecked,
}

/// Queue of a grant, with the basis of the decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JudgedQueue {
    /// Provider name.
    pub provider: String,
    /// Queue path.
    pub path: String,
    /// Basis of the decision.
    pub basis: QueueCheckBasis,
    /// Age of the last snapshot; `None` if there is none.
    pub age: Option<Duration>,
}

/// An external cluster whose row the transaction locks.
#[derive(Debug, Clone)]
pub struct LockedCluster {
    /// Cluster id. A provider that is deleted and created again gets another id.
    pub id: i64,
    /// Provider of the cluster.
    pub provider: Provider,
    /// Rules for its snapshots.
    pub rules: CheckRules,
    /// Whether a snapshot exists; otherwise `rooms` is empty.
    pub is_known: bool,
    /// Number of ticket changes so far.
    pub changes: i64,
    /// The queues that the batch touches.
    pub rooms: QueueCapacities,
}

/// Amounts that a live ticket holds in an external cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterTicket {
    /// Id of the cluster.
    pub cluster_id: i64,
    /// Queue path; never changes for a ticket.
    pub path: String,
    /// Amounts and phase.
    pub held: QueueHolding,
}

/// Write to the row of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterDelta {
    /// Id of the cluster.
    pub cluster_id: i64,
    /// Number of changes when the row was read.
    pub changes_before: i64,
    /// New number of changes.
    pub changes: i64,
    /// New unseen amounts of the changed queues, by path.
    pub unseen: Vec<(String, QueueAmounts)>,
}

/// Write to the row of a ticket in an external queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterTicketDelta {
    /// Id of the ticket.
    pub ticket_id: Uuid,
    /// Current amounts, or the last ones if the ticket ended.
    pub ticket: ClusterTicket,
    /// Number of this change within the cluster.
    pub change: i64,
    /// Whether the ticket ended.
    pub ended: bool,
}

/// The external clusters that a batch touches.
#[derive(Debug, Clone, Default)]
pub struct Clusters {
    providers: Vec<(i64, Provider)>,
    by_id: BTreeMap<i64, LockedCluster>,
    tickets: HashMap<Uuid, ClusterTicket>,
    /// Number of changes of each cluster when it was read.
    before: BTreeMap<i64, i64>,
    touched: BTreeSet<(i64, String)>,
    changed: HashMap<Uuid, ClusterTicketDelta>,
}

/// Returns the amounts of a resource that belong to its queue or namespace.
fn amounts_of(resource: &Resource) -> QueueAmounts {
    let [cores, memory] = match resource.namespace() {
        None => QUEUE_DIMENSIONS,
        Some(_) => NAMESPACE_DIMENSIONS,
    };
    QueueAmounts { memory: resource.get(&memory), cores: resource.get(&cores) }
}

/// Dimensions of a queue and of a namespace, cores first.
const QUEUE_DIMENSIONS: [Dimension; 2] = [Dimension::QueueCores, Dimension::QueueMemory];
const NAMESPACE_DIMENSIONS: [Dimension; 2] = [Dimension::KubernetesMillicores, Dimension::KubernetesMemory];

/// Returns the amounts and phase of a ticket in its queue.
fn held_by(state: &TicketState) -> QueueHolding {
    match state {
        TicketState::Locked { resource, .. } => {
            QueueHolding { amounts: amounts_of(resource), phase: TicketPhase::Locked }
        }
        TicketState::Used { resource, used_time, .. } => {
            let application_id = resource.application_id().filter(|id| !id.is_empty()).map(str::to_owned);
            QueueHolding {
                amounts: amounts_of(resource),
                phase: TicketPhase::Used { since: *used_time, application_id },
            }
        }
    }
}

impl Clusters {
    /// Creates the state of a batch from all providers with their cluster ids, the locked clusters, and the batch's tickets
    /// in them.
    pub fn new(
        providers: Vec<(i64, Provider)>,
        clusters: impl IntoIterator<Item = LockedCluster>,
        tickets: HashMap<Uuid, ClusterTicket>,
    ) -> Self {
        let by_id: BTreeMap<i64, LockedCluster> = clusters.into_iter().map(|cluster| (cluster.id, cluster)).collect();
        let before = by_id.iter().map(|(id, cluster)| (*id, cluster.changes)).collect();
        Self { providers, by_id, tickets, before, ..Self::default() }
    }

    /// Selects the cluster of a type for a request with these labels; returns its id.
    pub fn chosen(providers: &[(i64, Provider)], resource_type: &str, labels: &Labels) -> Option<i64> {
        let chosen = provider::choose(providers.iter().map(|(_, provider)| provider), resource_type, labels.as_map())?;
        providers.iter().find(|(_, provider)| provider == chosen).map(|(id, _)| *id)
    }

    /// Returns the demand of a resource in its queue; `None` if no cluster applies.
    pub fn asked<'a>(&'a self, resource: &'a Resource, labels: &Labels) -> Option<QueueDemand<'a>> {
        let (resource_type, name) = place_of(resource)?;
        let cluster = self.by_id.get(&Self::chosen(&self.providers, resource_type, labels)?)?;
        Some(QueueDemand { cluster, name, amounts: amounts_of(resource) })
    }

    /// Completes a decision at a position with that about the external queue. Returns the earlier result and the queue of the grant, if
    /// any.
    ///
    /// # Errors
    /// The shortfalls of both decisions, with the wait keys of both.
    pub fn judge<T>(
        &self,
        judged: Result<T, Box<BlockedRequest>>,
        request: &PlacedRequest,
        position: &AssessedPosition,
        limits: &Limits,
        line: &WaitQueues,
        now: OffsetDateTime,
    ) -> Result<(T, Option<JudgedQueue>), Box<BlockedRequest>> {
        let Some(asked) = self.asked(request.resource(), &request.ask.labels) else {
            return judged.map(|judged| (judged, None));
        };
        match (judged, asked.judge(line, position, now)) {
            (Ok(judged), Ok(queue)) => Ok((judged, queue)),
            (Ok(_), Err(mut short)) => {
                short.wait_keys.extend(assessment::wait_keys(request, limits).map(|wait_key| (wait_key, false)));
                Err(short)
            }
            (Err(mut short), Ok(_)) => {
                short.wait_keys.extend(asked.wait_keys().into_iter().map(|wait_key| (wait_key, false)));
                Err(short)
            }
            (Err(mut short), Err(in_queue)) => {
                short.refusal.append(in_queue.refusal);
                short.wait_keys.extend(in_queue.wait_keys);
                Err(short)
            }
        }
    }

    /// Returns the wait keys of a ticket's queue and its ancestors.
    pub fn wait_keys_of(&self, ticket_id: Uuid) -> Vec<WaitKey> {
        let ticket = self.tickets.get(&ticket_id);
        let wait_keys = ticket.and_then(|ticket| Some(self.by_id.get(&ticket.cluster_id)?.wait_keys(&ticket.path)));
        wait_keys.unwrap_or_default()
    }

    /// Returns the refusal if a ticket may not grow to `used` in its queue; `None` if it fits or does not grow.
    pub fn judge_growth(&self, ticket_id: Uuid, used: &Resource, now: OffsetDateTime) -> Option<Refusal> {
        let ticket = self.tickets.get(&ticket_id)?;
        let (cluster, amounts) = (self.by_id.get(&ticket.cluster_id)?, amounts_of(used));
        let (held, grows) = (ticket.held.amounts, amounts.minus(ticket.held.amounts));
        if grows.memory <= 0 && grows.cores <= 0 {
            return None;
        }
        let asked = QueueDemand { cluster, name: &ticket.path, amounts };
        // A running engine does not wait, so no reservations apply.
        asked
            .judge_need(held, grows, &WaitQueues::default(), &AssessedPosition::default(), now)
            .err()
            .map(|short| short.refusal)
    }

    /// Counts a new ticket.
    pub fn count(&mut self, ticket: &Ticket) {
        let Some(QueueDemand { cluster, name, .. }) = self.asked(ticket.resource(), &ticket.labels) else { return };
        let held = held_by(&ticket.state);
        let path = match cluster.rooms.path(name) {
            Ok(path) => path.to_owned(),
            // Without amounts and without a queue, nothing is counted.
            Err(_) if held.amounts == QueueAmounts::default() => return,
            Err(_) => full_path(name),
        };
        let new = ClusterTicket { cluster_id: cluster.id, path, held: held.clone() };
        self.change(ticket.id, new, None, Some(held));
    }

    /// Counts the changed amounts of a ticket.
    pub fn recount(&mut self, ticket: &Ticket) {
        if let Some(before) = self.tickets.get(&ticket.id).cloned() {
            let held = held_by(&ticket.state);
            let now = ClusterTicket { held: held.clone(), ..before.clone() };
            self.change(ticket.id, now, Some(before.held), Some(held));
        }
    }

    /// Removes an ended ticket from the counts.
    pub fn end(&mut self, ticket_id: Uuid) {
        if let Some(before) = self.tickets.get(&ticket_id).cloned() {
            let held = before.held.clone();
            self.change(ticket_id, before, Some(held), None);
        }
    }

    fn change(&mut self, ticket_id: Uuid, ticket: ClusterTicket, from: Option<QueueHolding>, to: Option<QueueHolding>) {
        // A deleted cluster is not counted.
        let Some(cluster) = self.by_id.get_mut(&ticket.cluster_id) else { return };
        cluster.changes += 1;
        let ended = to.is_none();
        cluster.rooms.apply(&HoldingChange { path: ticket.path.clone(), from, to });
        self.touched.extend(along(&ticket.path).map(|path| (ticket.cluster_id, path.to_owned())));
        match ended {
            true => drop(self.tickets.remove(&ticket_id)),
            false => drop(self.tickets.insert(ticket_id, ticket.clone())),
        }
        let change = cluster.changes;
        self.changed.insert(ticket_id, ClusterTicketDelta { ticket_id, ticket, change, ended });
    }

    /// Returns the writes of the batch.
    pub fn finish(self) -> (Vec<ClusterDelta>, Vec<ClusterTicketDelta>) {
        let delta = |cluster: &LockedCluster| {
            let changes_before = self.before.get(&cluster.id).copied().unwrap_or_default();
            let touched = self.touched.iter().filter(|(id, _)| *id == cluster.id);
            let unseen = touched.map(|(_, path)| (path.clone(), cluster.rooms.unseen(path))).collect();
            let (cluster_id, changes) = (cluster.id, cluster.changes);
            (changes != changes_before).then_some(ClusterDelta { cluster_id, changes_before, changes, unseen })
        };
        (self.by_id.values().filter_map(delta).collect(), self.changed.into_values().collect())
    }
}

impl LockedCluster {
    /// Returns the dimensions of its queues, cores first.
    pub(super) fn dimensions(&self) -> [Dimension; 2] {
        match self.provider.resource_type.as_str() {
            KUBERNETES => NAMESPACE_DIMENSIONS,
            _ => QUEUE_DIMENSIONS,
        }
    }

    pub(super) fn wait_keys(&self, path: &str) -> Vec<WaitKey> {
        let provider = &self.provider.name;
        along(path).map(|path| WaitKey::Queue { provider: provider.clone(), path: path.to_owned() }).collect()
    }

    /// Returns the age of the snapshot; `None` if there is none.
    pub(super) fn age(&self, now: OffsetDateTime) -> Option<Duration> {
        self.is_known.then(|| (now - self.rooms.snapshot().begun).max(Duration::ZERO))
    }

    /// Returns the basis for a decision now; `None` if requests are refused.
    pub(super) fn basis(&self, now: OffsetDateTime) -> Option<QueueCheckBasis> {
        match (self.age(now), self.rules.when_away) {
            (Some(age), _) if age <= self.rules.max_age => Some(QueueCheckBasis::Snapshot),
            (Some(age), UnavailablePolicy::LastKnown) if age <= self.rules.last_known_for => {
                Some(QueueCheckBasis::LastKnown)
            }
            (_, UnavailablePolicy::Allow) => Some(QueueCheckBasis::Unchecked),
            _ => None,
        }
    }
}
