//! Compressed messages: every service accepts and returns gzip, within the bounds of the uncompressed size.

use rm_proto::v1::{
    self as proto, admin_service_client::AdminServiceClient, limit_service_client::LimitServiceClient,
    resource_manager_service_client::ResourceManagerServiceClient, usage_service_client::UsageServiceClient,
};
use tokio_stream::once;
use tonic::{Response, codec::CompressionEncoding::Gzip};
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
