//! What scopes hold, beside the rules that decide there.

use std::sync::Arc;

use super::{LimitedScope, Rule, RuleChanges, maxima};
use crate::{
    limit_mode::LimitMode,
    resource::Dimension,
    scope::{Scope, StoredUsage, Usage},
};

/// A scope, what it holds, and the rules that decide there.
#[derive(Debug, Clone, PartialEq)]
pub struct ScopeUsage {
    /// Which.
    pub scope: Scope,
    /// The rules that decide there, the most specific first: each decides the dimensions that none before it names.
    pub rules: Vec<Arc<Rule>>,
    /// What its live tickets hold together.
    pub usage: Usage,
    /// Which state of its row that is: it grows with each change.
    pub version: i64,
}

impl ScopeUsage {
    /// A counter and what it holds.
    pub fn new(limited: LimitedScope, stored: StoredUsage) -> Self {
        let StoredUsage { usage, version } = stored;
        Self { scope: limited.counter.scope, rules: limited.rules, usage, version }
    }

    /// The dimension of whose maximum it holds the largest share, of those that are enforced or watched, and that share: 1 is all of it. Of a
    /// maximum of nothing, what is held counts as so many times. `None` if it has no maximum.
    pub fn fullest(&self) -> Option<(&Dimension, f64)> {
        // For people: a sum of more than 2^53 need not be told to the last digit.
        let number = |amount: i64| amount as f64;
        let held = |dimension| self.usage.used.get(dimension).saturating_add(self.usage.locked.get(dimension));
        let shares = maxima(&self.rules).filter(|(.., rule)| rule.mode != LimitMode::Off);
        let shares = shares.map(|(dimension, max, _)| (dimension, number(held(dimension)) / number(max.max(1))));
        shares.max_by(|(_, one), (_, other)| one.total_cmp(other))
    }

    /// The largest share of a maximum that it holds: 0 if it holds nothing, or has no maximum.
    pub fn fullness(&self) -> f64 {
        self.fullest().map_or(0.0, |(_, share)| share)
    }

    /// Whether it holds more than its rules allow: one was lowered below what was held, an engine was adopted, or one only watches.
    pub fn is_over(&self) -> bool {
        self.is_over_in(LimitMode::Enforced) || self.is_over_in(LimitMode::Watched)
    }

    /// The same of the rules of one mode. Beyond those that are enforced, nothing is granted until it drains.
    pub fn is_over_in(&self, mode: LimitMode) -> bool {
        let held = |dimension| self.usage.used.get(dimension).saturating_add(self.usage.locked.get(dimension));
        maxima(&self.rules).any(|(dimension, max, rule)| rule.mode == mode && held(dimension) > max)
    }
}

/// Puts those first that hold the largest share of a maximum; of those that hold the same, in the order of their labels.
pub fn sort_fullest(scopes: &mut [ScopeUsage]) {
    scopes.sort_by(|one, other| other.fullness().total_cmp(&one.fullness()).then_with(|| one.scope.cmp(&other.scope)));
}

/// What it changes that other rules are all there are.
#[derive(Debug, Clone)]
pub struct Replaced {
    /// Which rules.
    pub changes: RuleChanges,
    /// Which scopes hold more than the rules allow.
    pub over: Over,
    /// Whether all rules decide; otherwise there is something to count first.
    pub decides: bool,
}

/// Scopes that hold more than rules allow.
#[derive(Debug, Clone, Default)]
pub struct Over {
    /// The first of them.
    pub first: Vec<ScopeUsage>,
    /// How many there are among those that were looked at.
    pub count: usize,
    /// Whether not all scopes were looked at: there are very many, or some are not counted yet.
    pub is_partial: bool,
}

impl Over {
    /// None was looked at.
    pub fn unknown() -> Self {
        Self { is_partial: true, ..Self::default() }
    }
}
