//! `LimitService`: who may hold how much.

use tonic::{Request, Response, Status};

use crate::{domain::name::FieldError, error::Error, service::limits};

use super::{
    convert,
    proto::{self, limit_service_server::LimitService},
};

/// Changes and tells the limits.
#[derive(Debug)]
pub struct Limit(limits::LimitService);

impl Limit {
    /// On top of the service.
    pub fn new(limits: limits::LimitService) -> Self {
        Self(limits)
    }
}

#[tonic::async_trait]
impl LimitService for Limit {
    async fn set_limit(
        &self,
        call: Request<proto::SetLimitRequest>,
    ) -> Result<Response<proto::SetLimitResponse>, Status> {
        let rule = convert::limit::rule("limit", call.get_ref().limit.as_ref()).map_err(Error::from)?;
        let over_limit = self.0.set(rule).await?.iter().map(convert::limit::scope_usage).collect();
        Ok(Response::new(proto::SetLimitResponse { over_limit }))
    }

    async fn delete_limit(
        &self,
        call: Request<proto::DeleteLimitRequest>,
    ) -> Result<Response<proto::DeleteLimitResponse>, Status> {
        let missing = || Error::from(FieldError::new("limit", "is required"));
        let limit = call.get_ref().limit.as_ref().ok_or_else(missing)?;
        self.0.delete(&convert::limit::pattern("limit", limit).map_err(Error::from)?).await?;
        Ok(Response::new(proto::DeleteLimitResponse {}))
    }

    async fn list_limits(
        &self,
        _: Request<proto::ListLimitsRequest>,
    ) -> Result<Response<proto::ListLimitsResponse>, Status> {
        let limits = self.0.current().await?.rules().map(convert::limit::limit).collect();
        Ok(Response::new(proto::ListLimitsResponse { limits }))
    }

    async fn set_policy(
        &self,
        call: Request<proto::SetPolicyRequest>,
    ) -> Result<Response<proto::SetPolicyResponse>, Status> {
        let (em_kind, policy) =
            convert::limit::policy("policy", call.get_ref().policy.as_ref()).map_err(Error::from)?;
        self.0.set_policy(&em_kind, &policy).await?;
        Ok(Response::new(proto::SetPolicyResponse {}))
    }

    async fn list_policies(
        &self,
        _: Request<proto::ListPoliciesRequest>,
    ) -> Result<Response<proto::ListPoliciesResponse>, Status> {
        let policies = self.0.policies().await?;
        let policies =
            policies.iter().map(|(em_kind, policy)| convert::limit::policy_message(em_kind, policy)).collect();
        Ok(Response::new(proto::ListPoliciesResponse { policies }))
    }
}
