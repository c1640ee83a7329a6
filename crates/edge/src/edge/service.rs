//! Edge service: authenticates each call, acquires its permits and byte budgets, and ends endless streams.
//!
//! The edge rejects a call before any service reads it: a request that is no gRPC call, missing credentials, no permit,
//! an expired deadline. It logs the cause of a defect, because the caller gets only a general text. Never: decodes a
//! message. Callers: the HTTP/2 servers of an instance, and the monitoring page for its own calls.

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

use arc_swap::ArcSwap;
use prost::DecodeError;
use tokio::time::{Sleep, sleep};
use tokio_util::sync::CancellationToken;
use tonic::{
    Code, Status,
    body::Body,
    codegen::{
        Service,
        http::{
            self, HeaderValue, Method, StatusCode,
            header::{ALLOW, AUTHORIZATION, CONTENT_TYPE},
            uri::PathAndQuery,
        },
    },
};

use crate::status::to_status;
use crate::{
    authenticator::{self, AdmittedCaller, Authenticator},
    deadline, message_size,
    routes::{ReplyFuture, Routes},
};
use rm_model::name::FieldError;
use rm_service::{error::Error, tokens::CallerExpiry};
use rm_telemetry::cause;

use super::{Edge, SMALL_ANSWER_BYTES, SMALL_BODY_BYTES, body::RequestBody, connection::Peer, reply::ReplyBody};

/// Tower service in front of the routes. The HTTP library clones it for each call.
#[derive(Debug, Clone)]
pub struct EdgeService(Arc<EdgeInner>);

#[derive(Debug)]
struct EdgeInner {
    routes: Arc<Routes<RequestBody>>,
    edge: Arc<Edge>,
    access: AccessMode,
}

/// Which calls the edge accepts.
#[derive(Debug, Clone)]
enum AccessMode {
    /// All calls that the authenticator accepts.
    Open(Arc<Authenticator>),
    /// Health checks only. Other calls fail with this error.
    Closed(Arc<ArcSwap<Error>>),
}

/// Path prefix of the health checks.
const HEALTH: &str = "/grpc.health.v1.Health/";

impl EdgeService {
    /// Creates the service in front of `routes`. `identity` authenticates the calls.
    pub fn new(routes: Routes<RequestBody>, edge: Arc<Edge>, identity: Arc<Authenticator>) -> Self {
        Self(Arc::new(EdgeInner { routes: Arc::new(routes), edge, access: AccessMode::Open(identity) }))
    }

    /// Returns a service for the same routes that authenticates with `identity`.
    pub fn with_authenticator(&self, identity: Arc<Authenticator>) -> Self {
        let EdgeInner { routes, edge, .. } = &*self.0;
        Self(Arc::new(EdgeInner { routes: routes.clone(), edge: edge.clone(), access: AccessMode::Open(identity) }))
    }

    /// Creates a service in front of the health routes. Other calls fail with the current value of `error`.
    pub fn health_only(routes: Routes<RequestBody>, edge: Arc<Edge>, error: Arc<ArcSwap<Error>>) -> Self {
        Self(Arc::new(EdgeInner { routes: Arc::new(routes), edge, access: AccessMode::Closed(error) }))
    }
}

impl EdgeInner {
    /// Authenticates a call and removes its credentials, so that no service can log them.
    fn authenticate(&self, request: &mut http::Request<Body>) -> Result<Option<AdmittedCaller>, Error> {
        let identity = match &self.access {
            AccessMode::Open(identity) => identity,
            AccessMode::Closed(_) if request.uri().path().starts_with(HEALTH) => return Ok(None),
            AccessMode::Closed(error) => return Err(Error::clone(&error.load())),
        };
        let peer = request.extensions().get::<Arc<Peer>>();
        let admitted = identity.admit(&authenticator::CallCredentials {
            path: request.uri().path(),
            headers: request.headers(),
            certified: peer.and_then(|peer| peer.certified.as_ref()),
            address: peer.and_then(|peer| peer.address),
        })?;
        request.headers_mut().remove(AUTHORIZATION);
        if let (Some(_), Some(peer)) = (&admitted, request.extensions().get::<Arc<Peer>>()) {
            peer.is_known.store(true, Ordering::Relaxed);
        }
        Ok(admitted)
    }

    fn handle(&self, mut request: http::Request<Body>) -> CallFuture {
        // Many clients accept gzip by default. Compressing small responses would cost more than it saves, so only a
        // compressed request gets a compressed response.
        let is_gzip = request.headers().get(ENCODING).is_some_and(|encoding| encoding == "gzip");
        if !is_gzip {
            request.headers_mut().remove(ACCEPT_ENCODING);
        }
        let path = request.uri().path_and_query().cloned();
        let refused = |refused| CallFuture {
            answer: Err(refused),
            path: path.clone(),
            sort: CallClass::Work,
            closing: None,
            call: None,
            deadline: None,
        };
        if let Some(code) = refused_by_http(&request) {
            return refused(CallRejection::Http(code));
        }
        let refused = |error| refused(CallRejection::Grpc(error));
        let admitted = match self.authenticate(&mut request) {
            Ok(admitted) => admitted,
            Err(error) => return refused(error),
        };
        let timeout = match deadline::of_headers(request.headers()) {
            Ok(timeout) => timeout,
            Err(error) => return refused(error.into()),
        };
        let place = match self.edge.places.acquire(request.uri().path(), admitted.as_ref()) {
            Ok(place) => place,
            Err(error) => {
                self.edge.gauges.rejected.add();
                return refused(error);
            }
        };
        let sort = CallClass::of(request.uri().path());
        let call = match CallPermit::begin(&self.edge, request.extensions().get::<Arc<Peer>>(), sort) {
            Ok(call) => Arc::new(call),
            Err(error) => {
                self.edge.gauges.rejected.add();
                return refused(error);
            }
        };
        // An endless stream ends with the credentials that started it.
        let ended = || admitted.as_ref().map(|admitted| admitted.caller.ended.clone());
        let closing = || StreamDeadline::new(self.edge.closing.clone(), ended());
        let questions = (sort == CallClass::Reflection).then(closing);
        let closing = (sort == CallClass::Reflection || ENDLESS.contains(&request.uri().path())).then(closing);
        place.and_then(|place| request.extensions_mut().insert(place));
        admitted.and_then(|admitted| request.extensions_mut().insert(admitted));
        let limit = message_size::limit_of(request.uri().path());
        let answer = Ok(self.routes.call(request.map(|body| match questions {
            Some(closing) => RequestBody::stream(body, closing),
            None => RequestBody::message(body, call.clone(), is_gzip, limit),
        })));
        let deadline = timeout.map(|timeout| Box::pin(sleep(timeout)));
        CallFuture { answer, path, sort, closing, call: Some(call), deadline }
    }
}

/// Why a call is rejected before it reaches a service.
enum CallRejection {
    /// With a gRPC status.
    Grpc(Error),
    /// The request is no gRPC call: with an HTTP status for other clients.
    Http(StatusCode),
}

/// Returns the HTTP status for a request that is no gRPC call.
fn refused_by_http(request: &http::Request<Body>) -> Option<StatusCode> {
    if request.method() != Method::POST {
        return Some(StatusCode::METHOD_NOT_ALLOWED);
    }
    let content_type = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let kind = content_type.and_then(|content_type| content_type.strip_prefix("application/grpc"));
    let is_grpc = kind.is_some_and(|kind| kind.is_empty() || kind.starts_with(['+', ';']));
    (!is_grpc).then_some(StatusCode::UNSUPPORTED_MEDIA_TYPE)
}

/// Marks a response with a server's error code as a fault of the caller.
#[derive(Debug, Clone, Copy)]
pub struct FaultOfCaller;

impl Service<http::Request<Body>> for EdgeService {
    type Response = http::Response<ReplyBody>;
    type Error = Infallible;
    type Future = CallFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> CallFuture {
        self.0.handle(request)
    }
}

/// Encoding of the request message, and accepted encodings of the response.
const ENCODING: &str = "grpc-encoding";
const ACCEPT_ENCODING: &str = "grpc-accept-encoding";

/// Calls besides reflection whose response streams have no end.
const ENDLESS: [&str; 3] =
    ["/grpc.health.v1.Health/Watch", "/linkis.rm.v1.UsageService/Watch", "/linkis.rm.v1.UsageService/FollowActions"];

/// How a call counts on its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallClass {
    /// Completes before the connection ends.
    Work,
    /// Has no end of its own, and the end of the connection does not wait for it.
    Lingers,
    /// As `Lingers`, and the instance has few permits for it.
    Reflection,
    /// Needs no credentials. The end of the connection does not wait for the call, and the connection has few permits
    /// for it.
    Health,
}

impl CallClass {
    fn of(path: &str) -> Self {
        match path {
            _ if path.starts_with(HEALTH) => Self::Health,
            _ if path.starts_with("/grpc.reflection.") => Self::Reflection,
            _ if ENDLESS.contains(&path) => Self::Lingers,
            _ => Self::Work,
        }
    }
}

/// A call in progress with its permits and its charge to the byte budgets. Dropping it releases them.
#[derive(Debug)]
pub(super) struct CallPermit {
    pub(super) edge: Arc<Edge>,
    peer: Arc<Peer>,
    sort: CallClass,
    bytes: AtomicUsize,
    answer_bytes: AtomicUsize,
}

impl CallPermit {
    /// # Errors
    /// [`Error::Overloaded`] if no permit for this class of calls is available.
    pub(super) fn begin(edge: &Arc<Edge>, peer: Option<&Arc<Peer>>, sort: CallClass) -> Result<Self, Error> {
        let peer = peer.cloned().unwrap_or_else(|| Arc::new(Peer::new(edge, None, None)));
        let has_place = match sort {
            CallClass::Work | CallClass::Lingers => true,
            CallClass::Reflection => edge.reflections.take(1),
            CallClass::Health => peer.health.take(1),
        };
        if !has_place {
            return Err(Error::Overloaded);
        }
        peer.work.fetch_add(usize::from(sort == CallClass::Work), Ordering::AcqRel);
        edge.gauges.calls.add();
        Ok(Self { edge: edge.clone(), peer, sort, bytes: AtomicUsize::new(0), answer_bytes: AtomicUsize::new(0) })
    }

    /// Charges `bytes` in total to the budgets of request bodies. Returns false, and charges nothing more, if they do
    /// not fit.
    pub(super) fn take(&self, bytes: usize) -> bool {
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

    /// Charges a response of `bytes` until its last frame is taken; called once. Returns false if it does not fit. A
    /// small response is not charged.
    fn take_answer(&self, bytes: usize) -> bool {
        if bytes <= SMALL_ANSWER_BYTES {
            return true;
        }
        // The largest response fits if its connection has no other.
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

/// Returns the part of a body that counts as large: all of it, or zero.
fn large(bytes: usize) -> usize {
    if bytes > SMALL_BODY_BYTES { bytes } else { 0 }
}

impl Drop for CallPermit {
    fn drop(&mut self) {
        let (bytes, gauges) = (*self.bytes.get_mut(), &self.edge.gauges);
        let answer_bytes = *self.answer_bytes.get_mut();
        self.peer.answer_bytes.give_back(answer_bytes);
        self.edge.answer_bytes.give_back(answer_bytes);
        gauges.held_bytes.give_back(bytes);
        gauges.held_large_bytes.give_back(large(bytes));
        self.peer.bytes.give_back(bytes);
        match self.sort {
            CallClass::Work => {
                self.peer.work.fetch_sub(1, Ordering::AcqRel);
            }
            CallClass::Lingers => {}
            CallClass::Reflection => self.edge.reflections.give_back(1),
            CallClass::Health => self.peer.health.give_back(1),
        }
        gauges.calls.take_away();
    }
}

/// End of an endless stream, and its reason.
pub(super) struct StreamDeadline {
    wait: Pin<Box<dyn Future<Output = Error> + Send>>,
    /// The reason, once it is known: several bodies poll it.
    ended: Option<Error>,
}

impl StreamDeadline {
    fn new(closing: CancellationToken, ended: Option<CallerExpiry>) -> Self {
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
        Self { wait, ended: None }
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Error> {
        if self.ended.is_none() {
            self.ended = Some(ready!(self.wait.as_mut().poll(cx)));
        }
        self.ended.clone().map_or(Poll::Pending, Poll::Ready)
    }
}

impl fmt::Debug for StreamDeadline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Closing")
    }
}

/// Future of a call.
pub struct CallFuture {
    answer: Result<ReplyFuture, CallRejection>,
    /// Request path, for the log.
    path: Option<PathAndQuery>,
    sort: CallClass,
    closing: Option<StreamDeadline>,
    call: Option<Arc<CallPermit>>,
    /// The caller's deadline.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl fmt::Debug for CallFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answering").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Future for CallFuture {
    type Output = Result<http::Response<ReplyBody>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut answer = ready!(self.poll_answer(cx));
        let (closing, call) = (self.closing.take(), self.call.take());
        if let Some(status) = answer.extensions().get::<Status>() {
            let error = error_of(status);
            if error.is_some_and(Error::is_fault_of_caller) {
                answer.extensions_mut().insert(FaultOfCaller);
            } else if let Some(error) = unread(status, self.sort) {
                answer = to_status(error).into_http();
            } else {
                log_defect(self.path.as_ref().map_or("", PathAndQuery::path), status);
            }
        }
        let is_whole = closing.is_none();
        let mut answer = answer.map(|body| ReplyBody::new(body, closing, call.clone()));
        if let Some(call) = call.filter(|_| is_whole)
            && !call.take_answer(answer.body_mut().read_ahead(cx))
        {
            call.edge.gauges.shed.add();
            let refused = to_status(Error::TooManyBytes).into_http();
            answer = refused.map(|body| ReplyBody::new(body, None, Some(call)));
        }
        Poll::Ready(Ok(answer))
    }
}

impl CallFuture {
    /// Returns the response, or the status of an expired deadline.
    fn poll_answer(&mut self, cx: &mut Context<'_>) -> Poll<http::Response<Body>> {
        match &mut self.answer {
            Ok(answer) => {
                if let Poll::Ready(Ok(answer)) = answer.as_mut().poll(cx) {
                    return Poll::Ready(answer);
                }
                let Some(deadline) = &mut self.deadline else { return Poll::Pending };
                ready!(deadline.as_mut().poll(cx));
                Poll::Ready(to_status(Error::DeadlineExpired).into_http())
            }
            Err(CallRejection::Grpc(error)) => Poll::Ready(to_status(error.clone()).into_http()),
            Err(CallRejection::Http(code)) => {
                let mut answer = http::Response::new(Body::empty());
                *answer.status_mut() = *code;
                if *code == StatusCode::METHOD_NOT_ALLOWED {
                    answer.headers_mut().insert(ALLOW, HeaderValue::from_static("POST"));
                }
                answer.extensions_mut().insert(FaultOfCaller);
                Poll::Ready(answer)
            }
        }
    }
}

/// Returns the error that is attached to a status, if any.
fn error_of(status: &Status) -> Option<&Error> {
    std::error::Error::source(status).and_then(|source| source.downcast_ref())
}

/// Returns the error of a call whose message cannot be decoded. The health service decodes its own messages and has no
/// other INTERNAL.
fn unread(status: &Status, sort: CallClass) -> Option<Error> {
    let source = std::error::Error::source(status);
    let is_unread = match source {
        Some(source) => source.is::<DecodeError>(),
        None => sort == CallClass::Health,
    };
    let problem = || format!("cannot be read as the message of this call: {}", status.message());
    (is_unread && status.code() == Code::Internal).then(|| FieldError::new("the message", problem()).into())
}

/// Logs the cause of a response that states only a defect. Faults of the caller are not logged.
fn log_defect(method: &str, status: &Status) {
    if let (Code::Internal, Some(error)) = (status.code(), error_of(status)) {
        tracing::error!(method, error = cause(error), "call failed: defect of the service");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edge::EdgeBounds;

    #[test]
    fn body_budget_reserves_shares_for_small_bodies_and_connections() {
        let bounds = EdgeBounds { body_bytes: 16 << 20, ..EdgeBounds::DEFAULT };
        let edge = Edge::new(bounds, None);
        let peers: [_; 4] = std::array::from_fn(|_| Arc::new(Peer::new(&edge, None, None)));
        let call = |peer: usize| CallPermit::begin(&edge, peers.get(peer), CallClass::Work).unwrap();
        let large = [call(0), call(0), call(1), call(2)];
        assert!(large.iter().zip([3 << 20, 2 << 20, 3 << 20, 3 << 20]).map(|(call, bytes)| call.take(bytes)).eq([
            true,  // 3 MB
            false, // its connection has a quarter
            true,  // 6 MB
            false, // large ones have half
        ]));
        let small: Vec<CallPermit> = (0..200).map(|n| call(n % 4)).collect();
        let taken = small.iter().filter(|call| call.take(SMALL_BODY_BYTES)).count();
        assert!(taken >= 128, "8 MB of small messages fit: {taken}");
        assert!(edge.gauges.bytes_in_flight() <= 16 << 20);
        drop((large, small));
        assert_eq!((edge.gauges.bytes_in_flight(), edge.gauges.calls()), (0, 0));
        assert_eq!((edge.gauges.held_large_bytes.taken(), peers[0].bytes.taken()), (0, 0));
    }
    #[test]
    fn unread_replies_have_a_budget() {
        let edge = Edge::new(EdgeBounds { body_bytes: 16 << 20, ..EdgeBounds::DEFAULT }, None);
        let peers: [_; 6] = std::array::from_fn(|_| Arc::new(Peer::new(&edge, None, None)));
        let call = |peer: usize| CallPermit::begin(&edge, peers.get(peer), CallClass::Work).unwrap();
        let (first, second, small, largest) = (call(0), call(0), call(0), call(1));
        assert!(first.take_answer(3 << 20) && !second.take_answer(2 << 20) && small.take_answer(SMALL_ANSWER_BYTES));
        assert!(largest.take_answer(100 << 20), "the budget of its connection");
        let others = [call(2), call(3), call(4)];
        assert_eq!(others.each_ref().map(|call| call.take_answer(4 << 20)), [true, true, false], "16 MB in all");
        drop((first, second, small, largest, others));
        assert_eq!((edge.answer_bytes.taken(), peers[0].answer_bytes.taken()), (0, 0));
    }
}
