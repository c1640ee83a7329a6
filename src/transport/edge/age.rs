//! How old connections get: not all equally, so that those that began together do not all come back in the same second.

use std::time::Duration;

/// How many ages there are; a power of two.
const AGES: u32 = 64;

/// The ages around `age`, from nine to eleven tenths of it: neighbours are far apart, so that those who come one after the other are.
pub fn spread(age: Duration) -> impl Iterator<Item = Duration> {
    (0..AGES).map(move |nth: u32| {
        let place = nth.reverse_bits() >> (u32::BITS - AGES.ilog2());
        age.mul_f64(0.9 + 0.2 * f64::from(place) / f64::from(AGES - 1))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten thousand that come in the same moment, and get their ages in turn: how many of them go within one second at most.
    fn most_in_a_second(age: Duration) -> usize {
        let ages: Vec<Duration> = spread(age).collect();
        let mut ends: Vec<Duration> = ages.iter().cycle().take(10_000).copied().collect();
        ends.sort_unstable();
        let until = |begin: Duration| ends.partition_point(|end| *end < begin + Duration::from_secs(1));
        ends.iter().enumerate().map(|(nth, begin)| until(*begin) - nth).max().unwrap_or_default()
    }

    #[test]
    fn those_that_came_together_do_not_come_back_together() {
        for (minutes, most) in [(1, 1000), (10, 160), (60, 160)] {
            let found = most_in_a_second(Duration::from_secs(60 * minutes));
            assert!(found <= most, "{found} after {minutes} minutes");
        }
    }

    #[test]
    fn ages_are_within_a_tenth_and_around_what_was_asked_for() {
        let age = Duration::from_secs(1000);
        let ages: Vec<f64> = spread(age).map(|age| age.as_secs_f64()).collect();
        assert!(ages.iter().all(|age| (899.99..=1100.01).contains(age)), "{ages:?}");
        let mean = ages.iter().sum::<f64>() / f64::from(AGES);
        assert!((mean - 1000.0).abs() < 1.0, "{mean}");
        let near = ages.windows(2).filter(|pair| (pair[0] - pair[1]).abs() < 20.0).count();
        assert_eq!(near, 0, "neighbours are far apart");
        assert_eq!(spread(Duration::from_secs(365 * 86400)).count(), 64);
    }
}
