//! `linkis-rm migrate`: migrates the schema, for services whose database role may not.
//!
//! A failed migration changes nothing, so the command can be repeated. Several processes can run it concurrently.

use std::{io::Write as _, process::ExitCode};

use clap::Args;

use crate::config::DatabaseArguments;
use rm_store::{StoreError, citus, history_partition, schema};

use super::{
    database::{ConnectError, DatabaseConnection},
    error::{EXIT_NO_ANSWER, EXIT_USAGE},
    output::{progress, text::clean_lines},
};

/// Arguments of `migrate`.
#[derive(Debug, Clone, Args)]
pub struct MigrateCommand {
    #[command(flatten)]
    database: DatabaseArguments,
}

/// Reason why the migration failed.
#[derive(Debug, thiserror::Error)]
enum MigrateFailure {
    #[error(transparent)]
    Open(#[from] ConnectError),
    #[error("the schema cannot be migrated; unfinished changes are rolled back, so the command can be repeated")]
    Migration(#[source] StoreError),
}

impl MigrateCommand {
    /// Migrates the schema, prints the number of migrations, and returns the exit code.
    pub async fn run(self) -> ExitCode {
        match self.migrate().await {
            Ok(made) => {
                let text = match made {
                    0 => "the schema is up to date\n".to_owned(),
                    made => format!("{made} migrations were applied\n"),
                };
                // A closed output still gets the exit code.
                let _ = std::io::stdout().write_all(text.as_bytes());
                ExitCode::SUCCESS
            }
            Err(failure) => {
                eprintln!("linkis-rm: {}", clean_lines(&rm_telemetry::with_causes(&failure)));
                let is_usage = matches!(failure, MigrateFailure::Open(ConnectError::Usage(_)));
                ExitCode::from(if is_usage { EXIT_USAGE } else { EXIT_NO_ANSWER })
            }
        }
    }

    async fn migrate(&self) -> Result<usize, MigrateFailure> {
        let mut opened = DatabaseConnection::new(&self.database).await?;
        let migrated = async {
            if let Some(cell) = opened.target.cell() {
                citus::make_schema(&mut opened.connection, &cell).await?;
            }
            let made = schema::migrate(&mut opened.connection).await?;
            history_partition::make_first(&mut opened.connection).await?;
            opened.describe().await?;
            Ok(made)
        };
        let made = progress::shown("migrating the schema", migrated)
            .await
            .map_err(|error: StoreError| MigrateFailure::Migration(error.or_denied()))?;
        opened.close().await;
        Ok(made)
    }
}
