//! `LimitService`: limits, policies, the order and priorities of waiting requests, and reclaim policies.
//!
//! Each method parses its message, calls the service and converts the result. A caller that is bound to users sees the
//! limits that can apply to these users. The edge has authenticated the caller already. Caller: the gRPC routes.

use std::time::Duration;

use tokio::time::Instant;
use tonic::Request;

use crate::rpc::{Reply, rpc};
use rm_model::{access::CallScope, limit::LabelPattern, name::FieldError, scope};
use rm_service::{
    error::Error,
    limits::{self, SetResult},
};

use super::{authenticator, convert, deadline};
use rm_proto::page::PageRequest;
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

fn parse_pattern_key(key: &str) -> Option<LabelPattern> {
    serde_json::from_str(key).map(LabelPattern::new).ok()
}

/// Returns false for a limit that names only another user.
fn is_shown(pattern: &LabelPattern, reach: &CallScope) -> bool {
    let Some(users) = reach.users() else { return true };
    match pattern.labels().get(scope::USER) {
        Some(Some(user)) => users.iter().any(|own| own.as_str() == user),
        _ => true,
    }
}

impl LimitRpc {
    async fn set_limit(&self, call: Request<proto::SetLimitRequest>) -> Reply<proto::SetLimitResponse> {
        let rule = convert::limit::new_rule("limit", call.get_ref().limit.as_ref())?;
        let expected = convert::limit::expected(call.get_ref().expected_etag.as_deref());
        let by = authenticator::actor_with_reason(&call, &call.get_ref().reason)?;
        let set = self.limits.set(&by, rule, expected, self.deadline(&call)).await?;
        let (decides, over) = match set {
            SetResult::InForce(over) => (true, over),
            SetResult::Counting => (false, vec![]),
        };
        let over_limit = over.iter().map(convert::limit::scope_usage).collect();
        Ok(proto::SetLimitResponse { over_limit, state: convert::limit::state(decides).into() })
    }

    async fn delete_limit(&self, call: Request<proto::DeleteLimitRequest>) -> Reply<proto::DeleteLimitResponse> {
        let missing = || Error::from(FieldError::new("limit", "is required"));
        let limit = call.get_ref().limit.as_ref().ok_or_else(missing)?;
        let pattern = convert::limit::pattern("limit", limit)?;
        let expected = convert::limit::expected(call.get_ref().expected_etag.as_deref());
        let by = authenticator::actor_with_reason(&call, &call.get_ref().reason)?;
        self.limits.delete(&by, &pattern, expected, self.deadline(&call)).await?;
        Ok(proto::DeleteLimitResponse {})
    }

    async fn replace_limits(&self, call: Request<proto::ReplaceLimitsRequest>) -> Reply<proto::ReplaceLimitsResponse> {
        let message = call.get_ref();
        let new = convert::limit::replacement(message)?;
        let by = authenticator::actor_with_reason(&call, &message.reason)?;
        let replaced = match message.dry_run {
            true => self.limits.replace_dry_run(new).await?,
            false => self.limits.replace_and_wait(&by, new, self.deadline(&call)).await?,
        };
        Ok(convert::limit::replaced(&replaced))
    }

    async fn list_limits(&self, call: Request<proto::ListLimitsRequest>) -> Reply<proto::ListLimitsResponse> {
        let proto::ListLimitsRequest { page_size, page_token } = call.get_ref();
        let page = PageRequest::new("ListLimits", *page_size, &())?;
        let after = page.after(page_token, parse_pattern_key)?;
        let (reach, size) = (authenticator::reach(&call)?, page.entries_max());
        let (found, last) = self.limits.list(after.as_ref(), size, &|pattern| is_shown(pattern, reach)).await?;
        let limits = found.iter().map(|(record, decides)| convert::limit::limit_record(record, *decides)).collect();
        let next_page_token = last.map(|last| page.token(&pattern_key(&last))).unwrap_or_default();
        Ok(proto::ListLimitsResponse { limits, next_page_token })
    }

    async fn set_policy(&self, call: Request<proto::SetPolicyRequest>) -> Reply<proto::SetPolicyResponse> {
        let (em_kind, policy) = convert::limit::new_policy("policy", call.get_ref().policy.as_ref())?;
        self.limits.set_policy(&authenticator::actor(&call), &em_kind, &policy, self.deadline(&call)).await?;
        Ok(proto::SetPolicyResponse {})
    }

    async fn list_policies(&self, _: Request<proto::ListPoliciesRequest>) -> Reply<proto::ListPoliciesResponse> {
        let policies = self.limits.policies().await?;
        let policies =
            policies.iter().map(|(em_kind, policy)| convert::limit::policy_message(em_kind, policy)).collect();
        Ok(proto::ListPoliciesResponse { policies })
    }

    async fn set_order(&self, call: Request<proto::SetOrderRequest>) -> Reply<proto::SetOrderResponse> {
        let order = convert::limit::new_order("order", call.get_ref().order.as_ref())?;
        let by = authenticator::actor_with_reason(&call, &call.get_ref().reason)?;
        self.limits.set_order(&by, order, self.deadline(&call)).await?;
        Ok(proto::SetOrderResponse {})
    }

    async fn set_priority(&self, call: Request<proto::SetPriorityRequest>) -> Reply<proto::SetPriorityResponse> {
        let rule = convert::limit::new_priority("priority", call.get_ref().priority.as_ref())?;
        let by = authenticator::actor_with_reason(&call, &call.get_ref().reason)?;
        self.limits.set_priority(&by, rule, self.deadline(&call)).await?;
        Ok(proto::SetPriorityResponse {})
    }

    async fn delete_priority(
        &self,
        call: Request<proto::DeletePriorityRequest>,
    ) -> Reply<proto::DeletePriorityResponse> {
        let pattern = convert::limit::priority_pattern("priority", call.get_ref().priority.as_ref())?;
        let by = authenticator::actor_with_reason(&call, &call.get_ref().reason)?;
        self.limits.delete_priority(&by, pattern, self.deadline(&call)).await?;
        Ok(proto::DeletePriorityResponse {})
    }

    async fn list_priorities(&self, _: Request<proto::ListPrioritiesRequest>) -> Reply<proto::ListPrioritiesResponse> {
        let priorities = self.limits.priorities().await?;
        let priorities = priorities.rules().iter().map(convert::limit::priority_message).collect();
        Ok(proto::ListPrioritiesResponse { priorities })
    }

    async fn set_reclaim_policy(
        &self,
        call: Request<proto::SetReclaimPolicyRequest>,
    ) -> Reply<proto::SetReclaimPolicyResponse> {
        let policy = convert::limit::new_reclaim_policy("policy", call.get_ref().policy.as_ref())?;
        let by = authenticator::actor_with_reason(&call, &call.get_ref().reason)?;
        self.limits.set_reclaim_policy(&by, policy, self.deadline(&call)).await?;
        Ok(proto::SetReclaimPolicyResponse {})
    }

    async fn delete_reclaim_policy(
        &self,
        call: Request<proto::DeleteReclaimPolicyRequest>,
    ) -> Reply<proto::DeleteReclaimPolicyResponse> {
        let pattern = convert::limit::reclaim_pattern("policy", call.get_ref().policy.as_ref())?;
        let by = authenticator::actor_with_reason(&call, &call.get_ref().reason)?;
        self.limits.delete_reclaim_policy(&by, pattern, self.deadline(&call)).await?;
        Ok(proto::DeleteReclaimPolicyResponse {})
    }

    async fn list_reclaim_policies(
        &self,
        _: Request<proto::ListReclaimPoliciesRequest>,
    ) -> Reply<proto::ListReclaimPoliciesResponse> {
        let policies = self.limits.reclaim_policies().await?;
        let policies = policies.rules().iter().map(convert::limit::reclaim_policy_message).collect();
        Ok(proto::ListReclaimPoliciesResponse { policies })
    }

    async fn get_order(&self, _: Request<proto::GetOrderRequest>) -> Reply<proto::GetOrderResponse> {
        Ok(proto::GetOrderResponse { order: Some(convert::limit::order_message(&self.limits.order().await?)) })
    }
}

rpc! {
    LimitService = LimitRpc {
        set_limit: SetLimitRequest => SetLimitResponse,
        delete_limit: DeleteLimitRequest => DeleteLimitResponse,
        replace_limits: ReplaceLimitsRequest => ReplaceLimitsResponse,
        list_limits: ListLimitsRequest => ListLimitsResponse,
        set_policy: SetPolicyRequest => SetPolicyResponse,
        list_policies: ListPoliciesRequest => ListPoliciesResponse,
        set_order: SetOrderRequest => SetOrderResponse,
        get_order: GetOrderRequest => GetOrderResponse,
        set_priority: SetPriorityRequest => SetPriorityResponse,
        delete_priority: DeletePriorityRequest => DeletePriorityResponse,
        list_priorities: ListPrioritiesRequest => ListPrioritiesResponse,
        set_reclaim_policy: SetReclaimPolicyRequest => SetReclaimPolicyResponse,
        delete_reclaim_policy: DeleteReclaimPolicyRequest => DeleteReclaimPolicyResponse,
        list_reclaim_policies: ListReclaimPoliciesRequest => ListReclaimPoliciesResponse,
    }
}
