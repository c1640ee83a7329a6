//! Which of the database's hosts takes writes. One task for each host looks, for all connections of an instance: however many want one,
//! a host that is dead is tried by one at a time, and nobody is led to one that takes no writes.
//!
//! A host that stops taking writes is left at once: its pools are closed, and whoever keeps a connection to it gives that up
//! ([`Primary::generation`], [`Primary::moved`]). Of several that take writes, as after a split, the one counts whose timeline is the
//! latest: it was promoted after the others.
//!
//! Hosts are named by a URL or, where a cell is moved from one to another, by the coordinator of Citus ([`owner`]).
//!
//! - `look`: the tasks that look; `known`: what follows from what they see; `owner`: hosts of a cell, by the coordinator;
//!   `seats`: the connections that an instance needs; `disk`: a full disk.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use sqlx::{
    PgConnection,
    postgres::{PgConnectOptions, PgPool, PgPoolOptions},
};
use tokio::{sync::watch, time::timeout};
use tokio_util::task::AbortOnDropHandle;

use super::{
    StoreError,
    citus::{self, Cell, Tables},
    operators,
    session::{CONNECT_TIMEOUT, Endpoint, Settings},
    target::{Target, place},
    url::Hosts,
};

mod disk;
mod known;
mod look;
mod owner;
mod seats;

pub use known::Missing;
use known::{Known, Seen, State, choose, missing};
use look::{check, check_new, look_at_all, takes_writes};
use seats::Seats;
pub(super) use seats::{Seat, Taken};

/// Maximum number of connections for short reads by key, and for steps of background work.
const POOL_CONNECTIONS_MAX: u32 = 4;

/// Maximum number of connections for operations that wait for contended keys.
pub const LANES_MAX: u32 = 3;

/// How many connections an instance with one committer needs at most, beside one to each further host of the database.
pub const CONNECTIONS_MAX: u32 =
    1 + 1 + seats::OTHERS_MAX + 1 + LANES_MAX + operators::CONNECTIONS_MAX + POOL_CONNECTIONS_MAX;

/// The database has no connection left, as it said itself.
pub(super) fn full(why: &str) -> Missing {
    let needed = CONNECTIONS_MAX;
    Missing::Full(format!("the database has too few connections ({why}): an instance needs up to {needed}").into())
}

/// The disk of the database is full, as it said itself.
pub(super) fn disk_full(why: &str) -> Missing {
    Missing::DiskFull(format!("the database has no space left on its disk ({why})").into())
}

/// A host that takes writes.
#[derive(Debug)]
pub struct Found {
    index: usize,
    /// Where it is, for people.
    pub place: String,
    generation: u64,
    /// For short reads by key, and for whatever is not a hot path; never for what an operator lists.
    pub pool: PgPool,
    /// For what operators list.
    pub(super) operators: PgPool,
    /// For operations that wait for contended keys.
    lanes: PgPool,
}

/// The pool that lends a connection.
#[derive(Debug, Clone, Copy)]
pub(super) enum Lender {
    Pool,
    Operators,
    Lanes,
}

impl Found {
    fn pools(&self) -> [&PgPool; 3] {
        [&self.pool, &self.operators, &self.lanes]
    }

    async fn close(&self) {
        tokio::join!(self.pool.close(), self.operators.close(), self.lanes.close());
    }

    /// Which of the hosts it is.
    pub(super) fn index(&self) -> usize {
        self.index
    }
}

struct Shared {
    target: Target,
    /// What connections are for.
    tables: Tables,
    hosts: ArcSwap<Endpoints>,
    known: watch::Sender<Known>,
    /// The number of the last question.
    asked: watch::Sender<u64>,
    /// The number of the host that is used, counted by how often another was found.
    generation: AtomicU64,
    /// The same, for those who wait for another.
    moves: watch::Sender<u64>,
    /// Number of pooled connections that no longer answered.
    losses: AtomicU64,
    seats: Seats,
}

/// How to connect to each host, and how long each may take to let a connection in.
struct Endpoints {
    each: Vec<Endpoint>,
    timeout: Duration,
}

/// The host that takes writes; clones share what is known of it. While one of them lives, it is looked for.
#[derive(Clone)]
pub struct Primary {
    shared: Arc<Shared>,
    _looking: Arc<AbortOnDropHandle<()>>,
}

impl fmt::Debug for Primary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Primary({})", self.shared.target)
    }
}

impl Primary {
    /// Looks for it, as long as this or a clone lives. Of a target with a cell, that is the coordinator.
    pub fn watch(target: Target) -> Self {
        let tables = target.cell().map_or(Tables::All, Tables::Distributed);
        let shared = Shared::new(target.hosts().as_ref(), target, tables);
        let looking = AbortOnDropHandle::new(tokio::spawn(look_at_all(shared.clone())));
        Self { shared, _looking: Arc::new(looking) }
    }

    /// Looks for the worker that has a cell, which `coordinator` tells; at `hosts` until it does.
    pub(super) fn of_cell(coordinator: Self, cell: Cell, hosts: Hosts) -> Self {
        citus::serve();
        let shared = Shared::new(&hosts, coordinator.target().clone(), Tables::Local(cell.clone()));
        let looking = {
            let shared = shared.clone();
            async move {
                let ((), ()) = tokio::join!(look_at_all(shared.clone()), owner::follow(shared, coordinator, cell));
            }
        };
        Self { shared, _looking: Arc::new(AbortOnDropHandle::new(tokio::spawn(looking))) }
    }

    /// Where it is looked for.
    pub fn target(&self) -> &Target {
        &self.shared.target
    }

    /// The one that takes writes now. If none is known, waits for one more look at each host, but for no longer than it takes to connect.
    ///
    /// # Errors
    /// [`StoreError::NoPrimary`].
    pub async fn found(&self) -> Result<Arc<Found>, StoreError> {
        {
            let known = self.shared.known.borrow();
            if let Some(why) = known.short.clone().filter(|_| known.found.is_some()) {
                let hosts = self.shared.target.to_string();
                return Err(StoreError::NoPrimary { why, hosts });
            }
        }
        self.usable().await
    }

    /// The host that takes writes now, also while the instance has too few connections.
    async fn usable(&self) -> Result<Arc<Found>, StoreError> {
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

    /// The same, however long it takes.
    pub async fn awaited(&self) -> Arc<Found> {
        let mut known = self.shared.known.subscribe();
        let found = known.wait_for(|known| known.usable().is_some()).await.ok().and_then(|known| known.usable());
        match found {
            Some(found) => found,
            // It is looked for as long as this lives.
            None => std::future::pending().await,
        }
    }

    /// Whether one takes writes, as of the last look; why not.
    ///
    /// # Errors
    /// [`Missing`].
    pub fn standing(&self) -> Result<Arc<Found>, Missing> {
        self.shared.known.borrow().standing()
    }

    /// Waits until that is not as it is now.
    pub fn changed(&self) -> impl Future<Output = ()> + Send + use<> {
        let stands = |known: &Known| known.standing().map(|found| found.generation);
        let mut known = self.shared.known.subscribe();
        let before = stands(&known.borrow());
        async move {
            // Its other end goes with the store, and so does whoever waits.
            let _ = known.wait_for(|known| stands(known) != before).await;
        }
    }

    /// The one there is when an instance starts, or why there is none yet.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] if waiting for one is of no use.
    pub async fn at_start(&self) -> Result<Result<Arc<Found>, Missing>, StoreError> {
        if let Ok(found) = self.found().await {
            return Ok(Ok(found));
        }
        match self.hopeless() {
            Some(error) => Err(error),
            None => Ok(self.standing()),
        }
    }

    /// Why waiting for one is of no use: no host lets this role in, has the database, or suits the service. `None` while one may.
    pub fn hopeless(&self) -> Option<StoreError> {
        let states = self.shared.known.borrow().states();
        let errors: Vec<_> = states.iter().filter_map(State::hopeless).collect();
        let source = errors.first().filter(|_| errors.len() == states.len())?;
        Some(StoreError::Unreachable { address: self.shared.target.to_string(), source: (*source).clone() })
    }

    /// The error of a call that finds no host now.
    pub fn missing(&self) -> StoreError {
        self.shared.no_primary()
    }

    /// A connection to it, with these settings beside those of every session, which is known to take writes.
    ///
    /// # Errors
    /// [`StoreError::NoPrimary`]; those of the database.
    pub async fn connect_with(&self, settings: &[(&str, &str)]) -> Result<(PgConnection, u64), StoreError> {
        let found = self.found().await?;
        self.connect_to(&found, settings).await
    }

    async fn connect_to(&self, found: &Found, settings: &[(&str, &str)]) -> Result<(PgConnection, u64), StoreError> {
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

    /// Number of pooled connections that no longer answered: while it is the same, the database was not away.
    pub(super) fn losses(&self) -> u64 {
        self.shared.losses.load(Ordering::Acquire)
    }

    /// The number of the host that is used: whoever has a connection of another gives it up.
    pub fn generation(&self) -> u64 {
        self.shared.generation.load(Ordering::Acquire)
    }

    /// Waits until the host that is used now is used no more.
    pub fn moved(&self) -> impl Future<Output = ()> + Send + use<> {
        let (mut moves, now) = (self.shared.moves.subscribe(), self.generation());
        async move {
            if moves.wait_for(|generation| *generation != now).await.is_err() {
                std::future::pending().await
            }
        }
    }

    /// Has every host looked at soon: a connection broke.
    pub fn ask(&self) {
        self.shared.ask();
    }

    /// One connection that is kept for listening, opened when it is first needed; it counts as taken as long as the second value lives.
    ///
    /// # Errors
    /// [`StoreError::NoPrimary`].
    pub async fn listening(&self) -> Result<(PgPool, Taken), StoreError> {
        let found = self.found().await?;
        let _ = self.reserved(Seat::Listener).await;
        let taken = self.take(Seat::Listener);
        let hosts = self.shared.hosts.load();
        let endpoint = hosts.each.get(found.index).ok_or_else(|| self.shared.no_primary())?;
        Ok((self.shared.pool_options(1, endpoint).connect_lazy_with(endpoint.options.clone()), taken))
    }

    /// Takes other hosts, or another password for the same.
    pub(super) fn show(&self, hosts: Hosts) {
        self.shared.show(hosts);
    }

    /// Closes the pools; the host is not looked for any more.
    pub(super) async fn close(&self) {
        self._looking.abort();
        let last = self.shared.known.borrow().last.clone();
        if let Some(last) = last {
            last.close().await;
        }
    }
}

impl Shared {
    fn new(hosts: &Hosts, target: Target, tables: Tables) -> Arc<Self> {
        let hosts = bounded(hosts, &tables);
        Arc::new(Self {
            known: watch::Sender::new(Known::of(hosts.each.len())),
            asked: watch::Sender::new(0),
            generation: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            moves: watch::Sender::new(0),
            seats: Seats::default(),
            hosts: ArcSwap::from_pointee(hosts),
            target,
            tables,
        })
    }

    /// Has every host looked at soon; answers with the number of the question.
    fn ask(&self) -> u64 {
        let mut question = 0;
        self.asked.send_modify(|asked| {
            *asked += 1;
            question = *asked;
        });
        question
    }

    /// Somebody could not use the host of this generation: nobody else is led there until it was looked at.
    fn doubt(&self, generation: u64) {
        self.known.send_if_modified(|known| {
            known.is_doubted |= known.found.as_ref().is_some_and(|found| found.generation == generation);
            false
        });
        self.ask();
    }

    /// A host has not answered for a while: if it is the one that is used, another may be about to take its place.
    fn late(&self, index: usize) {
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
        let told = |(endpoint, state): (&Endpoint, &State)| {
            let place = place(&endpoint.options);
            match state {
                State::Unseen => format!("{place} has not been looked at"),
                State::Writable(_) => format!("{place} is just being looked at again"),
                State::InRecovery => format!("{place} is in recovery"),
                State::ReadOnly => format!("{place} takes no writes"),
                State::Elsewhere => format!("{place} has the cell no more"),
                State::NotYet(error) | State::Unfit(error) | State::Away { error, .. } => {
                    format!("{place}: {}", crate::telemetry::with_causes(&**error))
                }
            }
        };
        let hosts: Vec<_> = hosts.each.iter().zip(&states).map(told).collect();
        StoreError::NoPrimary { why: missing(&states), hosts: hosts.join("; ") }
    }

    /// A host was looked at.
    fn note(self: &Arc<Self>, index: usize, seen: Seen) {
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
            Some(Change::Found(found)) => tracing::info!(host = found.place, "found the host that takes writes"),
            Some(Change::Lost) => {
                let error = self.no_primary();
                tracing::warn!(error = &error as &dyn std::error::Error, "no host of the database takes writes");
                // The others look at once.
                self.ask();
            }
            Some(Change::None) | None => {}
        }
    }

    /// Which host is to be used, by what is known now.
    fn decide(self: &Arc<Self>, known: &mut Known) -> Change {
        let states = known.states();
        let before = known.found.as_ref().map(|found| found.index);
        let now = choose(&states, known.last.as_ref().map(|last| last.index));
        if now == before {
            return Change::None;
        }
        let Some(index) = now else {
            known.found = None;
            // One that only fell silent may be the same again, and its connections, too.
            let is_silent = before.and_then(|index| states.get(index)).is_none_or(|s| matches!(s, State::Away { .. }));
            if !is_silent {
                self.leave(known);
            }
            return Change::Lost;
        };
        if let Some(last) = known.last.clone().filter(|last| last.index == index) {
            known.found = Some(last.clone());
            return Change::Found(last);
        }
        self.leave(known);
        let Some(found) = self.used(index) else { return Change::None };
        known.found = Some(found.clone());
        known.last = Some(found.clone());
        Change::Found(found)
    }

    /// Nobody uses the host any more that was used.
    fn leave(&self, known: &mut Known) {
        known.found = None;
        if let Some(left) = known.last.take() {
            let generation = self.generation.fetch_add(1, Ordering::AcqRel) + 1;
            self.moves.send_replace(generation);
            tokio::spawn(async move { left.close().await });
        }
    }

    fn used(self: &Arc<Self>, index: usize) -> Option<Arc<Found>> {
        let hosts = self.hosts.load();
        let endpoint = hosts.each.get(index)?;
        let pool = |most| self.pool_options(most, endpoint).connect_lazy_with(endpoint.options.clone());
        Some(Arc::new(Found {
            index,
            place: place(&endpoint.options),
            generation: self.generation.load(Ordering::Acquire),
            pool: pool(POOL_CONNECTIONS_MAX),
            operators: pool(operators::CONNECTIONS_MAX),
            lanes: pool(LANES_MAX),
        }))
    }

    /// How pools treat their connections. They have to answer in time when they are taken, and when they are given back: the pool's own
    /// questions would wait on a connection that was lost without a word until the caller's time is over, or for ever.
    fn pool_options(self: &Arc<Self>, connections_max: u32, endpoint: &Endpoint) -> PgPoolOptions {
        let (before, after, made) = (Arc::downgrade(self), Arc::downgrade(self), Arc::downgrade(self));
        let endpoint = endpoint.clone();
        PgPoolOptions::new()
            .max_connections(connections_max)
            .acquire_timeout(CONNECT_TIMEOUT)
            // A connection that was closed may be another instance's by then.
            .idle_timeout(None)
            .max_lifetime(None)
            .test_before_acquire(false)
            .before_acquire(move |connection, _| Box::pin(check(before.clone(), connection)))
            .after_release(move |connection, _| Box::pin(check(after.clone(), connection)))
            .after_connect(move |connection, _| Box::pin(check_new(made.clone(), endpoint.clone(), connection)))
    }

    fn show(self: &Arc<Self>, hosts: Hosts) {
        let before = self.hosts.load_full();
        let hosts = Arc::new(bounded(&hosts, &self.tables));
        let places = |hosts: &Endpoints| hosts.each.iter().map(|host| place(&host.options)).collect::<Vec<_>>();
        let are_others = places(&before) != places(&hosts);
        self.hosts.store(hosts.clone());
        if are_others {
            self.known.send_modify(|known| {
                self.leave(known);
                *known = Known { round: known.round + 1, ..Known::of(hosts.each.len()) };
            });
            return;
        }
        let last = self.known.borrow().last.clone();
        if let Some((last, endpoint)) = last.and_then(|last| Some((last.clone(), hosts.each.get(last.index)?))) {
            last.pools().into_iter().for_each(|pool| pool.set_connect_options(endpoint.options.clone()));
        }
    }
}

/// How to connect to each of `hosts`, for `tables`.
fn bounded(hosts: &Hosts, tables: &Tables) -> Endpoints {
    let endpoint = |options: &PgConnectOptions| {
        let settings = tables.seen_by(Settings::bounded(options, &hosts.settings));
        Endpoint::new(options.clone(), settings)
    };
    Endpoints { each: hosts.options.iter().map(endpoint).collect(), timeout: hosts.timeout }
}

/// What a look has changed.
enum Change {
    None,
    Found(Arc<Found>),
    Lost,
}
