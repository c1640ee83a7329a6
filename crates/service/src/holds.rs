//! Holds: an operator blocks all changes of an EM or a user for a limited time.
//!
//! A hold begins while all transactions on its key are excluded: an EM by its resource lock, a user by the limits fence. When
//! [`HoldService::hold`] returns, no earlier transaction on the key is in progress, and later ones read the hold. The end of a
//! hold wakes the requests that wait for it. It excludes nothing for a user: a request that enters the queue meanwhile may be
//! woken by the next poll.
//!
//! Never: owns a database lock beyond its transaction.
//! Callers: `rm_edge::admin` and `background::holds`.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use async_recursion::async_recursion as boxed;
use sqlx::{Connection as _, PgConnection, Postgres, Transaction};
use tokio::{sync::Mutex, time::Instant};

use crate::{admission::Admission, commit::commit, error::Error, lock_attempts::LockAttempts};
use rm_model::{
    hold::{HOLDS_MAX, NewHold, ResourceHold},
    operation::{LockKey, Rejection},
    principal::{Actor, Principal},
    wait_queue::{FreedKeys, MUCH},
};
use rm_store::{
    Store, StoreError, limit,
    resource_hold::{self, HoldEnd},
    resource_lock,
    session::{self, Session, within_timeout},
    waiting::{self, FreedNotification},
};
use rm_telemetry::cause;

/// Maximum number of holds in a list.
const LISTED_MAX: i64 = 1000;

/// Service for holds. Clones share it.
#[derive(Clone, Debug)]
pub struct HoldService {
    store: Store,
    /// Reads an EM after a change of its hold, so that placement sees it at once. Other instances see it at their next survey.
    admission: Admission,
    /// Serializes the attempts, so that they use one connection.
    changing: Arc<Mutex<()>>,
}

/// A change of a hold.
#[derive(Debug, Clone, Copy)]
enum HoldChange<'a> {
    Begin(&'a NewHold),
    Release(&'a LockKey),
}

/// Result of a change; `None` if there was no hold to release.
type HoldResult = Option<ResourceHold>;

impl HoldService {
    /// Creates the service.
    pub fn new(store: Store, admission: Admission) -> Self {
        Self { store, admission, changing: Arc::default() }
    }

    /// Sets a hold, or replaces the caller's own hold on the key.
    ///
    /// # Errors
    /// - [`Rejection::AlreadyHeld`] if another caller holds the key; [`Rejection::TooManyHolds`].
    /// - [`Error::LockTimeout`] if other transactions owned the key until `deadline`.
    /// - [`Error::CommitUnknown`] if the connection broke during the commit.
    #[boxed]
    pub async fn hold(&self, by: &Actor, new: &NewHold, deadline: Instant) -> Result<ResourceHold, Error> {
        let begun = self.change(by, HoldChange::Begin(new), deadline).await?;
        begun.ok_or_else(|| Error::defect("a hold did not begin"))
    }

    /// Ends a hold before its deadline, regardless of its owner. Returns false if there is none.
    ///
    /// # Errors
    /// - [`Error::LockTimeout`] if other transactions owned the key until `deadline`.
    /// - [`Error::CommitUnknown`] if the connection broke during the commit.
    #[boxed]
    pub async fn release(&self, by: &Actor, key: &LockKey, deadline: Instant) -> Result<bool, Error> {
        Ok(self.change(by, HoldChange::Release(key), deadline).await?.is_some())
    }

    /// Makes a change, and repeats it until its locks are free.
    async fn change(&self, by: &Actor, change: HoldChange<'_>, deadline: Instant) -> Result<HoldResult, Error> {
        let mut session = self.store.operator_session();
        let mut attempts = LockAttempts::until(deadline);
        loop {
            let turn = tokio::time::timeout_at(deadline, self.changing.lock()).await.map_err(|_| Error::LockTimeout)?;
            let prepared = async {
                let connection = session.get().await?;
                match change {
                    HoldChange::Begin(new) => begin(connection, attempts.patience, by, new).await,
                    HoldChange::Release(key) => release(connection, attempts.patience, by, key).await,
                }
            };
            match tokio::time::timeout_at(deadline, prepared).await {
                // The commit has no timeout: its outcome would be unknown.
                Ok(Ok((transaction, changed))) => {
                    commit(transaction).await?;
                    if let Some(hold) = &changed {
                        show(&self.admission, &hold.key).await;
                    }
                    return Ok(changed);
                }
                Ok(Err(Error::LockTimeout)) if attempts.may_repeat() => {}
                Ok(Err(error)) => return Err(error),
                Err(_) => return Err(Error::LockTimeout),
            }
            // Transactions that waited behind this one proceed during the pause.
            session.reset();
            drop(turn);
            attempts.pause().await;
        }
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

/// Shows placement whether an EM is held. After a failure, the next survey does.
async fn show(admission: &Admission, key: &LockKey) {
    if let LockKey::Em(em) = key
        && let Err(error) = admission.refresh(std::slice::from_ref(em)).await
        && !error.is_logged()
    {
        tracing::warn!(error = cause(&error), %key, "cannot read an EM after a change of its hold");
    }
}

/// Opens a transaction that waits up to `patience` for each lock.
async fn open(connection: &mut PgConnection, patience: Duration) -> Result<Transaction<'_, Postgres>, StoreError> {
    let mut transaction = connection.begin().await?;
    session::hurried(&mut transaction, patience).await?;
    Ok(transaction)
}

/// Sets a hold in a transaction, which the caller must commit.
async fn begin<'c>(
    connection: &'c mut PgConnection,
    patience: Duration,
    by: &Actor,
    new: &NewHold,
) -> Result<(Transaction<'c, Postgres>, HoldResult), Error> {
    within_timeout(async {
        let mut transaction = open(connection, patience).await?;
        let (locks, is_taken) = match &new.key {
            LockKey::Em(_) => {
                let locks = resource_lock::lock(&mut transaction, &BTreeSet::from([new.key.clone()])).await?;
                let is_taken = locks.is_none();
                (locks, is_taken)
            }
            // Batches lock users only where a limit counts by user.
            LockKey::User(_) => {
                limit::close_fence(&mut transaction).await?;
                (None, resource_hold::has_row(&mut *transaction, &new.key).await?)
            }
        };
        if is_taken {
            return Err(Rejection::AlreadyHeld { key: new.key.clone(), taken: None }.into());
        }
        let Some(hold) = resource_hold::begin(&mut transaction, new, by).await? else {
            let held = resource_hold::read(&mut *transaction, &new.key).await?;
            let taken = held.and_then(|held| held.taken).map(Box::new);
            return Err(Rejection::AlreadyHeld { key: new.key.clone(), taken }.into());
        };
        if resource_hold::count(&mut *transaction).await? > HOLDS_MAX {
            return Err(Rejection::TooManyHolds { most: HOLDS_MAX }.into());
        }
        if let Some(locks) = locks {
            resource_lock::unlock(&mut transaction, locks).await?;
        }
        Ok((transaction, Some(hold)))
    })
    .await
}

/// Ends a hold, or deletes the row of another program, in a transaction, which the caller must commit.
async fn release<'c>(
    connection: &'c mut PgConnection,
    patience: Duration,
    by: &Actor,
    key: &LockKey,
) -> Result<(Transaction<'c, Postgres>, HoldResult), Error> {
    within_timeout(async {
        let mut transaction = open(connection, patience).await?;
        let row = resource_hold::end(&mut transaction, key, by, HoldEnd::RowDeleted).await?;
        let hold = end(&mut transaction, key, by, HoldEnd::Released).await?;
        Ok((transaction, hold.or(row)))
    })
    .await
}

/// Ends the hold on a key, and wakes the requests that wait for its end after the commit. A committed row of another
/// program, which owns the key of an EM, does not keep the hold.
async fn end(connection: &mut PgConnection, key: &LockKey, by: &Actor, how: HoldEnd) -> Result<HoldResult, StoreError> {
    let locks = match key {
        LockKey::Em(_) => resource_lock::lock(&mut *connection, &BTreeSet::from([key.clone()])).await?,
        LockKey::User(_) => None,
    };
    let ended = resource_hold::end(&mut *connection, key, by, how).await?;
    if let Some(locks) = locks {
        resource_lock::unlock(&mut *connection, locks).await?;
    }
    if ended.is_some() {
        let mut freed = FreedKeys::default();
        freed.add(key.wait_key(), MUCH);
        waiting::notify(&mut *connection, &FreedNotification::at(&freed)).await?;
    }
    Ok(ended)
}

/// Maximum number of expired holds that one step deletes.
const EXPIRED_MAX: i64 = 100;

/// Maximum wait for the lock of an EM whose hold has expired.
const EXPIRY_PATIENCE: Duration = Duration::from_millis(200);

/// Deletes expired holds. A key that other transactions own waits for the next step.
///
/// # Errors
/// Database errors.
pub async fn clear(session: &mut Session, admission: &Admission) -> Result<(), StoreError> {
    for key in within_timeout(resource_hold::expired(session.get().await?, EXPIRED_MAX)).await? {
        let connection = session.get().await?;
        let ended = within_timeout(async {
            let mut transaction = open(connection, EXPIRY_PATIENCE).await?;
            end(&mut transaction, &key, &Principal::Service.into(), HoldEnd::Expired).await?;
            transaction.commit().await?;
            Ok::<_, StoreError>(())
        });
        match ended.await {
            Err(error) if error.is_lock_timeout() => {}
            ended => {
                ended?;
                show(admission, &key).await;
            }
        }
    }
    Ok(())
}
