//! Results of all measurements.

use std::time::Duration;

use crate::{
    Workload,
    check::CheckResult,
    churn::Churn,
    meter::Cost,
    plan::{Step, Subject},
    sample::{Sample, median},
};

/// Minimum number of durations for a p99.9.
const TIMES_MIN_FOR_P999: usize = 1000;

#[derive(Debug)]
pub(crate) struct Results {
    pub workloads: Vec<Workload>,
    pub series: Vec<Series>,
    pub churns: Vec<Churn>,
    /// Results of the database checks.
    pub checked: Vec<CheckResult>,
}

impl Results {
    pub fn find(&self, subject: Subject, workload: Workload, callers: usize) -> Option<&Series> {
        let step = Step::new(subject, workload, callers);
        self.series.iter().find(|series| series.step == step)
    }

    /// Returns the series with the highest rate.
    pub fn best(&self, subject: Subject, workload: Workload) -> Option<&Series> {
        let of = |series: &&Series| series.step.subject == subject && series.step.workload == workload;
        self.series.iter().filter(of).max_by(|a, b| a.rate().total_cmp(&b.rate()))
    }

    /// Returns the number of failed calls.
    pub fn errors(&self) -> u64 {
        let samples = self.series.iter().flat_map(|series| &series.samples);
        samples.map(|sample| sample.errors).sum::<u64>() + self.churns.iter().map(|churn| churn.errors).sum::<u64>()
    }

    /// Returns true if no call failed and all checks passed.
    pub fn correct(&self) -> bool {
        self.errors() == 0 && self.checked.iter().all(|checked| checked.passed)
    }
}

/// Samples of one step, one per round.
#[derive(Debug)]
pub(crate) struct Series {
    pub step: Step,
    pub samples: Vec<Sample>,
}

/// Percentiles of the durations over all rounds: p50, p99 and p99.9.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Latency {
    pub p50: Duration,
    pub p99: Duration,
    pub p999: Option<Duration>,
}

impl Series {
    /// Returns the median rate.
    pub fn rate(&self) -> f64 {
        median(self.rates())
    }

    /// Returns the rate as a fraction of another's: the median of the rounds' ratios. A machine that changes its speed
    /// between rounds does not affect it.
    pub fn part_of(&self, other: &Self) -> f64 {
        median(self.rates().zip(other.rates()).map(|(rate, other)| rate / other))
    }

    /// Returns one part of the cost as a fraction of another series': the median of the rounds' ratios.
    pub fn cost_part_of(&self, other: &Self, cost: fn(&Cost) -> f64) -> Option<f64> {
        let times = |series: &Self| -> Option<Vec<f64>> {
            series.samples.iter().map(|sample| sample.cost.as_ref().map(cost)).collect()
        };
        Some(median(times(self)?.into_iter().zip(times(other)?).map(|(time, other)| time / other)))
    }

    /// Returns the median duration as a fraction of another series': the median of the rounds' ratios.
    pub fn p50_part_of(&self, other: &Self) -> Option<f64> {
        let p50s = |series: &Self| series.samples.iter().map(Sample::p50).collect::<Option<Vec<f64>>>();
        Some(median(p50s(self)?.into_iter().zip(p50s(other)?).map(|(p50, other)| p50 / other)))
    }

    pub fn rates(&self) -> impl Iterator<Item = f64> {
        self.samples.iter().map(|sample| sample.rate)
    }

    pub fn latency(&self) -> Option<Latency> {
        let mut times: Vec<Duration> = self.samples.iter().flat_map(|sample| sample.times.iter().copied()).collect();
        times.sort_unstable();
        let at = |part: f64| times.get(((times.len() as f64 * part) as usize).min(times.len().saturating_sub(1)));
        let p999 = at(0.999).filter(|_| times.len() >= TIMES_MIN_FOR_P999);
        Some(Latency { p50: *at(0.5)?, p99: *at(0.99)?, p999: p999.copied() })
    }

    /// Returns the medians of the cost per operation.
    pub fn cost(&self) -> Option<Cost> {
        let costs: Option<Vec<Cost>> = self.samples.iter().map(|sample| sample.cost).collect();
        let costs = costs?;
        let of = |part: fn(&Cost) -> f64| median(costs.iter().map(part));
        Some(Cost {
            load: of(|cost| cost.load),
            server: of(|cost| cost.server),
            postgresql: of(|cost| cost.postgresql),
            wal_bytes: of(|cost| cost.wal_bytes),
        })
    }

    /// Returns the smallest fraction of its fair share that an instance served.
    pub fn least_share(&self) -> Option<f64> {
        let least = |sample: &Sample| {
            let fair = 1.0 / sample.shares.len() as f64;
            sample.shares.iter().map(|share| share / fair).reduce(f64::min)
        };
        self.samples.iter().filter(|sample| sample.shares.len() > 1).filter_map(least).reduce(f64::min)
    }

    pub fn errors(&self) -> u64 {
        self.samples.iter().map(|sample| sample.errors).sum()
    }
}
