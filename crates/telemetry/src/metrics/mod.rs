//! Metrics of an instance, in Prometheus text format.
//!
//! Each server owns a [`Metrics`], so that several in one process stay separate. A component gets a clone and updates
//! its own group. A scrape reads atomics and a few files of `/proc/self`, and never waits for a component or the
//! database. The number of series is bounded. Callers choose no label value, except for the scopes of the 50 fullest
//! limits.
//!
//! Submodules: [`components`] has the committer, the wait queue, caches and the database. [`requests`], [`calls`],
//! [`tasks`], [`external`] and [`jwt`] have one component each. [`cluster`] has the whole cluster. A
//! scrape reads `process` and `traces`. `value` has the metric types.

use std::{fmt, ops::Deref, sync::Arc};

use prometheus_client::{
    collector::Collector,
    encoding::text,
    metrics::{
        family::Family,
        gauge::{ConstGauge, Gauge},
    },
    registry::{Metric, Registry},
};

use calls::{CallMetrics, Method};
use tasks::TaskFamilies;

/// Declares the metrics of a component: visibility, field, type, name, help text, and the initial value if it is not the
/// default. `register` registers all of them.
macro_rules! metrics {
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $group:ident {
            $($field_visibility:vis $field:ident: $kind:ty = $name:literal, $help:literal $(, $value:expr)?;)+
        }
    ) => {
        $(#[$attribute])*
        #[derive(Debug)]
        $visibility struct $group {
            $(
                #[doc = $help]
                $field_visibility $field: $kind,
            )+
        }

        impl $group {
            pub(super) fn register(registry: &mut prometheus_client::registry::Registry) -> Self {
                Self { $($field: super::add(registry, $name, $help, metrics!(@initial $kind $(, $value)?)),)+ }
            }
        }
    };
    (@initial $kind:ty) => { <$kind>::default() };
    (@initial $kind:ty, $value:expr) => { $value };
}

pub mod calls;
pub mod cluster;
pub mod components;
pub mod external;
pub mod jwt;
mod process;
pub mod requests;
pub mod tasks;
mod traces;
mod value;

pub use tasks::{TaskMetrics, TaskReading};
pub use value::{Counter, GaugeGuard, TimerGuard};

/// Media type of [`Metrics::text`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Metrics of one server. Clones share them.
#[derive(Clone, Debug)]
pub struct Metrics(Arc<MetricFamilies>);

/// Metric families by component.
#[derive(Debug)]
pub struct MetricFamilies {
    registry: Registry,
    tasks: TaskFamilies,
    /// gRPC calls.
    pub calls: CallMetrics,
    /// Committer.
    pub committer: components::CommitterMetrics,
    /// The whole cluster.
    pub cluster: cluster::ClusterMetrics,
    /// Failed authentication and authorization.
    pub access: components::AccessMetrics,
    /// Requests for resources.
    pub requests: requests::RequestMetrics,
    /// Wait queue.
    pub line: components::WaitQueueMetrics,
    /// Caches of the database state.
    pub caches: components::CacheMetrics,
    /// Amounts of idle engines in refusals.
    pub idle_amounts: components::IdleAmountMetrics,
    /// Database.
    pub database: components::DatabaseMetrics,
    /// Fetches from external clusters.
    pub external: external::ExternalMetrics,
    /// JWT authentication.
    pub jwt: jwt::JwtMetrics,
    /// Overviews of the cluster.
    pub overviews: components::OverviewMetrics,
    /// Followers of the history.
    pub follow: components::FollowMetrics,
    /// Sums by user.
    pub user_sums: components::UserSumMetrics,
    /// Tickets that are to end because requests wait.
    pub reclaim: components::ReclaimMetrics,
}

impl Deref for Metrics {
    type Target = MetricFamilies;

    fn deref(&self) -> &MetricFamilies {
        &self.0
    }
}

impl Metrics {
    /// Creates the metrics of a server that serves `methods`; `collectors` write the families of other crates.
    pub fn new(
        methods: impl IntoIterator<Item = Method>,
        collectors: impl IntoIterator<Item = Box<dyn Collector>>,
    ) -> Self {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(process::ProcessMetrics::new()));
        registry.register_collector(Box::new(traces::TraceMetrics));
        for collector in collectors {
            registry.register_collector(collector);
        }
        let cluster = cluster::ClusterMetrics::default();
        registry.register_collector(Box::new(cluster.clone()));
        let calls = CallMetrics::register(&mut registry, methods);
        let ours = registry.sub_registry_with_prefix("linkis_rm");
        let version = ("version".into(), env!("CARGO_PKG_VERSION").into());
        ours.sub_registry_with_labels([version].into_iter()).register(
            "build_info",
            "Release of this instance: compare the instances during an upgrade",
            ConstGauge::new(1_i64),
        );
        let committer = components::CommitterMetrics::register(ours);
        let (access, requests) = (components::AccessMetrics::register(ours), requests::RequestMetrics::register(ours));
        let (line, caches) = (components::WaitQueueMetrics::register(ours), components::CacheMetrics::register(ours));
        let (database, tasks) = (components::DatabaseMetrics::register(ours), TaskFamilies::register(ours));
        let idle_amounts = components::IdleAmountMetrics::register(ours);
        let external = external::ExternalMetrics::register(ours);
        let jwt = jwt::JwtMetrics::register(ours);
        let overviews = components::OverviewMetrics::register(ours);
        let follow = components::FollowMetrics::register(ours);
        let user_sums = components::UserSumMetrics::register(ours);
        let reclaim = components::ReclaimMetrics::register(ours);
        Self(Arc::new(MetricFamilies {
            registry,
            tasks,
            calls,
            cluster,
            committer,
            access,
            requests,
            line,
            caches,
            idle_amounts,
            database,
            external,
            jwt,
            overviews,
            follow,
            user_sums,
            reclaim,
        }))
    }

    /// Returns all metrics in Prometheus text format.
    ///
    /// # Errors
    /// Fails if a value cannot be written.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        text::encode_registry(&mut text, &self.registry)?;
        Ok(text)
    }

    /// Returns the metrics of the background task `task`. The name is a label value, from a fixed set.
    pub fn task(&self, task: &'static str) -> TaskMetrics {
        self.tasks.task(task)
    }

    /// Returns the gauge of open jobs of a kind. The kind is a label value, from a fixed set.
    pub fn jobs(&self, kind: &'static str) -> Gauge {
        self.tasks.jobs(kind)
    }
}

/// Label of a family with one label: its name and its value.
type Label = [(&'static str, &'static str); 1];

/// Creates a family with one label. A series exists for each of `values` from the beginning.
fn family<M: Default>(label: &'static str, values: impl IntoIterator<Item = &'static str>) -> Family<Label, M> {
    let family = Family::default();
    values.into_iter().for_each(|value| drop(family.get_or_create(&[(label, value)])));
    family
}

/// Registers a metric and returns it for its component.
fn add<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register(name, help, metric.clone());
    metric
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Returns the lines of families whose names begin with `family`.
    fn lines_of(metrics: &Metrics, family: &str) -> Vec<String> {
        metrics.text().unwrap().lines().filter(|line| line.starts_with(family)).map(str::to_owned).collect()
    }

    #[test]
    fn task_metrics_show_steps_errors_and_lag() {
        let metrics = Metrics::new([], []);
        assert_eq!(lines_of(&metrics, "linkis_rm_task"), [""; 0]);
        let task = metrics.task("expiry");
        task.lag(Duration::from_millis(1500));
        task.step();
        metrics.task("expiry").failed("no answer".to_owned());
        metrics.jobs("em_removal").set(2);
        assert_eq!(lines_of(&metrics, "linkis_rm_task_steps"), [r#"linkis_rm_task_steps_total{task="expiry"} 1"#]);
        assert_eq!(lines_of(&metrics, "linkis_rm_task_errors"), [r#"linkis_rm_task_errors_total{task="expiry"} 1"#]);
        assert_eq!(lines_of(&metrics, "linkis_rm_task_lag"), [r#"linkis_rm_task_lag_seconds{task="expiry"} 1.5"#]);
        assert_eq!(lines_of(&metrics, "linkis_rm_jobs"), [r#"linkis_rm_jobs{kind="em_removal"} 2"#]);
        let seconds = |family| -> f64 { lines_of(&metrics, family)[0].rsplit(' ').next().unwrap().parse().unwrap() };
        let (run, success) =
            (seconds("linkis_rm_task_last_run_timestamp"), seconds("linkis_rm_task_last_success_timestamp"));
        assert!(success > 1.7e9 && run >= success, "{run} {success}");
    }

    #[test]
    fn contended_gauge_counts_operations_until_drop() {
        let metrics = Metrics::new([], []);
        let (first, second) = (metrics.committer.contended(), metrics.committer.contended());
        drop(first);
        assert_eq!(lines_of(&metrics, "linkis_rm_contended"), ["linkis_rm_contended_operations 1"]);
        drop(second);
        assert_eq!(lines_of(&metrics, "linkis_rm_contended"), ["linkis_rm_contended_operations 0"]);
        assert_eq!(lines_of(&metrics, "linkis_rm_contentions"), ["linkis_rm_contentions_total 2"]);
    }
}
