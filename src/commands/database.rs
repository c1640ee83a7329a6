//! Database connection of the commands that do not call a service: `migrate` and `tokens`.
//!
//! Never: creates a database, or stops a PostgreSQL that another process runs.

use std::{fmt, path::PathBuf};

use sqlx::{Connection as _, PgConnection};

use super::output::text::clean_lines;

use crate::config::{DatabaseArguments, DatabaseSource};
use rm_devpg::{EmbeddedError, EmbeddedPostgres};
use rm_store::{PendingStore, StoreError, connect_target::ConnectTarget, endpoint, primary::Primary, server_instance};

/// A connection without a statement timeout.
pub(super) struct DatabaseConnection {
    /// Connection for schema changes: that of the coordinator in a cell.
    pub connection: PgConnection,
    pub target: ConnectTarget,
    /// The private PostgreSQL, if this process started it.
    private: Option<EmbeddedPostgres>,
    place: Place,
}

/// The database, for display.
enum Place {
    Folder(PathBuf),
    Server(ConnectTarget),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(folder) => write!(f, "the private one in {}", folder.display()),
            Self::Server(target) => target.fmt(f),
        }
    }
}

/// Reason why the connection failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error("{0}")]
    Usage(String),
    #[error("no database in {}; name the service's database by --data-dir or DATABASE_URL", .0.display())]
    NoDatabase(PathBuf),
    #[error("the database cannot be used; check DATABASE_URL")]
    Store(#[from] StoreError),
    #[error("the private PostgreSQL cannot be used")]
    Embedded(#[from] EmbeddedError),
}

impl DatabaseConnection {
    pub async fn new(arguments: &DatabaseArguments) -> Result<Self, ConnectError> {
        let (target, private, place) = match arguments.choose().map_err(ConnectError::Usage)? {
            DatabaseSource::External(target) => (target.clone(), None, Place::Server(target)),
            DatabaseSource::Embedded(data_dir) => {
                let folder = data_dir.map_or_else(rm_devpg::default_data_dir, Ok)?;
                let (target, private) = private(folder.clone()).await?;
                (target, private, Place::Folder(folder))
            }
        };
        let (connection, _) = Primary::watch(target.clone()).connect_with(endpoint::UNBOUNDED).await?;
        Ok(Self { connection, target, private, place })
    }

    /// Prints the database and the number of its instances to standard error. A command on another database than the
    /// service's would have no effect on the service.
    pub async fn describe(&mut self) -> Result<(), StoreError> {
        let serving = match self.private {
            // This process owns the database now.
            Some(_) => 0,
            None => server_instance::list(&mut self.connection).await?.len(),
        };
        let serving = match serving {
            0 => "no instance serves from it".to_owned(),
            1 => "1 instance serves from it".to_owned(),
            serving => format!("{serving} instances serve from it"),
        };
        eprintln!("database: {}; {serving}", clean_lines(&self.place.to_string()));
        Ok(())
    }

    /// Reconnects to the server with the tables; those of a cell are on its worker.
    pub async fn go_to_tables(&mut self) -> Result<(), StoreError> {
        if self.target.cell().is_some() {
            let (opening, _) = PendingStore::find(self.target.clone()).await?;
            self.connection = opening.connect().await?;
        }
        Ok(())
    }

    pub async fn close(self) {
        // The command has finished; a failed close changes nothing.
        let _ = self.connection.close().await;
        if let Some(private) = self.private {
            private.stop().await;
        }
    }
}

/// Returns the private PostgreSQL: that of a running service, or one started for this command. Never creates a database.
async fn private(data_dir: PathBuf) -> Result<(ConnectTarget, Option<EmbeddedPostgres>), ConnectError> {
    if !rm_devpg::has_database(&data_dir) {
        return Err(ConnectError::NoDatabase(data_dir));
    }
    match EmbeddedPostgres::start(rm_devpg::EmbeddedSettings { data_dir: data_dir.clone(), server_options: vec![] })
        .await
    {
        Ok(private) => Ok((private.connect_options().into(), Some(private))),
        Err(error @ EmbeddedError::InUse { .. }) => Ok((rm_devpg::running(&data_dir).ok_or(error)?.into(), None)),
        Err(error) => Err(error.into()),
    }
}
