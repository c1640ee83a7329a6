//! gRPC calls by method, under the names that dashboards and alerts for gRPC know.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, histogram::Histogram},
    registry::Registry,
};
use tonic::Code;

use super::{Counter, add};

/// The names of all codes, by their numbers, as other implementations of gRPC write them in metrics.
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

/// From 1 ms to a minute; a histogram of it.
fn seconds() -> Histogram {
    Histogram::new([0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0])
}

/// A method that a server serves.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Method {
    /// `unary`, `client_stream`, `server_stream` or `bidi_stream`.
    pub grpc_type: &'static str,
    /// The service, with its package.
    pub grpc_service: String,
    /// The method's own name.
    pub grpc_method: String,
}

impl Method {
    /// What calls of methods that do not exist are counted as: whoever makes up names makes no series.
    fn unknown() -> Self {
        Self { grpc_type: "unknown", grpc_service: "unknown".to_owned(), grpc_method: "unknown".to_owned() }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Handled {
    #[prometheus(flatten)]
    method: Method,
    grpc_code: &'static str,
}

/// The calls of all methods.
#[derive(Debug)]
pub struct Calls {
    methods: HashMap<String, Arc<Series>>,
    unknown: Arc<Series>,
}

#[derive(Clone)]
struct Families {
    started: Family<Method, Counter>,
    handled: Family<Handled, Counter>,
    seconds: Family<Method, Histogram, fn() -> Histogram>,
    may_wait: Histogram,
}

/// The series of one method, each looked up once.
struct Series {
    method: Method,
    families: Families,
    started: Counter,
    handled: [OnceLock<Counter>; CODES.len()],
    seconds: OnceLock<Histogram>,
}

impl fmt::Debug for Series {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.method.fmt(formatter)
    }
}

impl Calls {
    pub(super) fn register(registry: &mut Registry, methods: impl IntoIterator<Item = Method>) -> Self {
        let families = Families {
            started: add(
                registry,
                "grpc_server_started_total",
                "Calls that have begun: more than were handled are under way",
                Family::default(),
            ),
            handled: add(
                registry,
                "grpc_server_handled_total",
                "Calls that have ended, by their code: a refusal for want of resources is an answer, and so OK",
                Family::default(),
            ),
            seconds: add(
                registry,
                "grpc_server_handling_seconds",
                "How long calls take, without requests that are ready to wait in line",
                Family::new_with_constructor(seconds),
            ),
            may_wait: add(
                registry,
                "linkis_rm_waiting_request_seconds",
                "How long requests with a wait_timeout take, whether or not they had to wait",
                seconds(),
            ),
        };
        let path = |method: &Method| format!("/{}/{}", method.grpc_service, method.grpc_method);
        let methods = methods.into_iter();
        let methods = methods.map(|method| (path(&method), Arc::new(Series::new(method, &families)))).collect();
        Self { methods, unknown: Arc::new(Series::new(Method::unknown(), &families)) }
    }

    /// A call has begun.
    pub fn begin(&self, path: &str) -> Call {
        let series = self.methods.get(path).unwrap_or(&self.unknown);
        series.started.inc();
        Call { series: series.clone(), since: Instant::now(), may_wait: MayWait::default(), ended: false }
    }
}

impl Series {
    fn new(method: Method, families: &Families) -> Self {
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
        let handled = || Handled { method: self.method.clone(), grpc_code };
        Some(counter.get_or_init(|| self.families.handled.get_or_create_owned(&handled())))
    }

    fn seconds(&self) -> &Histogram {
        self.seconds.get_or_init(|| self.families.seconds.get_or_create_owned(&self.method))
    }
}

/// Whether the caller of a call is ready to wait for what it asks: then its time says nothing about the service.
#[derive(Clone, Debug, Default)]
pub struct MayWait(Arc<AtomicBool>);

impl MayWait {
    /// It is.
    pub fn say(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_said(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A call that is under way. Dropped without an end, it was cancelled.
#[derive(Debug)]
pub struct Call {
    series: Arc<Series>,
    since: Instant,
    may_wait: MayWait,
    ended: bool,
}

impl Call {
    /// Where to say that its caller is ready to wait.
    pub fn may_wait(&self) -> MayWait {
        self.may_wait.clone()
    }

    /// It has ended; only the first end counts.
    pub fn end(&mut self, code: Code) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        if let Some(handled) = self.series.handled(code) {
            handled.inc();
        }
        let seconds = if self.may_wait.is_said() { &self.series.families.may_wait } else { self.series.seconds() };
        seconds.observe(self.since.elapsed().as_secs_f64());
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.end(Code::Cancelled);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;

    #[test]
    fn every_code_has_its_name_and_only_the_first_end_counts() {
        let method =
            || Method { grpc_type: "unary", grpc_service: "some.Service".to_owned(), grpc_method: "Do".to_owned() };
        let metrics = Metrics::new([method()]);
        for number in 0..17 {
            let mut call = metrics.calls.begin("/some.Service/Do");
            call.end(Code::from_i32(number));
            call.end(Code::Ok);
        }
        drop(metrics.calls.begin("/some.Service/Do"));
        let waits = metrics.calls.begin("/some.Service/Do");
        waits.may_wait().say();
        drop(waits);
        let text = metrics.text().unwrap();
        let labels = r#"grpc_type="unary",grpc_service="some.Service",grpc_method="Do""#;
        for (number, name) in CODES.iter().enumerate() {
            let count = if number == Code::Cancelled as usize { 3 } else { 1 };
            let line = format!("grpc_server_handled_total{{{labels},grpc_code=\"{name}\"}} {count}\n");
            assert!(text.contains(&line), "{line}{text}");
        }
        assert!(text.contains(&format!("grpc_server_handling_seconds_count{{{labels}}} 18\n")), "{text}");
        assert!(text.contains("linkis_rm_waiting_request_seconds_count 1\n"), "{text}");
    }
}
