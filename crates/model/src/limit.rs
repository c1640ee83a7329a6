//! Limits: maximum amounts for tickets that match label values, independent of their EMs.
//!
//! A rule names a label set, each label with a value or "each", and limits the dimensions that it names. Within one label
//! set, the most specific matching rule that names a dimension decides it. Rules of different label sets all apply. A label
//! set counts in all its scopes, regardless of its rules, so a change of rules cannot unbalance a counter. A new label set is
//! counted in steps and decides only when its counters include all tickets.
//! Never: reads or changes counters. Callers: the ledger, the admission check, the store and the limit service.
//!
//! - `label_set`: label sets and their scopes; `rule`: rules and their lookup;
//! - `pattern_rules`: other rules, of which the most specific one decides;
//! - `maximum`: the deciding maxima of a scope; `usage`: rules together with the use of a scope.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use uuid::Uuid;

use super::{
    cap::Cap,
    limit_mode::LimitMode,
    name::Name,
    order::QueueRules,
    policy::Policy,
    resource::{Dimension, Resource},
    scope::{Scope, ScopeCounter, TicketLabels, USER},
};

mod label_set;
mod maximum;
mod pattern_rules;
mod rule;
mod usage;

pub use label_set::{CountingRule, LabelSet};
pub use maximum::{Maximum, MaximumSource};
pub use pattern_rules::{PatternChange, PatternRule, PatternRules};
pub use rule::{LabelPattern, Rule, RuleChanges, RulePrecondition, RuleRecord, WrongGuarantee};
use rule::{RuleSet, check_order};
pub use usage::{
    GuaranteeExcess, LimitChanges, LimitExcess, LimitReplacement, RuleReplacement, ScopeUsage, sort_fullest,
};

/// Maximum number of labels in one limit.
pub const LABELS_MAX: usize = 8;

/// Maximum number of label sets with limits. Every ticket counts in at most one scope of each.
pub const LABEL_SETS_MAX: usize = 32;

/// Maximum number of dimensions in one limit.
pub const DIMENSIONS_MAX: usize = 64;

/// All rules, label sets and policies at one limits version.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    version: Uuid,
    /// Label sets in check order, each with its rules; empty rules if the label set does not decide yet.
    sets: Vec<(LabelSet, Arc<RuleSet>)>,
    /// All rules by label set, in the same order.
    rules: Vec<(BTreeSet<String>, Arc<RuleSet>)>,
    /// Policies by the application name of EMs. EMs without a policy have all limits.
    policies: BTreeMap<Name, Policy>,
    /// Order of waiting requests, their priorities, and the reclaim policies.
    queue_rules: QueueRules,
}

/// A counter of a ticket, with the rules that decide there, if any.
#[derive(Debug, Clone)]
pub struct LimitedScope {
    /// The counter.
    pub counter: ScopeCounter,
    /// Matching rules, the most specific first. Each decides the dimensions that no earlier rule names. Empty if no rule
    /// matches or the label set is still being counted.
    pub rules: Vec<Arc<Rule>>,
    /// Cap of the decided request for this label set, if any.
    pub cap: Option<Arc<Cap>>,
}

impl LimitedScope {
    /// Returns the counted scope.
    pub fn scope(&self) -> &Scope {
        &self.counter.scope
    }

    /// Returns the maximum of each counted dimension that a rule names, with the deciding rule.
    pub fn maxima(&self) -> impl Iterator<Item = (&Dimension, i64, &Rule)> {
        maxima(&self.rules).filter(|(dimension, ..)| self.counts(dimension))
    }

    /// Returns the maximum number of waiting requests with the deciding rule, if a rule limits them here.
    pub fn waiting_max(&self) -> Option<(i64, &Rule)> {
        let of_waiting = self.rules.iter().find_map(|rule| Some((*rule.max.get(&Dimension::Waiting)?, &**rule)));
        of_waiting.filter(|(_, rule)| rule.mode == LimitMode::Enforced)
    }

    /// Returns the guarantee of each counted dimension that has one. The rule that decides the maximum decides it, too.
    pub fn guarantees(&self) -> impl Iterator<Item = (&Dimension, i64)> {
        let in_effect = self.maxima().filter(|(.., rule)| rule.mode != LimitMode::Off);
        in_effect.filter_map(|(dimension, _, rule)| Some((dimension, *rule.guarantee.get(dimension)?)))
    }

    /// Returns the amounts of a resource that this scope counts.
    pub fn share(&self, resource: &Resource) -> impl Iterator<Item = (Dimension, i64)> {
        resource.amounts().filter(|(dimension, _)| self.counts(dimension))
    }

    fn counts(&self, dimension: &Dimension) -> bool {
        self.scope().counts(dimension)
    }
}

/// Returns the maximum of each dimension of tickets that a rule names. The first rule that names the dimension decides.
pub fn maxima(rules: &[Arc<Rule>]) -> impl Iterator<Item = (&Dimension, i64, &Rule)> {
    rules.iter().enumerate().flat_map(|(number, rule)| {
        let before = rules.iter().take(number);
        let falls_here = move |dimension: &Dimension| !before.clone().any(|rule| rule.max.contains_key(dimension));
        let of_tickets = rule.max.iter().filter(|(dimension, _)| **dimension != Dimension::Waiting);
        let named = of_tickets.filter(move |(dimension, _)| falls_here(dimension));
        named.map(|(dimension, max)| (dimension, *max, &**rule))
    })
}

impl Limits {
    /// Creates the limits of a version from its label sets and rules.
    pub fn new(version: Uuid, sets: Vec<LabelSet>, rules: impl IntoIterator<Item = Rule>) -> Self {
        let mut by_set: BTreeMap<BTreeSet<String>, RuleSet> = BTreeMap::new();
        for rule in rules {
            by_set.entry(rule.label_set()).or_default().insert(Arc::new(rule));
        }
        Self::assemble(version, sets, by_set)
    }

    /// Returns the limits after `changes` of some rules; `None` deletes the rule of the pattern. The cost depends on the
    /// changes, not on the number of rules.
    pub fn changed(
        &self,
        version: Uuid,
        sets: Vec<LabelSet>,
        changes: impl IntoIterator<Item = (LabelPattern, Option<Rule>)>,
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
        Self::assemble(version, sets, by_set).with_queue_rules(self.queue_rules.clone())
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
        Self { version, sets, rules, policies: BTreeMap::new(), queue_rules: QueueRules::default() }
    }

    /// Replaces the policies.
    pub fn with_policies(self, policies: BTreeMap<Name, Policy>) -> Self {
        Self { policies, ..self }
    }

    /// Replaces the rules of the wait queues.
    pub fn with_queue_rules(self, queue_rules: QueueRules) -> Self {
        Self { queue_rules, ..self }
    }

    /// Returns the rules of the wait queues.
    pub fn queue_rules(&self) -> &QueueRules {
        &self.queue_rules
    }

    /// Returns the same label sets, policies and rules of the wait queues with other limits.
    pub fn with_rules(&self, rules: impl IntoIterator<Item = Rule>) -> Self {
        let sets = self.label_sets().cloned().collect();
        let limits = Self::new(self.version, sets, rules).with_policies(self.policies.clone());
        limits.with_queue_rules(self.queue_rules.clone())
    }

    /// Returns the policies, by the application name of EMs.
    pub fn policies(&self) -> &BTreeMap<Name, Policy> {
        &self.policies
    }

    /// Returns the limits version; every change creates a new one.
    pub fn version(&self) -> Uuid {
        self.version
    }

    /// Returns whether there are no label sets.
    pub fn is_empty(&self) -> bool {
        self.sets.is_empty()
    }

    /// Returns all rules in check order, each with whether it decides already.
    pub fn rules(&self) -> impl Iterator<Item = (&Rule, bool)> {
        self.rules.iter().flat_map(|(keys, rules)| {
            let decides = self.is_counted(keys);
            rules.rules().map(move |rule| (&**rule, decides))
        })
    }

    /// Returns at most `limit` rules after the pattern `after`, which need not exist.
    pub fn rules_behind(&self, after: &LabelPattern, limit: usize) -> Vec<(&Rule, bool)> {
        let keys: BTreeSet<String> = after.keys().map(str::to_owned).collect();
        let mut page = Vec::new();
        for (set, rules) in &self.rules {
            let (of_set, decides) = (check_order(set).cmp(&check_order(&keys)), self.is_counted(set));
            let behind = rules.behind(of_set, after, limit - page.len());
            page.extend(behind.into_iter().map(|rule| (rule, decides)));
        }
        page
    }

    /// Returns whether the rules of this label set decide.
    pub fn is_counted(&self, keys: &BTreeSet<String>) -> bool {
        self.sets.iter().any(|(set, _)| set.is_counted && set.counting.keys == *keys)
    }

    /// Returns all label sets.
    pub fn label_sets(&self) -> impl Iterator<Item = &LabelSet> {
        self.sets.iter().map(|(set, _)| set)
    }

    /// Returns the label set id up to which an EM without tickets is counted.
    pub fn newest_label_set(&self) -> i64 {
        self.sets.iter().map(|(set, _)| set.id).max().unwrap_or(0)
    }

    /// Returns whether operations must lock users: a label set contains the user.
    pub fn locks_users(&self) -> bool {
        self.sets.iter().any(|(set, _)| set.counting.keys.contains(USER))
    }

    /// Returns the counters of a ticket with these labels, in check order. The EM's row states which counters already
    /// include the ticket.
    pub fn scopes(&self, labels: &TicketLabels<'_>) -> Vec<LimitedScope> {
        self.scopes_under(labels, &[])
    }

    /// As [`Limits::scopes`], with the caps of a request. Label sets that are still being counted get no cap.
    pub fn scopes_under(&self, labels: &TicketLabels<'_>, caps: &[Arc<Cap>]) -> Vec<LimitedScope> {
        let in_set = |(set, rules): &(LabelSet, Arc<RuleSet>)| {
            let counter = ScopeCounter { label_set_id: set.id, scope: set.counting.scope(labels)? };
            let cap = caps.iter().find(|cap| set.is_counted && cap.keys == set.counting.keys).cloned();
            Some(LimitedScope { cap, ..decide(rules, counter) })
        };
        self.sets.iter().filter_map(in_set).collect()
    }

    /// As [`Limits::scopes`], restricted to completely counted label sets.
    pub fn deciding(&self, labels: &TicketLabels<'_>) -> Vec<LimitedScope> {
        let mut scopes = self.scopes(labels);
        scopes.retain(|limited| {
            self.sets.iter().any(|(set, _)| set.is_counted && set.id == limited.counter.label_set_id)
        });
        scopes
    }

    /// Returns the counter of a scope; `None` unless its label set is completely counted.
    pub fn deciding_at(&self, scope: &Scope) -> Option<LimitedScope> {
        let (set, rules) = self.counted_set(scope)?;
        Some(decide(rules, ScopeCounter { label_set_id: set.id, scope: scope.clone() }))
    }

    /// Returns whether the counter of a scope includes a ticket with these labels.
    pub fn counts_in(&self, scope: &Scope, labels: &TicketLabels<'_>) -> bool {
        self.counted_set(scope).is_some_and(|(set, _)| set.counting.scope(labels).as_ref() == Some(scope))
    }

    /// Returns the label set of a scope; `None` unless it is completely counted.
    fn counted_set(&self, scope: &Scope) -> Option<&(LabelSet, Arc<RuleSet>)> {
        self.sets.iter().find(|(set, _)| set.is_counted && set.counting.keys.iter().eq(scope.labels().keys()))
    }

    /// Returns a counter with the rules that decide there.
    pub fn of_counter(&self, counter: ScopeCounter) -> LimitedScope {
        match self.sets.iter().find(|(set, _)| set.id == counter.label_set_id) {
            Some((_, rules)) => decide(rules, counter),
            None => LimitedScope { counter, rules: Vec::new(), cap: None },
        }
    }
}

fn decide(rules: &RuleSet, counter: ScopeCounter) -> LimitedScope {
    let rules = rules.matching(&counter.scope).cloned().collect();
    LimitedScope { counter, rules, cap: None }
}

#[cfg(test)]
mod tests;
