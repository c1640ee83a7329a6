//! Requests that name no EM: the service chooses one.

use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

use linkis_rm::{
    client::{ResourceRequest, ResultResource},
    domain::{
        limit::{Pattern, Rule},
        name::Labels,
        resource::{Dimension, Resource},
    },
    server::Options,
    transport::resource_manager::Times,
};
use tokio::task::JoinSet;
use tonic::Code;
use uuid::Uuid;

use crate::{harness::*, proxy::Weather};

fn anywhere(user: &str, resource: Resource) -> ResourceRequest {
    ResourceRequest { em: None, ..request(&em("any"), user, resource) }
}

async fn register(rm: &Instance, hosts: usize, instances: i64) {
    for n in 0..hosts {
        rm.client.register(registration(em(&format!("host{n}")), load(1000, 1000, instances))).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_spread_until_every_em_is_full() {
    let (database, rm) = start().await;
    register(&rm, 5, 10).await;
    let mut on: HashMap<_, u32> = HashMap::new();
    for n in 1..=50 {
        let grant = rm.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.granted();
        *on.entry(grant.em).or_default() += 1;
        let (least, most) = (on.values().min().unwrap(), on.values().max().unwrap());
        assert!(n < 10 || most - least <= 2, "the freest first: {on:?}");
    }
    assert!(on.len() == 5 && on.values().all(|count| *count == 10), "{on:?}");
    let refusal = rm.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.refused();
    assert_eq!((refusal.code, refusal.shortfalls[0].available, refusal.never_fits), (11003, 0, false));
    assert_eq!(assert_invariants(&database, &rm.client).await, 50);
}

/// Two instances with views of their own: whoever finds his choice full tries the next in the same call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_callers_through_two_instances_get_all_there_is() {
    let (database, first) = start().await;
    let second = Instance::start(&database).await;
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_em_with_a_tenant_serves_that_tenant_alone() {
    let (_database, rm) = start().await;
    let tenant = |name: &str| Labels::parse("labels", BTreeMap::from([("tenant".into(), name.into())])).unwrap();
    let of_a = em("of-a");
    let mut registered = registration(of_a.clone(), load(10, 10, 10));
    registered.labels = tenant("a");
    rm.client.register(registered).await.unwrap();
    rm.client.register(registration(em("of-all"), load(100, 100, 100))).await.unwrap();
    let ask = |labels: Labels| ResourceRequest { labels, ..anywhere("hadoop", load(1, 1, 1)) };
    for _ in 0..3 {
        assert_eq!(rm.client.request_resource(&ask(tenant("a"))).await.granted().em, of_a);
        assert_eq!(rm.client.request_resource(&ask(Labels::default())).await.granted().em, em("of-all"));
    }
    let error = rm.client.request_resource(&ask(tenant("b"))).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("NO_EM_MATCHES"));
    assert!(error.to_string().contains(r#""tenant": "b""#), "{error}");
    // One that is named is not chosen: its labels do not matter.
    rm.client.request_resource(&request(&of_a, "hadoop", load(1, 1, 1))).await.granted();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_request_ids_and_dry_runs_hold_without_an_em() {
    let (database, rm) = start().await;
    let nowhere = rm.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.unwrap_err();
    assert_eq!(nowhere.reason().as_deref(), Some("NO_EM_MATCHES"));
    register(&rm, 3, 4).await;
    let each_user = Pattern::new(BTreeMap::from([("user".into(), None)]));
    let rule = Rule { pattern: each_user, max: BTreeMap::from([(Dimension::Instances, 2)]) };
    rm.client.set_limit(&rule).await.unwrap();

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
    assert_eq!(error.reason().as_deref(), Some("UNANSWERABLE_RESOURCE"));
}

/// Nothing is refused by an old view: room that another instance learned of a moment ago is found.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn room_that_is_new_is_found_at_once() {
    let (database, first) = start().await;
    let second = Instance::start(&database).await;
    register(&first, 1, 1).await;
    first.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.granted();
    for n in 1..4 {
        first.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.refused();
        let new = em(&format!("host{n}"));
        second.client.register(registration(new.clone(), load(10, 10, 1))).await.unwrap();
        assert_eq!(first.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.granted().em, new);
    }
    assert_eq!(assert_invariants(&database, &first.client).await, 4);
}

/// Many who ask while the database says nothing share one try, and none of them waits longer than he said.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_falls_silent_keeps_nobody_beyond_his_deadline() {
    let (database, direct) = start().await;
    register(&direct, 2, 10).await;
    let (proxy, proxied) = database.behind_proxy("choosing");
    let times = Times { request_timeout: Duration::from_secs(2), ..options().times };
    let rm = Instance::start_with(&proxied, Options { times, ..options() }).await;
    proxy.set_weather(Weather::Hole);
    let start = Instant::now();
    let mut calls = JoinSet::new();
    for n in 0..20 {
        let client = rm.client.clone();
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
        assert!(start.elapsed() < Duration::from_secs(3), "answered after {:?}", start.elapsed());
    }
    // Whoever comes then waits no longer, either: nobody queues behind those who failed.
    let late = Instant::now();
    rm.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.expect_err("there is no database");
    assert!(late.elapsed() < Duration::from_secs(3), "answered after {:?}", late.elapsed());

    proxy.set_weather(Weather::Fair);
    let again = async || rm.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.is_ok();
    eventually("it is served again", Duration::from_secs(20), again).await;
}
