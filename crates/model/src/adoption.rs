//! Adoption: recording a running engine that has no ticket, from the tables of Linkis or after a database loss.
//!
//! An adoption creates a used ticket whether or not it fits. [`AdoptTicket::differences`] makes a repeated adoption recognizable.
//! Never: replaces an existing ticket.
//! Callers: the ledger, and the call that submits the operation.

use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    em::EmInstance,
    name::{Labels, Name},
    principal::Principal,
    resource::Resource,
    scope::TicketLabels,
    ticket::{EngineInstance, Ticket, TicketState},
};

/// Operation that records a running engine, even if it does not fit: the engine already uses the resources.
#[derive(Debug, Clone, PartialEq)]
pub struct AdoptTicket {
    /// Id of the new ticket; never nil.
    pub ticket_id: Uuid,
    /// User of the engine.
    pub user: Name,
    /// Application of the user.
    pub creator: Name,
    /// Engine type; may be empty.
    pub engine_type: String,
    /// EM of the engine.
    pub em: EmInstance,
    /// Further labels that scopes count by.
    pub labels: Labels,
    /// The running engine.
    pub engine: EngineInstance,
    /// Amounts that the engine uses.
    pub used: Resource,
}

impl AdoptTicket {
    /// Returns the labels that determine the scopes of the ticket.
    pub fn ticket_labels(&self) -> TicketLabels<'_> {
        TicketLabels::new(
            self.user.as_str(),
            self.creator.as_str(),
            &self.engine_type,
            &self.labels,
            &self.em,
            &self.used,
        )
    }

    /// Returns the ticket to create under the EM registration `em_epoch`.
    pub fn ticket(&self, by: &Principal, em_epoch: i64, now: OffsetDateTime) -> Ticket {
        Ticket {
            id: self.ticket_id,
            user: self.user.clone(),
            creator: self.creator.clone(),
            engine_type: self.engine_type.clone(),
            em: self.em.clone(),
            labels: self.labels.clone(),
            locked_time: now,
            state: TicketState::Used {
                resource: self.used.clone(),
                engine: self.engine.clone(),
                used_time: now,
                idle_since: None,
            },
            principal: by.clone(),
            em_epoch,
        }
    }

    /// Returns the fields in which a live ticket differs from this adoption; empty if it is the same. `adopted_with` is the
    /// use at the time of the adoption, if recorded; the engine may have reported other amounts since.
    pub fn differences(&self, ticket: &Ticket, adopted_with: Option<&Resource>) -> Vec<&'static str> {
        let TicketState::Used { resource, engine, .. } = &ticket.state else { return vec!["its state: it is locked"] };
        let of_ticket = [
            ("user", self.user == ticket.user),
            ("creator", self.creator == ticket.creator),
            ("engine_type", self.engine_type == ticket.engine_type),
            ("em", self.em == ticket.em),
            ("labels", self.labels == ticket.labels),
            ("engine", self.engine == *engine),
            ("used", self.used == *adopted_with.unwrap_or(resource)),
        ];
        of_ticket.into_iter().filter(|(_, is_same)| !is_same).map(|(what, _)| what).collect()
    }
}
