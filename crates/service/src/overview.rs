//! Overview: the totals of the whole cluster at one moment.
//!
//! The service computes at most one overview per second, and only on request. All callers and watchers of that second share it.
//!
//! Never: locks rows of the committer; runs periodically without a caller.
//! Callers: the RPC service `rm_edge::usage` and the web page `rm_edge::http::page`.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwapOption;
use async_recursion::async_recursion as boxed;
use time::OffsetDateTime;
use tokio::{
    sync::mpsc,
    time::{Instant, MissedTickBehavior},
};
use uuid::Uuid;

use crate::error::Error;
use rm_model::{
    overview::{EmChange, Overview, ScopeTotals, TicketTotals, changes},
    principal::Principal,
};
pub use rm_store::server_instance::{ServerInstance, TaskReport};
use rm_store::{
    Store,
    overview::{self, COUNTED_MAX},
    server_instance,
    session::{Session, within_timeout},
    user_resource::{self, TicketFilter},
};
use rm_telemetry::metrics::Metrics;

use super::{
    background::fullest::FullestScopes, fair_semaphore::FairSemaphore, single_flight::SingleFlight,
    tasks::InstanceTasks,
};

/// Maximum age of an overview: slightly less than the interval of watchers.
const AGE_MAX: Duration = Duration::from_millis(900);

/// Interval between updates of a watcher.
const INTERVAL: Duration = Duration::from_secs(1);

/// Timeout of the computation for one caller.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// Maximum number of watchers of an instance.
const WATCHERS_MAX: usize = 64;

/// Maximum number of fullest scopes in an overview.
const FULLEST_NAMED: usize = 10;

/// Overview with the changes since the previous one.
#[derive(Debug)]
pub struct OverviewSnapshot {
    /// Sequence number.
    number: u64,
    /// Totals of the cluster.
    pub overview: Overview,
    /// EMs that were added, removed or changed since the previous overview.
    changes: Vec<EmChange>,
}

impl OverviewSnapshot {
    /// Returns the EMs that were added, removed or changed since the earlier overview `before`.
    fn changes_since(&self, before: &Self) -> Vec<EmChange> {
        match before.number.checked_add(1) == Some(self.number) {
            true => self.changes.clone(),
            false => changes(&before.overview.states, &self.overview.states),
        }
    }
}

/// Update of a watcher.
#[derive(Debug)]
pub struct WatchUpdate {
    /// The overview.
    pub snapshot: Arc<OverviewSnapshot>,
    /// Changes since the watcher's previous update.
    pub changes: Vec<EmChange>,
}

/// Background work left.
#[derive(Debug)]
pub struct RemainingWork {
    /// Kind of the work.
    pub kind: &'static str,
    /// EM or label set of the work.
    pub subject: String,
    /// Number of tickets left.
    pub left: i64,
}

/// Computes overviews. Clones share them.
#[derive(Clone, Debug)]
pub struct OverviewService {
    store: Store,
    silent_after: Duration,
    scopes: FullestScopes,
    metrics: Metrics,
    tasks: InstanceTasks,
    shared: SingleFlight,
    session: Arc<tokio::sync::Mutex<Session>>,
    last: Arc<ArcSwapOption<OverviewSnapshot>>,
    watchers: Arc<FairSemaphore>,
}

impl OverviewService {
    /// Creates the service. EMs without a report for `silent_after` are silent; `scopes` lists the fullest scopes.
    pub fn new(
        store: Store,
        silent_after: Duration,
        scopes: FullestScopes,
        metrics: Metrics,
        tasks: &InstanceTasks,
    ) -> Self {
        let (shared, session) = (SingleFlight::new(tasks), Arc::new(tokio::sync::Mutex::new(store.lent_session())));
        let (watchers, tasks) = (FairSemaphore::of(WATCHERS_MAX), tasks.clone());
        Self { store, silent_after, scopes, metrics, tasks, shared, session, last: Arc::default(), watchers }
    }

    /// Returns an overview that is less than a second old; computes one if necessary.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn current(&self) -> Result<Arc<OverviewSnapshot>, Error> {
        let take = || {
            let this = self.clone();
            async move { this.take().await }
        };
        self.shared.run_recent(AGE_MAX, Instant::now() + WAIT_MAX, take).await?;
        self.last.load_full().ok_or_else(|| Error::defect("an overview was read, but is missing"))
    }

    /// Returns the last overview, regardless of its age; `None` if none was computed.
    pub fn last(&self) -> Option<Arc<OverviewSnapshot>> {
        self.last.load_full()
    }

    /// Computes an overview and stores it.
    async fn take(&self) -> Result<(), Error> {
        let mut session = self.session.lock().await;
        let looked = self.look(&mut session).await;
        if looked.is_err() {
            session.reset();
        }
        session.give_back().await;
        drop(session);
        let overview = looked?;
        self.metrics.overviews.taken.inc();
        let before = self.last.load_full();
        let number = before.as_ref().map_or(0, |before| before.number.saturating_add(1));
        let changes = before.map(|before| changes(&before.overview.states, &overview.states)).unwrap_or_default();
        self.last.store(Some(Arc::new(OverviewSnapshot { number, overview, changes })));
        Ok(())
    }

    async fn look(&self, session: &mut Session) -> Result<Overview, Error> {
        let totals = within_timeout(overview::totals(session.get().await?)).await?;
        let locked = TicketFilter { locked: Some(true), ..TicketFilter::default() };
        let oldest = within_timeout(user_resource::list(session.get().await?, &locked, Uuid::nil(), 1)).await?;
        let ems = overview::ems(session, self.silent_after).await?;
        let tickets = TicketTotals {
            used: ems.used_tickets,
            locked: totals.locked_tickets.min(COUNTED_MAX),
            is_locked_partial: totals.locked_tickets > COUNTED_MAX,
            oldest_locked: oldest.tickets.into_iter().next(),
            idle: totals.idle,
        };
        Ok(Overview {
            at: totals.at,
            ems: ems.totals,
            states: ems.states,
            held_percent: ems.held_percent,
            tickets,
            line: totals.line,
            throughput: totals.throughput,
            scopes: self.scopes(),
        })
    }

    fn scopes(&self) -> ScopeTotals {
        let Some(list) = self.scopes.list() else { return ScopeTotals::default() };
        ScopeTotals {
            scopes: list.scopes,
            over_limit: list.over_limit,
            fullest: list.fullest.iter().take(FULLEST_NAMED).cloned().collect(),
            at: Some(list.at),
        }
    }

    /// Starts a stream of overviews: one immediately, then one per second while the receiver takes them. No overview is
    /// computed while the receiver is full.
    ///
    /// # Errors
    /// [`Error::Overloaded`] if there are too many watchers, or too many of `by`.
    pub fn watch(&self, by: &Principal) -> Result<mpsc::Receiver<Result<WatchUpdate, Error>>, Error> {
        let place = self.watchers.acquire(by).ok_or(Error::Overloaded)?;
        let (updates, watched) = mpsc::channel(1);
        let (this, watcher) = (self.clone(), self.metrics.overviews.watcher());
        self.tasks.spawn(async move {
            let _held = (place, watcher);
            tokio::select! {
                () = updates.closed() => {}
                () = this.publish(&updates) => {}
            }
        });
        Ok(watched)
    }

    async fn publish(&self, updates: &mpsc::Sender<Result<WatchUpdate, Error>>) {
        let mut seconds = tokio::time::interval(INTERVAL);
        seconds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut before: Option<Arc<OverviewSnapshot>> = None;
        loop {
            seconds.tick().await;
            // Waits for a free slot first: a watcher that has not taken its update causes no computation.
            let Ok(place) = updates.reserve().await else { return };
            let snapshot = match self.current().await {
                Ok(snapshot) => snapshot,
                Err(error) => return place.send(Err(error)),
            };
            let is_new = before.as_ref().is_none_or(|before| before.number != snapshot.number);
            if is_new {
                let changes = before.map(|before| snapshot.changes_since(&before)).unwrap_or_default();
                place.send(Ok(WatchUpdate { snapshot: snapshot.clone(), changes }));
            }
            before = Some(snapshot);
        }
    }

    /// Returns the live instances, the oldest first, each with its start time.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn instances(&self) -> Result<Vec<(ServerInstance, OffsetDateTime)>, Error> {
        let mut connection = self.store.operators().acquire().await?;
        Ok(within_timeout(server_instance::list(&mut *connection)).await?)
    }

    /// Returns the large background work that is left: the first entry of each kind.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn jobs(&self) -> Result<Vec<RemainingWork>, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let going = within_timeout(overview::going(&mut *connection)).await?;
        let counting = within_timeout(overview::counting(&mut *connection)).await?;
        let going =
            going.into_iter().map(|(em, left)| RemainingWork { kind: "em_goes", subject: em.to_string(), left });
        let counting = counting.into_iter().map(|(keys, left)| RemainingWork {
            kind: "label_sets",
            subject: keys.join(","),
            left,
        });
        Ok(going.chain(counting).collect())
    }
}
