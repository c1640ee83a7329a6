//! The schema: which tables there are, brought up to date when an instance starts, or by `linkis-rm migrate`.
//!
//! Tables are a cell's or home's. Each side has migrations of its own, and remembers by itself which of them were made. What a later
//! release has made is left alone: whether this one may still write is said beside the limits (`oldest_writer`).

use std::collections::HashMap;

use sqlx::{
    AssertSqlSafe, PgConnection, SqlSafeStr as _,
    migrate::{Migration, Migrator},
};

use super::{StoreError, citus};

/// How often a migration is tried that does not get its locks: each try keeps others waiting for no longer than `lock_timeout`.
const TRIES_MAX: u32 = 60;

/// Migrations, and the table in which those that were made are remembered.
struct Side {
    migrator: Migrator,
    remembered_in: &'static str,
}

/// Those of home, what is said once for all cells; and those of a cell, what is found by its EM.
fn sides() -> [Side; 2] {
    [
        Side::new(sqlx::migrate!("migrations/home"), "linkis_rm_migration_home"),
        Side::new(sqlx::migrate!("migrations/cell"), "linkis_rm_migration_cell"),
    ]
}

impl Side {
    fn new(mut migrator: Migrator, remembered_in: &'static str) -> Self {
        migrator.set_ignore_missing(true).dangerous_set_table_name(remembered_in);
        Self { migrator, remembered_in }
    }

    /// How many of its migrations were not made, or otherwise than they are now.
    async fn missing(&self, connection: &mut PgConnection) -> Result<usize, StoreError> {
        let is_there: bool = sqlx::query_scalar("SELECT to_regclass($1) IS NOT NULL")
            .bind(self.remembered_in)
            .fetch_one(&mut *connection)
            .await?;
        let made: HashMap<i64, Vec<u8>> = match is_there {
            true => {
                let sql = format!("SELECT version, checksum FROM {} WHERE success", self.remembered_in);
                let made: Vec<(i64, Vec<u8>)> = sqlx::query_as(AssertSqlSafe(sql)).fetch_all(connection).await?;
                made.into_iter().collect()
            }
            false => HashMap::new(),
        };
        let is_missing = |version, checksum: &[u8]| made.get(&version).is_none_or(|made| made != checksum);
        Ok(self.migrator.iter().filter(|migration| is_missing(migration.version, &migration.checksum)).count())
    }
}

/// How many migrations of this release were not made.
///
/// # Errors
/// Those of the database.
pub async fn missing(connection: &mut PgConnection) -> Result<usize, StoreError> {
    let mut missing = 0;
    for side in sides() {
        missing += side.missing(&mut *connection).await?;
    }
    Ok(missing)
}

/// Makes what has not been made yet; answers how many migrations there were to make. Several may do so at once, and one that dies leaves
/// each migration whole or undone. Where nothing is missing, it needs no right to change anything.
///
/// # Errors
/// Those of the database.
pub async fn migrate(connection: &mut PgConnection) -> Result<usize, StoreError> {
    let is_distributed = citus::is_distributed(&mut *connection).await?;
    let mut missing = 0;
    for mut side in sides() {
        let of_side = side.missing(&mut *connection).await?;
        if of_side > 0 {
            if is_distributed {
                side.migrator.migrations = side.migrator.iter().map(for_citus).collect();
            }
            run(&side.migrator, &mut *connection).await?;
            missing += of_side;
        }
    }
    Ok(missing)
}

/// The same migration for tables that are distributed. Citus sends a worker the text that it was sent itself, and takes one statement at a
/// time: in a block, each is a text of its own. The bound of waits for locks then holds on the workers.
fn for_citus(migration: &Migration) -> Migration {
    let sql = format!(
        "DO $linkis_rm$ BEGIN SET LOCAL lock_timeout = '2s'; {}\n END $linkis_rm$",
        migration.sql.as_str()
    );
    Migration { sql: AssertSqlSafe(sql).into_sql_str(), ..migration.clone() }
}

async fn run(migrator: &Migrator, connection: &mut PgConnection) -> Result<(), StoreError> {
    let mut tries = 0;
    while let Err(error) = migrator.run(&mut *connection).await.map_err(StoreError::Migration) {
        tries += 1;
        if !error.is_lock_timeout() || tries == TRIES_MAX {
            return Err(error);
        }
        tracing::warn!(
            error = &error as &dyn std::error::Error,
            tries,
            "somebody is in the way of a migration; trying again"
        );
    }
    Ok(())
}
