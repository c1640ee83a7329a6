//! Fetches from servers that behave as ResourceManagers do, and as they must not.

use std::time::Duration;

use tokio::net::TcpListener;

use super::*;
use crate::{
    allowed::AllowedHosts,
    fake::{FakeReply, FakeServer, certified, client, http, on_path},
    http::HttpTimeouts,
    read,
};

const FAIR: &str = include_str!("../../../../tests/fixtures/yarn/fair-3.4.2.json");
const SHARES: &str = include_str!("../../../../tests/fixtures/yarn/capacity-2.7.json");
const REDIRECTING: &str = include_str!("../../../../tests/fixtures/yarn/standby-3.4.2.txt");
const ALONE: &str = include_str!("../../../../tests/fixtures/yarn/standby-alone-3.4.2.txt");
const ACTIVE: &str = r#"{"clusterInfo": {"haState": "ACTIVE"}}"#;
const STANDBY: &str = r#"{"clusterInfo": {"haState": "STANDBY"}}"#;

/// Replies of an active ResourceManager with these queues.
fn active(scheduler: &'static str) -> impl Fn(&str) -> FakeReply + Send + Sync {
    move |path| match path.rsplit('/').next().unwrap().split('?').next().unwrap() {
        "info" => FakeReply::Json(ACTIVE.into()),
        "scheduler" => FakeReply::Json(scheduler.into()),
        "metrics" => FakeReply::Json(r#"{"clusterMetrics": {"totalMB": 9216, "totalVirtualCores": 9}}"#.into()),
        "apps" => FakeReply::Json(r#"{"apps": {"app": [{"id": "application_1", "queue": "etl"}]}}"#.into()),
        _ => FakeReply::Raw(http("404 Not Found", "text/plain", "")),
    }
}

async fn paths(addresses: &str, more: &str) -> Result<usize, FetchError> {
    let config = format!(r#"{{"rmWebAddress": "{addresses}"{more}}}"#);
    let cluster = read("Yarn", &config, None).unwrap();
    Ok(cluster.queues(&client("127.0.0.1")).await?.behind(None).count())
}

/// Returns the failure at the only address.
async fn failure(reply: impl Fn(&str) -> FakeReply + Send + Sync + 'static) -> (HttpFailure, FakeServer) {
    let fake = FakeServer::start(reply).await;
    let error = paths(&format!("http://{}", fake.address), "").await.unwrap_err();
    let [(address, failure)] = &error.failures[..] else { panic!("{error}") };
    assert_eq!(*address, format!("http://{}", fake.address));
    (failure.clone(), fake)
}

#[tokio::test]
async fn single_address_is_fetched_without_probe() {
    let rm = FakeServer::start(active(FAIR)).await;
    assert_eq!(paths(&format!("http://{}", rm.address), "").await, Ok(5));
    assert_eq!(rm.paths(), ["scheduler"], "a single address is not probed");
    let old = FakeServer::start(active(SHARES)).await;
    assert_eq!(paths(&format!("http://{}/", old.address), "").await, Ok(4));
    assert_eq!(old.paths(), ["scheduler", "metrics"]);
    let cluster = read("Yarn", &format!(r#"{{"rmWebAddress": "http://{}"}}"#, rm.address), None).unwrap();
    let applications = cluster.applications(&client("*")).await.unwrap();
    assert_eq!(applications.len(), 1);
    assert!(rm.heads.lock().unwrap().last().unwrap().contains("states=NEW,NEW_SAVING,SUBMITTED,ACCEPTED,RUNNING"));
}

#[tokio::test]
async fn active_address_of_several_is_found_and_remembered() {
    let standby = FakeServer::start(|_| FakeReply::Json(STANDBY.into())).await;
    // Every path of a standby shows the state. Release 3.x sends a redirect, to the active one if known. Older ones
    // send text with status 200.
    let redirecting = FakeServer::start(|_| FakeReply::Raw(REDIRECTING.into())).await;
    let alone = FakeServer::start(|_| FakeReply::Raw(ALONE.into())).await;
    let old =
        FakeServer::start(|_| FakeReply::Raw(http("200 OK", "text/plain", "This is standby RM. Redirecting to...")))
            .await;
    let rm = FakeServer::start(active(FAIR)).await;
    let all = [standby.address, redirecting.address, alone.address, old.address, rm.address]
        .map(|address| format!("http://{address}"));
    let config = format!(r#"{{"rmWebAddress": "{}"}}"#, all.join(";"));
    let (cluster, http) = (read("Yarn", &config, None).unwrap(), client("127.0.0.1"));
    for _ in 0..2 {
        assert_eq!(cluster.queues(&http).await.unwrap().behind(None).count(), 5);
    }
    assert_eq!(rm.paths(), ["info", "scheduler", "info", "scheduler"]);
    for other in [&standby, &redirecting, &alone, &old] {
        assert_eq!(other.paths(), ["info"], "the second fetch knows the active one");
    }
}

#[tokio::test]
async fn addresses_without_active_one_are_retried_then_fail() {
    let fakes = [
        FakeServer::start(|_| FakeReply::Json(STANDBY.into())).await,
        FakeServer::start(|_| FakeReply::Json(STANDBY.into())).await,
    ];
    let all = fakes.each_ref().map(|fake| format!("http://{}", fake.address)).join(";");
    let error = paths(&all, "").await.unwrap_err();
    assert!(error.failures.iter().all(|(_, failure)| *failure == HttpFailure::NotActive), "{error}");
    assert_eq!((error.failures.len(), error.class()), (2, "not_active"));
    assert_eq!(fakes[0].paths().len(), 3);
    // A single one is queried directly, and its reply shows the state.
    let (failure, fake) =
        failure(|_| FakeReply::Raw(http("200 OK", "text/plain", "This is standby RM. Redirecting to..."))).await;
    assert_eq!((failure, fake.paths().len()), (HttpFailure::NotActive, 3));
}

#[tokio::test]
async fn redirect_is_not_followed_with_credentials() {
    let other = FakeServer::start(active(FAIR)).await;
    let elsewhere = format!("HTTP/1.1 302 Found\r\nLocation: http://{}/\r\nContent-Length: 0\r\n\r\n", other.address);
    let rm = FakeServer::start(move |_| FakeReply::Raw(elsewhere.clone())).await;
    let login = r#", "authorEnable": true, "user": "hadoop", "pwd": "gr8-s3cret""#;
    let error = paths(&format!("http://{}", rm.address), login).await.unwrap_err();
    assert_eq!(error.failures[0].1, HttpFailure::Redirect(302));
    assert!(!error.to_string().contains("gr8"), "{error}");
    assert!(other.paths().is_empty());
    let heads = rm.heads.lock().unwrap().clone();
    assert_eq!(heads.len(), 1, "a redirect is not retried");
    assert!(heads[0].to_lowercase().contains("authorization: basic agfkb29womdyoc1zm2nyzxq="), "{heads:?}");
}

#[tokio::test]
async fn redirect_to_itself_fails_after_one_request() {
    let (failure, fake) =
        failure(|path| FakeReply::Raw(format!("HTTP/1.1 301 Moved\r\nLocation: {path}\r\nContent-Length: 0\r\n\r\n")))
            .await;
    assert_eq!((failure, fake.paths().len()), (HttpFailure::Redirect(301), 1));
}

#[tokio::test]
async fn yarn_malformed_reply_error_omits_content() {
    for (answer, expected) in [
        (http("200 OK", "text/html", "<html>gr8-s3cret</html>"), "is not JSON"),
        (http("200 OK", "application/json", &FAIR[..FAIR.len() / 2]), "is truncated"),
        (http("200 OK", "application/json", "{}"), "scheduler.schedulerInfo"),
        (http("401 Unauthorized", "text/html", "gr8-s3cret"), "answered 401: it requires a user"),
        (http("403 Forbidden", "text/html", "GSSException: gr8-s3cret"), "answered 403"),
        (http("404 Not Found", "text/html", "gr8-s3cret"), "answered 404"),
    ] {
        let (failure, fake) = failure(move |_| FakeReply::Raw(answer.clone())).await;
        let text = failure.to_string();
        assert!(text.contains(expected) && !text.contains("gr8"), "{text}");
        assert_eq!(fake.paths().len(), 1, "{text}: not retried");
    }
    let cut = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{{", FAIR.len());
    assert_eq!(failure(move |_| FakeReply::Raw(cut.clone())).await.0, HttpFailure::Broken);
    let (failure, fake) = failure(|_| FakeReply::Raw(http("503 Service Unavailable", "text/plain", ""))).await;
    assert_eq!((failure, fake.paths().len()), (HttpFailure::Status(503), 3));
}

#[tokio::test]
async fn endless_reply_is_ended_by_bound() {
    // The timeouts are long, so that only the size can end it.
    let seconds = Duration::from_secs;
    let times = HttpTimeouts { connect: seconds(2), read: seconds(10), answer: seconds(60), fetch: seconds(60) };
    let http = ClusterHttp::with_times(AllowedHosts::parse("127.0.0.1").unwrap(), times);
    for head in ["HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n"] {
        let rm = FakeServer::start(move |_| FakeReply::Endless(head)).await;
        let cluster = read("Yarn", &format!(r#"{{"rmWebAddress": "http://{}"}}"#, rm.address), None).unwrap();
        assert_eq!(cluster.queues(&http).await.unwrap_err().failures[0].1, HttpFailure::TooLarge(32 << 20));
    }
}

#[tokio::test]
async fn silent_server_fails_by_timeout() {
    let begun = Instant::now();
    let (failure, fake) = failure(|_| FakeReply::Silence).await;
    assert_eq!((failure, fake.paths().len()), (HttpFailure::Timeout, 3));
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    // The bound is independent of the number of silent addresses.
    let begun = Instant::now();
    let error = paths(&vec![format!("http://{}", fake.address); 8].join(";"), "").await.unwrap_err();
    assert_eq!(error.failures.len(), 8);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn closed_port_is_retried() {
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let error = paths(&format!("http://{gone}"), "").await.unwrap_err();
    assert_eq!(error.to_string(), format!("http://{gone} cannot be connected to"));
}

#[tokio::test]
async fn yarn_server_with_untrusted_certificate_gets_no_request() {
    let (tls, _) = certified(&["localhost", "127.0.0.1"]);
    let fake = FakeServer::start_with(on_path(active(FAIR)), Some(tls)).await;
    let error = paths(&format!("https://{}", fake.address), "").await.unwrap_err();
    assert_eq!(error.failures[0].1, HttpFailure::Tls);
    assert!(fake.paths().is_empty());
}

#[tokio::test]
async fn yarn_host_not_allowed_gets_no_request() {
    let rm = FakeServer::start(active(FAIR)).await;
    let cluster = read("Yarn", &format!(r#"{{"rmWebAddress": "http://{}"}}"#, rm.address), None).unwrap();
    for hosts in ["", "rm1", "127.0.0.1:1"] {
        let error = cluster.queues(&client(hosts)).await.unwrap_err();
        assert_eq!(error.failures[0].1, HttpFailure::NotAllowed);
    }
    assert!(rm.paths().is_empty());
}

#[tokio::test]
async fn request_accepts_gzip_json() {
    let rm = FakeServer::start(active(FAIR)).await;
    assert_eq!(paths(&format!("http://{}", rm.address), "").await, Ok(5));
    let head = rm.heads.lock().unwrap()[0].to_lowercase();
    assert!(head.contains("accept-encoding: gzip") && head.contains("accept: application/json"), "{head}");
}
