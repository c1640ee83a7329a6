//! Where operations wait whose keys others hold: one lane per held key, on a connection of its own.
//!
//! A lane waits for its key alone, holding nothing, so that it stands in nobody's way; then it carries its operations out as a
//! batch of its own. While a lane is open, new operations on its key go there at once: the others meet a held key only once.
//!
//! What may be tried on another EM waits in the lane of an EM for one turn at most: if the key is still held then, it is taken out and its
//! caller told so. The lane then stays open until the key is free, so that the EM is not chosen meanwhile.

use std::{
    collections::{HashMap, hash_map::Entry},
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
    service::{admission::StateCache, tasks::Tasks},
    store::{
        Store, StoreError,
        resource_lock::{self, Obstacle},
        session::answered,
    },
};

use super::{
    Pending,
    queue::BATCH_COST_MAX,
    worker::{Answers, Worker},
};

/// How many lanes wait in the database at once, each on a connection; the others take turns.
const LANES_ACTIVE_MAX: u32 = 4;

/// How long a lane waits in the database before it lets another have its turn, and looks who still waits in it.
const TURN: Duration = Duration::from_millis(200);

/// The least that a turn is worth.
const TURN_MIN: Duration = Duration::from_millis(10);

/// How often a lane looks whether a committed row, which nobody can wait for, is gone.
const HOLD_POLL: Duration = Duration::from_millis(50);

/// The same for a lane in which nobody waits: where more are open than wait at once, each looks the more rarely.
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
        self.em.is_some() && pending.patience.may_go
    }

    /// Lets an operation wait, unless it may go elsewhere, or asks for something and too many do.
    fn join(&mut self, pending: Pending) {
        let is_full = pending.operation.request().is_some() && self.waiting.len() >= LANE_REQUESTS_MAX;
        if self.may_go(&pending) && (self.is_held || is_full) {
            self.send_elsewhere(pending);
        } else if is_full {
            // Whether it is heard is its caller's affair.
            pending.answer(Err(Error::Overloaded));
        } else {
            if self.waiting.is_empty() {
                self.stirred.notify_one();
            }
            self.waiting.push(pending);
        }
    }

    /// Takes an operation out that has changed nothing, and will not: its transaction never began, or was rolled back.
    fn send_elsewhere(&mut self, pending: Pending) {
        self.is_watched = true;
        pending.answer(Err(Error::LockTimeout));
    }

    /// Somebody holds the key, or nobody does any more: first whoever chooses EMs is told, then those who may go elsewhere.
    fn note_held(&mut self, is_held: bool, seen: &StateCache) {
        if self.is_held != is_held {
            self.is_held = is_held;
            if let Some(em) = &self.em {
                seen.note_held(em, is_held);
            }
        }
        if !is_held {
            self.is_watched = false;
            return;
        }
        let waiting = std::mem::take(&mut self.waiting).into_iter();
        let (may_go, stay): (Vec<_>, Vec<_>) = waiting.partition(|pending| self.may_go(pending));
        self.waiting = stay;
        may_go.into_iter().for_each(|pending| self.send_elsewhere(pending));
    }
}

/// The lanes that are open.
pub(super) struct Lanes {
    store: Store,
    answers: Answers,
    /// Where EMs are chosen.
    seen: StateCache,
    open: Mutex<HashMap<LockKey, Lane>>,
    /// Whether nothing more will come.
    is_closing: AtomicBool,
    active: Semaphore,
    metrics: Metrics,
    tasks: Tasks,
}

impl Lanes {
    pub fn new(store: Store, (answers, seen): (Answers, StateCache), metrics: Metrics, tasks: Tasks) -> Self {
        let (open, is_closing) = (Mutex::default(), AtomicBool::new(false));
        let active = Semaphore::new(LANES_ACTIVE_MAX as usize);
        Self { store, answers, seen, open, is_closing, active, metrics, tasks }
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
                    lane.join(pending);
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
            Entry::Occupied(mut lane) => operations.into_iter().for_each(|pending| lane.get_mut().join(pending)),
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
        let mut worker = Worker::new(&self.store, self.answers(), self.metrics.clone(), limits);
        while self.is_wanted(&key) {
            if self.open().len() > LANES_ACTIVE_MAX as usize {
                // Only lanes whose turn it is have a connection, however many there are.
                worker.session().close();
            }
            let Ok(turn) = tokio::time::timeout(TURN, self.active.acquire()).await else {
                continue;
            };
            let mut pause = Duration::ZERO;
            match self.obstacle(&mut worker, &key).await {
                Ok(Obstacle::None) => {
                    self.note_held(&key, false);
                    let batch = self.take(&key);
                    for (key, operations) in worker.commit(batch).await {
                        self.set_aside(key, operations, &worker.limits());
                    }
                }
                Ok(obstacle) => match (self.note_held(&key, true), obstacle) {
                    (true, Obstacle::Hold) => pause = HOLD_POLL,
                    (true, _) => {}
                    (false, _) => pause = self.watch_poll(),
                },
                Err(error) => {
                    self.note_held(&key, false);
                    if !error.is_told() {
                        let error = &error as &dyn std::error::Error;
                        tracing::warn!(error, ?key, "cannot wait for a resource lock");
                    }
                    pause = ERROR_PAUSE;
                }
            }
            drop(turn);
            // It ends early where somebody waits anew.
            let _ = tokio::time::timeout(pause, stirred.notified()).await;
        }
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

    /// How long a lane pauses in which nobody waits.
    fn watch_poll(&self) -> Duration {
        WATCH_POLL * self.count().div_ceil(LANES_ACTIVE_MAX)
    }

    /// How many lanes are open, and at least one.
    fn count(&self) -> u32 {
        u32::try_from(self.open().len()).unwrap_or(u32::MAX).max(1)
    }

    /// Notes how a turn has ended. Whether somebody waits in the lane then.
    fn note_held(&self, key: &LockKey, is_held: bool) -> bool {
        let mut open = self.open();
        let Some(lane) = open.get_mut(key) else { return false };
        lane.note_held(is_held, &self.seen);
        !lane.waiting.is_empty()
    }

    /// Whether somebody still waits in a lane, or was sent elsewhere as long as its key is held; closes it if not.
    fn is_wanted(&self, key: &LockKey) -> bool {
        let mut open = self.open();
        let Some(lane) = open.get_mut(key) else { return false };
        let now = Instant::now();
        let waits = std::mem::take(&mut lane.waiting).into_iter().filter(Pending::is_wanted);
        let (overdue, rest): (Vec<_>, Vec<_>) = waits.partition(|pending| pending.patience.until <= now);
        lane.waiting = rest;
        for pending in overdue {
            // Its caller could not give up by itself: its transaction seemed to run when its time was over.
            pending.answer(Err(Error::LockTimeout));
        }
        let is_watched = lane.is_held && lane.is_watched && !self.is_closing.load(Ordering::Acquire);
        let wanted = is_watched || !lane.waiting.is_empty();
        if !wanted {
            lane.note_held(false, &self.seen);
            open.remove(key);
        }
        wanted
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
