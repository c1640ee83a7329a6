//! Metrics and health over HTTP: values, bounded series, and readiness during outages.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write as _,
    net::SocketAddr,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use rm_client::{ResourceRequest, ResultResource};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tonic::{Code, transport::Endpoint};

use crate::{
    certificates::{Folder, authority, certify},
    harness::*,
    proxy::FaultPlan,
};

/// Status and body of a scrape.
pub async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, body.to_owned())
}

async fn eventually_replies(address: SocketAddr, path: &str, status: u16, body: &str) {
    let got = (status, body.to_owned());
    eventually(&format!("{path}: {got:?}"), LONG, || async { get(address, path).await == got }).await;
}

/// Returns the value of each series.
pub async fn scrape(address: SocketAddr) -> BTreeMap<String, f64> {
    let (status, text) = get(address, "/metrics").await;
    assert_eq!(status, 200, "{text}");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let parse = |line: &str| {
        let (series, value) = line.rsplit_once(' ').unwrap();
        (series.to_owned(), value.parse().unwrap())
    };
    lines.map(parse).collect()
}

async fn series(address: SocketAddr) -> BTreeSet<String> {
    scrape(address).await.into_keys().collect()
}

async fn eventually_is(address: SocketAddr, series: &str, value: f64) {
    let what = format!("{series} is {value}");
    eventually(&what, LONG, || async { scrape(address).await[series] == value }).await;
}

/// A series of a method of the resource manager.
fn of_method(family: &str, method: &str, more: &str) -> String {
    format!(
        r#"{family}{{grpc_type="unary",grpc_service="linkis.rm.v1.ResourceManagerService",grpc_method="{method}"{more}}}"#
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_and_operation_metrics_count_each_end() {
    let (_database, instance) = start().await;
    let (client, em1) = (&instance.client, em("host1"));
    client.register(registration(em1.clone(), load(64, 16, 20))).await.unwrap();
    let grant = client.request_resource(&request(&em1, "alice", load(1, 1, 1))).await.granted();
    client.request_resource(&request(&em1, "alice", load(1, 17, 1))).await.refused();
    client.request_resource(&request(&em("nowhere"), "alice", load(1, 1, 1))).await.unwrap_err();
    client.resource_released(&release(&grant, "bob")).await.unwrap_err();
    client.resource_released(&release(&grant, "alice")).await.unwrap();

    let seen = scrape(instance.http).await;
    let handled = |method, code| {
        seen.get(&of_method("grpc_server_handled_total", method, &format!(",grpc_code={code:?}"))).copied()
    };
    assert_eq!(handled("Register", "OK"), Some(1.0));
    assert_eq!(handled("RequestResource", "OK"), Some(2.0), "a refusal is an answer");
    assert_eq!(handled("RequestResource", "NotFound"), Some(1.0));
    assert_eq!(handled("ResourceReleased", "NotFound"), Some(1.0));
    assert_eq!(seen[&of_method("grpc_server_started_total", "RequestResource", "")], 3.0);
    assert_eq!(seen[&of_method("grpc_server_handling_seconds_count", "RequestResource", "")], 3.0);
    assert_eq!(seen[&of_method("grpc_server_started_total", "Unregister", "")], 0.0, "known before it is called");

    // A registration, a grant and two releases; checks refused the other requests.
    assert_eq!(seen["linkis_rm_batch_operations_sum"], 4.0);
    assert_eq!(seen["linkis_rm_lock_wait_seconds_count"], seen["linkis_rm_batch_operations_count"]);
    assert_eq!(seen["linkis_rm_commit_seconds_count"], 3.0, "one of them wrote nothing");
    assert!(seen["linkis_rm_batch_seconds_sum"] >= seen["linkis_rm_commit_seconds_sum"], "{seen:?}");
    assert_eq!(seen[r#"linkis_rm_operations_failed_total{class="rejected"}"#], 1.0);
    assert_eq!(seen["linkis_rm_committer_queue_operations"], 0.0);
    assert_eq!(seen[r#"linkis_rm_cache_entries{cache="ems"}"#], 1.0);
    assert_eq!(seen["linkis_rm_database_up"], 1.0);
    assert!(seen["process_resident_memory_bytes"] > 1e6 && seen["process_open_fds"] > 3.0, "{seen:?}");
    instance.stop().await;
}

/// Returns the series of requests with this outcome.
fn requests(outcome: &str, scope: &str, dimension: &str) -> String {
    format!(r#"linkis_rm_requests_total{{outcome="{outcome}",scope="{scope}",dimension="{dimension}"}}"#)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_metrics_count_each_outcome() {
    let (_database, instance) = start().await;
    let (client, em1, going) = (&instance.client, em("host1"), em("host2"));
    for em in [&em1, &going] {
        client.register(registration(em.clone(), load(64, 16, 20))).await.unwrap();
    }
    client.set_limit(&each_user(3)).await.unwrap();
    let ask = async |ask: ResourceRequest| client.request_resource(&ask).await;
    let released = ask(request(&em1, "alice", load(1, 1, 1))).await.granted();
    client.resource_released(&release(&released, "alice")).await.unwrap();
    ask(request(&going, "alice", load(1, 1, 1))).await.granted();
    client.unregister(&going).await.unwrap();
    let forced = ask(request(&em1, "alice", load(1, 10, 1))).await.granted();
    // Refusals: some capacity is used; more than the total; more than the limit of a user; and a passed wait timeout.
    ask(request(&em1, "bob", load(1, 10, 1))).await.refused();
    ask(request(&em1, "bob", load(1, 17, 1))).await.refused();
    ask(request(&em1, "bob", load(1, 1, 4))).await.refused();
    let patient = |wait_timeout| ResourceRequest { wait_timeout, ..request(&em1, "bob", load(1, 10, 1)) };
    ask(patient(Duration::from_secs(2))).await.refused();
    ask(request(&em("nowhere"), "bob", load(1, 1, 1))).await.unwrap_err();
    client.dry_run(&request(&em1, "bob", load(1, 17, 1))).await.refused();
    // A cancelled request and a granted one.
    let wait = |patient: ResourceRequest| {
        let client = client.clone();
        tokio::spawn(async move { client.request_resource(&patient).await })
    };
    let goes_away = wait(patient(LONG));
    eventually_is(instance.http, "linkis_rm_waiting_requests", 1.0).await;
    eventually("it is queued", LONG, async || client.waiting().await.unwrap().len() == 1).await;
    // The instance has noted the committed entry, too, when it polls the request.
    let polls = || instance.metric("linkis_rm_waiting_polls_total");
    let before = polls();
    eventually("it is polled", LONG, async || polls() > before).await;
    goes_away.abort();
    eventually_is(instance.http, &requests("cancelled", "", ""), 1.0).await;
    assert_wait_queues_empty(client).await;
    let is_served = wait(patient(LONG));
    eventually("it is queued", LONG, async || client.waiting().await.unwrap().len() == 1).await;
    client.force_release(forced.ticket_id, "a test").await.unwrap();
    is_served.await.unwrap().granted();
    let short = ResourceRequest { lock_ttl: Some(Duration::from_millis(20)), ..request(&em1, "carol", load(1, 1, 1)) };
    ask(short).await.granted();
    eventually_is(instance.http, r#"linkis_rm_tickets_ended_total{how="expired"}"#, 1.0).await;

    let seen = scrape(instance.http).await;
    for (series, count) in [
        (requests("granted", "", ""), 5.0),
        (requests("refused", "em", "cores"), 1.0),
        (requests("never_fits", "em", "cores"), 1.0),
        (requests("never_fits", "user", "instances"), 1.0),
        (requests("timed_out", "em", "cores"), 1.0),
        (requests("failed", "", ""), 1.0),
        (requests("cancelled", "", ""), 1.0),
    ] {
        assert_eq!(seen.get(&series), Some(&count), "{series} {seen:#?}");
    }
    for how in ["released", "unregistered", "forced"] {
        assert_eq!(seen[&format!(r#"linkis_rm_tickets_ended_total{{how="{how}"}}"#)], 1.0, "{how}");
    }
    assert_eq!(seen[r#"linkis_rm_tickets_ended_total{how="lost"}"#], 0.0, "known before it happens");
    for outcome in ["timed_out", "granted", "cancelled"] {
        let waited = format!(r#"linkis_rm_request_wait_seconds_count{{outcome="{outcome}"}}"#);
        assert_eq!(seen[&waited], 1.0, "{outcome}");
    }
    assert!(seen.contains_key("linkis_rm_expiry_lag_seconds") && seen.contains_key("linkis_rm_waiting_checks_total"));
    assert_eq!(seen["linkis_rm_waiting_served_total"], 1.0);
    assert_eq!(seen["linkis_rm_waiting_request_seconds_count"], 3.0, "timed out, granted and cancelled");
    let handling = of_method("grpc_server_handling_seconds_count", "RequestResource", "");
    assert_eq!(seen[&handling], 9.0, "waiting requests are not timed");
    let cancelled = of_method("grpc_server_handled_total", "RequestResource", r#",grpc_code="Canceled""#);
    assert_eq!(seen.get(&cancelled), Some(&1.0));
    instance.stop().await;
}

/// The age of a ticket that cannot expire is exported.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expiry_lag_metric_shows_overdue_ticket() {
    let em1 = em("held");
    let (database, instance) = start_with_em(em1.clone(), load(64, 16, 20)).await;
    let grant = instance.client.request_resource(&request(&em1, "alice", load(1, 1, 1))).await.granted();
    database.hold_by_hand(&em1).await;
    let overdue = "UPDATE linkis_user_resource_meta_data SET expires_at = now() - interval '1 hour'";
    database.execute(overdue).await;
    let lag = async || scrape(instance.http).await["linkis_rm_expiry_lag_seconds"];
    eventually("it is an hour late", LONG, async || (3600.0..3700.0).contains(&lag().await)).await;
    database.release_holds().await;
    eventually("it expires", LONG, async || !lives(&instance.client, grant.ticket_id).await).await;
    eventually("nothing is late any more", LONG, async || lag().await < 10.0).await;
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn auth_failure_metric_counts_by_reason() {
    let database = Database::fresh().await;
    let viewer = crate::identity::token(&database, "viewer", &["--role", "viewer", "--user", "alice"]);
    let ecm = crate::identity::token(&database, "ecm", &["--role", "ecm", "--em", "host1"]);
    let instance = Instance::start(&database).await;
    let channel = Endpoint::new(instance.address.clone()).unwrap().connect().await.unwrap();
    let register = async |token: &str, host: &str| {
        crate::identity::rm_of(&channel, token).register(crate::identity::register(host)).await.map(drop)
    };
    register("", "host1").await.unwrap_err();
    register("made-up", "host1").await.unwrap_err();
    register(&viewer, "host1").await.unwrap_err();
    register(&ecm, "host1").await.unwrap();
    // An authenticated call that is denied for its EM.
    register(&ecm, "host2").await.unwrap_err();
    let seen = scrape(instance.http).await;
    let failures = |reason: &str| seen[&format!(r#"linkis_rm_auth_failures_total{{reason="{reason}"}}"#)];
    assert_eq!((failures("token_missing"), failures("token_unknown"), failures("role_denied")), (1.0, 1.0, 2.0));
    assert_eq!((failures("token_expired"), failures("token_revoked")), (0.0, 0.0), "known before it happens");
    instance.stop().await;
}

/// Expiry times of the current certificates, also after a renewal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificate_expiry_metric_follows_renewal() {
    let (database, folder) = (Database::fresh().await, Folder::new("expiry"));
    let ca = authority("ca");
    folder.write_all(&certify(&ca, &["rm.example"], &[], 2040), &ca);
    let instance = Instance::start_with(&database, folder.tls(settings())).await;
    let end = |file: &str| -> Option<i64> {
        let series = format!(r#"linkis_rm_tls_certificate_expiry_timestamp_seconds{{file="{file}"}} "#);
        instance.metrics.text().lines().find_map(|line| line.strip_prefix(&series)?.parse().ok())
    };
    // The first of January, of 2040 and of 2050.
    assert_eq!(end("cert"), Some(2_208_988_800));
    assert!(end("client_ca").is_some_and(|end| end > 2_208_988_800), "{:?}", end("client_ca"));
    folder.write_all(&certify(&ca, &["rm.example"], &[], 2050), &ca);
    eventually("the renewed certificate is published", LONG, async || end("cert") == Some(2_524_608_000)).await;
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contended_operations_metric_shows_waiting_calls() {
    let em1 = em("held");
    let (database, instance) = start_with_em(em1.clone(), load(64, 16, 20)).await;
    database.hold_by_hand(&em1).await;
    let calls: Vec<_> = (0..3)
        .map(|_| {
            let (client, em1) = (instance.client.clone(), em1.clone());
            tokio::spawn(async move { client.request_resource(&request(&em1, "alice", load(1, 1, 1))).await })
        })
        .collect();
    eventually_is(instance.http, "linkis_rm_contended_operations", 3.0).await;
    database.release_holds().await;
    for call in calls {
        call.await.unwrap().granted();
    }
    let seen = scrape(instance.http).await;
    assert_eq!(seen["linkis_rm_contended_operations"], 0.0);
    assert!(seen["linkis_rm_contentions_total"] >= 3.0, "{seen:?}");
    instance.stop().await;
}

/// Every bounded resource has a metric, which is exported while idle and documented; a gauge and a counter have different names.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metric_families_are_exported_when_idle_and_documented() {
    const DOCUMENTED: &str = include_str!("../../docs/METRICS.md");
    const FAMILIES: [&str; 15] = [
        "linkis_rm_committer_queue_operations",
        "linkis_rm_batch_operations_count",
        "linkis_rm_batch_seconds_count",
        "linkis_rm_lock_wait_seconds_count",
        "linkis_rm_commit_seconds_count",
        "linkis_rm_contended_operations",
        "linkis_rm_waiting_requests",
        "linkis_rm_connections",
        "linkis_rm_calls",
        "linkis_rm_request_in_flight_bytes",
        "linkis_rm_expiry_lag_seconds",
        "linkis_rm_watchers",
        "linkis_rm_followers",
        "linkis_rm_jwt_cache_entries",
        "process_resident_memory_bytes",
    ];
    let (_database, instance) = start().await;
    // The steps of a task: a scrape before the first step has no series of the task.
    let tasks = async || instance.client.tasks().await.unwrap().tasks;
    eventually("tasks are listed", LONG, async || tasks().await.len() >= 8).await;
    let tasks = tasks().await;
    let seen = series(instance.http).await;
    let got = |series: &str| assert!(seen.contains(series), "{series} is not among {seen:#?}");
    FAMILIES.into_iter().for_each(got);
    for cache in ["ems", "scopes", "wait_keys", "placement", "idle_amounts"] {
        got(&format!("linkis_rm_cache_entries{{cache=\"{cache}\"}}"));
    }
    for state in ["used", "idle"] {
        got(&format!("linkis_rm_database_pool_connections{{state=\"{state}\"}}"));
    }
    for task in tasks {
        for of_task in ["task_lag_seconds", "task_steps_total", "task_errors_total", "task_last_run_timestamp_seconds"]
        {
            got(&format!("linkis_rm_{of_task}{{task=\"{}\"}}", task.task));
        }
    }
    for kind in ["em_goes", "label_sets"] {
        got(&format!("linkis_rm_jobs{{kind=\"{kind}\"}}"));
    }
    for series in &seen {
        let family = series.split('{').next().unwrap();
        let family = ["_bucket", "_sum", "_count"].iter().find_map(|part| family.strip_suffix(part)).unwrap_or(family);
        assert!(DOCUMENTED.contains(&format!("`{family}`")), "{family} is not in docs/METRICS.md");
    }
    let text = instance.metrics.text();
    let types: BTreeSet<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    for gauge in types.iter().filter_map(|line| line.strip_suffix(" gauge")) {
        assert!(!types.contains(&*format!("{gauge}_total counter")), "{gauge} and {gauge}_total differ too little");
    }
    instance.stop().await;
}

/// Names that callers choose (of methods, users, EMs or limits) are no label values.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metric_series_are_independent_of_callers() {
    let (_database, instance) = start().await;
    let client = &instance.client;
    let channel = Endpoint::new(instance.address.clone()).unwrap().connect().await.unwrap();
    let crowd = async |n: i32| {
        let em1 = em(&format!("host{n}"));
        client.register(registration(em1.clone(), load(64, 16, 20))).await.unwrap();
        client.request_resource(&request(&em1, &format!("user{n}"), load(1, 1, 1))).await.granted();
        for path in [format!("/made.up.Service{n}/Do"), format!("/linkis.rm.v1.UsageService/Do{n}")] {
            let mut stranger = tonic::client::Grpc::new(channel.clone());
            stranger.ready().await.unwrap();
            let codec = tonic_prost::ProstCodec::<(), ()>::default();
            let call = stranger.unary(tonic::Request::new(()), path.parse().unwrap(), codec);
            assert_eq!(call.await.unwrap_err().code(), Code::Unimplemented);
        }
    };
    crowd(0).await;
    // The first overview of the cluster adds its series.
    let has_overview =
        async || series(instance.http).await.iter().any(|name| name.starts_with("linkis_rm_cluster_ems"));
    eventually("the cluster is measured", LONG, has_overview).await;
    let before = series(instance.http).await;
    for n in 1..20 {
        crowd(n).await;
    }
    assert_eq!(series(instance.http).await, before);
    let unknown = r#"grpc_server_handled_total{grpc_type="unknown",grpc_service="unknown",grpc_method="unknown",grpc_code="Unimplemented"}"#;
    assert_eq!(scrape(instance.http).await[unknown], 40.0);
    instance.stop().await;
}

/// No HTTP reply waits for the database.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readyz_during_database_outage_returns_503() {
    let database = Database::fresh().await;
    let (proxy, behind) = database.behind_proxy("metrics");
    let instance = Instance::start(&behind).await;
    eventually_replies(instance.http, "/readyz", 200, "ready\n").await;
    // The connections are cut, and new ones get no reply.
    proxy.set_fault_plan(FaultPlan::Hole);
    proxy.cut_all();
    eventually_replies(instance.http, "/readyz", 503, "not ready: the database does not answer\n").await;
    let why = "[+]started ok\n[-]database does not answer\n[+]serving ok\nnot ready: the database does not answer\n";
    assert_eq!(get(instance.http, "/readyz?verbose").await, (503, why.to_owned()));
    tokio::time::timeout(LONG, async {
        for _ in 0..20 {
            assert_eq!(scrape(instance.http).await["linkis_rm_database_up"], 0.0);
        }
    })
    .await
    .expect("replies without a wait for the database");
    assert_eq!(get(instance.http, "/livez").await, (200, "alive\n".to_owned()));
    assert_eq!(get(instance.http, "/livez?verbose").await, (200, "[+]process ok\nalive\n".to_owned()));
    proxy.set_fault_plan(FaultPlan::Fair);
    eventually_replies(instance.http, "/readyz", 200, "ready\n").await;
    eventually_is(instance.http, "linkis_rm_database_up", 1.0).await;
    for query in ["verbose", "verbose=true", "x=1&verbose"] {
        let ready = "[+]started ok\n[+]database ok\n[+]serving ok\nready\n".to_owned();
        assert_eq!(get(instance.http, &format!("/readyz?{query}")).await, (200, ready));
    }
    assert_eq!(get(instance.http, "/readyz?x=verbose").await, (200, "ready\n".to_owned()));
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readyz_during_shutdown_returns_503() {
    let database = Database::fresh().await;
    let instance = Instance::start_with(&database, settings().with("--drain-timeout", "1h")).await;
    let (client, http, em1) = (instance.client.clone(), instance.http, em("held"));
    client.register(registration(em1.clone(), load(64, 16, 20))).await.unwrap();
    database.hold_by_hand(&em1).await;
    let call = tokio::spawn(async move { client.request_resource(&request(&em1, "alice", load(1, 1, 1))).await });
    eventually_is(http, "linkis_rm_contended_operations", 1.0).await;
    let stopping = tokio::spawn(instance.stop());
    eventually_replies(http, "/readyz", 503, "not ready: stopping\n").await;
    assert_eq!(get(http, "/livez").await.0, 200);
    assert_eq!(scrape(http).await["linkis_rm_contended_operations"], 1.0);
    database.release_holds().await;
    call.await.unwrap().granted();
    stopping.await.unwrap();
    let is_over = async || TcpStream::connect(http).await.is_err();
    eventually("it serves nothing any more", Duration::from_secs(5), is_over).await;
}

/// More silent connections than permits: the oldest one is closed for each new one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_http_connections_yield_to_new_ones() {
    let (_database, instance) = start().await;
    let (mut silent, begun) = (Vec::new(), Instant::now());
    for _ in 0..200 {
        silent.push(TcpStream::connect(instance.http).await.unwrap());
    }
    assert_eq!(get(instance.http, "/livez").await.0, 200);
    let mut is_open = silent.into_iter().map(|stream| stream.into_std().unwrap().peek(&mut [0]).is_err());
    assert_eq!(is_open.next(), Some(false));
    // The last one ends only by its timeout.
    assert!(is_open.next_back() == Some(true) || begun.elapsed() > Duration::from_secs(5));
    instance.stop().await;
}

/// `promtool check metrics` reports no fault in names, types and help texts.
pub async fn promtool(http: SocketAddr) {
    let (_, text) = get(http, "/metrics").await;
    let promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut promtool) = promtool else {
        return skip_without("promtool", "Debian has it in the package prometheus");
    };
    promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let checked = promtool.wait_with_output().unwrap();
    let got = [checked.stdout, checked.stderr].map(|out| String::from_utf8_lossy(&out).into_owned()).concat();
    assert!(checked.status.success() && got.is_empty(), "{got}");
}

/// A busy server with a value in every family.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_of_busy_instance_pass_promtool() {
    let (_database, instance) = start().await;
    let (client, em1) = (instance.client.clone(), em("host1"));
    client.register(registration(em1.clone(), load(64, 16, 20))).await.unwrap();
    client.set_limit(&each_user(2)).await.unwrap();
    let busy = tokio::spawn(async move {
        for n in 0_u64.. {
            let user = format!("user{}", n % 7);
            let wait_timeout = Duration::from_millis(n % 3);
            let ask = ResourceRequest { wait_timeout, ..request(&em1, &user, load(1, 3, 1)) };
            if let Ok(ResultResource::Available(grant)) = client.request_resource(&ask).await
                && n % 2 == 0
            {
                client.resource_released(&release(&grant, &user)).await.unwrap();
            }
        }
    });
    let refused = requests("refused", "em", "cores");
    eventually("it is busy", LONG, async || {
        scrape(instance.http).await.get(&refused).is_some_and(|count| *count > 20.0)
    })
    .await;
    promtool(instance.http).await;
    busy.abort();
    instance.stop().await;
}
