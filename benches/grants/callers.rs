//! Closed-loop callers: each sends its next call after the reply to the last one, until they are stopped. Caller:
//! `load`.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tokio::task::JoinSet;

use crate::{
    Failure,
    calls::{Client, TargetEm},
    load::{Job, Tally, Work},
    random::Random,
};

/// Pause after a failed call, so that an unresponsive server is not flooded.
const ERROR_PAUSE: Duration = Duration::from_millis(20);

/// Calls in progress. Dropping them cancels them.
pub(crate) struct CallHandles {
    progress: Arc<CallerProgress>,
    tasks: JoinSet<Vec<Duration>>,
}

/// Result of a run of callers.
pub(crate) struct CallCounts {
    pub times: Vec<Duration>,
    pub errors: u64,
    /// The first error.
    pub error: Option<String>,
}

impl CallHandles {
    /// Starts one caller for each connection. A connection comes with the number of its instance.
    pub fn start(job: Job, clients: impl Iterator<Item = (usize, Client)>, tally: &Arc<Tally>) -> Self {
        let progress = Arc::new(CallerProgress::new(job.instances));
        let mut tasks = JoinSet::new();
        for (seed, (instance, client)) in (1..).zip(clients) {
            let (random, times) = (Random::new(seed), Vec::new());
            let (progress, tally) = (progress.clone(), tally.clone());
            tasks.spawn(Caller { client, instance, job, random, progress, tally, times }.run());
        }
        Self { progress, tasks }
    }

    /// Returns the number of completed operations.
    pub fn done(&self) -> u64 {
        self.done_by_instance().iter().sum()
    }

    /// Returns the number of completed operations by instance.
    pub fn done_by_instance(&self) -> Vec<u64> {
        self.progress.done.iter().map(|done| done.load(Relaxed)).collect()
    }

    /// Sets whether calls that begin from now on are timed individually.
    pub fn set_timing(&self, timing: bool) {
        self.progress.timing.store(timing, Relaxed);
    }

    /// Stops the callers and waits for the calls in progress.
    pub async fn finish(mut self) -> Result<CallCounts, Failure> {
        self.progress.stop.store(true, Relaxed);
        let mut times = Vec::new();
        while let Some(caller) = self.tasks.join_next().await {
            times.extend(caller?);
        }
        let (errors, error) = (self.progress.errors.load(Relaxed), self.progress.error.get().cloned());
        Ok(CallCounts { times, errors, error })
    }
}

struct CallerProgress {
    done: Vec<AtomicU64>,
    /// Whether calls are timed individually.
    timing: AtomicBool,
    /// Whether the callers stop.
    stop: AtomicBool,
    errors: AtomicU64,
    error: OnceLock<String>,
}

impl CallerProgress {
    fn new(instances: usize) -> Self {
        Self {
            done: (0..instances).map(|_| AtomicU64::new(0)).collect(),
            timing: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            errors: AtomicU64::new(0),
            error: OnceLock::new(),
        }
    }
}

struct Caller {
    client: Client,
    instance: usize,
    job: Job,
    random: Random,
    progress: Arc<CallerProgress>,
    tally: Arc<Tally>,
    times: Vec<Duration>,
}

impl Caller {
    async fn run(mut self) -> Vec<Duration> {
        while !self.progress.stop.load(Relaxed) {
            if let Err(error) = self.turn().await {
                self.progress.errors.fetch_add(1, Relaxed);
                // Only the first error is kept.
                let _ = self.progress.error.set(error.to_string());
                tokio::time::sleep(ERROR_PAUSE).await;
            }
        }
        self.times
    }

    async fn turn(&mut self) -> Result<(), Failure> {
        let workload = self.job.workload;
        let begun = self.begin();
        if self.job.work == Work::Refusals {
            self.client.refusal(TargetEm::choose_full(workload, &mut self.random)).await?;
            self.count(begun);
            return Ok(());
        }
        let ticket = self.client.grant(TargetEm::choose(workload, &mut self.random)).await?;
        self.count(begun);
        self.tally.granted.fetch_add(1, Relaxed);
        if self.job.work == Work::Lives {
            let begun = self.begin();
            self.client.inited(&ticket).await?;
            self.count(begun);
            let begun = self.begin();
            self.client.released(ticket).await?;
            self.count(begun);
            self.tally.released.fetch_add(1, Relaxed);
        }
        Ok(())
    }

    /// Returns the start of a call; `None` if it is not timed.
    fn begin(&self) -> Option<Instant> {
        self.progress.timing.load(Relaxed).then(Instant::now)
    }

    fn count(&mut self, begun: Option<Instant>) {
        self.times.extend(begun.map(|begun| begun.elapsed()));
        self.progress.done[self.instance].fetch_add(1, Relaxed);
    }
}
