//! What it costs: the processor time of everybody who takes part, and how much PostgreSQL writes into its log.

use std::fs;

use sqlx::{ConnectOptions as _, PgConnection, postgres::PgConnectOptions};

use crate::Failure;

/// In which the kernel counts processor time for programs (`USER_HZ`): the same on every machine that Rust runs on.
const TICKS_PER_SECOND: f64 = 100.0;

/// Where to read.
pub(crate) struct Meter {
    servers: Vec<u32>,
    postmaster: u32,
    /// Only what PostgreSQL does for this one, or for all of its databases, counts: other services go on meanwhile.
    database: String,
    connection: PgConnection,
}

/// What everybody had used at some time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reading {
    load_ticks: u64,
    server_ticks: u64,
    postgresql_ticks: u64,
    wal_bytes: i64,
}

/// What one operation costs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cost {
    /// Microseconds of processor time, of the load generator (or pgbench).
    pub load: f64,
    /// Of the servers.
    pub server: f64,
    /// Of PostgreSQL's processes that work for the measured database, or for all. Vacuum counts nowhere: it comes in pieces, which are
    /// more than what is measured in a second or two, and which then would be some other measurement's.
    pub postgresql: f64,
    pub wal_bytes: f64,
}

impl Meter {
    /// For servers with these process ids.
    pub async fn new(options: &PgConnectOptions, servers: Vec<u32>) -> Result<Self, Failure> {
        let mut connection = options.connect().await?;
        let backend: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut connection).await?;
        let backend = Stat::read(u32::try_from(backend)?).ok_or("PostgreSQL's processes cannot be seen in /proc")?;
        let database = options.get_database().unwrap_or_default().to_owned();
        Ok(Self { servers, postmaster: backend.parent, database, connection })
    }

    /// Reads of others from now on: of these servers, and of what PostgreSQL does for this database.
    pub fn turn_to(&mut self, database: &str, servers: Vec<u32>) {
        self.database = database.to_owned();
        self.servers = servers;
    }

    /// All processes of PostgreSQL.
    pub fn postgresql(&self) -> Vec<u32> {
        let children = processes().filter(|stat| stat.parent == self.postmaster).map(|stat| stat.process);
        std::iter::once(self.postmaster).chain(children).collect()
    }

    pub async fn read(&mut self) -> Result<Reading, Failure> {
        let own = Stat::read(std::process::id()).ok_or("/proc cannot be read")?;
        let servers = self.servers.iter().filter_map(|server| Stat::read(*server));
        let server_ticks = servers.map(|stat| stat.ticks).sum();
        let postmaster = Stat::read(self.postmaster).ok_or("PostgreSQL has ended")?;
        let children = processes().filter(|stat| stat.parent == self.postmaster && self.counts(stat.process));
        // Those who connect by themselves, because there is no server, have ended when it is read what they cost.
        let ended_ticks = if self.servers.is_empty() { postmaster.ended_ticks } else { 0 };
        let postgresql_ticks = postmaster.ticks + ended_ticks + children.map(|stat| stat.ticks).sum::<u64>();
        let wal = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint";
        let wal_bytes = sqlx::query_scalar(wal).fetch_one(&mut self.connection).await?;
        Ok(Reading { load_ticks: own.with_ended(), server_ticks, postgresql_ticks, wal_bytes })
    }

    /// Whether a child of PostgreSQL works for the measured database, or for all, as its title says.
    fn counts(&self, process: u32) -> bool {
        let title = fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
        let words: Vec<&str> = title.split([' ', '\0']).collect();
        match words[..] {
            ["postgres:", "autovacuum", ..] => false,
            ["postgres:", _, database, client, ..] if client == "[local]" || client.ends_with(')') => {
                database == self.database
            }
            _ => true,
        }
    }
}

impl Reading {
    /// What each of so many operations has cost since `before`.
    pub fn since(self, before: Self, operations: u64) -> Cost {
        let operations = operations.max(1) as f64;
        let micros = |now: u64, before: u64| now.saturating_sub(before) as f64 * 1e6 / TICKS_PER_SECOND / operations;
        Cost {
            load: micros(self.load_ticks, before.load_ticks),
            server: micros(self.server_ticks, before.server_ticks),
            postgresql: micros(self.postgresql_ticks, before.postgresql_ticks),
            wal_bytes: (self.wal_bytes - before.wal_bytes) as f64 / operations,
        }
    }
}

/// What `/proc/PID/stat` says of a process.
struct Stat {
    process: u32,
    parent: u32,
    ticks: u64,
    /// Of the children that have ended, and were waited for.
    ended_ticks: u64,
}

impl Stat {
    fn read(process: u32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // The name, in parentheses, may have spaces.
        let mut fields = text.rsplit_once(')')?.1.split_whitespace();
        let parent = fields.nth(1)?.parse().ok()?;
        let ticks: Vec<u64> = fields.skip(9).take(4).filter_map(|field| field.parse().ok()).collect();
        let [user, system, ended_user, ended_system] = ticks[..] else { return None };
        Some(Self { process, parent, ticks: user + system, ended_ticks: ended_user + ended_system })
    }

    fn with_ended(&self) -> u64 {
        self.ticks + self.ended_ticks
    }
}

fn processes() -> impl Iterator<Item = Stat> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| Stat::read(entry.file_name().to_str()?.parse().ok()?))
}
