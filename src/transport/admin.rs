//! `AdminService`: whether the books are in order, and putting them in order.

use tonic::{Request, Response, Status};

use crate::service::audit::AuditService;

use super::{
    convert, identity,
    proto::{self, admin_service_server::AdminService},
};

/// Audits and repairs.
#[derive(Debug)]
pub struct Admin(AuditService);

impl Admin {
    /// On top of the service.
    pub fn new(audit: AuditService) -> Self {
        Self(audit)
    }
}

#[tonic::async_trait]
impl AdminService for Admin {
    async fn audit(&self, _: Request<proto::AuditRequest>) -> Result<Response<proto::AuditResponse>, Status> {
        Ok(Response::new(convert::audit::report(&self.0.audit().await?)))
    }

    async fn repair(&self, call: Request<proto::RepairRequest>) -> Result<Response<proto::RepairResponse>, Status> {
        Ok(Response::new(convert::audit::repaired(&self.0.repair(&identity::of_call(&call)).await?)))
    }
}
