//! Resource types: named shapes over the dimensions.

use std::fmt;
use std::str::FromStr;

use super::{Dimension, ResourceError};

text_enum! {
    /// The type of a resource, which defines its dimensions. The names are those of Linkis, in its
    /// order.
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

const MEMORY: &[Dimension] = &[Dimension::Memory];
const CPU: &[Dimension] = &[Dimension::Cores];
const LOAD: &[Dimension] = &[Dimension::Memory, Dimension::Cores];
const INSTANCE: &[Dimension] = &[Dimension::Instances];
const LOAD_INSTANCE: &[Dimension] = &[Dimension::Memory, Dimension::Cores, Dimension::Instances];
const YARN: &[Dimension] = &[Dimension::QueueMemory, Dimension::QueueCores, Dimension::QueueInstances];
const DRIVER_AND_YARN: &[Dimension] = &[
    Dimension::Memory,
    Dimension::Cores,
    Dimension::Instances,
    Dimension::QueueMemory,
    Dimension::QueueCores,
    Dimension::QueueInstances,
];
const KUBERNETES: &[Dimension] = &[Dimension::KubernetesMemory, Dimension::KubernetesMillicores];
const DRIVER_AND_KUBERNETES: &[Dimension] = &[
    Dimension::Memory,
    Dimension::Cores,
    Dimension::Instances,
    Dimension::KubernetesMemory,
    Dimension::KubernetesMillicores,
];

impl ResourceType {
    /// Returns the fixed dimensions of the type; a Special has only custom ones.
    pub(crate) const fn shape(self) -> &'static [Dimension] {
        match self {
            Self::Memory => MEMORY,
            Self::Cpu => CPU,
            Self::Load => LOAD,
            Self::Instance => INSTANCE,
            Self::LoadInstance => LOAD_INSTANCE,
            Self::Yarn => YARN,
            Self::DriverAndYarn => DRIVER_AND_YARN,
            Self::Kubernetes => KUBERNETES,
            Self::DriverAndKubernetes => DRIVER_AND_KUBERNETES,
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
