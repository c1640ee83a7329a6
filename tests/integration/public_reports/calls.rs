//! gRPC calls: large metadata, health of each service.

use linkis_rm::transport::proto::{self, usage_service_client::UsageServiceClient};
use tonic::{Request, metadata::MetadataValue};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use super::{Case, Wrong, case};
use crate::harness::*;

/// Fields of the metadata of a call, and the bytes of each.
#[derive(Debug, Clone, Copy)]
struct Metadata {
    fields: usize,
    bytes: usize,
}

/// Whether the call is refused.
const METADATA: [Case<Metadata, bool>; 5] = [
    case("grpc/grpc PROTOCOL-HTTP2", "large metadata ends the server", Metadata { fields: 1, bytes: 4 << 10 }, false),
    case("grpc/grpc PROTOCOL-HTTP2", "large metadata ends the server", Metadata { fields: 1, bytes: 15 << 10 }, true),
    case("grpc/grpc PROTOCOL-HTTP2", "large metadata ends the server", Metadata { fields: 1, bytes: 64 << 10 }, true),
    case("grpc/grpc PROTOCOL-HTTP2", "large metadata ends the server", Metadata { fields: 1, bytes: 1 << 20 }, true),
    case("grpc/grpc PROTOCOL-HTTP2", "many metadata fields end the server", Metadata { fields: 2000, bytes: 16 }, true),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_with_large_metadata_are_refused_alone() {
    let (_database, rm) = start().await;
    let mut wrong = Wrong::default();
    for case in &METADATA {
        let mut usage = UsageServiceClient::new(channel_to(&rm.address).await);
        let mut call = Request::new(proto::ListEmsRequest::default());
        for field in 0..case.input.fields {
            let key = tonic::metadata::AsciiMetadataKey::from_bytes(format!("x-{field}").as_bytes()).unwrap();
            call.metadata_mut().insert(key, MetadataValue::try_from("v".repeat(case.input.bytes)).unwrap());
        }
        wrong.compare(case, usage.list_ems(call).await.is_err());
        rm.client.ems().await.unwrap();
    }
    wrong.none();
}

const ABSENT: &str = "the health of a service is not known";

const HEALTH: [Case<&str, ServingStatus>; 6] = [
    case("grpc/grpc-rust#963", ABSENT, "", ServingStatus::Serving),
    case("grpc/grpc-java#8385", ABSENT, "linkis.rm.v1.ResourceManagerService", ServingStatus::Serving),
    case("grpc/grpc-java#8385", ABSENT, "linkis.rm.v1.LimitService", ServingStatus::Serving),
    case("grpc/grpc-java#8385", ABSENT, "linkis.rm.v1.UsageService", ServingStatus::Serving),
    case("grpc/grpc-java#8385", ABSENT, "linkis.rm.v1.ExternalResourceService", ServingStatus::Serving),
    case("grpc/grpc-java#8385", ABSENT, "linkis.rm.v1.AdminService", ServingStatus::Serving),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_of_each_service_is_serving() {
    let (_database, rm) = start().await;
    let mut health = HealthClient::new(channel_to(&rm.address).await);
    let mut wrong = Wrong::default();
    for case in &HEALTH {
        let call = || HealthCheckRequest { service: case.input.into() };
        wrong.compare(case, health.check(call()).await.unwrap().into_inner().status());
        let mut watch = health.watch(call()).await.unwrap().into_inner();
        wrong.compare(case, watch.message().await.unwrap().unwrap().status());
    }
    wrong.none();
}
