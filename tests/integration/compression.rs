//! Messages that are compressed: accepted and answered so by every service, and bounded by what they hold.

use linkis_rm::transport::{
    message_size::MESSAGE_BYTES_MAX,
    proto::{
        self, admin_service_client::AdminServiceClient, limit_service_client::LimitServiceClient,
        resource_manager_service_client::ResourceManagerServiceClient, usage_service_client::UsageServiceClient,
    },
};
use tokio_stream::once;
use tonic::{Code, Response, codec::CompressionEncoding::Gzip};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tonic_reflection::pb::{v1, v1alpha};

use crate::harness::*;

/// A client that compresses, and accepts that.
macro_rules! gzip {
    ($client:expr) => {
        $client.send_compressed(Gzip).accept_compressed(Gzip)
    };
}

fn is_gzip<M>(answer: &Response<M>) -> bool {
    answer.metadata().get("grpc-encoding").is_some_and(|encoding| encoding == "gzip")
}

fn em_message() -> Option<proto::EmInstance> {
    Some(proto::EmInstance { application_name: "ecm".into(), instance: "host1:9102".into() })
}

fn cores(cores: i64) -> Option<proto::Resource> {
    Some(proto::Resource { kind: Some(proto::resource::Kind::Cpu(proto::CpuResource { cores })) })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn services_accept_and_return_gzip() {
    let (_database, rm) = start().await;
    let channel = channel_to(&rm.address).await;
    let mut manager = gzip!(ResourceManagerServiceClient::new(channel.clone()));
    let call = proto::RegisterRequest { em: em_message(), total: cores(10), ..Default::default() };
    let registered = manager.register(call).await.unwrap();
    assert!(is_gzip(&registered));
    let epoch = registered.into_inner().em.unwrap().epoch;
    let heartbeat = proto::HeartbeatRequest { em: em_message(), epoch, sequence: 1, ..Default::default() };
    assert!(is_gzip(&manager.heartbeat(heartbeat).await.unwrap()));
    let mut limits = gzip!(LimitServiceClient::new(channel.clone()));
    assert!(is_gzip(&limits.list_policies(proto::ListPoliciesRequest {}).await.unwrap()));
    let mut usage = gzip!(UsageServiceClient::new(channel.clone()));
    let ems = usage.list_ems(proto::ListEmsRequest::default()).await.unwrap();
    assert!(is_gzip(&ems) && ems.into_inner().ems.len() == 1);
    let mut admin = gzip!(AdminServiceClient::new(channel.clone()));
    assert!(is_gzip(&admin.audit(proto::AuditRequest {}).await.unwrap()));
    let mut health = gzip!(HealthClient::new(channel.clone()));
    assert!(is_gzip(&health.check(HealthCheckRequest { service: String::new() }).await.unwrap()));

    let list = v1::server_reflection_request::MessageRequest::ListServices(String::new());
    let question = v1::ServerReflectionRequest { host: String::new(), message_request: Some(list) };
    let mut reflection = gzip!(v1::server_reflection_client::ServerReflectionClient::new(channel.clone()));
    let mut answers = reflection.server_reflection_info(once(question)).await.unwrap();
    assert!(is_gzip(&answers) && answers.get_mut().message().await.unwrap().is_some());
    let list = v1alpha::server_reflection_request::MessageRequest::ListServices(String::new());
    let question = v1alpha::ServerReflectionRequest { host: String::new(), message_request: Some(list) };
    let mut reflection = gzip!(v1alpha::server_reflection_client::ServerReflectionClient::new(channel));
    let mut answers = reflection.server_reflection_info(once(question)).await.unwrap();
    assert!(is_gzip(&answers) && answers.get_mut().message().await.unwrap().is_some());
}

/// Many clients accept it without being told to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_does_not_compress_is_not_answered_so() {
    let (_database, rm) = start().await;
    let mut usage = UsageServiceClient::new(channel_to(&rm.address).await).accept_compressed(Gzip);
    assert!(!is_gzip(&usage.list_ems(proto::ListEmsRequest::default()).await.unwrap()));
}

/// 4 MB in 4 KB.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_compressed_may_hold_no_more_than_a_message_may() {
    let (_database, rm) = start().await;
    let channel = channel_to(&rm.address).await;
    let bomb = || "0".repeat(4 << 20);
    let mut manager = gzip!(ResourceManagerServiceClient::new(channel.clone()));
    let request = proto::RequestResourceRequest { user: bomb(), ..Default::default() };
    let status = manager.request_resource(request).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    assert!(status.message().contains(&MESSAGE_BYTES_MAX.to_string()), "{status:?}");
    let heartbeat = proto::HeartbeatRequest { ticket_ids: vec![0; 4 << 20], ..Default::default() };
    assert_eq!(manager.heartbeat(heartbeat).await.unwrap_err().code(), Code::ResourceExhausted);
    let mut usage = gzip!(UsageServiceClient::new(channel.clone()));
    let list = proto::ListTicketsRequest { user: bomb(), ..Default::default() };
    assert_eq!(usage.list_tickets(list).await.unwrap_err().code(), Code::ResourceExhausted);
    let mut health = gzip!(HealthClient::new(channel));
    let check = HealthCheckRequest { service: "0".repeat(1 << 20) };
    assert_eq!(health.check(check).await.unwrap_err().code(), Code::ResourceExhausted);
    // What fits is judged as ever, also if it takes far fewer bytes on its way.
    let request = proto::RequestResourceRequest { user: "0".repeat(200 << 10), ..Default::default() };
    assert_eq!(manager.request_resource(request).await.unwrap_err().code(), Code::InvalidArgument);
    rm.client.ems().await.unwrap();
}
