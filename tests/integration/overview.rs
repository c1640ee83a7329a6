//! Overview: cluster totals, watchers, live instances and background tasks.
//!
//! - `LINKIS_RM_OVERVIEW`: maximum time of an overview with a million tickets on 10,000 EMs, in milliseconds; a scrape then may take 20.
//!   Unset, the test has fewer tickets and EMs.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use rm_client::ResourceRequest;
use rm_model::{
    em::EmInstance,
    report::{EmReport, Health},
    resource::Resource,
};
use rm_proto::v1::{self as proto, EmState, usage_service_client::UsageServiceClient};
use tonic::{Code, transport::Channel};

use crate::harness::*;
use crate::identity::reason;
use crate::metrics::{get, scrape};

async fn usage(rm: &Instance) -> UsageServiceClient<Channel> {
    UsageServiceClient::connect(rm.address.clone()).await.unwrap()
}

/// Maximum time of a scrape with a large cluster.
const SCRAPE_MAX: Duration = Duration::from_millis(20);

/// Returns the number of overviews that an instance has read from the database.
fn taken(rm: &Instance) -> u64 {
    let text = rm.metrics.text();
    let line = text.lines().find(|line| line.starts_with("linkis_rm_overviews_total")).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// State of EMs, their number, and their total, used, locked and left cores.
fn cores(overview: &proto::Overview) -> Vec<(EmState, i64, [i64; 4])> {
    let group = |totals: &proto::EmTotals| {
        let cores = totals.dimensions["cores"];
        (totals.state(), totals.ems, [cores.total, cores.used, cores.locked, cores.left])
    };
    overview.ems.iter().map(group).collect()
}

async fn report(rm: &Instance, em: &EmInstance, epoch: i64, sequence: i64, health: Health) {
    let report =
        EmReport { em: em.clone(), epoch, sequence, health, load: None, tickets: vec![], observed: None, idle: vec![] };
    rm.client.heartbeat(&report).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overview_equals_stored_counters() {
    let (database, rm) = start().await;
    let empty = rm.client.overview().await.unwrap();
    let tickets = empty.tickets.unwrap();
    assert!(empty.ems.is_empty() && tickets.oldest_locked.is_none() && tickets.locked == 0, "{tickets:?}");
    assert_eq!((empty.line.unwrap().waiting, empty.line.unwrap().longest_wait), (0, None));

    let hosts = ["host1", "host2", "host3"].map(em);
    let mut epochs = Vec::new();
    for host in &hosts {
        let protected = load(1, 1, 0);
        let register = rm_model::operation::RegisterEm { protected, ..registration(host.clone(), load(10, 10, 10)) };
        epochs.push(rm.client.register(register).await.unwrap().epoch);
    }
    // Resource types that the database does not sum, and one with fewer dimensions.
    let gpus = Resource::special([("gpu".to_owned(), 8)].into()).unwrap();
    for (instance, total) in [("gpus", gpus), ("cores", Resource::cpu(5).unwrap())] {
        let other = EmInstance::parse("em", "other", instance).unwrap();
        rm.client.register(registration(other, total)).await.unwrap();
    }
    let oldest = rm.client.request_resource(&request(&hosts[0], "alice", load(1, 2, 1))).await.granted();
    let used = rm.client.request_resource(&request(&hosts[1], "bob", load(1, 3, 1))).await.granted();
    rm.client.resource_inited(&inited(&used, "bob", None)).await.unwrap();
    rm.client.request_resource(&request(&hosts[0], "bob", load(1, 1, 1))).await.granted();
    report(&rm, &hosts[1], epochs[1], 1, Health::Healthy).await;
    rm.client.drain(&hosts[2], "a disk").await.unwrap();
    let wait_timeout = Duration::from_secs(60);
    let patient = ResourceRequest { wait_timeout, ..request(&hosts[0], "carol", load(9, 9, 9)) };
    let waiting = request_in_task(&rm.client, patient);
    let seen = || async { rm.client.overview().await.unwrap().line.unwrap().waiting == 1 };
    eventually("it is seen in line", Duration::from_secs(20), seen).await;

    let overview = rm.client.overview().await.unwrap();
    let ecm = |totals: &proto::EmTotals| totals.em_application_name == "linkis-cg-engineconnmanager";
    let (ecms, others): (Vec<_>, Vec<_>) = overview.ems.iter().cloned().partition(ecm);
    assert_eq!(
        cores(&proto::Overview { ems: ecms, ..Default::default() }),
        [
            (EmState::Healthy, 1, [10, 3, 0, 6]),
            (EmState::Unreported, 1, [10, 0, 3, 6]),
            (EmState::Draining, 1, [10, 0, 0, 9]),
        ]
    );
    assert_eq!((others.len(), others[0].ems), (1, 2));
    let dimensions: Vec<_> = others[0].dimensions.iter().map(|(key, sums)| (key.as_str(), sums.total)).collect();
    assert_eq!(dimensions, [("cores", 5), ("special.gpu", 8)]);
    let tickets = overview.tickets.unwrap();
    assert_eq!((tickets.used, tickets.locked, tickets.locked_partial), (1, 2, false));
    assert_eq!(tickets.oldest_locked.unwrap().ticket_id, oldest.ticket_id.to_string());
    assert!(overview.line.unwrap().longest_wait.is_some());
    waiting.abort();

    // Replies to requests, as soon as the instance counts them.
    let busy = || async {
        rm.client.request_resource(&request(&hosts[0], "bob", load(0, 0, 1))).await.granted();
        rm.client.request_resource(&request(&hosts[0], "bob", load(99_999, 0, 1))).await.refused();
        let throughput = rm.client.overview().await.unwrap().throughput.unwrap();
        throughput.grants_per_second > 0.0 && throughput.refusals_per_second > 0.0
    };
    let more = registration(hosts[0].clone(), load(10_000, 10_000, 1_000_000));
    rm.client.register(more).await.unwrap();
    eventually("the load is shown", Duration::from_secs(30), busy).await;
    drop(database);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watchers_share_one_overview_per_second() {
    let (_database, rm) = start().await;
    let em1 = em("host1");
    let epoch = rm.client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap().epoch;
    assert_eq!(taken(&rm), 0);
    let begun = Instant::now();
    let (mut one, mut other) = (usage(&rm).await, usage(&rm).await);
    let mut streams = Vec::new();
    for usage in [&mut one, &mut other] {
        for _ in 0..5 {
            streams.push(usage.watch(proto::WatchRequest {}).await.unwrap().into_inner());
        }
    }
    for stream in &mut streams {
        let first = stream.message().await.unwrap().unwrap();
        assert_eq!(cores(&first.overview.unwrap()), [(EmState::Unreported, 1, [10, 0, 0, 10])]);
        assert!(first.em_changes.is_empty());
    }
    report(&rm, &em1, epoch, 1, Health::Healthy).await;
    rm.client.register(registration(em("host2"), load(10, 10, 10))).await.unwrap();
    rm.client.drain(&em1, "a disk").await.unwrap();
    // Each stream reports each change once, in one message or several.
    for stream in &mut streams {
        let mut got = Vec::new();
        while got.len() < 2 {
            let message = tokio::time::timeout(LONG, stream.message()).await.unwrap().unwrap().unwrap();
            let change = |change: &proto::EmChange| {
                (change.em.as_ref().unwrap().instance.clone(), change.before(), change.after())
            };
            got.extend(message.em_changes.iter().map(change));
            if got.iter().any(|(_, _, after)| *after == EmState::Healthy) {
                got.retain(|(_, _, after)| *after != EmState::Healthy);
            }
        }
        got.sort();
        let got: Vec<_> = got.into_iter().map(|(em1, _, after)| (em1, after)).collect();
        let expected = [("host1:9102".to_owned(), EmState::Draining), ("host2:9102".to_owned(), EmState::Unreported)];
        assert_eq!(got, expected);
    }
    let (taken_now, seconds) = (taken(&rm), begun.elapsed().as_secs());
    assert!(taken_now <= seconds + 4, "{taken_now} overviews for ten watchers in {seconds} s");
    drop(streams);
    eventually("no watcher is left", LONG, async || rm.metric("linkis_rm_watchers") == 0.0).await;
    let steps = || rm.metric(r#"linkis_rm_task_steps_total{task="silence"}"#);
    let wait_for = async |more: f64| {
        let before = steps();
        eventually("steps of another task of the same period", LONG, async || steps() >= before + more).await;
    };
    // An overview may have begun before the last watcher left.
    wait_for(1.0).await;
    let before = taken(&rm);
    wait_for(2.0).await;
    assert_eq!(taken(&rm), before, "without watchers no overview is taken");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watchers_are_bounded_and_end_at_shutdown() {
    let (_database, rm) = start().await;
    let mut usage = usage(&rm).await;
    let mut streams = Vec::new();
    let refused = loop {
        match usage.watch(proto::WatchRequest {}).await {
            Ok(stream) => streams.push(stream.into_inner()),
            Err(status) => break status,
        }
        assert!(streams.len() <= 64);
    };
    assert_eq!((refused.code(), reason(&refused).as_str()), (Code::ResourceExhausted, "OVERLOADED"));
    assert_eq!(streams.len(), 60, "a part of the bound is left to other callers");
    streams.pop();
    let freed = || async { usage.clone().watch(proto::WatchRequest {}).await.is_ok() };
    eventually("an ended stream frees its permit", LONG, freed).await;
    rm.client.overview().await.unwrap();
    let stopping = tokio::spawn(rm.stop());
    let mut last = streams.pop().unwrap();
    let status = loop {
        match tokio::time::timeout(LONG, last.message()).await.expect("the stream ends") {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream ends without a status"),
            Err(status) => break status,
        }
    };
    assert_eq!((status.code(), reason(&status).as_str()), (Code::Unavailable, "SHUTTING_DOWN"));
    drop(streams);
    assert_eq!(stopping.await.unwrap(), ServerExit::Drained);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_are_listed_while_alive() {
    let (database, first, second) = two().await;
    let dead =
        "INSERT INTO linkis_rm_server (instance_id, version, address, start_time, alive_until, grants_per_second,
            refusals_per_second, tasks)
        VALUES (gen_random_uuid(), '0', 'nowhere', now(), now() - interval '2 minutes', 7, 7, '[]')";
    database.execute(dead).await;
    let both = || async { first.client.instances().await.unwrap().len() == 2 };
    eventually("both instances are listed", Duration::from_secs(20), both).await;
    let got = second.client.instances().await.unwrap();
    let mut ids: Vec<_> = got.iter().map(|instance| instance.instance_id.clone()).collect();
    ids.sort();
    let mut known = Vec::new();
    for instance in [&first, &second] {
        known.push(instance.client.server_info().await.unwrap().instance_id);
        let address = instance.address.replace("http://", "");
        assert!(got.iter().any(|got| got.address == address && got.start_time.is_some()), "{got:?}");
    }
    known.sort();
    assert_eq!(ids, known);
    assert!(got.iter().all(|instance| instance.version == env!("CARGO_PKG_VERSION")));
    let forgotten = || async { database.count("SELECT count(*) FROM linkis_rm_server WHERE version = '0'").await == 0 };
    eventually("the dead instance is deleted", LONG, forgotten).await;
    let holders = "SELECT count(*) FROM linkis_rm_lease JOIN linkis_rm_server USING (instance_id)";
    eventually("a listed instance owns the lease", LONG, async || database.count(holders).await == 1).await;
    assert_eq!(first.client.overview().await.unwrap().throughput.unwrap().grants_per_second, 0.0);
    second.stop().await;
    assert_eq!(first.client.instances().await.unwrap().len(), 1, "it has said that it goes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_return_progress_errors_and_jobs() {
    let (database, rm, second) = two().await;
    let em1 = em("host1");
    rm.client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap();
    for _ in 0..3 {
        rm.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    }
    let of_expiry = |tasks: &[proto::TaskStatus]| -> Vec<i64> {
        let expiry = tasks.iter().filter(|task| task.task == "expiry" && task.last_run_time.is_some());
        expiry.map(|task| task.steps).filter(|steps| *steps > 0).collect()
    };
    let both = || async { of_expiry(&rm.client.tasks().await.unwrap().tasks).len() == 2 };
    eventually("both overviews include it", Duration::from_secs(20), both).await;
    let got = rm.client.tasks().await.unwrap();
    assert!(got.tasks.is_sorted_by_key(|task| task.task.clone()));
    assert!(got.jobs.is_empty() && got.tasks.len() >= 20, "{got:?}");
    let before: i64 = of_expiry(&got.tasks).iter().sum();
    let grows = || async { of_expiry(&rm.client.tasks().await.unwrap().tasks).iter().sum::<i64>() > before };
    eventually("steps are counted", LONG, grows).await;

    // A held EM cannot be unregistered.
    database.hold_by_hand(&em1).await;
    let goes = "UPDATE linkis_em_resource_meta_data SET going_epoch = epoch, going_end = 'unregistered',
            going_after = '00000000-0000-0000-0000-000000000000'";
    database.execute(goes).await;
    // A failed task returns its error.
    database.execute("ALTER TABLE linkis_resource_usage_hour RENAME TO hidden").await;
    let why = || async {
        let tasks = rm.client.tasks().await.unwrap().tasks;
        tasks.iter().any(|task| task.errors > 0 && !task.last_error.is_empty())
    };
    eventually("the error is listed", LONG, why).await;
    database.execute("ALTER TABLE hidden RENAME TO linkis_resource_usage_hour").await;
    let jobs = rm.client.tasks().await.unwrap().jobs;
    assert_eq!(jobs, [proto::Job { kind: "em_goes".into(), subject: em1.to_string(), left: 3 }]);
    database.release_holds().await;
    let gone = || async { rm.client.tasks().await.unwrap().jobs.is_empty() };
    eventually("the EM is unregistered", LONG, gone).await;
    second.stop().await;
}

/// Loads EMs with tickets, as the benchmark does, or fewer EMs without tickets. Returns the number of EMs.
async fn fill(database: &Database, is_large: bool) -> i64 {
    let statements = match is_large {
        true => &[
            include_str!("../../benches/grants/preload/tickets.sql"),
            include_str!("../../benches/grants/preload/ems.sql"),
            include_str!("../../benches/grants/preload/scopes.sql"),
        ][..],
        false => &["INSERT INTO linkis_em_resource_meta_data (em_application_name, em_instance, resource_type, total_resource,
                protected_resource, used_resource, locked_resource, left_resource, over_committed, labels, epoch, register_time,
                version, counted_to)
            SELECT 'ecm', 'host' || n, 'LoadInstance', amount, amount, nothing, nothing, nothing, false, '{}', 1, now(), 1, 0
            FROM generate_series(1, 1000) n, (SELECT '{\"memory\":1,\"cores\":1,\"instances\":1}'::jsonb AS amount,
                '{\"memory\":0,\"cores\":0,\"instances\":0}'::jsonb AS nothing) a"],
    };
    for statement in statements {
        database.execute(*statement).await;
    }
    database.execute("VACUUM ANALYZE").await;
    if is_large { 10_000 } else { 1000 }
}

/// Returns the median.
fn median(mut took: Vec<Duration>) -> Duration {
    took.sort();
    took[took.len() / 2]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overview_of_many_ems_meets_its_bound() {
    let most = std::env::var("LINKIS_RM_OVERVIEW").ok().map(|text| Duration::from_millis(text.parse().unwrap()));
    let (database, rm) = start().await;
    rm.client.set_limit(&each_user(1000)).await.unwrap();
    let ems = fill(&database, most.is_some()).await;
    let tickets = database.count("SELECT count(*) FROM linkis_user_resource_meta_data").await;
    assert_eq!(tickets, if most.is_some() { 1_000_000 } else { 0 });
    let (mut took, mut last) = (Vec::new(), None);
    while took.len() < if most.is_some() { 9 } else { 1 } {
        let start = Instant::now();
        let overview = rm.client.overview().await.unwrap();
        // An overview of the last second is returned again.
        if last != overview.snapshot_time {
            took.push(start.elapsed());
        }
        last = overview.snapshot_time;
        assert_eq!(overview.ems.iter().map(|totals| totals.ems).sum::<i64>(), ems);
    }
    println!("{ems} EMs, {tickets} tickets: overviews took {took:?}");
    let overview = median(took);

    let of_ems = |series: &BTreeMap<String, f64>| -> f64 {
        series.iter().filter(|(name, _)| name.starts_with("linkis_rm_cluster_ems{")).map(|(_, count)| count).sum()
    };
    let all_are_exported = async || of_ems(&scrape(rm.http).await) == ems as f64;
    eventually("all EMs are exported", LONG, all_are_exported).await;
    let mut took = Vec::new();
    for _ in 0..10 {
        let start = Instant::now();
        let (status, text) = get(rm.http, "/metrics").await;
        took.push(start.elapsed());
        assert!(status == 200 && text.contains("linkis_rm_cluster_ems{"), "{text}");
    }
    println!("{ems} EMs, {tickets} tickets: scrapes took {took:?}");
    let scrape = median(took);
    println!("the medians: {overview:?} for an overview, {scrape:?} for a scrape");
    assert!(most.is_none_or(|most| overview <= most && scrape <= SCRAPE_MAX));
}
