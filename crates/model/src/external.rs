//! External queues: the capacity of a YARN queue or Kubernetes namespace, from a cluster snapshot and the grants that it
//! does not show.
//!
//! A snapshot has a time and contains the maximum and use of each queue and the use of each application. For each queue and
//! its ancestors,
//!
//! > capacity = max − used − Σ unseen(ticket), over the live tickets in the queue,
//!
//! where unseen(ticket) is the granted amount less the amount that the *same* snapshot shows for the ticket's application.
//! Each ticket thus counts with the larger of its grant and its actual use: never with both, and never with less than its
//! grant. [`ClusterSnapshot`] has the rules for each phase of a ticket.
//!
//! Never: queries a cluster. Callers: the ledger and the refresh task.
//!
//! - `demand`: demand and refusal; `cluster`: clusters in a batch; `preparation`: counts for the next snapshot.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use time::{Duration, OffsetDateTime};

use super::queue::{Application, ExternalQueue, QueueAmounts, QueueError, QueueState, QueueTree};

mod cluster;
mod demand;
mod preparation;

pub use cluster::{
    CheckRules, ClusterDelta, ClusterTicket, ClusterTicketDelta, Clusters, JudgedQueue, KUBERNETES, LockedCluster,
    QueueCheckBasis, UnavailablePolicy, YARN, place_of,
};
pub use demand::QueueDemand;
pub use preparation::SnapshotPreparation;

/// Maximum time until a cluster shows an engine that has no application id.
pub const SETTLE: Duration = Duration::seconds(60);

/// Queues and applications of an external cluster at one moment.
///
/// The unseen amount of a ticket follows from these rules:
///
/// 1. A locked ticket is unseen: its application is not known yet.
/// 2. A used ticket with an application is unseen except for the amount in the snapshot. An application reported after the
///    snapshot is subtracted too, because the snapshot's queue use includes exactly that amount.
/// 3. A used ticket without an application is unseen in snapshots begun before [`SETTLE`] has passed since its start, and
///    shown in later ones. The snapshot's time decides, so nothing changes between two snapshots.
/// 4. Queues and applications are two replies. Applications are read before and after the queues, and the lesser amount
///    counts. An application that started or ended in between is not taken as included.
/// 5. Snapshots are ordered by their start. An older one is never installed.
#[derive(Debug, Clone)]
pub struct ClusterSnapshot {
    /// Time before the first query, by the database clock.
    pub begun: OffsetDateTime,
    /// Queues of the cluster.
    pub queues: QueueTree,
    /// Part of the queues' use that each application accounts for.
    shown: HashMap<String, QueueAmounts>,
}

/// Amounts that a live ticket holds in an external queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueHolding {
    /// Granted or reported amounts.
    pub amounts: QueueAmounts,
    /// Phase of the ticket.
    pub phase: TicketPhase,
}

/// Phase of a ticket in an external queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TicketPhase {
    /// Granted; the engine has not confirmed.
    Locked,
    /// Confirmed by the engine.
    Used {
        /// Time of the confirmation.
        since: OffsetDateTime,
        /// Application id, if the engine reported one.
        application_id: Option<String>,
    },
}

impl ClusterSnapshot {
    /// Creates a snapshot from the replies of a cluster, in the order in which they were read.
    pub fn new(begun: OffsetDateTime, before: &[Application], queues: QueueTree, after: &[Application]) -> Self {
        let after: HashMap<&str, QueueAmounts> = after.iter().map(|app| (app.id.as_str(), app.allocated)).collect();
        let both = |app: &Application| Some((app.id.clone(), app.allocated.least(*after.get(app.id.as_str())?)));
        Self { begun, queues, shown: before.iter().filter_map(both).collect() }
    }

    /// Creates a snapshot from stored rows; may contain only the queues that a batch needs.
    pub fn stored(begun: OffsetDateTime, queues: QueueTree, shown: HashMap<String, QueueAmounts>) -> Self {
        Self { begun, queues, shown }
    }

    /// Returns the part of the queues' use that each application accounts for.
    pub fn shown(&self) -> &HashMap<String, QueueAmounts> {
        &self.shown
    }

    /// Returns the granted amounts that the queues' use does not include.
    pub fn unseen(&self, held: &QueueHolding) -> QueueAmounts {
        let shown = match &held.phase {
            TicketPhase::Locked => QueueAmounts::default(),
            TicketPhase::Used { application_id: Some(id), .. } => self.shown.get(id).copied().unwrap_or_default(),
            TicketPhase::Used { since, application_id: None } if !self.is_settled(*since) => QueueAmounts::default(),
            TicketPhase::Used { application_id: None, .. } => held.amounts,
        };
        held.amounts.unseen(shown)
    }

    /// Returns whether a ticket without an application, used since then, is taken as shown.
    fn is_settled(&self, since: OffsetDateTime) -> bool {
        since <= self.begun.saturating_sub(SETTLE)
    }
}

/// Amounts of a ticket before and after a change. A new ticket has no `from`; an ended one has no `to`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HoldingChange {
    /// Queue path; never changes for a ticket.
    pub path: String,
    /// Amounts before the change.
    pub from: Option<QueueHolding>,
    /// Amounts after the change.
    pub to: Option<QueueHolding>,
}

/// The queues of a cluster with the granted amounts that its snapshot does not show.
#[derive(Debug, Clone)]
pub struct QueueCapacities {
    snapshot: Arc<ClusterSnapshot>,
    /// Unseen amounts by path, for every queue with live tickets and its ancestors; includes queues that the snapshot does
    /// not contain.
    unseen: BTreeMap<String, QueueAmounts>,
}

/// Reason why a queue has no capacity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QueueShortage {
    /// The queue does not exist, or its name is ambiguous.
    Queue(QueueError),
    /// The queue or an ancestor does not accept applications in its state.
    State {
        /// Path of that queue.
        path: String,
        /// State of that queue.
        state: QueueState,
    },
    /// The queue or its ancestors have too little capacity.
    Short(Vec<ShortQueue>),
}

/// A queue with too little capacity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShortQueue {
    /// Queue path.
    pub path: String,
    /// Capacity left in this queue alone, without its ancestors and without reservations.
    pub left: QueueAmounts,
    /// Amounts that earlier queue entries reserve.
    pub ahead: QueueAmounts,
    /// Maximum of the queue.
    pub max: QueueAmounts,
}

impl ShortQueue {
    /// Returns the capacity left after the reservations of earlier entries.
    pub fn available(&self) -> QueueAmounts {
        self.left.minus(self.ahead)
    }

    fn is_short(&self, need: QueueAmounts) -> bool {
        let available = self.available();
        let is_short = |need: i64, available: i64| need > 0 && need > available;
        is_short(need.memory, available.memory) || is_short(need.cores, available.cores)
    }
}

/// Returns the paths from the root to `path`, inclusive.
pub fn along(path: &str) -> impl DoubleEndedIterator<Item = &str> {
    let mut ends: Vec<usize> = path.match_indices('.').map(|(end, _)| end).collect();
    ends.push(path.len());
    ends.into_iter().filter_map(|end| path.get(..end))
}

/// Error: the installed snapshot is not older.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StaleSnapshot;

impl QueueCapacities {
    /// Counts the live tickets, given with their queue paths, against a snapshot.
    pub fn new<'a>(
        snapshot: Arc<ClusterSnapshot>,
        live: impl IntoIterator<Item = (&'a str, &'a QueueHolding)>,
    ) -> Self {
        let mut rooms = Self { snapshot, unseen: BTreeMap::new() };
        for (path, held) in live {
            rooms.count(path, QueueAmounts::default(), rooms.snapshot.unseen(held));
        }
        rooms
    }

    /// Creates the state from stored rows; `unseen` may contain only the queues that a batch needs.
    pub fn stored(snapshot: Arc<ClusterSnapshot>, unseen: BTreeMap<String, QueueAmounts>) -> Self {
        Self { snapshot, unseen }
    }

    /// Returns the snapshot.
    pub fn snapshot(&self) -> &ClusterSnapshot {
        &self.snapshot
    }

    /// Returns the granted amounts in a queue that the snapshot does not show.
    pub fn unseen(&self, path: &str) -> QueueAmounts {
        self.unseen.get(path).copied().unwrap_or_default()
    }

    /// Returns the unseen amounts of all queues where they are not zero, by path.
    pub fn all_unseen(&self) -> &BTreeMap<String, QueueAmounts> {
        &self.unseen
    }

    /// Returns the capacity of a queue, limited by its ancestors; zero if the snapshot does not contain the queue.
    pub fn room(&self, path: &str) -> QueueAmounts {
        let queues = &self.snapshot.queues;
        let Ok(queue) = queues.find(path) else { return QueueAmounts::default() };
        queues.least(queue, |queue| self.left(queue))
    }

    /// Returns the path of the queue that `name` refers to.
    ///
    /// # Errors
    /// [`QueueShortage::Queue`] if no queue or several queues match.
    pub fn path(&self, name: &str) -> Result<&str, QueueShortage> {
        self.snapshot.queues.find(name).map(|queue| queue.path.as_str()).map_err(QueueShortage::Queue)
    }

    /// Returns the capacity left in this queue alone, without its ancestors.
    fn left(&self, queue: &ExternalQueue) -> QueueAmounts {
        queue.max.minus(queue.used).minus(self.unseen(&queue.path))
    }

    /// Checks that the queue and its ancestors have capacity for `need` beyond the reservations `ahead`. A dimension that
    /// `need` does not contain is never short.
    ///
    /// # Errors
    /// The reason why the capacity is insufficient.
    pub fn judge(
        &self,
        path: &str,
        need: QueueAmounts,
        ahead: impl Fn(&str) -> QueueAmounts,
    ) -> Result<(), QueueShortage> {
        let queues = &self.snapshot.queues;
        let queue = queues.find(path).map_err(QueueShortage::Queue)?;
        if let Some(closed) = queues.along(queue).find(|queue| queue.state != QueueState::Running) {
            return Err(QueueShortage::State { path: closed.path.clone(), state: closed.state });
        }
        let along = queues.deciding(queue).map(|(queue, decides)| ShortQueue {
            path: queue.path.clone(),
            left: decides.left(self.left(queue)),
            ahead: ahead(&queue.path),
            max: queue.max,
        });
        let short: Vec<_> = along.filter(|queue| queue.is_short(need)).collect();
        if short.is_empty() { Ok(()) } else { Err(QueueShortage::Short(short)) }
    }

    /// Counts a change of a ticket.
    pub fn apply(&mut self, change: &HoldingChange) {
        let unseen =
            |held: &Option<QueueHolding>| held.as_ref().map(|held| self.snapshot.unseen(held)).unwrap_or_default();
        let (from, to) = (unseen(&change.from), unseen(&change.to));
        self.count(&change.path, from, to);
    }

    /// Replaces the snapshot by a later one. `prepared` counts the tickets of some earlier moment against it; `since`
    /// contains the changes after that moment.
    ///
    /// # Errors
    /// [`StaleSnapshot`] if the installed snapshot is not older; the state is then unchanged.
    pub fn install(&mut self, mut prepared: Self, since: &[HoldingChange]) -> Result<(), StaleSnapshot> {
        if prepared.snapshot.begun <= self.snapshot.begun {
            return Err(StaleSnapshot);
        }
        since.iter().for_each(|change| prepared.apply(change));
        *self = prepared;
        Ok(())
    }

    /// Replaces the unseen amount `from` by `to`, at a path and its ancestors.
    fn count(&mut self, path: &str, from: QueueAmounts, to: QueueAmounts) {
        for path in along(path) {
            let unseen = self.unseen(path).minus(from).plus(to);
            match unseen == QueueAmounts::default() {
                true => drop(self.unseen.remove(path)),
                false => drop(self.unseen.insert(path.to_owned(), unseen)),
            }
        }
    }
}

#[cfg(test)]
mod tests;
