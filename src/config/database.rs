//! Which PostgreSQL to use.

use std::path::PathBuf;

use clap::Args;
use secrecy::{ExposeSecret as _, SecretString};

use super::parse::is_set;
use crate::store::{citus::Cell, target::Target};

const CELL: &str = "--cell (LINKIS_RM_CELL)";

/// Which PostgreSQL to use, as it is said.
#[derive(Debug, Clone, Args)]
pub struct DatabaseArguments {
    /// The PostgreSQL (15 or newer) to use, e.g. postgres://user:password@host/database. Without it, a private one is started.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, value_name = "URL")]
    database_url: Option<SecretString>,

    /// A file with that URL instead, read again when it changes: connections that are made from then on show the new password.
    #[arg(long, env = "DATABASE_URL_FILE", value_name = "FILE")]
    database_url_file: Option<PathBuf>,

    /// The cell to serve: a schema that the Citus whose coordinator --database-url names has on one of its workers (docs/CELLS.md).
    #[arg(long, env = "LINKIS_RM_CELL", value_name = "SCHEMA")]
    cell: Option<String>,

    /// Where the private PostgreSQL keeps its data [default: /var/lib/linkis-rm as root, else linkis-rm in the user's data folder]
    #[arg(long, env = "LINKIS_RM_DATA_DIR", value_name = "FOLDER")]
    data_dir: Option<PathBuf>,
}

impl DatabaseArguments {
    /// What is said; the mistake otherwise.
    pub fn choose(&self) -> Result<Database, String> {
        let url = self.database_url.as_ref().filter(|url| !url.expose_secret().is_empty());
        let file = self.database_url_file.clone().filter(|path| is_set(path));
        let cell = self.cell.as_deref().filter(|cell| !cell.is_empty()).map(Cell::parse).transpose();
        let cell = cell.map_err(|error| format!("{CELL}: {error}"))?;
        let (name, target) = match (url, file) {
            (None, None) if cell.is_some() => {
                return Err(format!("{CELL}: is on Citus; say by DATABASE_URL where its coordinator is"));
            }
            (None, None) => return Ok(Database::Embedded(self.data_dir.clone())),
            (Some(_), Some(_)) => {
                return Err(
                    "--database-url-file (DATABASE_URL_FILE): DATABASE_URL is set, too; set only one of them".into()
                );
            }
            (Some(url), None) => ("--database-url (DATABASE_URL)", Target::parse(url.expose_secret())),
            (None, Some(file)) => ("--database-url-file (DATABASE_URL_FILE)", Target::in_file(file)),
        };
        if self.data_dir.is_some() {
            return Err(format!(
                "--data-dir (LINKIS_RM_DATA_DIR): is for the private PostgreSQL, but {name} names another; set only one of them"
            ));
        }
        let target = target.and_then(|target| match cell {
            Some(cell) => target.with_cell(cell),
            None => Ok(target),
        });
        target.map(Database::External).map_err(|error| format!("{name}: {error}"))
    }
}

/// Which PostgreSQL to use.
#[derive(Debug, Clone)]
pub enum Database {
    /// One that somebody else runs.
    External(Target),
    /// A private one, started here; `None` for the default folder.
    Embedded(Option<PathBuf>),
}
