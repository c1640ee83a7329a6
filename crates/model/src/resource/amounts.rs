//! Amounts of a resource by dimension, without type or sign rules.
//!
//! Fixed dimensions are in an array, custom ones in a map by name. [`super::Resource`] enforces the rules of its type on
//! top.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::dimension::FIXED;
use super::{Dimension, ResourceError};

/// Maximum number of custom names in one Special.
const NAMES_MAX: usize = 64;
/// Maximum length of all custom names of one Special in bytes. The bound keeps its JSON, with escapes, within the limit of
/// the reader.
const NAMES_BYTES_MAX: usize = 6 * 1024;

/// Amounts by dimension. Slots outside the shape of the resource stay zero. An empty `custom` does not allocate.
#[derive(Clone, Debug, Default)]
pub(super) struct Amounts {
    fixed: [i64; FIXED],
    custom: BTreeMap<Arc<str>, i64>,
}

impl Amounts {
    pub(super) fn get(&self, dimension: &Dimension) -> i64 {
        let found = match dimension {
            Dimension::Custom(name) => self.custom.get(&**name),
            fixed => fixed.slot().and_then(|slot| self.fixed.get(slot)),
        };
        found.copied().unwrap_or(0)
    }

    pub(super) fn set(&mut self, dimension: Dimension, amount: i64) {
        if let Dimension::Custom(name) = dimension {
            self.custom.insert(name, amount);
        } else if let Some(cell) = dimension.slot().and_then(|slot| self.fixed.get_mut(slot)) {
            *cell = amount;
        }
    }

    /// Returns whether the dimension is custom and exists here, even with zero.
    pub(super) fn names(&self, dimension: &Dimension) -> bool {
        matches!(dimension, Dimension::Custom(name) if self.custom.contains_key(&**name))
    }

    /// Returns the amounts of the shape in its order, then the custom ones by name.
    pub(super) fn iter(&self, shape: &'static [Dimension]) -> impl Iterator<Item = (Dimension, i64)> + '_ {
        let fixed = shape.iter().map(|dimension| (dimension.clone(), self.get(dimension)));
        fixed.chain(self.custom().map(|(name, amount)| (Dimension::Custom(name.clone()), amount)))
    }

    /// Returns the custom amounts by name.
    pub(super) fn custom(&self) -> impl Iterator<Item = (&Arc<str>, i64)> {
        self.custom.iter().map(|(name, amount)| (name, *amount))
    }

    /// Returns both amounts of every dimension of the shape and of every custom dimension of either side; a missing one is
    /// zero.
    pub(super) fn pairs(
        &self,
        right: &Self,
        shape: &'static [Dimension],
    ) -> impl Iterator<Item = (Dimension, i64, i64)> {
        let ours = self.iter(shape).map(|(dimension, amount)| {
            let other = right.get(&dimension);
            (dimension, amount, other)
        });
        let theirs = right.custom().filter(|(name, _)| !self.custom.contains_key(&***name));
        ours.chain(theirs.map(|(name, amount)| (Dimension::Custom(name.clone()), 0, amount)))
    }

    /// Combines two vectors per dimension, up to the first error.
    pub(super) fn zip(
        &self,
        right: &Self,
        shape: &'static [Dimension],
        mut combine: impl FnMut(&Dimension, i64, i64) -> Result<i64, ResourceError>,
    ) -> Result<Self, ResourceError> {
        let mut combined = Self::default();
        for (dimension, left, right) in self.pairs(right, shape) {
            let amount = combine(&dimension, left, right)?;
            combined.set(dimension, amount);
        }
        Ok(combined)
    }

    /// Subtracts other amounts, in every dimension that both have.
    pub(super) fn take_off(&mut self, taken: &Self) {
        for (left, taken) in self.fixed.iter_mut().zip(&taken.fixed) {
            *left = left.saturating_sub(*taken);
        }
        for (name, left) in &mut self.custom {
            *left = left.saturating_sub(taken.custom.get(name).copied().unwrap_or(0));
        }
    }

    /// Enforces the limits of custom names. Names with zero amounts are for display only and are dropped first, so that a
    /// long-lived sum does not fill up with zeros.
    pub(super) fn within_limits(mut self) -> Result<Self, ResourceError> {
        if self.check_limits().is_err() {
            self.custom.retain(|_, amount| *amount != 0);
            self.check_limits()?;
        }
        Ok(self)
    }

    pub(super) fn check_limits(&self) -> Result<(), ResourceError> {
        let names = self.custom.len();
        let bytes: usize = self.custom.keys().map(|name| name.len()).sum();
        if names > NAMES_MAX || bytes > NAMES_BYTES_MAX {
            return Err(ResourceError::TooManyNames { names, bytes, names_max: NAMES_MAX, bytes_max: NAMES_BYTES_MAX });
        }
        Ok(())
    }
}

/// A missing custom name is zero.
impl PartialEq for Amounts {
    fn eq(&self, other: &Self) -> bool {
        self.fixed == other.fixed && self.pairs(other, &[]).all(|(_, left, right)| left == right)
    }
}

impl Eq for Amounts {}
