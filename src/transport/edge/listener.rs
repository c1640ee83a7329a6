//! The accept loop.

use std::{io, sync::Arc, time::Duration};

use tokio::{sync::mpsc, task::JoinSet};

use super::{Connection, Edge, Listener, connection::Newcomer};

/// How long to wait after a connection could not be accepted: what is missing, e.g. a file descriptor, is not there again at once.
const PAUSE: Duration = Duration::from_millis(100);

/// Accepts connections and hands them on to be served, until nobody serves any more. Those beyond the bound are closed at once. Each has
/// its handshake by itself, if they are encrypted, and counts as a connection meanwhile.
pub async fn accept(listener: Arc<Listener>, edge: Arc<Edge>, serve: mpsc::Sender<io::Result<Connection>>) {
    let mut handshakes = JoinSet::new();
    loop {
        match listener.accept().await {
            Ok((stream, address)) => match (Newcomer::admit(stream, address, &edge), &edge.tls) {
                (Some(newcomer), None) => {
                    if serve.send(Ok(newcomer.plain())).await.is_err() {
                        return;
                    }
                }
                (Some(newcomer), Some(tls)) => {
                    while handshakes.try_join_next().is_some() {}
                    let (tls, serve) = (tls.clone(), serve.clone());
                    handshakes.spawn(async move {
                        if let Some(connection) = newcomer.encrypted(&tls).await {
                            // Where nobody serves any more, it ends.
                            let _ = serve.send(Ok(connection)).await;
                        }
                    });
                }
                (None, _) => {
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
