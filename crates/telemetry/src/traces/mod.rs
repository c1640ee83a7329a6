//! Traces: the spans of calls, operations and batches.
//!
//! A call continues the trace of its headers (W3C `traceparent`), or begins one. A batch serves many calls, so it is a
//! trace of its own, linked with the traces of its operations. A batch is traced if one of its operations is. Each
//! function here is one check and allocates nothing unless [`TraceSettings`] has an endpoint. Callers: the edge and the
//! committer.
//!
//! | span | content |
//! |---|---|
//! | `linkis.rm.v1.…/…`, `look`, `line` | a call with its decision; its check without locks; its wait in a queue |
//! | `operation`, `queue`, `set aside` | an operation until its reply; its waits for a batch, and for a contended key |
//! | `batch`, `lock`, `read`, `write`, `commit` | a transaction and its parts |

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::OnceLock,
    task::{self, Poll},
};

use opentelemetry::{
    Context, KeyValue,
    trace::{Link, Span as _, SpanContext, Status, TraceContextExt as _, TraceState, Tracer as _},
};
use opentelemetry_sdk::trace::{SdkTracer, Span};

mod call;
pub mod export;
pub mod settings;

pub use call::{CallTrace, call};
pub use export::TraceExport;
pub use settings::TraceSettings;

/// Span factory of the process; empty until the export starts.
static TRACES: OnceLock<SpanFactory> = OnceLock::new();

#[derive(Debug)]
struct SpanFactory {
    /// Spans of calls, selected by the configured sampler.
    calls: SdkTracer,
    /// Spans of batches, always recorded.
    batches: SdkTracer,
}

/// Maximum number of operations that a batch is linked with.
const LINKS_MAX: usize = 128;

/// Returns the factory and the current context; `None` if nothing is traced.
fn current() -> Option<(&'static SpanFactory, Context)> {
    let traces = TRACES.get()?;
    let context = Context::current();
    context.span().span_context().is_sampled().then_some((traces, context))
}

/// Returns the trace id of the current call, for logs; `None` if the call has no trace.
pub fn trace_id() -> Option<impl fmt::Display + fmt::Debug + use<>> {
    Context::map_current(|context| {
        let span = context.span();
        let context = span.span_context();
        context.is_valid().then(|| context.trace_id())
    })
}

/// Adds attributes to the span of the current call. Calls `attributes` only if there is one.
pub fn add(attributes: impl FnOnce() -> Vec<KeyValue>) {
    if let Some((_, context)) = current() {
        context.span().set_attributes(attributes());
    }
}

/// Span of a step, ended when dropped. Empty and small if nothing is traced, as most calls are not.
#[derive(Debug, Default)]
pub struct TraceStep(Option<Box<Span>>);

impl TraceStep {
    fn of(traces: &SpanFactory, name: &'static str, parent: &Context) -> Self {
        Self(Some(Box::new(traces.calls.build_with_context(traces.calls.span_builder(name), parent))))
    }
}

impl Drop for TraceStep {
    fn drop(&mut self) {
        if let Some(span) = &mut self.0 {
            span.end();
        }
    }
}

/// Begins a step of the current call.
pub fn step(name: &'static str) -> TraceStep {
    current().map(|(traces, context)| TraceStep::of(traces, name, &context)).unwrap_or_default()
}

/// Future inside a span, which is the parent of its steps and ends with it.
#[derive(Debug)]
pub struct TracedFuture<F: ?Sized> {
    span: Option<Context>,
    work: Pin<Box<F>>,
}

/// Runs `work` as a step of the current call.
pub fn within<F: ?Sized>(name: &'static str, work: Pin<Box<F>>) -> TracedFuture<F> {
    let begin = |(traces, context): (&SpanFactory, Context)| {
        let span = traces.calls.build_with_context(traces.calls.span_builder(name), &context);
        context.with_span(span)
    };
    TracedFuture { span: current().map(begin), work }
}

impl<F: Future + ?Sized> Future for TracedFuture<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut task::Context<'_>) -> Poll<F::Output> {
        let _attached = self.span.clone().map(Context::attach);
        self.work.as_mut().poll(context)
    }
}

/// Trace of an operation in the committer. Empty if nothing is traced.
#[derive(Debug, Default)]
pub struct OperationTrace(Option<Box<OperationSpans>>);

#[derive(Debug)]
struct OperationSpans {
    /// Context with the span of the operation.
    operation: Context,
    /// Span of the present wait.
    waits: TraceStep,
}

/// Begins the trace of an operation of the current call, at its entry into the commit queue.
pub fn operation(kind: &'static str) -> OperationTrace {
    let Some((traces, call)) = current() else { return OperationTrace(None) };
    let builder = traces.calls.span_builder("operation").with_attributes([KeyValue::new("linkis_rm.operation", kind)]);
    let operation = call.with_span(traces.calls.build_with_context(builder, &call));
    let waits = TraceStep::of(traces, "queue", &operation);
    OperationTrace(Some(Box::new(OperationSpans { operation, waits })))
}

impl OperationTrace {
    /// Records that the operation waits for a contended key.
    pub fn contended(&mut self) {
        if let (Some(traced), Some(traces)) = (&mut self.0, TRACES.get()) {
            traced.waits = TraceStep::of(traces, "set aside", &traced.operation);
        }
    }

    /// Records that the operation failed.
    pub fn failed(&self) {
        if let Some(traced) = &self.0 {
            traced.operation.span().set_status(Status::error(""));
        }
    }
}

/// Trace of a batch. Empty if nothing is traced.
#[derive(Debug, Default)]
pub struct BatchTrace(Option<Context>);

/// Begins the trace of a batch of operations with these traces.
pub fn batch<'a>(operations: impl ExactSizeIterator<Item = &'a mut OperationTrace>) -> BatchTrace {
    let Some(traces) = TRACES.get() else { return BatchTrace(None) };
    let size = i64::try_from(operations.len()).unwrap_or(i64::MAX);
    let mut traced: Vec<&mut OperationSpans> = operations.filter_map(|operation| operation.0.as_deref_mut()).collect();
    if traced.is_empty() {
        return BatchTrace(None);
    }
    let links = traced.iter().take(LINKS_MAX).map(|traced| link(traced.operation.span().span_context())).collect();
    let size = [KeyValue::new("linkis_rm.operations", size)];
    let builder = traces.batches.span_builder("batch").with_links(links).with_attributes(size);
    let nowhere = Context::new();
    let batch = nowhere.with_span(traces.batches.build_with_context(builder, &nowhere));
    for traced in &mut traced {
        traced.waits = TraceStep::default();
        traced.operation.span().add_link(without_state(batch.span().span_context()), Vec::new());
    }
    BatchTrace(Some(batch))
}

impl BatchTrace {
    /// Begins a step of the batch.
    pub fn step(&self, name: &'static str) -> TraceStep {
        let traced = self.0.as_ref().zip(TRACES.get());
        traced.map(|(batch, traces)| TraceStep::of(traces, name, batch)).unwrap_or_default()
    }

    /// Records that the batch was not committed.
    pub fn failed(&self) {
        if let Some(batch) = &self.0 {
            batch.span().set_status(Status::error(""));
        }
    }
}

fn link(to: &SpanContext) -> Link {
    Link::with_context(without_state(to))
}

/// Removes the trace state of the caller: a link needs the ids only.
fn without_state(span: &SpanContext) -> SpanContext {
    let (trace_id, span_id, flags) = (span.trace_id(), span.span_id(), span.trace_flags());
    SpanContext::new(trace_id, span_id, flags, span.is_remote(), TraceState::NONE)
}
