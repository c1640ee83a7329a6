//! PostgreSQL primary with a standby, each a process on a port of this machine.

use std::{fs, os::unix::fs::MetadataExt as _, path::PathBuf, process::Command};

use rm_devpg::EmbeddedPostgres;
use rustix::process::{Pid, Signal};
use sqlx::{ConnectOptions as _, PgConnection, postgres::PgConnectOptions};

use crate::harness::*;

/// Access rules.
const ACCESS: &str = "local all postgres peer map=owner
host all all 127.0.0.1/32 trust
host replication all 127.0.0.1/32 trust
";

/// Small: several of them run beside each other.
const SMALL: [(&str, &str); 4] = [
    ("shared_buffers", "32MB"),
    ("wal_receiver_timeout", "5s"),
    ("wal_retrieve_retry_interval", "100ms"),
    ("max_connections", "150"),
];

/// A PostgreSQL.
pub struct Node {
    postgres: EmbeddedPostgres,
    folder: PathBuf,
    pub port: u16,
}

/// Two of them.
pub struct Pair {
    pub primary: Node,
    pub standby: Node,
}

impl Pair {
    /// Starts both. With `synchronous`, each commit waits for the standby.
    pub async fn start(name: &str, synchronous: bool) -> Self {
        let folders = ["a", "b"].map(|which| scratch(&format!("{name}-{which}")));
        folders.iter().for_each(|folder| fs::create_dir_all(folder).unwrap());
        let [a, b] = folders;
        start_postgres(&a, &[]).await.unwrap().stop().await;
        [&a, &b].into_iter().for_each(|folder| fs::write(folder.join("hba"), ACCESS).unwrap());
        // A copy of a stopped node.
        let copied = Command::new("cp").arg("-a").arg(a.join("data")).arg(b.join("data")).status().unwrap();
        assert!(copied.success());
        let owner = fs::metadata(a.join("data")).unwrap();
        let signal = b.join("data/standby.signal");
        fs::write(&signal, "").unwrap();
        std::os::unix::fs::chown(&signal, Some(owner.uid()), Some(owner.gid())).unwrap();
        let primary = Node::start(a, &[]).await;
        let follows = format!("host=127.0.0.1 port={} user=postgres application_name=b", primary.port);
        let standby = Node::start(b, &[("primary_conninfo", &follows)]).await;
        let pair = Self { primary, standby };
        eventually("the standby follows", LONG, || async { pair.primary.count(FOLLOWERS).await == Some(1) }).await;
        if synchronous {
            pair.primary.run("ALTER SYSTEM SET synchronous_standby_names = '*'").await;
            pair.primary.run("SELECT pg_reload_conf()").await;
            eventually("it is synchronous", LONG, || async { pair.primary.count(SYNCHRONOUS).await == Some(1) }).await;
        }
        pair
    }

    /// The URL of the current primary.
    pub fn url(&self) -> String {
        let (a, b) = (self.primary.port, self.standby.port);
        format!(
            "postgres://postgres@127.0.0.1:{a},127.0.0.1:{b}/postgres?target_session_attrs=read-write&sslmode=disable"
        )
    }

    /// Ends the replication.
    pub async fn separate(&self) {
        let others: Vec<_> = ACCESS.lines().filter(|line| !line.contains("replication")).collect();
        fs::write(self.primary.folder.join("hba"), others.join("\n") + "\n").unwrap();
        self.primary.run("CREATE TABLE changed AS SELECT clock_timestamp() AS moment").await;
        self.primary.run("SELECT pg_reload_conf()").await;
        // A new connection has what the server has read.
        let is_read = "SELECT count(*) FROM changed WHERE moment <= pg_conf_load_time()";
        eventually("the file is read", LONG, || async { self.primary.count(is_read).await == Some(1) }).await;
        let nobody_follows = || async {
            self.primary.run("SELECT pg_terminate_backend(pid) FROM pg_stat_replication").await;
            self.primary.count("SELECT count(*) FROM pg_stat_replication").await == Some(0)
        };
        eventually("nobody follows", LONG, nobody_follows).await;
    }

    /// As the database of a test, straight to the primary, or to the standby.
    pub fn database(&self, node: &Node) -> Database {
        node.options().into()
    }
}

const FOLLOWERS: &str = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'";
const SYNCHRONOUS: &str = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";

impl Node {
    /// A free port, which another process may take first.
    async fn start(folder: PathBuf, more: &[(&str, &str)]) -> Self {
        remove_at_end(&folder);
        let (data, hba, options) = (folder.clone(), folder.join("hba"), [&SMALL, more].concat());
        let (postgres, port) = start_postgres_on_port(&data, &hba, &options).await;
        Self { postgres, folder, port }
    }

    pub fn options(&self) -> PgConnectOptions {
        let url = format!("postgres://postgres@127.0.0.1:{}/postgres?sslmode=disable", self.port);
        url.parse().unwrap()
    }

    /// The URL for a process.
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres?sslmode=disable", self.port)
    }

    pub async fn connect(&self) -> PgConnection {
        self.options().connect().await.unwrap()
    }

    pub async fn run(&self, sql: &str) {
        execute(&mut self.connect().await, sql.to_owned()).await;
    }

    /// Returns the result of a query; `None` if the server does not reply.
    pub async fn count(&self, sql: &'static str) -> Option<i64> {
        let mut connection = self.options().connect().await.ok()?;
        sqlx::query_scalar(sql).fetch_one(&mut connection).await.ok()
    }

    /// Makes it the primary.
    pub async fn promote(&self) {
        // Recovery may cancel a query that waits for its end.
        self.run("SELECT pg_promote(wait => false)").await;
        let is_primary = "SELECT count(*) FROM (SELECT WHERE NOT pg_is_in_recovery()) p";
        eventually("it is promoted", LONG, async || self.count(is_primary).await == Some(1)).await;
    }

    /// Sends a signal to all of its processes.
    fn signal(&self, signal: Signal) {
        let data = fs::canonicalize(self.folder.join("data")).unwrap();
        let processes = fs::read_dir("/proc")
            .unwrap()
            .flatten()
            .filter(|process| fs::read_link(process.path().join("cwd")).is_ok_and(|cwd| cwd == data));
        for process in processes {
            let pid = process.file_name().to_str().and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw);
            // It may have ended.
            let _ = pid.map(|pid| rustix::process::kill_process(pid, signal));
        }
    }

    /// Kills the server (SIGKILL), as a failed machine.
    pub async fn kill(&self) {
        self.signal(Signal::KILL);
        self.postgres.died().await;
    }

    /// Freezes the node (SIGSTOP), or continues it.
    pub fn freeze(&self, frozen: bool) {
        self.signal(if frozen { Signal::STOP } else { Signal::CONT });
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // A frozen node does not stop.
        self.freeze(false);
    }
}
