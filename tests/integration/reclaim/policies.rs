//! Reclaim policies: calls, commands and history lines. Their roles are in `identity`.

use std::{collections::BTreeMap, time::Duration};

use rm_proto::v1::{self as proto, limit_service_client::LimitServiceClient};
use tonic::Code;
use tonic_types::StatusExt as _;

use super::*;
use crate::command_line::{program, text};

fn seconds(seconds: i64, nanos: i32) -> Option<prost_types::Duration> {
    Some(prost_types::Duration { seconds, nanos })
}

/// A policy for the tickets of a user, with the mode off.
fn message(change: impl FnOnce(&mut proto::ReclaimPolicy)) -> Option<proto::ReclaimPolicy> {
    let labels = BTreeMap::from([("user".to_owned(), "ann".to_owned())]);
    let mut policy = proto::ReclaimPolicy { labels, mode: proto::ReclaimMode::Off.into(), ..Default::default() };
    change(&mut policy);
    Some(policy)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reclaim_policies_are_listed_the_most_specific_first() {
    let (_database, first, second) = two().await;
    let in_order = [
        policy(&[("em", Some("host1:9102")), ("em_application", Some("ecm")), ("user", None)], ReclaimMode::Stop),
        policy(&[("creator", Some("IDE")), ("user", None)], ReclaimMode::Advise),
        policy(&[("queue", Some("root.a"))], ReclaimMode::Off),
        ReclaimPolicy {
            idle_after: Duration::from_millis(1500),
            grace: Duration::from_secs(24 * 3600),
            per_minute: 100_000,
            busy: true,
            min_life: Duration::from_secs(1),
            ..policy(&[("user", None)], ReclaimMode::Observe)
        },
    ];
    for policy in in_order.iter().rev() {
        first.client.set_reclaim_policy(policy, "").await.unwrap();
    }
    assert_eq!(second.client.reclaim_policies().await.unwrap(), in_order);
    second.client.delete_reclaim_policy(&in_order[1].pattern, "").await.unwrap();
    assert_eq!(first.client.reclaim_policies().await.unwrap(), [&in_order[..1], &in_order[2..]].concat());
}

/// Values that a call leaves out are those of a new policy, also where a policy is replaced.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_values_of_a_reclaim_policy_are_the_defaults() {
    let (_database, rm) = start().await;
    let mut limits = LimitServiceClient::connect(rm.address.clone()).await.unwrap();
    let mut set = async |policy: Option<proto::ReclaimPolicy>| {
        limits.set_reclaim_policy(proto::SetReclaimPolicyRequest { policy, reason: String::new() }).await.unwrap();
        rm.client.reclaim_policies().await.unwrap()
    };
    let expected = policy(&[("user", Some("ann"))], ReclaimMode::Off);
    // Parts of a millisecond are not stored.
    let short = ReclaimPolicy { idle_after: Duration::from_secs(1), per_minute: 1, ..expected.clone() };
    let changed = message(|policy| (policy.idle_after, policy.per_minute) = (seconds(1, 999_999), 1));
    assert_eq!(set(changed).await, [short]);
    assert_eq!(set(message(|policy| policy.grace = seconds(0, 0))).await, [expected]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_reclaim_policy_is_rejected() {
    let (database, rm) = start().await;
    let mut limits = LimitServiceClient::connect(rm.address.clone()).await.unwrap();
    for (policy, field) in [
        (None, "policy"),
        (message(|policy| policy.labels.clear()), "policy.labels"),
        (message(|policy| policy.each.push("user".to_owned())), "policy.each"),
        (message(|policy| drop(policy.labels.insert("em".into(), "ecm/host1:9102".into()))), "policy.labels"),
        (message(|policy| policy.mode = 0), "policy.mode"),
        (message(|policy| policy.mode = 5), "policy.mode"),
        (message(|policy| policy.idle_after = seconds(0, 999_999_999)), "policy.idle_after"),
        (message(|policy| policy.idle_after = seconds(86_400, 1)), "policy.idle_after"),
        (message(|policy| policy.idle_after = seconds(-1, 0)), "policy.idle_after"),
        (message(|policy| policy.grace = seconds(0, 1)), "policy.grace"),
        (message(|policy| policy.grace = seconds(i64::MAX, 0)), "policy.grace"),
        (message(|policy| policy.per_minute = -1), "policy.per_minute"),
        (message(|policy| policy.per_minute = 100_001), "policy.per_minute"),
        (message(|policy| policy.min_life = seconds(86_400, 1)), "policy.min_life"),
    ] {
        let call = proto::SetReclaimPolicyRequest { policy, reason: String::new() };
        let status = limits.set_reclaim_policy(call).await.unwrap_err();
        let named = &status.get_details_bad_request().unwrap().field_violations[0].field;
        assert_eq!((status.code(), named.as_str()), (Code::InvalidArgument, field));
    }
    let missing = proto::DeleteReclaimPolicyRequest { policy: message(|_| ()), reason: String::new() };
    let status = limits.delete_reclaim_policy(missing).await.unwrap_err();
    let info = status.get_details_error_info().unwrap();
    assert_eq!((info.reason.as_str(), info.metadata["policy"].as_str()), ("NO_SUCH_RECLAIM_POLICY", "user=ann"));
    assert_eq!(database.recorded("reclaim_policy_set").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundred_reclaim_policies_are_the_most() {
    let (_database, rm) = start().await;
    let of = |user: &str, mode| policy(&[("user", Some(user))], mode);
    for number in 0..100 {
        rm.client.set_reclaim_policy(&of(&format!("u{number}"), ReclaimMode::Off), "").await.unwrap();
    }
    rm.client.set_reclaim_policy(&of("u7", ReclaimMode::Stop), "").await.unwrap();
    let error = rm.client.set_reclaim_policy(&of("u100", ReclaimMode::Off), "").await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("TOO_MANY_RECLAIM_POLICIES"));
}

/// Each change of a policy has one history line with the states before and after; an equal policy has none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_shows_reclaim_policies() {
    let (_database, first, second) = two().await;
    let advise = policy(&[("creator", Some("IDE")), ("user", None)], ReclaimMode::Advise);
    let stop = ReclaimPolicy { mode: ReclaimMode::Stop, per_minute: 9, ..advise.clone() };
    for policy in [&advise, &advise, &stop] {
        first.client.set_reclaim_policy(policy, "as agreed").await.unwrap();
    }
    second.client.delete_reclaim_policy(&stop.pattern, "no longer").await.unwrap();
    let lines = first.client.actions(&proto::ListActionsRequest::default()).await.unwrap().actions;
    let shown: Vec<_> =
        lines.iter().map(|line| [&line.action, &line.object, &line.reason, &line.before, &line.after]).collect();
    let name = "creator=IDE,each user";
    let [advise, stop] = [("ADVISE", 60), ("STOP", 9)]
        .map(|(mode, rate)| {
            format!(r#"{{"busy":false,"grace_s":30.0,"idle_after_s":300.0,"min_life_s":600.0,"mode":"{mode}","per_minute":{rate}}}"#)
        });
    assert_eq!(
        shown,
        [
            ["reclaim_policy_set", name, "as agreed", "", &advise],
            ["reclaim_policy_set", name, "as agreed", &advise, &stop],
            ["reclaim_policy_deleted", name, "no longer", &stop, ""],
        ]
    );
}

/// A command keeps the values that it does not name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reclaim_policy_command_changes_named_values() {
    let (_database, rm) = start().await;
    let set = |options: &[&str]| {
        let words = [&["reclaim", "policy", "set", "creator=IDE,each user"], options, &["--yes", "--reason", "r"]];
        let done = program(&rm.address, &words.concat()).output().unwrap();
        (done.status.code(), text(&done.stderr))
    };
    let (code, error) = set(&["--grace", "1m"]);
    assert!(
        code == Some(64) && error.contains("--mode: is required, because no reclaim policy has the labels"),
        "{code:?} {error}"
    );
    assert_eq!(set(&["--mode", "observe", "--idle-after", "90s"]), (Some(0), String::new()));
    assert_eq!(set(&["--grace", "1m", "--per-minute", "5"]), (Some(0), String::new()));
    assert_eq!(set(&["--busy", "--min-life", "20m"]), (Some(0), String::new()));
    let expected = ReclaimPolicy {
        idle_after: Duration::from_secs(90),
        grace: Duration::from_secs(60),
        per_minute: 5,
        busy: true,
        min_life: Duration::from_secs(1200),
        ..policy(&[("creator", Some("IDE")), ("user", None)], ReclaimMode::Observe)
    };
    assert_eq!(rm.client.reclaim_policies().await.unwrap(), [expected]);
    let listed = text(&program(&rm.address, &["reclaim", "policy", "list", "--no-headers"]).output().unwrap().stdout);
    let cells: Vec<&str> = listed.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
    assert_eq!(cells, ["creator=IDE,each user", "observe", "1m30s", "1m0s", "5", "20m0s"]);
    assert_eq!(set(&["--busy", "false"]), (Some(0), String::new()));
    assert!(!rm.client.reclaim_policies().await.unwrap()[0].busy);
}
