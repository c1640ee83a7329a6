//! The history: what was done to tickets and EMs.

use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    audit::Subject,
    end::End,
    limit_mode::LimitMode,
    name::{Labels, Name},
    resource::Resource,
    ticket::EngineInstance,
};

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// An EM registered, for the first time or again with the same amounts.
    Registered,
    /// An EM registered again with other amounts.
    Resized,
    /// A ticket was granted.
    Granted,
    /// An engine that runs was put into the books.
    Adopted,
    /// Its engine reported in.
    Inited,
    /// Its engine reported to use something else.
    Reported,
    /// It ended; or an EM went (then [`End::Unregistered`] or [`End::Lost`]).
    Ended(End),
    /// The counters of an EM or a scope were brought in line with the tickets.
    Repaired,
    /// A rule was set.
    LimitSet,
    /// A rule was deleted.
    LimitDeleted,
    /// A kind of EMs got a policy.
    PolicySet,
    /// The tickets of a label set were all counted: from here on its rules decide, for the kinds of EMs whose policies say so now.
    LimitsInForce,
    /// An EM was drained, or another reason was given for it.
    Drained,
    /// An EM grants again.
    Resumed,
    /// An operator holds an EM or a user.
    Held,
    /// A hold came to its end.
    HoldEnded,
    /// A provider was added, or changed.
    ProviderPut,
    /// A provider was removed.
    ProviderDeleted,
    /// A token was made.
    TokenCreated,
    /// A token was revoked.
    TokenRevoked,
}

impl Action {
    const ALL: [Self; 24] = [
        Self::Registered,
        Self::Resized,
        Self::Granted,
        Self::Adopted,
        Self::Inited,
        Self::Reported,
        Self::Ended(End::Released),
        Self::Ended(End::Expired),
        Self::Ended(End::Unregistered),
        Self::Ended(End::Lost),
        Self::Ended(End::Forced),
        Self::Repaired,
        Self::LimitSet,
        Self::LimitDeleted,
        Self::PolicySet,
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

    /// As it stands in `linkis_resource_action_record.action`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Registered => "registered",
            Self::Resized => "resized",
            Self::Granted => "granted",
            Self::Adopted => "adopted",
            Self::Inited => "inited",
            Self::Reported => "reported",
            Self::Ended(end) => end.as_str(),
            Self::Repaired => "repaired",
            Self::LimitSet => "limit_set",
            Self::LimitDeleted => "limit_deleted",
            Self::PolicySet => "policy_set",
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

    /// Whether it is done to a rule, or to all rules of a label set.
    pub fn is_of_rules(self) -> bool {
        matches!(self, Self::LimitSet | Self::LimitDeleted | Self::LimitsInForce)
    }

    /// The reverse of [`Action::as_str`].
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.as_str() == text)
    }
}

/// What a line of the history says of its ticket besides.
#[derive(Debug, Clone, PartialEq)]
pub struct TicketDetail {
    /// By which application of its user it was asked for.
    pub creator: String,
    /// The engine's type; may be empty.
    pub engine_type: String,
    /// What the request carried.
    pub labels: Labels,
    /// The engine that uses it then, or used it until then.
    pub engine: Option<EngineInstance>,
}

/// One line of the history.
#[derive(Debug, Clone, PartialEq)]
pub struct ActionRecord {
    /// Its number: it grows with time.
    pub number: i64,
    /// What was done.
    pub action: Action,
    /// To which ticket, and whose that is; `None` if it was done to the EM or the scope.
    pub ticket: Option<(Uuid, Name)>,
    /// What else is known of that ticket.
    pub detail: Option<Box<TicketDetail>>,
    /// On which EM; repairs are also of scopes, and rules and policies are subjects themselves.
    pub subject: Subject,
    /// What the ticket held after it, or when it ended; of an EM, what it provides. After a repair, what the tickets hold together:
    /// of a scope as a Special, by the keys of dimensions. Of a rule its maximum, likewise; of a label set nothing.
    pub resource: Resource,
    /// Of a rule, what it does; unknown of what an earlier release did, which enforced all.
    pub limit_mode: Option<LimitMode>,
    /// Why, if an operator gave a reason.
    pub reason: Option<String>,
    /// Who did it: the service itself where nobody asked.
    pub actor: String,
    /// From where, of what operators and administrators did.
    pub address: Option<String>,
    /// How what it was done to stood before, as JSON, if that is remembered and it was there.
    pub before: Option<String>,
    /// How it stood after, likewise.
    pub after: Option<String>,
    /// When, by the database's clock.
    pub at: OffsetDateTime,
}
