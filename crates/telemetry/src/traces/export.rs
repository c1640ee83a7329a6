//! Export of spans: a bounded queue and one task that sends them to a collector.
//!
//! Ending a span never waits. A slow or unreachable collector costs spans only, which are counted: a span that ends
//! while the queue is full is dropped. Caller: `main` of the program.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use opentelemetry::{Context, KeyValue, trace::TracerProvider as _};
use opentelemetry_otlp::{
    ExporterBuildError, SpanExporter as OtlpExporter, WithExportConfig as _, WithTonicConfig as _,
};
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    resource::{EnvResourceDetector, TelemetryResourceDetector},
    trace::{Sampler, SdkTracerProvider, Span, SpanData, SpanExporter as _, SpanProcessor},
};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout, timeout_at},
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use uuid::Uuid;

use super::{SpanFactory, TRACES, settings::TraceSettings};

/// Timeout of the last export when the process ends.
const LAST_TIMEOUT: Duration = Duration::from_millis(300);

/// Number of spans that a collector accepted from this process.
static EXPORTED: AtomicU64 = AtomicU64::new(0);

/// Number of lost spans: the queue was full, or the collector rejected them.
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Returns the number of spans that a collector accepted from this process.
pub fn exported() -> u64 {
    EXPORTED.load(Ordering::Relaxed)
}

/// Returns the number of lost spans of this process.
pub fn dropped() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// Handle of the span export, which ends when dropped.
#[derive(Debug)]
pub struct TraceExport {
    ending: CancellationToken,
    task: AbortOnDropHandle<()>,
}

impl TraceExport {
    /// Starts the export. All later spans of the process carry `instance_id` in their resource.
    ///
    /// # Errors
    /// Fails if the settings are invalid.
    ///
    /// # Panics
    /// Outside a runtime.
    pub fn start(settings: TraceSettings, instance_id: Uuid) -> Result<Self, ExporterBuildError> {
        let resource = resource(&settings, instance_id);
        let exporter = OtlpExporter::builder().with_tonic().with_endpoint(&settings.endpoint);
        let mut exporter = exporter.with_tls_config(settings.tls.clone()).build()?;
        exporter.set_resource(&resource);
        let (queue, ended) = mpsc::channel(settings.queue_max);
        let provider = || {
            let provider = SdkTracerProvider::builder().with_resource(resource.clone());
            provider.with_span_processor(SpanQueue(queue.clone()))
        };
        let scope = env!("CARGO_PKG_NAME");
        let calls = provider().build().tracer(scope);
        // A batch is traced because an operation in it is.
        let batches = provider().with_sampler(Sampler::AlwaysOn).build().tracer(scope);
        let ending = CancellationToken::new();
        let sending =
            SpanSender { exporter, settings, ended, batch: Vec::new(), ending: ending.clone(), is_taken: true };
        let task = tokio::spawn(sending.run());
        // A process has one exporter; a second one has no effect.
        let _ = TRACES.set(SpanFactory { calls, batches });
        Ok(Self { ending, task: AbortOnDropHandle::new(task) })
    }

    /// Sends the remaining spans, for up to `LAST_TIMEOUT`.
    pub async fn finish(self) {
        self.ending.cancel();
        if timeout(LAST_TIMEOUT, self.task).await.is_err() {
            tracing::warn!("the trace collector did not accept the last spans in time");
        }
    }
}

/// Returns the resource attributes of the process. Attributes from the environment take precedence.
fn resource(settings: &TraceSettings, instance_id: Uuid) -> Resource {
    let own = [
        KeyValue::new("service.name", env!("CARGO_PKG_NAME")),
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        KeyValue::new("service.instance.id", instance_id.to_string()),
    ];
    let resource = Resource::builder_empty().with_attributes(own);
    let resource = resource.with_detector(Box::new(TelemetryResourceDetector));
    let resource = resource.with_detector(Box::new(EnvResourceDetector::new()));
    match settings.service_name.clone() {
        Some(name) => resource.with_service_name(name).build(),
        None => resource.build(),
    }
}

/// Queue of ended spans. Ending a span never waits.
#[derive(Debug)]
struct SpanQueue(mpsc::Sender<SpanData>);

impl SpanProcessor for SpanQueue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if span.span_context.is_sampled() && self.0.try_send(span).is_err() {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// Task that sends spans in batches.
struct SpanSender {
    exporter: OtlpExporter,
    settings: TraceSettings,
    ended: mpsc::Receiver<SpanData>,
    /// Spans of the next batch.
    batch: Vec<SpanData>,
    ending: CancellationToken,
    /// Whether the collector accepted the last batch. Only changes are logged.
    is_taken: bool,
}

impl SpanSender {
    async fn run(mut self) {
        let ending = self.ending.clone();
        loop {
            if ending.run_until_cancelled(self.gather()).await.is_none() {
                // The queue receives no further spans.
                while self.batch.len() < self.settings.batch_max
                    && let Ok(span) = self.ended.try_recv()
                {
                    self.batch.push(span);
                }
            }
            if self.batch.is_empty() {
                return;
            }
            self.send().await;
        }
    }

    /// Waits until the batch is full or its first span has waited for `delay`. Cancel-safe: the spans stay in the
    /// batch.
    async fn gather(&mut self) {
        if self.batch.is_empty() {
            self.batch.extend(self.ended.recv().await);
        }
        let until = Instant::now() + self.settings.delay;
        while self.batch.len() < self.settings.batch_max
            && let Ok(Some(span)) = timeout_at(until, self.ended.recv()).await
        {
            self.batch.push(span);
        }
    }

    async fn send(&mut self) {
        let batch = std::mem::take(&mut self.batch);
        let spans = u64::try_from(batch.len()).unwrap_or(u64::MAX);
        let why = match timeout(self.settings.timeout, self.exporter.export(batch)).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some(format!("no reply within {:?}", self.settings.timeout)),
        };
        let count = if why.is_none() { &EXPORTED } else { &DROPPED };
        count.fetch_add(spans, Ordering::Relaxed);
        let was_taken = std::mem::replace(&mut self.is_taken, why.is_none());
        match why {
            Some(error) if was_taken => {
                tracing::warn!(endpoint = %self.settings.endpoint, error, "the trace collector refuses spans; they \
                    are dropped");
            }
            None if !was_taken => tracing::info!("the trace collector accepts spans again"),
            _ => {}
        }
    }
}
