//! Local wait queue: the requests that wait on this instance, and their wake-ups.
//!
//! The database owns the wait queues, and the ledger decides who is granted. The local queue decides only when a waiting
//! request checks again. A release sends the head of the queue to the committer directly behind itself. Each commit that frees
//! capacity notifies the wait keys with a count, here and on other instances; a slow poll covers lost notifications.
//! Invariant: an instance renews its row while requests wait on it; otherwise other instances delete its queue entries.
//! Never: grants; decides a position. Callers: `request_resource` (waiting requests), `committer` (freed capacity).
//!
//! - `rm_engine::waiter_index`: the waiters by ticket id, wait key and position; `maintenance`: background tasks.

use std::{
    collections::{BTreeSet, HashSet},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use time::OffsetDateTime;
use tokio::{
    sync::{Notify, mpsc},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::error::Error;
use rm_engine::{
    request::WaitResult,
    waiter_index::{FreedCapacity, WaiterIndex, WaiterProfile},
    wake_reason::{Needs, WakeReason},
};
use rm_model::{
    em::EmInstance,
    operation::{Operation, QueuedOutcome, RequestSpec, WaitParameters},
    wait_queue::{FreedKeys, OwnedPosition, QueuePosition, RerankedRequest, WaitKey, WaitKeyHash, WaitKeys},
};
use rm_store::{
    Store,
    session::{Session, answered_within, within_timeout},
    waiting::{self, Departure, ListenerProcess, key_hash},
};
use rm_telemetry::metrics::{GaugeGuard, Metrics};

use super::{
    fair_semaphore::{FairPermit, FairSemaphore},
    lock::lock,
    single_flight::SingleFlight,
    tasks::InstanceTasks,
};

mod maintenance;

pub use maintenance::{listen, renew, run};

/// The waiters of this instance.
type Waiters = WaiterIndex<Arc<WaiterSignals>>;

/// The claims of the waiting calls of this instance.
type LiveClaims = Arc<Mutex<HashSet<Uuid>>>;

/// Signals to one waiting call.
#[derive(Debug)]
struct WaiterSignals {
    /// Identifies the call.
    claim: Uuid,
    claims: LiveClaims,
    /// Capacity may be free.
    wake: Notify,
    /// The call no longer owns its position: an operator removed the request, or a later call took the position over.
    ended: CancellationToken,
}

impl PartialEq for WaiterSignals {
    fn eq(&self, other: &Self) -> bool {
        self.claim == other.claim
    }
}

impl WaiterSignals {
    fn new(claims: &LiveClaims) -> Arc<Self> {
        let (claim, claims) = (Uuid::now_v7(), claims.clone());
        lock(&claims).insert(claim);
        Arc::new(Self { claim, claims, wake: Notify::new(), ended: CancellationToken::new() })
    }
}

impl Drop for WaiterSignals {
    fn drop(&mut self) {
        lock(&self.claims).remove(&self.claim);
    }
}

/// Interval between searches for dead instances and polls of the queue heads, and between renewals of an instance with waiters.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Timeout of the first reply on a connection that was idle.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);

/// Pause of a waiter after a transient error.
const FAILURE_PAUSE: Duration = Duration::from_millis(500);

/// The waiting requests of this instance. Clones share them.
#[derive(Clone, Debug)]
pub struct LocalWaitQueue {
    store: Store,
    instance_id: Uuid,
    index: Arc<Mutex<Waiters>>,
    claims: LiveClaims,
    leaving: mpsc::UnboundedSender<Departure>,
    stopping: CancellationToken,
    metrics: Metrics,
    /// Permits of the waiting requests.
    places: Arc<FairSemaphore>,
    /// Renews the instance's row on its own connection, so that a shortage of connections does not cost any queue entry.
    alive: SingleFlight,
    signs: Arc<tokio::sync::Mutex<Session>>,
    /// Process of the connection on which the instance listens, while it does.
    listener: Arc<Mutex<Option<ListenerProcess>>>,
    /// Whether no request waited at the last turn of [`renew`]. The row is not renewed then, and no sign of an outage.
    is_idle: Arc<AtomicBool>,
}

impl LocalWaitQueue {
    /// Creates an empty queue for up to `most` requests. Also returns the receiver of the calls that end without a
    /// decision.
    pub fn new(
        store: Store,
        instance_id: Uuid,
        most: usize,
        metrics: Metrics,
        tasks: &InstanceTasks,
        stopping: CancellationToken,
    ) -> (Self, mpsc::UnboundedReceiver<Departure>) {
        #[expect(
            clippy::disallowed_methods,
            reason = "one for each call that ends, and calls are bounded; a drop cannot wait"
        )]
        let (leaving, left) = mpsc::unbounded_channel();
        let (alive, signs) = (SingleFlight::new(tasks), Arc::new(tokio::sync::Mutex::new(store.session())));
        let listener = Arc::default();
        let (index, claims, places) = (Arc::default(), Arc::default(), FairSemaphore::of(most));
        let is_idle = Arc::new(AtomicBool::new(true));
        let line = Self {
            store,
            instance_id,
            index,
            claims,
            leaving,
            stopping,
            metrics,
            places,
            alive,
            signs,
            listener,
            is_idle,
        };
        (line, left)
    }

    /// Returns the sender for waiting calls whose callers are gone.
    pub fn leaving(&self) -> mpsc::UnboundedSender<Departure> {
        self.leaving.clone()
    }

    /// Returns the id of this instance, as stored in the queue entries.
    pub fn instance_id(&self) -> Uuid {
        self.instance_id
    }

    /// Returns the wait key that `operation` will free; `None` if it frees none, or if no request waits here.
    pub fn freed_key(&self, operation: &Operation) -> Option<WaitKeyHash> {
        let em = match operation {
            Operation::Released(released) => &released.em,
            Operation::Force(forced) => &forced.ticket.em,
            _ => return None,
        };
        (self.index().callers > 0).then(|| key_hash(&WaitKey::Em(em.clone())))
    }

    /// Wakes the head of the queue at `wait_key`: an operation that will free capacity there is in the commit queue.
    pub fn capacity_expected(&self, wait_key: WaitKeyHash) {
        self.change(|index| index.room_comes(wait_key));
    }

    /// Handles a committed batch. The batch freed capacity at `freed` and granted the queued requests `granted`, each at that EM.
    /// `others_wait` states whether requests may wait on other instances.
    pub fn committed<'a>(
        &self,
        freed: &FreedKeys,
        granted: impl Iterator<Item = (Uuid, &'a EmInstance)>,
        others_wait: bool,
    ) {
        // A request that enters later reads the committed state.
        if self.index().callers == 0 {
            return;
        }
        // Computes the hashes of the keys before locking the index.
        let freed = freed_capacity(freed);
        let granted: Vec<_> = granted.map(|(ticket_id, em)| (ticket_id, key_hash(&WaitKey::Em(em.clone())))).collect();
        self.change(|index| index.committed(freed, granted, others_wait));
    }

    /// Ends those of `calls` that wait here: each checks once, and no longer owns its position.
    pub fn end_calls(&self, calls: &[OwnedPosition]) {
        if calls.is_empty() {
            return;
        }
        self.change(|index| {
            if index.callers == 0 {
                return;
            }
            // A later call may wait here under the same ticket id.
            let is_other = |call: &OwnedPosition| {
                index.handle(call.ticket_id).is_some_and(|waiter| Some(waiter.claim) != call.claim)
            };
            let ended: Vec<Uuid> = calls.iter().filter(|call| !is_other(call)).map(|call| call.ticket_id).collect();
            index.removed(ended).iter().for_each(|waiter| waiter.ended.cancel());
        });
    }

    /// Moves the requests that wait here to their new positions, and wakes those that may be granted.
    pub fn rerank(&self, requests: impl IntoIterator<Item = RerankedRequest>) {
        let mut requests = requests.into_iter().peekable();
        if requests.peek().is_some() {
            self.change(|index| index.rerank(requests));
        }
    }

    /// Returns the sequence number of the last freed event.
    pub fn freed_count(&self) -> u64 {
        self.index().news_count()
    }

    /// Wakes requests without a named EM after contended EMs became free.
    pub fn contention_ended(&self) {
        self.change(|index| {
            if index.callers > 0 {
                index.wake_anywhere();
            }
        });
    }

    /// Creates a handle for a request that waits until `until`; `None` if too many requests wait here, or too many of this
    /// principal. `connection` is that of the caller.
    pub fn enter_if_room(
        &self,
        any_em: bool,
        ask: &RequestSpec,
        until: Instant,
        connection: CallerConnection,
    ) -> Option<WaitHandle> {
        let RequestSpec { principal, resource, labels, selector, .. } = ask;
        let place = self.places.acquire(principal)?;
        self.index().callers += 1;
        let wake = WaiterSignals::new(&self.claims);
        let sleeper = WaiterProfile { wake, any_em, needs: Needs::of(resource, labels, selector) };
        Some(WaitHandle {
            line: self.clone(),
            sleeper,
            until,
            connection,
            in_doubt: false,
            entry: None,
            guaranteed: Vec::new(),
            subscribed: BTreeSet::new(),
            news_count: 0,
            queued_since: None,
            decided_at: OffsetDateTime::UNIX_EPOCH,
            priority: None,
            answered: None,
            may_return: false,
            _counted: self.metrics.line.caller(),
            _place: place,
        })
    }

    /// Renews the instance's row, unless it was renewed within [`POLL_INTERVAL`]. Queue entries of an instance without renewals
    /// are void.
    async fn keep_alive(&self, deadline: Instant) -> Result<(), Error> {
        let say = || {
            let (signs, instance_id, is_idle) = (self.signs.clone(), self.instance_id, self.is_idle.clone());
            let listener = *lock(&self.listener);
            async move {
                renew_instance(signs, instance_id, listener, is_idle.load(Ordering::Relaxed)).await?;
                is_idle.store(false, Ordering::Relaxed);
                Ok(())
            }
        };
        self.alive.run_recent(POLL_INTERVAL, deadline, say).await
    }

    /// Connects before the first request waits, which may have a short deadline.
    async fn connect(&self) {
        // The first renewal connects if the database does not reply now.
        let _ = self.signs.lock().await.get().await;
    }

    /// Sets the process of the connection on which the instance listens, for the next renewal.
    fn set_listener(&self, listener: Option<ListenerProcess>) {
        *lock(&self.listener) = listener;
    }

    /// Returns the ends of those of `claims` whose calls have ended.
    fn ended(&self, claims: Vec<Uuid>) -> Vec<Departure> {
        let live = lock(&self.claims);
        let ended = claims.into_iter().filter(|claim| !live.contains(claim));
        ended.map(|claim| Departure { claim, is_absent: true }).collect()
    }

    fn index(&self) -> MutexGuard<'_, Waiters> {
        lock(&self.index)
    }

    /// Changes the index, and notifies the waiters that the change wakes.
    fn change<T>(&self, change: impl FnOnce(&mut Waiters) -> T) -> T {
        let (result, woken) = {
            let mut index = self.index();
            let result = change(&mut index);
            (result, index.take_woken())
        };
        woken.iter().for_each(|waiter| waiter.wake.notify_one());
        result
    }
}

/// Returns what was freed, by the hashes of the wait keys.
fn freed_capacity(keys: &FreedKeys) -> FreedCapacity {
    let mut freed = FreedCapacity::default();
    for (wait_key, requests) in keys.iter() {
        let key = key_hash(wait_key);
        let noted = freed.wait_keys.entry(key).or_default();
        *noted = noted.saturating_add(requests);
        if matches!(wait_key, WaitKey::Em(_)) {
            freed.ems.insert(key);
        }
    }
    freed
}

/// Renews the instance's row. Reconnects once if an idle connection does not reply within [`IDLE_TIMEOUT`].
async fn renew_instance(
    signs: Arc<tokio::sync::Mutex<Session>>,
    instance_id: Uuid,
    listener: Option<ListenerProcess>,
    was_idle: bool,
) -> Result<(), Error> {
    let mut session = signs.lock().await;
    if session.is_open() {
        let said = async { waiting::keep_alive(session.get().await?, instance_id, listener, was_idle).await };
        match answered_within(IDLE_TIMEOUT, said).await {
            Ok(()) => return Ok(()),
            Err(_) => session.reset(),
        }
    }
    let said = match session.get().await {
        Ok(connection) => within_timeout(waiting::keep_alive(connection, instance_id, listener, was_idle)).await,
        Err(error) => Err(error),
    };
    if said.is_err() {
        session.reset();
    }
    Ok(said?)
}

/// The connection of a caller, shared by its calls. The default never closes.
#[derive(Clone, Debug, Default)]
pub struct CallerConnection(Arc<ConnectionState>);

#[derive(Debug)]
struct ConnectionState {
    is_closed: AtomicBool,
    opened: Instant,
    /// Time of the last read, in milliseconds after `opened`; 0 before the first one.
    last_read: AtomicU64,
}

impl Default for ConnectionState {
    fn default() -> Self {
        Self { is_closed: AtomicBool::new(false), opened: Instant::now(), last_read: AtomicU64::new(0) }
    }
}

impl CallerConnection {
    /// Time without a read after which a connection that ends its calls is broken: a cancelled call ends just after a read, and a
    /// keep-alive ping without an answer much later.
    pub const SILENT: Duration = Duration::from_secs(8);

    /// Records that the connection ends or is broken, before its calls end.
    pub fn mark_closed(&self) {
        self.0.is_closed.store(true, Ordering::Release);
    }

    /// Records that the caller has sent something.
    pub fn mark_read(&self) {
        self.0.last_read.store(self.millis().max(1), Ordering::Relaxed);
    }

    /// Whether the connection has ended: the caller of a call that ends without a decision did not cancel it, and may come back.
    pub fn is_closed(&self) -> bool {
        let last_read = self.0.last_read.load(Ordering::Relaxed);
        let is_silent = last_read > 0 && u128::from(self.millis().saturating_sub(last_read)) > Self::SILENT.as_millis();
        is_silent || self.0.is_closed.load(Ordering::Acquire)
    }

    fn millis(&self) -> u64 {
        u64::try_from(self.0.opened.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// Handle of one waiting request. Dropping it ends the call: the request leaves the queue, or its caller counts as absent.
#[derive(Debug)]
pub struct WaitHandle {
    line: LocalWaitQueue,
    sleeper: WaiterProfile<Arc<WaiterSignals>>,
    until: Instant,
    connection: CallerConnection,
    /// Whether the call may own a position in the database, also after an unknown commit.
    in_doubt: bool,
    entry: Option<(QueuePosition, WaitKeys)>,
    /// Time of the decision that stored the entry, by the database clock.
    decided_at: OffsetDateTime,
    /// Priority of the first queue entry, in seconds.
    priority: Option<i16>,
    /// Scopes with guarantees that may entitle the request.
    guaranteed: Vec<WaitKey>,
    /// Further wait keys that wake this request.
    subscribed: BTreeSet<WaitKey>,
    /// Sequence number of the last freed event before the last decision.
    news_count: u64,
    /// Time of the first queue entry.
    queued_since: Option<Instant>,
    answered: Option<&'static str>,
    /// Whether the call failed, and its caller may repeat it.
    may_return: bool,
    /// Gauge of waiting requests.
    _counted: GaugeGuard,
    _place: FairPermit,
}

impl WaitHandle {
    /// Renews the instance and returns the wait parameters of the request for the ledger. `is_elsewhere` states whether the
    /// attempt uses another EM or spec than the queue entry.
    ///
    /// # Errors
    /// Database errors: an instance without renewal cannot have queue entries.
    pub async fn wait(&mut self, is_elsewhere: bool) -> Result<WaitParameters, Error> {
        self.line.keep_alive(self.until).await?;
        self.in_doubt = true;
        self.news_count = self.line.freed_count();
        Ok(self.parameters(is_elsewhere))
    }

    /// Returns the wait parameters of the request now.
    pub fn parameters(&self, is_elsewhere: bool) -> WaitParameters {
        WaitParameters {
            claim: self.sleeper.wake.claim,
            instance_id: self.line.instance_id,
            remaining: self.until.saturating_duration_since(Instant::now()),
            is_elsewhere,
            priority: self.priority,
            position: self.position(),
        }
    }

    /// Returns the wait deadline.
    pub fn until(&self) -> Instant {
        self.until
    }

    /// Returns the wait keys of the queue entry; `None` if the request is not queued.
    pub fn wait_keys(&self) -> Option<&WaitKeys> {
        self.entry.as_ref().map(|(_, wait_keys)| wait_keys)
    }

    /// Records that the request was submitted to the committer.
    pub fn mark_submitted(&self) {
        self.in_index(Waiters::tries);
    }

    /// Returns the position: that of the index, if another request has changed it since the entry.
    fn position(&self) -> Option<QueuePosition> {
        let stored = self.entry.as_ref().map(|(position, _)| *position);
        self.in_index(|index, ticket_id| index.position_of(ticket_id)).flatten().or(stored)
    }

    /// Changes the waiter in the index, if it is that of this call: a later call may wait under the same ticket id.
    fn in_index<T>(&self, change: impl FnOnce(&mut Waiters, Uuid) -> T) -> Option<T> {
        let ticket_id = self.entry.as_ref()?.0.ticket_id();
        self.line.change(|index| index.has(ticket_id, &self.sleeper.wake).then(|| change(index, ticket_id)))
    }

    /// Records the position and wait keys that the ledger has stored. `any_em` states whether capacity at any EM may serve the request.
    pub fn update_entry(&mut self, waiting: &QueuedOutcome, any_em: bool) {
        self.queued_since.get_or_insert_with(Instant::now);
        self.sleeper.any_em = any_em;
        let (position, wait_keys) = (waiting.position, &waiting.wait_keys);
        self.decided_at = waiting.decided_at;
        self.priority = Some(waiting.priority);
        let guaranteed = waiting.guaranteed_scopes.as_ref();
        let guaranteed = guaranteed.map(|scopes| scopes.iter().cloned().map(WaitKey::Scope).collect::<Vec<_>>());
        let has_changed = guaranteed.as_ref().is_some_and(|guaranteed| self.guaranteed != *guaranteed);
        self.guaranteed = guaranteed.unwrap_or_else(|| std::mem::take(&mut self.guaranteed));
        if self.position() == Some(position) && self.wait_keys() == Some(wait_keys) && !has_changed {
            self.in_index(|index, _| index.place(position, waiting.decided_at));
        } else {
            self.entry = Some((position, wait_keys.clone()));
            self.register(self.news_count);
        }
    }

    /// Also wakes the request for freed capacity at `wait_keys`, including freed events since the sequence number `since`.
    pub fn subscribe(&mut self, wait_keys: BTreeSet<WaitKey>, since: u64) {
        if self.subscribed != wait_keys {
            self.subscribed = wait_keys;
            self.register(since);
        }
    }

    fn register(&self, since: u64) {
        let Some((position, wait_keys)) = &self.entry else { return };
        let short = wait_keys.iter().filter(|(_, is_short)| **is_short).map(|(wait_key, _)| wait_key);
        let keys: BTreeSet<WaitKeyHash> = short.chain(&self.guaranteed).chain(&self.subscribed).map(key_hash).collect();
        self.line.change(|index| {
            if !self.has_ended() {
                index.insert(*position, self.sleeper.clone(), keys, since, self.decided_at);
            }
        });
    }

    /// Parks until a wake-up, the wait deadline or shutdown.
    pub async fn wait_for_wake(&self) -> WaitResult {
        // A separate statement, so that the index is unlocked before the wait.
        let rested = self.in_index(|index, ticket_id| index.rest(ticket_id));
        match rested {
            Some(None) => {}
            Some(Some(wake)) => return WaitResult::Look(wake),
            // Another call under this ticket id is the waiter. A check decides which of them owns the position.
            None => {
                self.register(self.line.freed_count());
                return WaitResult::Look(WakeReason::NEWS);
            }
        }
        tokio::select! {
            () = self.line.stopping.cancelled() => WaitResult::Stopping,
            () = tokio::time::sleep_until(self.until) => WaitResult::DeadlinePassed,
            () = self.ended() => WaitResult::Look(WakeReason::NEWS),
            () = self.sleeper.wake.wake.notified() => {
                WaitResult::Look(self.in_index(Waiters::woken_by).unwrap_or(WakeReason::NEWS))
            }
        }
    }

    /// Whether the call no longer owns its position.
    pub fn has_ended(&self) -> bool {
        self.sleeper.wake.ended.is_cancelled()
    }

    /// Waits until the call no longer owns its position.
    pub async fn ended(&self) {
        self.sleeper.wake.ended.cancelled().await;
    }

    /// Forwards a wake-up without a grant to later waiters, because they may need other dimensions.
    pub fn forward_wake(&self, wake: WakeReason) {
        self.in_index(|index, ticket_id| index.pass_on(ticket_id, wake));
    }

    /// Counts a check, or an attempt without a grant, by its reason.
    pub fn count_check(&self, wake: WakeReason) {
        let counts = &self.line.metrics.line;
        if wake.is_poll { counts.polls.inc() } else { counts.checks.inc() }
    }

    /// Waits `FAILURE_PAUSE` after a transient error, then checks again.
    pub async fn back_off(&self) -> WaitResult {
        let again = (Instant::now() + FAILURE_PAUSE).min(self.until);
        tokio::select! {
            () = self.line.stopping.cancelled() => WaitResult::Stopping,
            () = tokio::time::sleep_until(again), if again < self.until => WaitResult::Look(WakeReason::NEWS),
            () = tokio::time::sleep_until(self.until) => WaitResult::DeadlinePassed,
        }
    }

    /// Records a grant. The committed batch has already removed the request from the index.
    pub fn granted(&mut self) {
        self.in_doubt = false;
        if self.entry.take().is_some() {
            self.line.metrics.line.served.inc();
        }
    }

    /// Records the result for the metrics, and whether the caller may repeat the call. A request without a result counts as cancelled.
    pub fn record_result(&mut self, outcome: &'static str, may_return: bool) {
        (self.answered, self.may_return) = (Some(outcome), may_return);
    }

    /// Records that the ledger has deleted the queue entry, or found none. If the request enters the queue again, it does so under
    /// another claim: the end of the former claim may be known already, or come later.
    pub fn mark_removed(&mut self) {
        self.in_doubt = false;
        self.in_index(Waiters::remove);
        self.entry = None;
        self.sleeper.wake = WaiterSignals::new(&self.line.claims);
    }
}

impl Drop for WaitHandle {
    fn drop(&mut self) {
        if let Some(since) = self.queued_since {
            self.line.metrics.requests.waited(since, self.answered.unwrap_or("cancelled"));
        }
        self.in_index(Waiters::remove);
        if self.in_doubt {
            let is_lost = self.answered.is_none() && self.connection.is_closed();
            let is_absent = is_lost || self.may_return || self.line.stopping.is_cancelled();
            // The receiver ends only at shutdown; other instances then end the call.
            let _ = self.line.leaving.send(Departure { claim: self.sleeper.wake.claim, is_absent });
        }
        self.line.index().callers -= 1;
    }
}
