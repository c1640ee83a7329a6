//! Deciding maxima of a scope: from rules and from the caps of a request.
//!
//! Only enforced rules and caps can refuse a request. A cap decides where it is lower than the rule, or where no rule
//! decides.

use std::fmt;

use crate::{cap::Cap, limit_mode::LimitMode, resource::Dimension};

use super::{LimitedScope, Rule};

/// Source of a maximum.
#[derive(Debug, Clone, Copy)]
pub enum MaximumSource<'a> {
    /// A rule.
    Rule(&'a Rule),
    /// A cap of the request, lower than every enforced rule.
    Cap(&'a Cap),
}

impl fmt::Display for MaximumSource<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule(rule) => rule.fmt(f),
            Self::Cap(cap) => cap.fmt(f),
        }
    }
}

/// Maximum of a scope in one dimension.
#[derive(Debug, Clone, Copy)]
pub struct Maximum<'a> {
    /// The dimension.
    pub dimension: &'a Dimension,
    /// Maximum amount.
    pub max: i64,
    /// Rule or cap that sets the maximum.
    pub decided_by: MaximumSource<'a>,
}

impl LimitedScope {
    /// Returns the maxima that can refuse a request: the enforced rule, or the cap if it is lower.
    pub fn enforced(&self) -> impl Iterator<Item = Maximum<'_>> {
        let cap = self.cap.as_deref();
        let lower = move |rule: Maximum<'_>| {
            let cap = cap.and_then(|cap| Some((*cap.max.get(rule.dimension)?, cap)));
            cap.filter(|(max, _)| *max < rule.max)
        };
        let of_rules = self.in_mode(LimitMode::Enforced).map(move |of_rule| match lower(of_rule) {
            Some((max, cap)) => Maximum { max, decided_by: MaximumSource::Cap(cap), ..of_rule },
            None => of_rule,
        });
        let is_ruled =
            move |dimension: &Dimension| self.in_mode(LimitMode::Enforced).any(|rule| rule.dimension == dimension);
        let alone = cap.into_iter().flat_map(move |cap| {
            let unruled = cap.max.iter().filter(move |(dimension, _)| !is_ruled(dimension));
            unruled.map(move |(dimension, max)| Maximum { dimension, max: *max, decided_by: MaximumSource::Cap(cap) })
        });
        of_rules.chain(alone)
    }

    /// Returns whether the scope can refuse any request.
    pub fn is_limited(&self) -> bool {
        self.enforced().next().is_some()
    }

    /// Returns the maxima that rules of this mode decide.
    pub fn in_mode(&self, mode: LimitMode) -> impl Iterator<Item = Maximum<'_>> {
        let of_mode = self.maxima().filter(move |(.., rule)| rule.mode == mode);
        of_mode.map(|(dimension, max, rule)| Maximum { dimension, max, decided_by: MaximumSource::Rule(rule) })
    }
}
