//! One PostgreSQL for a test run, and a new database for each test.

use std::{
    net::TcpListener,
    path::Path,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use rm_devpg::{EmbeddedError, EmbeddedPostgres, EmbeddedSettings};
use sqlx::{AssertSqlSafe, ConnectOptions as _, PgExecutor, postgres::PgConnectOptions};

use crate::{remove_at_end, scratch};

/// The PostgreSQL of this test run, which ends with the process.
fn postgres() -> &'static PgConnectOptions {
    static OPTIONS: OnceLock<PgConnectOptions> = OnceLock::new();
    OPTIONS.get_or_init(|| {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        // A thread for the whole run, because the runtime of a test ends with it.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            runtime.block_on(async {
                let data_dir = scratch("shared");
                remove_at_end(&data_dir);
                let postgres = start_postgres(&data_dir, &[]).await.unwrap();
                sender.send(postgres.connect_options()).unwrap();
                panic!("PostgreSQL ended by itself: {}", postgres.died().await);
            })
        });
        receiver.recv().expect("a PostgreSQL for the tests")
    })
}

/// Starts a PostgreSQL that never waits for its disk: no test outlives a crash of the machine.
pub async fn start_postgres(data_dir: &Path, options: &[(&str, &str)]) -> Result<EmbeddedPostgres, EmbeddedError> {
    let fast = [("fsync", "off"), ("full_page_writes", "off")];
    let options = fast.iter().chain(options).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let settings = EmbeddedSettings { data_dir: data_dir.to_owned(), server_options: options.collect() };
    EmbeddedPostgres::start(settings).await
}

/// Starts a PostgreSQL on a free port of this machine, with access by the file `hba`. Returns it with its port.
pub async fn start_postgres_on_port(data_dir: &Path, hba: &Path, options: &[(&str, &str)]) -> (EmbeddedPostgres, u16) {
    let mut failures = Vec::new();
    // Another process may take the port first.
    for _ in 0..5 {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (text, hba) = (port.to_string(), hba.to_str().unwrap());
        let own = [("port", &*text), ("listen_addresses", "127.0.0.1"), ("hba_file", hba)];
        match start_postgres(data_dir, &[&own, options].concat()).await {
            Ok(postgres) => return (postgres, port),
            Err(error) => failures.push(error),
        }
    }
    panic!("no PostgreSQL: {failures:?}");
}

/// Creates a database as a copy of `template`.
pub async fn new_database(template: &str) -> PgConnectOptions {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("test_{}", COUNT.fetch_add(1, Ordering::Relaxed));
    let create = format!("CREATE DATABASE {name} TEMPLATE {template}");
    execute(&mut postgres().connect().await.unwrap(), create).await;
    postgres().clone().database(&name)
}

/// Runs statements on a pool or a connection, and returns the number of rows that they changed.
pub async fn execute(executor: impl PgExecutor<'_>, sql: impl AsRef<str>) -> u64 {
    sqlx::raw_sql(AssertSqlSafe(sql.as_ref().to_owned())).execute(executor).await.unwrap().rows_affected()
}
