//! The history of calls by operators and administrators: actor, address, subject, and the states before and after.

use std::{
    collections::BTreeMap,
    process::Command,
    sync::{Arc, Mutex},
};

use rm_proto::v1::{
    self as proto, admin_service_client::AdminServiceClient,
    external_resource_service_client::ExternalResourceServiceClient, limit_service_client::LimitServiceClient,
    usage_service_client::UsageServiceClient,
};
use serde_json::{Value, json};
use tonic::{Code, service::interceptor::InterceptedService, transport::Channel};

use crate::{
    harness::*,
    identity::{Show, amount, ask, em_message, granted, reason, register, rm_of, token, with},
};

type With = InterceptedService<Channel, Show>;

/// A caller with a token.
struct Person {
    limits: LimitServiceClient<With>,
    admin: AdminServiceClient<With>,
    external: ExternalResourceServiceClient<With>,
    usage: UsageServiceClient<With>,
}

impl Person {
    fn new(channel: &Channel, token: &str) -> Self {
        Self {
            limits: LimitServiceClient::new(with(channel, token)),
            admin: AdminServiceClient::new(with(channel, token)),
            external: ExternalResourceServiceClient::new(with(channel, token)),
            usage: UsageServiceClient::new(with(channel, token)),
        }
    }

    async fn history(&mut self) -> Vec<proto::Action> {
        let all = proto::ListActionsRequest { page_size: 1000, ..Default::default() };
        self.usage.list_actions(all).await.unwrap().into_inner().actions
    }
}

/// Starts a server that requires authentication, and returns its log.
fn asking(database: &Database) -> (Process, Arc<Mutex<Vec<String>>>) {
    let log = Arc::<Mutex<Vec<String>>>::default();
    let lines = log.clone();
    let mut command = Command::new(*PROGRAM);
    command.args(["--external-hosts", "*"]).args(["--database-url", &database.url()]);
    (Process::start_command(&mut command, move |line| lines.lock().unwrap().push(line)), log)
}

fn limit(user: &str, instances: i64) -> proto::Limit {
    proto::Limit {
        labels: BTreeMap::from([("user".to_owned(), user.to_owned())]),
        max: BTreeMap::from([("instances".to_owned(), instances)]),
        ..Default::default()
    }
}

fn set(limit: proto::Limit, expected_etag: Option<&str>) -> proto::SetLimitRequest {
    let (expected_etag, reason) = (expected_etag.map(str::to_owned), "for bob".to_owned());
    proto::SetLimitRequest { limit: Some(limit), expected_etag, reason }
}

fn policy(checks: &[proto::Check]) -> proto::SetPolicyRequest {
    let checks = checks.iter().map(|check| (*check).into()).collect();
    let em_application_name = em("host1").application_name.to_string();
    proto::SetPolicyRequest { policy: Some(proto::Policy { em_application_name, checks, ..Default::default() }) }
}

fn drain(host: &str, reason: &str) -> proto::DrainRequest {
    proto::DrainRequest { em: em_message(host), reason: reason.into() }
}

fn hold(host: &str, reason: &str) -> proto::HoldRequest {
    let duration = Some(prost_types::Duration { seconds: 300, nanos: 0 });
    proto::HoldRequest { em: em_message(host), duration, reason: reason.into(), ..Default::default() }
}

fn provider(user: &str, expected_etag: Option<&str>) -> proto::PutProviderRequest {
    let config =
        json!({ "rmWebAddress": "http://127.0.0.1:1", "authorEnable": true, "user": user, "pwd": "gr8-s3cret" });
    proto::PutProviderRequest {
        provider: Some(proto::Provider {
            resource_type: "Yarn".into(),
            name: "default".into(),
            config: config.to_string(),
            ..Default::default()
        }),
        expected_etag: expected_etag.map(str::to_owned),
    }
}

/// Replaces times by a mark, because they differ in each run.
fn without_times(text: &str) -> Value {
    let mut state: Value = if text.is_empty() { Value::Null } else { serde_json::from_str(text).unwrap() };
    if let Value::Object(state) = &mut state {
        state.iter_mut().filter(|(key, _)| key.ends_with("_time") || *key == "hold_until").for_each(|(key, time)| {
            assert!(time.as_str().is_some_and(|time| time.starts_with("20")), "{key}: {time}");
            *time = "then".into();
        });
    }
    state
}

/// A history line: action, actor, subject, and the states before and after.
fn fields(line: &proto::Action) -> (String, String, String, Value, Value) {
    let em = line.em.as_ref().map(|em| em.instance.clone()).filter(|em| !em.is_empty());
    let labels: Vec<_> = line.scope.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let kind = line.em.as_ref().map(|em| em.application_name.clone());
    let object =
        [line.object.clone(), line.ticket_id.clone(), labels.join(",")].into_iter().find(|text| !text.is_empty());
    let object = object.or(em).or(kind).unwrap_or_default();
    (line.action.clone(), line.actor.clone(), object, without_times(&line.before), without_times(&line.after))
}

/// Ends as it should: refused, for this reason.
#[track_caller]
fn refused<T: std::fmt::Debug>(done: Result<T, tonic::Status>, why: &str) {
    assert_eq!(reason(&done.unwrap_err()), why);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn admin_calls_are_recorded_with_actor_and_states() {
    let database = Database::fresh().await;
    let [ann, otto] =
        [("ann", "admin"), ("otto", "operator")].map(|(who, role)| token(&database, who, &["--role", role]));
    let (process, _log) = asking(&database);
    let channel = channel_to(&process.address).await;
    let (mut admin, mut operator, mut rm) =
        (Person::new(&channel, &ann), Person::new(&channel, &otto), rm_of(&channel, &ann));
    rm.register(register("host1")).await.unwrap();
    let ticket = granted(rm.request_resource(ask("host1", "bob", 1)).await.unwrap().into_inner());

    admin.limits.set_limit(set(limit("bob", 9), None)).await.unwrap();
    refused(admin.limits.set_limit(set(limit("bob", 1), Some("another"))).await, "LIMIT_CHANGED");
    let replace = proto::ReplaceLimitsRequest {
        limits: vec![limit("bob", 8), limit("al", 1)],
        reason: "as agreed".into(),
        ..Default::default()
    };
    admin.limits.replace_limits(replace).await.unwrap();
    let delete =
        proto::DeleteLimitRequest { limit: Some(limit("al", 1)), expected_etag: None, reason: "al is gone".into() };
    admin.limits.delete_limit(delete.clone()).await.unwrap();
    refused(admin.limits.delete_limit(delete).await, "NO_SUCH_LIMIT");
    admin.limits.set_policy(policy(&[proto::Check::User])).await.unwrap();

    operator.admin.drain(drain("host1", "a new disk")).await.unwrap();
    operator.admin.drain(drain("host1", "a new disk")).await.unwrap();
    refused(operator.admin.drain(drain("host2", "a typing mistake")).await, "EM_NOT_REGISTERED");
    admin.admin.drain(drain("host1", "a new board")).await.unwrap();
    let resume = proto::ResumeRequest { em: em_message("host1"), reason: String::new() };
    operator.admin.resume(resume.clone()).await.unwrap();
    operator.admin.resume(resume).await.unwrap();
    operator.admin.hold(hold("host1", "a look")).await.unwrap();
    operator.admin.hold(hold("host1", "a longer look")).await.unwrap();
    refused(admin.admin.hold(hold("host1", "mine")).await, "ALREADY_HELD");
    let release = proto::ReleaseHoldRequest { em: em_message("host1"), user: String::new() };
    admin.admin.release_hold(release.clone()).await.unwrap();
    admin.admin.release_hold(release).await.unwrap();
    let force = |ticket_id: &str| proto::ForceReleaseRequest {
        ticket_id: ticket_id.into(),
        reason: "it hangs".into(),
        ..Default::default()
    };
    operator.admin.force_release(force(&ticket)).await.unwrap();
    operator.admin.force_release(force(&ticket)).await.unwrap();
    refused(operator.admin.force_release(force(&uuid::Uuid::new_v4().to_string())).await, "TICKET_NOT_FOUND");
    let adopted = uuid::Uuid::new_v4().to_string();
    let adopt = proto::AdoptTicketRequest {
        ticket_id: adopted.clone(),
        em: em_message("host1"),
        user: "bob".into(),
        creator: "IDE".into(),
        engine: Some(proto::EngineInstance { application_name: "engine".into(), instance: "host1:7".into() }),
        used: amount(2),
        ..Default::default()
    };
    admin.admin.adopt_ticket(adopt.clone()).await.unwrap();
    admin.admin.adopt_ticket(adopt).await.unwrap();
    let damage = "UPDATE linkis_em_resource_meta_data SET used_resource = jsonb_set(used_resource, '{cores}', '7')";
    database.execute(damage).await;
    let repair = proto::RepairRequest { reason: "somebody wrote there".into(), ..Default::default() };
    admin.admin.repair(repair.clone()).await.unwrap();
    admin.admin.repair(repair).await.unwrap();
    admin.external.put_provider(provider("hadoop", None)).await.unwrap();
    refused(admin.external.put_provider(provider("other", Some("another"))).await, "PROVIDER_CHANGED");
    admin.external.put_provider(provider("linkis", None)).await.unwrap();
    let delete =
        proto::DeleteProviderRequest { resource_type: "Yarn".into(), name: "default".into(), expected_etag: None };
    admin.external.delete_provider(delete.clone()).await.unwrap();
    refused(admin.external.delete_provider(delete).await, "NO_SUCH_PROVIDER");
    let viewer = token(&database, "vera", &["--role", "viewer", "--user", "bob"]);
    let mut revoke = Command::new(*PROGRAM);
    revoke
        .args(["token", "revoke", "--yes", "--name", "vera", "--reason", "vera is gone"])
        .env("DATABASE_URL", database.url());
    assert!(revoke.env_remove("LINKIS_RM_DATA_DIR").status().unwrap().success());
    assert_eq!(revoke.status().unwrap().code(), Some(1), "nothing is left to revoke");

    let all = admin.history().await;
    let acts: Vec<_> = all.iter().filter(|line| !line.address.is_empty()).collect();
    let bob = |instances: i64| json!({ "max": { "instances": instances }, "mode": "enforced" });
    let checks = |checks: &[&str]| json!({ "checks": checks, "required_labels": [], "placement": "spread", "em_new_after_s": 60.0 });
    let drained = |reason: &str, by: &str| json!({ "reason": reason, "drained_by": by, "drain_time": "then" });
    let held = |reason: &str| json!({ "reason": reason, "held_by": "otto", "hold_time": "then", "hold_until": "then" });
    let amounts = |n: i64| json!({ "memory": n * GB, "cores": n, "instances": n });
    let locked = json!({ "state": "locked", "resource": amounts(1), "expire_time": "then" });
    let used = json!({ "state": "used", "resource": amounts(2), "used_time": "then",
        "engine": "engine/host1:7" });
    let cores = |cores: i64| json!({ "used": { "cores": cores } });
    let yarn = |user: &str| json!({ "labels": {}, "config": { "rmWebAddress": "http://127.0.0.1:1", "user": user } });
    let rights = |role: &str, users: Value| json!({ "roles": [role], "ems": [], "users": users, "owner": "the tests", "expire_time": "then" });
    let vera = rights("viewer", json!(["bob"]));
    let mut revoked = vera.clone();
    revoked["revoke_time"] = "then".into();
    let (nothing, me) = (Value::Null, whoami());
    let expected = [
        ("token_created", &*me, "token * of ann", nothing.clone(), rights("admin", Value::Null)),
        ("token_created", &me, "token * of otto", nothing.clone(), rights("operator", Value::Null)),
        ("limit_set", "ann", "user=bob", nothing.clone(), bob(9)),
        ("limit_set", "ann", "user=al", nothing.clone(), bob(1)),
        ("limit_set", "ann", "user=bob", bob(9), bob(8)),
        ("limit_deleted", "ann", "user=al", bob(1), nothing.clone()),
        (
            "policy_set",
            "ann",
            "linkis-cg-engineconnmanager",
            checks(&["em", "creator", "user", "labels"]),
            checks(&["em", "user"]),
        ),
        ("drained", "otto", "host1:9102", nothing.clone(), drained("a new disk", "otto")),
        ("drained", "ann", "host1:9102", drained("a new disk", "otto"), drained("a new board", "ann")),
        ("resumed", "otto", "host1:9102", drained("a new board", "ann"), nothing.clone()),
        ("held", "otto", "host1:9102", nothing.clone(), held("a look")),
        ("held", "otto", "host1:9102", held("a look"), held("a longer look")),
        ("hold_ended", "ann", "host1:9102", held("a longer look"), nothing.clone()),
        ("forced", "otto", &ticket, locked, nothing.clone()),
        ("adopted", "ann", &adopted, nothing.clone(), used),
        ("repaired", "ann", "host1:9102", cores(7), cores(2)),
        ("provider_put", "ann", "provider Yarn/default", nothing.clone(), yarn("hadoop")),
        ("provider_put", "ann", "provider Yarn/default", yarn("hadoop"), yarn("linkis")),
        ("provider_deleted", "ann", "provider Yarn/default", yarn("linkis"), nothing.clone()),
        ("token_created", &me, "token * of vera", nothing, vera.clone()),
        ("token_revoked", &me, "token * of vera", vera, revoked),
    ];
    for (line, (action, actor, object, before, after)) in acts.iter().zip(&expected) {
        let mut got = fields(line);
        if let (Some(id), true) = (got.2.split(' ').nth(1), line.action.starts_with("token_")) {
            assert!(id.parse::<uuid::Uuid>().is_ok(), "{line:?}");
            got.2 = got.2.replace(id, "*");
        }
        for (got, expected) in [(&mut got.3, before), (&mut got.4, after)] {
            // The configuration in the history shows only the given keys, without secrets.
            if let (Some(Value::Object(config)), Some(Value::Object(known))) =
                (got.get_mut("config"), expected.get("config"))
            {
                config.retain(|key, _| known.contains_key(key));
            }
        }
        assert_eq!(
            got,
            ((*action).to_owned(), (*actor).to_owned(), (*object).to_owned(), before.clone(), after.clone())
        );
        match line.action.starts_with("token_") {
            true => assert!(!line.address.contains(':') && line.address == hostname(), "{line:?}"),
            false => assert!(line.address.starts_with("127.0.0.1:"), "{line:?}"),
        }
    }
    assert_eq!(acts.len(), expected.len(), "{acts:#?}");
    let reasons = acts.iter().filter(|line| !line.reason.is_empty() && !["drained", "held"].contains(&&*line.action));
    let reasons: Vec<_> = reasons.map(|line| (line.action.as_str(), line.reason.as_str())).collect();
    let expected = [
        ("limit_set", "for bob"),
        ("limit_set", "as agreed"),
        ("limit_set", "as agreed"),
        ("limit_deleted", "al is gone"),
        ("forced", "it hangs"),
        ("repaired", "somebody wrote there"),
        ("token_revoked", "vera is gone"),
    ];
    assert_eq!(reasons, expected);
    let others: Vec<_> = all.iter().filter(|line| line.address.is_empty()).map(|line| line.action.as_str()).collect();
    assert_eq!(others, ["registered", "granted", "limits_in_force"]);
    for line in &all {
        let text = format!("{line:?}");
        for secret in ["gr8-s3cret", &ann[4..40], &otto[4..40], &viewer[4..40]] {
            assert!(!text.contains(secret), "{text}");
        }
    }
    assert_eq!(database.count("SELECT count(*) FROM linkis_resource_action_record_rest").await, 0);
}

/// The actor of a command of this machine.
fn whoami() -> String {
    let output = |argument: &str| {
        let done = Command::new("id").arg(argument).output().unwrap().stdout;
        String::from_utf8(done).unwrap().trim().to_owned()
    };
    format!("{} (uid {})", output("-un"), output("-u"))
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_owned()
}

/// A viewer sees neither addresses of callers nor lines about tokens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn denied_calls_are_logged_without_history_lines() {
    let database = Database::fresh().await;
    let [ann, otto, vera] = [("ann", "admin"), ("otto", "operator"), ("vera", "viewer")]
        .map(|(who, role)| token(&database, who, &["--role", role]));
    let (process, log) = asking(&database);
    let channel = channel_to(&process.address).await;
    let (mut admin, mut operator) = (Person::new(&channel, &ann), Person::new(&channel, &otto));
    rm_of(&channel, &ann).register(register("host1")).await.unwrap();
    admin.admin.drain(drain("host1", "a new disk")).await.unwrap();
    let (before, begun) = (admin.history().await, std::time::Instant::now());
    for _ in 0..100 {
        let denied = operator.limits.set_limit(set(limit("bob", 9), None)).await.unwrap_err();
        assert_eq!((denied.code(), reason(&denied).as_str()), (Code::PermissionDenied, "ROLE_DENIED"));
    }
    for denied in [
        operator.limits.set_policy(policy(&[])).await.map(drop),
        operator.admin.repair(proto::RepairRequest::default()).await.map(drop),
        operator.external.put_provider(provider("hadoop", None)).await.map(drop),
        Person::new(&channel, &vera).admin.drain(drain("host1", "mine")).await.map(drop),
    ] {
        assert_eq!(reason(&denied.unwrap_err()), "ROLE_DENIED");
    }
    assert_eq!(admin.history().await, before);
    assert_eq!(process.terminate(), Some(0));
    let log = std::mem::take(&mut *log.lock().unwrap());
    let lines: Vec<_> = log.iter().filter(|line| line.contains("a call is denied")).collect();
    let whole = lines.iter().all(|line| line.contains("principal=") && line.contains("address=127.0.0.1:"));
    assert!((1..=2 * crate::edge::lines_max(begun)).contains(&lines.len()) && whole, "{lines:#?}");

    let (process, _log) = asking(&database);
    let channel = channel_to(&process.address).await;
    let seen = Person::new(&channel, &vera).history().await;
    assert_eq!(seen.iter().map(|line| line.action.as_str()).collect::<Vec<_>>(), ["registered", "drained"]);
    assert!(seen.iter().all(|line| line.address.is_empty() && line.actor == "ann"), "{seen:?}");
    let seen = Person::new(&channel, &otto).history().await;
    assert_eq!(seen, before);
}
