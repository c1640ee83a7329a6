//! Callers without credentials.

use super::*;
use crate::identity::token;

const WATCH: &str = "grpc.health.v1.Health/Watch";

/// A connection with too many health watches gets an error; other connections can watch health.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_calls_per_connection_are_bounded() {
    let database = Database::fresh().await;
    let (process, _) = server(&database, &[]);
    let raw = Raw::connect(&process.address).await;
    let (mut watches, mut refused) = (vec![], 0);
    for _ in 0..50 {
        let answer = raw.empty_call(WATCH, &[]).await;
        match answer.headers().get("grpc-status") {
            None => watches.push(answer),
            Some(status) => {
                assert_eq!(status, "8", "{answer:?}");
                refused += 1;
            }
        }
    }
    assert_eq!((watches.len(), refused), (8, 42));
    let is_accepted = async |raw: &Raw| {
        let answer = raw.empty_call("grpc.health.v1.Health/Check", &[]).await;
        !answer.headers().contains_key("grpc-status")
    };
    assert!(!is_accepted(&raw).await && is_accepted(&Raw::connect(&process.address).await).await);
    process.client.ems().await.unwrap();
    drop(watches);
    eventually("a permit is available again", Duration::from_secs(30), || is_accepted(&raw)).await;
}

/// Unauthenticated connections are closed before authenticated ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unauthenticated_connections_yield_to_known_callers() {
    let database = Database::fresh().await;
    let (process, _) = server(&database, &[("MAX_CONNECTIONS", "8"), ("HANDSHAKE_TIMEOUT", "2s")]);
    let shown = format!("Bearer {}", token(&database, "reader", &["--role", "viewer"]));
    let is_served = async |raw: &Raw| {
        let answer = raw.empty_call("linkis.rm.v1.UsageService/ListEms", &[("authorization", &shown)]).await;
        !answer.headers().contains_key("grpc-status")
    };
    let known = Raw::connect(&process.address).await;
    eventually("its token is known", Duration::from_secs(30), || is_served(&known)).await;
    let mut one = tcp(&process.address).await;
    one.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    assert!(!is_ended(&mut one, Duration::from_secs(3)).await, "there is room for it");
    let mut crowd = vec![];
    for _ in 0..8 {
        // The last connections get no permit.
        if let Ok((mut requests, connection)) = h2::client::handshake(tcp(&process.address).await).await {
            let uri = format!("{}/{WATCH}", process.address);
            let call = Request::post(uri).header("content-type", "application/grpc").body(()).unwrap();
            crowd.push((requests.send_request(call, false).ok(), requests));
            tokio::spawn(connection);
        }
    }
    assert!(is_ended(&mut one, Duration::from_secs(30)).await, "it makes room");
    eventually("there is a place", Duration::from_secs(30), async || {
        let builder = h2::client::Builder::new();
        let Ok((requests, connection)) = builder.handshake::<_, Bytes>(tcp(&process.address).await).await else {
            return false;
        };
        tokio::spawn(connection);
        let uri = format!("{}/linkis.rm.v1.UsageService/ListEms", process.address);
        let call = Request::post(uri).header("content-type", "application/grpc").header("authorization", &shown);
        let Ok(mut ready) = requests.ready().await else { return false };
        let Ok((answer, mut stream)) = ready.send_request(call.body(()).unwrap(), false) else { return false };
        let _ = stream.send_data(message_prefix(0).into(), true);
        answer.await.is_ok_and(|answer| !answer.headers().contains_key("grpc-status"))
    })
    .await;
    assert!(is_served(&known).await, "on the connection that it had");
}
