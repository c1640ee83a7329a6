//! Plain values of resources: the checked conversion into a [`Resource`] and the conversion back.
//!
//! Every resource from outside passes [`Resource::from_parts`], so no other code checks signs or names.
//! Callers: the converters of messages and JSON.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::amounts::Amounts;
use super::{DEFAULT_PLACE, Dimension, Resource, ResourceError, ResourceType, place_name};

/// Maximum length of a queue name, namespace, application id or custom name, in characters.
const NAME_CHARS_MAX: usize = 255;

/// Plain values of a resource of each type, unchecked until [`Resource::from_parts`]. The values of a [`LeftResource`](super::LeftResource)
/// may be negative.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResourceParts {
    /// [`ResourceType::Memory`].
    Memory {
        /// Memory in bytes.
        memory: i64,
    },
    /// [`ResourceType::Cpu`].
    Cpu {
        /// Whole cores.
        cores: i64,
    },
    /// [`ResourceType::Load`].
    Load {
        /// Memory in bytes.
        memory: i64,
        /// Whole cores.
        cores: i64,
    },
    /// [`ResourceType::Instance`].
    Instance {
        /// Number of engines.
        instances: i64,
    },
    /// [`ResourceType::LoadInstance`].
    LoadInstance(LoadInstanceAmounts),
    /// [`ResourceType::Yarn`].
    Yarn(YarnAmounts),
    /// [`ResourceType::DriverAndYarn`]: the driver part and the queue part.
    DriverAndYarn(LoadInstanceAmounts, YarnAmounts),
    /// [`ResourceType::Kubernetes`].
    Kubernetes(KubernetesAmounts),
    /// [`ResourceType::DriverAndKubernetes`]: the driver part and the namespace part.
    DriverAndKubernetes(LoadInstanceAmounts, KubernetesAmounts),
    /// [`ResourceType::Special`]: amounts by custom name.
    Special(BTreeMap<String, i64>),
}

/// Amounts of an EM or a driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadInstanceAmounts {
    /// Memory in bytes.
    pub memory: i64,
    /// Whole cores.
    pub cores: i64,
    /// Number of engines.
    pub instances: i64,
}

/// Amounts in a YARN queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct YarnAmounts {
    /// Memory in bytes.
    pub queue_memory: i64,
    /// Whole cores.
    pub queue_cores: i64,
    /// Number of instances.
    pub queue_instances: i64,
    /// Queue name; empty means [`DEFAULT_PLACE`].
    pub queue_name: String,
    /// Id of the YARN application, if known; arithmetic drops it, as in Linkis.
    pub application_id: String,
}

/// Amounts in a Kubernetes namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KubernetesAmounts {
    /// Memory in bytes.
    pub memory: i64,
    /// Thousandths of a core; Linkis calls them cores.
    pub millicores: i64,
    /// Namespace; empty means [`DEFAULT_PLACE`].
    pub namespace: String,
}

impl Resource {
    /// Checks plain values and creates the resource; [`Resource::parts`] is the inverse.
    ///
    /// # Errors
    /// - [`ResourceError::Negative`]: a negative amount (Linkis accepts it);
    /// - [`ResourceError::InvalidName`]: a queue name, namespace, application id or custom name with more than 255
    ///   characters or with control characters, or an empty custom name;
    /// - [`ResourceError::TooManyNames`]: more than 64 custom names, or more than 6 KiB of them.
    pub fn from_parts(parts: ResourceParts) -> Result<Self, ResourceError> {
        let mut made = Self::zero(parts.resource_type());
        match parts {
            ResourceParts::Memory { memory } => made.put(Dimension::Memory, memory)?,
            ResourceParts::Cpu { cores } => made.put(Dimension::Cores, cores)?,
            ResourceParts::Load { memory, cores } => {
                made.put(Dimension::Memory, memory)?;
                made.put(Dimension::Cores, cores)?;
            }
            ResourceParts::Instance { instances } => made.put(Dimension::Instances, instances)?,
            ResourceParts::LoadInstance(driver) => made.put_driver(driver)?,
            ResourceParts::Yarn(yarn) => made.put_yarn(&yarn)?,
            ResourceParts::DriverAndYarn(driver, yarn) => {
                made.put_driver(driver)?;
                made.put_yarn(&yarn)?;
            }
            ResourceParts::Kubernetes(kubernetes) => made.put_kubernetes(&kubernetes)?,
            ResourceParts::DriverAndKubernetes(driver, kubernetes) => {
                made.put_driver(driver)?;
                made.put_kubernetes(&kubernetes)?;
            }
            ResourceParts::Special(custom) => made.put_custom(custom)?,
        }
        Ok(made)
    }

    /// Returns the plain values that [`Resource::from_parts`] accepts. An empty queue name or namespace becomes "default".
    #[must_use]
    pub fn parts(&self) -> ResourceParts {
        ResourceParts::of(self.resource_type, &self.amounts, self.place.as_ref(), self.application_id.as_ref())
    }

    fn put(&mut self, dimension: Dimension, amount: i64) -> Result<(), ResourceError> {
        if amount < 0 {
            return Err(ResourceError::Negative { dimension, amount });
        }
        self.amounts.set(dimension, amount);
        Ok(())
    }

    fn put_driver(&mut self, driver: LoadInstanceAmounts) -> Result<(), ResourceError> {
        self.put(Dimension::Memory, driver.memory)?;
        self.put(Dimension::Cores, driver.cores)?;
        self.put(Dimension::Instances, driver.instances)
    }

    fn put_yarn(&mut self, yarn: &YarnAmounts) -> Result<(), ResourceError> {
        self.put(Dimension::QueueMemory, yarn.queue_memory)?;
        self.put(Dimension::QueueCores, yarn.queue_cores)?;
        self.put(Dimension::QueueInstances, yarn.queue_instances)?;
        self.place = checked_place("queue name", &yarn.queue_name)?;
        check_name("application id", &yarn.application_id)?;
        self.application_id = (!yarn.application_id.is_empty()).then(|| Arc::from(yarn.application_id.as_str()));
        Ok(())
    }

    fn put_kubernetes(&mut self, kubernetes: &KubernetesAmounts) -> Result<(), ResourceError> {
        self.put(Dimension::KubernetesMemory, kubernetes.memory)?;
        self.put(Dimension::KubernetesMillicores, kubernetes.millicores)?;
        self.place = checked_place("namespace", &kubernetes.namespace)?;
        Ok(())
    }

    fn put_custom(&mut self, custom: BTreeMap<String, i64>) -> Result<(), ResourceError> {
        for (name, amount) in custom {
            if name.is_empty() {
                return Err(ResourceError::InvalidName { what: "custom dimension's name", problem: "is empty" });
            }
            check_name("custom dimension's name", &name)?;
            self.put(Dimension::Custom(name.into()), amount)?;
        }
        self.amounts.check_limits()
    }
}

impl ResourceParts {
    /// Returns the type of the values.
    #[must_use]
    pub const fn resource_type(&self) -> ResourceType {
        match self {
            Self::Memory { .. } => ResourceType::Memory,
            Self::Cpu { .. } => ResourceType::Cpu,
            Self::Load { .. } => ResourceType::Load,
            Self::Instance { .. } => ResourceType::Instance,
            Self::LoadInstance(_) => ResourceType::LoadInstance,
            Self::Yarn(_) => ResourceType::Yarn,
            Self::DriverAndYarn(..) => ResourceType::DriverAndYarn,
            Self::Kubernetes(_) => ResourceType::Kubernetes,
            Self::DriverAndKubernetes(..) => ResourceType::DriverAndKubernetes,
            Self::Special(_) => ResourceType::Special,
        }
    }

    /// Returns the amounts in the order of the type's shape, and the queue or namespace.
    #[must_use]
    pub fn amounts(&self) -> (Vec<(Dimension, i64)>, Option<&str>) {
        use Dimension::{
            Cores, Instances, KubernetesMemory, KubernetesMillicores, Memory, QueueCores, QueueInstances, QueueMemory,
        };
        let load = |r: &LoadInstanceAmounts| vec![(Memory, r.memory), (Cores, r.cores), (Instances, r.instances)];
        let yarn = |r: &YarnAmounts| {
            vec![(QueueMemory, r.queue_memory), (QueueCores, r.queue_cores), (QueueInstances, r.queue_instances)]
        };
        let kubernetes =
            |r: &KubernetesAmounts| vec![(KubernetesMemory, r.memory), (KubernetesMillicores, r.millicores)];
        match self {
            Self::Memory { memory } => (vec![(Memory, *memory)], None),
            Self::Cpu { cores } => (vec![(Cores, *cores)], None),
            Self::Load { memory, cores } => (vec![(Memory, *memory), (Cores, *cores)], None),
            Self::Instance { instances } => (vec![(Instances, *instances)], None),
            Self::LoadInstance(driver) => (load(driver), None),
            Self::Yarn(queue) => (yarn(queue), Some(&queue.queue_name)),
            Self::DriverAndYarn(driver, queue) => ([load(driver), yarn(queue)].concat(), Some(&queue.queue_name)),
            Self::Kubernetes(namespace) => (kubernetes(namespace), Some(&namespace.namespace)),
            Self::DriverAndKubernetes(driver, namespace) => {
                ([load(driver), kubernetes(namespace)].concat(), Some(&namespace.namespace))
            }
            Self::Special(custom) => {
                (custom.iter().map(|(name, amount)| (Dimension::from(name.as_str()), *amount)).collect(), None)
            }
        }
    }

    pub(super) fn of(
        resource_type: ResourceType,
        amounts: &Amounts,
        place: Option<&Arc<str>>,
        application_id: Option<&Arc<str>>,
    ) -> Self {
        let get = |dimension| amounts.get(&dimension);
        let driver = || LoadInstanceAmounts {
            memory: get(Dimension::Memory),
            cores: get(Dimension::Cores),
            instances: get(Dimension::Instances),
        };
        let yarn = || YarnAmounts {
            queue_memory: get(Dimension::QueueMemory),
            queue_cores: get(Dimension::QueueCores),
            queue_instances: get(Dimension::QueueInstances),
            queue_name: place_name(place).to_owned(),
            application_id: application_id.map_or_else(String::new, ToString::to_string),
        };
        let kubernetes = || KubernetesAmounts {
            memory: get(Dimension::KubernetesMemory),
            millicores: get(Dimension::KubernetesMillicores),
            namespace: place_name(place).to_owned(),
        };
        match resource_type {
            ResourceType::Memory => Self::Memory { memory: get(Dimension::Memory) },
            ResourceType::Cpu => Self::Cpu { cores: get(Dimension::Cores) },
            ResourceType::Load => Self::Load { memory: get(Dimension::Memory), cores: get(Dimension::Cores) },
            ResourceType::Instance => Self::Instance { instances: get(Dimension::Instances) },
            ResourceType::LoadInstance => Self::LoadInstance(driver()),
            ResourceType::Yarn => Self::Yarn(yarn()),
            ResourceType::DriverAndYarn => Self::DriverAndYarn(driver(), yarn()),
            ResourceType::Kubernetes => Self::Kubernetes(kubernetes()),
            ResourceType::DriverAndKubernetes => Self::DriverAndKubernetes(driver(), kubernetes()),
            ResourceType::Special => {
                Self::Special(amounts.custom().map(|(name, amount)| (name.to_string(), amount)).collect())
            }
        }
    }
}

fn checked_place(what: &'static str, name: &str) -> Result<Option<Arc<str>>, ResourceError> {
    check_name(what, name)?;
    Ok((!name.is_empty() && name != DEFAULT_PLACE).then(|| Arc::from(name)))
}

fn check_name(what: &'static str, name: &str) -> Result<(), ResourceError> {
    if name.chars().nth(NAME_CHARS_MAX).is_some() {
        return Err(ResourceError::InvalidName { what, problem: "has more than 255 characters" });
    }
    if name.chars().any(char::is_control) {
        return Err(ResourceError::InvalidName { what, problem: "has a control character" });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_amount_is_refused_by_dimension() {
        let yarn = YarnAmounts { queue_cores: -1, ..YarnAmounts::default() };
        let made = Resource::from_parts(ResourceParts::DriverAndYarn(LoadInstanceAmounts::default(), yarn));
        assert_eq!(made, Err(ResourceError::Negative { dimension: Dimension::QueueCores, amount: -1 }));
    }

    #[test]
    fn empty_queue_name_is_default() {
        let made = Resource::from_parts(ResourceParts::Yarn(YarnAmounts::default())).unwrap();
        assert_eq!(made.queue_name(), Some("default"));
    }

    #[test]
    fn names_have_limits() {
        let special = |name: String| Resource::special(BTreeMap::from([(name, 1)]));
        assert!(special("ü".repeat(255)).is_ok());
        for name in [String::new(), "x".repeat(256), "a\u{7}".into(), "a\u{85}".into()] {
            assert!(matches!(special(name.clone()), Err(ResourceError::InvalidName { .. })), "{name:?}");
        }
        let many =
            |count: usize, length: usize| Resource::special((0..count).map(|n| (format!("{n:0length$}"), 1)).collect());
        assert!(many(64, 96).is_ok());
        assert!(matches!(many(65, 2), Err(ResourceError::TooManyNames { names: 65, .. })));
        assert!(matches!(many(64, 97), Err(ResourceError::TooManyNames { .. })));
    }
}
