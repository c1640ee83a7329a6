//! Priorities: the head starts of waiting requests, and the rules that allow them.
//!
//! A rule names labels, each with a value or "each", the priority of requests that name none, and the maximum. Among the rules that
//! match a request, the most specific one decides both. "Each" matches any value, and a missing label, too, as in limits. Without a rule, both are 0: every request may let later ones pass, and none
//! may pass earlier ones.
//! Never: changes the priority of a request that waits. Callers: the ledger, the checks, and the limit service.

use super::{
    limit::{LabelPattern, PatternRule, PatternRules},
    operation::{PlacedRequest, Rejection},
};

/// Maximum of a priority, and of its negative value, in seconds.
pub const PRIORITY_MAX: i16 = 600;

/// Maximum number of rules. Each request that enters a queue is compared with all of them.
pub const PRIORITY_RULES_MAX: usize = 100;

/// Priorities of the requests of a pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PriorityRule {
    /// Requests that the rule applies to. The pattern identifies the rule.
    pub pattern: LabelPattern,
    /// Priority of requests that name none, in seconds; at most `max`.
    pub default: i16,
    /// Maximum priority, in seconds.
    pub max: i16,
}

/// All priority rules, the most specific one first.
pub type Priorities = PatternRules<PriorityRule>;

impl PatternRule for PriorityRule {
    const RULES_MAX: usize = PRIORITY_RULES_MAX;

    fn pattern(&self) -> &LabelPattern {
        &self.pattern
    }

    fn too_many() -> Rejection {
        Rejection::TooManyPriorities { most: Self::RULES_MAX }
    }

    fn missing(pattern: &LabelPattern) -> Rejection {
        Rejection::NoSuchPriority(pattern.to_string())
    }
}

impl Priorities {
    /// Returns the priority at which a request enters a queue, in seconds. A request that has waited keeps its priority.
    pub fn priority_of(&self, request: &PlacedRequest) -> i16 {
        match (request.kept_priority(), request.ask.priority) {
            (Some(kept), _) => kept,
            (None, 0) => self.of_request(request).map_or(0, |rule| rule.default),
            (None, requested) => requested,
        }
    }

    /// Checks that a request may have the priority that it names.
    ///
    /// # Errors
    /// [`Rejection::PriorityAboveMax`].
    pub fn check(&self, request: &PlacedRequest) -> Result<(), Rejection> {
        let requested = request.ask.priority;
        if requested == 0 || request.kept_priority().is_some() {
            return Ok(());
        }
        let rule = self.of_request(request);
        let max = rule.map_or(0, |rule| rule.max);
        if requested <= max {
            return Ok(());
        }
        Err(Rejection::PriorityAboveMax { requested, max, rule: rule.map(|rule| rule.pattern.to_string()) })
    }

    fn of_request(&self, request: &PlacedRequest) -> Option<&PriorityRule> {
        self.deciding(&request.ask.ticket_labels(&request.em))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(labels: &[(&str, Option<&str>)]) -> PriorityRule {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned)));
        PriorityRule { pattern: LabelPattern::new(labels.collect()), default: 0, max: 0 }
    }

    #[test]
    fn priority_rules_are_ordered_by_specificity() {
        let (spark, ann, ide) = (("engine_type", Some("spark")), ("user", Some("ann")), ("creator", Some("IDE")));
        let in_order = [
            rule(&[spark, ann]),
            rule(&[spark, ("user", None)]),
            rule(&[ann, ("engine_type", None)]),
            rule(&[ann, ("zone", None)]),
            rule(&[ide, ("engine_type", None)]),
            rule(&[("zone", Some("a")), ("user", None)]),
            rule(&[spark]),
            rule(&[ann]),
            rule(&[ide]),
            rule(&[("user", None), ("creator", None)]),
            rule(&[("user", None)]),
        ];
        assert_eq!(Priorities::new(in_order.iter().rev().cloned()).rules(), in_order);
    }
}
