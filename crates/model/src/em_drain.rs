//! Drain of an EM: the EM accepts no new grants, and its live tickets continue.
//!
//! The ledger starts and ends drains; placement and the assessment read them. A drain outlives the registrations of its EM.

use time::OffsetDateTime;

use super::{name::Name, principal::Principal};

/// A drain. It outlives the registrations of the EM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmDrain {
    /// Reason, for display.
    pub reason: Name,
    /// Caller that started the drain or gave its latest reason.
    pub by: Principal,
    /// Start of the drain, by the database clock.
    pub since: OffsetDateTime,
}
