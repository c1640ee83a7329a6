//! The whole cluster at a moment: one look a second serves everybody who wants one then, and nobody looks while nobody does.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwapOption;
use time::OffsetDateTime;
use tokio::{
    sync::mpsc,
    time::{Instant, MissedTickBehavior},
};
use uuid::Uuid;

use crate::{
    domain::{
        overview::{EmChange, Overview, ScopeTotals, TicketTotals, changes},
        principal::Principal,
    },
    error::Error,
    metrics::Metrics,
    store::{
        Store,
        overview::{self, COUNTED_MAX},
        server_instance::{self, ServerInstance},
        session::{Session, answered},
        user_resource::{self, Filter},
    },
};

use super::{background::fullest::FullestScopes, fair_share::FairShare, shared_try::SharedTry, tasks::Tasks};

/// How old an overview may be: a little less than the time between two that a watcher is told.
const AGE_MAX: Duration = Duration::from_millis(900);

/// How often a watcher is told one.
const INTERVAL: Duration = Duration::from_secs(1);

/// How long anybody waits for one.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// How many may watch an instance.
const WATCHERS_MAX: usize = 64;

/// How many of the fullest scopes it names.
const FULLEST_NAMED: usize = 10;

/// An overview, and what has changed since the one before.
#[derive(Debug)]
pub struct Snapshot {
    /// Grows by one.
    number: u64,
    /// What was seen.
    pub overview: Overview,
    /// The EMs that came, went, or stand otherwise than in the one before.
    changes: Vec<EmChange>,
}

impl Snapshot {
    /// The EMs that came, went, or stand otherwise than in another, which was taken before.
    fn changes_since(&self, before: &Self) -> Vec<EmChange> {
        match before.number.checked_add(1) == Some(self.number) {
            true => self.changes.clone(),
            false => changes(&before.overview.states, &self.overview.states),
        }
    }
}

/// What a watcher is told.
#[derive(Debug)]
pub struct Seen {
    /// The overview.
    pub snapshot: Arc<Snapshot>,
    /// What has changed since the one that the watcher was told before.
    pub changes: Vec<EmChange>,
}

/// Background work that is left.
#[derive(Debug)]
pub struct Job {
    /// What kind.
    pub kind: &'static str,
    /// What it is about.
    pub subject: String,
    /// How much of it is left.
    pub left: i64,
}

/// Looks at the whole cluster; clones share what they see.
#[derive(Clone, Debug)]
pub struct Overviews {
    store: Store,
    silent_after: Duration,
    scopes: FullestScopes,
    metrics: Metrics,
    tasks: Tasks,
    shared: SharedTry,
    session: Arc<tokio::sync::Mutex<Session>>,
    last: Arc<ArcSwapOption<Snapshot>>,
    watchers: Arc<FairShare>,
}

impl Overviews {
    /// Of EMs that are silent after `silent_after`, and of scopes as they are listed there.
    pub fn new(store: Store, silent_after: Duration, scopes: FullestScopes, metrics: Metrics, tasks: &Tasks) -> Self {
        let (shared, session) = (SharedTry::new(tasks), Arc::new(tokio::sync::Mutex::new(store.lent_session())));
        let (watchers, tasks) = (FairShare::of(WATCHERS_MAX), tasks.clone());
        Self { store, silent_after, scopes, metrics, tasks, shared, session, last: Arc::default(), watchers }
    }

    /// The whole cluster as it was less than a second ago, or is now.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn current(&self) -> Result<Arc<Snapshot>, Error> {
        let take = || {
            let this = self.clone();
            async move { this.take().await }
        };
        self.shared.done(AGE_MAX, Instant::now() + WAIT_MAX, take).await?;
        self.last.load_full().ok_or_else(|| Error::defect("an overview was taken, and is not there"))
    }

    /// What was seen last, however long ago; `None` if nobody has looked yet.
    pub fn last(&self) -> Option<Arc<Snapshot>> {
        self.last.load_full()
    }

    /// Looks at the whole cluster.
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
        self.last.store(Some(Arc::new(Snapshot { number, overview, changes })));
        Ok(())
    }

    async fn look(&self, session: &mut Session) -> Result<Overview, Error> {
        let totals = answered(overview::totals(session.get().await?)).await?;
        let locked = Filter { locked: Some(true), ..Filter::default() };
        let oldest = answered(user_resource::list(session.get().await?, &locked, Uuid::nil(), 1)).await?;
        let ems = overview::ems(session, self.silent_after).await?;
        let tickets = TicketTotals {
            used: ems.used_tickets,
            locked: totals.locked_tickets.min(COUNTED_MAX),
            is_locked_partial: totals.locked_tickets > COUNTED_MAX,
            oldest_locked: oldest.tickets.into_iter().next(),
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

    /// Tells an overview at once and then one each second, as long as somebody takes them; one who takes none costs nothing.
    ///
    /// # Errors
    /// [`Error::Overloaded`] if too many watch, or too many of `by`.
    pub fn watch(&self, by: &Principal) -> Result<mpsc::Receiver<Result<Seen, Error>>, Error> {
        let place = self.watchers.take(by).ok_or(Error::Overloaded)?;
        let (tell, told) = mpsc::channel(1);
        let (this, watcher) = (self.clone(), self.metrics.overviews.watcher());
        self.tasks.spawn(async move {
            let _held = (place, watcher);
            tokio::select! {
                () = tell.closed() => {}
                () = this.tell(&tell) => {}
            }
        });
        Ok(told)
    }

    async fn tell(&self, tell: &mpsc::Sender<Result<Seen, Error>>) {
        let mut seconds = tokio::time::interval(INTERVAL);
        seconds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut before: Option<Arc<Snapshot>> = None;
        loop {
            seconds.tick().await;
            // First: nobody looks for one who has not yet taken what was seen before.
            let Ok(place) = tell.reserve().await else { return };
            let snapshot = match self.current().await {
                Ok(snapshot) => snapshot,
                Err(error) => return place.send(Err(error)),
            };
            let is_new = before.as_ref().is_none_or(|before| before.number != snapshot.number);
            if is_new {
                let changes = before.map(|before| snapshot.changes_since(&before)).unwrap_or_default();
                place.send(Ok(Seen { snapshot: snapshot.clone(), changes }));
            }
            before = Some(snapshot);
        }
    }

    /// The instances that live, the oldest first, each with when it started.
    pub async fn instances(&self) -> Result<Vec<(ServerInstance, OffsetDateTime)>, Error> {
        let mut connection = self.store.operators().acquire().await?;
        Ok(answered(server_instance::list(&mut *connection)).await?)
    }

    /// The large work that is left: the first of each kind.
    pub async fn jobs(&self) -> Result<Vec<Job>, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let going = answered(overview::going(&mut *connection)).await?;
        let counting = answered(overview::counting(&mut *connection)).await?;
        let going = going.into_iter().map(|(em, left)| Job { kind: "em_goes", subject: em.to_string(), left });
        let counting =
            counting.into_iter().map(|(keys, left)| Job { kind: "label_sets", subject: keys.join(","), left });
        Ok(going.chain(counting).collect())
    }
}
