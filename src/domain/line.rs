//! The waiting line: who stands where, and how much the positions ahead keep for themselves.
//!
//! A waiting request stands at every spot (an EM, or a limited scope) where it is short. Whoever comes later, waiting or not, is
//! judged as if the requests ahead at its spots were granted already: so it passes only where it takes nothing that they are
//! waiting for, and a big request gets what is given back until it fits.
//!
//! At other spots a waiting request keeps nothing, so that one user who waits for a limit of his own does not block an EM for all
//! others; but for the first in line at some spot: that one stands at all of its spots, and so its turn comes.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    sync::{Arc, OnceLock},
};

use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    cap::Cap,
    em::EmInstance,
    name::{Labels, Name},
    resource::Resource,
    scope::{Scope, Tally},
};

/// Where one can stand in line.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Spot {
    /// At an EM.
    Em(EmInstance),
    /// At a limited scope.
    Scope(Scope),
    /// At a queue of an external cluster.
    Queue {
        /// The name of its provider.
        provider: Name,
        /// Its path.
        path: String,
    },
}

/// For people: not to be taken apart again.
impl fmt::Display for Spot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Em(em) => write!(f, "em={em}"),
            Self::Scope(scope) => scope.fmt(f),
            Self::Queue { provider, path } => write!(f, "provider={provider},queue={path}"),
        }
    }
}

/// How many bytes a [`QueuePosition`] has.
pub const POSITION_BYTES: usize = 26;

/// A position in line: the one key by which everybody stands in order, the same at every spot, so that no two spots can wait for each
/// other. Its bytes are in the order of those who wait: first the higher priority, then who came first, then the ticket.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueuePosition([u8; POSITION_BYTES]);

impl QueuePosition {
    /// Of a request that has this priority, has waited `since` then by the database's clock, read under the locks, and will be granted
    /// that ticket.
    pub fn new(priority: i16, since: OffsetDateTime, ticket_id: Uuid) -> Self {
        let rank = u16::MAX - priority.cast_unsigned().wrapping_add(1 << 15);
        let micros = i64::try_from(since.unix_timestamp_nanos() / 1000).unwrap_or(i64::MAX);
        let since = micros.cast_unsigned().wrapping_add(1 << 63);
        let mut bytes = [0; POSITION_BYTES];
        let fields = rank.to_be_bytes().into_iter().chain(since.to_be_bytes()).chain(ticket_id.into_bytes());
        bytes.iter_mut().zip(fields).for_each(|(byte, field)| *byte = field);
        Self(bytes)
    }

    /// As it was stored; `None` if it was not.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// As it is stored.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The ticket that will be granted.
    pub fn ticket_id(&self) -> Uuid {
        let mut ticket_id = [0; 16];
        ticket_id.copy_from_slice(&self.0[POSITION_BYTES - 16..]);
        Uuid::from_bytes(ticket_id)
    }
}

impl fmt::Debug for QueuePosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueuePosition({self})")
    }
}

/// In hexadecimal digits.
impl fmt::Display for QueuePosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// How somebody stands at a spot.
#[derive(Debug, Clone, PartialEq)]
pub struct WaitEntry {
    /// What is waited for.
    pub resource: Resource,
    /// Whether the spot is what it waits for; otherwise it only keeps its room there.
    pub is_short: bool,
}

/// The spots where a request stands; true where it is short.
pub type Spots = BTreeMap<Spot, bool>;

/// Room for more requests than anybody counted.
pub const MUCH: u32 = u32::MAX;

/// Where there is more room, or a position less ahead, and about how many requests it was that made it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FreedSpots(BTreeMap<Spot, u32>);

impl FreedSpots {
    /// So many requests have made room at a spot.
    pub fn note(&mut self, spot: Spot, requests: u32) {
        let noted = self.0.entry(spot).or_default();
        *noted = noted.saturating_add(requests);
    }

    /// Whether there is more room at a spot.
    pub fn contains(&self, spot: &Spot) -> bool {
        self.0.contains_key(spot)
    }

    /// Whether there is more room nowhere.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Spot by spot, and how many requests have made room there; [`MUCH`] if nobody knows.
    pub fn iter(&self) -> impl Iterator<Item = (&Spot, u32)> {
        self.0.iter().map(|(spot, requests)| (spot, *requests))
    }
}

/// A request that waits, as it is shown.
#[derive(Debug, Clone, PartialEq)]
pub struct WaitingRequest {
    /// The ticket that it will get if it is granted.
    pub ticket_id: Uuid,
    /// Since when, by the database's clock.
    pub waiting_since: OffsetDateTime,
    /// For whom.
    pub user: Name,
    /// By which application of the user.
    pub creator: Name,
    /// The engine's type; may be empty.
    pub engine_type: String,
    /// Where it was judged last.
    pub em: EmInstance,
    /// Whether any EM will do.
    pub any_em: bool,
    /// How much it waits for.
    pub resource: Resource,
    /// What it says of itself.
    pub labels: Labels,
    /// What it allows itself.
    pub caps: Vec<Cap>,
    /// Until when.
    pub wait_until: OffsetDateTime,
    /// Where it is short, for people, and how many are short there before it.
    pub ahead: BTreeMap<String, i64>,
}

/// How much of a spot was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Everybody who matters to somebody who comes last.
    All,
    /// Everybody who stands before this one, and he himself.
    UpTo(QueuePosition),
}

impl Extent {
    /// What has to be looked at for a request: those before it, if it stands in line.
    pub fn of(position: Option<QueuePosition>) -> Self {
        position.map_or(Self::All, Self::UpTo)
    }

    /// As much as both.
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::UpTo(one), Self::UpTo(two)) => Self::UpTo(one.max(two)),
            _ => Self::All,
        }
    }
}

/// Which spots were looked at, and how much of each.
pub type ViewedSpots = BTreeMap<Spot, Extent>;

/// The spots that have to be looked at for several requests.
pub fn viewed_spots(requests: impl IntoIterator<Item = (Spot, Extent)>) -> ViewedSpots {
    let mut spots = ViewedSpots::new();
    for (spot, extent) in requests {
        spots.entry(spot).and_modify(|viewed| *viewed = viewed.and(extent)).or_insert(extent);
    }
    spots
}

/// Who stands at some spots.
#[derive(Debug, Clone, Default)]
pub struct Line(HashMap<Spot, Arc<Queue>>);

/// Who stands at one spot.
#[derive(Debug, Clone, Default)]
struct Queue {
    stands: BTreeMap<QueuePosition, WaitEntry>,
    /// What all of them wait for together, once somebody has asked.
    total: OnceLock<Tally>,
    /// What those before every [`STRIDE`]th wait for together, once somebody far behind has asked.
    marks: OnceLock<BTreeMap<QueuePosition, Tally>>,
}

/// From one mark in a queue to the next.
const STRIDE: usize = 32;

impl Queue {
    fn total(&self) -> &Tally {
        self.total.get_or_init(|| sum(self.stands.values()))
    }

    fn marks(&self) -> &BTreeMap<QueuePosition, Tally> {
        self.marks.get_or_init(|| {
            let (mut marks, mut before) = (BTreeMap::new(), Tally::default());
            for (number, (position, stand)) in self.stands.iter().enumerate() {
                if number.is_multiple_of(STRIDE) {
                    marks.insert(*position, before.clone());
                }
                before.add_up(&stand.resource);
            }
            marks
        })
    }

    /// What those before `position` wait for together.
    fn ahead(&self, position: QueuePosition) -> Tally {
        let (mut near, mut tally) = (self.stands.range(..position), Tally::default());
        if near.clone().nth(STRIDE).is_some()
            && let Some((mark, before)) = self.marks().range(..=position).next_back()
        {
            (near, tally) = (self.stands.range(*mark..position), before.clone());
        }
        near.for_each(|(_, stand)| tally.add_up(&stand.resource));
        tally
    }

    /// Somebody came or left.
    fn changed(&mut self) {
        self.total.take();
        self.marks.take();
    }
}

impl Line {
    /// What those before `position` at a spot wait for together, or all if there is no position yet.
    pub fn ahead(&self, spot: &Spot, position: Option<QueuePosition>) -> Tally {
        match (self.0.get(spot), position) {
            (None, _) => Tally::default(),
            (Some(queue), None) => queue.total().clone(),
            (Some(queue), Some(position)) => queue.ahead(position),
        }
    }

    /// The same, without making the spot if nobody stands anywhere.
    pub fn ahead_at(&self, spot: impl FnOnce() -> Spot, position: Option<QueuePosition>) -> Tally {
        if self.is_empty() { Tally::default() } else { self.ahead(&spot(), position) }
    }

    /// Where a request stands that is short at some of its `spots`.
    pub fn stand(&self, position: QueuePosition, spots: &Spots) -> Spots {
        let is_first = |spot: &Spot| {
            let queue = self.0.get(spot);
            queue.is_none_or(|queue| !queue.stands.range(..position).any(|(_, other)| other.is_short))
        };
        let keeps_all = spots.iter().any(|(spot, is_short)| *is_short && is_first(spot));
        spots
            .iter()
            .filter(|(_, is_short)| **is_short || keeps_all)
            .map(|(spot, short)| (spot.clone(), *short))
            .collect()
    }

    /// Where somebody stands; empty for one who is not in line.
    pub fn spots_of(&self, position: QueuePosition) -> Spots {
        let standing =
            self.0.iter().filter_map(|(spot, queue)| Some((spot.clone(), queue.stands.get(&position)?.is_short)));
        standing.collect()
    }

    /// Somebody stands at a spot.
    pub fn insert(&mut self, spot: Spot, position: QueuePosition, stand: WaitEntry) {
        let queue = Arc::make_mut(self.0.entry(spot).or_default());
        if let Some(total) = queue.total.get_mut() {
            total.add_up(&stand.resource);
        }
        queue.marks.take();
        if queue.stands.insert(position, stand).is_some() {
            queue.total.take();
        }
    }

    /// Somebody leaves all spots.
    pub fn remove(&mut self, position: QueuePosition) {
        for queue in self.0.values_mut().filter(|queue| queue.stands.contains_key(&position)) {
            let queue = Arc::make_mut(queue);
            queue.stands.remove(&position);
            queue.changed();
        }
        self.0.retain(|_, queue| !queue.stands.is_empty());
    }

    /// Takes over how `other` looked at `spots`, as far as each was looked at.
    pub fn replace(&mut self, spots: ViewedSpots, other: &Self) {
        for (spot, extent) in spots {
            match (other.0.get(&spot), extent) {
                (Some(queue), Extent::All) => drop(self.0.insert(spot, queue.clone())),
                (None, Extent::All) => drop(self.0.remove(&spot)),
                (queue, Extent::UpTo(last)) => self.replace_first(spot, last, queue),
            }
        }
    }

    /// At how many spots somebody is known to stand.
    pub fn spots(&self) -> usize {
        self.0.len()
    }

    /// Takes over who stands at a spot up to `last`.
    fn replace_first(&mut self, spot: Spot, last: QueuePosition, other: Option<&Arc<Queue>>) {
        let first = other.into_iter().flat_map(|queue| queue.stands.range(..=last));
        let first: Vec<_> = first.map(|(position, stand)| (*position, stand.clone())).collect();
        if let Some(queue) = self.0.get_mut(&spot) {
            let queue = Arc::make_mut(queue);
            let behind = queue.stands.split_off(&last);
            queue.stands = behind;
            queue.stands.remove(&last);
            queue.changed();
        }
        for (position, stand) in first {
            self.insert(spot.clone(), position, stand);
        }
        self.0.retain(|_, queue| !queue.stands.is_empty());
    }

    /// Whether somebody is known to stand at a spot.
    pub fn contains(&self, spot: &Spot) -> bool {
        self.0.contains_key(spot)
    }

    /// Whether nobody is known to stand anywhere.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

fn sum<'a>(stands: impl Iterator<Item = &'a WaitEntry>) -> Tally {
    let mut sum = Tally::default();
    stands.for_each(|stand| sum.add_up(&stand.resource));
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::resource::Dimension;

    fn position(number: u128) -> QueuePosition {
        QueuePosition::new(0, OffsetDateTime::UNIX_EPOCH, Uuid::from_u128(number))
    }

    fn em(host: &str) -> Spot {
        Spot::Em(EmInstance::parse("em", "ecm", host).unwrap())
    }

    fn user(name: &str) -> Spot {
        Spot::Scope(Scope::new(BTreeMap::from([("user".to_owned(), name.to_owned())])))
    }

    /// Stands where it has to, as it says, and asks for as many cores as its number.
    fn stand(line: &mut Line, number: u128, spots: &[(Spot, bool)]) -> Spots {
        let stands = line.stand(position(number), &spots.iter().cloned().collect());
        let resource = Resource::cpu(i64::try_from(number).unwrap()).unwrap();
        for (spot, is_short) in &stands {
            line.insert(spot.clone(), position(number), WaitEntry { resource: resource.clone(), is_short: *is_short });
        }
        stands
    }

    #[test]
    fn only_the_first_in_line_keeps_room_where_it_is_not_short() {
        let mut line = Line::default();
        let spots = [(em("a"), false), (user("u"), true)];
        assert_eq!(stand(&mut line, 1, &spots).len(), 2, "the first at user=u");
        assert_eq!(stand(&mut line, 2, &spots), BTreeMap::from([(user("u"), true)]));
        let ahead = |line: &Line, spot, position| line.ahead(&spot, position).get(&Dimension::Cores);
        assert_eq!(ahead(&line, em("a"), None), 1, "one position's worth, however many wait for the user's limit");
        assert_eq!(ahead(&line, user("u"), None), 1 + 2);
        line.remove(position(1));
        assert_eq!(stand(&mut line, 2, &spots).len(), 2, "now the first");
    }

    #[test]
    fn places_are_in_order_and_nobody_stands_before_himself() {
        let mut line = Line::default();
        for number in [3, 1, 2] {
            stand(&mut line, number, &[(em("a"), true)]);
        }
        let ahead = |spot, number: Option<u128>| line.ahead(&spot, number.map(position)).get(&Dimension::Cores);
        assert_eq!([1, 2, 3, 4].map(|number| ahead(em("a"), Some(number))), [0, 1, 1 + 2, 1 + 2 + 3]);
        assert_eq!((ahead(em("a"), None), ahead(em("b"), None)), (6, 0));
        line.remove(position(2));
        assert_eq!(line.ahead(&em("a"), None).get(&Dimension::Cores), 1 + 3);
    }

    #[test]
    fn those_far_behind_are_told_the_same() {
        let mut line = Line::default();
        let ahead = |line: &Line, number| line.ahead(&em("a"), Some(position(number))).get(&Dimension::Cores);
        let sum = |numbers: std::ops::Range<u128>| i64::try_from(numbers.sum::<u128>()).unwrap();
        for number in 1..=200 {
            stand(&mut line, number, &[(em("a"), true)]);
            assert_eq!(ahead(&line, number), sum(1..number));
        }
        for gone in 1..=100 {
            line.remove(position(gone));
            assert_eq!(ahead(&line, 180), sum(gone + 1..180));
        }
        assert_eq!((ahead(&line, 101), ahead(&line, 1000)), (0, sum(101..201)));
    }
}
