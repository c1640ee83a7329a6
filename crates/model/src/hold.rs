//! Holds: operator locks on an EM or a user, which block all changes to it for up to ten minutes.
//!
//! A hold is a committed row in the lock table, so it does not depend on any instance. This module defines its data only.
//! Callers: the hold service, the audit and the store.

use std::{fmt, time::Duration};

use time::OffsetDateTime;

use super::{name::Name, operation::LockKey, principal::Principal};

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
