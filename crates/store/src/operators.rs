//! Connections that operators' calls share.
//!
//! Few connections, permits and a rest after each read bound the load of lists, so that they delay only one another. A
//! call that would wait too long is rejected. Callers: lists, audits, changes of limits, and followers in `rm-service`.

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

/// Maximum number of operators' calls with a connection.
pub(super) const CONNECTIONS_MAX: u32 = 4;

/// Maximum number of them that read concurrently: each occupies a PostgreSQL process beside those that commit.
const READING_MAX: usize = 2;

/// Rest of a read permit after a read: a multiple of the read's duration, up to a maximum. Endless lists therefore
/// leave most of the time to other work.
const REST_TIMES: u32 = 7;
const REST_MAX: Duration = Duration::from_millis(300);

/// Maximum number of further calls that wait for a connection.
const WAITING_MAX: usize = 32;

/// Timeout of the wait for a connection, and then of the wait for a read permit.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(2);

/// The shared connections and their permits. Clones share them.
#[derive(Clone, Debug)]
pub struct OperatorPool {
    primary: Primary,
    admitted: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    reading: Arc<Semaphore>,
}

/// A connection for one operator's call, with the permit to read. Dropping it starts the rest of the permit.
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

impl OperatorPool {
    pub(super) fn new(primary: Primary) -> Self {
        Self {
            primary,
            admitted: Arc::new(Semaphore::new(CONNECTIONS_MAX as usize + WAITING_MAX)),
            connections: Arc::new(Semaphore::new(CONNECTIONS_MAX as usize)),
            reading: Arc::new(Semaphore::new(READING_MAX)),
        }
    }

    /// Returns the permits of the connections.
    pub(super) fn connections(&self) -> Arc<Semaphore> {
        self.connections.clone()
    }

    /// Admits a call that has its own connection; it counts as a waiting call.
    ///
    /// # Errors
    /// [`StoreError::OperatorsBusy`] if too many calls wait.
    pub fn admit(&self) -> Result<OwnedSemaphorePermit, StoreError> {
        self.admitted.clone().try_acquire_owned().map_err(|_| StoreError::OperatorsBusy)
    }

    /// Waits for a connection and a read permit.
    ///
    /// # Errors
    /// [`StoreError::OperatorsBusy`] if too many calls wait or a wait exceeds `WAIT_MAX`; database errors.
    pub async fn acquire(&self) -> Result<OperatorConnection, StoreError> {
        let admitted = self.admit()?;
        // Separate from the pool's own wait, which would not distinguish a busy database from an unreachable one.
        let connections = turn(&self.connections).await?;
        let connection = self.primary.found().await?.operators.acquire().await?;
        // After the connection, so that a silently lost connection blocks no other reader.
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

/// Waits for one permit.
///
/// # Errors
/// [`StoreError::OperatorsBusy`] after `WAIT_MAX`.
async fn turn(turns: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, StoreError> {
    let turn = tokio::time::timeout(WAIT_MAX, turns.clone().acquire_owned()).await;
    Ok(turn.map_err(|_| StoreError::OperatorsBusy)?.map_err(|_| sqlx::Error::PoolClosed)?)
}
