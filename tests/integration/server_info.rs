//! ServerInfo: version, identity and bounds of an instance.

use std::time::Duration;

use rm_proto::v1::{self as proto, resource_manager_service_client::ResourceManagerServiceClient};
use tonic::Code;

use crate::harness::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_info_returns_bounds_in_force() {
    let database = Database::fresh().await;
    let options = settings().with_time("--max-wait", Duration::from_secs(77));
    let (rm, second) = (Instance::start_with(&database, options).await, Instance::start(&database).await);
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

    // The bounds are in force.
    let em1 = em("host1");
    rm.client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap();
    let waits = |seconds| {
        let asked = request(&em1, "hadoop", load(1, 1, 1));
        rm_client::ResourceRequest { wait_timeout: Duration::from_secs(seconds), ..asked }
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
