//! Accept loop: accepts connections, acquires their permits, and passes them to the HTTP/2 server.
//!
//! The loop never waits for a peer: a TLS handshake, or the delay of a slowed address, runs in a task of its own.
//! Caller: the server of the root package.

use std::{io, sync::Arc, time::Duration};

use tokio::{sync::mpsc, task::JoinSet, time::Instant};

use super::{Connection, Edge, Listener, connection::PendingConnection, slow_addresses::Turn};
use rm_telemetry::cause;

/// Pause after a failure to accept. A missing file descriptor is not available again immediately.
const PAUSE: Duration = Duration::from_millis(100);

/// Accepts connections and passes them to `serve` until its receiver is dropped.
///
/// Connections above the bound are closed immediately. A connection counts during its TLS handshake. Connections of a
/// slowed address wait for their turn.
pub async fn accept(listener: Arc<Listener>, edge: Arc<Edge>, serve: mpsc::Sender<io::Result<Connection>>) {
    let mut pending = JoinSet::new();
    loop {
        match listener.accept().await {
            Ok((stream, address)) => {
                let Some(newcomer) = PendingConnection::admit(stream, address, &edge) else {
                    edge.gauges.refused.add();
                    let open = edge.gauges.connections();
                    tracing::warn!(%address, open, "connection rejected: see --max-connections");
                    continue;
                };
                let turn = match edge.slow_addresses.turn(address.ip(), Instant::now()) {
                    Turn::Now => None,
                    Turn::At(turn) => Some(turn),
                    Turn::Never => {
                        edge.gauges.slowed.add();
                        continue;
                    }
                };
                if let (None, None) = (turn, &edge.tls) {
                    if serve.send(Ok(newcomer.plain())).await.is_err() {
                        return;
                    }
                    continue;
                }
                while pending.try_join_next().is_some() {}
                let (edge, serve) = (edge.clone(), serve.clone());
                pending.spawn(async move {
                    if let Some(connection) = prepare(newcomer, turn, &edge).await {
                        // Without a receiver the connection ends.
                        let _ = serve.send(Ok(connection)).await;
                    }
                });
            }
            Err(error) if is_of_the_connection(&error) => {}
            Err(error) => {
                edge.gauges.accept_errors.add();
                let open = edge.gauges.connections();
                tracing::error!(error = cause(&error), open, "cannot accept connections");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Waits for the turn of a connection and performs the TLS handshake; `None` if the handshake fails or times out.
async fn prepare(newcomer: PendingConnection, turn: Option<Instant>, edge: &Edge) -> Option<Connection> {
    let newcomer = match turn {
        Some(turn) => {
            edge.gauges.slowed.add();
            newcomer.wait(turn).await
        }
        None => newcomer,
    };
    match &edge.tls {
        Some(tls) => newcomer.encrypted(tls).await,
        None => Some(newcomer.plain()),
    }
}

/// Returns true if only the one connection failed before it was accepted.
fn is_of_the_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
