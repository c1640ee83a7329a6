//! `AdminService`: audit, repair, adoption, drains, forced releases and holds.
//!
//! Each method parses its message, checks the call scope, calls one service and converts the result. The edge has
//! authenticated the caller already. Never: decides or writes; the services do. Caller: the gRPC routes.

use std::time::Duration;

use tonic::{Request, Response, Status};

use crate::status::to_status;
use rm_model::{
    access::CallScope,
    operation::{ForceRelease, Operation, Outcome},
};
use rm_service::{
    audit::AuditService, committer::Committer, error::Error, holds::HoldService, ticket_lookup::TicketLookup,
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
        timeout: Duration,
    ) -> Self {
        Self { audit, committer, tickets, holds, timeout }
    }

    async fn submit<M>(&self, call: &Request<M>, operation: Operation) -> Result<Outcome, Error> {
        let deadline = deadline::of_call(call.metadata(), self.timeout);
        self.committer.submit(authenticator::actor(call), operation, deadline.into()).await
    }
}

#[tonic::async_trait]
impl AdminService for AdminRpc {
    async fn audit(&self, _: Request<proto::AuditRequest>) -> Result<Response<proto::AuditResponse>, Status> {
        Ok(Response::new(convert::audit::report(&self.audit.audit().await.map_err(to_status)?)))
    }

    async fn repair(&self, call: Request<proto::RepairRequest>) -> Result<Response<proto::RepairResponse>, Status> {
        let only = convert::operator::repair(call.get_ref()).map_err(to_status)?;
        if only.is_none() {
            authenticator::check_admin(&call, "the role admin, or the name of one EM or scope").map_err(to_status)?;
        }
        let by = authenticator::actor_with_reason(&call, &call.get_ref().reason).map_err(to_status)?;
        let repaired = self.audit.repair(&by, only.as_ref()).await.map_err(to_status)?;
        Ok(Response::new(convert::audit::repaired(&repaired)))
    }

    async fn adopt_ticket(
        &self,
        call: Request<proto::AdoptTicketRequest>,
    ) -> Result<Response<proto::AdoptTicketResponse>, Status> {
        let adopt = convert::request::adopt(call.get_ref().clone()).map_err(to_status)?;
        let deadline = deadline::of_call(call.metadata(), self.timeout);
        let counters = call.get_ref().return_counters.then_some(CallScope::ALL);
        let (by, reply_options) = (authenticator::actor(&call), (deadline, counters));
        match submit(&self.committer, by, Operation::Adopt(adopt), reply_options).await.map_err(to_status)? {
            (Outcome::Adopted(ticket), counters) => {
                let ticket = Some(convert::answer::ticket(&ticket));
                Ok(Response::new(proto::AdoptTicketResponse { ticket, counters }))
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    async fn drain(&self, call: Request<proto::DrainRequest>) -> Result<Response<proto::DrainResponse>, Status> {
        let drain = convert::operator::drain(call.get_ref().clone()).map_err(to_status)?;
        authenticator::check(&call, |reach| reach.check_em(&drain.em)).map_err(to_status)?;
        match self.submit(&call, Operation::Drain(drain)).await.map_err(to_status)? {
            Outcome::Drained(drain) => {
                Ok(Response::new(proto::DrainResponse { drain: Some(convert::operator::drain_message(&drain)) }))
            }
            other => Err(unexpected(&other)),
        }
    }

    async fn resume(&self, call: Request<proto::ResumeRequest>) -> Result<Response<proto::ResumeResponse>, Status> {
        let resume = convert::operator::resume(call.get_ref().clone()).map_err(to_status)?;
        authenticator::check(&call, |reach| reach.check_em(&resume.em)).map_err(to_status)?;
        match self.submit(&call, Operation::Resume(resume)).await.map_err(to_status)? {
            Outcome::Resumed(was_drained) => Ok(Response::new(proto::ResumeResponse { was_drained })),
            other => Err(unexpected(&other)),
        }
    }

    async fn force_release(
        &self,
        call: Request<proto::ForceReleaseRequest>,
    ) -> Result<Response<proto::ForceReleaseResponse>, Status> {
        let (named, reason) = convert::operator::force(call.get_ref()).map_err(to_status)?;
        let deadline = deadline::of_call(call.metadata(), self.timeout);
        let ticket = self.tickets.complete(named, deadline).await.map_err(to_status)?;
        let force = Operation::Force(ForceRelease { ticket, reason });
        let reply_options = (deadline, call.get_ref().return_counters.then_some(CallScope::ALL));
        match submit(&self.committer, authenticator::actor(&call), force, reply_options).await.map_err(to_status)? {
            (Outcome::Forced(ended), counters) => Ok(Response::new(proto::ForceReleaseResponse {
                ended: ended.end.as_str().to_owned(),
                end_time: Some(convert::answer::timestamp(ended.at)),
                counters,
            })),
            (other, _) => Err(unexpected(&other)),
        }
    }

    async fn hold(&self, call: Request<proto::HoldRequest>) -> Result<Response<proto::HoldResponse>, Status> {
        let new = convert::operator::hold(call.get_ref().clone()).map_err(to_status)?;
        let deadline = deadline::of_call(call.metadata(), self.timeout);
        let hold = self.holds.hold(&authenticator::actor(&call), &new, deadline).await.map_err(to_status)?;
        Ok(Response::new(proto::HoldResponse { hold: Some(convert::operator::hold_message(&hold)) }))
    }

    async fn release_hold(
        &self,
        call: Request<proto::ReleaseHoldRequest>,
    ) -> Result<Response<proto::ReleaseHoldResponse>, Status> {
        let proto::ReleaseHoldRequest { em, user } = call.get_ref();
        let key = convert::operator::key(em.clone(), user).map_err(to_status)?;
        let was_held = self.holds.release(&authenticator::actor(&call), &key).await.map_err(to_status)?;
        Ok(Response::new(proto::ReleaseHoldResponse { was_held }))
    }

    async fn list_holds(
        &self,
        _: Request<proto::ListHoldsRequest>,
    ) -> Result<Response<proto::ListHoldsResponse>, Status> {
        let holds = self.holds.list().await.map_err(to_status)?;
        Ok(Response::new(proto::ListHoldsResponse {
            holds: holds.iter().map(convert::operator::hold_message).collect(),
        }))
    }
}
