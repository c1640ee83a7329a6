//! Response body of a call.
//!
//! A response that is no stream is read completely before it is sent, regardless of the caller's speed. Its size is
//! then known and is charged to the byte budget. A large message is sent in pieces. Caller: `service`.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http_body::{Body as HttpBody, Frame, SizeHint};
use tonic::{
    Status,
    body::Body,
    codegen::{Bytes, http},
};

use super::{
    SMALL_ANSWER_BYTES,
    service::{CallPermit, StreamDeadline},
};
use crate::status::to_status;

/// Response body as it is sent.
#[derive(Debug)]
pub struct ReplyBody {
    /// Frames that were read ahead.
    ahead: VecDeque<Result<Frame<Bytes>, Status>>,
    body: Body,
    closing: Option<StreamDeadline>,
    has_ended: bool,
    /// Keeps the call in progress until the last frame is taken.
    _call: Option<Arc<CallPermit>>,
}

impl ReplyBody {
    pub(super) fn new(body: Body, closing: Option<StreamDeadline>, call: Option<Arc<CallPermit>>) -> Self {
        // Most responses have one message and the trailers.
        Self { ahead: VecDeque::with_capacity(2), body, closing, has_ended: false, _call: call }
    }

    /// Reads all frames that are available now: the whole response unless it is a stream. Returns the bytes of its
    /// messages.
    pub(super) fn read_ahead(&mut self, cx: &mut Context<'_>) -> usize {
        let mut bytes = 0;
        while !self.has_ended {
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(Some(frame)) => match frame.map(Frame::into_data) {
                    Ok(Ok(data)) => {
                        bytes += data.len();
                        self.put(data);
                    }
                    Ok(Err(trailers)) => self.ahead.push_back(Ok(trailers)),
                    Err(status) => self.ahead.push_back(Err(status)),
                },
                Poll::Ready(None) => self.has_ended = true,
                Poll::Pending => break,
            }
        }
        bytes
    }

    /// Queues `data` in pieces. The HTTP/2 library takes a piece when the previous one was sent, and keeps the last
    /// one. Each piece is a copy, because a slice would keep the whole buffer.
    fn put(&mut self, data: Bytes) {
        if data.len() <= SMALL_ANSWER_BYTES {
            self.ahead.push_back(Ok(Frame::data(data)));
            return;
        }
        let pieces = data.chunks(SMALL_ANSWER_BYTES).map(Bytes::copy_from_slice);
        self.ahead.extend(pieces.map(|piece| Ok(Frame::data(piece))));
    }
}

impl HttpBody for ReplyBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Some(frame) = self.ahead.pop_front() {
            return Poll::Ready(Some(frame));
        }
        if self.has_ended {
            return Poll::Ready(None);
        }
        // The end of a stream is checked first. Its requests end too, and the stream would otherwise end without an
        // error.
        let Some(Poll::Ready(why)) = self.closing.as_mut().map(|closing| closing.poll(cx)) else {
            return Pin::new(&mut self.body).poll_frame(cx);
        };
        self.has_ended = true;
        let mut trailers = http::HeaderMap::new();
        let encoded = to_status(why).add_header(&mut trailers);
        Poll::Ready(Some(encoded.map(|()| Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.ahead.is_empty() && (self.has_ended || self.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        if self.ahead.is_empty() { self.body.size_hint() } else { SizeHint::default() }
    }
}
