//! What can be asked of the ledger, which resource locks each operation takes, and how the ledger can answer.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use uuid::Uuid;

use super::{
    adopt::Adopt,
    cap::Cap,
    em::{Em, EmInstance},
    limit::{LimitedScope, Limits},
    line::{QueuePosition, Spots},
    name::{Labels, Name},
    principal::Principal,
    refusal::{Refusal, Shortfall},
    report::{LastSign, ReportNumber},
    resource::{Resource, ResourceError, ResourceType},
    scope::{CREATOR, Counter, ENGINE_TYPE, TicketLabels, USER},
    selector::Selector,
    ticket::{EndedTicket, EngineInstance, Ticket},
};

/// One change that somebody wants.
#[derive(Debug, Clone, PartialEq)]
pub enum Operation {
    /// An EM tells what it provides.
    Register(Register),
    /// An EM goes, and its tickets with it.
    Unregister(Unregister),
    /// Resources are asked for.
    Request(Request),
    /// An engine that runs is put into the books.
    Adopt(Adopt),
    /// The engine of a ticket has reported in.
    Inited(Inited),
    /// An engine that runs uses other amounts than before.
    Reported(Reported),
    /// A ticket is given back.
    Released(Released),
    /// A ticket's deadline may have passed.
    Expire(Released),
    /// A ticket was missing from its EM's reports.
    Lost(Released),
    /// An EM fell silent.
    Reap(Reap),
    /// An EM goes: the next of its tickets end.
    EndTickets(EmInstance),
    /// A label set is new: the next of an EM's tickets are put into its counters.
    CountTickets(CountTickets),
}

/// How many tickets of an EM one operation touches: so many that a batch which carries it out keeps nobody waiting for long.
pub const STEP_TICKETS_MAX: usize = 64;

/// How many tickets one step counts: each of them may concern a scope of its own.
pub const STEP_COUNTED_MAX: usize = STEP_TICKETS_MAX / 2;

/// An EM tells what it provides.
#[derive(Debug, Clone, PartialEq)]
pub struct Register {
    /// Which EM.
    pub em: EmInstance,
    /// Everything it provides.
    pub total: Resource,
    /// The part that is never granted: of the type of `total`, and at most `total`.
    pub protected: Resource,
    /// What it says of itself.
    pub labels: Labels,
    /// Labels, besides, that it is reserved for; none of them is among `labels`.
    pub reserved: Labels,
}

/// An EM goes, and its tickets with it.
#[derive(Debug, Clone, PartialEq)]
pub struct Unregister {
    /// Which EM.
    pub em: EmInstance,
    /// The registration that its caller acts for; `None` for whichever there is.
    pub epoch: Option<i64>,
}

/// Resources are asked for on an EM.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Where.
    pub em: EmInstance,
    /// What.
    pub ask: Ask,
    /// How it waits in line if it does not fit; `None` to be refused then.
    pub wait: Option<Wait>,
    /// The counters that it would belong to.
    pub scopes: RequestScopes,
}

impl Request {
    /// The counters that it would belong to, in the order in which they are checked.
    pub fn scopes(&self, limits: &Limits) -> Arc<[LimitedScope]> {
        self.scopes.get(limits, &self.em, || limits.scopes_under(&self.ask.ticket_labels(&self.em), &self.ask.caps))
    }

    /// The same, without the rules that decide there.
    pub fn counters(&self, limits: &Limits) -> Vec<Counter> {
        self.scopes(limits).iter().map(|limited| limited.counter.clone()).collect()
    }
}

/// The counters that a request would belong to, worked out once: with it they go through all rooms. It is equal to any other, because
/// it says nothing that the request does not.
#[derive(Debug, Clone, Default)]
pub struct RequestScopes(Arc<OnceLock<KnownScopes>>);

#[derive(Debug)]
struct KnownScopes {
    limits: Uuid,
    em: EmInstance,
    scopes: Arc<[LimitedScope]>,
}

impl RequestScopes {
    fn get(&self, limits: &Limits, em: &EmInstance, work_out: impl Fn() -> Vec<LimitedScope>) -> Arc<[LimitedScope]> {
        let known =
            self.0.get_or_init(|| KnownScopes { limits: limits.version(), em: em.clone(), scopes: work_out().into() });
        match known.limits == limits.version() && known.em == *em {
            true => known.scopes.clone(),
            // The limits have changed since, or it tries another EM.
            false => work_out().into(),
        }
    }
}

impl PartialEq for RequestScopes {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// How a request waits in line.
#[derive(Debug, Clone, PartialEq)]
pub struct Wait {
    /// The instance of the service where its caller waits.
    pub instance_id: Uuid,
    /// For how much longer at most.
    pub remaining: Duration,
    /// Whether any EM will do: it stands at one, and may be granted on another.
    pub any_em: bool,
    /// Whether this is another EM than where it stands: if it does not fit here, it stays there.
    pub is_elsewhere: bool,
    /// Where it stands in line already.
    pub position: Option<QueuePosition>,
}

/// Resources are asked for, wherever they may be.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// Who asks.
    pub principal: Principal,
    /// The name that the ticket will have if it is granted.
    pub ticket_id: Uuid,
    /// For whom.
    pub user: Name,
    /// By which application of the user.
    pub creator: Name,
    /// The engine's type; may be empty.
    pub engine_type: String,
    /// How much.
    pub resource: Resource,
    /// Kept with the ticket, and counted: all that it carries, those that select an EM included.
    pub labels: Labels,
    /// Which EMs it may go to.
    pub selector: Selector,
    /// What it allows itself, each for other labels: part of the request, and not of its ticket.
    pub caps: Vec<Arc<Cap>>,
    /// How long the grant stays locked.
    pub lock_ttl: Duration,
    /// Makes the request repeatable.
    pub request_id: Option<RequestId>,
}

impl Ask {
    /// The labels that decide in which scopes it counts on `em`.
    pub fn ticket_labels<'a>(&'a self, em: &'a EmInstance) -> TicketLabels<'a> {
        TicketLabels::new(self.user.as_str(), self.creator.as_str(), &self.engine_type, &self.labels, em)
    }

    /// Whether it carries a label with some value.
    pub fn carries(&self, key: &str) -> bool {
        match key {
            USER | CREATOR => true,
            ENGINE_TYPE => !self.engine_type.is_empty(),
            _ => self.labels.as_map().contains_key(key),
        }
    }

    /// Whether it carries a label with this value, other than by a field of its own.
    pub fn has(&self, key: &str, value: &str) -> bool {
        self.labels.as_map().get(key).is_some_and(|ours| ours == value)
    }
}

/// The caller's name for a request, and what it stood for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RequestId {
    /// The caller's name for it.
    pub id: Name,
    /// SHA-256 of the request's body.
    pub body_hash: [u8; 32],
}

/// What was granted under a request id.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestRecord {
    /// The id and its body.
    pub request_id: RequestId,
    /// The grant.
    pub grant: Grant,
    /// When, by the database's clock.
    pub create_time: OffsetDateTime,
}

/// The engine of a ticket has reported in.
#[derive(Debug, Clone, PartialEq)]
pub struct Inited {
    /// Which ticket.
    pub ticket_id: Uuid,
    /// Who says so.
    pub user: Name,
    /// Where.
    pub em: EmInstance,
    /// What the engine really uses; `None` for exactly what was granted.
    pub used: Option<Resource>,
    /// The engine.
    pub engine: EngineInstance,
    /// The registration of the EM that its caller acts for; `None` for whichever there is. The ticket may be older.
    pub epoch: Option<i64>,
}

/// An engine that runs uses other amounts than before, or its application is known now.
#[derive(Debug, Clone, PartialEq)]
pub struct Reported {
    /// Which ticket.
    pub ticket_id: Uuid,
    /// Who says so.
    pub user: Name,
    /// Where.
    pub em: EmInstance,
    /// What the engine uses from now on. Without an application id, the one that is known stays.
    pub used: Resource,
    /// The registration of the EM that its caller acts for; `None` for whichever there is. The ticket may be older.
    pub epoch: Option<i64>,
}

/// An EM is given up, unless something was heard of it since.
#[derive(Debug, Clone, PartialEq)]
pub struct Reap {
    /// Which EM.
    pub em: EmInstance,
    /// The last that was heard of it.
    pub last: LastSign,
}

/// The tickets of an EM are put into the counters of label sets, some at a time.
#[derive(Debug, Clone, PartialEq)]
pub struct CountTickets {
    /// Which EM.
    pub em: EmInstance,
    /// Up to which label set.
    pub to: i64,
    /// How many tickets this step touches at most: up to [`STEP_COUNTED_MAX`], and fewer if it counts them in several label sets.
    pub tickets_max: usize,
}

/// A ticket is given back, or given up.
#[derive(Debug, Clone, PartialEq)]
pub struct Released {
    /// Which ticket.
    pub ticket_id: Uuid,
    /// Whose it should be.
    pub user: Name,
    /// Where it should be.
    pub em: EmInstance,
}

/// From where on an operation goes through the tickets of its EM, in the order of their ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepFrom {
    /// From the first.
    First,
    /// From behind those that have been ended.
    Ended,
    /// From behind those that have been counted.
    Counted,
}

/// What a transaction excludes others from. The order of this type is the one order in which locks are taken: EMs before users,
/// each by bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LockKey {
    /// All operations on an EM.
    Em(EmInstance),
    /// All operations of a user, on whatever EM: a user's limit spans EMs.
    User(Name),
}

impl Operation {
    /// The EM that it is about.
    pub fn em(&self) -> &EmInstance {
        match self {
            Self::Register(op) => &op.em,
            Self::Unregister(op) => &op.em,
            Self::EndTickets(em) => em,
            Self::CountTickets(op) => &op.em,
            Self::Request(op) => &op.em,
            Self::Adopt(op) => &op.em,
            Self::Inited(op) => &op.em,
            Self::Reported(op) => &op.em,
            Self::Released(op) | Self::Expire(op) | Self::Lost(op) => &op.em,
            Self::Reap(op) => &op.em,
        }
    }

    /// What it costs in a batch, beside operations on one ticket.
    pub fn cost(&self) -> usize {
        match self {
            Self::CountTickets(op) => op.tickets_max.clamp(1, STEP_COUNTED_MAX) * 2,
            operation => operation.tickets_max(),
        }
    }

    /// How many tickets it touches at most.
    pub fn tickets_max(&self) -> usize {
        match self {
            Self::Unregister(_) | Self::Reap(_) | Self::EndTickets(_) => STEP_TICKETS_MAX,
            Self::CountTickets(op) => op.tickets_max.clamp(1, STEP_COUNTED_MAX),
            Self::Register(_)
            | Self::Request(_)
            | Self::Adopt(_)
            | Self::Inited(_)
            | Self::Reported(_)
            | Self::Released(_)
            | Self::Expire(_)
            | Self::Lost(_) => 1,
        }
    }

    /// The user that it is for; what concerns a whole EM has none.
    pub fn user(&self) -> Option<&Name> {
        match self {
            Self::Register(_) | Self::Unregister(_) | Self::Reap(_) | Self::EndTickets(_) | Self::CountTickets(_) => {
                None
            }
            Self::Request(op) => Some(&op.ask.user),
            Self::Adopt(op) => Some(&op.user),
            Self::Inited(op) => Some(&op.user),
            Self::Reported(op) => Some(&op.user),
            Self::Released(op) | Self::Expire(op) | Self::Lost(op) => Some(&op.user),
        }
    }

    /// The live or ended ticket that it names, or the one that it adopts.
    pub fn ticket_id(&self) -> Option<Uuid> {
        match self {
            Self::Register(_)
            | Self::Unregister(_)
            | Self::Request(_)
            | Self::Reap(_)
            | Self::EndTickets(_)
            | Self::CountTickets(_) => None,
            Self::Adopt(op) => Some(op.ticket_id),
            Self::Inited(op) => Some(op.ticket_id),
            Self::Reported(op) => Some(op.ticket_id),
            Self::Released(op) | Self::Expire(op) | Self::Lost(op) => Some(op.ticket_id),
        }
    }

    /// Whether it goes through tickets of its EM, and from where.
    pub fn steps_from(&self) -> Option<StepFrom> {
        match self {
            Self::Unregister(_) | Self::Reap(_) => Some(StepFrom::First),
            Self::EndTickets(_) => Some(StepFrom::Ended),
            Self::CountTickets(_) => Some(StepFrom::Counted),
            _ => None,
        }
    }

    /// The EM that is given up unless it has reported since.
    pub fn reaps(&self) -> Option<&EmInstance> {
        match self {
            Self::Reap(op) => Some(&op.em),
            _ => None,
        }
    }

    /// The EM that registers.
    pub fn registers(&self) -> Option<&EmInstance> {
        match self {
            Self::Register(op) => Some(&op.em),
            _ => None,
        }
    }

    /// The request that it is.
    pub fn request(&self) -> Option<&Request> {
        match self {
            Self::Request(op) => Some(op),
            _ => None,
        }
    }

    /// The engine that it puts into the books.
    pub fn adopts(&self) -> Option<&Adopt> {
        match self {
            Self::Adopt(op) => Some(op),
            _ => None,
        }
    }

    /// The position in line of a request that has one.
    pub fn position(&self) -> Option<QueuePosition> {
        self.request()?.wait.as_ref()?.position
    }

    /// The request id that it carries.
    pub fn request_id(&self) -> Option<&RequestId> {
        self.request()?.ask.request_id.as_ref()
    }

    /// The locks that it takes: that of its EM, and where users are locked, that of its user.
    pub fn lock_keys(&self, locks_users: bool) -> impl Iterator<Item = LockKey> + use<> {
        let user = self.user().filter(|_| locks_users).cloned();
        [Some(LockKey::Em(self.em().clone())), user.map(LockKey::User)].into_iter().flatten()
    }
}

/// How an operation that was carried out ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The EM as it now stands.
    Registered(Box<Em>),
    /// The EM grants nothing any more, and so many of its tickets have ended.
    Unregistered {
        /// How many live tickets have ended so far.
        removed_tickets: usize,
        /// Whether there may be more, which end in steps.
        in_progress: bool,
    },
    /// The request was granted, now or before under the same request id.
    Granted(Grant),
    /// The request was not granted.
    Refused(Box<Refusal>),
    /// The request stands in line.
    Waiting(Box<Waiting>),
    /// The ticket as it now stands, adopted now or before.
    Adopted(Box<Ticket>),
    /// The ticket as it now stands.
    Inited(Box<Ticket>),
    /// The ticket as it now stands.
    Reported(Box<Ticket>),
    /// The ticket holds nothing any more.
    Released,
    /// The deadline had passed and the ticket was rolled back; false if there was nothing to do.
    Expired(bool),
    /// The ticket was given up; false if there was nothing to do.
    Lost(bool),
    /// The EM grants nothing any more, and so many of its tickets have ended so far; `None` if it was heard of since, or was gone
    /// already.
    Reaped(Option<usize>),
    /// A step through the tickets of an EM was made; whether there may be another.
    Stepped {
        /// How many tickets it touched.
        tickets: usize,
        /// Whether there may be more.
        more: bool,
    },
}

/// A request that stands in line, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct Waiting {
    /// Its position.
    pub position: QueuePosition,
    /// Where it stands.
    pub spots: Spots,
    /// What it would be answered now.
    pub refusal: Refusal,
}

/// What a caller is told of a grant.
#[derive(Debug, Clone, PartialEq)]
pub struct Grant {
    /// The ticket.
    pub ticket_id: Uuid,
    /// Where.
    pub em: EmInstance,
    /// When it is rolled back unless the engine reports in.
    pub expires_at: OffsetDateTime,
    /// Where it went beyond limits that only watch, if it was granted just now: it is not told again under the request id.
    pub over_watched: Vec<Shortfall>,
}

impl Grant {
    /// The report that `engine` runs and uses exactly what was granted.
    pub fn inited(&self, user: Name, engine: EngineInstance) -> Inited {
        Inited { ticket_id: self.ticket_id, user, em: self.em.clone(), used: None, engine, epoch: None }
    }

    /// The report that the engine uses `used` from now on.
    pub fn reported(&self, user: Name, used: Resource) -> Reported {
        Reported { ticket_id: self.ticket_id, user, em: self.em.clone(), used, epoch: None }
    }

    /// The release of what was granted.
    pub fn released(&self, user: Name) -> Released {
        Released { ticket_id: self.ticket_id, user, em: self.em.clone() }
    }
}

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
        "no EM can be chosen: {matching} match the request, but all of them are silent or unhealthy; repair one, or name one to use it \
         all the same"
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
    /// The ticket is somebody else's.
    #[error("the ticket {ticket_id} belongs to another {what}; name the {what} that it was granted to")]
    TicketNotOwned {
        /// Which ticket.
        ticket_id: Uuid,
        /// "user" or "EM".
        what: &'static str,
    },
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
    format!("{} at {}", ended.end, ended.at.format(&Rfc3339).unwrap_or_else(|_| ended.at.to_string()))
}

impl Rejection {
    /// Whether it is about the EM that was tried, so that another may do.
    pub fn is_of_em(&self) -> bool {
        matches!(
            self,
            Self::EmNotRegistered(_)
                | Self::Unanswerable { .. }
                | Self::OtherQueue { .. }
                | Self::LabelRequired { .. }
                | Self::EmReserved { .. }
                | Self::LabelMissing { .. }
                | Self::CapNotCounted { .. }
        )
    }
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
            at.format(&Rfc3339).unwrap_or_else(|_| at.to_string())
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
