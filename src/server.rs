//! Puts an instance together, serves it, and takes it down in order.
//!
//! - `cell`: the services and background tasks of a cell; `assembly`: what is served of them, put together;
//! - `connections`: connections as they come, and the HTTP/2 on them;
//! - `health`: who is told whether calls may be sent here.

mod assembly;
mod cell;
mod connections;
mod health;

use std::{fmt, future::Future, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use tokio::{net::TcpListener, sync::watch, task::JoinSet, time::Instant};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tower_layer::Layer as _;
use uuid::Uuid;

use crate::{
    domain::{
        limit::{Rule, RuleChanges},
        principal::Principal,
    },
    error::Error,
    external::allowed::AllowedHosts,
    http::{
        self, Readiness,
        page::{
            self, Site,
            history::{History, Sources},
            picture::Pictures,
        },
    },
    metrics::Metrics,
    notify,
    service::{
        background::announcing::told_address,
        heartbeat::LivenessTimeouts,
        jwt::{Jwt, JwtError},
        limits::LimitService,
        tasks::Tasks,
        tokens::Tokens,
    },
    store::{Opening, Store, StoreError, primary::Missing, target::Target},
    tls::{self, Tls, TlsError},
    transport::{
        edge::{Bounds, Calls, Edge, Listen, Listener},
        health::reporter,
        identity::Identity,
        json::Schema,
        message_size::{QUESTION_BYTES_MAX, compressible},
        observe::{self, Observe},
        proto,
        resource_manager::RequestTimeouts,
        routes::Routes,
    },
};

use self::{
    assembly::assemble,
    cell::Instance,
    connections::{accepted, serve_calls},
    health::{Health, LIVENESS, watch_health},
};

/// How long a server that stops lets those linger who have no call under way: long enough for them to hear that it stops.
const LINGER: Duration = Duration::from_millis(250);

/// How long those may take to end who were told that an instance waits for its database, once it does no more.
const WAITED_TIMEOUT: Duration = Duration::from_secs(1);

/// How often a database that is waited for is tried, and how often the reason is logged.
const WAIT_POLL: Duration = Duration::from_secs(1);
const WARN_INTERVAL: Duration = Duration::from_secs(10);

/// What a server has to know.
#[derive(Debug, Clone)]
pub struct Options {
    /// What its callers may wait for.
    pub times: RequestTimeouts,
    /// How long signs of life of its EMs may be missing.
    pub liveness: LivenessTimeouts,
    /// How long ended tickets and request ids are remembered.
    pub history: Duration,
    /// How long calls may take to finish when it stops.
    pub drain_timeout: Duration,
    /// How long it says that it stops, and lets everybody in all the same, before it does.
    pub shutdown_delay: Duration,
    /// How many commit, each on a connection and for EMs of its own.
    pub committers: u16,
    /// What its callers may take.
    pub bounds: Bounds,
    /// What they have to show.
    pub security: Security,
    /// Which hosts external clusters may be asked at.
    pub external_hosts: AllowedHosts,
    /// Where a standby of its database is, for reads that may be a little old; `None` if the primary answers them, too.
    pub standby: Option<Target>,
    /// Whether it brings the schema of its database up to date, or expects to find it so.
    pub migrates: bool,
}

/// What callers have to show.
#[derive(Debug, Clone)]
pub struct Security {
    /// The certificates that connections are encrypted with; `None` if they are not.
    pub tls: Option<tls::Files>,
    /// Whose JWTs are believed, a file that says so; `None` for nobody's.
    pub jwt: Option<PathBuf>,
    /// Whether everybody may do everything, as long as no token was ever made.
    pub is_open: bool,
    /// Whether everybody who comes to the page is one of these.
    pub is_page_open: bool,
}

impl Security {
    /// Nothing: for one machine, or a program of its own.
    pub const OPEN: Self = Self { tls: None, jwt: None, is_open: true, is_page_open: true };
}

/// How an instance is protected, for people.
impl fmt::Display for Security {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has_certificates = self.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
        let shown = match (has_certificates, &self.jwt) {
            (true, None) => "certificates or tokens",
            (true, Some(_)) => "certificates, tokens or JWTs",
            (false, _) if self.is_open => {
                let protection = if self.tls.is_some() { "TLS" } else { "nothing" };
                return write!(f, "{protection}; everybody may do everything until a token is made");
            }
            (false, None) => "tokens",
            (false, Some(_)) => "tokens or JWTs",
        };
        write!(f, "{}{shown}", if self.tls.is_some() { "TLS, with " } else { "" })
    }
}

/// An instance that is ready to serve.
#[derive(Debug)]
pub struct Server {
    instance_id: Uuid,
    listener: Arc<Listener>,
    store: Store,
    options: Options,
    edge: Arc<Edge>,
    tls: Option<Arc<Tls>>,
    tokens: Tokens,
    jwt: Option<Arc<Jwt>>,
    metrics: Metrics,
    readiness: watch::Sender<Readiness>,
    /// Serves metrics, health and the page; ends with the server.
    http: Option<(SocketAddr, AbortOnDropHandle<()>)>,
    /// Where what the page needs goes.
    page: page::Slot,
}

/// Why a server cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The certificates cannot be used.
    #[error("the certificates cannot be used; see --tls-cert, --tls-key and --tls-client-ca")]
    Tls(#[from] TlsError),
    /// JWTs cannot be checked.
    #[error("JWTs cannot be checked; see --jwt-config")]
    Jwt(#[from] JwtError),
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
    /// The methods of the API cannot be read: a defect of the build.
    #[error("the API's methods cannot be read")]
    Methods(#[from] prost::DecodeError),
    /// The messages of the API cannot be read: a defect of the build.
    #[error("the API's messages cannot be read")]
    Messages(#[from] prost_reflect::DescriptorError),
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
    /// Brings the schema of the database up to date, if it is to; calls wait at `listener` meanwhile. A database that does not answer, or
    /// takes no writes yet, is waited for, and health and calls are answered so. Metrics and health are served at `http` from now on, if there is one. Logs
    /// first which instance this is, and where.
    pub async fn open(
        listener: Listener,
        http: Option<TcpListener>,
        database: impl Into<Target>,
        options: Options,
    ) -> Result<Self, ServerError> {
        let (instance_id, database) = (Uuid::new_v4(), database.into());
        tell_of(instance_id, &listener, http.as_ref(), &database, &options.security);
        let tls = options.security.tls.clone().map(Tls::read).transpose()?;
        let edge = Edge::new(options.bounds, tls.clone());
        let metrics = Metrics::new(observe::methods(&DESCRIPTORS)?, edge.gauges());
        let jwt = options.security.jwt.clone();
        let jwt = jwt.map(|path| Jwt::read(path, options.external_hosts.clone(), metrics.clone())).transpose()?;
        let (readiness, seen) = watch::channel(Readiness::Starting);
        let page = page::Slot::default();
        let serve = |listener: TcpListener| {
            let address = listener.local_addr().ok()?;
            Some((address, http::serve(listener, tls.clone(), metrics.clone(), seen, page.clone())))
        };
        let http = http.and_then(serve);
        let listener = Arc::new(listener);
        let (opening, found) = Opening::find(database).await?;
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

    /// Makes `rules` all the limits there are.
    ///
    /// # Errors
    /// As of [`LimitService::replace`].
    pub async fn replace_limits(&self, rules: Vec<Rule>) -> Result<RuleChanges, Error> {
        let limits = LimitService::new(self.store.clone(), Arc::default());
        limits.replace(&Principal::Service.into(), rules, Instant::now() + self.options.times.request_timeout).await
    }

    /// By what it is told from other instances, in the database and in logs.
    pub fn instance_id(&self) -> Uuid {
        self.instance_id
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
        let tasks = Tasks::here().leaving(store.primary().clone());
        let (stopping, leaving) = (CancellationToken::new(), CancellationToken::new());
        let defect = tasks.defect();
        let (health, health_service) = reporter();
        let address = listener.address().map(|address| announced(&address)).unwrap_or_default();
        let instance = Instance::new((instance_id, address.clone()), &options, (&metrics, &tasks, &stopping));
        let (routes, overviews) = assemble(&instance, &store, &tokens)?;
        let routes = routes.and(compressible!(health_service).max_decoding_message_size(QUESTION_BYTES_MAX));
        let health = Health { grpc: health, readiness, metrics: metrics.clone() };
        tasks.spawn(watch_health(health, store.clone(), leaving.clone()));
        tasks.spawn(store.primary().clone().stay_equipped(options.committers, stopping.clone()));
        tasks.spawn(store.primary().clone().watch_disk(stopping.clone()));
        take_up_changes(&tasks, &store, tls.as_ref(), jwt.as_ref(), &stopping);
        let incoming = accepted(listener, &edge, &tasks, &stopping, options.bounds.connection_age);
        tasks.close();

        let known_by = |is_open| Arc::new(Identity::new(tokens.clone(), jwt.clone(), is_open, metrics.clone()));
        let calls = Calls::new(routes, edge.clone(), known_by(options.security.is_open));
        let identity = known_by(options.security.is_page_open);
        let observe = Observe::new(metrics.clone());
        let (history, schema) = (History::default(), Arc::new(Schema::new()?));
        tasks.spawn(history.clone().keep(Sources::new(overviews.clone(), metrics, instance_id), stopping.clone()));
        let page = page.open(Site {
            calls: observe.layer(calls.known_by(identity.clone())),
            edge: edge.clone(),
            identity,
            pictures: Pictures::new(schema.clone()),
            schema,
            overviews,
            answers: page::shared::Answers::default(),
            history,
            about: page::About { instance_id, grpc: address, tls: tls.is_some() },
            tasks: tasks.clone(),
            stopping: stopping.clone(),
        });
        let serving = ended(serve_calls(calls, incoming, &options.bounds, &observe, &stopping));
        tokio::pin!(serving);
        let lame_duck = async {
            stop.await;
            leaving.cancel();
            // Whoever sends calls here hears that it stops before it does.
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
            return ended.map(|()| Ending::Drained);
        }
        tracing::info!("stopping: finishing the calls under way");
        let drained = tokio::time::timeout(options.drain_timeout, finish(serving, &edge, &tasks)).await;
        store.close().await;
        match drained {
            Ok(served) => served.map(|()| Ending::Drained),
            Err(_) => Ok(Ending::CutOff),
        }
    }
}

/// Brings the schema up to date, reads the tokens, and opens every connection that the instance needs.
async fn prepare(opening: &Opening, options: &Options) -> Result<(Store, Tokens), StoreError> {
    let store = opening.prepare(options.history, options.migrates).await?;
    let tokens = Tokens::read(&store).await?;
    store.primary().equip(options.committers).await?;
    Ok((store, tokens))
}

/// Serves health until the database can be used, and answers calls with the reason why it cannot, which is logged again and again. Returns
/// the prepared database.
///
/// # Errors
/// [`ServerError::Store`] if waiting is of no use.
async fn wait_for_database(
    mut error: StoreError,
    (opening, options): (&Opening, &Options),
    listener: &Arc<Listener>,
    edge: Arc<Edge>,
    (readiness, metrics): (watch::Sender<Readiness>, Metrics),
) -> Result<(Store, Tokens), ServerError> {
    // It is up, and cannot do more than whoever waits for it.
    notify::tell("READY=1");
    let (tasks, stopping) = (Tasks::here(), CancellationToken::new());
    let (health, health_service) = reporter();
    let health = Health { grpc: health, readiness, metrics: metrics.clone() };
    health.grpc.set_service_status(LIVENESS, tonic_health::ServingStatus::Serving).await;
    let routes = Routes::default().and(compressible!(health_service).max_decoding_message_size(QUESTION_BYTES_MAX));
    let away = |error: &StoreError| {
        Error::Unavailable(Arc::new(StoreError::NoPrimary { why: error.missing(), hosts: String::new() }))
    };
    let answer = Arc::new(ArcSwap::from_pointee(away(&error)));
    let calls = Calls::closed(routes, edge.clone(), answer.clone());
    let incoming = accepted(listener.clone(), &edge, &tasks, &stopping, None);
    let mut servers = serve_calls(calls, incoming, &edge.bounds(), &Observe::new(metrics), &stopping);
    let preparing = async {
        let mut warned = None::<(Missing, Instant)>;
        loop {
            let why = error.missing();
            let is_news = warned.as_ref().is_none_or(|(before, at)| *before != why || at.elapsed() >= WARN_INTERVAL);
            if is_news {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "{why}: waiting for it; calls are answered so meanwhile");
                warned = Some((why.clone(), Instant::now()));
            }
            answer.store(Arc::new(away(&error)));
            health.publish(Readiness::NoDatabase(why)).await;
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

/// Takes up what changes in files meanwhile: the database's password, certificates, and whose JWTs are believed.
fn take_up_changes(
    tasks: &Tasks,
    store: &Store,
    tls: Option<&Arc<Tls>>,
    jwt: Option<&Arc<Jwt>>,
    stopping: &CancellationToken,
) {
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

/// Waits until the calls under way are answered, and nothing is done any more that they began.
async fn finish(
    serving: impl Future<Output = Result<(), ServerError>>,
    edge: &Edge,
    tasks: &Tasks,
) -> Result<(), ServerError> {
    let close = async {
        tokio::time::sleep(LINGER).await;
        edge.close();
    };
    let (served, ()) = tokio::join!(serving, close);
    tasks.wait().await;
    served
}

/// The URL of the page at a listener of [`listen_http`].
pub fn page_url(http: &TcpListener, is_encrypted: bool) -> Option<String> {
    let scheme = if is_encrypted { "https" } else { "http" };
    Some(format!("{scheme}://{}/", told_address(&http.local_addr().ok()?)))
}

/// Logs the identity, the addresses and the protection of the instance.
fn tell_of(instance_id: Uuid, listener: &Listener, http: Option<&TcpListener>, database: &Target, security: &Security) {
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

/// The address that others are told.
fn announced(address: &Listen) -> String {
    match address {
        Listen::Tcp(addresses) => addresses.first().map(told_address).unwrap_or_default(),
        Listen::Unix(_) => address.to_string(),
    }
}
