//! Rejections: errors of operations that are not valid in the current state.
//!
//! A rejection changes nothing. Its text is the message of the error reply; `rm_edge::status` maps each variant to a status
//! code. Callers: the ledger and the services create rejections.

use std::sync::Arc;

use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    em::EmInstance,
    em_drain::EmDrain,
    hold::ExistingHold,
    name::Name,
    operation::LockKey,
    refusal::Refusal,
    report::ReportNumber,
    resource::{ResourceError, ResourceType},
    scope::Scope,
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
        "no registered EM matches {0}; register a matching EM, remove required labels, or add the reserved labels of \
            an EM"
    )]
    NoEmMatches(String),
    /// EMs match a request that names none, but none is available.
    #[error(
        "no EM is available: {matching} match, but all are silent, unhealthy or drained; repair or resume one, or \
            name an EM that is not drained"
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
        "the EM {em} has registered again: its epoch is {registered}, and {epoch} has ended; stop the earlier \
            process, or register again"
    )]
    StaleEpoch {
        /// The EM.
        em: EmInstance,
        /// Epoch of the call.
        epoch: i64,
        /// Current epoch.
        registered: i64,
    },
    /// A call with an epoch that does not exist yet.
    #[error("epoch: is higher than the epoch of the registration, {registered}; give that epoch")]
    EpochAhead {
        /// Current epoch.
        registered: i64,
    },
    /// A registration with another resource type while tickets are live.
    #[error(
        "the EM {em} has live tickets counted as {current}; release them or unregister the EM before it registers as \
            {wanted}, or with another queue"
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
    #[error("the EM {em} lacks the required label {key}={value}; name another EM, or remove the required label")]
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
    #[error("the EM {em} is reserved for {key}={value}; add that label to the request, or name another EM")]
    EmReserved {
        /// The EM.
        em: EmInstance,
        /// Key of the label.
        key: String,
        /// Value that the request must carry.
        value: String,
    },
    /// The request names a higher priority than its labels may have.
    #[error("{}", priority_above_max(*.requested, *.max, .rule.as_deref()))]
    PriorityAboveMax {
        /// Priority of the request, in seconds.
        requested: i16,
        /// Maximum, in seconds.
        max: i16,
        /// Rule with the maximum; `None` if no rule matches.
        rule: Option<String>,
    },
    /// A new priority rule beside the largest allowed number.
    #[error("there are {most} priority rules already; delete one, or let one rule with fewer labels serve several")]
    TooManyPriorities {
        /// Maximum number of rules.
        most: usize,
    },
    /// The priority rule does not exist.
    #[error("there is no priority rule {0}; ListPriorities returns all rules")]
    NoSuchPriority(String),
    /// A new reclaim policy beside the largest allowed number.
    #[error("there are {most} reclaim policies already; delete one, or let one policy with fewer labels serve several")]
    TooManyReclaimPolicies {
        /// Maximum number of policies.
        most: usize,
    },
    /// The reclaim policy does not exist.
    #[error("there is no reclaim policy {0}; ListReclaimPolicies returns all policies")]
    NoSuchReclaimPolicy(String),
    /// The policy of the EM kind requires a label that the request does not carry.
    #[error("{key}: is required by the policy of {}; add it to the labels, or set the field of this name", .em.application_name)]
    LabelMissing {
        /// The EM.
        em: EmInstance,
        /// Key of the label.
        key: String,
    },
    /// The request has a cap for labels that no limit counts it by.
    #[error(
        "caps: the EM {em} is not counted by {keys}; call SetLimit with these labels as each and mode \
            LIMIT_MODE_OFF, or omit the cap"
    )]
    CapNotCounted {
        /// The EM.
        em: EmInstance,
        /// Label names, for display.
        keys: String,
    },
    /// The EM does not provide a requested dimension.
    #[error("{field}: the EM {em} does not provide it; request only dimensions that the EM registered")]
    NotProvided {
        /// Field of the call.
        field: &'static str,
        /// The EM.
        em: EmInstance,
        /// Dimension or type that the EM does not provide.
        source: ResourceError,
    },
    /// The EM provides another queue or namespace.
    #[error(
        "resource: the EM {em} provides the queue or namespace {provided:?}, not {asked:?}; request that one, or \
            name another EM"
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
    #[error("used: has another type or queue than the grant; report the type and queue of the grant")]
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
    #[error("the ticket {} {}; adopt a running engine under a new id", .0.id, ended_at(.0))]
    AdoptedTooLate(Box<EndedTicket>),
    /// An adoption under the id of another live ticket.
    #[error("another ticket {ticket_id} exists, which differs in {differs}; give each engine a new id")]
    TicketExists {
        /// Id of the ticket.
        ticket_id: Uuid,
        /// Fields that differ.
        differs: String,
    },
    /// The request is no longer queued, because its instance was considered dead.
    #[error("the request is no longer in the wait queue; repeat it")]
    PlaceLost,
    /// A later call with the same request id waits at the position.
    #[error(
        "a later call with the same request id took over the position in the wait queue; let that call wait, and do not repeat this one"
    )]
    PositionTakenOver,
    /// An operator has removed the request from its queues.
    #[error(
        "an operator removed the request from the wait queue: {reason}; request again only if this reason has ended"
    )]
    RemovedFromQueue {
        /// Id of the ticket that a grant would have created.
        ticket_id: Uuid,
        /// Reason of the operator.
        reason: Name,
    },
    /// As many requests of a scope wait as a limit allows.
    #[error(
        "as many requests of {scope} wait as the limit {limit} allows ({max}); repeat the request when one of them has ended, or \
            raise the limit"
    )]
    TooManyWaiting {
        /// The scope.
        scope: Scope,
        /// The limit.
        limit: String,
        /// Number of waiting requests.
        waiting: i64,
        /// Maximum number of waiting requests.
        max: i64,
    },
    /// No request waits under this ticket id.
    #[error("no request waits under the ticket id {0}; ListWaiting returns those that wait")]
    NotWaiting(Uuid),
    /// The ticket is not chosen for reclaim.
    #[error("the ticket {0} is not chosen for reclaim; ListReclaims returns those that are")]
    NotChosen(Uuid),
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
        "no live ticket is used by the engine {}/{}; give the ticket_id, or check the engine's application name and \
            instance",
        .0.application_name, .0.instance
    )]
    NoTicketOfEngine(EngineInstance),
    /// Several live tickets are used by the engine.
    #[error("several live tickets are used by the engine {}/{}; give a ticket_id, which ListTickets with this engine \
        returns", .0.application_name, .0.instance)]
    ManyTicketsOfEngine(EngineInstance),
    /// The ticket is confirmed by another engine.
    #[error("the ticket {ticket_id} is used by another engine, {}/{}; request a new ticket for this engine", engine.application_name, engine.instance)]
    AlreadyInited {
        /// Id of the ticket.
        ticket_id: Uuid,
        /// Engine that uses the ticket.
        engine: EngineInstance,
    },
    /// The ticket is confirmed by this engine with other amounts or another application.
    #[error(
        "the ticket {ticket_id} is in use already, with other amounts or another application; to change its use, \
            call ResourceReported"
    )]
    InitedOtherwise {
        /// Id of the ticket.
        ticket_id: Uuid,
    },
    /// The engine uses more than the grant, and the additional amounts do not fit.
    #[error("{}; the ticket stays locked until it expires: report less, or release it", .0.reason)]
    NotEnough(Box<Refusal>),
    /// The ticket is not confirmed.
    #[error("the ticket {ticket_id} is not confirmed yet; call ResourceInited first")]
    NotInited {
        /// Id of the ticket.
        ticket_id: Uuid,
    },
    /// A running engine uses more than before, and the additional amounts do not fit.
    #[error("{}; the ticket keeps its previous amounts: use only these, or release it", .0.reason)]
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
    #[error("{most} holds exist, which is the maximum; release one first")]
    TooManyHolds {
        /// Maximum number of holds.
        most: usize,
    },
    /// No limit counts these labels.
    #[error(
        "nothing is counted by the labels {keys}; call SetLimit with these labels as each and mode LIMIT_MODE_OFF; \
            ListLimits shows when the count is complete"
    )]
    ScopeNotCounted {
        /// Label names, for display.
        keys: String,
    },
    /// The limit does not exist.
    #[error("there is no limit for {0}; ListLimits returns all limits")]
    NoSuchLimit(String),
    /// The maximum number of label sets is reached.
    #[error(
        "limits with {most} label sets exist, which is the maximum; delete all limits with one of these label sets \
            first"
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
    #[error("{field}: the sum of the tickets would overflow; reduce the amounts")]
    Overflow {
        /// Field of the call.
        field: &'static str,
        /// The overflow.
        source: ResourceError,
    },
    /// The stored counters contradict each other.
    #[error("the stored counters of {what} are inconsistent; see Audit and Repair")]
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

    /// Returns whether the call no longer owns a position: an operator removed it, or a later call took it over.
    pub fn is_end_of_waiting(&self) -> bool {
        matches!(self, Self::RemovedFromQueue { .. } | Self::PositionTakenOver)
    }

    /// Returns whether the rejection concerns the EM of the attempt, so that another EM may grant the request.
    pub fn is_of_em(&self) -> bool {
        matches!(
            self,
            Self::EmNotRegistered(_)
                | Self::NotProvided { .. }
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
            format!(
                "{key} is locked by a row that an operator wrote, or by another transaction; delete that row, or retry"
            )
        }
    }
}

fn priority_above_max(requested: i16, max: i16, rule: Option<&str>) -> String {
    match rule {
        Some(rule) => format!(
            "priority: {requested} exceeds {max}, the maximum of the priority rule {rule}; request at most {max}, or let \
             an administrator change the rule (SetPriority)"
        ),
        None => format!(
            "priority: {requested} exceeds {max}, the maximum without a priority rule; leave it out, or let an administrator \
             set a rule for these labels (SetPriority)"
        ),
    }
}

fn em_draining(em: &EmInstance, drain: &EmDrain) -> String {
    let EmDrain { reason, by, since } = drain;
    let since = rfc3339(*since);
    format!(
        "the EM {em} is drained since {since} by {by} ({reason}), and grants nothing new; name another EM, or omit \
            the EM"
    )
}

fn ticket_not_found(ticket_id: Uuid, ended: Option<&EndedTicket>) -> String {
    match ended {
        Some(ended) => {
            format!("the ticket {ticket_id} {}; request another for an engine that needs one", ended_at(ended))
        }
        None => format!(
            "there is no ticket {ticket_id}, and none in the history: the lock on the resource is lost; request another"
        ),
    }
}

fn limit_changed(limit: &str, last: Option<&(String, OffsetDateTime)>) -> String {
    match last {
        Some((by, at)) => {
            format!("the limit for {limit} has changed: {by} set it at {}; read it again, then change it", rfc3339(*at))
        }
        None => format!("the limit for {limit} has changed: it was deleted; read the limits again, then set it"),
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
