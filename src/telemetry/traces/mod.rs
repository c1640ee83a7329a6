//! Traces: where the time of a call went, from its first byte to its last.
//!
//! A call goes on with the trace that it comes with (W3C `traceparent`), or begins one; what it waits for here are spans in it. A batch
//! serves many calls, and so belongs to none of them: it is a trace of its own, linked with those of its operations, and they with it.
//! A batch is traced if one of its operations is.
//!
//! | span | |
//! |---|---|
//! | `linkis.rm.v1.…/…` | a call, with what was decided |
//! | `look` | the read-only look |
//! | `line` | waiting in line for resources |
//! | `operation` | from the committer's queue to the answer; linked with its batches |
//! | `queue`, `set aside` | of that, waiting for a batch; for somebody who holds its EM or user |
//! | `batch` | one transaction; linked with its operations |
//! | `lock`, `read`, `write`, `commit` | its parts |
//!
//! Nothing is traced unless it is set where spans go ([`Settings`]): then everything here is one look at whether it is, and nothing is
//! allocated.
//!
//! - [`settings`]: where they go; [`export`]: how;
//! - `call`: what a call brings, and how it ends.

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

pub use call::{Call, call};
pub use export::Export;
pub use settings::Settings;

/// How this process traces; nothing until it does.
static TRACES: OnceLock<Traces> = OnceLock::new();

/// What makes spans.
#[derive(Debug)]
struct Traces {
    /// By the sampler that is set.
    calls: SdkTracer,
    /// All that are asked for.
    batches: SdkTracer,
}

/// With how many operations a batch is linked at most.
const LINKS_MAX: usize = 128;

/// What is being traced here and now, and how; `None` if nothing is.
fn current() -> Option<(&'static Traces, Context)> {
    let traces = TRACES.get()?;
    let context = Context::current();
    context.span().span_context().is_sampled().then_some((traces, context))
}

/// The trace of the call that is being carried out, for logs; `None` if nobody wants it known.
pub fn trace_id() -> Option<impl fmt::Display + fmt::Debug + use<>> {
    Context::map_current(|context| {
        let span = context.span();
        let context = span.span_context();
        context.is_valid().then(|| context.trace_id())
    })
}

/// Adds what is known by now to the span of the call that is being carried out; asked only if there is one.
pub fn add(attributes: impl FnOnce() -> Vec<KeyValue>) {
    if let Some((_, context)) = current() {
        context.span().set_attributes(attributes());
    }
}

/// A piece of what is being traced; ends when it is dropped. None of it, if nothing is, and small: calls are mostly not traced.
#[derive(Debug, Default)]
pub struct Step(Option<Box<Span>>);

impl Step {
    fn of(traces: &Traces, name: &'static str, parent: &Context) -> Self {
        Self(Some(Box::new(traces.calls.build_with_context(traces.calls.span_builder(name), parent))))
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if let Some(span) = &mut self.0 {
            span.end();
        }
    }
}

/// A piece of the call that is being carried out begins.
pub fn step(name: &'static str) -> Step {
    current().map(|(traces, context)| Step::of(traces, name, &context)).unwrap_or_default()
}

/// Work whose steps are those of one span, which ends with it.
#[derive(Debug)]
pub struct Within<F: ?Sized> {
    span: Option<Context>,
    work: Pin<Box<F>>,
}

/// Carries `work` out as a piece of the call that is being carried out.
pub fn within<F: ?Sized>(name: &'static str, work: Pin<Box<F>>) -> Within<F> {
    let begin = |(traces, context): (&Traces, Context)| {
        let span = traces.calls.build_with_context(traces.calls.span_builder(name), &context);
        context.with_span(span)
    };
    Within { span: current().map(begin), work }
}

impl<F: Future + ?Sized> Future for Within<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut task::Context<'_>) -> Poll<F::Output> {
        let _attached = self.span.clone().map(Context::attach);
        self.work.as_mut().poll(context)
    }
}

/// The trace of an operation, with which it goes through the committer.
#[derive(Debug, Default)]
pub struct Operation(Option<Box<Traced>>);

#[derive(Debug)]
struct Traced {
    /// With its span.
    operation: Context,
    /// What it waits for now.
    waits: Step,
}

/// An operation of the call that is being carried out goes into the committer's queue.
pub fn operation(kind: &'static str) -> Operation {
    let Some((traces, call)) = current() else { return Operation(None) };
    let builder = traces.calls.span_builder("operation").with_attributes([KeyValue::new("linkis_rm.operation", kind)]);
    let operation = call.with_span(traces.calls.build_with_context(builder, &call));
    let waits = Step::of(traces, "queue", &operation);
    Operation(Some(Box::new(Traced { operation, waits })))
}

impl Operation {
    /// Somebody holds what it needs.
    pub fn set_aside(&mut self) {
        if let (Some(traced), Some(traces)) = (&mut self.0, TRACES.get()) {
            traced.waits = Step::of(traces, "set aside", &traced.operation);
        }
    }

    /// It was not carried out.
    pub fn failed(&self) {
        if let Some(traced) = &self.0 {
            traced.operation.span().set_status(Status::error(""));
        }
    }
}

/// The trace of a batch.
#[derive(Debug, Default)]
pub struct Batch(Option<Context>);

/// A batch begins of operations with these traces.
pub fn batch<'a>(operations: impl ExactSizeIterator<Item = &'a mut Operation>) -> Batch {
    let Some(traces) = TRACES.get() else { return Batch(None) };
    let size = i64::try_from(operations.len()).unwrap_or(i64::MAX);
    let mut traced: Vec<&mut Traced> = operations.filter_map(|operation| operation.0.as_deref_mut()).collect();
    if traced.is_empty() {
        return Batch(None);
    }
    let links = traced.iter().take(LINKS_MAX).map(|traced| link(traced.operation.span().span_context())).collect();
    let size = [KeyValue::new("linkis_rm.operations", size)];
    let builder = traces.batches.span_builder("batch").with_links(links).with_attributes(size);
    let nowhere = Context::new();
    let batch = nowhere.with_span(traces.batches.build_with_context(builder, &nowhere));
    for traced in &mut traced {
        traced.waits = Step::default();
        traced.operation.span().add_link(without_state(batch.span().span_context()), Vec::new());
    }
    Batch(Some(batch))
}

impl Batch {
    /// A part of it begins.
    pub fn step(&self, name: &'static str) -> Step {
        let traced = self.0.as_ref().zip(TRACES.get());
        traced.map(|(batch, traces)| Step::of(traces, name, batch)).unwrap_or_default()
    }

    /// It was not committed.
    pub fn failed(&self) {
        if let Some(batch) = &self.0 {
            batch.span().set_status(Status::error(""));
        }
    }
}

fn link(to: &SpanContext) -> Link {
    Link::with_context(without_state(to))
}

/// A link names a span, whatever its caller carries along.
fn without_state(span: &SpanContext) -> SpanContext {
    let (trace_id, span_id, flags) = (span.trace_id(), span.span_id(), span.trace_flags());
    SpanContext::new(trace_id, span_id, flags, span.is_remote(), TraceState::NONE)
}
