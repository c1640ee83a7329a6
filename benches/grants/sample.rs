//! Result of one measurement.

use std::time::Duration;

use crate::meter::Cost;

/// One measurement.
#[derive(Debug)]
pub(crate) struct Sample {
    /// Operations per second.
    pub rate: f64,
    /// Durations of the operations, if they were timed.
    pub times: Vec<Duration>,
    pub cost: Option<Cost>,
    /// Fraction of the operations that each instance served.
    pub shares: Vec<f64>,
    /// Number of failed calls.
    pub errors: u64,
    /// The first error.
    pub error: Option<String>,
}

impl Sample {
    /// Returns the median duration in seconds; `None` without durations.
    pub fn p50(&self) -> Option<f64> {
        (!self.times.is_empty()).then(|| median(self.times.iter().map(Duration::as_secs_f64)))
    }
}

/// Returns the median; zero without values.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = |index: usize| values.get(index).copied().unwrap_or_default();
    (middle(values.len().saturating_sub(1) / 2) + middle(values.len() / 2)) / 2.0
}
