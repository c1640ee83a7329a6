//! Call metrics: counts every call by method, code and duration, and traces the calls of the API.
//!
//! The layer is in front of all services. It observes the response headers and trailers and never changes a call.
//! Caller: the server of the root package.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll, ready},
};

use hyper::body::{Body as HttpBody, Frame, SizeHint};
use prost::{DecodeError, Message as _};
use prost_types::FileDescriptorSet;
use tonic::{
    Code, Status,
    body::Body,
    codegen::{Bytes, Service, http},
};
use tower_layer::Layer;

use crate::edge::FaultOfCaller;
use rm_telemetry::{
    metrics::{
        Metrics,
        calls::{CallTimer, Method},
    },
    traces,
};

/// Returns the methods of all services in `descriptors`.
///
/// # Errors
/// Unreadable descriptors: a defect of the build.
pub fn methods(descriptors: &[&[u8]]) -> Result<Vec<Method>, DecodeError> {
    let mut methods = Vec::new();
    for set in descriptors {
        for file in FileDescriptorSet::decode(*set)?.file {
            for service in &file.service {
                let grpc_service = format!("{}.{}", file.package(), service.name());
                methods.extend(service.method.iter().map(|method| Method {
                    grpc_type: match (method.client_streaming(), method.server_streaming()) {
                        (false, false) => "unary",
                        (true, false) => "client_stream",
                        (false, true) => "server_stream",
                        (true, true) => "bidi_stream",
                    },
                    grpc_service: grpc_service.clone(),
                    grpc_method: method.name().to_owned(),
                }));
            }
        }
    }
    Ok(methods)
}

/// Tower layer that counts the calls of a server.
#[derive(Clone, Debug)]
pub struct ObserveLayer(Metrics);

impl ObserveLayer {
    /// Creates the layer with the given metrics.
    pub fn new(metrics: Metrics) -> Self {
        Self(metrics)
    }
}

impl<S> Layer<S> for ObserveLayer {
    type Service = ObservedService<S>;

    fn layer(&self, inner: S) -> ObservedService<S> {
        ObservedService { inner, metrics: self.0.clone() }
    }
}

/// Service whose calls are counted.
#[derive(Clone, Debug)]
pub struct ObservedService<S> {
    inner: S,
    metrics: Metrics,
}

impl<S, B> Service<http::Request<Body>> for ObservedService<S>
where
    S: Service<http::Request<Body>, Response = http::Response<B>, Error = Infallible>,
    S::Future: Unpin,
{
    type Response = http::Response<ObservedBody<B>>;
    type Error = Infallible;
    type Future = ObservedFuture<S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let call = self.metrics.calls.begin(request.uri().path());
        let trace = CallTraceGuard(trace(&call, request.headers()));
        ObservedFuture { answer: self.inner.call(request), observed: Some((call, trace)) }
    }
}

/// Future of a counted call. One future holds both parts: a nested future would add its own size to every call.
#[derive(Debug)]
pub struct ObservedFuture<F> {
    answer: F,
    /// Metrics and trace of the call until its response takes them over.
    observed: Option<(CallTimer, CallTraceGuard)>,
}

impl<F, B> Future for ObservedFuture<F>
where
    F: Future<Output = Result<http::Response<B>, Infallible>> + Unpin,
{
    type Output = Result<http::Response<ObservedBody<B>>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { answer, observed } = &mut *self;
        // The caller polls no further after the response.
        let Some((call, trace)) = observed else { return Poll::Pending };
        let work = || Pin::new(answer).poll(context);
        let Ok(answer) = ready!(match &trace.0 {
            Some(traced) => call.carry_out(|| traced.carry_out(work)),
            None => call.carry_out(work),
        });
        // A response without a body carries its status in the headers. A fault of the caller counts as
        // `INVALID_ARGUMENT`, regardless of its code.
        let fault = answer.extensions().get::<FaultOfCaller>().map(|_| Code::InvalidArgument);
        if let Some(code) = fault.or_else(|| code(answer.headers())) {
            call.end(code);
            trace.end(code);
        }
        let Some((call, trace)) = observed.take() else { return Poll::Pending };
        Poll::Ready(Ok(answer.map(|body| ObservedBody { body, call, trace })))
    }
}

/// Starts the trace of a call. Calls of health and reflection are too frequent for traces, and unknown calls have none.
fn trace(call: &CallTimer, headers: &http::HeaderMap) -> Option<traces::CallTrace> {
    let method = call.method().filter(|method| method.grpc_service.starts_with("linkis.rm."))?;
    traces::call(&method.grpc_service, &method.grpc_method, headers)
}

/// Trace of a call, if it has one. Dropping it without an end records a cancellation.
#[derive(Debug)]
struct CallTraceGuard(Option<traces::CallTrace>);

impl CallTraceGuard {
    fn end(&mut self, code: Code) {
        if let Some(trace) = self.0.take() {
            trace.end(code);
        }
    }
}

impl Drop for CallTraceGuard {
    fn drop(&mut self) {
        self.end(Code::Cancelled);
    }
}

fn code(headers: &http::HeaderMap) -> Option<Code> {
    headers.get(Status::GRPC_STATUS).map(|code| Code::from_bytes(code.as_bytes()))
}

/// Body of a counted response. Its trailers end the call.
#[derive(Debug)]
pub struct ObservedBody<B> {
    body: B,
    call: CallTimer,
    trace: CallTraceGuard,
}

impl<B> ObservedBody<B> {
    fn end(&mut self, code: Code) {
        self.call.end(code);
        self.trace.end(code);
    }
}

impl<B: HttpBody<Data = Bytes, Error = Status> + Unpin> HttpBody for ObservedBody<B> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(frame) = &polled {
            match frame {
                Some(Ok(frame)) => {
                    if let Some(code) = frame.trailers_ref().map(code) {
                        self.end(code.unwrap_or(Code::Unknown));
                    }
                }
                Some(Err(status)) => self.end(status.code()),
                None => self.end(Code::Unknown),
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
