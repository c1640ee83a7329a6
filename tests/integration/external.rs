//! External clusters: providers, and the queues of a ResourceManager with the replies of a real one.

use std::{
    collections::BTreeMap,
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{
    Router,
    extract::{Path, Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use hyper::server::conn::http1;
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use rm_proto::v1::{self as proto, external_resource_service_client::ExternalResourceServiceClient as Client};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};
use tonic::{Code, Status, transport::Channel};
use tonic_types::StatusExt as _;

use crate::harness::*;

pub const FAIR: &str = include_str!("../fixtures/yarn/fair-3.4.2.json");
const CAPACITY: &str = include_str!("../fixtures/yarn/capacity-3.4.2.json");
const SECRET: &str = "gr8-s3cret";

/// Behaviour of a fake ResourceManager.
#[derive(Clone, Default)]
struct Behaviour {
    /// Reply about queues; `None` is 503.
    scheduler: Option<String>,
    apps: String,
    /// Whether it gives no reply.
    hangs: bool,
}

/// A ResourceManager.
pub struct Yarn {
    pub address: String,
    behaviour: Arc<watch::Sender<Behaviour>>,
    asked: Arc<AtomicUsize>,
    serving: JoinHandle<()>,
}

type Shared = (Arc<watch::Sender<Behaviour>>, Arc<AtomicUsize>);

async fn answer(State((behaviour, asked)): State<Shared>, Path(what): Path<String>, _: Request) -> Response {
    asked.fetch_add(1, Ordering::SeqCst);
    let Behaviour { scheduler, apps, .. } = behaviour.subscribe().wait_for(|now| !now.hangs).await.unwrap().clone();
    let body = match what.as_str() {
        "scheduler" => scheduler,
        "apps" => Some(apps),
        _ => None,
    };
    body.map_or_else(|| StatusCode::SERVICE_UNAVAILABLE.into_response(), IntoResponse::into_response)
}

impl Yarn {
    pub async fn start(scheduler: &str) -> Self {
        let apps = |n: i32| {
            let (queue, user) = if n % 2 == 0 { ("etl", "hadoop") } else { ("root.default", "alice") };
            serde_json::json!({"id": format!("application_1_{n:04}"), "user": user, "queue": queue, "name": format!("job {n}"),
                "state": if n % 4 == 0 { "ACCEPTED" } else { "RUNNING" }, "allocatedMB": 1024, "allocatedVCores": 1,
                "startedTime": 1_795_304_054_064_i64})
        };
        let apps = serde_json::json!({"apps": {"app": (0..10).map(apps).collect::<Vec<_>>()}}).to_string();
        let behaviour = Behaviour { scheduler: Some(scheduler.into()), apps, hangs: false };
        let (behaviour, asked) = (Arc::new(watch::Sender::new(behaviour)), Arc::<AtomicUsize>::default());
        let router =
            Router::new().route("/ws/v1/cluster/{what}", get(answer)).with_state((behaviour.clone(), asked.clone()));
        let (address, serving) = serve(router).await;
        Self { address, behaviour, asked, serving }
    }

    fn behave(&self, change: impl FnOnce(&mut Behaviour)) {
        self.behaviour.send_modify(change);
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }

    /// Waits for the fetch of the snapshot by which requests are decided; the next one is minutes later. Returns the number of calls so far.
    async fn is_known(&self) -> usize {
        eventually("a snapshot", LONG, async || self.asked() >= 3).await;
        self.asked()
    }
}

/// Serves the API of a cluster on a free port. Returns the address and the task.
pub async fn serve(router: Router) -> (String, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let serving = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = TowerToHyperService::new(router.clone());
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    (address, serving)
}

pub async fn client_of(rm: &Instance) -> Client<Channel> {
    Client::connect(rm.address.clone()).await.unwrap()
}

pub fn provider(name: &str, config: &str) -> proto::Provider {
    proto::Provider { resource_type: "Yarn".into(), name: name.into(), config: config.into(), ..Default::default() }
}

pub fn config(address: &str) -> String {
    format!(
        r#"{{"rmWebAddress": "{address}", "hadoopVersion": "2.7.2", "authorEnable": false, "user": "", "pwd": "", "kerberosEnable": false,
            "refreshInterval": "5m", "maxAge": "10m"}}"#
    )
}

pub async fn put(client: &Client<Channel>, provider: proto::Provider) -> Result<proto::Provider, Status> {
    let call = proto::PutProviderRequest { provider: Some(provider), expected_etag: None };
    Ok(client.clone().put_provider(call).await?.into_inner().provider.unwrap())
}

async fn get_queue(client: &Client<Channel>, queue_name: &str) -> Result<proto::GetQueueResponse, Status> {
    let call = proto::GetQueueRequest { provider: None, queue_name: queue_name.into() };
    Ok(client.clone().get_queue(call).await?.into_inner())
}

fn reason(status: &Status) -> String {
    status.get_details_error_info().unwrap().reason
}

fn field(status: &Status) -> String {
    status.get_details_bad_request().unwrap().field_violations[0].field.clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_call_returns_scheduler_state() {
    let (_database, rm) = start().await;
    let (yarn, client) = (Yarn::start(FAIR).await, client_of(&rm).await);
    let error = get_queue(&client, "eng.etl").await.unwrap_err();
    assert_eq!((error.code(), reason(&error)), (Code::NotFound, "NO_SUCH_PROVIDER".into()));
    put(&client, provider("default", &config(&yarn.address))).await.unwrap();
    let got = get_queue(&client, "eng.etl").await.unwrap();
    assert_eq!(rm.metric(r#"linkis_rm_external_fetches_total{result="ok"}"#), 1.0);
    let queue = got.queue.unwrap();
    let amounts = |gb: i64, cores: i64| Some(proto::QueueAmounts { memory: gb << 30, cores, ..Default::default() });
    assert_eq!((queue.path.as_str(), queue.state()), ("root.eng.etl", proto::QueueState::Running));
    assert_eq!((queue.max, queue.used, queue.left), (amounts(40, 40), amounts(12, 3), amounts(28, 37)));
    assert_eq!((queue.running_applications, got.provider_name.as_str()), (Some(1), "default"));
    let above: Vec<_> = got.ancestors.iter().map(|queue| queue.path.as_str()).collect();
    assert_eq!(above, ["root.eng", "root"]);
    for (name, expected) in [("etl", "NO_SUCH_QUEUE"), ("", "INVALID_FIELD"), ("a\u{7}", "INVALID_FIELD")] {
        assert_eq!(reason(&get_queue(&client, name).await.unwrap_err()), expected, "{name:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_change_applies_on_every_instance() {
    let (_database, rm, other) = two().await;
    let (here, there) = (client_of(&rm).await, client_of(&other).await);
    let (first, second) = (Yarn::start(FAIR).await, Yarn::start(CAPACITY).await);
    put(&here, provider("default", &config(&first.address))).await.unwrap();
    let max = async |client: &Client<Channel>| {
        get_queue(client, "root.eng.etl").await.unwrap().queue.unwrap().max.unwrap().memory >> 30
    };
    assert_eq!((max(&here).await, max(&there).await), (40, 40));
    put(&there, provider("default", &config(&second.address))).await.unwrap();
    assert_eq!((max(&here).await, max(&there).await), (100, 100));
    let guaranteed = config(&second.address).replace("\"pwd\"", "\"queueCapacity\": \"guaranteed\", \"pwd\"");
    put(&here, provider("default", &guaranteed)).await.unwrap();
    assert_eq!((max(&here).await, max(&there).await), (60, 60));
    let delete =
        proto::DeleteProviderRequest { resource_type: "Yarn".into(), name: "default".into(), expected_etag: None };
    here.clone().delete_provider(delete.clone()).await.unwrap();
    for client in [&here, &there] {
        assert_eq!(reason(&get_queue(client, "root").await.unwrap_err()), "NO_SUCH_PROVIDER");
    }
    let error = here.clone().delete_provider(delete).await.unwrap_err();
    assert_eq!((error.code(), reason(&error)), (Code::NotFound, "NO_SUCH_PROVIDER".into()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_fetch_is_shared_by_concurrent_calls() {
    let (_database, rm) = start().await;
    let (yarn, client) = (Yarn::start(CAPACITY).await, client_of(&rm).await);
    put(&client, provider("default", &config(&yarn.address))).await.unwrap();
    let before = yarn.is_known().await;
    yarn.behave(|behaviour| behaviour.hangs = true);
    let call = || {
        let client = client.clone();
        tokio::spawn(async move { get_queue(&client, "etl").await })
    };
    let in_progress = async |count| {
        eventually("the calls are in progress", LONG, async || rm.metric("linkis_rm_calls") == count).await;
    };
    // A cancelled call does not cancel the fetch.
    let cancelled = call();
    eventually("the fetch begins", LONG, async || yarn.asked() > before).await;
    cancelled.abort();
    in_progress(0.0).await;
    let calls: Vec<_> = (0..50).map(|_| call()).collect();
    in_progress(50.0).await;
    yarn.behave(|behaviour| behaviour.hangs = false);
    for call in calls {
        call.await.unwrap().unwrap();
    }
    // A state that is stale at its arrival is fetched again.
    assert!(yarn.asked() <= before + 5);
    // The current state is returned once the old one is stale.
    let before = yarn.asked();
    yarn.behave(|behaviour| behaviour.scheduler = Some(FAIR.into()));
    eventually("the other scheduler", LONG, async || get_queue(&client, "etl").await.is_err()).await;
    assert_eq!(yarn.asked(), before + 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_outage_returns_reason_and_limits_fetches() {
    let (_database, rm) = start().await;
    let (yarn, client) = (Yarn::start(FAIR).await, client_of(&rm).await);
    put(&client, provider("default", &config(&yarn.address))).await.unwrap();
    let (before, begun) = (yarn.is_known().await, std::time::Instant::now());
    yarn.behave(|behaviour| behaviour.scheduler = None);
    for _ in 0..20 {
        let error = get_queue(&client, "root").await.unwrap_err();
        assert_eq!((error.code(), reason(&error)), (Code::Unavailable, "EXTERNAL_UNAVAILABLE".into()));
        assert!(error.message().ends_with(&format!("{} answered 503", yarn.address)), "{error}");
        assert!(error.get_details_retry_info().is_some());
        assert_eq!(error.get_details_error_info().unwrap().metadata["code"], "11006");
    }
    let most = 3 * (2 + begun.elapsed().as_secs() as usize / 2);
    assert!(yarn.asked() <= before + most, "{} tries, three of each fetch", yarn.asked() - before);
    yarn.behave(|behaviour| behaviour.scheduler = Some("<html></html>".into()));
    eventually("it is tried again", LONG, async || {
        get_queue(&client, "root").await.unwrap_err().code() == Code::FailedPrecondition
    })
    .await;
    yarn.serving.abort();
    yarn.behave(|behaviour| behaviour.scheduler = Some(FAIR.into()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_with_mistake_returns_field() {
    let database = Database::fresh().await;
    let hosts = "rm1,*.example.com:8088";
    let rm = Instance::start_with(&database, settings().with("--external-hosts", hosts)).await;
    let client = client_of(&rm).await;
    let good = || provider("default", &config("http://rm1:8088"));
    for (wrong, at) in [
        (proto::Provider { resource_type: "Mesos".into(), ..good() }, "provider.resource_type"),
        (proto::Provider { resource_type: String::new(), ..good() }, "provider.resource_type"),
        (proto::Provider { name: String::new(), ..good() }, "provider.name"),
        (proto::Provider { config: String::new(), ..good() }, "provider.config"),
        (proto::Provider { config: " ".repeat(20_000), ..good() }, "provider.config"),
        (proto::Provider { config: r#"{"rmWebAdress": ""}"#.into(), ..good() }, "provider.config.rmWebAddress"),
        (proto::Provider { config: config("http://rm1").replace("user", "usr"), ..good() }, "provider.config.usr"),
        (
            proto::Provider {
                config: config("http://rm1").replace("\"kerberosEnable\": false", "\"kerberosEnable\": true"),
                ..good()
            },
            "provider.config.kerberosEnable",
        ),
        (proto::Provider { config: config("http://169.254.169.254"), ..good() }, "provider.config"),
        (proto::Provider { config: config("http://rm1;http://rm2"), ..good() }, "provider.config"),
        (
            proto::Provider { labels: BTreeMap::from([(String::new(), "x".into())]), ..good() },
            "provider.labels (a key)",
        ),
    ] {
        let error = put(&client, wrong).await.unwrap_err();
        assert_eq!((error.code(), field(&error).as_str()), (Code::InvalidArgument, at), "{error}");
    }
    let error = put(&client, provider("default", &config("http://rm2:8088"))).await.unwrap_err();
    assert!(
        error.message().contains("http://rm2:8088 is not an allowed host")
            && error.message().contains("--external-hosts"),
        "{error}"
    );
    assert!(
        client.clone().list_providers(proto::ListProvidersRequest {}).await.unwrap().into_inner().providers.is_empty()
    );
    let both = proto::ProviderSelector {
        name: "x".into(),
        labels: BTreeMap::from([("a".into(), "b".into())]),
        ..Default::default()
    };
    let call = proto::GetQueueRequest { provider: Some(both), queue_name: "root".into() };
    assert_eq!(field(&client.clone().get_queue(call).await.unwrap_err()), "provider.labels");
    let call = proto::ListQueuesRequest { page_size: -1, ..Default::default() };
    assert_eq!(field(&client.clone().list_queues(call).await.unwrap_err()), "page_size");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_fetch_requires_allowed_host() {
    let (database, rm) = start().await;
    let (yarn, client) = (Yarn::start(FAIR).await, client_of(&rm).await);
    put(&client, provider("default", &config(&yarn.address))).await.unwrap();
    let before = yarn.is_known().await;
    let strict = Instance::start_with(&database, settings().with("--external-hosts", "elsewhere")).await;
    let error = get_queue(&client_of(&strict).await, "root").await.unwrap_err();
    assert_eq!((error.code(), reason(&error)), (Code::FailedPrecondition, "EXTERNAL_UNAVAILABLE".into()));
    assert!(error.message().contains("--external-hosts"), "{error}");
    assert_eq!(yarn.asked(), before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_etag_mismatch_is_refused() {
    let (_database, rm) = start().await;
    let client = client_of(&rm).await;
    let put_if = async |provider: proto::Provider, etag: Option<&str>| {
        let call = proto::PutProviderRequest { provider: Some(provider), expected_etag: etag.map(str::to_owned) };
        client.clone().put_provider(call).await.map(|got| got.into_inner().provider.unwrap())
    };
    let default = || provider("default", &config("http://127.0.0.1:8088"));
    let first = put_if(default(), Some("")).await.unwrap();
    assert_eq!((first.updated_by.as_str(), first.update_time.is_some()), ("anonymous", true));
    for stale in ["", "x", &uuid::Uuid::new_v4().to_string()] {
        let error = put_if(default(), Some(stale)).await.unwrap_err();
        assert_eq!((error.code(), reason(&error)), (Code::Aborted, "PROVIDER_CHANGED".into()));
    }
    let second = put_if(default(), Some(&first.etag)).await.unwrap();
    assert_ne!(first.etag, second.etag);
    let other = provider("other", &config("http://127.0.0.1:8089"));
    let error = put_if(other.clone(), None).await.unwrap_err();
    assert_eq!((error.code(), reason(&error)), (Code::AlreadyExists, "PROVIDER_LABELS_TAKEN".into()));
    let labels = |n: usize| BTreeMap::from([("yarnCluster".to_owned(), format!("Yarn-{n}"))]);
    for n in 1..32 {
        put_if(proto::Provider { name: format!("p{n:02}"), labels: labels(n), ..other.clone() }, None).await.unwrap();
    }
    let error = put_if(proto::Provider { labels: labels(32), ..other.clone() }, None).await.unwrap_err();
    assert_eq!(reason(&error), "TOO_MANY_PROVIDERS");
    put_if(default(), None).await.unwrap();
    let delete = |etag: &str| proto::DeleteProviderRequest {
        resource_type: "Yarn".into(),
        name: "p01".into(),
        expected_etag: Some(etag.into()),
    };
    let error = client.clone().delete_provider(delete(&second.etag)).await.unwrap_err();
    assert_eq!(reason(&error), "PROVIDER_CHANGED");
    let got = client.clone().list_providers(proto::ListProvidersRequest {}).await.unwrap().into_inner().providers;
    assert_eq!(got.len(), 32);
    client.clone().delete_provider(delete(&got[1].etag)).await.unwrap();
}

/// The labels of a request select its provider.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_is_selected_by_labels() {
    let (_database, rm) = start().await;
    let (yarn, client) = (Yarn::start(FAIR).await, client_of(&rm).await);
    let labels = BTreeMap::from([("yarnCluster".to_owned(), "Yarn-etl".to_owned())]);
    put(&client, provider("default", &config(&yarn.address))).await.unwrap();
    put(&client, proto::Provider { labels: labels.clone(), ..provider("etl", &config(&yarn.address)) }).await.unwrap();
    let asked = async |selector: proto::ProviderSelector| {
        let call = proto::GetQueueRequest { provider: Some(selector), queue_name: "root".into() };
        client.clone().get_queue(call).await.unwrap().into_inner().provider_name
    };
    let selector = proto::ProviderSelector::default;
    assert_eq!(asked(selector()).await, "default");
    assert_eq!(asked(proto::ProviderSelector { labels, ..selector() }).await, "etl");
    assert_eq!(
        asked(proto::ProviderSelector { labels: BTreeMap::from([("yarnCluster".into(), "x".into())]), ..selector() })
            .await,
        "default"
    );
    assert_eq!(asked(proto::ProviderSelector { name: "etl".into(), ..selector() }).await, "etl");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_password_is_never_returned() {
    let (_database, rm) = start().await;
    let (yarn, client) = (Yarn::start("<html>").await, client_of(&rm).await);
    let with = |address: &str, pwd: &str| {
        provider("default", &format!(r#"{{"rmWebAddress": "{address}", "authorEnable": true, "user": "hadoop"{pwd}}}"#))
    };
    let mut got = vec![format!("{:?}", put(&client, with(&yarn.address, r#", "pwd": "gr8-s3cret""#)).await.unwrap())];
    // A provider without a password keeps the stored one, unless the addresses change, because another server would receive it.
    got.push(format!("{:?}", put(&client, with(&yarn.address, "")).await.unwrap()));
    let other = put(&client, with("http://127.0.0.1:9", "")).await.unwrap_err();
    assert_eq!(field(&other), "provider.config.pwd");
    got.push(format!("{other:?}"));
    got.push(format!("{:?}", put(&client, with(&yarn.address, r#", "pwd": "gr8-s3cret", "x": 1"#)).await.unwrap_err()));
    got.push(format!("{:?}", put(&client, with(&yarn.address, r#", "pwd": "gr8-s3cret""#).clone()).await.unwrap()));
    got.push(format!("{:?}", get_queue(&client, "root").await.unwrap_err()));
    got.push(format!("{:?}", client.clone().list_providers(proto::ListProvidersRequest {}).await.unwrap()));
    got.push(rm.metrics.text());
    assert!(got.iter().all(|text| !text.contains(SECRET)), "{got:?}");
    assert!(yarn.asked() > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trace_log_hides_provider_password() {
    let (database, yarn) = (Database::fresh().await, Yarn::start(FAIR).await);
    let lines = Arc::<Mutex<Vec<String>>>::default();
    let log = lines.clone();
    let mut command = Command::new("env");
    command.args(["RUST_LOG=trace", *PROGRAM, "--database-url", &database.url(), "--external-hosts", "127.0.0.1"]);
    let rm = Process::start_command(command.args(["--http-listen", ""]), move |line| log.lock().unwrap().push(line));
    let client = Client::connect(rm.address.clone()).await.unwrap();
    let config =
        format!(r#"{{"rmWebAddress": "{}", "authorEnable": true, "user": "hadoop", "pwd": "{SECRET}"}}"#, yarn.address);
    put(&client, provider("default", &config)).await.unwrap();
    put(&client, provider("default", &config.replace("authorEnable", "x"))).await.unwrap_err();
    get_queue(&client, "root").await.unwrap();
    yarn.behave(|behaviour| behaviour.scheduler = None);
    eventually("it fails", LONG, async || get_queue(&client, "root").await.is_err()).await;
    assert_eq!(rm.terminate(), Some(0));
    let lines = lines.lock().unwrap();
    assert!(lines.iter().any(|line| line.contains("TRACE")), "{lines:?}");
    let secrets = [SECRET, "aGFkb29wOmdyOC1zM2NyZXQ="];
    let got: Vec<_> = lines.iter().filter(|line| secrets.iter().any(|secret| line.contains(secret))).collect();
    assert!(got.is_empty(), "{got:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queues_and_applications_come_in_pages() {
    let (_database, rm) = start().await;
    let (yarn, client) = (Yarn::start(CAPACITY).await, client_of(&rm).await);
    put(&client, provider("default", &config(&yarn.address))).await.unwrap();
    let (mut paths, mut page_token) = (Vec::new(), String::new());
    loop {
        let call = proto::ListQueuesRequest { page_size: 2, page_token, ..Default::default() };
        let page = client.clone().list_queues(call).await.unwrap().into_inner();
        paths.push(page.queues.into_iter().map(|queue| queue.path).collect::<Vec<_>>());
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(paths, [vec!["root", "root.default"], vec!["root.eng", "root.eng.adhoc"], vec!["root.eng.etl"]]);

    let list = async |filter: proto::ListApplicationsRequest| {
        let (mut ids, mut pages, mut page_token) = (Vec::new(), 0, String::new());
        while pages == 0 || !page_token.is_empty() {
            let call = proto::ListApplicationsRequest { page_token, page_size: 3, ..filter.clone() };
            let page = client.clone().list_applications(call).await.unwrap().into_inner();
            ids.extend(page.applications.into_iter().map(|app| (app.application_id, app.queue)));
            (pages, page_token) = (pages + 1, page.next_page_token);
        }
        (ids.len(), pages, ids.first().map(|(_, queue)| queue.clone()).unwrap_or_default())
    };
    let filter = proto::ListApplicationsRequest::default;
    assert_eq!(list(filter()).await, (10, 4, "root.eng.etl".into()), "a last name returns its path");
    assert_eq!(list(proto::ListApplicationsRequest { queue_name: "eng".into(), ..filter() }).await.0, 5);
    assert_eq!(list(proto::ListApplicationsRequest { queue_name: "root".into(), ..filter() }).await.0, 10);
    assert_eq!(
        list(proto::ListApplicationsRequest { user: "alice".into(), ..filter() }).await,
        (5, 2, "root.default".into())
    );
    let accepted = proto::ListApplicationsRequest { state: "ACCEPTED".into(), queue_name: "etl".into(), ..filter() };
    assert_eq!(list(accepted).await, (3, 1, "root.eng.etl".into()));
    let unknown = proto::ListApplicationsRequest { queue_name: "x".into(), ..filter() };
    assert_eq!(reason(&client.clone().list_applications(unknown).await.unwrap_err()), "NO_SUCH_QUEUE");
}

/// An absent or slow cluster affects no other call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hanging_cluster_delays_no_other_call() {
    let (_database, rm) = start().await;
    let (yarn, client) = (Yarn::start(FAIR).await, client_of(&rm).await);
    put(&client, provider("default", &config(&yarn.address))).await.unwrap();
    let before = yarn.is_known().await;
    yarn.behave(|behaviour| behaviour.hangs = true);
    let hanging: Vec<_> = (0..100)
        .map(|_| {
            tokio::spawn({
                let client = client.clone();
                async move { get_queue(&client, "root").await }
            })
        })
        .collect();
    eventually("the fetch begins", LONG, async || yarn.asked() > before).await;
    rm.client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    let put_meanwhile = proto::Provider {
        labels: BTreeMap::from([("a".into(), "b".into())]),
        ..provider("b", &config("http://127.0.0.1:9"))
    };
    put(&client, put_meanwhile).await.unwrap();
    assert!(yarn.asked() <= before + 3, "more than the tries of one fetch");
    hanging.into_iter().for_each(|call| call.abort());
}

async fn check(
    client: &Client<Channel>,
    name: &str,
    provider: Option<proto::Provider>,
) -> Result<proto::check_provider_response::Result, Status> {
    let call = proto::CheckProviderRequest { name: name.into(), provider, ..Default::default() };
    Ok(client.clone().check_provider(call).await?.into_inner().result.unwrap())
}

/// A check returns the numbers found or the failure, and stores nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_check_returns_content_or_failure() {
    use proto::check_provider_response::Result::{Content, Failure};
    let (database, rm) = start().await;
    let (yarn, client) = (Yarn::start(FAIR).await, client_of(&rm).await);
    let new = || Some(provider("default", &config(&yarn.address)));
    let Content(content) = check(&client, "", new()).await.unwrap() else { panic!("it replies") };
    assert!(content.queues > 3 && content.applications == 10, "{content:?}");
    assert!(content.queues_duration.is_some() && content.applications_duration.is_some());
    assert_eq!(database.count("SELECT count(*) FROM linkis_external_resource_provider").await, 0);
    assert_eq!(reason(&check(&client, "default", None).await.unwrap_err()), "NO_SUCH_PROVIDER");
    put(&client, new().unwrap()).await.unwrap();
    // The first check made two calls, and a snapshot makes three.
    eventually("a snapshot", LONG, async || yarn.asked() >= 5).await;
    let before = yarn.asked();
    assert!(matches!(check(&client, "default", None).await.unwrap(), Content(_)));
    assert_eq!(yarn.asked(), before + 2, "not from the cache");
    yarn.behave(|behaviour| behaviour.scheduler = None);
    let Failure(failure) = check(&client, "default", None).await.unwrap() else { panic!("it replies 503") };
    assert!(failure.may_pass && failure.message.ends_with(&format!("{} answered 503", yarn.address)), "{failure:?}");
    let elsewhere = provider("default", &config("http://169.254.169.254"));
    for (name, provider, at) in [
        ("", None, "name"),
        ("default", new(), "provider"),
        ("", Some(elsewhere), "provider.config"),
        ("a\u{7}", None, "name"),
    ] {
        let error = check(&client, name, provider).await.unwrap_err();
        assert_eq!((error.code(), field(&error).as_str()), (Code::InvalidArgument, at), "{error}");
    }
    assert!(rm.metrics.text().contains(r#"linkis_rm_external_fetches_total{result="ok"}"#));
}

/// A check above the bound is rejected, and the end of one returns its permit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_checks_are_bounded() {
    let (_database, rm) = start().await;
    let (yarn, client) = (Yarn::start(FAIR).await, client_of(&rm).await);
    yarn.behave(|behaviour| behaviour.hangs = true);
    let new = || Some(provider("default", &config(&yarn.address)));
    let checks: Vec<_> = (0..4)
        .map(|_| {
            let (client, new) = (client.clone(), new());
            tokio::spawn(async move { check(&client, "", new).await })
        })
        .collect();
    eventually("four checks run", LONG, async || rm.metric("linkis_rm_external_checks") == 4.0).await;
    let error = check(&client, "", new()).await.unwrap_err();
    assert_eq!((error.code(), reason(&error).as_str()), (Code::ResourceExhausted, "OVERLOADED"));
    checks[0].abort();
    eventually("three checks run", LONG, async || rm.metric("linkis_rm_external_checks") == 3.0).await;
    yarn.behave(|behaviour| behaviour.hangs = false);
    check(&client, "", new()).await.unwrap();
    checks.iter().for_each(tokio::task::JoinHandle::abort);
}
