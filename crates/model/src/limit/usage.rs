//! Use of scopes together with the deciding rules, for lists and for the effect of rule changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{LimitedScope, Rule, RuleChanges, maxima};
use crate::{
    limit_mode::LimitMode,
    order::{QueueRuleChanges, QueueRuleReplacement},
    resource::Dimension,
    scope::{Scope, ScopeHoldings, StoredScopeHoldings},
};

/// A scope with its use and its deciding rules.
#[derive(Debug, Clone, PartialEq)]
pub struct ScopeUsage {
    /// The scope.
    pub scope: Scope,
    /// Deciding rules, the most specific first. Each decides the dimensions that no earlier rule names.
    pub rules: Vec<Arc<Rule>>,
    /// Sums of its live tickets.
    pub usage: ScopeHoldings,
    /// Row version; increases with each change.
    pub version: i64,
}

impl ScopeUsage {
    /// Combines a counter with its stored use.
    pub fn new(limited: LimitedScope, stored: StoredScopeHoldings) -> Self {
        let StoredScopeHoldings { usage, version } = stored;
        Self { scope: limited.counter.scope, rules: limited.rules, usage, version }
    }

    /// Returns the fullest dimension of the enforced and advisory maxima, and the used share of its maximum: 1 is the
    /// maximum. A maximum of zero counts as one unit. `None` without a maximum.
    pub fn fullest(&self) -> Option<(&Dimension, f64)> {
        // For display only: precision beyond 2^53 is not needed.
        let number = |amount: i64| amount as f64;
        let shares = maxima(&self.rules).filter(|(.., rule)| rule.mode != LimitMode::Off);
        let shares =
            shares.map(|(dimension, max, _)| (dimension, number(self.usage.held(dimension)) / number(max.max(1))));
        shares.max_by(|(_, one), (_, other)| one.total_cmp(other))
    }

    /// Returns the share of the fullest dimension; 0 without use or maximum.
    pub fn fullness(&self) -> f64 {
        self.fullest().map_or(0.0, |(_, share)| share)
    }

    /// Returns whether the use exceeds an enforced or advisory maximum. Causes: a lowered limit, an adoption, or an
    /// advisory limit.
    pub fn is_over(&self) -> bool {
        self.is_over_in(LimitMode::Enforced) || self.is_over_in(LimitMode::Advisory)
    }

    /// As [`ScopeUsage::is_over`], for one mode. A scope above an enforced maximum gets no grants until its use falls.
    pub fn is_over_in(&self, mode: LimitMode) -> bool {
        maxima(&self.rules).any(|(dimension, max, rule)| rule.mode == mode && self.usage.held(dimension) > max)
    }
}

/// Sorts by the share of the fullest dimension, in descending order, then by labels.
pub fn sort_fullest(scopes: &mut [ScopeUsage]) {
    scopes.sort_by(|one, other| other.fullness().total_cmp(&one.fullness()).then_with(|| one.scope.cmp(&other.scope)));
}

/// Rules of each kind that replace all others. Those it does not have stay as they are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LimitReplacement {
    /// Limits, with distinct patterns.
    pub rules: Option<Vec<Rule>>,
    /// Rules of the wait queues.
    pub queue: QueueRuleReplacement,
}

/// Changes by a replacement.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LimitChanges {
    /// Changed rules.
    pub rules: RuleChanges,
    /// Changed rules of the wait queues.
    pub queue: QueueRuleChanges,
}

/// Effect of replacing all rules.
#[derive(Debug, Clone)]
pub struct RuleReplacement {
    /// Changed rules.
    pub changes: LimitChanges,
    /// Scopes whose use exceeds the new rules.
    pub over: LimitExcess,
    /// Guarantees that together exceed the capacity.
    pub guarantees: Vec<GuaranteeExcess>,
    /// Whether all rules decide already; false if tickets must be counted first.
    pub decides: bool,
}

/// Guarantees of a label set that together exceed the capacity of the registered EMs, in one dimension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuaranteeExcess {
    /// The labels.
    pub labels: BTreeSet<String>,
    /// The dimension.
    pub dimension: Dimension,
    /// Sum of the guarantees. A rule for each value counts once.
    pub guaranteed: i64,
    /// Capacity of the EMs.
    pub capacity: i64,
}

impl GuaranteeExcess {
    /// Returns the excesses of `rules` by the capacity of the EMs in some dimensions.
    pub fn of<'a>(rules: impl IntoIterator<Item = &'a Rule>, capacity: &BTreeMap<Dimension, i64>) -> Vec<Self> {
        let mut sums: BTreeMap<(BTreeSet<String>, &Dimension), i64> = BTreeMap::new();
        for rule in rules.into_iter().filter(|rule| rule.mode != LimitMode::Off) {
            for (dimension, guarantee) in &rule.guarantee {
                let sum = sums.entry((rule.label_set(), dimension)).or_default();
                *sum = sum.saturating_add(*guarantee);
            }
        }
        let excess = |((labels, dimension), guaranteed): ((_, &Dimension), i64)| {
            let capacity = *capacity.get(dimension).filter(|capacity| guaranteed > **capacity)?;
            Some(Self { labels, dimension: dimension.clone(), guaranteed, capacity })
        };
        sums.into_iter().filter_map(excess).collect()
    }
}

/// Scopes whose use exceeds their rules.
#[derive(Debug, Clone, Default)]
pub struct LimitExcess {
    /// The first of these scopes.
    pub first: Vec<ScopeUsage>,
    /// Number of these scopes among the checked ones.
    pub count: usize,
    /// Whether some scopes were not checked, because there are too many or some are not counted yet.
    pub is_partial: bool,
}

impl LimitExcess {
    /// Returns the result without any check.
    pub fn unknown() -> Self {
        Self { is_partial: true, ..Self::default() }
    }
}
