//! The dimensions: what a resource counts.

use std::fmt;
use std::sync::Arc;

/// One thing that is counted.
///
/// Its `Display` is the name used in messages: `memory`, `queue_cores`, ..., or the custom name itself.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dimension {
    /// Memory of managers and drivers, in bytes.
    Memory,
    /// Virtual cores of managers and drivers, whole.
    Cores,
    /// Engine instances.
    Instances,
    /// Memory of a Yarn queue, in bytes.
    QueueMemory,
    /// Virtual cores of a Yarn queue, whole.
    QueueCores,
    /// Instances in a Yarn queue.
    QueueInstances,
    /// Memory of a Kubernetes namespace, in bytes.
    KubernetesMemory,
    /// Processor time of a Kubernetes namespace, in thousandths of a core (Linkis calls them cores).
    KubernetesMillicores,
    /// A custom dimension of a Special; its unit is its owner's business.
    Custom(Arc<str>),
}

/// How many dimensions are not custom.
pub(super) const FIXED: usize = 8;

impl Dimension {
    /// The place in the array of fixed amounts, below [`FIXED`]; none for a custom dimension.
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
            Self::Custom(_) => None,
        }
    }

    /// Whether it is counted in a queue or a namespace, which has a name.
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

    /// Whether it is counted in bytes, and may be written as a size such as `20g`.
    #[must_use]
    pub const fn is_size(&self) -> bool {
        matches!(self, Self::Memory | Self::QueueMemory | Self::KubernetesMemory)
    }

    /// The place in messages about shortages: Linkis speaks of cores first, then memory, then instances.
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
            Self::Custom(_) => 8,
        }
    }

    /// What custom dimensions are told by wherever a mistyped name has to be noticed.
    pub const CUSTOM_PREFIX: &str = "special.";

    /// The key of the dimension in a limit: the name, for a custom one behind [`Dimension::CUSTOM_PREFIX`].
    #[must_use]
    pub fn key(&self) -> String {
        match self {
            Self::Custom(name) => format!("{}{name}", Self::CUSTOM_PREFIX),
            fixed => fixed.name().to_owned(),
        }
    }

    /// The reverse of [`Dimension::key`]; `None` for a name that is neither fixed nor said to be custom.
    #[must_use]
    pub fn parse_key(key: &str) -> Option<Self> {
        match key.strip_prefix(Self::CUSTOM_PREFIX) {
            Some("") => None,
            Some(name) => Some(Self::Custom(name.into())),
            None => Some(Self::from(key)).filter(|dimension| !matches!(dimension, Self::Custom(_))),
        }
    }

    /// The name, as `Display` writes it.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Custom(name) => name,
            fixed => fixed.class(),
        }
    }

    /// The name, where there have to be few: `special` for all custom dimensions.
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
            Self::Custom(_) => "special",
        }
    }
}

/// The reverse of `Display`; a name that is none of the fixed ones is a custom one.
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
