//! Meter: processor time of the load, the servers and PostgreSQL, and the bytes that PostgreSQL writes to its log.

use std::fs;

use sqlx::{ConnectOptions as _, PgConnection, postgres::PgConnectOptions};

use crate::Failure;

/// Unit of processor time for programs (`USER_HZ`), equal on every machine that Rust supports.
const TICKS_PER_SECOND: f64 = 100.0;

/// Processes to read.
pub(crate) struct Meter {
    servers: Vec<u32>,
    postmaster: u32,
    /// Database whose processes count, besides those that serve all databases. Other services run meanwhile.
    database: String,
    connection: PgConnection,
}

/// Totals at one time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UsageSample {
    load_ticks: u64,
    server_ticks: u64,
    postgresql_ticks: u64,
    wal_bytes: i64,
}

/// Cost of one operation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cost {
    /// Processor time of the load generator or pgbench, in microseconds.
    pub load: f64,
    /// Processor time of the servers, in microseconds.
    pub server: f64,
    /// Processor time of PostgreSQL's processes for the measured database or for all, in microseconds. Vacuum does not
    /// count: it comes in bursts longer than a measurement, and would be charged to another one.
    pub postgresql: f64,
    /// Bytes written to PostgreSQL's log.
    pub wal_bytes: f64,
}

impl Meter {
    /// Creates a meter for servers with these process ids.
    pub async fn new(options: &PgConnectOptions, servers: Vec<u32>) -> Result<Self, Failure> {
        let mut connection = options.connect().await?;
        let backend: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut connection).await?;
        let backend = Stat::read(u32::try_from(backend)?).ok_or("PostgreSQL's processes cannot be seen in /proc")?;
        let database = options.get_database().unwrap_or_default().to_owned();
        Ok(Self { servers, postmaster: backend.parent, database, connection })
    }

    /// Reads other servers and another database from now on.
    pub fn turn_to(&mut self, database: &str, servers: Vec<u32>) {
        self.database = database.to_owned();
        self.servers = servers;
    }

    /// Returns all processes of PostgreSQL.
    pub fn postgresql(&self) -> Vec<u32> {
        let children = processes().filter(|stat| stat.parent == self.postmaster).map(|stat| stat.process);
        std::iter::once(self.postmaster).chain(children).collect()
    }

    pub async fn read(&mut self) -> Result<UsageSample, Failure> {
        let own = Stat::read(std::process::id()).ok_or("/proc cannot be read")?;
        let servers = self.servers.iter().filter_map(|server| Stat::read(*server));
        let server_ticks = servers.map(|stat| stat.ticks).sum();
        let postmaster = Stat::read(self.postmaster).ok_or("PostgreSQL has ended")?;
        let children = processes().filter(|stat| stat.parent == self.postmaster && self.counts(stat.process));
        // Clients that connect without a server have ended at the second reading.
        let ended_ticks = if self.servers.is_empty() { postmaster.ended_ticks } else { 0 };
        let postgresql_ticks = postmaster.ticks + ended_ticks + children.map(|stat| stat.ticks).sum::<u64>();
        let wal = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint";
        let wal_bytes = sqlx::query_scalar(wal).fetch_one(&mut self.connection).await?;
        Ok(UsageSample { load_ticks: own.with_ended(), server_ticks, postgresql_ticks, wal_bytes })
    }

    /// Returns true if a child of PostgreSQL works for the measured database or for all, by its title.
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

impl UsageSample {
    /// Returns the cost per operation since `before`.
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

/// Content of `/proc/PID/stat`.
struct Stat {
    process: u32,
    parent: u32,
    ticks: u64,
    /// Ticks of the children that have ended and were waited for.
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
