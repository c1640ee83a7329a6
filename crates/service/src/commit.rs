//! Commit of a transaction that the database must not repeat.
//!
//! A broken connection leaves the outcome unknown, and the caller gets [`Error::CommitUnknown`]. Callers: the changes of
//! holds, of limits and of providers, and withdrawals.

use sqlx::{Postgres, Transaction};

use crate::error::Error;
use rm_store::{StoreError, session::within_timeout};
use rm_telemetry::cause;

/// Commits a transaction.
///
/// # Errors
/// [`Error::CommitUnknown`] if the database does not confirm the commit.
pub(crate) async fn commit(transaction: Transaction<'_, Postgres>) -> Result<(), Error> {
    let committed = within_timeout(async { transaction.commit().await.map_err(StoreError::from) });
    committed.await.map_err(|error| {
        tracing::warn!(error = cause(&error), "the connection broke while committing");
        Error::CommitUnknown
    })
}
