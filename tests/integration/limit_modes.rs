//! Modes of limits: enforced, advisory, off.

use std::time::Duration;

use rm_client::{ResourceRequest, ResultResource};
use rm_model::{
    limit::{LabelPattern, Rule},
    limit_mode::LimitMode,
    resource::Dimension,
    scope::Tally,
};
use rm_proto::v1::{self as proto, limit_service_client::LimitServiceClient};
use tonic::Code;

use crate::harness::*;

fn rule(labels: &[(&str, Option<&str>)], mode: LimitMode, instances: Option<i64>) -> Rule {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned)));
    let max = instances.map(|instances| (Dimension::Instances, instances)).into_iter().collect();
    Rule { pattern: LabelPattern::new(labels.collect()), mode, max, guarantee: Default::default() }
}

fn ask(user: &str) -> ResourceRequest {
    request(&em("host1"), user, load(1, 1, 1))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn advisory_limit_grants_and_counts_violations() {
    let (database, rm) = start_with_host1().await;
    rm.client.set_limit(&rule(&[("user", None)], LimitMode::Advisory, Some(1))).await.unwrap();
    let within = rm.client.request_resource(&ask("hadoop")).await.granted();
    assert_eq!(within.advisory_violations, []);
    // An advisory limit delays no request. The reply names the violations.
    let patient = ResourceRequest { wait_timeout: Duration::from_secs(60), ..ask("hadoop") };
    let dry = rm.client.dry_run(&patient).await.granted();
    let beyond = rm.client.request_resource(&patient).await.granted();
    for got in [&dry.advisory_violations, &beyond.advisory_violations] {
        let [over] = got.as_slice() else { panic!("{got:?}") };
        assert_eq!((over.scope.as_str(), &over.dimension), ("user=hadoop", &Dimension::Instances));
        assert_eq!((over.requested, over.available, over.max), (1, 0, 1));
        assert_eq!(over.rule, "each user (advisory): at most 1 instances");
    }
    assert_eq!(rm.counter("linkis_rm_limits_advisory_violations_total"), 1);
    // Use above the grant also counts as a violation.
    rm.client.set_limit(&rule(&[("user", None)], LimitMode::Advisory, Some(2))).await.unwrap();
    rm.client.resource_inited(&inited(&beyond, "hadoop", Some(load(1, 1, 2)))).await.unwrap();
    assert_eq!(rm.counter("linkis_rm_limits_advisory_violations_total"), 2);
    assert_eq!(rm.client.request_resource(&ask("alice")).await.granted().advisory_violations, []);

    let scopes = rm.client.scopes().await.unwrap();
    let over: Vec<_> = scopes.iter().filter(|scope| scope.is_over()).map(|scope| scope.scope.to_string()).collect();
    assert_eq!(over, ["user=hadoop"]);
    assert!(scopes.iter().all(|scope| scope.rules[0].mode == LimitMode::Advisory));
    let report = rm.client.audit().await.unwrap();
    assert!(report.differences.is_empty(), "{report:?}");
    assert_eq!(report.notes, ["scope user=hadoop has more in use than its advisory limit"]);

    // Use above an enforced limit drains.
    let over = rm.client.set_limit(&rule(&[("user", None)], LimitMode::Enforced, Some(2))).await.unwrap();
    assert_eq!(over.len(), 1);
    rm.client.request_resource(&ask("hadoop")).await.refused();
    rm.client.resource_released(&release(&beyond, "hadoop")).await.unwrap();
    rm.client.request_resource(&ask("hadoop")).await.granted();
    assert_eq!(assert_invariants(&database, &rm.client).await, 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_off_counts_use_without_refusal() {
    let (database, rm) = start_with_host1().await;
    rm.client.set_limit(&rule(&[("user", None), ("creator", None)], LimitMode::Off, None)).await.unwrap();
    for user in ["hadoop", "hadoop", "alice"] {
        assert_eq!(rm.client.request_resource(&ask(user)).await.granted().advisory_violations, []);
    }
    let mut counted: Vec<_> = (rm.client.scopes().await.unwrap().into_iter())
        .map(|scope| (scope.scope.to_string(), scope.usage.locked.get(&Dimension::Instances), scope.is_over()))
        .collect();
    counted.sort();
    let expected = [("creator=IDE,user=alice", 1, false), ("creator=IDE,user=hadoop", 2, false)];
    assert_eq!(counted, expected.map(|(scope, held, over)| (scope.to_owned(), held, over)));
    // Only a limit in mode off needs no maximum.
    for mode in [LimitMode::Enforced, LimitMode::Advisory] {
        let error = rm.client.set_limit(&rule(&[("user", None)], mode, None)).await.unwrap_err();
        assert_eq!((error.code(), error.field().as_deref()), (Some(Code::InvalidArgument), Some("limit.max")));
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 3);
}

/// The most specific limit decides in each dimension, in any mode; a dimension that it does not name falls to the next limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_mode_of_most_specific_limit_decides() {
    let (database, first) = start_with_host1().await;
    let second = Instance::start(&database).await;
    let each = Rule {
        max: [(Dimension::Instances, 1), (Dimension::Cores, 3)].into(),
        ..rule(&[("user", None)], LimitMode::Enforced, None)
    };
    first.client.set_limit(&each).await.unwrap();
    second.client.request_resource(&ask("hadoop")).await.granted();
    second.client.request_resource(&ask("hadoop")).await.refused();
    // The other instance reads only the change.
    for mode in [LimitMode::Off, LimitMode::Advisory] {
        first.client.set_limit(&rule(&[("user", Some("hadoop"))], mode, Some(0))).await.unwrap();
        let granted = second.client.request_resource(&ask("hadoop")).await.granted();
        assert_eq!(granted.advisory_violations.len(), usize::from(mode == LimitMode::Advisory));
    }
    let refusal = second.client.request_resource(&ask("hadoop")).await.refused();
    let short: Vec<_> = refusal.shortfalls.iter().map(|short| &short.dimension).collect();
    assert_eq!(short, [&Dimension::Cores], "each user's cores are limited as before");
    let ResultResource::NotEnough(_) =
        second.client.request_resource(&request(&em("host1"), "alice", load(1, 1, 2))).await.unwrap()
    else {
        panic!("the limit of each other user holds");
    };
    let modes: Vec<_> = second.client.limits().await.unwrap().iter().map(|rule| rule.mode).collect();
    assert_eq!(modes, [LimitMode::Advisory, LimitMode::Enforced]);
    assert_eq!(assert_invariants(&database, &first.client).await, 3);
}

/// A limit that becomes advisory grants its waiting requests. The history shows the change.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_turned_advisory_grants_waiting_request() {
    let (database, rm) = start_with_host1().await;
    rm.client.set_limit(&rule(&[("user", None)], LimitMode::Enforced, Some(1))).await.unwrap();
    rm.client.request_resource(&ask("hadoop")).await.granted();
    let (client, patient) =
        (rm.client.clone(), ResourceRequest { wait_timeout: Duration::from_secs(60), ..ask("hadoop") });
    let call = tokio::spawn(async move { client.request_resource(&patient).await });
    eventually("it stands in line", Duration::from_secs(20), || async {
        rm.client.waiting().await.unwrap().len() == 1
    })
    .await;
    let mut limits = LimitServiceClient::connect(rm.address.clone()).await.unwrap();
    let advisory = proto::Limit {
        each: vec!["user".into()],
        max: [("instances".to_owned(), 1)].into(),
        mode: proto::LimitMode::Advisory.into(),
        ..Default::default()
    };
    let replace =
        |dry_run| proto::ReplaceLimitsRequest { limits: vec![advisory.clone()], dry_run, ..Default::default() };
    for dry_run in [true, false] {
        let got = limits.replace_limits(replace(dry_run)).await.unwrap().into_inner();
        let modes =
            got.changed.iter().map(|change| [&change.before, &change.after].map(|l| l.as_ref().unwrap().mode()));
        assert_eq!(modes.collect::<Vec<_>>(), [[proto::LimitMode::Enforced, proto::LimitMode::Advisory]]);
    }
    assert_eq!(call.await.unwrap().granted().advisory_violations.len(), 1);
    let modes = "SELECT array_to_string(array_agg(limit_mode ORDER BY id), ',') FROM linkis_resource_action_record
        WHERE action = 'limit_set'";
    let modes: String = database.scalar(modes).await;
    assert_eq!(modes, "enforced,advisory");
    assert_eq!(rm.client.scopes().await.unwrap()[0].usage.used, Tally::default());
    assert_eq!(assert_invariants(&database, &rm.client).await, 2);
}
