//! In front of every service: what the body of a call may take, in bytes and in time, and when a stream without an end has to end.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::Instant,
};

use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::{Sleep, sleep};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::{
    Code, Status,
    body::Body,
    codegen::{Bytes, Service, http},
    service::Routes,
};

use crate::error::Error;

use super::{BODY_BYTES_MAX, Edge, PREFIX_BYTES, SMALL_BODY_BYTES, connection::Peer};

/// Serves calls within the bounds of the edge.
#[derive(Debug, Clone)]
pub struct Calls {
    routes: Routes,
    edge: Arc<Edge>,
}

impl Calls {
    /// In front of `routes`.
    pub fn new(routes: Routes, edge: Arc<Edge>) -> Self {
        Self { routes: routes.prepare(), edge }
    }
}

impl Service<http::Request<Body>> for Calls {
    type Response = http::Response<Answer>;
    type Error = Infallible;
    type Future = Answering;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<http::Request<Received>>::poll_ready(&mut self.routes, cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Answering {
        let mut call = Call::begin(&self.edge, request.extensions().get::<Arc<Peer>>());
        let uri = request.uri().clone();
        let is_reflection = uri.path().starts_with("/grpc.reflection.");
        if is_reflection && !call.take_reflection() {
            return Answering { answer: Err(Error::Overloaded), uri, closing: None, call: None };
        }
        let call = Arc::new(call);
        let closing = || Box::pin(self.edge.closing.clone().cancelled_owned());
        let kind = match is_reflection {
            true => Kind::Stream { closing: closing() },
            false => Kind::Whole { call: call.clone(), prefix: Prefix::default(), received: 0, late: None },
        };
        let answer = Ok(self.routes.call(request.map(|body| Received { body, kind })));
        let closing = (is_reflection || uri.path() == HEALTH_WATCH).then(closing);
        Answering { answer, uri, closing, call: Some(call) }
    }
}

/// Beside reflection, the call whose answer goes on until somebody ends it.
const HEALTH_WATCH: &str = "/grpc.health.v1.Health/Watch";

/// A call under way, and what it takes; gives it back at its end.
#[derive(Debug)]
struct Call {
    edge: Arc<Edge>,
    peer: Arc<Peer>,
    bytes: AtomicUsize,
    is_reflection: bool,
}

impl Call {
    fn begin(edge: &Arc<Edge>, peer: Option<&Arc<Peer>>) -> Self {
        let peer = peer.cloned().unwrap_or_else(|| Arc::new(Peer::new(edge)));
        peer.calls.fetch_add(1, Ordering::AcqRel);
        edge.gauges.calls.add();
        Self { edge: edge.clone(), peer, bytes: AtomicUsize::new(0), is_reflection: false }
    }

    /// Takes one of the places for reflection; false if there is none.
    fn take_reflection(&mut self) -> bool {
        self.is_reflection = self.edge.reflections.take(1);
        self.is_reflection
    }

    /// Takes room for `bytes` in all; false if there is not so much.
    fn take(&self, bytes: usize) -> bool {
        let before = self.bytes.load(Ordering::Relaxed);
        let Some(more) = bytes.checked_sub(before).filter(|more| *more > 0) else { return true };
        let gauges = &self.edge.gauges;
        let parts = [
            (&self.peer.bytes, more),
            (&gauges.held_large_bytes, large(bytes) - large(before)),
            (&gauges.held_bytes, more),
        ];
        for (taken, (share, amount)) in parts.iter().enumerate() {
            if !share.take(*amount) {
                parts.iter().take(taken).for_each(|(share, amount)| share.give_back(*amount));
                return false;
            }
        }
        self.bytes.store(bytes, Ordering::Relaxed);
        true
    }
}

/// What counts of a body as large: all of it, or nothing.
fn large(bytes: usize) -> usize {
    if bytes > SMALL_BODY_BYTES { bytes } else { 0 }
}

impl Drop for Call {
    fn drop(&mut self) {
        let (bytes, gauges) = (*self.bytes.get_mut(), &self.edge.gauges);
        gauges.held_bytes.give_back(bytes);
        gauges.held_large_bytes.give_back(large(bytes));
        self.peer.bytes.give_back(bytes);
        self.edge.reflections.give_back(usize::from(self.is_reflection));
        gauges.calls.take_away();
        self.peer.calls.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The first bytes of a body, which tell how long its message is.
#[derive(Debug, Default)]
struct Prefix {
    bytes: [u8; PREFIX_BYTES],
    known: usize,
}

impl Prefix {
    /// How long the body is by its own account, if that is known by now.
    fn read(&mut self, data: &[u8]) -> Option<usize> {
        for (place, byte) in self.bytes.iter_mut().skip(self.known).zip(data) {
            *place = *byte;
            self.known += 1;
        }
        let [_, a, b, c, d] = self.bytes;
        let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
        (self.known == PREFIX_BYTES).then(|| length.saturating_add(PREFIX_BYTES))
    }
}

/// The body of a call, as it arrives.
#[derive(Debug)]
pub struct Received {
    body: Body,
    kind: Kind,
}

type Closing = Pin<Box<WaitForCancellationFutureOwned>>;

#[derive(Debug)]
enum Kind {
    /// One message. Its room is taken when it is announced, because that much is laid out for it then.
    Whole { call: Arc<Call>, prefix: Prefix, received: usize, late: Option<Pin<Box<Sleep>>> },
    /// Questions of some bytes each, as long as the caller likes, or until the server closes.
    Stream { closing: Closing },
}

impl Kind {
    /// Takes room for `data`.
    fn take(&mut self, data: &[u8]) -> Result<(), Error> {
        let Self::Whole { call, prefix, received, .. } = self else { return Ok(()) };
        *received = received.saturating_add(data.len());
        let announced = prefix.read(data).unwrap_or_default();
        // What is announced beyond the largest message is refused unread.
        let announced = if announced > BODY_BYTES_MAX { 0 } else { announced };
        if call.take(announced.max(*received)) {
            return Ok(());
        }
        call.edge.gauges.shed.add();
        Err(Error::TooManyBytes)
    }

    /// Ready if nothing more of the body is waited for, and why if that is a failure.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        match self {
            Self::Whole { call, late, .. } => {
                let longest = call.edge.bounds.body_timeout;
                ready!(late.get_or_insert_with(|| Box::pin(sleep(longest))).as_mut().poll(cx));
                call.edge.gauges.late.add();
                Poll::Ready(Err(Error::BodyTimeout(longest)))
            }
            Self::Stream { closing } => closing.as_mut().poll(cx).map(Ok),
        }
    }
}

impl HttpBody for Received {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                let taken = frame.data_ref().map_or(Ok(()), |data| this.kind.take(data));
                Poll::Ready(Some(taken.map(|()| frame).map_err(Status::from)))
            }
            Poll::Ready(end) => Poll::Ready(end),
            Poll::Pending => match ready!(this.kind.poll_end(cx)) {
                Ok(()) => Poll::Ready(None),
                Err(error) => Poll::Ready(Some(Err(error.into()))),
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A call that is being answered.
#[derive(Debug)]
pub struct Answering {
    answer: Result<<Routes as Service<http::Request<Received>>>::Future, Error>,
    uri: http::Uri,
    closing: Option<Closing>,
    call: Option<Arc<Call>>,
}

impl Future for Answering {
    type Output = Result<http::Response<Answer>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = match &mut self.answer {
            Ok(answer) => match ready!(Pin::new(answer).poll(cx)) {
                Ok(answer) => answer,
            },
            Err(error) => Status::from(error.clone()).into_http(),
        };
        let (closing, call) = (self.closing.take(), self.call.take());
        if let (Some(status), Some(call)) = (answer.extensions().get::<Status>(), &call) {
            tell_of_defect(&call.edge, self.uri.path(), status);
        }
        Poll::Ready(Ok(answer.map(|body| Answer { body, closing, has_ended: false, _call: call })))
    }
}

/// Logs what was behind an answer that only says that there is a defect. What the caller did wrong is its own affair.
fn tell_of_defect(edge: &Edge, method: &str, status: &Status) {
    let error = std::error::Error::source(status).and_then(|source| source.downcast_ref::<Error>());
    if let (Code::Internal, Some(error)) = (status.code(), error)
        && let Some(others) = edge.defects.tell(Instant::now())
    {
        tracing::error!(method, error = error as &dyn std::error::Error, others, "a call met a defect of the service");
    }
}

/// What a call is answered, as it is sent.
#[derive(Debug)]
pub struct Answer {
    body: Body,
    closing: Option<Closing>,
    has_ended: bool,
    /// It is under way until the last of the answer is handed over.
    _call: Option<Arc<Call>>,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            return Poll::Ready(frame);
        }
        let Some(closing) = &mut self.closing else { return Poll::Pending };
        ready!(closing.as_mut().poll(cx));
        self.has_ended = true;
        let mut trailers = http::HeaderMap::new();
        let told = Status::from(Error::ShuttingDown).add_header(&mut trailers);
        Poll::Ready(Some(told.map(|()| Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.has_ended || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::edge::Bounds;

    #[test]
    fn the_length_is_read_however_it_is_cut() {
        let message = [0, 0, 0, 1, 2, 9, 9];
        for cut in 0..message.len() {
            let (first, second) = message.split_at(cut);
            let mut prefix = Prefix::default();
            let told = [prefix.read(first), prefix.read(second)];
            assert_eq!(told, [(cut >= PREFIX_BYTES).then_some(263), Some(263)], "cut at {cut}");
        }
    }

    #[test]
    fn large_bodies_leave_room_for_small_ones_and_one_connection_for_others() {
        let bounds = Bounds { body_bytes: 16 << 20, ..Bounds::DEFAULT };
        let edge = Edge::new(bounds);
        let peers: [_; 4] = std::array::from_fn(|_| Arc::new(Peer::new(&edge)));
        let call = |peer: usize| Call::begin(&edge, peers.get(peer));
        let large = [call(0), call(0), call(1), call(2)];
        assert!(large.iter().zip([3 << 20, 2 << 20, 3 << 20, 3 << 20]).map(|(call, bytes)| call.take(bytes)).eq([
            true,  // 3 MB
            false, // its connection has a quarter
            true,  // 6 MB
            false, // large ones have half
        ]));
        let small: Vec<Call> = (0..200).map(|n| call(n % 4)).collect();
        let taken = small.iter().filter(|call| call.take(SMALL_BODY_BYTES)).count();
        assert!(taken >= 128, "8 MB of small ones are taken: {taken}");
        assert!(edge.gauges().bytes_in_flight() <= 16 << 20);
        drop((large, small));
        assert_eq!((edge.gauges().bytes_in_flight(), edge.gauges().calls()), (0, 0));
        assert_eq!((edge.gauges.held_large_bytes.taken(), peers[0].bytes.taken()), (0, 0));
    }
}
