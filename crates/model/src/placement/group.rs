//! Groups: EMs that are equivalent for many requests, sorted by free capacity.
//!
//! A group sorts its available members lazily, once per dominant dimension of a request, so that a search visits few EMs.
//! Sizes that did not fit are remembered until a member gains capacity. Caller: the cluster view.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Bound,
};

use crate::{
    resource::{Dimension, LeftResource, Resource},
    selector::Placement,
};

use super::{
    candidate::{Candidate, CandidateOrder, LoadClass, Rank, ratio, share_of},
    candidates::CandidateTable,
    new_ems::NewEmBounds,
};

/// Maximum number of remembered sizes that fit nowhere.
const REMEMBERED_MAX: usize = 16;

/// Number of sort orders beyond which new ones spare no dimensions. Each change of an EM updates every order.
const ORDERS_MAX: usize = 16;

/// Index of an EM within a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct CandidateId(pub u32);

/// EMs of one resource type. A sort order exists for each dimension that was dominant in a request. Pack placement has
/// further orders, which spare the dimensions that a request does not need.
#[derive(Debug, Default)]
pub(super) struct CandidateGroup {
    members: BTreeSet<CandidateId>,
    /// Capacity of the members per dimension: sum, and amount of each member.
    capacity: BTreeMap<Dimension, GroupCapacity>,
    /// Available members by sort order.
    orders: HashMap<CandidateOrder, BTreeSet<Rank>>,
    /// `full`: sizes that fit on no available, uncontended member. `small`: sizes that would not fit even on empty members.
    full: RefusedSizes,
    small: RefusedSizes,
    /// Number of available members.
    available: usize,
    /// The other members.
    closed: BTreeSet<CandidateId>,
    new_ems: NewEmBounds,
}

#[derive(Debug, Default)]
struct GroupCapacity {
    sum: i128,
    /// Number of members by amount.
    members: BTreeMap<i64, usize>,
}

impl GroupCapacity {
    fn insert(&mut self, amount: i64) {
        self.sum += i128::from(amount);
        *self.members.entry(amount).or_default() += 1;
    }

    fn remove(&mut self, amount: i64) {
        self.sum -= i128::from(amount);
        if let Some(members) = self.members.get_mut(&amount) {
            *members -= 1;
            if *members == 0 {
                self.members.remove(&amount);
            }
        }
    }

    fn largest(&self) -> i64 {
        self.members.last_key_value().map_or(0, |(amount, _)| *amount)
    }
}

/// Sizes that do not fit; none contains another.
#[derive(Debug, Default)]
struct RefusedSizes(Vec<Resource>);

impl RefusedSizes {
    fn applies_to(&self, share: &Resource) -> bool {
        self.0.iter().any(|known| known.not_more_than(share) == Ok(true))
    }

    fn insert(&mut self, share: &Resource) {
        self.0.retain(|known| share.not_more_than(known) != Ok(true));
        if self.0.len() >= REMEMBERED_MAX {
            self.0.remove(0);
        }
        self.0.push(share.clone());
    }

    fn clear_refused_sizes(&mut self, room: &LeftResource) {
        self.0.retain(|known| !room.covers(known));
    }
}

/// Search conditions within a group.
pub(super) struct CandidateQuery<'a> {
    /// Share that the EMs would count.
    pub share: &'a Resource,
    pub placement: Placement,
    /// Whether to search the contended EMs instead of the others.
    pub is_blocked: bool,
    /// Further condition, if any.
    pub only: Option<&'a dyn Fn(&Candidate) -> bool>,
}

impl CandidateQuery<'_> {
    fn may_be(&self, candidate: &Candidate) -> bool {
        candidate.em.provides(self.share).is_ok() && self.only.is_none_or(|only| only(candidate))
    }
}

impl CandidateGroup {
    /// Creates a group of a few members for one search.
    pub fn new(members: &[CandidateId], candidates: &CandidateTable) -> Self {
        let mut group = Self::default();
        for id in members {
            if let Some(candidate) = candidates.get(*id) {
                group.insert(*id, candidate);
            }
        }
        let members: Vec<_> = members.iter().filter_map(|id| Some((*id, candidates.get(*id)?))).collect();
        // Nothing is ranked yet.
        group.new_ems = NewEmBounds::of_few(&members);
        group
    }

    pub fn len(&self) -> usize {
        self.members.len()
    }

    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    pub fn members(&self) -> impl Iterator<Item = CandidateId> {
        self.members.iter().copied()
    }

    pub fn insert(&mut self, id: CandidateId, candidate: &Candidate) {
        self.members.insert(id);
        for (dimension, amount) in candidate.capacity.amounts() {
            self.capacity.entry(dimension).or_default().insert(amount);
        }
        if candidate.is_new {
            self.new_ems.bound(id, self.available);
        }
        self.rank(id, candidate);
    }

    /// Counts the selection of a member. Bounds it if it is new, and frees the members that may be selected again.
    pub fn note_selection(&mut self, id: CandidateId, candidates: &CandidateTable) {
        self.new_ems.note_selection();
        if let Some(candidate) = candidates.get(id).filter(|candidate| candidate.is_new) {
            self.unrank(id, candidate);
            self.new_ems.bound(id, self.available);
            self.rank(id, candidate);
        }
        while let Some(id) = self.new_ems.due() {
            match candidates.get(id) {
                Some(candidate) => self.free(id, candidate),
                None => self.new_ems.free(id),
            }
        }
    }

    /// Ends the bound of a member.
    pub fn free(&mut self, id: CandidateId, candidate: &Candidate) {
        self.unrank(id, candidate);
        self.new_ems.free(id);
        self.rank(id, candidate);
    }

    /// Removes a member, which must be unchanged since it was inserted or ranked.
    pub fn remove(&mut self, id: CandidateId, candidate: &Candidate) {
        self.members.remove(&id);
        for (dimension, amount) in candidate.capacity.amounts() {
            if let Some(capacity) = self.capacity.get_mut(&dimension) {
                capacity.remove(amount);
                if capacity.members.is_empty() {
                    self.capacity.remove(&dimension);
                }
            }
        }
        self.unrank(id, candidate);
        self.new_ems.free(id);
    }

    /// Inserts a member into all sort orders after a change.
    pub fn rank(&mut self, id: CandidateId, candidate: &Candidate) {
        if candidate.is_available() {
            self.available += 1;
            let is_bounded = self.new_ems.is_bounded(id);
            for (order, ranks) in &mut self.orders {
                ranks.insert(candidate.rank(id, order, is_bounded));
            }
            if !candidate.is_blocked {
                self.full.clear_refused_sizes(&candidate.left);
            }
            self.small.clear_refused_sizes(&candidate.capacity);
        } else {
            self.closed.insert(id);
        }
    }

    /// Removes a member from all sort orders before a change. The member remains in the group.
    pub fn unrank(&mut self, id: CandidateId, candidate: &Candidate) {
        if candidate.is_available() {
            self.available = self.available.saturating_sub(1);
            let is_bounded = self.new_ems.is_bounded(id);
            for (order, ranks) in &mut self.orders {
                ranks.remove(&candidate.rank(id, order, is_bounded));
            }
        } else {
            self.closed.remove(&id);
        }
    }

    /// Returns whether each dimension of a share is provided by some member.
    fn may_provide(&self, share: &Resource) -> bool {
        share.amounts().all(|(dimension, _)| self.capacity.contains_key(&dimension))
    }

    /// Returns the dimension with the largest part of the group's total capacity in the share.
    fn dominant(&self, share: &Resource) -> Dimension {
        let part = |dimension: &Dimension, asked: i64| {
            let whole = self.capacity.get(dimension).map_or(0, |capacity| capacity.sum).max(1);
            ratio(i128::from(asked), whole)
        };
        let asked = share.amounts().filter(|(_, asked)| *asked > 0).map(|(dimension, asked)| {
            let part = part(&dimension, asked);
            (dimension, part)
        });
        let dominant = asked.max_by(|(_, one), (_, other)| one.total_cmp(other));
        dominant.map_or(Dimension::Memory, |(dimension, _)| dimension)
    }

    /// Returns whether the share is remembered as not fitting on any available, uncontended member.
    #[cfg(test)]
    pub fn is_known_to_be_full_for(&self, share: &Resource) -> bool {
        self.full.applies_to(share)
    }

    /// Returns the best EM with capacity for the share, with its rank. `is_blocked` selects the contended EMs or the others.
    pub fn best(&mut self, wanted: &CandidateQuery<'_>, candidates: &CandidateTable) -> Option<Rank> {
        if !self.may_provide(wanted.share) || !wanted.is_blocked && self.full.applies_to(wanted.share) {
            return None;
        }
        let dimension = self.dominant(wanted.share);
        // A smaller free share cannot fit even on the largest member.
        let largest = self.capacity.get(&dimension).map_or(0, GroupCapacity::largest);
        let needed = share_of(wanted.share.get(&dimension), largest);
        let has_room = |rank: &&Rank| {
            candidates
                .get(rank.candidate)
                .is_some_and(|candidate| candidate.left.covers(wanted.share) && wanted.may_be(candidate))
        };
        let (spared, by_load) = match wanted.placement {
            Placement::Spread => (Vec::new(), true),
            Placement::Pack => (self.not_asked(wanted.share), false),
        };
        let is_blocked = wanted.is_blocked;
        let ranks = self.ranks(CandidateOrder { dimension, spared, by_load }, candidates);
        let found = match wanted.placement {
            Placement::Spread => best_of_classes(ranks, is_blocked, needed, has_room),
            Placement::Pack => {
                let lowest = |spare, share| Rank::lowest(is_blocked, LoadClass::default(), spare, share);
                let without = ranks.range(lowest(false, needed)..lowest(true, 0));
                let with = ranks.range((Bound::Included(lowest(true, needed)), end_of(is_blocked)));
                without.chain(with).find(has_room).copied()
            }
        };
        if found.is_none() && !is_blocked && wanted.only.is_none() {
            self.full.insert(wanted.share);
        }
        found
    }

    /// Returns the EM that best explains a refusal, with its rank. True: the share would fit on it if it were empty. An
    /// uncontended EM takes precedence, then the largest free share.
    pub fn closest(&mut self, wanted: &CandidateQuery<'_>, candidates: &CandidateTable) -> Option<(bool, Rank)> {
        if !self.may_provide(wanted.share) {
            return None;
        }
        let dimension = self.dominant(wanted.share);
        if !self.small.applies_to(wanted.share) {
            let would_fit = |rank: &&Rank| {
                candidates
                    .get(rank.candidate)
                    .is_some_and(|candidate| candidate.capacity.covers(wanted.share) && wanted.may_be(candidate))
            };
            if let Some(rank) = self.ranks(by_share(dimension.clone()), candidates).iter().rev().find(would_fit) {
                return Some((true, *rank));
            }
            if wanted.only.is_none() {
                self.small.insert(wanted.share);
            }
        }
        let may_be = |rank: &&Rank| candidates.get(rank.candidate).is_some_and(|candidate| wanted.may_be(candidate));
        self.ranks(by_share(dimension), candidates).iter().rev().find(may_be).map(|rank| (false, *rank))
    }

    /// Returns any available member that fulfils `only`, regardless of its dimensions.
    pub fn any(&self, candidates: &CandidateTable, only: &dyn Fn(&Candidate) -> bool) -> Option<CandidateId> {
        let can_be =
            |id: &CandidateId| candidates.get(*id).is_some_and(|candidate| candidate.is_available() && only(candidate));
        match self.orders.values().next() {
            Some(available) => available.iter().map(|rank| rank.candidate).find(can_be),
            None => self.members().find(can_be),
        }
    }

    /// Returns a closed member that fulfils `only`, the first for which the share would fit if it were empty, or the first of all.
    pub fn closed(
        &self,
        share: Option<&Resource>,
        candidates: &CandidateTable,
        only: Option<&dyn Fn(&Candidate) -> bool>,
    ) -> Option<(bool, Reverse<CandidateId>)> {
        let members = self.closed.iter().filter_map(|id| Some((*id, candidates.get(*id)?)));
        let mut members = members.filter(|(_, candidate)| only.is_none_or(|only| only(candidate)));
        let largest = |dimension| self.capacity.get(&dimension).map_or(0, GroupCapacity::largest);
        // Most shares that fit nowhere exceed the largest member, and need no search.
        let share = share.filter(|share| share.amounts().all(|(dimension, amount)| amount <= largest(dimension)));
        let fitting = share.and_then(|share| {
            let fits = |candidate: &Candidate| candidate.capacity.covers(share) && candidate.em.provides(share).is_ok();
            members.clone().find(|(_, candidate)| fits(candidate))
        });
        let found = fitting.or_else(|| members.next());
        found.map(|(id, _)| (fitting.is_some(), Reverse(id)))
    }

    /// Returns the dimensions of the group that a share does not need.
    fn not_asked(&self, share: &Resource) -> Vec<Dimension> {
        let asked: BTreeSet<Dimension> =
            share.amounts().filter(|(_, asked)| *asked > 0).map(|(dimension, _)| dimension).collect();
        let there = self.capacity.iter().filter(|(_, capacity)| capacity.sum > 0).map(|(dimension, _)| dimension);
        there.filter(|dimension| !asked.contains(dimension)).cloned().collect()
    }

    fn ranks(&mut self, mut order: CandidateOrder, candidates: &CandidateTable) -> &BTreeSet<Rank> {
        if self.orders.len() >= ORDERS_MAX && !self.orders.contains_key(&order) {
            order.spared.clear();
        }
        let (members, new_ems) = (&self.members, &self.new_ems);
        self.orders.entry(order).or_insert_with_key(|order| {
            let available = members.iter().filter_map(|id| Some((*id, candidates.get(*id)?)));
            available
                .filter(|(_, candidate)| candidate.is_available())
                .map(|(id, candidate)| candidate.rank(id, order, new_ems.is_bounded(id)))
                .collect()
        })
    }
}

/// Returns the order by free share alone.
fn by_share(dimension: Dimension) -> CandidateOrder {
    CandidateOrder { dimension, spared: Vec::new(), by_load: false }
}

/// Returns the end of the contended EMs, which rank below the others, or of all.
fn end_of(is_blocked: bool) -> Bound<Rank> {
    if is_blocked { Bound::Excluded(Rank::lowest_free()) } else { Bound::Unbounded }
}

/// Returns the best EM for spread placement: of each load class, the one with the largest free share that has capacity. The
/// classes are visited from the least busy one, until no EM of a further class can be better.
fn best_of_classes(
    ranks: &BTreeSet<Rank>,
    is_blocked: bool,
    needed: u64,
    has_room: impl Fn(&&Rank) -> bool,
) -> Option<Rank> {
    let mut best: Option<Rank> = None;
    let mut first = ranks.range((Bound::Unbounded, end_of(is_blocked))).next_back();
    while let Some(freest) = first.filter(|rank| rank.blocked.0 == is_blocked) {
        let class = freest.class.0;
        if best.is_some_and(|best| best.spread_score() >= class.best_score()) {
            break;
        }
        if freest.share >= needed {
            let with_share = ranks.range(Rank::lowest(is_blocked, class, false, needed)..=*freest).rev();
            let found = with_share.copied().find(|rank| has_room(&rank));
            best = best.into_iter().chain(found).max_by_key(|rank| (rank.spread_score(), *rank));
        }
        first = ranks.range(..Rank::lowest(is_blocked, class, false, 0)).next_back();
    }
    best
}
