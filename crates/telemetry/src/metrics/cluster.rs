//! Metrics of the whole cluster: computed by one instance, stored, and published by every instance as last read.
//!
//! All values of a reading belong to one moment. Callers: the tasks for cluster figures and audits publish a reading; a
//! scrape and the page read it.

use std::{collections::BTreeMap, fmt, sync::Arc};

use arc_swap::ArcSwapOption;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, gauge::ConstGauge},
};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use rm_model::overview::EmState;

/// Sums of one dimension over all EMs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DimensionFigures {
    /// Capacity.
    pub total: f64,
    /// Part of the capacity that is never granted.
    pub protected: f64,
    /// Amount used by engines.
    pub used: f64,
    /// Amount granted and not yet confirmed.
    pub locked: f64,
}

/// Fullness of a limited scope.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ScopeFullness {
    /// Scope.
    pub scope: String,
    /// Dimension in which the scope is fullest.
    pub dimension: String,
    /// Used share of the maximum: 1 is full.
    pub share: f64,
}

/// Stored figures of the cluster. Members that another release does not write are zero.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterFigures {
    /// Memory of EMs, in bytes.
    pub memory: DimensionFigures,
    /// Cores of EMs.
    pub cores: DimensionFigures,
    /// Engines on EMs.
    pub instances: DimensionFigures,
    /// Number of EMs by state.
    pub ems: BTreeMap<String, f64>,
    /// Number of confirmed tickets.
    pub used_tickets: f64,
    /// Number of granted tickets that are not yet confirmed.
    pub locked_tickets: f64,
    /// Number of confirmed tickets with idle engines.
    pub idle_tickets: f64,
    /// Number of waiting requests.
    pub waiting_requests: f64,
    /// Waiting time of the oldest waiting request, in seconds.
    pub waiting_oldest_seconds: f64,
    /// Number of holds.
    pub holds: f64,
    /// Fullest scopes, at most 50: each is a time series.
    pub fullest: Vec<ScopeFullness>,
    /// Unix time in seconds before which the use of all ended tickets is summed.
    pub usage_rolled_up: f64,
    /// Unix time in seconds before which the sums by user are complete; 0 before the first sums.
    pub users_summed: f64,
}

/// Result of the last audit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AuditFigures {
    /// Number of differences.
    pub differences: f64,
    /// Unix time of the audit, in seconds.
    pub at: f64,
}

/// Last reading of the stored figures.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ClusterReading {
    /// Figures with the Unix time of their computation, in seconds.
    pub figures: Option<(ClusterFigures, f64)>,
    /// Last audit.
    pub audit: Option<AuditFigures>,
}

/// Returns figures in their stored form.
pub fn json<F: Serialize>(figures: &F) -> String {
    // Numbers and texts always have a JSON form.
    serde_json::to_string(figures).unwrap_or_default()
}

/// Returns a time as Unix time in seconds.
pub fn seconds(at: OffsetDateTime) -> f64 {
    (at - OffsetDateTime::UNIX_EPOCH).as_seconds_f64()
}

/// Published reading. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct ClusterMetrics(Arc<ArcSwapOption<ClusterReading>>);

impl ClusterMetrics {
    /// Publishes a reading.
    pub fn publish(&self, cluster: ClusterReading) {
        self.0.store(Some(Arc::new(cluster)));
    }

    /// Returns the published reading; `None` before the first.
    pub fn last(&self) -> Option<Arc<ClusterReading>> {
        self.0.load_full()
    }
}

/// Encoder of gauges.
struct GaugeWriter<'a, 'e>(&'a mut DescriptorEncoder<'e>);

impl GaugeWriter<'_, '_> {
    fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        let name = format!("linkis_rm_{name}");
        let encoder = self.0.encode_descriptor(&name, &format!("{help}."), None, MetricType::Gauge)?;
        ConstGauge::new(value).encode(encoder)
    }

    /// Encodes a gauge per combination of label values; nothing without any.
    fn family<const LABELS: usize>(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = ([(&'static str, String); LABELS], f64)>,
    ) -> fmt::Result {
        let mut series = series.into_iter().peekable();
        if series.peek().is_none() {
            return Ok(());
        }
        let name = format!("linkis_rm_{name}");
        let mut encoder = self.0.encode_descriptor(&name, &format!("{help}."), None, MetricType::Gauge)?;
        for (labels, value) in series {
            ConstGauge::new(value).encode(encoder.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn amounts(&mut self, name: &str, help: &str, amounts: &DimensionFigures) -> fmt::Result {
        let DimensionFigures { total, protected, used, locked } = *amounts;
        let kinds = [("total", total), ("protected", protected), ("used", used), ("locked", locked)];
        self.family(name, help, kinds.map(|(kind, amount)| ([("kind", kind.to_owned())], amount)))
    }

    fn figures(&mut self, figures: &ClusterFigures, at: f64) -> fmt::Result {
        self.amounts("cluster_memory_bytes", "Memory of all EMs", &figures.memory)?;
        self.amounts("cluster_cores", "Cores of all EMs", &figures.cores)?;
        self.amounts("cluster_instances", "Engines on all EMs", &figures.instances)?;
        let ems = EmState::ALL
            .map(EmState::as_str)
            .map(|state| ([("state", state.to_owned())], figures.ems.get(state).copied().unwrap_or(0.0)));
        self.family("cluster_ems", "EMs by state: silent ones do not report", ems)?;
        let tickets = [("used", figures.used_tickets), ("locked", figures.locked_tickets)];
        let tickets = tickets.map(|(state, count)| ([("state", state.to_owned())], count));
        self.family("cluster_tickets", "Live tickets", tickets)?;
        self.gauge(
            "cluster_idle_tickets",
            "Used tickets of idle engines, by the reports of their EMs: linkis-rm user list shows whose they are",
            figures.idle_tickets,
        )?;
        self.gauge("cluster_waiting_requests", "Waiting requests of all instances", figures.waiting_requests)?;
        self.gauge(
            "cluster_waiting_oldest_seconds",
            "Longest wait of a waiting request",
            figures.waiting_oldest_seconds,
        )?;
        self.gauge("cluster_holds", "EMs and users with a hold of an operator: calls on them wait", figures.holds)?;
        let fullest = figures
            .fullest
            .iter()
            .map(|full| ([("scope", full.scope.clone()), ("dimension", full.dimension.clone())], full.share));
        self.family(
            "scope_fullness",
            "Used share of the maximum of the fullest scopes, in the fullest dimension of each: 1 is full",
            fullest,
        )?;
        self.gauge(
            "usage_rolled_up_timestamp_seconds",
            "Time before which GetUsage is complete",
            figures.usage_rolled_up,
        )?;
        self.gauge("users_summed_timestamp_seconds", "Time before which ListUsers is complete", figures.users_summed)?;
        self.gauge(
            "cluster_snapshot_timestamp_seconds",
            "Time of the computation of the cluster metrics: if it does not advance, see the background task cluster",
            at,
        )
    }
}

impl Collector for ClusterMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Some(cluster) = self.0.load_full() else { return Ok(()) };
        let mut writer = GaugeWriter(&mut encoder);
        if let Some((figures, at)) = &cluster.figures {
            writer.figures(figures, *at)?;
        }
        if let Some(audit) = cluster.audit {
            let help = "Differences between stored counters and tickets in the last audit: above 0 is a defect, see \
                Audit and Repair";
            writer.gauge("audit_differences", help, audit.differences)?;
            let help = "Time of the last audit: it runs every hour, on one instance for all";
            writer.gauge("audit_last_success_timestamp_seconds", help, audit.at)?;
        }
        Ok(())
    }
}
