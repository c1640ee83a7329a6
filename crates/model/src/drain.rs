//! Drains: EMs on which nothing new is granted, because an operator wants them empty. What lives there stays.

use time::OffsetDateTime;

use super::{name::Name, principal::Principal};

/// That an EM is drained. It outlives the EM's registrations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drain {
    /// Why, for people.
    pub reason: Name,
    /// Who drained it, or gave the reason last.
    pub by: Principal,
    /// Since when, by the database's clock.
    pub since: OffsetDateTime,
}
