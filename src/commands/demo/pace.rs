//! The bound on the demo's calls.

use std::time::Duration;

use prost::Message;
use tokio::{
    sync::Mutex,
    time::{Interval, MissedTickBehavior, interval},
};

use crate::commands::{error::CommandFailure, service::ServiceClient};
use rm_client::ApiCall;

/// Shortest time between two calls: at most 20 a second.
pub const INTERVAL: Duration = Duration::from_millis(50);

/// Timeout of a call, including its time in a wait queue.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// A client that begins at most one call in each [`INTERVAL`], and repeats none.
#[derive(Debug)]
pub struct PacedClient {
    service: ServiceClient,
    permits: Mutex<Interval>,
}

impl PacedClient {
    /// Returns a client for `service`, which must not repeat calls.
    pub fn new(service: ServiceClient) -> Self {
        let mut permits = interval(INTERVAL);
        permits.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { service, permits: Mutex::new(permits) }
    }

    /// Returns the address of the service.
    pub fn address(&self) -> &str {
        self.service.address()
    }

    /// Waits for the next permit, then makes the call.
    ///
    /// # Errors
    /// [`CommandFailure::Service`].
    pub async fn make<Q, A>(&self, call: &ApiCall<Q, A>, message: &Q) -> Result<A, CommandFailure>
    where
        Q: Message,
        A: Message + Default + 'static,
    {
        self.permits.lock().await.tick().await;
        self.service.make(call, message).await
    }
}
