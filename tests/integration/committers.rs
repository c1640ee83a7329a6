//! Several committers in one instance: shared scopes are counted exactly, and no committer waits for the EMs of another.

use std::time::{Duration, Instant};

use linkis_rm::server::{Options, ServerExit};
use rm_client::{ResourceRequest, ResultResource};
use rm_model::{
    em::EmInstance,
    limit::{LabelPattern, Rule},
    resource::Dimension,
};
use tokio::task::JoinSet;

use crate::harness::*;

/// EMs that three committers share: each has some of these.
const HOSTS: usize = 9;

fn several(committers: u16) -> Options {
    Options { committers, ..options() }
}

async fn hosts(rm: &Instance) -> Vec<EmInstance> {
    let hosts: Vec<_> = (0..HOSTS).map(|n| em(&format!("host{n}"))).collect();
    for host in &hosts {
        rm.client.register(registration(host.clone(), load(1000, 1000, 1000))).await.unwrap();
    }
    hosts
}

/// A limit on the instances of the creator IDE.
fn of_ide(instances: i64) -> Rule {
    let pattern = LabelPattern::new([("creator".to_owned(), Some("IDE".to_owned()))].into());
    Rule { pattern, mode: Default::default(), max: [(Dimension::Instances, instances)].into() }
}

/// Transactions that hold resource locks at this moment.
async fn under_way(database: &Database) -> i64 {
    let holders = "SELECT count(DISTINCT l.pid) FROM pg_locks l
        JOIN pg_database d ON d.oid = l.database AND d.datname = current_database()
        WHERE l.relation = 'linkis_resource_lock'::regclass AND l.mode = 'RowExclusiveLock'";
    database.count(holders).await
}

/// A scope that all EMs' requests count in is exact, although their batches are under way at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_committers_never_over_commit_a_scope_that_they_share() {
    const MAX: i64 = 60;
    const CALLERS: usize = 24;
    let database = Database::fresh().await;
    let rm = Instance::start_with(&database, several(2)).await;
    let hosts = hosts(&rm).await;
    rm.client.set_limit(&of_ide(MAX)).await.unwrap();
    rm.client.set_limit(&each_user(20)).await.unwrap();
    let mut callers = JoinSet::new();
    for caller in 0..CALLERS {
        let (client, hosts) = (rm.client.clone(), hosts.clone());
        callers.spawn(async move {
            let user = format!("user{}", caller % 5);
            let mut granted = 0;
            for turn in 0..12 {
                let host = &hosts[(caller + turn * 5) % HOSTS];
                let answer = client.request_resource(&request(host, &user, load(1, 1, 1))).await.unwrap();
                let ResultResource::Available(grant) = answer else { continue };
                // Some leave room for others again, so that the limit is met again and again.
                if turn % 3 == 0 {
                    client.resource_released(&release(&grant, &user)).await.unwrap();
                } else {
                    granted += 1;
                }
            }
            granted
        });
    }
    let mut granted = 0;
    while let Some(of_caller) = callers.join_next().await {
        granted += of_caller.unwrap();
        assert!(rm.client.tickets(None).await.unwrap().len() <= MAX as usize);
    }
    assert_eq!(granted, MAX, "as many as there are, and no more");
    assert_eq!(assert_invariants(&database, &rm.client).await, MAX as usize);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_of_different_committers_are_under_way_at_once() {
    let database = Database::fresh().await;
    let rm = Instance::start_with(&database, several(3)).await;
    let hosts = hosts(&rm).await;
    let mut callers = JoinSet::new();
    for (caller, host) in hosts.into_iter().enumerate() {
        let client = rm.client.clone();
        callers.spawn(async move {
            let user = format!("user{caller}");
            loop {
                let grant = client.request_resource(&request(&host, &user, load(1, 1, 1))).await.granted();
                client.resource_released(&release(&grant, &user)).await.unwrap();
            }
        });
    }
    eventually("a transaction of each", LONG, async || under_way(&database).await >= 3).await;
    callers.shutdown().await;
}

/// An instance with two committers and one with three deal EMs differently: they meet in every way, and nothing is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_that_deal_differently_agree() {
    let database = Database::fresh().await;
    let first = Instance::start_with(&database, several(2)).await;
    let second = Instance::start_with(&database, several(3)).await;
    let hosts = hosts(&first).await;
    first.client.set_limit(&of_ide(40)).await.unwrap();
    first.client.set_limit(&each_user(9)).await.unwrap();
    let mut callers = JoinSet::new();
    for caller in 0..60 {
        let client = [&first, &second][caller % 2].client.clone();
        let hosts = hosts.clone();
        callers.spawn(async move {
            for turn in 0..6 {
                let user = format!("user{}", (caller * 7 + turn) % 11);
                let host = &hosts[(caller * 3 + turn) % hosts.len()];
                // Every third waits for its turn.
                let wait_timeout = if caller % 3 == 0 { LONG } else { Duration::ZERO };
                let ask = ResourceRequest { wait_timeout, ..request(host, &user, load(1, 2, 1)) };
                let Ok(ResultResource::Available(grant)) = client.request_resource(&ask).await else { continue };
                if turn % 2 == 0 {
                    client.resource_inited(&inited(&grant, &user, Some(load(1, 1, 1)))).await.unwrap();
                }
                client.resource_released(&release(&grant, &user)).await.unwrap();
            }
        });
    }
    callers.join_all().await;
    assert_eq!(assert_invariants(&database, &first.client).await, 0);
    assert!(first.client.waiting().await.unwrap().is_empty());
    // All of them end in order.
    assert_eq!([first.stop().await, second.stop().await], [ServerExit::Drained; 2]);
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    assert_eq!(database.count(deadlocks).await, 0, "locks are taken in one order");
}

/// Freed capacity of one committer wakes requests whose EMs belong to another one, also while they are checked. A missed wake-up
/// would delay them until the next poll.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn room_that_one_committer_makes_serves_who_waits_for_another() {
    const WAITERS: usize = 120;
    let database = Database::fresh().await;
    let rm = Instance::start_with(&database, several(3)).await;
    let hosts = hosts(&rm).await;
    rm.client.set_limit(&each_user(2)).await.unwrap();
    let ask = |n: usize| ResourceRequest { wait_timeout: LONG, ..request(&hosts[n % HOSTS], "hadoop", load(1, 1, 1)) };
    let mut held = Vec::new();
    for n in 0..2 {
        held.push(rm.client.request_resource(&ask(n)).await.granted());
    }
    let mut calls = JoinSet::new();
    for n in 0..WAITERS {
        let (client, ask) = (rm.client.clone(), ask(n));
        calls.spawn(async move {
            let grant = client.request_resource(&ask).await.granted();
            let granted = Instant::now();
            client.resource_released(&release(&grant, "hadoop")).await.unwrap();
            granted
        });
    }
    let in_line = "SELECT count(*) FROM linkis_resource_waiting";
    eventually("all wait", LONG, async || database.count(in_line).await == WAITERS as i64).await;
    for grant in held {
        rm.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    }
    let mut granted = calls.join_all().await;
    granted.sort();
    let gaps = granted.windows(2).map(|pair| pair[1] - pair[0]);
    let stalls: Vec<Duration> = gaps.filter(|gap| *gap > Duration::from_millis(500)).collect();
    // A machine that is busy may stand still now and then.
    assert!(stalls.len() <= WAITERS / 20, "{stalls:?}");
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
}

/// The end of an EM or a deadline releases tickets through the committer of the EM.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nobody_waits_for_is_done_beside_the_callers_of_all_committers() {
    let database = Database::fresh().await;
    let rm = Instance::start_with(&database, several(3)).await;
    let hosts = hosts(&rm).await;
    rm.client.set_limit(&of_ide(10_000)).await.unwrap();
    let mut calls = JoinSet::new();
    for n in 0..40 * HOSTS {
        let lock_ttl = (n % 2 == 0).then_some(Duration::from_millis(200));
        let ask = ResourceRequest { lock_ttl, ..request(&hosts[n % HOSTS], "hadoop", load(1, 1, 1)) };
        let client = rm.client.clone();
        calls.spawn(async move { client.request_resource(&ask).await.granted() });
    }
    calls.join_all().await;
    for host in &hosts[..HOSTS / 2] {
        rm.client.unregister(host).await.unwrap();
    }
    let left = 20 * (HOSTS - HOSTS / 2);
    let live = async || rm.client.tickets(None).await.unwrap().len();
    eventually("the others have expired", LONG, async || live().await <= left).await;
    assert_eq!(assert_invariants(&database, &rm.client).await, left);
}
