//! The few connections that operators' calls share: however many list at once, and however much, nobody else waits for it, and
//! whoever would wait long is told to come again.

use std::{
    ops::{Deref, DerefMut},
    sync::Arc,
    time::Duration,
};

use sqlx::{PgConnection, Postgres, pool::PoolConnection};
use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

use super::{StoreError, primary::Primary};

/// How many operators' calls have a connection at once.
pub(super) const CONNECTIONS_MAX: u32 = 4;

/// How many of those read at once: as many processes of the database work for them beside those that commit.
const READING_MAX: usize = 2;

/// After a call has read, its turn to read rests so many times as long as that took, and no longer than that: however many list without
/// end, most of the time is others'.
const REST_TIMES: u32 = 7;
const REST_MAX: Duration = Duration::from_millis(300);

/// How many more may wait for a connection.
const WAITING_MAX: usize = 32;

/// For how long they do, and then for their turn to read.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(2);

/// The connections, and who may wait for them; clones share them.
#[derive(Clone, Debug)]
pub struct Operators {
    primary: Primary,
    admitted: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    reading: Arc<Semaphore>,
}

/// A connection for one operator's call, whose turn it is to read.
#[derive(Debug)]
pub struct OperatorConnection {
    connection: PoolConnection<Postgres>,
    _connections: OwnedSemaphorePermit,
    _admitted: OwnedSemaphorePermit,
    reading: Option<OwnedSemaphorePermit>,
    begun: Instant,
}

impl Drop for OperatorConnection {
    fn drop(&mut self) {
        let (reading, rest) = (self.reading.take(), (self.begun.elapsed() * REST_TIMES).min(REST_MAX));
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move {
                tokio::time::sleep(rest).await;
                drop(reading);
            });
        }
    }
}

impl Operators {
    pub(super) fn new(primary: Primary) -> Self {
        Self {
            primary,
            admitted: Arc::new(Semaphore::new(CONNECTIONS_MAX as usize + WAITING_MAX)),
            connections: Arc::new(Semaphore::new(CONNECTIONS_MAX as usize)),
            reading: Arc::new(Semaphore::new(READING_MAX)),
        }
    }

    /// The permits of the connections.
    pub(super) fn connections(&self) -> Arc<Semaphore> {
        self.connections.clone()
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
    /// [`StoreError::OperatorsBusy`] if too many wait, or its turn does not come in time; those of the database.
    pub async fn acquire(&self) -> Result<OperatorConnection, StoreError> {
        let admitted = self.admit()?;
        // Apart from the pool's own wait, which would not tell a busy database from one that is away.
        let connections = turn(&self.connections).await?;
        let connection = self.primary.found().await?.operators.acquire().await?;
        // Afterwards, so that a connection that was lost without a word keeps no others from reading.
        let reading = Some(turn(&self.reading).await?);
        Ok(OperatorConnection {
            connection,
            _connections: connections,
            _admitted: admitted,
            reading,
            begun: Instant::now(),
        })
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

/// One of so many, when there is one.
async fn turn(turns: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, StoreError> {
    let turn = tokio::time::timeout(WAIT_MAX, turns.clone().acquire_owned()).await;
    Ok(turn.map_err(|_| StoreError::OperatorsBusy)?.map_err(|_| sqlx::Error::PoolClosed)?)
}
