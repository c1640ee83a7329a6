//! Figures of the last fifteen minutes, so that a new page shows them immediately.
//!
//! One point is recorded every five seconds, with or without a viewer. A point uses the figures of the instances and
//! sums that other tasks compute; it never causes a count. Callers: the event stream; the server runs
//! [`MetricHistory::keep`].

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde::Serialize;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use rm_model::{
    overview::{DimensionTotals, Overview},
    scope_kind::ScopeKind,
};
use rm_service::{
    error::Error,
    overview::{OverviewService, OverviewSnapshot},
};
use rm_telemetry::metrics::{
    Metrics,
    cluster::{ClusterFigures, DimensionFigures},
};

/// Interval between two points.
const INTERVAL: Duration = Duration::from_secs(5);
/// Maximum number of points: a quarter of an hour.
const POINTS_MAX: usize = 180;

/// Key of refusals by other instances, whose reason this instance does not know.
const ELSEWHERE: &str = "elsewhere";

/// Maximum number of dimensions in a point.
const DIMENSIONS_MAX: usize = 8;

/// Figures at one time. Unknown figures are omitted.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct HistoryPoint {
    /// Seconds since the start of the recording, by a monotonic clock.
    t: f64,
    /// Granted requests per second on all instances.
    #[serde(skip_serializing_if = "Option::is_none")]
    /// Refused requests per second on all instances.
    grants: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    refusals: Option<f64>,
    /// Refused requests per second, by the kind of the first shortfall.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    refused: BTreeMap<&'static str, f64>,
    /// Number of requests in wait queues.
    #[serde(skip_serializing_if = "Option::is_none")]
    waiting: Option<i64>,
    /// Used and locked fraction of the unprotected capacity, by dimension.
    held: BTreeMap<String, f64>,
}

/// Points, oldest first; clones share them.
#[derive(Debug, Clone, Default)]
pub struct MetricHistory(Arc<Mutex<PointRing>>);

#[derive(Debug, Default)]
struct PointRing {
    points: VecDeque<HistoryPoint>,
    /// Number of points recorded so far.
    noted: usize,
}

impl MetricHistory {
    /// Returns the points after the first `noted` ones, and the number of points so far. A caller that is bound to
    /// users gets only the used fractions.
    pub fn since(&self, noted: usize, is_bound: bool) -> (Vec<HistoryPoint>, usize) {
        let ring = self.ring();
        let first = ring.noted - ring.points.len();
        let points = ring.points.iter().skip(noted.saturating_sub(first)).cloned();
        let bound = |point: HistoryPoint| {
            if is_bound { HistoryPoint { t: point.t, held: point.held, ..HistoryPoint::default() } } else { point }
        };
        (points.map(bound).collect(), ring.noted)
    }

    fn note(&self, point: HistoryPoint) {
        let mut ring = self.ring();
        if ring.points.len() == POINTS_MAX {
            ring.points.pop_front();
        }
        ring.points.push_back(point);
        ring.noted += 1;
    }

    /// Locks the points. They stay consistent if a holder panics.
    fn ring(&self) -> MutexGuard<'_, PointRing> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records points until the instance stops; none while the database is unavailable.
    pub async fn keep(self, mut sources: PointSources, stopping: CancellationToken) {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let keeping = async {
            loop {
                ticks.tick().await;
                match sources.point().await {
                    Ok(point) => self.note(point),
                    Err(error) => {
                        tracing::debug!(%error, "a point is missing in the charts of the page");
                    }
                }
            }
        };
        tokio::select! {
            () = keeping => {}
            () = stopping.cancelled() => {}
        }
    }
}

/// Sources of the points.
#[derive(Debug)]
pub struct PointSources {
    overviews: OverviewService,
    metrics: Metrics,
    instance_id: Uuid,
    start: Instant,
    /// The overview at the last point.
    seen: Option<Arc<OverviewSnapshot>>,
    /// Time of the last point, and the refusals until then.
    refused: (Instant, [(ScopeKind, u64); ScopeKind::ALL.len()]),
}

impl PointSources {
    /// Creates the sources of one instance.
    pub fn new(overviews: OverviewService, metrics: Metrics, instance_id: Uuid) -> Self {
        let (start, refused) = (Instant::now(), metrics.requests.refused());
        Self { overviews, metrics, instance_id, start, seen: None, refused: (start, refused) }
    }

    async fn point(&mut self) -> Result<HistoryPoint, Error> {
        let instances = self.overviews.instances().await?;
        let mut refused = self.refused();
        let (mut grants, mut refusals, mut elsewhere) = (0.0, 0.0, 0.0);
        for (instance, _) in &instances {
            grants += instance.throughput.grants;
            refusals += instance.throughput.refusals;
            if instance.id != self.instance_id {
                elsewhere += instance.throughput.refusals;
            }
        }
        if elsewhere > 0.0 {
            refused.insert(ELSEWHERE, elsewhere);
        }
        let cluster = self.metrics.cluster.last();
        let figures = cluster.as_ref().and_then(|cluster| cluster.figures.as_ref()).map(|(figures, _)| figures);
        // Uses an overview that another caller has requested: the recording requests none.
        let seen = self.overviews.last();
        let is_same = |seen: &Arc<OverviewSnapshot>| self.seen.as_ref().is_some_and(|before| Arc::ptr_eq(before, seen));
        let lately = seen.clone().filter(|seen| !is_same(seen));
        self.seen = seen;
        let mut held = figures.map(held_by_figures).unwrap_or_default();
        held.extend(lately.iter().flat_map(|seen| held_by_overview(&seen.overview)));
        let waiting = lately.as_ref().map(|seen| seen.overview.line.waiting);
        // The number of waiting requests is far below 2^53.
        let waiting = waiting.or(figures.map(|figures| figures.waiting_requests as i64));
        let t = self.start.elapsed().as_secs_f64();
        Ok(HistoryPoint { t, grants: Some(grants), refusals: Some(refusals), refused, waiting, held })
    }

    /// Returns the refusals of this instance per second since the last point, by the kind of the first shortfall.
    fn refused(&mut self) -> BTreeMap<&'static str, f64> {
        let now = (Instant::now(), self.metrics.requests.refused());
        let (then, before) = std::mem::replace(&mut self.refused, now);
        let seconds = now.0.duration_since(then).as_secs_f64().max(f64::MIN_POSITIVE);
        let rate = |((kind, now), (_, before)): ((ScopeKind, u64), (ScopeKind, u64))| {
            (kind.as_str(), now.saturating_sub(before) as f64 / seconds)
        };
        now.1.into_iter().zip(before).map(rate).filter(|(_, rate)| *rate > 0.0).collect()
    }
}

/// Returns the used fractions that one instance computes for all, every few seconds.
fn held_by_figures(figures: &ClusterFigures) -> BTreeMap<String, f64> {
    let dimensions = [("memory", figures.memory), ("cores", figures.cores), ("instances", figures.instances)];
    let share = |DimensionFigures { total, protected, used, locked }: DimensionFigures| {
        (used + locked) / (total - protected).max(1.0)
    };
    let there = dimensions.into_iter().filter(|(_, amounts)| amounts.total > 0.0);
    there.map(|(name, amounts)| (name.to_owned(), share(amounts))).collect()
}

/// Returns the used and locked fraction of the unprotected capacity of all EMs together.
fn held_by_overview(overview: &Overview) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::<_, DimensionTotals>::new();
    for totals in overview.ems.values() {
        for (dimension, of_some) in &totals.dimensions {
            sums.entry(dimension.key()).or_default().add(of_some);
        }
    }
    let share = |sums: DimensionTotals| {
        let (held, room) = (sums.used.saturating_add(sums.locked), sums.total.saturating_sub(sums.protected));
        // The precision suffices for a chart.
        held as f64 / room.max(1) as f64
    };
    sums.into_iter().take(DIMENSIONS_MAX).map(|(dimension, sums)| (dimension, share(sums))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_points_are_sent_once_and_old_ones_dropped() {
        let history = MetricHistory::default();
        let times = |noted| history.since(noted, false).0.iter().map(|point| point.t).collect::<Vec<_>>();
        let point = |t: f64| HistoryPoint { t, grants: Some(1.0), ..HistoryPoint::default() };
        assert_eq!(history.since(0, false), (vec![], 0));
        history.note(point(1.0));
        history.note(point(2.0));
        assert_eq!((times(0), times(1), times(2)), (vec![1.0, 2.0], vec![2.0], vec![]));
        (0..POINTS_MAX).for_each(|_| history.note(point(3.0)));
        assert_eq!((times(0).len(), times(0)[0], history.since(0, false).1), (POINTS_MAX, 3.0, POINTS_MAX + 2));
        assert_eq!(history.since(POINTS_MAX + 1, true).0, [HistoryPoint { t: 3.0, ..HistoryPoint::default() }]);
    }
}
