//! kill -9 in the middle of a load.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use linkis_rm::{
    client::{ResourceRequest, ResultResource},
    domain::{operation::Grant, ticket::TicketState},
    service::background::{
        Step, Task as _,
        lease::{LeaseFlag, RenewLease},
    },
    store::Store,
};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::{harness::*, proxy::FaultPlan};

/// What callers were told.
#[derive(Default)]
struct Told {
    granted: Vec<Grant>,
    /// Tickets whose release was asked for, whatever was answered.
    maybe_released: HashSet<Uuid>,
}

/// One caller: asks, and lets every other engine report in and end, until the server is gone.
async fn caller(client: linkis_rm::client::RmClient, number: usize, ttl: Duration, told: Arc<Mutex<Told>>) {
    for turn in 0.. {
        let user = format!("user{}", (number + turn) % 17);
        let host = em(&format!("host{}", (number * 5 + turn) % 4));
        let asked = ResourceRequest { lock_ttl: Some(ttl), ..request(&host, &user, load(1, 1, 1)) };
        let Ok(answer) = client.request_resource(&asked).await else { return };
        let ResultResource::Available(grant) = answer else { continue };
        told.lock().unwrap().granted.push(grant.clone());
        if turn % 3 == 0 {
            continue;
        }
        if client.resource_inited(&inited(&grant, &user, None)).await.is_err() {
            return;
        }
        if turn % 3 == 1 {
            told.lock().unwrap().maybe_released.insert(grant.ticket_id);
            if client.resource_released(&release(&grant, &user)).await.is_err() {
                return;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_kill_nine_nothing_is_stuck_lost_or_counted_twice() {
    let database = Database::fresh().await;
    let url = database.url();
    let ttl = Duration::from_secs(6);
    let mut process = Process::start(&["--database-url", &url]);
    for n in 0..4 {
        process.client.register(registration(em(&format!("host{n}")), load(100_000, 100_000, 100_000))).await.unwrap();
    }
    let told = Arc::new(Mutex::new(Told::default()));
    for round in 0..3 {
        let mut callers = JoinSet::new();
        for number in 0..64 {
            callers.spawn(caller(process.client.clone(), number, ttl, told.clone()));
        }
        let before = told.lock().unwrap().granted.len();
        eventually("it is busy", Duration::from_secs(20), || async {
            told.lock().unwrap().granted.len() > before + 200 + 100 * round
        })
        .await;
        process.kill();
        callers.join_all().await;
        process = Process::start(&["--database-url", &url]);
        assert_invariants(&database, &process.client).await;
    }

    let tickets = process.client.tickets(None).await.unwrap();
    let alive: HashSet<Uuid> = tickets.iter().map(|ticket| ticket.id).collect();
    let used = tickets.iter().filter(|ticket| matches!(ticket.state, TicketState::Used { .. })).count();
    let (over, expired) = (ended(&database).await, expired(&database).await);
    let told = std::mem::take(&mut *told.lock().unwrap());
    for grant in &told.granted {
        let id = grant.ticket_id;
        assert!(alive.contains(&id) || over.contains(&id), "{id} was granted, and is lost");
    }
    for id in over.difference(&expired) {
        assert!(told.maybe_released.contains(id), "{id} was released, and nobody asked for it");
    }
    println!("{} told as granted, {} alive, {} over", told.granted.len(), alive.len(), over.len());
    eventually("every locked ticket expires", ttl + Duration::from_secs(1), || async {
        process.client.ems().await.unwrap().iter().all(|em| em.locked.is_zero())
    })
    .await;
    assert_eq!(assert_invariants(&database, &process.client).await, used);
    assert_eq!(process.terminate(), Some(0));
}

async fn ended(database: &Database) -> HashSet<Uuid> {
    let sql = "SELECT ticket_id FROM linkis_resource_action_record WHERE action IN ('released', 'expired')";
    sqlx::query_scalar(sql).fetch_all(&database.pool).await.unwrap().into_iter().collect()
}

async fn expired(database: &Database) -> HashSet<Uuid> {
    let sql = "SELECT ticket_id FROM linkis_resource_action_record WHERE action = 'expired'";
    sqlx::query_scalar(sql).fetch_all(&database.pool).await.unwrap().into_iter().collect()
}

/// A database that goes away and comes back: calls fail fast meanwhile, and are served again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_connections_reopen_after_termination() {
    let (database, rm) = start().await;
    let host = em("host1");
    rm.client.register(registration(host.clone(), load(1000, 1000, 1000))).await.unwrap();
    for _ in 0..5 {
        rm.client.request_resource(&request(&host, "hadoop", load(1, 1, 1))).await.granted();
        sqlx::raw_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        .execute(&database.pool)
        .await
        .unwrap();
        eventually("it is served again", Duration::from_secs(5), || async {
            match rm.client.request_resource(&request(&host, "hadoop", load(1, 1, 1))).await {
                Ok(_) => true,
                Err(error) => {
                    assert_eq!(error.code(), Some(tonic::Code::Unavailable), "{error}");
                    false
                }
            }
        })
        .await;
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 10);
}

/// An instance that stood still answers those who still wait, however many went away meanwhile over the same connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_instance_serves_remaining_callers() {
    let database = Database::fresh().await;
    let process = Process::start(&["--database-url", &database.url()]);
    let host = em("host1");
    process.client.register(registration(host.clone(), load(1000, 1000, 1000))).await.unwrap();
    process.freeze(true);
    let client = process.client.clone();
    let asked = request(&host, "patient", load(1, 1, 1));
    let patient = tokio::spawn(async move { client.request_resource(&asked).await });
    let mut impatient = JoinSet::new();
    for n in 0..200 {
        let (client, lock_ttl) = (process.client.clone(), Some(Duration::from_secs(3)));
        let asked = ResourceRequest { lock_ttl, ..request(&host, &format!("impatient{n}"), load(1, 1, 1)) };
        impatient.spawn(async move {
            let call = client.request_resource(&asked);
            tokio::time::timeout(Duration::from_millis(300), call).await.unwrap_err();
        });
    }
    impatient.join_all().await;
    process.freeze(false);
    patient.await.unwrap().granted();
    // Behind all the others on their connection.
    let last = process.client.request_resource(&request(&host, "last", load(1, 1, 1))).await.granted();
    process.client.resource_released(&release(&last, "last")).await.unwrap();
    // What is granted to them is undone at once, but for an answer that was under way before the server had read that its caller is
    // gone: that expires.
    eventually("those who went away hold nothing", Duration::from_secs(20), || async {
        process.client.tickets(None).await.unwrap().len() == 1
    })
    .await;
    // In one look, because a cancelled call may still be on its way.
    let report = process.client.audit().await.unwrap();
    assert!(report.differences.is_empty() && report.notes.is_empty(), "{report:?}");
}

/// Connections that are lost without a word, in the middle of reads, are replaced.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_database_connections_are_replaced() {
    let (database, direct) = start().await;
    direct.client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
    let (proxy, proxied) = database.behind_proxy("silent");
    let rm = Instance::start(&proxied).await;
    // As many as the pool has connections, and more; all of them read while the connections fall silent.
    for round in 0..5 {
        proxy.set_fault_plan(FaultPlan::Slow(Duration::from_millis(200)));
        let mut reads = JoinSet::new();
        for _ in 0..20 {
            let client = rm.client.clone();
            reads.spawn(async move { tokio::time::timeout(Duration::from_millis(1200), client.ems()).await.is_ok() });
        }
        tokio::time::sleep(Duration::from_millis(500 + 100 * round)).await;
        proxy.forget_all();
        proxy.set_fault_plan(FaultPlan::Fair);
        reads.join_all().await;
    }
    eventually("reads are answered", Duration::from_secs(10), || async { rm.client.ems().await.is_ok() }).await;
    rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
}

/// A connection that was lost without a word while nobody used it costs the next call a moment, not its answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_idle_connection_fails_no_call() {
    let (database, _direct) = start().await;
    let (proxy, proxied) = database.behind_proxy("silent-idle");
    let rm = Instance::start(&proxied).await;
    let read_ten_times = async || {
        let reads = (0..10).map(|_| rm.client.clone()).map(|client| async move { client.ems().await });
        reads.collect::<JoinSet<_>>().join_all().await
    };
    // Slowly, so that each has a connection of its own.
    proxy.set_fault_plan(FaultPlan::Slow(Duration::from_millis(50)));
    read_ten_times().await;
    proxy.set_fault_plan(FaultPlan::Fair);
    proxy.forget_all();
    for answer in read_ten_times().await {
        answer.unwrap();
    }
}

/// A read on a connection that is lost without a word is answered, also if its caller would wait for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_on_a_connection_that_fell_silent_is_answered() {
    let (database, _direct) = start().await;
    let (proxy, proxied) = database.behind_proxy("silent-read");
    let rm = Instance::start(&proxied).await;
    proxy.set_fault_plan(FaultPlan::Slow(Duration::from_millis(200)));
    let client = rm.client.clone();
    let read = tokio::spawn(async move { client.ems().await });
    // After the look whether the connection is still good, and before the answer.
    tokio::time::sleep(Duration::from_millis(700)).await;
    proxy.forget_all();
    let answer = tokio::time::timeout(Duration::from_secs(30), read).await.expect("an answer").unwrap();
    assert_eq!(answer.unwrap_err().reason().as_deref(), Some("DATABASE_UNAVAILABLE"));
}

/// Work that one instance does for all goes on soon after its connection for that was lost without a word.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_after_silent_connection_is_renewed() {
    let (database, direct) = start().await;
    direct.stop().await;
    let (proxy, proxied) = database.behind_proxy("lease");
    let _rm = Instance::start(&proxied).await;
    let renewals = "SELECT coalesce(max(held_until) > clock_timestamp() + interval '4 seconds', false)::int::bigint FROM linkis_rm_lease";
    let is_renewed = || async { database.count(renewals).await == 1 };
    eventually("it is held", Duration::from_secs(5), is_renewed).await;
    proxy.forget_all();
    eventually("it is about to end", Duration::from_secs(5), || async { !is_renewed().await }).await;
    // Sooner than a statement without an answer is given up otherwise.
    eventually("it is renewed", Duration::from_secs(8), is_renewed).await;
}

/// A connection that ends costs nobody the lease: whatever this instance does for all goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_after_connection_end_is_kept() {
    let (database, rm) = start().await;
    rm.stop().await;
    let store = Store::open(database.target(), options().history).await.unwrap();
    let (holder, mut session) = (LeaseFlag::default(), store.session());
    let mut lease = RenewLease::new(Uuid::new_v4(), holder.clone());
    assert_eq!(lease.step(&mut session).await.unwrap(), Step::Done);
    assert!(holder.holds());
    let own = sqlx::query_scalar::<_, i32>("SELECT pg_backend_pid()");
    let own = own.fetch_one(session.get().await.unwrap()).await.unwrap();
    let ended = sqlx::query("SELECT pg_terminate_backend($1, 10000)").bind(own);
    ended.execute(&database.pool).await.unwrap();
    assert_eq!(lease.step(&mut session).await.unwrap(), Step::Done);
    assert!(holder.holds());
}
