//! Citus with one coordinator and two workers, common to all tests, and cells in it; if it is installed (`tests/citus/cluster install`).

use std::{
    net::TcpListener,
    path::Path,
    process::{Command, Stdio},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use rm_store::{citus::Cell as Name, connect_target::ConnectTarget};
use sqlx::{ConnectOptions as _, PgConnection, Row as _, postgres::PgConnectOptions};

use crate::harness::*;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/citus/cluster");

/// The coordinator's port; the workers' follow it.
fn cluster() -> Option<u16> {
    static PORT: OnceLock<Option<u16>> = OnceLock::new();
    *PORT.get_or_init(|| {
        if !Command::new(SCRIPT).arg("has").stderr(Stdio::null()).status().unwrap().success() {
            return None;
        }
        let is_free = |port: &u16| (*port..*port + 3).all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok());
        let first = 22_000 + u16::try_from(std::process::id() % 3000).unwrap() * 3;
        let port = (first..first + 300).find(is_free).unwrap();
        let folder = scratch("citus");
        let up = Command::new(SCRIPT).arg("up").arg(&folder).arg(port.to_string()).stdin(Stdio::null()).status();
        stop_at_end(&folder);
        assert!(up.unwrap().success());
        for (port, name) in [(port, "postgres"), (port + 1, "postgres"), (port + 2, "postgres")] {
            run_at(port, name, "CREATE DATABASE rm");
            run_at(port, "rm", "CREATE EXTENSION citus");
        }
        run_at(port, "rm", &format!("SELECT citus_set_coordinator_host('127.0.0.1', {port})"));
        for worker in [port + 1, port + 2] {
            run_at(port, "rm", &format!("SELECT citus_add_node('127.0.0.1', {worker})"));
        }
        Some(port)
    })
}

/// Starts a script that stops the cluster after the end of this process, and removes its files.
fn stop_at_end(folder: &Path) {
    let script = r#"(while [ -d "/proc/$1" ]; do sleep 0.2; done; "$3" down "$2"; rm -rf "$2") &"#;
    let mut watcher = Command::new("sh");
    watcher.args(["-c", script, "sh", &std::process::id().to_string()]).arg(folder).arg(SCRIPT);
    std::os::unix::process::CommandExt::process_group(&mut watcher, 0);
    assert!(watcher.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success());
}

/// Runs a statement by psql, because no runtime exists for as long as the cluster.
fn run_at(port: u16, database: &str, sql: &str) {
    let mut psql = Command::new("psql");
    psql.args(["-XqAt", "-v", "ON_ERROR_STOP=1", "-h", "127.0.0.1", "-U", "postgres", "-d", database, "-c", sql]);
    assert!(psql.arg("-p").arg(port.to_string()).stdout(Stdio::null()).status().unwrap().success(), "{sql}");
}

/// A cell.
#[derive(Clone)]
pub struct Cell {
    pub name: String,
    coordinator: u16,
}

impl Cell {
    /// Returns a new cell name and the coordinator, without creating the cell. Returns `None` and prints the reason without Citus.
    pub fn named() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let Some(coordinator) = cluster() else {
            println!("skipped: Citus is not installed: tests/citus/cluster install");
            return None;
        };
        Some(Self { name: format!("cell{}", COUNT.fetch_add(1, Ordering::Relaxed)), coordinator })
    }

    /// Creates a cell as an operator does.
    pub async fn make() -> Option<Self> {
        let cell = Self::named()?;
        cell.printed(&["migrate"]);
        cell.distribute().await;
        Some(cell)
    }

    pub async fn distribute(&self) {
        self.coordinate(&format!("SELECT citus_schema_distribute('{}')", self.name)).await;
    }

    /// Returns a command of the program for the cell.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(*PROGRAM);
        command.args(words).env("DATABASE_URL", self.url()).env("LINKIS_RM_CELL", &self.name);
        command.env_remove("LINKIS_RM_DATA_DIR");
        command
    }

    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/rm?sslmode=disable", self.coordinator)
    }

    pub fn target(&self) -> ConnectTarget {
        ConnectTarget::parse(&self.url()).unwrap().with_cell(Name::parse(&self.name).unwrap()).unwrap()
    }

    pub fn worker(&self, number: u16) -> u16 {
        self.coordinator + number
    }

    fn options(&self, port: u16) -> PgConnectOptions {
        self.url().parse::<PgConnectOptions>().unwrap().port(port)
    }

    /// A connection to the coordinator that sees the cell's tables by their names.
    pub async fn coordinator(&self) -> PgConnection {
        let options = self.options(self.coordinator).options([("search_path", &self.name)]);
        options.connect().await.unwrap()
    }

    pub async fn coordinate(&self, sql: &str) {
        execute(&mut self.coordinator().await, sql.to_owned()).await;
    }

    /// Returns the port of the cell's worker.
    pub async fn owner(&self) -> u16 {
        let port = sqlx::query("SELECT nodeport FROM citus_shards WHERE table_name = 'linkis_resource_lock'::regclass")
            .fetch_one(&mut self.coordinator().await)
            .await
            .unwrap();
        u16::try_from(port.get::<i32, _>(0)).unwrap()
    }

    /// Moves the cell to the other worker. Returns the duration.
    pub async fn move_away(&self) -> Duration {
        let (one, begun) = (self.worker(1), Instant::now());
        let to = if self.owner().await == one { self.worker(2) } else { one };
        self.coordinate(&format!("SELECT citus_schema_move('{}', '127.0.0.1', {to})", self.name)).await;
        begun.elapsed()
    }

    /// Returns the cell as a test database: directly on its current worker.
    pub async fn database(&self) -> Database {
        let path = [("search_path", format!("{}_local", self.name)), ("linkis_rm.cell", self.name.clone())];
        self.options(self.owner().await).options(path).into()
    }

    pub async fn start(&self) -> Instance {
        Instance::start_on(&format!("{}#{}", self.url(), self.name), settings(), ANY_PORT).await
    }

    /// The output of a command.
    pub fn printed(&self, words: &[&str]) -> String {
        let output = self.command(words).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}
