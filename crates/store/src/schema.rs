//! Database schema: the migrations, applied at the start of an instance or by `linkis-rm migrate`.
//!
//! Tables belong to home or to a cell. Each side has its own migrations and its own table of applied ones. Migrations
//! of a later release are left alone; `oldest_writer` beside the limits decides whether this release may still write.
//!
//! Never: applies a migration in part. Callers: [`super::PendingStore::prepare`], and the `migrate` and `tokens` commands.

use std::collections::HashMap;

use sqlx::{
    AssertSqlSafe, Connection as _, PgConnection, SqlSafeStr as _,
    migrate::{Migrate as _, Migration, MigrationType, Migrator},
};

use super::{StoreError, citus, limit};

/// Maximum number of attempts of a migration that cannot get its locks. Each attempt delays other sessions for at most
/// `lock_timeout`.
const TRIES_MAX: u32 = 60;

/// A file of the folder `migrations`.
struct MigrationFile {
    version: i64,
    description: &'static str,
    sql: &'static str,
}

mod files {
    use super::MigrationFile;

    include!(concat!(env!("OUT_DIR"), "/migrations.rs"));
}

/// Migrations of one side, and the table that records the applied ones.
struct MigrationSet {
    migrator: Migrator,
    remembered_in: &'static str,
}

/// Returns the migrations of home (data for all cells) and of a cell (data found by its EM).
fn sides() -> [MigrationSet; 2] {
    [
        MigrationSet::new(files::HOME, "linkis_rm_migration_home"),
        MigrationSet::new(files::CELL, "linkis_rm_migration_cell"),
    ]
}

impl MigrationSet {
    fn new(files: &[MigrationFile], remembered_in: &'static str) -> Self {
        let migrations = files.iter().map(|file| {
            Migration::new(
                file.version,
                file.description.into(),
                MigrationType::Simple,
                file.sql.into_sql_str(),
                file.sql.starts_with("-- no-transaction"),
            )
        });
        let mut migrator = Migrator::with_migrations(migrations.collect());
        migrator.set_ignore_missing(true).dangerous_set_table_name(remembered_in);
        Self { migrator, remembered_in }
    }

    /// Returns the migrations that are not applied, and the number of applied ones.
    ///
    /// # Errors
    /// [`StoreError::EarlierState`] if an applied migration had another content; database errors.
    async fn missing(&self, connection: &mut PgConnection) -> Result<(Vec<&Migration>, usize), StoreError> {
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
        let is_other = |migration: &&Migration| {
            made.get(&migration.version).is_some_and(|made| made.as_slice() != &*migration.checksum)
        };
        if let Some(other) = self.migrator.iter().find(is_other) {
            let what = format!("migration {} of {} differs", other.version, self.remembered_in);
            return Err(StoreError::EarlierState { what });
        }
        let missing = self.migrator.iter().filter(|migration| !made.contains_key(&migration.version)).collect();
        Ok((missing, made.len()))
    }
}

/// Returns the number of migrations of this release that are not applied.
///
/// # Errors
/// [`StoreError::EarlierState`]; database errors.
pub async fn missing(connection: &mut PgConnection) -> Result<usize, StoreError> {
    // Read first: a migration creates its tables and its record together.
    let table = any_table(&mut *connection).await?;
    let (mut missing, mut made) = (0, 0);
    for side in sides() {
        let (of_side, made_of_side) = side.missing(&mut *connection).await?;
        (missing, made) = (missing + of_side.len(), made + made_of_side);
    }
    match table {
        Some(table) if made == 0 => Err(StoreError::EarlierState { what: format!("{table} without its migration") }),
        _ => Ok(missing),
    }
}

/// Returns the name of any table of the service, if one exists.
async fn any_table(connection: &mut PgConnection) -> Result<Option<String>, StoreError> {
    let table = sqlx::query_scalar(
        "-- schema::any_table
        SELECT relname::text FROM pg_catalog.pg_class WHERE relnamespace = to_regnamespace(quote_ident(current_schema()))
            AND relkind IN ('r', 'p') AND starts_with(relname, 'linkis_') AND NOT starts_with(relname, 'linkis_rm_migration_')
        ORDER BY relname LIMIT 1",
    );
    Ok(table.fetch_optional(connection).await?)
}

/// Applies all missing migrations and returns their number.
///
/// Several instances may migrate concurrently, and each migration is applied whole or not at all. If none is missing,
/// no privilege to change the schema is needed.
///
/// # Errors
/// [`StoreError::EarlierState`]; database errors.
pub async fn migrate(connection: &mut PgConnection) -> Result<usize, StoreError> {
    let is_distributed = citus::is_distributed(&mut *connection).await?;
    if missing(&mut *connection).await? == 0 {
        return Ok(0);
    }
    let mut missing = 0;
    for side in sides() {
        let of_side = side.missing(&mut *connection).await?.0.len();
        if of_side > 0 {
            match is_distributed {
                true => one_by_one(&side, &mut *connection).await?,
                false => run(&side.migrator, &mut *connection).await?,
            }
            missing += of_side;
        }
    }
    Ok(missing)
}

/// Applies the missing migrations on tables that Citus distributes. Citus forwards the text as it received it and
/// accepts one statement in a text, so each statement is sent alone.
async fn one_by_one(side: &MigrationSet, connection: &mut PgConnection) -> Result<(), StoreError> {
    connection.lock().await.map_err(StoreError::Migration)?;
    let made = async {
        connection.ensure_migrations_table(side.remembered_in).await.map_err(StoreError::Migration)?;
        let mut tries = 0;
        // Another instance may have applied migrations since.
        for migration in side.missing(&mut *connection).await?.0 {
            while let Err(error) = make(migration, side.remembered_in, &mut *connection).await {
                tries += 1;
                again_if_in_the_way(error, tries)?;
            }
        }
        Ok(())
    };
    let made = made.await;
    connection.unlock().await.map_err(StoreError::Migration)?;
    made
}

/// Applies one migration, whole or not at all.
async fn make(migration: &Migration, remembered_in: &str, connection: &mut PgConnection) -> Result<(), StoreError> {
    let mut transaction = connection.begin().await?;
    // The bound of a transaction also applies on the workers.
    let bound = std::iter::once("SET LOCAL lock_timeout = '2s'");
    for statement in bound.chain(statements(migration.sql.as_str())) {
        sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut *transaction).await?;
    }
    let remember = format!(
        "INSERT INTO {remembered_in} (version, description, success, checksum, execution_time) VALUES ($1, $2, true, $3, 0)"
    );
    sqlx::query(AssertSqlSafe(remember))
        .bind(migration.version)
        .bind(&*migration.description)
        .bind(&*migration.checksum)
        .execute(&mut *transaction)
        .await?;
    Ok(transaction.commit().await?)
}

/// Splits a text into its statements.
fn statements(sql: &str) -> impl Iterator<Item = &str> {
    let (mut found, mut begin, mut at) = (Vec::new(), 0, 0);
    while let Some(rest) = sql.get(at..).filter(|rest| !rest.is_empty()) {
        if rest.starts_with(';') {
            found.extend(sql.get(begin..at));
            begin = at + 1;
        }
        at += piece(rest);
    }
    found.extend(sql.get(begin..));
    found.into_iter().filter(|statement| !statement.trim().is_empty())
}

/// Returns the length of the first piece of `text` in which no semicolon ends a statement: a comment, a quoted text, or
/// one character.
fn piece(text: &str) -> usize {
    let until = |mark: &str, from: usize| {
        let end = text.get(from..).and_then(|rest| rest.find(mark)).map(|end| from + end + mark.len());
        end.unwrap_or(text.len())
    };
    let tag = text.strip_prefix('$').and_then(|rest| text.get(..rest.find('$')? + 2));
    let tag = tag.filter(|tag| tag.bytes().all(|byte| byte == b'$' || byte == b'_' || byte.is_ascii_alphabetic()));
    match (text.get(..2), text.chars().next(), tag) {
        (Some("--"), ..) => until("\n", 2),
        (_, Some('\''), _) => until("'", 1),
        (_, Some('"'), _) => until("\"", 1),
        (_, _, Some(tag)) => until(tag, tag.len()),
        (_, first, _) => first.map_or(1, char::len_utf8),
    }
}

/// Excludes earlier releases from writing: see [`limit::keep_earlier_out`].
///
/// # Errors
/// [`StoreError::is_lock_timeout`] if batches keep the lock for all attempts; database errors.
pub async fn keep_earlier_out(connection: &mut PgConnection) -> Result<(), StoreError> {
    let mut tries = 0;
    while let Err(error) = limit::keep_earlier_out(&mut *connection).await {
        tries += 1;
        again_if_in_the_way(error, tries)?;
    }
    Ok(())
}

async fn run(migrator: &Migrator, connection: &mut PgConnection) -> Result<(), StoreError> {
    let mut tries = 0;
    while let Err(error) = migrator.run(&mut *connection).await.map_err(StoreError::Migration) {
        tries += 1;
        again_if_in_the_way(error, tries)?;
    }
    Ok(())
}

/// Logs a lock timeout, so that the caller can try again. Returns any other error, and the last lock timeout.
fn again_if_in_the_way(error: StoreError, tries: u32) -> Result<(), StoreError> {
    if !error.is_lock_timeout() || tries == TRIES_MAX {
        return Err(error);
    }
    tracing::warn!(error = &error as &dyn std::error::Error, tries, "another transaction blocks a migration; retrying");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migration_text_is_split_into_statements() {
        for (sql, parts) in [
            ("", &[][..]),
            ("a; b ;", &["a", "b"]),
            ("-- x; y\na", &["-- x; y\na"]),
            ("a ';' b; c", &["a ';' b", "c"]),
            ("a 'it''s; so' b", &["a 'it''s; so' b"]),
            (r#"a ";" b; c"#, &[r#"a ";" b"#, "c"]),
            ("DO $x$ a; $1; $y$ b; $y$ $x$; c", &["DO $x$ a; $1; $y$ b; $y$ $x$", "c"]),
            ("a $1; b $2; é; c $", &["a $1", "b $2", "é", "c $"]),
        ] {
            assert_eq!(statements(sql).map(str::trim).collect::<Vec<_>>(), parts, "{sql}");
        }
    }
}
