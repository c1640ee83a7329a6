//! Machine of the measurement, and the databases on it.

use std::{collections::BTreeMap, fmt, fs, path::Path};

use rm_devpg::EmbeddedPostgres;
use serde::Serialize;
use sqlx::{ConnectOptions as _, Connection as _, PgConnection, postgres::PgConnectOptions};

use crate::{Failure, process};

/// Settings that make a commit durable. Without them a commit would be cheaper.
const DURABLE: [&str; 3] = ["fsync", "synchronous_commit", "full_page_writes"];

/// Hardware, kernel and PostgreSQL of the measurement.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    cores: usize,
    cpu: String,
    memory_bytes: u64,
    kernel: String,
    postgresql: String,
    /// Relevant settings of PostgreSQL.
    settings: BTreeMap<String, String>,
    file_system: String,
}

impl Machine {
    /// Reads the machine's data. Fails if commits are not durable.
    pub async fn look(database: &EmbeddedPostgres, dir: &Path) -> Result<Self, Failure> {
        let mut connection = database.connect_options().connect().await?;
        let mut settings = BTreeMap::new();
        for name in DURABLE.into_iter().chain(["shared_buffers", "max_wal_size", "wal_sync_method"]) {
            settings.insert(name.to_owned(), setting(&mut connection, name).await?);
        }
        let postgresql = setting(&mut connection, "server_version").await?;
        connection.close().await?;
        if DURABLE.iter().any(|name| settings[*name] != "on") {
            return Err(format!("commits are not durable: {} have to be on", DURABLE.join(", ")).into());
        }
        let file_system = file_system(dir).unwrap_or_else(|| "unknown".into());
        if file_system == "tmpfs" {
            eprintln!(
                "warning: the database is in memory, where a commit costs nothing; set TMPDIR to a folder on a disk"
            );
        }
        Ok(Self {
            cores: std::thread::available_parallelism()?.get(),
            cpu: field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown CPU".into()),
            memory_bytes: memory_bytes().unwrap_or_default(),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            postgresql,
            settings,
            file_system,
        })
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = self.memory_bytes as f64 / (1_u64 << 30) as f64;
        let settings: Vec<String> = self.settings.iter().map(|(name, value)| format!("{name} {value}")).collect();
        let (cores, cpu, kernel) = (self.cores, &self.cpu, &self.kernel);
        writeln!(
            f,
            "machine: {cores} cores, {cpu}, {memory:.0} GiB, Linux {kernel}, file system {}",
            self.file_system
        )?;
        write!(f, "PostgreSQL {}\nits settings: {}", self.postgresql, settings.join(", "))
    }
}

async fn setting(connection: &mut PgConnection, name: &str) -> Result<String, Failure> {
    Ok(sqlx::query_scalar("SELECT current_setting($1)").bind(name).fetch_one(connection).await?)
}

/// Creates an empty database on the same server.
pub(crate) async fn create_database(
    database: &EmbeddedPostgres,
    name: &'static str,
) -> Result<PgConnectOptions, Failure> {
    let mut connection = database.connect_options().connect().await?;
    // The name is a constant of this program: a statement that creates a database takes no parameters.
    sqlx::raw_sql(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&mut connection).await?;
    connection.close().await?;
    Ok(database.connect_options().database(name))
}

/// Writes a checkpoint, so that each round starts without pending writes.
pub(crate) async fn checkpoint(database: &EmbeddedPostgres) -> Result<(), Failure> {
    let mut connection: PgConnection = database.connect_options().connect().await?;
    sqlx::raw_sql("CHECKPOINT").execute(&mut connection).await?;
    Ok(connection.close().await?)
}

/// Returns the value of the first line that begins with `name`.
fn field(file: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn memory_bytes() -> Option<u64> {
    let kibibytes: u64 = field("/proc/meminfo", "MemTotal")?.strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

fn file_system(dir: &Path) -> Option<String> {
    let output = process::command("stat").args(["-f", "-c", "%T"]).arg(dir).output().ok()?;
    let name = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    Some(name).filter(|name| !name.is_empty())
}
