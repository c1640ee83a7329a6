//! Holds: operator locks on an EM or a user, which block all changes to it for up to ten minutes.
//!
//! A hold is a committed row, so it does not depend on any instance. The ledger applies no operation on a held EM, and none of a
//! held user. A request that may wait enters the wait queue there; other operations wait in the committer.
//! Callers: the ledger, the admission check, the hold service, the audit and the store.

use std::{collections::HashMap, fmt, time::Duration};

use time::OffsetDateTime;

use super::{
    assessment::BlockedRequest,
    em::Em,
    name::Name,
    operation::{LockKey, Operation, PlacedRequest},
    principal::Principal,
    refusal::Refusal,
    scope::{Scope, USER},
    wait_queue::WaitKey,
};

/// Maximum duration of a hold.
pub const HOLD_MAX: Duration = Duration::from_secs(600);

/// Maximum number of holds that were started by a call.
pub const HOLDS_MAX: usize = 100;

/// A hold on an EM or a user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourceHold {
    /// The EM or user.
    pub key: LockKey,
    /// How the hold was started; `None` if its row was inserted by hand.
    pub taken: Option<ExistingHold>,
}

/// Data of a hold that was started by a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExistingHold {
    /// Reason, for display.
    pub reason: Name,
    /// Caller that started the hold.
    pub by: Principal,
    /// Start, by the database clock.
    pub since: OffsetDateTime,
    /// Deadline after which the hold ends, by the database clock.
    pub until: OffsetDateTime,
}

/// Holds in effect, by EM or user.
#[derive(Debug, Clone, Default)]
pub struct Holds(HashMap<LockKey, ExistingHold>);

impl FromIterator<(LockKey, ExistingHold)> for Holds {
    fn from_iter<I: IntoIterator<Item = (LockKey, ExistingHold)>>(holds: I) -> Self {
        Self(holds.into_iter().collect())
    }
}

impl Holds {
    /// Whether no EM or user is held.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether an EM or user is held.
    pub fn contains(&self, key: &LockKey) -> bool {
        self.0.contains_key(key)
    }

    /// Returns the held EM or user of an operation, if any.
    pub fn key_of(&self, operation: &Operation) -> Option<LockKey> {
        if self.is_empty() { None } else { operation.lock_keys(true).find(|key| self.contains(key)) }
    }

    /// Returns the wait keys of a request that may wait and whose EM or user is held, with the refusal.
    pub fn block(&self, request: &PlacedRequest) -> Option<BlockedRequest> {
        if !request.ask.may_wait || self.is_empty() {
            return None;
        }
        let keys = [LockKey::Em(request.em.clone()), LockKey::User(request.ask.user.clone())];
        let (key, hold) = keys.iter().find_map(|key| self.0.get_key_value(key))?;
        let wait_keys = [(key.wait_key(), true)].into();
        Some(BlockedRequest { refusal: Refusal::of_hold(key, hold, request.resource()), wait_keys })
    }

    /// Replaces the assessment of a request that may wait and whose EM or user is held, or whose EM is closed, unless the request never
    /// fits. It waits only until the EM or user is open again, so that it keeps no capacity from others.
    ///
    /// A request for any EM is also queued where it is short, because its other EMs may be open. It stays queued at its EM, so that
    /// its class does not depend on what else is short.
    pub fn or_block<T>(
        &self,
        em: &Em,
        assessed: Result<T, Box<BlockedRequest>>,
        request: &PlacedRequest,
    ) -> Result<T, Box<BlockedRequest>> {
        let is_closed = request.ask.may_wait && (em.drain.is_some() || request.is_em_unavailable);
        let closed = || BlockedRequest {
            refusal: Refusal::of_closed_em(em, request.resource()),
            wait_keys: [(WaitKey::Em(em.instance.clone()), true)].into(),
        };
        let Some(mut held) = self.block(request).or_else(|| is_closed.then(closed)) else { return assessed };
        let any_em = request.wait.is_some() && request.any_em;
        match assessed {
            Err(short) if short.refusal.never_fits => return Err(short),
            Err(short) if any_em && held.refusal.is_of_em_alone() => {
                let here = std::mem::replace(&mut held.wait_keys, short.wait_keys);
                held.wait_keys.extend(here);
            }
            _ => {}
        }
        Err(Box::new(held))
    }
}

impl LockKey {
    /// Returns the wait key of the requests that wait for the end of a hold on this key.
    pub fn wait_key(&self) -> WaitKey {
        match self {
            Self::Em(em) => WaitKey::Em(em.clone()),
            Self::User(user) => WaitKey::Scope(Scope::new([(USER.to_owned(), user.to_string())].into())),
        }
    }
}

/// A hold to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewHold {
    /// The EM or user.
    pub key: LockKey,
    /// Duration from the start of the hold.
    pub duration: Duration,
    /// Reason, for display.
    pub reason: Name,
}

/// For display; not parsed.
impl fmt::Display for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Em(em) => write!(f, "em={em}"),
            Self::User(user) => write!(f, "user={user}"),
        }
    }
}
