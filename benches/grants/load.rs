//! Load of the service: callers in a closed loop over a few connections to each instance. Each sends its next call
//! after the last reply.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use crate::{
    Failure, Workload, callers::CallHandles, calls::Client, meter::Meter, sample::Sample, secured::Credentials,
};

const CONNECTIONS_PER_INSTANCE: usize = 4;

/// Time before a measurement, until the batches have reached their size.
pub(crate) const WARM_UP: Duration = Duration::from_millis(500);

/// Work of the callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// Requests that are granted and stay locked.
    Grants,
    /// Request, confirmation, release: three operations.
    Lives,
    /// Requests that are refused because the EM is full.
    Refusals,
}

/// One measurement: work, workload, callers and instances.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job {
    pub work: Work,
    pub workload: Workload,
    pub callers: usize,
    /// Number of the instances that get calls.
    pub instances: usize,
}

/// Connections to the instances of a service, and the number of its grants.
pub(crate) struct Load {
    clients: Vec<Vec<Client>>,
    tally: Arc<Tally>,
}

/// Numbers of replies over all measurements.
#[derive(Default)]
pub(crate) struct Tally {
    pub granted: AtomicU64,
    pub released: AtomicU64,
}

impl Load {
    /// Connects to all of `urls`, with credentials if given.
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

    /// Registers the EMs of a workload and fills the full ones.
    pub async fn register(&mut self, workload: Workload) -> Result<(), Failure> {
        let client = &mut self.clients[0][0];
        client.register(workload).await?;
        let granted = client.fill(workload).await?;
        self.tally.granted.fetch_add(granted, Relaxed);
        Ok(())
    }

    /// Makes engines also use an external queue.
    pub fn use_queue(&mut self) {
        self.clients.iter_mut().flatten().for_each(Client::use_queue);
    }

    /// Returns the number of live tickets, by the replies.
    pub fn live(&self) -> u64 {
        self.tally.granted.load(Relaxed) - self.tally.released.load(Relaxed)
    }

    pub fn tally(&self) -> &Arc<Tally> {
        &self.tally
    }

    /// Returns a connection by number, with the number of its instance. Connections alternate between `instances`
    /// instances.
    pub fn client(&self, number: usize, instances: usize) -> (usize, Client) {
        let instance = number % instances;
        let connections = &self.clients[instance];
        (instance, connections[number / instances % connections.len()].clone())
    }

    /// Starts the callers of a job.
    pub fn start(&self, job: Job) -> CallHandles {
        let clients = (0..job.callers).map(|number| self.client(number, job.instances));
        CallHandles::start(job, clients, &self.tally)
    }

    /// Measures a job for `window`, after a warm-up.
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
