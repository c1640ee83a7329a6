//! Scopes: combinations of label values, the labels of a ticket, and the counters of both.
//!
//! [`Scope::of`] selects the scope of a ticket in a label set. [`Tally`] sums amounts of tickets and never becomes
//! negative. Callers: limits, the assessment, the ledger and the store.

use std::{collections::BTreeMap, fmt, sync::Arc};

use super::{
    em::EmInstance,
    name::{Labels, Name},
    resource::{Dimension, Resource, ResourceError},
};

/// Label of every ticket: its user.
pub const USER: &str = "user";
/// Label of every ticket: its creator.
pub const CREATOR: &str = "creator";
/// Label of a ticket with an engine type.
pub const ENGINE_TYPE: &str = "engine_type";

/// Derived label: the part of the engine type before the version, such as `spark` of `spark-3.2.1`.
pub const ENGINE_FAMILY: &str = "engine_family";
/// Derived label: the application name of the EM.
pub const EM_APPLICATION: &str = "em_application";
/// Derived label: the instance of the EM.
pub const EM: &str = "em";

/// Derived label: the YARN queue that a resource names.
pub const QUEUE: &str = "queue";
/// Derived label: the Kubernetes namespace that a resource names.
pub const NAMESPACE: &str = "namespace";

/// Labels that no request may carry, because fields of the ticket define them.
pub const RESERVED: [&str; 8] = [USER, CREATOR, ENGINE_TYPE, ENGINE_FAMILY, EM_APPLICATION, EM, QUEUE, NAMESPACE];

/// Returns the label that a dimension requires to be counted, because amounts of two queues or namespaces are never summed.
pub fn label_of(dimension: &Dimension) -> Option<&'static str> {
    match dimension {
        Dimension::QueueMemory | Dimension::QueueCores | Dimension::QueueInstances => Some(QUEUE),
        Dimension::KubernetesMemory | Dimension::KubernetesMillicores => Some(NAMESPACE),
        Dimension::Memory | Dimension::Cores | Dimension::Instances | Dimension::Waiting | Dimension::Custom(_) => None,
    }
}

/// Error: a maximum for a dimension that the label set does not count.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UncountedDimension {
    /// Amounts of two queues or namespaces are never summed.
    #[error("names {dimension:?}, which each {label} has of its own: add the label {label:?}, with a value or in each")]
    LabelRequired {
        /// Key of the dimension.
        dimension: String,
        /// Label that the dimension requires.
        label: &'static str,
    },
    /// A waiting request may be granted on another EM.
    #[error("names \"waiting\" with the label {label:?}: a waiting request has no EM yet; name it with other labels")]
    WaitingAtEm {
        /// Label of an EM.
        label: &'static str,
    },
}

impl UncountedDimension {
    /// Checks that a label set counts all dimensions.
    ///
    /// # Errors
    /// [`UncountedDimension`] for the first dimension that it does not count.
    pub fn check<'a>(
        mut dimensions: impl Iterator<Item = &'a Dimension>,
        has_label: impl Fn(&str) -> bool,
    ) -> Result<(), Self> {
        let uncounted = |dimension: &Dimension| {
            if *dimension == Dimension::Waiting {
                return [EM, EM_APPLICATION]
                    .into_iter()
                    .find(|label| has_label(label))
                    .map(|label| Self::WaitingAtEm { label });
            }
            let label = label_of(dimension).filter(|label| !has_label(label))?;
            Some(Self::LabelRequired { dimension: dimension.key(), label })
        };
        dimensions.find_map(uncounted).map_or(Ok(()), Err)
    }
}

/// All labels of a ticket: from its fields, from the request, and derived ones. All of them are constant while the ticket
/// lives, because its use keeps the granted type, queue and namespace.
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
    /// Returns the labels of a ticket or request. Only the queue or namespace of `resource` is used.
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

    /// Returns the application name of the EM, whose policy determines the limits.
    pub fn em_kind(&self) -> &'a Name {
        &self.em.application_name
    }

    /// Returns the value of a label, if the ticket has it.
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

    /// Returns the value of a label that the request carried.
    fn carried(&self, key: &str) -> Option<&'a str> {
        self.labels.as_map().get(key).map(String::as_str)
    }
}

/// Label values that a counter belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scope(Arc<BTreeMap<String, String>>);

impl Scope {
    /// Whether the scope depends on the EM of a ticket.
    pub fn names_em(&self) -> bool {
        self.0.keys().any(|label| label == EM || label == EM_APPLICATION)
    }

    /// Whether the tickets of the scope are those of one user.
    pub fn names_user(&self) -> bool {
        self.0.contains_key(USER)
    }

    /// Creates the scope with these labels.
    pub fn new(labels: BTreeMap<String, String>) -> Self {
        Self(Arc::new(labels))
    }

    /// Returns the scope of a ticket in a label set; `None` if it does not count there. A ticket without a queue or
    /// namespace counts in no scope of one. Without another label it counts in the scope with the value "", so that a
    /// request without the label does not escape the limit.
    pub fn of<'k>(labels: &TicketLabels<'_>, keys: impl Iterator<Item = &'k str>) -> Option<Self> {
        let value = |key: &'k str| match labels.get(key) {
            // The ticket uses nothing there, so no limit is escaped.
            None if matches!(key, QUEUE | NAMESPACE) => None,
            value => Some(value.unwrap_or_default()),
        };
        let pairs: Option<BTreeMap<String, String>> =
            keys.map(|key| Some((key.to_owned(), value(key)?.to_owned()))).collect();
        pairs.map(Self::new)
    }

    /// Returns the labels with their values.
    pub fn labels(&self) -> &BTreeMap<String, String> {
        &self.0
    }

    /// Returns the label names, for display.
    pub fn keys(&self) -> String {
        self.0.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
    }

    /// Returns whether the scope counts a dimension: amounts in external queues count only where the labels name the queue
    /// or namespace.
    pub fn counts(&self, dimension: &Dimension) -> bool {
        label_of(dimension).is_none_or(|label| self.0.contains_key(label))
    }
}

/// A counter: a scope in one label set.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ScopeCounter {
    /// Id of the label set. While a new way of counting the same labels is prepared, the labels have two ids.
    pub label_set_id: i64,
    /// The counted scope.
    pub scope: Scope,
}

/// For display; not parsed.
impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (key, value)) in self.0.iter().enumerate() {
            write!(f, "{}{key}={value}", if number == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// A sum of resources of any types, per dimension. Never negative.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally(BTreeMap<Dimension, i64>);

impl Tally {
    /// Creates a tally; zeros are omitted.
    pub fn new(amounts: impl IntoIterator<Item = (Dimension, i64)>) -> Self {
        Self(amounts.into_iter().filter(|(_, amount)| *amount != 0).collect())
    }

    /// Returns the amount of a dimension.
    pub fn get(&self, dimension: &Dimension) -> i64 {
        self.0.get(dimension).copied().unwrap_or(0)
    }

    /// Returns the amounts that are not zero.
    pub fn amounts(&self) -> impl Iterator<Item = (&Dimension, i64)> {
        self.0.iter().map(|(dimension, amount)| (dimension, *amount))
    }

    /// Adds amounts, multiplied by `times`.
    ///
    /// # Errors
    /// [`ResourceError::Overflow`]; the tally is then unchanged.
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

    /// Adds a resource with saturation; only for reservations, never for stored sums.
    pub fn add_up(&mut self, resource: &Resource) {
        for (dimension, amount) in resource.amounts().filter(|(_, amount)| *amount != 0) {
            let sum = self.0.entry(dimension).or_default();
            *sum = sum.saturating_add(amount);
        }
    }

    /// Reverts [`Tally::add_up`]. Returns false, without a change, if a sum may have saturated.
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

    /// Subtracts amounts.
    ///
    /// # Errors
    /// [`ResourceError::BelowZero`] if the amounts exceed the sum; the tally is then unchanged.
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

    /// Returns whether the tally is empty.
    pub fn is_zero(&self) -> bool {
        self.0.is_empty()
    }
}

/// Sums of the live tickets of a scope.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScopeHoldings {
    /// Sum used by engines.
    pub used: Tally,
    /// Sum granted and not yet confirmed.
    pub locked: Tally,
}

impl ScopeHoldings {
    /// Returns the sum of both in one dimension.
    pub fn held(&self, dimension: &Dimension) -> i64 {
        // Both are sums of granted amounts, so their sum does not overflow.
        self.used.get(dimension).saturating_add(self.locked.get(dimension))
    }

    /// Returns whether both sums are zero.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// Counters in a scope's row.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoredScopeHoldings {
    /// Sums of the live tickets.
    pub usage: ScopeHoldings,
    /// Row version; increases with each commit that changes the sums.
    pub version: i64,
}
