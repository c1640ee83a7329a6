//! Clusters as the ledger sees them: the queues that a batch is about, what was granted in them, and what becomes of that.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use crate::{
    judgement::{self, Short},
    limit::Limits,
    line::{Line, Spot},
    name::Labels,
    operation::Request,
    provider::{self, Provider},
    queue::QueueAmounts,
    refusal::Refusal,
    resource::{Dimension, Resource},
    ticket::{Ticket, TicketState},
};

use super::{
    Change, Held, Phase, Rooms, along,
    asked::{Asked, full_path},
};

/// The type of the clusters whose queues resources name, as Linkis calls it.
pub const YARN: &str = "Yarn";

/// The type of those whose namespaces they name, likewise.
pub const KUBERNETES: &str = "Kubernetes";

/// In which type of cluster a resource asks for something, and in which queue, or namespace, of it.
pub fn place_of(resource: &Resource) -> Option<(&'static str, &str)> {
    let queue = resource.queue_name().map(|name| (YARN, name));
    queue.or_else(|| resource.namespace().map(|name| (KUBERNETES, name)))
}

/// What a request gets while no snapshot of its cluster is young enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhenAway {
    /// Nothing.
    Refuse,
    /// What it asks for, whatever the queue has.
    Allow,
    /// What fits by the last snapshot, up to some age.
    LastKnown,
}

impl WhenAway {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Refuse, Self::Allow, Self::LastKnown];

    /// As providers' configurations call it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Refuse => "refuse",
            Self::Allow => "allow",
            Self::LastKnown => "last_known",
        }
    }

    /// The reverse of [`WhenAway::as_str`].
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|when_away| when_away.as_str() == text)
    }
}

/// How the queues of a cluster are judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckRules {
    /// By which age a snapshot is too old.
    pub max_age: Duration,
    /// What then.
    pub when_away: WhenAway,
    /// Up to which age the last one is used, if it is.
    pub last_known_for: Duration,
    /// How often a snapshot is made.
    pub refresh_interval: Duration,
}

/// By what a queue was judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// By what its cluster showed lately.
    Snapshot,
    /// By what its cluster showed last, which is older than it should be.
    LastKnown,
    /// By nothing: its cluster does not answer, and its provider allows everything then.
    Unchecked,
}

/// The queue in which something was granted, and by what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JudgedQueue {
    /// The name of the provider.
    pub provider: String,
    /// The path of the queue.
    pub path: String,
    /// By what it was judged.
    pub basis: Basis,
    /// How old the last snapshot was; `None` if there never was one.
    pub age: Option<Duration>,
}

/// A cluster, under its lock.
#[derive(Debug, Clone)]
pub struct Cluster {
    /// Its number: that of a provider which is put again after it was removed is another.
    pub id: i64,
    /// Its provider.
    pub provider: Provider,
    /// How its queues are judged.
    pub rules: CheckRules,
    /// Whether there is a snapshot; without one, `rooms` are empty.
    pub is_known: bool,
    /// How many changes of tickets there were.
    pub changes: i64,
    /// As much of its queues as the batch is about.
    pub rooms: Rooms,
}

/// What a live ticket holds of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterTicket {
    /// Of which.
    pub cluster_id: i64,
    /// The path of its queue, which stays.
    pub path: String,
    /// How much.
    pub held: Held,
}

/// What has to be written of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterDelta {
    /// Which.
    pub cluster_id: i64,
    /// How many changes there were when it was read.
    pub changes_before: i64,
    /// How many there are now.
    pub changes: i64,
    /// What is unseen in queues where that changed.
    pub unseen: Vec<(String, QueueAmounts)>,
}

/// What has to be written of a ticket in a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterTicketDelta {
    /// Which.
    pub ticket_id: Uuid,
    /// What it holds, or held last.
    pub ticket: ClusterTicket,
    /// The number of the change among all of the cluster.
    pub change: i64,
    /// Whether it has ended.
    pub ended: bool,
}

/// The clusters that a batch is about.
#[derive(Debug, Clone, Default)]
pub struct Clusters {
    providers: Vec<(i64, Provider)>,
    by_id: BTreeMap<i64, Cluster>,
    tickets: HashMap<Uuid, ClusterTicket>,
    /// How many changes each had when it was read.
    before: BTreeMap<i64, i64>,
    touched: BTreeSet<(i64, String)>,
    changed: HashMap<Uuid, ClusterTicketDelta>,
}

/// How much of a resource is the queue's, or the namespace's.
fn amounts_of(resource: &Resource) -> QueueAmounts {
    let [cores, memory] = match resource.namespace() {
        None => QUEUE_DIMENSIONS,
        Some(_) => NAMESPACE_DIMENSIONS,
    };
    QueueAmounts { memory: resource.get(&memory), cores: resource.get(&cores) }
}

/// What is asked for in a queue, and in a namespace: cores first.
const QUEUE_DIMENSIONS: [Dimension; 2] = [Dimension::QueueCores, Dimension::QueueMemory];
const NAMESPACE_DIMENSIONS: [Dimension; 2] = [Dimension::KubernetesMillicores, Dimension::KubernetesMemory];

/// What a ticket holds of its queue.
fn held_by(state: &TicketState) -> Held {
    match state {
        TicketState::Locked { resource, .. } => Held { amounts: amounts_of(resource), phase: Phase::Locked },
        TicketState::Used { resource, used_time, .. } => {
            let application_id = resource.application_id().filter(|id| !id.is_empty()).map(str::to_owned);
            Held { amounts: amounts_of(resource), phase: Phase::Used { since: *used_time, application_id } }
        }
    }
}

impl Clusters {
    /// All providers with the numbers of their clusters, the clusters that are locked, and what the batch's tickets hold in them.
    pub fn new(
        providers: Vec<(i64, Provider)>,
        clusters: impl IntoIterator<Item = Cluster>,
        tickets: HashMap<Uuid, ClusterTicket>,
    ) -> Self {
        let by_id: BTreeMap<i64, Cluster> = clusters.into_iter().map(|cluster| (cluster.id, cluster)).collect();
        let before = by_id.iter().map(|(id, cluster)| (*id, cluster.changes)).collect();
        Self { providers, by_id, tickets, before, ..Self::default() }
    }

    /// The cluster of a type among `providers` that a request with these labels belongs to.
    pub fn chosen(providers: &[(i64, Provider)], resource_type: &str, labels: &Labels) -> Option<i64> {
        let chosen = provider::choose(providers.iter().map(|(_, provider)| provider), resource_type, labels.as_map())?;
        providers.iter().find(|(_, provider)| provider == chosen).map(|(id, _)| *id)
    }

    /// What is asked for in a queue of a cluster; `None` if no cluster has a say.
    pub fn asked<'a>(&'a self, resource: &'a Resource, labels: &Labels) -> Option<Asked<'a>> {
        let (resource_type, name) = place_of(resource)?;
        let cluster = self.by_id.get(&Self::chosen(&self.providers, resource_type, labels)?)?;
        Some(Asked { cluster, name, amounts: amounts_of(resource) })
    }

    /// Judges a request by its queue too, behind everything else. Answers with what was judged before, and the queue, if there is one.
    ///
    /// # Errors
    /// Why it does not fit, wherever that is.
    pub fn judge<T>(
        &self,
        judged: Result<T, Box<Short>>,
        request: &Request,
        limits: &Limits,
        line: &Line,
        now: OffsetDateTime,
    ) -> Result<(T, Option<JudgedQueue>), Box<Short>> {
        let Some(asked) = self.asked(&request.ask.resource, &request.ask.labels) else {
            return judged.map(|judged| (judged, None));
        };
        match (judged, asked.judge(line, request.position(), now)) {
            (Ok(judged), Ok(queue)) => Ok((judged, queue)),
            (Ok(_), Err(mut short)) => {
                short.spots.extend(judgement::spots(request, limits).map(|spot| (spot, false)));
                Err(short)
            }
            (Err(mut short), Ok(_)) => {
                short.spots.extend(asked.spots().into_iter().map(|spot| (spot, false)));
                Err(short)
            }
            (Err(mut short), Err(in_queue)) => {
                let Short { refusal: Refusal { shortfalls, never_fits, .. }, spots } = *in_queue;
                short.refusal.shortfalls.extend(shortfalls);
                short.refusal.never_fits |= never_fits;
                short.spots.extend(spots);
                Err(short)
            }
        }
    }

    /// Where a ticket stands in line, or would, for what it holds of a queue.
    pub fn spots_of(&self, ticket_id: Uuid) -> Vec<Spot> {
        let ticket = self.tickets.get(&ticket_id);
        let spots = ticket.and_then(|ticket| Some(self.by_id.get(&ticket.cluster_id)?.spots(&ticket.path)));
        spots.unwrap_or_default()
    }

    /// Why a live ticket may not hold so much of its queue instead of what it holds; what does not grow always may.
    pub fn judge_growth(&self, ticket_id: Uuid, used: &Resource, now: OffsetDateTime) -> Option<Refusal> {
        let ticket = self.tickets.get(&ticket_id)?;
        let (cluster, amounts) = (self.by_id.get(&ticket.cluster_id)?, amounts_of(used));
        let (held, grows) = (ticket.held.amounts, amounts.minus(ticket.held.amounts));
        if grows.memory <= 0 && grows.cores <= 0 {
            return None;
        }
        let asked = Asked { cluster, name: &ticket.path, amounts };
        // An engine that runs does not wait in line.
        asked.judge_need(held, grows, &Line::default(), None, now).err().map(|short| short.refusal)
    }

    /// Counts a ticket that is new.
    pub fn count(&mut self, ticket: &Ticket) {
        let Some(Asked { cluster, name, .. }) = self.asked(ticket.resource(), &ticket.labels) else { return };
        let held = held_by(&ticket.state);
        let path = match cluster.rooms.path(name) {
            Ok(path) => path.to_owned(),
            // There is nothing to count, and no queue to count it in.
            Err(_) if held.amounts == QueueAmounts::default() => return,
            Err(_) => full_path(name),
        };
        let new = ClusterTicket { cluster_id: cluster.id, path, held: held.clone() };
        self.change(ticket.id, new, None, Some(held));
    }

    /// A ticket holds something else from now on.
    pub fn recount(&mut self, ticket: &Ticket) {
        if let Some(before) = self.tickets.get(&ticket.id).cloned() {
            let held = held_by(&ticket.state);
            let now = ClusterTicket { held: held.clone(), ..before.clone() };
            self.change(ticket.id, now, Some(before.held), Some(held));
        }
    }

    /// A ticket has ended.
    pub fn end(&mut self, ticket_id: Uuid) {
        if let Some(before) = self.tickets.get(&ticket_id).cloned() {
            let held = before.held.clone();
            self.change(ticket_id, before, Some(held), None);
        }
    }

    fn change(&mut self, ticket_id: Uuid, ticket: ClusterTicket, from: Option<Held>, to: Option<Held>) {
        // A cluster that is gone counts nothing.
        let Some(cluster) = self.by_id.get_mut(&ticket.cluster_id) else { return };
        cluster.changes += 1;
        let ended = to.is_none();
        cluster.rooms.apply(&Change { path: ticket.path.clone(), from, to });
        self.touched.extend(along(&ticket.path).map(|path| (ticket.cluster_id, path.to_owned())));
        match ended {
            true => drop(self.tickets.remove(&ticket_id)),
            false => drop(self.tickets.insert(ticket_id, ticket.clone())),
        }
        let change = cluster.changes;
        self.changed.insert(ticket_id, ClusterTicketDelta { ticket_id, ticket, change, ended });
    }

    /// What has to be written.
    pub fn finish(self) -> (Vec<ClusterDelta>, Vec<ClusterTicketDelta>) {
        let delta = |cluster: &Cluster| {
            let changes_before = self.before.get(&cluster.id).copied().unwrap_or_default();
            let touched = self.touched.iter().filter(|(id, _)| *id == cluster.id);
            let unseen = touched.map(|(_, path)| (path.clone(), cluster.rooms.unseen(path))).collect();
            let (cluster_id, changes) = (cluster.id, cluster.changes);
            (changes != changes_before).then_some(ClusterDelta { cluster_id, changes_before, changes, unseen })
        };
        (self.by_id.values().filter_map(delta).collect(), self.changed.into_values().collect())
    }
}

impl Cluster {
    /// What is asked for in its queues: cores first.
    pub(super) fn dimensions(&self) -> [Dimension; 2] {
        match self.provider.resource_type.as_str() {
            KUBERNETES => NAMESPACE_DIMENSIONS,
            _ => QUEUE_DIMENSIONS,
        }
    }

    pub(super) fn spots(&self, path: &str) -> Vec<Spot> {
        let provider = &self.provider.name;
        along(path).map(|path| Spot::Queue { provider: provider.clone(), path: path.to_owned() }).collect()
    }

    /// How old the snapshot is.
    pub(super) fn age(&self, now: OffsetDateTime) -> Option<Duration> {
        self.is_known.then(|| (now - self.rooms.snapshot().begun).max(Duration::ZERO))
    }

    /// By what it is judged now; `None` if by nothing, so that everything is refused.
    pub(super) fn basis(&self, now: OffsetDateTime) -> Option<Basis> {
        match (self.age(now), self.rules.when_away) {
            (Some(age), _) if age <= self.rules.max_age => Some(Basis::Snapshot),
            (Some(age), WhenAway::LastKnown) if age <= self.rules.last_known_for => Some(Basis::LastKnown),
            (_, WhenAway::Allow) => Some(Basis::Unchecked),
            _ => None,
        }
    }
}
