//! `AdminService`: whether the books are in order, putting them in order, and putting engines into them.

use std::time::Duration;

use tonic::{Request, Response, Status};

use crate::{
    domain::operation::{Operation, Outcome},
    error::Error,
    service::{audit::AuditService, committer::Committer},
};

use super::{
    convert, deadline, identity,
    proto::{self, admin_service_server::AdminService},
    resource_manager::unexpected,
};

/// Audits, repairs and adopts.
#[derive(Debug)]
pub struct Admin {
    audit: AuditService,
    committer: Committer,
    /// How long an adoption may take if the call does not say.
    timeout: Duration,
}

impl Admin {
    /// On top of the services.
    pub fn new(audit: AuditService, committer: Committer, timeout: Duration) -> Self {
        Self { audit, committer, timeout }
    }
}

#[tonic::async_trait]
impl AdminService for Admin {
    async fn audit(&self, _: Request<proto::AuditRequest>) -> Result<Response<proto::AuditResponse>, Status> {
        Ok(Response::new(convert::audit::report(&self.audit.audit().await?)))
    }

    async fn repair(&self, call: Request<proto::RepairRequest>) -> Result<Response<proto::RepairResponse>, Status> {
        Ok(Response::new(convert::audit::repaired(&self.audit.repair(&identity::of_call(&call)).await?)))
    }

    async fn adopt_ticket(
        &self,
        call: Request<proto::AdoptTicketRequest>,
    ) -> Result<Response<proto::AdoptTicketResponse>, Status> {
        let adopt = convert::request::adopt(call.get_ref().clone()).map_err(Error::from)?;
        let deadline = deadline::of_call(call.metadata(), self.timeout);
        match self.committer.submit(&identity::of_call(&call), Operation::Adopt(adopt), deadline).await? {
            Outcome::Adopted(ticket) => {
                Ok(Response::new(proto::AdoptTicketResponse { ticket: Some(convert::answer::ticket(&ticket)) }))
            }
            other => Err(unexpected(&other)),
        }
    }
}
