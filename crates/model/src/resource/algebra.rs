//! Checked arithmetic of resources. The right operand is first projected onto the left type ([`Resource::project`]); the
//! result has the left type. Arithmetic never wraps and never saturates (unlike Linkis, whose amounts wrap and can be
//! negative).
//!
//! Amounts of different queues or namespaces cannot be combined (unlike Linkis, which gives the result the right-hand
//! queue). An operand without amounts in its queue is compatible with every queue. The result has no application id, as in
//! Linkis. Callers: the ledger and the audit, for all counters.

use super::amounts::Amounts;
use super::{Dimension, Resource, ResourceError, ResourceType};

impl Resource {
    /// Returns the sum per dimension.
    ///
    /// # Errors
    /// [`ResourceError::Overflow`], [`ResourceError::Unanswerable`], [`ResourceError::DifferentQueue`], and
    /// [`ResourceError::TooManyNames`] for Specials.
    pub fn add(&self, right: &Self) -> Result<Self, ResourceError> {
        self.combine(right, |dimension, left, right| left.checked_add(right).ok_or_else(|| overflow(dimension)))
    }

    /// Returns the difference per dimension.
    ///
    /// # Errors
    /// [`ResourceError::BelowZero`] if `right` is larger in a dimension; and those of [`Resource::add`].
    pub fn minus(&self, right: &Self) -> Result<Self, ResourceError> {
        self.combine(right, |dimension, left, right| {
            // Both are zero or more, so the difference always fits.
            if left < right {
                return Err(ResourceError::BelowZero { dimension: dimension.clone(), from: left, taken: right });
            }
            left.checked_sub(right).ok_or_else(|| overflow(dimension))
        })
    }

    /// Returns the product per dimension. (Linkis rejects it for DriverAndYarn and DriverAndKubernetes.)
    ///
    /// # Errors
    /// As [`Resource::add`].
    pub fn multiply(&self, right: &Self) -> Result<Self, ResourceError> {
        self.combine(right, |dimension, left, right| left.checked_mul(right).ok_or_else(|| overflow(dimension)))
    }

    /// Returns the integer quotient per dimension, truncated. (Linkis rejects it for DriverAndYarn and
    /// DriverAndKubernetes.)
    ///
    /// A custom dimension that is zero on both sides stays zero.
    ///
    /// # Errors
    /// [`ResourceError::DivideByZero`]; and those of [`Resource::add`].
    pub fn divide(&self, right: &Self) -> Result<Self, ResourceError> {
        self.combine(right, |dimension, left, right| match (dimension, left, right) {
            (Dimension::Custom(_), 0, 0) => Ok(0),
            (_, _, 0) => Err(ResourceError::DivideByZero { dimension: dimension.clone() }),
            _ => left.checked_div(right).ok_or_else(|| overflow(dimension)),
        })
    }

    /// Multiplies all amounts by a rate. As in Linkis, the result is truncated, except the rounded cores of Load,
    /// LoadInstance, drivers and Kubernetes. Both parts of a DriverAndKubernetes are scaled (unlike Linkis, which scales
    /// only the driver).
    ///
    /// # Errors
    /// [`ResourceError::InvalidRate`] for a negative or non-finite rate, [`ResourceError::Overflow`].
    pub fn multiply_by(&self, rate: f32) -> Result<Self, ResourceError> {
        if !rate.is_finite() || rate < 0.0 {
            return Err(ResourceError::InvalidRate { rate });
        }
        self.each(|dimension, amount| {
            let rounding = self.resource_type.rounding(dimension);
            scaled(amount, rate, rounding).ok_or_else(|| overflow(dimension))
        })
    }

    /// Multiplies all amounts by a count.
    ///
    /// # Errors
    /// [`ResourceError::Overflow`].
    pub fn times(&self, count: u32) -> Result<Self, ResourceError> {
        self.each(|dimension, amount| amount.checked_mul(count.into()).ok_or_else(|| overflow(dimension)))
    }

    /// Divides all amounts by an integer, truncated. Both parts of a DriverAndKubernetes are divided (unlike Linkis, which
    /// divides only the driver).
    ///
    /// # Errors
    /// [`ResourceError::InvalidDivisor`] for a divisor below 1.
    pub fn divide_by(&self, divisor: i64) -> Result<Self, ResourceError> {
        if divisor < 1 {
            return Err(ResourceError::InvalidDivisor { divisor });
        }
        self.each(|dimension, amount| amount.checked_div(divisor).ok_or_else(|| overflow(dimension)))
    }

    fn combine(
        &self,
        right: &Self,
        operation: impl FnMut(&Dimension, i64, i64) -> Result<i64, ResourceError>,
    ) -> Result<Self, ResourceError> {
        let right = right.widened(self.resource_type)?;
        let place = self.common_place(&right)?;
        let amounts = self.amounts.zip(&right.amounts, self.resource_type.shape(), operation)?.within_limits()?;
        Ok(Self { resource_type: self.resource_type, amounts, place, application_id: None })
    }

    fn each(
        &self,
        mut operation: impl FnMut(&Dimension, i64) -> Result<i64, ResourceError>,
    ) -> Result<Self, ResourceError> {
        let nothing = Amounts::default();
        let shape = self.resource_type.shape();
        let amounts = self.amounts.zip(&nothing, shape, |dimension, amount, _| operation(dimension, amount))?;
        Ok(Self { resource_type: self.resource_type, amounts, place: self.place.clone(), application_id: None })
    }
}

fn overflow(dimension: &Dimension) -> ResourceError {
    ResourceError::Overflow { dimension: dimension.clone() }
}

#[derive(Clone, Copy)]
enum Rounding {
    Truncate,
    /// To the nearest integer, halves up.
    Nearest,
}

impl ResourceType {
    /// Returns how Linkis rounds a scaled amount.
    const fn rounding(self, dimension: &Dimension) -> Rounding {
        match dimension {
            Dimension::Cores if !matches!(self, Self::Cpu) => Rounding::Nearest,
            Dimension::KubernetesMillicores => Rounding::Nearest,
            _ => Rounding::Truncate,
        }
    }
}

/// Integers up to this value are exact in an `f32`.
const EXACT_IN_F32: i64 = 1 << 24;
/// 2^63, the first number above `i64`; exact in an `f32`.
const BEYOND_I64: f32 = 9_223_372_036_854_775_808.0;

/// Returns `amount * rate` as an integer; `None` if it overflows. `rate` is finite and not negative, `amount` is not
/// negative.
fn scaled(amount: i64, rate: f32, rounding: Rounding) -> Option<i64> {
    if amount > EXACT_IN_F32 {
        return scaled_exactly(amount, rate, rounding);
    }
    // Small amounts use single precision as in Linkis: 10 cores * 0.7 is 7, although the nearest f32 to 0.7 is below it.
    #[expect(clippy::cast_precision_loss, reason = "exact up to EXACT_IN_F32")]
    let product = amount as f32 * rate;
    let whole = match rounding {
        Rounding::Truncate => product.trunc(),
        Rounding::Nearest => product.round(),
    };
    #[expect(clippy::cast_possible_truncation, reason = "whole, and in range by the condition")]
    (whole < BEYOND_I64).then_some(whole as i64)
}

/// As [`scaled`], in integers. Single precision would lose the low bits of a large amount (as in Linkis), even at a rate of
/// 1.
fn scaled_exactly(amount: i64, rate: f32, rounding: Rounding) -> Option<i64> {
    // An f32 is mantissa / 2^shift.
    let bits = rate.to_bits();
    let exponent = (bits >> 23) & 0xff;
    let fraction = bits & 0x7f_ffff;
    let (mantissa, shift) = match exponent {
        0 => (fraction, 149),
        _ => (fraction | 0x80_0000, 150 - i64::from(exponent)),
    };
    let product = i128::from(amount) * i128::from(mantissa); // below 2^87
    let whole = match u32::try_from(shift) {
        // At most 2^104.
        Err(_) | Ok(0) => product.checked_mul(1_i128 << shift.unsigned_abs())?,
        Ok(shift @ 1..=100) => match rounding {
            Rounding::Truncate => product >> shift,
            Rounding::Nearest => (product + (1 << (shift - 1))) >> shift,
        },
        Ok(_) => 0,
    };
    i64::try_from(whole).ok()
}

#[cfg(test)]
mod tests {
    use super::super::{KubernetesAmounts, ResourceParts, YarnAmounts};
    use super::*;
    use std::collections::BTreeMap;

    fn yarn(queue_memory: i64, queue_name: &str) -> Resource {
        Resource::from_parts(ResourceParts::Yarn(YarnAmounts {
            queue_memory,
            queue_name: queue_name.into(),
            ..YarnAmounts::default()
        }))
        .unwrap()
    }

    #[test]
    fn resource_errors_name_dimension() {
        let one = Resource::load_instance(1, 1, 1).unwrap();
        let full = Resource::load_instance(1, i64::MAX, 1).unwrap();
        assert_eq!(full.add(&one), Err(ResourceError::Overflow { dimension: Dimension::Cores }));
        assert_eq!(full.multiply(&full), Err(ResourceError::Overflow { dimension: Dimension::Cores }));
        let two = Resource::load_instance(1, 1, 2).unwrap();
        let short = ResourceError::BelowZero { dimension: Dimension::Instances, from: 1, taken: 2 };
        assert_eq!(one.minus(&two), Err(short));
        let divisor = Resource::load_instance(1, 0, 1).unwrap();
        assert_eq!(one.divide(&divisor), Err(ResourceError::DivideByZero { dimension: Dimension::Cores }));
    }

    #[test]
    fn resource_queues_mix_only_with_empty_one() {
        let (q, r) = (yarn(2, "q"), yarn(1, "r"));
        let different = ResourceError::DifferentQueue { left: "q".into(), right: "r".into() };
        assert_eq!(q.add(&r), Err(different));
        assert_eq!(q.add(&r.zero_like()).unwrap().queue_name(), Some("q"));
        assert_eq!(q.zero_like().add(&r).unwrap().queue_name(), Some("r"));
    }

    #[test]
    fn resource_custom_names_are_united() {
        let special = |pairs: &[(&str, i64)]| {
            Resource::special(pairs.iter().map(|(name, amount)| ((*name).to_owned(), *amount)).collect()).unwrap()
        };
        let (a, b) = (special(&[("gpu", 6)]), special(&[("disk", 1), ("gpu", 2)]));
        assert_eq!(a.add(&b), Ok(special(&[("disk", 1), ("gpu", 8)])));
        assert_eq!(a.divide(&special(&[("gpu", 2), ("disk", 0)])), Ok(special(&[("gpu", 3)])));
        assert!(matches!(b.divide(&a), Err(ResourceError::DivideByZero { .. })));
        assert!(matches!(a.minus(&b), Err(ResourceError::BelowZero { taken: 1, .. })));
    }

    #[test]
    fn resource_zero_custom_names_are_dropped() {
        let named = |range: std::ops::Range<u32>, amount| {
            Resource::special(range.map(|n| (format!("n{n}"), amount)).collect::<BTreeMap<_, _>>()).unwrap()
        };
        let (old, new) = (named(0..64, 0), named(64..128, 1));
        assert_eq!(old.add(&new), Ok(new.clone()));
        assert!(matches!(named(0..64, 1).add(&new), Err(ResourceError::TooManyNames { names: 128, .. })));
    }

    #[test]
    fn scaling_rounds_cores_and_truncates_the_rest() {
        assert_eq!(Resource::cpu(5).unwrap().multiply_by(0.5), Resource::cpu(2));
        assert_eq!(Resource::cpu(10).unwrap().multiply_by(0.7), Resource::cpu(7));
        assert_eq!(Resource::load(5, 5).unwrap().multiply_by(0.5), Resource::load(2, 3));
        assert_eq!(Resource::load(5, 5).unwrap().divide_by(2), Resource::load(2, 2));
        let kubernetes = |memory, millicores| {
            Resource::from_parts(ResourceParts::Kubernetes(KubernetesAmounts {
                memory,
                millicores,
                namespace: "n".into(),
            }))
        };
        assert_eq!(kubernetes(5, 5).unwrap().multiply_by(0.5), kubernetes(2, 3));
        for rate in [-0.1, f32::NAN, f32::INFINITY] {
            assert!(matches!(
                Resource::zero(ResourceType::Cpu).multiply_by(rate),
                Err(ResourceError::InvalidRate { .. })
            ));
        }
        for divisor in [0, -1] {
            assert_eq!(Resource::cpu(1).unwrap().divide_by(divisor), Err(ResourceError::InvalidDivisor { divisor }));
        }
    }

    #[test]
    fn scaling_keeps_large_amounts_exact() {
        let scale = |amount, rate| scaled(amount, rate, Rounding::Truncate);
        assert_eq!(scale(i64::MAX, 1.0), Some(i64::MAX));
        assert_eq!(scale(i64::MAX, 0.5), Some(i64::MAX / 2));
        assert_eq!(scaled(i64::MAX, 0.5, Rounding::Nearest), Some(i64::MAX / 2 + 1));
        assert_eq!(scale(i64::MAX, f32::from_bits(1)), Some(0));
        assert_eq!(scale(i64::MAX, f32::MIN_POSITIVE), Some(0));
        assert_eq!(scale(i64::MAX, 0.0), Some(0));
        assert_eq!(scale((1 << 30) + 1, 3.0), Some(3 * ((1 << 30) + 1)));
        for (amount, rate) in [(i64::MAX, 2.0), (i64::MAX, f32::MAX), (1 << 30, f32::MAX), (1, f32::MAX), (2, 1e19)] {
            assert_eq!(scale(amount, rate), None, "{amount} * {rate}");
        }
    }
}
