//! What one measurement found.

use std::time::Duration;

use crate::meter::Cost;

/// One measurement.
#[derive(Debug)]
pub(crate) struct Sample {
    /// Operations per second.
    pub rate: f64,
    /// How long each took, if they were timed.
    pub times: Vec<Duration>,
    pub cost: Option<Cost>,
    /// What part of the operations each instance answered.
    pub shares: Vec<f64>,
    /// How many calls were not answered as they should be.
    pub errors: u64,
    /// What the first of them said.
    pub error: Option<String>,
}

impl Sample {
    /// The median time, in seconds; `None` if none were taken.
    pub fn p50(&self) -> Option<f64> {
        (!self.times.is_empty()).then(|| median(self.times.iter().map(Duration::as_secs_f64)))
    }
}

/// The value in the middle, or between the two there; zero of nothing.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = |index: usize| values.get(index).copied().unwrap_or_default();
    (middle(values.len().saturating_sub(1) / 2) + middle(values.len() / 2)) / 2.0
}
