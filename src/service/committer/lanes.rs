//! Where operations wait whose keys others hold: one lane per held key, on a connection of its own.
//!
//! A lane waits for its key alone, holding nothing, so that it stands in nobody's way; then it carries its operations out as a
//! batch of its own. While a lane is open, new operations on its key go there at once: the others meet a held key only once.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Semaphore, time::Instant};

use crate::{
    domain::{limit::Limits, operation::LockKey},
    error::Error,
    metrics::Metrics,
    service::tasks::Tasks,
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

/// How long a lane pauses after the database failed it.
const ERROR_PAUSE: Duration = Duration::from_millis(500);

/// How many wait in a lane when no more requests may: whoever holds a key for long must not have all that there is room for wait for it.
const LANE_REQUESTS_MAX: usize = 1024;

/// Lets an operation wait in a lane, unless it asks for something and too many do.
fn join(lane: &mut Vec<Pending>, pending: Pending) {
    if pending.operation.request().is_some() && lane.len() >= LANE_REQUESTS_MAX {
        // Whether it is heard is its caller's affair.
        pending.answer(Err(Error::Overloaded));
    } else {
        lane.push(pending);
    }
}

/// The lanes that are open.
pub(super) struct Lanes {
    store: Store,
    answers: Answers,
    waiting: Mutex<HashMap<LockKey, Vec<Pending>>>,
    active: Semaphore,
    metrics: Metrics,
    tasks: Tasks,
}

impl Lanes {
    pub fn new(store: Store, answers: Answers, metrics: Metrics, tasks: Tasks) -> Self {
        let active = Semaphore::new(LANES_ACTIVE_MAX as usize);
        Self { store, answers, waiting: Mutex::default(), active, metrics, tasks }
    }

    pub fn answers(&self) -> Answers {
        self.answers.clone()
    }

    /// Puts operations whose key has a lane into it; answers with the others.
    pub fn divert(&self, arrived: impl Iterator<Item = Pending>) -> Vec<Pending> {
        let mut waiting = self.waiting();
        if waiting.is_empty() {
            return arrived.collect();
        }
        let mut others = Vec::new();
        for mut pending in arrived {
            match pending.operation.lock_keys(true).find(|key| waiting.contains_key(key)) {
                Some(key) => {
                    pending.waits = Some(self.metrics.committer.set_aside());
                    pending.trace.set_aside();
                    join(waiting.entry(key).or_default(), pending);
                }
                None => others.push(pending),
            }
        }
        others
    }

    /// Puts operations into the lane of `key`, and opens it if it is not open, with the limits that are known.
    pub fn set_aside(self: &Arc<Self>, key: LockKey, mut operations: Vec<Pending>, limits: &Arc<Limits>) {
        operations.iter_mut().for_each(|pending| pending.waits = Some(self.metrics.committer.set_aside()));
        match self.waiting().entry(key) {
            Entry::Occupied(mut lane) => operations.into_iter().for_each(|pending| join(lane.get_mut(), pending)),
            Entry::Vacant(lane) => {
                tracing::info!(key = ?lane.key(), operations = operations.len(), "somebody else holds a resource lock");
                let key = lane.key().clone();
                lane.insert(operations);
                self.tasks.spawn(self.clone().serve(key, limits.clone()));
            }
        }
    }

    /// Serves a lane until nobody waits in it.
    async fn serve(self: Arc<Self>, key: LockKey, limits: Arc<Limits>) {
        let mut worker = Worker::new(&self.store, self.answers(), self.metrics.clone(), limits);
        while self.is_wanted(&key) {
            if self.waiting().len() > LANES_ACTIVE_MAX as usize {
                // Only lanes whose turn it is have a connection, however many there are.
                worker.session().close();
            }
            let Ok(turn) = tokio::time::timeout(TURN, self.active.acquire()).await else {
                continue;
            };
            let mut pause = Duration::ZERO;
            match self.obstacle(&mut worker, &key).await {
                Ok(Obstacle::None) => {
                    let batch = self.take(&key);
                    for (key, operations) in worker.commit(batch).await {
                        self.set_aside(key, operations, &worker.limits());
                    }
                }
                Ok(Obstacle::Transaction) => {}
                Ok(Obstacle::Hold) => pause = HOLD_POLL,
                Err(error) => {
                    if !error.is_told() {
                        let error = &error as &dyn std::error::Error;
                        tracing::warn!(error, ?key, "cannot wait for a resource lock");
                    }
                    pause = ERROR_PAUSE;
                }
            }
            drop(turn);
            tokio::time::sleep(pause).await;
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
        let lanes = u32::try_from(self.waiting().len()).unwrap_or(u32::MAX).max(1);
        (TURN * LANES_ACTIVE_MAX / lanes).clamp(TURN_MIN, TURN)
    }

    /// Whether somebody still waits in a lane; closes it if not.
    fn is_wanted(&self, key: &LockKey) -> bool {
        let mut waiting = self.waiting();
        let Some(lane) = waiting.get_mut(key) else { return false };
        let now = Instant::now();
        let waits = std::mem::take(lane).into_iter().filter(Pending::is_wanted);
        let (overdue, rest): (Vec<_>, Vec<_>) = waits.partition(|pending| pending.deadline <= now);
        *lane = rest;
        for pending in overdue {
            // Its caller could not give up by itself: its transaction seemed to run when its time was over.
            pending.answer(Err(Error::LockTimeout));
        }
        let wanted = !lane.is_empty();
        if !wanted {
            waiting.remove(key);
        }
        wanted
    }

    /// The first operations of a lane, which stays open: as many as a batch may cost.
    fn take(&self, key: &LockKey) -> Vec<Pending> {
        let mut waiting = self.waiting();
        let Some(lane) = waiting.get_mut(key) else { return Vec::new() };
        let mut cost = 0;
        let fits = |pending: &&Pending| {
            cost += pending.operation.cost();
            cost <= BATCH_COST_MAX
        };
        let count = lane.iter().take_while(fits).count();
        lane.drain(..count).map(|pending| Pending { waits: None, ..pending }).collect()
    }

    /// A lock that is poisoned guards nothing that a panic could have left half done.
    fn waiting(&self) -> MutexGuard<'_, HashMap<LockKey, Vec<Pending>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
