//! Metrics of background tasks and of open jobs. Callers: the tasks of `rm-service`; the announcing task stores the
//! readings.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use arc_swap::ArcSwapOption;
use prometheus_client::metrics::{family::Family, gauge::Gauge};

use super::{Counter, Label};

/// Gauge in seconds: a duration or a Unix time.
type Seconds = Gauge<f64, std::sync::atomic::AtomicU64>;

metrics! {
    /// Families of all tasks.
    pub(super) struct TaskFamilies {
        last_run: Family<Label, Seconds> = "task_last_run_timestamp_seconds",
            "Time of the last step of a background task, successful or not: a value that does not advance shows a stuck \
                task";
        last_success: Family<Label, Seconds> = "task_last_success_timestamp_seconds",
            "Time of the last successful step of a background task: if it lags behind the last run, the log states the \
                failure";
        lag: Family<Label, Seconds> = "task_lag_seconds",
            "Delay of a background task: while it grows, more work falls due than is done";
        steps: Family<Label, Counter> = "task_steps_total",
            "Successful steps of a background task";
        errors: Family<Label, Counter> = "task_errors_total",
            "Failed steps of a background task, which are retried: the log states the reason";
        jobs: Family<Label, Gauge> = "jobs",
            "Remaining large jobs by kind: any instance executes them in steps";
    }
}

impl TaskFamilies {
    pub fn task(&self, task: &'static str) -> TaskMetrics {
        let task = [("task", task)];
        TaskMetrics {
            last_run: self.last_run.get_or_create_owned(&task),
            last_success: self.last_success.get_or_create_owned(&task),
            lag: self.lag.get_or_create_owned(&task),
            steps: self.steps.get_or_create_owned(&task),
            errors: self.errors.get_or_create_owned(&task),
            last_error: Arc::default(),
        }
    }

    pub fn jobs(&self, kind: &'static str) -> Gauge {
        self.jobs.get_or_create_owned(&[("kind", kind)])
    }
}

/// Metrics of one background task, created when it starts.
#[derive(Clone, Debug)]
pub struct TaskMetrics {
    last_run: Seconds,
    last_success: Seconds,
    lag: Seconds,
    steps: Counter,
    errors: Counter,
    last_error: Arc<ArcSwapOption<String>>,
}

/// Maximum length of a stored error text, in bytes.
const ERROR_BYTES_MAX: usize = 1024;

impl TaskMetrics {
    /// Records a successful step, also one without work.
    pub fn step(&self) {
        self.steps.inc();
        let now = now();
        self.last_run.set(now);
        self.last_success.set(now);
    }

    /// Sets the lag behind the due time; zero if the task has caught up.
    pub fn lag(&self, behind: Duration) {
        self.lag.set(behind.as_secs_f64());
    }

    /// Records a failed step with its error, in a text for operators.
    pub fn failed(&self, mut why: String) {
        self.errors.inc();
        self.last_run.set(now());
        why.truncate(why.floor_char_boundary(ERROR_BYTES_MAX));
        self.last_error.store(Some(Arc::new(why)));
    }

    /// Returns the present values.
    pub fn reading(&self) -> TaskReading {
        TaskReading {
            last_run: self.last_run.get(),
            last_success: self.last_success.get(),
            lag: self.lag.get(),
            steps: self.steps.get(),
            errors: self.errors.get(),
            last_error: self.last_error.load().as_deref().cloned(),
        }
    }
}

/// Values of one background task.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskReading {
    /// Unix time of the last finished step in seconds, successful or not; 0 if none.
    pub last_run: f64,
    /// Unix time of the last successful step in seconds; 0 if none.
    pub last_success: f64,
    /// Lag behind the due time, in seconds.
    pub lag: f64,
    /// Number of successful steps.
    pub steps: u64,
    /// Number of failed steps.
    pub errors: u64,
    /// Error of the last failed step.
    pub last_error: Option<String>,
}

/// Returns the present Unix time in seconds.
fn now() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0.0, |since| since.as_secs_f64())
}
