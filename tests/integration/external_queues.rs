//! Requests in queues of an external cluster: its snapshot and later grants count together, on any number of instances.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use rm_client::{ResourceRequest, ResultResource, RmClient};
use rm_model::{
    external::QueueCheckBasis,
    hold::NewHold,
    operation::{Grant, LockKey},
    resource::{Dimension, LoadInstanceAmounts, Resource, ResourceParts, YarnAmounts},
};
use rm_proto::v1::{
    self as proto, external_resource_service_client::ExternalResourceServiceClient,
    resource_manager_service_client::ResourceManagerServiceClient,
};
use tokio::{net::TcpListener, task::JoinSet};
use tonic_types::StatusExt as _;

use crate::harness::*;

mod cluster;
mod preparation_cache;
mod stale_snapshots;

use cluster::{Cluster, QueueOf};

const SOON: Duration = Duration::from_secs(20);

async fn put(rm: &Instance, config: String) {
    put_as(rm, "default", BTreeMap::new(), config).await;
}

async fn put_as(rm: &Instance, name: &str, labels: BTreeMap<String, String>, config: String) {
    let (resource_type, name) = ("Yarn".into(), name.into());
    let provider = proto::Provider { resource_type, name, labels, config, ..Default::default() };
    let call = proto::PutProviderRequest { provider: Some(provider), expected_etag: None };
    ExternalResourceServiceClient::connect(rm.address.clone()).await.unwrap().put_provider(call).await.unwrap();
}

const GENERATION: &str = "SELECT coalesce(max(generation), 0) FROM linkis_external_cluster";

/// Waits for a snapshot that begins after this call.
async fn refreshed(database: &Database) {
    let before = database.count(GENERATION).await;
    // The next snapshot may have begun already.
    eventually("two snapshots", SOON, async || database.count(GENERATION).await >= before + 2).await;
}

/// Returns a resource with amounts of a queue and a small driver.
fn of_queue(queue: &str, gb: i64, application_id: &str) -> Resource {
    let driver = LoadInstanceAmounts { memory: 1, cores: 1, instances: 1 };
    let (queue_name, application_id) = (queue.to_owned(), application_id.to_owned());
    let yarn = YarnAmounts { queue_memory: gb * GB, queue_cores: gb, queue_instances: 1, queue_name, application_id };
    Resource::from_parts(ResourceParts::DriverAndYarn(driver, yarn)).unwrap()
}

pub fn in_queue(queue: &str, gb: i64) -> ResourceRequest {
    request(&em("host1"), "hadoop", of_queue(queue, gb, ""))
}

/// Starts a cluster with a provider, two instances, and one EM with ample capacity.
async fn two_instances(queues: &[QueueOf], more: &str) -> (Database, Cluster, Instance, Instance) {
    let (database, one, two) = two().await;
    let cluster = Cluster::start(queues).await;
    one.client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
    put(&one, cluster.config(more)).await;
    eventually("a snapshot", SOON, async || database.count(GENERATION).await > 0).await;
    (database, cluster, one, two)
}

/// Counted GB of a queue: the snapshot in force and the unseen use.
async fn counted(database: &Database, path: &str) -> i64 {
    let sql =
        "SELECT ((s.used_memory + coalesce(u.unseen_memory, 0)) / 1073741824)::bigint FROM linkis_external_cluster c
        JOIN linkis_external_snapshot s ON s.cluster_id = c.cluster_id AND s.generation = c.generation AND s.path = $1
        LEFT JOIN linkis_external_queue u ON u.cluster_id = c.cluster_id AND u.path = s.path";
    sqlx::query_scalar(sql).bind(path).fetch_one(&database.pool).await.unwrap()
}

/// Makes concurrent requests, half on each instance. Returns the grants.
async fn burst(instances: [&Instance; 2], requests: usize, ask: &ResourceRequest) -> Vec<Grant> {
    let mut calls = JoinSet::new();
    for number in 0..requests {
        let (client, ask) = (client(&instances[number % 2].address), ask.clone());
        calls.spawn(async move { client.request_resource(&ask).await.unwrap() });
    }
    let granted = calls.join_all().await.into_iter().filter_map(|answer| match answer {
        ResultResource::Available(grant) => Some(grant),
        ResultResource::NotEnough(refusal) => {
            assert_eq!(refusal.code, 12_011, "{refusal:?}");
            None
        }
    });
    granted.collect()
}

async fn report(client: &RmClient, grant: &Grant, queue: &str, application_id: &str) {
    let used = of_queue(queue, 12, application_id);
    client.resource_inited(&inited(grant, "hadoop", Some(used))).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn external_queue_burst_is_granted_within_capacity() {
    for (parent, fits) in [(300, 8), (50, 4)] {
        let queues = [("root", 1000, 0, "RUNNING"), ("root.a", parent, 0, "RUNNING"), ("root.a.x", 110, 10, "RUNNING")];
        let queues =
            queues.map(|(path, max, used, state)| (path, if path == "root.a" { max + 10 } else { max }, used, state));
        let (database, cluster, one, two) = two_instances(&queues, "").await;
        // The cluster lags: no snapshot shows the granted amounts.
        let granted = burst([&one, &two], 30, &in_queue("a.x", 12)).await;
        assert_eq!(granted.len(), fits, "a parent with {parent} GB");
        refreshed(&database).await;
        assert!(burst([&one, &two], 4, &in_queue("root.a.x", 12)).await.is_empty());
        let refusal = two.client.request_resource(&in_queue("a.x", 12)).await.refused();
        let short = &refusal.shortfalls[0];
        let left = if parent == 50 { 2 } else { 4 };
        assert_eq!((short.dimension.clone(), short.requested, short.available), (Dimension::QueueCores, 12, left));
        let place = if parent == 50 { "provider=default,queue=root.a" } else { "provider=default,queue=root.a.x" };
        assert_eq!((short.scope.as_str(), refusal.never_fits), (place, false));
        assert!(short.rule.contains("s ago"), "{short:?}");
        assert_eq!(counted(&database, "root.a.x").await, 10 + 12 * i64::try_from(fits).unwrap());
        assert_eq!(assert_invariants(&database, &one.client).await, fits);
        assert!(cluster.asked.load(Ordering::SeqCst) > 0);
    }
}

/// Applications of granted tickets appear and end: no amount is counted twice or missed at any moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn applications_of_tickets_are_counted_once() {
    let queues = [("root", 1000, 0, "RUNNING"), ("root.a", 500, 0, "RUNNING"), ("root.a.x", 100, 0, "RUNNING")];
    let (database, cluster, one, two) = two_instances(&queues, "").await;
    let granted = burst([&one, &two], 12, &in_queue("a.x", 12)).await;
    assert_eq!(granted.len(), 8);
    let (database, stop) = (Arc::new(database), Arc::new(AtomicBool::new(false)));
    let watch = tokio::spawn({
        let (database, stop) = (database.clone(), stop.clone());
        async move {
            let mut samples = 0;
            while !stop.load(Ordering::SeqCst) {
                for path in ["root.a.x", "root.a", "root"] {
                    assert_eq!(counted(&database, path).await, 96, "{path}");
                }
                samples += 1;
            }
            samples
        }
    });
    for (number, grant) in granted.iter().enumerate() {
        let id = format!("application_1_{number}");
        let client = if number % 2 == 0 { &one.client } else { &two.client };
        // Some applications are shown before their report, some after it.
        if number < 4 {
            report(client, grant, "a.x", &id).await;
        }
        cluster.show(|shown| shown.applications.push((id.clone(), "root.a.x", 0)));
        if number >= 4 {
            report(client, grant, "a.x", &id).await;
        }
    }
    // The cluster shows a part of the use first, then all of it.
    for gb in [1, 7, 12] {
        cluster.show(|shown| shown.applications.iter_mut().for_each(|(.., has)| *has = gb));
        refreshed(&database).await;
        assert!(burst([&one, &two], 2, &in_queue("a.x", 12)).await.is_empty());
    }
    stop.store(true, Ordering::SeqCst);
    assert!(watch.await.unwrap() > 10);
    let unseen = "SELECT coalesce(sum(unseen_memory), 0)::bigint FROM linkis_external_queue";
    assert_eq!(database.count(unseen).await, 0, "no unseen use is left");
    // An ended ticket counts until the cluster no longer shows its application.
    for grant in &granted[..3] {
        one.client.resource_released(&release(grant, "hadoop")).await.unwrap();
    }
    assert_eq!(counted(&database, "root").await, 96);
    cluster.show(|shown| drop(shown.applications.drain(..3)));
    refreshed(&database).await;
    assert_eq!(counted(&database, "root").await, 60);
    assert_eq!(burst([&one, &two], 6, &in_queue("a.x", 12)).await.len(), 3);
    // Applications are matched to tickets by their ids.
    let mut external = ExternalResourceServiceClient::connect(two.address.clone()).await.unwrap();
    let got = external.list_applications(proto::ListApplicationsRequest::default()).await.unwrap().into_inner();
    let of = |n: usize| got.applications.iter().find(|app| app.application_id == format!("application_1_{n}"));
    assert_eq!(of(5).unwrap().ticket_id, granted[5].ticket_id.to_string());
    assert_eq!(assert_invariants(&database, &one.client).await, 8);
    let kept = "SELECT count(*) FROM linkis_external_ticket WHERE ended";
    eventually("ended tickets are deleted", SOON, async || database.count(kept).await == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_outage_applies_policy_of_its_provider() {
    let queues = [("root", 100, 0, "RUNNING"), ("root.a", 20, 0, "RUNNING")];
    let (database, cluster, one, two) = two_instances(&queues, "").await;
    let first = one.client.request_resource(&in_queue("a", 5)).await.granted();
    let judged = first.queue.unwrap();
    assert_eq!(
        (judged.provider.as_str(), judged.path.as_str(), judged.basis),
        ("default", "root.a", QueueCheckBasis::Snapshot)
    );
    assert!(judged.age.unwrap() < time::Duration::seconds(20));
    // Refused when the last snapshot is too old; other requests are served.
    put(&one, cluster.config("").replace("20s", "1s")).await;
    cluster.show(|shown| shown.is_away = true);
    let is_refused = async || match one.client.request_resource(&in_queue("a", 1)).await.unwrap() {
        ResultResource::NotEnough(refusal) => {
            assert_eq!((refusal.code, refusal.never_fits), (11_006, false), "{refusal:?}");
            assert!(refusal.reason.contains("provider default has not answered for"), "{refusal:?}");
            true
        }
        ResultResource::Available(grant) => {
            one.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
            false
        }
    };
    eventually("it is refused", SOON, is_refused).await;
    one.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    // Decided by the last snapshot, on every instance from the next call on.
    put(&one, cluster.config(r#", "whenDown": "last_known", "lastKnownFor": "1h""#).replace("20s", "1s")).await;
    let last_known = two.client.request_resource(&in_queue("a", 10)).await.granted();
    assert_eq!(last_known.queue.clone().unwrap().basis, QueueCheckBasis::LastKnown);
    assert_eq!(two.client.request_resource(&in_queue("a", 10)).await.refused().code, 12_011);
    // Independent of the queue's capacity, and still counted.
    put(&one, cluster.config(r#", "whenDown": "allow""#).replace("20s", "1s")).await;
    let allowed = two.client.request_resource(&in_queue("a", 10)).await.granted();
    assert_eq!(allowed.queue.clone().unwrap().basis, QueueCheckBasis::Unchecked);
    cluster.show(|shown| shown.is_away = false);
    put(&one, cluster.config(r#", "whenDown": "allow""#)).await;
    refreshed(&database).await;
    let is_back = async || match two.client.dry_run(&in_queue("a", 1)).await.unwrap() {
        ResultResource::NotEnough(refusal) => refusal.code == 12_011 && refusal.shortfalls[0].available == -5,
        ResultResource::Available(_) => false,
    };
    eventually("it is judged again", SOON, is_back).await;
    two.client.resource_released(&release(&allowed, "hadoop")).await.unwrap();
    let again = two.client.request_resource(&in_queue("a", 4)).await.granted();
    assert_eq!(again.queue.unwrap().basis, QueueCheckBasis::Snapshot);
    assert_eq!(assert_invariants(&database, &one.client).await, 4);
}

/// Twice as many hanging clusters as permits for large replies, beside a cluster with a large reply.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hanging_clusters_delay_no_other_refresh() {
    const HANGING: usize = 8;
    let (database, rm) = start_with_em(em("host1"), load(1000, 1000, 1000)).await;
    let connected = Arc::<AtomicUsize>::default();
    for number in 0..HANGING {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let connected = connected.clone();
        tokio::spawn(async move {
            let mut silent = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                connected.fetch_add(usize::from(silent.is_empty()), Ordering::SeqCst);
                silent.push(stream);
            }
        });
        // A request without labels gets the default one's queues.
        let labels = [("cluster".to_owned(), number.to_string())].into();
        let config = format!(r#"{{"rmWebAddress": "http://{address}", "refreshInterval": "200ms", "maxAge": "20s"}}"#);
        put_as(&rm, &format!("hanging{number}"), labels, config).await;
    }
    eventually("all of them are asked", SOON, async || connected.load(Ordering::SeqCst) == HANGING).await;
    let cluster = Cluster::start(&[("root", 100, 0, "RUNNING"), ("root.a", 100, 0, "RUNNING")]).await;
    cluster.show(|shown| shown.padding = 100_000);
    put(&rm, cluster.config("")).await;
    for _ in 0..5 {
        let before = database.count(GENERATION).await;
        eventually("a snapshot", Duration::from_secs(4), async || database.count(GENERATION).await > before).await;
    }
    rm.client.request_resource(&in_queue("a", 12)).await.granted();
    assert_invariants(&database, &rm.client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_in_absent_or_stopped_queue_is_refused() {
    let queues = [
        ("root", 100, 0, "RUNNING"),
        ("root.a", 20, 0, "STOPPED"),
        ("root.a.x", 10, 0, "RUNNING"),
        ("root.b", 10, 0, "RUNNING"),
    ];
    let (_database, _cluster, one, _two) = two_instances(&queues, "").await;
    let refusal = one.client.request_resource(&in_queue("nowhere", 1)).await.refused();
    assert_eq!((refusal.code, refusal.never_fits), (11_006, true));
    assert!(refusal.reason.contains(r#"there is no queue "nowhere""#), "{refusal:?}");
    let refusal = one.client.request_resource(&in_queue("a.x", 1)).await.refused();
    assert!(refusal.reason.contains("root.a is STOPPED"), "{refusal:?}");
    let refusal = one.client.request_resource(&in_queue("b", 11)).await.refused();
    assert!(refusal.never_fits, "{refusal:?}");
    // A request without amounts in the queue is not checked.
    one.client.request_resource(&in_queue("nowhere", 0)).await.granted();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_names_select_first_fitting_queue() {
    let queues = [("root", 100, 0, "RUNNING"), ("root.a", 20, 15, "RUNNING"), ("root.b", 20, 5, "RUNNING")];
    let (database, _cluster, one, two) = two_instances(&queues, "").await;
    let mut manager = ResourceManagerServiceClient::connect(one.address.clone()).await.unwrap();
    let resource = proto::YarnResource { queue_memory: 10 * GB, queue_cores: 10, ..Default::default() };
    let resource = proto::DriverAndYarnResource {
        load_instance: Some(proto::LoadInstanceResource { memory: 1, cores: 1, instances: 1 }),
        yarn: Some(resource),
    };
    let ask = |names: &[&str], request_id: &str| proto::RequestResourceRequest {
        em: Some(proto::EmInstance {
            application_name: em("host1").application_name.to_string(),
            instance: em("host1").instance.to_string(),
        }),
        user: "hadoop".into(),
        creator: "IDE".into(),
        resource: Some(proto::Resource { kind: Some(proto::resource::Kind::DriverAndYarn(resource.clone())) }),
        queue_names: names.iter().map(|name| (*name).to_owned()).collect(),
        request_id: request_id.into(),
        ..Default::default()
    };
    let mut asked = async |request: proto::RequestResourceRequest| {
        manager.request_resource(request).await.map(|answer| answer.into_inner().result.unwrap())
    };
    use proto::request_resource_response::Result::{Available, NotEnough};
    let dry_run = proto::RequestResourceRequest { dry_run: true, ..ask(&["a", "b"], "") };
    let Available(got) = asked(dry_run).await.unwrap() else { panic!("b has room") };
    assert_eq!(got.queue_name, "b");
    for _ in 0..2 {
        let Available(got) = asked(ask(&["a", "b"], "one")).await.unwrap() else { panic!("b has room") };
        assert_eq!(got.queue_name, "b");
    }
    let NotEnough(refusal) = asked(ask(&["a", "b"], "two")).await.unwrap() else { panic!("neither has room") };
    assert_eq!(refusal.scope, "provider=default,queue=root.a", "the first queue of the request");
    let tickets = one.client.tickets(None).await.unwrap();
    assert_eq!((tickets.len(), tickets[0].resource().queue_name()), (1, Some("b")));
    for (wrong, field) in [
        (ask(&["a"; 9], ""), "queue_names"),
        (ask(&["a", ""], ""), "queue_names[1]"),
        (ask(&["a\u{7}"], ""), "queue_names[0]"),
        (
            proto::RequestResourceRequest {
                resource: Some(proto::Resource {
                    kind: Some(proto::resource::Kind::Cpu(proto::CpuResource { cores: 1 })),
                }),
                ..ask(&["a"], "")
            },
            "queue_names",
        ),
    ] {
        let error = asked(wrong).await.unwrap_err();
        assert_eq!(error.get_details_bad_request().unwrap().field_violations[0].field, field, "{error}");
    }
    // The request waits for the first queue that can ever fit.
    let mut manager = ResourceManagerServiceClient::connect(two.address.clone()).await.unwrap();
    let wait_timeout = Some(prost_types::Duration { seconds: 20, nanos: 0 });
    let waits = proto::RequestResourceRequest { wait_timeout, ..ask(&["nowhere", "b", "a"], "") };
    let waiting =
        tokio::spawn(async move { manager.request_resource(waits).await.unwrap().into_inner().result.unwrap() });
    let sql = "SELECT count(*) FROM linkis_resource_waiting";
    eventually("it waits", SOON, async || database.count(sql).await == 1).await;
    one.client.ticket_released(tickets[0].id).await.unwrap();
    let Available(got) = waiting.await.unwrap() else { panic!("b has room again") };
    assert_eq!(got.queue_name, "b");
    assert_eq!(assert_invariants(&database, &one.client).await, 1);
}

/// A request with several queues counts once in the metrics and in the refusals, by its reply.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_with_several_queues_counts_once() {
    const PATHS: [&str; 8] = ["root.a", "root.b", "root.c", "root.d", "root.e", "root.f", "root.g", "root.h"];
    // Only the last queue has capacity.
    let queues = PATHS.iter().map(|path| (*path, 20, if *path == PATHS[7] { 5 } else { 15 }, "RUNNING"));
    let queues: Vec<QueueOf> = [("root", 200, 0, "RUNNING")].into_iter().chain(queues).collect();
    let (database, _cluster, one, _two) = two_instances(&queues, "").await;
    let names = PATHS.map(|path| path.trim_start_matches("root.").to_owned());
    let ask = ResourceRequest { queue_names: names.into(), ..in_queue("a", 10) };
    let ended = |outcome: &str| {
        let series = format!(r#"linkis_rm_requests_total{{outcome="{outcome}""#);
        let text = one.metrics.text();
        let of_each = text.lines().filter(|line| line.starts_with(&series));
        of_each.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum::<u64>()
    };
    let all = || ["granted", "refused", "timed_out", "never_fits", "failed"].map(ended);
    let grant = one.client.request_resource(&ask).await.granted();
    assert_eq!((grant.queue.unwrap().path.as_str(), all()), ("root.h", [1, 0, 0, 0, 0]));
    one.client.request_resource(&ask).await.refused();
    assert_eq!(all(), [1, 1, 0, 0, 0]);
    let patient = ResourceRequest { wait_timeout: Duration::from_secs(3), ..ask };
    let refusal = one.client.request_resource(&patient).await.refused();
    assert_eq!(refusal.shortfalls[0].scope, "provider=default,queue=root.a", "the queue that is named first");
    assert_eq!(all(), [1, 1, 1, 0, 0]);
    let entries =
        "SELECT (SELECT count(*) FROM linkis_resource_waiting) + (SELECT count(*) FROM linkis_resource_waiting_entry)";
    eventually("no request waits", LONG, async || database.count(entries).await == 0).await;
    let got = "SELECT coalesce(sum(refusals), 0)::bigint FROM linkis_resource_refusal";
    eventually("both refusals are listed", SOON, async || database.count(got).await >= 2).await;
    assert_eq!(database.count(got).await, 2);
}

/// A request with several queues waits for one of them and is granted in the first with capacity: after a release on another
/// instance or a new snapshot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_with_several_queues_wakes_by_any() {
    let queues = ["root.a", "root.b", "root.c"].map(|path| (path, 20, 0, "RUNNING"));
    let queues: Vec<QueueOf> = [("root", 100, 0, "RUNNING")].into_iter().chain(queues).collect();
    let (database, cluster, one, two) = two_instances(&queues, "").await;
    let mut held = HashMap::new();
    for queue in ["a", "b", "c"] {
        held.insert(queue, one.client.request_resource(&in_queue(queue, 15)).await.granted());
    }
    let wait = |rm: &Instance, names: [&str; 3], id: &str| {
        let queue_names = names.map(str::to_owned).into();
        let request_id = Some(id.to_owned());
        let ask = ResourceRequest { wait_timeout: SOON, queue_names, request_id, ..in_queue("a", 12) };
        let client = client(&rm.address);
        tokio::spawn(async move { client.request_resource(&ask).await.unwrap() })
    };
    let waiting = async |count| database.waiting(count).await;
    let path = |grant: &Grant| grant.queue.clone().unwrap().path;
    // The request waits on one instance; another one frees capacity in the last of its queues.
    let last = wait(&two, ["a", "b", "c"], "1");
    waiting(1).await;
    one.client.resource_released(&release(&held["c"], "hadoop")).await.unwrap();
    let granted = last.await.unwrap();
    let ResultResource::Available(grant) = granted else { panic!("{granted:?}") };
    assert_eq!(path(&grant), "root.c");
    waiting(0).await;
    // A new snapshot shows capacity.
    let second = wait(&one, ["nowhere", "a", "b"], "2");
    waiting(1).await;
    cluster.show(|shown| shown.queues[2].1 = 30);
    let granted = second.await.unwrap();
    let ResultResource::Available(grant) = granted else { panic!("{granted:?}") };
    assert_eq!(path(&grant), "root.b");
    // If all queues have capacity, the request is granted once.
    let third = wait(&one, ["b", "a", "c"], "3");
    waiting(1).await;
    cluster.show(|shown| shown.queues.iter_mut().for_each(|queue| queue.1 = 100));
    assert!(matches!(third.await.unwrap(), ResultResource::Available(_)));
    waiting(0).await;
    assert_eq!(assert_invariants(&database, &one.client).await, 5);
}

/// One EM is held and the other is full: the request waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_with_several_queues_skips_held_em() {
    let queues = ["root.a", "root.b"].map(|path| (path, 20, 0, "RUNNING"));
    let queues: Vec<QueueOf> = [("root", 100, 0, "RUNNING")].into_iter().chain(queues).collect();
    let (database, _cluster, one, _two) = two_instances(&queues, "").await;
    let full = em("host2");
    one.client.register(registration(full.clone(), load(1, 1, 1))).await.unwrap();
    let grant = one.client.request_resource(&request(&full, "hadoop", load(1, 1, 1))).await.granted();
    // The first of its queues is full, too.
    one.client.request_resource(&in_queue("a", 15)).await.granted();
    let (key, duration) = (LockKey::Em(em("host1")), Duration::from_secs(600));
    one.client.hold(&NewHold { key, duration, reason: name("books are checked") }).await.unwrap();
    let queue_names = vec!["a".to_owned(), "b".to_owned()];
    let call = request_in_task(
        &one.client,
        ResourceRequest { em: None, wait_timeout: SOON * 3, queue_names, ..in_queue("a", 12) },
    );
    let waits = "SELECT count(*) FROM linkis_resource_waiting";
    eventually("it waits in line", SOON, async || database.count(waits).await == 1).await;
    one.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    let granted = tokio::time::timeout(SOON, call).await.expect("there is room").unwrap().granted();
    assert_eq!((granted.em, granted.queue.unwrap().path), (full, "root.b".to_owned()));
    assert!(one.client.release_hold(&LockKey::Em(em("host1"))).await.unwrap());
    assert_eq!(assert_invariants(&database, &one.client).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reported_use_above_queue_capacity_is_refused() {
    let queues = [("root", 100, 0, "RUNNING"), ("root.a", 20, 0, "RUNNING")];
    let (database, _cluster, one, _two) = two_instances(&queues, "").await;
    let grant = one.client.request_resource(&in_queue("a", 12)).await.granted();
    one.client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
    let use_of = |gb| grant.reported(name("hadoop"), of_queue("a", gb, ""));
    one.client.resource_reported(&use_of(20)).await.unwrap();
    one.client.resource_reported(&use_of(21)).await.unwrap_err();
    one.client.resource_reported(&use_of(5)).await.unwrap();
    one.client.request_resource(&in_queue("a", 15)).await.granted();
    assert_eq!(counted(&database, "root.a").await, 20);
    assert_eq!(assert_invariants(&database, &one.client).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn audit_repairs_external_queue_counters() {
    let queues = [("root", 100, 0, "RUNNING"), ("root.a", 20, 0, "RUNNING")];
    let (database, _cluster, one, _two) = two_instances(&queues, r#", "refreshInterval": "5m", "maxAge": "10m""#).await;
    one.client.request_resource(&in_queue("a", 12)).await.granted();
    assert_eq!(assert_invariants(&database, &one.client).await, 1);
    for (planted, counter) in [
        ("UPDATE linkis_external_queue SET unseen_memory = unseen_memory + 5 WHERE path = 'root.a'", "unseen"),
        ("DELETE FROM linkis_external_queue WHERE path = 'root'", "unseen"),
        ("INSERT INTO linkis_external_queue SELECT cluster_id, 'root.z', 1, 1 FROM linkis_external_cluster", "unseen"),
        (
            "INSERT INTO linkis_external_ticket (ticket_id, cluster_id, path, memory, cores, change, ended)
                SELECT gen_random_uuid(), cluster_id, 'root.a', 0, 0, 0, false FROM linkis_external_cluster",
            "ticket",
        ),
    ] {
        assert_eq!(sqlx::raw_sql(planted).execute(&database.pool).await.unwrap().rows_affected(), 1, "{planted}");
        let report = one.client.audit().await.unwrap();
        assert_eq!(report.differences.count, 1, "{planted}: {report:?}");
        assert_eq!(report.differences.first[0].counter, counter, "{report:?}");
        assert!(report.differences.first[0].what.starts_with("scope provider=default"), "{report:?}");
        let repaired = one.client.repair().await.unwrap();
        assert_eq!((repaired.repaired.count, repaired.remaining.count), (1, 0), "{repaired:?}");
        assert_eq!(assert_invariants(&database, &one.client).await, 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_deletion_removes_its_counters() {
    let queues = [("root", 100, 0, "RUNNING"), ("root.a", 20, 0, "RUNNING")];
    let (database, cluster, one, two) = two_instances(&queues, "").await;
    let grants = burst([&one, &two], 2, &in_queue("a", 10)).await;
    let mut external = ExternalResourceServiceClient::connect(two.address.clone()).await.unwrap();
    let delete =
        proto::DeleteProviderRequest { resource_type: "Yarn".into(), name: "default".into(), expected_etag: None };
    external.delete_provider(delete).await.unwrap();
    // No provider is left, so no queue decides.
    let free = one.client.request_resource(&in_queue("a", 1000)).await.granted();
    assert_eq!(free.queue, None);
    one.client
        .resource_inited(&inited(&grants[0], "hadoop", Some(of_queue("a", 10, "application_3_1"))))
        .await
        .unwrap();
    two.client.resource_released(&release(&grants[0], "hadoop")).await.unwrap();
    let rows = "SELECT (SELECT count(*) FROM linkis_external_queue) + (SELECT count(*) FROM linkis_external_ticket)
        + (SELECT count(*) FROM linkis_external_snapshot) + (SELECT count(*) FROM linkis_external_refresh)";
    eventually("nothing of it is left", SOON, async || database.count(rows).await == 0).await;
    // A new provider with an equal name does not count the earlier tickets.
    put(&one, cluster.config("")).await;
    eventually("a snapshot", SOON, async || database.count(GENERATION).await > 0).await;
    assert_eq!(burst([&one, &two], 4, &in_queue("a", 10)).await.len(), 2);
    two.client.resource_released(&release(&grants[1], "hadoop")).await.unwrap();
    assert_eq!(assert_invariants(&database, &one.client).await, 3);
}

/// An outage of a cluster delays no request, with or without a queue of the cluster.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_outage_under_load_delays_no_request() {
    let queues = [("root", 100_000, 0, "RUNNING"), ("root.a", 90_000, 0, "RUNNING")];
    let (database, cluster, one, two) = two_instances(&queues, r#", "whenDown": "allow", "maxAge": "3s""#).await;
    let (plain, queued) = (request(&em("host1"), "hadoop", load(1, 1, 1)), in_queue("a", 1));
    let (stop, unchecked) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
    let mut callers = JoinSet::new();
    for (number, ask) in [plain, queued].into_iter().cycle().take(8).enumerate() {
        // Less than the bound of a fetch from the cluster.
        let client = hurried(if number % 4 < 2 { &one.address } else { &two.address }, Duration::from_secs(8));
        let (stop, unchecked) = (stop.clone(), unchecked.clone());
        callers.spawn(async move {
            while !stop.load(Ordering::SeqCst) {
                let grant = client.request_resource(&ask).await.granted();
                client.resource_released(&release(&grant, "hadoop")).await.unwrap();
                let is_unchecked = grant.queue.is_some_and(|queue| queue.basis == QueueCheckBasis::Unchecked);
                unchecked.fetch_add(usize::from(is_unchecked), Ordering::SeqCst);
            }
        });
    }
    let granted_by = async |basis: QueueCheckBasis| {
        let queue = one.client.dry_run(&in_queue("a", 1)).await;
        assert!(matches!(queue, Ok(ResultResource::Available(_))), "{queue:?}");
        let grant = one.client.request_resource(&in_queue("a", 1)).await.granted();
        one.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
        grant.queue.unwrap().basis == basis
    };
    eventually("it answers", SOON, async || granted_by(QueueCheckBasis::Snapshot).await).await;
    cluster.show(|shown| shown.is_away = true);
    eventually("it is away", SOON, async || granted_by(QueueCheckBasis::Unchecked).await).await;
    eventually("grants without a check", SOON, async || unchecked.load(Ordering::SeqCst) > 50).await;
    cluster.show(|shown| shown.is_away = false);
    eventually("it is back", SOON, async || granted_by(QueueCheckBasis::Snapshot).await).await;
    stop.store(true, Ordering::SeqCst);
    callers.join_all().await;
    assert_eq!(assert_invariants(&database, &one.client).await, 0);
}
