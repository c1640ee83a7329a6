//! What is left, which may be a deficit, and what an ask lacks.

use std::sync::Arc;

use super::amounts::Amounts;
use super::{Dimension, Parts, Resource, ResourceError, ResourceType};

/// What is left of a total after what is protected, used and locked. Unlike those of a [`Resource`] its amounts may be
/// negative: a total may shrink under what is already in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    resource_type: ResourceType,
    amounts: Amounts,
    place: Option<Arc<str>>,
}

/// A dimension in which more is asked than is left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Where.
    pub dimension: Dimension,
    /// What is asked, above zero.
    pub requested: i64,
    /// What is left, below what is asked and perhaps below zero.
    pub available: i64,
    /// What is kept for others, and so is not left.
    pub ahead: i64,
}

impl Resource {
    /// `total - protected - used - locked` in every dimension. (Linkis forgets the locked in some places; then two
    /// grants can take the same resource.)
    ///
    /// # Errors
    /// [`ResourceError::Unanswerable`] if the four are not of one type (nothing is widened here),
    /// [`ResourceError::DifferentQueue`] as in arithmetic, [`ResourceError::Overflow`] if a deficit is too deep to
    /// count.
    pub fn left(total: &Self, protected: &Self, used: &Self, locked: &Self) -> Result<Left, ResourceError> {
        let onto = total.resource_type;
        let mut amounts = total.amounts.clone();
        // Whoever has something in a queue or namespace first names it; the others must agree.
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
        Ok(Left { resource_type: onto, amounts, place: named.place.clone() })
    }
}

impl Left {
    /// The type, that of the total.
    #[must_use]
    pub fn resource_type(&self) -> ResourceType {
        self.resource_type
    }

    /// What is left in one dimension; zero if it does not exist here.
    #[must_use]
    pub fn get(&self, dimension: &Dimension) -> i64 {
        self.amounts.get(dimension)
    }

    /// What is left in all dimensions, in the order of [`Resource::amounts`].
    pub fn amounts(&self) -> impl Iterator<Item = (Dimension, i64)> + '_ {
        self.amounts.iter(self.resource_type.shape())
    }

    /// The plain values, some of them perhaps negative.
    #[must_use]
    pub fn parts(&self) -> Parts {
        Parts::of(self.resource_type, &self.amounts, self.place.as_ref(), None)
    }

    /// The JSON of [`Resource::to_json`], some amounts perhaps negative.
    #[must_use]
    pub fn to_json(&self) -> String {
        super::json::write(&self.parts())
    }

    /// Whether any dimension is below zero.
    #[must_use]
    pub fn is_negative_anywhere(&self) -> bool {
        self.amounts().any(|(_, amount)| amount < 0)
    }

    /// Whether nothing that is asked is short: exactly when [`Left::shortages`] is empty.
    #[must_use]
    pub fn covers(&self, asked: &Resource) -> bool {
        self.missing(asked, |_| 0).next().is_none()
    }

    /// The same, while so much of each dimension as `ahead` tells is kept for others.
    #[must_use]
    pub fn covers_behind(&self, asked: &Resource, ahead: impl Fn(&Dimension) -> i64) -> bool {
        self.missing(asked, ahead).next().is_none()
    }

    /// Every dimension in which more is asked than is left, in Linkis's order for messages: cores, memory, instances,
    /// then the same of the queue and of the namespace, then custom names.
    ///
    /// Where nothing is asked nothing is short, even if the rest is negative. A dimension, or a queue or namespace, that
    /// does not exist here has nothing left; project what is asked first if only a part of it counts.
    #[must_use]
    pub fn shortages(&self, asked: &Resource) -> Vec<Shortage> {
        self.shortages_behind(asked, |_| 0)
    }

    /// The same, while so much of each dimension as `ahead` tells is kept for others.
    #[must_use]
    pub fn shortages_behind(&self, asked: &Resource, ahead: impl Fn(&Dimension) -> i64) -> Vec<Shortage> {
        let mut shortages: Vec<_> = self.missing(asked, ahead).collect();
        shortages.sort_by(|a, b| {
            let precedence = a.dimension.precedence().cmp(&b.dimension.precedence());
            precedence.then_with(|| a.dimension.cmp(&b.dimension))
        });
        shortages
    }

    fn missing<'a>(
        &'a self,
        asked: &'a Resource,
        ahead: impl Fn(&Dimension) -> i64 + 'a,
    ) -> impl Iterator<Item = Shortage> + 'a {
        asked.amounts().filter_map(move |(dimension, requested)| {
            let elsewhere = dimension.is_external() && self.place != asked.place;
            let ahead = ahead(&dimension);
            let available = behind(if elsewhere { 0 } else { self.get(&dimension) }, ahead);
            (requested > 0 && requested > available).then_some(Shortage { dimension, requested, available, ahead })
        })
    }
}

/// What is left for those behind `ahead`. Below zero only if nothing was left for anybody.
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
        Resource::from_parts(Parts::Yarn(YarnAmounts { queue_memory, queue_name, ..YarnAmounts::default() })).unwrap()
    }

    #[test]
    fn a_deficit_shows_and_shortages_come_in_order() {
        let left = Resource::left(&li(10, 10, 10), &li(1, 1, 1), &li(8, 5, 9), &li(3, 3, 0)).unwrap();
        assert_eq!(left.parts(), Parts::LoadInstance(LoadInstanceAmounts { memory: -2, cores: 1, instances: 0 }));
        assert!(left.is_negative_anywhere());
        assert_eq!(left.to_json(), r#"{"memory":-2,"cores":1,"instances":0,"instance":0}"#);
        let shortage = |dimension, requested, available| Shortage { dimension, requested, available, ahead: 0 };
        assert_eq!(
            left.shortages(&li(1, 2, 1)),
            [
                shortage(Dimension::Cores, 2, 1),
                shortage(Dimension::Memory, 1, -2),
                shortage(Dimension::Instances, 1, 0),
            ]
        );
        assert!(!left.covers(&li(1, 0, 0)));
        assert!(left.covers(&li(0, 1, 0)), "nothing is asked where there is a deficit");
    }

    #[test]
    fn the_four_must_be_alike() {
        let zero = Resource::zero(ResourceType::LoadInstance);
        let memory = Resource::memory(1).unwrap();
        let (from, onto) = (ResourceType::Memory, ResourceType::LoadInstance);
        assert_eq!(Resource::left(&zero, &zero, &memory, &zero), Err(ResourceError::Unanswerable { from, onto }));
        let full = li(i64::MAX, 0, 0);
        let overflow = ResourceError::Overflow { dimension: Dimension::Memory };
        assert_eq!(Resource::left(&zero, &full, &full, &zero), Err(overflow));
    }

    #[test]
    fn another_queue_has_nothing_left() {
        let zero = Resource::zero(ResourceType::Yarn);
        let left = Resource::left(&yarn(5, "q"), &zero, &yarn(1, "q"), &zero).unwrap();
        assert!(left.covers(&yarn(4, "q")));
        assert!(left.covers(&yarn(0, "r")));
        let dimension = Dimension::QueueMemory;
        assert_eq!(left.shortages(&yarn(1, "r")), [Shortage { dimension, requested: 1, available: 0, ahead: 0 }]);
        assert!(Resource::left(&yarn(5, "q"), &zero, &yarn(1, "r"), &zero).is_err());
        assert!(Resource::left(&zero, &yarn(5, "q"), &yarn(1, "r"), &zero).is_err());
        let Parts::Yarn(parts) = Resource::left(&zero, &yarn(5, "q"), &zero, &zero).unwrap().parts() else {
            panic!("a Yarn");
        };
        assert_eq!(parts.queue_name, "q");
    }

    #[test]
    fn an_unknown_custom_name_has_nothing_left() {
        let special = |name: &str, amount| Resource::special(BTreeMap::from([(name.to_owned(), amount)])).unwrap();
        let zero = Resource::zero(ResourceType::Special);
        let left = Resource::left(&special("gpu", 2), &zero, &special("disk", 1), &zero).unwrap();
        assert_eq!(left.get(&Dimension::Custom("disk".into())), -1);
        assert!(left.covers(&special("gpu", 2)));
        assert!(!left.covers(&special("fpga", 1)));
    }
}
