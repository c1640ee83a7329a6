//! Table of all calls: the path, the messages and the idempotency of each, and the maximum size of a large reply.
//!
//! A call is marked as safe only if a repetition with an unknown first result has no further effect. `Watch` is not
//! in the table, because this client does not use it.
//! Callers: the methods of [`RmClient`](super::RmClient), and programs that use the messages of the API.

use rm_proto::v1 as proto;

use super::{call::ApiCall, retry::Idempotency};

/// Maximum size of the largest replies, in bytes: an audit report can contain a thousand scopes with long names.
const AUDIT_BYTES_MAX: usize = 64 << 20;

const SAFE: Idempotency = Idempotency::Safe;
const ONLY_IF_NOT_DONE: Idempotency = Idempotency::OnlyIfNotDone;

/// Defines one constant per call, and the list of all paths.
macro_rules! calls {
    ($($(#[$why:meta])* $name:ident: $service:literal / $call:literal, $question:ident => $answer:ident, $repeat:expr;)*) => {
        $(
            $(#[$why])*
            pub const $name: ApiCall<proto::$question, proto::$answer> =
                ApiCall::new(concat!("/linkis.rm.v1.", $service, "/", $call), $repeat);
        )*

        #[cfg(test)]
        const ALL: &[(&str, Idempotency)] = &[$(($name.path(), $name.method.repeat)),*];
    };
}

calls! {
    /// A repetition succeeds.
    REGISTER: "ResourceManagerService" / "Register", RegisterRequest => RegisterResponse, SAFE;
    /// A repetition fails because the EM does not exist, or removes a later registration.
    UNREGISTER: "ResourceManagerService" / "Unregister", UnregisterRequest => UnregisterResponse, ONLY_IF_NOT_DONE;
    /// Granted once per request id; a dry run changes nothing.
    REQUEST_RESOURCE: "ResourceManagerService" / "RequestResource", RequestResourceRequest => RequestResourceResponse, SAFE;
    /// A repetition succeeds.
    RESOURCE_INITED: "ResourceManagerService" / "ResourceInited", ResourceInitedRequest => ResourceInitedResponse, SAFE;
    /// A repetition succeeds.
    RESOURCE_REPORTED: "ResourceManagerService" / "ResourceReported", ResourceReportedRequest => ResourceReportedResponse, SAFE;
    /// A repetition succeeds.
    RESOURCE_RELEASED: "ResourceManagerService" / "ResourceReleased", ResourceReleasedRequest => ResourceReleasedResponse, SAFE;
    /// A report with an equal sequence has no further effect.
    HEARTBEAT: "ResourceManagerService" / "Heartbeat", HeartbeatRequest => HeartbeatResponse, SAFE;
    /// A repetition succeeds, even with the etag of the earlier state.
    SET_LIMIT: "LimitService" / "SetLimit", SetLimitRequest => SetLimitResponse, SAFE;
    /// A repetition fails because the limit does not exist, or deletes a later limit.
    DELETE_LIMIT: "LimitService" / "DeleteLimit", DeleteLimitRequest => DeleteLimitResponse, ONLY_IF_NOT_DONE;
    /// A repetition does not return the changes, or reverts later changes.
    REPLACE_LIMITS_SMALL: "LimitService" / "ReplaceLimits", ReplaceLimitsRequest => ReplaceLimitsResponse, ONLY_IF_NOT_DONE;
    /// Only reads.
    LIST_LIMITS: "LimitService" / "ListLimits", ListLimitsRequest => ListLimitsResponse, SAFE;
    /// A repetition changes nothing.
    SET_POLICY: "LimitService" / "SetPolicy", SetPolicyRequest => SetPolicyResponse, SAFE;
    /// Only reads.
    LIST_POLICIES: "LimitService" / "ListPolicies", ListPoliciesRequest => ListPoliciesResponse, SAFE;
    /// A repetition changes nothing.
    SET_ORDER: "LimitService" / "SetOrder", SetOrderRequest => SetOrderResponse, SAFE;
    /// A repetition changes nothing.
    SET_PRIORITY: "LimitService" / "SetPriority", SetPriorityRequest => SetPriorityResponse, SAFE;
    /// A repetition fails because the rule does not exist, or deletes a later rule.
    DELETE_PRIORITY: "LimitService" / "DeletePriority", DeletePriorityRequest => DeletePriorityResponse, ONLY_IF_NOT_DONE;
    /// Only reads.
    LIST_PRIORITIES: "LimitService" / "ListPriorities", ListPrioritiesRequest => ListPrioritiesResponse, SAFE;
    /// A repetition changes nothing.
    SET_RECLAIM_POLICY: "LimitService" / "SetReclaimPolicy", SetReclaimPolicyRequest => SetReclaimPolicyResponse, SAFE;
    /// A repetition fails because the policy does not exist, or deletes a later policy.
    DELETE_RECLAIM_POLICY: "LimitService" / "DeleteReclaimPolicy", DeleteReclaimPolicyRequest => DeleteReclaimPolicyResponse, ONLY_IF_NOT_DONE;
    /// Only reads.
    LIST_RECLAIM_POLICIES: "LimitService" / "ListReclaimPolicies", ListReclaimPoliciesRequest => ListReclaimPoliciesResponse, SAFE;
    /// Only reads.
    GET_ORDER: "LimitService" / "GetOrder", GetOrderRequest => GetOrderResponse, SAFE;
    /// Only reads.
    LIST_SCOPES: "UsageService" / "ListScopes", ListScopesRequest => ListScopesResponse, SAFE;
    /// Only reads.
    LIST_REFUSALS: "UsageService" / "ListRefusals", ListRefusalsRequest => ListRefusalsResponse, SAFE;
    /// Only reads.
    GET_USAGE: "UsageService" / "GetUsage", GetUsageRequest => GetUsageResponse, SAFE;
    /// Only reads.
    LIST_USERS: "UsageService" / "ListUsers", ListUsersRequest => ListUsersResponse, SAFE;
    /// Only reads.
    LIST_ACTIONS: "UsageService" / "ListActions", ListActionsRequest => ListActionsResponse, SAFE;
    /// Only reads.
    FOLLOW_ACTIONS: "UsageService" / "FollowActions", FollowActionsRequest => FollowActionsResponse, SAFE;
    /// Only reads.
    GET_SCOPE: "UsageService" / "GetScope", GetScopeRequest => GetScopeResponse, SAFE;
    /// Only reads.
    BATCH_GET_EMS: "UsageService" / "BatchGetEms", BatchGetEmsRequest => BatchGetEmsResponse, SAFE;
    /// Only reads.
    BATCH_GET_TICKETS: "UsageService" / "BatchGetTickets", BatchGetTicketsRequest => BatchGetTicketsResponse, SAFE;
    /// Only reads.
    LIST_WAITING: "UsageService" / "ListWaiting", ListWaitingRequest => ListWaitingResponse, SAFE;
    /// Only reads.
    LIST_RECLAIMS: "UsageService" / "ListReclaims", ListReclaimsRequest => ListReclaimsResponse, SAFE;
    /// Only reads.
    GET_SERVER_INFO: "UsageService" / "GetServerInfo", GetServerInfoRequest => GetServerInfoResponse, SAFE;
    /// Only reads.
    GET_EM: "UsageService" / "GetEm", GetEmRequest => GetEmResponse, SAFE;
    /// Only reads.
    LIST_EMS: "UsageService" / "ListEms", ListEmsRequest => ListEmsResponse, SAFE;
    /// Only reads.
    GET_TICKET: "UsageService" / "GetTicket", GetTicketRequest => GetTicketResponse, SAFE;
    /// Only reads.
    LIST_TICKETS: "UsageService" / "ListTickets", ListTicketsRequest => ListTicketsResponse, SAFE;
    /// Only reads.
    GET_OVERVIEW: "UsageService" / "GetOverview", GetOverviewRequest => GetOverviewResponse, SAFE;
    /// Only reads.
    LIST_INSTANCES: "UsageService" / "ListInstances", ListInstancesRequest => ListInstancesResponse, SAFE;
    /// Only reads.
    LIST_TASKS: "UsageService" / "ListTasks", ListTasksRequest => ListTasksResponse, SAFE;
    /// Only reads.
    AUDIT_SMALL: "AdminService" / "Audit", AuditRequest => AuditResponse, SAFE;
    /// A repetition does not return the repairs.
    REPAIR: "AdminService" / "Repair", RepairRequest => RepairResponse, ONLY_IF_NOT_DONE;
    /// A repetition succeeds.
    ADOPT_TICKET: "AdminService" / "AdoptTicket", AdoptTicketRequest => AdoptTicketResponse, SAFE;
    /// A repetition changes nothing.
    DRAIN: "AdminService" / "Drain", DrainRequest => DrainResponse, SAFE;
    /// A repetition does not return that the EM was drained, or ends a later drain.
    RESUME: "AdminService" / "Resume", ResumeRequest => ResumeResponse, ONLY_IF_NOT_DONE;
    /// A repetition succeeds.
    FORCE_RELEASE: "AdminService" / "ForceRelease", ForceReleaseRequest => ForceReleaseResponse, SAFE;
    /// A repetition changes nothing.
    REMOVE_WAITING: "AdminService" / "RemoveWaiting", RemoveWaitingRequest => RemoveWaitingResponse, SAFE;
    /// A repetition changes nothing.
    WITHDRAW_RECLAIM: "AdminService" / "WithdrawReclaim", WithdrawReclaimRequest => WithdrawReclaimResponse, SAFE;
    /// A repetition restarts the duration.
    HOLD: "AdminService" / "Hold", HoldRequest => HoldResponse, SAFE;
    /// A repetition does not return that the hold existed, or ends a later hold.
    RELEASE_HOLD: "AdminService" / "ReleaseHold", ReleaseHoldRequest => ReleaseHoldResponse, ONLY_IF_NOT_DONE;
    /// Only reads.
    LIST_HOLDS: "AdminService" / "ListHolds", ListHoldsRequest => ListHoldsResponse, SAFE;
    /// A repetition writes the provider again under another etag and overwrites later changes.
    PUT_PROVIDER: "ExternalResourceService" / "PutProvider", PutProviderRequest => PutProviderResponse, ONLY_IF_NOT_DONE;
    /// A repetition fails because the provider does not exist, or deletes a later provider.
    DELETE_PROVIDER: "ExternalResourceService" / "DeleteProvider", DeleteProviderRequest => DeleteProviderResponse, ONLY_IF_NOT_DONE;
    /// Only reads.
    LIST_PROVIDERS: "ExternalResourceService" / "ListProviders", ListProvidersRequest => ListProvidersResponse, SAFE;
    /// Only reads.
    CHECK_PROVIDER: "ExternalResourceService" / "CheckProvider", CheckProviderRequest => CheckProviderResponse, SAFE;
    /// Only reads.
    GET_QUEUE: "ExternalResourceService" / "GetQueue", GetQueueRequest => GetQueueResponse, SAFE;
    /// Only reads.
    LIST_QUEUES: "ExternalResourceService" / "ListQueues", ListQueuesRequest => ListQueuesResponse, SAFE;
    /// Only reads.
    LIST_APPLICATIONS: "ExternalResourceService" / "ListApplications", ListApplicationsRequest => ListApplicationsResponse, SAFE;
}

/// [`AUDIT_SMALL`] with the size limit for large replies.
pub const AUDIT: ApiCall<proto::AuditRequest, proto::AuditResponse> = AUDIT_SMALL.with_large_answers(AUDIT_BYTES_MAX);

/// [`REPLACE_LIMITS_SMALL`] with the size limit for large replies: thousands of limits can change.
pub const REPLACE_LIMITS: ApiCall<proto::ReplaceLimitsRequest, proto::ReplaceLimitsResponse> =
    REPLACE_LIMITS_SMALL.with_large_answers(AUDIT_BYTES_MAX);

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use prost::Message as _;

    use super::*;

    /// Method that this client does not call.
    const LEFT_OUT: &str = "linkis.rm.v1.UsageService/Watch";

    fn of_api() -> BTreeSet<String> {
        let descriptors = prost_types::FileDescriptorSet::decode(proto::DESCRIPTORS).unwrap();
        let mut calls = BTreeSet::new();
        for file in &descriptors.file {
            for service in &file.service {
                let path = |method: &str| format!("{}.{}/{method}", file.package(), service.name());
                calls.extend(service.method.iter().map(|method| path(method.name())));
            }
        }
        calls
    }

    /// Returns the paths of the calls that are not repeated when their result is unknown.
    fn once() -> BTreeSet<&'static str> {
        let once = ALL.iter().filter(|(_, repeat)| *repeat == ONLY_IF_NOT_DONE);
        once.map(|(path, _)| path.trim_start_matches('/')).collect()
    }

    #[test]
    fn call_list_equals_api_descriptors() {
        let table: BTreeSet<_> = ALL.iter().map(|(path, _)| path.trim_start_matches('/').to_owned()).collect();
        assert_eq!(table.len(), ALL.len());
        let mut api = of_api();
        assert!(api.remove(LEFT_OUT));
        assert_eq!(table, api);
    }

    #[test]
    fn java_client_retries_same_calls() {
        let java = include_str!("../../../clients/java/client/src/main/java/io/linkisrm/client/Repetition.java");
        let named = java.split('"').filter(|text| text.starts_with("linkis.rm.v1."));
        assert_eq!(named.collect::<BTreeSet<_>>(), once());
    }

    #[test]
    fn api_page_lists_calls_without_retry() {
        let page = include_str!("../../../docs/API.md");
        let head = page.lines().find(|line| line.starts_with("| event |")).unwrap();
        let named = head.split('`').skip(1).step_by(2);
        let names = once().into_iter().filter_map(|path| Some(path.rsplit_once('/')?.1));
        assert_eq!(named.collect::<BTreeSet<_>>(), names.collect());
    }
}
