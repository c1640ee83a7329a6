//! Follower of the history, across connections: resumes a broken stream from the position of the last message.
//!
//! No line is lost or repeated while the service keeps the lines after the position.

use std::time::Duration;

use prost::bytes::Bytes;
use tokio::time::{sleep, timeout};
use tonic::{Status, Streaming};

use rm_proto::v1 as proto;

use super::{
    Result, RmClient, calls, connection, random,
    retry::{AttemptFailure, Idempotency},
};

/// Timeout without a message. The service sends one at least every five seconds.
const SILENT_MAX: Duration = Duration::from_secs(30);

/// Follows the history; see [`RmClient::follow_actions`].
#[derive(Debug)]
pub struct Follower {
    client: RmClient,
    position: String,
    stream: Option<Streaming<Bytes>>,
    /// Number of failures since the last message.
    failed: u32,
}

impl Follower {
    pub(super) fn new(client: RmClient, position: String) -> Self {
        Self { client, position, stream: None, failed: 0 }
    }

    /// Returns the position of the last message. Any client can resume from it at any time.
    pub fn position(&self) -> &str {
        &self.position
    }

    /// Returns the next message: history lines, or none if only the position advanced. A broken stream is resumed from the
    /// last position, with as many attempts as a call.
    ///
    /// Cancel safe: dropping the future loses no line.
    ///
    /// # Errors
    /// [`ClientError::Status`](super::ClientError::Status): the lines after the position are deleted, or no instance is
    /// reachable.
    pub async fn next(&mut self) -> Result<proto::FollowActionsResponse> {
        loop {
            let failure = match self.try_next().await {
                Ok(message) => {
                    self.failed = 0;
                    self.position.clone_from(&message.position);
                    return Ok(message);
                }
                Err(failure) => failure,
            };
            self.stream = None;
            self.failed += 1;
            if self.failed >= self.client.retry_budget.attempts || !failure.may_be_repeated(Idempotency::Safe) {
                return Err(failure.into_status().into());
            }
            let [high, low] = random();
            let pause = failure.pause(self.failed, f64::from(u16::from_be_bytes([high, low])) / f64::from(u16::MAX));
            sleep(pause).await;
        }
    }

    async fn try_next(&mut self) -> std::result::Result<proto::FollowActionsResponse, AttemptFailure> {
        let stream = match &mut self.stream {
            Some(stream) => stream,
            None => {
                let from = proto::FollowActionsRequest { position: self.position.clone() };
                let opened = calls::FOLLOW_ACTIONS.open(&self.client.pool, &from, self.client.retry_budget).await?;
                self.stream.insert(opened)
            }
        };
        let lost = |why: &str| AttemptFailure::Lost(Status::unavailable(why));
        match timeout(SILENT_MAX, stream.message()).await {
            Ok(Ok(Some(message))) => calls::FOLLOW_ACTIONS.decode(message).map_err(connection::failure),
            Ok(Ok(None)) => Err(lost("the service ended the stream without a status")),
            Ok(Err(status)) => Err(connection::failure(status)),
            Err(_) => Err(lost("the service sent nothing for too long")),
        }
    }
}
