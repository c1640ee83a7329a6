//! What a snapshot that is not in force yet leaves unseen, brought up to date until it is.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use uuid::Uuid;

use crate::domain::queue::QueueAmounts;

use super::{ClusterTicketDelta, Rooms, Snapshot, along};

/// A snapshot, and what live tickets hold that it does not show.
#[derive(Debug)]
pub struct Preparation {
    rooms: Rooms,
    /// Of each live ticket, in which queue it is, and what of it is counted.
    counted: HashMap<Uuid, (Arc<str>, QueueAmounts)>,
    /// Of very many tickets, few are in another queue than others.
    paths: HashSet<Arc<str>>,
    touched: BTreeSet<String>,
}

impl Preparation {
    /// Without tickets.
    pub fn new(snapshot: Arc<Snapshot>) -> Self {
        let (rooms, counted, paths) = (Rooms::new(snapshot, []), HashMap::new(), HashSet::new());
        Self { rooms, counted, paths, touched: BTreeSet::new() }
    }

    /// Counts a ticket as it is now, whatever it was before.
    pub fn put(&mut self, delta: &ClusterTicketDelta) {
        let nothing = QueueAmounts::default();
        if let Some((path, counted)) = self.counted.remove(&delta.ticket_id) {
            self.rooms.count(&path, counted, nothing);
        }
        if delta.ended {
            return;
        }
        let path = self.paths.get(delta.ticket.path.as_str()).cloned().unwrap_or_else(|| {
            let path: Arc<str> = delta.ticket.path.as_str().into();
            self.paths.insert(path.clone());
            path
        });
        let unseen = self.rooms.snapshot.unseen(&delta.ticket.held);
        self.rooms.count(&path, nothing, unseen);
        self.counted.insert(delta.ticket_id, (path, unseen));
    }

    /// The same of one that has changed since what is stored of queues was read.
    pub fn catch_up(&mut self, delta: &ClusterTicketDelta) {
        self.touched.extend(along(&delta.ticket.path).map(str::to_owned));
        self.put(delta);
    }

    /// The queues in which tickets have changed since; none any more: what is stored of them is read again.
    pub fn take_touched(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.touched)
    }

    /// What is unseen of all queues where that is not what was `stored`, or where it has changed since.
    pub fn differing(&self, stored: &BTreeMap<String, QueueAmounts>) -> Vec<(String, QueueAmounts)> {
        let all = stored.keys().chain(self.rooms.unseen.keys()).chain(&self.touched).collect::<BTreeSet<_>>();
        let differs = |path: &&String| {
            self.touched.contains(*path) || stored.get(*path).copied().unwrap_or_default() != self.rooms.unseen(path)
        };
        all.into_iter().filter(differs).map(|path| (path.clone(), self.rooms.unseen(path))).collect()
    }

    /// The queues, with what is unseen.
    pub fn rooms(&self) -> &Rooms {
        &self.rooms
    }

    /// How many live tickets are counted.
    pub fn tickets(&self) -> usize {
        self.counted.len()
    }
}
