//! Cells on Citus, where it is installed (`tests/citus/cluster install`).

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use linkis_rm::{
    client::{ResultResource, RmClient},
    store::{Store, history_part},
    transport::proto::{self, usage_service_client::UsageServiceClient},
};
use sqlx::Row as _;
use uuid::Uuid;

use crate::{
    citus_cluster::{Cell, earlier},
    harness::*,
    scale::crowd,
};

const LONG: Duration = Duration::from_secs(60);

/// How long calls to a cell may pause while it moves.
const PAUSE_MAX: Duration = Duration::from_secs(5);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cell_on_citus_serves_two_instances() {
    let Some(cell) = Cell::make().await else { return };
    let (one, two) = (cell.start().await, cell.start().await);
    let host = em("host1");
    one.client.register(registration(host.clone(), load(10, 10, 10))).await.unwrap();
    one.client.set_limit(&each_user(3)).await.unwrap();
    let grant = two.client.request_resource(&request(&host, "bob", load(8, 8, 1))).await.granted();
    two.client.resource_inited(&inited(&grant, "bob", None)).await.unwrap();
    // Who waits on one instance hears of what is given back on the other.
    let mut ask = request(&host, "alice", load(4, 4, 1));
    ask.wait_timeout = LONG;
    let (client, begun) = (one.client.clone(), Instant::now());
    let waiting = tokio::spawn(async move { client.request_resource(&ask).await });
    let in_line = || async { one.client.waiting().await.unwrap().len() == 1 };
    eventually("it stands in line", LONG, in_line).await;
    two.client.resource_released(&release(&grant, "bob")).await.unwrap();
    let next = waiting.await.unwrap().granted();
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    let database = cell.database().await;
    assert_eq!(assert_invariants(&database, &two.client).await, 1);
    two.client.resource_released(&release(&next, "alice")).await.unwrap();
    // What is written there is seen by Citus.
    let lines: i64 = sqlx::query_scalar("SELECT count(*) FROM linkis_resource_action_record")
        .fetch_one(&mut cell.coordinator().await)
        .await
        .unwrap();
    assert!(lines >= 6, "{lines}");
    // A command writes there, too.
    let token =
        ["tokens", "create", "--name", "vera", "--role", "viewer", "--owner", "v@example.com", "--lifetime", "1d"];
    assert!(!cell.printed(&token).is_empty());
    assert_eq!(database.count("SELECT count(*) FROM linkis_rm_token WHERE name = 'vera'").await, 1);
    assert!(cell.printed(&["tokens", "list"]).contains("vera"));
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cell_start_without_distribution_names_statement() {
    let Some(cell) = Cell::named() else { return };
    let told = |cell: &Cell, arguments: &[&str]| {
        let mut command = cell.command(&["--listen", "127.0.0.1:0", "--http-listen", ""]);
        let output = command.args(arguments).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let not_distributed = format!("SELECT citus_schema_distribute('{}')", cell.name);
    assert!(told(&cell, &[]).contains(&not_distributed));
    assert!(cell.command(&["migrate"]).status().unwrap().success());
    assert!(told(&cell, &[]).contains(&not_distributed));
    // A database that is no coordinator's.
    let database = Database::fresh().await;
    let socket = database.options.get_socket().unwrap().display().to_string();
    let name = database.options.get_database().unwrap();
    let url = format!("postgres://postgres@localhost:5432/{name}?host={socket}");
    assert!(told(&cell, &["--database-url", &url]).contains("names a socket"));
    let plain = cell.url().replace("/rm?", "/postgres?");
    assert!(told(&cell, &["--database-url", &plain]).contains("names no coordinator of Citus"));
}

/// What callers were told while a cell was moved.
#[derive(Default)]
struct Ledger {
    granted: Mutex<HashSet<Uuid>>,
    released: Mutex<HashSet<Uuid>>,
    /// The longest time between two answers that were none of failure, and when it ended.
    last: Mutex<HashMap<usize, Instant>>,
    pause: Mutex<Duration>,
    failed: AtomicUsize,
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

/// Asks, and gives every other ticket back, until it is told to stop.
async fn ask_on(client: RmClient, caller: usize, ledger: Arc<Ledger>, stop: Arc<AtomicBool>) {
    let (host, user) = (em("host1"), format!("u{caller}"));
    let mut turn = 0;
    while !stop.load(Ordering::Relaxed) {
        turn += 1;
        let grant = match client.request_resource(&request(&host, &user, load(0, 1, 1))).await {
            Ok(ResultResource::Available(grant)) => grant,
            Ok(ResultResource::NotEnough(refusal)) => panic!("{refusal:?}"),
            Err(error) => {
                assert!(matches!(error.code(), Some(tonic::Code::Unavailable | tonic::Code::Aborted)), "{error:?}");
                ledger.failed.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            }
        };
        ledger.answered(caller);
        ledger.granted.lock().unwrap().insert(grant.ticket_id);
        if turn % 2 == 0 {
            match client.resource_released(&release(&grant, &user)).await {
                Ok(_) => drop(ledger.released.lock().unwrap().insert(grant.ticket_id)),
                Err(_) => drop(ledger.failed.fetch_add(1, Ordering::Relaxed)),
            }
        }
    }
}

/// The numbers of the history, in the order in which they are told.
async fn follow_all(client: RmClient, numbers: Arc<Mutex<Vec<Uuid>>>) {
    let mut follower = client.follow_actions("");
    loop {
        match follower.next().await {
            Ok(told) => {
                let granted = told.actions.iter().filter(|line| line.action == "granted");
                numbers.lock().unwrap().extend(granted.map(|line| line.ticket_id.parse::<Uuid>().unwrap()));
            }
            Err(error) => {
                assert!(matches!(error.code(), Some(tonic::Code::Unavailable | tonic::Code::Cancelled)), "{error:?}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// There and back again, with many live tickets, while two instances grant: whoever was told that something was granted or given back is
/// right, and nobody waits for long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cell_move_under_load_loses_no_ticket() {
    let Some(cell) = Cell::make().await else { return };
    let live = i64::try_from(crowd_of(3000)).unwrap();
    let instances = [cell.start().await, cell.start().await];
    let client = &instances[0].client;
    crowd(&cell.database().await, client, &em("crowd"), live, "1 day").await;
    client.register(registration(em("host1"), load(0, 1_000_000, 1_000_000))).await.unwrap();
    // Somebody stands in line all the while.
    let full = em("full");
    client.register(registration(full.clone(), load(1, 1, 1))).await.unwrap();
    let held = client.request_resource(&request(&full, "bob", load(1, 1, 1))).await.granted();
    let mut ask = request(&full, "alice", load(1, 1, 1));
    ask.wait_timeout = LONG * 5;
    let waits = hurried(&instances[1].address, LONG * 5);
    let waiting = tokio::spawn(async move { waits.request_resource(&ask).await });
    let (ledger, stop, told) = (Arc::<Ledger>::default(), Arc::<AtomicBool>::default(), Arc::default());
    let following = tokio::spawn(follow_all(client.clone(), Arc::clone(&told)));
    tokio::time::sleep(Duration::from_millis(300)).await;
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
    println!("calm: longest pause {:?}", std::mem::take(&mut *ledger.pause.lock().unwrap()));
    for way in ["there", "back"] {
        let (before, failed) = (ledger.answered.load(Ordering::Relaxed), ledger.failed.load(Ordering::Relaxed));
        let took = cell.move_away().await;
        more(200).await;
        let pause = std::mem::take(&mut *ledger.pause.lock().unwrap());
        println!(
            "{way}, with {live} live tickets: {took:?}, {} answers meanwhile, {} failures; longest pause of a caller {pause:?}",
            ledger.answered.load(Ordering::Relaxed) - before,
            ledger.failed.load(Ordering::Relaxed) - failed,
        );
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
    println!("{} grants told, {lost} lost; {} releases told, {back} lost", granted.len(), released.len());
    assert_eq!((lost, back), (0, 0));
    let all_told = || async {
        let told: HashSet<Uuid> = told.lock().unwrap().iter().copied().collect();
        granted.is_subset(&told)
    };
    eventually("who follows the history is told all of it", LONG, all_told).await;
    following.abort();
    let told = told.lock().unwrap().clone();
    assert_eq!(told.len(), told.iter().collect::<HashSet<_>>().len(), "and nothing twice");
    assert!(assert_invariants(&database, client).await >= usize::try_from(live).unwrap());
    for instance in instances {
        instance.stop().await;
    }
}

/// A cell of an earlier release is brought up to date as it is, on its worker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cell_migration_runs_on_its_worker() {
    let Some(cell) = Cell::named() else { return };
    let mut connection = cell.coordinator().await;
    sqlx::raw_sql(sqlx::AssertSqlSafe(format!("CREATE SCHEMA {}", cell.name))).execute(&mut connection).await.unwrap();
    // Of what comes later, Citus takes every statement; SET STORAGE, which came before, it does not.
    for (side, latest) in [("home", 2), ("cell", 11)] {
        earlier(side, latest).await.run(&mut connection).await.unwrap();
    }
    cell.distribute().await;
    assert_eq!(cell.printed(&["migrate"]), "14 migrations were made\n");
    assert_eq!(cell.printed(&["migrate"]), "the schema is up to date\n");
    let instance = cell.start().await;
    instance.client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    let grant = instance.client.request_resource(&request(&em("host1"), "bob", load(1, 1, 1))).await.granted();
    // A later release comes, while this one goes on.
    let column = "ALTER TABLE linkis_em_meta_data ADD COLUMN later text NOT NULL DEFAULT 'x'";
    cell.coordinate(column).await;
    let later = cell.start().await;
    let database = cell.database().await;
    assert_eq!(database.count("SELECT count(*) FROM linkis_em_meta_data WHERE later <> 'x'").await, 0);
    for instance in [&instance, &later] {
        instance.client.request_resource(&request(&em("host1"), "bob", load(1, 1, 1))).await.granted();
    }
    later.client.resource_released(&release(&grant, "bob")).await.unwrap();
    assert_eq!(assert_invariants(&database, &instance.client).await, 2);
    // The same tables as a cell that was made by this release.
    let new = Cell::make().await.unwrap();
    assert_eq!(columns(&cell).await, columns(&new).await);
    instance.stop().await;
    later.stop().await;
}

/// All columns of a cell's tables, but of the one that was added by hand, and of parts.
async fn columns(cell: &Cell) -> Vec<String> {
    let sql = r"SELECT format('%s.%s %s %s', table_name, column_name, data_type, is_nullable) FROM information_schema.columns
        WHERE table_schema = $1 AND column_name <> 'later' AND table_name !~ '_\d{10}_\d{10}$' ORDER BY 1";
    sqlx::query_scalar(sql).bind(&cell.name).fetch_all(&mut cell.coordinator().await).await.unwrap()
}

/// Parts of the history are made, indexed and dropped through the coordinator, and used on the worker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cell_history_partitions_are_on_worker() {
    let Some(cell) = Cell::make().await else { return };
    let instance = cell.start().await;
    let store = Store::open(cell.target(), options().history).await.unwrap();
    let mut schema = store.schema_session().unwrap();
    let connection = schema.get().await.unwrap();
    let hour = "extract(epoch FROM date_trunc('hour', now()))::bigint";
    let part = format!("SELECT linkis_rm_make_history_part({hour} - 86400, {hour} - 82800)");
    sqlx::raw_sql(sqlx::AssertSqlSafe(part)).execute(&mut *connection).await.unwrap();
    let database = cell.database().await;
    sqlx::raw_sql(
        r#"INSERT INTO linkis_resource_action_record (action, em_application_name, em_instance, resource_type, resource, actor, action_time)
            SELECT 'registered', 'other', 'other', 'CPU', '{"cores":1}', 'somebody', date_trunc('hour', now()) - interval '1 day'
            FROM generate_series(1, 300) n;
        INSERT INTO linkis_resource_action_record (action, em_application_name, em_instance, resource_type, resource, actor, action_time)
            VALUES ('registered', 'ecm', 'rarely', 'CPU', '{"cores":1}', 'seldom', date_trunc('hour', now()) - interval '1 day')"#,
    )
    .execute(&database.pool)
    .await
    .unwrap();
    let lacks = history_part::indexed(&mut database.pool.acquire().await.unwrap()).await.unwrap().unwrap().below;
    for _ in 0..3 {
        assert!(history_part::index_oldest(&mut *connection).await.unwrap());
    }
    assert!(!history_part::index_oldest(&mut *connection).await.unwrap());
    // Seen on the worker: only what is behind that part is without indexes.
    let below = history_part::indexed(&mut database.pool.acquire().await.unwrap()).await.unwrap().unwrap().below;
    assert!(below > lacks, "{below} {lacks}");
    let mut usage = UsageServiceClient::connect(instance.address.clone()).await.unwrap();
    let call = proto::ListActionsRequest { actor: "seldom".into(), ..Default::default() };
    assert_eq!(usage.list_actions(call.clone()).await.unwrap().into_inner().actions.len(), 1);
    let before = database.count("SELECT forgotten FROM linkis_resource_action_horizon").await;
    assert!(history_part::drop_oldest(&mut *connection, Duration::from_secs(3600)).await.unwrap());
    assert!(!history_part::drop_oldest(&mut *connection, Duration::from_secs(3600)).await.unwrap());
    assert!(database.count("SELECT forgotten FROM linkis_resource_action_horizon").await > before);
    assert!(usage.list_actions(call).await.unwrap().into_inner().actions.is_empty());
    // What is written goes on.
    instance.client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    store.close().await;
    instance.stop().await;
}

/// A row that the worker numbers itself is numbered behind all that was ever there, wherever the cell was.
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
        // The newest line is gone, and its number is not given out again.
        sqlx::raw_sql("DELETE FROM linkis_resource_action_record").execute(&database.pool).await.unwrap();
        cell.move_away().await;
    }
    instance.stop().await;
}
