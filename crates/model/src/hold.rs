//! Holds: EMs and users about which nobody changes anything for a while, because an operator wants so.

use std::{fmt, time::Duration};

use time::OffsetDateTime;

use super::{name::Name, operation::LockKey, principal::Principal};

/// The longest that a hold lasts.
pub const HOLD_MAX: Duration = Duration::from_secs(600);

/// How many holds there may be that somebody took by a call.
pub const HOLDS_MAX: usize = 100;

/// Something that is held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hold {
    /// What.
    pub key: LockKey,
    /// How it was taken; `None` if somebody put it into the table by hand.
    pub taken: Option<TakenHold>,
}

/// How a hold was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakenHold {
    /// Why, for people.
    pub reason: Name,
    /// Who holds.
    pub by: Principal,
    /// Since when, by the database's clock.
    pub since: OffsetDateTime,
    /// When it ends by itself, by the same clock.
    pub until: OffsetDateTime,
}

/// What an operator wants to hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewHold {
    /// What.
    pub key: LockKey,
    /// For how long, from when it is taken.
    pub duration: Duration,
    /// Why, for people.
    pub reason: Name,
}

/// For people: not to be taken apart again.
impl fmt::Display for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Em(em) => write!(f, "em={em}"),
            Self::User(user) => write!(f, "user={user}"),
        }
    }
}
