//! The committer: applies all operations on tickets and EMs. Only an audit repair corrects tickets and counters outside it.
//!
//! Calls submit operations to a commit queue. The worker applies all queued operations in one transaction and replies after the
//! commit; later ones form the next batch. No timer delays a batch: under load, hundreds of operations share a commit.
//! Never: writes without the row count check; replies before the commit; leaves a transaction half done after a cancelled call.
//! Callers: `request_resource`, `heartbeat`, `background`, and the RPC services of `rm_edge`.
//!
//! - `batch`: one transaction; `counters`: counters after a batch;
//! - `worker`: applies batches and handles their failures; `evidence`: whether an interrupted commit took effect;
//! - `contended`: queues of operations with a contended key.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

use tokio::{
    runtime::Handle,
    sync::{mpsc, oneshot},
    time::{Duration, Instant},
};

use crate::error::Error;
use rm_engine::commit_queue::{
    BATCH_COST_MAX, CommitQueues, OperationClass, OperationPermit, OperationPermits, WAITING_MAX,
};
use rm_model::{
    counters::Counters,
    operation::{Operation, Outcome, PlacedRequest, ReleaseTicket},
    principal::{Actor, Principal},
};
use rm_store::{Store, user_resource::DueTicket, waiting::Departure};
use rm_telemetry::cause;
use rm_telemetry::{
    metrics::{GaugeGuard, Metrics},
    operation_log::OperationLog,
    traces,
};

use super::{admission::StateCache, tasks::InstanceTasks, waiting::LocalWaitQueue};

mod batch;
mod contended;
mod counters;
mod evidence;
mod worker;

use batch::BatchItem;

/// Capacity of the channel to the committer: twice the permits, because undo operations need none.
const INBOX_MAX: usize = 2 * WAITING_MAX;

/// Idle time after which the committer ends its open transaction.
const REST_AFTER: Duration = Duration::from_secs(1);

/// Additional wait after the deadline for an operation whose transaction runs: longer than most transactions take.
const END_TIMEOUT: Duration = Duration::from_millis(500);

/// Time that an operation without an alternative EM waits for its contended EM before its caller selects an EM again.
const HOLDER_PATIENCE: Duration = Duration::from_secs(1);

/// Timeout of one attempt of an operation without a caller.
const DETACHED_TIMEOUT: Duration = Duration::from_secs(10);

/// First and longest pause before an undo that failed for now is repeated.
const UNDO_PAUSE: Duration = Duration::from_secs(1);
const UNDO_PAUSE_MAX: Duration = Duration::from_secs(30);

/// Handle of the committer: submits operations to its commit queues.
#[derive(Clone, Debug)]
pub struct Committer {
    inbox: mpsc::Sender<QueuedOperation>,
    room: OperationPermits,
    line: LocalWaitQueue,
    undoing: UndoQueue,
    metrics: Metrics,
}

/// How long an operation waits for its lock keys.
#[derive(Debug, Clone, Copy)]
pub struct LockWait {
    /// The caller's deadline.
    pub until: Instant,
    /// Time from which the operation stops waiting for a contended EM and ends as [`Outcome::Contended`], so that its caller
    /// can try another EM. `None` if the operation has no alternative EM.
    goes_at: Option<Instant>,
}

impl From<Instant> for LockWait {
    fn from(until: Instant) -> Self {
        Self { until, goes_at: None }
    }
}

impl LockWait {
    /// Ends at once on a contended EM, so that the caller can try another EM.
    pub fn try_other_ems(until: Instant) -> Self {
        Self { until, goes_at: Some(Instant::now()) }
    }

    /// Waits `HOLDER_PATIENCE` for a contended EM, because no other EM was available.
    pub fn try_other_ems_after_pause(until: Instant) -> Self {
        Self { until, goes_at: Some(Instant::now() + HOLDER_PATIENCE) }
    }
}

/// Components that are notified after each commit.
#[derive(Debug)]
pub struct CommitListeners {
    /// Receives the state of the EMs and scopes of the batch.
    pub seen: StateCache,
    /// Receives grants that expire before the next expiry sweep.
    pub expiring_soon: mpsc::Sender<DueTicket>,
    /// Receives waiting calls whose callers are gone.
    pub abandoned: mpsc::UnboundedSender<Departure>,
    /// The waiting requests of this instance.
    pub line: LocalWaitQueue,
}

impl Committer {
    /// Starts the task of the committer.
    ///
    /// The task ends when all clones of the committer are dropped and all operations have replies. The task has its own thread
    /// and connection. On a thread shared with calls, each SQL statement would wait for the calls that the last batch has woken.
    ///
    /// # Errors
    /// If the thread cannot be spawned.
    pub fn start(
        store: Store,
        after_commit: CommitListeners,
        metrics: Metrics,
        tasks: &InstanceTasks,
    ) -> io::Result<Self> {
        let (inbox, arrived) = mpsc::channel(INBOX_MAX);
        let undoing = UndoQueue { inbox: inbox.downgrade(), metrics: metrics.clone() };
        let (line, seen) = (after_commit.line.clone(), after_commit.seen.clone());
        let answers = worker::ReplyDispatcher::start(after_commit, undoing.clone(), tasks);
        let told = (answers, seen, line.clone());
        let lanes = Arc::new(contended::ContendedQueues::new(store.clone(), told, metrics.clone(), tasks.clone()));
        let worker = worker::Worker::new(store.committer_session(), lanes.answers(), metrics.clone(), Arc::default());
        tasks.spawn_on_thread("committer", run(arrived, lanes, worker))?;
        Ok(Self { inbox, room: OperationPermits::default(), line, undoing, metrics })
    }

    /// Submits an operation that a caller waits for, and returns its result after the commit.
    ///
    /// The operation is in its queue when this function returns. The future does not own the operation: one future exists per
    /// active call, and each enclosing future would reserve space for it. A dropped future withdraws its operation if the
    /// transaction has not begun.
    ///
    /// # Errors
    /// - [`Error::LockTimeout`] at the deadline if a lock key is contended then.
    /// - [`Error::NotBegun`] at the deadline if the transaction has not begun for another reason.
    /// - [`Error::CommitUnknown`] soon after the deadline if the transaction has not ended.
    /// - [`Error::Overloaded`] if too many operations wait.
    pub fn submit<'a>(
        &'a self,
        by: Actor,
        operation: Operation,
        patience: LockWait,
    ) -> impl Future<Output = Result<Outcome, Error>> + Send + use<'a> {
        let class = OperationClass::called(&operation);
        self.execute(class, by, operation, patience, None)
    }

    /// Submits an operation as [`Committer::submit`] does. If `wanted`, also returns the counters after the commit, or `None`
    /// if the operation has no counters.
    ///
    /// # Errors
    /// As of [`Committer::submit`].
    pub fn submit_with_counters<'a>(
        &'a self,
        by: Actor,
        operation: Operation,
        patience: LockWait,
        wanted: bool,
    ) -> impl Future<Output = Result<(Outcome, Option<Box<Counters>>), Error>> + Send + use<'a> {
        let class = OperationClass::called(&operation);
        let (tell, told) = wanted.then(oneshot::channel).unzip();
        let done = self.execute(class, by, operation, patience, tell);
        async move {
            let outcome = done.await?;
            // The counters are sent before the outcome.
            Ok((outcome, told.and_then(|mut told| told.try_recv().ok())))
        }
    }

    /// Submits an operation without a caller. Operations with a caller are applied first.
    ///
    /// # Errors
    /// As of [`Committer::submit`].
    pub fn submit_in_background<'a>(
        &'a self,
        operation: Operation,
        deadline: Instant,
    ) -> impl Future<Output = Result<Outcome, Error>> + Send + use<'a> {
        let class = OperationClass::uncalled(&operation);
        self.execute(class, Principal::Service.into(), operation, deadline.into(), None)
    }

    fn execute<'a>(
        &'a self,
        class: OperationClass,
        by: Actor,
        operation: Operation,
        patience: LockWait,
        counters: Option<CounterSender>,
    ) -> impl Future<Output = Result<Outcome, Error>> + Send + use<'a> {
        let told = OperationLog::of(&by.principal, &operation);
        let mut queued = self.enqueue(class, by, operation, patience, counters);
        async move {
            // Borrowed, because a moved reply would occupy the future twice.
            let done = match &mut queued {
                Ok(answer) => match answer.wait(patience.until).await {
                    Ok(Outcome::Contended) if patience.until <= Instant::now() => Err(Error::LockTimeout),
                    done => done,
                },
                Err(error) => Err(error.clone()),
            };
            told.tell(&done);
            if let Err(error) = &done {
                self.metrics.committer.failed(error.failure());
            }
            done
        }
    }

    /// Adds an operation to a queue. Returns the reply to wait for.
    fn enqueue(
        &self,
        class: OperationClass,
        by: Actor,
        operation: Operation,
        patience: LockWait,
        counters: Option<CounterSender>,
    ) -> Result<PendingReply, Error> {
        // An operation above the maximum cost never fits a batch and would block its queue forever.
        if operation.cost() > BATCH_COST_MAX {
            return Err(Error::defect("an operation costs more than a batch"));
        }
        let (reply, answer) = oneshot::channel();
        let (progress, place) = (OperationState::default(), self.room.take(&operation).ok_or(Error::Overloaded)?);
        let undo = GrantUndo::of(&by.principal, &operation);
        let answer = PendingReply { answer, progress: progress.clone(), undo, undoing: self.undoing.clone() };
        let waits = Some(self.metrics.committer.queued());
        let making_room = self.line.freed_key(&operation);
        let trace = traces::operation(operation.kind());
        let pending = QueuedOperation::new(class, by, operation, patience, reply);
        let pending = QueuedOperation { progress, counters, waits, trace, _room: Some(place), ..pending };
        self.inbox.try_send(pending)?;
        if let Some(wait_key) = making_room {
            self.line.capacity_expected(wait_key);
        }
        Ok(answer)
    }
}

/// Receiver of the result of an operation.
type OperationReply = oneshot::Receiver<Result<Outcome, Error>>;

/// Sender of the counters after a commit.
type CounterSender = oneshot::Sender<Box<Counters>>;

/// Undo of a grant whose reply is lost.
#[derive(Debug)]
struct GrantUndo {
    by: Principal,
    ticket: ReleaseTicket,
    /// Time from the grant until the ticket expires.
    lock_ttl: Duration,
}

impl GrantUndo {
    /// Returns the undo of a request's grant. `None` if the caller can repeat the request by its request id.
    fn of(by: &Principal, operation: &Operation) -> Option<Self> {
        let Operation::Request(PlacedRequest { ask, em, .. }) = operation else { return None };
        let ticket = ReleaseTicket { ticket_id: ask.ticket_id, user: ask.user.clone(), em: em.clone() };
        ask.request_id.is_none().then(|| Self { by: by.clone(), ticket, lock_ttl: ask.lock_ttl })
    }
}

/// Reply of an operation. Dropping it with an unread grant undoes the grant, because the committer saw a caller that waits.
struct PendingReply {
    answer: OperationReply,
    progress: OperationState,
    /// Undo of the grant. `None` if the grant stays.
    undo: Option<GrantUndo>,
    undoing: UndoQueue,
}

impl PendingReply {
    /// Waits for the reply until `deadline`, and up to [`END_TIMEOUT`] longer if the transaction runs.
    async fn wait(&mut self, deadline: Instant) -> Result<Outcome, Error> {
        let answered = match tokio::time::timeout_at(deadline, &mut self.answer).await {
            Ok(answered) => answered,
            Err(_) => match self.progress.abandon() {
                Some(error) => return Err(error),
                // The end of the transaction decides the reply, but may be late if the database is slow. Another attempt may wait by then.
                None => match tokio::time::timeout_at(deadline + END_TIMEOUT, &mut self.answer).await {
                    Ok(answered) => answered,
                    Err(_) => return Err(self.progress.abandon().unwrap_or(Error::CommitUnknown)),
                },
            },
        };
        answered.unwrap_or(Err(Error::ShuttingDown))
    }
}

impl Drop for PendingReply {
    fn drop(&mut self) {
        let Some(undo) = self.undo.take() else { return };
        // The responder sees from here on that the caller is gone.
        self.answer.close();
        if let Ok(Ok(Outcome::Granted(_))) = self.answer.try_recv() {
            self.undoing.submit(undo);
        }
    }
}

/// Queue of undo operations: they revert grants whose callers are gone.
#[derive(Clone, Debug)]
struct UndoQueue {
    inbox: mpsc::WeakSender<QueuedOperation>,
    metrics: Metrics,
}

impl UndoQueue {
    /// Undoes a grant. Until the ticket expires, repeats attempts that fail for now, or with an unknown result: a repetition changes
    /// nothing.
    fn submit(&self, GrantUndo { by, ticket, lock_ttl }: GrantUndo) {
        // Without a runtime, the instance has shut down.
        let Ok(runtime) = Handle::try_current() else { return };
        let (queue, expires, mut pause) = (self.clone(), Instant::now() + lock_ttl, UNDO_PAUSE);
        let mut attempt = queue.enqueue(&by, &ticket);
        // The task owns the reply channel: an operation without a receiver is not applied.
        runtime.spawn(async move {
            loop {
                let result = match attempt {
                    Ok(answer) => answer.await.unwrap_or(Err(Error::ShuttingDown)),
                    Err(error) => Err(error),
                };
                let Err(error) = result else { return };
                let is_repeated = error.is_transient() || matches!(error, Error::CommitUnknown);
                if pause == UNDO_PAUSE || !is_repeated {
                    tracing::warn!(error = cause(&error), is_repeated, "a grant without a caller could not be undone");
                }
                if !is_repeated || Instant::now() >= expires {
                    return;
                }
                tokio::time::sleep(pause).await;
                pause = (2 * pause).min(UNDO_PAUSE_MAX);
                attempt = queue.enqueue(&by, &ticket);
            }
        });
    }

    fn enqueue(&self, by: &Principal, ticket: &ReleaseTicket) -> Result<OperationReply, Error> {
        let operation = Operation::Undo(ticket.clone());
        let (class, by, (reply, answer)) = (OperationClass::called(&operation), by.clone().into(), oneshot::channel());
        let patience = (Instant::now() + DETACHED_TIMEOUT).into();
        let waits = Some(self.metrics.committer.queued());
        let pending = QueuedOperation { waits, ..QueuedOperation::new(class, by, operation, patience, reply) };
        self.inbox.upgrade().ok_or(Error::ShuttingDown)?.try_send(pending)?;
        Ok(answer)
    }
}

async fn run(
    mut inbox: mpsc::Receiver<QueuedOperation>,
    lanes: Arc<contended::ContendedQueues>,
    mut worker: worker::Worker,
) {
    let mut queues = CommitQueues::default();
    loop {
        if queues.is_empty() {
            let first = match tokio::time::timeout(REST_AFTER, inbox.recv()).await {
                Ok(first) => first,
                Err(_) => {
                    worker.session().idle().await;
                    inbox.recv().await
                }
            };
            let Some(first) = first else {
                lanes.close();
                worker.session().idle().await;
                return;
            };
            enter(&mut queues, first);
        }
        while let Ok(arrived) = inbox.try_recv() {
            enter(&mut queues, arrived);
        }
        let mut batch = queues.next(Instant::now().into_std());
        batch.iter_mut().for_each(|pending| pending.waits = None);
        let batch = lanes.divert(batch.into_iter());
        for (key, operations) in worker.commit(batch).await {
            lanes.queue(&key, operations, &worker.limits());
        }
    }
}

fn enter(queues: &mut CommitQueues<QueuedOperation>, pending: QueuedOperation) {
    queues.push(pending.class, pending.operation.cost(), pending);
}

/// Operation in a commit queue, with its reply channel.
#[derive(Debug)]
struct QueuedOperation {
    class: OperationClass,
    by: Actor,
    operation: Operation,
    patience: LockWait,
    progress: OperationState,
    reply: oneshot::Sender<Result<Outcome, Error>>,
    /// Receives the counters before the reply, if the caller requested them.
    counters: Option<CounterSender>,
    /// Gauge of the queue that counts the operation.
    waits: Option<GaugeGuard>,
    /// Trace of the operation; ends with it.
    trace: traces::OperationTrace,
    /// Permit until the reply is sent. `None` for an undo operation, which needs no permit.
    _room: Option<OperationPermit>,
}

/// State of an operation. Caller and committer change the state atomically, so that only one of them succeeds.
#[derive(Clone, Debug, Default)]
struct OperationState(Arc<AtomicU8>);

const WAITING: u8 = 0;
const RUNNING: u8 = 1;
const ABANDONED: u8 = 2;
/// Waits for a key that another transaction or a row of another program owns, or that an operator holds.
const CONTENDED: u8 = 3;

impl OperationState {
    fn change(&self, from: u8, to: u8) -> bool {
        self.0.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Cancels the operation for its caller. Returns the reason why it was not applied, or `None` if its transaction runs.
    fn abandon(&self) -> Option<Error> {
        // Tries `WAITING` twice, because the key may become free in between.
        let reasons = [(WAITING, Error::NotBegun), (CONTENDED, Error::LockTimeout), (WAITING, Error::NotBegun)];
        reasons.into_iter().find(|(from, _)| self.change(*from, ABANDONED)).map(|(_, error)| error)
    }

    /// Marks the operation as running. Returns false if its caller has cancelled it.
    fn begin(&self) -> bool {
        self.change(WAITING, RUNNING) || self.change(CONTENDED, RUNNING)
    }

    /// Marks the operation as waiting again after an attempt without effect.
    fn pause(&self, is_contended: bool) {
        self.change(RUNNING, WAITING);
        self.set_contended(is_contended);
    }

    /// Records whether a lock key is contended; ignored once the operation runs.
    fn set_contended(&self, is_contended: bool) {
        let (from, to) = if is_contended { (WAITING, CONTENDED) } else { (CONTENDED, WAITING) };
        self.change(from, to);
    }

    /// Returns the error of an operation that reached its deadline without running.
    fn timeout(&self) -> Error {
        if self.0.load(Ordering::Acquire) == CONTENDED { Error::LockTimeout } else { Error::NotBegun }
    }
}

impl QueuedOperation {
    /// Creates an operation without gauge, trace, counters and permit.
    fn new(
        class: OperationClass,
        by: Actor,
        operation: Operation,
        patience: LockWait,
        reply: oneshot::Sender<Result<Outcome, Error>>,
    ) -> Self {
        let (progress, trace) = (OperationState::default(), traces::OperationTrace::default());
        Self { class, by, operation, patience, progress, reply, counters: None, waits: None, trace, _room: None }
    }

    /// Marks the operation as running. Returns false if its caller is gone.
    fn begin(&self) -> bool {
        !self.reply.is_closed() && self.progress.begin()
    }

    /// Marks the operation as waiting for a contended key.
    fn requeue(&mut self) {
        self.trace.contended();
        self.progress.pause(true);
    }

    /// Returns the view for the batch.
    fn as_batch_item(&self) -> BatchItem<'_> {
        BatchItem { by: &self.by, operation: &self.operation, counters: self.counters.is_some() }
    }

    /// Whether the caller still waits.
    fn has_caller(&self) -> bool {
        !self.reply.is_closed() && self.progress.0.load(Ordering::Acquire) != ABANDONED
    }

    /// Sends the result. Returns false if the caller is gone.
    fn reply(self, answer: Result<Outcome, Error>) -> bool {
        let Self { reply, trace, .. } = self;
        if answer.is_err() {
            trace.failed();
        }
        // Ends the trace before the caller continues.
        drop(trace);
        reply.send(answer).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use rm_model::{em::EmInstance, name::Name, operation::Grant};

    type Reply = oneshot::Sender<Result<Outcome, Error>>;

    fn answer() -> (Reply, PendingReply, mpsc::Sender<QueuedOperation>, mpsc::Receiver<QueuedOperation>) {
        let ((reply, answer), (queue, inbox)) = (oneshot::channel(), mpsc::channel(1));
        let metrics = Metrics::new([], []);
        let ticket = ReleaseTicket {
            ticket_id: Uuid::from_u128(7),
            user: Name::parse("user", "hadoop").unwrap(),
            em: EmInstance::parse("em", "ecm", "host1").unwrap(),
        };
        let undo = Some(GrantUndo { by: Principal::Anonymous, ticket, lock_ttl: Duration::from_secs(60) });
        let undoing = UndoQueue { inbox: queue.downgrade(), metrics };
        (reply, PendingReply { answer, progress: OperationState::default(), undo, undoing }, queue, inbox)
    }

    fn granted() -> Result<Outcome, Error> {
        let em = EmInstance::parse("em", "ecm", "host1").unwrap();
        let (ticket_id, expires_at) = (Uuid::from_u128(7), time::OffsetDateTime::UNIX_EPOCH);
        Ok(Outcome::Granted(Grant {
            ticket_id,
            em,
            expires_at,
            advisory_violations: Vec::new(),
            queue: None,
            counters: None,
        }))
    }

    #[tokio::test]
    async fn pending_reply_dropped_unread_undoes_grant() {
        let (reply, answer, _queue, mut inbox) = answer();
        reply.send(granted()).unwrap();
        drop(answer);
        let pending = inbox.try_recv().unwrap();
        assert!(
            matches!(&pending.operation, Operation::Undo(undone) if undone.ticket_id == Uuid::from_u128(7)),
            "{pending:?}"
        );
        assert!(pending.has_caller());
    }

    /// An undo outlives a hold and an outage.
    #[tokio::test]
    async fn undo_that_fails_for_now_is_repeated() {
        let (reply, waits, _queue, mut inbox) = answer();
        reply.send(granted()).unwrap();
        drop(waits);
        for error in [Error::LockTimeout, Error::CommitUnknown, Error::ShuttingDown] {
            let pending = tokio::time::timeout(10 * UNDO_PAUSE, inbox.recv()).await.unwrap().unwrap();
            pending.reply(Err(error));
        }
        let again = tokio::time::timeout(2 * UNDO_PAUSE, inbox.recv()).await;
        assert!(again.is_err(), "{again:?}");
    }

    #[tokio::test]
    async fn operation_timeout_names_lock_only_when_contended() {
        for (is_contended, expected) in [(None, "NotBegun"), (Some(true), "LockTimeout"), (Some(false), "NotBegun")] {
            let (_reply, mut waits, ..) = answer();
            // The key was contended for a moment only.
            is_contended.into_iter().for_each(|is_contended| {
                waits.progress.set_contended(true);
                waits.progress.set_contended(is_contended);
            });
            let error = waits.wait(Instant::now()).await.unwrap_err();
            assert_eq!(format!("{error:?}"), expected, "{is_contended:?}");
        }
    }

    /// The deadline of an operation that waits between two attempts of its batch has a known result, and no attempt follows.
    #[tokio::test]
    async fn deadline_between_attempts_has_known_result() {
        for (is_contended, expected) in [(true, "LockTimeout"), (false, "NotBegun")] {
            let (_reply, mut waits, ..) = answer();
            let progress = waits.progress.clone();
            assert!(progress.begin());
            progress.pause(is_contended);
            let error = waits.wait(Instant::now()).await.unwrap_err();
            assert_eq!(format!("{error:?}"), expected);
            assert!(!progress.begin());
        }
    }

    #[tokio::test]
    async fn pending_reply_read_keeps_grant() {
        let (reply, mut seen, _queue, mut inbox) = answer();
        reply.send(granted()).unwrap();
        (&mut seen.answer).await.unwrap().unwrap();
        drop(seen);
        assert!(inbox.try_recv().is_err());
        // A sender without a receiver learns that its caller is gone.
        let (reply, gone, _queue, mut inbox) = answer();
        drop(gone);
        assert!(reply.send(granted()).is_err() && inbox.try_recv().is_err());
    }
}
