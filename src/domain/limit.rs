//! Limits: who may hold how much, whatever EM it is on.
//!
//! A rule names a set of labels, each with a value or "each", and caps the dimensions that it names. Of the rules with the same
//! label set, the most specific one that matches a request and names a dimension decides there; rules with different label sets all
//! apply. A counter is kept for every scope of every label set that some rule has, whatever its rules say, so that a change of a rule
//! can never unbalance it. A label set that is new is counted in steps, and decides only when all tickets are in its counters.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet},
    fmt,
    ops::Bound,
    sync::Arc,
};

use rpds::RedBlackTreeMapSync;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    cap::Cap,
    limit_mode::LimitMode,
    name::Name,
    policy::Policy,
    resource::Dimension,
    scope::{CREATOR, Counter, ENGINE_TYPE, Scope, TicketLabels, USER},
};

/// How many labels a limit may name.
pub const LABELS_MAX: usize = 8;

/// How many sets of labels may have limits: every ticket counts in a scope of each.
pub const LABEL_SETS_MAX: usize = 32;

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

    /// Which labels have a value, the weightiest first: `hadoop` + `IDE` before `hadoop` + each before each + `IDE` before each +
    /// each.
    fn shape(&self) -> Shape {
        let mut keys: Vec<_> = self.0.iter().collect();
        keys.sort_by_key(|(key, _)| rank(key));
        Shape(keys.into_iter().map(|(key, value)| (key.clone(), value.is_some())).collect())
    }

    /// The values that it names, in the order of its labels.
    fn values(&self) -> Values {
        self.0.values().flatten().cloned().collect()
    }
}

/// The labels of a rule, and which of them have a value.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Shape(Vec<(String, bool)>);

impl Shape {
    /// The values of a scope that a rule of this shape would name.
    fn values(&self, scope: &Scope) -> Values {
        let is_fixed = |key: &str| self.0.iter().any(|(known, is_fixed)| *is_fixed && known == key);
        scope.labels().iter().filter(|(key, _)| is_fixed(key)).map(|(_, value)| value.clone()).collect()
    }

    fn is_fixed(&self) -> impl Iterator<Item = bool> {
        self.0.iter().map(|(_, is_fixed)| *is_fixed)
    }
}

/// The values of some labels of a label set, in the order of the labels.
type Values = Vec<String>;

/// Rules by the values that they name; copies share what has not changed.
type ByValues = RedBlackTreeMapSync<Values, Arc<Rule>>;

/// The rules of a label set, found by the values that they name: however many there are, a look costs one for each way in which its
/// labels have values.
#[derive(Debug, Clone, Default)]
struct RuleSet {
    /// The most specific first.
    shapes: Vec<(Shape, ByValues)>,
}

impl RuleSet {
    fn insert(&mut self, rule: Arc<Rule>) {
        let (shape, values) = (rule.pattern.shape(), rule.pattern.values());
        let at = self.find(&shape).unwrap_or_else(|at| {
            self.shapes.insert(at, (shape, ByValues::default()));
            at
        });
        if let Some((_, rules)) = self.shapes.get_mut(at) {
            rules.insert_mut(values, rule);
        }
    }

    fn remove(&mut self, pattern: &Pattern) {
        let Ok(at) = self.find(&pattern.shape()) else { return };
        if let Some((_, rules)) = self.shapes.get_mut(at) {
            rules.remove_mut(&pattern.values());
            if rules.is_empty() {
                self.shapes.remove(at);
            }
        }
    }

    /// Where rules of a shape are, or would be.
    fn find(&self, shape: &Shape) -> Result<usize, usize> {
        self.shapes.binary_search_by(|(known, _)| shape.is_fixed().cmp(known.is_fixed()))
    }

    fn is_empty(&self) -> bool {
        self.shapes.is_empty()
    }

    /// The rules that match a scope, the most specific first.
    fn matching(&self, scope: &Scope) -> impl Iterator<Item = &Arc<Rule>> {
        self.shapes.iter().filter_map(|(shape, rules)| rules.get(&shape.values(scope)))
    }

    /// The most specific first, of these by their values.
    fn rules(&self) -> impl Iterator<Item = &Arc<Rule>> {
        self.shapes.iter().flat_map(|(_, rules)| rules.values())
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

/// The weight of a label, the heaviest first: engine type, user, creator as in Linkis's configuration, then the others by name.
fn rank(key: &str) -> (u8, &str) {
    match key {
        ENGINE_TYPE => (0, key),
        USER => (1, key),
        CREATOR => (2, key),
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

/// One limit: at most so much, in the dimensions that it names; and what it does about more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// For which tickets. Names the rule: there is one for each pattern.
    pub pattern: Pattern,
    /// What it does about what goes beyond its maximum.
    pub mode: LimitMode,
    /// The maximum, dimension by dimension.
    pub max: BTreeMap<Dimension, i64>,
}

impl Rule {
    /// The names of its labels.
    pub fn label_set(&self) -> BTreeSet<String> {
        self.pattern.keys().map(str::to_owned).collect()
    }
}

/// A rule, and how it came to be as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleRecord {
    /// The rule.
    pub rule: Rule,
    /// Who set it last.
    pub updated_by: String,
    /// When, by the database's clock.
    pub update_time: OffsetDateTime,
    /// Another whenever it is set; not to be taken apart.
    pub etag: String,
}

/// What is different when other rules are all there are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuleChanges {
    /// Those that were not there.
    pub added: Vec<Rule>,
    /// Those that had another maximum or mode: before and after.
    pub changed: Vec<(Rule, Rule)>,
    /// Those that are there no more, in the order of their patterns.
    pub removed: Vec<Rule>,
}

impl RuleChanges {
    /// From the rules there are to `after`, of which no two have the same pattern.
    pub fn between(before: impl IntoIterator<Item = Rule>, after: &[Rule]) -> Self {
        let mut before: BTreeMap<Pattern, Rule> = before.into_iter().map(|rule| (rule.pattern.clone(), rule)).collect();
        let mut changes = Self::default();
        for rule in after {
            match before.remove(&rule.pattern) {
                None => changes.added.push(rule.clone()),
                Some(same) if same == *rule => {}
                Some(other) => changes.changed.push((other, rule.clone())),
            }
        }
        changes.removed = before.into_values().collect();
        changes
    }
}

/// Where a ticket counts that lacks a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lacking {
    /// Nowhere in the label set: so the first release counted.
    Skipped,
    /// In the scope with the value "" there: nobody escapes a limit by saying less.
    Empty,
}

/// One way to count: the labels that scopes have, and the tickets that do not count.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Counting {
    /// The names of the labels.
    pub keys: BTreeSet<String>,
    /// Where tickets count that do not carry all of them.
    pub lacking: Lacking,
    /// The application names of EMs whose policies leave this label set out.
    pub exempt: BTreeSet<Name>,
}

impl Counting {
    /// What has to be counted for rules of these label sets under these policies.
    pub fn wanted(sets: BTreeSet<BTreeSet<String>>, policies: &BTreeMap<Name, Policy>) -> BTreeSet<Self> {
        let exempt = |keys: &BTreeSet<String>| {
            let leaving_out = policies.iter().filter(|(_, policy)| !policy.applies(keys));
            leaving_out.map(|(kind, _)| kind.clone()).collect()
        };
        sets.into_iter().map(|keys| Self { exempt: exempt(&keys), lacking: Lacking::Empty, keys }).collect()
    }

    /// The scope that a ticket with these labels counts in, if it does in any.
    fn scope(&self, labels: &TicketLabels<'_>) -> Option<Scope> {
        match self.exempt.contains(labels.em_kind()) {
            true => None,
            false => Scope::of(labels, self.keys.iter().map(String::as_str), self.lacking),
        }
    }
}

/// A label set that is counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabelSet {
    /// Its number: later ones have higher ones, and none is used twice.
    pub id: i64,
    /// How it is counted.
    pub counting: Counting,
    /// Whether all tickets are in its counters, so that rules decide by them; otherwise they are being counted.
    pub is_counted: bool,
}

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
    /// The cap of the request that is judged here, if it has one.
    pub cap: Option<Arc<Cap>>,
}

impl LimitedScope {
    /// The scope that is counted.
    pub fn scope(&self) -> &Scope {
        &self.counter.scope
    }

    /// The maximum in each dimension that some rule names, and the rule that decides it.
    pub fn maxima(&self) -> impl Iterator<Item = (&Dimension, i64, &Rule)> {
        maxima(&self.rules)
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
        let (shape, values, mut page) = (after.shape(), after.values(), Vec::new());
        for (set, rules) in &self.rules {
            let of_set = check_order(set).cmp(&check_order(&keys));
            let decides = self.is_counted(set);
            for (known, by_values) in &rules.shapes {
                let from = match of_set.then_with(|| shape.is_fixed().cmp(known.is_fixed())) {
                    Ordering::Less => continue,
                    Ordering::Equal => Bound::Excluded(&values),
                    Ordering::Greater => Bound::Unbounded,
                };
                let behind = by_values.range::<Values, _>((from, Bound::Unbounded));
                page.extend(behind.take(limit - page.len()).map(|(_, rule)| (&**rule, decides)));
            }
        }
        page
    }

    /// Whether rules of this label set decide.
    fn is_counted(&self, keys: &BTreeSet<String>) -> bool {
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
            Some(LimitedScope { cap, ..decide(rules, counter) })
        };
        self.sets.iter().filter_map(in_set).collect()
    }

    /// A counter with the rules that decide there.
    pub fn of_counter(&self, counter: Counter) -> LimitedScope {
        match self.sets.iter().find(|(set, _)| set.id == counter.label_set_id) {
            Some((_, rules)) => decide(rules, counter),
            None => LimitedScope { counter, rules: Vec::new(), cap: None },
        }
    }
}

fn decide(rules: &RuleSet, counter: Counter) -> LimitedScope {
    let rules = rules.matching(&counter.scope).cloned().collect();
    LimitedScope { counter, rules, cap: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{em::EmInstance, name::Labels};

    fn rule(labels: &[(&str, Option<&str>)], instances: i64) -> Rule {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned))).collect();
        let max = BTreeMap::from([(Dimension::Instances, instances)]);
        Rule { pattern: Pattern::new(labels), mode: LimitMode::Enforced, max }
    }

    fn decided(limits: &Limits, user: &str, creator: &str) -> Vec<(String, Option<i64>)> {
        let labels = Labels::default();
        let em = EmInstance::parse("em", "ecm", "host").unwrap();
        let scopes = limits.scopes(&TicketLabels::new(user, creator, "", &labels, &em));
        let instances =
            |s: &LimitedScope| s.maxima().find(|(d, ..)| **d == Dimension::Instances).map(|(_, max, _)| max);
        scopes.into_iter().map(|s| (s.scope().to_string(), instances(&s))).collect()
    }

    /// With all label sets counted, or all being counted.
    fn limits(is_counted: bool, rules: impl IntoIterator<Item = Rule>) -> Limits {
        let rules: Vec<Rule> = rules.into_iter().collect();
        let wanted = Counting::wanted(rules.iter().map(Rule::label_set).collect(), &BTreeMap::new());
        let sets = (1..).zip(wanted).map(|(id, counting)| LabelSet { id, counting, is_counted }).collect();
        Limits::new(Uuid::nil(), sets, rules)
    }

    #[test]
    fn a_label_set_that_is_being_counted_decides_nothing() {
        for is_counted in [true, false] {
            let limits = limits(is_counted, [rule(&[("user", None)], 2)]);
            assert_eq!(decided(&limits, "hadoop", "IDE"), [("user=hadoop".into(), is_counted.then_some(2))]);
            assert!(limits.rules().all(|(_, decides)| decides == is_counted));
            assert!(limits.locks_users());
        }
        assert!(!limits(true, [rule(&[("creator", None)], 2)]).locks_users());
    }

    #[test]
    fn kinds_whose_policy_leaves_a_label_set_out_do_not_count_there() {
        let kind = Name::parse("em", "ecm").unwrap();
        let policies = BTreeMap::from([(kind.clone(), Policy::new([]))]);
        let rules = [rule(&[("user", None)], 2)];
        let [counting] = Counting::wanted(rules.iter().map(Rule::label_set).collect(), &policies)
            .into_iter()
            .collect::<Vec<_>>()
            .try_into()
            .unwrap();
        assert_eq!(counting.exempt, BTreeSet::from([kind]));
        let limits = Limits::new(Uuid::nil(), vec![LabelSet { id: 1, counting, is_counted: true }], rules);
        assert_eq!(decided(&limits, "hadoop", "IDE"), []);
    }

    #[test]
    fn the_most_specific_rule_of_a_label_set_decides() {
        let both = |user, creator, max| rule(&[("user", user), ("creator", creator)], max);
        let limits = limits(
            true,
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
    fn what_the_most_specific_rule_does_not_name_falls_to_the_next() {
        let both = |user: Option<&str>, max: &[(Dimension, i64)]| Rule {
            max: max.iter().cloned().collect(),
            ..rule(&[("user", user), ("creator", Some("IDE"))], 0)
        };
        let limits = limits(
            true,
            [
                both(None, &[(Dimension::Instances, 9), (Dimension::Cores, 8)]),
                both(Some("hadoop"), &[(Dimension::Instances, 2)]),
            ],
        );
        let (labels, em) = (Labels::default(), EmInstance::parse("em", "ecm", "host").unwrap());
        let of = |user| {
            let scopes = limits.scopes(&TicketLabels::new(user, "IDE", "", &labels, &em));
            let maxima: BTreeMap<_, _> = scopes[0].maxima().map(|(dimension, max, _)| (dimension.key(), max)).collect();
            maxima
        };
        assert_eq!(of("hadoop"), BTreeMap::from([("instances".to_owned(), 2), ("cores".to_owned(), 8)]));
        assert_eq!(of("other"), BTreeMap::from([("instances".to_owned(), 9), ("cores".to_owned(), 8)]));
    }

    #[test]
    fn of_labels_with_a_value_the_engine_type_weighs_most_then_the_user() {
        let three =
            |engine, user, creator, max| rule(&[("engine_type", engine), ("user", user), ("creator", creator)], max);
        let limits = limits(
            true,
            [
                three(None, Some("hadoop"), Some("IDE"), 3),
                three(Some("spark"), None, None, 1),
                three(Some("spark"), None, Some("IDE"), 2),
            ],
        );
        let (labels, em) = (Labels::default(), EmInstance::parse("em", "ecm", "host").unwrap());
        let scopes = limits.scopes(&TicketLabels::new("hadoop", "IDE", "spark", &labels, &em));
        let maxima: Vec<i64> = scopes[0].rules.iter().map(|rule| rule.max[&Dimension::Instances]).collect();
        assert_eq!(maxima, [2, 1, 3]);
    }

    #[test]
    fn other_rules_are_told_apart_from_those_there_are() {
        let of = |user, max| rule(&[("user", Some(user))], max);
        let changes = RuleChanges::between([of("a", 1), of("b", 1), of("c", 1)], &[of("d", 1), of("b", 2), of("a", 1)]);
        let expected =
            RuleChanges { added: vec![of("d", 1)], changed: vec![(of("b", 1), of("b", 2))], removed: vec![of("c", 1)] };
        assert_eq!(changes, expected);
        assert_eq!(RuleChanges::between([of("a", 1)], &[of("a", 1)]), RuleChanges::default());
    }

    #[test]
    fn rules_come_in_pages_of_any_size_in_one_order() {
        let values = [None, Some("a"), Some("b")];
        let mut rules = Vec::new();
        for user in values {
            rules.extend([rule(&[("user", user)], 1), rule(&[("creator", user)], 1)]);
            rules.extend(values.map(|creator| rule(&[("user", user), ("creator", creator)], 1)));
        }
        let all = limits(true, rules.clone());
        let order: Vec<_> = all.rules().collect();
        assert_eq!(order.len(), 15);
        for (number, (after, _)) in order.iter().enumerate() {
            // A rule that has gone marks its place all the same.
            let without = limits(true, rules.iter().filter(|rule| rule != after).cloned());
            for size in 0..order.len() {
                let expected: Vec<_> = order.iter().skip(number + 1).take(size).copied().collect();
                assert_eq!(all.rules_behind(&after.pattern, size), expected);
                assert_eq!(without.rules_behind(&after.pattern, size), expected);
            }
        }
    }

    #[test]
    fn what_has_changed_leaves_the_same_as_reading_all_anew() {
        let of = |user: usize, max| rule(&[("user", Some(&format!("user{user}")))], max);
        let before = limits(true, (0..100).map(|user| of(user, 1)).chain([rule(&[("creator", None)], 5)]));
        let sets: Vec<LabelSet> = before.label_sets().cloned().collect();
        let changes = [
            (of(7, 0).pattern, Some(of(7, 2))),
            (of(100, 0).pattern, Some(of(100, 3))),
            (of(8, 0).pattern, None),
            (rule(&[("creator", None)], 0).pattern, None),
        ];
        let after = before.changed(Uuid::from_u128(1), sets.clone(), changes);
        let max = |user| {
            if user == 7 {
                2
            } else if user == 100 {
                3
            } else {
                1
            }
        };
        let anew = (0..101).filter(|user| *user != 8).map(|user| of(user, max(user)));
        let anew = Limits::new(Uuid::from_u128(1), sets, anew);
        assert_eq!(after.rules().collect::<Vec<_>>(), anew.rules().collect::<Vec<_>>());
        for user in ["user7", "user8", "user100", "user1"] {
            assert_eq!(decided(&after, user, "IDE"), decided(&anew, user, "IDE"));
        }
        assert_eq!(before.rules().count(), 101, "who counts by them still does");
    }

    #[test]
    fn label_sets_are_checked_creator_first_then_user_then_larger_ones() {
        let limits = limits(
            true,
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
                ("tenant=".into(), Some(9)),
                ("creator=IDE,user=hadoop".into(), Some(3)),
            ]
        );
        assert_eq!(decided(&limits, "hadoop", "x")[0], ("creator=x".into(), None), "counted, but not limited");
    }
}
