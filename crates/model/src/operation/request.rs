//! Requests: the spec, the EM of one attempt, the waiting parameters and the request id.
//!
//! One spec is shared by all attempts and wake-ups of a request. Each attempt names one EM, because the committer locks
//! EMs.
//! Callers: the request service, the committer and the ledger.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
    time::Duration,
};

use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    cap::Cap,
    em::EmInstance,
    limit::{LimitedScope, Limits},
    name::{Labels, Name},
    principal::Principal,
    resource::Resource,
    scope::{CREATOR, ENGINE_TYPE, Scope, ScopeCounter, TicketLabels, USER},
    selector::EmSelector,
    wait_queue::{QueuePosition, WaitQueues},
};

use super::{Grant, Rejection};

/// Operation that requests resources on one EM.
#[derive(Debug, Clone, PartialEq)]
pub struct PlacedRequest {
    /// EM of this attempt.
    pub em: EmInstance,
    /// Spec, shared by all attempts.
    pub ask: Arc<RequestSpec>,
    /// Waiting parameters if the request does not fit; `None` to refuse it.
    pub wait: Option<WaitParameters>,
    /// Whether the request names no EM.
    pub any_em: bool,
    /// Whether the request names no EM, and this one is unhealthy or silent by the cluster view: it waits here, and is not granted.
    pub is_em_unavailable: bool,
    /// Cached counters of the request.
    pub scopes: RequestScopes,
}

impl PlacedRequest {
    /// Creates an attempt on `em` that does not wait; `any_em` if the request names none.
    pub fn new(em: EmInstance, ask: &Arc<RequestSpec>, any_em: bool) -> Self {
        let (ask, scopes) = (ask.clone(), RequestScopes::default());
        Self { em, ask, wait: None, any_em, is_em_unavailable: false, scopes }
    }

    /// Returns the queue position that the request had last, if it has an entry.
    pub fn position(&self) -> Option<QueuePosition> {
        self.wait.as_ref()?.position
    }

    /// Returns the priority at which the request has waited already, in seconds.
    pub fn kept_priority(&self) -> Option<i16> {
        self.wait.as_ref()?.priority
    }

    /// Returns the ticket id, if the request has a queue entry.
    pub fn queued_ticket(&self) -> Option<Uuid> {
        self.position().map(|_| self.ask.ticket_id)
    }

    /// Returns the position of the request in `queues`, if it has a queue entry. `kept` is the stored position of its request id;
    /// `removed` has the reasons of the removals.
    ///
    /// # Errors
    /// - [`Rejection::RequestIdReused`] if the waiting request with this id differs.
    /// - [`Rejection::PositionTakenOver`] if another call owns the position.
    /// - [`Rejection::RemovedFromQueue`] or [`Rejection::PlaceLost`] if no queue contains the request any more.
    pub fn stored_position(
        &self,
        queues: &WaitQueues,
        kept: Option<&KeptPosition>,
        removed: &HashMap<Uuid, Name>,
    ) -> Result<Option<QueuePosition>, Rejection> {
        if let (Some(kept), Some(request_id)) = (kept, &self.ask.request_id)
            && kept.body_hash != request_id.body_hash
        {
            return Err(Rejection::RequestIdReused(request_id.id.to_string()));
        }
        let Some(ticket_id) = self.queued_ticket() else { return Ok(None) };
        match kept.map(|kept| kept.claim) {
            Some(Some(claim)) if Some(claim) != self.claim() => return Err(Rejection::PositionTakenOver),
            // The instance missed its renewals, and the caller counted as absent.
            Some(None) => return Err(Rejection::PlaceLost),
            _ => {}
        }
        match (queues.position_of(ticket_id), removed.get(&ticket_id)) {
            (None, Some(reason)) => Err(Rejection::RemovedFromQueue { ticket_id, reason: reason.clone() }),
            (None, None) => Err(Rejection::PlaceLost),
            (position, _) => Ok(position),
        }
    }

    /// Returns the request under another ticket id.
    pub fn with_ticket(&self, ticket_id: Uuid) -> Self {
        let ask = RequestSpec { ticket_id, ..RequestSpec::clone(&self.ask) };
        Self { ask: Arc::new(ask), ..self.clone() }
    }

    /// Returns the requested amounts.
    pub fn resource(&self) -> &Resource {
        &self.ask.resource
    }

    /// Returns the claim of the call; `None` if the request does not wait.
    pub fn claim(&self) -> Option<Uuid> {
        self.wait.as_ref().map(|wait| wait.claim)
    }

    /// Returns the counters of the request with their rules, in check order.
    pub fn scopes(&self, limits: &Limits) -> Arc<[LimitedScope]> {
        self.scopes.get(limits, &self.em, || limits.scopes_under(&self.ask.ticket_labels(&self.em), &self.ask.caps))
    }

    /// Returns the scopes of the request where a limit counts waiting requests.
    pub fn waiting_scopes(&self, limits: &Limits) -> Vec<Scope> {
        let scopes = self.scopes(limits);
        let limited = scopes.iter().filter(|limited| limited.waiting_max().is_some());
        limited.map(|limited| limited.scope().clone()).collect()
    }

    /// Returns the counters of the request without their rules.
    pub fn counters(&self, limits: &Limits) -> Vec<ScopeCounter> {
        self.scopes(limits).iter().map(|limited| limited.counter.clone()).collect()
    }
}

/// Counters of a request, computed once and passed along with it. All values compare as equal, because they follow from the
/// request.
#[derive(Debug, Clone, Default)]
pub struct RequestScopes(Arc<OnceLock<CachedScopes>>);

#[derive(Debug)]
struct CachedScopes {
    limits: Uuid,
    em: EmInstance,
    scopes: Arc<[LimitedScope]>,
}

impl RequestScopes {
    fn get(&self, limits: &Limits, em: &EmInstance, work_out: impl Fn() -> Vec<LimitedScope>) -> Arc<[LimitedScope]> {
        let known =
            self.0.get_or_init(|| CachedScopes { limits: limits.version(), em: em.clone(), scopes: work_out().into() });
        match known.limits == limits.version() && known.em == *em {
            true => known.scopes.clone(),
            // Other limits or another EM: the cached scopes do not apply.
            false => work_out().into(),
        }
    }
}

impl PartialEq for RequestScopes {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// Position in the wait queue that belongs to a request id.
#[derive(Debug, Clone, PartialEq)]
pub struct KeptPosition {
    /// SHA-256 of the request body.
    pub body_hash: [u8; 32],
    /// Call that owns the position; `None` while its caller is absent.
    pub claim: Option<Uuid>,
    /// The position; it contains the id of the ticket that a grant creates.
    pub position: QueuePosition,
}

/// Waiting parameters of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct WaitParameters {
    /// Identifies the call. A statement of a call changes only a position that the call owns.
    pub claim: Uuid,
    /// Instance where the caller waits.
    pub instance_id: Uuid,
    /// Remaining time to wait, at the submission. A wait for a contended key makes the stored deadline as much later; the call ends at
    /// its own.
    pub remaining: Duration,
    /// Whether this attempt is on another EM than the queued one. If it does not fit, the queue entries remain.
    pub is_elsewhere: bool,
    /// Priority of the first queue entry, in seconds: the request keeps it if it enters anew. `None` before that entry.
    pub priority: Option<i16>,
    /// Last known queue position, if the request has an entry. The stored one decides.
    pub position: Option<QueuePosition>,
}

/// Content of a request, without an EM.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestSpec {
    /// Principal of the caller.
    pub principal: Principal,
    /// Id of the ticket that a grant creates.
    pub ticket_id: Uuid,
    /// User of the request.
    pub user: Name,
    /// Application of the user.
    pub creator: Name,
    /// Engine type; may be empty.
    pub engine_type: String,
    /// Requested amounts.
    pub resource: Resource,
    /// All labels of the request, including those that select an EM. The ticket stores them, and scopes count by them.
    pub labels: Labels,
    /// Conditions on the EM.
    pub selector: EmSelector,
    /// Caps of the request, each for another label set; not part of the ticket.
    pub caps: Vec<Arc<Cap>>,
    /// Time until the ticket expires without a confirmation.
    pub lock_ttl: Duration,
    /// Request id, which makes the request repeatable.
    pub request_id: Option<RequestId>,
    /// Whether the grant returns the counters.
    pub return_counters: bool,
    /// Head start in the wait queues, in seconds; 0 for the default of its labels.
    pub priority: i16,
    /// Whether the request waits in a queue if it cannot be granted now.
    pub may_wait: bool,
}

impl RequestSpec {
    /// Returns the labels that determine the scopes of the request on `em`.
    pub fn ticket_labels<'a>(&'a self, em: &'a EmInstance) -> TicketLabels<'a> {
        let (user, creator) = (self.user.as_str(), self.creator.as_str());
        TicketLabels::new(user, creator, &self.engine_type, &self.labels, em, &self.resource)
    }

    /// Returns the key of the request id, if the request has one.
    pub fn request_key(&self) -> Option<RequestKey> {
        let id = self.request_id.as_ref()?.id.clone();
        Some(RequestKey { user: self.user.clone(), id })
    }

    /// Returns whether the request carries a label with any value, in a field or in its labels.
    pub fn carries(&self, key: &str) -> bool {
        match key {
            USER | CREATOR => true,
            ENGINE_TYPE => !self.engine_type.is_empty(),
            _ => self.labels.as_map().contains_key(key),
        }
    }

    /// Returns whether the labels contain this value; the fields are not compared.
    pub fn has(&self, key: &str, value: &str) -> bool {
        self.labels.as_map().get(key).is_some_and(|ours| ours == value)
    }
}

/// User and request id. One key gives one ticket.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestKey {
    /// User of the request.
    pub user: Name,
    /// Request id; unique per user.
    pub id: Name,
}

/// A request id with the content that it was used for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RequestId {
    /// The id that the caller chose.
    pub id: Name,
    /// SHA-256 of the request body.
    pub body_hash: [u8; 32],
}

/// The grant that a user's request id created.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestRecord {
    /// User of the request.
    pub user: Name,
    /// The request id.
    pub request_id: RequestId,
    /// The grant.
    pub grant: Grant,
    /// Time of the grant, by the database clock.
    pub create_time: OffsetDateTime,
}

impl RequestRecord {
    /// Returns the lookup key.
    pub fn key(&self) -> RequestKey {
        RequestKey { user: self.user.clone(), id: self.request_id.id.clone() }
    }
}
