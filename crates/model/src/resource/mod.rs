//! Resources: the amounts that EMs provide and engines request, and their arithmetic.
//!
//! A [`Resource`] is a vector of named non-negative integers in the units of Linkis: bytes, whole virtual cores, and millicores
//! for Kubernetes. Its [`ResourceType`] defines its [`Dimension`]s. Only a [`LeftResource`] can contain a deficit.
//! Never: wraps or saturates; an operation returns a result, or the dimension that prevents it. A type that cannot be projected
//! is an error. All modules of the workspace use resources.
//!
//! Reading order: [`ResourceType`] and [`Dimension`], [`ResourceParts`] (checked conversion from and to plain values),
//! arithmetic, comparisons (a partial order), [`Resource::project`] (conversion between types), [`LeftResource`], JSON forms,
//! sizes. The service needs addition, subtraction and `covers`; the test `conformance` compares all operations with Linkis.

mod algebra;
mod amounts;
mod compare;
mod dimension;
mod error;
mod json;
mod left_resource;
mod packed;
mod parts;
mod project;
#[cfg(test)]
mod properties;
mod resource_type;
mod size;

use std::collections::BTreeMap;
use std::sync::Arc;

use self::amounts::Amounts;
pub use self::dimension::Dimension;
pub use self::error::ResourceError;
pub use self::left_resource::{LeftResource, behind};
pub use self::parts::{KubernetesAmounts, LoadInstanceAmounts, ResourceParts, YarnAmounts};
pub use self::resource_type::ResourceType;
pub use self::size::{format_size, parse_size, whole_gb};

/// Default name of a queue or namespace, as in Linkis.
pub const DEFAULT_PLACE: &str = "default";

/// A typed vector of non-negative amounts.
///
/// Cloning does not allocate, except for the custom names of a Special.
///
/// `==` compares type, amounts and queue or namespace. A missing custom name is zero, and the name of a queue or namespace
/// without amounts is ignored. The application id is not compared, as in Linkis. The result agrees with
/// [`Resource::equals`] where that returns one.
#[derive(Clone, Debug)]
pub struct Resource {
    resource_type: ResourceType,
    amounts: Amounts,
    /// Queue name or namespace (no type has both); `None` is [`DEFAULT_PLACE`], which saves an allocation.
    place: Option<Arc<str>>,
    /// Application id of a YARN part; `None` is the empty id.
    application_id: Option<Arc<str>>,
}

impl Resource {
    /// Creates a Memory resource of `memory` bytes.
    ///
    /// # Errors
    /// [`ResourceError::Negative`] if the amount is negative.
    pub fn memory(memory: i64) -> Result<Self, ResourceError> {
        Self::from_parts(ResourceParts::Memory { memory })
    }

    /// Creates a CPU resource of whole `cores`.
    ///
    /// # Errors
    /// [`ResourceError::Negative`] if the amount is negative.
    pub fn cpu(cores: i64) -> Result<Self, ResourceError> {
        Self::from_parts(ResourceParts::Cpu { cores })
    }

    /// Creates a Load resource of `memory` in bytes and whole `cores`.
    ///
    /// # Errors
    /// [`ResourceError::Negative`] if an amount is negative.
    pub fn load(memory: i64, cores: i64) -> Result<Self, ResourceError> {
        Self::from_parts(ResourceParts::Load { memory, cores })
    }

    /// Creates an Instance resource: a number of engines.
    ///
    /// # Errors
    /// [`ResourceError::Negative`] if the amount is negative.
    pub fn instance(instances: i64) -> Result<Self, ResourceError> {
        Self::from_parts(ResourceParts::Instance { instances })
    }

    /// Creates a LoadInstance resource: `memory` in bytes, whole `cores`, a number of engines.
    ///
    /// # Errors
    /// [`ResourceError::Negative`] if an amount is negative.
    pub fn load_instance(memory: i64, cores: i64, instances: i64) -> Result<Self, ResourceError> {
        Self::from_parts(ResourceParts::LoadInstance(LoadInstanceAmounts { memory, cores, instances }))
    }

    /// Creates a Special resource: amounts of custom dimensions by name, such as `gpu_milli`.
    ///
    /// # Errors
    /// [`ResourceError::Negative`], [`ResourceError::InvalidName`] or [`ResourceError::TooManyNames`]; see
    /// [`Resource::from_parts`].
    pub fn special(amounts: BTreeMap<String, i64>) -> Result<Self, ResourceError> {
        Self::from_parts(ResourceParts::Special(amounts))
    }

    /// Returns zero of a type, in the default queue or namespace; a Special has no names.
    #[must_use]
    pub fn zero(resource_type: ResourceType) -> Self {
        Self { resource_type, amounts: Amounts::default(), place: None, application_id: None }
    }

    /// Returns zero of the same type, queue and namespace (Linkis drops the queue of a Yarn resource and fails for
    /// Kubernetes). Custom names are dropped, because a missing one is zero.
    #[must_use]
    pub fn zero_like(&self) -> Self {
        Self { place: self.place.clone(), ..Self::zero(self.resource_type) }
    }

    /// Returns the type, which defines the shape.
    #[must_use]
    pub fn resource_type(&self) -> ResourceType {
        self.resource_type
    }

    /// Returns the amounts of all dimensions of the shape, including zeros, in the order of [`Dimension`]; custom ones by
    /// name.
    pub fn amounts(&self) -> impl Iterator<Item = (Dimension, i64)> + '_ {
        self.amounts.iter(self.resource_type.shape())
    }

    /// Returns the amount of one dimension; zero if the resource does not have it.
    #[must_use]
    pub fn get(&self, dimension: &Dimension) -> i64 {
        self.amounts.get(dimension)
    }

    /// Returns whether the dimension exists in this resource, even with zero.
    #[must_use]
    pub fn has(&self, dimension: &Dimension) -> bool {
        self.resource_type.shape().contains(dimension) || self.amounts.names(dimension)
    }

    /// Returns whether all amounts are zero.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.amounts().all(|(_, amount)| amount == 0)
    }

    /// Returns the name of the YARN queue, if the type has a YARN part.
    #[must_use]
    pub fn queue_name(&self) -> Option<&str> {
        self.resource_type.has_queue().then(|| place_name(self.place.as_ref()))
    }

    /// Returns the Kubernetes namespace, if the type has a Kubernetes part.
    #[must_use]
    pub fn namespace(&self) -> Option<&str> {
        self.resource_type.has_namespace().then(|| place_name(self.place.as_ref()))
    }

    /// Returns the application id of the YARN part (may be empty), if the type has one.
    #[must_use]
    pub fn application_id(&self) -> Option<&str> {
        self.resource_type.has_queue().then(|| self.application_id.as_deref().unwrap_or_default())
    }

    /// Returns whether the queue or namespace has no amounts, so that its name is irrelevant.
    fn is_zero_outside(&self) -> bool {
        self.amounts().all(|(dimension, amount)| amount == 0 || !dimension.is_external())
    }
}

impl PartialEq for Resource {
    fn eq(&self, other: &Self) -> bool {
        self.resource_type == other.resource_type
            && self.amounts == other.amounts
            && (self.place == other.place || self.is_zero_outside())
    }
}

impl Eq for Resource {}

fn place_name(place: Option<&Arc<str>>) -> &str {
    place.map_or(DEFAULT_PLACE, |name| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yarn(queue_memory: i64, queue_name: &str, application_id: &str) -> Resource {
        Resource::from_parts(ResourceParts::Yarn(YarnAmounts {
            queue_memory,
            queue_cores: 0,
            queue_instances: 0,
            queue_name: queue_name.into(),
            application_id: application_id.into(),
        }))
        .unwrap()
    }

    #[test]
    fn dimension_outside_resource_type_is_none() {
        let load = Resource::load(5, 0).unwrap();
        assert!(load.has(&Dimension::Cores));
        assert!(!load.has(&Dimension::Instances));
        assert_eq!(load.get(&Dimension::Instances), 0);
        assert_eq!(load.amounts().collect::<Vec<_>>(), [(Dimension::Memory, 5), (Dimension::Cores, 0)]);
        assert_eq!((load.queue_name(), load.namespace(), load.application_id()), (None, None, None));
    }

    #[test]
    fn resource_equality_ignores_application_and_empty_queue_name() {
        assert_eq!(yarn(1, "q", "app_1"), yarn(1, "q", "app_2"));
        assert_ne!(yarn(1, "q", ""), yarn(1, "r", ""));
        assert_eq!(yarn(0, "q", ""), yarn(0, "r", ""));
        assert_ne!(Resource::load(1, 0).unwrap(), Resource::memory(1).unwrap());
    }

    #[test]
    fn missing_custom_name_equals_zero() {
        let named = Resource::special(BTreeMap::from([("gpu".into(), 2), ("disk".into(), 0)])).unwrap();
        let missing = Resource::special(BTreeMap::from([("gpu".into(), 2)])).unwrap();
        assert_eq!(named, missing);
        assert_eq!(missing, named);
        assert_eq!(named.amounts().count(), 2, "the zero name is kept for display");
        assert!(named.has(&Dimension::Custom("disk".into())));
        assert!(!missing.has(&Dimension::Custom("disk".into())));
    }

    #[test]
    fn zero_resource_keeps_queue() {
        let zero = yarn(1, "q", "app").zero_like();
        assert!(zero.is_zero());
        assert_eq!((zero.queue_name(), zero.application_id()), (Some("q"), Some("")));
        assert_eq!(Resource::zero(ResourceType::Kubernetes).namespace(), Some("default"));
    }
}
