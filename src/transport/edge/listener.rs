//! The accept loop.

use std::{io, sync::Arc, time::Duration};

use tokio::sync::mpsc;

use super::{Connection, Edge, Listener};

/// How long to wait after a connection could not be accepted: what is missing, e.g. a file descriptor, is not there again at once.
const PAUSE: Duration = Duration::from_millis(100);

/// Accepts connections and hands them on to be served, until nobody serves any more. Those beyond the bound are closed at once.
pub async fn accept(listener: Listener, edge: Arc<Edge>, serve: mpsc::Sender<io::Result<Connection>>) {
    loop {
        match listener.accept().await {
            Ok((stream, address)) => match Connection::admit(stream, &address, &edge) {
                Some(connection) => {
                    if serve.send(Ok(connection)).await.is_err() {
                        return;
                    }
                }
                None => {
                    edge.gauges.refused.add();
                    let open = edge.gauges.connections();
                    tracing::warn!(%address, open, "turned a connection away: see --max-connections");
                }
            },
            Err(error) if is_of_the_connection(&error) => {}
            Err(error) => {
                edge.gauges.accept_errors.add();
                let open = edge.gauges.connections();
                tracing::error!(error = &error as &dyn std::error::Error, open, "cannot accept connections");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Whether only the one connection failed, before it was accepted.
fn is_of_the_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
