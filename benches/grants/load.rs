//! The load: callers in a closed loop over a few connections to each instance. A call is made as soon as another is answered.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use crate::{Failure, Workload, callers::Calls, calls::Client, meter::Meter, sample::Sample, secured::Credentials};

const CONNECTIONS_PER_INSTANCE: usize = 4;

/// Before anything is counted: until the batches have found their size.
pub(crate) const WARM_UP: Duration = Duration::from_millis(500);

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
    /// The first of the instances that are asked, and how many are.
    pub first: usize,
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
    /// Connects to all of `urls`, with these credentials if there are any.
    pub async fn connect(urls: &[String], credentials: Option<&Credentials>) -> Result<Self, Failure> {
        let mut clients = Vec::new();
        for url in urls {
            let mut connections = Vec::new();
            for _ in 0..CONNECTIONS_PER_INSTANCE {
                connections.push(Client::connect(url, credentials).await?);
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

    /// From now on engines need something of a queue, too.
    pub fn use_queue(&mut self) {
        self.clients.iter_mut().flatten().for_each(Client::use_queue);
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
        self.client_from(0, number, instances)
    }

    fn client_from(&self, first: usize, number: usize, instances: usize) -> (usize, Client) {
        let instance = number % instances;
        let connections = &self.clients[first + instance];
        (instance, connections[number / instances % connections.len()].clone())
    }

    /// Begins to call.
    pub fn start(&self, job: Job) -> Calls {
        let clients = (0..job.callers).map(|number| self.client_from(job.first, number, job.instances));
        Calls::start(job, clients, &self.tally)
    }

    /// Calls for `window`, after a warm-up.
    pub async fn measure(&self, job: Job, window: Duration, meter: &mut Meter) -> Result<Sample, Failure> {
        let calls = self.start(job);
        tokio::time::sleep(WARM_UP).await;
        let (read, read_at) = (meter.read().await?, calls.done());
        let (begun, before) = (Instant::now(), calls.done_by_instance());
        calls.set_timing(true);
        tokio::time::sleep(window).await;
        let (after, elapsed) = (calls.done_by_instance(), begun.elapsed());
        calls.set_timing(false);
        let cost = meter.read().await?.since(read, calls.done() - read_at);
        let ended = calls.finish().await?;
        let done: Vec<u64> = after.iter().zip(before).map(|(after, before)| after - before).collect();
        let total = done.iter().sum::<u64>() as f64;
        if let Some(error) = ended.error.as_ref().filter(|_| total == 0.0) {
            return Err(format!("nothing was answered as it should be: {error}").into());
        }
        let shares = done.iter().map(|done| *done as f64 / total.max(1.0)).collect();
        let rate = total / elapsed.as_secs_f64();
        Ok(Sample { rate, times: ended.times, cost: Some(cost), shares, errors: ended.errors, error: ended.error })
    }
}
