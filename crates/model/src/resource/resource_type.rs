//! Resource types: named shapes over the dimensions.

use std::fmt;
use std::str::FromStr;

use super::{Dimension, ResourceError};

text_enum! {
    /// The type of a resource, which defines its dimensions. The names are those of Linkis, in its
    /// order. A new type is the last, because `packed` stores the index.
    ///
    /// Linkis's `Default` does not exist here (Linkis reads it as Load, as it does any unknown name).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum ResourceType {
        /// Memory in bytes.
        Memory = "Memory",
        /// Whole cores.
        Cpu = "CPU",
        /// Memory and cores.
        Load = "Load",
        /// A number of engines.
        Instance = "Instance",
        /// Memory, cores and instances: the capacity of an EM.
        LoadInstance = "LoadInstance",
        /// Memory, cores and instances of one YARN queue.
        Yarn = "Yarn",
        /// A LoadInstance for the driver and a YARN part for its executors.
        DriverAndYarn = "DriverAndYarn",
        /// Memory and millicores of one Kubernetes namespace.
        Kubernetes = "Kubernetes",
        /// A LoadInstance for the driver and a Kubernetes part for its executors.
        DriverAndKubernetes = "DriverAndKubernetes",
        /// Amounts of custom dimensions by name.
        Special = "Special",
    }
}

impl ResourceType {
    /// Returns the fixed dimensions of the type; a Special has only custom ones.
    pub(crate) const fn shape(self) -> &'static [Dimension] {
        use Dimension::{
            Cores, Instances, KubernetesMemory, KubernetesMillicores, Memory, QueueCores, QueueInstances, QueueMemory,
        };
        match self {
            Self::Memory => const { &[Memory] },
            Self::Cpu => const { &[Cores] },
            Self::Load => const { &[Memory, Cores] },
            Self::Instance => const { &[Instances] },
            Self::LoadInstance => const { &[Memory, Cores, Instances] },
            Self::Yarn => const { &[QueueMemory, QueueCores, QueueInstances] },
            Self::DriverAndYarn => const { &[Memory, Cores, Instances, QueueMemory, QueueCores, QueueInstances] },
            Self::Kubernetes => const { &[KubernetesMemory, KubernetesMillicores] },
            Self::DriverAndKubernetes => const { &[Memory, Cores, Instances, KubernetesMemory, KubernetesMillicores] },
            Self::Special => &[],
        }
    }

    pub(super) const fn has_queue(self) -> bool {
        matches!(self, Self::Yarn | Self::DriverAndYarn)
    }

    pub(super) const fn has_namespace(self) -> bool {
        matches!(self, Self::Kubernetes | Self::DriverAndKubernetes)
    }
}

impl fmt::Display for ResourceType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for ResourceType {
    type Err = ResourceError;

    /// Parses a name exactly as Linkis writes it.
    fn from_str(name: &str) -> Result<Self, ResourceError> {
        Self::parse(name).ok_or_else(|| ResourceError::unknown_type(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_exactly() {
        for resource_type in ResourceType::ALL {
            assert_eq!(resource_type.as_str().parse(), Ok(resource_type));
        }
        for name in ["", "Default", "cpu", "Cpu", " Load"] {
            assert!(matches!(name.parse::<ResourceType>(), Err(ResourceError::UnknownType { .. })), "{name:?}");
        }
    }
}
