//! Calls that administrators make for limits: `LimitService`. Each method makes one call, or all calls of a list.

use std::collections::BTreeMap;

use rm_model::{
    limit::{LabelPattern, Rule, ScopeUsage},
    limit_mode::LimitMode,
    name::Name,
    order::QueueOrder,
    policy::Policy,
    priority::PriorityRule,
    reclaim::{ReclaimMode, ReclaimPolicy},
};
use rm_proto::{convert::limit, v1 as proto};

use super::{PAGE_SIZE, Result, RmClient, calls};

impl RmClient {
    /// Adds a limit, or changes the one with the same pattern. Returns scopes whose use exceeds it.
    pub async fn set_limit(&self, rule: &Rule) -> Result<Vec<ScopeUsage>> {
        let message = proto::SetLimitRequest { limit: Some(limit::limit(rule)), ..Default::default() };
        let answer = self.make(&calls::SET_LIMIT, &message).await?;
        answer.over_limit.into_iter().map(|scope| Ok(limit::read_scope_usage(scope)?)).collect()
    }

    /// Deletes a limit.
    pub async fn delete_limit(&self, pattern: &LabelPattern) -> Result<()> {
        let rule =
            Rule { pattern: pattern.clone(), mode: LimitMode::Off, max: BTreeMap::new(), guarantee: BTreeMap::new() };
        let message = proto::DeleteLimitRequest { limit: Some(limit::limit(&rule)), ..Default::default() };
        self.make(&calls::DELETE_LIMIT, &message).await?;
        Ok(())
    }

    /// Returns all limits, in check order.
    pub async fn limits(&self) -> Result<Vec<Rule>> {
        let ask = |page_token| proto::ListLimitsRequest { page_size: PAGE_SIZE, page_token };
        let rule = |message: proto::Limit| limit::rule("limit", Some(&message));
        self.list(&calls::LIST_LIMITS, ask, |page| (page.limits, page.next_page_token), rule).await
    }

    /// Sets the policy of an EM kind.
    pub async fn set_policy(&self, em_kind: &Name, policy: &Policy) -> Result<()> {
        let message = proto::SetPolicyRequest { policy: Some(limit::policy_message(em_kind, policy)) };
        self.make(&calls::SET_POLICY, &message).await?;
        Ok(())
    }

    /// Sets the order of waiting requests.
    pub async fn set_order(&self, order: &QueueOrder, reason: &str) -> Result<()> {
        let message = proto::SetOrderRequest { order: Some(limit::order_message(order)), reason: reason.to_owned() };
        self.make(&calls::SET_ORDER, &message).await?;
        Ok(())
    }

    /// Sets a priority rule.
    pub async fn set_priority(&self, rule: &PriorityRule, reason: &str) -> Result<()> {
        let priority = Some(limit::priority_message(rule));
        self.make(&calls::SET_PRIORITY, &proto::SetPriorityRequest { priority, reason: reason.to_owned() }).await?;
        Ok(())
    }

    /// Deletes a priority rule.
    pub async fn delete_priority(&self, pattern: &LabelPattern, reason: &str) -> Result<()> {
        let rule = PriorityRule { pattern: pattern.clone(), default: 0, max: 0 };
        let priority = Some(limit::priority_message(&rule));
        self.make(&calls::DELETE_PRIORITY, &proto::DeletePriorityRequest { priority, reason: reason.to_owned() })
            .await?;
        Ok(())
    }

    /// Returns the priority rules, in the order of their evaluation.
    pub async fn priorities(&self) -> Result<Vec<PriorityRule>> {
        let answer = self.make(&calls::LIST_PRIORITIES, &proto::ListPrioritiesRequest {}).await?;
        let rule = |message: &proto::Priority| Ok(limit::priority("priorities", Some(message))?);
        answer.priorities.iter().map(rule).collect()
    }

    /// Sets a reclaim policy.
    pub async fn set_reclaim_policy(&self, policy: &ReclaimPolicy, reason: &str) -> Result<()> {
        let (policy, reason) = (Some(limit::reclaim_policy_message(policy)), reason.to_owned());
        self.make(&calls::SET_RECLAIM_POLICY, &proto::SetReclaimPolicyRequest { policy, reason }).await?;
        Ok(())
    }

    /// Deletes a reclaim policy.
    pub async fn delete_reclaim_policy(&self, pattern: &LabelPattern, reason: &str) -> Result<()> {
        let policy = ReclaimPolicy::new(pattern.clone(), ReclaimMode::Off);
        let (policy, reason) = (Some(limit::reclaim_policy_message(&policy)), reason.to_owned());
        self.make(&calls::DELETE_RECLAIM_POLICY, &proto::DeleteReclaimPolicyRequest { policy, reason }).await?;
        Ok(())
    }

    /// Returns the reclaim policies, in the order of their evaluation.
    pub async fn reclaim_policies(&self) -> Result<Vec<ReclaimPolicy>> {
        let answer = self.make(&calls::LIST_RECLAIM_POLICIES, &proto::ListReclaimPoliciesRequest {}).await?;
        let policy = |message: &proto::ReclaimPolicy| Ok(limit::reclaim_policy("policies", Some(message))?);
        answer.policies.iter().map(policy).collect()
    }

    /// Returns the order of waiting requests.
    pub async fn order(&self) -> Result<QueueOrder> {
        let answer = self.make(&calls::GET_ORDER, &proto::GetOrderRequest {}).await?;
        Ok(limit::order("order", answer.order.as_ref())?)
    }

    /// Returns the policies of all EM kinds, by application name.
    pub async fn policies(&self) -> Result<BTreeMap<Name, Policy>> {
        let answer = self.make(&calls::LIST_POLICIES, &proto::ListPoliciesRequest {}).await?;
        answer.policies.iter().map(|message| Ok(limit::policy("policy", Some(message))?)).collect()
    }
}
