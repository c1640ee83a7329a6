//! Limits: who may hold how much, whatever EM it is on.
//!
//! A rule names a set of labels, each with a value or "each", and caps the dimensions that it names. Of the rules with the same
//! label set, the most specific one that matches a request decides; rules with different label sets all apply. A counter is kept
//! for every scope of every label set that some rule has, whatever its rules say, so that a change of a rule can never
//! unbalance it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use super::{
    name::Name,
    policy::Policy,
    resource::Dimension,
    scope::{CREATOR, ENGINE_TYPE, Scope, TicketLabels, USER},
};

/// How many labels a limit may name.
pub const LABELS_MAX: usize = 8;

/// How many dimensions a limit may name.
pub const DIMENSIONS_MAX: usize = 64;

/// Which tickets a rule is for: its labels, each with a value, or `None` for each value on its own.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pattern(BTreeMap<String, Option<String>>);

impl Pattern {
    /// A pattern with these labels.
    pub fn new(labels: BTreeMap<String, Option<String>>) -> Self {
        Self(labels)
    }

    /// Label by label.
    pub fn labels(&self) -> &BTreeMap<String, Option<String>> {
        &self.0
    }

    /// Its label set.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    fn matches(&self, scope: &Scope) -> bool {
        self.0.iter().all(|(key, wanted)| {
            wanted.as_ref().is_none_or(|wanted| scope.labels().get(key).is_some_and(|value| value == wanted))
        })
    }

    /// Which labels have a value, the weightiest first: `hadoop` + `IDE` before `hadoop` + each before each + `IDE` before each +
    /// each.
    fn specificity(&self) -> Vec<bool> {
        let mut keys: Vec<_> = self.0.iter().collect();
        keys.sort_by_key(|(key, _)| rank(key));
        keys.into_iter().map(|(_, value)| value.is_some()).collect()
    }
}

/// For people: not to be taken apart again.
impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (key, value)) in self.0.iter().enumerate() {
            let separator = if number == 0 { "" } else { "," };
            match value {
                Some(value) => write!(f, "{separator}{key}={value}")?,
                None => write!(f, "{separator}each {key}")?,
            }
        }
        Ok(())
    }
}

/// The weight of a label, the heaviest first: user, creator, engine type, then the others by name.
fn rank(key: &str) -> (u8, &str) {
    match key {
        USER => (0, key),
        CREATOR => (1, key),
        ENGINE_TYPE => (2, key),
        _ => (3, key),
    }
}

/// The order in which label sets are checked: creator, user, then larger sets.
fn check_order(keys: &BTreeSet<String>) -> (usize, u8, Vec<&str>) {
    let first = match keys.iter().next().map(String::as_str) {
        Some(CREATOR) => 0,
        Some(USER) => 1,
        _ => 2,
    };
    (keys.len(), first, keys.iter().map(String::as_str).collect())
}

/// One limit: at most so much, in the dimensions that it names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// For which tickets. Names the rule: there is one for each pattern.
    pub pattern: Pattern,
    /// The maximum, dimension by dimension.
    pub max: BTreeMap<Dimension, i64>,
}

/// All rules, as they stand at some version.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    version: i64,
    /// By label set, in the order in which they are checked; each with its rules, the most specific first.
    sets: Vec<(BTreeSet<String>, Vec<Arc<Rule>>)>,
    /// By the application name of EMs; others have all limits.
    policies: BTreeMap<Name, Policy>,
}

/// A scope that a ticket counts in, and the rule that decides there, if any.
#[derive(Debug, Clone)]
pub struct LimitedScope {
    /// Which.
    pub scope: Scope,
    /// The most specific rule that matches; `None` if no rule of the label set does.
    pub rule: Option<Arc<Rule>>,
}

impl Limits {
    /// The rules of a version.
    pub fn new(version: i64, rules: impl IntoIterator<Item = Rule>) -> Self {
        let mut by_set: BTreeMap<BTreeSet<String>, Vec<Arc<Rule>>> = BTreeMap::new();
        for rule in rules {
            let keys = rule.pattern.keys().map(str::to_owned).collect();
            by_set.entry(keys).or_default().push(Arc::new(rule));
        }
        let mut sets: Vec<_> = by_set.into_iter().collect();
        for (_, rules) in &mut sets {
            rules.sort_by_key(|rule| std::cmp::Reverse(rule.pattern.specificity()));
        }
        sets.sort_by(|(a, _), (b, _)| check_order(a).cmp(&check_order(b)));
        Self { version, sets, policies: BTreeMap::new() }
    }

    /// The same, with the policies of kinds of EMs.
    pub fn with_policies(self, policies: BTreeMap<Name, Policy>) -> Self {
        Self { policies, ..self }
    }

    /// The policies, by the application name of EMs.
    pub fn policies(&self) -> &BTreeMap<Name, Policy> {
        &self.policies
    }

    /// Grows with every change.
    pub fn version(&self) -> i64 {
        self.version
    }

    /// Whether there is no rule.
    pub fn is_empty(&self) -> bool {
        self.sets.is_empty()
    }

    /// All rules, in the order in which they are checked.
    pub fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.sets.iter().flat_map(|(_, rules)| rules).map(|rule| &**rule)
    }

    /// The label sets of all rules.
    pub fn label_sets(&self) -> impl Iterator<Item = &BTreeSet<String>> {
        self.sets.iter().map(|(keys, _)| keys)
    }

    /// The scopes that a ticket with these labels counts in, in the order in which they are checked.
    pub fn scopes(&self, labels: &TicketLabels<'_>) -> Vec<LimitedScope> {
        let in_set =
            |(keys, rules): &(BTreeSet<String>, Vec<Arc<Rule>>)| Some(decide(rules, self.scope(labels, keys)?));
        self.sets.iter().filter_map(in_set).collect()
    }

    /// The scope of a label set that a ticket with these labels counts in, if it does in any.
    pub fn scope(&self, labels: &TicketLabels<'_>, label_set: &BTreeSet<String>) -> Option<Scope> {
        let policy = self.policies.get(labels.em_kind());
        let applies = policy.is_none_or(|policy| policy.applies(label_set));
        if applies { Scope::of(labels, label_set.iter().map(String::as_str)) } else { None }
    }

    /// A scope with the rule that decides there.
    pub fn of_scope(&self, scope: Scope) -> LimitedScope {
        let same_set = |keys: &BTreeSet<String>| keys.iter().eq(scope.labels().keys());
        let rules = self.sets.iter().find(|(keys, _)| same_set(keys)).map_or(&[][..], |(_, rules)| rules);
        decide(rules, scope)
    }
}

fn decide(rules: &[Arc<Rule>], scope: Scope) -> LimitedScope {
    let rule = rules.iter().find(|rule| rule.pattern.matches(&scope)).cloned();
    LimitedScope { scope, rule }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{em::EmInstance, name::Labels};

    fn rule(labels: &[(&str, Option<&str>)], instances: i64) -> Rule {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned))).collect();
        Rule { pattern: Pattern::new(labels), max: BTreeMap::from([(Dimension::Instances, instances)]) }
    }

    fn decided(limits: &Limits, user: &str, creator: &str) -> Vec<(String, Option<i64>)> {
        let labels = Labels::default();
        let em = EmInstance::parse("em", "ecm", "host").unwrap();
        let scopes = limits.scopes(&TicketLabels::new(user, creator, "", &labels, &em));
        scopes.into_iter().map(|s| (s.scope.to_string(), s.rule.map(|rule| rule.max[&Dimension::Instances]))).collect()
    }

    #[test]
    fn the_most_specific_rule_of_a_label_set_decides() {
        let both = |user, creator, max| rule(&[("user", user), ("creator", creator)], max);
        let limits = Limits::new(
            1,
            [
                both(None, None, 4),
                both(None, Some("IDE"), 3),
                both(Some("hadoop"), None, 2),
                both(Some("hadoop"), Some("IDE"), 1),
            ],
        );
        for (user, creator, max) in [("hadoop", "IDE", 1), ("hadoop", "x", 2), ("x", "IDE", 3), ("x", "y", 4)] {
            assert_eq!(decided(&limits, user, creator), [(format!("creator={creator},user={user}"), Some(max))]);
        }
    }

    #[test]
    fn label_sets_are_checked_creator_first_then_user_then_larger_ones() {
        let limits = Limits::new(
            1,
            [
                rule(&[("user", None), ("creator", None)], 3),
                rule(&[("user", None)], 2),
                rule(&[("creator", Some("IDE"))], 1),
                rule(&[("tenant", None)], 9),
            ],
        );
        assert_eq!(
            decided(&limits, "hadoop", "IDE"),
            [
                ("creator=IDE".into(), Some(1)),
                ("user=hadoop".into(), Some(2)),
                ("creator=IDE,user=hadoop".into(), Some(3))
            ],
            "a ticket without a tenant is in no tenant's scope"
        );
        assert_eq!(decided(&limits, "hadoop", "x")[0], ("creator=x".into(), None), "counted, but not limited");
    }
}
