//! Ends of tickets: the reason why a ticket ended, as history lines and metrics record it.
//!
//! The names are stored, so a name never changes its meaning. Callers: the ledger, the history and the metrics.

use std::fmt;

text_enum! {
    /// Reason why a ticket ended. The texts are values of `linkis_resource_action_record.action`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum TicketEnd {
        /// The caller released it.
        Released = "released",
        /// The engine did not confirm before the deadline.
        Expired = "expired",
        /// Its EM was unregistered.
        Unregistered = "unregistered",
        /// Its EM omitted it from too many reports, or was lost.
        Lost = "lost",
        /// An operator released it by force.
        Forced = "forced",
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
