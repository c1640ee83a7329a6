//! Left amounts, which may be a deficit, and the shortages of a request.
//!
//! A request fits if it has no shortage. Reservations of earlier queue entries are subtracted first.
//! Callers: the assessment and placement.

use std::sync::Arc;

use super::amounts::Amounts;
use super::{Dimension, Resource, ResourceError, ResourceParts, ResourceType};

/// Total − protected − used − locked. Unlike those of a [`Resource`], the amounts can be negative: a total can be lowered
/// below the use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftResource {
    resource_type: ResourceType,
    amounts: Amounts,
    place: Option<Arc<str>>,
}

impl Resource {
    /// Returns `total - protected - used - locked` per dimension. (Linkis omits the locked amounts in some places, so that
    /// two grants can use the same resource.)
    ///
    /// # Errors
    /// [`ResourceError::Unanswerable`] if the four differ in type (no projection here), [`ResourceError::DifferentQueue`]
    /// as in arithmetic, [`ResourceError::Overflow`] if the deficit is too large for a number.
    pub fn left(total: &Self, protected: &Self, used: &Self, locked: &Self) -> Result<LeftResource, ResourceError> {
        let onto = total.resource_type;
        let mut amounts = total.amounts.clone();
        // The first operand with amounts in a queue or namespace names it; the others must agree.
        let mut named = total;
        for taken in [protected, used, locked] {
            if taken.resource_type != onto {
                return Err(ResourceError::Unanswerable { from: taken.resource_type, onto });
            }
            named.common_place(taken)?;
            if named.is_zero_outside() && !taken.is_zero_outside() {
                named = taken;
            }
            amounts = amounts.zip(&taken.amounts, onto.shape(), |dimension, left, taken| {
                left.checked_sub(taken).ok_or_else(|| ResourceError::Overflow { dimension: dimension.clone() })
            })?;
        }
        Ok(LeftResource { resource_type: onto, amounts, place: named.place.clone() })
    }
}

impl LeftResource {
    /// Returns the type, which is that of the total.
    #[must_use]
    pub fn resource_type(&self) -> ResourceType {
        self.resource_type
    }

    /// Returns the amount in one dimension; zero if the type does not have it.
    #[must_use]
    pub fn get(&self, dimension: &Dimension) -> i64 {
        self.amounts.get(dimension)
    }

    /// Returns the amounts in all dimensions, in the order of [`Resource::amounts`].
    pub fn amounts(&self) -> impl Iterator<Item = (Dimension, i64)> + '_ {
        self.amounts.iter(self.resource_type.shape())
    }

    /// Returns the plain values, possibly negative.
    #[must_use]
    pub fn parts(&self) -> ResourceParts {
        ResourceParts::of(self.resource_type, &self.amounts, self.place.as_ref(), None)
    }

    /// Returns the JSON form of [`Resource::to_json`], with possibly negative amounts.
    #[must_use]
    pub fn to_json(&self) -> String {
        super::json::write(&self.parts())
    }

    /// Subtracts what a request takes, in every dimension that both have.
    pub fn take_off(&mut self, taken: &Resource) {
        self.amounts.take_off(&taken.amounts);
    }

    /// Returns whether any dimension is negative.
    #[must_use]
    pub fn is_negative_anywhere(&self) -> bool {
        self.amounts().any(|(_, amount)| amount < 0)
    }

    /// Returns whether the amount of a dimension is available to `asked`. Amounts of a queue or namespace are not available
    /// to a request for another one.
    #[must_use]
    pub fn is_for(&self, asked: &Resource, dimension: &Dimension) -> bool {
        !dimension.is_external() || self.place == asked.place || asked.is_zero_outside()
    }

    /// Returns whether `asked` fits. A dimension without a requested amount always fits, even if the left amount is
    /// negative. A dimension, queue or namespace that does not exist here has nothing left; project the request first if
    /// only a part of it counts.
    #[must_use]
    pub fn covers(&self, asked: &Resource) -> bool {
        let available = |dimension: &Dimension| if self.is_for(asked, dimension) { self.get(dimension) } else { 0 };
        asked.amounts().all(|(dimension, requested)| requested <= 0 || requested <= available(&dimension))
    }
}

/// Returns the amount left after the reservations `ahead`. Negative only if `left` is negative.
pub fn behind(left: i64, ahead: i64) -> i64 {
    left.saturating_sub(ahead).max(left.min(0))
}

#[cfg(test)]
mod tests {
    use super::super::{LoadInstanceAmounts, YarnAmounts};
    use super::*;
    use std::collections::BTreeMap;

    fn li(memory: i64, cores: i64, instances: i64) -> Resource {
        Resource::load_instance(memory, cores, instances).unwrap()
    }

    fn yarn(queue_memory: i64, queue_name: &str) -> Resource {
        let queue_name = queue_name.to_owned();
        Resource::from_parts(ResourceParts::Yarn(YarnAmounts { queue_memory, queue_name, ..YarnAmounts::default() }))
            .unwrap()
    }

    #[test]
    fn left_resource_shows_deficit() {
        let left = Resource::left(&li(10, 10, 10), &li(1, 1, 1), &li(8, 5, 9), &li(3, 3, 0)).unwrap();
        assert_eq!(
            left.parts(),
            ResourceParts::LoadInstance(LoadInstanceAmounts { memory: -2, cores: 1, instances: 0 })
        );
        assert!(left.is_negative_anywhere());
        assert_eq!(left.to_json(), r#"{"memory":-2,"cores":1,"instances":0,"instance":0}"#);
        assert!(!left.covers(&li(1, 0, 0)));
        assert!(left.covers(&li(0, 1, 0)), "nothing is asked where there is a deficit");
    }

    #[test]
    fn left_resource_needs_equal_types() {
        let zero = Resource::zero(ResourceType::LoadInstance);
        let memory = Resource::memory(1).unwrap();
        let (from, onto) = (ResourceType::Memory, ResourceType::LoadInstance);
        assert_eq!(Resource::left(&zero, &zero, &memory, &zero), Err(ResourceError::Unanswerable { from, onto }));
        let full = li(i64::MAX, 0, 0);
        let overflow = ResourceError::Overflow { dimension: Dimension::Memory };
        assert_eq!(Resource::left(&zero, &full, &full, &zero), Err(overflow));
    }

    #[test]
    fn left_resource_of_other_queue_is_zero() {
        let zero = Resource::zero(ResourceType::Yarn);
        let left = Resource::left(&yarn(5, "q"), &zero, &yarn(1, "q"), &zero).unwrap();
        assert!(left.covers(&yarn(4, "q")));
        assert!(left.covers(&yarn(0, "r")));
        assert!(!left.covers(&yarn(1, "r")));
        assert!(Resource::left(&yarn(5, "q"), &zero, &yarn(1, "r"), &zero).is_err());
        assert!(Resource::left(&zero, &yarn(5, "q"), &yarn(1, "r"), &zero).is_err());
        let ResourceParts::Yarn(parts) = Resource::left(&zero, &yarn(5, "q"), &zero, &zero).unwrap().parts() else {
            panic!("a Yarn");
        };
        assert_eq!(parts.queue_name, "q");
    }

    #[test]
    fn left_resource_of_unknown_custom_name_is_zero() {
        let special = |name: &str, amount| Resource::special(BTreeMap::from([(name.to_owned(), amount)])).unwrap();
        let zero = Resource::zero(ResourceType::Special);
        let left = Resource::left(&special("gpu", 2), &zero, &special("disk", 1), &zero).unwrap();
        assert_eq!(left.get(&Dimension::Custom("disk".into())), -1);
        assert!(left.covers(&special("gpu", 2)));
        assert!(!left.covers(&special("fpga", 1)));
    }
}
