//! Placement among many contended EMs.

use super::*;
use crate::contention::start_patient;

/// Holds EMs by committed rows, which calls do not allow for so many, or locks them in one transaction.
async fn hold_all(database: &Database, hosts: usize, by_hand: bool) -> sqlx::PgConnection {
    let mut holder = database.connect().await;
    if !by_hand {
        execute(&mut holder, "BEGIN").await;
    }
    let instances: Vec<_> = (0..hosts).map(|n| em(&format!("host{n}"))).collect();
    let sql = "INSERT INTO linkis_resource_lock (scope, em_application_name, em_instance) SELECT 'em', $1, unnest($2::text[])";
    let named: Vec<&str> = instances.iter().map(|em| em.instance.as_str()).collect();
    let rows = sqlx::query(sql).bind(instances[0].application_name.as_str()).bind(named);
    assert_eq!(rows.execute(&mut holder).await.unwrap().rows_affected() as usize, hosts);
    holder
}

async fn end_holds(mut holder: sqlx::PgConnection, by_hand: bool) {
    let end = if by_hand { "DELETE FROM linkis_resource_lock" } else { "ROLLBACK" };
    execute(&mut holder, end).await;
}

/// A request that waits for held EMs is granted on the EM that is released first, even if another is emptier, and with or without a
/// wait timeout.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_on_held_ems_grants_first_released() {
    let (database, rm) = start().await;
    register(&rm, 2, 16).await;
    let (fuller, emptier) = (em("host0"), em("host1"));
    rm.client.request_resource(&request(&fuller, "hadoop", load(500, 500, 1))).await.granted();
    for wait_timeout in [Duration::ZERO, LONG] {
        for host in [&fuller, &emptier] {
            hold(&rm, &database, host, true).await;
        }
        let ask = ResourceRequest { wait_timeout, ..anywhere("hadoop", load(1, 1, 1)) };
        let call = request_in_task(&rm.client, ask);
        // A request with a timeout enters the queue.
        let waits = async || match wait_timeout {
            Duration::ZERO => rm.metric("linkis_rm_contended_operations") == 1.0,
            _ => rm.client.waiting().await.unwrap().len() == 1,
        };
        eventually("the request waits", LONG, waits).await;
        assert!(rm.client.release_hold(&LockKey::Em(fuller.clone())).await.unwrap());
        let granted = tokio::time::timeout(LONG, call).await.expect("a reply").unwrap().granted();
        assert_eq!(granted.em, fuller);
        assert!(rm.client.release_hold(&LockKey::Em(emptier.clone())).await.unwrap());
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 3);
}

/// One request finds the free EM among many held ones; later requests avoid the held ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_among_held_ems_finds_free_em() {
    const HELD: usize = 200;
    let (database, rm) = start().await;
    register(&rm, HELD, 100).await;
    // The free EM is the fullest.
    let free = em("free");
    rm.client.register(registration(free.clone(), load(1000, 1000, 100))).await.unwrap();
    rm.client.request_resource(&request(&free, "hadoop", load(500, 500, 1))).await.granted();
    let holder = hold_all(&database, HELD, true).await;
    let ask = async || rm.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.granted().em;
    assert_eq!(ask().await, free);
    let found_out = rm.metric("linkis_rm_contentions_total");
    for _ in 0..10 {
        assert_eq!(ask().await, free);
    }
    assert_eq!(rm.metric("linkis_rm_contentions_total"), found_out, "no later request is contended");
    end_holds(holder, true).await;
    eventually("the other EMs are selected again", LONG, async || ask().await != free).await;
    assert_invariants(&database, &rm.client).await;
}

/// Many holds end at once: a wake-up grants the waiting requests.
async fn wait_queue_is_granted(hosts: usize, by_hand: bool) {
    let (database, rm, patient) = start_patient().await;
    register(&rm, hosts, 1).await;
    // The requests wait for the largest EM, which is full.
    let full = em("full");
    rm.client.register(registration(full.clone(), load(1000, 1000, 1))).await.unwrap();
    rm.client.request_resource(&request(&full, "hadoop", load(1, 1, 1))).await.granted();
    let holder = hold_all(&database, hosts, by_hand).await;
    let ask = |n: usize| ResourceRequest { wait_timeout: LONG * 4, ..anywhere(&format!("user{n}"), load(1, 1, 1)) };
    let calls: Vec<_> = (0..hosts).map(|n| request_in_task(&patient, ask(n))).collect();
    database.waiting(hosts as i64).await;
    end_holds(holder, by_hand).await;
    let mut on = BTreeSet::new();
    for call in calls {
        on.insert(tokio::time::timeout(LONG * 4, call).await.expect("a reply").unwrap().granted().em);
    }
    assert!(on.len() == hosts && !on.contains(&full));
    assert_eq!(assert_invariants(&database, &rm.client).await, hosts + 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_after_holds_end_is_granted() {
    wait_queue_is_granted(120, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_after_transaction_end_is_granted() {
    wait_queue_is_granted(24, false).await;
}
