//! Callers that are bound to one EM or to some users.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ecm_token_authorizes_only_its_em() {
    let database = Database::fresh().await;
    let [token_a, token_b] = ["host1", "host2"].map(|host| token(&database, host, &["--role", "ecm", "--em", host]));
    let admin = token(&database, "admin", &["--role", "admin"]);
    let rm = Instance::start(&database).await;
    let channel = channel_to(&rm.address).await;
    let (mut a, mut b) = (rm_of(&channel, &token_a), rm_of(&channel, &token_b));
    let mut usage_a = usage_of(&channel, &token_a);
    a.register(register("host1")).await.unwrap();
    b.register(register("host2")).await.unwrap();
    let on_a = granted(a.request_resource(ask("host1", "alice", 1)).await.unwrap().into_inner());
    let on_b = granted(b.request_resource(ask("host2", "alice", 1)).await.unwrap().into_inner());

    let inited = |ticket: &str, host: &str| proto::ResourceInitedRequest {
        ticket_id: ticket.into(),
        user: "alice".into(),
        em: em_message(host),
        engine: Some(proto::EngineInstance { application_name: "e".into(), instance: format!("{host}:1") }),
        ..Default::default()
    };
    let released = |ticket: &str, em| proto::ResourceReleasedRequest {
        ticket_id: ticket.into(),
        user: "alice".into(),
        em,
        ..Default::default()
    };
    let beat =
        |host: &str| proto::HeartbeatRequest { em: em_message(host), epoch: 1, sequence: 1, ..Default::default() };
    let anywhere = proto::RequestResourceRequest { em: None, ..ask("host1", "alice", 1) };
    let denied = [
        a.register(register("host2")).await.unwrap_err(),
        a.unregister(proto::UnregisterRequest { em: em_message("host2"), ..Default::default() }).await.unwrap_err(),
        a.heartbeat(beat("host2")).await.unwrap_err(),
        a.request_resource(ask("host2", "alice", 1)).await.unwrap_err(),
        a.request_resource(anywhere).await.unwrap_err(),
        a.resource_inited(inited(&on_b, "host2")).await.unwrap_err(),
        a.resource_released(released(&on_b, em_message("host2"))).await.unwrap_err(),
        usage_a.get_em(proto::GetEmRequest { em: em_message("host2") }).await.unwrap_err(),
        usage_a
            .batch_get_ems(proto::BatchGetEmsRequest {
                ems: ["host1", "host2"].into_iter().filter_map(em_message).collect(),
            })
            .await
            .unwrap_err(),
    ];
    for (n, status) in denied.iter().enumerate() {
        assert_eq!(
            (status.code(), reason(status).as_str()),
            (Code::PermissionDenied, "ROLE_DENIED"),
            "{n}: {status:?}"
        );
        assert_eq!(fact(status, "role"), "ecm");
    }
    // The error does not reveal the EM of the ticket.
    let status =
        a.resource_released(proto::ResourceReleasedRequest { ticket_id: on_b.clone(), ..Default::default() }).await;
    let got = format!("{:?}", status.unwrap_err());
    assert!(got.contains("TICKET_NOT_FOUND") && !got.contains("host2") && !got.contains("alice"), "{got}");
    // A wrong EM of the ticket does not help.
    let status = a.resource_released(released(&on_b, em_message("host1"))).await.unwrap_err();
    assert_eq!(reason(&status), "TICKET_NOT_FOUND");

    usage_a.get_em(proto::GetEmRequest { em: em_message("host1") }).await.unwrap();
    a.resource_inited(inited(&on_a, "host1")).await.unwrap();
    a.resource_released(released(&on_a, None)).await.unwrap();
    b.unregister(proto::UnregisterRequest { em: em_message("host2"), ..Default::default() }).await.unwrap();

    // The history names the caller.
    let mut usage = usage_of(&channel, &admin);
    let lines = usage.list_actions(proto::ListActionsRequest::default()).await.unwrap().into_inner().actions;
    let by = lines.iter().map(|line| (line.action.as_str(), line.actor.as_str()));
    let by: Vec<_> = by.filter(|(action, _)| !action.starts_with("token_")).collect();
    assert_eq!(by[..2], [("registered", "host1"), ("registered", "host2")]);
    assert!(by.contains(&("released", "host1")) && by.contains(&("unregistered", "host2")), "{by:?}");
}

/// All replies to a caller, as text.
async fn everything(channel: &Channel, token: &str, tickets: &[String; 2], engine: proto::EngineInstance) -> String {
    let (mut usage, mut limits) = (usage_of(channel, token), LimitServiceClient::new(with(channel, token)));
    let mut got = String::new();
    let mut note = |what: &dyn std::fmt::Debug| got.push_str(&format!("{what:?}\n"));
    let (mut next, mut pages) = (String::new(), 0);
    loop {
        let call = proto::ListTicketsRequest { page_size: 2, page_token: next, ..Default::default() };
        let page = usage.list_tickets(call).await.unwrap().into_inner();
        note(&page);
        (next, pages) = (page.next_page_token, pages + 1);
        if next.is_empty() {
            break;
        }
    }
    note(&pages);
    for (em, user, engine) in [
        (em_message("host1"), "", None),
        (None, "bob", None),
        (em_message("host1"), "bob", None),
        (None, "", Some(engine.clone())),
    ] {
        let call = proto::ListTicketsRequest { em, user: user.into(), engine, ..Default::default() };
        note(&usage.list_tickets(call).await.unwrap().into_inner());
    }
    for ticket_id in tickets {
        let call = proto::GetTicketRequest { ticket_id: ticket_id.clone(), engine: None };
        note(&usage.get_ticket(call).await.map_err(|status| (reason(&status), status.get_details_error_info())));
        let call = proto::ListActionsRequest { ticket_id: ticket_id.clone(), ..Default::default() };
        note(&usage.list_actions(call).await.unwrap().into_inner().actions);
    }
    let call = proto::GetTicketRequest { ticket_id: String::new(), engine: Some(engine) };
    note(&usage.get_ticket(call).await.map_err(|status| reason(&status)));
    let call = proto::BatchGetTicketsRequest { ticket_ids: tickets.to_vec() };
    note(&usage.batch_get_tickets(call).await.unwrap().into_inner().tickets);
    let (mut next, mut lines) = (String::new(), 0);
    loop {
        let call = proto::ListScopesRequest { page_size: 1, page_token: next, ..Default::default() };
        let page = usage.list_scopes(call).await.unwrap().into_inner();
        (next, lines) = (page.next_page_token, lines + page.scopes.len());
        note(&page.scopes);
        if next.is_empty() {
            break;
        }
    }
    note(&lines);
    note(&usage.list_waiting(proto::ListWaitingRequest::default()).await.unwrap().into_inner());
    note(&usage.list_actions(proto::ListActionsRequest::default()).await.unwrap().into_inner().actions);
    for user in ["", "bob"] {
        let call = proto::ListRefusalsRequest { user: user.to_owned(), ..Default::default() };
        note(&usage.list_refusals(call).await.unwrap().into_inner());
        let call =
            proto::GetUsageRequest { by: proto::UsageBy::User.into(), user: user.to_owned(), ..Default::default() };
        note(&usage.get_usage(call).await.unwrap().into_inner());
        let labels: BTreeMap<String, String> =
            (!user.is_empty()).then(|| ("user".to_owned(), user.to_owned())).into_iter().collect();
        let (user, em) = (user.to_owned(), em_message("host1"));
        let call = proto::ListActionsRequest { newest_first: true, user: user.clone(), em, ..Default::default() };
        note(&usage.list_actions(call).await.unwrap().into_inner().actions);
        let call = proto::ListActionsRequest { user: user.clone(), ..Default::default() };
        note(&usage.list_actions(call).await.unwrap().into_inner().actions);
        let call = proto::ListWaitingRequest { user, em: em_message("host1"), ..Default::default() };
        note(&usage.list_waiting(call).await.unwrap().into_inner().waiting);
        for fullest_first in [false, true] {
            let call = proto::ListScopesRequest { labels: labels.clone(), fullest_first, ..Default::default() };
            note(&usage.list_scopes(call).await.unwrap().into_inner().scopes);
        }
    }
    let users = usage.list_users(proto::ListUsersRequest::default()).await.unwrap().into_inner();
    note(&(users, usage.get_overview(proto::GetOverviewRequest {}).await.unwrap().into_inner()));
    let mut watching = usage.watch(proto::WatchRequest {}).await.unwrap().into_inner();
    note(&watching.message().await.unwrap());
    note(&usage.list_instances(proto::ListInstancesRequest {}).await.unwrap().into_inner());
    note(&usage.list_tasks(proto::ListTasksRequest {}).await.unwrap().into_inner());
    note(&usage.list_ems(proto::ListEmsRequest::default()).await.unwrap().into_inner());
    let call = proto::ListLimitsRequest { page_size: 1, ..Default::default() };
    let page = limits.list_limits(call).await.unwrap().into_inner();
    let call = proto::ListLimitsRequest { page_token: page.next_page_token.clone(), ..Default::default() };
    note(&page);
    note(&limits.list_limits(call).await);
    got
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_scope_limits_requests_and_replies() {
    let database = Database::fresh().await;
    let admin = token(&database, "the boss", &["--role", "admin"]);
    let rights = |role| ["--role", role, "--user", "alice", "--user", "carol"];
    let [manager, viewer] = ["manager", "viewer"].map(|role| token(&database, role, &rights(role)));
    let one = token(&database, "one", &["--role", "viewer", "--user", "alice"]);
    let all = token(&database, "all", &["--role", "viewer"]);
    let rm = Instance::start(&database).await;
    let channel = channel_to(&rm.address).await;
    let (mut boss, mut limits) = (rm_of(&channel, &admin), LimitServiceClient::new(with(&channel, &admin)));
    boss.register(register("host1")).await.unwrap();
    for (labels, each) in [(None, Some("user")), (Some("bob"), None), (Some("alice"), None)] {
        let limit = proto::Limit {
            labels: labels.into_iter().map(|user: &str| ("user".to_owned(), user.to_owned())).collect(),
            each: each.into_iter().map(str::to_owned).collect(),
            max: [("instances".to_owned(), 9)].into(),
            ..Default::default()
        };
        limits.set_limit(proto::SetLimitRequest { limit: Some(limit), ..Default::default() }).await.unwrap();
    }
    let mut manager = rm_of(&channel, &manager);
    let of_alice = granted(manager.request_resource(ask("host1", "alice", 1)).await.unwrap().into_inner());
    let mut of_bob = Vec::new();
    for _ in 0..3 {
        of_bob.push(granted(boss.request_resource(ask("host1", "bob", 2)).await.unwrap().into_inner()));
    }
    let engine = proto::EngineInstance { application_name: "e".into(), instance: "bob-engine:1".into() };
    let inited = proto::ResourceInitedRequest {
        ticket_id: of_bob[0].clone(),
        user: "bob".into(),
        em: em_message("host1"),
        engine: Some(engine.clone()),
        ..Default::default()
    };
    boss.resource_inited(inited).await.unwrap();
    for user in ["alice", "bob"] {
        let ended = granted(boss.request_resource(ask("host1", user, 1)).await.unwrap().into_inner());
        let release = proto::ResourceReleasedRequest { ticket_id: ended, ..Default::default() };
        boss.resource_released(release).await.unwrap();
        boss.request_resource(ask("host1", user, 17)).await.unwrap();
    }
    let mut waiter = rm_of(&channel, &admin);
    let waiting = tokio::spawn(async move {
        let wait_timeout = Some(prost_types::Duration { seconds: 60, nanos: 0 });
        waiter.request_resource(proto::RequestResourceRequest { wait_timeout, ..ask("host1", "bob", 4) }).await
    });
    database.waiting(1).await;
    let sums = "SELECT (SELECT count(DISTINCT \"user\") FROM linkis_resource_refusal)
        + (SELECT count(DISTINCT name) FROM linkis_resource_usage_hour WHERE used_by = 'user')";
    eventually("sums of both users", LONG, async || database.count(sums).await == 4).await;
    let users = "SELECT count(*) FROM linkis_user_sum WHERE dimension = 'instances'";
    eventually("use of both users", LONG, async || database.count(users).await == 2).await;

    // A caller that is bound to alice sees the objects of alice, and none of bob.
    let tickets = [of_alice.clone(), of_bob[1].clone()];
    for token in [&viewer, &one] {
        let got = everything(&channel, token, &tickets, engine.clone()).await;
        for other in [&of_bob[0], &of_bob[2], "\"bob\"", "bob-engine:1"] {
            let lines: Vec<_> = got.lines().filter(|line| line.contains(other)).collect();
            assert!(lines.is_empty(), "{other}: {lines:#?}");
        }
        assert!(got.contains(&of_alice) && got.contains("\"alice\""), "{got}");
    }
    let got = everything(&channel, &all, &tickets, engine).await;
    assert!(got.contains("\"bob\"") && got.contains("bob-engine:1"), "a caller without a scope sees all: {got}");

    let by_em = proto::GetUsageRequest { by: proto::UsageBy::Em.into(), ..Default::default() };
    let status = usage_of(&channel, &one).get_usage(by_em).await.unwrap_err();
    assert!(status.code() == Code::InvalidArgument && status.message().contains("bound to users"), "{status:?}");

    // A manager requests for its users, and for no others.
    let released = |ticket: &str, user: &str| proto::ResourceReleasedRequest {
        ticket_id: ticket.into(),
        user: user.into(),
        em: em_message("host1"),
        ..Default::default()
    };
    let dry = proto::RequestResourceRequest { dry_run: true, ..ask("host1", "bob", 1) };
    for status in [
        manager.request_resource(ask("host1", "bob", 1)).await.unwrap_err(),
        manager.request_resource(dry).await.unwrap_err(),
        manager.resource_released(released(&of_bob[0], "bob")).await.unwrap_err(),
    ] {
        assert_eq!((status.code(), reason(&status).as_str()), (Code::PermissionDenied, "ROLE_DENIED"), "{status:?}");
    }
    let status = manager.resource_released(released(&of_bob[0], "alice")).await.unwrap_err();
    assert_eq!(reason(&status), "TICKET_NOT_FOUND");
    manager.resource_released(released(&of_alice, "alice")).await.unwrap();
    waiting.abort();
}

/// A live, an ended and an unknown ticket of another owner return the same error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ticket_of_another_owner_is_not_found() {
    let database = Database::fresh().await;
    let admin = token(&database, "admin", &["--role", "admin"]);
    let manager = token(&database, "manager", &["--role", "manager", "--user", "alice"]);
    let ecm = token(&database, "ecm", &["--role", "ecm", "--em", "host2"]);
    let rm = Instance::start(&database).await;
    let channel = channel_to(&rm.address).await;
    let mut boss = rm_of(&channel, &admin);
    boss.register(register("host1")).await.unwrap();
    boss.register(register("host2")).await.unwrap();
    let living = granted(boss.request_resource(ask("host1", "bob", 1)).await.unwrap().into_inner());
    let ended = granted(boss.request_resource(ask("host1", "bob", 1)).await.unwrap().into_inner());
    let all = |ticket: &str| proto::ResourceReleasedRequest { ticket_id: ticket.into(), ..Default::default() };
    boss.resource_released(all(&ended)).await.unwrap();
    let tickets = [living.clone(), ended, uuid::Uuid::now_v7().to_string()];
    let engine = || Some(proto::EngineInstance { application_name: "e".into(), instance: "e:1".into() });
    for (token, host, users) in
        [(&manager, "host1", ["alice", ""]), (&ecm, "host2", ["bob", "alice"]), (&ecm, "host2", ["", ""])]
    {
        let mut caller = rm_of(&channel, token);
        let mut got: Vec<Vec<String>> = Vec::new();
        for ticket in &tickets {
            let mut answers = Vec::new();
            for user in users {
                for em in [em_message(host), None] {
                    let call = proto::ResourceReleasedRequest { user: user.into(), em, ..all(ticket) };
                    answers.push(caller.resource_released(call).await.unwrap_err());
                }
            }
            let user = if users[0].is_empty() { "carol" } else { users[0] };
            let inited = proto::ResourceInitedRequest {
                ticket_id: ticket.clone(),
                user: user.into(),
                em: em_message(host),
                engine: engine(),
                ..Default::default()
            };
            answers.push(caller.resource_inited(inited).await.unwrap_err());
            let reported = proto::ResourceReportedRequest {
                ticket_id: ticket.clone(),
                user: user.into(),
                em: em_message(host),
                used: amount(1),
                ..Default::default()
            };
            answers.push(caller.resource_reported(reported).await.unwrap_err());
            for status in &answers {
                assert_eq!(
                    (status.code(), reason(status).as_str()),
                    (Code::NotFound, "TICKET_NOT_FOUND"),
                    "{status:?}"
                );
            }
            let shown = answers.iter().map(|status| {
                let facts = BTreeMap::from_iter(status.get_details_error_info().unwrap().metadata);
                format!("{} {facts:?}", status.message()).replace(ticket, "TICKET")
            });
            got.push(shown.collect());
        }
        assert!(got.iter().all(|answers| *answers == got[0]), "{got:#?}");
    }
    // A report reveals no more.
    let mut ecm = rm_of(&channel, &ecm);
    let epoch = ecm.register(register("host2")).await.unwrap().into_inner().em.unwrap().epoch;
    let ticket_ids = tickets.iter().flat_map(|id| id.parse::<uuid::Uuid>().unwrap().into_bytes()).collect();
    let beat =
        proto::HeartbeatRequest { em: em_message("host2"), epoch, sequence: 1, ticket_ids, ..Default::default() };
    let unknown = ecm.heartbeat(beat).await.unwrap().into_inner().unknown_tickets;
    let reasons: BTreeSet<_> = unknown.iter().map(|ticket| ticket.reason.as_str()).collect();
    assert_eq!((unknown.len(), reasons.len()), (3, 1), "{unknown:?}");
    boss.resource_released(all(&living)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_of_others_are_hidden_from_bound_callers() {
    let database = Database::fresh().await;
    let admin = token(&database, "admin", &["--role", "admin"]);
    let manager = token(&database, "manager", &["--role", "manager", "--user", "alice"]);
    let ecm = token(&database, "ecm", &["--role", "ecm", "--em", "host1"]);
    let rm = Instance::start(&database).await;
    let channel = channel_to(&rm.address).await;
    let (mut boss, mut limits) = (rm_of(&channel, &admin), LimitServiceClient::new(with(&channel, &admin)));
    boss.register(register("host1")).await.unwrap();
    for each in [vec!["user"], vec!["creator"], vec!["creator", "user"]] {
        let each = each.into_iter().map(str::to_owned).collect();
        let limit = proto::Limit { each, max: [("instances".to_owned(), 9)].into(), ..Default::default() };
        limits.set_limit(proto::SetLimitRequest { limit: Some(limit), ..Default::default() }).await.unwrap();
    }
    granted(boss.request_resource(ask("host1", "bob", 3)).await.unwrap().into_inner());
    for (token, own) in [(&admin, 3), (&manager, 2), (&ecm, 0)] {
        let mut caller = rm_of(&channel, token);
        let asks = proto::RequestResourceRequest { return_counters: true, ..ask("host1", "alice", 1) };
        let available = |answer: proto::RequestResourceResponse| match answer.result {
            Some(proto::request_resource_response::Result::Available(available)) => available,
            other => panic!("{other:?}"),
        };
        let dry = proto::RequestResourceRequest { dry_run: true, ..asks.clone() };
        let rooms = available(caller.request_resource(dry).await.unwrap().into_inner()).head_room;
        let of_scopes = rooms.iter().filter(|room| !room.scope.starts_with("em="));
        assert_eq!(of_scopes.count(), own, "{rooms:?}");
        let granted = available(caller.request_resource(asks).await.unwrap().into_inner());
        let of_grant = granted.counters.unwrap();
        let released = proto::ResourceReleasedRequest {
            ticket_id: granted.ticket_id,
            return_counters: true,
            ..Default::default()
        };
        let of_release = caller.resource_released(released).await.unwrap().into_inner().counters.unwrap();
        for counters in [*of_grant, of_release] {
            assert!(counters.em.is_some());
            assert_eq!(counters.scopes.len(), own, "{:?}", counters.scopes);
            let is_own =
                |scope: &proto::ScopeUsage| own == 3 || scope.labels.get("user").map(String::as_str) == Some("alice");
            assert!(counters.scopes.iter().all(is_own), "{:?}", counters.scopes);
        }
    }
}

/// The arguments of a documented `tokens` command.
fn token_commands(document: &str) -> Vec<Vec<String>> {
    let typed = document.split("linkis-rm token create ").skip(1).filter_map(|rest| rest.split(['\n', '`']).next());
    typed.map(|line| line.split_whitespace().map(|word| word.trim_matches('\'').to_owned()).collect()).collect()
}

/// LinkisManager's calls, with the tokens that the documents make for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documented_roles_of_linkis_manager_suffice() {
    let documents = [include_str!("../../../docs/SECURITY.md"), include_str!("../../../clients/java/README.md")];
    for document in documents {
        let words = token_commands(document).into_iter().find(|words| words.iter().any(|word| word.contains("linkis")));
        let words = words.expect("a document makes a token for LinkisManager");
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let database = Database::fresh().await;
        let created = tokens(&database, &[&["create"], words.as_slice()].concat());
        let rm = Instance::start(&database).await;
        let channel = channel_to(&rm.address).await;
        let token = created.trim_end().to_owned();
        let mut manager = rm_of(&channel, &token);
        let epoch = manager.register(register("host1")).await.unwrap().into_inner().em.unwrap().epoch;
        let cap = |labels: &[&str]| proto::Cap {
            labels: labels.iter().map(|label| (*label).to_owned()).collect(),
            max: [("instances".to_owned(), 9)].into(),
        };
        let caps = vec![cap(&["user", "creator", "engine_type"]), cap(&["user", "creator"])];
        let asks = proto::RequestResourceRequest { caps, engine_type: "spark-3.2.1".into(), ..ask("host1", "bob", 1) };
        let dry = proto::RequestResourceRequest { dry_run: true, ..asks.clone() };
        manager.request_resource(dry).await.unwrap();
        let ticket_id = granted(manager.request_resource(asks).await.unwrap().into_inner());
        let engine = Some(proto::EngineInstance { application_name: "e".into(), instance: "host1:1".into() });
        let inited = proto::ResourceInitedRequest {
            ticket_id: ticket_id.clone(),
            user: "bob".into(),
            em: em_message("host1"),
            engine,
            ..Default::default()
        };
        manager.resource_inited(inited).await.unwrap();
        let beat = proto::HeartbeatRequest { em: em_message("host1"), epoch, sequence: 1, ..Default::default() };
        manager.heartbeat(beat).await.unwrap();
        let mut operator = proto::admin_service_client::AdminServiceClient::new(with(&channel, &token));
        let duration = Some(prost_types::Duration { seconds: 60, nanos: 0 });
        let hold =
            proto::HoldRequest { em: em_message("host1"), reason: "a reset".into(), duration, ..Default::default() };
        operator.hold(hold).await.unwrap();
        let release = proto::ReleaseHoldRequest { em: em_message("host1"), ..Default::default() };
        operator.release_hold(release).await.unwrap();
        operator.repair(proto::RepairRequest { em: em_message("host1"), ..Default::default() }).await.unwrap();
        let scope = [("user", "bob"), ("creator", "IDE"), ("engine_type", "spark-3.2.1")];
        let scope = scope.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        operator.repair(proto::RepairRequest { scope, ..Default::default() }).await.unwrap();
        let status = operator.repair(proto::RepairRequest::default()).await.unwrap_err();
        assert_eq!((status.code(), reason(&status).as_str()), (Code::PermissionDenied, "ROLE_DENIED"));
        assert!(status.message().contains("the role admin"), "{status:?}");
        let mut usage = usage_of(&channel, &token);
        usage.list_scopes(proto::ListScopesRequest::default()).await.unwrap();
        usage.list_ems(proto::ListEmsRequest::default()).await.unwrap();
        manager.resource_released(proto::ResourceReleasedRequest { ticket_id, ..Default::default() }).await.unwrap();
        manager.unregister(proto::UnregisterRequest { em: em_message("host1"), ..Default::default() }).await.unwrap();
    }
}

/// A label set costs each ticket some work, so only a caller without bound users can add one by a cap.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn caps_of_bound_caller_need_counted_label_set() {
    let database = Database::fresh().await;
    let admin = token(&database, "admin", &["--role", "admin"]);
    let bound = token(&database, "bound", &["--role", "manager", "--user", "alice"]);
    let free = token(&database, "free", &["--role", "manager"]);
    let rm = Instance::start(&database).await;
    let channel = channel_to(&rm.address).await;
    rm_of(&channel, &admin).register(register("host1")).await.unwrap();
    let caps = vec![proto::Cap { labels: vec!["user".into()], max: [("instances".to_owned(), 9)].into() }];
    let asks = proto::RequestResourceRequest { caps, ..ask("host1", "alice", 1) };
    let mut bound = rm_of(&channel, &bound);
    let status = bound.request_resource(asks.clone()).await.unwrap_err();
    assert_eq!(reason(&status), "CAP_NOT_COUNTED");
    granted(rm_of(&channel, &free).request_resource(asks.clone()).await.unwrap().into_inner());
    granted(bound.request_resource(asks).await.unwrap().into_inner());
}
