//! Selection of the PostgreSQL: an external one by URL or file, or a private one.

use std::path::PathBuf;

use clap::Args;
use secrecy::{ExposeSecret as _, SecretString};

use super::parse::is_set;
use rm_store::{citus::Cell, connect_target::ConnectTarget};

const CELL: &str = "--cell (LINKIS_RM_CELL)";

/// Arguments that select the PostgreSQL.
#[derive(Debug, Clone, Args)]
pub struct DatabaseArguments {
    /// PostgreSQL (15 or newer), e.g. postgres://user:password@host/database [default: a private PostgreSQL].
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, value_name = "URL")]
    database_url: Option<SecretString>,

    /// File with that URL; a changed file is read again, and new connections use the new password.
    #[arg(long, env = "DATABASE_URL_FILE", value_name = "FILE")]
    database_url_file: Option<PathBuf>,

    /// Schema of a cell on Citus; --database-url names the coordinator (docs/CELLS.md).
    #[arg(long, env = "LINKIS_RM_CELL", value_name = "SCHEMA")]
    cell: Option<String>,

    /// Folder of the private PostgreSQL [default: /var/lib/linkis-rm as root, else linkis-rm in the user's data folder].
    #[arg(long, env = "LINKIS_RM_DATA_DIR", value_name = "FOLDER")]
    data_dir: Option<PathBuf>,
}

impl DatabaseArguments {
    /// Returns the selected database, or the mistake.
    pub fn choose(&self) -> Result<DatabaseSource, String> {
        let url = self.database_url.as_ref().filter(|url| !url.expose_secret().is_empty());
        let file = self.database_url_file.clone().filter(|path| is_set(path));
        let cell = self.cell.as_deref().filter(|cell| !cell.is_empty()).map(Cell::parse).transpose();
        let cell = cell.map_err(|error| format!("{CELL}: {error}"))?;
        let (name, target) = match (url, file) {
            (None, None) if cell.is_some() => {
                return Err(format!("{CELL}: a cell is on Citus; name its coordinator by DATABASE_URL"));
            }
            (None, None) => return Ok(DatabaseSource::Embedded(self.data_dir.clone())),
            (Some(_), Some(_)) => {
                return Err(
                    "--database-url-file (DATABASE_URL_FILE): DATABASE_URL is set, too; set only one of them".into()
                );
            }
            (Some(url), None) => ("--database-url (DATABASE_URL)", ConnectTarget::parse(url.expose_secret())),
            (None, Some(file)) => ("--database-url-file (DATABASE_URL_FILE)", ConnectTarget::in_file(file)),
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
        target.map(DatabaseSource::External).map_err(|error| format!("{name}: {error}"))
    }
}

/// The PostgreSQL to use.
#[derive(Debug, Clone)]
pub enum DatabaseSource {
    /// A PostgreSQL that is operated elsewhere.
    External(ConnectTarget),
    /// A private PostgreSQL, started by this process; `None` for the default folder.
    Embedded(Option<PathBuf>),
}
