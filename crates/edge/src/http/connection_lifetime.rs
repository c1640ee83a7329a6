//! Lifetime of an HTTP connection: one request within a bounded time, unless a handler makes it endless. Callers: the
//! HTTP listener and the handlers of the page.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use tokio_util::sync::CancellationToken;

/// Timeout of a connection with its one request and the response.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection, with its deadline.
#[derive(Debug)]
pub struct ConnectionLifetime {
    /// Address of the peer.
    pub peer: SocketAddr,
    /// Whether the connection uses TLS.
    pub is_encrypted: bool,
    lasts: AtomicBool,
    end: CancellationToken,
}

impl ConnectionLifetime {
    /// Creates the lifetime of a new connection.
    pub fn new(peer: SocketAddr, is_encrypted: bool) -> Self {
        Self { peer, is_encrypted, lasts: AtomicBool::new(false), end: CancellationToken::new() }
    }

    /// Removes the timeout of the connection. The caller bounds the number of such connections.
    pub fn last(&self) {
        self.lasts.store(true, Ordering::Relaxed);
    }

    /// Returns true if the connection has no timeout.
    pub fn lasts(&self) -> bool {
        self.lasts.load(Ordering::Relaxed)
    }

    /// Ends the connection, with unsent bytes: the peer does not read.
    pub fn cut_off(&self) {
        self.end.cancel();
    }

    /// Completes when the connection has to end, finished or not.
    pub async fn over(&self) {
        let late = async {
            tokio::time::sleep(CONNECTION_TIMEOUT).await;
            if self.lasts() {
                std::future::pending().await
            }
        };
        tokio::select! {
            () = late => {}
            () = self.end.cancelled() => {}
        }
    }
}
