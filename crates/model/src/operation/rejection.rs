//! Rejections: errors of operations that are not valid in the current state.
//!
//! A rejection changes nothing. Its text is the message of the error reply; the service layer maps each variant to a status
//! code.

use std::sync::Arc;

use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    em::EmInstance,
    em_drain::EmDrain,
    hold::ExistingHold,
    operation::LockKey,
    refusal::Refusal,
    report::ReportNumber,
    resource::{ResourceError, ResourceType},
    ticket::{EndedTicket, EngineInstance},
    timestamp::rfc3339,
};

/// Reason for the rejection of an operation, which changed nothing.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Rejection {
    /// The EM is not registered.
    #[error("the EM {0} is not registered; register it first, or check its application name and instance")]
    EmNotRegistered(EmInstance),
    /// No EM matches a request that names none.
    #[error(
        "there is no EM {0} that lets the request in; register one, require less, or carry the labels that others are reserved for"
    )]
    NoEmMatches(String),
    /// EMs match a request that names none, but none is available.
    #[error(
        "no EM can be chosen: {matching} match the request, but all of them are silent, unhealthy or drained; repair or resume one, or name \
         one that is not drained to use it all the same"
    )]
    NoEmAvailable {
        /// Number of matching EMs.
        matching: usize,
    },
    /// A report of an earlier registration, or a report overtaken by a later one.
    #[error("{}", stale_report(.em, *.registered, *.last))]
    StaleReport {
        /// The EM.
        em: EmInstance,
        /// Current epoch.
        registered: i64,
        /// Latest report, if any.
        last: Option<ReportNumber>,
    },
    /// A call with the epoch of an earlier registration.
    #[error(
        "the EM {em} has registered again: its epoch is {registered}, and {told} is over; whoever acts for that registration has to \
         stop, or to register again"
    )]
    StaleEpoch {
        /// The EM.
        em: EmInstance,
        /// Epoch of the call.
        told: i64,
        /// Current epoch.
        registered: i64,
    },
    /// A call with an epoch that does not exist yet.
    #[error("epoch: is higher than that of the registration, {registered}; give that one")]
    EpochAhead {
        /// Current epoch.
        registered: i64,
    },
    /// A registration with another resource type while tickets are live.
    #[error(
        "the EM {em} has live tickets counted as {current}; release them or unregister it before it registers as {wanted}, \
         or on another queue"
    )]
    EmHasTickets {
        /// The EM.
        em: EmInstance,
        /// Resource type of the counters.
        current: ResourceType,
        /// Resource type of the registration.
        wanted: ResourceType,
    },
    /// The EM lacks a required label.
    #[error("the EM {em} is not labelled {key}={value}, which the request requires; name another EM, or require less")]
    LabelRequired {
        /// The EM.
        em: EmInstance,
        /// Key of the label.
        key: String,
        /// Required value.
        value: String,
    },
    /// The EM is drained.
    #[error("{}", em_draining(.em, .drain))]
    EmDraining {
        /// The EM.
        em: EmInstance,
        /// Drain with start, actor and reason.
        drain: Arc<EmDrain>,
    },
    /// The EM is reserved for a label that the request does not carry.
    #[error("the EM {em} is reserved for {key}={value}; carry that label, or name another EM")]
    EmReserved {
        /// The EM.
        em: EmInstance,
        /// Key of the label.
        key: String,
        /// Value that the request must carry.
        value: String,
    },
    /// The policy of the EM kind requires a label that the request does not carry.
    #[error("{key}: has to be given for EMs of {}, by their policy; give it among the labels, or as the field of this name", .em.application_name)]
    LabelMissing {
        /// The EM.
        em: EmInstance,
        /// Key of the label.
        key: String,
    },
    /// The request has a cap for labels that no limit counts it by.
    #[error(
        "caps: no limit has what is on the EM {em} counted by {keys}; have it counted with SetLimit, these labels as each and mode \
         LIMIT_MODE_OFF, or leave the cap out"
    )]
    CapNotCounted {
        /// The EM.
        em: EmInstance,
        /// Label names, for display.
        keys: String,
    },
    /// The EM does not provide a requested dimension.
    #[error("{field}: the EM {em} cannot answer for it; ask only for what the EM registered")]
    Unanswerable {
        /// Field of the call.
        field: &'static str,
        /// The EM.
        em: EmInstance,
        /// Dimension or type that the EM does not provide.
        source: ResourceError,
    },
    /// The EM provides another queue or namespace.
    #[error(
        "resource: the EM {em} provides the queue or namespace {provided:?}, not {asked:?}; ask for that one, or name another EM"
    )]
    OtherQueue {
        /// The EM.
        em: EmInstance,
        /// Queue or namespace that the EM provides.
        provided: String,
        /// Requested queue or namespace.
        asked: String,
    },
    /// The reported use has another type, queue or namespace than the grant.
    #[error("used: is of another kind than what was granted; report it as the same type, on the same queue")]
    OtherUse {
        /// The difference.
        source: ResourceError,
    },
    /// The request id was used for another request.
    #[error("the request id {0:?} was used with another body; use a new id for a new request")]
    RequestIdReused(String),
    /// The ticket of the request id has ended.
    #[error("the request id {request_id:?} was granted the ticket {}, which {}; use a new id for a new request", .ended.id, ended_at(.ended))]
    TicketEnded {
        /// The request id.
        request_id: String,
        /// The ticket and its end.
        ended: Box<EndedTicket>,
    },
    /// An adoption under the id of an ended ticket.
    #[error("the ticket {} {}; give an engine that runs an id of its own", .0.id, ended_at(.0))]
    AdoptedTooLate(Box<EndedTicket>),
    /// An adoption under the id of another live ticket.
    #[error("there is a ticket {ticket_id} already, which differs in {differs}; give each engine an id of its own")]
    TicketExists {
        /// Id of the ticket.
        ticket_id: Uuid,
        /// Fields that differ.
        differs: String,
    },
    /// The request is no longer queued, because its instance was considered dead.
    #[error("the request has lost its place in line; ask again")]
    PlaceLost,
    /// The ticket is not live, or has another owner.
    #[error("{}", ticket_not_found(*.ticket_id, .ended.as_deref()))]
    TicketNotFound {
        /// Requested id.
        ticket_id: Uuid,
        /// End of the ticket, if recorded.
        ended: Option<Box<EndedTicket>>,
    },
    /// No live ticket is used by the engine.
    #[error(
        "no live ticket is used by the engine {}/{}; ask by ticket_id, or check the engine's application name and instance",
        .0.application_name, .0.instance
    )]
    NoTicketOfEngine(EngineInstance),
    /// Several live tickets are used by the engine.
    #[error("several live tickets are used by the engine {}/{}; ListTickets with this engine tells them", .0.application_name, .0.instance)]
    ManyTicketsOfEngine(EngineInstance),
    /// The ticket is confirmed by another engine.
    #[error("the ticket {ticket_id} is used by another engine, {}/{}; ask for a ticket of its own", engine.application_name, engine.instance)]
    AlreadyInited {
        /// Id of the ticket.
        ticket_id: Uuid,
        /// Engine that uses the ticket.
        engine: EngineInstance,
    },
    /// The ticket is confirmed by this engine with other amounts or another application.
    #[error(
        "the ticket {ticket_id} is in use already, with other amounts or another application than this report says; to change what it \
         uses, call ResourceReported"
    )]
    InitedOtherwise {
        /// Id of the ticket.
        ticket_id: Uuid,
    },
    /// The engine uses more than the grant, and the additional amounts do not fit.
    #[error("{}; the ticket stays locked until it expires: report less, or release it", .0.reason)]
    NotEnough(Box<Refusal>),
    /// The ticket is not confirmed.
    #[error("no engine has reported in for the ticket {ticket_id} yet; call ResourceInited first")]
    NotInited {
        /// Id of the ticket.
        ticket_id: Uuid,
    },
    /// A running engine uses more than before, and the additional amounts do not fit.
    #[error("{}; the ticket holds what it held before: use that much, or release it", .0.reason)]
    NoMore(Box<Refusal>),
    /// Another hold or transaction owns the lock key.
    #[error("{}", already_held(.key, .taken.as_deref()))]
    AlreadyHeld {
        /// The lock key.
        key: LockKey,
        /// The existing hold; `None` if its row was inserted by hand.
        taken: Option<Box<ExistingHold>>,
    },
    /// The maximum number of holds is reached.
    #[error("{most} EMs and users are held already, which is the most; release one of them first")]
    TooManyHolds {
        /// Maximum number of holds.
        most: usize,
    },
    /// No limit counts these labels.
    #[error(
        "no limit in force is for the labels {keys}, so that nothing is counted by them; SetLimit with these labels as each and mode          LIMIT_MODE_OFF has them counted, and ListLimits tells whether one is still being counted"
    )]
    ScopeNotCounted {
        /// Label names, for display.
        keys: String,
    },
    /// The limit does not exist.
    #[error("there is no limit for {0}; ListLimits tells those that there are")]
    NoSuchLimit(String),
    /// The maximum number of label sets is reached.
    #[error(
        "limits are for {most} sets of labels already, which is the most; delete all limits with one of these first"
    )]
    TooManyLabelSets {
        /// Maximum number of label sets.
        most: usize,
    },
    /// The limit differs from the precondition of the change.
    #[error("{}", limit_changed(.limit, .last.as_ref()))]
    LimitChanged {
        /// Pattern of the limit, for display.
        limit: String,
        /// Caller and time of the latest change; `None` if the limit does not exist.
        last: Option<(String, OffsetDateTime)>,
    },
    /// A counter would overflow.
    #[error("{field}: the sum of what is held would be too large to count")]
    Overflow {
        /// Field of the call.
        field: &'static str,
        /// The overflow.
        source: ResourceError,
    },
    /// The stored counters contradict each other.
    #[error("what is stored for {what} contradicts itself")]
    Inconsistent {
        /// EM or scope.
        what: String,
        /// The contradiction.
        source: ResourceError,
    },
}

/// Returns how and when a ticket ended, for display.
pub fn ended_at(ended: &EndedTicket) -> String {
    format!("{} at {}", ended.end, rfc3339(ended.at))
}

impl Rejection {
    /// Returns whether the EM of the attempt is drained.
    pub fn is_draining(&self) -> bool {
        matches!(self, Self::EmDraining { .. })
    }

    /// Returns whether the rejection concerns the EM of the attempt, so that another EM may grant the request.
    pub fn is_of_em(&self) -> bool {
        matches!(
            self,
            Self::EmNotRegistered(_)
                | Self::Unanswerable { .. }
                | Self::OtherQueue { .. }
                | Self::LabelRequired { .. }
                | Self::EmReserved { .. }
                | Self::EmDraining { .. }
                | Self::LabelMissing { .. }
                | Self::CapNotCounted { .. }
        )
    }
}

fn already_held(key: &LockKey, taken: Option<&ExistingHold>) -> String {
    match taken {
        Some(ExistingHold { reason, by, until, .. }) => {
            let until = rfc3339(*until);
            format!("{key} is held by {by} until {until} ({reason}); wait, or release that hold first")
        }
        None => {
            format!("{key} is held by somebody's hand, or another transaction; release that hold first, or try again")
        }
    }
}

fn em_draining(em: &EmInstance, drain: &EmDrain) -> String {
    let EmDrain { reason, by, since } = drain;
    let since = rfc3339(*since);
    format!(
        "the EM {em} is drained since {since} by {by} ({reason}): nothing new is granted there; name another EM, or leave the choice to the \
         service"
    )
}

fn ticket_not_found(ticket_id: Uuid, ended: Option<&EndedTicket>) -> String {
    match ended {
        Some(ended) => format!("the ticket {ticket_id} {}; an engine that needs one has to ask again", ended_at(ended)),
        None => format!(
            "there is no ticket {ticket_id}, nor is one remembered: the lock on the resource is lost, ask again"
        ),
    }
}

fn limit_changed(limit: &str, last: Option<&(String, OffsetDateTime)>) -> String {
    match last {
        Some((by, at)) => format!(
            "the limit for {limit} is not what was expected: it was last set by {by} at {}; read it again, and then change it",
            rfc3339(*at)
        ),
        None => format!("the limit for {limit} is not what was expected: it is gone; read it again, and then set it"),
    }
}

fn stale_report(em: &EmInstance, registered: i64, last: Option<ReportNumber>) -> String {
    let last = match last {
        Some(last) if last.epoch == registered => format!("has reported with sequence {} since", last.sequence),
        _ => "has not reported since".to_owned(),
    };
    format!(
        "the EM {em} registered last with epoch {registered} and {last}; report with that epoch and a higher sequence"
    )
}
