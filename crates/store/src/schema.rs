//! Database schema: the migrations, applied at the start of an instance or by `linkis-rm migrate`.
//!
//! Tables belong to home or to a cell. Each side has its own migrations and its own table of applied ones. Migrations
//! of a later release are left alone; `oldest_writer` beside the limits decides whether this release may still write.
//!
//! Never: applies a migration in part. Callers: [`super::PendingStore::prepare`], and the `migrate` and `tokens` commands.

use std::collections::HashMap;

use async_recursion::async_recursion as boxed;
use sha2::{Digest as _, Sha384};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};

use super::StoreError;

/// Maximum number of attempts of a migration that cannot get its locks. Each attempt delays other sessions for at most
/// `lock_timeout`.
const TRIES_MAX: u32 = 60;

/// Advisory lock of the transaction that applies a migration.
const LOCK: i64 = 0x6c69_6e6b_6973_726d;

/// A file of the folder `migrations`.
#[derive(Debug, Clone, Copy)]
struct Migration {
    version: i64,
    description: &'static str,
    sql: &'static str,
}

mod files {
    use super::Migration;

    include!(concat!(env!("OUT_DIR"), "/migrations.rs"));
}

/// Migrations of one side, and the table that records the applied ones.
#[derive(Debug, Clone, Copy)]
struct MigrationSet {
    migrations: &'static [Migration],
    record: &'static str,
}

/// Migrations of home (data for all cells) and of a cell (data found by its EM).
const SIDES: [MigrationSet; 2] = [
    MigrationSet { migrations: files::HOME, record: "linkis_rm_migration_home" },
    MigrationSet { migrations: files::CELL, record: "linkis_rm_migration_cell" },
];

impl Migration {
    fn checksum(&self) -> Vec<u8> {
        Sha384::digest(self.sql).to_vec()
    }
}

impl MigrationSet {
    /// Returns the migrations that are not applied, and the number of applied ones.
    ///
    /// # Errors
    /// [`StoreError::EarlierState`] if an applied migration had another content; database errors.
    async fn missing(self, connection: &mut PgConnection) -> Result<(Vec<&'static Migration>, usize), StoreError> {
        let is_there: bool = sqlx::query_scalar("SELECT to_regclass($1) IS NOT NULL")
            .bind(self.record)
            .fetch_one(&mut *connection)
            .await?;
        let made: HashMap<i64, Vec<u8>> = match is_there {
            true => {
                let sql = format!("SELECT version, checksum FROM {} WHERE success", self.record);
                let made: Vec<(i64, Vec<u8>)> = sqlx::query_as(AssertSqlSafe(sql)).fetch_all(connection).await?;
                made.into_iter().collect()
            }
            false => HashMap::new(),
        };
        let is_other =
            |migration: &&Migration| made.get(&migration.version).is_some_and(|made| *made != migration.checksum());
        if let Some(other) = self.migrations.iter().find(is_other) {
            let what = format!("migration {} of {} differs", other.version, self.record);
            return Err(StoreError::EarlierState { what });
        }
        let missing = self.migrations.iter().filter(|migration| !made.contains_key(&migration.version)).collect();
        Ok((missing, made.len()))
    }

    /// Applies a migration, whole or not at all, unless another instance has applied it. Returns whether it did.
    async fn apply(self, migration: &Migration, connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
        let mut transaction = connection.begin().await?;
        // On Citus, the bound of a transaction also applies on the workers.
        sqlx::raw_sql("SET LOCAL lock_timeout = '2s'").execute(&mut *transaction).await?;
        sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(LOCK).execute(&mut *transaction).await?;
        let record = format!(
            "CREATE TABLE IF NOT EXISTS {} (
                version bigint PRIMARY KEY,
                description text NOT NULL,
                installed_on timestamptz NOT NULL DEFAULT now(),
                success boolean NOT NULL,
                checksum bytea NOT NULL,
                execution_time bigint NOT NULL)",
            self.record
        );
        sqlx::raw_sql(AssertSqlSafe(record)).execute(&mut *transaction).await?;
        let is_applied = format!("SELECT EXISTS (SELECT FROM {} WHERE version = $1)", self.record);
        let is_applied = sqlx::query_scalar(AssertSqlSafe(is_applied)).bind(migration.version);
        if is_applied.fetch_one(&mut *transaction).await? {
            return Ok(false);
        }
        // Citus forwards the text as it received it and accepts one statement in a text, so each statement is sent alone.
        for statement in statements(migration.sql) {
            sqlx::raw_sql(statement).execute(&mut *transaction).await?;
        }
        let insert = format!(
            "INSERT INTO {} (version, description, success, checksum, execution_time) VALUES ($1, $2, true, $3, 0)",
            self.record
        );
        sqlx::query(AssertSqlSafe(insert))
            .bind(migration.version)
            .bind(migration.description)
            .bind(migration.checksum())
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(true)
    }

    /// As [`Self::apply`], again after each lock timeout.
    async fn until_applied(self, migration: &Migration, connection: &mut PgConnection) -> Result<bool, StoreError> {
        let mut tries = 0;
        loop {
            match self.apply(migration, &mut *connection).await {
                Ok(applied) => return Ok(applied),
                Err(error) => {
                    tries += 1;
                    again_if_in_the_way(StoreError::Migration { version: migration.version, error }, tries)?;
                }
            }
        }
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
    for side in SIDES {
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
#[boxed]
pub async fn migrate(connection: &mut PgConnection) -> Result<usize, StoreError> {
    if missing(&mut *connection).await? == 0 {
        return Ok(0);
    }
    let mut made = 0;
    for side in SIDES {
        for migration in side.missing(&mut *connection).await?.0 {
            made += usize::from(side.until_applied(migration, &mut *connection).await?);
        }
    }
    Ok(made)
}

/// Splits a text into its statements.
fn statements(sql: &'static str) -> impl Iterator<Item = &'static str> {
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

/// Applies a migration of a later release to a cell. Only tests use it: the first release has no second migration.
#[doc(hidden)]
pub async fn apply_later(connection: &mut PgConnection, version: i64, sql: &'static str) -> Result<(), StoreError> {
    let [_, cell] = SIDES;
    cell.until_applied(&Migration { version, description: "later", sql }, connection).await.map(drop)
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
    use std::fmt::Write as _;

    use sha2::{Digest as _, Sha256};

    use super::*;

    /// A database records the migrations with their checksums and refuses changed ones.
    #[test]
    fn migration_files_never_change() {
        let mut sums = String::new();
        for (side, files) in [("cell", files::CELL), ("home", files::HOME)] {
            for file in files {
                let name = file.description.replace(' ', "_");
                let hash: String = Sha256::digest(file.sql).iter().map(|byte| format!("{byte:02x}")).collect();
                writeln!(sums, "{hash}  {side}/{:04}_{name}.sql", file.version).unwrap();
            }
        }
        let kept = include_str!("../../../migrations/sha256sums");
        assert_eq!(sums, kept, "a change of the schema is a new file, with a new line in migrations/sha256sums");
    }

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
