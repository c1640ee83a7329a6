//! The database of a command that asks it straight.

use std::path::PathBuf;

use sqlx::{Connection as _, PgConnection};

use crate::{
    config::{Database, DatabaseArguments},
    store::{
        Opening, StoreError,
        embedded::{self, Embedded, EmbeddedError},
        primary::Primary,
        session,
        target::Target,
    },
};

/// A connection for work that may take its time.
pub(super) struct Opened {
    /// Where the schema is changed.
    pub connection: PgConnection,
    pub target: Target,
    /// The private PostgreSQL, if no service runs it.
    private: Option<Embedded>,
}

/// Why there is none.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    #[error("{0}")]
    Usage(String),
    #[error("the database cannot be used; check DATABASE_URL")]
    Store(#[from] StoreError),
    #[error("the private PostgreSQL cannot be used")]
    Embedded(#[from] EmbeddedError),
}

impl Opened {
    pub async fn new(arguments: &DatabaseArguments) -> Result<Self, OpenError> {
        let (target, private) = match arguments.choose().map_err(OpenError::Usage)? {
            Database::External(target) => (target, None),
            Database::Embedded(data_dir) => private(data_dir).await?,
        };
        let (connection, _) = Primary::watch(target.clone()).connect_with(session::unbounded).await?;
        Ok(Self { connection, target, private })
    }

    /// Has `connection` lead to where the tables are: a cell's are written on the worker that has it.
    pub async fn go_to_tables(&mut self) -> Result<(), StoreError> {
        if self.target.cell().is_some() {
            let (opening, _) = Opening::find(self.target.clone()).await?;
            self.connection = opening.connect().await?;
        }
        Ok(())
    }

    pub async fn close(self) {
        // What was done is done.
        let _ = self.connection.close().await;
        if let Some(private) = self.private {
            private.stop().await;
        }
    }
}

/// The private PostgreSQL: that of the service that runs, or else one for as long as this takes.
async fn private(data_dir: Option<PathBuf>) -> Result<(Target, Option<Embedded>), EmbeddedError> {
    let data_dir = data_dir.map_or_else(embedded::default_data_dir, Ok)?;
    match Embedded::start(embedded::Settings { data_dir: data_dir.clone(), server_options: vec![] }).await {
        Ok(private) => Ok((private.connect_options().into(), Some(private))),
        Err(error @ EmbeddedError::InUse { .. }) => Ok((embedded::running(&data_dir).ok_or(error)?.into(), None)),
        Err(error) => Err(error),
    }
}
