//! Accepted connections, and the HTTP/2 servers on them.
//!
//! Connections with a bounded age are distributed over several servers, one per age, so that they do not all end
//! together. Caller: the server of the root package.

use std::{sync::Arc, time::Duration};

use tokio::{sync::mpsc, task::JoinSet};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use rm_service::{tasks::InstanceTasks, waiting::CallerConnection};

use crate::{
    edge::{self, Edge, EdgeBounds, EdgeService, Listener},
    observe::ObserveLayer,
};

/// Interval between two keep-alive pings on a connection without traffic.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
/// Timeout of a keep-alive ping.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

const _: () = assert!(CallerConnection::SILENT.as_secs() < KEEPALIVE_TIMEOUT.as_secs());

/// Maximum number of accepted connections that wait for a server.
const ACCEPTED_MAX: usize = 16;

/// Accepted connections with one age.
pub type IncomingConnections = (Option<Duration>, ReceiverStream<std::io::Result<edge::Connection>>);

/// Accepts connections until the server stops. With an `age`, distributes them in turn over ages around it.
pub fn accepted(
    listener: Arc<Listener>,
    edge: &Arc<Edge>,
    tasks: &InstanceTasks,
    stopping: &CancellationToken,
    age: Option<Duration>,
) -> Vec<IncomingConnections> {
    let (serve, mut accepted) = mpsc::channel(ACCEPTED_MAX);
    let accepting = edge::accept(listener, edge.clone(), serve);
    let stopping = stopping.clone();
    tasks.spawn(async move { stopping.run_until_cancelled(accepting).await.unwrap_or_default() });
    let Some(age) = age else { return vec![(None, ReceiverStream::new(accepted))] };
    let (mut senders, mut incoming) = (vec![], vec![]);
    for age in edge::ages(age) {
        let (sender, dealt) = mpsc::channel(1);
        senders.push(sender);
        incoming.push((Some(age), ReceiverStream::new(dealt)));
    }
    tasks.spawn(async move {
        for sender in (0..senders.len()).cycle() {
            let (Some(connection), Some(sender)) = (accepted.recv().await, senders.get(sender)) else { return };
            // Without a receiver the connection ends.
            let _ = sender.send(connection).await;
        }
    });
    incoming
}

/// Serves calls on connections of every age until the server stops. The set is empty after the last connection.
pub fn serve_calls(
    calls: EdgeService,
    incoming: Vec<IncomingConnections>,
    bounds: &EdgeBounds,
    observe: &ObserveLayer,
    stopping: &CancellationToken,
) -> JoinSet<Result<(), tonic::transport::Error>> {
    let mut servers = JoinSet::new();
    for (age, incoming) in incoming {
        let server = transport_server(bounds, age).layer(observe.clone());
        let stop = stopping.clone().cancelled_owned();
        servers.spawn(server.serve_with_incoming_shutdown(calls.clone(), incoming, stop));
    }
    servers
}

/// Returns an HTTP/2 server within `bounds` for connections of this age.
fn transport_server(bounds: &EdgeBounds, age: Option<Duration>) -> tonic::transport::Server {
    let server = tonic::transport::Server::builder();
    // The age has no grace period. A grace period would cut off calls in progress and would not send new calls
    // elsewhere earlier. Each call ends by its own deadline.
    let server = match age {
        Some(age) => server.max_connection_age(age),
        None => server,
    };
    server
        .max_concurrent_streams(bounds.connection_streams)
        // A connection may cancel as many calls before they are read as it may have in progress. A higher bound would
        // permit abuse. A lower bound would make a paused instance cut off waiting calls because of cancelled ones.
        .http2_max_pending_accept_reset_streams(usize::try_from(bounds.connection_streams).ok())
        .initial_stream_window_size(edge::STREAM_WINDOW)
        .initial_connection_window_size(bounds.connection_window())
        .http2_max_header_list_size(edge::HEADER_BYTES_MAX)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
}
