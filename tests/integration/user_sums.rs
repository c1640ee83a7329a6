//! Users by the use of their live tickets: order, pages, and sums that equal the tickets after any fault.

use std::{collections::BTreeMap, time::Duration};

use rm_client::{ResourceRequest, RmClient};
use rm_model::{
    operation::Grant,
    report::{EmReport, Health},
    ticket::TicketState,
};
use rm_proto::{page::PageRequest, v1 as proto};
use sqlx::Connection as _;
use tokio::task::JoinSet;
use tonic::Code;
use uuid::Uuid;

use crate::{faults::random::Random, harness::*};

/// Returns a page of the users.
async fn page(client: &RmClient, dimension: &str, page_size: i32, page_token: &str) -> proto::ListUsersResponse {
    let page_token = page_token.to_owned();
    client.users(&proto::ListUsersRequest { dimension: dimension.into(), page_size, page_token }).await.unwrap()
}

/// Returns the names of all users in the order of a dimension, read in pages of two.
async fn names(client: &RmClient, dimension: &str) -> Vec<String> {
    let (mut names, mut token) = (vec![], String::new());
    loop {
        let page = page(client, dimension, 2, &token).await;
        names.extend(page.users.into_iter().map(|user| user.user));
        token = page.next_page_token;
        if token.is_empty() {
            return names;
        }
    }
}

/// Sums of a user by dimension, empty for the number of tickets: used, locked, and idle of the used.
type Sums = BTreeMap<String, [i64; 3]>;

/// Returns the listed sums of all users.
async fn listed(client: &RmClient) -> BTreeMap<String, Sums> {
    let users = page(client, "", 1000, "").await.users;
    let sums = |user: proto::UserUse| {
        let tickets = (String::new(), [user.used_tickets, user.locked_tickets, user.idle_tickets]);
        let amounts = user.dimensions.into_iter().map(|(key, sum)| (key, [sum.used, sum.locked, sum.idle]));
        (user.user, std::iter::once(tickets).chain(amounts).collect())
    };
    users.into_iter().map(sums).collect()
}

/// Returns the sums of the live tickets.
async fn summed(client: &RmClient) -> BTreeMap<String, Sums> {
    let mut users = BTreeMap::<String, Sums>::new();
    for ticket in client.tickets(None).await.unwrap() {
        let sums = users.entry(ticket.user.to_string()).or_default();
        let amounts = ticket.resource().amounts().filter(|(_, amount)| *amount != 0);
        let amounts = amounts.map(|(dimension, amount)| (dimension.key(), amount));
        for (key, amount) in std::iter::once((String::new(), 1)).chain(amounts) {
            let [used, locked, idle] = sums.entry(key).or_default();
            match &ticket.state {
                TicketState::Locked { .. } => *locked += amount,
                TicketState::Used { idle_since, .. } => {
                    *used += amount;
                    *idle += if idle_since.is_some() { amount } else { 0 };
                }
            }
        }
    }
    users
}

async fn assert_sums_equal_tickets(client: &RmClient) {
    eventually("the sums equal the tickets", LONG, async || listed(client).await == summed(client).await).await;
    let age = page(client, "", 1, "").await.age.expect("an age");
    assert!((0..60).contains(&age.seconds), "{age:?}");
}

async fn grant(client: &RmClient, user: &str, gb: i64, cores: i64) -> Grant {
    client.request_resource(&request(&em("host1"), user, load(gb, cores, 1))).await.granted()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_list_is_ordered_by_use_of_dimension() {
    let (_database, rm) = start_with_host1().await;
    for (user, gb, cores, tickets) in
        [("alice", 1, 9, 1), ("bob", 2, 1, 3), ("carol", 3, 1, 2), ("dave", 1, 1, 2), ("e.ve", 0, 1, 1)]
    {
        for _ in 0..tickets {
            grant(&rm.client, user, gb, cores).await;
        }
    }
    let used = grant(&rm.client, "alice", 0, 1).await;
    rm.client.resource_inited(&inited(&used, "alice", Some(load(0, 2, 1)))).await.unwrap();
    assert_sums_equal_tickets(&rm.client).await;
    // Equal sums are in the order of the names; a user without use of the dimension is not listed.
    for (dimension, expected) in [
        ("", &["bob", "alice", "carol", "dave", "e.ve"][..]),
        ("instances", &["bob", "alice", "carol", "dave", "e.ve"]),
        ("cores", &["alice", "bob", "carol", "dave", "e.ve"]),
        ("memory", &["bob", "carol", "dave", "alice"]),
        ("queue_cores", &[]),
        ("special.gpu", &[]),
    ] {
        assert_eq!(names(&rm.client, dimension).await, expected, "{dimension}");
    }
    let alice = &listed(&rm.client).await["alice"];
    assert_eq!(["", "cores", "memory"].map(|key| alice[key]), [[1, 1, 0], [2, 9, 0], [0, GB, 0]]);
    let token = page(&rm.client, "cores", 1, "").await.next_page_token;
    let call = |dimension: &str, token: &str| {
        let call =
            proto::ListUsersRequest { dimension: dimension.into(), page_token: token.into(), ..Default::default() };
        let client = rm.client.clone();
        async move { client.users(&call).await.unwrap_err() }
    };
    for error in [call("memory", &token).await, call("cores", "x").await, call("gpu", "").await] {
        assert_eq!((error.code(), error.reason().as_deref()), (Some(Code::InvalidArgument), Some("INVALID_FIELD")));
    }
    for key in ["1.\u{0}", "0.a", "-1.a", "1", "a.a"] {
        let cores = proto::ListUsersRequest { dimension: "cores".into(), ..Default::default() };
        let token = PageRequest::new("ListUsers", 1, &cores).unwrap().token(key);
        assert_eq!(call("cores", &token).await.code(), Some(Code::InvalidArgument), "{key:?}");
    }
    eventually("the time of the sums is exported", LONG, async || {
        rm.metric("linkis_rm_users_summed_timestamp_seconds") > 0.0
            && rm.metric("linkis_rm_user_sums_tickets") == 10.0
            && rm.metric("linkis_rm_user_sums_step_seconds_count") > 0.0
    })
    .await;
    rm.stop().await;
}

/// Changes tickets at random: grants, confirmations, reports, releases, expiries.
async fn work(client: &RmClient, random: &mut Random, live: &mut Vec<(String, Grant)>, rounds: usize) {
    for _ in 0..rounds {
        if live.is_empty() || random.percent(40) {
            let user = format!("user{}", random.index(20));
            let lock_ttl = random.percent(10).then_some(Duration::from_millis(300));
            let amounts = load(1, random.between(1, 3), 1);
            let wanted = ResourceRequest { lock_ttl, ..request(&em("host1"), &user, amounts) };
            let grant = client.request_resource(&wanted).await.granted();
            live.push((user, grant));
            continue;
        }
        let at = random.index(live.len());
        let (user, grant) = &live[at];
        // An expired ticket is refused.
        match random.index(4) {
            0 => drop(client.resource_inited(&inited(grant, user, Some(load(1, 4, 1)))).await),
            1 => drop(client.resource_reported(&grant.reported(name(user), load(2, 1, 1))).await),
            _ => {
                drop(client.resource_released(&release(grant, user)).await);
                live.swap_remove(at);
            }
        }
    }
}

/// Each instance that sums is killed; the next one finds sums of an earlier time, and tickets that have changed since.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_sums_after_kills_equal_tickets() {
    let database = Database::fresh().await;
    let start = || Process::start(&["--database-url", &database.url()]);
    let (mut first, mut second) = (start(), start());
    first.client.register(registration(em("host1"), load(100_000, 100_000, 100_000))).await.unwrap();
    first.client.register(registration(em("host2"), load(100, 100, 100))).await.unwrap();
    for n in 0..9 {
        first.client.request_resource(&request(&em("host2"), &format!("gone{n}"), load(1, 1, 1))).await.granted();
    }
    let (mut random, mut live) = (Random::new(7), vec![]);
    for round in 0..3 {
        work(&second.client, &mut random, &mut live, 150).await;
        if round == 1 {
            second.client.unregister(&em("host2")).await.unwrap();
        }
        first.kill();
        (first, second) = (second, start());
    }
    assert_sums_equal_tickets(&first.client).await;
    // Sums of a database that was changed by hand are corrected by the next run.
    let wrong = r#"UPDATE linkis_user_sum SET used = used + 1, rank = rank - 1 WHERE "user" = 'user1';
        DELETE FROM linkis_user_sum WHERE "user" = 'user2';
        INSERT INTO linkis_user_sum VALUES ('nobody', 'instances', 1, 0, -1), ('user3', 'special.gpu', 1, 0, -1);
        UPDATE linkis_user_sum_progress SET writer = gen_random_uuid()"#;
    database.execute(wrong).await;
    assert_sums_equal_tickets(&second.client).await;
    work(&first.client, &mut random, &mut live, 50).await;
    assert_sums_equal_tickets(&first.client).await;
}

/// A late commit with an earlier number is not skipped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_sums_include_late_commits() {
    let (database, rm) = start_with_host1().await;
    grant(&rm.client, "first", 1, 1).await;
    assert_sums_equal_tickets(&rm.client).await;
    let mut late = database.connect().await;
    let mut late = late.begin().await.unwrap();
    let line = r#"INSERT INTO linkis_resource_action_record (action, ticket_id, "user", creator, engine_type, labels,
            em_application_name, em_instance, resource_type, resource, actor, action_time)
        SELECT action, gen_random_uuid(), 'late', creator, engine_type, labels, em_application_name, em_instance, resource_type,
            resource, actor, action_time
        FROM linkis_resource_action_record WHERE action = 'granted'"#;
    sqlx::query(line).execute(&mut *late).await.unwrap();
    grant(&rm.client, "second", 1, 1).await;
    let steps = || rm.counter(r#"linkis_rm_task_steps_total{task="user_sums"}"#);
    let before = steps();
    eventually("two more steps", LONG, async || steps() >= before + 2).await;
    assert_eq!(names(&rm.client, "").await, ["first"]);
    late.commit().await.unwrap();
    eventually("all are listed", LONG, async || names(&rm.client, "").await == ["first", "late", "second"]).await;
    rm.stop().await;
}

/// A line that changes no ticket can follow the end of its ticket.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_sums_ignore_recalls_and_withdrawals() {
    let (database, rm) = start_with_host1().await;
    let ended = grant(&rm.client, "first", 1, 1).await;
    rm.client.resource_released(&release(&ended, "first")).await.unwrap();
    for action in ["recalled", "reclaim_withdrawn"] {
        database
            .execute(format!(
                r#"INSERT INTO linkis_resource_action_record (action, ticket_id, "user", creator, engine_type, labels,
                    em_application_name, em_instance, resource_type, resource, actor, reason, action_time)
                SELECT '{action}', ticket_id, "user", creator, engine_type, labels, em_application_name, em_instance, resource_type,
                    resource, actor, 'a test', now()
                FROM linkis_resource_action_record WHERE action = 'granted'"#
            ))
            .await;
    }
    grant(&rm.client, "second", 1, 1).await;
    eventually("the last grant is summed", LONG, async || names(&rm.client, "").await.contains(&"second".to_owned()))
        .await;
    assert_eq!(names(&rm.client, "").await, ["second"]);
    assert_sums_equal_tickets(&rm.client).await;
    rm.stop().await;
}

/// Many changes of a user cost one write: otherwise the task competes with the grants that it sums.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_is_written_once_per_round_of_changes() {
    const USERS: usize = 320;
    const CHANGES: i64 = 7;
    let (database, rm) = start_with_em(em("host1"), load(10_000, 10_000, 10_000)).await;
    // The task has read all tickets: the changes come from the history.
    grant(&rm.client, "first", 1, 1).await;
    assert_sums_equal_tickets(&rm.client).await;
    let mut blocker = database.connect().await;
    let mut blocker = blocker.begin().await.unwrap();
    sqlx::query("SELECT FROM linkis_user_sum_progress FOR UPDATE").execute(&mut *blocker).await.unwrap();
    let mut callers = JoinSet::new();
    for number in 0..USERS {
        let client = rm.client.clone();
        callers.spawn(async move {
            let user = format!("user{number}");
            let granted = grant(&client, &user, 1, 1).await;
            client.resource_inited(&inited(&granted, &user, None)).await.unwrap();
            for cores in 3..=CHANGES {
                client.resource_reported(&granted.reported(name(&user), load(1, cores, 1))).await.unwrap();
            }
        });
    }
    callers.join_all().await;
    // A round that began before may write each user, and the next one reads 2,240 lines and writes each user.
    let steps = || rm.metric("linkis_rm_user_sums_step_seconds_count");
    let before = steps();
    blocker.commit().await.unwrap();
    assert_sums_equal_tickets(&rm.client).await;
    assert!(steps() - before <= 50.0, "{}", steps() - before);
    rm.stop().await;
}

/// The tickets of idle engines need two pages; then a third of the engines runs again, on both pages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_engines_are_counted_on_all_pages() {
    let (_database, rm) = start().await;
    let size = load(10_000, 10_000, 10_000);
    let epoch = rm.client.register(registration(em("host1"), size)).await.unwrap().epoch;
    let mut callers = JoinSet::new();
    for user in 0..20 {
        let client = rm.client.clone();
        callers.spawn(async move {
            let (user, mut tickets) = (format!("user{user}"), vec![]);
            for _ in 0..55 {
                let granted = grant(&client, &user, 1, 2).await;
                client.resource_inited(&inited(&granted, &user, None)).await.unwrap();
                tickets.push(granted.ticket_id);
            }
            tickets
        });
    }
    let mut tickets: Vec<Uuid> = callers.join_all().await.concat();
    tickets.sort();
    let some = tickets.iter().enumerate().filter(|(number, _)| number % 3 > 0).map(|(_, ticket)| *ticket).collect();
    for (sequence, idle) in [(1, tickets.clone()), (2, some)] {
        let count = i64::try_from(idle.len()).unwrap();
        let report = EmReport {
            em: em("host1"),
            epoch,
            sequence,
            health: Health::Healthy,
            load: None,
            tickets: tickets.clone(),
            observed: None,
            idle,
        };
        rm.client.heartbeat(&report).await.unwrap();
        assert_sums_equal_tickets(&rm.client).await;
        eventually("the overview has their sum", LONG, async || {
            let totals = rm.client.overview().await.unwrap().tickets.unwrap();
            totals.idle == count && totals.idle_amounts.get("cores") == Some(&(2 * count))
        })
        .await;
    }
    rm.stop().await;
}
