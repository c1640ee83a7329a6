//! Background work: what is done although nobody waits for it. One driver runs all of it, each task under a name, step by step: a step
//! does a bounded amount of work, on a connection of its own, and reports.
//!
//! - `lease`: which instance does what one does for all;
//! - `expiry`: locked tickets whose deadline passes;
//! - `silence`: EMs of which nothing is heard any more;
//! - `going`: the tickets of EMs that go, in steps;
//! - `cluster`: what the metrics tell of the cluster as a whole;
//! - `counting`: the counters of label sets that are new, in steps, and of those that count no more;
//! - `pruning`: counters of nothing;
//! - `holds`: those that are over;
//! - `indexing`: parts of the history that are over get indexes;
//! - `announcing`: that the instance lives, and how its tasks fare;
//! - `fullest`: the scopes that hold the largest share of a maximum;
//! - `refusals`: what was refused on this instance, every few seconds;
//! - `retention`: what is older than the history reaches;
//! - `self_audit`: whether the books are in order, every hour;
//! - `steps`: how a job's step is tried again that failed;
//! - `turns`: whose turn it is of many EMs;
//! - `usage`: use over time, summed from the ends in the history.

use std::{
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use tokio::{sync::Notify, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{
    error::Error,
    metrics::{Metrics, TaskMetrics, Told},
    store::{Store, StoreError, Work, session::Session},
};

use super::tasks::Tasks;

pub mod announcing;
pub mod cluster;
pub mod counting;
pub mod expiry;
pub mod fullest;
pub mod going;
pub mod holds;
pub mod indexing;
pub mod lease;
pub mod pruning;
pub mod refusals;
pub mod retention;
pub mod self_audit;
pub mod silence;
mod steps;
mod turns;
pub mod usage;

/// How many times as long as a look at everything took, whoever has looked rests before the next: that takes a connection a twentieth of
/// its time at most.
const PAUSE_TIMES: u32 = 19;

/// The longest pause after steps that failed one after another.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// What a step leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// There is nothing more to do for now.
    Done,
    /// There is more: the next step follows at once.
    More,
    /// There is more, but it cannot be done now: the next step follows after so long.
    Later(Duration),
}

/// Work that is done in steps.
pub trait Task: Send + 'static {
    /// What it is called, where it reports.
    const NAME: &'static str;

    /// How often to look for something to do.
    const PERIOD: Duration;

    /// How long a step takes.
    const WORK: Work = Work::Short;

    /// Does a part of what there is to do, which is bounded however much that is.
    fn step(&mut self, session: &mut Session) -> impl Future<Output = Result<Step, StoreError>> + Send;

    /// The server stops: nothing more is done.
    fn end(&mut self, _: &mut Session) -> impl Future<Output = ()> + Send {
        async {}
    }
}

/// The tasks that run; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Running(Arc<Mutex<Vec<(&'static str, TaskMetrics)>>>);

impl Running {
    /// What each has reported of itself, by name.
    pub fn told(&self) -> Vec<(&'static str, Told)> {
        let running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        running.iter().map(|(name, report)| (*name, report.told())).collect()
    }

    fn add(&self, name: &'static str, report: TaskMetrics) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((name, report));
    }
}

/// Runs tasks until the server stops.
#[derive(Clone, Debug)]
pub struct Driver {
    store: Store,
    tasks: Tasks,
    metrics: Metrics,
    stopping: CancellationToken,
    running: Running,
}

impl Driver {
    /// No task runs yet.
    pub fn new(store: Store, tasks: Tasks, metrics: Metrics, stopping: CancellationToken) -> Self {
        Self { store, tasks, metrics, stopping, running: Running::default() }
    }

    /// The tasks that it runs.
    pub fn running(&self) -> Running {
        self.running.clone()
    }

    /// Starts a task; whoever knows that there is something to do may wake it by `wake`.
    pub fn start<T: Task>(&self, mut task: T, wake: Arc<Notify>) {
        let (mut session, report, stopping) =
            (self.store.background_session(T::WORK), self.metrics.task(T::NAME), self.stopping.clone());
        self.running.add(T::NAME, report.clone());
        let metrics = self.metrics.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = stopping.cancelled() => {}
                () = drive(&mut task, &mut session, &report, (&wake, &metrics)) => {}
            }
            // An answer may still come on this connection.
            session.reset();
            task.end(&mut session).await;
        });
    }
}

async fn drive<T: Task>(
    task: &mut T,
    session: &mut Session,
    report: &TaskMetrics,
    (wake, metrics): (&Notify, &Metrics),
) {
    // Instances that start together do not look together.
    let mut due = Instant::now() + jitter(T::PERIOD);
    let mut failures = 0_u32;
    loop {
        tokio::select! {
            () = tokio::time::sleep_until(due) => {}
            () = wake.notified() => due = due.min(Instant::now()),
        }
        report.lag(due.elapsed());
        due = match task.step(session).await {
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
                metrics.database.failed(&error);
                if failures == 0 && !error.is_lock_timeout() && !error.is_told() {
                    tracing::warn!(
                        task = T::NAME,
                        error = &error as &dyn std::error::Error,
                        "background work has to wait"
                    );
                }
                report.failed(Error::from(error).to_string());
                failures = failures.saturating_add(1);
                Instant::now() + (T::PERIOD * (1 << failures.min(6))).min(PAUSE_MAX.max(T::PERIOD))
            }
        };
    }
}

/// Some part of a period: by the clock, because nothing depends on it.
fn jitter(period: Duration) -> Duration {
    let nanos = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.subsec_nanos());
    period.mul_f64(f64::from(nanos % 1000) / 2000.0)
}
