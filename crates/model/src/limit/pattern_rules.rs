//! Rules beside the limits, of which the most specific one decides: priority rules and reclaim policies.
//!
//! "Each" matches any value, and a missing label, too. Callers: `priority` and `reclaim`, and changes of their rules.

use std::collections::BTreeMap;

use crate::{operation::Rejection, scope::TicketLabels};

use super::LabelPattern;

/// A rule for the requests or tickets with some labels.
pub trait PatternRule: Clone {
    /// Maximum number of rules.
    const RULES_MAX: usize;

    /// Returns the pattern, which identifies the rule.
    fn pattern(&self) -> &LabelPattern;

    /// Returns the rejection of a new rule beside [`Self::RULES_MAX`] others.
    fn too_many() -> Rejection;

    /// Returns the rejection of a pattern without a rule.
    fn missing(pattern: &LabelPattern) -> Rejection;
}

/// All rules of one kind, the most specific one first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PatternRules<R>(Vec<R>);

impl<R> Default for PatternRules<R> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

/// Change of the rule of one pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PatternChange<R> {
    /// Pattern of the rule.
    pub pattern: LabelPattern,
    /// Rule before the change, if any.
    pub before: Option<R>,
    /// Rule after the change; `None` if it is deleted.
    pub after: Option<R>,
}

impl<R: PatternRule> PatternRules<R> {
    /// Sorts rules with unequal patterns.
    pub fn new(rules: impl IntoIterator<Item = R>) -> Self {
        let mut rules: Vec<_> = rules.into_iter().collect();
        rules.sort_by(|a, b| a.pattern().by_specificity(b.pattern()));
        Self(rules)
    }

    /// Returns the rules in the order of their evaluation.
    pub fn rules(&self) -> &[R] {
        &self.0
    }

    /// Returns the most specific rule that matches.
    pub fn deciding(&self, labels: &TicketLabels<'_>) -> Option<&R> {
        self.0.iter().find(|rule| rule.pattern().matches(labels))
    }

    /// Returns the change of the rule of `pattern` to `after`, or its deletion.
    ///
    /// # Errors
    /// [`PatternRule::too_many`], [`PatternRule::missing`].
    pub fn change(&self, pattern: &LabelPattern, after: Option<&R>) -> Result<PatternChange<R>, Rejection> {
        let before = self.0.iter().find(|rule| rule.pattern() == pattern);
        match (before, after) {
            (None, None) => Err(R::missing(pattern)),
            (None, Some(_)) if self.0.len() >= R::RULES_MAX => Err(R::too_many()),
            _ => Ok(PatternChange { pattern: pattern.clone(), before: before.cloned(), after: after.cloned() }),
        }
    }

    /// Returns the changes to `after`, by their patterns.
    pub fn changes_to(&self, after: &Self) -> Vec<PatternChange<R>>
    where
        R: PartialEq,
    {
        let mut changes = BTreeMap::new();
        for rule in &self.0 {
            changes.insert(rule.pattern(), (Some(rule), None));
        }
        for rule in &after.0 {
            changes.entry(rule.pattern()).or_insert((None, None)).1 = Some(rule);
        }
        let changes = changes.into_iter().filter(|(_, (before, after))| before != after);
        let change = |(pattern, (before, after)): (&LabelPattern, (Option<&R>, Option<&R>))| PatternChange {
            pattern: pattern.clone(),
            before: before.cloned(),
            after: after.cloned(),
        };
        changes.map(change).collect()
    }
}
