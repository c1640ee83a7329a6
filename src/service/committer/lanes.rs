//! Where operations wait whose keys others hold: one lane per held key, on a connection of its own.
//!
//! A lane waits for its key alone, holding nothing, so that it stands in nobody's way; then it carries its operations out as a
//! batch of its own. While a lane is open, new operations on its key go there at once: the others meet a held key only once.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use crate::{
    domain::operation::LockKey,
    store::{
        Store,
        resource_lock::{self, Obstacle},
    },
};

use super::{
    BATCH_MAX, Pending,
    worker::{Answers, SetAside, Worker},
};

/// How many lanes wait in the database at once, each on a connection; the others take turns.
const LANES_ACTIVE_MAX: usize = 4;

/// How long a lane waits in the database before it lets another have its turn, and looks who still waits in it.
const TURN: Duration = Duration::from_millis(200);

/// How often a lane looks whether a committed row, which nobody can wait for, is gone.
const HOLD_POLL: Duration = Duration::from_millis(50);

/// How long a lane pauses after the database failed it.
const ERROR_PAUSE: Duration = Duration::from_millis(500);

/// The lanes that are open.
pub(super) struct Lanes {
    store: Store,
    answers: Arc<Answers>,
    waiting: Mutex<HashMap<LockKey, Vec<Pending>>>,
    active: Semaphore,
    tasks: TaskTracker,
}

impl Lanes {
    pub fn new(store: Store, answers: Arc<Answers>, tasks: TaskTracker) -> Self {
        Self { store, answers, waiting: Mutex::default(), active: Semaphore::new(LANES_ACTIVE_MAX), tasks }
    }

    pub fn answers(&self) -> Arc<Answers> {
        self.answers.clone()
    }

    /// Puts operations whose key has a lane into it; answers with the others.
    pub fn divert(&self, arrived: impl Iterator<Item = Pending>) -> Vec<Pending> {
        let mut waiting = self.waiting();
        if waiting.is_empty() {
            return arrived.collect();
        }
        let mut others = Vec::new();
        for pending in arrived {
            match pending.operation.lock_keys().find(|key| waiting.contains_key(key)) {
                Some(key) => waiting.entry(key).or_default().push(pending),
                None => others.push(pending),
            }
        }
        others
    }

    /// Puts operations into the lane of `key`, and opens it if it is not open.
    pub fn set_aside(self: &Arc<Self>, key: LockKey, operations: Vec<Pending>) {
        match self.waiting().entry(key) {
            Entry::Occupied(mut lane) => lane.get_mut().extend(operations),
            Entry::Vacant(lane) => {
                tracing::info!(key = ?lane.key(), operations = operations.len(), "somebody else holds a resource lock");
                let key = lane.key().clone();
                lane.insert(operations);
                self.tasks.spawn(self.clone().serve(key));
            }
        }
    }

    /// Serves a lane until nobody waits in it.
    async fn serve(self: Arc<Self>, key: LockKey) {
        let mut worker = Worker::new(&self.store, self.answers());
        while self.is_wanted(&key) {
            let Ok(turn) = tokio::time::timeout(TURN, self.active.acquire()).await else {
                continue;
            };
            let obstacle = match worker.session().get().await {
                Ok(connection) => resource_lock::wait(connection, &key, TURN).await,
                Err(error) => Err(error),
            };
            match obstacle {
                Ok(Obstacle::None) => {
                    let batch = self.take(&key);
                    self.set_all_aside(worker.commit(batch).await);
                }
                Ok(Obstacle::Transaction) => {}
                Ok(Obstacle::Hold) => {
                    drop(turn);
                    tokio::time::sleep(HOLD_POLL).await;
                }
                Err(error) => {
                    drop(turn);
                    tracing::warn!(error = &error as &dyn std::error::Error, ?key, "cannot wait for a resource lock");
                    worker.session().reset();
                    tokio::time::sleep(ERROR_PAUSE).await;
                }
            }
        }
    }

    fn set_all_aside(self: &Arc<Self>, aside: SetAside) {
        for (key, operations) in aside {
            self.set_aside(key, operations);
        }
    }

    /// Whether somebody still waits in a lane; closes it if not.
    fn is_wanted(&self, key: &LockKey) -> bool {
        let mut waiting = self.waiting();
        let Some(lane) = waiting.get_mut(key) else { return false };
        lane.retain(Pending::is_wanted);
        let wanted = !lane.is_empty();
        if !wanted {
            waiting.remove(key);
        }
        wanted
    }

    /// The first operations of a lane, which stays open.
    fn take(&self, key: &LockKey) -> Vec<Pending> {
        let mut waiting = self.waiting();
        let Some(lane) = waiting.get_mut(key) else { return Vec::new() };
        lane.drain(..lane.len().min(BATCH_MAX)).collect()
    }

    /// A lock that is poisoned guards nothing that a panic could have left half done.
    fn waiting(&self) -> MutexGuard<'_, HashMap<LockKey, Vec<Pending>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
