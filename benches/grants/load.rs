//! The load: calls in a closed loop over a few connections, every answer looked at.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use linkis_rm::transport::proto::{
    self, request_resource_response::Result as Answer, resource::Kind,
    resource_manager_service_client::ResourceManagerServiceClient,
};
use tokio::task::JoinSet;
use tonic::{
    Request,
    transport::{Channel, Endpoint},
};

use crate::{Failure, Latency, Sample, Workload};

/// How many calls are in flight.
pub(crate) const CALLERS: [u64; 4] = [1, 16, 256, 1024];

const CONNECTIONS: u64 = 4;
const USERS: u64 = 1000;

/// Before anything is counted: until the batches have found their size.
pub(crate) const WARM_UP: Duration = Duration::from_millis(500);

/// As a client sets it; no call is expected to come near.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The address of an EM.
pub(crate) fn em(workload: Workload, number: u64) -> proto::EmInstance {
    let instance = match workload {
        Workload::Hot => "hot:9102".to_owned(),
        Workload::Spread => format!("host{number}:9102"),
    };
    proto::EmInstance { application_name: "ecm".to_owned(), instance }
}

/// An amount of every dimension of an EM.
pub(crate) fn amount(memory: i64, cores: i64, instances: i64) -> Option<proto::Resource> {
    let amounts = proto::LoadInstanceResource { memory, cores, instances };
    Some(proto::Resource { kind: Some(Kind::LoadInstance(amounts)) })
}

/// Connections to a server.
pub(crate) struct Load {
    clients: Vec<ResourceManagerServiceClient<Channel>>,
}

impl Load {
    /// Connects to the server at `url`.
    pub async fn connect(url: String) -> Result<Self, Failure> {
        let endpoint = Endpoint::from_shared(url)?.tcp_nodelay(true);
        let mut clients = Vec::new();
        for _ in 0..CONNECTIONS {
            clients.push(ResourceManagerServiceClient::new(endpoint.connect().await?));
        }
        Ok(Self { clients })
    }

    /// Registers the EMs of a workload, so large that nothing is ever refused.
    pub async fn register(&mut self, workload: Workload) -> Result<(), Failure> {
        for number in 1..=workload.ems() {
            let total = amount(i64::MAX / 2, i64::MAX / 2, i64::MAX / 2);
            let message = proto::RegisterRequest { em: Some(em(workload, number)), total, ..Default::default() };
            self.clients[0].register(message).await?;
        }
        Ok(())
    }

    /// Begins to ask for grants, with so many calls in flight.
    pub fn start(&self, workload: Workload, callers: u64) -> Calls {
        let progress = Arc::new(Progress::default());
        let clients = self.clients.iter().cycle().cloned();
        let mut tasks = JoinSet::new();
        for (number, client) in (1..=callers).zip(clients) {
            let caller = Caller { client, workload, random: Random::new(number), progress: progress.clone() };
            tasks.spawn(caller.run());
        }
        Calls { progress, tasks }
    }

    /// Asks for grants for `window`, after a warm-up; answers also how many were granted in all.
    pub async fn measure(&self, workload: Workload, callers: u64, window: Duration) -> Result<(Sample, u64), Failure> {
        let calls = self.start(workload, callers);
        tokio::time::sleep(WARM_UP).await;
        let (begun, before) = (Instant::now(), calls.granted());
        calls.progress.timing.store(true, Relaxed);
        tokio::time::sleep(window).await;
        let (granted, elapsed) = (calls.granted() - before, begun.elapsed());
        let (all, times) = calls.finish().await?;
        Ok((Sample { rate: granted as f64 / elapsed.as_secs_f64(), latency: Latency::of(times) }, all))
    }
}

/// Calls under way; dropped, they are cancelled.
pub(crate) struct Calls {
    progress: Arc<Progress>,
    tasks: JoinSet<Result<Vec<Duration>, Failure>>,
}

#[derive(Default)]
struct Progress {
    granted: AtomicU64,
    /// Whether calls are timed one by one.
    timing: AtomicBool,
    /// Whether no more calls are made: it is over, or one has failed.
    stop: AtomicBool,
}

impl Calls {
    /// How many were granted so far.
    pub fn granted(&self) -> u64 {
        self.progress.granted.load(Relaxed)
    }

    /// Whether a call has failed; [`Calls::finish`] says why.
    pub fn failed(&self) -> bool {
        self.progress.stop.load(Relaxed)
    }

    /// Lets the calls under way finish; answers how many were granted in all, and the times that were taken.
    pub async fn finish(mut self) -> Result<(u64, Vec<Duration>), Failure> {
        self.progress.stop.store(true, Relaxed);
        let mut times = Vec::new();
        while let Some(caller) = self.tasks.join_next().await {
            times.extend(caller??);
        }
        Ok((self.granted(), times))
    }
}

struct Caller {
    client: ResourceManagerServiceClient<Channel>,
    workload: Workload,
    random: Random,
    progress: Arc<Progress>,
}

impl Caller {
    async fn run(mut self) -> Result<Vec<Duration>, Failure> {
        let mut times = Vec::new();
        while !self.progress.stop.load(Relaxed) {
            let timing = self.progress.timing.load(Relaxed);
            let begun = Instant::now();
            if let Err(failure) = self.call().await {
                self.progress.stop.store(true, Relaxed);
                return Err(failure);
            }
            if timing {
                times.push(begun.elapsed());
            }
            self.progress.granted.fetch_add(1, Relaxed);
        }
        Ok(times)
    }

    async fn call(&mut self) -> Result<(), Failure> {
        let mut request = Request::new(proto::RequestResourceRequest {
            em: Some(em(self.workload, self.random.up_to(self.workload.ems()))),
            user: format!("user{}", self.random.up_to(USERS)),
            creator: "IDE".to_owned(),
            resource: amount(1 << 30, 1, 1),
            ..Default::default()
        });
        request.set_timeout(CALL_TIMEOUT);
        match self.client.request_resource(request).await?.into_inner().result {
            Some(Answer::Available(available)) if !available.ticket_id.is_empty() => Ok(()),
            Some(Answer::NotEnough(refusal)) => {
                Err(format!("refused, which is not what is measured: {}", refusal.reason).into())
            }
            _ => Err("an answer without a ticket".into()),
        }
    }
}

/// SplitMix64: good enough to choose by, and the same in every run.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xD1B5_4A32_D192_ED03))
    }

    /// From 1 to `most`.
    fn up_to(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % most + 1
    }
}
