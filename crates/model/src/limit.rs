//! Limits: who may hold how much, whatever EM it is on.
//!
//! A rule names a set of labels, each with a value or "each", and caps the dimensions that it names. Of the rules with the same
//! label set, the most specific one that matches a request and names a dimension decides there; rules with different label sets all
//! apply. A counter is kept for every scope of every label set that some rule has, whatever its rules say, so that a change of a rule
//! can never unbalance it. A label set that is new is counted in steps, and decides only when all tickets are in its counters.
//!
//! - `label_set`: sets of labels, and how tickets count in their scopes; `rule`: the rules, and which is found for a counter;
//! - `maximum`: what decides in a scope; `usage`: what scopes hold beside that.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use uuid::Uuid;

use super::{
    cap::Cap,
    name::Name,
    policy::Policy,
    resource::{Dimension, Resource},
    scope::{Counter, Queues, Scope, TicketLabels, USER},
};

mod label_set;
mod maximum;
mod rule;
mod usage;

pub use label_set::{Counting, LabelSet};
pub use maximum::{Decider, Maximum};
pub use rule::{Expected, Pattern, Rule, RuleChanges, RuleRecord};
use rule::{RuleSet, check_order};
pub use usage::{Over, Replaced, ScopeUsage, sort_fullest};

/// How many labels a limit may name.
pub const LABELS_MAX: usize = 8;

/// How many sets of labels may have limits: every ticket counts in a scope of each.
pub const LABEL_SETS_MAX: usize = 32;

/// How many dimensions a limit may name.
pub const DIMENSIONS_MAX: usize = 64;

/// All rules and all that is counted, as they stand at some version.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    version: Uuid,
    /// In the order in which they are checked; each with its rules, if it decides.
    sets: Vec<(LabelSet, Arc<RuleSet>)>,
    /// All rules by label set, in the same order.
    rules: Vec<(BTreeSet<String>, Arc<RuleSet>)>,
    /// By the application name of EMs; others have all limits.
    policies: BTreeMap<Name, Policy>,
    users_held: bool,
}

/// A counter that a ticket counts in, and the rules that decide there, if any.
#[derive(Debug, Clone)]
pub struct LimitedScope {
    /// Which.
    pub counter: Counter,
    /// Those that match, the most specific first: each decides the dimensions that none before it names. Empty if no rule of the label
    /// set matches, or the set is still being counted.
    pub rules: Vec<Arc<Rule>>,
    /// How amounts in queues count in it.
    pub queues: Queues,
    /// The cap of the request that is judged here, if it has one.
    pub cap: Option<Arc<Cap>>,
}

impl LimitedScope {
    /// The scope that is counted.
    pub fn scope(&self) -> &Scope {
        &self.counter.scope
    }

    /// The maximum in each dimension that some rule names and that is counted, and the rule that decides it.
    pub fn maxima(&self) -> impl Iterator<Item = (&Dimension, i64, &Rule)> {
        maxima(&self.rules).filter(|(dimension, ..)| self.counts(dimension))
    }

    /// What is counted of a resource.
    pub fn share(&self, resource: &Resource) -> impl Iterator<Item = (Dimension, i64)> {
        resource.amounts().filter(|(dimension, _)| self.counts(dimension))
    }

    fn counts(&self, dimension: &Dimension) -> bool {
        self.queues == Queues::Summed || self.scope().counts(dimension)
    }
}

/// The maximum in each dimension that some rule names, and the rule that decides it: the first that names it.
pub fn maxima(rules: &[Arc<Rule>]) -> impl Iterator<Item = (&Dimension, i64, &Rule)> {
    rules.iter().enumerate().flat_map(|(number, rule)| {
        let before = rules.iter().take(number);
        let falls_here = move |dimension: &Dimension| !before.clone().any(|rule| rule.max.contains_key(dimension));
        let named = rule.max.iter().filter(move |(dimension, _)| falls_here(dimension));
        named.map(|(dimension, max)| (dimension, *max, &**rule))
    })
}

impl Limits {
    /// The rules of a version, and the label sets that are counted then.
    pub fn new(version: Uuid, sets: Vec<LabelSet>, rules: impl IntoIterator<Item = Rule>) -> Self {
        let mut by_set: BTreeMap<BTreeSet<String>, RuleSet> = BTreeMap::new();
        for rule in rules {
            by_set.entry(rule.label_set()).or_default().insert(Arc::new(rule));
        }
        Self::assemble(version, sets, by_set)
    }

    /// What these have become in a version, in which some patterns have other rules, or none any more. It costs what has changed,
    /// however many rules there are.
    pub fn changed(
        &self,
        version: Uuid,
        sets: Vec<LabelSet>,
        changes: impl IntoIterator<Item = (Pattern, Option<Rule>)>,
    ) -> Self {
        let mut by_set: BTreeMap<BTreeSet<String>, RuleSet> =
            self.rules.iter().map(|(keys, rules)| (keys.clone(), RuleSet::clone(rules))).collect();
        for (pattern, rule) in changes {
            let of_set = by_set.entry(pattern.keys().map(str::to_owned).collect()).or_default();
            match rule {
                Some(rule) => of_set.insert(Arc::new(rule)),
                None => of_set.remove(&pattern),
            }
        }
        by_set.retain(|_, rules| !rules.is_empty());
        Self::assemble(version, sets, by_set)
    }

    fn assemble(version: Uuid, sets: Vec<LabelSet>, by_set: BTreeMap<BTreeSet<String>, RuleSet>) -> Self {
        let by_set: BTreeMap<_, _> = by_set.into_iter().map(|(keys, rules)| (keys, Arc::new(rules))).collect();
        let deciding = |set: &LabelSet| by_set.get(&set.counting.keys).filter(|_| set.is_counted).cloned();
        let mut sets: Vec<_> = sets.into_iter().map(|set| (deciding(&set).unwrap_or_default(), set)).collect();
        sets.sort_by(|(_, a), (_, b)| {
            check_order(&a.counting.keys).cmp(&check_order(&b.counting.keys)).then(a.id.cmp(&b.id))
        });
        let sets = sets.into_iter().map(|(rules, set)| (set, rules)).collect();
        let mut rules: Vec<_> = by_set.into_iter().collect();
        rules.sort_by(|(a, _), (b, _)| check_order(a).cmp(&check_order(b)));
        Self { version, sets, rules, policies: BTreeMap::new(), users_held: false }
    }

    /// The same, with the policies of kinds of EMs.
    pub fn with_policies(self, policies: BTreeMap<Name, Policy>) -> Self {
        Self { policies, ..self }
    }

    /// The same, and whether an operator holds users.
    pub fn with_users_held(self, users_held: bool) -> Self {
        Self { users_held, ..self }
    }

    /// The same counters under other rules.
    pub fn with_rules(&self, rules: impl IntoIterator<Item = Rule>) -> Self {
        let sets = self.label_sets().cloned().collect();
        Self::new(self.version, sets, rules).with_policies(self.policies.clone()).with_users_held(self.users_held)
    }

    /// The policies, by the application name of EMs.
    pub fn policies(&self) -> &BTreeMap<Name, Policy> {
        &self.policies
    }

    /// Another with every change.
    pub fn version(&self) -> Uuid {
        self.version
    }

    /// Whether nothing is counted.
    pub fn is_empty(&self) -> bool {
        self.sets.is_empty()
    }

    /// All rules, in the order in which they are checked; each with whether it decides already.
    pub fn rules(&self) -> impl Iterator<Item = (&Rule, bool)> {
        self.rules.iter().flat_map(|(keys, rules)| {
            let decides = self.is_counted(keys);
            rules.rules().map(move |rule| (&**rule, decides))
        })
    }

    /// The first `limit` of them behind `after`, whether or not there is such a rule.
    pub fn rules_behind(&self, after: &Pattern, limit: usize) -> Vec<(&Rule, bool)> {
        let keys: BTreeSet<String> = after.keys().map(str::to_owned).collect();
        let mut page = Vec::new();
        for (set, rules) in &self.rules {
            let (of_set, decides) = (check_order(set).cmp(&check_order(&keys)), self.is_counted(set));
            let behind = rules.behind(of_set, after, limit - page.len());
            page.extend(behind.into_iter().map(|rule| (rule, decides)));
        }
        page
    }

    /// Whether rules of this label set decide.
    pub fn is_counted(&self, keys: &BTreeSet<String>) -> bool {
        self.sets.iter().any(|(set, _)| set.is_counted && set.counting.keys == *keys)
    }

    /// What is counted.
    pub fn label_sets(&self) -> impl Iterator<Item = &LabelSet> {
        self.sets.iter().map(|(set, _)| set)
    }

    /// The number up to which the tickets of an EM without tickets are counted.
    pub fn newest_label_set(&self) -> i64 {
        self.sets.iter().map(|(set, _)| set.id).max().unwrap_or(0)
    }

    /// Whether users' resource locks have to be taken: some label set counts by user, or an operator holds users.
    pub fn locks_users(&self) -> bool {
        self.users_held || self.sets.iter().any(|(set, _)| set.counting.keys.contains(USER))
    }

    /// The counters that a ticket with these labels belongs to, in the order in which they are checked. Whether it is in those that
    /// are still being made, its EM knows.
    pub fn scopes(&self, labels: &TicketLabels<'_>) -> Vec<LimitedScope> {
        self.scopes_under(labels, &[])
    }

    /// The same, with the caps of a request; of label sets of which not all tickets are counted there is none.
    pub fn scopes_under(&self, labels: &TicketLabels<'_>, caps: &[Arc<Cap>]) -> Vec<LimitedScope> {
        let in_set = |(set, rules): &(LabelSet, Arc<RuleSet>)| {
            let counter = Counter { label_set_id: set.id, scope: set.counting.scope(labels)? };
            let cap = caps.iter().find(|cap| set.is_counted && cap.keys == set.counting.keys).cloned();
            Some(LimitedScope { cap, ..decide(rules, set.counting.queues, counter) })
        };
        self.sets.iter().filter_map(in_set).collect()
    }

    /// The same, of the label sets alone of which all tickets are counted.
    pub fn deciding(&self, labels: &TicketLabels<'_>) -> Vec<LimitedScope> {
        let mut scopes = self.scopes(labels);
        scopes.retain(|limited| {
            self.sets.iter().any(|(set, _)| set.is_counted && set.id == limited.counter.label_set_id)
        });
        scopes
    }

    /// The counter of a scope; `None` unless all tickets are counted by the names of its labels.
    pub fn deciding_at(&self, scope: &Scope) -> Option<LimitedScope> {
        let is_of = |set: &LabelSet| set.is_counted && set.counting.keys.iter().eq(scope.labels().keys());
        let (set, rules) = self.sets.iter().find(|(set, _)| is_of(set))?;
        Some(decide(rules, set.counting.queues, Counter { label_set_id: set.id, scope: scope.clone() }))
    }

    /// A counter with the rules that decide there.
    pub fn of_counter(&self, counter: Counter) -> LimitedScope {
        match self.sets.iter().find(|(set, _)| set.id == counter.label_set_id) {
            Some((set, rules)) => decide(rules, set.counting.queues, counter),
            None => LimitedScope { counter, rules: Vec::new(), queues: Queues::Apart, cap: None },
        }
    }
}

fn decide(rules: &RuleSet, queues: Queues, counter: Counter) -> LimitedScope {
    let rules = rules.matching(&counter.scope).cloned().collect();
    LimitedScope { counter, rules, queues, cap: None }
}

#[cfg(test)]
mod tests;
