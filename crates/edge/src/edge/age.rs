//! Ages of connections: spread, so that connections of one moment do not all return in the same second.
//!
//! Caller: the server of the root package, which gives each accepted connection the next age in turn.

use std::time::Duration;

/// Number of ages; a power of two.
const AGES: u32 = 64;

/// Returns 64 ages between nine and eleven tenths of `age`. Consecutive ages differ widely, so that connections
/// in a row do.
pub fn spread(age: Duration) -> impl Iterator<Item = Duration> {
    (0..AGES).map(move |nth: u32| {
        let place = nth.reverse_bits() >> (u32::BITS - AGES.ilog2());
        age.mul_f64(0.9 + 0.2 * f64::from(place) / f64::from(AGES - 1))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the largest number of 10,000 simultaneous connections that end within one second.
    fn most_in_a_second(age: Duration) -> usize {
        let ages: Vec<Duration> = spread(age).collect();
        let mut ends: Vec<Duration> = ages.iter().cycle().take(10_000).copied().collect();
        ends.sort_unstable();
        let until = |begin: Duration| ends.partition_point(|end| *end < begin + Duration::from_secs(1));
        ends.iter().enumerate().map(|(nth, begin)| until(*begin) - nth).max().unwrap_or_default()
    }

    #[test]
    fn connection_ages_are_spread() {
        for (minutes, most) in [(1, 1000), (10, 160), (60, 160)] {
            let found = most_in_a_second(Duration::from_secs(60 * minutes));
            assert!(found <= most, "{found} after {minutes} minutes");
        }
    }

    #[test]
    fn connection_ages_are_near_the_setting() {
        let age = Duration::from_secs(1000);
        let ages: Vec<f64> = spread(age).map(|age| age.as_secs_f64()).collect();
        assert!(ages.iter().all(|age| (899.99..=1100.01).contains(age)), "{ages:?}");
        let mean = ages.iter().sum::<f64>() / f64::from(AGES);
        assert!((mean - 1000.0).abs() < 1.0, "{mean}");
        let near = ages.windows(2).filter(|pair| (pair[0] - pair[1]).abs() < 20.0).count();
        assert_eq!(near, 0, "ages of neighbours differ");
        assert_eq!(spread(Duration::from_secs(365 * 86400)).count(), 64);
    }
}
