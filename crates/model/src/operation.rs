//! Operations: the changes that callers and tasks submit to the committer, their lock keys, their costs, and their outcomes.
//!
//! Each operation concerns one EM and at most one user. An operation is data only: it never performs the change itself.
//! Callers: the edge and the background tasks create operations; the committer groups them into batches by lock keys and
//! costs; the ledger applies them.
//!
//! - `request`: requests; `draining`: drains; `rejection`: error replies.

use std::sync::Arc;

use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    adoption::AdoptTicket,
    counters::Counters,
    em::{Em, EmInstance},
    em_drain::EmDrain,
    external::{JudgedQueue, place_of},
    name::{Labels, Name},
    refusal::{Refusal, Shortfall},
    report::LastSignOfLife,
    resource::Resource,
    scope::Scope,
    ticket::{EndedTicket, EngineInstance, Ticket},
    wait_queue::{QueuePosition, WaitKeys},
};

mod draining;
mod rejection;
mod request;

pub use draining::{DrainEm, ResumeEm};
pub use rejection::{Rejection, ended_at};
pub use request::{
    KeptPosition, PlacedRequest, RequestId, RequestKey, RequestRecord, RequestScopes, RequestSpec, WaitParameters,
};

/// One change to the state of the ledger.
#[derive(Debug, Clone, PartialEq)]
pub enum Operation {
    /// Registers an EM with its capacity.
    Register(RegisterEm),
    /// Unregisters an EM and ends its tickets.
    Unregister(UnregisterEm),
    /// Requests resources.
    Request(PlacedRequest),
    /// Adopts a running engine.
    Adopt(AdoptTicket),
    /// Confirms that the engine of a ticket runs.
    Inited(ConfirmTicket),
    /// Changes the amounts that a running engine uses.
    Reported(UpdateTicket),
    /// Releases a ticket.
    Released(ReleaseTicket),
    /// Releases a ticket that is still locked: the reply with its grant was not delivered.
    Undo(ReleaseTicket),
    /// Ends a ticket by an operator.
    Force(ForceRelease),
    /// Removes a waiting request by an operator.
    Remove(RemoveWaiting),
    /// Drains an EM.
    Drain(DrainEm),
    /// Ends the drain of an EM.
    Resume(ResumeEm),
    /// Expires a ticket if its deadline has passed.
    Expire(ReleaseTicket),
    /// Ends a ticket that its EM no longer reports.
    Lost(ReleaseTicket),
    /// Marks a silent EM as lost.
    Reap(MarkEmLost),
    /// Ends the next tickets of an EM that is being unregistered.
    EndTickets(EmInstance),
    /// Counts the next tickets of an EM in new label sets.
    CountTickets(CountTickets),
}

/// Maximum number of tickets of an EM that one operation touches. The number bounds the duration of its batch for other
/// callers.
pub const STEP_TICKETS_MAX: usize = 56;

/// Maximum number of tickets that one step counts. Each ticket can concern a scope of its own, so the number is lower.
pub const STEP_COUNTED_MAX: usize = STEP_TICKETS_MAX / 2;

/// Operation that registers an EM.
#[derive(Debug, Clone, PartialEq)]
pub struct RegisterEm {
    /// The EM.
    pub em: EmInstance,
    /// Total capacity.
    pub total: Resource,
    /// Part that is never granted; has the type of `total` and does not exceed it.
    pub protected: Resource,
    /// Labels of the EM.
    pub labels: Labels,
    /// Further labels that the EM is reserved for; disjoint from `labels`.
    pub reserved: Labels,
}

/// Operation that unregisters an EM and ends its tickets.
#[derive(Debug, Clone, PartialEq)]
pub struct UnregisterEm {
    /// The EM.
    pub em: EmInstance,
    /// Epoch of the registration that the caller acts for; `None` for the current one.
    pub epoch: Option<i64>,
}

/// Operation that confirms the engine of a ticket.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfirmTicket {
    /// Id of the ticket.
    pub ticket_id: Uuid,
    /// User that the caller states.
    pub user: Name,
    /// EM that the caller states.
    pub em: EmInstance,
    /// Amounts that the engine uses; `None` for the granted amounts.
    pub used: Option<Resource>,
    /// The running engine.
    pub engine: EngineInstance,
    /// Epoch of the EM that the caller acts for; `None` for the current one. The ticket may be of an earlier epoch.
    pub epoch: Option<i64>,
}

/// Operation that changes the use of a running engine, or adds its application id.
#[derive(Debug, Clone, PartialEq)]
pub struct UpdateTicket {
    /// Id of the ticket.
    pub ticket_id: Uuid,
    /// User that the caller states.
    pub user: Name,
    /// EM that the caller states.
    pub em: EmInstance,
    /// New amounts. Without an application id, the recorded one remains.
    pub used: Resource,
    /// Epoch of the EM that the caller acts for; `None` for the current one. The ticket may be of an earlier epoch.
    pub epoch: Option<i64>,
}

/// A ticket with the owner that the caller states.
#[derive(Debug, Clone, PartialEq)]
pub struct TicketRef {
    /// Id of the ticket.
    pub ticket_id: Uuid,
    /// Owner, if the caller states it.
    pub user: Option<Name>,
    /// EM, if the caller states it.
    pub em: Option<EmInstance>,
}

/// Operation that marks an EM as lost, unless it has reported or registered since.
#[derive(Debug, Clone, PartialEq)]
pub struct MarkEmLost {
    /// The EM.
    pub em: EmInstance,
    /// Last report and registration that the caller knows.
    pub last: LastSignOfLife,
}

/// Operation that counts some tickets of an EM in label sets.
#[derive(Debug, Clone, PartialEq)]
pub struct CountTickets {
    /// The EM.
    pub em: EmInstance,
    /// Id of the last label set to count.
    pub to: i64,
    /// Maximum number of tickets of this step: up to [`STEP_COUNTED_MAX`], fewer for several label sets.
    pub tickets_max: usize,
}

/// Operation that ends one ticket by release, expiry or loss.
#[derive(Debug, Clone, PartialEq)]
pub struct ReleaseTicket {
    /// Id of the ticket.
    pub ticket_id: Uuid,
    /// Expected owner.
    pub user: Name,
    /// Expected EM.
    pub em: EmInstance,
}

/// Operation that ends a ticket by an operator, regardless of its owner.
#[derive(Debug, Clone, PartialEq)]
pub struct ForceRelease {
    /// The ticket with its owner and EM.
    pub ticket: ReleaseTicket,
    /// Reason, for display.
    pub reason: Name,
}

/// Operation that removes a waiting request from its queues by an operator. It changes no counter, and the row of the request
/// decides between it and a grant. It needs no resource lock, and neither a hold nor another transaction delays it.
#[derive(Debug, Clone, PartialEq)]
pub struct RemoveWaiting {
    /// Id of the ticket that a grant would create.
    pub ticket_id: Uuid,
    /// EM of the latest decision that the caller knows. The request can be queued at another one since.
    pub em: EmInstance,
    /// Reason, for display.
    pub reason: Name,
}

/// Start of a step through the tickets of an EM, in order of their ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepCursor {
    /// The first ticket.
    First,
    /// The ticket after the last ended one.
    Ended,
    /// The ticket after the last counted one.
    Counted,
}

/// Resource lock of a transaction. All transactions lock in the order of this type: EMs before users, each by bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LockKey {
    /// Excludes other operations on an EM.
    Em(EmInstance),
    /// Excludes other operations of a user on any EM, because limits of a user span EMs.
    User(Name),
}

impl Operation {
    /// Returns the EM of the operation.
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
            Self::Released(op) | Self::Undo(op) | Self::Expire(op) | Self::Lost(op) => &op.em,
            Self::Force(op) => &op.ticket.em,
            Self::Remove(op) => &op.em,
            Self::Drain(op) => &op.em,
            Self::Resume(op) => &op.em,
            Self::Reap(op) => &op.em,
        }
    }

    /// Returns the name of the operation in logs and traces.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Register(_) => "register",
            Self::Unregister(_) => "unregister",
            Self::Request(_) => "request",
            Self::Adopt(_) => "adopt",
            Self::Inited(_) => "inited",
            Self::Reported(_) => "reported",
            Self::Released(_) => "released",
            Self::Undo(_) => "undo",
            Self::Force(_) => "force",
            Self::Remove(_) => "remove",
            Self::Drain(_) => "drain",
            Self::Resume(_) => "resume",
            Self::Expire(_) => "expire",
            Self::Lost(_) => "lost",
            Self::Reap(_) => "reap",
            Self::EndTickets(_) => "end_tickets",
            Self::CountTickets(_) => "count_tickets",
        }
    }

    /// Returns the cost in a batch, where an operation on one ticket costs 1.
    pub fn cost(&self) -> usize {
        match self {
            Self::CountTickets(op) => op.tickets_max.clamp(1, STEP_COUNTED_MAX) * 2,
            operation => operation.tickets_max(),
        }
    }

    /// Returns the maximum number of tickets that the operation touches.
    pub fn tickets_max(&self) -> usize {
        match self {
            Self::Unregister(_) | Self::Reap(_) | Self::EndTickets(_) => STEP_TICKETS_MAX,
            Self::CountTickets(op) => op.tickets_max.clamp(1, STEP_COUNTED_MAX),
            _ => 1,
        }
    }

    /// Returns the user of the operation; `None` if it concerns a whole EM.
    pub fn user(&self) -> Option<&Name> {
        match self {
            Self::Request(op) => Some(&op.ask.user),
            operation => operation.ticket().map(|(_, user)| user),
        }
    }

    /// Returns the id of the ticket that the operation concerns or adopts; `None` for a request.
    pub fn ticket_id(&self) -> Option<Uuid> {
        self.ticket().map(|(ticket_id, _)| ticket_id)
    }

    /// Returns the ticket that the operation concerns or adopts, with its user.
    fn ticket(&self) -> Option<(Uuid, &Name)> {
        match self {
            Self::Register(_)
            | Self::Unregister(_)
            | Self::Request(_)
            | Self::Remove(_)
            | Self::Drain(_)
            | Self::Resume(_)
            | Self::Reap(_)
            | Self::EndTickets(_)
            | Self::CountTickets(_) => None,
            Self::Adopt(op) => Some((op.ticket_id, &op.user)),
            Self::Inited(op) => Some((op.ticket_id, &op.user)),
            Self::Reported(op) => Some((op.ticket_id, &op.user)),
            Self::Released(op) | Self::Undo(op) | Self::Expire(op) | Self::Lost(op) => Some((op.ticket_id, &op.user)),
            Self::Force(op) => Some((op.ticket.ticket_id, &op.ticket.user)),
        }
    }

    /// Returns the start of the step if the operation processes tickets of its EM in steps.
    pub fn steps_from(&self) -> Option<StepCursor> {
        match self {
            Self::Unregister(_) | Self::Reap(_) => Some(StepCursor::First),
            Self::EndTickets(_) => Some(StepCursor::Ended),
            Self::CountTickets(_) => Some(StepCursor::Counted),
            _ => None,
        }
    }

    /// Returns the EM of [`Operation::Reap`].
    pub fn reaps(&self) -> Option<&EmInstance> {
        match self {
            Self::Reap(op) => Some(&op.em),
            _ => None,
        }
    }

    /// Returns the EM of [`Operation::Register`].
    pub fn registers(&self) -> Option<&EmInstance> {
        match self {
            Self::Register(op) => Some(&op.em),
            _ => None,
        }
    }

    /// Returns the EM if the operation needs its drain.
    pub fn needs_drain(&self) -> Option<&EmInstance> {
        match self {
            Self::Register(_) | Self::Drain(_) | Self::Resume(_) => Some(self.em()),
            _ => None,
        }
    }

    /// Returns the request of [`Operation::Request`].
    pub fn request(&self) -> Option<&PlacedRequest> {
        match self {
            Self::Request(op) => Some(op),
            _ => None,
        }
    }

    /// Returns whether the operation is a request that may wait in a queue.
    pub fn may_queue(&self) -> bool {
        self.request().is_some_and(|request| request.ask.may_wait)
    }

    /// Returns the adoption of [`Operation::Adopt`].
    pub fn adopts(&self) -> Option<&AdoptTicket> {
        match self {
            Self::Adopt(op) => Some(op),
            _ => None,
        }
    }

    /// Returns the resource and labels if the operation requests or adopts amounts in an external queue.
    pub fn asks_queue(&self) -> Option<(&Resource, &Labels)> {
        let asked = match self {
            Self::Request(op) => (op.resource(), &op.ask.labels),
            Self::Adopt(op) => (&op.used, &op.labels),
            _ => return None,
        };
        place_of(asked.0).map(|_| asked)
    }

    /// Returns the application id that the operation reports, if any.
    pub fn application_id(&self) -> Option<&str> {
        let used = match self {
            Self::Inited(op) => op.used.as_ref()?,
            Self::Reported(op) => &op.used,
            Self::Adopt(op) => &op.used,
            _ => return None,
        };
        used.application_id().filter(|id| !id.is_empty())
    }

    /// Returns the ticket id of the waiting request of [`Operation::Remove`].
    pub fn removes(&self) -> Option<Uuid> {
        match self {
            Self::Remove(op) => Some(op.ticket_id),
            _ => None,
        }
    }

    /// Returns the ticket id of the request, if it has a queue entry.
    pub fn queued_ticket(&self) -> Option<Uuid> {
        self.request()?.queued_ticket()
    }

    /// Returns the request id, if the operation has one.
    pub fn request_id(&self) -> Option<&RequestId> {
        self.request()?.ask.request_id.as_ref()
    }

    /// Returns the lock keys: the EM, and the user if users are locked; none of a removal.
    pub fn lock_keys(&self, locks_users: bool) -> impl Iterator<Item = LockKey> + use<> {
        let em = Some(self.em().clone()).filter(|_| self.removes().is_none());
        let user = self.user().filter(|_| locks_users).cloned();
        [em.map(LockKey::Em), user.map(LockKey::User)].into_iter().flatten()
    }
}

/// Outcome of a submitted operation.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The registered EM.
    Registered(Box<Em>),
    /// The EM is unregistered and grants nothing.
    Unregistered {
        /// Number of live tickets that ended so far.
        removed_tickets: usize,
        /// Whether further tickets may end in later steps.
        in_progress: bool,
    },
    /// The request was granted, now or earlier under its request id.
    Granted(Grant),
    /// The request was refused.
    Refused(Box<Refusal>),
    /// The request entered a wait queue or remains in it.
    Waiting(Box<QueuedOutcome>),
    /// The ticket, adopted now or earlier.
    Adopted(Box<Ticket>),
    /// The confirmed ticket.
    Inited(Box<Ticket>),
    /// The ticket with its new use.
    Reported(Box<Ticket>),
    /// The ticket has ended.
    Released,
    /// The ticket has ended, now by an operator or earlier.
    Forced(Box<EndedTicket>),
    /// The request has left its queues, removed now or earlier by an operator.
    RemovedFromQueue,
    /// The EM is drained.
    Drained(Arc<EmDrain>),
    /// The EM accepts grants; true if it was drained before.
    Resumed(bool),
    /// True if the ticket expired; false if it had no deadline or the deadline has not passed.
    Expired(bool),
    /// True if the ticket ended as lost; false if there was nothing to end.
    Lost(bool),
    /// Number of tickets that ended so far; `None` if the EM had reported since or was not registered.
    Reaped(Option<usize>),
    /// A step through the tickets of an EM was applied.
    Stepped {
        /// Number of tickets that the step touched.
        tickets: usize,
        /// Whether further steps may be necessary.
        more: bool,
    },
    /// The key of the EM is contended, so nothing was applied, and another EM can be tried. Only the committer returns it.
    Contended,
    /// An operator holds this EM or user, so nothing was applied. The committer tries the operation again after the hold.
    Held(LockKey),
}

/// A queued request, with the reason.
#[derive(Debug, Clone, PartialEq)]
pub struct QueuedOutcome {
    /// Position of the request.
    pub position: QueuePosition,
    /// Time of the decision, by the database clock.
    pub decided_at: OffsetDateTime,
    /// Priority of the request, in seconds.
    pub priority: i16,
    /// Wait keys of the request.
    pub wait_keys: WaitKeys,
    /// Scopes with guarantees that may entitle the request when their holdings shrink; none if it is entitled. `None` if the attempt
    /// was elsewhere.
    pub guaranteed_scopes: Option<Vec<Scope>>,
    /// Refusal that the request would get without waiting.
    pub refusal: Refusal,
}

/// The grant as the caller gets it.
#[derive(Debug, Clone, PartialEq)]
pub struct Grant {
    /// Id of the ticket.
    pub ticket_id: Uuid,
    /// EM of the ticket.
    pub em: EmInstance,
    /// Deadline of the confirmation; the ticket expires then.
    pub expires_at: OffsetDateTime,
    /// Advisory limits that the grant violates; empty when the grant is returned again for its request id.
    pub advisory_violations: Vec<Shortfall>,
    /// External queue of the grant, with the basis of the decision; `None` when returned again.
    pub queue: Option<JudgedQueue>,
    /// Counters after the grant, if requested; `None` when returned again.
    pub counters: Option<Box<Counters>>,
}

impl Grant {
    /// Returns the confirmation of `engine` with exactly the granted amounts.
    pub fn inited(&self, user: Name, engine: EngineInstance) -> ConfirmTicket {
        ConfirmTicket { ticket_id: self.ticket_id, user, em: self.em.clone(), used: None, engine, epoch: None }
    }

    /// Returns the change of the use to `used`.
    pub fn reported(&self, user: Name, used: Resource) -> UpdateTicket {
        UpdateTicket { ticket_id: self.ticket_id, user, em: self.em.clone(), used, epoch: None }
    }

    /// Returns the release of the ticket.
    pub fn released(&self, user: Name) -> ReleaseTicket {
        ReleaseTicket { ticket_id: self.ticket_id, user, em: self.em.clone() }
    }
}
