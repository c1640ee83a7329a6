//! `AdminService`: audit, repair, adoption, drains, forced releases, removals of waiting requests, withdrawals of chosen tickets, and holds.
//!
//! Each method parses its message, checks the call scope, calls one service and converts the result. The edge has
//! authenticated the caller already. Never: decides or writes; the services do. Caller: the gRPC routes.

use std::time::Duration;

use tonic::Request;

use crate::rpc::{Reply, rpc};
use rm_model::{
    access::CallScope,
    operation::{ForceRelease, Operation, Outcome, RemoveWaiting},
};
use rm_service::{
    audit::AuditService, committer::Committer, error::Error, holds::HoldService, reclaims::ReclaimService,
    ticket_lookup::TicketLookup,
};

use super::{
    authenticator, convert, deadline,
    resource_manager::{submit, unexpected},
};
use rm_proto::v1::{self as proto, admin_service_server::AdminService};

/// Implementation of `AdminService`.
#[derive(Debug)]
pub struct AdminRpc {
    audit: AuditService,
    committer: Committer,
    tickets: TicketLookup,
    holds: HoldService,
    reclaims: ReclaimService,
    /// Timeout of a change whose call states no deadline.
    timeout: Duration,
}

impl AdminRpc {
    /// Creates the implementation on the given services.
    pub fn new(
        audit: AuditService,
        committer: Committer,
        tickets: TicketLookup,
        holds: HoldService,
        reclaims: ReclaimService,
        timeout: Duration,
    ) -> Self {
        Self { audit, committer, tickets, holds, reclaims, timeout }
    }

    async fn submit<M>(&self, call: &Request<M>, operation: Operation) -> Result<Outcome, Error> {
        let deadline = deadline::of_call(call.metadata(), self.timeout);
        self.committer.submit(authenticator::actor(call), operation, deadline.into()).await
    }

    async fn audit(&self, _: Request<proto::AuditRequest>) -> Reply<proto::AuditResponse> {
        Ok(convert::audit::report(&self.audit.audit().await?))
    }

    async fn repair(&self, call: Request<proto::RepairRequest>) -> Reply<proto::RepairResponse> {
        let only = convert::operator::repair(call.get_ref())?;
        if only.is_none() {
            authenticator::check_admin(&call, "the role admin, or the name of one EM or scope")?;
        }
        let by = authenticator::actor_with_reason(&call, &call.get_ref().reason)?;
        let repaired = self.audit.repair(&by, only.as_ref()).await?;
        Ok(convert::audit::repaired(&repaired))
    }

    async fn adopt_ticket(&self, call: Request<proto::AdoptTicketRequest>) -> Reply<proto::AdoptTicketResponse> {
        let adopt = convert::request::adopt(call.get_ref().clone())?;
        let deadline = deadline::of_call(call.metadata(), self.timeout);
        let counters = call.get_ref().return_counters.then_some(CallScope::ALL);
        let (by, reply_options) = (authenticator::actor(&call), (deadline, counters));
        match submit(&self.committer, by, Operation::Adopt(adopt), reply_options).await? {
            (Outcome::Adopted(ticket), counters) => {
                Ok(proto::AdoptTicketResponse { ticket: Some(convert::answer::ticket(&ticket)), counters })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    async fn drain(&self, call: Request<proto::DrainRequest>) -> Reply<proto::DrainResponse> {
        let drain = convert::operator::drain(call.get_ref().clone())?;
        authenticator::check(&call, |reach| reach.check_em(&drain.em))?;
        match self.submit(&call, Operation::Drain(drain)).await? {
            Outcome::Drained(drain) => {
                Ok(proto::DrainResponse { drain: Some(convert::operator::drain_message(&drain)) })
            }
            other => Err(unexpected(&other)),
        }
    }

    async fn resume(&self, call: Request<proto::ResumeRequest>) -> Reply<proto::ResumeResponse> {
        let resume = convert::operator::resume(call.get_ref().clone())?;
        authenticator::check(&call, |reach| reach.check_em(&resume.em))?;
        match self.submit(&call, Operation::Resume(resume)).await? {
            Outcome::Resumed(was_drained) => Ok(proto::ResumeResponse { was_drained }),
            other => Err(unexpected(&other)),
        }
    }

    async fn force_release(&self, call: Request<proto::ForceReleaseRequest>) -> Reply<proto::ForceReleaseResponse> {
        let (named, reason) = convert::operator::force(call.get_ref())?;
        let deadline = deadline::of_call(call.metadata(), self.timeout);
        let ticket = self.tickets.complete(named, deadline).await?;
        let force = Operation::Force(ForceRelease { ticket, reason });
        let reply_options = (deadline, call.get_ref().return_counters.then_some(CallScope::ALL));
        match submit(&self.committer, authenticator::actor(&call), force, reply_options).await? {
            (Outcome::Forced(ended), counters) => Ok(proto::ForceReleaseResponse {
                ended: ended.end.as_str().to_owned(),
                end_time: Some(convert::answer::timestamp(ended.at)),
                counters,
            }),
            (other, _) => Err(unexpected(&other)),
        }
    }

    async fn remove_waiting(&self, call: Request<proto::RemoveWaitingRequest>) -> Reply<proto::RemoveWaitingResponse> {
        let (ticket_id, reason) = convert::operator::remove_waiting(call.get_ref())?;
        let em = self.tickets.em_of_waiting(ticket_id).await?;
        match self.submit(&call, Operation::Remove(RemoveWaiting { ticket_id, em, reason })).await? {
            Outcome::RemovedFromQueue => Ok(proto::RemoveWaitingResponse {}),
            other => Err(unexpected(&other)),
        }
    }

    async fn withdraw_reclaim(
        &self,
        call: Request<proto::WithdrawReclaimRequest>,
    ) -> Reply<proto::WithdrawReclaimResponse> {
        let (ticket_id, reason) = convert::operator::withdraw_reclaim(call.get_ref())?;
        self.reclaims.withdraw(&authenticator::actor(&call), ticket_id, &reason).await?;
        Ok(proto::WithdrawReclaimResponse {})
    }

    async fn hold(&self, call: Request<proto::HoldRequest>) -> Reply<proto::HoldResponse> {
        let new = convert::operator::hold(call.get_ref().clone())?;
        let deadline = deadline::of_call(call.metadata(), self.timeout);
        let hold = self.holds.hold(&authenticator::actor(&call), &new, deadline).await?;
        Ok(proto::HoldResponse { hold: Some(convert::operator::hold_message(&hold)) })
    }

    async fn release_hold(&self, call: Request<proto::ReleaseHoldRequest>) -> Reply<proto::ReleaseHoldResponse> {
        let proto::ReleaseHoldRequest { em, user } = call.get_ref();
        let key = convert::operator::key(em.clone(), user)?;
        let deadline = deadline::of_call(call.metadata(), self.timeout);
        let was_held = self.holds.release(&authenticator::actor(&call), &key, deadline).await?;
        Ok(proto::ReleaseHoldResponse { was_held })
    }

    async fn list_holds(&self, _: Request<proto::ListHoldsRequest>) -> Reply<proto::ListHoldsResponse> {
        let holds = self.holds.list().await?;
        Ok(proto::ListHoldsResponse { holds: holds.iter().map(convert::operator::hold_message).collect() })
    }
}

rpc! {
    AdminService = AdminRpc {
        audit: AuditRequest => AuditResponse,
        repair: RepairRequest => RepairResponse,
        adopt_ticket: AdoptTicketRequest => AdoptTicketResponse,
        drain: DrainRequest => DrainResponse,
        resume: ResumeRequest => ResumeResponse,
        force_release: ForceReleaseRequest => ForceReleaseResponse,
        remove_waiting: RemoveWaitingRequest => RemoveWaitingResponse,
        withdraw_reclaim: WithdrawReclaimRequest => WithdrawReclaimResponse,
        hold: HoldRequest => HoldResponse,
        release_hold: ReleaseHoldRequest => ReleaseHoldResponse,
        list_holds: ListHoldsRequest => ListHoldsResponse,
    }
}
