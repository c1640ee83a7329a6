//! Server: starts an instance, serves it, and stops it in order.
//!
//! [`Server::open`] prepares the database; [`Server::serve`] runs until the stop signal, then completes the calls in
//! progress within the drain timeout. The server never decides about resources. Caller: `main`.
//!
//! `health` publishes the readiness of the instance.

mod health;

use std::{fmt, future::Future, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use sd_notify::NotifyState;
use tokio::{net::TcpListener, sync::watch, task::JoinSet, time::Instant};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tower_layer::Layer as _;
use uuid::Uuid;

use crate::notify;
use rm_edge::{
    assembly,
    authenticator::Authenticator,
    compressible,
    connections::{accepted, serve_calls},
    edge::{Edge, EdgeBounds, EdgeService, ListenAddress, Listener, RequestBody},
    health::reporter,
    http::{
        self, Readiness,
        page::{
            self, PageServices,
            history::{MetricHistory, PointSources},
            snapshot::PageSnapshots,
        },
    },
    json::ReadCalls,
    message_size::QUESTION_BYTES_MAX,
    observe::{self, ObserveLayer},
    resource_manager::RequestTimeouts,
    routes::Routes,
    server_info::ServerInfo,
    tls::{self, Tls, TlsError},
};
use rm_external::allowed::AllowedHosts;
use rm_model::{
    limit::{LimitChanges, LimitReplacement},
    principal::Principal,
};
use rm_proto::v1 as proto;
use rm_service::{
    background::announce::address_text,
    cell::{CellServices, CellSettings, InstanceContext},
    error::Error,
    heartbeat::LivenessTimeouts,
    jwt::{JwtAuthenticator, JwtError},
    limits::LimitService,
    overview::OverviewService,
    tasks::InstanceTasks,
    tokens::TokenCache,
};
use rm_store::{PendingStore, Store, StoreError, connect_target::ConnectTarget, primary::NoPrimaryReason};
use rm_telemetry::cause;
use rm_telemetry::metrics::Metrics;

use self::health::{HealthState, LIVENESS, watch_health};

/// Time between the stop and the end of endless streams and idle connections, so that their peers receive the
/// announcement.
const LINGER: Duration = Duration::from_millis(250);

/// Timeout of the connections that were served while the instance waited for its database.
const WAITED_TIMEOUT: Duration = Duration::from_secs(1);

/// Interval between two attempts to use a missing database.
const WAIT_POLL: Duration = Duration::from_secs(1);
/// Interval between two log lines of the same reason.
const WARN_INTERVAL: Duration = Duration::from_secs(10);

/// Settings of a server.
#[derive(Debug, Clone)]
pub struct Options {
    /// Timeouts of calls.
    pub times: RequestTimeouts,
    /// Timeouts of missing heartbeats.
    pub liveness: LivenessTimeouts,
    /// Retention time of ended tickets and request ids.
    pub history: Duration,
    /// Timeout of the calls in progress when the server stops.
    pub drain_timeout: Duration,
    /// Time for which the server announces its stop and still accepts calls.
    pub shutdown_delay: Duration,
    /// Bounds of the edge.
    pub bounds: EdgeBounds,
    /// Authentication and TLS.
    pub security: SecuritySettings,
    /// Network hosts at which external clusters may be called.
    pub external_hosts: AllowedHosts,
    /// Whether the server migrates the schema of its database. Otherwise it requires the current schema.
    pub migrates: bool,
}

impl Options {
    /// Returns the settings of the instance's cell.
    fn cell(&self) -> CellSettings {
        CellSettings {
            liveness: self.liveness,
            history: self.history,
            waiting_max: self.bounds.waiting,
            external_hosts: self.external_hosts.clone(),
        }
    }
}

/// Authentication and TLS of callers.
#[derive(Debug, Clone)]
pub struct SecuritySettings {
    /// Certificates of connections; `None` without TLS.
    pub tls: Option<tls::TlsFiles>,
    /// File with the trusted issuers of JWTs; `None` if no JWT is accepted.
    pub jwt: Option<PathBuf>,
    /// Whether every call is permitted until the first token is created.
    pub is_open: bool,
    /// Whether every viewer of the page has these rights.
    pub is_page_open: bool,
}

/// Describes the protection of an instance, for display.
impl fmt::Display for SecuritySettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has_certificates = self.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
        let shown = match (has_certificates, &self.jwt) {
            (true, None) => "certificates or tokens",
            (true, Some(_)) => "certificates, tokens or JWTs",
            (false, _) if self.is_open => {
                let protection = if self.tls.is_some() { "TLS" } else { "nothing" };
                return write!(f, "{protection}; every caller may do everything until a token is created");
            }
            (false, None) => "tokens",
            (false, Some(_)) => "tokens or JWTs",
        };
        write!(f, "{}{shown}", if self.tls.is_some() { "TLS, with " } else { "" })
    }
}

/// Instance that is ready to serve.
#[derive(Debug)]
pub struct Server {
    instance_id: Uuid,
    listener: Arc<Listener>,
    store: Store,
    options: Options,
    edge: Arc<Edge>,
    tls: Option<Arc<Tls>>,
    tokens: TokenCache,
    jwt: Option<Arc<JwtAuthenticator>>,
    metrics: Metrics,
    readiness: watch::Sender<Readiness>,
    /// Task of the HTTP listener; ends with the server.
    http: Option<(SocketAddr, AbortOnDropHandle<()>)>,
    /// Slot that gives the page its services.
    page: page::PageSlot,
}

/// Why a server cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The certificates cannot be used.
    #[error("the certificates cannot be used; see --tls-cert, --tls-key and --tls-client-ca")]
    Tls(#[from] TlsError),
    /// The settings of JWTs cannot be used.
    #[error("JWTs cannot be checked; see --jwt-config")]
    Jwt(#[from] JwtError),
    /// The database cannot be used.
    #[error("the database cannot be used")]
    Store(#[from] StoreError),
    /// Another process uses the address.
    #[error(
        "cannot listen on {address}: the address is in use, perhaps by another instance; select another with {setting}"
    )]
    Taken {
        /// The address.
        address: ListenAddress,
        /// Setting of the address.
        setting: &'static str,
    },
    /// The address cannot be bound.
    #[error("cannot listen on {address}; select another address with {setting}")]
    Listen {
        /// The address.
        address: ListenAddress,
        /// Setting of the address.
        setting: &'static str,
        /// Error of the system.
        source: std::io::Error,
    },
    /// No thread for the committer.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// The gRPC server failed.
    #[error("the gRPC server failed")]
    Transport(#[from] tonic::transport::Error),
    /// An essential task panicked. The process has to be restarted.
    #[error("a defect stopped a part of the service; its log states which")]
    Defect,
    /// The methods of the API cannot be read: a defect of the build.
    #[error("the API's methods cannot be read")]
    Methods(#[from] prost::DecodeError),
    /// The messages of the API cannot be read: a defect of the build.
    #[error("the API's messages cannot be read")]
    Messages(#[from] prost_reflect::DescriptorError),
}

/// How a server ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerExit {
    /// All calls in progress were completed.
    Drained,
    /// Some calls were in progress at the drain timeout.
    CutOff,
}

/// Binds the address for gRPC. The first step of a start, because it shows soonest whether another instance runs.
///
/// # Errors
/// [`ServerError::Taken`], [`ServerError::Listen`].
pub async fn listen(address: impl Into<ListenAddress>) -> Result<Listener, ServerError> {
    let address = address.into();
    Listener::bind(&address).await.map_err(|source| cannot_listen(address, "--listen", source))
}

/// Binds the address for metrics and health.
///
/// # Errors
/// [`ServerError::Taken`], [`ServerError::Listen`].
pub async fn listen_http(addresses: &[SocketAddr]) -> Result<TcpListener, ServerError> {
    let wrong = |source| cannot_listen(ListenAddress::Tcp(addresses.to_vec()), "--http-listen", source);
    TcpListener::bind(addresses).await.map_err(wrong)
}

fn cannot_listen(address: ListenAddress, setting: &'static str, source: std::io::Error) -> ServerError {
    match source.kind() {
        std::io::ErrorKind::AddrInUse => ServerError::Taken { address, setting },
        _ => ServerError::Listen { address, setting, source },
    }
}

/// Descriptors of all services.
const DESCRIPTORS: [&[u8]; 4] = [
    proto::DESCRIPTORS,
    tonic_health::pb::FILE_DESCRIPTOR_SET,
    tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
    tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
];

impl Server {
    /// Prepares an instance: logs its identity and addresses, starts the HTTP listener, and migrates the schema if the
    /// options require it.
    ///
    /// Calls wait at `listener` meanwhile. A database that is unavailable or takes no writes is waited for; health
    /// checks and calls then get this reason.
    ///
    /// # Errors
    /// An unusable certificate, JWT setting or database.
    pub async fn open(
        listener: Listener,
        http: Option<TcpListener>,
        database: impl Into<ConnectTarget>,
        options: Options,
    ) -> Result<Self, ServerError> {
        let (instance_id, database) = (Uuid::new_v4(), database.into());
        log_start(instance_id, &listener, http.as_ref(), &database, &options.security);
        let tls = options.security.tls.clone().map(Tls::read).transpose()?;
        let edge = Edge::new(options.bounds, tls.clone());
        let metrics = Metrics::new(observe::methods(&DESCRIPTORS)?, [edge.collector()]);
        let jwt = options.security.jwt.clone();
        let jwt = jwt
            .map(|path| JwtAuthenticator::read(path, options.external_hosts.clone(), metrics.clone()))
            .transpose()?;
        let (readiness, seen) = watch::channel(Readiness::Starting);
        let page = page::PageSlot::default();
        let serve = |listener: TcpListener| {
            let address = listener.local_addr().ok()?;
            Some((address, http::serve(listener, tls.clone(), metrics.clone(), seen, page.clone())))
        };
        let http = http.and_then(serve);
        let listener = Arc::new(listener);
        let (opening, found) = PendingStore::find(database).await?;
        let prepared = match found {
            Ok(()) => prepare(&opening, &options).await,
            Err(_) => Err(opening.standing().err().unwrap_or_else(|| opening.missing())),
        };
        let (store, tokens) = match prepared {
            Err(error) if error.may_be_waited_for() => {
                let edge = Edge::new(options.bounds, tls.clone());
                let health = (readiness.clone(), metrics.clone());
                let prepared = wait_for_database(error, (&opening, &options), &listener, edge, health).await?;
                let _ = readiness.send_replace(Readiness::Starting);
                prepared
            }
            prepared => prepared?,
        };
        if let Some(jwt) = &jwt {
            jwt.first_keys().await;
        }
        Ok(Self { instance_id, listener, store, options, edge, tls, tokens, jwt, metrics, readiness, http, page })
    }

    /// Replaces all rules of the kinds that `new` has.
    ///
    /// # Errors
    /// Errors of [`LimitService::replace`].
    pub async fn replace_limits(&self, new: LimitReplacement) -> Result<LimitChanges, Error> {
        let limits = LimitService::new(self.store.clone(), Arc::default());
        limits.replace(&Principal::Service.into(), new, Instant::now() + self.options.times.request_timeout).await
    }

    /// Returns the identifier of the instance, as in the database and in logs.
    pub fn instance_id(&self) -> Uuid {
        self.instance_id
    }

    /// Returns the address for gRPC.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn address(&self) -> std::io::Result<ListenAddress> {
        self.listener.address()
    }

    /// Returns the address for metrics and health; `None` without one.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http.as_ref().map(|(address, _)| *address)
    }

    /// Serves until `stop` completes, then completes the calls in progress within the drain timeout.
    ///
    /// # Errors
    /// A failed gRPC server, and [`ServerError::Defect`] if an essential task panicked.
    pub async fn serve(self, stop: impl Future<Output = ()>) -> Result<ServerExit, ServerError> {
        // Metrics and health are served until the last call is completed.
        let Self {
            instance_id,
            listener,
            store,
            options,
            edge,
            tls,
            tokens,
            jwt,
            metrics,
            readiness,
            http: _http,
            page,
        } = self;
        let tasks = InstanceTasks::here().leaving(store.primary().clone());
        let (stopping, leaving) = (CancellationToken::new(), CancellationToken::new());
        let defect = tasks.defect();
        let (health, health_service) = reporter();
        let address = listener.address().map(|address| announced(&address)).unwrap_or_default();
        let instance = InstanceContext {
            id: instance_id,
            address: address.clone(),
            settings: options.cell(),
            metrics: &metrics,
            tasks: &tasks,
            stopping: &stopping,
            tokens: &tokens,
        };
        let (routes, overviews) = start_cell(&instance, &options, &store)?;
        let routes = routes.and(compressible!(health_service).max_decoding_message_size(QUESTION_BYTES_MAX));
        let health = HealthState { grpc: health, readiness, metrics: metrics.clone() };
        tasks.spawn(watch_health(health, store.clone(), leaving.clone()));
        follow_changes(&tasks, &store, tls.as_ref(), jwt.as_ref(), &stopping);
        let incoming = accepted(listener, &edge, &tasks, &stopping, options.bounds.connection_age);
        tasks.close();

        let known_by = |is_open| Arc::new(Authenticator::new(tokens.clone(), jwt.clone(), is_open, metrics.clone()));
        let calls = EdgeService::new(routes, edge.clone(), known_by(options.security.is_open));
        let identity = known_by(options.security.is_page_open);
        let observe = ObserveLayer::new(metrics.clone());
        let (history, schema) = (MetricHistory::default(), Arc::new(ReadCalls::new()?));
        tasks.spawn(history.clone().keep(PointSources::new(overviews.clone(), metrics, instance_id), stopping.clone()));
        let page = page.open(PageServices {
            calls: observe.layer(calls.with_authenticator(identity.clone())),
            edge: edge.clone(),
            identity,
            pictures: PageSnapshots::new(schema.clone()),
            schema,
            overviews,
            answers: page::reply_cache::ReplyCache::default(),
            history,
            about: page::InstanceInfo { instance_id, grpc: address, tls: tls.is_some() },
            tasks: tasks.clone(),
            stopping: stopping.clone(),
        });
        let serving = ended(serve_calls(calls, incoming, &options.bounds, &observe, &stopping));
        tokio::pin!(serving);
        let lame_duck = async {
            stop.await;
            leaving.cancel();
            // Load balancers learn of the stop before it happens.
            tokio::time::sleep(options.shutdown_delay).await;
        };
        let failed = tokio::select! {
            ended = &mut serving => Some(ended),
            () = defect.cancelled() => Some(Err(ServerError::Defect)),
            () = lame_duck => None,
        };
        leaving.cancel();
        stopping.cancel();
        drop(page);
        if let Some(ended) = failed {
            store.close().await;
            return ended.map(|()| ServerExit::Drained);
        }
        tracing::info!("stopping: finishing open calls");
        let drained = tokio::time::timeout(options.drain_timeout, finish(serving, &edge, &tasks)).await;
        store.close().await;
        drained.map_or(Ok(ServerExit::CutOff), |served| served.map(|()| ServerExit::Drained))
    }
}

/// Starts the services of a cell. Returns the routes of all calls, and the overviews for the page.
fn start_cell(
    instance: &InstanceContext<'_>,
    options: &Options,
    store: &Store,
) -> Result<(Routes<RequestBody>, OverviewService), ServerError> {
    let cell = CellServices::start(instance, store).map_err(ServerError::Thread)?;
    let overviews = cell.overviews.clone();
    let info = ServerInfo {
        instance_id: instance.id,
        times: options.times,
        liveness: options.liveness,
        history: options.history,
        tls: options.security.tls.is_some(),
    };
    Ok((assembly::routes(cell, info)?, overviews))
}

/// Migrates the schema, reads the tokens, and opens the database connections of the instance.
async fn prepare(opening: &PendingStore, options: &Options) -> Result<(Store, TokenCache), StoreError> {
    let store = opening.prepare(options.history, options.migrates).await?;
    let tokens = TokenCache::read(&store).await?;
    store.primary().equip().await?;
    Ok((store, tokens))
}

/// Serves health checks until the database can be used. Other calls fail with the reason, which is logged repeatedly.
/// Returns the prepared database.
///
/// # Errors
/// [`ServerError::Store`] if waiting cannot help.
async fn wait_for_database(
    mut error: StoreError,
    (opening, options): (&PendingStore, &Options),
    listener: &Arc<Listener>,
    edge: Arc<Edge>,
    (readiness, metrics): (watch::Sender<Readiness>, Metrics),
) -> Result<(Store, TokenCache), ServerError> {
    // The process is ready for systemd: it can only wait.
    notify::notify(NotifyState::Ready);
    let (tasks, stopping) = (InstanceTasks::here(), CancellationToken::new());
    let (health, health_service) = reporter();
    let health = HealthState { grpc: health, readiness, metrics: metrics.clone() };
    health.grpc.set_service_status(LIVENESS, tonic_health::ServingStatus::Serving).await;
    let routes = Routes::default().and(compressible!(health_service).max_decoding_message_size(QUESTION_BYTES_MAX));
    let away = |error: &StoreError| {
        Error::Unavailable(Arc::new(StoreError::NoPrimary { why: error.missing(), hosts: String::new() }))
    };
    let answer = Arc::new(ArcSwap::from_pointee(away(&error)));
    let calls = EdgeService::health_only(routes, edge.clone(), answer.clone());
    let incoming = accepted(listener.clone(), &edge, &tasks, &stopping, None);
    let mut servers = serve_calls(calls, incoming, &edge.bounds(), &ObserveLayer::new(metrics), &stopping);
    let preparing = async {
        let mut warned = None::<(NoPrimaryReason, Instant)>;
        loop {
            let why = error.missing();
            let is_news = warned.as_ref().is_none_or(|(before, at)| *before != why || at.elapsed() >= WARN_INTERVAL);
            if is_news {
                let error = cause(&error);
                tracing::warn!(error, "{why}: retrying; calls fail with this error meanwhile");
                warned = Some((why.clone(), Instant::now()));
            }
            answer.store(Arc::new(away(&error)));
            health.publish(Readiness::NoDatabase(why.to_string())).await;
            let _ = tokio::time::timeout(WAIT_POLL, opening.found()).await;
            let tried = match opening.standing() {
                Ok(()) => prepare(opening, options).await,
                Err(error) => Err(error),
            };
            match tried {
                Ok(prepared) => return Ok(prepared),
                Err(failed) if failed.may_be_waited_for() => error = failed,
                Err(failed) => return Err(ServerError::from(failed)),
            }
            if opening.standing().is_ok() {
                tokio::time::sleep(WAIT_POLL).await;
            }
        }
    };
    let ended = tokio::select! {
        prepared = preparing => prepared,
        Some(ended) = servers.join_next() => Err(match ended {
            Ok(Err(error)) => error.into(),
            Ok(Ok(())) | Err(_) => ServerError::Defect,
        }),
    };
    stopping.cancel();
    edge.close();
    let _ = tokio::time::timeout(WAITED_TIMEOUT, async { while servers.join_next().await.is_some() {} }).await;
    ended
}

/// Starts the tasks that follow changes of the database, and of files: database password, certificates, and issuers of
/// JWTs.
fn follow_changes(
    tasks: &InstanceTasks,
    store: &Store,
    tls: Option<&Arc<Tls>>,
    jwt: Option<&Arc<JwtAuthenticator>>,
    stopping: &CancellationToken,
) {
    tasks.spawn(store.primary().clone().stay_equipped(stopping.clone()));
    tasks.spawn(store.primary().clone().watch_disk(stopping.clone()));
    tasks.spawn(store.clone().follow(stopping.clone()));
    if let Some(tls) = tls {
        tasks.spawn(tls.clone().follow(stopping.clone()));
    }
    if let Some(jwt) = jwt {
        tasks.spawn(jwt.clone().follow(stopping.clone()));
    }
}

/// Waits until all servers have ended.
async fn ended(mut servers: JoinSet<Result<(), tonic::transport::Error>>) -> Result<(), ServerError> {
    while let Some(ended) = servers.join_next().await {
        ended.map_err(|_| ServerError::Defect)??;
    }
    Ok(())
}

/// Waits for the calls in progress and for the background work that they started.
async fn finish(
    serving: impl Future<Output = Result<(), ServerError>>,
    edge: &Edge,
    tasks: &InstanceTasks,
) -> Result<(), ServerError> {
    let close = async {
        tokio::time::sleep(LINGER).await;
        edge.close();
    };
    let (served, ()) = tokio::join!(serving, close);
    tasks.wait().await;
    served
}

/// Returns the URL of the page at a listener of [`listen_http`].
pub fn page_url(http: &TcpListener, is_encrypted: bool) -> Option<String> {
    let scheme = if is_encrypted { "https" } else { "http" };
    Some(format!("{scheme}://{}/", address_text(&http.local_addr().ok()?)))
}

/// Logs the identity, the addresses and the protection of the instance.
fn log_start(
    instance_id: Uuid,
    listener: &Listener,
    http: Option<&TcpListener>,
    database: &ConnectTarget,
    security: &SecuritySettings,
) {
    let (address, http) = (listener.address().ok(), http.and_then(|http| http.local_addr().ok()));
    tracing::info!(
        instance = %instance_id,
        address = address.map(tracing::field::display),
        http_address = http.map(tracing::field::display),
        %database,
        protection = %security,
        "instance created"
    );
}

/// Returns the address that other instances and callers read.
fn announced(address: &ListenAddress) -> String {
    match address {
        ListenAddress::Tcp(addresses) => addresses.first().map(address_text).unwrap_or_default(),
        ListenAddress::Unix(_) => address.to_string(),
    }
}
