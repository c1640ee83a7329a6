//! Holds: an operator keeps everybody from changing anything about an EM or a user for a while.
//!
//! A hold is a committed row of `linkis_resource_lock`: the unique constraint, which makes transactions wait for each other, makes all
//! wait for it. To put it there, its transaction waits for whoever has the key; and where users are not locked because no rule counts
//! by them, it has them locked from then on, behind the fence, so that whoever does not has ended. So when a hold is answered, nothing
//! that began before it is under way.

use std::{sync::Arc, time::Duration};

use sqlx::{Connection as _, PgConnection, Postgres, Transaction};
use tokio::{sync::Mutex, time::Instant};

use crate::{
    domain::{
        hold::{HOLDS_MAX, Hold, NewHold},
        operation::{LockKey, Rejection},
        principal::Actor,
    },
    error::Error,
    store::{
        Store, StoreError, limit, resource_hold,
        session::{self, Session, answered},
    },
};

/// How many holds are listed.
const LISTED_MAX: i64 = 1000;

/// How long to wait for a lock at most, before others have their turn.
const PATIENCE_MAX: Duration = Duration::from_secs(1);

/// How long to pause before trying again.
const PAUSE: Duration = Duration::from_millis(25);

/// Takes, ends and lists holds.
#[derive(Clone, Debug)]
pub struct HoldService {
    store: Store,
    /// One at a time, on one connection, however many are wanted.
    changing: Arc<Mutex<()>>,
}

/// Why a hold was not taken.
enum HoldError {
    Rejected(Rejection),
    Store(StoreError),
    /// The connection broke while it committed: it may have been.
    Unknown(StoreError),
}

impl From<StoreError> for HoldError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<sqlx::Error> for HoldError {
    fn from(error: sqlx::Error) -> Self {
        Self::Store(error.into())
    }
}

impl From<HoldError> for Error {
    fn from(error: HoldError) -> Self {
        match error {
            HoldError::Rejected(rejection) => rejection.into(),
            HoldError::Store(error) => error.into(),
            HoldError::Unknown(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "the connection broke while committing");
                Self::CommitUnknown
            }
        }
    }
}

impl HoldService {
    /// On top of the store.
    pub fn new(store: Store) -> Self {
        Self { store, changing: Arc::default() }
    }

    /// Takes a hold, or takes one that the caller has anew.
    ///
    /// # Errors
    /// [`Rejection::AlreadyHeld`]; [`Rejection::TooManyHolds`]; [`Error::LockTimeout`] if others had the key until `deadline`;
    /// [`Error::CommitUnknown`].
    pub async fn hold(&self, by: &Actor, new: &NewHold, deadline: Instant) -> Result<Hold, Error> {
        let _turn = tokio::time::timeout_at(deadline, self.changing.lock()).await.map_err(|_| Error::LockTimeout)?;
        let mut session = self.store.operator_session();
        let mut patience = session::HURRY;
        loop {
            let prepared = async { prepare(session.get().await?, patience, by, new).await };
            match tokio::time::timeout_at(deadline, prepared).await {
                // Not given up while it commits: what is answered then would not be known.
                Ok(Ok((transaction, hold))) => {
                    let committed = answered(async { transaction.commit().await.map_err(StoreError::from) });
                    committed.await.map_err(HoldError::Unknown)?;
                    return Ok(hold);
                }
                Ok(Err(HoldError::Store(error))) if error.is_lock_timeout() && Instant::now() + PAUSE < deadline => {
                    patience = (patience * 2).min(PATIENCE_MAX);
                }
                Ok(Err(error)) => return Err(error.into()),
                Err(_) => return Err(Error::LockTimeout),
            }
            // Those who waited behind it go on for a moment.
            session.reset();
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Ends a hold before its time, whoever holds; false if there is none.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn release(&self, by: &Actor, key: &LockKey) -> Result<bool, Error> {
        let mut session = self.store.operator_session();
        let was_over = answered(resource_hold::end_over(session.get().await?, key)).await?;
        Ok(!was_over && answered(resource_hold::release(session.get().await?, key, by)).await?)
    }

    /// The holds that there are, the first of them.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn list(&self) -> Result<Vec<Hold>, Error> {
        let mut connection = self.store.operators().acquire().await?;
        Ok(answered(resource_hold::list(&mut *connection, LISTED_MAX)).await?)
    }
}

/// Takes a hold, which counts when the transaction is committed.
async fn prepare<'c>(
    connection: &'c mut PgConnection,
    patience: Duration,
    by: &Actor,
    new: &NewHold,
) -> Result<(Transaction<'c, Postgres>, Hold), HoldError> {
    answered(async {
        let mut transaction = connection.begin().await?;
        session::hurried(&mut transaction, patience).await?;
        let Some(taken) = resource_hold::take(&mut transaction, &new.key, &by.principal, &new.reason).await? else {
            let held = resource_hold::read(&mut *transaction, &new.key).await?;
            let taken = held.and_then(|held| held.taken).map(Box::new);
            return Err(HoldError::Rejected(Rejection::AlreadyHeld { key: new.key.clone(), taken }));
        };
        if resource_hold::count(&mut *transaction).await? > HOLDS_MAX {
            return Err(HoldError::Rejected(Rejection::TooManyHolds { most: HOLDS_MAX }));
        }
        limit::keep_older_out(&mut transaction, limit::KNOWS_DRAINS).await?;
        if matches!(new.key, LockKey::User(_)) {
            limit::hold_users(&mut transaction).await?;
        }
        let hold = resource_hold::begin(&mut transaction, new, &taken, by).await?;
        Ok((transaction, hold))
    })
    .await
}

/// How many holds that are over one step removes.
const OVER_MAX: i64 = 100;

/// Removes holds that are over and that nobody has run into, and has users locked no longer than some are held.
///
/// # Errors
/// Those of the database.
pub async fn clear(session: &mut Session) -> Result<(), StoreError> {
    for key in answered(resource_hold::over(session.get().await?, OVER_MAX)).await? {
        answered(resource_hold::end_over(session.get().await?, &key)).await?;
    }
    if answered(resource_hold::are_users_let_go(session.get().await?)).await? {
        let connection = session.get().await?;
        answered(async {
            let mut transaction = connection.begin().await?;
            session::hurried(&mut transaction, session::HURRY).await?;
            limit::let_users_go(&mut transaction).await?;
            transaction.commit().await?;
            Ok::<_, StoreError>(())
        })
        .await?;
    }
    Ok(())
}
