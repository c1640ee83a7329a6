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

use time::OffsetDateTime;
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use crate::{
    error::Error,
    read_state::{self, QueueUse},
};
use rm_model::{
    assessment::{self, BlockedRequest, assess},
    em::{Em, EmInstance},
    external::{Clusters, place_of},
    hold::Holds,
    ledger::{PostCommitState, WaitQueueView},
    limit::Limits,
    operation::{LockKey, PlacedRequest, Rejection, RequestKey, RequestRecord},
    scope::{ScopeCounter, ScopeHoldings},
    ticket::EndedTicket,
};
use rm_store::{
    StoreError, em_resource, label_resource,
    limit::CurrentLimits,
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
        let mut state = within_timeout(read(&mut session, &looks, &limits)).await;
        while state.as_ref().is_err_and(StoreError::is_lock_timeout) && looks.iter().any(|look| !look.reply.is_closed())
        {
            // A limit change is in progress; the next read waits for it again.
            fenced.store(true, Ordering::Relaxed);
            state = within_timeout(read(&mut session, &looks, &limits)).await;
        }
        fenced.store(false, Ordering::Relaxed);
        if reused && state.is_err() {
            // A connection that broke while idle costs one new connection.
            session.reset();
            state = within_timeout(read(&mut session, &looks, &limits)).await;
        }
        match state {
            Ok(state) => {
                limits = state.limits.clone();
                let answer = |look: CheckTask| {
                    if !state.ems.contains_key(&look.request.em) {
                        seen.forget(&look.request.em);
                    }
                    if let Some(room) = look.room {
                        // A caller that is gone needs no reply.
                        let _ = room.send(state.room(&look.request));
                    }
                    (state.verdict(&look.request).map_err(Error::from), look.reply)
                };
                let answers: Vec<_> = looks.drain(..).map(answer).collect();
                // The cache is updated before the replies, because callers may act on it.
                seen.update_by_look(state.into_post_commit_state(), commits);
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

/// Rows on which requests are decided, as read by a check or as cached.
#[derive(Debug, Default)]
pub(super) struct CheckState {
    pub ems: HashMap<EmInstance, Em>,
    /// Limits; in the cache, those of the last commit or check.
    pub limits: Arc<Limits>,
    pub scopes: HashMap<ScopeCounter, ScopeHoldings>,
    pub request_ids: HashMap<RequestKey, RequestRecord>,
    /// Ended tickets that were granted under these request ids.
    pub ended: HashMap<Uuid, EndedTicket>,
    pub line: WaitQueueView,
    /// Holds on the EMs and users; empty in the cache.
    pub holds: Holds,
    /// Clusters of the requested external queues; empty in the cache.
    pub clusters: Clusters,
    /// Database time of the read, if external queues were read.
    pub now: Option<OffsetDateTime>,
}

impl CheckState {
    /// Whether the request fits by this state. State that is missing counts as not fitting.
    pub fn fits(&self, request: &PlacedRequest) -> bool {
        if request.ask.request_key().is_some_and(|key| self.request_ids.contains_key(&key)) {
            return true;
        }
        self.ems.get(&request.em).filter(|em| assessment::check_em(em, &self.limits, &request.ask).is_ok()).is_some_and(
            |em| {
                let scopes = request.scopes(&self.limits);
                assessment::fits(em, &scopes, |scope| self.scopes.get(scope), &self.line.line, &request.ask)
            },
        )
    }

    /// Decides the request by this state.
    ///
    /// # Errors
    /// The rejection that the ledger would return.
    pub fn verdict(&self, request: &PlacedRequest) -> Result<Verdict, Rejection> {
        if let (Some(asked), Some(key)) = (&request.ask.request_id, request.ask.request_key())
            && let Some(record) = self.request_ids.get(&key)
        {
            let (request_id, ended) = (asked.id.to_string(), self.ended.get(&record.grant.ticket_id));
            return match ended.cloned().map(Box::new) {
                _ if record.request_id != *asked => Err(Rejection::RequestIdReused(request_id)),
                Some(ended) => Err(Rejection::TicketEnded { request_id, ended }),
                None => Ok(Verdict::Fits),
            };
        }
        let em = self.ems.get(&request.em).ok_or_else(|| Rejection::EmNotRegistered(request.em.clone()))?;
        let position = request.position();
        if position.is_some_and(|position| !self.line.line.has(position)) {
            return Err(Rejection::PlaceLost);
        }
        assessment::check_em(em, &self.limits, &request.ask)?;
        let assessed = self.assess(em, request)?;
        Ok(match self.holds.or_block(assessed, request, &self.line.line) {
            Ok(()) => Verdict::Fits,
            Err(mut short) => {
                if let Some(position) = position {
                    short.wait_keys = self.line.line.keys_for(position, &short.wait_keys);
                }
                Verdict::Refused(short)
            }
        })
    }

    /// Assesses a request on its EM, in its scopes and in its external queue.
    fn assess(&self, em: &Em, request: &PlacedRequest) -> Result<Result<(), Box<BlockedRequest>>, Rejection> {
        let scopes = request.scopes(&self.limits);
        let usage = |counter: &ScopeCounter| self.scopes.get(counter);
        let assessed = assess(em, &scopes, usage, &self.line.line, request.position(), &request.ask)?;
        Ok(match self.now {
            Some(now) => self.clusters.judge(assessed, request, &self.limits, &self.line.line, now).map(|_| ()),
            None => assessed.map(|_| ()),
        })
    }

    /// Returns the head-room and the exceeded advisory limits; empty if the verdict explains the rejection.
    pub fn room(&self, request: &PlacedRequest) -> DryRunResult {
        let Some(em) = self.ems.get(&request.em) else { return DryRunResult::default() };
        let (scopes, resource) = (request.scopes(&self.limits), &request.ask.resource);
        let usage = |counter: &ScopeCounter| self.scopes.get(counter);
        DryRunResult {
            head_room: assessment::head_room(em, &scopes, usage, &self.line.line).unwrap_or_default(),
            advisory_violations: assessment::advisory_violations(&scopes, usage, &resource.zero_like(), resource),
        }
    }

    /// Converts the state for the cache.
    pub fn into_post_commit_state(self) -> PostCommitState {
        let (ems, scopes) = (self.ems.into_values().collect(), self.scopes.into_iter().collect());
        PostCommitState { ems, gone: vec![], scopes, limits: self.limits, line: self.line }
    }
}

async fn read(session: &mut Session, looks: &[CheckTask], known: &Arc<Limits>) -> Result<CheckState, StoreError> {
    let connection = session.get().await?;
    let instances: HashSet<&EmInstance> = looks.iter().map(|look| &look.request.em).collect();
    let (CurrentLimits { limits, anybody_waits, any_held, .. }, mut ems) =
        em_resource::read_in_force(&mut *connection, known, instances).await?;
    ems.retain(|_, em| em.is_registered());
    let requests: Vec<&PlacedRequest> = looks.iter().map(|look| &look.request).collect();
    let (request_ids, ended) = read_state::request_ids(&mut *connection, &requests).await?;
    let scopes: BTreeSet<ScopeCounter> = requests.iter().flat_map(|request| request.counters(&limits)).collect();
    let scopes = match scopes.is_empty() {
        true => HashMap::new(),
        false => label_resource::read(&mut *connection, &scopes).await?,
    };
    let in_queue = requests.iter().filter(|request| place_of(&request.ask.resource).is_some());
    let asked: Vec<_> = in_queue.map(|request| (&request.ask.resource, &request.ask.labels)).collect();
    let now = match asked.is_empty() {
        true => None,
        false => Some(session::clock(&mut *connection).await?),
    };
    let clusters = read_state::clusters(&mut *connection, &QueueUse { asked, tickets: vec![] }, false).await?;
    let lock_keys =
        requests.iter().flat_map(|request| [LockKey::Em(request.em.clone()), LockKey::User(request.ask.user.clone())]);
    let holds = read_state::holds(&mut *connection, (any_held, None), lock_keys, &mut ems).await?;
    let line = match anybody_waits {
        true => read_state::line(&mut *connection, &requests, &limits, &clusters, &holds).await?,
        false => WaitQueueView::default(),
    };
    Ok(CheckState { ems, limits, scopes, request_ids, ended, line, holds, clusters, now })
}
