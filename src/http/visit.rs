//! A connection: it is one request within a time that is bounded, unless it lasts by agreement.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use tokio_util::sync::CancellationToken;

/// How long a connection may take, with its one request and the answer.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);

/// What is known of a connection, and how long it may stay.
#[derive(Debug)]
pub struct Visit {
    /// Where it comes from.
    pub peer: SocketAddr,
    /// Whether what is said on it is encrypted.
    pub is_encrypted: bool,
    lasts: AtomicBool,
    end: CancellationToken,
}

impl Visit {
    /// One that begins.
    pub fn new(peer: SocketAddr, is_encrypted: bool) -> Self {
        Self { peer, is_encrypted, lasts: AtomicBool::new(false), end: CancellationToken::new() }
    }

    /// From here on it has no end of its own. Whoever lets it last bounds how many do.
    pub fn last(&self) {
        self.lasts.store(true, Ordering::Relaxed);
    }

    /// Whether it has no end of its own.
    pub fn lasts(&self) -> bool {
        self.lasts.load(Ordering::Relaxed)
    }

    /// Ends it, whatever is still on its way: the other side does not read.
    pub fn cut_off(&self) {
        self.end.cancel();
    }

    /// When it has to end, whether it is done or not.
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
