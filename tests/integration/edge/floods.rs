//! Floods of frames outside of calls: the connection ends, and an honest client with many cancels continues.

use std::{collections::BTreeMap, net::SocketAddr};

use tokio::{net::TcpSocket, task::JoinHandle};

use super::*;
use crate::metrics::scrape;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Kinds of HTTP/2 frames, by their numbers on the wire.
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;

/// The error code of a GOAWAY that ends a flood.
const ENHANCE_YOUR_CALM: u32 = 11;

/// Maximum number of frames of a kind in a flood.
const FLOOD_FRAMES: u32 = 200_000;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A health check without its message, as literal header fields.
fn health_check(stream: u32) -> Vec<u8> {
    let mut fields = vec![0x83, 0x86];
    let mut field = |name: &[u8], value: &str| {
        fields.extend(name);
        fields.push(u8::try_from(value.len()).unwrap());
        fields.extend(value.as_bytes());
    };
    field(&[0x04], "/grpc.health.v1.Health/Check");
    field(&[0x01], "localhost");
    field(&[0x0f, 0x10], "application/grpc");
    frame(HEADERS, 0x4, stream, &fields)
}

/// One step of a flood: the `n`th of its kind.
fn flood_step(kind: u8, n: u32) -> Vec<u8> {
    match kind {
        RST_STREAM => {
            let stream = 2 * n + 1;
            [health_check(stream), frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes())].concat()
        }
        SETTINGS => frame(SETTINGS, 0, 0, &[0, 4, 0, 1, 0, 0]),
        _ => frame(PING, 0, 0, &[7; 8]),
    }
}

/// Opens a connection from an address of this machine. A task reads everything that the server sends.
async fn connect_from(from: &str, server: SocketAddr) -> (tokio::net::tcp::OwnedWriteHalf, JoinHandle<Vec<u8>>) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(format!("{from}:0").parse().unwrap()).unwrap();
    let stream = socket.connect(server).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let (mut read, mut write) = stream.into_split();
    let received = tokio::spawn(async move {
        let mut received = vec![];
        let mut piece = vec![0; 64 << 10];
        while let Ok(bytes @ 1..) = read.read(&mut piece).await {
            received.extend_from_slice(&piece[..bytes]);
        }
        received
    });
    write.write_all(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()).await.unwrap();
    (write, received)
}

/// Floods a new connection until the server ends it. Returns the error code and the text of the GOAWAY, if one was received.
async fn flood(from: &str, server: SocketAddr, kind: u8) -> Option<(u32, String)> {
    let (mut write, received) = connect_from(from, server).await;
    for first in (0..FLOOD_FRAMES).step_by(200) {
        let steps: Vec<u8> = (first..first + 200).flat_map(|n| flood_step(kind, n)).collect();
        if write.write_all(&steps).await.is_err() {
            break;
        }
        // Begins fewer calls at a time than may be reset before the server has accepted them.
        tokio::task::yield_now().await;
    }
    drop(write);
    let received = received.await.unwrap();
    let mut rest = received.as_slice();
    let mut last = None;
    while let Some((head, behind)) = rest.split_at_checked(9) {
        let length = usize::try_from(u32::from_be_bytes([0, head[0], head[1], head[2]])).unwrap();
        let Some((payload, behind)) = behind.split_at_checked(length) else { break };
        if head[3] == GOAWAY {
            let code = u32::from_be_bytes(payload[4..8].try_into().unwrap());
            last = Some((code, String::from_utf8(payload[8..].to_vec()).unwrap()));
        }
        rest = behind;
    }
    last
}

fn server_of(rm: &Instance) -> SocketAddr {
    rm.address.strip_prefix("http://").unwrap().parse().unwrap()
}

fn ended(seen: &BTreeMap<String, f64>) -> BTreeMap<String, f64> {
    let of = |(series, value): (&String, &f64)| {
        let reason = series.strip_prefix("linkis_rm_connections_ended_total{reason=\"")?.strip_suffix("\"}")?;
        (*value > 0.0).then(|| (reason.to_owned(), *value))
    };
    seen.iter().filter_map(of).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frame_flood_ends_with_enhance_your_calm() {
    let (_database, rm) = start().await;
    for (nth, (kind, text, reason)) in [
        (PING, "too_many_pings", "pings"),
        (SETTINGS, "too_many_settings", "settings"),
        (RST_STREAM, "too_many_resets", "resets"),
    ]
    .into_iter()
    .enumerate()
    {
        let end = flood(&format!("127.0.0.{}", 10 + nth), server_of(&rm), kind).await;
        assert_eq!(end, Some((ENHANCE_YOUR_CALM, text.to_owned())), "{reason}");
        assert_eq!(ended(&scrape(rm.http).await).get(reason), Some(&1.0), "{reason}");
        rm.client.ems().await.unwrap();
    }
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn address_after_flood_gets_slow_connections() {
    let (_database, rm) = start().await;
    let server = server_of(&rm);
    let slowed = async || scrape(rm.http).await["linkis_rm_connections_slowed_total"];
    let is_answered = async |from: &str| {
        let (mut write, received) = connect_from(from, server).await;
        // The server ends the connection after the GOAWAY.
        write.write_all(&[frame(PING, 0, 0, &[7; 8]), frame(GOAWAY, 0, 0, &[0; 8])].concat()).await.unwrap();
        let received = tokio::time::timeout(LONG, received).await.expect("the end of the connection").unwrap();
        let pong = frame(PING, 1, 0, &[7; 8]);
        received.windows(pong.len()).any(|bytes| bytes == pong)
    };
    assert!(is_answered("127.0.0.1").await);
    assert_eq!(slowed().await, 0.0);
    flood("127.0.0.9", server, PING).await;
    assert!(is_answered("127.0.0.1").await);
    rm.client.ems().await.unwrap();
    assert_eq!(slowed().await, 0.0, "connections of other addresses are as fast as before");
    assert!(is_answered("127.0.0.9").await, "a slowed connection is served");
    assert_eq!(slowed().await, 1.0);
    rm.stop().await;
}

/// Cancelled waiting calls, expired deadlines, and cancelled calls beside completed ones, all on one connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[expect(clippy::async_yields_async, reason = "an answer is awaited after other calls were sent, or dropped")]
async fn honest_client_with_many_cancels_is_not_ended() {
    const AT_ONCE: usize = 1000;
    let (database, rm) = start().await;
    let (held, free) = (em("host1"), em("host2"));
    for host in [&held, &free] {
        rm.client.register(registration(host.clone(), load(100_000, 100_000, 100_000))).await.unwrap();
    }
    // The library of the client would count replies to cancelled calls as errors of the server.
    let mut builder = h2::client::Builder::new();
    builder.max_concurrent_reset_streams(10 * AT_ONCE).max_local_error_reset_streams(None);
    let raw = Raw::connect_with(&rm.address, &builder).await;
    let list = async || {
        let (answer, mut stream) = raw.call("UsageService/ListEms").await;
        stream.send_data(message_prefix(0).into(), true).unwrap();
        answer
    };
    // Every third call is cancelled immediately after it is sent.
    for _ in 0..30 {
        let mut answers = vec![];
        for n in 0..300 {
            let answer = list().await;
            if n % 3 > 0 {
                answers.push(answer);
            }
        }
        for answer in answers {
            assert_eq!(answer.await.unwrap().status(), 200);
        }
    }
    database.hold_by_hand(&held).await;
    let message = {
        use prost::Message as _;
        let (application_name, instance) = (held.application_name.to_string(), held.instance.to_string());
        let em = rm_proto::v1::EmInstance { application_name, instance };
        let unregister = rm_proto::v1::UnregisterRequest { em: Some(em), ..Default::default() };
        let message = unregister.encode_to_vec();
        Bytes::from([message_prefix(message.len()), message].concat())
    };
    let calls = async || scrape(rm.http).await["linkis_rm_calls"];
    // Calls that wait for a locked EM and all end at one moment: by the client, or by their deadlines.
    for deadline in [None, None, Some("300m"), Some("300m"), None, None] {
        let headers: Vec<_> = deadline.map(|deadline| ("grpc-timeout", deadline)).into_iter().collect();
        let mut answers = vec![];
        for _ in 0..AT_ONCE {
            let method = "linkis.rm.v1.ResourceManagerService/Unregister";
            let (answer, mut stream) = raw.call_with(method, &headers).await;
            stream.send_data(message.clone(), true).unwrap();
            answers.push((answer, stream));
        }
        if deadline.is_some() {
            for (answer, _) in answers {
                tokio::time::timeout(LONG, answer).await.expect("its deadline expires").unwrap();
            }
        } else {
            eventually("the calls are under way", LONG, async || calls().await >= AT_ONCE as f64).await;
            // The server lets calls of this age be cancelled freely.
            tokio::time::sleep(Duration::from_millis(50)).await;
            drop(answers);
        }
        eventually("all calls are ended", LONG, async || calls().await == 0.0).await;
    }
    database.release_holds().await;
    assert_eq!(list().await.await.unwrap().status(), 200, "the connection is still served");
    assert_eq!(ended(&scrape(rm.http).await), BTreeMap::new());
    rm.stop().await;
}
