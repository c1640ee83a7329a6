//! Puts an instance together, serves it, and takes it down in order.

use std::{future::Future, net::SocketAddr, sync::Arc, time::Duration};

use sqlx::postgres::PgConnectOptions;
use tokio::{
    net::TcpListener,
    sync::{Notify, mpsc, watch},
    time::Instant,
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic::service::Routes;
use tonic_health::server::HealthReporter;

use crate::{
    domain::{
        limit::{Rule, RuleChanges},
        principal::Principal,
    },
    error::Error,
    http::{self, Readiness},
    metrics::Metrics,
    service::{
        admission::{Admission, StateCache},
        audit::AuditService,
        background::{
            Driver,
            counting::CountLabelSets,
            expiry,
            going::Going,
            holds::EndHolds,
            lease::{Holder, Lease},
            pruning::Pruning,
            retention::Retention,
            silence::Silence,
        },
        committer::{AfterCommit, Committer},
        heartbeat::{HeartbeatService, LivenessTimeouts},
        holds::HoldService,
        limits::LimitService,
        request_resource::RequestResourceService,
        tasks::Tasks,
        ticket_lookup::TicketLookup,
        usage::Usage,
        waiting::{self, WaitingLine},
    },
    store::{Store, StoreError},
    transport::{
        self,
        admin::Admin,
        edge::{self, Bounds, Calls, Edge, Listen, Listener},
        message_size::{LIMITS_BYTES_MAX, Limited, MESSAGE_BYTES_MAX, QUESTION_BYTES_MAX, compressible},
        observe::{self, Observe},
        proto,
        proto::{
            admin_service_server::AdminServiceServer, limit_service_server::LimitServiceServer,
            resource_manager_service_server::ResourceManagerServiceServer, usage_service_server::UsageServiceServer,
        },
        resource_manager::{RequestTimeouts, ResourceManager},
        server_info::ServerInfo,
    },
};

/// How often a connection without traffic is asked for a sign of life, and how long it may take.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// How often an instance looks whether its database answers.
const HEALTH_INTERVAL: Duration = Duration::from_secs(1);

/// The service that health tells to be there as long as the process is, whatever else is not.
const LIVENESS: &str = "liveness";

/// How long a server that stops lets those linger who have no call under way: long enough for them to hear that it stops.
const LINGER: Duration = Duration::from_millis(250);

/// How many accepted connections wait to be served.
const ACCEPTED_MAX: usize = 16;

/// What a server has to know.
#[derive(Debug, Clone)]
pub struct Options {
    /// What its callers may wait for.
    pub times: RequestTimeouts,
    /// How long signs of life of its EMs may be missing.
    pub patience: LivenessTimeouts,
    /// How long ended tickets and request ids are remembered.
    pub history: Duration,
    /// How long calls may take to finish when it stops.
    pub drain_timeout: Duration,
    /// How long it says that it stops, and lets everybody in all the same, before it does.
    pub shutdown_delay: Duration,
    /// What its callers may take.
    pub bounds: Bounds,
}

/// An instance that is ready to serve.
#[derive(Debug)]
pub struct Server {
    listener: Listener,
    store: Store,
    options: Options,
    edge: Arc<Edge>,
    metrics: Metrics,
    readiness: watch::Sender<Readiness>,
    /// Serves metrics and health; ends with the server.
    http: Option<(SocketAddr, AbortOnDropHandle<()>)>,
}

/// Why a server cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The database cannot be used.
    #[error("the database cannot be used")]
    Store(#[from] StoreError),
    /// The address is taken.
    #[error("cannot listen on {address}: it is taken; is another instance running? choose another with {setting}")]
    Taken {
        /// Which address.
        address: Listen,
        /// Where it is set.
        setting: &'static str,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}; choose another with {setting}")]
    Listen {
        /// Which address.
        address: Listen,
        /// Where it is set.
        setting: &'static str,
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
    /// The methods of the API cannot be read: a defect of the build.
    #[error("the API's methods cannot be read")]
    Methods(#[from] prost::DecodeError),
}

/// How a server came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// All calls under way were answered.
    Drained,
    /// Some were still under way when their time was over.
    CutOff,
}

/// Takes an address for gRPC; first of all, because that tells soonest whether another instance has it.
pub async fn listen(address: impl Into<Listen>) -> Result<Listener, ServerError> {
    let address = address.into();
    Listener::bind(&address).await.map_err(|source| cannot_listen(address, "--listen", source))
}

/// Takes an address for metrics and health.
pub async fn listen_http(addresses: &[SocketAddr]) -> Result<TcpListener, ServerError> {
    let wrong = |source| cannot_listen(Listen::Tcp(addresses.to_vec()), "--http-listen", source);
    TcpListener::bind(addresses).await.map_err(wrong)
}

fn cannot_listen(address: Listen, setting: &'static str, source: std::io::Error) -> ServerError {
    match source.kind() {
        std::io::ErrorKind::AddrInUse => ServerError::Taken { address, setting },
        _ => ServerError::Listen { address, setting, source },
    }
}

/// The descriptors of everything that is served.
const DESCRIPTORS: [&[u8]; 4] = [
    proto::DESCRIPTORS,
    tonic_health::pb::FILE_DESCRIPTOR_SET,
    tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
    tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
];

impl Server {
    /// Brings the schema of the database up to date; calls wait at `listener` meanwhile. Metrics and health are served at `http` from
    /// now on, if there is one.
    pub async fn open(
        listener: Listener,
        http: Option<TcpListener>,
        database: PgConnectOptions,
        options: Options,
    ) -> Result<Self, ServerError> {
        let edge = Edge::new(options.bounds);
        let metrics = Metrics::new(observe::methods(&DESCRIPTORS)?, edge.gauges());
        let (readiness, seen) = watch::channel(Readiness::Starting);
        let serve =
            |listener: TcpListener| Some((listener.local_addr().ok()?, http::serve(listener, metrics.clone(), seen)));
        let http = http.and_then(serve);
        let store = Store::open(database, options.history).await?;
        Ok(Self { listener, store, options, edge, metrics, readiness, http })
    }

    /// Makes `rules` all the limits there are.
    ///
    /// # Errors
    /// As of [`LimitService::replace`].
    pub async fn replace_limits(&self, rules: Vec<Rule>) -> Result<RuleChanges, Error> {
        let limits = LimitService::new(self.store.clone(), Arc::default());
        limits.replace(&Principal::Service, rules, Instant::now() + self.options.times.request_timeout).await
    }

    /// What it counts of itself.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Where it listens.
    pub fn address(&self) -> std::io::Result<Listen> {
        self.listener.address()
    }

    /// Where it serves metrics and health; `None` if it does not.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http.as_ref().map(|(address, _)| *address)
    }

    /// Serves until `stop` is done; then finishes what is under way, for no longer than the drain timeout.
    pub async fn serve(self, stop: impl Future<Output = ()>) -> Result<Ending, ServerError> {
        // While calls under way are finished, metrics and health are served on.
        let Self { listener, store, options, edge, metrics, readiness, http: _http } = self;
        let (tasks, stopping, leaving) = (Tasks::here(), CancellationToken::new(), CancellationToken::new());
        let defect = tasks.defect();
        let (health, health_service) = tonic_health::server::health_reporter();
        let routes = assemble(&store, &options, &metrics, &tasks, &stopping)?
            .add_service(compressible!(health_service).max_decoding_message_size(QUESTION_BYTES_MAX));
        let health = Health { grpc: health, readiness, metrics: metrics.clone() };
        tasks.spawn(watch_health(health, store.clone(), leaving.clone()));
        let incoming = accepted(listener, &edge, &tasks, &stopping);
        tasks.close();

        let calls = Calls::new(routes, edge.clone());
        let serving = transport_server(&options.bounds).layer(Observe::new(metrics)).serve_with_incoming_shutdown(
            calls,
            incoming,
            stopping.clone().cancelled_owned(),
        );
        tokio::pin!(serving);
        let lame_duck = async {
            stop.await;
            leaving.cancel();
            // Whoever sends calls here hears that it stops before it does.
            tokio::time::sleep(options.shutdown_delay).await;
        };
        let failed = tokio::select! {
            ended = &mut serving => Some(ended.map_err(ServerError::from)),
            () = defect.cancelled() => Some(Err(ServerError::Defect)),
            () = lame_duck => None,
        };
        leaving.cancel();
        stopping.cancel();
        if let Some(ended) = failed {
            store.close().await;
            return ended.map(|()| Ending::Drained);
        }
        tracing::info!("stopping: finishing the calls under way");
        let drained = tokio::time::timeout(options.drain_timeout, async {
            let close = async {
                tokio::time::sleep(LINGER).await;
                edge.close();
            };
            let (served, ()) = tokio::join!(serving, close);
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
    metrics: &Metrics,
    tasks: &Tasks,
    stopping: &CancellationToken,
) -> Result<Routes, ServerError> {
    let seen = StateCache::new(metrics.clone());
    let (expiring_soon, expiring) = expiry::channel();
    let (line, leaving) =
        WaitingLine::new(store.clone(), options.bounds.waiting, metrics.clone(), tasks, stopping.clone());
    let after_commit = AfterCommit {
        seen: seen.clone(),
        expiring_soon: expiring_soon.clone(),
        abandoned: line.leaving(),
        line: line.clone(),
    };
    let info = ServerInfo {
        instance_id: line.instance_id(),
        times: options.times,
        patience: options.patience,
        history: options.history,
    };
    let committer = Committer::start(store.clone(), after_commit, metrics.clone(), tasks);
    let committer = committer.map_err(ServerError::Thread)?;
    let admission = Admission::start(store, seen.clone(), options.patience.silent_after, tasks);
    let (em_goes, counting) = (Arc::<Notify>::default(), Arc::<Notify>::default());
    let turned_down = expiry::TurnedDown::default();
    tasks.spawn(expiry::run_timers(committer.clone(), expiring, turned_down.clone(), stopping.clone()));
    let driver = Driver::new(store.clone(), tasks.clone(), metrics.clone(), stopping.clone());
    let (holder, wake) = (Holder::default(), Arc::default);
    driver.start(Lease::new(holder.clone()), wake());
    driver.start(expiry::Sweep::new(expiring_soon, turned_down, holder.clone()), wake());
    driver.start(Silence::new(committer.clone(), options.patience, holder.clone()), wake());
    driver.start(Retention::new(options.history, holder.clone()), wake());
    driver.start(Pruning::new(holder.clone()), wake());
    driver.start(EndHolds::new(holder.clone()), wake());
    driver.start(Going::new(committer.clone(), holder.clone(), metrics.jobs("em_goes")), em_goes.clone());
    driver.start(CountLabelSets::new(committer.clone(), holder, metrics.jobs("label_sets")), counting.clone());

    tasks.spawn(waiting::run(line.clone(), leaving));
    tasks.spawn(waiting::live(line.clone()));
    tasks.spawn(waiting::listen(line.clone(), admission.clone()));

    let request_resource = RequestResourceService::new(admission, committer.clone(), line);
    let heartbeat = HeartbeatService::start(store, seen, committer.clone(), options.patience, tasks);
    let tickets = TicketLookup::start(store, tasks);
    let audit = AuditService::new(store.clone());
    let admin = Admin::new(
        audit,
        committer.clone(),
        tickets.clone(),
        HoldService::new(store.clone()),
        options.times.request_timeout,
    );
    let manager = ResourceManager::new(committer, request_resource, heartbeat, tickets, em_goes, options.times);
    let limits = LimitService::new(store.clone(), counting);
    let usage = Usage::new(store.clone(), options.patience.silent_after);
    let usage = transport::usage::Usage::new(usage, limits.clone(), info);
    let limits = transport::limit::Limit::new(limits, options.times.request_timeout);
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            // So that grpcurl can show the details of errors.
            .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
    };
    Ok(Routes::new(Limited::new(manager))
        .add_service(compressible!(LimitServiceServer::new(limits)).max_decoding_message_size(LIMITS_BYTES_MAX))
        .add_service(compressible!(UsageServiceServer::new(usage)).max_decoding_message_size(MESSAGE_BYTES_MAX))
        .add_service(compressible!(AdminServiceServer::new(admin)).max_decoding_message_size(MESSAGE_BYTES_MAX))
        .add_service(compressible!(reflection().build_v1()?).max_decoding_message_size(QUESTION_BYTES_MAX))
        .add_service(compressible!(reflection().build_v1alpha()?).max_decoding_message_size(QUESTION_BYTES_MAX)))
}

/// The connections of callers that were let in, until the server stops.
fn accepted(
    listener: Listener,
    edge: &Arc<Edge>,
    tasks: &Tasks,
    stopping: &CancellationToken,
) -> ReceiverStream<std::io::Result<edge::Connection>> {
    let (serve, accepted) = mpsc::channel(ACCEPTED_MAX);
    let accepting = edge::accept(listener, edge.clone(), serve);
    let stopping = stopping.clone();
    tasks.spawn(async move { stopping.run_until_cancelled(accepting).await.unwrap_or_default() });
    ReceiverStream::new(accepted)
}

/// HTTP/2 within `bounds`.
fn transport_server(bounds: &Bounds) -> tonic::transport::Server {
    let server = tonic::transport::Server::builder();
    // Without a time for it: with one, calls under way would be cut off then, and new ones not sent elsewhere before. None of them
    // lasts longer than it said.
    let server = match bounds.connection_age {
        Some(age) => server.max_connection_age(age),
        None => server,
    };
    server
        .max_concurrent_streams(bounds.connection_streams)
        // As many calls as it may have under way may be cancelled before they were looked at. Of more, a client would be at fault; of
        // fewer, an instance that stood still would cut off those who still wait, for those who went away.
        .http2_max_pending_accept_reset_streams(usize::try_from(bounds.connection_streams).ok())
        .initial_stream_window_size(edge::STREAM_WINDOW)
        .initial_connection_window_size(bounds.connection_window())
        .http2_max_header_list_size(edge::HEADER_BYTES_MAX)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
}

/// Who is told whether calls may be sent here.
struct Health {
    grpc: HealthReporter,
    readiness: watch::Sender<Readiness>,
    metrics: Metrics,
}

/// Tells load balancers whether to send calls here: while the database answers, and until the server is told to stop.
async fn watch_health(health: Health, store: Store, stopping: CancellationToken) {
    // Whoever would restart an instance because its database is away asks for this.
    health.grpc.set_service_status(LIVENESS, tonic_health::ServingStatus::Serving).await;
    let mut session = store.session();
    let mut looks = tokio::time::interval(HEALTH_INTERVAL);
    loop {
        let look = async {
            looks.tick().await;
            session.answers().await
        };
        let readiness = tokio::select! {
            biased;
            () = stopping.cancelled() => Readiness::Stopping,
            answers = look => if answers { Readiness::Ready } else { Readiness::NoDatabase },
        };
        health.metrics.database.observe(readiness != Readiness::NoDatabase, store.pool());
        health.publish(readiness).await;
        if readiness == Readiness::Stopping {
            return;
        }
    }
}

impl Health {
    async fn publish(&self, readiness: Readiness) {
        let _ = self.readiness.send_replace(readiness);
        if readiness == Readiness::Ready {
            self.grpc.set_serving::<ResourceManagerServiceServer<ResourceManager>>().await;
            self.grpc.set_serving::<UsageServiceServer<transport::usage::Usage>>().await;
            self.grpc.set_serving::<LimitServiceServer<transport::limit::Limit>>().await;
            self.grpc.set_serving::<AdminServiceServer<Admin>>().await;
            self.grpc.set_service_status("", tonic_health::ServingStatus::Serving).await;
        } else {
            self.grpc.set_not_serving::<ResourceManagerServiceServer<ResourceManager>>().await;
            self.grpc.set_not_serving::<UsageServiceServer<transport::usage::Usage>>().await;
            self.grpc.set_not_serving::<LimitServiceServer<transport::limit::Limit>>().await;
            self.grpc.set_not_serving::<AdminServiceServer<Admin>>().await;
            self.grpc.set_service_status("", tonic_health::ServingStatus::NotServing).await;
        }
    }
}
