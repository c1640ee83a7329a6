//! Scopes: a set of labels with their values, and what the tickets that carry them hold together.

use std::{collections::BTreeMap, fmt, sync::Arc};

use super::{
    em::EmInstance,
    name::{Labels, Name},
    resource::{Dimension, Resource, ResourceError},
};

/// The label that every ticket has by its user.
pub const USER: &str = "user";
/// The label that every ticket has by its creator.
pub const CREATOR: &str = "creator";
/// The label that a ticket has by its engine's type, if it names one.
pub const ENGINE_TYPE: &str = "engine_type";

/// The derived label for what stands before the version in an engine's type: `spark` of `spark-3.2.1`.
pub const ENGINE_FAMILY: &str = "engine_family";
/// The derived label for the application name of the EM.
const EM_APPLICATION: &str = "em_application";
/// The derived label for the instance of the EM.
pub const EM: &str = "em";

/// The derived label for the Yarn queue that a resource names.
pub const QUEUE: &str = "queue";
/// The derived label for the Kubernetes namespace that a resource names.
pub const NAMESPACE: &str = "namespace";

/// Labels that no request may carry: they are a ticket's by its own fields, or derived from these.
pub const RESERVED: [&str; 8] = [USER, CREATOR, ENGINE_TYPE, ENGINE_FAMILY, EM_APPLICATION, EM, QUEUE, NAMESPACE];

/// The label without which a dimension is not counted: amounts of two queues, or of two namespaces, are never one sum.
pub fn label_of(dimension: &Dimension) -> Option<&'static str> {
    match dimension {
        Dimension::QueueMemory | Dimension::QueueCores | Dimension::QueueInstances => Some(QUEUE),
        Dimension::KubernetesMemory | Dimension::KubernetesMillicores => Some(NAMESPACE),
        Dimension::Memory | Dimension::Cores | Dimension::Instances | Dimension::Custom(_) => None,
    }
}

/// A maximum is said for a dimension that the labels do not count.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("names {dimension:?}, which each {label} has of its own: add the label {label:?}, with a value or in each")]
pub struct Uncounted {
    /// The dimension, as limits name it.
    dimension: String,
    /// The label that it is counted by.
    label: &'static str,
}

impl Uncounted {
    /// Whether labels count all of some dimensions.
    ///
    /// # Errors
    /// The first that they do not.
    pub fn check<'a>(
        mut dimensions: impl Iterator<Item = &'a Dimension>,
        has_label: impl Fn(&str) -> bool,
    ) -> Result<(), Self> {
        let uncounted = |dimension: &Dimension| {
            let label = label_of(dimension).filter(|label| !has_label(label))?;
            Some(Self { dimension: dimension.key(), label })
        };
        dimensions.find_map(uncounted).map_or(Ok(()), Err)
    }
}

/// All labels of a ticket: those of its own fields, those that came with the request, and those that are derived. All of them stay
/// the same as long as the ticket lives: what it uses is of the type that was granted, and in the same queue or namespace.
#[derive(Debug, Clone)]
pub struct TicketLabels<'a> {
    user: &'a str,
    creator: &'a str,
    engine_type: &'a str,
    labels: &'a Labels,
    em: &'a EmInstance,
    resource: &'a Resource,
}

impl<'a> TicketLabels<'a> {
    /// Of a ticket or a request; of `resource`, only the queue or namespace counts.
    pub fn new(
        user: &'a str,
        creator: &'a str,
        engine_type: &'a str,
        labels: &'a Labels,
        em: &'a EmInstance,
        resource: &'a Resource,
    ) -> Self {
        Self { user, creator, engine_type, labels, em, resource }
    }

    /// The application name of the EM: its policy decides which limits apply.
    pub fn em_kind(&self) -> &'a Name {
        &self.em.application_name
    }

    /// The value of a label, if the ticket carries it.
    pub fn get(&self, key: &str) -> Option<&'a str> {
        match key {
            USER => Some(self.user),
            CREATOR => Some(self.creator),
            ENGINE_TYPE => Some(self.engine_type).filter(|value| !value.is_empty()),
            ENGINE_FAMILY => self.engine_type.split('-').next().filter(|value| !value.is_empty()),
            EM_APPLICATION => Some(self.em.application_name.as_str()),
            EM => Some(self.em.instance.as_str()),
            QUEUE => self.resource.queue_name(),
            NAMESPACE => self.resource.namespace(),
            _ => self.carried(key),
        }
    }

    /// The value of a label that came with the request.
    fn carried(&self, key: &str) -> Option<&'a str> {
        self.labels.as_map().get(key).map(String::as_str)
    }
}

/// Where a ticket counts that lacks a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lacking {
    /// Nowhere in the label set: so the first release counted.
    Skipped,
    /// In the scope with the value "" there, but nowhere in the label set if the label is the engine family: so earlier releases counted.
    EmptyButFamily,
    /// In the scope with the value "" there. A request that leaves something out escapes no limit.
    Empty,
}

/// How amounts in queues and namespaces count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Queues {
    /// All together, whatever the labels are: so earlier releases counted.
    Summed,
    /// Each on its own: where the labels name the queue or namespace, and nowhere else.
    Apart,
}

/// Labels with their values: what a counter is kept for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scope(Arc<BTreeMap<String, String>>);

impl Scope {
    /// The scope with these labels.
    pub fn new(labels: BTreeMap<String, String>) -> Self {
        Self(Arc::new(labels))
    }

    /// The scope of a ticket in a label set, if it counts there. A ticket that uses no queue or namespace counts in no scope of one.
    pub fn of<'k>(
        labels: &TicketLabels<'_>,
        keys: impl Iterator<Item = &'k str>,
        lacking: Lacking,
        queues: Queues,
    ) -> Option<Self> {
        // Before queues were told apart, these labels were like any other.
        let is_derived = |key| matches!(key, QUEUE | NAMESPACE) && queues == Queues::Apart;
        let find = |key| match key {
            QUEUE | NAMESPACE if !is_derived(key) => labels.carried(key),
            _ => labels.get(key),
        };
        let value = |key: &'k str| match (find(key), lacking) {
            (None, Lacking::Skipped) => None,
            (None, Lacking::EmptyButFamily) if key == ENGINE_FAMILY => None,
            // It uses nothing there: a limit on it is not escaped.
            (None, _) if is_derived(key) => None,
            (value, _) => Some(value.unwrap_or_default()),
        };
        let pairs: Option<BTreeMap<String, String>> =
            keys.map(|key| Some((key.to_owned(), value(key)?.to_owned()))).collect();
        pairs.map(Self::new)
    }

    /// Label by label.
    pub fn labels(&self) -> &BTreeMap<String, String> {
        &self.0
    }

    /// The names of its labels, for people.
    pub fn keys(&self) -> String {
        self.0.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
    }

    /// Whether a dimension is counted here, where queues are told apart.
    pub fn counts(&self, dimension: &Dimension) -> bool {
        label_of(dimension).is_none_or(|label| self.0.contains_key(label))
    }
}

/// A counter: a scope, as one label set counts it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Counter {
    /// The number of the label set. While another way to count the same labels is being prepared, there are two.
    pub label_set_id: i64,
    /// What is counted.
    pub scope: Scope,
}

/// For people: not to be taken apart again.
impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (key, value)) in self.0.iter().enumerate() {
            write!(f, "{}{key}={value}", if number == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// A sum over resources of any types, dimension by dimension. Never negative.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally(BTreeMap<Dimension, i64>);

impl Tally {
    /// A tally with these amounts; zeros are left out.
    pub fn new(amounts: impl IntoIterator<Item = (Dimension, i64)>) -> Self {
        Self(amounts.into_iter().filter(|(_, amount)| *amount != 0).collect())
    }

    /// How much there is of a dimension.
    pub fn get(&self, dimension: &Dimension) -> i64 {
        self.0.get(dimension).copied().unwrap_or(0)
    }

    /// Dimension by dimension, without zeros.
    pub fn amounts(&self) -> impl Iterator<Item = (&Dimension, i64)> {
        self.0.iter().map(|(dimension, amount)| (dimension, *amount))
    }

    /// Counts the amounts of a resource in.
    ///
    /// # Errors
    /// [`ResourceError::Overflow`]; nothing is counted then.
    pub fn add(
        &mut self,
        amounts: impl IntoIterator<Item = (Dimension, i64)>,
        times: i64,
    ) -> Result<(), ResourceError> {
        let mut sums = self.0.clone();
        for (dimension, amount) in amounts {
            let sum = sums.get(&dimension).copied().unwrap_or(0);
            let sum = amount.checked_mul(times).and_then(|amount| sum.checked_add(amount));
            let sum = sum.ok_or_else(|| ResourceError::Overflow { dimension: dimension.clone() })?;
            match sum {
                0 => drop(sums.remove(&dimension)),
                _ => drop(sums.insert(dimension, sum)),
            }
        }
        self.0 = sums;
        Ok(())
    }

    /// Counts a resource in, as far as numbers go: for what is only kept free, never for what is held.
    pub fn add_up(&mut self, resource: &Resource) {
        for (dimension, amount) in resource.amounts().filter(|(_, amount)| *amount != 0) {
            let sum = self.0.entry(dimension).or_default();
            *sum = sum.saturating_add(amount);
        }
    }

    /// Reverts [`Tally::add_up`]; returns false, and changes nothing, where a sum may have been cut off.
    pub fn take_off(&mut self, resource: &Resource) -> bool {
        let amounts = || resource.amounts().filter(|(_, amount)| *amount != 0);
        if amounts().any(|(dimension, amount)| !(amount..i64::MAX).contains(&self.get(&dimension))) {
            return false;
        }
        for (dimension, amount) in amounts() {
            match self.get(&dimension) - amount {
                0 => drop(self.0.remove(&dimension)),
                rest => drop(self.0.insert(dimension, rest)),
            }
        }
        true
    }

    /// Counts the amounts of a resource out.
    ///
    /// # Errors
    /// [`ResourceError::BelowZero`] if they were not counted in; nothing is counted then.
    pub fn minus(&mut self, amounts: impl IntoIterator<Item = (Dimension, i64)>) -> Result<(), ResourceError> {
        let mut sums = self.0.clone();
        for (dimension, taken) in amounts {
            let from = sums.get(&dimension).copied().unwrap_or(0);
            match from - taken {
                rest if rest < 0 => return Err(ResourceError::BelowZero { dimension, from, taken }),
                0 => drop(sums.remove(&dimension)),
                rest => drop(sums.insert(dimension, rest)),
            }
        }
        self.0 = sums;
        Ok(())
    }

    /// Whether nothing is counted.
    pub fn is_zero(&self) -> bool {
        self.0.is_empty()
    }
}

/// What the live tickets of a scope hold together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// What engines use.
    pub used: Tally,
    /// What is granted and not yet in use.
    pub locked: Tally,
}

impl Usage {
    /// Whether nothing is held.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// What a scope's row says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoredUsage {
    /// What is held.
    pub usage: Usage,
    /// It grows with each commit that changes that.
    pub version: i64,
}
