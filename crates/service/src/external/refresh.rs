//! Cluster snapshots: the queues and applications by which requests for external queues are decided.
//!
//! One instance per cluster fetches a snapshot under a lease and stores it; all instances decide by the stored one. A snapshot
//! is in force until the next one, so no request waits for a cluster. A failed fetch affects only its own task.
//!
//! Never: decides a request; blocks a batch while it fetches or counts.
//! Caller: the server, which spawns [`run`].

use std::{
    collections::HashSet,
    iter,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::time::{Instant, interval, timeout};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{commit::commit, error::Error, lock::lock, tasks::InstanceTasks, waiting::LocalWaitQueue};
use rm_external::{self, FetchError};
use rm_model::{
    external::{ClusterSnapshot, QueueCapacities},
    name::Name,
    wait_queue::{FreedKeys, MUCH, WaitKey},
};
use rm_store::{
    StoreError, Work, external_queue,
    external_refresh::{self, RefreshLease},
    external_snapshot::{self, InstallResult, PreparedSnapshot},
    session::{Session, within_timeout},
    waiting::{self, FreedNotification},
};
use rm_telemetry::cause;

use super::{
    ExternalResourceService, ProviderKey, ProviderSelector, ProviderSource, begin, preparation_cache::PreparationCache,
};

/// Interval between polls for due clusters.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// Number of polls between checks that each provider has a cluster, and no other cluster exists.
const LOOKS_PER_RECONCILIATION: u32 = 40;

/// Timeout of all fetches for one snapshot.
const ASK_TIMEOUT: Duration = Duration::from_secs(15);

const REFRESH_TIMEOUT: Duration = external_refresh::LEASE;

/// Minimum pause of a cluster that failed several times. Requests are served again within one refresh after its recovery.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum number of attempts to install a snapshot that too many changes outrun.
const INSTALL_TRIES_MAX: u32 = 5;

/// Maximum number of updates of a preparation before an attempt, and the number of changes that is small enough to begin it.
const CATCH_UPS_MAX: u32 = 20;
const CAUGHT_UP: usize = 32;

/// Number of changes up to which a cached preparation is always updated. If it lacks more changes than that and than its
/// tickets, all tickets are read instead.
const BEHIND_MAX: usize = 20_000;

/// Maximum number of external queues whose waiters are woken at once; other waiters check at the next poll.
const WOKEN_QUEUES_MAX: i64 = 1000;

/// Maximum number of steps that delete the rows of a deleted cluster at once, and the maximum time to delete old rows of an
/// existing one. The next refresh continues.
const CLEAN_STEPS_MAX: usize = 500;
const CLEAN_MAX: Duration = Duration::from_secs(3);

/// Clusters that this instance is refreshing.
type RefreshesInFlight = Arc<Mutex<HashSet<i64>>>;

/// Refreshes the clusters that are due, until shutdown.
pub async fn run(
    service: ExternalResourceService,
    line: LocalWaitQueue,
    tasks: InstanceTasks,
    stopping: CancellationToken,
) {
    let mut session = service.store.lent_session();
    let mut looks = interval(LOOK_INTERVAL);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (under_way, kept, mut count, mut failed) =
        (RefreshesInFlight::default(), PreparationCache::default(), 0_u32, false);
    loop {
        tokio::select! {
            () = stopping.cancelled() => return,
            () = service.changed.notified() => {}
            _ = looks.tick() => {}
        }
        let reconciles = count.is_multiple_of(LOOKS_PER_RECONCILIATION);
        count = count.wrapping_add(1);
        let looked = look(&service, &mut session, &kept, reconciles).await;
        if looked.is_err() {
            session.reset();
        }
        session.give_back().await;
        match looked {
            Ok(due) => {
                failed = false;
                for cluster_id in due {
                    let (service, line, kept) = (service.clone(), line.clone(), kept.clone());
                    let refresh = Refresh { service, line, kept, cluster_id, lease: Uuid::new_v4() };
                    start(refresh, &under_way, &tasks, &stopping);
                }
            }
            Err(error) => {
                if !failed {
                    tracing::warn!(error = cause(&error), "cannot read the external clusters to refresh");
                }
                failed = true;
            }
        }
    }
}

/// Returns the due clusters.
async fn look(
    service: &ExternalResourceService,
    session: &mut Session,
    kept: &PreparationCache,
    reconciles: bool,
) -> Result<Vec<i64>, Error> {
    if reconciles {
        service.reconcile(session).await?;
    }
    let leases = kept.leases();
    let own: Vec<Uuid> = leases.iter().map(|(_, lease)| *lease).collect();
    let rows = within_timeout(external_refresh::all(session.get().await?, &own)).await?;
    kept.retain(&leases, &rows);
    Ok(rows.into_iter().filter(|row| row.is_due).map(|row| row.cluster_id).collect())
}

/// Starts the refresh of a cluster, unless this instance is refreshing it already.
fn start(refresh: Refresh, under_way: &RefreshesInFlight, tasks: &InstanceTasks, stopping: &CancellationToken) {
    let cluster_id = refresh.cluster_id;
    let is_new = lock(under_way).insert(cluster_id);
    if !is_new {
        return;
    }
    let (under_way, stopping) = (under_way.clone(), stopping.clone());
    tasks.spawn(async move {
        let mut session = refresh.service.store.background_session(Work::Refresh);
        let done = stopping.run_until_cancelled(timeout(REFRESH_TIMEOUT, refresh.run(&mut session))).await;
        if !matches!(done, Some(Ok(Ok(())))) {
            if let Some(Ok(Err(error))) = &done {
                tracing::warn!(error = cause(error), "a snapshot of a cluster could not be stored");
                refresh.service.metrics.external.refreshed("store");
            }
            // Another instance may try immediately; without a database, after the lease.
            session.reset();
            let pauses = [if done.is_none() { Duration::ZERO } else { PROBE_INTERVAL }; 2];
            if let Ok(connection) = session.get().await {
                let (id, lease) = (cluster_id, refresh.lease);
                let _ = within_timeout(external_refresh::failed(connection, id, lease, pauses, false)).await;
            }
        }
        lock(&under_way).remove(&cluster_id);
    });
}

/// One refresh of one cluster.
struct Refresh {
    service: ExternalResourceService,
    line: LocalWaitQueue,
    kept: PreparationCache,
    cluster_id: i64,
    lease: Uuid,
}

impl Refresh {
    async fn run(&self, session: &mut Session) -> Result<(), StoreError> {
        let (cluster_id, lease) = (self.cluster_id, self.lease);
        let taken = within_timeout(external_refresh::take(session.get().await?, cluster_id, lease)).await?;
        let Some(taken) = taken else { return Ok(()) };
        if taken.is_gone {
            for _ in 0..CLEAN_STEPS_MAX {
                if !within_timeout(external_refresh::clean_gone(session.get().await?, cluster_id, lease)).await? {
                    break;
                }
            }
            return Ok(());
        }
        let kept = self.valid_preparation(session, &taken).await?;
        // A cached preparation must be updated with tickets that ended after it.
        self.clean(session, kept.as_ref().map_or(i64::MAX, |kept| kept.changes)).await?;
        let rows = external_queue::clusters(session.get().await?, &[cluster_id].into(), false).await?;
        let Some(row) = rows.first() else { return Ok(()) };
        let (provider, rules) = (row.provider.clone(), row.rules);
        let selector = ProviderSelector {
            resource_type: provider.resource_type.clone(),
            by: ProviderKey::Name(provider.name.clone()),
        };
        // The provider was just deleted, or a later release wrote it.
        let Ok(source) = self.service.source(&selector).await else { return Ok(()) };
        session.give_back().await;
        let asked = timeout(ASK_TIMEOUT, self.ask(&source, taken.begun)).await;
        let interval = Duration::try_from(rules.refresh_interval).unwrap_or(PROBE_INTERVAL);
        let snapshot = match asked {
            Ok(Ok(snapshot)) => Arc::new(snapshot),
            Ok(Err(error)) => return self.failed(session, &provider.name, Some(&error), interval, kept.ok()).await,
            Err(_) => return self.failed(session, &provider.name, None, interval, kept.ok()).await,
        };
        let generation = within_timeout(external_snapshot::write(session.get().await?, cluster_id, &snapshot)).await?;
        match self.prepare(session, snapshot, kept).await? {
            Some(prepared) => self.install(session, &provider.name, generation, prepared).await,
            None => Ok(()),
        }
    }

    /// Returns the updated preparation from the cache, or the reason why there is no valid one.
    async fn valid_preparation(
        &self,
        session: &mut Session,
        taken: &RefreshLease,
    ) -> Result<Result<PreparedSnapshot, &'static str>, StoreError> {
        let Some((lease, mut kept)) = self.kept.take(self.cluster_id) else { return Ok(Err("new")) };
        if taken.before != Some(lease) {
            return Ok(Err("superseded"));
        }
        let connection = session.get().await?;
        let Some(behind) = within_timeout(external_snapshot::behind(connection, self.cluster_id, &kept)).await? else {
            return Ok(Err("renumbered"));
        };
        if usize::try_from(behind).is_ok_and(|behind| behind <= kept.preparation.tickets().max(BEHIND_MAX)) {
            let is_there = self.catch_up(session, &mut kept).await?;
            return Ok(if is_there { Ok(kept) } else { Err("new") });
        }
        Ok(Err("outdated"))
    }

    /// Counts what the snapshot does not show: by the cached preparation, or by all live tickets. `None` if the cluster was
    /// deleted.
    async fn prepare(
        &self,
        session: &mut Session,
        snapshot: Arc<ClusterSnapshot>,
        kept: Result<PreparedSnapshot, &'static str>,
    ) -> Result<Option<PreparedSnapshot>, StoreError> {
        let external = &self.service.metrics.external;
        let why = match kept {
            Err(why) => why,
            Ok(mut kept) => {
                let connection = session.get().await?;
                let renewed = external_snapshot::renew(connection, self.cluster_id, &mut kept, snapshot.clone());
                if within_timeout(renewed).await? {
                    external.prepared("kept");
                    return Ok(Some(kept));
                }
                // The database's clock was set back.
                "renumbered"
            }
        };
        let prepared = external_snapshot::prepare(session.get().await?, self.cluster_id, snapshot).await?;
        if let Some(prepared) = &prepared {
            external.prepared(why);
            external.read("all", prepared.preparation.tickets());
        }
        Ok(prepared)
    }

    /// Puts a prepared snapshot into force, and caches the preparation for the next one.
    async fn install(
        &self,
        session: &mut Session,
        provider: &Name,
        generation: i64,
        mut prepared: PreparedSnapshot,
    ) -> Result<(), StoreError> {
        let (cluster_id, lease) = (self.cluster_id, self.lease);
        let keeps = self.kept.has_room(prepared.preparation.tickets());
        for _ in 0..INSTALL_TRIES_MAX {
            if !self.catch_up(session, &mut prepared).await? {
                return Ok(());
            }
            let (connection, lease) = (session.get().await?, (lease, keeps));
            let installed = external_snapshot::install(connection, cluster_id, lease, generation, &mut prepared);
            match within_timeout(installed).await? {
                InstallResult::InForce(changed) => {
                    self.service.metrics.external.refreshed("ok");
                    self.service.metrics.external.read("changed", changed);
                    self.wake(session, provider, prepared.preparation.rooms()).await?;
                    if keeps {
                        self.kept.put(cluster_id, self.lease, prepared);
                    }
                    return Ok(());
                }
                InstallResult::Outrun => {}
                InstallResult::Superseded => {
                    self.service.metrics.external.refreshed("superseded");
                    return Ok(());
                }
            }
        }
        Err(StoreError::inconsistent("linkis_external_ticket", "more changes than a snapshot can apply"))
    }

    /// Updates the preparation before any lock is taken. Returns false if the cluster was deleted.
    async fn catch_up(&self, session: &mut Session, prepared: &mut PreparedSnapshot) -> Result<bool, StoreError> {
        let mut looks = 0;
        while looks < CATCH_UPS_MAX {
            let connection = session.get().await?;
            let caught_up = within_timeout(external_snapshot::catch_up(connection, self.cluster_id, prepared)).await?;
            let Some(changed) = caught_up else { return Ok(false) };
            self.service.metrics.external.read("changed", changed);
            if changed <= CAUGHT_UP {
                break;
            }
            // Full pages are older changes, which are finite; only other pages count.
            looks += u32::from(changed < external_snapshot::CATCH_UP_PAGE);
        }
        Ok(true)
    }

    /// Fetches the snapshot. Applications are read before and after the queues, so that use counts as included only if it
    /// certainly is.
    async fn ask(&self, source: &ProviderSource, begun: time::OffsetDateTime) -> Result<ClusterSnapshot, FetchError> {
        let http = &self.service.http;
        let before = source.cluster.applications(http).await?;
        let queues = source.cluster.queues(http).await?;
        let after = source.cluster.applications(http).await?;
        Ok(ClusterSnapshot::new(begun, &before, queues, &after))
    }

    async fn failed(
        &self,
        session: &mut Session,
        provider: &Name,
        error: Option<&FetchError>,
        interval: Duration,
        kept: Option<PreparedSnapshot>,
    ) -> Result<(), StoreError> {
        self.service.metrics.external.refreshed(error.map_or("timeout", FetchError::class));
        let (connection, pauses) = (session.get().await?, [interval, interval.max(PROBE_INTERVAL)]);
        let (cluster_id, lease, keeps) = (self.cluster_id, self.lease, kept.is_some());
        let failures = within_timeout(external_refresh::failed(connection, cluster_id, lease, pauses, keeps)).await?;
        if let Some(kept) = kept.filter(|_| failures.is_some()) {
            self.kept.put(cluster_id, lease, kept);
        }
        // Logged once, not at each failure.
        if failures == Some(1) {
            let why = error.map_or_else(|| "no reply in time".to_owned(), ToString::to_string);
            tracing::warn!(%provider, why, "the queues of an external cluster cannot be read");
        }
        Ok(())
    }

    /// Wakes requests that wait for external queues with free capacity, here and on other instances.
    async fn wake(&self, session: &mut Session, provider: &Name, rooms: &QueueCapacities) -> Result<(), StoreError> {
        let connection = session.get().await?;
        let wait_keys = within_timeout(waiting::queues(&mut *connection, provider, WOKEN_QUEUES_MAX)).await?;
        let mut freed = FreedKeys::default();
        for wait_key in wait_keys {
            if let WaitKey::Queue { path, .. } = &wait_key {
                let room = rooms.room(path);
                if room.memory > 0 || room.cores > 0 {
                    freed.add(wait_key, MUCH);
                }
            }
        }
        if freed.is_empty() {
            return Ok(());
        }
        let own = self.line.instance_id();
        let parts: Vec<FreedNotification> =
            FreedNotification::at(&freed).into_iter().map(|part| part.from(own)).collect();
        within_timeout(waiting::notify(connection, &parts)).await?;
        self.line.committed(&freed, iter::empty(), true);
        Ok(())
    }

    async fn clean(&self, session: &mut Session, known: i64) -> Result<(), StoreError> {
        let begun = Instant::now();
        while begun.elapsed() < CLEAN_MAX {
            if !within_timeout(external_refresh::clean(session.get().await?, self.cluster_id, known)).await? {
                break;
            }
        }
        Ok(())
    }
}

impl ExternalResourceService {
    /// Creates clusters for all current providers and deletes all others.
    async fn reconcile(&self, session: &mut Session) -> Result<(), Error> {
        let providers = within_timeout(super::table::read(&self.store.pool().await?)).await?;
        let known = within_timeout(external_refresh::known(&self.store.pool().await?)).await?;
        let is_known = providers.len() == known.len()
            && providers.iter().zip(&known).all(|(record, (resource_type, name, etag))| {
                record.provider.resource_type.as_str() == resource_type
                    && record.provider.name.as_str() == name
                    && record.etag == *etag
            });
        if is_known {
            return Ok(());
        }
        let (mut transaction, records) = begin(session).await?;
        let known = within_timeout(external_refresh::known(&mut *transaction)).await?;
        for record in &records {
            let (resource_type, name) = (record.provider.resource_type.as_str(), record.provider.name.as_str());
            if known
                .iter()
                .any(|known| (known.0.as_str(), known.1.as_str(), known.2) == (resource_type, name, record.etag))
            {
                continue;
            }
            let rules = super::cluster(record).map_or(rm_external::check::DEFAULT, |cluster| cluster.rules());
            within_timeout(external_refresh::put(&mut transaction, &record.provider, record.etag, &rules)).await?;
        }
        for (resource_type, name, _) in &known {
            let is_there = |record: &super::ProviderRecord| {
                record.provider.resource_type.as_str() == resource_type && record.provider.name.as_str() == name
            };
            if !records.iter().any(is_there) {
                within_timeout(external_refresh::delete(&mut transaction, resource_type, name)).await?;
            }
        }
        commit(transaction).await
    }
}
