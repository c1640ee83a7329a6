//! Metrics and health over HTTP: what is counted, and that it stays small, cheap and apart.

use std::{collections::HashMap, net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::harness::*;

/// What is answered there: the status, and the body.
async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, body.to_owned())
}

async fn eventually_answered(address: SocketAddr, path: &str, status: u16) {
    let what = format!("{path} answers {status}");
    eventually(&what, Duration::from_secs(20), || async { get(address, path).await.0 == status }).await;
}

/// The value of each series.
async fn scrape(address: SocketAddr) -> HashMap<String, f64> {
    let (status, text) = get(address, "/metrics").await;
    assert_eq!(status, 200, "{text}");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let parse = |line: &str| {
        let (series, value) = line.rsplit_once(' ').unwrap();
        (series.to_owned(), value.parse().unwrap())
    };
    lines.map(parse).collect()
}

/// A series of a method of the resource manager.
fn of_method(family: &str, method: &str, more: &str) -> String {
    format!(
        r#"{family}{{grpc_type="unary",grpc_service="linkis.rm.v1.ResourceManagerService",grpc_method="{method}"{more}}}"#
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_are_counted_by_method_and_code() {
    let (_database, instance) = start().await;
    let client = &instance.client;
    client.register(registration(em("host1"), load(64, 16, 20))).await.unwrap();
    let grant = client.request_resource(&request(&em("host1"), "alice", load(1, 1, 1))).await.granted();
    client.request_resource(&request(&em("host1"), "alice", load(1, 17, 1))).await.refused();
    client.request_resource(&request(&em("nowhere"), "alice", load(1, 1, 1))).await.unwrap_err();
    client.resource_released(&release(&grant, "alice")).await.unwrap();
    let seen = scrape(instance.http).await;
    let ok = |method| seen.get(&of_method("grpc_server_handled_total", method, r#",grpc_code="OK""#)).copied();
    assert_eq!((ok("Register"), ok("RequestResource"), ok("ResourceReleased")), (Some(1.0), Some(2.0), Some(1.0)));
    let not_found = of_method("grpc_server_handled_total", "RequestResource", r#",grpc_code="NotFound""#);
    assert_eq!(seen.get(&not_found), Some(&1.0));
    assert_eq!(seen[&of_method("grpc_server_started_total", "RequestResource", "")], 3.0);
    assert_eq!(seen[&of_method("grpc_server_handling_seconds_count", "RequestResource", "")], 3.0);
    assert_eq!(seen[&of_method("grpc_server_started_total", "Unregister", "")], 0.0, "known before it is called");
    assert_eq!(ok("Unregister"), None);
    assert!(seen["process_resident_memory_bytes"] > 1e6, "{seen:?}");
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn health_is_told_over_http() {
    let (_database, instance) = start().await;
    assert_eq!(get(instance.http, "/livez").await, (200, "alive\n".to_owned()));
    eventually_answered(instance.http, "/readyz", 200).await;
    assert_eq!(get(instance.http, "/nothing").await.0, 404);
    instance.stop().await;
}
