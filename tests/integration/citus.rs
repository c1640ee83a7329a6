//! Cells on Citus, where it is installed (`tests/citus/cluster install`).

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use rm_client::{ResultResource, RmClient};
use rm_proto::v1::{self as proto, usage_service_client::UsageServiceClient};
use rm_store::{Store, history_partition, schema};
use sqlx::Row as _;
use uuid::Uuid;

use crate::{citus_cluster::Cell, harness::*, scale::crowd};

/// Longest pause of calls to a cell that moves.
const PAUSE_MAX: Duration = Duration::from_secs(5);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cell_on_citus_serves_two_instances() {
    let Some(cell) = Cell::make().await else { return };
    let (one, two) = (cell.start().await, cell.start().await);
    let em1 = em("host1");
    one.client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap();
    one.client.set_limit(&each_user(3)).await.unwrap();
    let grant = two.client.request_resource(&request(&em1, "bob", load(8, 8, 1))).await.granted();
    two.client.resource_inited(&inited(&grant, "bob", None)).await.unwrap();
    // A release on one instance grants a request that waits on the other.
    let waiting = enqueue(&one.client, patient(&em1, "alice", load(4, 4, 1))).await;
    two.client.resource_released(&release(&grant, "bob")).await.unwrap();
    let next = grant_of(waiting).await;
    let database = cell.database().await;
    assert_eq!(assert_invariants(&database, &two.client).await, 1);
    two.client.resource_released(&release(&next, "alice")).await.unwrap();
    // Citus reads the lines through the coordinator.
    let lines: i64 = sqlx::query_scalar("SELECT count(*) FROM linkis_resource_action_record")
        .fetch_one(&mut cell.coordinator().await)
        .await
        .unwrap();
    assert!(lines >= 6, "{lines}");
    // A command writes to the cell, too.
    let token =
        ["token", "create", "--name", "vera", "--role", "viewer", "--owner", "v@example.com", "--lifetime", "1d"];
    assert!(!cell.printed(&token).is_empty());
    assert_eq!(database.count("SELECT count(*) FROM linkis_rm_token WHERE name = 'vera'").await, 1);
    assert!(cell.printed(&["token", "list"]).contains("vera"));
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cell_start_without_distribution_names_statement() {
    let Some(cell) = Cell::named() else { return };
    let stderr = |cell: &Cell, arguments: &[&str]| {
        let mut command = cell.command(&["--listen", "127.0.0.1:0", "--http-listen", ""]);
        let output = command.args(arguments).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let not_distributed = format!("SELECT citus_schema_distribute('{}')", cell.name);
    assert!(stderr(&cell, &[]).contains(&not_distributed));
    assert!(cell.command(&["migrate"]).status().unwrap().success());
    assert!(stderr(&cell, &[]).contains(&not_distributed));
    // A database without a coordinator.
    let database = Database::fresh().await;
    let socket = database.options.get_socket().unwrap().display().to_string();
    let name = database.options.get_database().unwrap();
    let url = format!("postgres://postgres@localhost:5432/{name}?host={socket}");
    assert!(stderr(&cell, &["--database-url", &url]).contains("names a socket"));
    let plain = cell.url().replace("/rm?", "/postgres?");
    assert!(stderr(&cell, &["--database-url", &plain]).contains("does not name a coordinator of Citus"));
}

/// Replies to callers while a cell moves.
#[derive(Default)]
struct Ledger {
    granted: Mutex<HashSet<Uuid>>,
    released: Mutex<HashSet<Uuid>>,
    /// Time of the last successful reply of each caller, and the longest time between two of them.
    last: Mutex<HashMap<usize, Instant>>,
    pause: Mutex<Duration>,
    answered: AtomicUsize,
}

impl Ledger {
    fn answered(&self, caller: usize) {
        self.answered.fetch_add(1, Ordering::Relaxed);
        let now = Instant::now();
        if let Some(before) = self.last.lock().unwrap().insert(caller, now) {
            let mut pause = self.pause.lock().unwrap();
            *pause = pause.max(now - before);
        }
    }
}

/// Requests, and releases every other ticket, until `stop`.
async fn ask_on(client: RmClient, caller: usize, ledger: Arc<Ledger>, stop: Arc<AtomicBool>) {
    let (em1, user) = (em("host1"), format!("u{caller}"));
    let mut turn = 0;
    while !stop.load(Ordering::Relaxed) {
        turn += 1;
        let grant = match client.request_resource(&request(&em1, &user, load(0, 1, 1))).await {
            Ok(ResultResource::Available(grant)) => grant,
            Ok(ResultResource::NotEnough(refusal)) => panic!("{refusal:?}"),
            Err(error) => {
                assert!(matches!(error.code(), Some(tonic::Code::Unavailable | tonic::Code::Aborted)), "{error:?}");
                pause_as_advised(&error).await;
                continue;
            }
        };
        ledger.answered(caller);
        ledger.granted.lock().unwrap().insert(grant.ticket_id);
        if turn % 2 == 0 && client.resource_released(&release(&grant, &user)).await.is_ok() {
            ledger.released.lock().unwrap().insert(grant.ticket_id);
        }
    }
}

/// Records the granted tickets in the order of the followed lines.
async fn follow_all(client: RmClient, numbers: Arc<Mutex<Vec<Uuid>>>) {
    let mut follower = client.follow_actions("");
    loop {
        match follower.next().await {
            Ok(got) => {
                let granted = got.actions.iter().filter(|line| line.action == "granted");
                numbers.lock().unwrap().extend(granted.map(|line| line.ticket_id.parse::<Uuid>().unwrap()));
            }
            Err(error) => {
                assert!(matches!(error.code(), Some(tonic::Code::Unavailable | tonic::Code::Cancelled)), "{error:?}");
                pause_as_advised(&error).await;
            }
        }
    }
}

/// A cell moves to another worker and back under load: every acknowledged grant and release is kept, and no caller pauses for long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cell_move_under_load_loses_no_ticket() {
    let Some(cell) = Cell::make().await else { return };
    let live = i64::try_from(crowd_of(3000)).unwrap();
    let instances = [cell.start().await, cell.start().await];
    let client = &instances[0].client;
    crowd(&cell.database().await, client, &em("crowd"), live, "1 day").await;
    client.register(registration(em("host1"), load(0, 1_000_000, 1_000_000))).await.unwrap();
    // A request waits throughout.
    let full = em("full");
    client.register(registration(full.clone(), load(1, 1, 1))).await.unwrap();
    let held = client.request_resource(&request(&full, "bob", load(1, 1, 1))).await.granted();
    let mut ask = request(&full, "alice", load(1, 1, 1));
    ask.wait_timeout = LONG * 5;
    let waits = hurried(&instances[1].address, LONG * 5);
    let waiting = tokio::spawn(async move { waits.request_resource(&ask).await });
    let (ledger, stop, got) = (Arc::<Ledger>::default(), Arc::<AtomicBool>::default(), Arc::default());
    let following = tokio::spawn(follow_all(client.clone(), Arc::clone(&got)));
    eventually("the follower has begun", LONG, async || instances[0].metric("linkis_rm_followers") == 1.0).await;
    let asking: Vec<_> = (0..8)
        .map(|caller| {
            let client = instances[caller % 2].client.clone();
            tokio::spawn(ask_on(client, caller, ledger.clone(), stop.clone()))
        })
        .collect();
    let more = |count: usize| {
        let (ledger, before) = (ledger.clone(), ledger.answered.load(Ordering::Relaxed));
        async move {
            eventually("grants", LONG, || async { ledger.answered.load(Ordering::Relaxed) > before + count }).await
        }
    };
    more(200).await;
    for _ in 0..2 {
        cell.move_away().await;
        more(200).await;
        let pause = std::mem::take(&mut *ledger.pause.lock().unwrap());
        assert!(pause < PAUSE_MAX, "{pause:?}");
    }
    stop.store(true, Ordering::Relaxed);
    for asked in asking {
        asked.await.unwrap();
    }
    client.resource_released(&release(&held, "bob")).await.unwrap();
    waiting.await.unwrap().granted();
    let database = cell.database().await;
    let stored = |action: &'static str| {
        let pool = database.pool.clone();
        async move {
            let sql =
                "SELECT ticket_id FROM linkis_resource_action_record WHERE action = $1 AND em_instance = 'host1:9102'";
            let rows: Vec<Uuid> = sqlx::query_scalar(sql).bind(action).fetch_all(&pool).await.unwrap();
            rows.into_iter().collect::<HashSet<_>>()
        }
    };
    let (granted, released) = (ledger.granted.lock().unwrap().clone(), ledger.released.lock().unwrap().clone());
    let lost = granted.difference(&stored("granted").await).count();
    let back = released.difference(&stored("released").await).count();
    assert_eq!((lost, back), (0, 0));
    let all_received = || async {
        let got: HashSet<Uuid> = got.lock().unwrap().iter().copied().collect();
        granted.is_subset(&got)
    };
    eventually("the follower receives all lines", LONG, all_received).await;
    following.abort();
    let got = got.lock().unwrap().clone();
    assert_eq!(got.len(), got.iter().collect::<HashSet<_>>().len(), "each line once");
    assert!(assert_invariants(&database, client).await >= usize::try_from(live).unwrap());
    for instance in instances {
        instance.stop().await;
    }
}

/// A migration of a later release goes through the coordinator to the cell's worker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cell_migration_runs_on_its_worker() {
    const LATER: &str = "ALTER TABLE linkis_em_meta_data ADD COLUMN later text NOT NULL DEFAULT 'x'";
    let Some(cell) = Cell::make().await else { return };
    assert_eq!(cell.printed(&["migrate"]), "the schema is up to date\n");
    let instance = cell.start().await;
    instance.client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    let grant = instance.client.request_resource(&request(&em("host1"), "bob", load(1, 1, 1))).await.granted();
    // A later release starts while this one runs.
    schema::apply_later(&mut cell.coordinator().await, 9999, LATER).await.unwrap();
    let later = cell.start().await;
    let database = cell.database().await;
    assert_eq!(database.count("SELECT count(*) FROM linkis_em_meta_data WHERE later <> 'x'").await, 0);
    for instance in [&instance, &later] {
        instance.client.request_resource(&request(&em("host1"), "bob", load(1, 1, 1))).await.granted();
    }
    later.client.resource_released(&release(&grant, "bob")).await.unwrap();
    assert_eq!(assert_invariants(&database, &instance.client).await, 2);
    instance.stop().await;
    later.stop().await;
}

/// Partitions of the history are created, indexed and dropped through the coordinator, and used on the worker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cell_history_partitions_are_on_worker() {
    let Some(cell) = Cell::make().await else { return };
    let instance = cell.start().await;
    let store = Store::open(cell.target(), HISTORY).await.unwrap();
    let mut schema = store.schema_session().unwrap();
    let connection = schema.get().await.unwrap();
    let hour = "extract(epoch FROM date_trunc('hour', now()))::bigint";
    let part = format!("SELECT linkis_rm_make_history_part({hour} - 86400, {hour} - 82800)");
    execute(&mut *connection, part).await;
    let database = cell.database().await;
    database.execute(r#"INSERT INTO linkis_resource_action_record (action, em_application_name, em_instance, resource_type, resource, actor, action_time)
            SELECT 'registered', 'other', 'other', 'CPU', '{"cores":1}', 'somebody', date_trunc('hour', now()) - interval '1 day'
            FROM generate_series(1, 300) n;
        INSERT INTO linkis_resource_action_record (action, em_application_name, em_instance, resource_type, resource, actor, action_time)
            VALUES ('registered', 'ecm', 'rarely', 'CPU', '{"cores":1}', 'seldom', date_trunc('hour', now()) - interval '1 day')"#).await;
    let lacks = history_partition::indexed(&mut database.pool.acquire().await.unwrap()).await.unwrap().unwrap().below;
    for _ in 0..3 {
        assert!(history_partition::index_oldest(&mut *connection).await.unwrap());
    }
    assert!(!history_partition::index_oldest(&mut *connection).await.unwrap());
    // The worker reports it: only later partitions are without indexes.
    let below = history_partition::indexed(&mut database.pool.acquire().await.unwrap()).await.unwrap().unwrap().below;
    assert!(below > lacks, "{below} {lacks}");
    let mut usage = UsageServiceClient::connect(instance.address.clone()).await.unwrap();
    let call = proto::ListActionsRequest { actor: "seldom".into(), ..Default::default() };
    assert_eq!(usage.list_actions(call.clone()).await.unwrap().into_inner().actions.len(), 1);
    let before = database.count("SELECT forgotten FROM linkis_resource_action_horizon").await;
    assert!(history_partition::drop_oldest(&mut *connection, Duration::from_secs(3600)).await.unwrap());
    assert!(!history_partition::drop_oldest(&mut *connection, Duration::from_secs(3600)).await.unwrap());
    assert!(database.count("SELECT forgotten FROM linkis_resource_action_horizon").await > before);
    assert!(usage.list_actions(call).await.unwrap().into_inner().actions.is_empty());
    // Writes continue.
    instance.client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    store.close().await;
    instance.stop().await;
}

/// A row that the worker numbers gets a higher number than all earlier rows of the cell, on any worker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cell_move_continues_history_numbers() {
    let Some(cell) = Cell::make().await else { return };
    let instance = cell.start().await;
    let mut last = 0;
    for host in ["host1", "host2", "host3"] {
        let registered = || async { instance.client.register(registration(em(host), load(1, 1, 1))).await.is_ok() };
        eventually("it registers", LONG, registered).await;
        let sql = "SELECT id FROM linkis_resource_action_record WHERE em_instance = $1";
        let database = cell.database().await;
        let row = sqlx::query(sql).bind(format!("{host}:9102")).fetch_one(&database.pool).await.unwrap();
        assert!(row.get::<i64, _>(0) > last);
        last = row.get(0);
        // The newest line is deleted, and its number is not reused.
        database.execute("DELETE FROM linkis_resource_action_record").await;
        cell.move_away().await;
    }
    instance.stop().await;
}
