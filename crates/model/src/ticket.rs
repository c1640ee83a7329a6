//! Tickets: one grant, from the request until it is released, expired, or gone with its EM.

use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    em::EmInstance,
    end::End,
    name::{FieldError, Labels, Name, check_new, parse_instance},
    principal::Principal,
    resource::{Resource, ResourceType},
    scope::TicketLabels,
};

/// A process that uses resources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineInstance {
    /// The name of the application, e.g. `linkis-cg-engineconn`.
    pub application_name: Name,
    /// The instance, by convention host:port.
    pub instance: Name,
}

impl EngineInstance {
    /// Checks both parts; `field` is the path of the instance in the request.
    pub fn parse(field: &str, application_name: &str, instance: &str) -> Result<Self, FieldError> {
        let (application_name, instance) = parse_instance(field, application_name, instance)?;
        Ok(Self { application_name, instance })
    }

    /// Checks both parts of an engine that a call brings into being, as [`check_new`] does.
    ///
    /// # Errors
    /// The part that is not legal in a new name.
    pub fn check_new(&self, field: &str) -> Result<(), FieldError> {
        check_new(&format!("{field}.application_name"), self.application_name.as_str())?;
        check_new(&format!("{field}.instance"), self.instance.as_str())
    }
}

/// A live grant.
#[derive(Debug, Clone, PartialEq)]
pub struct Ticket {
    /// Its name.
    pub id: Uuid,
    /// For whom.
    pub user: Name,
    /// By which application of the user.
    pub creator: Name,
    /// The engine's type; may be empty.
    pub engine_type: String,
    /// Where.
    pub em: EmInstance,
    /// The labels of the request.
    pub labels: Labels,
    /// When it was granted, by the database's clock.
    pub locked_time: OffsetDateTime,
    /// How far it has come.
    pub state: TicketState,
    /// Who asked for it.
    pub principal: Principal,
    /// The registration of its EM under which it was granted.
    pub em_epoch: i64,
}

/// How far a live ticket has come.
#[derive(Debug, Clone, PartialEq)]
pub enum TicketState {
    /// Granted; the engine has not reported in.
    Locked {
        /// What is reserved.
        resource: Resource,
        /// When it is rolled back.
        expires_at: OffsetDateTime,
    },
    /// The engine has reported in.
    Used {
        /// What it uses.
        resource: Resource,
        /// Who it is.
        engine: EngineInstance,
        /// When it reported in.
        used_time: OffsetDateTime,
    },
}

impl Ticket {
    /// The labels that decide in which scopes it counts.
    pub fn ticket_labels(&self) -> TicketLabels<'_> {
        let (user, creator) = (self.user.as_str(), self.creator.as_str());
        TicketLabels::new(user, creator, &self.engine_type, &self.labels, &self.em, self.resource())
    }

    /// What it holds, locked or used.
    pub fn resource(&self) -> &Resource {
        match &self.state {
            TicketState::Locked { resource, .. } | TicketState::Used { resource, .. } => resource,
        }
    }

    /// Whether its engine has not yet reported in.
    pub fn is_locked(&self) -> bool {
        matches!(self.state, TicketState::Locked { .. })
    }

    /// The type of what it holds.
    pub fn resource_type(&self) -> ResourceType {
        self.resource().resource_type()
    }
}

/// What history remembers of a ticket that is over.
#[derive(Debug, Clone, PartialEq)]
pub struct EndedTicket {
    /// Its name.
    pub id: Uuid,
    /// For whom it was.
    pub user: Name,
    /// Where it was.
    pub em: EmInstance,
    /// How it ended.
    pub end: End,
    /// When it ended, by the database's clock.
    pub at: OffsetDateTime,
}

impl EndedTicket {
    /// Whether it was this user's, on this EM.
    pub fn is_of(&self, user: &Name, em: &EmInstance) -> bool {
        self.user == *user && self.em == *em
    }
}
