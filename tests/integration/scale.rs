//! Very many rows of one kind. Each is processed in steps beside other calls, also after failures.

use std::{collections::HashSet, time::Duration};

use rm_client::RmClient;
use rm_model::{em::EmInstance, operation::ReleaseTicket, resource::Resource};
use rm_proto::v1::{
    self as proto, limit_service_client::LimitServiceClient,
    resource_manager_service_client::ResourceManagerServiceClient,
};
use rm_store::user_resource::{self, EmTicketsQuery};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::harness::*;

mod killed_instances;

/// More tickets than many steps end.
const CROWD: i64 = 3000;

/// Counts the attempts of steps on the EM `crowded`. From now on, those whose number meets this condition fail.
async fn fail_steps(database: &Database, condition: &str) {
    let gate = format!(
        "CREATE SEQUENCE IF NOT EXISTS tries;
        CREATE OR REPLACE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF nextval('tries') {condition} THEN RAISE EXCEPTION 'not now' USING ERRCODE = '57P03'; END IF;
            RETURN NEW;
        END $$;
        CREATE OR REPLACE TRIGGER gate BEFORE UPDATE ON linkis_em_resource_meta_data FOR EACH ROW
            WHEN (NEW.em_instance = 'crowded:9102') EXECUTE FUNCTION gate();"
    );
    database.execute(gate).await;
}

/// Gives an EM `count` locked tickets, with matching counters and a deadline `within` from now.
pub async fn crowd(database: &Database, rm: &RmClient, host: &EmInstance, count: i64, within: &'static str) {
    rm.register(registration(host.clone(), Resource::cpu(1_000_000_000).unwrap())).await.unwrap();
    sqlx::query(
        r#"WITH crowd AS (
               INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name,
                   em_instance, resource_type, user_locked_resource, labels, locked_time, expires_at, em_epoch)
               SELECT gen_random_uuid(), 'user' || n % 7, 'IDE', '', e.em_application_name, e.em_instance, 'CPU', '{"cores":1}',
                   '{}', now(), now() + $3::text::interval, e.epoch
               FROM generate_series(1, $1) n, linkis_em_resource_meta_data e WHERE e.em_instance = $2)
           UPDATE linkis_em_resource_meta_data SET version = version + 1, locked_resource = jsonb_build_object('cores', $1),
               left_resource = jsonb_build_object('cores', 1000000000 - $1) WHERE em_instance = $2"#,
    )
    .bind(count)
    .bind(host.instance.as_str())
    .bind(within)
    .execute(&database.pool)
    .await
    .unwrap();
}

fn one_core(host: &EmInstance, user: &str) -> rm_client::ResourceRequest {
    request(host, user, Resource::cpu(1).unwrap())
}

async fn tickets_of(database: &Database, host: &EmInstance) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM linkis_user_resource_meta_data WHERE em_instance = $1")
        .bind(host.instance.as_str())
        .fetch_one(&database.pool)
        .await
        .unwrap()
}

/// Overdue tickets on a held EM delay no other expiry, in any number.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expiry_beside_overdue_tickets_on_held_em_continues() {
    let (database, rm) = start().await;
    let (held, other) = (em("held"), em("other"));
    rm.client.register(registration(other.clone(), Resource::cpu(1_000_000).unwrap())).await.unwrap();
    crowd(&database, &rm.client, &held, 5 * CROWD, "-1 hours").await;
    database.hold_by_hand(&held).await;
    // Earlier work has ended, and each of these tickets is due after all tickets on the held EM.
    for _ in 0..3 {
        let short =
            rm_client::ResourceRequest { lock_ttl: Some(Duration::from_millis(2500)), ..one_core(&other, "alice") };
        let grant = rm.client.request_resource(&short).await.granted();
        eventually("it expires", Duration::from_secs(20), || async { !lives(&rm.client, grant.ticket_id).await }).await;
    }
    database.release_holds().await;
    eventually("all are back", Duration::from_secs(60), || async { tickets_of(&database, &held).await == 0 }).await;
    assert_invariants(&database, &rm.client).await;
}

/// Overdue tickets on several held EMs delay no other expiry, before and after the holds are known. The deadline is beyond the
/// timers of the granting instance, so that a sweep must find it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expiry_beside_many_held_ems_is_punctual() {
    const TTL: Duration = Duration::from_secs(3);
    let (database, rm) = start().await;
    let (held, other) = ((0..8).map(|n| em(&format!("held{n}"))).collect::<Vec<_>>(), em("other"));
    rm.client.register(registration(other.clone(), Resource::cpu(1_000_000).unwrap())).await.unwrap();
    for host in &held {
        crowd(&database, &rm.client, host, CROWD / 2, "1 hour").await;
    }
    for host in &held {
        database.hold_by_hand(host).await;
    }
    let overdue = "UPDATE linkis_user_resource_meta_data SET expires_at = now() - interval '1 second'";
    database.execute(overdue).await;
    // The service detects the holds after it has tried each EM for five seconds.
    for _ in 0..3 {
        let short = rm_client::ResourceRequest { lock_ttl: Some(TTL), ..one_core(&other, "alice") };
        let grant = rm.client.request_resource(&short).await.granted();
        eventually("it expires", 3 * TTL, || async { !lives(&rm.client, grant.ticket_id).await }).await;
    }
    database.release_holds().await;
    eventually("all are back", Duration::from_secs(60), || async {
        database.count("SELECT count(*) FROM linkis_user_resource_meta_data").await == 0
    })
    .await;
    assert_invariants(&database, &rm.client).await;
}

/// A large EM is unregistered in steps. Another instance continues after a failure; a new registration is kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unregister_of_large_em_keeps_new_registration() {
    let (database, first) = start().await;
    let (crowded, other) = (em("crowded"), em("other"));
    first.client.register(registration(other.clone(), Resource::cpu(1_000_000).unwrap())).await.unwrap();
    crowd(&database, &first.client, &crowded, CROWD, "1 hour").await;
    fail_steps(&database, "> 10").await;
    let mut manager = ResourceManagerServiceClient::connect(first.address.clone()).await.unwrap();
    let name =
        proto::EmInstance { application_name: "linkis-cg-engineconnmanager".into(), instance: "crowded:9102".into() };
    let unregister = proto::UnregisterRequest { em: Some(name), epoch: 0 };
    let answer = manager.unregister(unregister.clone()).await.unwrap().into_inner();
    assert!(answer.in_progress && answer.removed_tickets < CROWD / 2, "{answer:?}");
    // The EM grants nothing and is not found.
    let error = first.client.request_resource(&one_core(&crowded, "alice")).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("EM_NOT_REGISTERED"));
    let again = manager.unregister(unregister).await.unwrap_err();
    assert_eq!(again.code(), tonic::Code::NotFound);
    // The instance ends; another one continues and serves calls.
    first.stop().await;
    let left = tickets_of(&database, &crowded).await;
    fail_steps(&database, "< 0").await;
    let second = Instance::start(&database).await;
    assert!(left > 0 && left < CROWD, "{left}");
    // The EM registers again: its new tickets stay.
    let back =
        second.client.register(registration(crowded.clone(), Resource::cpu(1_000_000_000).unwrap())).await.unwrap();
    let grant = second.client.request_resource(&one_core(&crowded, "alice")).await.granted();
    eventually("only the new one is left", Duration::from_secs(60), || async {
        second.client.request_resource(&one_core(&other, "bob")).await.granted();
        tickets_of(&database, &crowded).await == 1
    })
    .await;
    assert!(lives(&second.client, grant.ticket_id).await);
    eventually("it goes no more", Duration::from_secs(10), || async {
        database.count("SELECT count(*) FROM linkis_em_resource_meta_data WHERE going_epoch IS NOT NULL").await == 0
    })
    .await;
    assert_eq!(second.client.em(&crowded).await.unwrap().epoch, back.epoch);
    let ended = database.count(
        "SELECT count(*) FROM linkis_resource_action_record WHERE action = 'unregistered' AND ticket_id IS NOT NULL",
    );
    assert_eq!(ended.await, CROWD);
    assert_invariants(&database, &second.client).await;
}

/// A ticket of an unregistering EM can be released by its owner, and ends once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unregister_of_many_ems_ends_tickets_once() {
    let (database, rm) = start().await;
    let ems: Vec<EmInstance> = (0..12).map(|n| em(&format!("host{n}"))).collect();
    for em1 in &ems {
        crowd(&database, &rm.client, em1, 300, "1 hour").await;
    }
    let ids: Vec<(Uuid, String, String)> = database
        .rows(r#"SELECT ticket_id, "user", em_instance FROM linkis_user_resource_meta_data ORDER BY 1 DESC LIMIT 20"#)
        .await;
    let mut calls = JoinSet::new();
    for em1 in ems.clone() {
        let client = rm.client.clone();
        calls.spawn(async move {
            client.unregister(&em1).await.unwrap();
        });
    }
    for (ticket_id, user, instance) in ids {
        let client = rm.client.clone();
        let em1 = EmInstance::parse("em", "linkis-cg-engineconnmanager", &instance).unwrap();
        calls.spawn(async move {
            client.resource_released(&ReleaseTicket { ticket_id, user: name(&user), em: em1 }).await.unwrap()
        });
    }
    calls.join_all().await;
    eventually("all are gone", Duration::from_secs(60), || async {
        database.count("SELECT count(*) FROM linkis_em_resource_meta_data").await == 0
    })
    .await;
    assert_eq!(database.count("SELECT count(*) FROM linkis_user_resource_meta_data").await, 0);
    let ends = "SELECT count(*) FROM linkis_resource_action_record WHERE ticket_id IS NOT NULL";
    assert_eq!(database.count(ends).await, 12 * 300, "each ended once");
    assert_invariants(&database, &rm.client).await;
}

/// A limit with new labels is counted in steps beside everything else, and decides when all is counted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_over_many_tickets_counts_in_steps() {
    let (database, rm) = start().await;
    let (crowded, other) = (em("crowded"), em("other"));
    rm.client.register(registration(other.clone(), Resource::cpu(1_000_000).unwrap())).await.unwrap();
    crowd(&database, &rm.client, &crowded, CROWD, "1 hour").await;
    // Nothing of this EM can be counted yet.
    database.hold_by_hand(&crowded).await;
    let brief = Instance::start_with(&database, settings().with("--request-timeout", "3s")).await;
    let mut limits = LimitServiceClient::connect(brief.address.clone()).await.unwrap();
    let limit =
        proto::Limit { each: vec!["user".into()], max: [("cores".to_owned(), 440)].into(), ..Default::default() };
    let call = proto::SetLimitRequest { limit: Some(limit), ..Default::default() };
    let answer = limits.set_limit(call).await.unwrap().into_inner();
    assert_eq!(answer.state(), proto::LimitState::Counting);
    let state = async || {
        let listed = limits.clone().list_limits(proto::ListLimitsRequest::default()).await.unwrap().into_inner().limits;
        listed[0].state()
    };
    assert_eq!(state().await, proto::LimitState::Counting);
    // The limit does not decide yet; grants are counted meanwhile.
    for _ in 0..20 {
        rm.client.request_resource(&one_core(&other, "user1")).await.granted();
    }
    database.release_holds().await;
    eventually("it decides", Duration::from_secs(60), || async {
        rm.client.request_resource(&one_core(&other, &Uuid::new_v4().to_string())).await.granted();
        state().await == proto::LimitState::InForce
    })
    .await;
    // Each of seven users has 428 or 429 of 3,000 tickets: with 20 more, one is above its limit.
    rm.client.request_resource(&one_core(&other, "user1")).await.refused();
    rm.client.request_resource(&one_core(&other, "user2")).await.granted();
    let over: Vec<_> = rm.client.scopes().await.unwrap().into_iter().filter(|scope| scope.is_over()).collect();
    assert_eq!(over.iter().map(|scope| scope.scope.to_string()).collect::<Vec<_>>(), ["user=user1"]);
    rm.client.delete_limit(&each_user(1).pattern).await.unwrap();
    assert_invariants(&database, &rm.client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_of_idle_users_are_deleted() {
    let em1 = em("host1");
    let (database, rm) = start_with_em(em1.clone(), load(10_000, 10_000, 10_000)).await;
    rm.client.set_limit(&each_user(3)).await.unwrap();
    let mut calls = JoinSet::new();
    for n in 0..300 {
        let (client, em1, user) = (rm.client.clone(), em1.clone(), format!("user{n}"));
        calls.spawn(async move {
            let grant = client.request_resource(&request(&em1, &user, load(1, 1, 1))).await.granted();
            if n > 0 {
                client.resource_released(&release(&grant, &user)).await.unwrap();
            }
        });
    }
    calls.join_all().await;
    // Makes the counters old, because a new counter stays for a minute.
    database.execute("UPDATE linkis_label_resource SET version = 0").await;
    eventually("only the counter of who holds something is left", Duration::from_secs(30), || async {
        database.count("SELECT count(*) FROM linkis_label_resource").await == 1
    })
    .await;
    // A returning user is counted again.
    rm.client.request_resource(&request(&em1, "user7", load(1, 1, 1))).await.granted();
    rm.client.delete_limit(&each_user(3).pattern).await.unwrap();
    eventually("counters of no limit go", Duration::from_secs(30), || async {
        database.count("SELECT count(*) FROM linkis_label_resource").await == 0
            && database.count("SELECT count(*) FROM linkis_label_set").await == 0
    })
    .await;
    assert_invariants(&database, &rm.client).await;
}

/// Concurrent changes of limits share few connections, and each gets a reply.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_changes_share_few_connections() {
    let database = Database::fresh().await;
    // Long, because the changes are made one after another.
    let rm = Instance::start_with(&database, settings().with("--request-timeout", "5m")).await;
    let mut calls = JoinSet::new();
    for n in 0..200 {
        let client = rm.client.clone();
        calls.spawn(async move { client.set_limit(&each_user(100 + n)).await.map(drop) });
    }
    let connections = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()";
    let mut most = 0;
    while let Some(set) = calls.join_next().await {
        set.unwrap().unwrap();
        most = most.max(database.count(connections).await);
    }
    assert!(most <= 40, "{most} connections");
    assert_invariants(&database, &rm.client).await;
}

/// An EM that registers again immediately is granted as before: tickets of the older registration are found in few steps.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tickets_of_later_registration_are_skipped() {
    let (database, rm) = start().await;
    let em1 = em("host1");
    crowd(&database, &rm.client, &em1, CROWD, "1 hour").await;
    let later =
        "UPDATE linkis_user_resource_meta_data SET em_epoch = em_epoch + 1 WHERE id % 500 <> 0 RETURNING em_epoch";
    let later: Vec<i64> = database.column(later).await;
    let older = usize::try_from(CROWD).unwrap() - later.len();

    let mut connection = database.pool.acquire().await.unwrap();
    let (mut after, mut parts, mut found) = (Some(Uuid::nil()), 0, HashSet::new());
    while let Some(from) = after {
        let page = EmTicketsQuery { em: &em1, after: from, limit: 4, epoch_max: Some(later[0] - 1) };
        let (pages, tickets) = user_resource::read_pages(&mut connection, &[page]).await.unwrap();
        assert!(tickets.len() <= 4 && tickets.values().all(|ticket| ticket.em_epoch < later[0]));
        found.extend(tickets.into_keys());
        (after, parts) = (pages[&em1].last, parts + 1);
    }
    assert_eq!(found.len(), older);
    assert!(parts <= 6, "{parts} parts for {older} tickets among {CROWD}");
}

/// Marks EMs as unregistering, as an instance leaves them that died immediately after the call.
async fn have_go(database: &Database, host_like: &str) {
    sqlx::query(
        "UPDATE linkis_em_resource_meta_data SET version = version + 1, going_epoch = epoch, going_end = 'unregistered',
            going_after = '00000000-0000-0000-0000-000000000000' WHERE em_instance LIKE $1",
    )
    .bind(host_like)
    .execute(&database.pool)
    .await
    .unwrap();
}

/// A failed step is repeated in its order, and delays only its EM.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unregister_steps_retry_after_database_errors() {
    let (database, rm) = start().await;
    let crowded = em("crowded");
    crowd(&database, &rm.client, &crowded, 560, "1 hour").await;
    // The database accepts the mark of the EM, and then one of three attempts to end tickets.
    fail_steps(&database, "% 3 <> 1").await;
    have_go(&database, "crowded:%").await;
    // Ten steps. With a transfer to another instance, each failed step would take three seconds.
    eventually("it is gone", Duration::from_secs(20), || async { tickets_of(&database, &crowded).await == 0 }).await;
    let tries = database.count("SELECT last_value FROM tries").await;
    assert!(tries >= 20, "{tries}");
    assert_invariants(&database, &rm.client).await;
}

/// Held EMs delay no other unregistration, in any number.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unregister_of_held_ems_delays_no_other() {
    const HELD: usize = 20;
    let (database, rm) = start().await;
    let held: Vec<EmInstance> = (0..HELD).map(|n| em(&format!("held{n}"))).collect();
    let free = em("later");
    for host in held.iter().chain([&free]) {
        crowd(&database, &rm.client, host, 70, "1 hour").await;
    }
    for host in &held {
        database.hold_by_hand(host).await;
    }
    // The held EMs first: they use all turns of the task.
    have_go(&database, "held%").await;
    let tried = async || rm.metric("linkis_rm_contended_operations") >= 16.0;
    eventually("held EMs have all turns", LONG, tried).await;
    have_go(&database, "later%").await;
    eventually("it is gone", Duration::from_secs(30), || async { tickets_of(&database, &free).await == 0 }).await;
    assert_eq!(tickets_of(&database, &held[0]).await, 70, "it is held");
    database.release_holds().await;
    eventually("all are gone", Duration::from_secs(60), || async {
        database.count("SELECT count(*) FROM linkis_user_resource_meta_data").await == 0
    })
    .await;
    assert_invariants(&database, &rm.client).await;
}
