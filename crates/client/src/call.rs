//! One call: attempts on one address after another, while safe and before its deadline.
//!
//! `pool` selects the connection and `retry` decides about further attempts. The message is encoded once. Attempts send and
//! receive encoded messages, so that their code is compiled once and not for each call of the API.
//! Never: repeats a call whose result is unknown, unless the table in `calls` marks it as safe.
//! Callers: [`RmClient::make`](super::RmClient::make), and `follow`, which opens a stream.

use std::{marker::PhantomData, time::Duration};

use async_recursion::async_recursion as boxed;
use http::uri::PathAndQuery;
use prost::{
    Message,
    bytes::{Buf as _, BufMut as _, Bytes},
};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::{
    Request, Status, Streaming,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
};

use super::{
    ClientError,
    connection::{self, Sender},
    pool::ConnectionPool,
    random,
    retry::{AttemptFailure, Idempotency},
};

/// Maximum timeout of any call.
const TIMEOUT_MAX: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Maximum number of connections that close before a call begins, until the next one counts as a failed attempt.
const NOT_BEGUN_MAX: u32 = 16;

/// A call of the API with the types of its request and reply.
#[derive(Debug)]
pub struct ApiCall<Q, A> {
    pub(super) method: Method,
    types: PhantomData<fn(Q) -> A>,
}

/// A method of the API.
#[derive(Debug)]
pub(super) struct Method {
    path: &'static str,
    /// Whether the call may be repeated when its result is unknown.
    pub repeat: Idempotency,
    /// Maximum size of a reply, in bytes.
    answer_bytes_max: usize,
}

impl<Q, A> ApiCall<Q, A> {
    pub(super) const fn new(path: &'static str, repeat: Idempotency) -> Self {
        Self { method: Method { path, repeat, answer_bytes_max: 4 << 20 }, types: PhantomData }
    }

    pub(super) const fn with_large_answers(self, answer_bytes_max: usize) -> Self {
        Self { method: Method { answer_bytes_max, ..self.method }, types: PhantomData }
    }

    /// Returns the path of the method.
    #[must_use]
    pub const fn path(&self) -> &'static str {
        self.method.path
    }
}

impl<Q: Message, A: Message + Default> ApiCall<Q, A> {
    /// Makes the call.
    pub(super) async fn make(&self, pool: &ConnectionPool, message: &Q, budget: RetryBudget) -> Result<A, ClientError> {
        let reply = self.method.make(pool, message.encode_to_vec().into(), budget).await?;
        Ok(self.decode(reply)?)
    }

    /// Opens a streaming call on the next serving address, with one attempt. The messages are decoded by [`ApiCall::decode`].
    pub(super) async fn open(
        &self,
        pool: &ConnectionPool,
        message: &Q,
        budget: RetryBudget,
    ) -> Result<Streaming<Bytes>, AttemptFailure> {
        self.method.open(pool, message.encode_to_vec().into(), budget).await
    }

    /// Decodes a reply.
    ///
    /// # Errors
    /// `INTERNAL` for bytes that are not such a message.
    pub(super) fn decode(&self, reply: Bytes) -> Result<A, Status> {
        A::decode(reply).map_err(|error| Status::internal(format!("the reply cannot be decoded: {error}")))
    }
}

/// Number of attempts and time allowed for a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct RetryBudget {
    pub timeout: Duration,
    pub attempts: u32,
}

impl Method {
    #[boxed]
    async fn make(&self, pool: &ConnectionPool, body: Bytes, budget: RetryBudget) -> Result<Bytes, ClientError> {
        let deadline = Instant::now() + budget.timeout.min(TIMEOUT_MAX);
        let (mut failed, mut not_begun, mut on) = (0, 0, None);
        loop {
            let failure = match self.attempt(pool, body.clone(), deadline, &mut on).await {
                Ok(answer) => return Ok(answer),
                // Not an attempt: another connection takes the call, now or as soon as it is open.
                Err(AttemptFailure::NotBegun(_)) if not_begun < NOT_BEGUN_MAX => {
                    not_begun += 1;
                    tokio::task::yield_now().await;
                    continue;
                }
                Err(failure) => failure,
            };
            failed += 1;
            if failed >= budget.attempts || !failure.may_be_repeated(self.repeat) {
                return Err(failure.into_status().into());
            }
            let [high, low] = random();
            let pause = failure.pause(failed, f64::from(u16::from_be_bytes([high, low])) / f64::from(u16::MAX));
            if Instant::now() + pause >= deadline {
                return Err(failure.into_status().into());
            }
            let (is_of_the_way, status) = (failure.is_of_the_way(), failure.into_status());
            tracing::debug!(call = self.path, failed, ?pause, reason = status.message(), "a call is retried");
            match is_of_the_way {
                true if failed == 1 && pool.another_serves(on) => {}
                // Waits until an instance serves.
                true if !pool.another_serves(on) => pool.someone_serves(pause).await,
                _ => sleep(pause).await,
            }
        }
    }

    #[boxed]
    async fn open(
        &self,
        pool: &ConnectionPool,
        body: Bytes,
        budget: RetryBudget,
    ) -> Result<Streaming<Bytes>, AttemptFailure> {
        let opening = async {
            let (at, sender) = pool.next(None).await.map_err(AttemptFailure::NotSent)?;
            // Without a deadline, because the stream has no end.
            let request = Self::request(pool, body);
            let mut grpc = Grpc::with_origin(sender, pool.origin(at)).max_decoding_message_size(self.answer_bytes_max);
            let path = PathAndQuery::from_static(self.path);
            let opened = grpc.server_streaming(request, path, RawCodec).await;
            opened.map(tonic::Response::into_inner).map_err(connection::failure)
        };
        let late = |_| AttemptFailure::Lost(Status::unavailable("no reply before the deadline"));
        timeout(budget.timeout.min(TIMEOUT_MAX), opening).await.map_err(late)?
    }

    fn request(pool: &ConnectionPool, body: Bytes) -> Request<Bytes> {
        let mut request = Request::new(body);
        if let Some(authorization) = pool.authorization() {
            request.metadata_mut().insert("authorization", authorization.clone());
        }
        request
    }

    /// Makes one attempt and stores its address in `on`.
    async fn attempt(
        &self,
        pool: &ConnectionPool,
        body: Bytes,
        deadline: Instant,
        on: &mut Option<usize>,
    ) -> Result<Bytes, AttemptFailure> {
        let trying = async {
            let (at, sender) = pool.next(*on).await.map_err(AttemptFailure::NotSent)?;
            *on = Some(at);
            self.send(pool, at, sender, body, deadline).await.map_err(connection::failure)
        };
        let late = |_| AttemptFailure::Answered(Status::deadline_exceeded("no reply before the deadline"));
        timeout_at(deadline, trying).await.map_err(late)?
    }

    async fn send(
        &self,
        pool: &ConnectionPool,
        at: usize,
        sender: Sender,
        body: Bytes,
        deadline: Instant,
    ) -> Result<Bytes, Status> {
        let mut request = Self::request(pool, body);
        request.set_timeout(deadline.saturating_duration_since(Instant::now()));
        let grpc = Grpc::with_origin(sender, pool.origin(at));
        let path = PathAndQuery::from_static(self.path);
        let mut grpc = grpc.max_decoding_message_size(self.answer_bytes_max);
        Ok(grpc.unary(request, path, RawCodec).await?.into_inner())
    }
}

/// Codec of encoded messages.
struct RawCodec;

impl Codec for RawCodec {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for RawCodec {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(message);
        Ok(())
    }
}

impl Decoder for RawCodec {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}
