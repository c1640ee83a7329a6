//! Traces as a collector receives them: links between calls and batches, and outages of the collector.

use std::{
    collections::HashMap,
    net::TcpListener,
    process::Command,
    sync::{Arc, Mutex},
};

use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{KeyValue, any_value::Value},
    trace::v1::{ResourceSpans, Span, span::SpanKind},
};
use rm_proto::v1::{self as proto, resource_manager_service_client::ResourceManagerServiceClient};
use tokio_util::task::AbortOnDropHandle;
use tonic::{
    Request, Response, Status,
    transport::{Channel, Server, server::TcpIncoming},
};

use crate::{harness::*, identity::*, metrics::scrape};

/// Received spans and header of a collector.
#[derive(Clone, Default)]
struct Collected(Arc<Mutex<Vec<(String, ResourceSpans)>>>);

#[tonic::async_trait]
impl TraceService for Collected {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let tenant = request.metadata().get("x-tenant").map(|tenant| tenant.to_str().unwrap().to_owned());
        let tenant = tenant.unwrap_or_default();
        let got = request.into_inner().resource_spans.into_iter().map(|spans| (tenant.clone(), spans));
        self.0.lock().unwrap().extend(got);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collected {
    fn spans(&self) -> Vec<Span> {
        let got = self.0.lock().unwrap();
        let scopes = got.iter().flat_map(|(_, spans)| &spans.scope_spans);
        scopes.flat_map(|scope| scope.spans.clone()).collect()
    }

    /// Returns the spans of a trace by name; one of several with equal names.
    fn trace(&self, trace_id: &[u8]) -> HashMap<String, Span> {
        let spans = self.spans().into_iter().filter(|span| span.trace_id == trace_id);
        spans.map(|span| (span.name.clone(), span)).collect()
    }
}

struct Collector {
    collected: Collected,
    endpoint: String,
    _serving: AbortOnDropHandle<()>,
}

impl Collector {
    async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (collected, endpoint) = (Collected::default(), format!("http://{}", listener.local_addr().unwrap()));
        let server = Server::builder().add_service(TraceServiceServer::new(collected.clone()));
        let serving = async move { server.serve_with_incoming(TcpIncoming::from(listener)).await.unwrap() };
        Self { collected, endpoint, _serving: AbortOnDropHandle::new(tokio::spawn(serving)) }
    }
}

/// Starts the program with its traces sent to `endpoint`.
fn traced(database: &Database, endpoint: &str, settings: &[(&str, &str)]) -> Process {
    let mut command = Command::new(*PROGRAM);
    command.args(["--database-url", &database.url(), "--http-listen", "127.0.0.1:0"]);
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint).env("OTEL_BSP_SCHEDULE_DELAY", "20");
    command.envs(settings.iter().copied());
    Process::start_command(&mut command, |line| println!("{line}"))
}

async fn connect(process: &Process) -> ResourceManagerServiceClient<Channel> {
    let channel = channel_to(&process.address).await;
    ResourceManagerServiceClient::new(channel)
}

/// Returns the bytes of an id in hexadecimal digits.
fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn attribute(attributes: &[KeyValue], key: &str) -> Option<String> {
    let value = attributes.iter().find(|attribute| attribute.key == key)?.value.clone()?.value?;
    Some(match value {
        Value::StringValue(text) => text,
        Value::IntValue(number) => number.to_string(),
        other => panic!("{other:?}"),
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trace_links_call_wait_queue_and_batch() {
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const CALLER: &str = "00f067aa0ba902b7";
    const UNSEEN: &str = "0af7651916cd43dd8448eb211c80319c";
    let (database, collector) = (Database::fresh().await, Collector::start().await);
    let settings = [
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue"),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test"),
        ("OTEL_SERVICE_NAME", "the-rm"),
        ("OTEL_TRACES_SAMPLER", "parentbased_always_off"),
    ];
    let process = traced(&database, &collector.endpoint, &settings);
    let mut rm = connect(&process).await;
    let with_trace = |trace: &str, flags: &str, cores: i64| {
        let wait_timeout = prost_types::Duration::try_from(LONG).ok();
        let mut call = Request::new(proto::RequestResourceRequest { wait_timeout, ..ask("host1", "alice", cores) });
        call.metadata_mut().insert("traceparent", format!("00-{trace}-{CALLER}-{flags}").parse().unwrap());
        call
    };
    rm.register(register("host1")).await.unwrap();
    let ticket_id = granted(rm.request_resource(with_trace(UNSEEN, "00", 10)).await.unwrap().into_inner());
    let waits = tokio::spawn({
        let (mut rm, call) = (rm.clone(), with_trace(TRACE, "01", 12));
        async move { granted(rm.request_resource(call).await.unwrap().into_inner()) }
    });
    eventually("it waits", LONG, || async { process.client.waiting().await.unwrap().len() == 1 }).await;
    rm.resource_released(proto::ResourceReleasedRequest { ticket_id, ..Default::default() }).await.unwrap();
    let ticket_id = waits.await.unwrap();

    let call_name = "linkis.rm.v1.ResourceManagerService/RequestResource";
    let ended = || async { collector.collected.trace(&bytes(TRACE)).contains_key(call_name) };
    eventually("the call is seen", LONG, ended).await;
    let of_call = collector.collected.trace(&bytes(TRACE));
    let span = |name: &str| of_call.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", of_call.keys()));
    let (call, line, queue) = (span(call_name), span("line"), span("queue"));
    assert_eq!((&call.parent_span_id, call.kind), (&bytes(CALLER), i32::from(SpanKind::Server)));
    assert_eq!(line.parent_span_id, call.span_id);
    let times = |span: &Span| (span.start_time_unix_nano, span.end_time_unix_nano);
    let is_in = |inner: &Span, outer: &Span| times(inner).0 >= times(outer).0 && times(inner).1 <= times(outer).1;
    assert!(is_in(line, call), "{line:?} {call:?}");
    for (key, value) in [
        ("linkis_rm.outcome", "granted"),
        ("linkis_rm.user", "alice"),
        ("linkis_rm.ticket_id", &ticket_id),
        ("rpc.method", "RequestResource"),
        ("rpc.grpc.status_code", "0"),
    ] {
        assert_eq!(attribute(&call.attributes, key).as_deref(), Some(value), "{key}");
    }

    // One attempt entered the wait queue, and one followed the free capacity, each in a batch with other operations.
    let spans = collector.collected.spans();
    let operations: Vec<_> =
        spans.iter().filter(|span| span.name == "operation" && span.trace_id == bytes(TRACE)).collect();
    assert!(!operations.is_empty() && operations.iter().all(|operation| operation.parent_span_id == line.span_id));
    assert!(operations.iter().any(|operation| operation.span_id == queue.parent_span_id));
    let last = operations.iter().max_by_key(|operation| operation.start_time_unix_nano).unwrap();
    let to = last.links.last().unwrap();
    let batch = spans.iter().find(|span| span.span_id == to.span_id).unwrap();
    assert!(batch.name == "batch" && batch.parent_span_id.is_empty() && batch.trace_id != bytes(TRACE), "{batch:?}");
    assert!(batch.links.iter().any(|link| link.span_id == last.span_id && link.trace_id == bytes(TRACE)), "{batch:?}");
    let of_batch = collector.collected.trace(&batch.trace_id);
    for part in ["lock", "read", "write", "commit"] {
        let part = of_batch.get(part).unwrap_or_else(|| panic!("no {part} in {:?}", of_batch.keys()));
        assert!(part.parent_span_id == batch.span_id && is_in(part, batch), "{part:?}");
    }

    // A call that is marked as not traced has no spans, and neither has an unmarked call by this setting.
    let traces: Vec<_> = spans.iter().filter(|span| span.name == call_name).map(|span| &span.trace_id).collect();
    assert_eq!(traces, [&bytes(TRACE)]);
    let got = collector.collected.0.lock().unwrap().clone();
    let resource = got[0].1.resource.clone().unwrap().attributes;
    let info = process.client.server_info().await.unwrap();
    for (key, value) in [
        ("service.name", "the-rm"),
        ("service.version", env!("CARGO_PKG_VERSION")),
        ("service.instance.id", &info.instance_id),
        ("deployment.environment.name", "test"),
    ] {
        assert_eq!(attribute(&resource, key).as_deref(), Some(value), "{key}");
    }
    assert!(got.iter().all(|(tenant, _)| tenant == "blue"));
    assert_eq!(scrape(process.http()).await["linkis_rm_trace_spans_dropped_total"], 0.0);
    assert_eq!(process.terminate(), Some(0));
}

/// Ended spans are sent before the process ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trace_spans_are_sent_at_shutdown() {
    let (database, collector) = (Database::fresh().await, Collector::start().await);
    let process = traced(&database, &collector.endpoint, &[("OTEL_BSP_SCHEDULE_DELAY", "600000")]);
    connect(&process).await.register(register("host1")).await.unwrap();
    assert!(collector.collected.spans().is_empty(), "they wait for others");
    assert_eq!(process.terminate(), Some(0));
    let names: Vec<_> = collector.collected.spans().into_iter().map(|span| span.name).collect();
    for name in ["linkis.rm.v1.ResourceManagerService/Register", "operation", "batch", "commit"] {
        assert!(names.iter().any(|got| got == name), "{names:?}");
    }
}

/// A collector that never replies: spans are dropped and counted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_collector_drops_spans_without_delay() {
    let (database, silent) = (Database::fresh().await, TcpListener::bind("127.0.0.1:0").unwrap());
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    // An export lasts longer than the test.
    let few = [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "16"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "120000"),
    ];
    let process = traced(&database, &endpoint, &few);
    let mut rm = connect(&process).await;
    for _ in 0..50 {
        rm.register(register("host1")).await.unwrap();
    }
    let seen = scrape(process.http()).await;
    assert!(seen["linkis_rm_trace_spans_dropped_total"] >= 200.0, "{seen:?}");
    assert_eq!(seen["linkis_rm_trace_spans_exported_total"], 0.0);
    let stopped = tokio::time::timeout(LONG, tokio::task::spawn_blocking(|| process.terminate())).await;
    assert_eq!(stopped.expect("the shutdown does not wait for an export").unwrap(), Some(0));
}

/// A missing collector: the loss is logged once, and the recovery once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn collector_outage_is_logged_at_each_change() {
    let database = Database::fresh().await;
    let place = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let lines = Arc::new(Mutex::new(Vec::new()));
    let mut command = Command::new(*PROGRAM);
    command.args(["--database-url", &database.url(), "--http-listen", "127.0.0.1:0"]);
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{place}")).env("OTEL_BSP_SCHEDULE_DELAY", "20");
    command.env("OTEL_EXPORTER_OTLP_TIMEOUT", "60000");
    let got = lines.clone();
    let process = Process::start_command(&mut command, move |line| got.lock().unwrap().push(line));
    let rm = connect(&process).await;
    let count = |text: &str| lines.lock().unwrap().iter().filter(|line| line.contains(text)).count();
    let register_until = async |what: &str, text: &str| {
        eventually(what, LONG, async || {
            rm.clone().register(register("host1")).await.unwrap();
            count(text) > 0
        })
        .await;
    };
    register_until("the lost spans are logged", "refuses spans; they are dropped").await;
    let listener = tokio::net::TcpListener::bind(place).await.unwrap();
    let collected = Collected::default();
    let server = Server::builder().add_service(TraceServiceServer::new(collected.clone()));
    let serving = tokio::spawn(async move { server.serve_with_incoming(TcpIncoming::from(listener)).await });
    let _serving = AbortOnDropHandle::new(serving);
    register_until("the recovery is logged", "accepts spans again").await;
    assert!(!collected.spans().is_empty());
    assert_eq!(count("refuses spans; they are dropped"), 1, "a change is logged, not each span");
    assert_eq!(process.terminate(), Some(0));
}
