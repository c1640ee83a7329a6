//! The cluster as a whole: worked out by one instance for all, and told by each as it was read last, all of it at one moment.

use std::{collections::BTreeMap, fmt, sync::Arc};

use arc_swap::ArcSwapOption;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, gauge::ConstGauge},
};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::domain::overview::EmState;

/// What all EMs have of a dimension.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Amounts {
    /// Everything.
    pub total: f64,
    /// What is never granted.
    pub protected: f64,
    /// What engines use.
    pub used: f64,
    /// What is granted and not yet in use.
    pub locked: f64,
}

/// A scope that a limit is for.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Fullness {
    /// Which.
    pub scope: String,
    /// The dimension of whose maximum it holds most.
    pub dimension: String,
    /// How much: 1 is full.
    pub share: f64,
}

/// What is worked out of the cluster: what another release does not know of is nothing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterFigures {
    /// Bytes of EMs.
    pub memory: Amounts,
    /// Cores of EMs.
    pub cores: Amounts,
    /// Engines on EMs.
    pub instances: Amounts,
    /// How many EMs are in which state.
    pub ems: BTreeMap<String, f64>,
    /// Live tickets that engines use.
    pub used_tickets: f64,
    /// Live tickets that are granted and not yet in use.
    pub locked_tickets: f64,
    /// Requests in line.
    pub waiting_requests: f64,
    /// For how many seconds the first of them has waited.
    pub waiting_oldest_seconds: f64,
    /// What is held by hand.
    pub holds: f64,
    /// The fullest scopes.
    pub fullest: Vec<Fullness>,
    /// All ends of tickets before are summed, in seconds since 1970.
    pub usage_rolled_up: f64,
}

/// What the last audit found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AuditFigures {
    /// How many differences.
    pub differences: f64,
    /// When, in seconds since 1970.
    pub at: f64,
}

/// All of it as it was read last.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Cluster {
    /// Sums, and when they were worked out, in seconds since 1970.
    pub figures: Option<(ClusterFigures, f64)>,
    /// The last audit.
    pub audit: Option<AuditFigures>,
}

/// As it is stored.
pub fn json<F: Serialize>(figures: &F) -> String {
    // Numbers and texts can always be written.
    serde_json::to_string(figures).unwrap_or_default()
}

/// A moment in seconds since 1970.
pub fn seconds(at: OffsetDateTime) -> f64 {
    (at - OffsetDateTime::UNIX_EPOCH).as_seconds_f64()
}

/// Where it is put; clones share it.
#[derive(Debug, Clone, Default)]
pub struct ClusterMetrics(Arc<ArcSwapOption<Cluster>>);

impl ClusterMetrics {
    /// Tells this from now on.
    pub fn publish(&self, cluster: Cluster) {
        self.0.store(Some(Arc::new(cluster)));
    }

    /// What is told now; `None` if nothing was read yet.
    pub fn last(&self) -> Option<Arc<Cluster>> {
        self.0.load_full()
    }
}

/// Writes gauges.
struct Writer<'a, 'e>(&'a mut DescriptorEncoder<'e>);

impl Writer<'_, '_> {
    fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        let name = format!("linkis_rm_{name}");
        let encoder = self.0.encode_descriptor(&name, &format!("{help}."), None, MetricType::Gauge)?;
        ConstGauge::new(value).encode(encoder)
    }

    /// A gauge for each combination of values of labels; none without one.
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

    fn amounts(&mut self, name: &str, help: &str, amounts: &Amounts) -> fmt::Result {
        let Amounts { total, protected, used, locked } = *amounts;
        let kinds = [("total", total), ("protected", protected), ("used", used), ("locked", locked)];
        self.family(name, help, kinds.map(|(kind, amount)| ([("kind", kind.to_owned())], amount)))
    }

    fn figures(&mut self, figures: &ClusterFigures, at: f64) -> fmt::Result {
        self.amounts("cluster_memory_bytes", "Memory of all EMs", &figures.memory)?;
        self.amounts("cluster_cores", "Cores of all EMs", &figures.cores)?;
        self.amounts("cluster_instances", "Engines on all EMs", &figures.instances)?;
        let ems = EmState::ALL
            .map(EmState::name)
            .map(|state| ([("state", state.to_owned())], figures.ems.get(state).copied().unwrap_or(0.0)));
        self.family("cluster_ems", "EMs by their state: of those that are silent, nothing is heard", ems)?;
        let tickets = [("used", figures.used_tickets), ("locked", figures.locked_tickets)];
        let tickets = tickets.map(|(state, count)| ([("state", state.to_owned())], count));
        self.family("cluster_tickets", "Live tickets", tickets)?;
        self.gauge(
            "cluster_waiting_requests",
            "Requests that wait in line, on all instances",
            figures.waiting_requests,
        )?;
        self.gauge(
            "cluster_waiting_oldest_seconds",
            "For how long the first in line has waited",
            figures.waiting_oldest_seconds,
        )?;
        self.gauge("cluster_holds", "EMs and users that somebody holds by hand: calls on them wait", figures.holds)?;
        let fullest = figures
            .fullest
            .iter()
            .map(|full| ([("scope", full.scope.clone()), ("dimension", full.dimension.clone())], full.share));
        self.family(
            "scope_fullness",
            "What the fullest limits have of their maximum, in the dimension in which each is the fullest: 1 is full",
            fullest,
        )?;
        self.gauge(
            "usage_rolled_up_timestamp_seconds",
            "GetUsage knows of all tickets that ended before this",
            figures.usage_rolled_up,
        )?;
        self.gauge(
            "cluster_snapshot_timestamp_seconds",
            "When all that is told of the cluster was worked out: if it stands still, see the background task cluster",
            at,
        )
    }
}

impl Collector for ClusterMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Some(cluster) = self.0.load_full() else { return Ok(()) };
        let mut writer = Writer(&mut encoder);
        if let Some((figures, at)) = &cluster.figures {
            writer.figures(figures, *at)?;
        }
        if let Some(audit) = cluster.audit {
            let help = "What the last audit found that is not as the tickets say: anything but 0 is a defect, see Audit and Repair";
            writer.gauge("audit_differences", help, audit.differences)?;
            let help = "When the last audit was: it runs every hour, on one instance for all";
            writer.gauge("audit_last_success_timestamp_seconds", help, audit.at)?;
        }
        Ok(())
    }
}
