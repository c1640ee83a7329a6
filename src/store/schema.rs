//! The schema: which tables there are, brought up to date when an instance starts.
//!
//! Tables are a cell's or home's. Each side has migrations of its own, and remembers by itself which of them were made. What a later
//! release has made is left alone: whether this one may still write is said beside the limits (`oldest_writer`).

use sqlx::{PgConnection, migrate::Migrator};

use super::StoreError;

/// How often a migration is tried that does not get its locks: each try keeps others waiting for no longer than `lock_timeout`.
const TRIES_MAX: u32 = 60;

/// Those of a cell: what is found by its EM.
pub fn cell() -> Migrator {
    side(sqlx::migrate!("migrations/cell"), "linkis_rm_migration_cell")
}

/// Those of home: what is said once for all cells.
pub fn home() -> Migrator {
    side(sqlx::migrate!("migrations/home"), "linkis_rm_migration_home")
}

fn side(mut migrator: Migrator, remembered_in: &'static str) -> Migrator {
    migrator.set_ignore_missing(true).dangerous_set_table_name(remembered_in);
    migrator
}

/// Makes what has not been made yet. Several instances may do so at once.
///
/// # Errors
/// Those of the database.
pub async fn migrate(connection: &mut PgConnection) -> Result<(), StoreError> {
    for side in [home(), cell()] {
        let mut tries = 0;
        while let Err(error) = side.run(&mut *connection).await.map_err(StoreError::Migration) {
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
    }
    Ok(())
}
