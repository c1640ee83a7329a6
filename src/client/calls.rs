//! The table of calls: whether each may be made again when nobody knows whether it was carried out. `Watch` is left out: nothing here
//! follows it.

use crate::transport::proto;

use super::{call::Call, retry::Repeat};

/// The largest answers, such as the report of an audit: it may name a thousand scopes with long names.
const AUDIT_BYTES_MAX: usize = 64 << 20;

const SAFE: Repeat = Repeat::Safe;
const ONLY_IF_NOT_DONE: Repeat = Repeat::OnlyIfNotDone;

/// One row for each call, and all their paths.
macro_rules! calls {
    ($($(#[$why:meta])* $name:ident: $service:literal / $call:literal, $question:ident => $answer:ident, $repeat:expr;)*) => {
        $(
            $(#[$why])*
            pub const $name: Call<proto::$question, proto::$answer> =
                Call::new(concat!("/linkis.rm.v1.", $service, "/", $call), $repeat);
        )*

        #[cfg(test)]
        const ALL: &[(&str, Repeat)] = &[$(($name.path, $name.repeat)),*];
    };
}

calls! {
    /// The same again is success.
    REGISTER: "ResourceManagerService" / "Register", RegisterRequest => RegisterResponse, SAFE;
    /// Again, it tells that there is no such EM, or removes one that has registered since.
    UNREGISTER: "ResourceManagerService" / "Unregister", UnregisterRequest => UnregisterResponse, ONLY_IF_NOT_DONE;
    /// Once for each request id, and nothing at all if it is a dry run.
    REQUEST_RESOURCE: "ResourceManagerService" / "RequestResource", RequestResourceRequest => RequestResourceResponse, SAFE;
    /// The same again is success.
    RESOURCE_INITED: "ResourceManagerService" / "ResourceInited", ResourceInitedRequest => ResourceInitedResponse, SAFE;
    /// The same again is success.
    RESOURCE_REPORTED: "ResourceManagerService" / "ResourceReported", ResourceReportedRequest => ResourceReportedResponse, SAFE;
    /// The same again is success.
    RESOURCE_RELEASED: "ResourceManagerService" / "ResourceReleased", ResourceReleasedRequest => ResourceReleasedResponse, SAFE;
    /// A report with the same sequence counts once.
    HEARTBEAT: "ResourceManagerService" / "Heartbeat", HeartbeatRequest => HeartbeatResponse, SAFE;
    /// The same again is success, also if it expects what there was before.
    SET_LIMIT: "LimitService" / "SetLimit", SetLimitRequest => SetLimitResponse, SAFE;
    /// Again, it tells that there is no such limit, or removes one that was set since.
    DELETE_LIMIT: "LimitService" / "DeleteLimit", DeleteLimitRequest => DeleteLimitResponse, ONLY_IF_NOT_DONE;
    /// Again, it no longer tells what was changed, or undoes what was set since.
    REPLACE_LIMITS_SMALL: "LimitService" / "ReplaceLimits", ReplaceLimitsRequest => ReplaceLimitsResponse, ONLY_IF_NOT_DONE;
    /// It only reads.
    LIST_LIMITS: "LimitService" / "ListLimits", ListLimitsRequest => ListLimitsResponse, SAFE;
    /// The same again changes nothing.
    SET_POLICY: "LimitService" / "SetPolicy", SetPolicyRequest => SetPolicyResponse, SAFE;
    /// It only reads.
    LIST_POLICIES: "LimitService" / "ListPolicies", ListPoliciesRequest => ListPoliciesResponse, SAFE;
    /// It only reads.
    LIST_SCOPES: "UsageService" / "ListScopes", ListScopesRequest => ListScopesResponse, SAFE;
    /// It only reads.
    LIST_REFUSALS: "UsageService" / "ListRefusals", ListRefusalsRequest => ListRefusalsResponse, SAFE;
    /// It only reads.
    GET_USAGE: "UsageService" / "GetUsage", GetUsageRequest => GetUsageResponse, SAFE;
    /// It only reads.
    LIST_ACTIONS: "UsageService" / "ListActions", ListActionsRequest => ListActionsResponse, SAFE;
    /// It only reads.
    FOLLOW_ACTIONS: "UsageService" / "FollowActions", FollowActionsRequest => FollowActionsResponse, SAFE;
    /// It only reads.
    GET_SCOPE: "UsageService" / "GetScope", GetScopeRequest => GetScopeResponse, SAFE;
    /// It only reads.
    BATCH_GET_EMS: "UsageService" / "BatchGetEms", BatchGetEmsRequest => BatchGetEmsResponse, SAFE;
    /// It only reads.
    BATCH_GET_TICKETS: "UsageService" / "BatchGetTickets", BatchGetTicketsRequest => BatchGetTicketsResponse, SAFE;
    /// It only reads.
    LIST_WAITING: "UsageService" / "ListWaiting", ListWaitingRequest => ListWaitingResponse, SAFE;
    /// It only reads.
    GET_SERVER_INFO: "UsageService" / "GetServerInfo", GetServerInfoRequest => GetServerInfoResponse, SAFE;
    /// It only reads.
    GET_EM: "UsageService" / "GetEm", GetEmRequest => GetEmResponse, SAFE;
    /// It only reads.
    LIST_EMS: "UsageService" / "ListEms", ListEmsRequest => ListEmsResponse, SAFE;
    /// It only reads.
    GET_TICKET: "UsageService" / "GetTicket", GetTicketRequest => GetTicketResponse, SAFE;
    /// It only reads.
    LIST_TICKETS: "UsageService" / "ListTickets", ListTicketsRequest => ListTicketsResponse, SAFE;
    /// It only reads.
    GET_OVERVIEW: "UsageService" / "GetOverview", GetOverviewRequest => GetOverviewResponse, SAFE;
    /// It only reads.
    LIST_INSTANCES: "UsageService" / "ListInstances", ListInstancesRequest => ListInstancesResponse, SAFE;
    /// It only reads.
    LIST_TASKS: "UsageService" / "ListTasks", ListTasksRequest => ListTasksResponse, SAFE;
    /// It only reads.
    AUDIT_SMALL: "AdminService" / "Audit", AuditRequest => AuditResponse, SAFE;
    /// Again, it no longer tells what was repaired.
    REPAIR: "AdminService" / "Repair", RepairRequest => RepairResponse, ONLY_IF_NOT_DONE;
    /// The same again is success.
    ADOPT_TICKET: "AdminService" / "AdoptTicket", AdoptTicketRequest => AdoptTicketResponse, SAFE;
    /// The same again changes nothing.
    DRAIN: "AdminService" / "Drain", DrainRequest => DrainResponse, SAFE;
    /// Again, it no longer tells that it was drained, or ends a drain that came since.
    RESUME: "AdminService" / "Resume", ResumeRequest => ResumeResponse, ONLY_IF_NOT_DONE;
    /// The same again is success.
    FORCE_RELEASE: "AdminService" / "ForceRelease", ForceReleaseRequest => ForceReleaseResponse, SAFE;
    /// Again, it counts from then on.
    HOLD: "AdminService" / "Hold", HoldRequest => HoldResponse, SAFE;
    /// Again, it no longer tells that it was held, or ends a hold that came since.
    RELEASE_HOLD: "AdminService" / "ReleaseHold", ReleaseHoldRequest => ReleaseHoldResponse, ONLY_IF_NOT_DONE;
    /// It only reads.
    LIST_HOLDS: "AdminService" / "ListHolds", ListHoldsRequest => ListHoldsResponse, SAFE;
    /// Again, it is put anew under another etag, over what was put since.
    PUT_PROVIDER: "ExternalResourceService" / "PutProvider", PutProviderRequest => PutProviderResponse, ONLY_IF_NOT_DONE;
    /// Again, it tells that there is no such provider, or removes one that was put since.
    DELETE_PROVIDER: "ExternalResourceService" / "DeleteProvider", DeleteProviderRequest => DeleteProviderResponse, ONLY_IF_NOT_DONE;
    /// It only reads.
    LIST_PROVIDERS: "ExternalResourceService" / "ListProviders", ListProvidersRequest => ListProvidersResponse, SAFE;
    /// It only reads.
    GET_QUEUE: "ExternalResourceService" / "GetQueue", GetQueueRequest => GetQueueResponse, SAFE;
    /// It only reads.
    LIST_QUEUES: "ExternalResourceService" / "ListQueues", ListQueuesRequest => ListQueuesResponse, SAFE;
    /// It only reads.
    LIST_APPLICATIONS: "ExternalResourceService" / "ListApplications", ListApplicationsRequest => ListApplicationsResponse, SAFE;
}

/// An audit may be told at length.
pub const AUDIT: Call<proto::AuditRequest, proto::AuditResponse> = AUDIT_SMALL.with_large_answers(AUDIT_BYTES_MAX);

/// And so may what becomes of thousands of limits.
pub const REPLACE_LIMITS: Call<proto::ReplaceLimitsRequest, proto::ReplaceLimitsResponse> =
    REPLACE_LIMITS_SMALL.with_large_answers(AUDIT_BYTES_MAX);

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use prost::Message as _;

    use super::*;

    /// What this client does not call.
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

    /// The paths of those that are not repeated when it is in doubt whether they were carried out.
    fn once() -> BTreeSet<&'static str> {
        let once = ALL.iter().filter(|(_, repeat)| *repeat == ONLY_IF_NOT_DONE);
        once.map(|(path, _)| path.trim_start_matches('/')).collect()
    }

    #[test]
    fn the_calls_are_those_of_the_api() {
        let table: BTreeSet<_> = ALL.iter().map(|(path, _)| path.trim_start_matches('/').to_owned()).collect();
        assert_eq!(table.len(), ALL.len());
        let mut api = of_api();
        assert!(api.remove(LEFT_OUT));
        assert_eq!(table, api);
    }

    #[test]
    fn the_java_client_repeats_the_same_calls() {
        let java = include_str!("../../clients/java/client/src/main/java/io/linkisrm/client/Repetition.java");
        let named = java.split('"').filter(|text| text.starts_with("linkis.rm.v1."));
        assert_eq!(named.collect::<BTreeSet<_>>(), once());
    }

    #[test]
    fn the_api_s_page_names_the_calls_that_are_not_repeated() {
        let page = include_str!("../../docs/API.md");
        let head = page.lines().find(|line| line.starts_with("| what happened |")).unwrap();
        let named = head.split('`').skip(1).step_by(2);
        let names = once().into_iter().filter_map(|path| Some(path.rsplit_once('/')?.1));
        assert_eq!(named.collect::<BTreeSet<_>>(), names.collect());
    }
}
