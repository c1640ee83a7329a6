//! In front of every service: what the body of a call may take, in bytes and in time, and when a stream without an end has to end.

use std::{
    convert::Infallible,
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
};

use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::{Sleep, sleep};
use tokio_util::sync::CancellationToken;
use tonic::{
    Code, Status,
    body::Body,
    codegen::{
        Bytes, Service,
        http::{self, header::AUTHORIZATION, uri::PathAndQuery},
    },
};

use crate::{
    error::Error,
    service::tokens::Ended,
    transport::{
        identity::{self, Admitted, Identity},
        routes::{Answered, Routes},
    },
};

use super::{
    BODY_BYTES_MAX, Edge, PREFIX_BYTES, SMALL_ANSWER_BYTES, SMALL_BODY_BYTES, answer::Answer, connection::Peer,
};

/// Serves calls within the bounds of the edge. The HTTP library makes a clone of it for each.
#[derive(Debug, Clone)]
pub struct Calls(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    routes: Arc<Routes<Received>>,
    edge: Arc<Edge>,
    door: Door,
}

/// Who is let in.
#[derive(Debug, Clone)]
enum Door {
    /// Those who show who they are.
    Open(Arc<Identity>),
    /// Nobody yet, because of this, but those who ask for health.
    Closed(Error),
}

/// What is answered while nobody is let in.
const HEALTH: &str = "/grpc.health.v1.Health/";

impl Calls {
    /// In front of `routes`, for those whom `identity` lets in.
    pub fn new(routes: Routes<Received>, edge: Arc<Edge>, identity: Arc<Identity>) -> Self {
        Self(Arc::new(Shared { routes: Arc::new(routes), edge, door: Door::Open(identity) }))
    }

    /// The same, for those whom another `identity` lets in.
    pub fn known_by(&self, identity: Arc<Identity>) -> Self {
        let Shared { routes, edge, .. } = &*self.0;
        Self(Arc::new(Shared { routes: routes.clone(), edge: edge.clone(), door: Door::Open(identity) }))
    }

    /// In front of `routes`, which serve health; other calls are answered with `error`.
    pub fn closed(routes: Routes<Received>, edge: Arc<Edge>, error: Error) -> Self {
        Self(Arc::new(Shared { routes: Arc::new(routes), edge, door: Door::Closed(error) }))
    }
}

impl Shared {
    /// Finds out who makes a call; of its token, nobody behind is told.
    fn admit(&self, request: &mut http::Request<Body>) -> Result<Option<Admitted>, Error> {
        let identity = match &self.door {
            Door::Open(identity) => identity,
            Door::Closed(_) if request.uri().path().starts_with(HEALTH) => return Ok(None),
            Door::Closed(error) => return Err(error.clone()),
        };
        let peer = request.extensions().get::<Arc<Peer>>();
        let admitted = identity.admit(&identity::Call {
            path: request.uri().path(),
            headers: request.headers(),
            certified: peer.and_then(|peer| peer.certified.as_ref()),
            address: peer.and_then(|peer| peer.address),
        })?;
        request.headers_mut().remove(AUTHORIZATION);
        Ok(admitted)
    }

    fn answer(&self, mut request: http::Request<Body>) -> Answering {
        // Many clients say of themselves that they accept it: compressing small answers would cost everybody more than it saves.
        if request.headers().get(ENCODING).is_none_or(|encoding| encoding != "gzip") {
            request.headers_mut().remove(ACCEPT_ENCODING);
        }
        let path = request.uri().path_and_query().cloned();
        let refused = |error| Answering { answer: Err(error), path: path.clone(), closing: None, call: None };
        let admitted = match self.admit(&mut request) {
            Ok(admitted) => admitted,
            Err(error) => return refused(error),
        };
        let place = match self.edge.places.admit(request.uri().path(), admitted.as_ref()) {
            Ok(place) => place,
            Err(error) => {
                self.edge.gauges.turned_away.add();
                return refused(error);
            }
        };
        let mut call = Call::begin(&self.edge, request.extensions().get::<Arc<Peer>>());
        let is_reflection = request.uri().path().starts_with("/grpc.reflection.");
        if is_reflection && !call.take_reflection() {
            return refused(Error::Overloaded);
        }
        // What has no end of its own ends with the token that it began with.
        let ended = || admitted.as_ref().map(|admitted| admitted.caller.ended.clone());
        let closing = || Closing::new(self.edge.closing.clone(), ended());
        let call = Arc::new(call);
        let kind = match is_reflection {
            true => Kind::Stream { closing: closing() },
            false => Kind::whole(call.clone()),
        };
        let closing = (is_reflection || ENDLESS.contains(&request.uri().path())).then(closing);
        place.and_then(|place| request.extensions_mut().insert(place));
        admitted.and_then(|admitted| request.extensions_mut().insert(admitted));
        let answer = Ok(self.routes.call(request.map(|body| Received { body, kind })));
        Answering { answer, path, closing, call: Some(call) }
    }
}

impl Service<http::Request<Body>> for Calls {
    type Response = http::Response<Answer>;
    type Error = Infallible;
    type Future = Answering;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Answering {
        self.0.answer(request)
    }
}

/// How a message is compressed, and how its answer may be: as it is itself, and only then.
const ENCODING: &str = "grpc-encoding";
const ACCEPT_ENCODING: &str = "grpc-accept-encoding";

/// Beside reflection, the calls whose answers go on until somebody ends them.
const ENDLESS: [&str; 3] =
    ["/grpc.health.v1.Health/Watch", "/linkis.rm.v1.UsageService/Watch", "/linkis.rm.v1.UsageService/FollowActions"];

/// A call under way, and what it takes; gives it back at its end.
#[derive(Debug)]
pub(super) struct Call {
    edge: Arc<Edge>,
    peer: Arc<Peer>,
    bytes: AtomicUsize,
    answer_bytes: AtomicUsize,
    is_reflection: bool,
}

impl Call {
    fn begin(edge: &Arc<Edge>, peer: Option<&Arc<Peer>>) -> Self {
        let peer = peer.cloned().unwrap_or_else(|| Arc::new(Peer::new(edge, None, None)));
        peer.calls.fetch_add(1, Ordering::AcqRel);
        edge.gauges.calls.add();
        Self {
            edge: edge.clone(),
            peer,
            bytes: AtomicUsize::new(0),
            answer_bytes: AtomicUsize::new(0),
            is_reflection: false,
        }
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

    /// Takes room for an answer of `bytes` until its last is handed over, once; false if there is none. A small one needs none.
    fn take_answer(&self, bytes: usize) -> bool {
        if bytes <= SMALL_ANSWER_BYTES {
            return true;
        }
        // However large it is, it has room if it is alone.
        let bytes = bytes.min(self.edge.bounds.connection_bytes());
        if !self.peer.answer_bytes.take(bytes) {
            return false;
        }
        if !self.edge.answer_bytes.take(bytes) {
            self.peer.answer_bytes.give_back(bytes);
            return false;
        }
        self.answer_bytes.store(bytes, Ordering::Relaxed);
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
        let answer_bytes = *self.answer_bytes.get_mut();
        self.peer.answer_bytes.give_back(answer_bytes);
        self.edge.answer_bytes.give_back(answer_bytes);
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

    /// Whether the message is compressed, if that is known by now.
    fn is_compressed(&self) -> bool {
        let [flag, ..] = self.bytes;
        self.known > 0 && flag == 1
    }
}

/// The last bytes of a compressed message, which tell how long it is without that (RFC 1952). One that lies is no message: that is
/// found when it is unpacked, and all of it is given back at once.
#[derive(Debug, Default)]
struct Unpacked {
    bytes: [u8; 4],
}

impl Unpacked {
    /// Reads on where `at` bytes of a body are known whose message ends after `end`: how long the message says to be, if that is known
    /// by now.
    fn read(&mut self, at: usize, data: &[u8], end: usize) -> Option<usize> {
        let first = end.checked_sub(self.bytes.len())?;
        for (place, byte) in (at..end).zip(data).skip(first.saturating_sub(at)) {
            if let Some(known) = place.checked_sub(first).and_then(|place| self.bytes.get_mut(place)) {
                *known = *byte;
            }
        }
        let length = usize::try_from(u32::from_le_bytes(self.bytes)).unwrap_or(usize::MAX);
        (at.saturating_add(data.len()) >= end).then_some(length)
    }
}

/// The body of a call, as it arrives.
#[derive(Debug)]
pub struct Received {
    body: Body,
    kind: Kind,
}

/// When a stream without an end has to end, and why.
pub(super) struct Closing {
    wait: Pin<Box<dyn Future<Output = Error> + Send>>,
    /// What it has told already: it may be asked again.
    told: Option<Error>,
}

impl Closing {
    fn new(closing: CancellationToken, ended: Option<Ended>) -> Self {
        let wait = Box::pin(async move {
            let ended = async {
                match ended {
                    Some(ended) => ended.why().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = closing.cancelled() => Error::ShuttingDown,
                why = ended => why.into(),
            }
        });
        Self { wait, told: None }
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Error> {
        if self.told.is_none() {
            self.told = Some(ready!(self.wait.as_mut().poll(cx)));
        }
        self.told.clone().map_or(Poll::Pending, Poll::Ready)
    }
}

impl fmt::Debug for Closing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Closing")
    }
}

#[derive(Debug)]
enum Kind {
    /// One message. Its room is taken when it is announced, because that much is laid out for it then; that of what a compressed one
    /// holds, before it is unpacked.
    Whole { call: Arc<Call>, prefix: Prefix, unpacked: Unpacked, received: usize, late: Option<Pin<Box<Sleep>>> },
    /// Questions of some bytes each, as long as the caller likes, or until the server closes.
    Stream { closing: Closing },
}

impl Kind {
    fn whole(call: Arc<Call>) -> Self {
        Self::Whole { call, prefix: Prefix::default(), unpacked: Unpacked::default(), received: 0, late: None }
    }

    /// Takes room for `data`.
    fn take(&mut self, data: &[u8]) -> Result<(), Error> {
        let Self::Whole { call, prefix, unpacked, received, .. } = self else { return Ok(()) };
        let before = *received;
        *received = before.saturating_add(data.len());
        let announced = prefix.read(data).unwrap_or_default();
        // What is announced beyond the largest message is refused unread, and what is unpacked beyond it where it gets there.
        let announced = if announced > BODY_BYTES_MAX { 0 } else { announced };
        let length =
            if prefix.is_compressed() { unpacked.read(before, data, announced).unwrap_or_default() } else { 0 };
        let length = if length > BODY_BYTES_MAX { 0 } else { length };
        if call.take(announced.max(*received).saturating_add(length)) {
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
            // Why, the answer tells.
            Self::Stream { closing } => closing.poll(cx).map(|_| Ok(())),
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
pub struct Answering {
    answer: Result<Answered, Error>,
    /// Of the call, for the log.
    path: Option<PathAndQuery>,
    closing: Option<Closing>,
    call: Option<Arc<Call>>,
}

impl fmt::Debug for Answering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answering").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Future for Answering {
    type Output = Result<http::Response<Answer>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = match &mut self.answer {
            Ok(answer) => match ready!(answer.as_mut().poll(cx)) {
                Ok(answer) => answer,
            },
            Err(error) => Status::from(error.clone()).into_http(),
        };
        let (closing, call) = (self.closing.take(), self.call.take());
        if let Some(status) = answer.extensions().get::<Status>() {
            tell_of_defect(self.path.as_ref().map_or("", PathAndQuery::path), status);
        }
        let is_whole = closing.is_none();
        let mut answer = answer.map(|body| Answer::new(body, closing, call.clone()));
        if let Some(call) = call.filter(|_| is_whole)
            && !call.take_answer(answer.body_mut().read_ahead(cx))
        {
            call.edge.gauges.shed.add();
            let refused = Status::from(Error::TooManyBytes).into_http();
            answer = refused.map(|body| Answer::new(body, None, Some(call)));
        }
        Poll::Ready(Ok(answer))
    }
}

/// Logs what was behind an answer that only says that there is a defect. What the caller did wrong is its own affair.
fn tell_of_defect(method: &str, status: &Status) {
    let error = std::error::Error::source(status).and_then(|source| source.downcast_ref::<Error>());
    if let (Code::Internal, Some(error)) = (status.code(), error) {
        tracing::error!(method, error = error as &dyn std::error::Error, "a call met a defect of the service");
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

    /// A message of few bytes that says to be of many has room for those before anybody unpacks it.
    #[test]
    fn what_is_compressed_takes_the_room_of_what_it_holds() {
        let length: u32 = 1 << 20;
        let message = [[1, 0, 0, 0, 20].as_slice(), &[9; 16], &length.to_le_bytes()].concat();
        let bytes = u64::try_from(message.len()).unwrap() + u64::from(length);
        for cut in 0..message.len() {
            let edge = Edge::new(Bounds::DEFAULT, None);
            let peer = Arc::new(Peer::new(&edge, None, None));
            let mut body = Kind::whole(Arc::new(Call::begin(&edge, Some(&peer))));
            let (first, second) = message.split_at(cut);
            body.take(first).unwrap();
            assert!(edge.gauges().bytes_in_flight() < 100, "not known yet");
            body.take(second).unwrap();
            assert_eq!(edge.gauges().bytes_in_flight(), bytes, "cut at {cut}");
            body.take(&[7]).unwrap();
            assert_eq!(edge.gauges().bytes_in_flight(), bytes + 1);
        }
        let edge = Edge::new(Bounds { body_bytes: 16 << 20, ..Bounds::DEFAULT }, None);
        let peer = Arc::new(Peer::new(&edge, None, None));
        let call = || Kind::whole(Arc::new(Call::begin(&edge, Some(&peer))));
        let mut bodies: Vec<_> = (0..5).map(|_| call()).collect();
        assert_eq!(
            bodies.iter_mut().filter_map(|body| body.take(&message).ok()).count(),
            3,
            "its connection has a quarter"
        );
    }

    #[test]
    fn large_bodies_leave_room_for_small_ones_and_one_connection_for_others() {
        let bounds = Bounds { body_bytes: 16 << 20, ..Bounds::DEFAULT };
        let edge = Edge::new(bounds, None);
        let peers: [_; 4] = std::array::from_fn(|_| Arc::new(Peer::new(&edge, None, None)));
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
    #[test]
    fn answers_that_are_not_taken_have_room_beside_others_and_the_largest_alone() {
        let edge = Edge::new(Bounds { body_bytes: 16 << 20, ..Bounds::DEFAULT }, None);
        let peers: [_; 6] = std::array::from_fn(|_| Arc::new(Peer::new(&edge, None, None)));
        let call = |peer: usize| Call::begin(&edge, peers.get(peer));
        let (first, second, small, largest) = (call(0), call(0), call(0), call(1));
        assert!(first.take_answer(3 << 20) && !second.take_answer(2 << 20) && small.take_answer(SMALL_ANSWER_BYTES));
        assert!(largest.take_answer(100 << 20), "as much as its connection may");
        let others = [call(2), call(3), call(4)];
        assert_eq!(others.each_ref().map(|call| call.take_answer(4 << 20)), [true, true, false], "16 MB in all");
        drop((first, second, small, largest, others));
        assert_eq!((edge.answer_bytes.taken(), peers[0].answer_bytes.taken()), (0, 0));
    }
}
