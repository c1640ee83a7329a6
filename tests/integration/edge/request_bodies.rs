//! Request bodies that expand when they are decoded, and bodies that do not end after their message.

use std::io::Write as _;

use super::*;

/// Number of empty parts that fit the size of a heartbeat: 1.86 MB that decode to 127 MB, and compress to 2 KB.
const PARTS: usize = 930_000;

/// Returns a message in gzip, followed by a trailer that states an empty content.
fn packed_with_a_lie(message: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(vec![], flate2::Compression::best());
    packed.write_all(message).unwrap();
    [packed.finish().unwrap(), vec![0; 4]].concat()
}

/// Messages of very many parts, whose bodies never end, are rejected before they use memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn message_of_many_fields_uses_bounded_memory() {
    const CALLS: usize = 6;
    let database = Database::fresh().await;
    let (process, _) = server(&database, &[("BODY_TIMEOUT", "1h")]);
    process.client.ems().await.unwrap();
    let idle = process.memory();
    let raw = Raw::connect(&process.address).await;
    let message = [0x3a, 0].repeat(PARTS);
    let plain = [message_prefix(message.len()), message.clone()].concat();
    let packed = packed_with_a_lie(&message);
    let mut prefix = message_prefix(packed.len());
    prefix[0] = 1;
    let (mut calls, mut most) = (JoinSet::new(), idle);
    for (encoding, body) in [("gzip", [prefix, packed].concat()), ("identity", plain)] {
        let body = Bytes::from(body);
        for _ in 0..CALLS {
            let headers = [("grpc-encoding", encoding)];
            let (answer, mut stream) = raw.call_with("linkis.rm.v1.ResourceManagerService/Heartbeat", &headers).await;
            let body = body.clone();
            calls.spawn(async move {
                send(&mut stream, body).await;
                (answer.await.unwrap(), stream)
            });
        }
        let mut refused = vec![];
        while refused.len() < CALLS {
            if let Ok(Some(answer)) = tokio::time::timeout(Duration::from_millis(10), calls.join_next()).await {
                let (answer, stream) = answer.unwrap();
                // Rejected for its content, or because the other calls use the budget.
                let status = &answer.headers()["grpc-status"];
                assert!(status == "3" || status == "8", "{encoding}: {answer:?}");
                refused.push(stream);
            }
            most = most.max(process.memory());
            assert!(most - idle <= 48 * MB, "{encoding}: {} MB above idle", (most - idle) / MB);
        }
    }
    process.client.ems().await.unwrap();
}

/// A complete message is processed without waiting for the end of its body.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_without_end_of_body_is_answered() {
    let database = Database::fresh().await;
    let (process, _) = server(&database, &[("BODY_TIMEOUT", "1h")]);
    let raw = Raw::connect(&process.address).await;
    for behind in [vec![], vec![0; 3], message_prefix(0)] {
        let (answer, mut stream) = raw.call("UsageService/ListEms").await;
        stream.send_data([message_prefix(0), behind].concat().into(), false).unwrap();
        let answer = tokio::time::timeout(Duration::from_secs(30), answer).await.expect("an answer").unwrap();
        let mut body = answer.into_body();
        while let Some(data) = body.data().await {
            data.unwrap();
        }
        assert_eq!(body.trailers().await.unwrap().unwrap()["grpc-status"], "0");
    }
}
