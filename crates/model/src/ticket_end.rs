//! Ends of tickets: the reason why a ticket ended, as history lines and metrics record it.
//!
//! The names are stored, so a name never changes its meaning. Callers: the ledger, the history and the metrics.

use std::fmt;

/// Reason why a ticket ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TicketEnd {
    /// The caller released it.
    Released,
    /// The engine did not confirm before the deadline.
    Expired,
    /// Its EM was unregistered.
    Unregistered,
    /// Its EM omitted it from too many reports, or was lost.
    Lost,
    /// An operator released it by force.
    Forced,
}

impl TicketEnd {
    /// All ends.
    pub const ALL: [Self; 5] = [Self::Released, Self::Expired, Self::Unregistered, Self::Lost, Self::Forced];

    /// Returns the value of `linkis_resource_action_record.action`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::Expired => "expired",
            Self::Unregistered => "unregistered",
            Self::Lost => "lost",
            Self::Forced => "forced",
        }
    }

    /// Parses a value from [`TicketEnd::as_str`]; `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|end| end.as_str() == text)
    }
}

impl fmt::Display for TicketEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Released => "was released",
            Self::Expired => "expired",
            Self::Unregistered => "ended when its EM was unregistered",
            Self::Lost => "ended as lost",
            Self::Forced => "was ended by an operator",
        })
    }
}
