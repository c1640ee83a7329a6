//! Worker: applies batches on one connection, handles the failures of their transactions, and replies.
//!
//! `rm_engine::batch_policy` decides whether a failed batch is retried, split, or failed. Operations with a contended key are returned to the caller of
//! [`Worker::commit`]. An interrupted commit is resolved by the evidence that the batch left.
//!
//! Never: replies before the commit; retries a batch whose commit may have taken effect, unless its repetition is safe.
//! Callers: the committer's run loop and the contended-key queues.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter, mem,
    sync::Arc,
    time::Duration,
};

use tokio::{sync::mpsc, time::Instant};
use uuid::Uuid;

use crate::{background::expiry, error::Error, tasks::InstanceTasks};
use rm_engine::batch_policy::{BatchFailure, BatchPart, Retry};
use rm_model::{
    limit::Limits,
    name::Name,
    operation::{Grant, LockKey, Operation, Outcome, PlacedRequest},
    ticket_end::TicketEnd,
};
use rm_store::{
    StoreError, limit, resource_lock,
    session::{Session, durable, within_timeout},
    user_resource::DueTicket,
    waiting::Departure,
};
use rm_telemetry::{metrics::Metrics, traces};

use super::{
    CommitListeners, GrantUndo, QueuedOperation, UndoQueue,
    batch::{self, BatchError, CommitResult},
    evidence::Evidence,
};

/// Operations by a contended lock key of theirs.
pub(super) type ContendedOperations = BTreeMap<LockKey, Vec<QueuedOperation>>;

/// Operations that share one attempt.
type QueuedPart = BatchPart<QueuedOperation>;

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
        let (mut parts, mut lock_waits) = (vec![BatchPart::new(batch)], 0);
        while let Some(mut part) = parts.pop() {
            begin(&mut part);
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
            let (failure, error) = match ended {
                Ok(committed) => {
                    self.committed(part.operations, committed, &mut aside);
                    continue;
                }
                Err(BatchError::Unknown { transaction_id, evidence, committed }) => {
                    match self.was_committed(&transaction_id, &evidence).await {
                        Some(true) => {
                            self.committed(part.operations, *committed, &mut aside);
                            continue;
                        }
                        Some(false) => (BatchFailure::NotCommitted, None),
                        None => {
                            self.answers.unknown(part.operations);
                            continue;
                        }
                    }
                }
                Err(BatchError::Contended) => {
                    pause(&part, false);
                    match self.split(&mut part, &mut aside).await {
                        Ok(()) => (BatchFailure::KeysRemoved, None),
                        Err(error) => {
                            self.session.reset();
                            answer_all(part.operations, &error.into());
                            continue;
                        }
                    }
                }
                Err(BatchError::Fenced) => (BatchFailure::LimitsLocked, None),
                Err(BatchError::OtherLimits(limits)) => {
                    self.limits = limits;
                    (BatchFailure::LimitsChanged, None)
                }
                Err(BatchError::Store(error)) => {
                    self.metrics.database.failed(error.failure());
                    match error.is_lock_timeout() {
                        // The next attempt must not wait for the locks of this one.
                        true => {
                            lock_waits += 1;
                            self.session.idle().await;
                        }
                        false => self.session.reset_after(&error),
                    }
                    (failure_of(&error, reused), Some(error))
                }
            };
            pause(&part, failure.is_contention());
            let retry = part.after(failure, lock_waits);
            if let Some(error) = &error {
                log_retry(&part, failure, retry, error);
            }
            follow(retry, part, error, &mut parts, &mut aside);
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

    /// Sends the replies of a batch. Moves the operations on held EMs and users to `aside`.
    fn committed(&self, mut part: Vec<QueuedOperation>, mut committed: CommitResult, aside: &mut ContendedOperations) {
        if committed.answers.iter().any(|answer| matches!(answer, Ok(Outcome::Held(_)))) {
            let answers = part.into_iter().zip(mem::take(&mut committed.answers));
            let counters = mem::take(&mut committed.counters).into_iter().chain(iter::repeat_with(|| None));
            part = Vec::new();
            for ((pending, answer), counters) in answers.zip(counters) {
                match answer {
                    Ok(Outcome::Held(key)) => queue_contended(aside, key, pending),
                    answer => {
                        part.push(pending);
                        committed.answers.push(answer);
                        committed.counters.push(counters);
                    }
                }
            }
        }
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

    /// Moves the operations with a contended key from `part` to `aside`.
    async fn split(&mut self, part: &mut QueuedPart, aside: &mut ContendedOperations) -> Result<(), StoreError> {
        let contended = self.contended(part).await?;
        for pending in std::mem::take(&mut part.operations) {
            match pending.operation.lock_keys(true).find(|key| contended.contains(key)) {
                Some(key) => queue_contended(aside, key, pending),
                None => part.operations.push(pending),
            }
        }
        Ok(())
    }

    /// Returns the contended keys of a part.
    async fn contended(&mut self, part: &QueuedPart) -> Result<BTreeSet<LockKey>, StoreError> {
        if self.limits.locks_users() {
            self.locks_users().await?;
        }
        let keys = batch::lock_keys(part.operations.iter().map(|pending| &pending.operation), &self.limits);
        within_timeout(resource_lock::contended(self.session.get().await?, &keys)).await
    }
}

fn queue_contended(aside: &mut ContendedOperations, key: LockKey, mut pending: QueuedOperation) {
    pending.requeue();
    aside.entry(key).or_default().push(pending);
}

/// Returns what an error of the store means for a batch; `reused` states whether its connection had been used before.
fn failure_of(error: &StoreError, reused: bool) -> BatchFailure {
    match error {
        error if error.is_lock_timeout() => BatchFailure::RowsLocked,
        error if error.is_cancelled() => BatchFailure::TooLong,
        // A connection that broke while idle costs one new connection.
        error if error.is_unavailable() && reused => BatchFailure::ConnectionLost,
        error if error.is_unavailable() || matches!(error, StoreError::TooOld { .. }) => BatchFailure::Unavailable,
        error if error.is_race() => BatchFailure::Race,
        _ => BatchFailure::Defect,
    }
}

/// Carries out what follows from a failed attempt: adds parts to try again, sets operations aside, or fails them.
fn follow(
    retry: Retry,
    part: QueuedPart,
    error: Option<StoreError>,
    parts: &mut Vec<QueuedPart>,
    aside: &mut ContendedOperations,
) {
    match retry {
        Retry::Again => parts.push(part),
        // The last part is tried first.
        Retry::Halves => parts.extend(part.halves().into_iter().rev()),
        Retry::Singles => parts.extend(part.singles().into_iter().rev()),
        Retry::WaitForKeys => wait_for_keys(part, parts, aside),
        Retry::Fail => match error.map(Error::from) {
            Some(error) => fail(part, &error),
            None => answer_all(part.operations, &Error::lost_connection()),
        },
    }
}

/// Sets the operations of a part aside, and those of `parts` that need the same row: at the same EM, those of the same user, whose scope may
/// be locked, or of all users once those of two wait there.
fn wait_for_keys(part: QueuedPart, parts: &mut [QueuedPart], aside: &mut ContendedOperations) {
    for pending in part.operations {
        match pending.operation.lock_keys(false).next() {
            Some(key) => queue_contended(aside, key, pending),
            // A removal: another transaction has its row, or that of an operation beside it, for long.
            None => drop(pending.reply(Err(Error::LockTimeout))),
        }
    }
    let users: BTreeMap<LockKey, BTreeSet<Option<Name>>> = aside
        .iter()
        .map(|(key, waiting)| (key.clone(), waiting.iter().map(|pending| pending.operation.user().cloned()).collect()))
        .collect();
    let is_locked = |key: &LockKey, operation: &Operation| {
        users.get(key).is_some_and(|users| users.len() > 1 || users.contains(&operation.user().cloned()))
    };
    // The last part is the next one.
    for other in parts.iter_mut().rev() {
        for pending in mem::take(&mut other.operations) {
            match pending.operation.lock_keys(false).next().filter(|key| is_locked(key, &pending.operation)) {
                Some(key) => queue_contended(aside, key, pending),
                None => other.operations.push(pending),
            }
        }
    }
}

/// Fails the operations of a part with an error of the store.
fn fail(part: QueuedPart, error: &Error) {
    let is_heard = part.operations.iter().any(|pending| !pending.reply.is_closed());
    // A caller logs a defect with the request that caused it. A missing primary is logged once by the store.
    let is_logged = error.is_logged() || is_heard && error.is_defect();
    if !is_logged {
        let operations = part.operations.len();
        tracing::error!(error = error as &dyn std::error::Error, operations, "operations failed");
    }
    answer_all(part.operations, error);
}

fn log_retry(part: &QueuedPart, failure: BatchFailure, retry: Retry, error: &StoreError) {
    let what = match (retry, failure) {
        (Retry::Fail, _) | (_, BatchFailure::ConnectionLost) => return,
        (_, BatchFailure::RowsLocked) => "another program locks rows without their resource lock",
        (Retry::Again, _) => "another program wrote the same rows; retrying",
        (Retry::Halves, _) => "a batch took too long; retrying its halves",
        (Retry::Singles | Retry::WaitForKeys, _) => "a batch failed; retrying its operations one by one",
    };
    tracing::warn!(error = error as &dyn std::error::Error, operations = part.operations.len(), "{what}");
}

/// Marks the operations of a part as running. Fails overdue operations and drops those whose callers are gone.
fn begin(part: &mut QueuedPart) {
    let now = Instant::now();
    for pending in mem::take(&mut part.operations) {
        if pending.patience.until <= now && !pending.reply.is_closed() {
            let error = pending.progress.timeout();
            pending.reply(Err(error));
        } else if pending.begin() {
            part.operations.push(pending);
        }
    }
}

/// Marks the operations of a part as waiting after an attempt without effect. An operation whose deadline passes before the next attempt
/// fails at once.
fn pause(part: &QueuedPart, is_contended: bool) {
    part.operations.iter().for_each(|pending| pending.progress.pause(is_contended));
}

fn answer_all(part: Vec<QueuedOperation>, error: &Error) {
    for pending in part {
        pending.reply(Err(error.clone()));
    }
}

/// Undo of a reply whose caller is gone.
enum Undo {
    /// Releases the grant.
    Release(GrantUndo),
    /// Removes the queue entry.
    Leave(Departure),
}

/// Sends the replies and publishes the state of committed batches, in batch order. A task of its own does so, so that the next
/// batch does not wait for it.
#[derive(Clone)]
pub(super) struct ReplyDispatcher {
    batches: mpsc::UnboundedSender<(Vec<QueuedOperation>, CommitResult)>,
    abandoned: mpsc::UnboundedSender<Departure>,
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
        let (own, abandoned) = (after_commit.line.instance_id(), after_commit.abandoned.clone());
        let responder = Responder { after_commit, undoing };
        tasks.spawn(async move {
            while let Some((part, committed)) = committed.recv().await {
                responder.respond(part, committed);
            }
        });
        Self { batches, abandoned, own }
    }

    /// Replies that the result of the commit is unknown. An entry that the batch may have made leaves the queue if its caller is
    /// gone; a caller that is there removes it itself.
    fn unknown(&self, part: Vec<QueuedOperation>) {
        for pending in part {
            let departure = pending.operation.request().and_then(departed);
            if !pending.reply(Err(Error::CommitUnknown))
                && let Some(departure) = departure
            {
                // The receiver ends only at shutdown; other instances then delete the entry.
                let _ = self.abandoned.send(departure);
            }
        }
    }

    fn committed(&self, part: Vec<QueuedOperation>, committed: CommitResult) {
        // The task receives until the last sender is dropped.
        let _ = self.batches.send((part, committed));
    }
}

/// Returns the end of a waiting call whose caller was gone when the reply came. The caller counts as absent, because the reason is
/// unknown here.
fn departed(request: &PlacedRequest) -> Option<Departure> {
    request.claim().map(|claim| Departure { claim, is_absent: true })
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
        let granted =
            granted.filter_map(|(pending, _)| Some((pending.operation.queued_ticket()?, pending.operation.em())));
        self.after_commit.line.end_calls(&committed.ended_waits);
        self.after_commit.line.rerank(committed.reranked);
        self.after_commit.line.committed(&committed.freed, granted, committed.others_wait);
        let counters = committed.counters.into_iter().chain(std::iter::repeat_with(|| None));
        for ((mut pending, answer), counters) in part.into_iter().zip(committed.answers).zip(counters) {
            if let (Some(tell), Some(counters)) = (pending.counters.take(), counters) {
                // A caller that is gone needs no counters.
                let _ = tell.send(counters);
            }
            let undo = match (&pending.operation, &answer) {
                (Operation::Request(request), Ok(Outcome::Granted(grant))) => {
                    self.arm_expiry(request, grant);
                    GrantUndo::of(&pending.by.principal, &pending.operation).map(Undo::Release)
                }
                (Operation::Request(request), Ok(Outcome::Waiting(_))) => departed(request).map(Undo::Leave),
                _ => None,
            };
            let delivered = pending.reply(answer.map_err(Error::from));
            match undo {
                Some(Undo::Release(undo)) if !delivered => self.undoing.submit(undo),
                // The receiver ends only at shutdown; other instances then delete the entry.
                Some(Undo::Leave(departure)) if !delivered => drop(self.after_commit.abandoned.send(departure)),
                _ => {}
            }
        }
    }

    /// Arms the expiry of a grant.
    fn arm_expiry(&self, request: &PlacedRequest, grant: &Grant) {
        if request.ask.lock_ttl <= expiry::HORIZON {
            let ticket = grant.released(request.ask.user.clone());
            let due = DueTicket { key: None, within: request.ask.lock_ttl, late: Duration::ZERO, ticket };
            // The next sweep finds tickets that do not fit the channel. The sweep of another instance finds them at shutdown.
            let _ = self.after_commit.expiring_soon.try_send(due);
        }
    }
}
