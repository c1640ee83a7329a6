//! Connections as they come, and the HTTP/2 that is served on them.

use std::{sync::Arc, time::Duration};

use tokio::{sync::mpsc, task::JoinSet};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use crate::{
    service::tasks::Tasks,
    transport::{
        edge::{self, Bounds, Calls, Edge, Listener},
        observe::Observe,
    },
};

/// How often a connection without traffic is asked for a sign of life, and how long it may take.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// How many accepted connections wait to be served.
const ACCEPTED_MAX: usize = 16;

/// Connections that get as old as this, as they come.
pub(super) type Incoming = (Option<Duration>, ReceiverStream<std::io::Result<edge::Connection>>);

/// The connections of callers that were let in, until the server stops; those that have an age are dealt in turn to ages around it.
pub(super) fn accepted(
    listener: Arc<Listener>,
    edge: &Arc<Edge>,
    tasks: &Tasks,
    stopping: &CancellationToken,
    age: Option<Duration>,
) -> Vec<Incoming> {
    let (serve, mut accepted) = mpsc::channel(ACCEPTED_MAX);
    let accepting = edge::accept(listener, edge.clone(), serve);
    let stopping = stopping.clone();
    tasks.spawn(async move { stopping.run_until_cancelled(accepting).await.unwrap_or_default() });
    let Some(age) = age else { return vec![(None, ReceiverStream::new(accepted))] };
    let (mut doors, mut incoming) = (vec![], vec![]);
    for age in edge::ages(age) {
        let (door, dealt) = mpsc::channel(1);
        doors.push(door);
        incoming.push((Some(age), ReceiverStream::new(dealt)));
    }
    tasks.spawn(async move {
        for door in (0..doors.len()).cycle() {
            let (Some(connection), Some(door)) = (accepted.recv().await, doors.get(door)) else { return };
            // Where nobody serves any more, it ends.
            let _ = door.send(connection).await;
        }
    });
    incoming
}

/// Serves calls on connections of every age, until the server stops; what serves them goes with the last.
pub(super) fn serve_calls(
    calls: Calls,
    incoming: Vec<Incoming>,
    bounds: &Bounds,
    observe: &Observe,
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

/// HTTP/2 within `bounds`, on connections that get so old.
fn transport_server(bounds: &Bounds, age: Option<Duration>) -> tonic::transport::Server {
    let server = tonic::transport::Server::builder();
    // Without a time for it: with one, calls under way would be cut off then, and new ones not sent elsewhere before. None of them
    // lasts longer than it said.
    let server = match age {
        Some(age) => server.max_connection_age(age),
        None => server,
    };
    server
        .max_concurrent_streams(bounds.connection_streams)
        // As many calls as it may have under way may be cancelled before they were looked at. Of more, a client would be at fault; of
        // fewer, an instance that stood still would cut off those who still wait, for those who went away.
        .http2_max_pending_accept_reset_streams(usize::try_from(bounds.connection_streams).ok())
        .initial_stream_window_size(edge::STREAM_WINDOW)
        .initial_connection_window_size(bounds.connection_window())
        .http2_max_header_list_size(edge::HEADER_BYTES_MAX)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
}
