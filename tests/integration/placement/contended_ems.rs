//! Very many EMs that somebody holds, or all of them.

use super::*;

/// Longer than any test waits for anything, and less than a call does.
const LONG: Duration = Duration::from_secs(25);

/// Held by hand, as an operator may hold more than calls let him, or by one transaction.
async fn hold_all(database: &Database, hosts: usize, by_hand: bool) -> sqlx::PgConnection {
    let mut holder = database.connect().await;
    if !by_hand {
        sqlx::raw_sql("BEGIN").execute(&mut holder).await.unwrap();
    }
    let instances: Vec<_> = (0..hosts).map(|n| em(&format!("host{n}"))).collect();
    let sql = "INSERT INTO linkis_resource_lock (scope, em_application_name, em_instance) SELECT 'em', $1, unnest($2::text[])";
    let named: Vec<&str> = instances.iter().map(|em| em.instance.as_str()).collect();
    let rows = sqlx::query(sql).bind(instances[0].application_name.as_str()).bind(named);
    assert_eq!(rows.execute(&mut holder).await.unwrap().rows_affected() as usize, hosts);
    holder
}

async fn let_go(mut holder: sqlx::PgConnection, by_hand: bool) {
    let end = if by_hand { "DELETE FROM linkis_resource_lock" } else { "ROLLBACK" };
    sqlx::raw_sql(end).execute(&mut holder).await.unwrap();
}

fn set_aside(rm: &Instance, what: &str) -> u64 {
    let text = rm.metrics.text().unwrap();
    text.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(' ')).unwrap().parse().unwrap()
}

/// Not on the one that it waits for at first, which is emptier; and whether it may stand in line or not: there is no line in which it could.
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
        let call = ask_in_task(&rm.client, ask);
        let waits = async || set_aside(&rm, "linkis_rm_set_aside_operations") == 1;
        eventually("it waits for a holder", LONG, waits).await;
        assert!(rm.client.release_hold(&LockKey::Em(fuller.clone())).await.unwrap());
        let granted = tokio::time::timeout(LONG, call).await.expect("nobody holds that one").unwrap().granted();
        assert_eq!(granted.em, fuller);
        assert!(rm.client.release_hold(&LockKey::Em(emptier.clone())).await.unwrap());
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 3);
}

/// More than anybody tries in vain because somebody was faster; and what one has found out, the others know.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_among_held_ems_finds_free_em() {
    const HELD: usize = 200;
    let (database, rm) = start().await;
    register(&rm, HELD, 100).await;
    // The fullest of all.
    let free = em("free");
    rm.client.register(registration(free.clone(), load(1000, 1000, 100))).await.unwrap();
    rm.client.request_resource(&request(&free, "hadoop", load(500, 500, 1))).await.granted();
    let holder = hold_all(&database, HELD, true).await;
    let ask = async || rm.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.granted().em;
    let start = Instant::now();
    assert_eq!(ask().await, free);
    println!("found among {HELD} after {:?}", start.elapsed());
    let found_out = set_aside(&rm, "linkis_rm_operations_set_aside_total");
    for _ in 0..10 {
        assert_eq!(ask().await, free);
    }
    assert_eq!(set_aside(&rm, "linkis_rm_operations_set_aside_total"), found_out, "nobody else meets a holder");
    let_go(holder, true).await;
    eventually("all are chosen again", LONG, async || ask().await != free).await;
    assert_invariants(&database, &rm.client).await;
}

/// All of them at once, however many: those in line hear of it.
async fn what_is_let_go_is_granted(hosts: usize, by_hand: bool) {
    const SOON: Duration = Duration::from_secs(6);
    let (database, rm) = start().await;
    register(&rm, hosts, 1).await;
    // Where they stand in line: it has no room, and is the largest.
    let full = em("full");
    rm.client.register(registration(full.clone(), load(1000, 1000, 1))).await.unwrap();
    rm.client.request_resource(&request(&full, "hadoop", load(1, 1, 1))).await.granted();
    let holder = hold_all(&database, hosts, by_hand).await;
    let ask = |n: usize| ResourceRequest { wait_timeout: LONG * 4, ..anywhere(&format!("user{n}"), load(1, 1, 1)) };
    let calls: Vec<_> = (0..hosts).map(|n| ask_in_task(&rm.client, ask(n))).collect();
    eventually("all stand in line", LONG * 3, async || {
        database.count("SELECT count(*) FROM linkis_resource_waiting").await == hosts as i64
    })
    .await;
    let_go(holder, by_hand).await;
    let start = Instant::now();
    let mut on = BTreeSet::new();
    for call in calls {
        on.insert(tokio::time::timeout(LONG * 4, call).await.expect("an answer").unwrap().granted().em);
    }
    println!("{hosts} hosts were granted {:?} after they were let go", start.elapsed());
    assert!(on.len() == hosts && !on.contains(&full));
    assert!(start.elapsed() < SOON, "after {:?}", start.elapsed());
    assert_eq!(assert_invariants(&database, &rm.client).await, hosts + 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_after_holds_end_is_granted() {
    what_is_let_go_is_granted(120, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_after_transaction_end_is_granted() {
    what_is_let_go_is_granted(24, false).await;
}
