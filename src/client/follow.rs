//! The history as it goes on, over one connection after another.

use std::time::Duration;

use tokio::time::{sleep, timeout};
use tonic::{Status, Streaming};

use crate::transport::proto;

use super::{
    Result, RmClient, calls, connection, random,
    retry::{Failure, Repeat},
};

/// After how long without a word the service is gone: it has one to say every five seconds.
const SILENT_MAX: Duration = Duration::from_secs(30);

/// Follows the history: see [`RmClient::follow_actions`].
#[derive(Debug)]
pub struct Follower {
    client: RmClient,
    position: String,
    stream: Option<Streaming<proto::FollowActionsResponse>>,
    /// How often it failed since something was told last.
    failed: u32,
}

impl Follower {
    pub(super) fn new(client: RmClient, position: String) -> Self {
        Self { client, position, stream: None, failed: 0 }
    }

    /// The position of the last message: whoever is done with it may go on from there, at any time and with any client.
    pub fn position(&self) -> &str {
        &self.position
    }

    /// The next message: lines, or none, if only the position is further on. What breaks meanwhile is taken up again from the last
    /// position, as often as the client tries a call.
    ///
    /// Dropped before it is done, it has lost nothing.
    ///
    /// # Errors
    /// [`ClientError::Status`](super::ClientError::Status): what comes behind the position is forgotten, say; or nobody could be reached.
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
            if self.failed >= self.client.patience.attempts || !failure.may_be_repeated(Repeat::Safe) {
                return Err(failure.into_status().into());
            }
            let [high, low] = random();
            let pause = failure.pause(self.failed, f64::from(u16::from_be_bytes([high, low])) / f64::from(u16::MAX));
            sleep(pause).await;
        }
    }

    async fn try_next(&mut self) -> std::result::Result<proto::FollowActionsResponse, Failure> {
        let stream = match &mut self.stream {
            Some(stream) => stream,
            None => {
                let from = proto::FollowActionsRequest { position: self.position.clone() };
                let opened = calls::FOLLOW_ACTIONS.open(&self.client.pool, &from, self.client.patience).await?;
                self.stream.insert(opened)
            }
        };
        let lost = |why: &str| Failure::Lost(Status::unavailable(why));
        match timeout(SILENT_MAX, stream.message()).await {
            Ok(Ok(Some(message))) => Ok(message),
            Ok(Ok(None)) => Err(lost("the service has ended the answer without a word")),
            Ok(Err(status)) => Err(connection::failure(status)),
            Err(_) => Err(lost("nothing was heard of the service for too long")),
        }
    }
}
