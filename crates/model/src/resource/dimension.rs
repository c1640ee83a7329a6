//! Dimensions: the quantities that a resource counts, with their names and keys.
//!
//! Limits, history lines and metrics contain the names, so a name never changes. Units are fixed per dimension.

use std::fmt;
use std::sync::Arc;

/// One counted quantity.
///
/// `Display` writes the name used in messages: `memory`, `queue_cores`, ..., or the custom name itself.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dimension {
    /// Memory of EMs and drivers, in bytes.
    Memory,
    /// Virtual cores of EMs and drivers, as integers.
    Cores,
    /// Number of engines.
    Instances,
    /// Memory of a YARN queue, in bytes.
    QueueMemory,
    /// Virtual cores of a YARN queue, as integers.
    QueueCores,
    /// Instances in a YARN queue.
    QueueInstances,
    /// Memory of a Kubernetes namespace, in bytes.
    KubernetesMemory,
    /// CPU of a Kubernetes namespace, in thousandths of a core (Linkis calls them cores).
    KubernetesMillicores,
    /// Number of waiting requests. Only limits name it; no resource has an amount of it.
    Waiting,
    /// A custom dimension of a Special; its unit is defined by its users.
    Custom(Arc<str>),
}

/// Number of dimensions that are not custom.
pub(super) const FIXED: usize = 8;

impl Dimension {
    /// Returns the index in the array of fixed amounts, below [`FIXED`]; `None` for a custom dimension.
    pub(super) const fn slot(&self) -> Option<usize> {
        match self {
            Self::Memory => Some(0),
            Self::Cores => Some(1),
            Self::Instances => Some(2),
            Self::QueueMemory => Some(3),
            Self::QueueCores => Some(4),
            Self::QueueInstances => Some(5),
            Self::KubernetesMemory => Some(6),
            Self::KubernetesMillicores => Some(7),
            Self::Waiting | Self::Custom(_) => None,
        }
    }

    /// Returns whether the dimension belongs to a named queue or namespace.
    pub(super) const fn is_external(&self) -> bool {
        matches!(
            self,
            Self::QueueMemory
                | Self::QueueCores
                | Self::QueueInstances
                | Self::KubernetesMemory
                | Self::KubernetesMillicores
        )
    }

    /// Returns whether the unit is bytes, so that a size such as `20g` is accepted.
    #[must_use]
    pub const fn is_size(&self) -> bool {
        matches!(self, Self::Memory | Self::QueueMemory | Self::KubernetesMemory)
    }

    /// Returns the order in shortage messages: as in Linkis, cores before memory before instances.
    pub const fn precedence(&self) -> u8 {
        match self {
            Self::Cores => 0,
            Self::Memory => 1,
            Self::Instances => 2,
            Self::QueueCores => 3,
            Self::QueueMemory => 4,
            Self::QueueInstances => 5,
            Self::KubernetesMillicores => 6,
            Self::KubernetesMemory => 7,
            Self::Waiting | Self::Custom(_) => 8,
        }
    }

    /// Prefix of custom dimensions in keys, which makes a mistyped fixed name detectable.
    pub const CUSTOM_PREFIX: &str = "special.";

    /// Returns the key of the dimension in a limit: the name, with [`Dimension::CUSTOM_PREFIX`] for a custom one.
    #[must_use]
    pub fn key(&self) -> String {
        match self {
            Self::Custom(name) => format!("{}{name}", Self::CUSTOM_PREFIX),
            fixed => fixed.name().to_owned(),
        }
    }

    /// Parses a key from [`Dimension::key`]; `None` for a name that is neither fixed nor prefixed.
    #[must_use]
    pub fn parse_key(key: &str) -> Option<Self> {
        match key.strip_prefix(Self::CUSTOM_PREFIX) {
            Some("") => None,
            Some(name) => Some(Self::Custom(name.into())),
            None if key == Self::Waiting.name() => Some(Self::Waiting),
            None => Some(Self::from(key)).filter(|dimension| !matches!(dimension, Self::Custom(_))),
        }
    }

    /// Returns the name, as `Display` writes it.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Custom(name) => name,
            fixed => fixed.class(),
        }
    }

    /// Returns a name from a fixed set, for metrics: `special` for all custom dimensions.
    #[must_use]
    pub const fn class(&self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cores => "cores",
            Self::Instances => "instances",
            Self::QueueMemory => "queue_memory",
            Self::QueueCores => "queue_cores",
            Self::QueueInstances => "queue_instances",
            Self::KubernetesMemory => "kubernetes_memory",
            Self::KubernetesMillicores => "kubernetes_millicores",
            Self::Waiting => "waiting",
            Self::Custom(_) => "special",
        }
    }
}

/// Parses the name of an amount from `Display`; any name that is not fixed is custom.
impl From<&str> for Dimension {
    fn from(name: &str) -> Self {
        let fixed = [
            Self::Memory,
            Self::Cores,
            Self::Instances,
            Self::QueueMemory,
            Self::QueueCores,
            Self::QueueInstances,
            Self::KubernetesMemory,
            Self::KubernetesMillicores,
        ];
        fixed.into_iter().find(|dimension| dimension.name() == name).unwrap_or_else(|| Self::Custom(name.into()))
    }
}

impl fmt::Display for Dimension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
