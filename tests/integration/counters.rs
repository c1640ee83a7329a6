//! Counters in replies: the state after the commit, with versions that order them.

use std::collections::BTreeMap;

use rm_model::{
    limit::{LabelPattern, Rule},
    limit_mode::LimitMode,
    resource::Dimension,
};
use rm_proto::v1::{
    self as proto, admin_service_client::AdminServiceClient, request_resource_response::Result as Answer,
    resource_manager_service_client::ResourceManagerServiceClient, usage_service_client::UsageServiceClient,
};
use tokio::task::JoinSet;
use tonic::{Code, transport::Channel};
use uuid::Uuid;

use crate::harness::*;
use crate::identity::{amount, ask, em_message, reason, register};

struct Calls {
    rm: ResourceManagerServiceClient<Channel>,
    usage: UsageServiceClient<Channel>,
    admin: AdminServiceClient<Channel>,
}

async fn calls(address: &str) -> Calls {
    let channel = Channel::from_shared(address.to_owned()).unwrap().connect().await.unwrap();
    Calls {
        rm: ResourceManagerServiceClient::new(channel.clone()),
        usage: UsageServiceClient::new(channel.clone()),
        admin: AdminServiceClient::new(channel),
    }
}

fn each(labels: &[&str], mode: LimitMode) -> Rule {
    let labels = labels.iter().map(|label| ((*label).to_owned(), None)).collect();
    Rule {
        pattern: LabelPattern::new(labels),
        mode,
        max: BTreeMap::from([(Dimension::Instances, 900)]),
        guarantee: Default::default(),
    }
}

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn counted(host: &str, user: &str, cores: i64) -> proto::RequestResourceRequest {
    proto::RequestResourceRequest { return_counters: true, ..ask(host, user, cores) }
}

fn available(answer: proto::RequestResourceResponse) -> proto::AvailableResource {
    match answer.result {
        Some(Answer::Available(available)) => available,
        other => panic!("{other:?}"),
    }
}

fn cores(resource: &Option<proto::Resource>) -> i64 {
    match resource.as_ref().and_then(|resource| resource.kind.as_ref()) {
        Some(proto::resource::Kind::LoadInstance(amounts)) => amounts.cores,
        other => panic!("{other:?}"),
    }
}

impl Calls {
    /// The counters of the reply equal the current ones.
    async fn assert_now(
        &mut self,
        got: Option<proto::Counters>,
        host: &str,
        scopes: &[BTreeMap<String, String>],
    ) -> proto::Counters {
        let got = got.expect("counters were asked for");
        let asked = proto::GetEmRequest { em: em_message(host) };
        let mut em = self.usage.get_em(asked).await.unwrap().into_inner().em.unwrap();
        let reported_em = got.em.clone().unwrap();
        // A reply has no data of reports.
        (em.health, em.load, em.last_report_time) =
            (reported_em.health, reported_em.load, reported_em.last_report_time);
        assert_eq!(reported_em, em);
        let mut now = Vec::new();
        for labels in scopes {
            let asked = proto::GetScopeRequest { labels: labels.clone() };
            now.push(self.usage.get_scope(asked).await.unwrap().into_inner().scope.unwrap());
        }
        let mut reported_scopes = got.scopes.clone();
        reported_scopes.sort_by(|one, other| one.labels.cmp(&other.labels));
        now.sort_by(|one, other| one.labels.cmp(&other.labels));
        assert_eq!(reported_scopes, now);
        got
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reply_counters_match_state_after_commit() {
    let (database, rm) = start().await;
    let mut calls = calls(&rm.address).await;
    rm.client.set_limit(&each(&["user"], LimitMode::Enforced)).await.unwrap();
    rm.client.set_limit(&each(&["user", "creator", "engine_type"], LimitMode::Off)).await.unwrap();
    let registered = calls.rm.register(register("host1")).await.unwrap().into_inner().em.unwrap();
    assert!(registered.version > 0);
    let scopes = [labels(&[("user", "alice")]), labels(&[("user", "alice"), ("creator", "IDE"), ("engine_type", "")])];

    let plain = available(calls.rm.request_resource(ask("host1", "alice", 2)).await.unwrap().into_inner());
    assert_eq!(plain.counters, None, "nobody asked");
    let grant = available(calls.rm.request_resource(counted("host1", "alice", 3)).await.unwrap().into_inner());
    let after_grant = calls.assert_now(grant.counters.as_deref().cloned(), "host1", &scopes).await;
    assert_eq!(cores(&after_grant.em.as_ref().unwrap().locked), 5);
    let em = em_message("host1");
    let engine = Some(proto::EngineInstance { application_name: "e".into(), instance: "h:1".into() });
    let inited = proto::ResourceInitedRequest {
        ticket_id: grant.ticket_id.clone(),
        user: "alice".into(),
        em: em.clone(),
        used: amount(2),
        engine: engine.clone(),
        return_counters: true,
        ..Default::default()
    };
    let answer = calls.rm.resource_inited(inited.clone()).await.unwrap().into_inner();
    let after_inited = calls.assert_now(answer.counters, "host1", &scopes).await;
    let again = calls.rm.resource_inited(inited).await.unwrap().into_inner();
    assert_eq!(again.counters, Some(after_inited.clone()), "a repetition changes nothing and returns the same");
    let reported = proto::ResourceReportedRequest {
        ticket_id: grant.ticket_id.clone(),
        user: "alice".into(),
        em: em.clone(),
        used: amount(1),
        return_counters: true,
        ..Default::default()
    };
    let answer = calls.rm.resource_reported(reported).await.unwrap().into_inner();
    let after_report = calls.assert_now(answer.counters, "host1", &scopes).await;
    let release =
        proto::ResourceReleasedRequest { ticket_id: grant.ticket_id, return_counters: true, ..Default::default() };
    let answer = calls.rm.resource_released(release.clone()).await.unwrap().into_inner();
    let after_release = calls.assert_now(answer.counters, "host1", &scopes).await;
    let again = calls.rm.resource_released(release).await.unwrap().into_inner().counters.unwrap();
    assert_eq!(
        (again.em, again.scopes.len()),
        (after_release.em.clone(), 0),
        "the EM of an ended ticket is recorded, its scopes are not"
    );
    let adopt = proto::AdoptTicketRequest {
        ticket_id: Uuid::new_v4().to_string(),
        em: em.clone(),
        user: "alice".into(),
        creator: "IDE".into(),
        engine,
        used: amount(4),
        return_counters: true,
        ..Default::default()
    };
    let answer = calls.admin.adopt_ticket(adopt.clone()).await.unwrap().into_inner();
    let after_adoption = calls.assert_now(answer.counters, "host1", &scopes).await;
    let force =
        proto::ForceReleaseRequest { ticket_id: adopt.ticket_id, reason: "it hangs".into(), return_counters: true };
    let answer = calls.admin.force_release(force).await.unwrap().into_inner();
    let after_force = calls.assert_now(answer.counters, "host1", &scopes).await;
    let all = [after_grant, after_inited, after_report, after_release, after_adoption, after_force];
    let versions: Vec<i64> = all.iter().map(|counters| counters.em.as_ref().unwrap().version).collect();
    assert!(versions.is_sorted_by(|one, next| one < next), "{versions:?}");
    for labels in &scopes {
        let of = |counters: &proto::Counters| {
            counters.scopes.iter().find(|scope| scope.labels == *labels).map(|scope| scope.version).unwrap()
        };
        let versions: Vec<i64> = all.iter().map(of).collect();
        assert!(versions.is_sorted_by(|one, next| one < next), "{versions:?}");
    }
    // A repetition by request id has no counters.
    let with_id = proto::RequestResourceRequest { request_id: "r1".into(), ..counted("host1", "bob", 1) };
    let first = available(calls.rm.request_resource(with_id.clone()).await.unwrap().into_inner());
    let again = available(calls.rm.request_resource(with_id.clone()).await.unwrap().into_inner());
    assert!(first.counters.is_some() && again.counters.is_none() && first.ticket_id == again.ticket_id);
    let other = proto::RequestResourceRequest { return_counters: false, ..with_id };
    assert_eq!(available(calls.rm.request_resource(other).await.unwrap().into_inner()).ticket_id, first.ticket_id);
    assert_invariants(&database, &rm.client).await;
}

/// The counters with the highest version are the current ones, in any order of replies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reply_counters_converge_by_version() {
    let (_database, first, second) = two().await;
    first.client.set_limit(&each(&["user"], LimitMode::Enforced)).await.unwrap();
    register_all(&first.client, ["host1", "host2"], load(100_000, 100_000, 100_000)).await;
    let mut callers = JoinSet::new();
    for number in 0..32 {
        let mut calls = calls(&[&first, &second][number % 2].address).await;
        callers.spawn(async move {
            let mut got = Vec::new();
            for turn in 0..12 {
                let host = ["host1", "host2"][(number + turn) % 2];
                let grant = available(calls.rm.request_resource(counted(host, "alice", 1)).await.unwrap().into_inner());
                got.extend(grant.counters.map(|counters| *counters));
                if turn % 3 != 0 {
                    let release = proto::ResourceReleasedRequest {
                        ticket_id: grant.ticket_id,
                        return_counters: true,
                        ..Default::default()
                    };
                    got.extend(calls.rm.resource_released(release).await.unwrap().into_inner().counters);
                }
            }
            got
        });
    }
    let got: Vec<proto::Counters> = callers.join_all().await.into_iter().flatten().collect();
    assert_eq!(got.len(), 32 * (12 + 8));
    let (mut ems, mut scopes) = (BTreeMap::new(), BTreeMap::new());
    for counters in got {
        let em = counters.em.unwrap();
        let key = (em.em.clone().unwrap().instance, em.epoch, em.version);
        // Replies with equal versions have equal counters.
        let known = ems.entry(key).or_insert_with(|| (em.used.clone(), em.locked.clone()));
        assert_eq!(*known, (em.used, em.locked));
        for scope in counters.scopes {
            let known = scopes.entry((scope.labels.clone(), scope.version)).or_insert_with(|| scope.clone());
            assert_eq!(*known, scope);
        }
    }
    let now = first.client.ems().await.unwrap();
    for em in &now {
        let newest = ems.range(..=(em.instance.instance.to_string(), i64::MAX, i64::MAX)).next_back().unwrap();
        assert_eq!(newest.0.2, em.version);
        assert_eq!(
            cores(&newest.1.1),
            em.locked.amounts().find(|(dimension, _)| *dimension == Dimension::Cores).unwrap().1
        );
    }
    let newest = scopes.last_entry().unwrap();
    let scope = first.client.scope(&labels(&[("user", "alice")])).await.unwrap();
    assert_eq!((newest.key().1, newest.get().locked["cores"]), (scope.version, 32 * 4));
    assert_eq!(scope.usage.locked.get(&Dimension::Cores), 32 * 4);
}

/// One scope is read by its labels, also without tickets; an uncounted scope is an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scope_call_returns_counters_by_labels() {
    let (database, rm) = start().await;
    let mut calls = calls(&rm.address).await;
    rm.client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    rm.client.set_limit(&each(&["user", "creator"], LimitMode::Off)).await.unwrap();
    let asked = labels(&[("user", "alice"), ("creator", "IDE")]);
    let empty = rm.client.scope(&asked).await.unwrap();
    assert!(empty.usage.used.is_zero() && empty.usage.locked.is_zero() && empty.rules.len() == 1);
    let grant = rm.client.request_resource(&request(&em("host1"), "alice", load(1, 2, 1))).await.granted();
    let held = rm.client.scope(&asked).await.unwrap();
    assert_eq!(held.usage.locked.get(&Dimension::Cores), 2);
    rm.client.resource_released(&release(&grant, "alice")).await.unwrap();
    let free = rm.client.scope(&asked).await.unwrap();
    assert!(free.usage.locked.is_zero() && free.version > held.version && held.version > empty.version);
    // The row is deleted and inserted again, with a higher version.
    database.execute("DELETE FROM linkis_label_resource").await;
    rm.client.request_resource(&request(&em("host1"), "alice", load(1, 2, 1))).await.granted();
    assert!(rm.client.scope(&asked).await.unwrap().version > free.version);
    for (wrong, code, why) in [
        (labels(&[("user", "alice")]), Code::NotFound, "SCOPE_NOT_COUNTED"),
        (labels(&[("user", "alice"), ("creator", "IDE"), ("engine_type", "x")]), Code::NotFound, "SCOPE_NOT_COUNTED"),
        (labels(&[]), Code::InvalidArgument, "INVALID_FIELD"),
        (labels(&[("", "alice")]), Code::InvalidArgument, "INVALID_FIELD"),
        (labels(&[("user", "a\u{7}")]), Code::InvalidArgument, "INVALID_FIELD"),
    ] {
        let status = calls.usage.get_scope(proto::GetScopeRequest { labels: wrong.clone() }).await.unwrap_err();
        assert_eq!((status.code(), reason(&status).as_str()), (code, why), "{wrong:?}: {status:?}");
    }
    let many = (0..9).map(|n| (format!("l{n}"), String::new())).collect();
    let status = calls.usage.get_scope(proto::GetScopeRequest { labels: many }).await.unwrap_err();
    assert_eq!(reason(&status), "INVALID_FIELD");
}
