//! Standby: a database host in recovery, for reads that may be stale and must not delay commits.
//!
//! The module finds a standby among the hosts and owns its connection pool. The caller, `service::standby`, decides
//! whether the standby is recent enough; this module never does.

use std::time::Duration;

use sqlx::{
    ConnectOptions, PgConnection,
    postgres::{PgConnectOptions, PgPool, PgPoolOptions},
};
use time::OffsetDateTime;
use tokio::time::timeout;
use uuid::Uuid;

use super::{
    StoreError,
    connect_target::{ConnectTarget, place},
    server_instance,
    session::{self, ALIVE_TIMEOUT, DatabaseEndpoint, Settings, unfit},
};

/// Maximum number of concurrent reads on the standby.
pub const CONNECTIONS_MAX: u32 = 4;

/// Timeout of a new connection; the primary then serves the read.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(2);

/// A standby that responds.
#[derive(Debug, Clone)]
pub struct StandbyHost {
    /// Address for display.
    pub place: String,
    /// Connection pool.
    pub pool: PgPool,
}

/// Search for a standby among the hosts of a database, and probes of the standby that was found.
#[derive(Debug)]
pub struct StandbySearch {
    target: ConnectTarget,
    /// Index of the probed host.
    index: usize,
    /// Connection for the probes.
    connection: Option<PgConnection>,
    host: Option<StandbyHost>,
}

impl StandbySearch {
    /// Creates a search without a result.
    pub fn new(target: ConnectTarget) -> Self {
        Self { target, index: 0, connection: None, host: None }
    }

    /// Probes the standby. Returns it with the last liveness time of `instance_id` that it has replayed. After a
    /// failure the next call probes the next host.
    ///
    /// # Errors
    /// Database errors; the host is no standby, or has no row of the instance.
    pub async fn look(&mut self, instance_id: Uuid) -> Result<(StandbyHost, OffsetDateTime), StoreError> {
        let looked = self.look_at_one(instance_id).await;
        if looked.is_err() {
            (self.connection, self.host) = (None, None);
            self.index = self.index.wrapping_add(1);
        }
        looked
    }

    async fn look_at_one(&mut self, instance_id: Uuid) -> Result<(StandbyHost, OffsetDateTime), StoreError> {
        let hosts = self.target.hosts();
        let index = self.index.checked_rem(hosts.options.len()).unwrap_or_default();
        let options = hosts.options.get(index).cloned().ok_or(sqlx::Error::PoolClosed)?;
        let settings = Settings::bounded(&options, &hosts.settings);
        let endpoint = DatabaseEndpoint::new(options, settings);
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => timeout(hosts.timeout, endpoint.connect()).await.map_err(|_| sqlx::Error::PoolTimedOut)??,
        };
        let connection = self.connection.insert(connection);
        let marked = timeout(ALIVE_TIMEOUT, server_instance::marked_on_standby(connection, instance_id)).await;
        let marked = marked.map_err(|_| sqlx::Error::PoolTimedOut)??.ok_or(sqlx::Error::RowNotFound)?;
        let host =
            self.host.get_or_insert_with(|| StandbyHost { place: place(&endpoint.options), pool: pool(endpoint) });
        Ok((host.clone(), marked))
    }

    /// Reads the URL file again. Returns true, and restarts the search, if the URL changed.
    pub async fn read_again(&mut self) -> bool {
        let Some(Ok(hosts)) = self.target.read_again().await else { return false };
        let urls = |options: &[PgConnectOptions]| options.iter().map(ConnectOptions::to_url_lossy).collect::<Vec<_>>();
        if urls(&hosts.options) == urls(&self.target.hosts().options) {
            return false;
        }
        self.target.set(hosts);
        *self = Self::new(self.target.clone());
        true
    }
}

/// Returns the pool of a standby. A connection is pinged when it is taken and when it is returned, as those to the
/// primary are.
fn pool(endpoint: DatabaseEndpoint) -> PgPool {
    let options = endpoint.options.clone();
    PgPoolOptions::new()
        .max_connections(CONNECTIONS_MAX)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .test_before_acquire(false)
        .before_acquire(|connection, _| Box::pin(async move { session::check(connection).await.map(|()| true) }))
        .after_release(|connection, _| Box::pin(async move { session::check(connection).await.map(|()| true) }))
        .after_connect(move |connection, _| {
            let endpoint = endpoint.clone();
            Box::pin(async move { endpoint.prepare(connection).await.map(drop).map_err(unfit) })
        })
        .connect_lazy_with(options)
}
