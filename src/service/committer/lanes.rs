//! Where operations wait whose keys others hold: one lane per held key, on a connection of its own.
//!
//! A lane waits for its key alone, holding nothing, so that it stands in nobody's way; then it carries its operations out as a
//! batch of its own. While a lane is open, new operations on its key go there at once: the others meet a held key only once.
//!
//! What may be tried on another EM waits in the lane of an EM for one turn at most: if the key is still held then, it is taken out and its
//! caller told so. The lane then stays open until the key is free, so that the EM is not chosen meanwhile. One of the lanes in which nobody
//! waits looks out for the keys of all of these, so that it takes no longer the more there are.

use std::{
    collections::{BTreeSet, HashMap, hash_map::Entry},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{Notify, Semaphore},
    time::Instant,
};

use crate::{
    domain::{em::EmInstance, limit::Limits, operation::LockKey},
    error::Error,
    metrics::Metrics,
    service::{admission::StateCache, tasks::Tasks, waiting::WaitingLine},
    store::{
        Store, StoreError,
        primary::LANES_MAX,
        resource_lock::{self, Obstacle},
        session::answered,
    },
};

use super::{
    Pending,
    queue::BATCH_COST_MAX,
    worker::{Answers, Worker},
};

/// How many lanes wait in the database at once, each on a connection; the others take turns. Lanes in which nobody waits take none.
const LANES_ACTIVE_MAX: u32 = LANES_MAX;

/// How long a lane waits in the database before it lets another have its turn, and looks who still waits in it.
const TURN: Duration = Duration::from_millis(200);

/// The least that a turn is worth.
const TURN_MIN: Duration = Duration::from_millis(10);

/// How often a lane looks whether a committed row, which nobody can wait for, is gone.
const HOLD_POLL: Duration = Duration::from_millis(50);

/// The same for the keys of all lanes in which nobody waits.
const WATCH_POLL: Duration = Duration::from_millis(500);

/// How long a lane pauses after the database failed it.
const ERROR_PAUSE: Duration = Duration::from_millis(500);

/// How many wait in a lane when no more requests may: whoever holds a key for long must not have all that there is room for wait for it.
const LANE_REQUESTS_MAX: usize = 1024;

/// The operations that wait for one key.
struct Lane {
    /// The EM whose key it is; `None` of a user's.
    em: Option<EmInstance>,
    waiting: Vec<Pending>,
    /// Whether somebody held the key at the end of the last turn.
    is_held: bool,
    /// Whether anybody was sent elsewhere for that.
    is_watched: bool,
    /// Somebody waits where nobody did, or nobody will any more.
    stirred: Arc<Notify>,
}

impl Lane {
    fn new(key: &LockKey, waiting: Vec<Pending>) -> Self {
        let em = match key {
            LockKey::Em(em) => Some(em.clone()),
            LockKey::User(_) => None,
        };
        Self { em, waiting, is_held: false, is_watched: false, stirred: Arc::default() }
    }

    /// Whether an operation need not wait here: its EM is held, and it may be tried on another.
    fn may_go(&self, pending: &Pending) -> bool {
        self.em.is_some() && pending.patience.may_go()
    }

    /// Lets an operation wait, unless it may go elsewhere, or asks for something and too many do.
    fn join(&mut self, pending: Pending, seen: &StateCache) {
        let is_full = pending.operation.request().is_some() && self.waiting.len() >= LANE_REQUESTS_MAX;
        if self.may_go(&pending) && (self.is_held || is_full) {
            // With so many who wait, it is as good as held.
            self.set_held(true, seen);
            self.send_elsewhere(pending);
        } else if is_full {
            // Whether it is heard is its caller's affair.
            pending.answer(Err(Error::Overloaded));
        } else {
            if self.waiting.is_empty() {
                self.stirred.notify_one();
            }
            if self.is_held {
                pending.progress.set_contended(true);
            }
            self.waiting.push(pending);
        }
    }

    /// Takes an operation out that has changed nothing, and will not: its transaction never began, or was rolled back.
    fn send_elsewhere(&mut self, pending: Pending) {
        self.is_watched = true;
        pending.answer(Err(Error::LockTimeout));
    }

    /// Tells whoever chooses EMs, if that is new; answers whether it is.
    fn set_held(&mut self, is_held: bool, seen: &StateCache) -> bool {
        let is_new = self.is_held != is_held;
        self.is_held = is_held;
        if let (true, Some(em)) = (is_new, &self.em) {
            seen.note_held(em, is_held);
        }
        is_new
    }

    /// Somebody holds the key, or nobody does any more: first whoever chooses EMs is told, then those who may go elsewhere. Whether an EM is
    /// free that was held.
    fn note_held(&mut self, is_held: bool, seen: &StateCache) -> bool {
        let is_new = self.set_held(is_held, seen);
        self.waiting.iter().for_each(|pending| pending.progress.set_contended(is_held));
        if !is_held {
            self.is_watched = false;
            return is_new && self.em.is_some();
        }
        let waiting = std::mem::take(&mut self.waiting).into_iter();
        let (may_go, stay): (Vec<_>, Vec<_>) = waiting.partition(|pending| self.may_go(pending));
        self.waiting = stay;
        may_go.into_iter().for_each(|pending| self.send_elsewhere(pending));
        false
    }

    /// Whether nobody waits, but some were sent elsewhere because of who still holds the key.
    fn is_only_watched(&self) -> bool {
        self.is_held && self.is_watched && self.waiting.is_empty()
    }
}

/// What a lane is open for.
enum Need {
    /// Somebody waits in it.
    Turn,
    /// Somebody was sent elsewhere because of who still holds its key.
    Watch,
    /// Nothing: it is closed.
    Nothing,
}

/// The lanes that are open.
pub(super) struct Lanes {
    store: Store,
    answers: Answers,
    /// Where EMs are chosen.
    seen: StateCache,
    /// Those who wait there for room.
    line: WaitingLine,
    open: Mutex<HashMap<LockKey, Lane>>,
    /// Whether nothing more will come.
    is_closing: AtomicBool,
    active: Semaphore,
    /// The lane that looks out for all keys has it, and where the next look begins.
    watching: tokio::sync::Mutex<Option<LockKey>>,
    metrics: Metrics,
    tasks: Tasks,
}

impl Lanes {
    pub fn new(
        store: Store,
        (answers, seen, line): (Answers, StateCache, WaitingLine),
        metrics: Metrics,
        tasks: Tasks,
    ) -> Self {
        let (open, is_closing) = (Mutex::default(), AtomicBool::new(false));
        let (active, watching) = (Semaphore::new(LANES_ACTIVE_MAX as usize), tokio::sync::Mutex::default());
        Self { store, answers, seen, line, open, is_closing, active, watching, metrics, tasks }
    }

    pub fn answers(&self) -> Answers {
        self.answers.clone()
    }

    /// Puts operations whose key has a lane into it; answers with the others.
    pub fn divert(&self, arrived: impl Iterator<Item = Pending>) -> Vec<Pending> {
        let mut open = self.open();
        if open.is_empty() {
            return arrived.collect();
        }
        let mut others = Vec::new();
        for mut pending in arrived {
            let key = pending.operation.lock_keys(true).find(|key| open.contains_key(key));
            match key.and_then(|key| open.get_mut(&key)) {
                Some(lane) => {
                    pending.waits = Some(self.metrics.committer.set_aside());
                    pending.trace.set_aside();
                    lane.join(pending, &self.seen);
                }
                None => others.push(pending),
            }
        }
        others
    }

    /// Puts operations into the lane of `key`, and opens it if it is not open, with the limits that are known.
    pub fn set_aside(self: &Arc<Self>, key: LockKey, mut operations: Vec<Pending>, limits: &Arc<Limits>) {
        operations.iter_mut().for_each(|pending| pending.waits = Some(self.metrics.committer.set_aside()));
        match self.open().entry(key) {
            Entry::Occupied(mut lane) => {
                operations.into_iter().for_each(|pending| lane.get_mut().join(pending, &self.seen));
            }
            Entry::Vacant(place) => {
                tracing::info!(key = ?place.key(), operations = operations.len(), "somebody else holds a resource lock");
                let key = place.key().clone();
                let stirred = place.insert(Lane::new(&key, operations)).stirred.clone();
                self.tasks.spawn(self.clone().serve(key, limits.clone(), stirred));
            }
        }
    }

    /// Nothing more will come: what waits is carried out, and nobody looks out for a key without need.
    pub fn close(&self) {
        self.is_closing.store(true, Ordering::Release);
        self.open().values().for_each(|lane| lane.stirred.notify_one());
    }

    /// Serves a lane until nobody waits in it, or was sent elsewhere because of who still holds its key.
    async fn serve(self: Arc<Self>, key: LockKey, limits: Arc<Limits>, stirred: Arc<Notify>) {
        let session = self.store.lane_session();
        let mut worker = Worker::new(session, self.answers(), self.metrics.clone(), limits);
        loop {
            match self.need(&key) {
                Need::Turn => {
                    let pause = self.take_turn(&mut worker, &key).await;
                    // It ends early where somebody waits anew.
                    let _ = tokio::time::timeout(pause, stirred.notified()).await;
                }
                Need::Watch => {
                    worker.session().give_back().await;
                    self.watch(&stirred).await;
                }
                Need::Nothing => return worker.session().give_back().await,
            }
        }
    }

    /// Waits for the key of a lane for a turn, and carries out what waits there, if it is free. For how long to pause then.
    async fn take_turn(self: &Arc<Self>, worker: &mut Worker, key: &LockKey) -> Duration {
        if self.count() > LANES_ACTIVE_MAX {
            // Only lanes whose turn it is have a connection, however many there are.
            worker.session().give_back().await;
        }
        let Ok(_turn) = tokio::time::timeout(TURN, self.active.acquire()).await else {
            return Duration::ZERO;
        };
        match self.obstacle(worker, key).await {
            Ok(Obstacle::None) => {
                self.note_held([key], false);
                let batch = self.take(key);
                for (key, operations) in worker.commit(batch).await {
                    self.set_aside(key, operations, &worker.limits());
                }
                Duration::ZERO
            }
            Ok(obstacle) => {
                self.note_held([key], true);
                if obstacle == Obstacle::Hold { HOLD_POLL } else { Duration::ZERO }
            }
            Err(error) => {
                self.note_held([key], false);
                if !error.is_told() {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(error, ?key, "cannot wait for a resource lock");
                }
                ERROR_PAUSE
            }
        }
    }

    /// Looks out for the keys of all lanes in which nobody waits, if no other lane does, until this one is `stirred`.
    async fn watch(&self, stirred: &Notify) {
        let mut after = tokio::select! {
            () = stirred.notified() => return,
            after = self.watching.lock() => after,
        };
        while tokio::time::timeout(WATCH_POLL, stirred.notified()).await.is_err() {
            let watched = self.watched();
            let looked = async {
                let mut connection = self.store.pool().await?.acquire().await?;
                resource_lock::free(&mut connection, watched, &mut after).await
            };
            match answered(looked).await {
                Ok(free) => self.note_held(&free, false),
                Err(error) => {
                    if !error.is_told() {
                        tracing::warn!(error = &error as &dyn std::error::Error, "cannot look out for resource locks");
                    }
                }
            }
        }
    }

    /// The keys of lanes in which nobody waits.
    fn watched(&self) -> BTreeSet<LockKey> {
        self.open().iter().filter(|(_, lane)| lane.is_only_watched()).map(|(key, _)| key.clone()).collect()
    }

    /// What stands in the way of a lane, when it has waited for it. On the connection on which its operations are carried out then: those
    /// that are shared may all be taken, or take long to be made, while everybody whose key it is waits.
    async fn obstacle(&self, worker: &mut Worker, key: &LockKey) -> Result<Obstacle, StoreError> {
        let waited = async { resource_lock::wait(worker.session().get().await?, key, self.turn()).await };
        let mut obstacle = answered(waited).await;
        if matches!((&obstacle, key), (Ok(Obstacle::Transaction | Obstacle::Hold), LockKey::User(_))) {
            match worker.locks_users().await {
                Ok(true) => {}
                Ok(false) => obstacle = Ok(Obstacle::None),
                Err(error) => obstacle = Err(error),
            }
        }
        if obstacle.is_err() {
            worker.session().reset();
        }
        obstacle
    }

    /// How long a turn is: the shorter, the more lanes take turns.
    fn turn(&self) -> Duration {
        (TURN * LANES_ACTIVE_MAX / self.count()).clamp(TURN_MIN, TURN)
    }

    /// How many lanes take turns, and at least one.
    fn count(&self) -> u32 {
        let count = self.open().values().filter(|lane| !lane.is_only_watched()).count();
        u32::try_from(count).unwrap_or(u32::MAX).max(1)
    }

    /// Notes that somebody holds keys, or nobody does: then those are woken whom any EM will do.
    fn note_held<'a>(&self, keys: impl IntoIterator<Item = &'a LockKey>, is_held: bool) {
        let (mut open, mut is_any_free) = (self.open(), false);
        for key in keys {
            let Some(lane) = open.get_mut(key) else { continue };
            is_any_free |= lane.note_held(is_held, &self.seen);
            if lane.waiting.is_empty() {
                lane.stirred.notify_one();
            }
        }
        drop(open);
        if is_any_free {
            self.line.held_no_more();
        }
    }

    /// What a lane is open for: somebody still waits in it, or was sent elsewhere as long as its key is held; closes it if not.
    fn need(&self, key: &LockKey) -> Need {
        let mut open = self.open();
        let Some(lane) = open.get_mut(key) else { return Need::Nothing };
        let now = Instant::now();
        let waits = std::mem::take(&mut lane.waiting).into_iter().filter(Pending::is_wanted);
        let (overdue, rest): (Vec<_>, Vec<_>) = waits.partition(|pending| pending.patience.until <= now);
        lane.waiting = rest;
        for pending in overdue {
            // Its caller could not give up by itself: its transaction seemed to run when its time was over.
            let error = pending.progress.timeout();
            pending.answer(Err(error));
        }
        if !lane.waiting.is_empty() {
            return Need::Turn;
        }
        if lane.is_only_watched() && !self.is_closing.load(Ordering::Acquire) {
            return Need::Watch;
        }
        lane.set_held(false, &self.seen);
        open.remove(key);
        Need::Nothing
    }

    /// The first operations of a lane, which stays open: as many as a batch may cost.
    fn take(&self, key: &LockKey) -> Vec<Pending> {
        let mut open = self.open();
        let Some(lane) = open.get_mut(key) else { return Vec::new() };
        let mut cost = 0;
        let fits = |pending: &&Pending| {
            cost += pending.operation.cost();
            cost <= BATCH_COST_MAX
        };
        let count = lane.waiting.iter().take_while(fits).count();
        lane.waiting.drain(..count).map(|pending| Pending { waits: None, ..pending }).collect()
    }

    /// A lock that is poisoned guards nothing that a panic could have left half done.
    fn open(&self) -> MutexGuard<'_, HashMap<LockKey, Lane>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
