//! Engines that live and are in no books: from the tables of Linkis, or after a database was lost.

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

/// A live engine is put into the books, whether or not there is room for it: it is there.
#[derive(Debug, Clone, PartialEq)]
pub struct Adopt {
    /// The name that its ticket gets: never nil.
    pub ticket_id: Uuid,
    /// For whom it runs.
    pub user: Name,
    /// By which application of the user.
    pub creator: Name,
    /// The engine's type; may be empty.
    pub engine_type: String,
    /// Where it runs.
    pub em: EmInstance,
    /// What it is counted by besides.
    pub labels: Labels,
    /// The engine.
    pub engine: EngineInstance,
    /// What it uses.
    pub used: Resource,
}

impl Adopt {
    /// The labels that decide in which scopes it counts.
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

    /// The ticket that it makes, under a registration of its EM.
    pub fn ticket(&self, by: &Principal, em_epoch: i64, now: OffsetDateTime) -> Ticket {
        Ticket {
            id: self.ticket_id,
            user: self.user.clone(),
            creator: self.creator.clone(),
            engine_type: self.engine_type.clone(),
            em: self.em.clone(),
            labels: self.labels.clone(),
            locked_time: now,
            state: TicketState::Used { resource: self.used.clone(), engine: self.engine.clone(), used_time: now },
            principal: by.clone(),
            em_epoch,
        }
    }

    /// In what a live ticket is another one; empty if it is this one. `adopted_with` is what it used when it was adopted, if that is
    /// remembered: it may have reported something else since.
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
