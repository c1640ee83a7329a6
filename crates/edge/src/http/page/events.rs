//! Event stream of the page, as server-sent events: the whole state first, then the changes of each second.
//!
//! A stream ends when the caller stops reading, its credentials end, or the instance stops. The bound of watchers
//! includes these streams. Caller: the page, through `/api/v1/events`.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Extension,
    body::Body,
    extract::State,
    http::{HeaderMap, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::{authenticator::AdmittedCaller, http::connection_lifetime::ConnectionLifetime};
use rm_service::{error::Error, overview::WatchUpdate};

use super::{
    PageServices, PageSlot,
    api::ApiErrorReply,
    history::HistoryPoint,
    session,
    snapshot::{SentState, SnapshotChanges},
};

/// Maximum time for which a caller may take no event.
const UNREAD_MAX: Duration = Duration::from_secs(10);
/// Maximum time for which a caller may not take the last event.
const LAST_WORD_MAX: Duration = Duration::from_millis(500);

/// Content of one event.
#[derive(Debug, Serialize)]
struct EventMessage<'a> {
    #[serde(flatten)]
    news: SnapshotChanges<'a>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    points: Vec<HistoryPoint>,
    #[serde(skip_serializing_if = "Option::is_none")]
    server: Option<Value>,
}

type EventSender = mpsc::Sender<Result<String, Infallible>>;

/// Starts a stream.
///
/// # Errors
/// 401 or 403 if the caller may not watch, 429 above the bound of watchers, 503 while the instance starts or stops.
pub async fn stream(
    State(slot): State<PageSlot>,
    Extension(visit): Extension<Arc<ConnectionLifetime>>,
    headers: HeaderMap,
) -> Result<Response, ApiErrorReply> {
    let site = slot.site()?;
    let admitted = session::admit(&site, session::shown(&headers, &visit), &visit)?;
    let seen = site.overviews.watch(&admitted.caller.principal)?;
    visit.last();
    let (sender, receiver) = mpsc::channel(1);
    let tasks = site.tasks.clone();
    tasks.spawn(run(site, admitted, seen, sender, visit));
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    Ok((headers, Body::from_stream(ReceiverStream::new(receiver))).into_response())
}

async fn run(
    site: Arc<PageServices>,
    admitted: AdmittedCaller,
    seen: mpsc::Receiver<Result<WatchUpdate, Error>>,
    sender: EventSender,
    visit: Arc<ConnectionLifetime>,
) {
    let stopping = site.stopping.clone();
    let end = tokio::select! {
        () = sender.closed() => return,
        () = stopping.cancelled() => word("trouble", "the instance stops"),
        why = admitted.caller.ended.why() => word("login", &why.to_string()),
        end = follow(&site, &admitted, seen, &sender) => match end {
            Some(end) => end,
            None => return visit.cut_off(),
        },
    };
    drop(site);
    if send(&sender, end, LAST_WORD_MAX).await.is_some() {
        drop(sender);
        if stopping.is_cancelled() {
            // The server ends all connections.
            return;
        }
        // The last event may still have to be sent.
        tokio::time::sleep(LAST_WORD_MAX).await;
    }
    // No bound counts the connection from here on, so an unread one would never end.
    visit.cut_off();
}

fn event(kind: &str, json: &str) -> String {
    // JSON text contains no line breaks.
    format!("event: {kind}\ndata: {json}\n\n")
}

fn word(kind: &str, text: &str) -> String {
    event(kind, &Value::from(text).to_string())
}

/// Sends an event; `None` if the caller does not take it in time.
async fn send(sender: &EventSender, text: String, longest: Duration) -> Option<()> {
    tokio::time::timeout(longest, sender.send(Ok(text))).await.ok()?.ok()
}

/// Sends the changes of each second. Returns the last event, or `None` if the caller does not take one.
async fn follow(
    site: &PageServices,
    admitted: &AdmittedCaller,
    mut seen: mpsc::Receiver<Result<WatchUpdate, Error>>,
    sender: &EventSender,
) -> Option<String> {
    let is_bound = !admitted.reach().is_all();
    let (mut sent, mut points_sent, mut server) = (SentState::default(), 0, Some(site.about(admitted)));
    loop {
        let picture = match seen.recv().await {
            Some(Ok(seen)) => site.pictures.of(&seen.snapshot),
            Some(Err(error)) => Err(error),
            None => Err(Error::ShuttingDown),
        };
        let picture = match picture {
            Ok(picture) => picture,
            Err(error) => return Some(word("trouble", &error.to_string())),
        };
        let (points, next) = site.history.since(points_sent, is_bound);
        points_sent = next;
        let message = EventMessage { news: sent.news(&picture, is_bound), points, server: server.take() };
        let Ok(json) = serde_json::to_string(&message) else {
            return Some(word("trouble", "a defect of the service"));
        };
        send(sender, event("picture", &json), UNREAD_MAX).await?;
    }
}

impl PageServices {
    /// Returns the fields of the first event about the instance and the caller.
    fn about(&self, admitted: &AdmittedCaller) -> Value {
        let mut fields = session::who(admitted);
        if let Value::Object(entries) = &mut fields {
            entries.insert("version".to_owned(), env!("CARGO_PKG_VERSION").into());
            entries.insert("instance_id".to_owned(), self.about.instance_id.to_string().into());
            entries.insert("grpc".to_owned(), self.about.grpc.clone().into());
            entries.insert("tls".to_owned(), self.about.tls.into());
        }
        fields
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn event_stream_without_reader_ends() {
        let (sender, mut receiver) = mpsc::channel(1);
        let soon = Duration::from_millis(20);
        assert!(send(&sender, event("picture", "{}"), soon).await.is_some());
        assert!(send(&sender, event("picture", "{}"), soon).await.is_none());
        let Ok(text) = receiver.recv().await.unwrap();
        assert_eq!(text, "event: picture\ndata: {}\n\n");
        drop(receiver);
        assert!(send(&sender, event("picture", "{}"), soon).await.is_none());
    }
}
