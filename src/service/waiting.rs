//! The waiting line of this instance: whose callers wait here, where they stand, and who wakes them.
//!
//! The line itself is in the database, and decides who may be granted what. Here is only who looks again, and when. A ticket that is
//! released here sends the first in line to the committer right behind itself: mostly one commit carries out both. Whoever commits
//! more room than was taken again, or leaves the line, tells of the spots and of how many made room there: those who wait here at
//! once, and the other instances by a notification; each wakes so many of its waiters. One for whom there is room by what this
//! instance has seen goes straight to the committer; others look first. One who is granted wakes the next, so that as many look as can
//! be served, and hardly more. A slow poll is the net below.
//!
//! - `index`: who waits where, and who is woken by what;
//! - `wake`: why somebody looks again;
//! - `keeper`: the tasks that keep the line, and hear of more room.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::mpsc, time::Instant};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    domain::{
        em::EmInstance,
        line::{FreedSpots, QueuePosition, Spot, Spots},
        operation::{Operation, RequestSpec, Wait, Waiting},
    },
    error::Error,
    metrics::{Held, Metrics},
    store::{
        Store,
        session::{Session, answered, answered_within},
        waiting::{self, Freed, SpotKey},
    },
};

use super::{
    fair_share::{FairShare, Place},
    shared_try::SharedTry,
    tasks::Tasks,
};

mod index;
mod keeper;
mod wake;

use index::{Index, Sleeper};
pub use keeper::{listen, live, run};
pub use wake::Wake;

/// How often an instance with waiters says that it lives, looks for dead ones, and lets the first in line look again.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How long a connection that was not used for a while has to answer.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a waiter pauses after a failure that may pass.
const FAILURE_PAUSE: Duration = Duration::from_millis(500);

/// The waiters of this instance; clones share them.
#[derive(Clone, Debug)]
pub struct WaitingLine {
    store: Store,
    instance_id: Uuid,
    index: Arc<Mutex<Index>>,
    leaving: mpsc::UnboundedSender<Uuid>,
    stopping: CancellationToken,
    metrics: Metrics,
    /// For those who wait here.
    places: Arc<FairShare>,
    /// Says that this instance lives, on a connection of its own: whatever else waits for connections, nobody here loses his position.
    alive: SharedTry,
    signs: Arc<tokio::sync::Mutex<Session>>,
}

impl WaitingLine {
    /// An empty line of the instance for up to `most` callers, and where it hears of those who leave it.
    pub fn new(
        store: Store,
        instance_id: Uuid,
        most: usize,
        metrics: Metrics,
        tasks: &Tasks,
        stopping: CancellationToken,
    ) -> (Self, mpsc::UnboundedReceiver<Uuid>) {
        #[expect(
            clippy::disallowed_methods,
            reason = "one for each call that ends, and calls are bounded; a drop cannot wait"
        )]
        let (leaving, left) = mpsc::unbounded_channel();
        let (alive, signs) = (SharedTry::new(tasks), Arc::new(tokio::sync::Mutex::new(store.session())));
        let (index, places) = (Arc::default(), FairShare::of(most));
        (Self { store, instance_id, index, leaving, stopping, metrics, places, alive, signs }, left)
    }

    /// Where to tell of requests that stand in line although their callers are gone.
    pub fn leaving(&self) -> mpsc::UnboundedSender<Uuid> {
        self.leaving.clone()
    }

    /// The instance on which these wait, in the database.
    pub fn instance_id(&self) -> Uuid {
        self.instance_id
    }

    /// Where an operation is going to make room, if anybody waits here.
    pub fn making_room(&self, operation: &Operation) -> Option<SpotKey> {
        let em = match operation {
            Operation::Released(released) => &released.em,
            Operation::Force(forced) => &forced.ticket.em,
            _ => return None,
        };
        (self.index().callers > 0).then(|| SpotKey::of(&Spot::Em(em.clone())))
    }

    /// An operation that is going to make room at a spot stands in the committer's queue: the first who waits there is sent after it.
    pub fn room_comes(&self, spot: SpotKey) {
        self.index().room_comes(spot);
    }

    /// A batch was committed here: it freed capacity at `freed`, and granted the requests at the positions `granted`, each at that EM.
    /// `others_wait` if requests may wait on other instances.
    pub fn committed<'a>(
        &self,
        freed: &FreedSpots,
        granted: impl Iterator<Item = (QueuePosition, &'a EmInstance)>,
        others_wait: bool,
    ) {
        // A caller that enters later reads what is committed.
        if self.index().callers == 0 {
            return;
        }
        // The hashes of the keys are computed before the lock is taken.
        let freed = Freed::of(freed);
        let granted: Vec<_> = granted.map(|(position, em)| (position, SpotKey::of(&Spot::Em(em.clone())))).collect();
        self.index().committed(freed, granted, others_wait);
    }

    /// EMs that somebody held are free: there may be room there for those for whom any EM will do.
    pub fn held_no_more(&self) {
        let mut index = self.index();
        if index.callers > 0 {
            index.wake_anywhere();
        }
    }

    /// A caller that is going to wait until `until`.
    ///
    /// # Errors
    /// [`Error::Overloaded`] if too many wait here, or too many of whoever asks.
    pub fn enter(&self, any_em: bool, ask: &RequestSpec, until: Instant) -> Result<Caller, Error> {
        self.enter_if_room(any_em, ask, until).ok_or_else(|| {
            self.metrics.line.turned_away.inc();
            Error::Overloaded
        })
    }

    /// Creates a waiting caller; `None` if too many wait. A request may still be granted without waiting.
    pub fn enter_if_room(&self, any_em: bool, ask: &RequestSpec, until: Instant) -> Option<Caller> {
        let place = self.places.take(&ask.principal)?;
        self.index().callers += 1;
        let needs = ask.resource.amounts().filter(|(_, amount)| *amount > 0).map(|(dimension, _)| dimension);
        let sleeper = Sleeper { wake: Arc::default(), any_em, needs: needs.collect() };
        Some(Caller {
            line: self.clone(),
            sleeper,
            until,
            in_doubt: None,
            stands: None,
            hears_of: BTreeSet::new(),
            news_count: 0,
            stood_since: None,
            answered: None,
            _counted: self.metrics.line.caller(),
            _place: place,
        })
    }

    /// Says that this instance lives, unless it was said just now: who waits on one that does not is not in line.
    async fn keep_alive(&self, deadline: Instant) -> Result<(), Error> {
        let say = || say_alive(self.signs.clone(), self.instance_id);
        self.alive.done(POLL_INTERVAL, deadline, say).await
    }

    /// Connects before anybody waits: whoever comes first may not have the time.
    async fn connect(&self) {
        // Without a database, the first sign of life tries again.
        let _ = self.signs.lock().await.get().await;
    }

    /// A lock that is poisoned guards nothing that a panic could have left half done.
    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection that was lost while it was idle costs a moment, and a new one.
async fn say_alive(signs: Arc<tokio::sync::Mutex<Session>>, instance_id: Uuid) -> Result<(), Error> {
    let mut session = signs.lock().await;
    if session.is_open() {
        let said = async { waiting::keep_alive(session.get().await?, instance_id).await };
        match answered_within(IDLE_TIMEOUT, said).await {
            Ok(()) => return Ok(()),
            Err(_) => session.reset(),
        }
    }
    let said = match session.get().await {
        Ok(connection) => answered(waiting::keep_alive(connection, instance_id)).await,
        Err(error) => Err(error),
    };
    if said.is_err() {
        session.reset();
    }
    Ok(said?)
}

/// Somebody who waits. Dropped, he leaves the line.
#[derive(Debug)]
pub struct Caller {
    line: WaitingLine,
    sleeper: Sleeper,
    until: Instant,
    /// The ticket under which it may stand in the database, whatever was heard of it.
    in_doubt: Option<Uuid>,
    stands: Option<(QueuePosition, Spots)>,
    /// Where else it hears of room.
    hears_of: BTreeSet<Spot>,
    /// How much news there had been when it was last judged.
    news_count: u64,
    /// When it first stood in line, and how it was answered, if it was.
    stood_since: Option<Instant>,
    answered: Option<&'static str>,
    /// Counts as waiting here as long as it does.
    _counted: Held,
    _place: Place,
}

/// Why a caller need not wait any longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Woken {
    /// There may be room.
    Look(Wake),
    /// The time is up.
    TimeIsUp,
    /// The server is going down.
    Stopping,
}

impl Caller {
    /// How the request for a ticket waits, for the ledger; `is_elsewhere` if it is tried on another EM than where it stands.
    ///
    /// # Errors
    /// Those of the database: an instance that cannot say that it lives has nobody in line.
    pub async fn wait(&mut self, ticket_id: Uuid, is_elsewhere: bool) -> Result<Wait, Error> {
        self.line.keep_alive(self.until).await?;
        self.in_doubt = Some(ticket_id);
        self.news_count = self.line.index().news_count();
        let remaining = self.until.saturating_duration_since(Instant::now());
        let position = self.position();
        Ok(Wait { instance_id: self.line.instance_id, remaining, any_em: self.any_em(), is_elsewhere, position })
    }

    /// Until when.
    pub fn until(&self) -> Instant {
        self.until
    }

    /// Whether any EM will do.
    pub fn any_em(&self) -> bool {
        self.sleeper.any_em
    }

    /// Where it stands; empty if it is not in line yet.
    pub fn spots(&self) -> Spots {
        self.stands.as_ref().map(|(_, spots)| spots.clone()).unwrap_or_default()
    }

    /// It goes to the committer.
    pub fn tries(&self) {
        if let Some(position) = self.position() {
            self.line.index().tries(position);
        }
    }

    fn position(&self) -> Option<QueuePosition> {
        self.stands.as_ref().map(|(position, _)| *position)
    }

    /// It stands in line there now.
    pub fn stand(&mut self, waiting: &Waiting) {
        self.stood_since.get_or_insert_with(Instant::now);
        if self.spots() != waiting.spots {
            self.stands = Some((waiting.position, waiting.spots.clone()));
            self.enlist(self.news_count);
        }
    }

    /// It is woken by room at these spots too, although it does not stand there: also by what was told since there were so many news.
    pub fn hears_of(&mut self, spots: BTreeSet<Spot>, since: u64) {
        if self.hears_of != spots {
            self.hears_of = spots;
            self.enlist(since);
        }
    }

    /// How much news there has been.
    pub fn news_count(&self) -> u64 {
        self.line.index().news_count()
    }

    fn enlist(&self, since: u64) {
        if let Some((position, spots)) = &self.stands {
            let short = spots.iter().filter(|(_, is_short)| **is_short).map(|(spot, _)| spot);
            let keys: BTreeSet<SpotKey> = short.chain(&self.hears_of).map(SpotKey::of).collect();
            self.line.index().insert(*position, self.sleeper.clone(), keys, since);
        }
    }

    /// Waits until something has changed that concerns it.
    pub async fn woken(&self) -> Woken {
        let Some(position) = self.position() else { return Woken::Look(Wake::NEWS) };
        // In a statement of its own: the lock must not be held any longer.
        let untold = self.line.index().rest(position);
        if let Some(wake) = untold {
            return Woken::Look(wake);
        }
        tokio::select! {
            () = self.line.stopping.cancelled() => Woken::Stopping,
            () = tokio::time::sleep_until(self.until) => Woken::TimeIsUp,
            () = self.sleeper.wake.notified() => Woken::Look(self.line.index().woken_by(position)),
        }
    }

    /// There was no room for it: there may be for others behind it.
    pub fn pass_on(&self, wake: Wake) {
        if let Some(position) = self.position() {
            self.line.index().pass_on(position, wake);
        }
    }

    /// Counts a look, or a try that was in vain.
    pub fn count_look(&self, wake: Wake) {
        let counts = &self.line.metrics.line;
        if wake.is_poll { counts.polls.inc() } else { counts.looks.inc() }
    }

    /// Pauses after a failure that may pass, and then looks again.
    pub async fn pause(&self) -> Woken {
        let again = (Instant::now() + FAILURE_PAUSE).min(self.until);
        tokio::select! {
            () = self.line.stopping.cancelled() => Woken::Stopping,
            () = tokio::time::sleep_until(again), if again < self.until => Woken::Look(Wake::NEWS),
            () = tokio::time::sleep_until(self.until) => Woken::TimeIsUp,
        }
    }

    /// It was granted, and left the line with that: so the index was told when it was committed.
    pub fn granted(&mut self) {
        self.in_doubt = None;
        if self.stands.take().is_some() {
            self.line.metrics.line.served.inc();
        }
    }

    /// It is told an answer of this kind; otherwise it goes away.
    pub fn answered(&mut self, outcome: &'static str) {
        self.answered = Some(outcome);
    }

    /// The ledger has taken it out of the line, or found that it is not there.
    pub fn is_out(&mut self) {
        self.in_doubt = None;
        if let Some((position, _)) = self.stands.take() {
            self.line.index().remove(position);
        }
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        if let Some(since) = self.stood_since {
            self.line.metrics.requests.waited(since, self.answered.unwrap_or("cancelled"));
        }
        let mut index = self.line.index();
        index.callers -= 1;
        if let Some((position, _)) = self.stands.take() {
            index.remove(position);
        }
        drop(index);
        if let Some(ticket_id) = self.in_doubt {
            // Without a listener the server has shut down; other instances sweep what it left.
            let _ = self.line.leaving.send(ticket_id);
        }
    }
}
