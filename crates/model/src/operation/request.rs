//! What is asked for, on which EM, and under which request id.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    cap::Cap,
    em::EmInstance,
    limit::{LimitedScope, Limits},
    line::QueuePosition,
    name::{Labels, Name},
    principal::Principal,
    resource::Resource,
    scope::{CREATOR, Counter, ENGINE_TYPE, TicketLabels, USER},
    selector::Selector,
};

use super::Grant;

/// Resources are asked for on an EM.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Where.
    pub em: EmInstance,
    /// What; each try of it shares this.
    pub ask: Arc<RequestSpec>,
    /// How it waits in line if it does not fit; `None` to be refused then.
    pub wait: Option<Wait>,
    /// The counters that it would belong to.
    pub scopes: RequestScopes,
}

impl Request {
    /// Its position in line, if it has one.
    pub fn position(&self) -> Option<QueuePosition> {
        self.wait.as_ref()?.position
    }

    /// The counters that it would belong to, in the order in which they are checked.
    pub fn scopes(&self, limits: &Limits) -> Arc<[LimitedScope]> {
        self.scopes.get(limits, &self.em, || limits.scopes_under(&self.ask.ticket_labels(&self.em), &self.ask.caps))
    }

    /// The same, without the rules that decide there.
    pub fn counters(&self, limits: &Limits) -> Vec<Counter> {
        self.scopes(limits).iter().map(|limited| limited.counter.clone()).collect()
    }
}

/// The counters that a request would belong to, worked out once: with it they go through all rooms. It is equal to any other, because
/// it says nothing that the request does not.
#[derive(Debug, Clone, Default)]
pub struct RequestScopes(Arc<OnceLock<KnownScopes>>);

#[derive(Debug)]
struct KnownScopes {
    limits: Uuid,
    em: EmInstance,
    scopes: Arc<[LimitedScope]>,
}

impl RequestScopes {
    fn get(&self, limits: &Limits, em: &EmInstance, work_out: impl Fn() -> Vec<LimitedScope>) -> Arc<[LimitedScope]> {
        let known =
            self.0.get_or_init(|| KnownScopes { limits: limits.version(), em: em.clone(), scopes: work_out().into() });
        match known.limits == limits.version() && known.em == *em {
            true => known.scopes.clone(),
            // The limits have changed since, or it tries another EM.
            false => work_out().into(),
        }
    }
}

impl PartialEq for RequestScopes {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// How a request waits in line.
#[derive(Debug, Clone, PartialEq)]
pub struct Wait {
    /// The instance of the service where its caller waits.
    pub instance_id: Uuid,
    /// For how much longer at most.
    pub remaining: Duration,
    /// Whether any EM will do: it stands at one, and may be granted on another.
    pub any_em: bool,
    /// Whether this is another EM than where it stands: if it does not fit here, it stays there.
    pub is_elsewhere: bool,
    /// Where it stands in line already.
    pub position: Option<QueuePosition>,
}

/// Resources are asked for, wherever they may be.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestSpec {
    /// Who asks.
    pub principal: Principal,
    /// The name that the ticket will have if it is granted.
    pub ticket_id: Uuid,
    /// For whom.
    pub user: Name,
    /// By which application of the user.
    pub creator: Name,
    /// The engine's type; may be empty.
    pub engine_type: String,
    /// How much.
    pub resource: Resource,
    /// Kept with the ticket, and counted: all that it carries, those that select an EM included.
    pub labels: Labels,
    /// Which EMs it may go to.
    pub selector: Selector,
    /// What it allows itself, each for other labels: part of the request, and not of its ticket.
    pub caps: Vec<Arc<Cap>>,
    /// How long the grant stays locked.
    pub lock_ttl: Duration,
    /// Makes the request repeatable.
    pub request_id: Option<RequestId>,
    /// Whether the counters are to be told with the grant.
    pub return_counters: bool,
}

impl RequestSpec {
    /// The labels that decide in which scopes it counts on `em`.
    pub fn ticket_labels<'a>(&'a self, em: &'a EmInstance) -> TicketLabels<'a> {
        let (user, creator) = (self.user.as_str(), self.creator.as_str());
        TicketLabels::new(user, creator, &self.engine_type, &self.labels, em, &self.resource)
    }

    /// The key of a request that has a request id.
    pub fn request_key(&self) -> Option<RequestKey> {
        let id = self.request_id.as_ref()?.id.clone();
        Some(RequestKey { user: self.user.clone(), id })
    }

    /// Whether it carries a label with some value.
    pub fn carries(&self, key: &str) -> bool {
        match key {
            USER | CREATOR => true,
            ENGINE_TYPE => !self.engine_type.is_empty(),
            _ => self.labels.as_map().contains_key(key),
        }
    }

    /// Whether it carries a label with this value, other than by a field of its own.
    pub fn has(&self, key: &str, value: &str) -> bool {
        self.labels.as_map().get(key).is_some_and(|ours| ours == value)
    }
}

/// The user of a request, and the user's name for it. One key gives one ticket.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestKey {
    /// User of the request.
    pub user: Name,
    /// Request id, of the user alone.
    pub id: Name,
}

/// The caller's name for a request, and what it stood for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RequestId {
    /// The caller's name for it.
    pub id: Name,
    /// SHA-256 of the request's body.
    pub body_hash: [u8; 32],
}

/// The grant under a request id of a user.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestRecord {
    /// User of the request.
    pub user: Name,
    /// The id and its body.
    pub request_id: RequestId,
    /// The grant.
    pub grant: Grant,
    /// When, by the database's clock.
    pub create_time: OffsetDateTime,
}

impl RequestRecord {
    /// The key that it is found by.
    pub fn key(&self) -> RequestKey {
        RequestKey { user: self.user.clone(), id: self.request_id.id.clone() }
    }
}
