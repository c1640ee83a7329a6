//! What a snapshot that is not in force yet leaves unseen, brought up to date until it is; and kept for the next one, so that a snapshot costs
//! what has changed, and not all tickets.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use time::OffsetDateTime;
use uuid::Uuid;

use crate::queue::QueueAmounts;

use super::{ClusterTicketDelta, Held, Older, Phase, Rooms, Snapshot, along};

/// A snapshot, and what live tickets hold that it does not show.
#[derive(Debug)]
pub struct Preparation {
    rooms: Rooms,
    counted: HashMap<Uuid, Counted>,
    /// Of very many tickets, few are in another queue than others.
    paths: HashSet<Arc<str>>,
    /// The tickets of applications: those whose amounts another snapshot may show otherwise.
    applications: BTreeSet<(Arc<str>, Uuid)>,
    /// The tickets without one that are not taken to be shown, by when they came into use.
    settling: BTreeSet<(OffsetDateTime, Uuid)>,
    touched: BTreeSet<String>,
}

/// A live ticket: as little of it as a later snapshot needs, because there may be very many.
#[derive(Debug)]
struct Counted {
    path: Arc<str>,
    amounts: QueueAmounts,
    /// What of it is counted.
    unseen: QueueAmounts,
    shows: Shows,
}

/// When another snapshot shows something else of a ticket.
#[derive(Debug, Clone)]
enum Shows {
    /// Never, as long as the ticket does not change.
    Same,
    /// When it shows something else of this application.
    Application(Arc<str>),
    /// When it was begun late enough after this.
    Settled(OffsetDateTime),
}

impl Preparation {
    /// Without tickets.
    pub fn new(snapshot: Arc<Snapshot>) -> Self {
        Self {
            rooms: Rooms::new(snapshot, []),
            counted: HashMap::new(),
            paths: HashSet::new(),
            applications: BTreeSet::new(),
            settling: BTreeSet::new(),
            touched: BTreeSet::new(),
        }
    }

    /// Counts a ticket as it is now, whatever it was before.
    pub fn put(&mut self, delta: &ClusterTicketDelta) {
        let ticket_id = delta.ticket_id;
        self.remove(ticket_id);
        if delta.ended {
            return;
        }
        let path = self.paths.get(delta.ticket.path.as_str()).cloned().unwrap_or_else(|| {
            let path: Arc<str> = delta.ticket.path.as_str().into();
            self.paths.insert(path.clone());
            path
        });
        let held = &delta.ticket.held;
        let unseen = self.rooms.snapshot.unseen(held);
        self.rooms.count(&path, QueueAmounts::default(), unseen);
        let shows = self.shows(held);
        match &shows {
            Shows::Same => {}
            Shows::Application(id) => drop(self.applications.insert((id.clone(), ticket_id))),
            Shows::Settled(since) => drop(self.settling.insert((*since, ticket_id))),
        }
        self.counted.insert(ticket_id, Counted { path, amounts: held.amounts, unseen, shows });
    }

    fn shows(&self, held: &Held) -> Shows {
        match &held.phase {
            Phase::Locked => Shows::Same,
            Phase::Used { application_id: Some(id), .. } => Shows::Application(id.as_str().into()),
            Phase::Used { since, application_id: None } if self.rooms.snapshot.is_settled(*since) => Shows::Same,
            Phase::Used { since, application_id: None } => Shows::Settled(*since),
        }
    }

    fn remove(&mut self, ticket_id: Uuid) {
        let Some(Counted { path, unseen, shows, .. }) = self.counted.remove(&ticket_id) else { return };
        self.rooms.count(&path, unseen, QueueAmounts::default());
        match shows {
            Shows::Same => {}
            Shows::Application(id) => drop(self.applications.remove(&(id, ticket_id))),
            Shows::Settled(since) => drop(self.settling.remove(&(since, ticket_id))),
        }
    }

    /// Counts the same tickets by a later snapshot: those of applications of which it shows something else, and those that have settled
    /// since.
    ///
    /// # Errors
    /// [`Older`]: tickets that had settled might not have; nothing is changed.
    pub fn renew(&mut self, snapshot: Arc<Snapshot>) -> Result<(), Older> {
        if snapshot.begun <= self.rooms.snapshot.begun {
            return Err(Older);
        }
        let before = std::mem::replace(&mut self.rooms.snapshot, snapshot.clone());
        let shows_otherwise = |id: &&String| before.shown().get(*id) != snapshot.shown().get(*id);
        let gone = before.shown().keys().filter(|id| !snapshot.shown().contains_key(*id));
        for id in snapshot.shown().keys().filter(shows_otherwise).chain(gone) {
            let id: Arc<str> = id.as_str().into();
            let tickets = self.applications.range((id.clone(), Uuid::nil())..=(id.clone(), Uuid::max()));
            let tickets: Vec<Uuid> = tickets.map(|(_, ticket_id)| *ticket_id).collect();
            let shown = snapshot.shown().get(&*id).copied().unwrap_or_default();
            tickets.into_iter().for_each(|ticket_id| self.recount(ticket_id, shown));
        }
        while let Some((since, ticket_id)) = self.settling.first().copied()
            && snapshot.is_settled(since)
        {
            self.settling.pop_first();
            if let Some(counted) = self.counted.get_mut(&ticket_id) {
                counted.shows = Shows::Same;
                let all = counted.amounts;
                self.recount(ticket_id, all);
            }
        }
        self.paths.retain(|path| Arc::strong_count(path) > 1);
        Ok(())
    }

    /// So much is shown of a ticket now.
    fn recount(&mut self, ticket_id: Uuid, shown: QueueAmounts) {
        if let Some(counted) = self.counted.get_mut(&ticket_id) {
            let unseen = counted.amounts.unseen(shown);
            self.rooms.count(&counted.path, counted.unseen, unseen);
            counted.unseen = unseen;
        }
    }

    /// The same as [`Preparation::put`] of one that has changed since what is stored of queues was read.
    pub fn catch_up(&mut self, delta: &ClusterTicketDelta) {
        self.touched.extend(along(&delta.ticket.path).map(str::to_owned));
        self.put(delta);
    }

    /// The queues in which tickets have changed since; none any more: what is stored of them is read again.
    pub fn take_touched(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.touched)
    }

    /// The same, and they stay so.
    pub fn touched(&self) -> impl Iterator<Item = &String> {
        self.touched.iter()
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
