//! Contended-key queues (lanes): the tasks that wait for contended keys and commit what is queued there.
//!
//! `rm_engine::contended_keys` has the operations of each key. Each key has one task, which waits for the key on its own
//! connection, then commits the queued operations as one batch. While an operator holds the key, only requests that may wait are
//! committed: the ledger moves them into the wait queue. One task polls the keys of all queues without operations.
//!
//! Never: waits for a key while it owns another one. Caller: the committer's run loop.

use std::{
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
use rm_engine::contended_keys::{ContendedKeys, KeyEffects, KeyTask, KeyWaiter};
use rm_model::{
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

/// Interval between polls of a key that a hold or a committed row owns. PostgreSQL cannot wait for a committed row.
const HOLD_POLL: Duration = Duration::from_millis(50);

/// Interval between polls of the keys of all empty queues.
const WATCH_POLL: Duration = Duration::from_millis(500);

/// Pause of a queue after a database error.
const ERROR_PAUSE: Duration = Duration::from_millis(500);

type Keys = ContendedKeys<QueuedOperation, Arc<Notify>>;
type Effects = KeyEffects<QueuedOperation, Arc<Notify>>;

/// All open contended-key queues.
pub(super) struct ContendedQueues {
    store: Store,
    answers: ReplyDispatcher,
    /// Placement's cache, which avoids contended EMs.
    seen: StateCache,
    /// The waiting requests of this instance.
    line: LocalWaitQueue,
    open: Mutex<Keys>,
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

    /// Moves operations into the open queues of their keys. Returns those that need not wait there.
    pub fn divert(&self, arrived: impl Iterator<Item = QueuedOperation>) -> Vec<QueuedOperation> {
        self.change(|keys, effects| {
            if keys.is_empty() {
                return arrived.collect();
            }
            let mut others = Vec::new();
            for mut pending in arrived {
                let may_queue = pending.operation.may_queue();
                match pending.operation.lock_keys(true).find(|key| keys.takes(key, may_queue)) {
                    Some(key) => {
                        pending.trace.contended();
                        self.join(keys, &key, pending, effects);
                    }
                    None => others.push(pending),
                }
            }
            others
        })
    }

    /// Adds operations to the queue of `key`. Opens the queue, with `limits` as the last known limits, if it is not open.
    pub fn queue(self: &Arc<Self>, key: &LockKey, operations: Vec<QueuedOperation>, limits: &Arc<Limits>) {
        let count = operations.len();
        let opened = self.change(|keys, effects| {
            let opened = keys.open(key, Arc::default());
            operations.into_iter().for_each(|pending| self.join(keys, key, pending, effects));
            opened
        });
        if let Some(stirred) = opened {
            tracing::info!(?key, operations = count, "another writer owns a resource lock");
            self.tasks.spawn(self.clone().serve(key.clone(), limits.clone(), stirred));
        }
    }

    fn join(&self, keys: &mut Keys, key: &LockKey, mut pending: QueuedOperation, effects: &mut Effects) {
        pending.waits = Some(self.metrics.committer.contended());
        if keys.is_contended(key) {
            pending.progress.set_contended(true);
        }
        let waiter = KeyWaiter {
            cost: pending.operation.cost(),
            is_request: pending.operation.request().is_some(),
            until: pending.patience.until.into_std(),
            leaves_at: pending.patience.goes_at.map(Instant::into_std),
            operation: pending,
        };
        keys.join(key, waiter, Instant::now().into_std(), effects);
    }

    /// Changes the queues, then carries out what follows: first for placement, then for the operations.
    fn change<R>(&self, change: impl FnOnce(&mut Keys, &mut Effects) -> R) -> R {
        let mut effects = Effects::default();
        let result = {
            let mut keys = self.open();
            let result = change(&mut keys, &mut effects);
            // Within the lock, so that placement has the changes of a key in their order.
            effects.ems.iter().for_each(|(em, is_contended)| self.seen.note_contended(em, *is_contended));
            result
        };
        let is_any_free = effects.ems.iter().any(|(_, is_contended)| !is_contended);
        // The transaction of an operation that leaves never began or was rolled back. Callers that are gone need no reply.
        for pending in effects.elsewhere {
            pending.reply(Ok(Outcome::Contended));
        }
        for pending in effects.rejected {
            pending.reply(Err(Error::Overloaded));
        }
        for pending in effects.overdue {
            // The caller could not cancel: the operation seemed to run at its deadline.
            let error = pending.progress.timeout();
            pending.reply(Err(error));
        }
        effects.notified.iter().for_each(|task| task.notify_one());
        if is_any_free {
            self.line.contention_ended();
        }
        result
    }

    /// Ends the polling of empty queues at shutdown. Queued operations are still applied.
    pub fn close(&self) {
        self.is_closing.store(true, Ordering::Release);
        self.open().tasks().for_each(|task| task.notify_one());
    }

    /// Runs the task of one queue until the queue closes.
    async fn serve(self: Arc<Self>, key: LockKey, limits: Arc<Limits>, stirred: Arc<Notify>) {
        let session = self.store.lane_session();
        let mut worker = Worker::new(session, self.answers(), self.metrics.clone(), limits);
        loop {
            match self.next_task(&key) {
                KeyTask::Turn => {
                    let pause = self.take_turn(&mut worker, &key).await;
                    // A new operation in an empty queue ends the pause early.
                    let _ = tokio::time::timeout(pause, stirred.notified()).await;
                }
                KeyTask::Watch => {
                    worker.session().give_back().await;
                    self.watch(&stirred).await;
                }
                KeyTask::End => return worker.session().give_back().await,
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
        let obstacle = self.obstacle(worker, key).await;
        self.open().note_held(key, matches!(obstacle, Ok(LockConflict::Hold)));
        match obstacle {
            Ok(LockConflict::None) => {
                self.note_contended([key], false);
                let batch = self.open().take(key, |_| true);
                self.commit(worker, batch).await;
                Duration::ZERO
            }
            Ok(LockConflict::Hold) => {
                self.note_contended([key], true);
                let batch = self.open().take(key, |pending| pending.operation.may_queue());
                self.commit(worker, batch).await;
                HOLD_POLL
            }
            Ok(LockConflict::Row) => {
                self.note_contended([key], true);
                HOLD_POLL
            }
            Ok(LockConflict::Transaction) => {
                self.note_contended([key], true);
                Duration::ZERO
            }
            Err(error) => {
                self.note_contended([key], false);
                if !error.is_logged() {
                    let error = cause(&error);
                    tracing::warn!(error, ?key, "cannot wait for a resource lock");
                }
                ERROR_PAUSE
            }
        }
    }

    async fn commit(self: &Arc<Self>, worker: &mut Worker, mut batch: Vec<QueuedOperation>) {
        if batch.is_empty() {
            return;
        }
        batch.iter_mut().for_each(|pending| pending.waits = None);
        for (key, operations) in worker.commit(batch).await {
            self.queue(&key, operations, &worker.limits());
            // The key was free, but not its rows, or another transaction took it: requests for any EM leave it.
            self.note_contended([&key], true);
        }
    }

    /// Polls the keys of all empty queues until `stirred` is notified. Only one task polls at a time.
    async fn watch(&self, stirred: &Notify) {
        let mut after = tokio::select! {
            () = stirred.notified() => return,
            after = self.watching.lock() => after,
        };
        while tokio::time::timeout(WATCH_POLL, stirred.notified()).await.is_err() {
            let watched = self.open().watched();
            let looked = async {
                let mut connection = self.store.pool().await?.acquire().await?;
                resource_lock::unlocked(&mut connection, watched, &mut after).await
            };
            match within_timeout(looked).await {
                Ok(free) => self.note_contended(&free, false),
                Err(error) => {
                    if !error.is_logged() {
                        tracing::warn!(error = cause(&error), "cannot poll contended resource locks");
                    }
                }
            }
        }
    }

    /// Waits for the key up to one turn and returns the conflict that remains.
    ///
    /// Uses the connection on which the operations are committed afterwards. A pooled connection may be unavailable or slow to
    /// open, which would delay all operations of the key.
    async fn obstacle(&self, worker: &mut Worker, key: &LockKey) -> Result<LockConflict, StoreError> {
        let waited = async { resource_lock::wait(worker.session().get().await?, key, self.turn()).await };
        let mut obstacle = within_timeout(waited).await;
        if matches!((&obstacle, key), (Ok(LockConflict::Transaction | LockConflict::Row), LockKey::User(_))) {
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
        u32::try_from(self.open().turns()).unwrap_or(u32::MAX).max(1)
    }

    /// Records the lock state of `keys`, for the operations that wait there and for placement.
    fn note_contended<'a>(&self, found: impl IntoIterator<Item = &'a LockKey>, is_contended: bool) {
        self.change(|keys, effects| {
            for key in found {
                keys.waiting(key).for_each(|pending| pending.progress.set_contended(is_contended));
                keys.found(key, is_contended, Instant::now().into_std(), effects);
            }
        });
    }

    /// Fails the overdue operations of a queue, drops those without a caller, and returns the next action.
    fn next_task(&self, key: &LockKey) -> KeyTask {
        let now = (Instant::now().into_std(), self.is_closing.load(Ordering::Acquire));
        self.change(|keys, effects| keys.next_task(key, now, QueuedOperation::has_caller, effects))
    }

    /// Locks the queues. They stay consistent if a holder panics.
    fn open(&self) -> MutexGuard<'_, Keys> {
        lock(&self.open)
    }
}
