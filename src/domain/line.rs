//! The waiting line: who stands where, and how much the places ahead keep for themselves.
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
}

/// For people: not to be taken apart again.
impl fmt::Display for Spot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Em(em) => write!(f, "em={em}"),
            Self::Scope(scope) => scope.fmt(f),
        }
    }
}

/// A place in line, the same at all spots: who came first stands first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// Since when, by the database's clock, read under the locks.
    pub since: OffsetDateTime,
    /// The ticket that will be granted.
    pub ticket_id: Uuid,
}

/// How somebody stands at a spot.
#[derive(Debug, Clone, PartialEq)]
pub struct Stand {
    /// What is waited for.
    pub resource: Resource,
    /// Whether the spot is what it waits for; otherwise it only keeps its room there.
    pub is_short: bool,
}

/// The spots where a request stands; true where it is short.
pub type Spots = BTreeMap<Spot, bool>;

/// Room for more requests than anybody counted.
pub const MUCH: u32 = u32::MAX;

/// Where there is more room, or a place less ahead, and about how many requests it was that made it.
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
    /// Its place.
    pub place: Place,
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
    /// Until when.
    pub wait_until: OffsetDateTime,
    /// Where it is short, for people, and how many are short there before it.
    pub ahead: BTreeMap<String, i64>,
}

/// Who stands at some spots.
#[derive(Debug, Clone, Default)]
pub struct Line(HashMap<Spot, Arc<Queue>>);

/// Who stands at one spot.
#[derive(Debug, Clone, Default)]
struct Queue {
    places: BTreeMap<Place, Stand>,
    /// What all of them wait for together, once somebody has asked.
    total: OnceLock<Tally>,
}

impl Queue {
    fn total(&self) -> &Tally {
        self.total.get_or_init(|| sum(self.places.values()))
    }
}

impl Line {
    /// What those before `place` at a spot wait for together, or all if there is no place yet.
    pub fn ahead(&self, spot: &Spot, place: Option<Place>) -> Tally {
        match (self.0.get(spot), place) {
            (None, _) => Tally::default(),
            (Some(queue), None) => queue.total().clone(),
            (Some(queue), Some(place)) => sum(queue.places.range(..place).map(|(_, stand)| stand)),
        }
    }

    /// The same, without making the spot if nobody stands anywhere.
    pub fn ahead_at(&self, spot: impl FnOnce() -> Spot, place: Option<Place>) -> Tally {
        if self.is_empty() { Tally::default() } else { self.ahead(&spot(), place) }
    }

    /// Where a request stands that is short at some of its `spots`.
    pub fn stand(&self, place: Place, spots: &Spots) -> Spots {
        let is_first = |spot: &Spot| {
            let queue = self.0.get(spot);
            queue.is_none_or(|queue| !queue.places.range(..place).any(|(_, other)| other.is_short))
        };
        let keeps_all = spots.iter().any(|(spot, is_short)| *is_short && is_first(spot));
        spots
            .iter()
            .filter(|(_, is_short)| **is_short || keeps_all)
            .map(|(spot, short)| (spot.clone(), *short))
            .collect()
    }

    /// Where somebody stands; empty for one who is not in line.
    pub fn spots_of(&self, place: Place) -> Spots {
        let standing =
            self.0.iter().filter_map(|(spot, queue)| Some((spot.clone(), queue.places.get(&place)?.is_short)));
        standing.collect()
    }

    /// Somebody stands at a spot.
    pub fn insert(&mut self, spot: Spot, place: Place, stand: Stand) {
        let queue = Arc::make_mut(self.0.entry(spot).or_default());
        if let Some(total) = queue.total.get_mut() {
            total.add_up(&stand.resource);
        }
        if queue.places.insert(place, stand).is_some() {
            queue.total.take();
        }
    }

    /// Somebody leaves all spots.
    pub fn remove(&mut self, place: Place) {
        for queue in self.0.values_mut().filter(|queue| queue.places.contains_key(&place)) {
            let queue = Arc::make_mut(queue);
            queue.places.remove(&place);
            queue.total.take();
        }
        self.0.retain(|_, queue| !queue.places.is_empty());
    }

    /// Takes over how `other` looked at `spots`.
    pub fn replace(&mut self, spots: impl IntoIterator<Item = Spot>, other: &Self) {
        for spot in spots {
            match other.0.get(&spot) {
                Some(queue) => drop(self.0.insert(spot, queue.clone())),
                None => drop(self.0.remove(&spot)),
            }
        }
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

fn sum<'a>(stands: impl Iterator<Item = &'a Stand>) -> Tally {
    let mut sum = Tally::default();
    stands.for_each(|stand| sum.add_up(&stand.resource));
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::resource::Dimension;

    fn place(number: u128) -> Place {
        Place { since: OffsetDateTime::UNIX_EPOCH, ticket_id: Uuid::from_u128(number) }
    }

    fn em(host: &str) -> Spot {
        Spot::Em(EmInstance::parse("em", "ecm", host).unwrap())
    }

    fn user(name: &str) -> Spot {
        Spot::Scope(Scope::new(BTreeMap::from([("user".to_owned(), name.to_owned())])))
    }

    /// Stands where it has to, as it says, and asks for as many cores as its number.
    fn stand(line: &mut Line, number: u128, spots: &[(Spot, bool)]) -> Spots {
        let stands = line.stand(place(number), &spots.iter().cloned().collect());
        let resource = Resource::cpu(i64::try_from(number).unwrap()).unwrap();
        for (spot, is_short) in &stands {
            line.insert(spot.clone(), place(number), Stand { resource: resource.clone(), is_short: *is_short });
        }
        stands
    }

    #[test]
    fn only_the_first_in_line_keeps_room_where_it_is_not_short() {
        let mut line = Line::default();
        let spots = [(em("a"), false), (user("u"), true)];
        assert_eq!(stand(&mut line, 1, &spots).len(), 2, "the first at user=u");
        assert_eq!(stand(&mut line, 2, &spots), BTreeMap::from([(user("u"), true)]));
        let ahead = |line: &Line, spot, place| line.ahead(&spot, place).get(&Dimension::Cores);
        assert_eq!(ahead(&line, em("a"), None), 1, "one place's worth, however many wait for the user's limit");
        assert_eq!(ahead(&line, user("u"), None), 1 + 2);
        line.remove(place(1));
        assert_eq!(stand(&mut line, 2, &spots).len(), 2, "now the first");
    }

    #[test]
    fn places_are_in_order_and_nobody_stands_before_himself() {
        let mut line = Line::default();
        for number in [3, 1, 2] {
            stand(&mut line, number, &[(em("a"), true)]);
        }
        let ahead = |spot, number: Option<u128>| line.ahead(&spot, number.map(place)).get(&Dimension::Cores);
        assert_eq!([1, 2, 3, 4].map(|number| ahead(em("a"), Some(number))), [0, 1, 1 + 2, 1 + 2 + 3]);
        assert_eq!((ahead(em("a"), None), ahead(em("b"), None)), (6, 0));
        line.remove(place(2));
        assert_eq!(line.ahead(&em("a"), None).get(&Dimension::Cores), 1 + 3);
    }
}
