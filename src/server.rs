//! Puts an instance together, serves it, and takes it down in order.

use std::{future::Future, net::SocketAddr, time::Duration};

use sqlx::postgres::PgConnectOptions;
use tokio::{net::TcpListener, sync::mpsc};
use tokio_util::sync::CancellationToken;
use tonic::transport::server::{Router, TcpIncoming};
use tonic_health::server::HealthReporter;

use crate::{
    domain::limit::Rule,
    error::Error,
    service::{
        audit::AuditService,
        committer::{AfterCommit, Committer},
        expiry,
        heartbeat::{HeartbeatService, Patience},
        judge::{Judge, Seen},
        limits::LimitService,
        request_resource::RequestResourceService,
        retention, silence,
        tasks::Tasks,
        usage::Usage,
        waiting::{self, WaitingLine},
    },
    store::{Store, StoreError},
    transport::{
        self,
        admin::Admin,
        message_size::{Limited, MESSAGE_BYTES_MAX},
        proto,
        proto::{
            admin_service_server::AdminServiceServer, limit_service_server::LimitServiceServer,
            resource_manager_service_server::ResourceManagerServiceServer, usage_service_server::UsageServiceServer,
        },
        resource_manager::{ResourceManager, Times},
    },
};

/// How many calls one connection may have under way.
const STREAMS_PER_CONNECTION_MAX: u32 = 4096;

/// How many calls of one connection may be cancelled before they were looked at: all that it can have under way. Of more, a client
/// would be at fault; of fewer, an instance that stood still would cut off those who still wait, for those who went away.
const CANCELLED_UNSEEN_MAX: usize = STREAMS_PER_CONNECTION_MAX as usize;

/// How often a connection without traffic is asked for a sign of life, and how long it may take.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// How often an instance looks whether its database answers.
const HEALTH_INTERVAL: Duration = Duration::from_secs(1);

/// What a server has to know.
#[derive(Debug, Clone)]
pub struct Options {
    /// What its callers may wait for.
    pub times: Times,
    /// How long signs of life of its EMs may be missing.
    pub patience: Patience,
    /// How long ended tickets and request ids are remembered.
    pub history: Duration,
    /// How long calls may take to finish when it stops.
    pub drain_timeout: Duration,
}

/// An instance that is ready to serve.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    store: Store,
    options: Options,
}

/// Why a server cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The database cannot be used.
    #[error("the database cannot be used")]
    Store(#[from] StoreError),
    /// The address is taken.
    #[error("cannot listen on {address}: it is taken; is another instance running? choose another with --listen")]
    Taken {
        /// Which address.
        address: SocketAddr,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}; choose another with --listen")]
    Listen {
        /// Which address.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// There is no thread for the committer.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// The transport failed.
    #[error("the gRPC server failed")]
    Transport(#[from] tonic::transport::Error),
    /// A task that everything depends on has panicked: the process has to start anew.
    #[error("a defect stopped a part of the service; its log says which")]
    Defect,
    /// The descriptors of the API cannot be read: a defect of the build.
    #[error("the API's descriptors cannot be read")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// How a server came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// All calls under way were answered.
    Drained,
    /// Some were still under way when their time was over.
    CutOff,
}

/// Takes an address; first of all, because that tells soonest whether another instance has it.
pub async fn listen(address: SocketAddr) -> Result<TcpListener, ServerError> {
    TcpListener::bind(address).await.map_err(|source| match source.kind() {
        std::io::ErrorKind::AddrInUse => ServerError::Taken { address },
        _ => ServerError::Listen { address, source },
    })
}

impl Server {
    /// Brings the schema of the database up to date; calls wait at `listener` meanwhile.
    pub async fn open(
        listener: TcpListener,
        database: PgConnectOptions,
        options: Options,
    ) -> Result<Self, ServerError> {
        let store = Store::open(database).await?;
        Ok(Self { listener, store, options })
    }

    /// Makes `rules` all the limits there are.
    pub async fn replace_limits(&self, rules: &[Rule]) -> Result<(), Error> {
        LimitService::new(self.store.clone()).replace(rules).await
    }

    /// Where it listens.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stop` is done; then finishes what is under way, for no longer than the drain timeout.
    pub async fn serve(self, stop: impl Future<Output = ()>) -> Result<Ending, ServerError> {
        let Self { listener, store, options } = self;
        let (tasks, stopping) = (Tasks::here(), CancellationToken::new());
        let defect = tasks.defect();
        let (health, health_service) = tonic_health::server::health_reporter();
        let router = assemble(&store, &options, &tasks, &stopping)?.add_service(health_service);
        tasks.spawn(watch_health(health, store.clone(), stopping.clone()));
        tasks.close();

        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let serving = router.serve_with_incoming_shutdown(incoming, stopping.clone().cancelled_owned());
        tokio::pin!(serving);
        let failed = tokio::select! {
            ended = &mut serving => Some(ended.map_err(ServerError::from)),
            () = defect.cancelled() => Some(Err(ServerError::Defect)),
            () = stop => None,
        };
        stopping.cancel();
        if let Some(ended) = failed {
            store.close().await;
            return ended.map(|()| Ending::Drained);
        }
        tracing::info!("stopping: finishing the calls under way");
        let drained = tokio::time::timeout(options.drain_timeout, async {
            let served = serving.await;
            tasks.wait().await;
            served
        })
        .await;
        store.close().await;
        match drained {
            Ok(served) => served.map(|()| Ending::Drained).map_err(ServerError::from),
            Err(_) => Ok(Ending::CutOff),
        }
    }
}

/// The services of an instance and its background tasks.
fn assemble(
    store: &Store,
    options: &Options,
    tasks: &Tasks,
    stopping: &CancellationToken,
) -> Result<Router, ServerError> {
    let seen = Seen::default();
    let (expiring_soon, expiring) = mpsc::unbounded_channel();
    let (line, leaving) = WaitingLine::new(store.clone(), stopping.clone());
    let after_commit = AfterCommit { seen: seen.clone(), expiring_soon, abandoned: line.leaving() };
    let committer = Committer::start(store.clone(), after_commit, tasks).map_err(ServerError::Thread)?;
    let judge = Judge::start(store, seen, options.patience.silent_after, tasks);
    tasks.spawn(expiry::run(store.clone(), committer.clone(), expiring, stopping.clone()));
    tasks.spawn(silence::run(store.clone(), committer.clone(), options.patience, stopping.clone()));
    tasks.spawn(retention::run(store.clone(), options.history, stopping.clone()));

    tasks.spawn(waiting::keep(line.clone(), leaving));
    tasks.spawn(waiting::live(line.clone()));
    tasks.spawn(waiting::listen(line.clone(), judge.clone()));

    let request_resource = RequestResourceService::new(judge, committer.clone(), line);
    let heartbeat = HeartbeatService::start(store, committer.clone(), options.patience, tasks);
    let manager = ResourceManager::new(committer, request_resource, heartbeat, options.times);
    let limits = LimitService::new(store.clone());
    let usage = transport::usage::Usage::new(Usage::new(store.clone(), options.patience.silent_after), limits.clone());
    let admin = Admin::new(AuditService::new(store.clone()));
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            // So that grpcurl can show the details of errors.
            .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
    };
    Ok(tonic::transport::Server::builder()
        .max_concurrent_streams(STREAMS_PER_CONNECTION_MAX)
        .http2_max_pending_accept_reset_streams(Some(CANCELLED_UNSEEN_MAX))
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .add_service(Limited::new(manager))
        .add_service(
            LimitServiceServer::new(transport::limit::Limit::new(limits)).max_decoding_message_size(MESSAGE_BYTES_MAX),
        )
        .add_service(UsageServiceServer::new(usage).max_decoding_message_size(MESSAGE_BYTES_MAX))
        .add_service(AdminServiceServer::new(admin).max_decoding_message_size(MESSAGE_BYTES_MAX))
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?))
}

/// Tells load balancers whether to send calls here: while the database answers, and until the server is told to stop.
async fn watch_health(health: HealthReporter, store: Store, stopping: CancellationToken) {
    let mut session = store.session();
    let mut looks = tokio::time::interval(HEALTH_INTERVAL);
    loop {
        let stopped = tokio::select! {
            () = stopping.cancelled() => true,
            _ = looks.tick() => false,
        };
        if !stopped && session.answers().await {
            health.set_serving::<ResourceManagerServiceServer<ResourceManager>>().await;
            health.set_serving::<UsageServiceServer<transport::usage::Usage>>().await;
            health.set_serving::<LimitServiceServer<transport::limit::Limit>>().await;
            health.set_serving::<AdminServiceServer<Admin>>().await;
            health.set_service_status("", tonic_health::ServingStatus::Serving).await;
        } else {
            health.set_not_serving::<ResourceManagerServiceServer<ResourceManager>>().await;
            health.set_not_serving::<UsageServiceServer<transport::usage::Usage>>().await;
            health.set_not_serving::<LimitServiceServer<transport::limit::Limit>>().await;
            health.set_not_serving::<AdminServiceServer<Admin>>().await;
            health.set_service_status("", tonic_health::ServingStatus::NotServing).await;
        }
        if stopped {
            return;
        }
    }
}
