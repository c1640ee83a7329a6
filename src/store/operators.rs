//! The few connections that operators' calls share: however many list at once, and however much, nobody else waits for it, and
//! whoever would wait long is told to come again.

use std::{
    ops::{Deref, DerefMut},
    sync::Arc,
    time::Duration,
};

use sqlx::{
    PgConnection, Postgres,
    pool::PoolConnection,
    postgres::{PgConnectOptions, PgPool},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{StoreError, pool_options};

/// How many operators' calls read at once.
const CONNECTIONS_MAX: u32 = 4;

/// How many more may wait for that.
const WAITING_MAX: usize = 32;

/// For how long they do.
const WAIT_MAX: Duration = Duration::from_secs(2);

/// The connections, and who may wait for them; clones share them.
#[derive(Clone, Debug)]
pub struct Operators {
    pool: PgPool,
    admitted: Arc<Semaphore>,
    turns: Arc<Semaphore>,
}

/// A connection for one operator's call.
#[derive(Debug)]
pub struct OperatorConnection {
    connection: PoolConnection<Postgres>,
    _turn: OwnedSemaphorePermit,
    _admitted: OwnedSemaphorePermit,
}

impl Operators {
    pub(super) fn new(options: &PgConnectOptions) -> Self {
        Self {
            pool: pool_options(CONNECTIONS_MAX).connect_lazy_with(options.clone()),
            admitted: Arc::new(Semaphore::new(CONNECTIONS_MAX as usize + WAITING_MAX)),
            turns: Arc::new(Semaphore::new(CONNECTIONS_MAX as usize)),
        }
    }

    /// Lets a call in that has a connection of its own; it counts as one that waits.
    ///
    /// # Errors
    /// [`StoreError::OperatorsBusy`] if too many wait.
    pub fn admit(&self) -> Result<OwnedSemaphorePermit, StoreError> {
        self.admitted.clone().try_acquire_owned().map_err(|_| StoreError::OperatorsBusy)
    }

    /// A connection, when it is the caller's turn.
    ///
    /// # Errors
    /// [`StoreError::OperatorsBusy`] if too many wait, or its turn does not come within two seconds; those of the database.
    pub async fn acquire(&self) -> Result<OperatorConnection, StoreError> {
        let admitted = self.admit()?;
        // Apart from the pool's own wait, which would not tell a busy database from one that is away.
        let turn = tokio::time::timeout(WAIT_MAX, self.turns.clone().acquire_owned()).await;
        let turn = turn.map_err(|_| StoreError::OperatorsBusy)?.map_err(|_| sqlx::Error::PoolClosed)?;
        let connection = self.pool.acquire().await?;
        Ok(OperatorConnection { connection, _turn: turn, _admitted: admitted })
    }

    pub(super) async fn close(&self) {
        self.pool.close().await;
    }
}

impl Deref for OperatorConnection {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.connection
    }
}

impl DerefMut for OperatorConnection {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.connection
    }
}
