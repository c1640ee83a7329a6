//! What can be asked of the ledger, which resource locks each operation takes, and how the ledger can answer.
//!
//! - `request`: what is asked for, and where; `draining`: drains; `rejection`: why an operation is rejected.

use std::sync::Arc;

use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    adopt::Adopt,
    counters::Counters,
    drain::Drain,
    em::{Em, EmInstance},
    external::{JudgedQueue, place_of},
    line::{QueuePosition, Spots},
    name::{Labels, Name},
    refusal::{Refusal, Shortfall},
    report::LastSign,
    resource::Resource,
    ticket::{EndedTicket, EngineInstance, Ticket},
};

mod draining;
mod rejection;
mod request;

pub use draining::{DrainEm, ResumeEm};
pub use rejection::{Rejection, ended_at};
pub use request::{Request, RequestId, RequestKey, RequestRecord, RequestScopes, RequestSpec, Wait};

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
    /// An operator ends a ticket.
    Force(Forced),
    /// Nothing new is to be granted on an EM.
    Drain(DrainEm),
    /// An EM is to grant again.
    Resume(ResumeEm),
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
pub const STEP_TICKETS_MAX: usize = 56;

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

/// A ticket as its caller names it.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedTicket {
    /// Which ticket.
    pub ticket_id: Uuid,
    /// Whose it should be, if the caller says so.
    pub user: Option<Name>,
    /// Where it should be, if the caller says so.
    pub em: Option<EmInstance>,
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

/// A ticket is ended by an operator, whosever it is.
#[derive(Debug, Clone, PartialEq)]
pub struct Forced {
    /// Which ticket, whose and where.
    pub ticket: Released,
    /// Why, for people.
    pub reason: Name,
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
            Self::Force(op) => &op.ticket.em,
            Self::Drain(op) => &op.em,
            Self::Resume(op) => &op.em,
            Self::Reap(op) => &op.em,
        }
    }

    /// What it is called, in logs and traces.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Register(_) => "register",
            Self::Unregister(_) => "unregister",
            Self::Request(_) => "request",
            Self::Adopt(_) => "adopt",
            Self::Inited(_) => "inited",
            Self::Reported(_) => "reported",
            Self::Released(_) => "released",
            Self::Force(_) => "force",
            Self::Drain(_) => "drain",
            Self::Resume(_) => "resume",
            Self::Expire(_) => "expire",
            Self::Lost(_) => "lost",
            Self::Reap(_) => "reap",
            Self::EndTickets(_) => "end_tickets",
            Self::CountTickets(_) => "count_tickets",
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
            | Self::Force(_)
            | Self::Drain(_)
            | Self::Resume(_)
            | Self::Expire(_)
            | Self::Lost(_) => 1,
        }
    }

    /// The user that it is for; what concerns a whole EM has none.
    pub fn user(&self) -> Option<&Name> {
        match self {
            Self::Register(_)
            | Self::Unregister(_)
            | Self::Drain(_)
            | Self::Resume(_)
            | Self::Reap(_)
            | Self::EndTickets(_)
            | Self::CountTickets(_) => None,
            Self::Request(op) => Some(&op.ask.user),
            Self::Adopt(op) => Some(&op.user),
            Self::Inited(op) => Some(&op.user),
            Self::Reported(op) => Some(&op.user),
            Self::Released(op) | Self::Expire(op) | Self::Lost(op) => Some(&op.user),
            Self::Force(op) => Some(&op.ticket.user),
        }
    }

    /// The live or ended ticket that it names, or the one that it adopts.
    pub fn ticket_id(&self) -> Option<Uuid> {
        match self {
            Self::Register(_)
            | Self::Unregister(_)
            | Self::Request(_)
            | Self::Drain(_)
            | Self::Resume(_)
            | Self::Reap(_)
            | Self::EndTickets(_)
            | Self::CountTickets(_) => None,
            Self::Adopt(op) => Some(op.ticket_id),
            Self::Inited(op) => Some(op.ticket_id),
            Self::Reported(op) => Some(op.ticket_id),
            Self::Released(op) | Self::Expire(op) | Self::Lost(op) => Some(op.ticket_id),
            Self::Force(op) => Some(op.ticket.ticket_id),
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

    /// The EM of which it has to be known whether it is drained, registered or not.
    pub fn needs_drain(&self) -> Option<&EmInstance> {
        match self {
            Self::Register(_) | Self::Drain(_) | Self::Resume(_) => Some(self.em()),
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

    /// What it asks for, or puts into the books, in a queue, or a namespace, of whichever cluster its labels tell.
    pub fn asks_queue(&self) -> Option<(&Resource, &Labels)> {
        let asked = match self {
            Self::Request(op) => (&op.ask.resource, &op.ask.labels),
            Self::Adopt(op) => (&op.used, &op.labels),
            _ => return None,
        };
        place_of(asked.0).map(|_| asked)
    }

    /// The application that it tells of an engine.
    pub fn application_id(&self) -> Option<&str> {
        let used = match self {
            Self::Inited(op) => op.used.as_ref()?,
            Self::Reported(op) => &op.used,
            Self::Adopt(op) => &op.used,
            _ => return None,
        };
        used.application_id().filter(|id| !id.is_empty())
    }

    /// The position in line of a request that has one.
    pub fn position(&self) -> Option<QueuePosition> {
        self.request()?.position()
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
    /// The ticket is over: an operator ended it now, or it had ended before.
    Forced(Box<EndedTicket>),
    /// Nothing new is granted on the EM.
    Drained(Arc<Drain>),
    /// The EM grants again; whether it did not before.
    Resumed(bool),
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
    /// In which queue of an external cluster, and by what; likewise.
    pub queue: Option<JudgedQueue>,
    /// The counters right after it, if they were asked for; likewise.
    pub counters: Option<Box<Counters>>,
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
