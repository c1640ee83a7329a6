//! Trace of one call: its parent from the headers, and its end. Caller: the edge.

use opentelemetry::{
    Context, KeyValue,
    propagation::{Extractor, TextMapPropagator as _},
    trace::{SpanKind, Status, TraceContextExt as _, Tracer as _},
};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tonic::{
    Code,
    codegen::http::{HeaderMap, HeaderName},
};
use tracing::Level;

use super::TRACES;
use crate::operation_log;

/// Maximum size of a trace header in bytes: the minimum that the standard requires implementations to propagate.
const STATE_BYTES_MAX: usize = 512;

/// Trace of one call.
#[derive(Debug)]
pub struct CallTrace {
    span: Context,
}

/// Begins the trace of a call. `None` if neither spans are exported nor the decision log needs a trace id.
pub fn call(service: &str, method: &str, headers: &HeaderMap) -> Option<CallTrace> {
    let Some(traces) = TRACES.get() else {
        let is_told = tracing::enabled!(target: operation_log::TARGET, Level::DEBUG);
        let span = is_told.then(|| parent(headers))?;
        return span.has_active_span().then_some(CallTrace { span });
    };
    let parent = parent(headers);
    let builder = traces.calls.span_builder(format!("{service}/{method}")).with_kind(SpanKind::Server);
    let builder = builder.with_attributes([
        KeyValue::new("rpc.system", "grpc"),
        KeyValue::new("rpc.service", service.to_owned()),
        KeyValue::new("rpc.method", method.to_owned()),
    ]);
    let span = parent.with_span(traces.calls.build_with_context(builder, &parent));
    Some(CallTrace { span })
}

/// Parses the trace context of the headers; empty without a valid one.
fn parent(headers: &HeaderMap) -> Context {
    TraceContextPropagator::new().extract_with_context(&Context::new(), &TraceHeaders(headers))
}

impl CallTrace {
    /// Runs `work` with the trace of this call as the current one.
    pub fn carry_out<T>(&self, work: impl FnOnce() -> T) -> T {
        let _attached = self.span.clone().attach();
        work()
    }

    /// Ends the span with the status `code`. Only the first end counts.
    pub fn end(&self, code: Code) {
        let span = self.span.span();
        if !span.is_recording() {
            return;
        }
        span.set_attribute(KeyValue::new("rpc.grpc.status_code", i64::from(i32::from(code))));
        if is_ours(code) {
            span.set_status(Status::error(""));
        }
        span.end();
    }
}

/// Returns whether the code is an error of the server, not of the caller, by the OpenTelemetry conventions for gRPC
/// servers.
fn is_ours(code: Code) -> bool {
    use Code::{DataLoss, DeadlineExceeded, Internal, Unavailable, Unimplemented, Unknown};
    matches!(code, Unknown | DeadlineExceeded | Unimplemented | Internal | Unavailable | DataLoss)
}

/// Trace headers of a call.
struct TraceHeaders<'a>(&'a HeaderMap);

impl Extractor for TraceHeaders<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        let value = self.0.get(key)?.to_str().ok()?;
        (value.len() <= STATE_BYTES_MAX).then_some(value)
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    fn parent_of(headers: &[(&'static str, String)]) -> Option<(String, String)> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        let parent = parent(&map);
        let span = parent.span();
        let context = span.span_context();
        context.is_valid().then(|| (context.trace_id().to_string(), context.trace_state().header()))
    }

    #[test]
    fn trace_context_of_caller_continues_when_valid() {
        let parent = ("traceparent", format!("00-{TRACE}-00f067aa0ba902b7-01"));
        let state = |bytes: usize| ("tracestate", format!("a={}", "x".repeat(bytes - 2)));
        assert_eq!(parent_of(std::slice::from_ref(&parent)), Some((TRACE.to_owned(), String::new())));
        assert_eq!(parent_of(&[parent.clone(), state(200)]).unwrap().1.len(), 200);
        assert_eq!(
            parent_of(&[parent, state(600)]),
            Some((TRACE.to_owned(), String::new())),
            "the trace without its state"
        );
        for odd in ["", "00-0-0-0", &format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)), &"x".repeat(4000)] {
            assert_eq!(parent_of(&[("traceparent", odd.to_owned())]), None, "{odd}");
        }
    }
}
