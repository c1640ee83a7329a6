//! Counters of an EM and its scopes right after a commit. Callers: the committer, which attaches them to a reply for callers that
//! request them, and the converters of messages.

use super::{em::Em, limit::ScopeUsage};

/// Counters that one operation changed.
#[derive(Debug, Clone, PartialEq)]
pub struct Counters {
    /// The EM with its new row version; `None` if it is no longer registered.
    pub em: Option<Em>,
    /// Scopes that count the ticket, or counted it until now, in label sets that decide.
    pub scopes: Vec<ScopeUsage>,
}
