//! Background tasks: work without a caller. Each task has a name, a session and its own metrics.
//!
//! The driver runs each task step by step; an error delays the next step. Most tasks run only on the instance that owns the
//! lease. Two instances may own it for a moment, so each step must be safe to repeat.
//! Never: does unbounded work in one step. Caller: the server, which starts the tasks.
//!
//! - Tickets, EMs, counters: `expiry`, `lost_ems`, `unregister`, `holds`; `count_label_sets`, `prune_counters`, `self_audit`.
//! - History: `build_indexes`, `prune_history`, `usage` (sums per hour), `refusals` (sums of this instance).
//! - Figures: `cluster_figures`, `fullest` (scopes by share of a maximum), `user_sums` (use by user), `announce` (the instance and its tasks).
//! - Waiting requests: `reclaim` (engines that are to end for them), `reclaim_places` (where it tries them), and
//!   `reclaim_sweeps` (its reads of tickets).
//! - Shared: `lease`, `steps` (retries of a step), `round_robin` (turns of EMs).

use std::{
    future::Future,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use tokio::{sync::Notify, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{error::Error, lock::lock};
use rm_store::{Store, StoreError, Work, session::Session};
use rm_telemetry::cause;
use rm_telemetry::metrics::{Metrics, TaskMetrics, TaskReading};

use super::tasks::InstanceTasks;
use lease::LeaseFlag;

pub mod announce;
pub mod build_indexes;
pub mod cluster_figures;
pub mod count_label_sets;
pub mod expiry;
pub mod fullest;
pub mod holds;
pub mod lease;
pub mod lost_ems;
pub mod prune_counters;
pub mod prune_history;
pub mod reclaim;
mod reclaim_places;
mod reclaim_sweeps;
pub mod refusals;
mod round_robin;
pub mod self_audit;
mod steps;
pub mod unregister;
pub mod usage;
pub mod user_sums;

/// Pause after a scan of all rows, as a multiple of its duration: a scan then uses at most a twentieth of a connection's time.
const PAUSE_TIMES: u32 = 19;

/// Longest pause after consecutive failures.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// No work is left for now; the next step follows after the period.
    Done,
    /// Work is left; the next step follows immediately.
    More,
    /// Work is left that cannot be done now; the next step follows after this duration, or after the period if that is longer.
    Later(Duration),
}

/// A background task, done in steps.
pub trait Task: Send + 'static {
    /// Name of the task in metrics, logs and reports.
    const NAME: &'static str;

    /// Interval between steps without known work.
    const PERIOD: Duration;

    /// Expected duration of a step, which selects its connection.
    const WORK: Work = Work::Short;

    /// True if only the instance with the background lease makes the steps.
    const LEASED: bool = false;

    /// Does a bounded part of the work.
    ///
    /// # Errors
    /// Database errors; the driver logs them and retries after a pause.
    fn step(&mut self, session: &mut Session) -> impl Future<Output = Result<Step, StoreError>> + Send;

    /// Cleans up at shutdown; no further step follows.
    fn end(&mut self, _: &mut Session) -> impl Future<Output = ()> + Send {
        async {}
    }
}

/// The running tasks. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct RunningTasks(Arc<Mutex<Vec<(&'static str, TaskMetrics)>>>);

impl RunningTasks {
    /// Returns the metrics of each task, by name.
    pub fn readings(&self) -> Vec<(&'static str, TaskReading)> {
        let running = lock(&self.0);
        running.iter().map(|(name, report)| (*name, report.reading())).collect()
    }

    fn add(&self, name: &'static str, report: TaskMetrics) {
        lock(&self.0).push((name, report));
    }
}

/// Runs tasks until shutdown.
#[derive(Clone, Debug)]
pub struct Driver {
    store: Store,
    tasks: InstanceTasks,
    metrics: Metrics,
    stopping: CancellationToken,
    running: RunningTasks,
    holder: LeaseFlag,
}

impl Driver {
    /// Creates a driver without tasks.
    pub fn new(store: Store, tasks: InstanceTasks, metrics: Metrics, stopping: CancellationToken) -> Self {
        Self { store, tasks, metrics, stopping, running: RunningTasks::default(), holder: LeaseFlag::default() }
    }

    /// Returns the running tasks.
    pub fn running(&self) -> RunningTasks {
        self.running.clone()
    }

    /// Returns the flag of the background lease, which [`RenewLease`](lease::RenewLease) updates.
    pub fn holder(&self) -> LeaseFlag {
        self.holder.clone()
    }

    /// Starts a task. `wake` starts its next step immediately.
    pub fn start<T: Task>(&self, mut task: T, wake: Arc<Notify>) {
        let (mut session, report, stopping) =
            (self.store.background_session(T::WORK), self.metrics.task(T::NAME), self.stopping.clone());
        self.running.add(T::NAME, report.clone());
        let (metrics, holder) = (self.metrics.clone(), self.holder.clone());
        self.tasks.spawn(async move {
            tokio::select! {
                () = stopping.cancelled() => {}
                () = drive(&mut task, &mut session, &report, (&wake, &metrics, &holder)) => {}
            }
            // A reply may still arrive on the old connection.
            session.reset();
            task.end(&mut session).await;
        });
    }
}

async fn drive<T: Task>(
    task: &mut T,
    session: &mut Session,
    report: &TaskMetrics,
    (wake, metrics, holder): (&Notify, &Metrics, &LeaseFlag),
) {
    // Instances that start together step at different times.
    let mut due = Instant::now() + jitter(T::PERIOD);
    let mut failures = 0_u32;
    loop {
        tokio::select! {
            () = tokio::time::sleep_until(due) => {}
            () = wake.notified() => due = due.min(Instant::now()),
        }
        report.lag(due.elapsed());
        let step = if T::LEASED && !holder.holds() { Ok(Step::Done) } else { task.step(session).await };
        due = match step {
            Ok(step) => {
                session.give_back().await;
                failures = 0;
                report.step();
                match step {
                    Step::More => Instant::now(),
                    Step::Done => Instant::now() + T::PERIOD,
                    Step::Later(pause) => Instant::now() + pause.max(T::PERIOD),
                }
            }
            Err(error) => {
                session.reset_after(&error);
                metrics.database.failed(error.failure());
                if failures == 0 && !error.is_lock_timeout() && !error.is_logged() {
                    tracing::warn!(task = T::NAME, error = cause(&error), "background work is delayed");
                }
                report.failed(Error::from(error).to_string());
                failures = failures.saturating_add(1);
                Instant::now() + (T::PERIOD * (1 << failures.min(6))).min(PAUSE_MAX.max(T::PERIOD))
            }
        };
    }
}

/// Returns up to half of a period, by the clock; nothing depends on its quality.
fn jitter(period: Duration) -> Duration {
    let nanos = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.subsec_nanos());
    period.mul_f64(f64::from(nanos % 1000) / 2000.0)
}
