//! `LimitService`: limits and policies.
//!
//! Each method parses its message, calls the service and converts the result. A caller that is bound to users sees the
//! limits that can apply to these users. The edge has authenticated the caller already. Caller: the gRPC routes.

use std::time::Duration;

use tokio::time::Instant;
use tonic::{Request, Response, Status};

use crate::status::to_status;
use rm_model::{access::CallScope, limit::LabelPattern, name::FieldError, scope};
use rm_service::{
    error::Error,
    limits::{self, SetResult},
};

use super::{authenticator, convert, deadline};
use rm_proto::page::{PageRequest, bad_token};
use rm_proto::v1::{self as proto, limit_service_server::LimitService};

/// Implementation of `LimitService`.
#[derive(Debug)]
pub struct LimitRpc {
    limits: limits::LimitService,
    /// Timeout of a change whose call states no deadline.
    timeout: Duration,
}

impl LimitRpc {
    /// Creates the implementation on the given service.
    pub fn new(limits: limits::LimitService, timeout: Duration) -> Self {
        Self { limits, timeout }
    }

    fn deadline<M>(&self, call: &Request<M>) -> Instant {
        deadline::of_call(call.metadata(), self.timeout)
    }
}

/// Page key of a limit: its pattern as JSON.
fn pattern_key(pattern: &LabelPattern) -> String {
    serde_json::json!(pattern.labels()).to_string()
}

fn parse_pattern_key(key: &str) -> Result<LabelPattern, FieldError> {
    serde_json::from_str(key).map(LabelPattern::new).map_err(|_| bad_token())
}

/// Returns false for a limit that names only another user.
fn is_shown(pattern: &LabelPattern, reach: &CallScope) -> bool {
    let Some(users) = reach.users() else { return true };
    match pattern.labels().get(scope::USER) {
        Some(Some(user)) => users.iter().any(|own| own.as_str() == user),
        _ => true,
    }
}

#[tonic::async_trait]
impl LimitService for LimitRpc {
    async fn set_limit(
        &self,
        call: Request<proto::SetLimitRequest>,
    ) -> Result<Response<proto::SetLimitResponse>, Status> {
        let rule = convert::limit::new_rule("limit", call.get_ref().limit.as_ref()).map_err(to_status)?;
        let expected = convert::limit::expected(call.get_ref().expected_etag.as_deref());
        let set = self
            .limits
            .set(&authenticator::actor(&call), rule, expected, self.deadline(&call))
            .await
            .map_err(to_status)?;
        let (decides, over) = match set {
            SetResult::InForce(over) => (true, over),
            SetResult::Counting => (false, vec![]),
        };
        let over_limit = over.iter().map(convert::limit::scope_usage).collect();
        Ok(Response::new(proto::SetLimitResponse { over_limit, state: convert::limit::state(decides).into() }))
    }

    async fn delete_limit(
        &self,
        call: Request<proto::DeleteLimitRequest>,
    ) -> Result<Response<proto::DeleteLimitResponse>, Status> {
        let missing = || Error::from(FieldError::new("limit", "is required"));
        let limit = call.get_ref().limit.as_ref().ok_or_else(missing).map_err(to_status)?;
        let pattern = convert::limit::pattern("limit", limit).map_err(to_status)?;
        let expected = convert::limit::expected(call.get_ref().expected_etag.as_deref());
        let by = authenticator::actor_with_reason(&call, &call.get_ref().reason).map_err(to_status)?;
        self.limits.delete(&by, &pattern, expected, self.deadline(&call)).await.map_err(to_status)?;
        Ok(Response::new(proto::DeleteLimitResponse {}))
    }

    async fn replace_limits(
        &self,
        call: Request<proto::ReplaceLimitsRequest>,
    ) -> Result<Response<proto::ReplaceLimitsResponse>, Status> {
        let message = call.get_ref();
        let rules = convert::limit::rules("limits", &message.limits).map_err(to_status)?;
        let by = authenticator::actor_with_reason(&call, &message.reason).map_err(to_status)?;
        let replaced = match message.dry_run {
            true => self.limits.replace_dry_run(rules).await.map_err(to_status)?,
            false => self.limits.replace_and_wait(&by, rules, self.deadline(&call)).await.map_err(to_status)?,
        };
        Ok(Response::new(convert::limit::replaced(&replaced)))
    }

    async fn list_limits(
        &self,
        call: Request<proto::ListLimitsRequest>,
    ) -> Result<Response<proto::ListLimitsResponse>, Status> {
        let proto::ListLimitsRequest { page_size, page_token } = call.get_ref();
        let page = PageRequest::new("ListLimits", *page_size, &()).map_err(to_status)?;
        let key = page.key(page_token).map_err(to_status)?;
        let after = key.map(parse_pattern_key).transpose().map_err(to_status)?;
        let (reach, size) =
            (authenticator::reach(&call).map_err(to_status)?, usize::try_from(page.size).unwrap_or(usize::MAX));
        let (found, last) =
            self.limits.list(after.as_ref(), size, |pattern| is_shown(pattern, reach)).await.map_err(to_status)?;
        let limits = found.iter().map(|(record, decides)| convert::limit::limit_record(record, *decides)).collect();
        let next_page_token = last.map(|last| page.token(&pattern_key(&last))).unwrap_or_default();
        Ok(Response::new(proto::ListLimitsResponse { limits, next_page_token }))
    }

    async fn set_policy(
        &self,
        call: Request<proto::SetPolicyRequest>,
    ) -> Result<Response<proto::SetPolicyResponse>, Status> {
        let (em_kind, policy) =
            convert::limit::new_policy("policy", call.get_ref().policy.as_ref()).map_err(to_status)?;
        self.limits
            .set_policy(&authenticator::actor(&call), &em_kind, &policy, self.deadline(&call))
            .await
            .map_err(to_status)?;
        Ok(Response::new(proto::SetPolicyResponse {}))
    }

    async fn list_policies(
        &self,
        _: Request<proto::ListPoliciesRequest>,
    ) -> Result<Response<proto::ListPoliciesResponse>, Status> {
        let policies = self.limits.policies().await.map_err(to_status)?;
        let policies =
            policies.iter().map(|(em_kind, policy)| convert::limit::policy_message(em_kind, policy)).collect();
        Ok(Response::new(proto::ListPoliciesResponse { policies }))
    }
}
