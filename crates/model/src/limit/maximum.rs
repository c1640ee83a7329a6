//! The maxima that decide in a scope: of rules, and of a request's own caps.

use std::fmt;

use crate::{cap::Cap, limit_mode::LimitMode, resource::Dimension};

use super::{LimitedScope, Rule};

/// What decides a maximum.
#[derive(Debug, Clone, Copy)]
pub enum Decider<'a> {
    /// A rule.
    Rule(&'a Rule),
    /// The request's own cap, because no rule that is enforced allows less.
    Cap(&'a Cap),
}

impl fmt::Display for Decider<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule(rule) => rule.fmt(f),
            Self::Cap(cap) => cap.fmt(f),
        }
    }
}

/// The maximum of a scope in one dimension.
#[derive(Debug, Clone, Copy)]
pub struct Maximum<'a> {
    /// Which dimension.
    pub dimension: &'a Dimension,
    /// How much.
    pub max: i64,
    /// Why so much.
    pub decided_by: Decider<'a>,
}

impl LimitedScope {
    /// The maximum in each dimension in which something can be refused: that of the rule, or of the cap if that is lower.
    pub fn enforced(&self) -> impl Iterator<Item = Maximum<'_>> {
        let cap = self.cap.as_deref();
        let lower = move |rule: Maximum<'_>| {
            let cap = cap.and_then(|cap| Some((*cap.max.get(rule.dimension)?, cap)));
            cap.filter(|(max, _)| *max < rule.max)
        };
        let of_rules = self.in_mode(LimitMode::Enforced).map(move |of_rule| match lower(of_rule) {
            Some((max, cap)) => Maximum { max, decided_by: Decider::Cap(cap), ..of_rule },
            None => of_rule,
        });
        let is_ruled =
            move |dimension: &Dimension| self.in_mode(LimitMode::Enforced).any(|rule| rule.dimension == dimension);
        let alone = cap.into_iter().flat_map(move |cap| {
            let unruled = cap.max.iter().filter(move |(dimension, _)| !is_ruled(dimension));
            unruled.map(move |(dimension, max)| Maximum { dimension, max: *max, decided_by: Decider::Cap(cap) })
        });
        of_rules.chain(alone)
    }

    /// Whether anything can be refused here.
    pub fn is_limited(&self) -> bool {
        self.enforced().next().is_some()
    }

    /// The maximum in each dimension that a rule of this mode decides.
    pub fn in_mode(&self, mode: LimitMode) -> impl Iterator<Item = Maximum<'_>> {
        let of_mode = self.maxima().filter(move |(.., rule)| rule.mode == mode);
        of_mode.map(|(dimension, max, rule)| Maximum { dimension, max, decided_by: Decider::Rule(rule) })
    }
}
