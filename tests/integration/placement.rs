//! Placement: the selection of an EM for requests that name none.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::{Duration, Instant},
};

use rm_client::{ResourceRequest, ResultResource};
use rm_model::{
    em::{Em, EmInstance},
    hold::NewHold,
    name::{Labels, Name},
    operation::{LockKey, RegisterEm},
    policy::Policy,
    report::{EmReport, Health},
    resource::{Dimension, Resource},
    selector::{EmSelector, Placement, Preference},
};
use tokio::task::JoinSet;
use tonic::Code;
use uuid::Uuid;

use crate::{harness::*, proxy::FaultPlan};

mod choosing;
mod contended_ems;

fn anywhere(user: &str, resource: Resource) -> ResourceRequest {
    ResourceRequest { em: None, ..request(&em("any"), user, resource) }
}

async fn register(rm: &Instance, hosts: usize, instances: i64) {
    register_hosts(&rm.client, 0..hosts, load(1000, 1000, instances)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_spreads_requests_until_ems_are_full() {
    let (database, rm) = start().await;
    register(&rm, 5, 10).await;
    let mut on: HashMap<_, u32> = HashMap::new();
    for n in 1..=50 {
        let grant = rm.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.granted();
        *on.entry(grant.em).or_default() += 1;
        let (least, most) = (on.values().min().unwrap(), on.values().max().unwrap());
        assert!(n < 10 || most - least <= 2, "the emptiest EM first: {on:?}");
    }
    assert!(on.len() == 5 && on.values().all(|count| *count == 10), "{on:?}");
    let refusal = rm.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.refused();
    assert_eq!((refusal.code, refusal.shortfalls[0].available, refusal.never_fits), (11003, 0, false));
    assert_eq!(assert_invariants(&database, &rm.client).await, 50);
}

/// Two instances have separate cluster views: a request whose first EM is full tries the next EM in the same call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_on_two_instances_grants_all_capacity() {
    let (database, first, second) = two().await;
    register(&first, 5, 12).await;
    let mut calls = JoinSet::new();
    for n in 0..200 {
        let client = [&first, &second][n % 2].client.clone();
        calls.spawn(async move {
            let answer = client.request_resource(&anywhere(&format!("user{}", n % 20), load(1, 1, 1))).await.unwrap();
            matches!(answer, ResultResource::Available(_))
        });
    }
    let granted = calls.join_all().await.into_iter().filter(|granted| *granted).count();
    assert_eq!(granted, 60);
    assert_eq!(assert_invariants(&database, &first.client).await, 60);
}

fn labels(pairs: &[(&str, &str)]) -> Labels {
    let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    Labels::parse("labels", pairs.collect::<BTreeMap<_, _>>()).unwrap()
}

async fn register_labelled(rm: &Instance, host: &str, own: &[(&str, &str)], reserved: &[(&str, &str)]) {
    let registration = registration(em(host), load(100, 100, 100));
    let registered = RegisterEm { labels: labels(own), reserved: labels(reserved), ..registration };
    let em = rm.client.register(registered).await.unwrap();
    assert_eq!((em.labels, em.reserved), (labels(own), labels(reserved)));
}

fn requiring(required: &[(&str, &str)]) -> ResourceRequest {
    let selector = EmSelector { required: labels(required), ..EmSelector::default() };
    ResourceRequest { selector, ..anywhere("hadoop", load(1, 1, 1)) }
}

/// Result of a request: the EM without its port, or the reason.
async fn placed(rm: &Instance, request: &ResourceRequest) -> String {
    match rm.client.request_resource(request).await {
        Ok(ResultResource::Available(grant)) => grant.em.instance.as_str().trim_end_matches(":9102").to_owned(),
        Ok(ResultResource::NotEnough(refusal)) => format!("not enough: {}", refusal.reason),
        Err(error) => error.reason().unwrap_or_else(|| error.to_string()),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_required_labels_select_em() {
    let (database, rm) = start().await;
    register_labelled(&rm, "a", &[("tenant", "a"), ("zone", "x")], &[]).await;
    register_labelled(&rm, "b", &[("tenant", "b"), ("rack", "r1")], &[]).await;
    assert_eq!(placed(&rm, &requiring(&[("tenant", "a")])).await, "a");
    assert_eq!(placed(&rm, &requiring(&[("rack", "r1")])).await, "b");
    assert_eq!(placed(&rm, &requiring(&[("tenant", "c")])).await, "NO_EM_MATCHES");
    let chosen = [placed(&rm, &requiring(&[])).await, placed(&rm, &requiring(&[])).await];
    assert!(
        chosen.contains(&"a".to_owned()) && chosen.contains(&"b".to_owned()),
        "labels exclude no request: {chosen:?}"
    );
    // A named EM needs the labels, too.
    let named = ResourceRequest { em: Some(em("b")), ..requiring(&[("tenant", "a")]) };
    let error = rm.client.request_resource(&named).await.unwrap_err();
    assert_eq!((error.code(), error.reason().as_deref()), (Some(Code::FailedPrecondition), Some("LABEL_REQUIRED")));
    assert!(error.to_string().contains("tenant=a"), "{error}");
    assert_eq!(rm.client.dry_run(&named).await.unwrap_err().reason().as_deref(), Some("LABEL_REQUIRED"));
    // A required label is counted like any other label.
    rm.client.set_limit(&limit(&[("tenant", Some("a"))], &[(Dimension::Instances, 1)])).await.unwrap();
    assert!(placed(&rm, &requiring(&[("tenant", "a")])).await.starts_with("not enough"));
    assert_eq!(assert_invariants(&database, &rm.client).await, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_on_reserved_em_requires_its_label() {
    let (_database, rm) = start().await;
    register_labelled(&rm, "of-a", &[], &[("tenant", "a")]).await;
    assert_eq!(placed(&rm, &requiring(&[])).await, "NO_EM_MATCHES");
    let named =
        |carried: &[(&str, &str)]| ResourceRequest { em: Some(em("of-a")), labels: labels(carried), ..requiring(&[]) };
    let error = rm.client.request_resource(&named(&[("tenant", "b")])).await.unwrap_err();
    assert_eq!((error.code(), error.reason().as_deref()), (Some(Code::FailedPrecondition), Some("EM_RESERVED")));
    assert!(error.to_string().contains("tenant=a"), "{error}");
    assert_eq!(placed(&rm, &named(&[("tenant", "a")])).await, "of-a");
    register_labelled(&rm, "of-all", &[], &[]).await;
    for request in [requiring(&[]), ResourceRequest { labels: labels(&[("tenant", "b")]), ..requiring(&[]) }] {
        assert_eq!(placed(&rm, &request).await, "of-all");
    }
    assert_eq!(placed(&rm, &requiring(&[("tenant", "a")])).await, "of-a", "a reserved label is a label of the EM");
    // A preferred EM ranks before emptier EMs.
    let preference = Preference { key: "tenant".into(), value: "a".into(), weight: 1 };
    let selector = EmSelector { preferred: vec![preference], ..EmSelector::default() };
    let preferring = ResourceRequest { selector, ..requiring(&[]) };
    for _ in 0..3 {
        assert_eq!(placed(&rm, &preferring).await, "of-a");
    }
    // Without the reservation, the EM accepts all requests.
    register_labelled(&rm, "of-a", &[], &[]).await;
    assert_eq!(placed(&rm, &named(&[])).await, "of-a");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_policy_packs_or_spreads_application() {
    let (_database, rm) = start().await;
    let of = |application: &str, host: &str| EmInstance::parse("em", application, host).unwrap();
    for host in ["s1", "s2"] {
        rm.client.register(registration(of("spread", host), load(10, 10, 10))).await.unwrap();
        rm.client.register(registration(of("pack", host), load(10, 10, 10))).await.unwrap();
    }
    let kind = |application: &str| Name::parse("em", application).unwrap();
    let pack = Policy::default().with(BTreeSet::new(), Placement::Pack).with_em_new_after(Duration::ZERO);
    rm.client.set_policy(&kind("pack"), &pack).await.unwrap();
    assert_eq!(rm.client.policies().await.unwrap()[&kind("pack")], pack);
    let to = |application: &str, placement| ResourceRequest {
        selector: EmSelector { application_name: Some(kind(application)), placement, ..EmSelector::default() },
        ..anywhere("hadoop", load(1, 1, 1))
    };
    let fills = async |application: &str, placement| {
        let mut on: BTreeMap<EmInstance, usize> = BTreeMap::new();
        for _ in 0..4 {
            let grant = rm.client.request_resource(&to(application, placement)).await.granted();
            assert_eq!(grant.em.application_name, kind(application));
            *on.entry(grant.em).or_default() += 1;
        }
        on.into_values().collect::<Vec<_>>()
    };
    // By the policy, unless the request names a placement.
    assert_eq!(fills("pack", None).await, [4]);
    assert_eq!(fills("spread", None).await, [2, 2]);
    assert_eq!(fills("pack", Some(Placement::Spread)).await, [4]);
    assert_eq!(fills("spread", Some(Placement::Pack)).await.iter().max(), Some(&4));
    assert_eq!(placed(&rm, &to("neither", None)).await, "NO_EM_MATCHES");
    let named = ResourceRequest { em: Some(of("pack", "s1")), ..to("pack", None) };
    assert_eq!(rm.client.request_resource(&named).await.unwrap_err().field().as_deref(), Some("em_application_name"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policy_required_labels_refuse_request() {
    let (_database, rm) = start().await;
    register(&rm, 2, 10).await;
    let kind = em("any").application_name;
    let strict =
        Policy::default().with(BTreeSet::from(["engine_type".to_owned(), "tenant".to_owned()]), Placement::Spread);
    rm.client.set_policy(&kind, &strict).await.unwrap();
    let tenant = ResourceRequest {
        engine_type: String::new(),
        labels: labels(&[("tenant", "a")]),
        ..request(&em("host1"), "hadoop", load(1, 1, 1))
    };
    let error = rm.client.request_resource(&tenant).await.unwrap_err();
    let got = (error.code(), error.reason(), error.field());
    assert_eq!(got, (Some(Code::InvalidArgument), Some("LABEL_MISSING".into()), Some("engine_type".into())));
    assert_eq!(rm.client.dry_run(&tenant).await.unwrap_err().reason().as_deref(), Some("LABEL_MISSING"));
    let spark = ResourceRequest { engine_type: "spark-3.2.1".into(), ..tenant };
    assert_eq!(placed(&rm, &spark).await, "host1");
    // For a request without an EM, these EMs are no candidates.
    let nowhere = ResourceRequest { em: None, labels: Labels::default(), ..spark.clone() };
    assert_eq!(placed(&rm, &nowhere).await, "NO_EM_MATCHES");
    assert!(placed(&rm, &ResourceRequest { em: None, ..spark.clone() }).await.starts_with("host"));
    rm.client.set_policy(&kind, &Policy::default()).await.unwrap();
    assert_eq!(placed(&rm, &ResourceRequest { em: Some(em("host0")), ..nowhere }).await, "host0");
}

/// An unhealthy EM is not selected: immediately on the instance that received the report, and after its next survey on the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_under_load_avoids_unhealthy_em() {
    let (database, first, second) = two().await;
    register(&first, 12, 100_000).await;
    // The instance knows the EMs: a report of an EM that a first survey reads meanwhile counts from the next survey on.
    first.client.request_resource(&anywhere("first", load(1, 1, 1))).await.granted();
    // How many EMs each instance avoids, and how many grants of the second in a row were on healthy ones.
    let avoided = Arc::new([const { AtomicUsize::new(0) }; 2]);
    let (stop, healthy) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut callers = JoinSet::new();
    for n in 0..12 {
        let (which, avoided, stop, healthy) = (n % 2, avoided.clone(), stop.clone(), healthy.clone());
        let client = [&first, &second][which].client.clone();
        callers.spawn(async move {
            let mut grants = 0;
            while !stop.load(Relaxed) {
                let known = avoided[which].load(SeqCst);
                let grant = client.request_resource(&anywhere(&format!("user{n}"), load(1, 1, 1))).await.granted();
                let sick = (0..6).position(|n| grant.em == em(&format!("host{n}")));
                assert!(sick.is_none_or(|sick| sick >= known), "{sick:?} of {known} was selected by instance {which}");
                if which == 1 {
                    healthy.fetch_update(SeqCst, SeqCst, |count| Some(sick.map_or(count + 1, |_| 0))).unwrap();
                }
                grants += 1;
            }
            grants
        });
    }
    for n in 0..6 {
        let sick = first.client.em(&em(&format!("host{n}"))).await.unwrap();
        first.client.heartbeat(&EmReport { health: Health::Unhealthy, ..report(&sick, 1) }).await.unwrap();
        avoided[0].store(n + 1, SeqCst);
    }
    let healthy = async |more| {
        let before = healthy.load(SeqCst);
        eventually("the other instance selects healthy EMs", LONG, async || healthy.load(SeqCst) > before + more).await;
    };
    healthy(100).await;
    avoided[1].store(6, SeqCst);
    healthy(200).await;
    stop.store(true, Relaxed);
    let grants = callers.join_all().await.into_iter().sum::<usize>();
    assert_eq!(assert_invariants(&database, &first.client).await, grants + 1);
}

/// Placement balances amounts, not numbers of grants: the sizes of requests differ, and some tickets end immediately.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_balances_equal_ems() {
    const HOSTS: usize = 20;
    let (database, first, second) = two().await;
    register_hosts(&first.client, 0..HOSTS, load(10_000, 10_000, 10_000)).await;
    let mut callers = JoinSet::new();
    for n in 0..16_u64 {
        let client = [&first, &second][usize::from(n % 2 == 0)].client.clone();
        callers.spawn(async move {
            let user = format!("user{n}");
            for call in 0..200 {
                let mixed = (n << 32 | call).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
                let size = if mixed % 10 == 0 { 60 } else { 1 };
                let grant = client.request_resource(&anywhere(&user, load(size, size, 1))).await.granted();
                if mixed / 10 % 3 == 0 {
                    client.resource_released(&release(&grant, &user)).await.unwrap();
                }
            }
        });
    }
    callers.join_all().await;
    let cores = |em: &Em| em.used.get(&Dimension::Cores) + em.locked.get(&Dimension::Cores);
    let held: Vec<i64> = first.client.ems().await.unwrap().iter().map(cores).collect();
    assert_eq!(held.len(), HOSTS);
    let (mean, fullest) = (held.iter().sum::<i64>() as f64 / HOSTS as f64, *held.iter().max().unwrap() as f64);
    assert!(mean > 300.0 && fullest <= 1.2 * mean, "the fullest holds {:.2} times the mean: {held:?}", fullest / mean);
    assert_invariants(&database, &first.client).await;
}

/// Holds an EM by a call of an operator, or locks it in a transaction.
async fn hold(rm: &Instance, database: &Database, host: &EmInstance, by_operator: bool) -> Option<sqlx::PgConnection> {
    if by_operator {
        let (key, duration) = (LockKey::Em(host.clone()), Duration::from_secs(600));
        rm.client.hold(&NewHold { key, duration, reason: name("an audit") }).await.unwrap();
        return None;
    }
    Some(database.transaction_that_holds(host).await)
}

async fn contended_em_is_skipped(by_operator: bool) {
    let (database, rm) = start().await;
    register(&rm, 3, 16).await;
    let held = em("host0");
    // The contended EM is the emptiest.
    for n in 0..6 {
        rm.client.request_resource(&request(&em(["host1", "host2"][n % 2]), "hadoop", load(1, 1, 1))).await.granted();
    }
    assert_eq!(rm.client.dry_run(&anywhere("hadoop", load(1, 1, 1))).await.granted().em, held);
    let holder = hold(&rm, &database, &held, by_operator).await;
    let ask = async |user: usize| {
        let grant = rm.client.request_resource(&anywhere(&format!("user{user}"), load(1, 1, 1))).await.granted();
        assert_ne!(grant.em, held, "no request passes the lock");
    };
    // Concurrent requests find the contended EM; later requests avoid it.
    tokio::join!(ask(1), ask(2), ask(3), ask(4), ask(5), ask(6));
    let contentions = || rm.metric("linkis_rm_contentions_total");
    let before = contentions();
    for user in 7..=26 {
        ask(user).await;
    }
    // Placement knows of a hold before the first request.
    let expected = if by_operator { 0.0..=0.0 } else { 1.0..=6.0 };
    assert!(expected.contains(&before), "{before} requests were contended");
    assert_eq!(contentions(), before, "no later request is contended");
    assert_eq!(rm.client.tickets(None).await.unwrap().len(), 32, "each request is granted once");

    // Without another EM, a request waits for the contended one, until its deadline or until the lock ends.
    let hasty = hurried(&rm.address, Duration::from_secs(3));
    let error = hasty.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.unwrap_err();
    assert_eq!((error.code(), error.reason().as_deref()), (Some(Code::Aborted), Some("LOCK_TIMEOUT")), "{error}");
    let waits = request_in_task(&rm.client, anywhere("hadoop", load(1, 1, 1)));
    eventually("the request is contended", LONG, async || rm.metric("linkis_rm_contended_operations") == 1.0).await;
    match holder {
        Some(mut holder) => drop(execute(&mut holder, "ROLLBACK").await),
        None => assert!(rm.client.release_hold(&LockKey::Em(held.clone())).await.unwrap()),
    }
    assert_eq!(grant_of(waits).await.em, held);
    // Placement selects the EM again.
    assert_eq!(rm.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.granted().em, held);
    assert_eq!(assert_invariants(&database, &rm.client).await, 34);
    hold(&rm, &database, &held, true).await;
    hasty.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.unwrap_err();
    assert_eq!(rm.stop().await, ServerExit::Drained, "the task that watches the contended EM ends");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_skips_held_em() {
    contended_em_is_skipped(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_skips_contended_em() {
    contended_em_is_skipped(false).await;
}

/// Number of rows of EMs that were read. The statistics of a connection are complete once it is closed.
async fn ems_read(database: &Database) -> i64 {
    eventually("all connections are closed", Duration::from_secs(20), || async {
        let open = "SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND application_name = 'linkis-rm'";
        database.count(open).await == 0
    })
    .await;
    let read = "SELECT seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_user_tables
        WHERE relname = 'linkis_em_resource_meta_data'";
    database.count(read).await
}

/// A refusal reads the current state of the closest EMs alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_refusal_returns_closest_em() {
    const HOSTS: i64 = 300;
    const REFUSED: i64 = 400;
    let (database, rm, other) = two().await;
    let mut spare = None;
    for n in 0..HOSTS {
        let em1 = em(&format!("host{n}"));
        rm.client.register(registration(em1.clone(), load(100, 10, 100))).await.unwrap();
        let held = if n == 7 { 3 } else { 8 };
        rm.client.request_resource(&request(&em1, "alice", load(1, held, 1))).await.granted();
        if n == 7 {
            spare = Some(rm.client.request_resource(&request(&em1, "alice", load(1, 2, 1))).await.granted());
        }
    }
    let six = anywhere("hadoop", load(1, 6, 1));
    let refusal = rm.client.request_resource(&six).await.refused();
    let closest = &refusal.shortfalls[0];
    assert!(closest.scope.contains("host7") && closest.available == 5, "{refusal:?}");
    // Another instance frees capacity: the next refusal check finds it without a survey.
    other.client.resource_released(&release(&spare.unwrap(), "alice")).await.unwrap();
    let grant = rm.client.request_resource(&six).await.granted();
    assert_eq!(grant.em, em("host7"));
    assert_invariants(&database, &rm.client).await;

    rm.stop().await;
    other.stop().await;
    database.execute("ANALYZE linkis_em_resource_meta_data").await;
    let before = ems_read(&database).await;
    let rm = Instance::start(&database).await;
    for _ in 0..REFUSED {
        rm.client.request_resource(&six).await.refused();
    }
    rm.stop().await;
    let read = ems_read(&database).await - before;
    assert!(read < REFUSED * HOSTS / 10, "{read} rows for {REFUSED} refusals among {HOSTS}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_keeps_limits_and_request_ids() {
    let (database, rm) = start().await;
    let nowhere = rm.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.unwrap_err();
    assert_eq!(nowhere.reason().as_deref(), Some("NO_EM_MATCHES"));
    register(&rm, 3, 4).await;
    rm.client.set_limit(&each_user(2)).await.unwrap();

    let dry = rm.client.dry_run(&anywhere("hadoop", load(1, 1, 1))).await.granted();
    assert_eq!(dry.ticket_id, Uuid::nil());
    let repeatable = ResourceRequest { request_id: Some("job".into()), ..anywhere("hadoop", load(1, 1, 1)) };
    let grant = rm.client.request_resource(&repeatable).await.granted();
    rm.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.granted();
    let refusal = rm.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.refused();
    assert_eq!((refusal.code, refusal.shortfalls[0].scope.as_str()), (12006, "user=hadoop"));
    assert_eq!(rm.client.dry_run(&anywhere("hadoop", load(1, 1, 1))).await.refused(), refusal);
    assert_eq!(rm.client.request_resource(&repeatable).await.granted(), grant, "although the limit is reached now");
    let too_large = rm.client.request_resource(&anywhere("alice", load(2000, 1, 1))).await.refused();
    assert!(too_large.never_fits);
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);

    let unanswerable = Resource::special(BTreeMap::from([("gpu".into(), 1)])).unwrap();
    let error = rm.client.request_resource(&anywhere("hadoop", unanswerable)).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("RESOURCE_NOT_PROVIDED"));
}

/// A refusal is cached for a second: capacity that another instance registers is found within two seconds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_finds_new_em_within_two_seconds() {
    let (database, first, second) = two().await;
    register(&first, 1, 1).await;
    first.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.granted();
    for n in 1..4 {
        first.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.refused();
        let new = em(&format!("host{n}"));
        second.client.register(registration(new.clone(), load(10, 10, 1))).await.unwrap();
        let registered = Instant::now();
        let found = async || {
            let is_late = registered.elapsed() > Duration::from_secs(2);
            let is_found = placed(&first, &anywhere("hadoop", load(1, 1, 1))).await == format!("host{n}");
            assert!(is_found || !is_late, "refused two seconds after the registration");
            is_found
        };
        eventually("the new EM is selected", LONG, found).await;
    }
    assert_eq!(assert_invariants(&database, &first.client).await, 4);
}

/// Requests on a silent database share one attempt, and each ends by its own deadline.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_on_silent_database_ends_by_deadline() {
    let (database, direct) = start().await;
    register(&direct, 2, 10).await;
    let (proxy, proxied) = database.behind_proxy("choosing");
    let rm = Instance::start_with(&proxied, settings().with_time("--request-timeout", Duration::from_secs(2))).await;
    proxy.set_fault_plan(FaultPlan::Hole);
    // Longer than the request timeout, and shorter than the timeouts of the database.
    let client = hurried(&rm.address, Duration::from_secs(8));
    let mut calls = JoinSet::new();
    for n in 0..20 {
        let client = client.clone();
        calls.spawn(async move {
            let named = request(&em("host1"), "hadoop", load(1, 1, 1));
            match n % 4 {
                0 => client.dry_run(&anywhere("hadoop", load(1, 1, 1))).await,
                1 => client.request_resource(&named).await,
                _ => client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await,
            }
        });
    }
    while let Some(answer) = calls.join_next().await {
        let error = answer.unwrap().expect_err("there is no database");
        let what = (error.code(), error.reason().unwrap_or_default());
        assert_eq!(what, (Some(Code::Unavailable), "DATABASE_UNAVAILABLE".to_owned()), "{error}");
    }
    // A later request waits no longer: failed requests leave no queue.
    let error = client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.expect_err("there is no database");
    assert_eq!(error.reason().as_deref(), Some("DATABASE_UNAVAILABLE"), "{error}");

    proxy.set_fault_plan(FaultPlan::Fair);
    let again = async || rm.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.is_ok();
    eventually("the instance serves again", Duration::from_secs(20), again).await;
}

/// Waiters that no EM can serve, because their user is at a limit or held, delay no other waiter.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_waiter_behind_blocked_crowd_is_woken() {
    const CROWD: usize = 40;
    // If the EM is full when they come, each of them has to find out first that capacity at the EM does not serve it.
    for (is_held, is_full) in [(false, false), (false, true), (true, false), (true, true)] {
        let (database, rm) = start().await;
        let (one, only) = (|| load(1, 1, 1), em("only"));
        rm.client.register(registration(only.clone(), load(4, 4, 4))).await.unwrap();
        rm.client.request_resource(&anywhere("pig", one())).await.granted();
        if is_held {
            let key = LockKey::User(name("pig"));
            let hold = NewHold { key, duration: Duration::from_secs(600), reason: name("an audit") };
            rm.client.hold(&hold).await.unwrap();
        } else {
            rm.client.set_limit(&limit(&[("user", Some("pig"))], &[(Dimension::Instances, 1)])).await.unwrap();
        }
        let patient = |user: &str| ResourceRequest { wait_timeout: LONG, ..anywhere(user, one()) };
        let fill = async || {
            let mut grants = Vec::new();
            while let ResultResource::Available(grant) =
                rm.client.request_resource(&request(&only, "first", one())).await.unwrap()
            {
                grants.push(grant);
            }
            grants
        };
        let mut grants = if is_full { fill().await } else { Vec::new() };
        let crowd: Vec<Call> = (0..CROWD).map(|_| request_in_task(&rm.client, patient("pig"))).collect();
        database.waiting(i64::try_from(CROWD).unwrap()).await;
        grants.extend(fill().await);
        let mouse = enqueue(&rm.client, patient("mouse")).await;
        for grant in &grants {
            rm.client.resource_released(&release(grant, "first")).await.unwrap();
        }
        grant_of(mouse).await;
        crowd.iter().for_each(Call::abort);
        assert_wait_queues_empty(&rm.client).await;
        rm.client.release_hold(&LockKey::User(name("pig"))).await.unwrap();
        assert_eq!(assert_invariants(&database, &rm.client).await, 2);
    }
}
