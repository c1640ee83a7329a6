//! Why an operation is rejected.

use std::sync::Arc;

use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    drain::Drain,
    em::EmInstance,
    hold::TakenHold,
    operation::LockKey,
    refusal::Refusal,
    report::ReportNumber,
    resource::{ResourceError, ResourceType},
    ticket::{EndedTicket, EngineInstance},
    timestamp::rfc3339,
};

/// Why an operation could not be carried out. It has changed nothing.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Rejection {
    /// There is no such EM.
    #[error("the EM {0} is not registered; register it first, or check its application name and instance")]
    EmNotRegistered(EmInstance),
    /// No EM is what a request requires that leaves the choice to the service.
    #[error(
        "there is no EM {0} that lets the request in; register one, require less, or carry the labels that others are reserved for"
    )]
    NoEmMatches(String),
    /// EMs are what a request requires that leaves the choice to the service, but none of them can be chosen.
    #[error(
        "no EM can be chosen: {matching} match the request, but all of them are silent, unhealthy or drained; repair or resume one, or name \
         one that is not drained to use it all the same"
    )]
    NoEmAvailable {
        /// How many EMs match.
        matching: usize,
    },
    /// A report of an older registration, or one that a later report overtook.
    #[error("{}", stale_report(.em, *.registered, *.last))]
    StaleReport {
        /// Which EM.
        em: EmInstance,
        /// The epoch of its registration.
        registered: i64,
        /// Its last report, if there is one.
        last: Option<ReportNumber>,
    },
    /// The word of an older incarnation of an EM.
    #[error(
        "the EM {em} has registered again: its epoch is {registered}, and {told} is over; whoever acts for that registration has to \
         stop, or to register again"
    )]
    StaleEpoch {
        /// Which EM.
        em: EmInstance,
        /// The epoch that was told.
        told: i64,
        /// The epoch of its registration.
        registered: i64,
    },
    /// An epoch that no registration has yet.
    #[error("epoch: is higher than that of the registration, {registered}; give that one")]
    EpochAhead {
        /// The epoch of the registration.
        registered: i64,
    },
    /// A registration with another type of resource, while tickets live.
    #[error(
        "the EM {em} has live tickets counted as {current}; release them or unregister it before it registers as {wanted}, \
         or on another queue"
    )]
    EmHasTickets {
        /// Which EM.
        em: EmInstance,
        /// The type that its counters have.
        current: ResourceType,
        /// The type that the registration has.
        wanted: ResourceType,
    },
    /// The EM has not what the request requires.
    #[error("the EM {em} is not labelled {key}={value}, which the request requires; name another EM, or require less")]
    LabelRequired {
        /// Which EM.
        em: EmInstance,
        /// The label.
        key: String,
        /// The value that is required.
        value: String,
    },
    /// Nothing new is granted on the EM.
    #[error("{}", em_draining(.em, .drain))]
    EmDraining {
        /// Which EM.
        em: EmInstance,
        /// Since when, by whom and why.
        drain: Arc<Drain>,
    },
    /// The EM is reserved for others.
    #[error("the EM {em} is reserved for {key}={value}; carry that label, or name another EM")]
    EmReserved {
        /// Which EM.
        em: EmInstance,
        /// The label.
        key: String,
        /// The value that lets in.
        value: String,
    },
    /// The policy of the kind of EM wants a label that the request does not carry.
    #[error("{key}: has to be given for EMs of {}, by their policy; give it among the labels, or as the field of this name", .em.application_name)]
    LabelMissing {
        /// Which EM.
        em: EmInstance,
        /// The label.
        key: String,
    },
    /// The request has a cap for labels that it is not counted by.
    #[error(
        "caps: no limit has what is on the EM {em} counted by {keys}; have it counted with SetLimit, these labels as each and mode \
         LIMIT_MODE_OFF, or leave the cap out"
    )]
    CapNotCounted {
        /// Which EM.
        em: EmInstance,
        /// The names of the labels, for people.
        keys: String,
    },
    /// The EM does not count something that is asked for.
    #[error("{field}: the EM {em} cannot answer for it; ask only for what the EM registered")]
    Unanswerable {
        /// The field of the call.
        field: &'static str,
        /// Which EM.
        em: EmInstance,
        /// What it does not count.
        source: ResourceError,
    },
    /// The EM provides another queue or namespace than the one that is asked for.
    #[error(
        "resource: the EM {em} provides the queue or namespace {provided:?}, not {asked:?}; ask for that one, or name another EM"
    )]
    OtherQueue {
        /// Which EM.
        em: EmInstance,
        /// What it provides.
        provided: String,
        /// What is asked for.
        asked: String,
    },
    /// What the engine reports has another type than what was granted.
    #[error("used: is of another kind than what was granted; report it as the same type, on the same queue")]
    OtherUse {
        /// The difference.
        source: ResourceError,
    },
    /// The request id stands for another request.
    #[error("the request id {0:?} was used with another body; use a new id for a new request")]
    RequestIdReused(String),
    /// What was granted under the request id is over.
    #[error("the request id {request_id:?} was granted the ticket {}, which {}; use a new id for a new request", .ended.id, ended_at(.ended))]
    TicketEnded {
        /// The caller's name for the request.
        request_id: String,
        /// The ticket, and how it ended.
        ended: Box<EndedTicket>,
    },
    /// An engine is put into the books under a ticket that is over.
    #[error("the ticket {} {}; give an engine that runs an id of its own", .0.id, ended_at(.0))]
    AdoptedTooLate(Box<EndedTicket>),
    /// An engine is put into the books under a ticket that is another's.
    #[error("there is a ticket {ticket_id} already, which differs in {differs}; give each engine an id of its own")]
    TicketExists {
        /// Which ticket.
        ticket_id: Uuid,
        /// In what.
        differs: String,
    },
    /// A request that stood in line does so no more: its instance was thought dead.
    #[error("the request has lost its place in line; ask again")]
    PlaceLost,
    /// There is no such live ticket.
    #[error("{}", ticket_not_found(*.ticket_id, .ended.as_deref()))]
    TicketNotFound {
        /// What was asked for.
        ticket_id: Uuid,
        /// How it ended, if that is known.
        ended: Option<Box<EndedTicket>>,
    },
    /// No live ticket is used by an engine.
    #[error(
        "no live ticket is used by the engine {}/{}; ask by ticket_id, or check the engine's application name and instance",
        .0.application_name, .0.instance
    )]
    NoTicketOfEngine(EngineInstance),
    /// Several are.
    #[error("several live tickets are used by the engine {}/{}; ListTickets with this engine tells them", .0.application_name, .0.instance)]
    ManyTicketsOfEngine(EngineInstance),
    /// Another engine has reported in for the ticket.
    #[error("the ticket {ticket_id} is used by another engine, {}/{}; ask for a ticket of its own", engine.application_name, engine.instance)]
    AlreadyInited {
        /// Which ticket.
        ticket_id: Uuid,
        /// The engine that has it.
        engine: EngineInstance,
    },
    /// Its engine has reported in for the ticket, and said something else.
    #[error(
        "the ticket {ticket_id} is in use already, with other amounts or another application than this report says; to change what it \
         uses, call ResourceReported"
    )]
    InitedOtherwise {
        /// Which ticket.
        ticket_id: Uuid,
    },
    /// The engine uses more than was granted, and the extra does not fit.
    #[error("{}; the ticket stays locked until it expires: report less, or release it", .0.reason)]
    NotEnough(Box<Refusal>),
    /// No engine has reported in for the ticket.
    #[error("no engine has reported in for the ticket {ticket_id} yet; call ResourceInited first")]
    NotInited {
        /// Which ticket.
        ticket_id: Uuid,
    },
    /// An engine that runs uses more than before, and the extra does not fit.
    #[error("{}; the ticket holds what it held before: use that much, or release it", .0.reason)]
    NoMore(Box<Refusal>),
    /// Somebody else holds what is to be held.
    #[error("{}", already_held(.key, .taken.as_deref()))]
    AlreadyHeld {
        /// What.
        key: LockKey,
        /// Who holds it and until when; `None` if it was put into the table by hand.
        taken: Option<Box<TakenHold>>,
    },
    /// More would be held than operators may hold at a time.
    #[error("{most} EMs and users are held already, which is the most; release one of them first")]
    TooManyHolds {
        /// How many may be.
        most: usize,
    },
    /// Nothing is counted by these labels.
    #[error(
        "no limit in force is for the labels {keys}, so that nothing is counted by them; SetLimit with these labels as each and mode          LIMIT_MODE_OFF has them counted, and ListLimits tells whether one is still being counted"
    )]
    ScopeNotCounted {
        /// Their names, for people.
        keys: String,
    },
    /// There is no such rule.
    #[error("there is no limit for {0}; ListLimits tells those that there are")]
    NoSuchLimit(String),
    /// More sets of labels would have limits than every ticket is to be counted by.
    #[error(
        "limits are for {most} sets of labels already, which is the most; delete all limits with one of these first"
    )]
    TooManyLabelSets {
        /// How many may have limits.
        most: usize,
    },
    /// A rule is not what its caller expected to change.
    #[error("{}", limit_changed(.limit, .last.as_ref()))]
    LimitChanged {
        /// Its pattern, for people.
        limit: String,
        /// Who set it last, and when; `None` if it is gone.
        last: Option<(String, OffsetDateTime)>,
    },
    /// An amount that cannot be added to the counters.
    #[error("{field}: the sum of what is held would be too large to count")]
    Overflow {
        /// The field of the call.
        field: &'static str,
        /// Which.
        source: ResourceError,
    },
    /// What is stored contradicts itself.
    #[error("what is stored for {what} contradicts itself")]
    Inconsistent {
        /// Which EM or scope.
        what: String,
        /// How.
        source: ResourceError,
    },
}

/// How and when a ticket ended, for people.
pub fn ended_at(ended: &EndedTicket) -> String {
    format!("{} at {}", ended.end, rfc3339(ended.at))
}

impl Rejection {
    /// Whether nothing new is granted on the EM that was tried.
    pub fn is_draining(&self) -> bool {
        matches!(self, Self::EmDraining { .. })
    }

    /// Whether it is about the EM that was tried, so that another may do.
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

fn already_held(key: &LockKey, taken: Option<&TakenHold>) -> String {
    match taken {
        Some(TakenHold { reason, by, until, .. }) => {
            let until = rfc3339(*until);
            format!("{key} is held by {by} until {until} ({reason}); wait, or release that hold first")
        }
        None => {
            format!("{key} is held by somebody's hand, or another transaction; release that hold first, or try again")
        }
    }
}

fn em_draining(em: &EmInstance, drain: &Drain) -> String {
    let Drain { reason, by, since } = drain;
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
