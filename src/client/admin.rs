//! What administrators ask: `AdminService`.

use crate::{
    domain::{
        adopt::Adopt,
        audit::{AuditReport, Repaired},
        ticket::Ticket,
    },
    transport::{
        convert::{answer, audit, resource},
        proto,
    },
};

use super::{Result, RmClient, calls};

impl RmClient {
    /// Puts an engine that runs into the books, also where there is no room. Needs an administrator.
    pub async fn adopt_ticket(&self, adopt: &Adopt) -> Result<Ticket> {
        let message = proto::AdoptTicketRequest {
            ticket_id: adopt.ticket_id.to_string(),
            em: Some(answer::em_message(&adopt.em)),
            user: adopt.user.to_string(),
            creator: adopt.creator.to_string(),
            engine_type: adopt.engine_type.clone(),
            labels: adopt.labels.as_map().clone(),
            engine: Some(answer::engine_message(&adopt.engine)),
            used: Some(resource::message(adopt.used.parts())),
        };
        let answer = self.make(&calls::ADOPT_TICKET, &message).await?;
        Ok(answer::read_ticket(answer.ticket.unwrap_or_default())?)
    }

    /// Compares every counter with what the tickets say, at one moment.
    pub async fn audit(&self) -> Result<AuditReport> {
        let answer = self.make(&calls::AUDIT, &proto::AuditRequest {}).await?;
        Ok(audit::read_report(answer)?)
    }

    /// Makes every counter what the tickets say.
    pub async fn repair(&self) -> Result<Repaired> {
        let answer = self.make(&calls::REPAIR, &proto::RepairRequest {}).await?;
        Ok(audit::read_repaired(answer)?)
    }
}
