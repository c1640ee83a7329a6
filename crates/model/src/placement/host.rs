//! An EM, and what choosing needs of it, worked out once.

use std::cmp::Reverse;

use crate::{
    em::Em,
    report::Condition,
    resource::{Dimension, Left, Resource, ResourceError},
};

use super::{group::HostId, label_sets::SetId};

/// An EM as it was last seen.
#[derive(Debug)]
pub(super) struct Host {
    pub em: Em,
    pub condition: Condition,
    /// The survey before whose end its condition was told by itself.
    pub reported: u64,
    /// What is left, also of what is assumed to be taken.
    pub left: Left,
    /// What there is to grant in all.
    pub capacity: Left,
    /// What was proposed to requests that have not been answered yet, and in which survey it was last.
    assumed: Option<(Resource, u64)>,
    /// Whether somebody holds it.
    pub is_held: bool,
    /// When it was chosen or seen last, among all times that any EM was.
    touched: u64,
    /// The survey that saw it last.
    pub surveyed: u64,
    /// The label sets that it is a member of.
    pub label_sets: Vec<SetId>,
}

/// What EMs are ordered by.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Order {
    /// By the free share of this.
    pub dimension: Dimension,
    /// Those that have none of these left stand below all others.
    pub spared: Vec<Dimension>,
}

/// Where an EM stands among others: the greatest is held by nobody, has something left of what is spared, if anything is, and the largest free
/// share of a dimension; of equal ones, its host is the least busy in tenths, where one that does not tell counts as idle; of these, it was
/// touched the longest ago.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub held: Reverse<bool>,
    pub spare: bool,
    pub share: u64,
    busy: Reverse<u8>,
    touched: Reverse<u64>,
    pub host: HostId,
}

impl Rank {
    /// In front of all with this share, held or not.
    pub fn lowest(is_held: bool, spare: bool, share: u64) -> Self {
        Self {
            held: Reverse(is_held),
            spare,
            share,
            busy: Reverse(u8::MAX),
            touched: Reverse(u64::MAX),
            host: HostId(0),
        }
    }
}

/// What a free share is counted in: parts of the whole.
pub(super) const WHOLE: i128 = 1_000_000_000;

/// An amount as a share of a whole; nothing if there is no whole, or nothing is left of it.
pub(super) fn share_of(amount: i64, whole: i64) -> u64 {
    match (amount, whole) {
        (1.., 1..) => u64::try_from(i128::from(amount) * WHOLE / i128::from(whole)).unwrap_or(u64::MAX),
        _ => 0,
    }
}

impl Host {
    /// # Errors
    /// If its amounts contradict each other: it is no candidate then, and whoever names it is told so.
    pub fn new(em: Em, condition: Condition, touched: u64, surveyed: u64) -> Result<Self, ResourceError> {
        let nothing = em.total.zero_like();
        let capacity = Resource::left(&em.total, &em.protected, &nothing, &nothing)?;
        Ok(Self {
            left: em.left()?,
            capacity,
            em,
            condition,
            reported: 0,
            assumed: None,
            is_held: false,
            touched,
            surveyed,
            label_sets: Vec::new(),
        })
    }

    /// Sees it anew: it is like it was, as [`Host::is_like`] tells.
    pub fn see(&mut self, em: Em, touched: u64, surveyed: u64) {
        // As it was granted: what could not be counted would not be there.
        if let Ok(left) = em.left() {
            (self.em, self.left, self.assumed, self.touched, self.surveyed) = (em, left, None, touched, surveyed);
        }
    }

    /// Whether an EM is the same but for what is held there.
    pub fn is_like(&self, em: &Em) -> bool {
        let of = |em: &Em| (em.epoch, em.is_registered());
        of(&self.em) == of(em)
            && self.em.labels == em.labels
            && self.em.reserved == em.reserved
            && self.em.total == em.total
            && self.em.protected == em.protected
            && self.em.drain.is_some() == em.drain.is_some()
    }

    /// Whether it may be chosen for a request.
    pub fn is_available(&self) -> bool {
        self.condition.is_available && self.em.drain.is_none()
    }

    /// Whether it has a label.
    pub fn has(&self, label: &(String, String)) -> bool {
        self.em.label(&label.0) == Some(&label.1)
    }

    pub fn rank(&self, host: HostId, order: &Order) -> Rank {
        Rank {
            held: Reverse(self.is_held),
            spare: order.spared.iter().any(|dimension| self.left.get(dimension) > 0),
            share: share_of(self.left.get(&order.dimension), self.capacity.get(&order.dimension)),
            busy: Reverse(self.condition.busy),
            touched: Reverse(self.touched),
            host,
        }
    }

    /// Takes a proposal into account that is not granted yet.
    pub fn assume(&mut self, share: &Resource, touched: u64, survey: u64) {
        self.touched = touched;
        let assumed = match &self.assumed {
            Some((before, _)) => before.add(share),
            None => Ok(share.clone()),
        };
        let locked = assumed.as_ref().ok().and_then(|assumed| self.em.locked.add(assumed).ok());
        let left =
            locked.and_then(|locked| Resource::left(&self.em.total, &self.em.protected, &self.em.used, &locked).ok());
        if let (Ok(assumed), Some(left)) = (assumed, left) {
            (self.left, self.assumed) = (left, Some((assumed, survey)));
        }
    }

    /// Whether anything is assumed, and has been since before a survey.
    pub fn is_assumed_before(&self, survey: u64) -> bool {
        self.assumed.as_ref().is_some_and(|(_, assumed_in)| *assumed_in < survey)
    }

    /// Forgets what was assumed.
    pub fn settle(&mut self) {
        if self.assumed.take().is_some()
            && let Ok(left) = self.em.left()
        {
            self.left = left;
        }
    }
}
