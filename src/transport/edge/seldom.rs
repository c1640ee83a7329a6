//! Logging at a bounded rate what a crowd can cause.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Lets so many through in a time, and counts the others.
#[derive(Debug)]
pub struct Seldom {
    at_most: u32,
    within: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    since: Option<Instant>,
    told: u32,
    left_out: u64,
}

impl Seldom {
    /// Lets `at_most` through `within` a time.
    pub fn new(at_most: u32, within: Duration) -> Self {
        Self { at_most, within, state: Mutex::default() }
    }

    /// Whether one more is let through, at `now`: then how many were left out since the last one that was.
    pub fn tell(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.since.is_none_or(|since| now.saturating_duration_since(since) >= self.within) {
            (state.since, state.told) = (Some(now), 0);
        }
        if state.told >= self.at_most {
            state.left_out += 1;
            return None;
        }
        state.told += 1;
        Some(std::mem::take(&mut state.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_is_counted() {
        let (seldom, start) = (Seldom::new(2, Duration::from_secs(1)), Instant::now());
        let at = |millis| seldom.tell(start + Duration::from_millis(millis));
        assert_eq!([at(0), at(1), at(2), at(999)], [Some(0), Some(0), None, None]);
        assert_eq!([at(1000), at(1001), at(1002)], [Some(2), Some(0), None]);
    }
}
