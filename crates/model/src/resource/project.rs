//! Projection of a resource onto another type, and the common queue of two operands.
//!
//! All operations on two resources project first. The pairs of types that convert are fixed in one table; any other pair is
//! an error. Callers: `algebra`, `compare` and `left_resource`.

use std::borrow::Cow;
use std::sync::Arc;

use super::{Resource, ResourceError, ResourceType, place_name};

impl Resource {
    /// Converts the resource to another type, the explicit form of the widening in Linkis's operators.
    ///
    /// - Every type converts to itself.
    /// - Memory, CPU, Load and Instance widen to Load, LoadInstance or a driver part that has all their dimensions. Other
    ///   dimensions are zero (Instance as LoadInstance differs from Linkis, where it is infinite).
    /// - DriverAndYarn and DriverAndKubernetes convert to their driver part as LoadInstance, which an EM provides. Their
    ///   other part converts to Yarn or Kubernetes, which a queue or namespace provides.
    /// - LoadInstance, Yarn and Kubernetes become the matching part of DriverAndYarn or DriverAndKubernetes. The other part
    ///   is zero, in the queue or namespace "default".
    ///
    /// # Errors
    /// [`ResourceError::Unanswerable`] for all other pairs, such as Yarn to LoadInstance (unlike Linkis, where the result
    /// is infinite).
    pub fn project(&self, onto: ResourceType) -> Result<Self, ResourceError> {
        self.widened(onto).map(Cow::into_owned)
    }

    /// As [`Resource::project`], without a copy if the type is the same.
    pub(super) fn widened(&self, onto: ResourceType) -> Result<Cow<'_, Self>, ResourceError> {
        let from = self.resource_type;
        if from == onto {
            return Ok(Cow::Borrowed(self));
        }
        if !answers(from, onto) {
            return Err(ResourceError::Unanswerable { from, onto });
        }
        let mut seen = Self::zero(onto);
        for dimension in onto.shape() {
            seen.amounts.set(dimension.clone(), self.amounts.get(dimension));
        }
        // The name is copied only with its part.
        if onto.has_queue() || onto.has_namespace() {
            seen.place.clone_from(&self.place);
        }
        if onto.has_queue() {
            seen.application_id.clone_from(&self.application_id);
        }
        Ok(Cow::Owned(seen))
    }

    /// Converts this into a use of `granted`: the same amounts in the queue or namespace of `granted`. Without an
    /// application id, that of `granted` is kept.
    ///
    /// # Errors
    /// [`ResourceError::Unanswerable`] for another type; [`ResourceError::DifferentQueue`] for amounts in another queue or
    /// namespace, even if `granted` has no amounts in its own.
    pub fn as_use_of(&self, granted: &Self) -> Result<Self, ResourceError> {
        let (from, onto) = (self.resource_type, granted.resource_type);
        if from != onto {
            return Err(ResourceError::Unanswerable { from, onto });
        }
        if self.place != granted.place && !self.is_zero_outside() {
            return Err(different_queue(granted, self));
        }
        let application_id = self.application_id.as_ref().or(granted.application_id.as_ref()).cloned();
        Ok(Self { place: granted.place.clone(), application_id, ..self.clone() })
    }

    /// Returns the common queue or namespace of two resources of one type. A side without amounts there takes the name of
    /// the other side.
    pub(super) fn common_place(&self, right: &Self) -> Result<Option<Arc<str>>, ResourceError> {
        if self.place == right.place || right.is_zero_outside() {
            Ok(self.place.clone())
        } else if self.is_zero_outside() {
            Ok(right.place.clone())
        } else {
            Err(different_queue(self, right))
        }
    }
}

fn different_queue(left: &Resource, right: &Resource) -> ResourceError {
    ResourceError::DifferentQueue {
        left: place_name(left.place.as_ref()).to_owned(),
        right: place_name(right.place.as_ref()).to_owned(),
    }
}

/// Returns whether one type can be projected onto another.
const fn answers(from: ResourceType, onto: ResourceType) -> bool {
    use ResourceType::{
        Cpu, DriverAndKubernetes, DriverAndYarn, Instance, Kubernetes, Load, LoadInstance, Memory, Special, Yarn,
    };
    match from {
        Memory | Cpu | Load => matches!(onto, Load | LoadInstance | DriverAndYarn | DriverAndKubernetes),
        Instance | LoadInstance => matches!(onto, LoadInstance | DriverAndYarn | DriverAndKubernetes),
        Yarn => matches!(onto, DriverAndYarn),
        DriverAndYarn => matches!(onto, LoadInstance | Yarn),
        Kubernetes => matches!(onto, DriverAndKubernetes),
        DriverAndKubernetes => matches!(onto, LoadInstance | Kubernetes),
        Special => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{LoadInstanceAmounts, ResourceParts, YarnAmounts};
    use super::*;

    fn driver_and_yarn() -> Resource {
        let driver = LoadInstanceAmounts { memory: 1, cores: 2, instances: 3 };
        let yarn = YarnAmounts {
            queue_memory: 4,
            queue_cores: 5,
            queue_instances: 6,
            queue_name: "q".into(),
            application_id: "app".into(),
        };
        Resource::from_parts(ResourceParts::DriverAndYarn(driver, yarn)).unwrap()
    }

    #[test]
    fn driver_and_yarn_resource_splits_and_joins() {
        let whole = driver_and_yarn();
        let driver = whole.project(ResourceType::LoadInstance).unwrap();
        let yarn = whole.project(ResourceType::Yarn).unwrap();
        assert_eq!(driver, Resource::load_instance(1, 2, 3).unwrap());
        assert_eq!((driver.queue_name(), yarn.queue_name()), (None, Some("q")));
        assert_eq!(yarn.application_id(), Some("app"));
        let again = yarn.project(ResourceType::DriverAndYarn).unwrap().add(&driver).unwrap();
        assert_eq!(again, whole);
        assert_eq!(driver.project(ResourceType::DriverAndYarn).unwrap().queue_name(), Some("default"));
    }

    #[test]
    fn zero_use_keeps_granted_queue() {
        let granted = driver_and_yarn();
        let used = |queue_cores, queue_name: &str, application_id: &str| {
            let (queue_name, application_id) = (queue_name.to_owned(), application_id.to_owned());
            let yarn = YarnAmounts { queue_cores, queue_name, application_id, ..YarnAmounts::default() };
            Resource::from_parts(ResourceParts::DriverAndYarn(LoadInstanceAmounts::default(), yarn)).unwrap()
        };
        let nothing = used(0, "r", "").as_use_of(&granted).unwrap();
        assert_eq!((nothing.queue_name(), nothing.application_id()), (Some("q"), Some("app")));
        assert_eq!(used(1, "q", "other").as_use_of(&nothing).unwrap().application_id(), Some("other"));
        let different = ResourceError::DifferentQueue { left: "q".into(), right: "r".into() };
        assert_eq!(used(1, "r", "").as_use_of(&nothing), Err(different));
        let (from, onto) = (ResourceType::Yarn, ResourceType::DriverAndYarn);
        assert_eq!(Resource::zero(from).as_use_of(&granted), Err(ResourceError::Unanswerable { from, onto }));
    }

    #[test]
    fn resource_views_equal_allowed_list() {
        // One line per type, in Linkis's order: the types that it can be projected onto.
        let views = [
            "Memory: Memory Load LoadInstance DriverAndYarn DriverAndKubernetes",
            "CPU: CPU Load LoadInstance DriverAndYarn DriverAndKubernetes",
            "Load: Load LoadInstance DriverAndYarn DriverAndKubernetes",
            "Instance: Instance LoadInstance DriverAndYarn DriverAndKubernetes",
            "LoadInstance: LoadInstance DriverAndYarn DriverAndKubernetes",
            "Yarn: Yarn DriverAndYarn",
            "DriverAndYarn: LoadInstance Yarn DriverAndYarn",
            "Kubernetes: Kubernetes DriverAndKubernetes",
            "DriverAndKubernetes: LoadInstance Kubernetes DriverAndKubernetes",
            "Special: Special",
        ];
        assert_eq!(views.len(), ResourceType::ALL.len());
        for (from, expected) in ResourceType::ALL.into_iter().zip(views) {
            let mut seen = format!("{from}:");
            for onto in ResourceType::ALL {
                match Resource::zero(from).project(onto) {
                    Ok(view) => {
                        assert_eq!(view.resource_type(), onto);
                        seen.push_str(&format!(" {onto}"));
                    }
                    Err(error) => assert_eq!(error, ResourceError::Unanswerable { from, onto }),
                }
            }
            assert_eq!(seen, expected);
        }
    }
}
