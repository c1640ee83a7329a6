//! What the numbers were measured on, and the databases on it.

use std::{fs, path::Path};

use linkis_rm::store::embedded::Embedded;
use sqlx::{ConnectOptions as _, Connection as _, PgConnection, postgres::PgConnectOptions};

use crate::{Failure, process};

/// One line about the machine; fails if commits are not durable.
pub(crate) async fn describe(database: &Embedded, dir: &Path) -> Result<String, Failure> {
    let mut connection = database.connect_options().connect().await?;
    let mut settings = Vec::new();
    for name in ["server_version", "fsync", "synchronous_commit"] {
        let value: String =
            sqlx::query_scalar("SELECT current_setting($1)").bind(name).fetch_one(&mut connection).await?;
        settings.push(value);
    }
    connection.close().await?;
    if settings[1..].iter().any(|setting| setting != "on") {
        return Err("commits are not durable: fsync and synchronous_commit have to be on".into());
    }
    let cores = std::thread::available_parallelism()?;
    let file_system = file_system(dir).unwrap_or_else(|| "unknown".into());
    if file_system == "tmpfs" {
        eprintln!(
            "warning: the database is kept in memory, where a commit costs nothing; set TMPDIR to a folder on a disk"
        );
    }
    Ok(format!(
        "machine: {cores} cores, {}; PostgreSQL {}, fsync on, synchronous_commit on, file system {file_system}",
        cpu_model().unwrap_or_else(|| "unknown CPU".into()),
        settings[0],
    ))
}

/// A fresh database on the same server.
pub(crate) async fn create_database(database: &Embedded, name: &'static str) -> Result<PgConnectOptions, Failure> {
    let mut connection = database.connect_options().connect().await?;
    // The name is a constant of this program: a statement that creates a database takes no parameters.
    sqlx::raw_sql(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&mut connection).await?;
    connection.close().await?;
    Ok(database.connect_options().database(name))
}

/// Makes each round begin alike: with nothing left to write out.
pub(crate) async fn checkpoint(database: &Embedded) -> Result<(), Failure> {
    let mut connection: PgConnection = database.connect_options().connect().await?;
    sqlx::raw_sql("CHECKPOINT").execute(&mut connection).await?;
    Ok(connection.close().await?)
}

fn cpu_model() -> Option<String> {
    let info = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn file_system(dir: &Path) -> Option<String> {
    let output = process::command("stat").args(["-f", "-c", "%T"]).arg(dir).output().ok()?;
    let name = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    Some(name).filter(|name| !name.is_empty())
}
