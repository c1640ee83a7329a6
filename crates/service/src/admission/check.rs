//! Check: decides many requests on one plain read, without locks.
//!
//! The check uses the same assessment as the ledger, on the same rows ([`read_state`]). The result of a check also updates the
//! cache.
//!
//! Never: grants; writes.
//! Caller: `admission`, which queues the checks.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use sqlx::PgConnection;
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use crate::{
    error::Error,
    read_state::{self, QueueUse},
};
use rm_engine::observed_state::CheckState;
use rm_model::{
    em::EmInstance,
    external::place_of,
    ledger::WaitQueueView,
    limit::Limits,
    operation::{LockKey, PlacedRequest},
    scope::ScopeCounter,
};
use rm_store::{
    StoreError, em_resource, label_resource,
    limit::CurrentLimits,
    request_id::UsedIds,
    session::{self, Session, within_timeout},
};

use super::{DryRunResult, StateCache, Verdict};

/// Maximum number of checks that share one read.
const BATCH_MAX: usize = 1024;

/// Check of one request, with its reply channel.
#[derive(Debug)]
pub(super) struct CheckTask {
    pub request: PlacedRequest,
    /// Receives the head-room before the verdict, if the caller requested it.
    pub room: Option<oneshot::Sender<DryRunResult>>,
    pub reply: oneshot::Sender<Result<Verdict, Error>>,
}

/// Runs the queued checks until all senders are dropped.
pub(super) async fn run(
    mut inbox: mpsc::Receiver<CheckTask>,
    seen: StateCache,
    mut session: Session,
    fenced: Arc<AtomicBool>,
) {
    let mut looks = Vec::with_capacity(BATCH_MAX);
    let mut limits = Arc::default();
    while inbox.recv_many(&mut looks, BATCH_MAX).await > 0 {
        looks.retain(|look| !look.reply.is_closed());
        if looks.is_empty() {
            continue;
        }
        let (reused, commits) = (session.is_open(), seen.commits());
        let mut state = within_timeout(read_for(&mut session, &looks, &limits)).await;
        while state.as_ref().is_err_and(StoreError::is_lock_timeout) && looks.iter().any(|look| !look.reply.is_closed())
        {
            // A limit change is in progress; the next read waits for it again.
            fenced.store(true, Ordering::Relaxed);
            state = within_timeout(read_for(&mut session, &looks, &limits)).await;
        }
        fenced.store(false, Ordering::Relaxed);
        if reused && state.is_err() {
            // A connection that broke while idle costs one new connection.
            session.reset();
            state = within_timeout(read_for(&mut session, &looks, &limits)).await;
        }
        match state {
            Ok(state) => {
                limits = state.limits.clone();
                let answer = |look: CheckTask| {
                    if !state.ems.contains_key(&look.request.em) {
                        seen.evict(&look.request.em);
                    }
                    if let Some(room) = look.room {
                        // A caller that is gone needs no reply.
                        let _ = room.send(state.room(&look.request));
                    }
                    (state.verdict(&look.request).map_err(Error::from), look.reply)
                };
                let answers: Vec<_> = looks.drain(..).map(answer).collect();
                // The cache is updated before the replies, because callers may act on it.
                seen.update_by_check(state.into_post_commit_state(), commits);
                for (answer, reply) in answers {
                    // A caller that is gone needs no reply.
                    let _ = reply.send(answer);
                }
            }
            Err(error) => {
                session.reset();
                let error = Error::from(error);
                for look in looks.drain(..) {
                    let _ = look.reply.send(Err(error.clone()));
                }
            }
        }
    }
}

async fn read_for(session: &mut Session, looks: &[CheckTask], known: &Arc<Limits>) -> Result<CheckState, StoreError> {
    let requests: Vec<&PlacedRequest> = looks.iter().map(|look| &look.request).collect();
    read(session.get().await?, &requests, known).await
}

/// Reads the rows on which `requests` are decided. `known` are the limits of an earlier read.
pub async fn read(
    connection: &mut PgConnection,
    requests: &[&PlacedRequest],
    known: &Arc<Limits>,
) -> Result<CheckState, StoreError> {
    let instances: HashSet<&EmInstance> = requests.iter().map(|request| &request.em).collect();
    let (CurrentLimits { limits, anybody_waits, any_held, .. }, mut ems) =
        em_resource::read_in_force(&mut *connection, known, instances).await?;
    ems.retain(|_, em| em.is_registered());
    let (used, ended) = read_state::request_ids(&mut *connection, requests).await?;
    let scopes: BTreeSet<ScopeCounter> = requests.iter().flat_map(|request| request.counters(&limits)).collect();
    let scopes = match scopes.is_empty() {
        true => HashMap::new(),
        false => label_resource::read(&mut *connection, &scopes).await?,
    };
    let in_queue = requests.iter().filter(|request| place_of(request.resource()).is_some());
    let asked: Vec<_> = in_queue.map(|request| (request.resource(), &request.ask.labels)).collect();
    let now = match asked.is_empty() && !anybody_waits {
        true => None,
        false => Some(session::clock(&mut *connection).await?),
    };
    let clusters = read_state::clusters(&mut *connection, &QueueUse { asked, tickets: vec![] }, false).await?;
    let lock_keys =
        requests.iter().flat_map(|request| [LockKey::Em(request.em.clone()), LockKey::User(request.ask.user.clone())]);
    let holds = read_state::holds(&mut *connection, (any_held, None), lock_keys, &mut ems).await?;
    let queued: Vec<Uuid> = requests.iter().filter_map(|request| request.queued_ticket()).collect();
    let in_line: Vec<Uuid> = queued.iter().copied().chain(used.kept_tickets()).collect();
    let line = match anybody_waits {
        true => {
            read_state::line(&mut *connection, (requests, &in_line, &used), false, &limits, &clusters, &holds).await?
        }
        false => WaitQueueView::default(),
    };
    let removed = read_state::removed(&mut *connection, queued.into_iter(), &line.line).await?;
    let UsedIds { granted: request_ids, kept } = used;
    Ok(CheckState { ems, limits, scopes, request_ids, kept, ended, line, removed, holds, clusters, now })
}
