//! Status of each way in which a call can fail: before, in and after its handler.
//!
//! The cases are those of gRPC's list of status codes and of its protocol over HTTP/2. A row names each deviation of the service.

use std::collections::BTreeSet;

use prost::Message as _;
use rm_proto::v1 as proto;

use super::{protocol::Answer, *};
use crate::{identity::token, metrics::scrape};

const LIST: &str = "linkis.rm.v1.UsageService/ListEms";
const GET: &str = "linkis.rm.v1.UsageService/GetEm";
const HEARTBEAT: &str = "linkis.rm.v1.ResourceManagerService/Heartbeat";
const HEALTH: &str = "grpc.health.v1.Health/Check";
const GZIP: &[(&str, &str)] = &[("grpc-encoding", "gzip")];

/// A message behind its flag and its length.
fn message(flag: u8, bytes: &[u8]) -> Vec<u8> {
    let mut message = message_prefix(bytes.len());
    message[0] = flag;
    [message.as_slice(), bytes].concat()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    let mut writer = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
    writer.write_all(bytes).unwrap();
    writer.finish().unwrap()
}

fn get_em(application_name: &str) -> Vec<u8> {
    let em = proto::EmInstance { application_name: application_name.to_owned(), instance: "nowhere:1".to_owned() };
    message(0, &proto::GetEmRequest { em: Some(em) }.encode_to_vec())
}

/// A failing call: its fault, method, headers and body, and the code and a part of the text of its status.
type Row = (&'static str, &'static str, &'static [(&'static str, &'static str)], Vec<u8>, Code, &'static str);

fn rows() -> Vec<Row> {
    use Code::*;
    let none = || message(0, &[]);
    vec![
        // Before the handler: the path and the headers.
        ("a method that is not there", "linkis.rm.v1.UsageService/Nothing", &[], none(), Unimplemented, ""),
        ("a service that is not there", "linkis.rm.v1.Nothing/ListEms", &[], none(), Unimplemented, ""),
        (
            "an encoding that is not supported",
            LIST,
            &[("grpc-encoding", "snappy")],
            message(1, &[1]),
            Unimplemented,
            "snappy",
        ),
        (
            "an encoding that is not supported, and not used",
            LIST,
            &[("grpc-encoding", "zstd")],
            none(),
            Unimplemented,
            "zstd",
        ),
        ("a timeout without digits", LIST, &[("grpc-timeout", "S")], none(), InvalidArgument, "grpc-timeout"),
        ("a timeout of letters", LIST, &[("grpc-timeout", "abc")], none(), InvalidArgument, "grpc-timeout"),
        ("a timeout below zero", LIST, &[("grpc-timeout", "-1S")], none(), InvalidArgument, "grpc-timeout"),
        ("a timeout of nine digits", LIST, &[("grpc-timeout", "123456789S")], none(), InvalidArgument, "grpc-timeout"),
        ("a timeout of an unknown unit", LIST, &[("grpc-timeout", "1d")], none(), InvalidArgument, "grpc-timeout"),
        ("a timeout without a text", LIST, &[("grpc-timeout", "")], none(), InvalidArgument, "grpc-timeout"),
        // The message. gRPC libraries answer INTERNAL for bytes that are no message, compressed or not. Here it is INVALID_ARGUMENT, because
        // INTERNAL is a defect of the service.
        ("bytes that are no message", LIST, &[], message(0, &[0xff; 3]), InvalidArgument, "the message"),
        ("a text that is not UTF-8", GET, &[], message(0, &[10, 3, 10, 1, 0xff]), InvalidArgument, "the message"),
        ("bytes that are no health check", HEALTH, &[], message(0, &[0xff; 3]), InvalidArgument, ""),
        ("a message that ends early", LIST, &[], message(0, &[0; 9])[..8].to_vec(), InvalidArgument, "the message"),
        ("a length that ends early", LIST, &[], vec![0, 0, 0], InvalidArgument, "the message"),
        ("bytes that are no gzip", LIST, GZIP, message(1, b"not gzip"), InvalidArgument, "the message"),
        ("bytes that are no gzip, and few", LIST, GZIP, message(1, b"no"), InvalidArgument, "the message"),
        ("bytes that are no gzip, for health", HEALTH, GZIP, message(1, b"not gzip"), InvalidArgument, "the message"),
        ("gzip that ends early", LIST, GZIP, message(1, &gzip(&[0; 99])[..20]), InvalidArgument, "the message"),
        (
            "gzip of bytes that are no message",
            LIST,
            GZIP,
            message(1, &gzip(&[0xff; 3])),
            InvalidArgument,
            "the message",
        ),
        ("no message", LIST, &[], vec![], Unimplemented, "message"),
        ("a compressed message without an encoding", LIST, &[], message(1, &gzip(&[])), Internal, "flag"),
        (
            "a compressed message of encoding identity",
            LIST,
            &[("grpc-encoding", "identity")],
            message(1, &[1]),
            Internal,
            "flag",
        ),
        ("a compressed health check without an encoding", HEALTH, &[], message(1, &gzip(&[])), Internal, "flag"),
        ("a flag that is neither 0 nor 1", LIST, &[], message(2, &[1]), Internal, "flag"),
        ("a message above the limit", LIST, &[], message_prefix((256 << 10) + 1), ResourceExhausted, "262144"),
        ("a heartbeat above the limit", HEARTBEAT, &[], message_prefix(4 << 20), ResourceExhausted, "limit"),
        ("a health check above the limit", HEALTH, &[], message_prefix(5000), ResourceExhausted, "4096"),
        (
            "gzip of more than the limit",
            LIST,
            GZIP,
            message(1, &gzip(&vec![0; 300 << 10])),
            ResourceExhausted,
            "262144",
        ),
        (
            "gzip of more than any limit",
            HEARTBEAT,
            GZIP,
            message(1, &gzip(&vec![0; 5 << 20])),
            ResourceExhausted,
            "limit",
        ),
        (
            "gzip of a health check above the limit",
            HEALTH,
            GZIP,
            message(1, &gzip(&[0; 5000])),
            ResourceExhausted,
            "4096",
        ),
        // Messages below the limit reach the handler.
        ("a large message below the limit", GET, &[], get_em(&"a".repeat(200 << 10)), InvalidArgument, "em"),
        (
            "gzip of a large message below the limit",
            GET,
            GZIP,
            message(1, &gzip(&get_em(&"a".repeat(200 << 10))[5..])),
            InvalidArgument,
            "em",
        ),
        // In the handler.
        ("a field that is missing", GET, &[], message(0, &[]), InvalidArgument, "em"),
        ("an EM that is not registered", GET, &[], get_em("ecm"), NotFound, "ecm"),
        ("a health check of an unknown service", HEALTH, &[], message(0, &[10, 1, b'x']), NotFound, ""),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_call_has_the_status_of_its_cause() {
    let (database, rm) = start().await;
    let raw = Raw::connect(&rm.address).await;
    let mut wrong = vec![];
    for (what, method, headers, body, code, text) in rows() {
        let answer = Answer::of(&raw, method, headers, body).await;
        if answer.status != 200 || answer.code() != Some(code) || !answer.text().contains(text) {
            wrong.push(format!("{what}: {answer:?} instead of {code:?}"));
        }
        if answer.code() == Some(Code::Unimplemented) && !headers.is_empty() {
            assert!(answer.headers["grpc-accept-encoding"].to_str().unwrap().contains("gzip"), "{what}");
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let handled = scrape(rm.http).await.into_iter().filter(|(_, count)| *count > 0.0);
    let failures: BTreeSet<String> = handled
        .map(|(series, _)| series)
        .filter(|series| series.starts_with("grpc_server_handled_total"))
        .filter(|series| {
            ["Unknown", "Internal", "Unavailable", "ResourceExhausted"].iter().any(|code| series.contains(code))
        })
        .collect();
    assert!(failures.is_empty(), "faults of callers are not counted as failures of the service: {failures:?}");
    assert_invariants(&database, &rm.client).await;
}

/// A deadline that expires before the message arrives has its own status, and so has a caller without rights.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_deadline_and_denied_caller_have_statuses() {
    let database = Database::fresh().await;
    let (process, _) = server(&database, &[]);
    let raw = Raw::connect(&process.address).await;
    // The message never arrives.
    let (answer, _stream) = raw.call_with(LIST, &[("grpc-timeout", "100m")]).await;
    let answer = Answer::read(answer).await;
    assert_eq!(answer.code(), Some(Code::DeadlineExceeded), "{answer:?}");

    let viewer = format!("Bearer {}", token(&database, "viewer", &["--role", "viewer"]));
    eventually("tokens are needed", Duration::from_secs(30), async || {
        Answer::of(&raw, LIST, &[], message(0, &[])).await.code() == Some(Code::Unauthenticated)
    })
    .await;
    let method = "linkis.rm.v1.ResourceManagerService/Unregister";
    let denied = Answer::of(&raw, method, &[("authorization", &viewer)], message(0, &[])).await;
    assert_eq!(denied.code(), Some(Code::PermissionDenied), "{denied:?}");
    let malformed = Answer::of(&raw, LIST, &[("grpc-timeout", "abc")], message(0, &[])).await;
    assert_eq!(malformed.code(), Some(Code::Unauthenticated), "the caller is known first: {malformed:?}");
}
