//! Cells on Citus: a cell is a schema with all tables of the service. The coordinator assigns the schema to one worker
//! (`citus_schema_distribute`) and can move it to another (`citus_schema_move`).
//!
//! Instances connect to the worker directly: the path through the coordinator costs several times as much and loses
//! `lock_timeout` and NOTIFY. Schema changes go through the coordinator, which forwards them to all workers. Callers:
//! [`super::primary`], [`super::schema`], and `config` and the `migrate` command of the program.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use async_recursion::async_recursion as boxed;
use sqlx::{AssertSqlSafe, PgConnection};

use super::{
    StoreError,
    endpoint::Settings,
    primary::Primary,
    session::{within_short_timeout, within_timeout},
    url::UrlHosts,
};

/// Maximum length of a cell name in bytes. A schema name consists of it and the suffix `_local`.
const NAME_MAX: usize = 48;

/// Name of the cell that an instance serves, which is the name of its schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cell(Arc<str>);

/// Error of an invalid cell name.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not the name of a cell: use up to {NAME_MAX} letters a to z, digits and _, beginning with a letter")]
pub struct CellNameError(String);

impl Cell {
    /// Parses a cell name.
    ///
    /// # Errors
    /// [`CellNameError`].
    pub fn parse(name: &str) -> Result<Self, CellNameError> {
        let is_well = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        let begins_well = name.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase());
        // The name is inserted into SQL unquoted.
        match begins_well && name.bytes().all(is_well) && name.len() <= NAME_MAX && !name.starts_with("pg_") {
            true => Ok(Self(name.into())),
            false => Err(CellNameError(name.to_owned())),
        }
    }

    /// Replaces each `{cell}` in `sql` by the name of the cell.
    fn sql(&self, sql: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(sql.replace("{cell}", &self.0))
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether this process serves a cell. A missing table then means that the cell moved to another worker; otherwise it
/// is a defect. A database error does not name its connection, so the flag is global.
static IS_SERVED: AtomicBool = AtomicBool::new(false);

/// Records that this process serves a cell.
pub(super) fn serve() {
    IS_SERVED.store(true, Ordering::Relaxed);
}

/// Returns whether this process serves a cell.
pub(super) fn is_served() -> bool {
    IS_SERVED.load(Ordering::Relaxed)
}

/// Tables that a connection is for.
#[derive(Debug, Clone)]
pub(super) enum TableSet {
    /// Tables of a database without cells.
    All,
    /// Tables of a cell, through the coordinator.
    Distributed(Cell),
    /// Tables of a cell, on the worker that owns it.
    Local(Cell),
}

impl TableSet {
    /// Adds the settings, such as `search_path`, by which a session finds the tables.
    pub(super) fn search_path(&self, settings: Settings) -> Settings {
        match self {
            Self::All => settings,
            // A timeout of a transaction must also apply on the workers, and Citus plans only with custom plans.
            Self::Distributed(cell) => settings.with([
                ("search_path", cell.0.as_ref()),
                ("citus.propagate_set_commands", "local"),
                ("plan_cache_mode", "auto"),
            ]),
            // No further schema: without the views, the same names would resolve to the path through the coordinator.
            Self::Local(cell) => {
                settings.with([("search_path", format!("{cell}_local").as_str()), ("linkis_rm.cell", cell.0.as_ref())])
            }
        }
    }
}

/// Creates the schema of a cell, unless it exists.
///
/// # Errors
/// Database errors.
#[boxed]
pub async fn make_schema(connection: &mut PgConnection, cell: &Cell) -> Result<(), StoreError> {
    sqlx::raw_sql(cell.sql("CREATE SCHEMA IF NOT EXISTS {cell}")).execute(connection).await?;
    Ok(())
}

/// Returns the worker that owns `cell`, as the coordinator names it.
///
/// # Errors
/// [`StoreError::NoCell`]; [`StoreError::NoPrimary`] if there is no coordinator; database errors.
pub(super) async fn owner(coordinator: &Primary, cell: &Cell) -> Result<UrlHosts, StoreError> {
    let found = coordinator.found().await?;
    let owner = sqlx::query_as(
        "-- citus::owner
        SELECT n.nodename, n.nodeport FROM pg_catalog.pg_dist_shard s
            JOIN pg_catalog.pg_dist_placement p USING (shardid) JOIN pg_catalog.pg_dist_node n USING (groupid)
        WHERE s.logicalrelid = to_regclass($1) AND n.noderole = 'primary' AND n.groupid <> 0",
    )
    .bind(format!("{cell}.linkis_resource_lock"));
    let owner: Option<(String, i32)> =
        match within_short_timeout(async { Ok::<_, StoreError>(owner.fetch_optional(&found.pool).await?) }).await {
            Err(error) if error.is_undefined() => {
                return Err(StoreError::NoCell {
                    cell: cell.to_string(),
                    why: "DATABASE_URL does not name a coordinator of Citus".into(),
                });
            }
            owner => owner?,
        };
    let hosts = coordinator.target().hosts();
    let (Some((host, port)), Some(options)) = (owner, hosts.options.get(found.index())) else {
        let why = format!(
            "its tables are on no worker; type linkis-rm migrate, and have Citus SELECT citus_schema_distribute('{cell}')"
        );
        return Err(StoreError::NoCell { cell: cell.to_string(), why });
    };
    let port = u16::try_from(port).map_err(|error| StoreError::inconsistent("pg_dist_node", error))?;
    Ok(UrlHosts { options: vec![options.clone().host(&host).port(port)], ..(*hosts).clone() })
}

/// Returns whether the worker of a connection owns `cell`. Creates the cell's views there if they do not exist yet.
pub(super) async fn is_here(connection: &mut PgConnection, cell: &Cell) -> Result<bool, StoreError> {
    let look = sqlx::query_as(
        "-- citus::is_here
        SELECT EXISTS (SELECT FROM pg_catalog.pg_dist_shard JOIN pg_catalog.pg_dist_placement USING (shardid)
                WHERE logicalrelid = to_regclass($1) AND groupid = (SELECT groupid FROM pg_catalog.pg_dist_local_group)),
            to_regclass($2) IS NOT NULL",
    )
    .bind(format!("{cell}.linkis_resource_lock"))
    // The newest table: the views are made again after its migration.
    .bind(format!("{cell}_local.linkis_resource_hold"));
    let (is_here, is_usable): (bool, bool) = look.fetch_one(&mut *connection).await?;
    if is_here && !is_usable {
        make_usable(connection, cell).await?;
    }
    Ok(is_here)
}

/// Creates the views through which the worker of a connection serves the tables of `cell`.
pub(super) async fn make_usable(connection: &mut PgConnection, cell: &Cell) -> Result<(), StoreError> {
    within_timeout(sqlx::raw_sql(cell.sql(include_str!("citus/views.sql"))).execute(connection)).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cell_name_is_its_schema_name() {
        for name in ["a", "cell_1", "main"] {
            assert_eq!(Cell::parse(name).unwrap().to_string(), name);
        }
        let long = "a".repeat(NAME_MAX + 1);
        for wrong in ["", "1a", "_a", "Cell", "a-b", "a b", "a;b", "é", "pg_x", &long] {
            assert!(Cell::parse(wrong).unwrap_err().to_string().contains("is not the name of a cell"), "{wrong}");
        }
    }
}
