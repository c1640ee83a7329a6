//! Worker: applies batches on one connection, handles the failures of their transactions, and replies.
//!
//! A failed batch is retried, split, or failed, by its error. Operations with a contended key are returned to the caller of
//! [`Worker::commit`]. An interrupted commit is resolved by the evidence that the batch left.
//!
//! Never: replies before the commit; retries a batch whose commit may have taken effect.
//! Callers: the committer's run loop and the contended-key queues.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tokio::{sync::mpsc, time::Instant};

use uuid::Uuid;

use crate::{background::expiry, error::Error, tasks::InstanceTasks};
use rm_model::{
    limit::Limits,
    operation::{Grant, LockKey, Operation, Outcome, PlacedRequest, ReleaseTicket},
    principal::Principal,
    ticket_end::TicketEnd,
};
use rm_store::{
    StoreError, limit, resource_lock,
    session::{Session, durable, within_timeout},
    user_resource::DueTicket,
};
use rm_telemetry::{metrics::Metrics, traces};

use super::{
    CommitListeners, QueuedOperation, UndoQueue,
    batch::{self, BatchError, CommitResult},
    evidence::Evidence,
};

/// Maximum number of retries of a batch after a write conflict.
const RETRIES_MAX: u32 = 5;

/// Maximum number of retries of a batch after a lock timeout on rows, before it is split in halves.
const WAITS_MAX: u32 = 2;

/// Operations by a contended lock key of theirs.
pub(super) type ContendedOperations = BTreeMap<LockKey, Vec<QueuedOperation>>;

/// Applies batches on its own connection.
pub(super) struct Worker {
    session: Session,
    answers: ReplyDispatcher,
    metrics: Metrics,
    /// Limits of the last batch.
    limits: Arc<Limits>,
    /// Id of this instance, which wakes its own waiters without a notification.
    own: Uuid,
}

/// Operations that share one attempt, with the number of their attempts.
struct BatchPart {
    operations: Vec<QueuedOperation>,
    tries: u32,
    /// Whether the part is half of a batch that failed.
    is_half: bool,
    /// Whether another transaction locks the limits or rows of these operations.
    is_contended: bool,
}

impl BatchPart {
    fn again(self) -> Self {
        Self { tries: self.tries + 1, ..self }
    }

    /// Fails overdue operations and drops operations whose callers are gone.
    fn drop_overdue(&mut self) {
        let now = Instant::now();
        let wanted = std::mem::take(&mut self.operations).into_iter().filter(|pending| !pending.reply.is_closed());
        let (overdue, rest) = wanted.partition(|pending| pending.patience.until <= now);
        self.operations = rest;
        answer_all(overdue, if self.is_contended { &Error::LockTimeout } else { &Error::NotBegun });
    }

    /// Splits the part in two halves. A single operation stays one part.
    fn halves(mut self) -> Vec<Self> {
        let rest = self.operations.split_off(self.operations.len() / 2);
        let is_contended = self.is_contended;
        let of = |operations| Self { operations, tries: WAITS_MAX, is_half: true, is_contended };
        [self.operations, rest].into_iter().filter(|operations| !operations.is_empty()).map(of).collect()
    }

    fn singles(self) -> Vec<Self> {
        let (tries, is_half, is_contended) = (self.tries, self.is_half, self.is_contended);
        let single = |pending| Self { operations: vec![pending], tries, is_half, is_contended };
        self.operations.into_iter().map(single).collect()
    }
}

impl Worker {
    /// Creates a worker that commits on `session`.
    pub fn new(session: Session, answers: ReplyDispatcher, metrics: Metrics, limits: Arc<Limits>) -> Self {
        let own = answers.own;
        Self { session, answers, metrics, limits, own }
    }

    /// Returns the limits of the last batch.
    pub fn limits(&self) -> Arc<Limits> {
        self.limits.clone()
    }

    /// Returns the session on which the worker commits.
    pub fn session(&mut self) -> &mut Session {
        &mut self.session
    }

    /// Applies `batch` and replies to its callers. Operations whose callers are gone are not applied.
    ///
    /// Returns the operations with a contended lock key; they have no reply and wait again.
    pub async fn commit(&mut self, batch: Vec<QueuedOperation>) -> ContendedOperations {
        let mut aside = ContendedOperations::new();
        let operations = batch.into_iter().filter(QueuedOperation::begin).collect();
        let mut parts = vec![BatchPart { operations, tries: 0, is_half: false, is_contended: false }];
        while let Some(mut part) = parts.pop() {
            part.drop_overdue();
            if part.operations.is_empty() {
                continue;
            }
            let reused = self.session.is_open();
            let trace = traces::batch(part.operations.iter_mut().map(|pending| &mut pending.trace));
            let ended = self.run(&part.operations, &trace).await;
            if ended.is_err() {
                trace.failed();
            }
            drop(trace);
            match ended {
                Ok(committed) => self.committed(part.operations, committed),
                Err(BatchError::Held) => parts.extend(self.split(part, &mut aside).await),
                // A limit change waits only for earlier batches and ends soon.
                Err(BatchError::Fenced) => parts.push(BatchPart { is_contended: true, ..part }),
                Err(BatchError::OtherLimits(limits)) => {
                    self.limits = limits;
                    parts.push(part);
                }
                Err(BatchError::Unknown { transaction_id, evidence, committed }) => {
                    match self.was_committed(&transaction_id, &evidence).await {
                        Some(true) => self.committed(part.operations, *committed),
                        Some(false) if part.tries < RETRIES_MAX => parts.push(part.again()),
                        Some(false) => answer_all(part.operations, &Error::lost_connection()),
                        None => answer_all(part.operations, &Error::CommitUnknown),
                    }
                }
                Err(BatchError::Store(error)) if error.is_lock_timeout() => {
                    self.metrics.database.failed(error.failure());
                    // The retry must not wait for the locks of its own last attempt.
                    self.session.idle().await;
                    parts.extend(after_wait(BatchPart { is_contended: true, ..part }, &error, &mut aside));
                }
                Err(BatchError::Store(error)) => {
                    self.metrics.database.failed(error.failure());
                    self.session.reset_after(&error);
                    parts.extend(after_error(BatchPart { is_contended: false, ..part }, error, reused));
                }
            }
        }
        aside
    }

    async fn run(&mut self, part: &[QueuedOperation], trace: &traces::BatchTrace) -> Result<CommitResult, BatchError> {
        let operations: Vec<_> = part.iter().map(QueuedOperation::as_batch_item).collect();
        let committed =
            batch::run(&mut self.session, &operations, &self.limits, self.own, &self.metrics, trace).await?;
        self.limits = committed.standing.limits.clone();
        Ok(committed)
    }

    fn committed(&self, part: Vec<QueuedOperation>, committed: CommitResult) {
        self.metrics.committer.advisory_violations.inc_by(committed.advisory_violations);
        for how in TicketEnd::ALL {
            let count = committed.ended.iter().filter(|end| **end == how).count();
            self.metrics.requests.tickets_ended(how, u64::try_from(count).unwrap_or(u64::MAX));
        }
        self.answers.committed(part, committed);
    }

    /// Returns whether a transaction was committed although its connection broke; `None` if the database does not reply in
    /// time.
    async fn was_committed(&mut self, transaction_id: &str, evidence: &Evidence) -> Option<bool> {
        self.session.reset();
        let connection = self.session.settled(transaction_id).await?;
        let holds = within_timeout(async {
            let holds = evidence.holds(&mut *connection).await?;
            if holds {
                durable(connection).await?;
            }
            Ok(holds)
        });
        let holds: Result<bool, StoreError> = holds.await;
        if let Err(error) = &holds {
            tracing::error!(error = error as &dyn std::error::Error, "cannot read the result of a commit");
            self.session.reset();
        }
        holds.ok()
    }

    /// Whether the current limits require user locks. If they do not, a contended user key no longer blocks operations.
    ///
    /// # Errors
    /// [`StoreError`] if the limits cannot be read. A limit change in progress is no error: the last known limits then apply.
    pub async fn locks_users(&mut self) -> Result<bool, StoreError> {
        let connection = self.session.get().await?;
        match within_timeout(limit::current(connection, &self.limits)).await {
            Ok(limits) => self.limits = limits,
            // A limit change is in progress; the known limits apply until it commits.
            Err(error) if error.is_lock_timeout() => {}
            Err(error) => return Err(error),
        }
        Ok(self.limits.locks_users())
    }

    /// Moves the operations with a contended key to `aside`. Returns the part with the other operations, or `None` after an
    /// error.
    async fn split(&mut self, part: BatchPart, aside: &mut ContendedOperations) -> Option<BatchPart> {
        let held = match self.held(&part).await {
            Ok(held) => held,
            Err(error) => {
                self.session.reset();
                answer_all(part.operations, &error.into());
                return None;
            }
        };
        let mut rest = Vec::with_capacity(part.operations.len());
        for pending in part.operations {
            match pending.operation.lock_keys(true).find(|key| held.contains(key)) {
                Some(key) => queue_contended(aside, key, pending),
                None => rest.push(pending),
            }
        }
        Some(BatchPart { operations: rest, tries: part.tries, is_half: part.is_half, is_contended: false })
    }

    /// Returns the contended keys of a part.
    async fn held(&mut self, part: &BatchPart) -> Result<BTreeSet<LockKey>, StoreError> {
        if self.limits.locks_users() {
            self.locks_users().await?;
        }
        let keys = batch::lock_keys(part.operations.iter().map(|pending| &pending.operation), &self.limits);
        within_timeout(resource_lock::held(self.session.get().await?, &keys)).await
    }
}

fn queue_contended(aside: &mut ContendedOperations, key: LockKey, mut pending: QueuedOperation) {
    pending.requeue();
    aside.entry(key).or_default().push(pending);
}

/// Decides the retry after a lock timeout on rows that another transaction locks without the resource lock.
///
/// PostgreSQL does not report the operation that waited. The part is halved until one operation remains, which moves to
/// `aside`.
fn after_wait(part: BatchPart, error: &StoreError, aside: &mut ContendedOperations) -> Vec<BatchPart> {
    tracing::warn!(
        %error, operations = part.operations.len(), tries = part.tries,
        "another program locks rows without their resource lock"
    );
    match part.operations.len() {
        _ if part.tries < WAITS_MAX => vec![part.again()],
        1 => {
            for pending in part.operations {
                if let Some(key) = pending.operation.lock_keys(false).next() {
                    queue_contended(aside, key, pending);
                }
            }
            vec![]
        }
        _ => part.halves(),
    }
}

/// Decides the retry of a batch that failed without a change. Returns the parts to try again; all others get `error`.
fn after_error(part: BatchPart, error: StoreError, reused: bool) -> Vec<BatchPart> {
    if error.is_cancelled() && part.operations.len() > 1 && !part.is_half {
        // One statement took too long: half of the operations may fit. A half that also fails shows that the database is too
        // slow.
        tracing::warn!(error = &error as &dyn std::error::Error, "a batch took too long; retrying its halves");
        return part.halves();
    }
    if reused && error.is_unavailable() && !error.is_cancelled() {
        // A connection that broke while idle costs one new connection; the attempt does not count.
        return vec![part];
    }
    if error.is_race() && part.tries < RETRIES_MAX {
        tracing::warn!(error = &error as &dyn std::error::Error, "another program wrote the same rows; retrying");
        return vec![part.again()];
    }
    if !error.is_unavailable() && !matches!(error, StoreError::TooOld { .. }) && part.operations.len() > 1 {
        // A failed operation must not fail the others. Single attempts identify the operation.
        tracing::warn!(error = &error as &dyn std::error::Error, "a batch failed; retrying its operations one by one");
        return part.singles();
    }
    let error = Error::from(error);
    let is_heard = part.operations.iter().any(|pending| !pending.reply.is_closed());
    // A caller logs a defect with the request that caused it. A missing primary is logged once by the store.
    let is_logged = error.is_logged() || is_heard && error.is_defect();
    if !is_logged {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            operations = part.operations.len(),
            "operations failed"
        );
    }
    answer_all(part.operations, &error);
    vec![]
}

fn answer_all(part: Vec<QueuedOperation>, error: &Error) {
    for pending in part {
        pending.reply(Err(error.clone()));
    }
}

/// Undo of a reply whose caller is gone.
enum Undo {
    /// Releases the grant.
    Release(Principal, ReleaseTicket),
    /// Removes the queue entry.
    Leave(Uuid),
}

/// Sends the replies and publishes the state of committed batches, in batch order. A task of its own does so, so that the next
/// batch does not wait for it.
#[derive(Clone)]
pub(super) struct ReplyDispatcher {
    batches: mpsc::UnboundedSender<(Vec<QueuedOperation>, CommitResult)>,
    own: Uuid,
}

impl ReplyDispatcher {
    /// Starts the task.
    pub fn start(after_commit: CommitListeners, undoing: UndoQueue, tasks: &InstanceTasks) -> Self {
        #[expect(
            clippy::disallowed_methods,
            reason = "at most one per reply of the committer, and its queue is bounded"
        )]
        let (batches, mut committed) = mpsc::unbounded_channel();
        let own = after_commit.line.instance_id();
        let responder = Responder { after_commit, undoing };
        tasks.spawn(async move {
            while let Some((part, committed)) = committed.recv().await {
                responder.respond(part, committed);
            }
        });
        Self { batches, own }
    }

    fn committed(&self, part: Vec<QueuedOperation>, committed: CommitResult) {
        // The task receives until the last sender is dropped.
        let _ = self.batches.send((part, committed));
    }
}

/// Replies to callers and notifies the other components after a commit.
struct Responder {
    after_commit: CommitListeners,
    undoing: UndoQueue,
}

impl Responder {
    fn respond(&self, part: Vec<QueuedOperation>, committed: CommitResult) {
        self.after_commit.seen.update(committed.standing);
        let answers = part.iter().zip(&committed.answers);
        let granted = answers.filter(|(_, answer)| matches!(answer, Ok(Outcome::Granted(_))));
        let granted = granted.filter_map(|(pending, _)| Some((pending.operation.position()?, pending.operation.em())));
        self.after_commit.line.committed(&committed.freed, granted, committed.others_wait);
        let counters = committed.counters.into_iter().chain(std::iter::repeat_with(|| None));
        for ((mut pending, answer), counters) in part.into_iter().zip(committed.answers).zip(counters) {
            if let (Some(tell), Some(counters)) = (pending.counters.take(), counters) {
                // A caller that is gone needs no counters.
                let _ = tell.send(counters);
            }
            let undo = match (&pending.operation, &answer) {
                (Operation::Request(request), Ok(Outcome::Granted(grant))) => {
                    self.granted(&pending.by.principal, request, grant)
                }
                (_, Ok(Outcome::Waiting(waiting))) => Some(Undo::Leave(waiting.position.ticket_id())),
                _ => None,
            };
            let delivered = pending.reply(answer.map_err(Error::from));
            match undo {
                Some(Undo::Release(by, release)) if !delivered => {
                    self.undoing.submit(by, Operation::Released(release));
                }
                // The receiver ends only at shutdown; other instances then delete the entry.
                Some(Undo::Leave(ticket_id)) if !delivered => drop(self.after_commit.abandoned.send(ticket_id)),
                _ => {}
            }
        }
    }

    /// Arms the expiry of a grant. Returns the undo of the grant for a caller that is gone; `None` if a request id lets the
    /// caller repeat the request.
    fn granted(&self, by: &Principal, request: &PlacedRequest, grant: &Grant) -> Option<Undo> {
        let ticket = grant.released(request.ask.user.clone());
        if request.ask.lock_ttl <= expiry::HORIZON {
            let due =
                DueTicket { key: None, within: request.ask.lock_ttl, late: Duration::ZERO, ticket: ticket.clone() };
            // The next sweep finds tickets that do not fit the channel. The sweep of another instance finds them at shutdown.
            let _ = self.after_commit.expiring_soon.try_send(due);
        }
        request.ask.request_id.is_none().then(|| Undo::Release(by.clone(), ticket))
    }
}
