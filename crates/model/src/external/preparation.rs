//! Preparation of the next snapshot: the unseen amounts of all live tickets, updated until the snapshot is installed.
//!
//! One preparation is reused for all later snapshots of a cluster, so a snapshot costs the changes since the last one, not
//! all tickets. Invariant: `rooms` contains exactly the sum over `counted`. Caller: the refresh task of a provider.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use time::OffsetDateTime;
use uuid::Uuid;

use crate::queue::QueueAmounts;

use super::{ClusterSnapshot, ClusterTicketDelta, QueueCapacities, QueueHolding, StaleSnapshot, TicketPhase, along};

/// A snapshot with the live tickets that it does not show.
#[derive(Debug)]
pub struct SnapshotPreparation {
    rooms: QueueCapacities,
    counted: HashMap<Uuid, CountedTicket>,
    /// Interned paths: many tickets share few queues.
    paths: HashSet<Arc<str>>,
    /// Tickets with an application, whose shown amounts a later snapshot can change.
    applications: BTreeSet<(Arc<str>, Uuid)>,
    /// Tickets without an application that are not taken as shown yet, by the time of their confirmation.
    settling: BTreeSet<(OffsetDateTime, Uuid)>,
    touched: BTreeSet<String>,
}

/// A live ticket, reduced to the data that a later snapshot needs, because there can be very many.
#[derive(Debug)]
struct CountedTicket {
    path: Arc<str>,
    amounts: QueueAmounts,
    /// Unseen amount that `rooms` includes for the ticket.
    unseen: QueueAmounts,
    shows: NextVisibility,
}

/// Condition under which a later snapshot shows other amounts for a ticket.
#[derive(Debug, Clone)]
enum NextVisibility {
    /// Never, until the ticket changes.
    Same,
    /// The snapshot shows other amounts for this application.
    Application(Arc<str>),
    /// The snapshot begins [`super::SETTLE`] or more after this time.
    Settled(OffsetDateTime),
}

impl SnapshotPreparation {
    /// Creates a preparation without tickets.
    pub fn new(snapshot: Arc<ClusterSnapshot>) -> Self {
        Self {
            rooms: QueueCapacities::new(snapshot, []),
            counted: HashMap::new(),
            paths: HashSet::new(),
            applications: BTreeSet::new(),
            settling: BTreeSet::new(),
            touched: BTreeSet::new(),
        }
    }

    /// Counts the current state of a ticket and replaces its earlier one.
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
            NextVisibility::Same => {}
            NextVisibility::Application(id) => drop(self.applications.insert((id.clone(), ticket_id))),
            NextVisibility::Settled(since) => drop(self.settling.insert((*since, ticket_id))),
        }
        self.counted.insert(ticket_id, CountedTicket { path, amounts: held.amounts, unseen, shows });
    }

    fn shows(&self, held: &QueueHolding) -> NextVisibility {
        match &held.phase {
            TicketPhase::Locked => NextVisibility::Same,
            TicketPhase::Used { application_id: Some(id), .. } => NextVisibility::Application(id.as_str().into()),
            TicketPhase::Used { since, application_id: None } if self.rooms.snapshot.is_settled(*since) => {
                NextVisibility::Same
            }
            TicketPhase::Used { since, application_id: None } => NextVisibility::Settled(*since),
        }
    }

    fn remove(&mut self, ticket_id: Uuid) {
        let Some(CountedTicket { path, unseen, shows, .. }) = self.counted.remove(&ticket_id) else { return };
        self.rooms.count(&path, unseen, QueueAmounts::default());
        match shows {
            NextVisibility::Same => {}
            NextVisibility::Application(id) => drop(self.applications.remove(&(id, ticket_id))),
            NextVisibility::Settled(since) => drop(self.settling.remove(&(since, ticket_id))),
        }
    }

    /// Replaces the snapshot by a later one. Recounts the tickets of changed applications and the tickets that are now
    /// settled.
    ///
    /// # Errors
    /// [`StaleSnapshot`] if the snapshot is not later, because settled tickets could become unsettled; the state is then unchanged.
    pub fn renew(&mut self, snapshot: Arc<ClusterSnapshot>) -> Result<(), StaleSnapshot> {
        if snapshot.begun <= self.rooms.snapshot.begun {
            return Err(StaleSnapshot);
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
                counted.shows = NextVisibility::Same;
                let all = counted.amounts;
                self.recount(ticket_id, all);
            }
        }
        self.paths.retain(|path| Arc::strong_count(path) > 1);
        Ok(())
    }

    /// Recounts a ticket with the amount `shown` by the new snapshot.
    fn recount(&mut self, ticket_id: Uuid, shown: QueueAmounts) {
        if let Some(counted) = self.counted.get_mut(&ticket_id) {
            let unseen = counted.amounts.unseen(shown);
            self.rooms.count(&counted.path, counted.unseen, unseen);
            counted.unseen = unseen;
        }
    }

    /// As [`SnapshotPreparation::put`], for a ticket that changed after the stored amounts were read.
    pub fn catch_up(&mut self, delta: &ClusterTicketDelta) {
        self.touched.extend(along(&delta.ticket.path).map(str::to_owned));
        self.put(delta);
    }

    /// Returns the queues of tickets changed by [`SnapshotPreparation::catch_up`], and clears the list.
    pub fn take_touched(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.touched)
    }

    /// Returns the queues of tickets changed by [`SnapshotPreparation::catch_up`].
    pub fn touched(&self) -> impl Iterator<Item = &String> {
        self.touched.iter()
    }

    /// Returns the unseen amounts of all queues that differ from `stored` or that changed by [`SnapshotPreparation::catch_up`].
    pub fn differing(&self, stored: &BTreeMap<String, QueueAmounts>) -> Vec<(String, QueueAmounts)> {
        let all = stored.keys().chain(self.rooms.unseen.keys()).chain(&self.touched).collect::<BTreeSet<_>>();
        let differs = |path: &&String| {
            self.touched.contains(*path) || stored.get(*path).copied().unwrap_or_default() != self.rooms.unseen(path)
        };
        all.into_iter().filter(differs).map(|path| (path.clone(), self.rooms.unseen(path))).collect()
    }

    /// Returns the queues with their unseen amounts.
    pub fn rooms(&self) -> &QueueCapacities {
        &self.rooms
    }

    /// Returns the number of counted tickets.
    pub fn tickets(&self) -> usize {
        self.counted.len()
    }
}
