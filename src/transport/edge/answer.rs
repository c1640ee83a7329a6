//! What a call is answered. It is read at once, and not as its caller reads: so its size is known, and can have a bound.

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
    calls::{Call, Closing},
};

/// What a call is answered, as it is sent.
#[derive(Debug)]
pub struct Answer {
    /// What was read ahead of its sending.
    ahead: VecDeque<Result<Frame<Bytes>, Status>>,
    body: Body,
    closing: Option<Closing>,
    has_ended: bool,
    /// It is under way until the last of the answer is handed over.
    _call: Option<Arc<Call>>,
}

impl Answer {
    pub(super) fn new(body: Body, closing: Option<Closing>, call: Option<Arc<Call>>) -> Self {
        // Of most answers there is a message and how it ended.
        Self { ahead: VecDeque::with_capacity(2), body, closing, has_ended: false, _call: call }
    }

    /// Reads what there is by now, which is all of an answer without a stream; how many bytes its messages have.
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

    /// The HTTP/2 library takes a piece when the one before has left, and keeps the last one: without pieces, it would keep it all. Each
    /// is a copy, because a part would keep the whole.
    fn put(&mut self, data: Bytes) {
        if data.len() <= SMALL_ANSWER_BYTES {
            self.ahead.push_back(Ok(Frame::data(data)));
            return;
        }
        let pieces = data.chunks(SMALL_ANSWER_BYTES).map(Bytes::copy_from_slice);
        self.ahead.extend(pieces.map(|piece| Ok(Frame::data(piece))));
    }
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Some(frame) = self.ahead.pop_front() {
            return Poll::Ready(Some(frame));
        }
        if self.has_ended {
            return Poll::Ready(None);
        }
        // First: of a stream that has to end, the questions end too, and then its answers would, as if nothing were the matter.
        let Some(Poll::Ready(why)) = self.closing.as_mut().map(|closing| closing.poll(cx)) else {
            return Pin::new(&mut self.body).poll_frame(cx);
        };
        self.has_ended = true;
        let mut trailers = http::HeaderMap::new();
        let told = Status::from(why).add_header(&mut trailers);
        Poll::Ready(Some(told.map(|()| Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.ahead.is_empty() && (self.has_ended || self.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        if self.ahead.is_empty() { self.body.size_hint() } else { SizeHint::default() }
    }
}
