//! gRPC calls by method, under the metric names of common gRPC dashboards and alerts.
//!
//! Unknown methods share one series, so that invented names create none. Callers: `rm_edge::observe`, and the services
//! of calls that may wait.

use std::{
    cell::Cell,
    collections::HashMap,
    fmt,
    sync::{Arc, OnceLock},
    time::Instant,
};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, histogram::Histogram},
    registry::Registry,
};
use tonic::Code;

use super::{Counter, add};

/// Names of all status codes, by number, as other gRPC implementations write them in metrics.
const CODES: [&str; 17] = [
    "OK",
    "Canceled",
    "Unknown",
    "InvalidArgument",
    "DeadlineExceeded",
    "NotFound",
    "AlreadyExists",
    "PermissionDenied",
    "ResourceExhausted",
    "FailedPrecondition",
    "Aborted",
    "OutOfRange",
    "Unimplemented",
    "Internal",
    "Unavailable",
    "DataLoss",
    "Unauthenticated",
];

/// Label value of a method that does not exist.
const UNKNOWN: &str = "unknown";

/// Returns a histogram with bounds from 1 ms to one minute.
fn seconds() -> Histogram {
    Histogram::new([0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0])
}

/// Labels of a method.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Method {
    /// `unary`, `client_stream`, `server_stream` or `bidi_stream`.
    pub grpc_type: &'static str,
    /// Full name of the service, with its package.
    pub grpc_service: String,
    /// Name of the method.
    pub grpc_method: String,
}

impl Method {
    /// Returns the labels for all unknown methods, so that invented names create no series.
    fn unknown() -> Self {
        Self { grpc_type: UNKNOWN, grpc_service: UNKNOWN.to_owned(), grpc_method: UNKNOWN.to_owned() }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HandledLabels {
    #[prometheus(flatten)]
    method: Method,
    grpc_code: &'static str,
}

/// Metrics of all methods.
#[derive(Debug)]
pub struct CallMetrics {
    methods: HashMap<String, Arc<MethodSeries>>,
    unknown: Arc<MethodSeries>,
}

#[derive(Clone)]
struct CallFamilies {
    started: Family<Method, Counter>,
    handled: Family<HandledLabels, Counter>,
    seconds: Family<Method, Histogram, fn() -> Histogram>,
    may_wait: Histogram,
}

/// Series of one method, each looked up once.
struct MethodSeries {
    method: Method,
    families: CallFamilies,
    started: Counter,
    handled: [OnceLock<Counter>; CODES.len()],
    seconds: OnceLock<Histogram>,
}

impl fmt::Debug for MethodSeries {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.method.fmt(formatter)
    }
}

impl CallMetrics {
    pub(super) fn register(registry: &mut Registry, methods: impl IntoIterator<Item = Method>) -> Self {
        let families = CallFamilies {
            started: add(
                registry,
                "grpc_server_started_total",
                "Started calls: the difference to the handled ones is in progress",
                Family::default(),
            ),
            handled: add(
                registry,
                "grpc_server_handled_total",
                "Completed calls by code: a refusal for lack of resources is a reply, and so OK",
                Family::default(),
            ),
            seconds: add(
                registry,
                "grpc_server_handling_seconds",
                "Duration of calls, without requests with a wait_timeout",
                Family::new_with_constructor(seconds),
            ),
            may_wait: add(
                registry,
                "linkis_rm_waiting_request_seconds",
                "Duration of requests with a wait_timeout, whether or not they waited",
                seconds(),
            ),
        };
        let path = |method: &Method| format!("/{}/{}", method.grpc_service, method.grpc_method);
        let methods = methods.into_iter();
        let methods = methods.map(|method| (path(&method), Arc::new(MethodSeries::new(method, &families)))).collect();
        Self { methods, unknown: Arc::new(MethodSeries::new(Method::unknown(), &families)) }
    }

    /// Begins a call.
    pub fn begin(&self, path: &str) -> CallTimer {
        let series = self.methods.get(path).unwrap_or(&self.unknown);
        series.started.inc();
        CallTimer { series: series.clone(), since: Instant::now(), may_wait: false, ended: false }
    }
}

impl MethodSeries {
    fn new(method: Method, families: &CallFamilies) -> Self {
        Self {
            started: families.started.get_or_create_owned(&method),
            handled: Default::default(),
            seconds: OnceLock::new(),
            families: families.clone(),
            method,
        }
    }

    fn handled(&self, code: Code) -> Option<&Counter> {
        let number = usize::try_from(i32::from(code)).ok()?;
        let (counter, grpc_code) = (self.handled.get(number)?, *CODES.get(number)?);
        let handled = || HandledLabels { method: self.method.clone(), grpc_code };
        Some(counter.get_or_init(|| self.families.handled.get_or_create_owned(&handled())))
    }

    fn seconds(&self) -> &Histogram {
        self.seconds.get_or_init(|| self.families.seconds.get_or_create_owned(&self.method))
    }
}

tokio::task_local! {
    /// Whether the current call may wait.
    static MAY_WAIT: Cell<bool>;
}

/// Marks the current call as waiting for resources if necessary. The duration of such a call says nothing about the
/// service, and is counted separately.
pub fn may_wait() {
    // A call outside the edge is not counted.
    let _ = MAY_WAIT.try_with(|may_wait| may_wait.set(true));
}

/// A call in progress. Dropping it without an end counts as cancelled.
#[derive(Debug)]
pub struct CallTimer {
    series: Arc<MethodSeries>,
    since: Instant,
    may_wait: bool,
    ended: bool,
}

impl CallTimer {
    /// Returns the method of the call; `None` if it does not exist.
    pub fn method(&self) -> Option<&Method> {
        Some(&self.series.method).filter(|method| method.grpc_type != UNKNOWN)
    }

    /// Runs a part of the call, in which [`may_wait`] applies to it.
    pub fn carry_out<T>(&mut self, work: impl FnOnce() -> T) -> T {
        MAY_WAIT.sync_scope(Cell::new(self.may_wait), || {
            let done = work();
            self.may_wait = MAY_WAIT.with(Cell::get);
            done
        })
    }

    /// Ends the call with `code`. Only the first end counts.
    pub fn end(&mut self, code: Code) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        if let Some(handled) = self.series.handled(code) {
            handled.inc();
        }
        let seconds = if self.may_wait { &self.series.families.may_wait } else { self.series.seconds() };
        seconds.observe(self.since.elapsed().as_secs_f64());
    }
}

impl Drop for CallTimer {
    fn drop(&mut self) {
        self.end(Code::Cancelled);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;

    #[test]
    fn call_metrics_count_first_end_by_code_name() {
        let method =
            || Method { grpc_type: "unary", grpc_service: "some.Service".to_owned(), grpc_method: "Do".to_owned() };
        let metrics = Metrics::new([method()], []);
        for number in 0..17 {
            let mut call = metrics.calls.begin("/some.Service/Do");
            call.end(Code::from_i32(number));
            call.end(Code::Ok);
        }
        drop(metrics.calls.begin("/some.Service/Do"));
        // A call that may wait and ends, and a cancelled one.
        let mut call = metrics.calls.begin("/some.Service/Do");
        call.carry_out(may_wait);
        call.carry_out(|| ());
        call.end(Code::Ok);
        let mut goes_away = metrics.calls.begin("/some.Service/Do");
        goes_away.carry_out(may_wait);
        drop(goes_away);
        let text = metrics.text().unwrap();
        let labels = r#"grpc_type="unary",grpc_service="some.Service",grpc_method="Do""#;
        for name in CODES {
            let count = match name {
                "OK" => 2,
                "Canceled" => 3,
                _ => 1,
            };
            let line = format!("grpc_server_handled_total{{{labels},grpc_code=\"{name}\"}} {count}\n");
            assert!(text.contains(&line), "{line}{text}");
        }
        assert!(text.contains(&format!("grpc_server_handling_seconds_count{{{labels}}} 18\n")), "{text}");
        assert!(text.contains("linkis_rm_waiting_request_seconds_count 2\n"), "{text}");
    }
}
