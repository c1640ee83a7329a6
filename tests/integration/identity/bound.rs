//! Callers who speak for one host, or for some users, alone.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ecm_speaks_for_its_own_host_alone() {
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
        a.resource_released(released(&on_b, None)).await.unwrap_err(),
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
    // Not even where the ticket is.
    let status =
        a.resource_released(proto::ResourceReleasedRequest { ticket_id: on_b.clone(), ..Default::default() }).await;
    let told = format!("{:?}", status.unwrap_err());
    assert!(told.contains("ROLE_DENIED") && !told.contains("host2") && !told.contains("alice"), "{told}");
    // One that lies about where the ticket is gets no further.
    let status = a.resource_released(released(&on_b, em_message("host1"))).await.unwrap_err();
    assert_eq!(reason(&status), "TICKET_NOT_OWNED");

    usage_a.get_em(proto::GetEmRequest { em: em_message("host1") }).await.unwrap();
    a.resource_inited(inited(&on_a, "host1")).await.unwrap();
    a.resource_released(released(&on_a, None)).await.unwrap();
    b.unregister(proto::UnregisterRequest { em: em_message("host2"), ..Default::default() }).await.unwrap();

    // The history says who it was.
    let mut usage = usage_of(&channel, &admin);
    let lines = usage.list_actions(proto::ListActionsRequest::default()).await.unwrap().into_inner().actions;
    let by = lines.iter().map(|line| (line.action.as_str(), line.actor.as_str()));
    let by: Vec<_> = by.filter(|(action, _)| !action.starts_with("token_")).collect();
    assert_eq!(by[..2], [("registered", "host1"), ("registered", "host2")]);
    assert!(by.contains(&("released", "host1")) && by.contains(&("unregistered", "host2")), "{by:?}");
}

/// Everything that a caller is told, as text.
async fn everything(channel: &Channel, token: &str, tickets: &[String; 2], engine: proto::EngineInstance) -> String {
    let (mut usage, mut limits) = (usage_of(channel, token), LimitServiceClient::new(with(channel, token)));
    let mut told = String::new();
    let mut tell = |what: &dyn std::fmt::Debug| told.push_str(&format!("{what:?}\n"));
    let (mut next, mut pages) = (String::new(), 0);
    loop {
        let call = proto::ListTicketsRequest { page_size: 2, page_token: next, ..Default::default() };
        let page = usage.list_tickets(call).await.unwrap().into_inner();
        tell(&page);
        (next, pages) = (page.next_page_token, pages + 1);
        if next.is_empty() {
            break;
        }
    }
    tell(&pages);
    for (em, user, engine) in [
        (em_message("host1"), "", None),
        (None, "bob", None),
        (em_message("host1"), "bob", None),
        (None, "", Some(engine.clone())),
    ] {
        let call = proto::ListTicketsRequest { em, user: user.into(), engine, ..Default::default() };
        tell(&usage.list_tickets(call).await.unwrap().into_inner());
    }
    for ticket_id in tickets {
        let call = proto::GetTicketRequest { ticket_id: ticket_id.clone(), engine: None };
        tell(&usage.get_ticket(call).await.map_err(|status| (reason(&status), status.get_details_error_info())));
        let call = proto::ListActionsRequest { ticket_id: ticket_id.clone(), ..Default::default() };
        tell(&usage.list_actions(call).await.unwrap().into_inner().actions);
    }
    let call = proto::GetTicketRequest { ticket_id: String::new(), engine: Some(engine) };
    tell(&usage.get_ticket(call).await.map_err(|status| reason(&status)));
    let call = proto::BatchGetTicketsRequest { ticket_ids: tickets.to_vec() };
    tell(&usage.batch_get_tickets(call).await.unwrap().into_inner().tickets);
    let (mut next, mut lines) = (String::new(), 0);
    loop {
        let call = proto::ListScopesRequest { page_size: 1, page_token: next, ..Default::default() };
        let page = usage.list_scopes(call).await.unwrap().into_inner();
        (next, lines) = (page.next_page_token, lines + page.scopes.len());
        tell(&page.scopes);
        if next.is_empty() {
            break;
        }
    }
    tell(&lines);
    tell(&usage.list_waiting(proto::ListWaitingRequest::default()).await.unwrap().into_inner());
    tell(&usage.list_actions(proto::ListActionsRequest::default()).await.unwrap().into_inner().actions);
    for user in ["", "bob"] {
        let labels: BTreeMap<String, String> =
            (!user.is_empty()).then(|| ("user".to_owned(), user.to_owned())).into_iter().collect();
        let (user, em) = (user.to_owned(), em_message("host1"));
        let call = proto::ListActionsRequest { newest_first: true, user: user.clone(), em, ..Default::default() };
        tell(&usage.list_actions(call).await.unwrap().into_inner().actions);
        let call = proto::ListActionsRequest { user: user.clone(), ..Default::default() };
        tell(&usage.list_actions(call).await.unwrap().into_inner().actions);
        let call = proto::ListWaitingRequest { user, em: em_message("host1"), ..Default::default() };
        tell(&usage.list_waiting(call).await.unwrap().into_inner().waiting);
        for fullest_first in [false, true] {
            let call = proto::ListScopesRequest { labels: labels.clone(), fullest_first, ..Default::default() };
            tell(&usage.list_scopes(call).await.unwrap().into_inner().scopes);
        }
    }
    tell(&usage.get_overview(proto::GetOverviewRequest {}).await.unwrap().into_inner());
    let mut watching = usage.watch(proto::WatchRequest {}).await.unwrap().into_inner();
    tell(&watching.message().await.unwrap());
    tell(&usage.list_instances(proto::ListInstancesRequest {}).await.unwrap().into_inner());
    tell(&usage.list_tasks(proto::ListTasksRequest {}).await.unwrap().into_inner());
    tell(&usage.list_ems(proto::ListEmsRequest::default()).await.unwrap().into_inner());
    let call = proto::ListLimitsRequest { page_size: 1, ..Default::default() };
    let page = limits.list_limits(call).await.unwrap().into_inner();
    let call = proto::ListLimitsRequest { page_token: page.next_page_token.clone(), ..Default::default() };
    tell(&page);
    tell(&limits.list_limits(call).await);
    told
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_bound_to_users_asks_for_these_and_sees_nothing_of_others() {
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
    let mut waiter = rm_of(&channel, &admin);
    let waiting = tokio::spawn(async move {
        let wait_timeout = Some(prost_types::Duration { seconds: 60, nanos: 0 });
        waiter.request_resource(proto::RequestResourceRequest { wait_timeout, ..ask("host1", "bob", 4) }).await
    });
    let stands = || async { database.count("SELECT count(*) FROM linkis_resource_waiting").await == 1 };
    eventually("bob stands in line", Duration::from_secs(5), stands).await;

    // Each of them sees what is alice's, and not a word of bob.
    let tickets = [of_alice.clone(), of_bob[1].clone()];
    for token in [&viewer, &one] {
        let told = everything(&channel, token, &tickets, engine.clone()).await;
        for other in [&of_bob[0], &of_bob[2], "\"bob\"", "bob-engine:1"] {
            let lines: Vec<_> = told.lines().filter(|line| line.contains(other)).collect();
            assert!(lines.is_empty(), "{other}: {lines:#?}");
        }
        assert!(told.contains(&of_alice) && told.contains("\"alice\""), "{told}");
    }
    let told = everything(&channel, &all, &tickets, engine).await;
    assert!(told.contains("\"bob\"") && told.contains("bob-engine:1"), "who is bound to nobody sees all: {told}");

    // A manager asks for its users, and for no others.
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
    assert_eq!(reason(&status), "TICKET_NOT_OWNED");
    manager.resource_released(released(&of_alice, "alice")).await.unwrap();
    waiting.abort();
}
