//! Rules: patterns of labels with maxima, and the lookup of the rules for a counter.
//!
//! A lookup costs one map access per shape of pattern, regardless of the number of rules. Copies of a rule set share
//! unchanged parts. The ranks of the labels equal those of Linkis's configuration. Never: knows counters or tickets.
//! Callers: `maximum` and `usage`, the store, and the limit service, for preconditions and differences.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet},
    fmt,
    ops::Bound,
    sync::Arc,
};

use rpds::RedBlackTreeMapSync;
use time::OffsetDateTime;

use crate::{
    limit_mode::LimitMode,
    operation::Rejection,
    principal::Principal,
    resource::Dimension,
    scope::{CREATOR, ENGINE_TYPE, Scope, TicketLabels, USER, UncountedDimension},
};

/// Label pattern of a rule: each label with a value, or `None` for "each value separately".
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LabelPattern(BTreeMap<String, Option<String>>);

impl LabelPattern {
    /// Creates a pattern from its labels.
    pub fn new(labels: BTreeMap<String, Option<String>>) -> Self {
        Self(labels)
    }

    /// Returns the labels.
    pub fn labels(&self) -> &BTreeMap<String, Option<String>> {
        &self.0
    }

    /// Returns the label names.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Returns whether labels match: those with a value in the pattern have that value.
    pub fn matches(&self, labels: &TicketLabels<'_>) -> bool {
        self.0.iter().all(|(key, value)| value.is_none() || labels.get(key) == value.as_deref())
    }

    /// Compares patterns of any labels: more values precede fewer, then more labels precede fewer. Then the ranks of the labels with
    /// values decide, and after them those of the others.
    pub fn by_specificity(&self, other: &Self) -> Ordering {
        let sizes = |pattern: &Self| (pattern.0.values().flatten().count(), pattern.0.len());
        let in_order = |pattern: &Self| {
            let mut keys: Vec<_> =
                pattern.0.iter().map(|(key, value)| (value.is_none(), rank(key).0, key.clone())).collect();
            keys.sort();
            keys
        };
        sizes(other).cmp(&sizes(self)).then_with(|| in_order(self).cmp(&in_order(other))).then_with(|| self.cmp(other))
    }

    /// Returns which labels have values, the label with the highest rank first. `hadoop` + `IDE` precedes `hadoop` + each,
    /// which precedes each + `IDE`, which precedes each + each.
    fn shape(&self) -> PatternShape {
        let mut keys: Vec<_> = self.0.iter().collect();
        keys.sort_by_key(|(key, _)| rank(key));
        PatternShape(keys.into_iter().map(|(key, value)| (key.clone(), value.is_some())).collect())
    }

    /// Returns the label values in the order of the label names.
    fn values(&self) -> LabelValues {
        self.0.values().flatten().cloned().collect()
    }
}

/// Labels of a pattern, and which of them have a value.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PatternShape(Vec<(String, bool)>);

impl PatternShape {
    /// Returns the values that a rule of this shape would name to match a scope.
    fn values(&self, scope: &Scope) -> LabelValues {
        let is_fixed = |key: &str| self.0.iter().any(|(known, is_fixed)| *is_fixed && known == key);
        scope.labels().iter().filter(|(key, _)| is_fixed(key)).map(|(_, value)| value.clone()).collect()
    }

    fn is_fixed(&self) -> impl Iterator<Item = bool> {
        self.0.iter().map(|(_, is_fixed)| *is_fixed)
    }
}

/// Values of some labels, in the order of the label names.
type LabelValues = Vec<String>;

/// Rules by their values. Copies share unchanged parts.
type RulesByValues = RedBlackTreeMapSync<LabelValues, Arc<Rule>>;

/// Rules of one label set, by their values. A lookup costs one map access per shape, regardless of the number of rules.
#[derive(Debug, Clone, Default)]
pub(super) struct RuleSet {
    /// Rules by shape, the most specific first.
    shapes: Vec<(PatternShape, RulesByValues)>,
}

impl RuleSet {
    pub fn insert(&mut self, rule: Arc<Rule>) {
        let (shape, values) = (rule.pattern.shape(), rule.pattern.values());
        let at = self.find(&shape).unwrap_or_else(|at| {
            self.shapes.insert(at, (shape, RulesByValues::default()));
            at
        });
        if let Some((_, rules)) = self.shapes.get_mut(at) {
            rules.insert_mut(values, rule);
        }
    }

    pub fn remove(&mut self, pattern: &LabelPattern) {
        let Ok(at) = self.find(&pattern.shape()) else { return };
        if let Some((_, rules)) = self.shapes.get_mut(at) {
            rules.remove_mut(&pattern.values());
            if rules.is_empty() {
                self.shapes.remove(at);
            }
        }
    }

    /// Returns the index of a shape, or the index to insert it at.
    fn find(&self, shape: &PatternShape) -> Result<usize, usize> {
        self.shapes.binary_search_by(|(known, _)| shape.is_fixed().cmp(known.is_fixed()))
    }

    /// Returns at most `limit` rules after the pattern `after`. `of_set` compares this label set with that of `after`.
    pub fn behind(&self, of_set: Ordering, after: &LabelPattern, limit: usize) -> Vec<&Rule> {
        let (shape, values, mut page) = (after.shape(), after.values(), Vec::new());
        for (known, by_values) in &self.shapes {
            let from = match of_set.then_with(|| shape.is_fixed().cmp(known.is_fixed())) {
                Ordering::Less => continue,
                Ordering::Equal => Bound::Excluded(&values),
                Ordering::Greater => Bound::Unbounded,
            };
            let behind = by_values.range::<LabelValues, _>((from, Bound::Unbounded));
            page.extend(behind.take(limit - page.len()).map(|(_, rule)| &**rule));
        }
        page
    }

    pub fn is_empty(&self) -> bool {
        self.shapes.is_empty()
    }

    /// Returns the rules that match a scope, the most specific first.
    pub fn matching(&self, scope: &Scope) -> impl Iterator<Item = &Arc<Rule>> {
        self.shapes.iter().filter_map(|(shape, rules)| rules.get(&shape.values(scope)))
    }

    /// Returns all rules: the most specific shape first, then by values.
    pub fn rules(&self) -> impl Iterator<Item = &Arc<Rule>> {
        self.shapes.iter().flat_map(|(_, rules)| rules.values())
    }
}

/// For display; not parsed.
impl fmt::Display for LabelPattern {
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

/// Returns the rank of a label: engine type, user, creator as in Linkis, then the others by name.
fn rank(key: &str) -> (u8, &str) {
    match key {
        ENGINE_TYPE => (0, key),
        USER => (1, key),
        CREATOR => (2, key),
        _ => (3, key),
    }
}

/// Check order of label sets: smaller sets first; creator, then user, then the others.
pub(super) fn check_order(keys: &BTreeSet<String>) -> (usize, u8, Vec<&str>) {
    let first = match keys.iter().next().map(String::as_str) {
        Some(CREATOR) => 0,
        Some(USER) => 1,
        _ => 2,
    };
    (keys.len(), first, keys.iter().map(String::as_str).collect())
}

/// One limit: maximum amounts for the tickets of a pattern, and the mode above the maximum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Tickets that the rule applies to. The pattern identifies the rule.
    pub pattern: LabelPattern,
    /// Effect above the maximum.
    pub mode: LimitMode,
    /// Maximum per dimension.
    pub max: BTreeMap<Dimension, i64>,
    /// Guarantee per dimension, of those with a maximum: within it, waiting requests go first.
    pub guarantee: BTreeMap<Dimension, i64>,
}

impl Rule {
    /// Returns the label names.
    pub fn label_set(&self) -> BTreeSet<String> {
        self.pattern.keys().map(str::to_owned).collect()
    }

    /// Checks that each guarantee is at most the maximum of its dimension.
    ///
    /// # Errors
    /// [`WrongGuarantee`] for the first guarantee above it.
    pub fn check_guarantee(&self) -> Result<(), WrongGuarantee> {
        let wrong = |(dimension, guarantee): (&Dimension, &i64)| {
            let key = || dimension.key();
            match self.max.get(dimension) {
                _ if *dimension == Dimension::Waiting => Some(WrongGuarantee::OfWaiting),
                None => Some(WrongGuarantee::WithoutMaximum { dimension: key() }),
                Some(max) if guarantee > max => {
                    Some(WrongGuarantee::AboveMaximum { dimension: key(), guarantee: *guarantee, max: *max })
                }
                Some(_) => None,
            }
        };
        self.guarantee.iter().find_map(wrong).map_or(Ok(()), Err)
    }

    /// Checks that the label set counts all dimensions of the rule.
    ///
    /// # Errors
    /// [`UncountedDimension`] for the first dimension that it does not count.
    pub fn check_labels(&self) -> Result<(), UncountedDimension> {
        UncountedDimension::check(self.max.keys(), |label| self.pattern.0.contains_key(label))
    }
}

/// Error: a guarantee that the maximum of the rule excludes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WrongGuarantee {
    /// The rule has no maximum for the dimension.
    #[error("names {dimension:?}, which max does not name: a guarantee needs a maximum")]
    WithoutMaximum {
        /// Key of the dimension.
        dimension: String,
    },
    /// The guarantee is above the maximum.
    #[error("has {guarantee} for {dimension:?}; must be at most its maximum of {max}")]
    AboveMaximum {
        /// Key of the dimension.
        dimension: String,
        /// The guarantee.
        guarantee: i64,
        /// The maximum.
        max: i64,
    },
    /// The dimension counts waiting requests.
    #[error("names \"waiting\": a guarantee is for amounts of tickets")]
    OfWaiting,
}

/// A stored rule with its latest change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleRecord {
    /// The rule.
    pub rule: Rule,
    /// Name of the caller that set it last.
    pub updated_by: String,
    /// Time of the latest change, by the database clock.
    pub update_time: OffsetDateTime,
    /// Identifier of this state; opaque, changes with every write.
    pub etag: String,
}

impl RuleRecord {
    /// Returns whether this principal set exactly this rule last. A repeated call, after a lost reply, then succeeds.
    pub fn is_set_already(&self, rule: &Rule, by: &Principal) -> bool {
        self.rule == *rule && self.updated_by == by.as_str()
    }
}

/// Precondition of a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RulePrecondition {
    /// No condition.
    Anything,
    /// The rule does not exist.
    Nothing,
    /// The rule has this etag.
    Etag(String),
}

impl RulePrecondition {
    /// Checks the precondition against the stored rule of `pattern`.
    ///
    /// # Errors
    /// [`Rejection::LimitChanged`] if it does not hold.
    pub fn check(&self, pattern: &LabelPattern, found: Option<&RuleRecord>) -> Result<(), Rejection> {
        let is_there = match (self, found) {
            (Self::Anything, _) | (Self::Nothing, None) => true,
            (Self::Etag(etag), Some(found)) => *etag == found.etag,
            (Self::Nothing, Some(_)) | (Self::Etag(_), None) => false,
        };
        let last = || found.map(|found| (found.updated_by.clone(), found.update_time));
        if is_there { Ok(()) } else { Err(Rejection::LimitChanged { limit: pattern.to_string(), last: last() }) }
    }
}

/// Difference between the stored rules and their replacement.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuleChanges {
    /// New rules.
    pub added: Vec<Rule>,
    /// Rules with another maximum or mode: before and after.
    pub changed: Vec<(Rule, Rule)>,
    /// Deleted rules, in pattern order.
    pub removed: Vec<Rule>,
}

impl RuleChanges {
    /// Compares the stored rules with `after`, whose patterns are unique.
    pub fn between(before: impl IntoIterator<Item = Rule>, after: &[Rule]) -> Self {
        let mut before: BTreeMap<LabelPattern, Rule> =
            before.into_iter().map(|rule| (rule.pattern.clone(), rule)).collect();
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
