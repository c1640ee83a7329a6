//! Rules: what they are for, how much they allow, and which of them is found for a counter.

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
    scope::{CREATOR, ENGINE_TYPE, Scope, USER, Uncounted},
};

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
pub(super) struct RuleSet {
    /// The most specific first.
    shapes: Vec<(Shape, ByValues)>,
}

impl RuleSet {
    pub fn insert(&mut self, rule: Arc<Rule>) {
        let (shape, values) = (rule.pattern.shape(), rule.pattern.values());
        let at = self.find(&shape).unwrap_or_else(|at| {
            self.shapes.insert(at, (shape, ByValues::default()));
            at
        });
        if let Some((_, rules)) = self.shapes.get_mut(at) {
            rules.insert_mut(values, rule);
        }
    }

    pub fn remove(&mut self, pattern: &Pattern) {
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

    /// The first `limit` rules behind one, whose label set stands before or behind this one, or is the same.
    pub fn behind(&self, of_set: Ordering, after: &Pattern, limit: usize) -> Vec<&Rule> {
        let (shape, values, mut page) = (after.shape(), after.values(), Vec::new());
        for (known, by_values) in &self.shapes {
            let from = match of_set.then_with(|| shape.is_fixed().cmp(known.is_fixed())) {
                Ordering::Less => continue,
                Ordering::Equal => Bound::Excluded(&values),
                Ordering::Greater => Bound::Unbounded,
            };
            let behind = by_values.range::<Values, _>((from, Bound::Unbounded));
            page.extend(behind.take(limit - page.len()).map(|(_, rule)| &**rule));
        }
        page
    }

    pub fn is_empty(&self) -> bool {
        self.shapes.is_empty()
    }

    /// The rules that match a scope, the most specific first.
    pub fn matching(&self, scope: &Scope) -> impl Iterator<Item = &Arc<Rule>> {
        self.shapes.iter().filter_map(|(shape, rules)| rules.get(&shape.values(scope)))
    }

    /// The most specific first, of these by their values.
    pub fn rules(&self) -> impl Iterator<Item = &Arc<Rule>> {
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
pub(super) fn check_order(keys: &BTreeSet<String>) -> (usize, u8, Vec<&str>) {
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

    /// Whether all dimensions that it names are counted by its labels.
    ///
    /// # Errors
    /// [`Uncounted`] for the first that is not.
    pub fn check_labels(&self) -> Result<(), Uncounted> {
        Uncounted::check(self.max.keys(), |label| self.pattern.0.contains_key(label))
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

impl RuleRecord {
    /// Whether it is this rule that this principal set last: who asks for it once more, because the answer was lost, finds his own.
    pub fn is_set_already(&self, rule: &Rule, by: &Principal) -> bool {
        self.rule == *rule && self.updated_by == by.as_str()
    }
}

/// What a change expects to find.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expected {
    /// Whatever there is.
    Anything,
    /// No such rule.
    Nothing,
    /// The rule as it was when it had this etag.
    Etag(String),
}

impl Expected {
    /// Whether that is what was found for `pattern`.
    ///
    /// # Errors
    /// [`Rejection::LimitChanged`] if it is not.
    pub fn check(&self, pattern: &Pattern, found: Option<&RuleRecord>) -> Result<(), Rejection> {
        let is_there = match (self, found) {
            (Self::Anything, _) | (Self::Nothing, None) => true,
            (Self::Etag(etag), Some(found)) => *etag == found.etag,
            (Self::Nothing, Some(_)) | (Self::Etag(_), None) => false,
        };
        let last = || found.map(|found| (found.updated_by.clone(), found.update_time));
        if is_there { Ok(()) } else { Err(Rejection::LimitChanged { limit: pattern.to_string(), last: last() }) }
    }
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
