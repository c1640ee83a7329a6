//! Cluster figures: totals that one instance computes and each instance publishes as metrics.
//!
//! All instances publish equal values, because all read the stored figures. The pause after a computation grows with its
//! duration, so that a large cluster does not load the database.
//!
//! Never: reads tickets one by one.
//! Caller: the task driver (`background`).

use std::{collections::BTreeSet, time::Duration};

use tokio::time::Instant;

use rm_model::{
    limit::ScopeUsage,
    overview::{DimensionTotals, EmTotals},
    resource::Dimension,
};
use rm_store::{
    Store, StoreError,
    cluster_figure::{self, AUDIT, CLUSTER, ClusterFigure},
    overview::{self, AllEmSums, COUNTED_MAX},
    resource_hold,
    session::{Session, within_short_timeout, within_timeout},
    usage_hour, user_sum,
};
use rm_telemetry::metrics::cluster::{
    AuditFigures, ClusterFigures, ClusterMetrics, ClusterReading, DimensionFigures, ScopeFullness, json, seconds,
};

use super::{PAUSE_TIMES, Step, Task, fullest::FullestScopes, lease::LeaseFlag};

/// Maximum number of fullest scopes to publish; each is a time series.
const FULLEST_MAX: usize = 50;

/// Maximum length of a scope's text, in bytes.
const SCOPE_BYTES_MAX: usize = 256;

/// Interval between counts of the holds: the scan passes the dead rows of all locks.
const HOLDS_EVERY: Duration = Duration::from_secs(30);

/// Background task that computes the cluster figures and publishes them.
#[derive(Debug)]
pub struct ExportClusterFigures {
    store: Store,
    holder: LeaseFlag,
    silent_after: Duration,
    metrics: ClusterMetrics,
    scopes: FullestScopes,
    holds: Option<(Instant, i64)>,
}

impl ExportClusterFigures {
    /// Creates the task. EMs without a report for `silent_after` are silent; `scopes` lists the fullest scopes.
    pub fn new(
        store: Store,
        holder: LeaseFlag,
        silent_after: Duration,
        scopes: FullestScopes,
        metrics: ClusterMetrics,
    ) -> Self {
        Self { store, holder, silent_after, metrics, scopes, holds: None }
    }

    async fn work_out(&mut self, session: &mut Session) -> Result<ClusterFigure, StoreError> {
        let totals = within_timeout(overview::totals(session.get().await?)).await?;
        let rolled_up = within_timeout(usage_hour::progress(session.get().await?)).await?.complete_until;
        let users_summed = within_timeout(user_sum::complete_until(session.get().await?)).await?;
        let figures = ClusterFigures {
            locked_tickets: number(totals.locked_tickets.min(COUNTED_MAX)),
            idle_tickets: number(totals.idle.tickets),
            waiting_requests: number(totals.line.waiting),
            waiting_oldest_seconds: totals.line.longest_seconds.unwrap_or_default(),
            holds: number(self.holds(session).await?),
            fullest: self.scopes.list().map(|list| fullest(&list.fullest)).unwrap_or_default(),
            usage_rolled_up: seconds(rolled_up),
            users_summed: users_summed.map(seconds).unwrap_or_default(),
            ..of_ems(&overview::ems(session, self.silent_after).await?)
        };
        Ok(ClusterFigure { json: json(&figures), at: totals.at })
    }

    async fn holds(&mut self, session: &mut Session) -> Result<i64, StoreError> {
        match self.holds {
            Some((counted, holds)) if counted.elapsed() < HOLDS_EVERY => Ok(holds),
            _ => {
                let holds = within_timeout(resource_hold::count_held(session.get().await?)).await?;
                self.holds = Some((Instant::now(), holds));
                Ok(holds)
            }
        }
    }

    /// Publishes the stored figures. Uses pooled connections, because an instance that does not compute needs none of its own.
    async fn tell(&self) -> Result<(), StoreError> {
        let figures = within_short_timeout(cluster_figure::read(&self.store.pool().await?, CLUSTER)).await?;
        let audit = within_short_timeout(cluster_figure::read(&self.store.pool().await?, AUDIT)).await?;
        self.metrics.publish(ClusterReading {
            // Figures that another release writes in a different format are not published.
            figures: figures.and_then(|figure| Some((serde_json::from_str(&figure.json).ok()?, seconds(figure.at)))),
            audit: audit.and_then(|figure| serde_json::from_str::<AuditFigures>(&figure.json).ok()),
        });
        Ok(())
    }
}

impl Task for ExportClusterFigures {
    const NAME: &'static str = "cluster";
    const PERIOD: Duration = Duration::from_secs(5);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        let begun = Instant::now();
        if self.holder.holds() {
            let figure = self.work_out(session).await?;
            within_short_timeout(cluster_figure::write(session.get().await?, CLUSTER, &figure)).await?;
        }
        let pause = begun.elapsed() * PAUSE_TIMES;
        self.tell().await?;
        Ok(Step::Later(pause))
    }
}

/// Converts for display: sums above 2^53 lose precision.
fn number(amount: i64) -> f64 {
    amount as f64
}

/// Adds up the sums over all EMs.
fn of_ems(sums: &AllEmSums) -> ClusterFigures {
    let mut figures = ClusterFigures { used_tickets: number(sums.used_tickets), ..ClusterFigures::default() };
    for ((_, state), totals) in &sums.totals {
        *figures.ems.entry(state.as_str().to_owned()).or_default() += number(totals.ems);
        add(&mut figures.memory, totals, &Dimension::Memory);
        add(&mut figures.cores, totals, &Dimension::Cores);
        add(&mut figures.instances, totals, &Dimension::Instances);
    }
    figures
}

fn add(amounts: &mut DimensionFigures, totals: &EmTotals, dimension: &Dimension) {
    let Some(DimensionTotals { total, protected, used, locked }) = totals.dimensions.get(dimension) else { return };
    amounts.total += number(*total);
    amounts.protected += number(*protected);
    amounts.used += number(*used);
    amounts.locked += number(*locked);
}

/// Returns the dimension of a scope with the largest share of its maximum; `None` if the scope has no maximum.
fn fullness(scope: &ScopeUsage) -> Option<ScopeFullness> {
    let (dimension, share) = scope.fullest()?;
    let mut text = scope.scope.to_string();
    text.truncate(text.floor_char_boundary(SCOPE_BYTES_MAX));
    Some(ScopeFullness { scope: text, dimension: dimension.class().to_owned(), share })
}

/// Returns the first [`FULLEST_MAX`] of the scopes, which are in order. If two scopes have equal truncated texts, only the
/// fuller one is returned, because a time series has one value.
fn fullest(scopes: &[ScopeUsage]) -> Vec<ScopeFullness> {
    let mut told = BTreeSet::new();
    let scopes = scopes.iter().filter_map(fullness);
    scopes.filter(|full| told.insert((full.scope.clone(), full.dimension.clone()))).take(FULLEST_MAX).collect()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Arc};

    use super::*;
    use rm_model::{
        limit::{LabelPattern, Rule, sort_fullest},
        limit_mode::LimitMode,
        scope::{Scope, ScopeHoldings, Tally},
    };

    fn scope(user: &str, cores: i64) -> ScopeUsage {
        let max = [(Dimension::Cores, 10), (Dimension::Instances, 100), (Dimension::Custom("gpu".into()), 0)];
        let pattern = LabelPattern::new([("user".to_owned(), None)].into());
        let rule = Rule { pattern, mode: LimitMode::Enforced, max: BTreeMap::from(max), guarantee: BTreeMap::new() };
        let used = Tally::new([(Dimension::Cores, cores), (Dimension::Instances, 1)]);
        let scope = Scope::new([("user".to_owned(), user.to_owned())].into());
        ScopeUsage {
            scope,
            rules: vec![Arc::new(rule)],
            usage: ScopeHoldings { used, locked: Tally::default() },
            version: 0,
        }
    }

    fn look(scopes: &[ScopeUsage]) -> Vec<(String, String, f64)> {
        let mut scopes = scopes.to_vec();
        sort_fullest(&mut scopes);
        fullest(&scopes).into_iter().map(|full| (full.scope, full.dimension, full.share)).collect()
    }

    #[test]
    fn fullest_scope_is_listed_once_by_fullest_dimension() {
        let told = |user: &str, dimension: &str, share| (format!("user={user}"), dimension.to_owned(), share);
        let scopes = [scope("bob", 0), scope("alice", 5), scope("carol", 15)];
        let all = [told("carol", "cores", 1.5), told("alice", "cores", 0.5), told("bob", "instances", 0.01)];
        assert_eq!(look(&scopes), all);
        // Scopes with equal truncated texts would be one series twice.
        let long = "用".repeat(255);
        let cut = look(&[scope(&format!("{long}a"), 4), scope(&format!("{long}b"), 5)]);
        assert!(cut.len() == 1 && cut[0].0.len() <= SCOPE_BYTES_MAX && cut[0].2 == 0.5, "{cut:?}");
    }

    #[test]
    fn fullest_scopes_of_many_are_found_at_any_position() {
        let crowd: Vec<_> = (0..1000).map(|n| scope(&format!("user{n}"), n * 7 % 1000)).collect();
        let told = look(&crowd);
        assert_eq!(told.len(), FULLEST_MAX);
        let shares: Vec<_> = told.iter().map(|(.., share)| *share).collect();
        let expected: Vec<_> = (0..50).map(|n| number(999 - n) / 10.0).collect();
        assert_eq!(shares, expected);
    }
}
