//! Lists: every filter alone and combined.

use std::{collections::BTreeMap, time::Duration};

use rm_client::ResourceRequest;
use rm_model::{
    em::EmInstance,
    limit::{LabelPattern, Rule},
    name::Labels,
    operation::RegisterEm,
    report::{EmReport, Health},
    resource::Dimension,
};
use rm_proto::v1::{self as proto, usage_service_client::UsageServiceClient};
use rm_store::history_partition;
use tonic::{Code, transport::Channel};
use tonic_types::StatusExt as _;

use crate::{command_line::program, harness::*};

type Usage = UsageServiceClient<Channel>;

async fn usage(rm: &Instance) -> Usage {
    UsageServiceClient::connect(rm.address.clone()).await.unwrap()
}

fn pairs<const N: usize>(pairs: [(&str, &str); N]) -> BTreeMap<String, String> {
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

fn em_message(em: &EmInstance) -> Option<proto::EmInstance> {
    let (application_name, instance) = (em.application_name.to_string(), em.instance.to_string());
    Some(proto::EmInstance { application_name, instance })
}

fn labels<const N: usize>(of: [(&str, &str); N]) -> Labels {
    Labels::parse("labels", pairs(of)).unwrap()
}

#[track_caller]
fn names_the_field(status: &tonic::Status, field: &str) {
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, field);
}

/// The EMs of all pages, each with two EMs at most.
async fn ems(usage: &mut Usage, filter: proto::ListEmsRequest) -> String {
    let (mut ems, mut page_token) = (Vec::new(), String::new());
    loop {
        let call = proto::ListEmsRequest { page_size: 2, page_token, ..filter.clone() };
        let page = usage.list_ems(call).await.unwrap().into_inner();
        assert!(page.ems.len() <= 2);
        ems.extend(page.ems.into_iter().map(|em| em.em.unwrap().instance.replace(":9102", "")));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return ems.join(" ");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_ems_filters_by_state_and_labels() {
    let (database, rm) = start().await;
    let mut epochs = BTreeMap::new();
    for (host, zone, reserved) in [("a", "1", ""), ("b", "1", "x"), ("c", "2", ""), ("d", "2", "")] {
        let reserved = if reserved.is_empty() { labels([]) } else { labels([("for", reserved)]) };
        let register =
            RegisterEm { labels: labels([("zone", zone)]), reserved, ..registration(em(host), load(10, 10, 10)) };
        epochs.insert(host, rm.client.register(register).await.unwrap().epoch);
    }
    let other = EmInstance::parse("em", "other", "e").unwrap();
    rm.client.register(registration(other.clone(), load(10, 10, 10))).await.unwrap();
    for (host, health) in [("a", Health::Healthy), ("b", Health::Unhealthy), ("c", Health::Healthy)] {
        let (em, epoch) = (em(host), epochs[host]);
        let report =
            EmReport { em, epoch, sequence: 1, health, load: None, tickets: vec![], observed: None, idle: vec![] };
        rm.client.heartbeat(&report).await.unwrap();
    }
    rm.client.drain(&em("c"), "a disk").await.unwrap();
    rm.client.request_resource(&request(&em("d"), "hadoop", load(1, 5, 1))).await.granted();
    // The EM registered an hour ago and is silent.
    let silent = "UPDATE linkis_em_report SET report_time = now() - interval '3 min' WHERE em_instance = 'a:9102'";
    let registered =
        "UPDATE linkis_em_resource_meta_data SET register_time = now() - interval '1 h' WHERE em_instance = 'a:9102'";
    for statement in [silent, registered] {
        database.execute(statement).await;
    }
    let watchful = settings().with_time("--em-silent-after", Duration::from_secs(120));
    let rm = Instance::start_with(&database, watchful).await;
    let mut usage = usage(&rm).await;
    let all = proto::ListEmsRequest::default();
    let ecm = "linkis-cg-engineconnmanager".to_owned();
    for (filter, found) in [
        (all.clone(), "a b c d e"),
        (proto::ListEmsRequest { em_application_name: ecm.clone(), ..all.clone() }, "a b c d"),
        (proto::ListEmsRequest { em_application_name: "other".into(), ..all.clone() }, "e"),
        (proto::ListEmsRequest { em_application_name: "nobody".into(), ..all.clone() }, ""),
        (proto::ListEmsRequest { labels: pairs([("zone", "1")]), ..all.clone() }, "a b"),
        (proto::ListEmsRequest { labels: pairs([("zone", "1"), ("for", "x")]), ..all.clone() }, "b"),
        (proto::ListEmsRequest { health: proto::Health::Unhealthy.into(), ..all.clone() }, "b"),
        (proto::ListEmsRequest { health: proto::Health::Healthy.into(), ..all.clone() }, "a c"),
        (proto::ListEmsRequest { silent: Some(true), ..all.clone() }, "a"),
        (proto::ListEmsRequest { silent: Some(false), labels: pairs([("zone", "1")]), ..all.clone() }, "b"),
        (proto::ListEmsRequest { draining: Some(true), ..all.clone() }, "c"),
        (proto::ListEmsRequest { draining: Some(false), em_application_name: ecm, ..all.clone() }, "a b d"),
        (proto::ListEmsRequest { min_fullness_percent: 50, ..all.clone() }, "d"),
        (proto::ListEmsRequest { min_fullness_percent: 51, ..all.clone() }, ""),
        (proto::ListEmsRequest { min_fullness_percent: 1, labels: pairs([("zone", "1")]), ..all.clone() }, ""),
    ] {
        // An order selects the same EMs.
        for order in [proto::EmOrder::Fullest, proto::EmOrder::Urgent] {
            let ordered = ems(&mut usage, proto::ListEmsRequest { order: order.into(), ..filter.clone() }).await;
            let (mut one, mut other): (Vec<_>, Vec<_>) = (ordered.split(' ').collect(), found.split(' ').collect());
            one.sort_unstable();
            other.sort_unstable();
            assert_eq!(one, other, "{order:?} {filter:?}");
        }
        assert_eq!(ems(&mut usage, filter.clone()).await, found, "{filter:?}");
    }
    // Urgent are, in this order: the silent EM, the unhealthy EM, the EM without a report, and the drained EM.
    for (order, found) in [(proto::EmOrder::Fullest, "d a b c e"), (proto::EmOrder::Urgent, "a b d e c")] {
        let call = proto::ListEmsRequest { order: order.into(), ..all.clone() };
        assert_eq!(ems(&mut usage, call.clone()).await, found, "{order:?}");
        let page = usage.list_ems(proto::ListEmsRequest { page_size: 2, ..call.clone() }).await.unwrap().into_inner();
        let page_token = page.next_page_token;
        names_the_field(
            &usage.list_ems(proto::ListEmsRequest { page_token, ..all.clone() }).await.unwrap_err(),
            "page_token",
        );
    }
    for (wrong, field) in [
        (proto::ListEmsRequest { order: 9, ..all.clone() }, "order"),
        (proto::ListEmsRequest { health: 9, ..all.clone() }, "health"),
        (proto::ListEmsRequest { min_fullness_percent: 101, ..all.clone() }, "min_fullness_percent"),
        (proto::ListEmsRequest { em_application_name: "\n".into(), ..all.clone() }, "em_application_name"),
    ] {
        names_the_field(&usage.list_ems(wrong).await.unwrap_err(), field);
    }
    rm.stop().await;
}

/// A page reads a bounded number of EMs, and the next page continues after them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_ems_page_of_rare_matches_is_bounded() {
    let watchful = settings().with_time("--em-silent-after", Duration::from_secs(5));
    let database = Database::fresh().await;
    let rm = Instance::start_with(&database, watchful).await;
    // More EMs than a page reads, and one matching EM behind them.
    let crowd = EmInstance::parse("em", "crowd", "0").unwrap();
    let epoch = rm.client.register(registration(crowd.clone(), load(10, 10, 10))).await.unwrap().epoch;
    let healthy = |em: &EmInstance, epoch| EmReport {
        em: em.clone(),
        epoch,
        sequence: 1,
        health: Health::Healthy,
        load: None,
        tickets: vec![],
        observed: None,
        idle: vec![],
    };
    rm.client.heartbeat(&healthy(&crowd, epoch)).await.unwrap();
    let last = EmInstance::parse("em", "other", "last").unwrap();
    let register = RegisterEm { labels: labels([("zone", "9")]), ..registration(last.clone(), load(10, 10, 10)) };
    let epoch = rm.client.register(register).await.unwrap().epoch;
    rm.client.heartbeat(&EmReport { health: Health::Unhealthy, ..healthy(&last, epoch) }).await.unwrap();
    rm.client.request_resource(&request(&last, "hadoop", load(1, 9, 1))).await.granted();
    rm.client.drain(&last, "a disk").await.unwrap();
    for table in ["linkis_em_resource_meta_data", "linkis_em_report"] {
        let many = format!(
            "INSERT INTO {table} OVERRIDING USER VALUE SELECT (jsonb_populate_record(t, jsonb_build_object('em_instance', n))).*
            FROM {table} t, generate_series(1, 5999) n WHERE em_instance = '0'"
        );
        database.execute(many).await;
    }
    let all = proto::ListEmsRequest::default();
    // Only this EM is silent.
    let is_silent = "UPDATE linkis_em_resource_meta_data SET register_time = now() - interval '1 h' WHERE em_instance = 'last';
        UPDATE linkis_em_report SET report_time = now() + CASE em_instance WHEN 'last' THEN -interval '20 s' ELSE interval '1 h' END";
    database.execute(is_silent).await;
    let mut usage = usage(&rm).await;
    for filter in [
        proto::ListEmsRequest { labels: pairs([("zone", "9")]), ..all.clone() },
        proto::ListEmsRequest { health: proto::Health::Unhealthy.into(), ..all.clone() },
        proto::ListEmsRequest { silent: Some(true), ..all.clone() },
        proto::ListEmsRequest { draining: Some(true), ..all.clone() },
        proto::ListEmsRequest { min_fullness_percent: 90, ..all.clone() },
    ] {
        for page_size in [10, 1000] {
            let call = proto::ListEmsRequest { page_size, ..filter.clone() };
            let first = usage.list_ems(call.clone()).await.unwrap().into_inner();
            assert!(first.ems.is_empty() && !first.next_page_token.is_empty(), "{call:?}: {first:?}");
            let next = proto::ListEmsRequest { page_token: first.next_page_token, ..call };
            let next = usage.list_ems(next).await.unwrap().into_inner();
            assert!(next.ems.len() == 1 && next.next_page_token.is_empty(), "{filter:?}: {next:?}");
        }
    }
    // In an order of their state, the only EM that needs a person is the first.
    let urgent = proto::ListEmsRequest { order: proto::EmOrder::Urgent.into(), page_size: 1, ..all.clone() };
    let page = usage.list_ems(urgent).await.unwrap().into_inner();
    assert_eq!(page.ems[0].em.as_ref().unwrap().instance, "last");
    // No EM matches, and a page examines a bounded number of EMs.
    let nowhere =
        proto::ListEmsRequest { order: proto::EmOrder::Fullest.into(), labels: pairs([("zone", "0")]), ..all.clone() };
    let first = usage.list_ems(nowhere.clone()).await.unwrap().into_inner();
    assert!(first.ems.is_empty() && !first.next_page_token.is_empty(), "{first:?}");
    let next = proto::ListEmsRequest { page_token: first.next_page_token, ..nowhere };
    let next = usage.list_ems(next).await.unwrap().into_inner();
    assert!(next.ems.is_empty() && next.next_page_token.is_empty(), "{next:?}");
    // A page is full if every row matches.
    let healthy = proto::ListEmsRequest { health: proto::Health::Healthy.into(), silent: Some(false), ..all };
    let (mut found, mut call) = (0, proto::ListEmsRequest { page_size: 700, ..healthy });
    loop {
        let page = usage.list_ems(call.clone()).await.unwrap().into_inner();
        found += page.ems.len();
        call.page_token = page.next_page_token;
        if call.page_token.is_empty() {
            break;
        }
        assert_eq!(page.ems.len(), 700);
    }
    assert_eq!(found, 6000);
    rm.stop().await;
}

/// A limit on these labels, with a value or each.
fn rule(of: &[(&str, Option<&str>)], instances: i64) -> Rule {
    let pattern = of.iter().map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned))).collect();
    Rule {
        pattern: LabelPattern::new(pattern),
        mode: Default::default(),
        max: [(Dimension::Instances, instances)].into(),
        guarantee: Default::default(),
    }
}

/// The labels of all scopes that match, in order, and whether there may be more.
async fn scopes(usage: &mut Usage, filter: proto::ListScopesRequest) -> (Vec<String>, proto::ListScopesResponse) {
    let (mut names, mut page_token) = (Vec::new(), String::new());
    loop {
        let page_size = if filter.fullest_first || filter.over_limit_only { filter.page_size } else { 1 };
        let call = proto::ListScopesRequest { page_size, page_token, ..filter.clone() };
        let page = usage.list_scopes(call).await.unwrap().into_inner();
        let name = |scope: &proto::ScopeUsage| scope.labels.values().cloned().collect::<Vec<_>>().join("/");
        names.extend(page.scopes.iter().map(name));
        page_token = page.next_page_token.clone();
        if page_token.is_empty() {
            return (names, page);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_scopes_filters_and_sorts_by_fullness() {
    let em1 = em("host1");
    let (_database, rm) = start_with_em(em1.clone(), load(1000, 1000, 1000)).await;
    rm.client.set_limit(&rule(&[("user", None)], 10)).await.unwrap();
    rm.client.set_limit(&rule(&[("user", None), ("creator", None)], 100)).await.unwrap();
    rm.client.set_limit(&rule(&[("engine_type", None)], 1000)).await.unwrap();
    rm.client.set_limit(&rule(&[("team", None)], 4)).await.unwrap();
    for (user, creator, team, times) in
        [("alice", "IDE", "blue", 1), ("bob", "IDE", "red", 4), ("carol", "Schedulis", "blue", 2)]
    {
        for _ in 0..times {
            let labels = labels([("team", team)]);
            let asked = ResourceRequest { creator: name(creator), labels, ..request(&em1, user, load(1, 1, 1)) };
            rm.client.request_resource(&asked).await.granted();
        }
    }
    // Below the use.
    rm.client.set_limit(&rule(&[("user", Some("bob"))], 2)).await.unwrap();
    let mut usage = usage(&rm).await;
    let all = proto::ListScopesRequest::default();
    for (labels, found) in [
        (pairs([("user", "bob")]), "IDE/bob bob"),
        (pairs([("user", "bob"), ("creator", "IDE")]), "IDE/bob"),
        (pairs([("user", "bob"), ("creator", "nobody")]), ""),
        (pairs([("creator", "IDE")]), "IDE/alice IDE/bob"),
        (pairs([("engine_type", "spark-3.2.1")]), "spark-3.2.1"),
        (pairs([("team", "blue")]), "blue"),
        (pairs([("team", "green")]), ""),
        (pairs([("nobody", "knows")]), ""),
    ] {
        let call = proto::ListScopesRequest { labels: labels.clone(), ..all.clone() };
        let mut names = scopes(&mut usage, call).await.0;
        names.sort();
        assert_eq!(names.join(" "), found, "{labels:?}");
    }
    assert_eq!(scopes(&mut usage, all.clone()).await.0.len(), 3 + 3 + 1 + 2);

    // The list is computed in the background; a lookup for a user is immediate.
    let of_bob = proto::ListScopesRequest { labels: pairs([("user", "bob")]), fullest_first: true, ..all.clone() };
    let (names, answer) = scopes(&mut usage, of_bob).await;
    assert_eq!((names.join(" "), answer.partial, answer.renew_time), ("bob IDE/bob".into(), false, None));
    assert_eq!((answer.scopes[0].fullness, answer.scopes[1].fullness), (2.0, 0.04));
    let fullest = proto::ListScopesRequest { fullest_first: true, ..all.clone() };
    let listed =
        || async { scopes(&mut usage.clone(), fullest.clone()).await.0.first().is_some_and(|name| name == "bob") };
    eventually("the list is there", Duration::from_secs(60), listed).await;
    let whole = || async { scopes(&mut usage.clone(), fullest.clone()).await.0.len() == 9 };
    eventually("all are in the list", Duration::from_secs(60), whole).await;
    let (names, answer) = scopes(&mut usage, fullest.clone()).await;
    assert_eq!(names[..4], ["bob", "red", "blue", "carol"], "200, 100, 75 and 20 percent");
    assert!(!answer.partial && answer.renew_time.is_some());
    let of_ide = proto::ListScopesRequest { labels: pairs([("creator", "IDE")]), ..fullest.clone() };
    assert_eq!(scopes(&mut usage, of_ide).await.0, ["IDE/bob", "IDE/alice"]);
    let over = proto::ListScopesRequest { over_limit_only: true, ..all.clone() };
    let (names, answer) = scopes(&mut usage, over).await;
    assert!(names == ["bob"] && answer.scopes[0].over_limit && !answer.partial, "{answer:?}");
    let two = proto::ListScopesRequest { page_size: 2, ..fullest.clone() };
    let (names, answer) = scopes(&mut usage, two).await;
    assert!(names == ["bob", "red"] && answer.partial, "there are more than the page has: {answer:?}");
    let overview = rm.client.overview().await.unwrap().scopes.unwrap();
    assert_eq!((overview.scopes, overview.over_limit, overview.fullest.len()), (9, 1, 9));

    let token = proto::ListScopesRequest { page_token: "x".into(), ..fullest };
    names_the_field(&usage.list_scopes(token).await.unwrap_err(), "page_token");
    let many = (0..9).map(|n| (n.to_string(), String::new())).collect();
    let wrong = proto::ListScopesRequest { labels: many, ..all };
    names_the_field(&usage.list_scopes(wrong).await.unwrap_err(), "labels");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_waiting_filters_by_user_em_and_scope() {
    let (_database, rm) = start().await;
    rm.client.set_limit(&each_user(3)).await.unwrap();
    let (full, roomy) = (em("full"), em("roomy"));
    rm.client.register(registration(full.clone(), load(10, 10, 10))).await.unwrap();
    rm.client.register(registration(roomy.clone(), load(100, 100, 100))).await.unwrap();
    rm.client.request_resource(&request(&full, "hadoop", load(10, 10, 3))).await.granted();
    let mut calls = Vec::new();
    // The user hadoop is at its limit, and the EM is full.
    for (em, user) in [(&full, "alice"), (&roomy, "hadoop"), (&full, "bob"), (&full, "hadoop")] {
        calls.push(enqueue(&rm.client, patient(em, user, load(1, 1, 1))).await);
    }
    let mut usage = usage(&rm).await;
    let listed = usage.list_waiting(proto::ListWaitingRequest::default()).await.unwrap().into_inner().waiting;
    let entry = |number: usize| (listed[number].entries[0].scope.clone(), listed[number].entries[0].ahead);
    assert_eq!([entry(0), entry(2)], [(format!("em={full}"), 0), (format!("em={full}"), 1)]);
    let all = proto::ListWaitingRequest::default();
    let (on_full, of_hadoop) = (em_message(&full), pairs([("user", "hadoop")]));
    for (filter, found) in [
        (all.clone(), "alice hadoop bob hadoop"),
        (proto::ListWaitingRequest { user: "hadoop".into(), ..all.clone() }, "hadoop hadoop"),
        (proto::ListWaitingRequest { user: "nobody".into(), ..all.clone() }, ""),
        (proto::ListWaitingRequest { em: on_full.clone(), ..all.clone() }, "alice bob hadoop"),
        (proto::ListWaitingRequest { em: em_message(&roomy), ..all.clone() }, ""),
        (proto::ListWaitingRequest { scope: of_hadoop.clone(), ..all.clone() }, "hadoop hadoop"),
        (proto::ListWaitingRequest { em: on_full.clone(), scope: of_hadoop.clone(), ..all.clone() }, "hadoop"),
        (proto::ListWaitingRequest { em: on_full.clone(), user: "bob".into(), ..all.clone() }, "bob"),
        (proto::ListWaitingRequest { user: "bob".into(), scope: of_hadoop, ..all.clone() }, ""),
    ] {
        let (mut users, mut page_token) = (Vec::new(), String::new());
        loop {
            let call = proto::ListWaitingRequest { page_size: 1, page_token, ..filter.clone() };
            let page = usage.list_waiting(call).await.unwrap().into_inner();
            users.extend(page.waiting.into_iter().map(|waiting| waiting.user));
            page_token = page.next_page_token;
            if page_token.is_empty() {
                break;
            }
        }
        assert_eq!(users.join(" "), found, "{filter:?}");
    }
    let wrong = proto::ListWaitingRequest { em: Some(proto::EmInstance::default()), ..all };
    names_the_field(&usage.list_waiting(wrong).await.unwrap_err(), "em.application_name");
    calls.iter().for_each(tokio::task::JoinHandle::abort);
}

/// Actions with their EM or ticket, of all pages.
async fn lines(usage: &mut Usage, filter: &proto::ListActionsRequest) -> Vec<String> {
    let (mut lines, mut page_token) = (Vec::new(), String::new());
    loop {
        let call = proto::ListActionsRequest { page_size: 2, page_token, ..filter.clone() };
        let page = usage.list_actions(call).await.unwrap().into_inner();
        assert!(page.actions.len() <= 2 && page.follow_token.is_empty() == filter.newest_first);
        lines.extend(page.actions.into_iter().map(|line| format!("{}:{}", line.action, line.user)));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return lines;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_actions_filters_by_every_field() {
    let (database, rm) = start().await;
    register_all(&rm.client, ["host1", "host2"], load(10, 10, 10)).await;
    let mut tickets = Vec::new();
    for (host, user) in [("host1", "alice"), ("host2", "bob"), ("host1", "bob")] {
        let grant = rm.client.request_resource(&request(&em(host), user, load(1, 1, 1))).await.granted();
        tickets.push((grant, user));
    }
    rm.client.resource_released(&release(&tickets[1].0, "bob")).await.unwrap();
    // Earlier lines are older, among unrelated lines.
    for statement in [
        "UPDATE linkis_resource_action_record SET action_time = action_time - interval '45 minutes'",
        "INSERT INTO linkis_resource_action_record (action, em_application_name, em_instance, resource_type, resource, actor,
            action_time)
        SELECT 'registered', 'other', 'other' || n, 'CPU', '{\"cores\":1}', 'somebody', now() - interval '30 minutes'
        FROM generate_series(1, 3000) n",
    ] {
        database.execute(statement).await;
    }
    rm.client.drain(&em("host2"), "a disk").await.unwrap();
    rm.client.resource_released(&release(&tickets[0].0, "alice")).await.unwrap();
    let mut usage = usage(&rm).await;
    let ago = |minutes: i64| {
        let seconds = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
        Some(prost_types::Timestamp { seconds: i64::try_from(seconds).unwrap() - minutes * 60, nanos: 0 })
    };
    let all = proto::ListActionsRequest::default();
    let (first, second) = (tickets[0].0.ticket_id.to_string(), em_message(&em("host2")));
    for (filter, found) in [
        (proto::ListActionsRequest { ticket_id: first.clone(), ..all.clone() }, "granted:alice released:alice"),
        (proto::ListActionsRequest { user: "bob".into(), ..all.clone() }, "granted:bob granted:bob released:bob"),
        (proto::ListActionsRequest { user: "nobody".into(), ..all.clone() }, ""),
        (
            proto::ListActionsRequest { em: second.clone(), ..all.clone() },
            "registered: granted:bob released:bob drained:",
        ),
        (
            proto::ListActionsRequest { actions: vec!["released".into(), "drained".into()], ..all.clone() },
            "released:bob drained: released:alice",
        ),
        (
            proto::ListActionsRequest { actor: "anonymous".into(), from_time: ago(10), ..all.clone() },
            "drained: released:alice",
        ),
        (proto::ListActionsRequest { from_time: ago(10), ..all.clone() }, "drained: released:alice"),
        (
            proto::ListActionsRequest { to_time: ago(40), ..all.clone() },
            "registered: registered: granted:alice granted:bob granted:bob released:bob",
        ),
        (proto::ListActionsRequest { from_time: ago(40), to_time: ago(35), ..all.clone() }, ""),
        (proto::ListActionsRequest { from_time: ago(10), to_time: ago(40), ..all.clone() }, ""),
        (
            proto::ListActionsRequest { ticket_id: first, actions: vec!["granted".into()], ..all.clone() },
            "granted:alice",
        ),
        (
            proto::ListActionsRequest {
                user: "bob".into(),
                em: second,
                actions: vec!["granted".into()],
                ..all.clone()
            },
            "granted:bob",
        ),
    ] {
        let found: Vec<&str> = found.split_whitespace().collect();
        assert_eq!(lines(&mut usage, &filter).await, found, "{filter:?}");
        let newest = proto::ListActionsRequest { newest_first: true, ..filter };
        let reversed: Vec<&str> = found.into_iter().rev().collect();
        assert_eq!(lines(&mut usage, &newest).await, reversed, "{newest:?}");
    }
    let newest = proto::ListActionsRequest { newest_first: true, page_size: 2, ..all.clone() };
    let page = usage.list_actions(newest).await.unwrap().into_inner();
    let last: Vec<_> = page.actions.iter().map(|line| line.action.as_str()).collect();
    assert_eq!(last, ["released", "drained"]);

    // A follower with a filter continues from its position.
    let of_bob = proto::ListActionsRequest { user: "bob".into(), ..all.clone() };
    let page = usage.list_actions(of_bob.clone()).await.unwrap().into_inner();
    rm.client.resource_released(&release(&tickets[2].0, "bob")).await.unwrap();
    let next = proto::ListActionsRequest { page_token: page.follow_token, ..of_bob };
    let page = usage.list_actions(next).await.unwrap().into_inner();
    assert_eq!(page.actions.len(), 1);
    assert_eq!(page.actions[0].action, "released");

    let out = Some(prost_types::Timestamp { seconds: i64::MAX, nanos: 0 });
    for (wrong, field) in [
        (proto::ListActionsRequest { actions: vec!["granted".into(), "nothing".into()], ..all.clone() }, "actions[1]"),
        (proto::ListActionsRequest { actions: vec!["granted".into(); 100], ..all.clone() }, "actions"),
        (proto::ListActionsRequest { from_time: out, ..all.clone() }, "from_time"),
    ] {
        names_the_field(&usage.list_actions(wrong).await.unwrap_err(), field);
    }
}

/// A page reads a bounded number of lines, independent of the length of the history, and the next page continues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_actions_page_of_rare_lines_is_bounded() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(10, 10, 10)).await;
    rm.client.request_resource(&request(&em1, "rare", load(1, 1, 1))).await.granted();
    let many = "INSERT INTO linkis_resource_action_record (action, em_application_name, em_instance, resource_type, resource, actor,
            action_time)
        SELECT 'registered', 'other', 'other', 'CPU', '{\"cores\":1}', 'somebody', now() FROM generate_series(1, 12000)";
    database.execute(many).await;
    rm.client.request_resource(&request(&em1, "rare", load(1, 1, 1))).await.granted();
    let mut usage = usage(&rm).await;
    for newest_first in [false, true] {
        let (mut found, mut pages, mut page_token) = (0, 0, String::new());
        loop {
            let call =
                proto::ListActionsRequest { user: "rare".into(), newest_first, page_token, ..Default::default() };
            let page = usage.list_actions(call).await.unwrap().into_inner();
            (found, pages, page_token) = (found + page.actions.len(), pages + 1, page.next_page_token);
            if page_token.is_empty() {
                break;
            }
        }
        assert_eq!((found, pages), (2, 5), "{newest_first}");
    }
    // The command continues until it has the requested lines, or has read all.
    for (words, lines) in [
        (&["--user", "rare"][..], 2),
        (&["--user", "rare", "--newest", "--limit", "2"], 2),
        (&["--actor", "nobody"], 0),
    ] {
        let words = [&["history", "--no-headers"], words].concat();
        let output = program(&rm.address, &words).output().unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        assert_eq!((output.status.code(), printed.lines().count()), (Some(0), lines), "{words:?}");
    }
}

/// Past partitions are searched by an index; the current partition is read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_actions_of_past_partitions_uses_indexes() {
    let database = Database::fresh().await;
    let history = Duration::from_secs(10 * 24 * 3600);
    let rm = Instance::start_with(&database, settings().with_time("--history", history)).await;
    let mut connection = database.connect().await;
    let hour = "extract(epoch FROM date_trunc('hour', now()))::bigint";
    for (days, others) in [(5, 60_000), (4, 60_000), (0, 1000)] {
        let lines = format!(
            r#"SELECT linkis_rm_make_history_part({hour} - {days} * 86400, {hour} - {days} * 86400 + 3600) WHERE {days} > 0;
            INSERT INTO linkis_resource_action_record (action, em_application_name, em_instance, resource_type, resource, actor,
                action_time)
            SELECT 'registered', 'other', 'other', 'CPU', '{{"cores":1}}', 'somebody',
                date_trunc('hour', now()) - interval '{days} days' FROM generate_series(1, {others});
            INSERT INTO linkis_resource_action_record (action, ticket_id, "user", creator, engine_type, labels, em_application_name,
                em_instance, resource_type, resource, actor, action_time)
            VALUES ('granted', gen_random_uuid(), 'rare', 'IDE', '', '{{}}', 'ecm', 'rarely', 'CPU', '{{"cores":1}}', 'seldom',
                date_trunc('hour', now()) - interval '{days} days')"#
        );
        execute(&mut connection, lines).await;
    }
    while history_partition::index_oldest(&mut connection).await.unwrap() {}
    let indexes = "SELECT count(*) FROM pg_indexes WHERE tablename ~ 'linkis_resource_action_record_[0-9]' AND indexname ~ '(user|em|actor)$'";
    assert_eq!(
        database.count(indexes).await,
        6,
        "the two past partitions have indexes; the present and the next one have none"
    );
    let mut usage = usage(&rm).await;
    let em = Some(proto::EmInstance { application_name: "ecm".into(), instance: "rarely".into() });
    let all = proto::ListActionsRequest::default();
    let of_user = proto::ListActionsRequest { user: "rare".into(), ..all.clone() };
    for filter in [
        of_user.clone(),
        proto::ListActionsRequest { em, ..all.clone() },
        proto::ListActionsRequest { actor: "seldom".into(), ..all },
        proto::ListActionsRequest { actions: vec!["granted".into()], actor: "seldom".into(), ..of_user.clone() },
    ] {
        for newest_first in [false, true] {
            let call = proto::ListActionsRequest { newest_first, ..filter.clone() };
            let page = usage.list_actions(call.clone()).await.unwrap().into_inner();
            let times: Vec<_> = page.actions.iter().map(|line| line.action_time.unwrap().seconds).collect();
            assert!(times.len() == 3 && page.next_page_token.is_empty(), "{call:?}: {} {:?}", times.len(), page);
            assert!(
                if newest_first { times.is_sorted_by(|one, next| one > next) } else { times.is_sorted() },
                "{times:?}"
            );
            // Pages of one line return each line once, without gaps.
            let (mut found, mut page_token) = (Vec::new(), String::new());
            loop {
                let one = proto::ListActionsRequest { page_size: 1, page_token, ..call.clone() };
                let page = usage.list_actions(one).await.unwrap().into_inner();
                found.extend(page.actions.iter().map(|line| line.action_time.unwrap().seconds));
                page_token = page.next_page_token;
                if page_token.is_empty() {
                    break;
                }
            }
            assert_eq!(found, times);
        }
    }
    let other = proto::ListActionsRequest { actions: vec!["released".into()], newest_first: true, ..of_user };
    let page = usage.list_actions(other).await.unwrap().into_inner();
    assert!(page.actions.is_empty() && page.next_page_token.is_empty(), "{page:?}");
}
