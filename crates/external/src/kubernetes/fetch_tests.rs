//! Fetches from servers that behave as Kubernetes does, and as it must not.

use std::{
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use serde_json::{Value, json};

use super::*;
use crate::{
    ExternalCluster,
    allowed::AllowedHosts,
    fake::{FakeReply, FakeServer, certified, client, http, on_path},
    http::HttpTimeouts,
    read,
};
use rm_model::queue::QueueAmounts;

const TOKEN: &str = "gr8-s3cret";

fn list(kind: &str, items: &Value, next: &str) -> FakeReply {
    FakeReply::Json(json!({"kind": kind, "metadata": {"continue": next}, "items": items}).to_string())
}

fn namespaces(names: &[&str]) -> Value {
    names.iter().map(|name| json!({"metadata": {"name": name}, "status": {"phase": "Active"}})).collect()
}

fn quota(namespace: &str, cpu: i64, memory: &str) -> Value {
    let hard = json!({"requests.cpu": cpu.to_string(), "requests.memory": memory});
    let used = json!({"requests.cpu": "500m", "requests.memory": "1Gi"});
    json!({"metadata": {"name": "q", "namespace": namespace}, "spec": {"hard": hard}, "status": {"hard": hard, "used": used}})
}

fn node(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {}, "status": {"allocatable": {"cpu": "8", "memory": "32Gi"}}})
}

fn pod(node: &str, cpu: &str, memory: &str) -> Value {
    let requests = json!({"requests": {"cpu": cpu, "memory": memory}});
    json!({"metadata": {"name": "p"}, "spec": {"nodeName": node, "containers": [{"resources": requests}]}})
}

/// Returns the requested list and the continue token.
fn asked(path: &str) -> (&str, &str) {
    let (path, query) = path.split_once('?').unwrap();
    let next = query.split('&').find_map(|part| part.strip_prefix("continue="));
    (path.rsplit('/').next().unwrap(), next.unwrap_or_default())
}

/// Replies of a cluster with two nodes and two namespaces, one of them with a quota.
fn serving(path: &str) -> FakeReply {
    match asked(path).0 {
        "namespaces" => list("NamespaceList", &namespaces(&["etl", "free"]), ""),
        "resourcequotas" => list("ResourceQuotaList", &json!([quota("etl", 4, "8Gi")]), ""),
        "nodes" => list("NodeList", &json!([node("n1"), node("n2")]), ""),
        "pods" => list("PodList", &json!([pod("n1", "3", "10Gi"), pod("gone", "8", "1Gi")]), ""),
        other => panic!("{other}"),
    }
}

fn named(fake: &FakeServer) -> Box<dyn ExternalCluster> {
    read("Kubernetes", &json!({"k8sMasterUrl": format!("http://{}", fake.address)}).to_string(), None).unwrap()
}

async fn failure(reply: impl Fn(&str) -> FakeReply + Send + Sync + 'static) -> (HttpFailure, FakeServer) {
    let fake = FakeServer::start(reply).await;
    let mut error = named(&fake).queues(&client("127.0.0.1")).await.unwrap_err();
    let (name, failure) = error.failures.pop().unwrap();
    assert_eq!((name, error.failures.len()), (format!("http://{}", fake.address), 0));
    (failure, fake)
}

#[tokio::test]
async fn namespaces_have_head_room_of_quotas_or_nodes() {
    let fake = FakeServer::start(serving).await;
    let queues = named(&fake).queues(&client("127.0.0.1")).await.unwrap();
    let left = |name: &str| queues.left(queues.find(name).unwrap());
    assert_eq!(left("etl"), QueueAmounts { memory: 7 << 30, cores: 3500 });
    assert_eq!(left("free"), QueueAmounts { memory: 54 << 30, cores: 13_000 });
    assert_eq!(fake.paths(), ["namespaces", "resourcequotas", "nodes", "pods"]);
    let heads = fake.heads.lock().unwrap().clone();
    assert!(heads.iter().all(|head| head.contains("limit=500")), "{heads:?}");
    assert!(heads[3].contains("fieldSelector=spec.nodeName"), "{heads:?}");
    assert!(named(&fake).applications(&client("127.0.0.1")).await.unwrap().is_empty());
}

#[tokio::test]
async fn nodes_are_not_fetched_when_quotas_decide() {
    let fake = FakeServer::start(|path| match asked(path).0 {
        "namespaces" => list("NamespaceList", &namespaces(&["etl"]), ""),
        "resourcequotas" => list("ResourceQuotaList", &json!([quota("etl", 4, "8Gi")]), ""),
        other => panic!("{other}"),
    })
    .await;
    let queues = named(&fake).queues(&client("127.0.0.1")).await.unwrap();
    assert_eq!(queues.left(queues.find("etl").unwrap()).cores, 3500);
}

#[tokio::test]
async fn expired_page_token_restarts_list() {
    let gone = Arc::new(AtomicUsize::new(0));
    let fake = FakeServer::start(move |path| match asked(path) {
        ("pods", "") => list("PodList", &json!([pod("n1", "1", "1Gi")]), "a b&c"),
        ("pods", "a+b%26c") if gone.fetch_add(1, Ordering::SeqCst) == 0 => {
            FakeReply::Raw(http("410 Gone", "application/json", r#"{"kind": "Status", "code": 410}"#))
        }
        ("pods", "a+b%26c") => list("PodList", &json!([pod("n2", "2", "2Gi")]), "last"),
        ("pods", "last") => list("PodList", &json!([pod("n2", "4", "4Gi")]), ""),
        _ => serving(path),
    })
    .await;
    let queues = named(&fake).queues(&client("127.0.0.1")).await.unwrap();
    assert_eq!(queues.left(queues.find("free").unwrap()), QueueAmounts { memory: 57 << 30, cores: 9000 });
    assert_eq!(fake.paths().iter().filter(|path| *path == "pods").count(), 5);
    let always = |path: &str| match asked(path) {
        ("pods", "") => list("PodList", &json!([]), "x"),
        ("pods", _) => FakeReply::Raw(http("410 Gone", "application/json", "{}")),
        _ => serving(path),
    };
    assert_eq!(failure(always).await.0, HttpFailure::Status(410));
}

#[tokio::test]
async fn endless_list_is_ended_by_bound() {
    let (failure, fake) = failure(|path| match asked(path).0 {
        "namespaces" => list("NamespaceList", &json!([]), "on"),
        _ => serving(path),
    })
    .await;
    // The bound of the pages ends it, unless the timeout does.
    assert!(matches!(failure, HttpFailure::Unreadable(_) | HttpFailure::Timeout), "{failure}");
    assert!(fake.paths().len() <= 201);
}

#[tokio::test]
async fn thousands_of_pods_fit_in_bounded_memory() {
    // Pages of 500 large pods, 20 MB in total; a name and two numbers are kept of each pod.
    let padding = "x".repeat(2000);
    let page: Value = (0..500)
        .map(|_| {
            let mut pod = pod("n1", "1m", "1Mi");
            pod["metadata"]["managedFields"] = json!([{"fieldsV1": padding}]);
            pod
        })
        .collect();
    let pages: Arc<Vec<String>> = Arc::new(
        (0..20)
            .map(|n: usize| {
                let next = if n == 19 { String::new() } else { (n + 1).to_string() };
                json!({"kind": "PodList", "metadata": {"continue": next}, "items": page}).to_string()
            })
            .collect(),
    );
    let fake = FakeServer::start(move |path| match asked(path) {
        ("pods", next) => FakeReply::Json(pages[next.parse::<usize>().unwrap_or_default()].clone()),
        _ => serving(path),
    })
    .await;
    let seconds = Duration::from_secs;
    let times = HttpTimeouts { connect: seconds(10), read: seconds(30), answer: seconds(30), fetch: seconds(120) };
    let http = ClusterHttp::with_times(AllowedHosts::parse("127.0.0.1").unwrap(), times);
    let queues = named(&fake).queues(&http).await.unwrap();
    let free = queues.left(queues.find("free").unwrap());
    assert_eq!(free, QueueAmounts { memory: (64 << 30) - (10_000 << 20), cores: 16_000 - 10_000 });
}

#[tokio::test]
async fn kubernetes_malformed_reply_error_omits_content() {
    for (answer, expected) in [
        (http("200 OK", "text/html", "<html>gr8-s3cret</html>"), "is not a NamespaceList in JSON"),
        (http("200 OK", "application/json", r#"{"kind": "NamespaceList", "items": [{"#), "is truncated"),
        (http("200 OK", "application/json", r#"{"kind": "gr8-s3cret"}"#), "is not a NamespaceList"),
        (http("403 Forbidden", "application/json", "gr8-s3cret"), "may not list namespaces"),
        (http("404 Not Found", "text/html", "gr8-s3cret"), "answered 404"),
        ("HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n".to_owned(), "answered 302"),
    ] {
        let (failure, fake) = failure(move |_| FakeReply::Raw(answer.clone())).await;
        let text = failure.to_string();
        assert!(text.contains(expected) && !text.contains("gr8"), "{text}");
        assert_eq!(fake.paths().len(), 1, "{text}: not retried");
    }
    for status in ["503 Service Unavailable", "429 Too Many Requests"] {
        let (failure, fake) = failure(move |_| FakeReply::Raw(http(status, "text/plain", ""))).await;
        assert!(failure.may_pass() && fake.paths().len() == 3, "{failure}");
    }
    let forbidden = |path: &str| match asked(path).0 {
        "pods" => FakeReply::Raw(http("403 Forbidden", "application/json", "{}")),
        _ => serving(path),
    };
    assert_eq!(failure(forbidden).await.0, HttpFailure::Forbidden("pods"));
}

#[tokio::test]
async fn silent_and_endless_replies_are_ended() {
    let begun = Instant::now();
    let (failure, fake) = failure(|_| FakeReply::Silence).await;
    assert_eq!((failure, fake.paths().len()), (HttpFailure::Timeout, 3));
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    let seconds = Duration::from_secs;
    let times = HttpTimeouts { connect: seconds(2), read: seconds(10), answer: seconds(60), fetch: seconds(60) };
    let http = ClusterHttp::with_times(AllowedHosts::parse("127.0.0.1").unwrap(), times);
    let fake = FakeServer::start(|_| FakeReply::Endless("HTTP/1.1 200 OK\r\n\r\n")).await;
    assert_eq!(named(&fake).queues(&http).await.unwrap_err().failures[0].1, HttpFailure::TooLarge(32 << 20));
}

#[tokio::test]
async fn kubernetes_host_not_allowed_gets_no_request() {
    let fake = FakeServer::start(serving).await;
    let folder = KubeconfigFolder::new("allowed");
    let config = folder.kubeconfig(&format!("http://{}", fake.address), "");
    for cluster in [named(&fake), config] {
        let error = cluster.queues(&client("k8s")).await.unwrap_err();
        assert_eq!(error.failures[0].1, HttpFailure::NotAllowed);
    }
    assert!(fake.paths().is_empty());
}

/// Temporary folder with a kubeconfig and a token, removed when dropped.
struct KubeconfigFolder(PathBuf);

impl KubeconfigFolder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("linkis-rm-fetch-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("token"), TOKEN).unwrap();
        Self(folder)
    }

    fn kubeconfig(&self, server: &str, ca: &str) -> Box<dyn ExternalCluster> {
        fs::write(self.0.join("ca.crt"), ca).unwrap();
        let (ca, user) = match ca {
            "" => ("", "{}"),
            _ => (", certificate-authority: ca.crt", "{tokenFile: token}"),
        };
        let config = format!(
            "current-context: c\ncontexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
             clusters: [{{name: c, cluster: {{server: '{server}'{ca}}}}}]\nusers: [{{name: u, user: {user}}}]\n"
        );
        let path = self.0.join("config");
        fs::write(&path, config).unwrap();
        read("Kubernetes", &json!({"k8sConfig": path}).to_string(), None).unwrap()
    }
}

impl Drop for KubeconfigFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Each token is valid until the next one, as real tokens are.
#[tokio::test]
async fn renewed_token_is_used_by_same_fetch() {
    let folder = KubeconfigFolder::new("renewed");
    let (token, renews) = (folder.0.join("token"), Arc::new(AtomicUsize::new(0)));
    let (tls, ca) = certified(&["127.0.0.1"]);
    let fake = FakeServer::start_with(
        move |head| {
            let shown = head.lines().find_map(|line| line.strip_prefix("authorization: Bearer ")).unwrap_or_default();
            // The first token has expired, and the kubelet writes the next one at that moment.
            match shown == "renewed" {
                true => serving(head.split(' ').nth(1).unwrap()),
                false => {
                    assert_eq!((shown, renews.fetch_add(1, Ordering::SeqCst)), (TOKEN, 0));
                    fs::write(&token, "renewed\n").unwrap();
                    FakeReply::Raw(http("401 Unauthorized", "application/json", r#"{"kind": "Status", "code": 401}"#))
                }
            }
        },
        Some(tls),
    )
    .await;
    let cluster = folder.kubeconfig(&format!("https://{}", fake.address), &ca);
    let queues = cluster.queues(&client("127.0.0.1")).await.unwrap();
    assert_eq!(queues.left(queues.find("etl").unwrap()).cores, 3500);
    assert_eq!(fake.paths(), ["namespaces", "namespaces", "resourcequotas", "nodes", "pods"]);
    assert!(!format!("{cluster:?} {}", cluster.shown()).contains(TOKEN));
}

#[tokio::test]
async fn rejected_credential_fails_after_one_retry() {
    let (failure, fake) = failure(|_| FakeReply::Raw(http("401 Unauthorized", "text/plain", "gr8-s3cret"))).await;
    assert_eq!((failure, fake.paths().len()), (HttpFailure::Unknown, 2), "one retry, with the files' new content");
}

#[tokio::test]
async fn kubernetes_server_with_untrusted_certificate_gets_no_request() {
    let folder = KubeconfigFolder::new("tls");
    let ((tls, _), (_, other)) = (certified(&["127.0.0.1"]), certified(&["127.0.0.1"]));
    let fake = FakeServer::start_with(on_path(serving), Some(tls)).await;
    let address = format!("https://{}", fake.address);
    let error = folder.kubeconfig(&address, &other).queues(&client("127.0.0.1")).await.unwrap_err();
    assert_eq!(error.failures[0].1, HttpFailure::Tls);
    assert!(fake.paths().is_empty(), "no token was sent");
    // An unencrypted connection gets no token either.
    let open = folder.kubeconfig(&format!("http://{}", fake.address), &other).queues(&client("127.0.0.1")).await;
    let text = open.unwrap_err().to_string();
    assert!(text.contains("must begin with https://") && !text.contains(TOKEN), "{text}");
}
