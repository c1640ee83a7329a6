//! Search for the primary, the database host that accepts writes, for all connections of an instance.
//!
//! Each host has one probe task. A dead host is therefore tried once at a time, and no caller uses a host without
//! writes. If several hosts accept writes, as after a split, the primary is the host with the latest timeline: it was
//! promoted last.
//!
//! A change of the primary closes its pools, and every session drops its connection ([`Primary::generation`],
//! [`Primary::moved`]). A URL names the hosts, or the coordinator of Citus for a cell (`owner`). Caller:
//! [`super::Store`].
//!
//! Submodules: `probe`: probe tasks; `host_states`: host states and the choice; `owner`: hosts of a cell; `seats`:
//! connections that an instance needs; `disk`: a full disk.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use async_recursion::async_recursion as boxed;
use sqlx::{
    PgConnection,
    postgres::{PgConnectOptions, PgPool, PgPoolOptions},
};
use tokio::{sync::watch, time::timeout};
use tokio_util::task::AbortOnDropHandle;

use super::{
    StoreError,
    citus::{self, Cell, TableSet},
    connect_target::{ConnectTarget, place},
    endpoint::{DatabaseEndpoint, Settings},
    operators,
    session::CONNECT_TIMEOUT,
    url::UrlHosts,
};

mod disk;
mod host_states;
mod owner;
mod probe;
mod seats;

pub use host_states::NoPrimaryReason;
use host_states::{HostObservation, HostState, HostStates, choose, missing};
use probe::{check, check_new, probe_all, takes_writes};
use seats::Seats;
pub(super) use seats::{Seat, TakenSeat};

/// Maximum number of connections for short reads by key, and for steps of background work.
const POOL_CONNECTIONS_MAX: u32 = 4;

/// Maximum number of connections for operations that wait for contended keys.
pub const LANES_MAX: u32 = 3;

/// Maximum number of connections of an instance, plus one to each further host of the database.
pub const CONNECTIONS_MAX: u32 =
    1 + 1 + seats::OTHERS_MAX + 1 + LANES_MAX + operators::CONNECTIONS_MAX + POOL_CONNECTIONS_MAX;

/// Returns the reason for a database without free connection slots. `why` is its error text.
pub(super) fn full(why: &str) -> NoPrimaryReason {
    let needed = CONNECTIONS_MAX;
    NoPrimaryReason::Full(
        format!("the database has too few connections ({why}): an instance needs up to {needed}").into(),
    )
}

/// Returns the reason for a database with a full disk. `why` is its error text.
pub(super) fn disk_full(why: &str) -> NoPrimaryReason {
    NoPrimaryReason::DiskFull(format!("the database has no space left on its disk ({why})").into())
}

/// The primary, with its connection pools.
#[derive(Debug)]
pub struct PrimaryHost {
    index: usize,
    /// Address for display.
    pub place: String,
    generation: u64,
    /// Pool for short reads by key and for paths that are not hot; not for operators' lists.
    pub pool: PgPool,
    /// Pool for operators' lists.
    pub(super) operators: PgPool,
    /// Pool for operations that wait for contended keys.
    lanes: PgPool,
}

/// Pool that lends a connection.
#[derive(Debug, Clone, Copy)]
pub(super) enum Lender {
    Pool,
    Operators,
    Lanes,
}

impl PrimaryHost {
    fn pools(&self) -> [&PgPool; 3] {
        [&self.pool, &self.operators, &self.lanes]
    }

    async fn close(&self) {
        tokio::join!(self.pool.close(), self.operators.close(), self.lanes.close());
    }

    /// Returns the index of the host.
    pub(super) fn index(&self) -> usize {
        self.index
    }
}

struct PrimaryInner {
    target: ConnectTarget,
    /// Tables that the connections are for.
    tables: TableSet,
    hosts: ArcSwap<Endpoints>,
    known: watch::Sender<HostStates>,
    /// Number of the last probe request.
    asked: watch::Sender<u64>,
    /// Generation of the primary: the number of times that another host became the primary.
    generation: watch::Sender<u64>,
    /// Number of pooled connections that stopped responding.
    losses: AtomicU64,
    seats: Seats,
}

/// Endpoints of all hosts, and the connect timeout of each.
struct Endpoints {
    each: Vec<DatabaseEndpoint>,
    timeout: Duration,
}

/// Handle of the search for the primary. Clones share its state; the search runs while one of them exists.
#[derive(Clone)]
pub struct Primary {
    shared: Arc<PrimaryInner>,
    _looking: Arc<AbortOnDropHandle<()>>,
}

impl fmt::Debug for Primary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Primary({})", self.shared.target)
    }
}

impl Primary {
    /// Starts the search for the primary of `target`; with a cell, for the coordinator.
    pub fn watch(target: ConnectTarget) -> Self {
        let tables = target.cell().map_or(TableSet::All, TableSet::Distributed);
        let shared = PrimaryInner::new(target.hosts().as_ref(), target, tables);
        let looking = AbortOnDropHandle::new(tokio::spawn(probe_all(shared.clone())));
        Self { shared, _looking: Arc::new(looking) }
    }

    /// Starts the search for the worker that owns `cell`, as `coordinator` names it; at `hosts` until then.
    pub(super) fn of_cell(coordinator: Self, cell: Cell, hosts: UrlHosts) -> Self {
        citus::serve();
        let shared = PrimaryInner::new(&hosts, coordinator.target().clone(), TableSet::Local(cell.clone()));
        let looking = {
            let shared = shared.clone();
            async move {
                let ((), ()) = tokio::join!(probe_all(shared.clone()), owner::follow(shared, coordinator, cell));
            }
        };
        Self { shared, _looking: Arc::new(AbortOnDropHandle::new(tokio::spawn(looking))) }
    }

    /// Returns the connect target.
    pub fn target(&self) -> &ConnectTarget {
        &self.shared.target
    }

    /// Returns the primary. If none is known, waits for one more probe of each host, for up to `CONNECT_TIMEOUT`.
    ///
    /// # Errors
    /// [`StoreError::NoPrimary`], also while the instance has too few connections.
    pub async fn found(&self) -> Result<Arc<PrimaryHost>, StoreError> {
        {
            let known = self.shared.known.borrow();
            if let Some(why) = known.short.clone().filter(|_| known.found.is_some()) {
                let hosts = self.shared.target.to_string();
                return Err(StoreError::NoPrimary { why, hosts });
            }
        }
        self.usable().await
    }

    /// Returns the primary, also while the instance has too few connections.
    async fn usable(&self) -> Result<Arc<PrimaryHost>, StoreError> {
        if let Some(found) = self.shared.known.borrow().usable() {
            return Ok(found);
        }
        let question = self.shared.ask();
        let mut known = self.shared.known.subscribe();
        let answered = known.wait_for(|known| known.is_answered(question));
        let found = match timeout(CONNECT_TIMEOUT, answered).await {
            Ok(Ok(known)) => known.usable(),
            Ok(Err(_)) | Err(_) => None,
        };
        found.ok_or_else(|| self.shared.no_primary())
    }

    /// Waits for a primary without a time limit.
    pub async fn awaited(&self) -> Arc<PrimaryHost> {
        let mut known = self.shared.known.subscribe();
        let found = known.wait_for(|known| known.usable().is_some()).await.ok().and_then(|known| known.usable());
        match found {
            Some(found) => found,
            // The sender lives as long as `self`.
            None => std::future::pending().await,
        }
    }

    /// Returns the primary as of the last probe, or the reason why calls are not served.
    ///
    /// # Errors
    /// [`NoPrimaryReason`].
    pub fn standing(&self) -> Result<Arc<PrimaryHost>, NoPrimaryReason> {
        self.shared.known.borrow().standing()
    }

    /// Returns a future that waits for a change of [`Primary::standing`].
    pub fn changed(&self) -> impl Future<Output = ()> + Send + use<> {
        let generation = |known: &HostStates| known.standing().map(|found| found.generation);
        let mut known = self.shared.known.subscribe();
        let before = generation(&known.borrow());
        async move {
            // An error means that the store was dropped, and then the waiting task is dropped as well.
            let _ = known.wait_for(|known| generation(known) != before).await;
        }
    }

    /// Returns the primary at the start of an instance, or the reason why there is none yet.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] if waiting cannot help.
    pub async fn at_start(&self) -> Result<Result<Arc<PrimaryHost>, NoPrimaryReason>, StoreError> {
        if let Ok(found) = self.found().await {
            return Ok(Ok(found));
        }
        match self.hopeless() {
            Some(error) => Err(error),
            None => Ok(self.standing()),
        }
    }

    /// Returns the error if waiting cannot help: every host rejects the role, lacks the database, or does not suit the
    /// service. `None` while a host may still become usable.
    pub fn hopeless(&self) -> Option<StoreError> {
        let states = self.shared.known.borrow().states();
        let errors: Vec<_> = states.iter().filter_map(HostState::hopeless).collect();
        let source = errors.first().filter(|_| errors.len() == states.len())?;
        Some(StoreError::Unreachable { address: self.shared.target.to_string(), source: (*source).clone() })
    }

    /// Returns the error for a call that finds no primary now.
    pub fn missing(&self) -> StoreError {
        self.shared.no_primary()
    }

    /// Opens a connection to the primary with `settings` in addition to the settings of every session, and checks that
    /// the host accepts writes. Returns the connection and the generation.
    ///
    /// # Errors
    /// [`StoreError::NoPrimary`]; database errors.
    #[boxed]
    pub async fn connect_with(&self, settings: &[(&str, &str)]) -> Result<(PgConnection, u64), StoreError> {
        let found = self.found().await?;
        self.connect_to(&found, settings).await
    }

    async fn connect_to(
        &self,
        found: &PrimaryHost,
        settings: &[(&str, &str)],
    ) -> Result<(PgConnection, u64), StoreError> {
        let hosts = self.shared.hosts.load_full();
        let Some(endpoint) = hosts.each.get(found.index) else { return Err(self.shared.no_primary()) };
        let endpoint = endpoint.with(settings);
        let opened = async {
            let mut connection = endpoint.connect().await?;
            match takes_writes(&mut connection).await? {
                true => Ok(connection),
                false => Err(self.shared.no_primary()),
            }
        };
        let opened = timeout(hosts.timeout, opened).await.unwrap_or(Err(sqlx::Error::PoolTimedOut.into()));
        match opened {
            Ok(connection) => Ok((connection, found.generation)),
            Err(error) => {
                self.shared.doubt(found.generation);
                Err(error)
            }
        }
    }

    /// Returns the number of pooled connections that stopped responding. A constant number means that the database was
    /// reachable.
    pub(super) fn losses(&self) -> u64 {
        self.shared.losses.load(Ordering::Acquire)
    }

    /// Returns the generation of the primary. A connection of an older generation must be dropped.
    pub fn generation(&self) -> u64 {
        self.shared.generation()
    }

    /// Returns a future that waits until the present primary is no longer the primary.
    pub fn moved(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut generation = self.shared.generation.subscribe();
        async move {
            if generation.changed().await.is_err() {
                std::future::pending().await
            }
        }
    }

    /// Requests a probe of every host, after a connection broke.
    pub fn ask(&self) {
        self.shared.ask();
    }

    /// Returns a pool of one connection for the listener, opened at first use. The connection counts as taken while the
    /// second value exists.
    ///
    /// # Errors
    /// [`StoreError::NoPrimary`].
    pub async fn listening(&self) -> Result<(PgPool, TakenSeat), StoreError> {
        let found = self.found().await?;
        let _ = self.reserved(Seat::Listener).await;
        let taken = self.take(Seat::Listener);
        let hosts = self.shared.hosts.load();
        let endpoint = hosts.each.get(found.index).ok_or_else(|| self.shared.no_primary())?;
        Ok((self.shared.pool_options(1, endpoint).connect_lazy_with(endpoint.options.clone()), taken))
    }

    /// Replaces the hosts, or the credentials of the same hosts.
    pub(super) fn show(&self, hosts: UrlHosts) {
        self.shared.show(hosts);
    }

    /// Ends the search and closes the pools.
    pub(super) async fn close(&self) {
        self._looking.abort();
        let last = self.shared.known.borrow().last.clone();
        if let Some(last) = last {
            last.close().await;
        }
    }
}

impl PrimaryInner {
    fn new(hosts: &UrlHosts, target: ConnectTarget, tables: TableSet) -> Arc<Self> {
        let hosts = bounded(hosts, &tables);
        Arc::new(Self {
            known: watch::Sender::new(HostStates::of(hosts.each.len())),
            asked: watch::Sender::new(0),
            generation: watch::Sender::new(0),
            losses: AtomicU64::new(0),
            seats: Seats::default(),
            hosts: ArcSwap::from_pointee(hosts),
            target,
            tables,
        })
    }

    /// Returns the generation of the primary. The lock of the value is not kept.
    fn generation(&self) -> u64 {
        *self.generation.borrow()
    }

    /// Requests a probe of every host. Returns the number of the request, or of a later one.
    fn ask(&self) -> u64 {
        self.asked.send_modify(|asked| *asked += 1);
        *self.asked.borrow()
    }

    /// Marks the primary of `generation` as doubted after a failed connection: it is not returned before its next
    /// probe.
    fn doubt(&self, generation: u64) {
        self.known.send_if_modified(|known| {
            known.is_doubted |= known.found.as_ref().is_some_and(|found| found.generation == generation);
            false
        });
        self.ask();
    }

    /// Marks host `index` as late. If it is the primary, requests a probe of all hosts: another host may take its
    /// place.
    fn mark_slow(&self, index: usize) {
        let is_news = self.known.send_if_modified(|known| {
            let is_used = known.found.as_ref().is_some_and(|found| found.index == index);
            let is_news = is_used && !known.is_late;
            known.is_late |= is_used;
            is_news
        });
        if is_news {
            self.ask();
        }
    }

    fn no_primary(&self) -> StoreError {
        let (states, hosts) = (self.known.borrow().states(), self.hosts.load());
        let describe = |(endpoint, state): (&DatabaseEndpoint, &HostState)| {
            let place = place(&endpoint.options);
            match state {
                HostState::Unseen => format!("{place} has not been probed"),
                HostState::Writable(_) => format!("{place} is being probed again"),
                HostState::InRecovery => format!("{place} is in recovery"),
                HostState::ReadOnly => format!("{place} is read-only"),
                HostState::Elsewhere => format!("{place} no longer has the cell"),
                HostState::NotYet(error) | HostState::Unfit(error) | HostState::Away { error, .. } => {
                    format!("{place}: {}", rm_telemetry::with_causes(&**error))
                }
            }
        };
        let hosts: Vec<_> = hosts.each.iter().zip(&states).map(describe).collect();
        StoreError::NoPrimary { why: missing(&states), hosts: hosts.join("; ") }
    }

    /// Records the result of a probe and applies its consequences.
    fn note(self: &Arc<Self>, index: usize, seen: HostObservation) {
        let mut change = None;
        self.known.send_modify(|known| {
            let Some(place) = known.hosts.get_mut(index) else { return };
            *place = seen;
            if known.found.as_ref().is_some_and(|found| found.index == index) {
                (known.is_doubted, known.is_late) = (false, false);
            }
            change = Some(self.decide(known));
        });
        match change {
            Some(HostChange::Found(found)) => tracing::info!(host = found.place, "found the primary"),
            Some(HostChange::Lost) => {
                let error = self.no_primary();
                tracing::warn!(error = &error as &dyn std::error::Error, "no database host accepts writes");
                // The other hosts are probed immediately.
                self.ask();
            }
            Some(HostChange::None) | None => {}
        }
    }

    /// Selects the primary by the present host states.
    fn decide(self: &Arc<Self>, known: &mut HostStates) -> HostChange {
        let states = known.states();
        let before = known.found.as_ref().map(|found| found.index);
        let now = choose(&states, known.last.as_ref().map(|last| last.index));
        if now == before {
            return HostChange::None;
        }
        let Some(index) = now else {
            known.found = None;
            // A silent host may return unchanged, and its connections with it.
            let is_silent =
                before.and_then(|index| states.get(index)).is_none_or(|s| matches!(s, HostState::Away { .. }));
            if !is_silent {
                self.drop_current(known);
            }
            return HostChange::Lost;
        };
        if let Some(last) = known.last.clone().filter(|last| last.index == index) {
            known.found = Some(last.clone());
            return HostChange::Found(last);
        }
        self.drop_current(known);
        let Some(found) = self.used(index) else { return HostChange::None };
        known.found = Some(found.clone());
        known.last = Some(found.clone());
        HostChange::Found(found)
    }

    /// Drops the present primary: starts a new generation and closes its pools.
    fn drop_current(&self, known: &mut HostStates) {
        known.found = None;
        if let Some(left) = known.last.take() {
            self.generation.send_modify(|generation| *generation += 1);
            tokio::spawn(async move { left.close().await });
        }
    }

    fn used(self: &Arc<Self>, index: usize) -> Option<Arc<PrimaryHost>> {
        let hosts = self.hosts.load();
        let endpoint = hosts.each.get(index)?;
        let pool = |most| self.pool_options(most, endpoint).connect_lazy_with(endpoint.options.clone());
        Some(Arc::new(PrimaryHost {
            index,
            place: place(&endpoint.options),
            generation: self.generation(),
            pool: pool(POOL_CONNECTIONS_MAX),
            operators: pool(operators::CONNECTIONS_MAX),
            lanes: pool(LANES_MAX),
        }))
    }

    /// Returns the options of a pool. A connection is pinged, with a timeout, when it is taken and when it is returned.
    /// The pool's own tests would wait on a silently lost connection until the caller's deadline, or forever.
    fn pool_options(self: &Arc<Self>, connections_max: u32, endpoint: &DatabaseEndpoint) -> PgPoolOptions {
        let (before, after, made) = (Arc::downgrade(self), Arc::downgrade(self), Arc::downgrade(self));
        let endpoint = endpoint.clone();
        PgPoolOptions::new()
            .max_connections(connections_max)
            .acquire_timeout(CONNECT_TIMEOUT)
            // After a close, another instance may get the connection slot.
            .idle_timeout(None)
            .max_lifetime(None)
            .test_before_acquire(false)
            .before_acquire(move |connection, _| Box::pin(check(before.clone(), connection)))
            .after_release(move |connection, _| Box::pin(check(after.clone(), connection)))
            .after_connect(move |connection, _| Box::pin(check_new(made.clone(), endpoint.clone(), connection)))
    }

    fn show(self: &Arc<Self>, hosts: UrlHosts) {
        let before = self.hosts.load_full();
        let hosts = Arc::new(bounded(&hosts, &self.tables));
        let places = |hosts: &Endpoints| hosts.each.iter().map(|host| place(&host.options)).collect::<Vec<_>>();
        let are_others = places(&before) != places(&hosts);
        self.hosts.store(hosts.clone());
        if are_others {
            self.known.send_modify(|known| {
                self.drop_current(known);
                *known = HostStates { round: known.round + 1, ..HostStates::of(hosts.each.len()) };
            });
            return;
        }
        let last = self.known.borrow().last.clone();
        if let Some((last, endpoint)) = last.and_then(|last| Some((last.clone(), hosts.each.get(last.index)?))) {
            last.pools().into_iter().for_each(|pool| pool.set_connect_options(endpoint.options.clone()));
        }
    }
}

/// Returns the endpoints of `hosts` for connections to `tables`.
fn bounded(hosts: &UrlHosts, tables: &TableSet) -> Endpoints {
    let endpoint = |options: &PgConnectOptions| {
        let settings = tables.search_path(Settings::bounded(options, &hosts.settings));
        DatabaseEndpoint::new(options.clone(), settings)
    };
    Endpoints { each: hosts.options.iter().map(endpoint).collect(), timeout: hosts.timeout }
}

/// Change that a probe made.
enum HostChange {
    None,
    Found(Arc<PrimaryHost>),
    Lost,
}
