//! The load: callers in a closed loop over a few connections to each instance. A call is made as soon as another is answered.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tokio::task::JoinSet;

use crate::{
    Failure, Workload,
    calls::{Client, Place},
    meter::Meter,
    random::Random,
    sample::Sample,
};

const CONNECTIONS_PER_INSTANCE: usize = 4;

/// Before anything is counted: until the batches have found their size.
pub(crate) const WARM_UP: Duration = Duration::from_millis(500);

/// After a call that failed, so that a server that does not answer is not flooded.
const ERROR_PAUSE: Duration = Duration::from_millis(20);

/// What callers do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// Ask for what is granted, and keep it.
    Grants,
    /// Ask, report in, release: three operations.
    Lives,
    /// Ask for what is refused, because the EM is full.
    Refusals,
}

/// Who does what, where.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job {
    pub work: Work,
    pub workload: Workload,
    pub callers: usize,
    /// To how many of the instances.
    pub instances: usize,
}

/// Connections to the instances of a service, and what they have granted so far.
pub(crate) struct Load {
    clients: Vec<Vec<Client>>,
    tally: Arc<Tally>,
}

/// What was answered, over all measurements.
#[derive(Default)]
pub(crate) struct Tally {
    pub granted: AtomicU64,
    pub released: AtomicU64,
}

impl Load {
    /// Connects to all of `urls`.
    pub async fn connect(urls: &[String]) -> Result<Self, Failure> {
        let mut clients = Vec::new();
        for url in urls {
            let mut connections = Vec::new();
            for _ in 0..CONNECTIONS_PER_INSTANCE {
                connections.push(Client::connect(url).await?);
            }
            clients.push(connections);
        }
        Ok(Self { clients, tally: Arc::default() })
    }

    /// Registers the EMs of a workload, and fills those that are to be full.
    pub async fn register(&mut self, workload: Workload) -> Result<(), Failure> {
        let client = &mut self.clients[0][0];
        client.register(workload).await?;
        let granted = client.fill(workload).await?;
        self.tally.granted.fetch_add(granted, Relaxed);
        Ok(())
    }

    /// How many tickets live, as far as the answers tell.
    pub fn live(&self) -> u64 {
        self.tally.granted.load(Relaxed) - self.tally.released.load(Relaxed)
    }

    pub fn tally(&self) -> &Arc<Tally> {
        &self.tally
    }

    /// The connection for one of many who call `instances` of the instances in turn, and the number of its instance.
    pub fn client(&self, number: usize, instances: usize) -> (usize, Client) {
        let instance = number % instances;
        let connections = &self.clients[instance];
        (instance, connections[number / instances % connections.len()].clone())
    }

    /// Begins to call.
    pub fn start(&self, job: Job) -> Calls {
        let progress = Arc::new(Progress::new(job.instances));
        let mut tasks = JoinSet::new();
        for number in 0..job.callers {
            let (instance, client) = self.client(number, job.instances);
            let random = Random::new(number as u64 + 1);
            let (progress, tally) = (progress.clone(), self.tally.clone());
            tasks.spawn(Caller { client, instance, job, random, progress, tally, times: Vec::new() }.run());
        }
        Calls { progress, tasks }
    }

    /// Calls for `window`, after a warm-up.
    pub async fn measure(&self, job: Job, window: Duration, meter: &mut Meter) -> Result<Sample, Failure> {
        let calls = self.start(job);
        tokio::time::sleep(WARM_UP).await;
        let (read, read_at) = (meter.read().await?, calls.done());
        let (begun, before) = (Instant::now(), calls.progress.by_instance());
        calls.progress.timing.store(true, Relaxed);
        tokio::time::sleep(window).await;
        let (after, elapsed) = (calls.progress.by_instance(), begun.elapsed());
        calls.progress.timing.store(false, Relaxed);
        let cost = meter.read().await?.since(read, calls.done() - read_at);
        let ended = calls.finish().await?;
        let done: Vec<u64> = after.iter().zip(before).map(|(after, before)| after - before).collect();
        let total = done.iter().sum::<u64>() as f64;
        let shares = done.iter().map(|done| *done as f64 / total.max(1.0)).collect();
        let rate = total / elapsed.as_secs_f64();
        Ok(Sample { rate, times: ended.times, cost: Some(cost), shares, errors: ended.errors, error: ended.error })
    }
}

/// Calls under way; dropped, they are cancelled.
pub(crate) struct Calls {
    progress: Arc<Progress>,
    tasks: JoinSet<Vec<Duration>>,
}

/// How calls have ended.
pub(crate) struct Ended {
    pub times: Vec<Duration>,
    pub errors: u64,
    /// The first of them.
    pub error: Option<String>,
}

impl Calls {
    /// How many operations were answered so far.
    pub fn done(&self) -> u64 {
        self.progress.by_instance().iter().sum()
    }

    /// Lets what is under way finish.
    pub async fn finish(mut self) -> Result<Ended, Failure> {
        self.progress.stop.store(true, Relaxed);
        let mut times = Vec::new();
        while let Some(caller) = self.tasks.join_next().await {
            times.extend(caller?);
        }
        let (errors, error) = (self.progress.errors.load(Relaxed), self.progress.error.get().cloned());
        Ok(Ended { times, errors, error })
    }
}

struct Progress {
    done: Vec<AtomicU64>,
    /// Whether calls are timed one by one.
    timing: AtomicBool,
    /// Whether no more calls are made.
    stop: AtomicBool,
    errors: AtomicU64,
    error: OnceLock<String>,
}

impl Progress {
    fn new(instances: usize) -> Self {
        Self {
            done: (0..instances).map(|_| AtomicU64::new(0)).collect(),
            timing: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            errors: AtomicU64::new(0),
            error: OnceLock::new(),
        }
    }

    fn by_instance(&self) -> Vec<u64> {
        self.done.iter().map(|done| done.load(Relaxed)).collect()
    }
}

struct Caller {
    client: Client,
    instance: usize,
    job: Job,
    random: Random,
    progress: Arc<Progress>,
    tally: Arc<Tally>,
    times: Vec<Duration>,
}

impl Caller {
    async fn run(mut self) -> Vec<Duration> {
        while !self.progress.stop.load(Relaxed) {
            if let Err(error) = self.turn().await {
                self.progress.errors.fetch_add(1, Relaxed);
                // Only the first is kept.
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
            self.client.refusal(Place::choose_full(workload, &mut self.random)).await?;
            self.count(begun);
            return Ok(());
        }
        let ticket = self.client.grant(Place::choose(workload, &mut self.random)).await?;
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

    /// When a call begins; `None` if it is not timed.
    fn begin(&self) -> Option<Instant> {
        self.progress.timing.load(Relaxed).then(Instant::now)
    }

    fn count(&mut self, begun: Option<Instant>) {
        self.times.extend(begun.map(|begun| begun.elapsed()));
        self.progress.done[self.instance].fetch_add(1, Relaxed);
    }
}
