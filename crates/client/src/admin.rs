//! Calls of administrators and operators: `AdminService`. Each method makes one call and converts its reply.

use std::collections::BTreeMap;

use uuid::Uuid;

use rm_model::{
    adoption::AdoptTicket,
    audit::{AuditReport, RepairReport},
    em::EmInstance,
    em_drain::EmDrain,
    hold::{NewHold, ResourceHold},
    name::FieldError,
    operation::LockKey,
    ticket::Ticket,
};
use rm_proto::{
    convert::{answer, audit, operator, resource},
    v1 as proto,
};

use super::{Result, RmClient, calls};

impl RmClient {
    /// Adopts a running engine, even if it does not fit. Requires an administrator.
    pub async fn adopt_ticket(&self, adopt: &AdoptTicket) -> Result<Ticket> {
        let message = proto::AdoptTicketRequest {
            ticket_id: adopt.ticket_id.to_string(),
            em: Some(answer::em_message(&adopt.em)),
            user: adopt.user.to_string(),
            creator: adopt.creator.to_string(),
            engine_type: adopt.engine_type.clone(),
            labels: adopt.labels.as_map().clone(),
            engine: Some(answer::engine_message(&adopt.engine)),
            used: Some(resource::message(adopt.used.parts())),
            return_counters: false,
        };
        let answer = self.make(&calls::ADOPT_TICKET, &message).await?;
        Ok(answer::read_ticket(answer.ticket.unwrap_or_default())?)
    }

    /// Drains an EM until [`RmClient::resume`]. Requires an operator.
    pub async fn drain(&self, em: &EmInstance, reason: &str) -> Result<EmDrain> {
        let message = proto::DrainRequest { em: Some(answer::em_message(em)), reason: reason.to_owned() };
        let answer = self.make(&calls::DRAIN, &message).await?;
        Ok(operator::read_drain(answer.drain.unwrap_or_default())?)
    }

    /// Ends the drain of an EM; returns whether it was drained. Requires an operator.
    pub async fn resume(&self, em: &EmInstance, reason: &str) -> Result<bool> {
        let message = proto::ResumeRequest { em: Some(answer::em_message(em)), reason: reason.to_owned() };
        Ok(self.make(&calls::RESUME, &message).await?.was_drained)
    }

    /// Ends a ticket regardless of its owner; returns how it ended, possibly earlier. Requires an operator.
    pub async fn force_release(&self, ticket_id: Uuid, reason: &str) -> Result<String> {
        let message = proto::ForceReleaseRequest {
            ticket_id: ticket_id.to_string(),
            reason: reason.to_owned(),
            return_counters: false,
        };
        Ok(self.make(&calls::FORCE_RELEASE, &message).await?.ended)
    }

    /// Removes a waiting request from its queues. Its call ends with the reason `REMOVED_FROM_QUEUE`. Requires an operator.
    pub async fn remove_waiting(&self, ticket_id: Uuid, reason: &str) -> Result<()> {
        let message = proto::RemoveWaitingRequest { ticket_id: ticket_id.to_string(), reason: reason.to_owned() };
        self.make(&calls::REMOVE_WAITING, &message).await.map(drop)
    }

    /// Withdraws a ticket that is chosen for reclaim: its engine stays. Requires an operator.
    pub async fn withdraw_reclaim(&self, ticket_id: Uuid, reason: &str) -> Result<()> {
        let message = proto::WithdrawReclaimRequest { ticket_id: ticket_id.to_string(), reason: reason.to_owned() };
        self.make(&calls::WITHDRAW_RECLAIM, &message).await.map(drop)
    }

    /// Blocks all changes to an EM or a user for a bounded time. Requires an operator.
    pub async fn hold(&self, new: &NewHold) -> Result<ResourceHold> {
        let (em, user) = named(&new.key);
        let duration = new.duration.try_into().map_err(|_| FieldError::new("duration", "is too long"))?;
        let message = proto::HoldRequest { em, user, duration: Some(duration), reason: new.reason.to_string() };
        let answer = self.make(&calls::HOLD, &message).await?;
        Ok(operator::read_hold(answer.hold.unwrap_or_default())?)
    }

    /// Ends a hold before its deadline; returns whether it existed. Requires an operator.
    pub async fn release_hold(&self, key: &LockKey) -> Result<bool> {
        let (em, user) = named(key);
        Ok(self.make(&calls::RELEASE_HOLD, &proto::ReleaseHoldRequest { em, user }).await?.was_held)
    }

    /// Returns all holds. Requires an operator.
    pub async fn holds(&self) -> Result<Vec<ResourceHold>> {
        let answer = self.make(&calls::LIST_HOLDS, &proto::ListHoldsRequest {}).await?;
        answer.holds.into_iter().map(|hold| Ok(operator::read_hold(hold)?)).collect()
    }

    /// Compares all stored counters with the tickets, on one snapshot.
    pub async fn audit(&self) -> Result<AuditReport> {
        let answer = self.make(&calls::AUDIT, &proto::AuditRequest {}).await?;
        Ok(audit::read_report(answer)?)
    }

    /// Repairs all stored counters to the sums of the tickets.
    pub async fn repair(&self) -> Result<RepairReport> {
        self.repair_some(proto::RepairRequest::default()).await
    }

    /// As [`RmClient::repair`], for the counters of one EM.
    pub async fn repair_em(&self, em: &EmInstance) -> Result<RepairReport> {
        self.repair_some(proto::RepairRequest { em: Some(answer::em_message(em)), ..Default::default() }).await
    }

    /// As [`RmClient::repair`], for the counters of one scope.
    pub async fn repair_scope(&self, labels: &BTreeMap<String, String>) -> Result<RepairReport> {
        self.repair_some(proto::RepairRequest { scope: labels.clone(), ..Default::default() }).await
    }

    /// Reads a provider once, stored or not; stores nothing. It may take 20 seconds.
    pub async fn check_provider(&self, question: &proto::CheckProviderRequest) -> Result<proto::CheckProviderResponse> {
        self.make(&calls::CHECK_PROVIDER, question).await
    }

    async fn repair_some(&self, question: proto::RepairRequest) -> Result<RepairReport> {
        let answer = self.make(&calls::REPAIR, &question).await?;
        Ok(audit::read_repaired(answer)?)
    }
}

/// Returns the EM or the user of a lock key as message fields.
fn named(key: &LockKey) -> (Option<proto::EmInstance>, String) {
    match key {
        LockKey::Em(em) => (Some(answer::em_message(em)), String::new()),
        LockKey::User(user) => (None, user.to_string()),
    }
}
