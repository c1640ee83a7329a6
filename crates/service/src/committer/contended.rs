//! Contended-key queues (lanes): operations whose lock key another transaction or a hold owns.
//!
//! Each contended key has one queue and one task. The task waits for the key on its own connection, then commits the queued
//! operations as one batch. New operations on the key are routed here, so that batches meet a contended key only once. An
//! operation that can be tried on another EM waits for one turn at most, and ends as `Outcome::Contended`. A queue stays open until
//! its key is free, so that placement avoids the EM; one task polls the keys of all queues without operations.
//!
//! Invariant: an operation is in exactly one of: commit queue, batch, contended-key queue.
//! Never: waits for a key while it owns another one. Caller: the committer's run loop.

use std::{
    collections::{BTreeSet, HashMap, hash_map::Entry},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{Notify, Semaphore},
    time::Instant,
};

use crate::{admission::StateCache, error::Error, lock::lock, tasks::InstanceTasks, waiting::LocalWaitQueue};
use rm_engine::commit_queue::BATCH_COST_MAX;
use rm_model::{
    em::EmInstance,
    limit::Limits,
    operation::{LockKey, Outcome},
};
use rm_store::{
    Store, StoreError,
    primary::LANES_MAX,
    resource_lock::{self, LockConflict},
    session::within_timeout,
};
use rm_telemetry::cause;
use rm_telemetry::metrics::Metrics;

use super::{
    QueuedOperation,
    worker::{ReplyDispatcher, Worker},
};

/// Maximum number of queues that wait in the database at once, each on its own connection. More queues take turns; empty queues
/// do not count.
const LANES_ACTIVE_MAX: u32 = LANES_MAX;

/// Time that a queue waits in the database before it checks its operations and lets another queue run.
const TURN: Duration = Duration::from_millis(200);

/// Shortest turn.
const TURN_MIN: Duration = Duration::from_millis(10);

/// Interval between polls of a key that a committed row (a hold) owns. PostgreSQL cannot wait for a committed row.
const HOLD_POLL: Duration = Duration::from_millis(50);

/// Interval between polls of the keys of all empty queues.
const WATCH_POLL: Duration = Duration::from_millis(500);

/// Pause of a queue after a database error.
const ERROR_PAUSE: Duration = Duration::from_millis(500);

/// Maximum number of operations in one queue while requests can enter. The bound keeps one contended key from using all
/// permits.
const LANE_REQUESTS_MAX: usize = 1024;

/// The operations that wait for one contended key.
struct ContendedQueue {
    /// The EM of the key; `None` for a user key.
    em: Option<EmInstance>,
    waiting: Vec<QueuedOperation>,
    /// Whether the key was contended at the end of the last turn.
    is_held: bool,
    /// Whether an operation ended as contended.
    is_watched: bool,
    /// Notifies the task that an empty queue has an operation, or will stay empty.
    stirred: Arc<Notify>,
}

impl ContendedQueue {
    fn new(key: &LockKey, waiting: Vec<QueuedOperation>) -> Self {
        let em = match key {
            LockKey::Em(em) => Some(em.clone()),
            LockKey::User(_) => None,
        };
        Self { em, waiting, is_held: false, is_watched: false, stirred: Arc::default() }
    }

    /// Whether an operation can fail early because its EM is contended and another EM can be tried.
    fn may_go(&self, pending: &QueuedOperation) -> bool {
        self.em.is_some() && pending.patience.has_given_up()
    }

    /// Adds an operation. Fails it instead if another EM can be tried, or if it is a request and the queue is full.
    fn join(&mut self, pending: QueuedOperation, seen: &StateCache) {
        let is_full = pending.operation.request().is_some() && self.waiting.len() >= LANE_REQUESTS_MAX;
        if self.may_go(&pending) && (self.is_held || is_full) {
            // A full queue counts as contended.
            self.set_held(true, seen);
            self.send_elsewhere(pending);
        } else if is_full {
            // A caller that is gone needs no reply.
            pending.reply(Err(Error::Overloaded));
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

    /// Fails an operation so that its caller tries another EM. The transaction of the operation never began or was rolled back.
    fn send_elsewhere(&mut self, pending: QueuedOperation) {
        self.is_watched = true;
        pending.reply(Ok(Outcome::Contended));
    }

    /// Records the lock state of the key for placement, if it changed. Returns whether it changed.
    fn set_held(&mut self, is_held: bool, seen: &StateCache) -> bool {
        let is_new = self.is_held != is_held;
        self.is_held = is_held;
        if let (true, Some(em)) = (is_new, &self.em) {
            seen.note_held(em, is_held);
        }
        is_new
    }

    /// Records the lock state of the key: first for placement, then for the operations. Fails the operations that can be tried
    /// on another EM while the key is contended. Returns whether a contended EM became free.
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

    /// Whether the queue is empty, but stays open because its contended key made operations fail.
    fn is_only_watched(&self) -> bool {
        self.is_held && self.is_watched && self.waiting.is_empty()
    }
}

/// Next action of a queue's task.
enum ContendedQueueTask {
    /// Run a turn: operations wait.
    Turn,
    /// Poll the key: operations failed because it is contended.
    Watch,
    /// Close the queue.
    Nothing,
}

/// All open contended-key queues.
pub(super) struct ContendedQueues {
    store: Store,
    answers: ReplyDispatcher,
    /// Placement's cache, which avoids contended EMs.
    seen: StateCache,
    /// The waiting requests of this instance.
    line: LocalWaitQueue,
    open: Mutex<HashMap<LockKey, ContendedQueue>>,
    /// Whether the committer has stopped, so that no operation arrives any more.
    is_closing: AtomicBool,
    active: Semaphore,
    /// Owned by the task that polls all keys of empty queues. The value is the key at which the next poll begins.
    watching: tokio::sync::Mutex<Option<LockKey>>,
    metrics: Metrics,
    tasks: InstanceTasks,
}

impl ContendedQueues {
    /// Creates the set without queues. `seen` avoids contended EMs; `line` is woken when one becomes free.
    pub fn new(
        store: Store,
        (answers, seen, line): (ReplyDispatcher, StateCache, LocalWaitQueue),
        metrics: Metrics,
        tasks: InstanceTasks,
    ) -> Self {
        let (open, is_closing) = (Mutex::default(), AtomicBool::new(false));
        let (active, watching) = (Semaphore::new(LANES_ACTIVE_MAX as usize), tokio::sync::Mutex::default());
        Self { store, answers, seen, line, open, is_closing, active, watching, metrics, tasks }
    }

    /// Returns the sender of replies, shared with the committer.
    pub fn answers(&self) -> ReplyDispatcher {
        self.answers.clone()
    }

    /// Moves operations with an open queue into it. Returns the other operations.
    pub fn divert(&self, arrived: impl Iterator<Item = QueuedOperation>) -> Vec<QueuedOperation> {
        let mut open = self.open();
        if open.is_empty() {
            return arrived.collect();
        }
        let mut others = Vec::new();
        for mut pending in arrived {
            let key = pending.operation.lock_keys(true).find(|key| open.contains_key(key));
            match key.and_then(|key| open.get_mut(&key)) {
                Some(lane) => {
                    pending.waits = Some(self.metrics.committer.contended());
                    pending.trace.contended();
                    lane.join(pending, &self.seen);
                }
                None => others.push(pending),
            }
        }
        others
    }

    /// Adds operations to the queue of `key`. Opens the queue, with `limits` as the last known limits, if it is not open.
    pub fn queue(self: &Arc<Self>, key: LockKey, mut operations: Vec<QueuedOperation>, limits: &Arc<Limits>) {
        operations.iter_mut().for_each(|pending| pending.waits = Some(self.metrics.committer.contended()));
        match self.open().entry(key) {
            Entry::Occupied(mut lane) => {
                operations.into_iter().for_each(|pending| lane.get_mut().join(pending, &self.seen));
            }
            Entry::Vacant(place) => {
                tracing::info!(
                    key = ?place.key(), operations = operations.len(),
                    "another transaction or a hold owns a resource lock"
                );
                let key = place.key().clone();
                let stirred = place.insert(ContendedQueue::new(&key, operations)).stirred.clone();
                self.tasks.spawn(self.clone().serve(key, limits.clone(), stirred));
            }
        }
    }

    /// Ends the polling of empty queues at shutdown. Queued operations are still applied.
    pub fn close(&self) {
        self.is_closing.store(true, Ordering::Release);
        self.open().values().for_each(|lane| lane.stirred.notify_one());
    }

    /// Runs the task of one queue until the queue closes.
    async fn serve(self: Arc<Self>, key: LockKey, limits: Arc<Limits>, stirred: Arc<Notify>) {
        let session = self.store.lane_session();
        let mut worker = Worker::new(session, self.answers(), self.metrics.clone(), limits);
        loop {
            match self.need(&key) {
                ContendedQueueTask::Turn => {
                    let pause = self.take_turn(&mut worker, &key).await;
                    // A new operation in an empty queue ends the pause early.
                    let _ = tokio::time::timeout(pause, stirred.notified()).await;
                }
                ContendedQueueTask::Watch => {
                    worker.session().give_back().await;
                    self.watch(&stirred).await;
                }
                ContendedQueueTask::Nothing => return worker.session().give_back().await,
            }
        }
    }

    /// Waits one turn for the key and commits the queued operations if it is free. Returns the pause before the next turn.
    async fn take_turn(self: &Arc<Self>, worker: &mut Worker, key: &LockKey) -> Duration {
        if self.count() > LANES_ACTIVE_MAX {
            // Only queues in their turn own a connection, however many are open.
            worker.session().give_back().await;
        }
        let Ok(_turn) = tokio::time::timeout(TURN, self.active.acquire()).await else {
            return Duration::ZERO;
        };
        match self.obstacle(worker, key).await {
            Ok(LockConflict::None) => {
                self.note_held([key], false);
                let batch = self.take(key);
                for (key, operations) in worker.commit(batch).await {
                    self.queue(key, operations, &worker.limits());
                }
                Duration::ZERO
            }
            Ok(obstacle) => {
                self.note_held([key], true);
                if obstacle == LockConflict::Hold { HOLD_POLL } else { Duration::ZERO }
            }
            Err(error) => {
                self.note_held([key], false);
                if !error.is_logged() {
                    let error = cause(&error);
                    tracing::warn!(error, ?key, "cannot wait for a resource lock");
                }
                ERROR_PAUSE
            }
        }
    }

    /// Polls the keys of all empty queues until `stirred` is notified. Only one task polls at a time.
    async fn watch(&self, stirred: &Notify) {
        let mut after = tokio::select! {
            () = stirred.notified() => return,
            after = self.watching.lock() => after,
        };
        while tokio::time::timeout(WATCH_POLL, stirred.notified()).await.is_err() {
            let watched = self.watched();
            let looked = async {
                let mut connection = self.store.pool().await?.acquire().await?;
                resource_lock::unlocked(&mut connection, watched, &mut after).await
            };
            match within_timeout(looked).await {
                Ok(free) => self.note_held(&free, false),
                Err(error) => {
                    if !error.is_logged() {
                        tracing::warn!(error = cause(&error), "cannot poll contended resource locks");
                    }
                }
            }
        }
    }

    /// The keys of the empty queues that stay open.
    fn watched(&self) -> BTreeSet<LockKey> {
        self.open().iter().filter(|(_, lane)| lane.is_only_watched()).map(|(key, _)| key.clone()).collect()
    }

    /// Waits for the key up to one turn and returns the conflict that remains.
    ///
    /// Uses the connection on which the operations are committed afterwards. A pooled connection may be unavailable or slow to
    /// open, which would delay all operations of the key.
    async fn obstacle(&self, worker: &mut Worker, key: &LockKey) -> Result<LockConflict, StoreError> {
        let waited = async { resource_lock::wait(worker.session().get().await?, key, self.turn()).await };
        let mut obstacle = within_timeout(waited).await;
        if matches!((&obstacle, key), (Ok(LockConflict::Transaction | LockConflict::Hold), LockKey::User(_))) {
            match worker.locks_users().await {
                Ok(true) => {}
                Ok(false) => obstacle = Ok(LockConflict::None),
                Err(error) => obstacle = Err(error),
            }
        }
        if obstacle.is_err() {
            worker.session().reset();
        }
        obstacle
    }

    /// Duration of a turn; decreases with the number of queues that take turns.
    fn turn(&self) -> Duration {
        (TURN * LANES_ACTIVE_MAX / self.count()).clamp(TURN_MIN, TURN)
    }

    /// Number of queues that take turns, at least one.
    fn count(&self) -> u32 {
        let count = self.open().values().filter(|lane| !lane.is_only_watched()).count();
        u32::try_from(count).unwrap_or(u32::MAX).max(1)
    }

    /// Records the lock state of `keys`. Wakes the waiting requests without an EM if a contended EM became free.
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
            self.line.contention_ended();
        }
    }

    /// Fails the overdue operations of a queue, drops those without a caller, and returns the next action. Closes the queue if
    /// it has no further use.
    fn need(&self, key: &LockKey) -> ContendedQueueTask {
        let mut open = self.open();
        let Some(lane) = open.get_mut(key) else { return ContendedQueueTask::Nothing };
        let now = Instant::now();
        let waits = std::mem::take(&mut lane.waiting).into_iter().filter(QueuedOperation::has_caller);
        let (overdue, rest): (Vec<_>, Vec<_>) = waits.partition(|pending| pending.patience.until <= now);
        lane.waiting = rest;
        for pending in overdue {
            // The caller could not cancel: the operation seemed to run at its deadline.
            let error = pending.progress.timeout();
            pending.reply(Err(error));
        }
        if !lane.waiting.is_empty() {
            return ContendedQueueTask::Turn;
        }
        if lane.is_only_watched() && !self.is_closing.load(Ordering::Acquire) {
            return ContendedQueueTask::Watch;
        }
        lane.set_held(false, &self.seen);
        open.remove(key);
        ContendedQueueTask::Nothing
    }

    /// Removes the first operations of a queue, up to the cost of one batch. The queue stays open.
    fn take(&self, key: &LockKey) -> Vec<QueuedOperation> {
        let mut open = self.open();
        let Some(lane) = open.get_mut(key) else { return Vec::new() };
        let mut cost = 0;
        let fits = |pending: &&QueuedOperation| {
            cost += pending.operation.cost();
            cost <= BATCH_COST_MAX
        };
        let count = lane.waiting.iter().take_while(fits).count();
        lane.waiting.drain(..count).map(|pending| QueuedOperation { waits: None, ..pending }).collect()
    }

    /// Locks the map. The map stays consistent if a holder panics.
    fn open(&self) -> MutexGuard<'_, HashMap<LockKey, ContendedQueue>> {
        lock(&self.open)
    }
}
