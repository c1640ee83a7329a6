//! Candidate: an EM as the placement last observed it, with derived values computed once.
//!
//! Proposed but undecided shares count as granted, so that concurrent proposals spread. Only the cluster view changes
//! candidates, because their ranks must be updated together with them. Callers: the other modules of `placement`.

use std::cmp::Reverse;

use time::Duration;

use crate::{
    em::Em,
    report::EmCondition,
    resource::{Dimension, LeftResource, Resource, ResourceError},
};

use super::{group::CandidateId, label_sets::SetId, pool::PoolId};

/// An EM as last observed.
#[derive(Debug)]
pub(super) struct Candidate {
    pub em: Em,
    pub condition: EmCondition,
    /// Survey that was current when its condition arrived by a report.
    pub reported: u64,
    /// Time from which the load of the condition does not count.
    pub load_until: Duration,
    /// Time of the registration.
    pub registered: Duration,
    /// Whether the registration is younger than the policy's `em_new_after`.
    pub is_new: bool,
    /// Number of the view's latest selection when it was selected last, or added.
    pub selected: u64,
    /// Free amounts, after assumed grants.
    pub left: LeftResource,
    /// Amounts that an empty EM could grant.
    pub capacity: LeftResource,
    /// The latest survey at a proposal that is not decided yet.
    assumed: Option<u64>,
    /// Whether the EM is contended, or held by an operator.
    pub is_blocked: bool,
    /// Time of the latest selection or observation, as a counter of the view.
    touched: u64,
    /// Survey that found it last.
    pub surveyed: u64,
    /// The pool that has it in its groups.
    pub pool: PoolId,
    /// Label sets that it is a member of.
    pub label_sets: Vec<SetId>,
}

/// Sort order of candidates.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct CandidateOrder {
    /// Dimension whose free share sorts.
    pub dimension: Dimension,
    /// EMs without free amounts in any of these dimensions sort below all others.
    pub spared: Vec<Dimension>,
    /// Whether the EMs have the load classes of spread placement.
    pub by_load: bool,
}

/// Load class of an EM in spread placement: its load in tenths, by tier. The second tier has the EMs whose grants are bounded. The
/// last one has the EMs at full load, which are selected if no other has capacity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LoadClass(u8);

impl LoadClass {
    const TIER: u8 = 16;

    pub fn new(busy: u8, is_bounded: bool) -> Self {
        match (busy, is_bounded) {
            (10.., _) => Self(2 * Self::TIER + 10),
            (_, true) => Self(Self::TIER + busy),
            (_, false) => Self(busy),
        }
    }

    /// Returns the score of an EM of this class without grants. No other EM of the class has a better one.
    pub fn best_score(self) -> (Reverse<u8>, u64) {
        let idle = 10_u64.saturating_sub((self.0 % Self::TIER).into());
        (Reverse(self.0 / Self::TIER), WHOLE_UNITS / 10 * idle)
    }
}

/// Rank of an EM in a sort order. The criteria, from the most significant:
///
/// 1. uncontended;
/// 2. load class, if the order has any;
/// 3. free amounts in a spared dimension, if the order spares any;
/// 4. free share of the dimension;
/// 5. least busy machine, in tenths; an unknown load counts as idle;
/// 6. longest time since the last selection or observation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub blocked: Reverse<bool>,
    pub class: Reverse<LoadClass>,
    pub spare: bool,
    pub share: u64,
    busy: Reverse<u8>,
    touched: Reverse<u64>,
    pub candidate: CandidateId,
}

impl Rank {
    /// Returns the lower bound of all ranks with these values.
    pub fn lowest(is_blocked: bool, class: LoadClass, spare: bool, share: u64) -> Self {
        Self {
            blocked: Reverse(is_blocked),
            class: Reverse(class),
            spare,
            share,
            busy: Reverse(u8::MAX),
            touched: Reverse(u64::MAX),
            candidate: CandidateId(0),
        }
    }

    /// Returns the lower bound of all ranks of uncontended EMs.
    pub fn lowest_free() -> Self {
        Self::lowest(false, LoadClass(u8::MAX), false, 0)
    }

    /// Returns the score in spread placement: the tier, and the smaller of the free share and the idle part of the machine.
    pub fn spread_score(&self) -> (Reverse<u8>, u64) {
        let (tier, idle) = self.class.0.best_score();
        (tier, idle.min(self.share))
    }
}

/// Unit of a free share: parts of the whole.
const WHOLE: f64 = 1e9;
const WHOLE_UNITS: u64 = 1_000_000_000;

/// Returns the ratio of two amounts, for an order: a larger amount never has a smaller ratio, because each step rounds
/// monotonically.
#[expect(clippy::cast_precision_loss, reason = "an order needs no exact ratio")]
pub(super) fn ratio(amount: i128, whole: i128) -> f64 {
    amount as f64 / whole as f64
}

/// Returns an amount as a share of `whole`; 0 if either is not positive.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the ratio is positive, and the cast saturates"
)]
pub(super) fn share_of(amount: i64, whole: i64) -> u64 {
    match (amount, whole) {
        (1.., 1..) => (ratio(amount.into(), whole.into()) * WHOLE) as u64,
        _ => 0,
    }
}

impl Candidate {
    /// Creates a candidate.
    ///
    /// # Errors
    /// [`ResourceError`] if its amounts contradict each other. Such an EM is never proposed; requests that name it get the
    /// error.
    pub fn new(em: Em, condition: EmCondition, touched: u64, surveyed: u64) -> Result<Self, ResourceError> {
        let nothing = em.total.zero_like();
        let capacity = Resource::left(&em.total, &em.protected, &nothing, &nothing)?;
        Ok(Self {
            left: em.left()?,
            capacity,
            em,
            condition,
            reported: 0,
            load_until: Duration::ZERO,
            registered: Duration::ZERO,
            is_new: false,
            selected: 0,
            assumed: None,
            is_blocked: false,
            touched,
            surveyed,
            pool: PoolId::default(),
            label_sets: Vec::new(),
        })
    }

    /// Replaces the observed EM; allowed only if [`Candidate::is_like`] holds.
    pub fn refresh(&mut self, em: Em, touched: u64, surveyed: u64) {
        // Keeps the earlier EM if the new amounts contradict each other.
        if let Ok(left) = em.left() {
            (self.em, self.left, self.assumed, self.touched, self.surveyed) = (em, left, None, touched, surveyed);
        }
    }

    /// Returns whether an EM is unchanged except for its used amounts.
    pub fn is_like(&self, em: &Em) -> bool {
        let of = |em: &Em| (em.epoch, em.is_registered());
        of(&self.em) == of(em)
            && self.em.labels == em.labels
            && self.em.reserved == em.reserved
            && self.em.total == em.total
            && self.em.protected == em.protected
            && self.em.drain.is_some() == em.drain.is_some()
            && self.em.is_held == em.is_held
    }

    /// Returns whether it can be selected for a request.
    pub fn is_available(&self) -> bool {
        self.condition.is_available && self.em.drain.is_none()
    }

    /// Returns whether it has a label.
    pub fn has(&self, label: &(String, String)) -> bool {
        self.em.label(&label.0) == Some(&label.1)
    }

    /// Returns the rank in an order; `is_bounded` if its grants are bounded.
    pub fn rank(&self, candidate: CandidateId, order: &CandidateOrder, is_bounded: bool) -> Rank {
        let class = if order.by_load { LoadClass::new(self.condition.busy, is_bounded) } else { LoadClass::default() };
        Rank {
            blocked: Reverse(self.is_blocked),
            class: Reverse(class),
            spare: order.spared.iter().any(|dimension| self.left.get(dimension) > 0),
            share: share_of(self.left.get(&order.dimension), self.capacity.get(&order.dimension)),
            busy: Reverse(self.condition.busy),
            touched: Reverse(self.touched),
            candidate,
        }
    }

    /// Counts a proposal as granted until the decision is observed.
    pub fn assume(&mut self, share: &Resource, touched: u64, survey: u64) {
        self.left.take_off(share);
        (self.touched, self.assumed) = (touched, Some(survey));
    }

    /// Returns whether a proposal was made before a survey and is still assumed.
    pub fn is_assumed_before(&self, survey: u64) -> bool {
        self.assumed.is_some_and(|assumed_in| assumed_in < survey)
    }

    /// Clears the assumed grants.
    pub fn clear_assumed(&mut self) {
        if self.assumed.take().is_some()
            && let Ok(left) = self.em.left()
        {
            self.left = left;
        }
    }
}
