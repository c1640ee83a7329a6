//! SplitMix64: a random generator of sufficient quality for choices, with equal numbers in every run.

use std::time::Duration;

/// Sequence of numbers that a seed determines.
pub(crate) struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xD1B5_4A32_D192_ED03))
    }

    /// Returns a number from 1 to `most`.
    pub fn up_to(&mut self, most: u64) -> u64 {
        self.next() % most + 1
    }

    /// Returns the time until the next of independent events with this rate.
    pub fn pause(&mut self, per_second: f64) -> Duration {
        // Above 0 and at most 1.
        let uniform = ((self.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64;
        Duration::from_secs_f64(-uniform.ln() / per_second)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }
}
