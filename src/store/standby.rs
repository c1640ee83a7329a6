//! A host of the database that follows another: for reads that may be a little old, and so take nothing from those that commit.
//!
//! Here is which of the named hosts is one, and the few connections to it. How old what it knows may be is found out by
//! [`service::standby`](crate::service::standby).

use std::time::Duration;

use sqlx::{
    ConnectOptions, PgConnection,
    postgres::{PgConnectOptions, PgPool, PgPoolOptions},
};
use time::OffsetDateTime;
use tokio::time::timeout;
use uuid::Uuid;

use super::{
    StoreError, server_instance,
    session::{self, ALIVE_TIMEOUT, Endpoint, Settings, unfit},
    target::{Target, place},
};

/// How many reads have a connection at once.
pub const CONNECTIONS_MAX: u32 = 4;

/// How long a read waits for a new connection before the primary is asked instead.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(2);

/// A standby that answers.
#[derive(Debug, Clone)]
pub struct Host {
    /// Where it is, for people.
    pub place: String,
    /// The connections to it.
    pub pool: PgPool,
}

/// Looks for a standby among the hosts of a database, and at the one that was found.
#[derive(Debug)]
pub struct Looking {
    target: Target,
    /// The host that is looked at.
    index: usize,
    /// The connection on which that is done.
    connection: Option<PgConnection>,
    host: Option<Host>,
}

impl Looking {
    /// Nothing was found yet.
    pub fn new(target: Target) -> Self {
        Self { target, index: 0, connection: None, host: None }
    }

    /// When the instance last said that it lives, as far as the standby knows, and which that is. After a failure another host is looked
    /// at.
    ///
    /// # Errors
    /// Those of the database; if it is no standby, or knows nothing of the instance.
    pub async fn look(&mut self, instance_id: Uuid) -> Result<(Host, OffsetDateTime), StoreError> {
        let looked = self.look_at_one(instance_id).await;
        if looked.is_err() {
            (self.connection, self.host) = (None, None);
            self.index = self.index.wrapping_add(1);
        }
        looked
    }

    async fn look_at_one(&mut self, instance_id: Uuid) -> Result<(Host, OffsetDateTime), StoreError> {
        let hosts = self.target.hosts();
        let index = self.index.checked_rem(hosts.options.len()).unwrap_or_default();
        let options = hosts.options.get(index).cloned().ok_or(sqlx::Error::PoolClosed)?;
        let settings = Settings::bounded(&options, &hosts.settings);
        let endpoint = Endpoint::new(options, settings);
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => timeout(hosts.timeout, endpoint.connect()).await.map_err(|_| sqlx::Error::PoolTimedOut)??,
        };
        let connection = self.connection.insert(connection);
        let marked = timeout(ALIVE_TIMEOUT, server_instance::marked_on_standby(connection, instance_id)).await;
        let marked = marked.map_err(|_| sqlx::Error::PoolTimedOut)??.ok_or(sqlx::Error::RowNotFound)?;
        let host = self.host.get_or_insert_with(|| Host { place: place(&endpoint.options), pool: pool(endpoint) });
        Ok((host.clone(), marked))
    }

    /// Takes up what the file of the URL says, if it stands in one and says something else. True if it does.
    pub async fn read_again(&mut self) -> bool {
        let Some(Ok(hosts)) = self.target.read_again().await else { return false };
        let told = |options: &[PgConnectOptions]| options.iter().map(ConnectOptions::to_url_lossy).collect::<Vec<_>>();
        if told(&hosts.options) == told(&self.target.hosts().options) {
            return false;
        }
        self.target.set(hosts);
        *self = Self::new(self.target.clone());
        true
    }
}

/// Connections have to answer in time when they are taken, and when they are given back, as those to the primary.
fn pool(endpoint: Endpoint) -> PgPool {
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
