//! SplitMix64: a random generator with a seed, so that a run can be repeated with equal choices.

use std::time::Duration;

/// A stream of numbers that depends on its seed alone.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a separate stream, so that its draws do not change those of others.
    pub fn fork(&mut self) -> Self {
        Self(self.next())
    }

    /// Returns a number from `low` to `high`, both included.
    pub fn between(&mut self, low: i64, high: i64) -> i64 {
        let span = u64::try_from(high - low + 1).unwrap();
        low + i64::try_from(self.next() % span).unwrap()
    }

    pub fn millis(&mut self, low: i64, high: i64) -> Duration {
        Duration::from_millis(u64::try_from(self.between(low, high)).unwrap())
    }

    /// The pace of a caller or of the faults: waits as long as the seed decides.
    pub async fn pause(&mut self, low: i64, high: i64) {
        tokio::time::sleep(self.millis(low, high)).await;
    }

    pub fn percent(&mut self, chance: i64) -> bool {
        self.between(0, 99) < chance
    }

    pub fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.next() % len as u64).unwrap()
    }

    pub fn pick<T: Copy, const N: usize>(&mut self, of: [T; N]) -> T {
        of[self.index(N)]
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.index(last + 1));
        }
    }
}
