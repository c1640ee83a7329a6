//! Comparisons of resources: a partial order over all dimensions of the shape.
//!
//! If each of two resources is larger in some dimension, all comparisons are `false` in both directions. `less_than` is
//! therefore not the negation of `not_less_than` (unlike Linkis, where two resources can each be less than the other). All
//! dimensions count, including queue instances (unlike Linkis). `PartialOrd` is not implemented, because an operator cannot
//! return an error.
//!
//! The right operand is first projected onto the left type ([`Resource::project`]). In Specials, a missing name is zero,
//! and a name that is zero on both sides is ignored.

use super::{Dimension, Resource, ResourceError};

impl Resource {
    /// `>`: strictly larger in every dimension; false if there is no dimension to compare (an empty Special; unlike
    /// Linkis).
    ///
    /// # Errors
    /// [`ResourceError::Unanswerable`] if the right type cannot be projected (Linkis treats it as infinite);
    /// [`ResourceError::DifferentQueue`] if both have amounts in different queues or namespaces.
    pub fn more_than(&self, right: &Self) -> Result<bool, ResourceError> {
        self.compare(right, |left, right| left > right, MissingDimensions(true))
    }

    /// `<`: strictly smaller in every dimension, the mirror of [`Resource::more_than`].
    ///
    /// # Errors
    /// As [`Resource::more_than`].
    pub fn less_than(&self, right: &Self) -> Result<bool, ResourceError> {
        self.compare(right, |left, right| left < right, MissingDimensions(true))
    }

    /// `=`: equal in every dimension. The application id is not compared, as in Linkis. Unlike `==`, the function projects
    /// the right operand and rejects different queues.
    ///
    /// # Errors
    /// As [`Resource::more_than`].
    pub fn equals(&self, right: &Self) -> Result<bool, ResourceError> {
        self.compare(right, |left, right| left == right, MissingDimensions(false))
    }

    /// `>=`: at least as large in every dimension, as [`Resource::covers`].
    ///
    /// # Errors
    /// As [`Resource::more_than`].
    pub fn not_less_than(&self, right: &Self) -> Result<bool, ResourceError> {
        self.compare(right, |left, right| left >= right, MissingDimensions(false))
    }

    /// `<=`: at most as large in every dimension.
    ///
    /// # Errors
    /// As [`Resource::more_than`].
    pub fn not_more_than(&self, right: &Self) -> Result<bool, ResourceError> {
        self.compare(right, |left, right| left <= right, MissingDimensions(false))
    }

    /// Returns whether this suffices for `asked`: at least as large in every dimension. Every grant depends on this
    /// comparison.
    ///
    /// # Errors
    /// As [`Resource::more_than`].
    pub fn covers(&self, asked: &Self) -> Result<bool, ResourceError> {
        self.not_less_than(asked)
    }

    fn compare(
        &self,
        right: &Self,
        holds: fn(i64, i64) -> bool,
        strict: MissingDimensions,
    ) -> Result<bool, ResourceError> {
        let right = right.widened(self.resource_type)?;
        self.common_place(&right)?;
        let mut compared = false;
        for (dimension, left, right) in self.amounts.pairs(&right.amounts, self.resource_type.shape()) {
            if matches!((dimension, left, right), (Dimension::Custom(_), 0, 0)) {
                continue;
            }
            if !holds(left, right) {
                return Ok(false);
            }
            compared = true;
        }
        Ok(compared || !strict.0)
    }
}

/// Whether a comparison without any dimension is false.
struct MissingDimensions(bool);

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn incomparable_resources_are_not_less_than_each_other() {
        let (a, b) = (Resource::load(2, 1).unwrap(), Resource::load(1, 2).unwrap());
        for answer in [a.more_than(&b), a.less_than(&b), a.covers(&b), a.not_more_than(&b), a.equals(&b)] {
            assert_eq!(answer, Ok(false));
        }
    }

    #[test]
    fn resource_with_one_equal_dimension_is_not_more() {
        let (a, b) = (Resource::load(2, 1).unwrap(), Resource::load(1, 1).unwrap());
        assert_eq!(a.more_than(&b), Ok(false));
        assert_eq!(a.covers(&b), Ok(true));
        assert_eq!(b.not_more_than(&a), Ok(true));
    }

    #[test]
    fn resource_comparison_widens_right_side() {
        let load = Resource::load(2, 1).unwrap();
        assert_eq!(load.covers(&Resource::memory(2).unwrap()), Ok(true));
        assert!(matches!(Resource::memory(2).unwrap().covers(&load), Err(ResourceError::Unanswerable { .. })));
    }

    #[test]
    fn resource_missing_and_zero_names_compare_equal() {
        let special = |gpu, disk: Option<i64>| {
            let disk = disk.map(|amount| ("disk".to_owned(), amount));
            Resource::special(disk.into_iter().chain([("gpu".to_owned(), gpu)]).collect()).unwrap()
        };
        let nothing = Resource::special(BTreeMap::new()).unwrap();
        for two in [special(2, None), special(2, Some(0))] {
            assert_eq!(two.more_than(&special(1, Some(0))), Ok(true));
            assert_eq!(two.more_than(&nothing), Ok(true));
            assert_eq!(nothing.less_than(&two), Ok(true));
            assert_eq!(nothing.covers(&two), Ok(false));
            assert_eq!(two.covers(&special(1, Some(1))), Ok(false));
        }
        assert_eq!(nothing.more_than(&nothing), Ok(false));
        assert_eq!(nothing.less_than(&special(0, None)), Ok(false));
    }
}
