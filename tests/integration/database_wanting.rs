//! Unusable databases: unreachable, with another encoding, with tables of an earlier state, or with too few connections.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
};

use rm_client::{ClientError, ClientSettings, check_health};
use rm_devpg::EmbeddedPostgres;
use sqlx::{ConnectOptions as _, PgConnection, postgres::PgConnectOptions};
use tokio::task::JoinSet;
use tonic::Code;

use crate::{harness::*, metrics::get};

/// Documented maximum number of connections of an instance.
const CONNECTIONS_MAX: i64 = 20;

async fn run(connection: &mut PgConnection, sql: String) {
    execute(connection, sql).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_away_at_start_is_waited_for() {
    let database = Database::fresh().await;
    let (proxy, behind) = database.behind_proxy("away");
    proxy.close();
    let process = Process::start_unready(&behind.url());
    let (address, http_address) = (process.address.clone(), process.http());
    let away = (503, "not ready: the database does not answer\n".to_owned());
    eventually("it says why it does not serve", LONG, || async { get(http_address, "/readyz").await == away }).await;
    assert_eq!(get(http_address, "/livez").await.0, 200);
    let serves = |service: &'static str| {
        let address = address.clone();
        async move {
            let got = check_health(&address, &ClientSettings::once(LONG), service).await.unwrap();
            got.into_iter().all(|(_, serves)| serves.unwrap())
        }
    };
    assert!(!serves("").await && serves("liveness").await);
    let client = client(&address);
    let error = client.em(&em("host1")).await.unwrap_err();
    assert!(error.code() == Some(Code::Unavailable) && error.to_string().contains("does not answer"), "{error}");
    proxy.open();
    let registered = || async { client.register(registration(em("host1"), load(1, 1, 1))).await.is_ok() };
    eventually("it serves", LONG, registered).await;
    eventually("health says so", LONG, || serves("")).await;
    process.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_absent_ends_the_start_with_reason() {
    let database = Database::fresh().await;
    let why = refusal(&url_of(&database.options.clone().database("nonesuch")), settings()).await;
    assert!(why.contains("database \"nonesuch\" does not exist"), "{why}");
    assert!(!why.contains("at line"), "the line of PostgreSQL's own source is left out: {why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_of_other_encoding_is_refused_by_name() {
    let database = Database::fresh().await;
    let mut admin = database.connect().await;
    let name = database.options.get_database().unwrap();
    for encoding in ["LATIN1", "SQL_ASCII"] {
        let other = format!("{name}_{}", encoding.to_lowercase());
        let sql =
            format!("CREATE DATABASE {other} ENCODING '{encoding}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'");
        run(&mut admin, sql).await;
        let url = url_of(&database.options.clone().database(&other));
        if encoding == "LATIN1" {
            let why = refusal(&url, settings()).await;
            assert!(why.contains("encoding LATIN1, but UTF8 is needed"), "{why}");
        } else {
            let rm = Instance::start_on(&url, settings(), ANY_PORT).await;
            rm.client.register(registration(em("主机"), load(10, 10, 10))).await.unwrap();
            rm.client.request_resource(&request(&em("主机"), "用户", load(1, 1, 1))).await.granted();
            rm.stop().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_of_earlier_state_is_recognised() {
    let tables = Database::empty().await;
    tables.execute("CREATE TABLE linkis_em_meta_data (id int)").await;
    let changed = Database::fresh().await;
    Instance::start(&changed).await.stop().await;
    let change = "UPDATE linkis_rm_migration_cell SET checksum = '\\x00' WHERE version = 1";
    changed.execute(change).await;
    for database in [tables, changed] {
        for settings in [settings(), settings().with("--no-migrate", "")] {
            let why = refusal(&database.url(), settings).await;
            assert!(why.contains("an unsupported earlier release"), "{why}");
            assert!(why.contains("empty database") && why.contains("AdoptTicket"), "it says what to do: {why}");
        }
        let mut migrate = std::process::Command::new(*PROGRAM);
        migrate.arg("migrate").env("DATABASE_URL", database.url()).env_remove("LINKIS_RM_DATA_DIR");
        let ended = tokio::task::spawn_blocking(move || migrate.output().unwrap()).await.unwrap();
        let why = String::from_utf8(ended.stderr).unwrap();
        assert!(!ended.status.success() && why.contains("an unsupported earlier release"), "{why}");
    }
}

/// Starts a PostgreSQL with a role that has a connection limit.
struct Small {
    postgres: EmbeddedPostgres,
    folder: std::path::PathBuf,
}

impl Small {
    async fn start(name: &str) -> Self {
        let folder = scratch(name);
        fs::create_dir_all(&folder).unwrap();
        let access = folder.join("access");
        fs::write(&access, "local all postgres peer map=owner\nlocal all all trust\n").unwrap();
        let options = [("hba_file", access.to_str().unwrap()), ("shared_buffers", "32MB")];
        let postgres = start_postgres(&folder.join("postgres"), &options).await.unwrap();
        let small = Self { postgres, folder };
        small.run("CREATE ROLE small LOGIN".into()).await;
        small.run("CREATE DATABASE small OWNER small".into()).await;
        small
    }

    async fn run(&self, sql: String) {
        run(&mut self.postgres.connect_options().connect().await.unwrap(), sql).await;
    }

    async fn limit(&self, connections: i64) {
        self.run(format!("ALTER ROLE small CONNECTION LIMIT {connections}")).await;
    }

    fn database(&self) -> PgConnectOptions {
        self.postgres.connect_options().username("small").database("small")
    }

    async fn connections(&self) -> i64 {
        let mut admin = self.postgres.connect_options().connect().await.unwrap();
        let count = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'small'";
        sqlx::query_scalar(count).fetch_one(&mut admin).await.unwrap()
    }

    async fn stop(self) {
        self.postgres.stop().await;
        fs::remove_dir_all(self.folder).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_with_few_connections_keeps_instance_unready() {
    let small = Small::start("too-few").await;
    Instance::start_on(&url_of(&small.database()), settings(), ANY_PORT).await.stop().await;
    for limit in [1, 2, 3, 4, 6, 8] {
        eventually("the last instance is gone", LONG, || async { small.connections().await == 0 }).await;
        small.limit(limit).await;
        let process = Process::start_unready(&url_of(&small.database()));
        let (address, http_address) = (process.address.clone(), process.http());
        let says_why = |text: &str| text.contains("too many connections for role \"small\"") && text.contains("20");
        eventually("it says why it does not serve", LONG, || async {
            let (code, text) = get(http_address, "/readyz").await;
            code == 503 && says_why(&text)
        })
        .await;
        let client = client(&address);
        let register = || client.register(registration(em("host1"), load(100, 100, 100)));
        eventually("a caller gets the reason", LONG, || async {
            register().await.is_err_and(|error| says_why(&error.to_string()))
        })
        .await;
        small.limit(CONNECTIONS_MAX).await;
        eventually("it serves", LONG, || async { get(http_address, "/readyz").await.0 == 200 }).await;
        eventually("a call is served", LONG, || async { register().await.is_ok() }).await;
        process.stop();
    }
    small.stop().await;
}

/// Fails every insert into the ledger as PostgreSQL does on a full disk, and counts the attempts: a sequence is not rolled back.
const DISK_FULL: &str = "CREATE SEQUENCE disk_full_attempts;
    CREATE FUNCTION disk_full() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        PERFORM nextval('disk_full_attempts');
        RAISE 'could not extend file \"base/7\": No space left on device' USING ERRCODE = '53100';
    END $$;
    DO $$ DECLARE ledger regclass; BEGIN
        FOR ledger IN SELECT oid FROM pg_class WHERE relkind IN ('r', 'p') AND NOT relispartition AND relname IN (
            'linkis_em_resource_meta_data', 'linkis_user_resource_meta_data', 'linkis_user_request_id',
            'linkis_resource_action_record')
        LOOP
            EXECUTE format('CREATE TRIGGER disk_full BEFORE INSERT ON %s FOR EACH ROW EXECUTE FUNCTION disk_full()', ledger);
        END LOOP;
    END $$";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_with_full_disk_keeps_instance_unready() {
    let (database, rm) = start_with_host1().await;
    let kept = rm.client.request_resource(&request(&em("host1"), "bob", load(1, 1, 1))).await.granted();
    database.execute(DISK_FULL).await;
    let says_why = |text: &str| text.contains("no space left on its disk (could not extend file \"base/7\"");
    let ask = || async { rm.client.request_resource(&request(&em("host1"), "bob", load(1, 1, 1))).await };
    let error = ask().await.unwrap_err();
    assert!(
        error.code() == Some(Code::Unavailable) && says_why(&error.to_string()),
        "a caller gets the reason: {error}"
    );
    let is_unready = || async {
        let (code, text) = get(rm.http, "/readyz").await;
        code == 503 && says_why(&text)
    };
    eventually("it says why it is not ready", LONG, is_unready).await;
    let serves = || async {
        let states = check_health(&rm.address, &ClientSettings::once(LONG), "").await.unwrap();
        states.into_iter().all(|(_, serves)| serves.unwrap())
    };
    eventually("health says so", LONG, || async { !serves().await }).await;
    assert_eq!(get(rm.http, "/livez").await.0, 200);
    assert_eq!(rm.client.tickets(None).await.unwrap().len(), 1, "reads are served, and nothing was changed");
    let attempts = "SELECT last_value FROM disk_full_attempts";
    let before = database.count(attempts).await;
    eventually("writes are attempted", LONG, || async { database.count(attempts).await >= before + 3 }).await;
    assert!(is_unready().await, "a failed attempt does not make it ready");
    database.execute("DROP FUNCTION disk_full CASCADE").await;
    eventually("it is ready", LONG, || async { get(rm.http, "/readyz").await.0 == 200 }).await;
    eventually("health says so", LONG, serves).await;
    ask().await.granted();
    rm.client.resource_released(&release(&kept, "bob")).await.unwrap();
    assert_eq!(database.count("SELECT count(*) FROM linkis_user_request_id WHERE \"user\" = ''").await, 0);
    rm.stop().await;
}

/// Asserts that a call got its reply, or was rejected as one of too many calls of operators.
#[track_caller]
fn assert_served<T>(answer: Result<T, ClientError>) {
    if let Err(error) = answer {
        assert_eq!(error.code(), Some(Code::ResourceExhausted), "{error}");
    }
}

/// All kinds of calls concurrently, beside the background tasks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_connections_of_busy_instance_stay_bounded() {
    let small = Small::start("enough").await;
    small.limit(CONNECTIONS_MAX).await;
    let rm = Instance::start_on(&url_of(&small.database()), settings(), ANY_PORT).await;
    let ems: Vec<_> = (0..16).map(|em1| em(&format!("host{em1}"))).collect();
    for em1 in &ems {
        rm.client.register(registration(em1.clone(), load(100, 100, 100))).await.unwrap();
    }
    // Another transaction owns the keys of some EMs for a while: their operations wait in lanes.
    let holds = Database::from(small.postgres.connect_options().database("small"));
    let (most, stop) = (AtomicI64::new(0), Arc::<AtomicBool>::default());
    let mut asking = JoinSet::new();
    for number in 0..40_usize {
        let (client, em1, stop) = (rm.client.clone(), ems[number % ems.len()].clone(), stop.clone());
        asking.spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                match number % 5 {
                    0 => {
                        let grant = client.request_resource(&request(&em1, "bob", load(1, 1, 1))).await.granted();
                        client.resource_inited(&grant.inited(name("bob"), engine("host"))).await.unwrap();
                        client.resource_released(&release(&grant, "bob")).await.unwrap();
                    }
                    1 => assert_served(client.ems().await),
                    2 => assert_served(client.em(&em1).await),
                    3 => assert_served(client.tickets(None).await),
                    _ => assert_served(client.audit().await),
                }
            }
        });
    }
    let metric = async |series: &str| {
        most.fetch_max(small.connections().await, Ordering::Relaxed);
        assert_eq!(get(rm.http, "/readyz").await.0, 200, "it serves all the while");
        rm.metric(series)
    };
    let contended = "linkis_rm_contended_operations";
    let cluster = r#"linkis_rm_task_steps_total{task="cluster"}"#;
    for _ in 0..15 {
        let mut holders = Vec::new();
        for em1 in &ems[..8] {
            holders.push(holds.transaction_that_holds(em1).await);
        }
        eventually("callers of four held EMs wait", LONG, async || metric(contended).await >= 4.0).await;
        drop(holders);
        eventually("no caller waits", LONG, async || metric(contended).await == 0.0).await;
    }
    eventually("a slow task runs, too", LONG, async || metric(cluster).await >= 1.0).await;
    stop.store(true, Ordering::Relaxed);
    asking.join_all().await;
    let most = most.into_inner();
    assert!(most <= CONNECTIONS_MAX, "{most}");
    rm.stop().await;
    small.stop().await;
}

/// Returns PostgreSQL's counts of opened connections and of cut connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_connections_of_contended_keys_are_reused() {
    let (database, rm) = start_with_host1().await;
    let counts =
        "SELECT (SELECT sessions * 1000 + sessions_abandoned FROM pg_stat_database WHERE datname = current_database())
        + 0 * (SELECT count(*) FROM (SELECT pg_stat_clear_snapshot()) AS cleared)";
    let contend = async || {
        let holder = database.transaction_that_holds(&em("host1")).await;
        let held = request_in_task(&rm.client, request(&em("host1"), "bob", load(1, 1, 1)));
        eventually("it waits", LONG, || is_waiting(&database)).await;
        drop(holder);
        held.await.unwrap().granted();
    };
    const ROUNDS: i64 = 60;
    for _ in 0..ROUNDS {
        contend().await;
    }
    rm.stop().await;
    // PostgreSQL counts a session when it ends.
    let live =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'linkis-rm'";
    eventually("all sessions of the instance have ended", LONG, async || database.count(live).await == 0).await;
    let counts = database.count(counts).await;
    let (opened, abandoned) = (counts / 1000, counts % 1000);
    // The test opens one connection in each round, which is cut.
    assert!(opened <= ROUNDS + 35, "{opened} connections were opened in {ROUNDS} rounds");
    assert!(
        abandoned <= ROUNDS + 25,
        "{abandoned} were cut off, of which {ROUNDS} by hand and the others with the instance"
    );
}
