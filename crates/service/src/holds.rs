//! Holds: an operator blocks all changes of an EM or a user for a limited time.
//!
//! A hold is a committed row of `linkis_resource_lock`, whose unique constraint blocks all transactions on the key. Inserting
//! it waits for the transaction that owns the key. If no limit counts by user, user locks are switched on behind the limits
//! fence, so that all transactions without them have ended. When [`HoldService::hold`] returns, no earlier transaction on the
//! key is in progress.
//!
//! Never: owns a database lock beyond its transaction.
//! Callers: `rm_edge::admin` and `background::holds`.

use std::{sync::Arc, time::Duration};

use async_recursion::async_recursion as boxed;
use sqlx::{Connection as _, PgConnection, Postgres, Transaction};
use tokio::{sync::Mutex, time::Instant};

use crate::{commit::commit, error::Error};
use rm_model::{
    hold::{HOLDS_MAX, NewHold, ResourceHold},
    operation::{LockKey, Rejection},
    principal::Actor,
};
use rm_store::{
    Store, StoreError, limit, resource_hold,
    session::{self, Session, within_timeout},
};

/// Maximum number of holds in a list.
const LISTED_MAX: i64 = 1000;

/// Maximum wait for a lock per attempt, so that operations behind it are not delayed for long.
const PATIENCE_MAX: Duration = Duration::from_secs(1);

/// Pause between attempts.
const PAUSE: Duration = Duration::from_millis(25);

/// Service for holds. Clones share it.
#[derive(Clone, Debug)]
pub struct HoldService {
    store: Store,
    /// Serializes changes, so that they use one connection.
    changing: Arc<Mutex<()>>,
}

impl HoldService {
    /// Creates the service.
    pub fn new(store: Store) -> Self {
        Self { store, changing: Arc::default() }
    }

    /// Sets a hold, or replaces the caller's own hold on the key.
    ///
    /// # Errors
    /// - [`Rejection::AlreadyHeld`] if another caller holds the key; [`Rejection::TooManyHolds`].
    /// - [`Error::LockTimeout`] if other transactions owned the key until `deadline`.
    /// - [`Error::CommitUnknown`] if the connection broke during the commit.
    #[boxed]
    pub async fn hold(&self, by: &Actor, new: &NewHold, deadline: Instant) -> Result<ResourceHold, Error> {
        let _turn = tokio::time::timeout_at(deadline, self.changing.lock()).await.map_err(|_| Error::LockTimeout)?;
        let mut session = self.store.operator_session();
        let mut patience = session::HURRY;
        loop {
            let prepared = async { prepare(session.get().await?, patience, by, new).await };
            match tokio::time::timeout_at(deadline, prepared).await {
                // The commit has no timeout: its outcome would be unknown.
                Ok(Ok((transaction, hold))) => {
                    commit(transaction).await?;
                    return Ok(hold);
                }
                Ok(Err(Error::LockTimeout)) if Instant::now() + PAUSE < deadline => {
                    patience = (patience * 2).min(PATIENCE_MAX);
                }
                Ok(Err(error)) => return Err(error),
                Err(_) => return Err(Error::LockTimeout),
            }
            // Transactions that waited behind this one proceed during the pause.
            session.reset();
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Ends a hold before its deadline, regardless of its owner. Returns false if there is none.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn release(&self, by: &Actor, key: &LockKey) -> Result<bool, Error> {
        let mut session = self.store.operator_session();
        let was_over = within_timeout(resource_hold::end_over(session.get().await?, key)).await?;
        Ok(!was_over && within_timeout(resource_hold::release(session.get().await?, key, by)).await?)
    }

    /// Returns the first `LISTED_MAX` holds.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn list(&self) -> Result<Vec<ResourceHold>, Error> {
        let mut connection = self.store.operators().acquire().await?;
        Ok(within_timeout(resource_hold::list(&mut *connection, LISTED_MAX)).await?)
    }
}

/// Inserts a hold in a transaction, which the caller must commit.
async fn prepare<'c>(
    connection: &'c mut PgConnection,
    patience: Duration,
    by: &Actor,
    new: &NewHold,
) -> Result<(Transaction<'c, Postgres>, ResourceHold), Error> {
    within_timeout(async {
        let mut transaction = connection.begin().await?;
        session::hurried(&mut transaction, patience).await?;
        let Some(taken) = resource_hold::take(&mut transaction, &new.key, &by.principal, &new.reason).await? else {
            let held = resource_hold::read(&mut *transaction, &new.key).await?;
            let taken = held.and_then(|held| held.taken).map(Box::new);
            return Err(Rejection::AlreadyHeld { key: new.key.clone(), taken }.into());
        };
        if resource_hold::count(&mut *transaction).await? > HOLDS_MAX {
            return Err(Rejection::TooManyHolds { most: HOLDS_MAX }.into());
        }
        if matches!(new.key, LockKey::User(_)) {
            limit::hold_users(&mut transaction).await?;
        }
        let hold = resource_hold::begin(&mut transaction, new, &taken, by).await?;
        Ok((transaction, hold))
    })
    .await
}

/// Maximum number of expired holds that one step deletes.
const OVER_MAX: i64 = 100;

/// Deletes expired holds that no operation has met, and switches user locks off when no user is held any more.
///
/// # Errors
/// Database errors.
pub async fn clear(session: &mut Session) -> Result<(), StoreError> {
    for key in within_timeout(resource_hold::over(session.get().await?, OVER_MAX)).await? {
        within_timeout(resource_hold::end_over(session.get().await?, &key)).await?;
    }
    if within_timeout(resource_hold::users_unlocked(session.get().await?)).await? {
        let connection = session.get().await?;
        within_timeout(async {
            let mut transaction = connection.begin().await?;
            session::hurried(&mut transaction, session::HURRY).await?;
            limit::unlock_users(&mut transaction).await?;
            transaction.commit().await?;
            Ok::<_, StoreError>(())
        })
        .await?;
    }
    Ok(())
}
