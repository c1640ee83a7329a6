//! What an instance tells of itself, and what has only a name yet.

use std::time::Duration;

use linkis_rm::transport::proto::{
    self, resource_manager_service_client::ResourceManagerServiceClient, usage_service_client::UsageServiceClient,
};
use tonic::Code;
use tonic_types::StatusExt as _;

use crate::harness::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_info_returns_bounds_in_force() {
    let database = Database::fresh().await;
    let mut told = options();
    told.times.max_wait = Duration::from_secs(77);
    let (rm, second) = (Instance::start_with(&database, told).await, Instance::start(&database).await);
    let info = rm.client.server_info().await.unwrap();
    assert_eq!(info.version, env!("CARGO_PKG_VERSION"));
    assert_eq!(info.instance_id, rm.client.server_info().await.unwrap().instance_id);
    assert_ne!(info.instance_id, second.client.server_info().await.unwrap().instance_id);
    let bounds = info.bounds.unwrap();
    let seconds = |duration: Option<prost_types::Duration>| duration.unwrap().seconds;
    assert_eq!((seconds(bounds.max_wait), seconds(bounds.default_lock_ttl)), (77, 600));
    assert_eq!((seconds(info.report_interval), seconds(info.em_silent_after)), (10, 30));
    assert_eq!((bounds.max_page_size, bounds.max_labels, bounds.max_caps), (1000, 32, 4));
    assert!(!info.tls && !info.authentication && info.checks.len() == 3);

    // What it tells is what holds.
    let host = em("host1");
    rm.client.register(registration(host.clone(), load(10, 10, 10))).await.unwrap();
    let waits = |seconds| {
        let asked = request(&host, "hadoop", load(1, 1, 1));
        linkis_rm::client::ResourceRequest { wait_timeout: Duration::from_secs(seconds), ..asked }
    };
    rm.client.request_resource(&waits(77)).await.granted();
    assert_eq!(rm.client.request_resource(&waits(78)).await.unwrap_err().field().as_deref(), Some("wait_timeout"));
    let manager = ResourceManagerServiceClient::connect(rm.address.clone()).await.unwrap();
    let largest = usize::try_from(bounds.max_message_bytes).unwrap();
    let large = |bytes| proto::RegisterRequest {
        em: Some(proto::EmInstance { application_name: "a".repeat(bytes), instance: String::new() }),
        ..Default::default()
    };
    let code = async |bytes| manager.clone().register(large(bytes)).await.unwrap_err().code();
    assert_eq!(code(largest - 100).await, Code::InvalidArgument);
    assert_eq!(code(largest).await, Code::ResourceExhausted);
}

/// Who is refused knows that he has not what he asked for; who was ignored would not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_only_has_a_name_yet_is_refused() {
    let (_database, rm) = start().await;
    let mut manager = ResourceManagerServiceClient::connect(rm.address.clone()).await.unwrap();
    let none = proto::RequestResourceRequest::default();
    for (request, field) in [
        (proto::RequestResourceRequest { priority: -1, ..none.clone() }, "priority"),
        (proto::RequestResourceRequest { group_id: "g".into(), ..none.clone() }, "group_id"),
    ] {
        let status = manager.request_resource(request).await.unwrap_err();
        let violated = status.get_details_bad_request().unwrap().field_violations.remove(0);
        assert_eq!((status.code(), violated.field.as_str()), (Code::InvalidArgument, field), "{status:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ticket_tells_whose_it_is_and_a_limit_its_name() {
    let (_database, rm) = start().await;
    let host = em("host1");
    rm.client.register(registration(host.clone(), load(10, 10, 10))).await.unwrap();
    let grant = rm.client.request_resource(&request(&host, "hadoop", load(1, 1, 1))).await.granted();
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let call = proto::GetTicketRequest { ticket_id: grant.ticket_id.to_string(), engine: None };
    assert_eq!(usage.get_ticket(call).await.unwrap().into_inner().ticket.unwrap().principal, "anonymous");
    rm.client.set_limit(&each_user(1)).await.unwrap();
    let mut limits = proto::limit_service_client::LimitServiceClient::connect(rm.address.clone()).await.unwrap();
    let told = limits.list_limits(proto::ListLimitsRequest::default()).await.unwrap().into_inner().limits;
    assert_eq!(told[0].name, "each user");
    let refusal = rm.client.request_resource(&request(&host, "hadoop", load(1, 1, 1))).await.refused();
    assert!(refusal.shortfalls[0].rule.contains(&told[0].name), "{refusal:?}");
}
