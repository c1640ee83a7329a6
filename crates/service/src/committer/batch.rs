//! Batch: one transaction that locks, reads, decides, writes, unlocks and commits for many operations.
//!
//! The ledger decides each operation on one snapshot. The snapshot is read after the locks, so it includes all earlier commits
//! on the lock keys. Invariants 4 and 7 of ARCHITECTURE.md depend on this order.
//!
//! Never: retries; the worker decides from the [`BatchError`] what to do.
//! Caller: `worker`.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::read_state::{self, QueueUse};
use rm_model::{
    counters::Counters,
    em::{Em, EmInstance},
    external::place_of,
    ledger::{Deltas, Ledger, LedgerSnapshot, PostCommitState, WaitQueueView},
    limit::Limits,
    operation::{KeptPosition, LockKey, Operation, Outcome, PlacedRequest, Rejection, RequestKey, StepCursor},
    principal::Actor,
    scope::{Scope, ScopeCounter},
    ticket::Ticket,
    ticket_end::TicketEnd,
    wait_queue::{FreedKeys, OwnedPosition, RerankedRequest},
};
use rm_store::{
    StoreError, action_record, batch_write, em_drain, em_observed, em_report, em_resource, label_resource,
    limit::{self, CurrentLimits},
    request_id, resource_lock,
    session::{Session, within_timeout},
    user_resource::{self, EmTicketsQuery},
    waiting::{self, FreedNotification},
};
use rm_telemetry::cause;
use rm_telemetry::{
    metrics::{Metrics, TimerGuard},
    traces,
};

use super::{
    counters::{self, ScopeVersions},
    evidence::Evidence,
};

/// Result of a committed batch.
#[derive(Debug)]
pub(super) struct CommitResult {
    /// One result per operation, in their order.
    pub answers: Vec<Result<Outcome, Rejection>>,
    /// Counters for the operations that requested them, in the order of the operations; empty if none did.
    pub counters: Vec<Option<Box<Counters>>>,
    /// State of the EMs and scopes that the batch read or wrote.
    pub standing: PostCommitState,
    /// Wait keys at which the batch freed capacity.
    pub freed: FreedKeys,
    /// Positions whose calls end.
    pub ended_waits: Vec<OwnedPosition>,
    /// Waiting requests with new positions.
    pub reranked: Vec<RerankedRequest>,
    /// Whether requests may wait on other instances.
    pub others_wait: bool,
    /// Number of operations that exceeded an advisory limit.
    pub advisory_violations: u64,
    /// How each ended ticket ended.
    pub ended: Vec<TicketEnd>,
}

/// Returns the waiting requests whose positions a batch changed at time `now`.
fn reranked(deltas: &Deltas, now: OffsetDateTime) -> impl Iterator<Item = RerankedRequest> {
    deltas.woken.values().map(move |position| RerankedRequest { position: *position, decided_at: Some(now) })
}

/// Reason why a batch was not committed.
#[derive(Debug)]
pub(super) enum BatchError {
    /// Another transaction or a committed row of another program owns some of its lock keys.
    Contended,
    /// A limit change is in progress.
    Fenced,
    /// The limits have changed and require other locks.
    OtherLimits(Arc<Limits>),
    /// The store failed; nothing was committed.
    Store(StoreError),
    /// The connection broke during the commit. Only the evidence shows whether the commit took effect.
    Unknown {
        transaction_id: String,
        /// Rows that prove the commit.
        evidence: Evidence,
        /// Result if the commit took effect.
        committed: Box<CommitResult>,
    },
}

impl From<StoreError> for BatchError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<sqlx::Error> for BatchError {
    fn from(error: sqlx::Error) -> Self {
        StoreError::from(error).into()
    }
}

/// Operation with its actor.
#[derive(Debug, Clone, Copy)]
pub(super) struct BatchItem<'a> {
    pub by: &'a Actor,
    pub operation: &'a Operation,
    /// Whether the caller requested the counters after the operation.
    pub counters: bool,
}

/// Returns all lock keys of a batch under `limits`, in lock order.
pub(super) fn lock_keys<'a>(operations: impl IntoIterator<Item = &'a Operation>, limits: &Limits) -> BTreeSet<LockKey> {
    let locks_users = limits.locks_users();
    operations.into_iter().flat_map(|operation| operation.lock_keys(locks_users)).collect()
}

/// Applies `operations` in order and commits them in one transaction.
///
/// `limits` are the last known limits; the batch reads the current ones. Waiting requests of the instance `own` are woken after
/// the commit by the worker; other instances are notified in the transaction.
///
/// # Errors
/// [`BatchError`]. The caller must then roll the session's transaction back or close its connection.
pub(super) async fn run(
    session: &mut Session,
    operations: &[BatchItem<'_>],
    limits: &Arc<Limits>,
    own: Uuid,
    metrics: &Metrics,
    trace: &traces::BatchTrace,
) -> Result<CommitResult, BatchError> {
    metrics.committer.batch_operations.observe(operations.len() as f64);
    let _batch = TimerGuard::in_histogram(&metrics.committer.batch);
    let connection = within_timeout(session.begin()).await?;
    let prepared = within_timeout(prepare(connection, operations, limits, own, metrics, trace)).await?;
    let Some((transaction_id, evidence)) = prepared.to_commit else {
        within_timeout(session.roll_back()).await?;
        return Ok(prepared.committed);
    };
    let committing = (TimerGuard::in_histogram(&metrics.committer.commit), trace.step("commit"));
    let ended = within_timeout(session.commit()).await;
    drop(committing);
    match ended {
        Ok(()) => Ok(prepared.committed),
        // The server reports the failed commit, so its outcome is known, unless the server is shutting down.
        Err(StoreError::Database(sqlx::Error::Database(error))) if !StoreError::is_going_down(&*error) => {
            Err(StoreError::from(sqlx::Error::Database(error)).into())
        }
        Err(error) => {
            let error = cause(&error);
            tracing::warn!(error, transaction_id, "the connection broke while committing");
            Err(BatchError::Unknown { transaction_id, evidence, committed: Box::new(prepared.committed) })
        }
    }
}

/// Transaction that is ready to commit.
struct PreparedBatch {
    /// Transaction id and evidence; `None` if the transaction has no writes.
    to_commit: Option<(String, Evidence)>,
    /// Result after the commit.
    committed: CommitResult,
}

/// Locks, reads, decides, writes and unlocks, in one transaction that is not yet committed.
async fn prepare(
    connection: &mut PgConnection,
    wanted: &[BatchItem<'_>],
    limits: &Arc<Limits>,
    own: Uuid,
    metrics: &Metrics,
    trace: &traces::BatchTrace,
) -> Result<PreparedBatch, BatchError> {
    let operations: Vec<&Operation> = wanted.iter().map(|wanted| wanted.operation).collect();
    let keys = lock_keys(operations.iter().copied(), limits);
    let waiting = (TimerGuard::in_histogram(&metrics.committer.lock_wait), trace.step("lock"));
    let taken = resource_lock::lock(&mut *connection, &keys).await;
    drop(waiting);
    let locks = match taken {
        Ok(Some(locks)) => locks,
        Ok(None) => return Err(BatchError::Contended),
        Err(error) if error.is_lock_timeout() => return Err(BatchError::Contended),
        Err(error) => return Err(error.into()),
    };
    let (now, transaction_id) = (locks.now, locks.transaction_id.clone());
    let reading = trace.step("read");
    // Separate statements: each sees all commits before it, and so all commits before the locks were acquired.
    let instances: HashSet<&EmInstance> = operations.iter().map(|operation| operation.em()).collect();
    let (in_force, ems) = match em_resource::read_in_force(&mut *connection, limits, instances).await {
        Ok(read) => read,
        Err(error) if error.is_lock_timeout() => return Err(BatchError::Fenced),
        Err(error) => return Err(error.into()),
    };
    limit::check_writer(in_force.oldest_writer)?;
    if in_force.limits.locks_users() && !limits.locks_users() {
        return Err(BatchError::OtherLimits(in_force.limits));
    }
    let tells_counters = wanted.iter().any(|wanted| wanted.counters);
    let (snapshot, versions) = read(&mut *connection, &operations, in_force, ems, (now, tells_counters)).await?;
    drop(reading);
    let mut ledger = Ledger::new(snapshot);
    let answers: Vec<_> = wanted.iter().map(|wanted| ledger.apply(wanted.by, wanted.operation)).collect();
    let (deltas, standing) = ledger.finish();
    let counters = counters::requested_counters(wanted, &answers, &deltas, &standing, &versions);
    if deltas.is_empty() {
        let committed = CommitResult {
            answers,
            counters,
            standing,
            freed: FreedKeys::default(),
            ended_waits: vec![],
            reranked: vec![],
            others_wait: true,
            advisory_violations: 0,
            ended: vec![],
        };
        return Ok(PreparedBatch { to_commit: None, committed });
    }
    let _writing = trace.step("write");
    write(&mut *connection, &deltas).await?;
    let written = batch_write::write(&mut *connection, &deltas, now, Some(locks), Some(own)).await?;
    let (others_wait, evidence) = (written.others_wait, Evidence::of(&deltas, written.first_line, now));
    if others_wait && !(deltas.freed.is_empty() && deltas.ended_waits.is_empty() && deltas.woken.is_empty()) {
        let ended = FreedNotification::ended(&deltas.ended_waits).into_iter();
        let reranked = FreedNotification::reranked(reranked(&deltas, now));
        let parts = ended.chain(reranked).chain(FreedNotification::at(&deltas.freed));
        let parts: Vec<FreedNotification> = parts.map(|part| part.from(own)).collect();
        waiting::notify(&mut *connection, &parts).await?;
    }
    let ended = deltas.ended.iter().map(|ended| ended.end).collect();
    let reranked = reranked(&deltas, now).collect();
    let Deltas { freed, ended_waits, advisory_violations, .. } = deltas;
    let committed = CommitResult {
        answers,
        counters,
        standing,
        freed,
        ended_waits,
        reranked,
        others_wait,
        advisory_violations,
        ended,
    };
    Ok(PreparedBatch { to_commit: Some((transaction_id, evidence)), committed })
}

/// Reads all other rows that `operations` touch, and locks the rows of their scopes. Returns the versions of the scopes if a
/// caller requested counters.
async fn read(
    connection: &mut PgConnection,
    operations: &[&Operation],
    in_force: CurrentLimits,
    mut ems: HashMap<EmInstance, Em>,
    (now, tells_counters): (OffsetDateTime, bool),
) -> Result<(LedgerSnapshot, ScopeVersions), StoreError> {
    let limits = in_force.limits;
    let mut ticket_ids: Vec<_> = operations.iter().filter_map(|operation| operation.ticket_id()).collect();
    let (mut tickets, mut ended) = (HashMap::new(), HashMap::new());
    if !ticket_ids.is_empty() {
        tickets = user_resource::read(&mut *connection, &ticket_ids).await?;
        ticket_ids.retain(|id| !tickets.contains_key(id));
        if !ticket_ids.is_empty() {
            ended = action_record::read(&mut *connection, &ticket_ids).await?;
        }
    }
    let adopting = operations.iter().filter_map(|operation| operation.adopts()).map(|op| op.ticket_id);
    let again: Vec<_> = adopting.filter(|id| tickets.contains_key(id)).collect();
    let adopted =
        if again.is_empty() { HashMap::new() } else { action_record::adopted(&mut *connection, &again).await? };
    let mut pages = HashMap::new();
    let steps = steps(operations, &ems);
    if !steps.is_empty() {
        let (read, of_pages) = user_resource::read_pages(&mut *connection, &steps).await?;
        pages = read;
        tickets.extend(of_pages);
    }
    let silent: HashSet<_> = operations.iter().filter_map(|operation| operation.reaps()).collect();
    let reports = if silent.is_empty() { HashMap::new() } else { em_report::lock(&mut *connection, silent).await? };
    let registering: HashSet<_> = operations.iter().filter_map(|operation| operation.registers()).collect();
    let inhabited = match registering.is_empty() {
        true => HashSet::new(),
        false => user_resource::inhabited(&mut *connection, registering).await?,
    };
    let drained: Vec<_> = operations.iter().filter_map(|operation| operation.needs_drain()).collect();
    let drains = if drained.is_empty() { HashMap::new() } else { em_drain::read(&mut *connection, drained).await? };
    let requests: Vec<&PlacedRequest> = operations.iter().filter_map(|operation| operation.request()).collect();
    let (used, over) = read_state::request_ids(&mut *connection, &requests).await?;
    ended.extend(over);
    let scopes = scopes(&limits, operations, tickets.values());
    let mut versions = ScopeVersions::new();
    let wanted = tells_counters.then_some(&mut versions);
    let scopes = match scopes.is_empty() {
        true => HashMap::new(),
        false => label_resource::lock(&mut *connection, &scopes, wanted).await?,
    };
    let clusters = read_state::clusters(&mut *connection, &queue_use(operations, &tickets), true).await?;
    let lock_keys = operations.iter().flat_map(|operation| operation.lock_keys(true));
    let holds = read_state::holds(&mut *connection, (in_force.any_held, Some(now)), lock_keys, &mut ems).await?;
    let queued: Vec<Uuid> = requests.iter().filter_map(|request| request.queued_ticket()).collect();
    let removing: Vec<Uuid> = operations.iter().filter_map(|operation| operation.removes()).collect();
    let in_line: Vec<Uuid> = queued.iter().chain(&removing).copied().chain(used.kept_tickets()).collect();
    let waiting = match !removing.is_empty() || requests.iter().any(|request| takes_over(request, &used.kept)) {
        // All rows that the batch may write, in one order. Without the lock of its EM, the entry of another call could move.
        true => waiting::lock(&mut *connection, &in_line).await?,
        false => HashMap::new(),
    };
    let queued_reads = (&requests[..], &in_line[..], &used);
    let line = match in_force.anybody_waits || !in_line.is_empty() {
        true => read_state::line(&mut *connection, queued_reads, true, &limits, &clusters, &holds).await?,
        false => WaitQueueView::default(),
    };
    let removed = read_state::removed(&mut *connection, queued.into_iter().chain(removing), &line.line).await?;
    let snapshot = LedgerSnapshot {
        waiting_counts: waiting_counts(connection, &requests, &limits).await?,
        now,
        ems,
        tickets,
        pages,
        ended,
        inhabited,
        reports,
        drains,
        holds,
        adopted,
        request_ids: used.granted,
        limits,
        scopes,
        line,
        kept: used.kept,
        waiting,
        removed,
        clusters,
    };
    Ok((snapshot, versions))
}

/// Whether a request takes over a position of another call.
fn takes_over(request: &PlacedRequest, kept: &HashMap<RequestKey, KeptPosition>) -> bool {
    let kept = request.ask.request_key().and_then(|key| kept.get(&key));
    kept.is_some_and(|kept| kept.claim != request.claim())
}

/// Returns the number of waiting requests of each scope that limits them and in which one of `requests` may enter the queue. Usually
/// there is none.
async fn waiting_counts(
    connection: &mut PgConnection,
    requests: &[&PlacedRequest],
    limits: &Limits,
) -> Result<HashMap<Scope, i64>, StoreError> {
    let entering = requests.iter().filter(|request| request.wait.is_some() && request.position().is_none());
    let scopes: BTreeSet<Scope> = entering.flat_map(|request| request.waiting_scopes(limits)).collect();
    if scopes.is_empty() { Ok(HashMap::new()) } else { waiting::counts(connection, scopes).await }
}

/// Returns the page of tickets that each EM's step processes: one page per EM, for the first operation that needs one.
fn steps<'a>(operations: &[&'a Operation], ems: &HashMap<EmInstance, Em>) -> Vec<EmTicketsQuery<'a>> {
    let mut seen = HashSet::new();
    let step = |operation: &&'a Operation| {
        let (from, instance) = (operation.steps_from()?, operation.em());
        let em = ems.get(instance)?;
        let (after, epoch_max) = match from {
            StepCursor::First => (Uuid::nil(), None),
            StepCursor::Ended => {
                em.going.map(|going| (going.after, Some(going.epoch).filter(|_| em.is_registered())))?
            }
            StepCursor::Counted => (em.counted.under_way.map_or(Uuid::nil(), |(_, after)| after), None),
        };
        Some(EmTicketsQuery { em: instance, after, limit: operation.tickets_max(), epoch_max })
    };
    operations.iter().filter_map(step).filter(|page| seen.insert(page.em)).collect()
}

/// Returns the use of external queues by `operations`; usually empty.
fn queue_use<'a>(operations: &[&'a Operation], tickets: &HashMap<Uuid, Ticket>) -> QueueUse<'a> {
    let told: HashMap<Uuid, &str> =
        operations.iter().filter_map(|operation| Some((operation.ticket_id()?, operation.application_id()?))).collect();
    let in_queue = tickets.values().filter(|ticket| place_of(ticket.resource()).is_some());
    QueueUse {
        asked: operations.iter().filter_map(|operation| operation.asks_queue()).collect(),
        tickets: in_queue.map(|ticket| (ticket.id, told.get(&ticket.id).copied())).collect(),
    }
}

/// Returns the counters of all scopes of live, requested and adopted tickets.
fn scopes<'a>(
    limits: &Limits,
    operations: &[&Operation],
    tickets: impl Iterator<Item = &'a Ticket>,
) -> BTreeSet<ScopeCounter> {
    if limits.is_empty() {
        return BTreeSet::new();
    }
    let requests = operations.iter().filter_map(|operation| operation.request());
    let asked = requests.flat_map(|request| request.counters(limits));
    let held = tickets.flat_map(|ticket| limits.scopes(&ticket.ticket_labels())).map(|limited| limited.counter);
    let adopted = operations.iter().filter_map(|operation| operation.adopts());
    let adopted = adopted.flat_map(|op| limits.scopes(&op.ticket_labels())).map(|limited| limited.counter);
    asked.chain(held).chain(adopted).collect()
}

/// Writes the deltas that only some batches have. [`batch_write::write`] writes all others.
async fn write(connection: &mut PgConnection, deltas: &Deltas) -> Result<(), StoreError> {
    if !deltas.ems_updated.is_empty() {
        em_resource::update(connection, &deltas.ems_updated).await?;
    }
    if !deltas.ems_resized.is_empty() {
        em_resource::update(connection, &deltas.ems_resized).await?;
    }
    if !deltas.ems_stepped.is_empty() {
        em_resource::update(connection, &deltas.ems_stepped).await?;
    }
    if !deltas.ems_inserted.is_empty() {
        em_resource::insert(connection, &deltas.ems_inserted).await?;
    }
    if !deltas.ems_deleted.is_empty() {
        em_resource::delete(connection, &deltas.ems_deleted).await?;
    }
    if !deltas.reports_ended.is_empty() {
        em_report::delete(connection, &deltas.reports_ended).await?;
        em_observed::delete(connection, &deltas.reports_ended).await?;
    }
    if !deltas.drains.is_empty() {
        em_drain::write(connection, &deltas.drains).await?;
    }
    // A call that takes a position over replaces the row.
    if !deltas.left_line.is_empty() {
        waiting::delete(connection, &deltas.left_line).await?;
    }
    if !deltas.request_ids.is_empty() {
        request_id::insert(connection, &deltas.request_ids).await?;
    }
    if !deltas.waiting.is_empty() {
        waiting::insert(connection, &deltas.waiting).await?;
    }
    if !deltas.moved.is_empty() {
        waiting::update(connection, &deltas.moved).await?;
    }
    if !deltas.reranked.is_empty() {
        waiting::rerank(connection, &deltas.reranked).await?;
    }
    if !deltas.turns_used.is_empty() {
        waiting::use_turns(connection, &deltas.turns_used).await?;
    }
    Ok(())
}
