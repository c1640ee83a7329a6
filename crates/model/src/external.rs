//! How much room a queue that lives elsewhere has: what its cluster showed at one moment, and what was granted that this does not show.
//!
//! A snapshot is an input: a value with a moment. Of a queue it says how much there may be and how much is used; of our tickets, by the
//! ids of their applications, how much of that use is theirs. For each queue and each that it is in,
//!
//! > room = max − used − Σ unseen(ticket), over the live tickets in it,
//!
//! where unseen(ticket) is what it was granted less what the *same* snapshot shows of it. So used + unseen counts of each ticket
//! the larger of what it was granted and what it has: never both, and never less than it was granted.
//!
//! 1. What is locked is unseen: its application is not known yet.
//! 2. What is in use, with an application, is unseen but for what the snapshot gives that application; also if it was told of later than the
//!    snapshot was taken, because what is subtracted is exactly what the snapshot's use includes.
//! 3. What is in use without one is unseen in snapshots that were begun before [`SETTLE`] had passed since it came into use, and shown
//!    after: by the moment of the snapshot and not by today's, so that nothing changes between two snapshots by itself.
//! 4. Queues and applications are two answers. Applications are asked before and after the queues, and the lesser counts: what came
//!    or went between is not taken to be included.
//! 5. Snapshots follow each other by the moment at which they were begun; an older one is not installed.
//!
//! - `asked`: what is asked for in a queue, and why it is not there;
//! - `cluster`: what the ledger sees of a cluster; `preparation`: how a snapshot that comes into force is counted.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use time::{Duration, OffsetDateTime};

use super::queue::{Application, Queue, QueueAmounts, QueueError, QueueState, Queues};

mod asked;
mod cluster;
mod preparation;

pub use asked::Asked;
pub use cluster::{
    Basis, CheckRules, Cluster, ClusterDelta, ClusterTicket, ClusterTicketDelta, Clusters, JudgedQueue, KUBERNETES,
    WhenAway, YARN, place_of,
};
pub use preparation::Preparation;

/// How long an engine without an application id may take until its cluster shows it.
pub const SETTLE: Duration = Duration::seconds(60);

/// What a cluster showed at one moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Before anything was asked, by the database's clock.
    pub begun: OffsetDateTime,
    /// Its queues.
    pub queues: Queues,
    /// What the use of its queues includes of each application.
    shown: HashMap<String, QueueAmounts>,
}

/// What a live ticket holds of a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// How much.
    pub amounts: QueueAmounts,
    /// How far it has come.
    pub phase: Phase,
}

/// How far a ticket has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// Granted; the engine has not reported in.
    Locked,
    /// In use.
    Used {
        /// Since when.
        since: OffsetDateTime,
        /// Its application, if the engine has told.
        application_id: Option<String>,
    },
}

impl Snapshot {
    /// From the answers of a cluster, in the order in which they were asked for.
    pub fn new(begun: OffsetDateTime, before: &[Application], queues: Queues, after: &[Application]) -> Self {
        let after: HashMap<&str, QueueAmounts> = after.iter().map(|app| (app.id.as_str(), app.allocated)).collect();
        let both = |app: &Application| Some((app.id.clone(), app.allocated.least(*after.get(app.id.as_str())?)));
        Self { begun, queues, shown: before.iter().filter_map(both).collect() }
    }

    /// The same as it was stored, or as much of it as is needed.
    pub fn stored(begun: OffsetDateTime, queues: Queues, shown: HashMap<String, QueueAmounts>) -> Self {
        Self { begun, queues, shown }
    }

    /// What the use of its queues includes of each application.
    pub fn shown(&self) -> &HashMap<String, QueueAmounts> {
        &self.shown
    }

    /// What was granted that the use of its queues does not include.
    pub fn unseen(&self, held: &Held) -> QueueAmounts {
        let shown = match &held.phase {
            Phase::Locked => QueueAmounts::default(),
            Phase::Used { application_id: Some(id), .. } => self.shown.get(id).copied().unwrap_or_default(),
            Phase::Used { since, application_id: None } if !self.is_settled(*since) => QueueAmounts::default(),
            Phase::Used { application_id: None, .. } => held.amounts,
        };
        held.amounts.unseen(shown)
    }

    /// Whether what came into use then without an application is taken to be shown.
    fn is_settled(&self, since: OffsetDateTime) -> bool {
        since <= self.begun.saturating_sub(SETTLE)
    }
}

/// What a ticket held, and what it holds now: without the first it is new, without the second it has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The path of its queue, which stays.
    pub path: String,
    /// Before.
    pub from: Option<Held>,
    /// After.
    pub to: Option<Held>,
}

/// The queues of a cluster, with what was granted in them.
#[derive(Debug, Clone)]
pub struct Rooms {
    snapshot: Arc<Snapshot>,
    /// By path, of all queues that live tickets are in, and of all that these are in; also of those that the snapshot does not have.
    unseen: BTreeMap<String, QueueAmounts>,
}

/// Why a queue has no room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoRoom {
    /// It is not there, or several are.
    Queue(QueueError),
    /// It takes nothing: it, or one that it is in, is in this state.
    State {
        /// Which.
        path: String,
        /// In which.
        state: QueueState,
    },
    /// There is too little: of it, or of what it is in.
    Short(Vec<ShortQueue>),
}

/// A queue that has too little left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShortQueue {
    /// Which.
    pub path: String,
    /// How much of it alone is left, whatever it is in, and whoever waits.
    pub left: QueueAmounts,
    /// How much is kept for those who wait before.
    pub ahead: QueueAmounts,
    /// How much there is in all.
    pub max: QueueAmounts,
}

impl ShortQueue {
    /// How much there is for one who asks, behind those who wait.
    pub fn available(&self) -> QueueAmounts {
        self.left.minus(self.ahead)
    }

    fn is_short(&self, need: QueueAmounts) -> bool {
        let available = self.available();
        let is_short = |need: i64, available: i64| need > 0 && need > available;
        is_short(need.memory, available.memory) || is_short(need.cores, available.cores)
    }
}

/// A path, and that of each queue that it is in, the root first.
pub fn along(path: &str) -> impl DoubleEndedIterator<Item = &str> {
    let mut ends: Vec<usize> = path.match_indices('.').map(|(end, _)| end).collect();
    ends.push(path.len());
    ends.into_iter().filter_map(|end| path.get(..end))
}

/// The snapshot is older than the one that is installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Older;

impl Rooms {
    /// By a snapshot, with these live tickets by the paths of their queues.
    pub fn new<'a>(snapshot: Arc<Snapshot>, live: impl IntoIterator<Item = (&'a str, &'a Held)>) -> Self {
        let mut rooms = Self { snapshot, unseen: BTreeMap::new() };
        for (path, held) in live {
            rooms.count(path, QueueAmounts::default(), rooms.snapshot.unseen(held));
        }
        rooms
    }

    /// The same as it was stored: `unseen` by path, as much of it as is needed.
    pub fn stored(snapshot: Arc<Snapshot>, unseen: BTreeMap<String, QueueAmounts>) -> Self {
        Self { snapshot, unseen }
    }

    /// The snapshot.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// What live tickets in a queue hold that the snapshot does not show.
    pub fn unseen(&self, path: &str) -> QueueAmounts {
        self.unseen.get(path).copied().unwrap_or_default()
    }

    /// The same of all queues that have anything unseen in them, by path.
    pub fn all_unseen(&self) -> &BTreeMap<String, QueueAmounts> {
        &self.unseen
    }

    /// How much of the queue at `path` is left, by it and by all that it is in; nothing, if the snapshot does not have it.
    pub fn room(&self, path: &str) -> QueueAmounts {
        let queues = &self.snapshot.queues;
        let Ok(queue) = queues.find(path) else { return QueueAmounts::default() };
        queues.least(queue, |queue| self.left(queue))
    }

    /// The path of the queue that `name` means.
    pub fn path(&self, name: &str) -> Result<&str, NoRoom> {
        self.snapshot.queues.find(name).map(|queue| queue.path.as_str()).map_err(NoRoom::Queue)
    }

    /// How much of a queue alone is left, whatever it is in.
    fn left(&self, queue: &Queue) -> QueueAmounts {
        queue.max.minus(queue.used).minus(self.unseen(&queue.path))
    }

    /// Whether the queue at `path`, and all that it is in, have room for so much more, while `ahead` is kept for others in each. Of what is
    /// not needed, there is never too little.
    ///
    /// # Errors
    /// Why they do not.
    pub fn judge(&self, path: &str, need: QueueAmounts, ahead: impl Fn(&str) -> QueueAmounts) -> Result<(), NoRoom> {
        let queues = &self.snapshot.queues;
        let queue = queues.find(path).map_err(NoRoom::Queue)?;
        if let Some(closed) = queues.along(queue).find(|queue| queue.state != QueueState::Running) {
            return Err(NoRoom::State { path: closed.path.clone(), state: closed.state });
        }
        let along = queues.deciding(queue).map(|(queue, decides)| ShortQueue {
            path: queue.path.clone(),
            left: decides.left(self.left(queue)),
            ahead: ahead(&queue.path),
            max: queue.max,
        });
        let short: Vec<_> = along.filter(|queue| queue.is_short(need)).collect();
        if short.is_empty() { Ok(()) } else { Err(NoRoom::Short(short)) }
    }

    /// Counts what has become of a ticket.
    pub fn apply(&mut self, change: &Change) {
        let unseen = |held: &Option<Held>| held.as_ref().map(|held| self.snapshot.unseen(held)).unwrap_or_default();
        let (from, to) = (unseen(&change.from), unseen(&change.to));
        self.count(&change.path, from, to);
    }

    /// The same by a later snapshot. `prepared` was made of it and of the tickets as they were at some moment; `since` is what has become of
    /// tickets after that moment.
    ///
    /// # Errors
    /// [`Older`]; nothing is changed.
    pub fn install(&mut self, mut prepared: Self, since: &[Change]) -> Result<(), Older> {
        if prepared.snapshot.begun <= self.snapshot.begun {
            return Err(Older);
        }
        since.iter().for_each(|change| prepared.apply(change));
        *self = prepared;
        Ok(())
    }

    /// Counts at a path, and at all that it is in.
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
