//! Actions: what the history records about tickets, EMs, limits, providers and tokens.
//!
//! An [`ActionRecord`] is one history line. Invariant: the stored text of an action never changes, because clients and
//! earlier lines use it. Callers: the ledger and the administration services produce actions; the store writes and reads
//! them.

use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    audit::Subject,
    limit_mode::LimitMode,
    name::{Labels, Name},
    resource::Resource,
    ticket::EngineInstance,
    ticket_end::TicketEnd,
};

/// Action of a history line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// An EM registered for the first time, or again with the same amounts.
    Registered,
    /// An EM registered again with other amounts.
    Resized,
    /// A ticket was granted.
    Granted,
    /// A running engine was adopted.
    Adopted,
    /// The engine of a ticket confirmed its start.
    Inited,
    /// The engine of a ticket reported other amounts.
    Reported,
    /// A ticket ended, or an EM was removed (only [`TicketEnd::Unregistered`] and [`TicketEnd::Lost`]).
    Ended(TicketEnd),
    /// An operator removed a waiting request: the line has the ticket id that a grant would have used, and no ticket exists.
    RemovedFromQueue,
    /// A ticket was recalled: its engine is to end, because a request waits.
    Recalled,
    /// An operator withdrew the choice of a ticket for reclaim: its engine stays.
    ReclaimWithdrawn,
    /// The counters of an EM or a scope were repaired to the sums of the tickets.
    Repaired,
    /// A limit was set.
    LimitSet,
    /// A limit was deleted.
    LimitDeleted,
    /// A policy was set.
    PolicySet,
    /// The order of waiting requests was set.
    OrderSet,
    /// A priority rule was set.
    PrioritySet,
    /// A priority rule was deleted.
    PriorityDeleted,
    /// A reclaim policy was set.
    ReclaimPolicySet,
    /// A reclaim policy was deleted.
    ReclaimPolicyDeleted,
    /// All tickets of a label set are counted; its limits now decide, for the policies that enforce them.
    LimitsInForce,
    /// An EM was drained, or its drain got another reason.
    Drained,
    /// The drain of an EM ended.
    Resumed,
    /// An operator started a hold on an EM or a user.
    Held,
    /// A hold ended.
    HoldEnded,
    /// A provider was added or changed.
    ProviderPut,
    /// A provider was removed.
    ProviderDeleted,
    /// A token was created.
    TokenCreated,
    /// A token was revoked.
    TokenRevoked,
}

impl Action {
    /// All actions.
    pub const ALL: [Self; 32] = [
        Self::Registered,
        Self::Resized,
        Self::Granted,
        Self::Adopted,
        Self::Inited,
        Self::Reported,
        Self::Ended(TicketEnd::Released),
        Self::Ended(TicketEnd::Expired),
        Self::Ended(TicketEnd::Unregistered),
        Self::Ended(TicketEnd::Lost),
        Self::Ended(TicketEnd::Forced),
        Self::RemovedFromQueue,
        Self::Recalled,
        Self::ReclaimWithdrawn,
        Self::Repaired,
        Self::LimitSet,
        Self::LimitDeleted,
        Self::PolicySet,
        Self::OrderSet,
        Self::PrioritySet,
        Self::PriorityDeleted,
        Self::ReclaimPolicySet,
        Self::ReclaimPolicyDeleted,
        Self::LimitsInForce,
        Self::Drained,
        Self::Resumed,
        Self::Held,
        Self::HoldEnded,
        Self::ProviderPut,
        Self::ProviderDeleted,
        Self::TokenCreated,
        Self::TokenRevoked,
    ];

    /// Returns the value of `linkis_resource_action_record.action`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Registered => "registered",
            Self::Resized => "resized",
            Self::Granted => "granted",
            Self::Adopted => "adopted",
            Self::Inited => "inited",
            Self::Reported => "reported",
            Self::Ended(end) => end.as_str(),
            Self::RemovedFromQueue => "removed_from_queue",
            Self::Recalled => "recalled",
            Self::ReclaimWithdrawn => "reclaim_withdrawn",
            Self::Repaired => "repaired",
            Self::LimitSet => "limit_set",
            Self::LimitDeleted => "limit_deleted",
            Self::PolicySet => "policy_set",
            Self::OrderSet => "order_set",
            Self::PrioritySet => "priority_set",
            Self::PriorityDeleted => "priority_deleted",
            Self::ReclaimPolicySet => "reclaim_policy_set",
            Self::ReclaimPolicyDeleted => "reclaim_policy_deleted",
            Self::LimitsInForce => "limits_in_force",
            Self::Drained => "drained",
            Self::Resumed => "resumed",
            Self::Held => "held",
            Self::HoldEnded => "hold_ended",
            Self::ProviderPut => "provider_put",
            Self::ProviderDeleted => "provider_deleted",
            Self::TokenCreated => "token_created",
            Self::TokenRevoked => "token_revoked",
        }
    }

    /// Returns whether the action concerns one limit, or all limits of a label set.
    pub fn is_of_rules(self) -> bool {
        matches!(self, Self::LimitSet | Self::LimitDeleted | Self::LimitsInForce)
    }

    /// Parses a value from [`Action::as_str`]; `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.as_str() == text)
    }
}

/// Ticket data in a history line, besides its id and user.
#[derive(Debug, Clone, PartialEq)]
pub struct TicketDetail {
    /// Application of the user that requested the ticket.
    pub creator: String,
    /// Engine type; may be empty.
    pub engine_type: String,
    /// Labels of the request.
    pub labels: Labels,
    /// Engine that used the ticket at that moment, or until then.
    pub engine: Option<EngineInstance>,
}

/// One history line.
#[derive(Debug, Clone, PartialEq)]
pub struct ActionRecord {
    /// Line number; increases with time.
    pub number: i64,
    /// Action that the line records.
    pub action: Action,
    /// Id and user of the ticket; `None` if the action concerns another subject.
    pub ticket: Option<(Uuid, Name)>,
    /// Further data of the ticket.
    pub detail: Option<Box<TicketDetail>>,
    /// EM, scope, limit, policy or other object of the action.
    pub subject: Subject,
    /// Amounts after the action. For a ticket, its amounts, or the last ones if it ended. For an EM, its capacity. For a
    /// repair, the sums of the tickets (for a scope a Special, by dimension key). For a limit, its maximum (likewise a
    /// Special). For a label set, empty.
    pub resource: Resource,
    /// Mode of the limit. `None` in lines of earlier releases, which enforced all limits.
    pub limit_mode: Option<LimitMode>,
    /// Reason that an operator gave.
    pub reason: Option<String>,
    /// Name of the caller; the service itself for background work.
    pub actor: String,
    /// Address of the caller; only for operators and administrators.
    pub address: Option<String>,
    /// State before the action as JSON; `None` if not recorded or if the object did not exist.
    pub before: Option<String>,
    /// State after the action as JSON; `None` as for `before`.
    pub after: Option<String>,
    /// Time by the database clock.
    pub at: OffsetDateTime,
}
