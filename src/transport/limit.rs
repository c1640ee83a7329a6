//! `LimitService`: who may hold how much.

use std::time::Duration;

use tokio::time::Instant;
use tonic::{Request, Response, Status};

use crate::{
    domain::name::FieldError,
    error::Error,
    service::limits::{self, Set},
};

use super::{
    convert, deadline, identity,
    proto::{self, limit_service_server::LimitService},
};

/// Changes and tells the limits.
#[derive(Debug)]
pub struct Limit {
    limits: limits::LimitService,
    /// How long a change may take if the call does not say.
    timeout: Duration,
}

impl Limit {
    /// On top of the service.
    pub fn new(limits: limits::LimitService, timeout: Duration) -> Self {
        Self { limits, timeout }
    }

    fn deadline<M>(&self, call: &Request<M>) -> Instant {
        deadline::of_call(call.metadata(), self.timeout)
    }
}

#[tonic::async_trait]
impl LimitService for Limit {
    async fn set_limit(
        &self,
        call: Request<proto::SetLimitRequest>,
    ) -> Result<Response<proto::SetLimitResponse>, Status> {
        let rule = convert::limit::rule("limit", call.get_ref().limit.as_ref()).map_err(Error::from)?;
        let (decides, over) = match self.limits.set(&identity::of_call(&call), rule, self.deadline(&call)).await? {
            Set::InForce(over) => (true, over),
            Set::Counting => (false, vec![]),
        };
        let over_limit = over.iter().map(convert::limit::scope_usage).collect();
        Ok(Response::new(proto::SetLimitResponse { over_limit, state: convert::limit::state(decides).into() }))
    }

    async fn delete_limit(
        &self,
        call: Request<proto::DeleteLimitRequest>,
    ) -> Result<Response<proto::DeleteLimitResponse>, Status> {
        let missing = || Error::from(FieldError::new("limit", "is required"));
        let limit = call.get_ref().limit.as_ref().ok_or_else(missing)?;
        let pattern = convert::limit::pattern("limit", limit).map_err(Error::from)?;
        self.limits.delete(&identity::of_call(&call), &pattern, self.deadline(&call)).await?;
        Ok(Response::new(proto::DeleteLimitResponse {}))
    }

    async fn list_limits(
        &self,
        _: Request<proto::ListLimitsRequest>,
    ) -> Result<Response<proto::ListLimitsResponse>, Status> {
        let limits = self.limits.current().await?.rules().map(convert::limit::limit_with_state).collect();
        Ok(Response::new(proto::ListLimitsResponse { limits }))
    }

    async fn set_policy(
        &self,
        call: Request<proto::SetPolicyRequest>,
    ) -> Result<Response<proto::SetPolicyResponse>, Status> {
        let (em_kind, policy) =
            convert::limit::policy("policy", call.get_ref().policy.as_ref()).map_err(Error::from)?;
        self.limits.set_policy(&identity::of_call(&call), &em_kind, &policy, self.deadline(&call)).await?;
        Ok(Response::new(proto::SetPolicyResponse {}))
    }

    async fn list_policies(
        &self,
        _: Request<proto::ListPoliciesRequest>,
    ) -> Result<Response<proto::ListPoliciesResponse>, Status> {
        let policies = self.limits.policies().await?;
        let policies =
            policies.iter().map(|(em_kind, policy)| convert::limit::policy_message(em_kind, policy)).collect();
        Ok(Response::new(proto::ListPoliciesResponse { policies }))
    }
}
