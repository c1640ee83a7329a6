//! Tickets: grants, from the request until their release, expiry, loss or the removal of their EM.
//!
//! A ticket is locked until its engine confirms, and used afterwards. Only the ledger creates, changes and ends tickets.

use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    em::EmInstance,
    name::{FieldError, Labels, Name, check_new, parse_instance},
    principal::Principal,
    resource::{Resource, ResourceType},
    scope::TicketLabels,
    ticket_end::TicketEnd,
};

/// Identity of an engine: the process that uses a ticket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineInstance {
    /// Application name, such as `linkis-cg-engineconn`.
    pub application_name: Name,
    /// Instance, by convention `host:port`.
    pub instance: Name,
}

impl EngineInstance {
    /// Parses both parts; `field` is the path of the instance in the request.
    ///
    /// # Errors
    /// The part that is not a valid name.
    pub fn parse(field: &str, application_name: &str, instance: &str) -> Result<Self, FieldError> {
        let (application_name, instance) = parse_instance(field, application_name, instance)?;
        Ok(Self { application_name, instance })
    }

    /// Checks both parts of an engine that a call creates, by the stricter rules of [`check_new`].
    ///
    /// # Errors
    /// The part that is not valid as a new name.
    pub fn check_new(&self, field: &str) -> Result<(), FieldError> {
        check_new(&format!("{field}.application_name"), self.application_name.as_str())?;
        check_new(&format!("{field}.instance"), self.instance.as_str())
    }
}

/// A live grant.
#[derive(Debug, Clone, PartialEq)]
pub struct Ticket {
    /// Id of the ticket.
    pub id: Uuid,
    /// User of the request.
    pub user: Name,
    /// Application of the user.
    pub creator: Name,
    /// Engine type; may be empty.
    pub engine_type: String,
    /// EM of the ticket.
    pub em: EmInstance,
    /// Labels of the request.
    pub labels: Labels,
    /// Time of the grant, by the database clock.
    pub locked_time: OffsetDateTime,
    /// State of the ticket.
    pub state: TicketState,
    /// Principal that requested the ticket.
    pub principal: Principal,
    /// Epoch of the EM at the grant.
    pub em_epoch: i64,
}

/// State of a live ticket.
#[derive(Debug, Clone, PartialEq)]
pub enum TicketState {
    /// Granted; the engine has not confirmed.
    Locked {
        /// Granted amounts.
        resource: Resource,
        /// Deadline of the confirmation; the ticket expires then.
        expires_at: OffsetDateTime,
    },
    /// Confirmed by the engine.
    Used {
        /// Amounts that the engine uses.
        resource: Resource,
        /// Engine that uses the ticket.
        engine: EngineInstance,
        /// Time of the confirmation.
        used_time: OffsetDateTime,
        /// Time since which the engine is idle (runs no task), by the reports of its EM; `None` if it is not, or its EM does not report it.
        idle_since: Option<OffsetDateTime>,
    },
}

impl Ticket {
    /// Returns the labels that determine the scopes of the ticket.
    pub fn ticket_labels(&self) -> TicketLabels<'_> {
        let (user, creator) = (self.user.as_str(), self.creator.as_str());
        TicketLabels::new(user, creator, &self.engine_type, &self.labels, &self.em, self.resource())
    }

    /// Returns its amounts, locked or used.
    pub fn resource(&self) -> &Resource {
        match &self.state {
            TicketState::Locked { resource, .. } | TicketState::Used { resource, .. } => resource,
        }
    }

    /// Returns whether its engine has not confirmed.
    pub fn is_locked(&self) -> bool {
        matches!(self.state, TicketState::Locked { .. })
    }

    /// Returns the type of its amounts.
    pub fn resource_type(&self) -> ResourceType {
        self.resource().resource_type()
    }
}

/// Data of an ended ticket that the history contains.
#[derive(Debug, Clone, PartialEq)]
pub struct EndedTicket {
    /// Id of the ticket.
    pub id: Uuid,
    /// User of the ticket.
    pub user: Name,
    /// EM of the ticket.
    pub em: EmInstance,
    /// How it ended.
    pub end: TicketEnd,
    /// Time of the end, by the database clock.
    pub at: OffsetDateTime,
}

impl EndedTicket {
    /// Returns whether the ticket had this user and EM.
    pub fn is_of(&self, user: &Name, em: &EmInstance) -> bool {
        self.user == *user && self.em == *em
    }
}
