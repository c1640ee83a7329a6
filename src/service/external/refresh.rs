//! Snapshots of clusters, by which requests are judged in their queues: one instance asks, under a lease, and all judge by what it wrote.
//!
//! Nobody who asks for resources waits for a cluster: a snapshot is in use until the next one comes into force, and one that fails costs
//! its task and nobody else.

use std::{
    collections::HashSet,
    iter,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::{interval, timeout};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    domain::{
        external::{Rooms, Snapshot},
        line::{FreedSpots, MUCH, Spot},
        name::Name,
    },
    error::Error,
    external::{self, FetchError},
    service::{tasks::Tasks, waiting::WaitingLine},
    store::{
        StoreError, external_queue,
        external_refresh::{self, Installed, Prepared},
        session::{Session, answered},
        waiting::{self, Freed},
    },
};

use super::{ExternalResourceService, SelectBy, Selector, Source, begin, commit};

/// How often to look which clusters are to be asked.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// In how many looks it is made sure that there are clusters for all providers, and for no others.
const LOOKS_PER_RECONCILIATION: u32 = 40;

/// How long a cluster has to answer all that it is asked for a snapshot.
const ASK_TIMEOUT: Duration = Duration::from_secs(15);

/// How long all of it may take: as long as the lease lasts.
const REFRESH_TIMEOUT: Duration = external_refresh::LEASE;

/// How long a cluster rests that failed several times, if it is not asked less often anyway.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);

/// How often a snapshot is to come into force, if too much changes each time until it could.
const INSTALL_TRIES_MAX: u32 = 5;

/// How often what was prepared is brought up to date before that, and when it is: if so few tickets changed meanwhile.
const CATCH_UPS_MAX: u32 = 20;
const CAUGHT_UP: usize = 32;

/// At how many queues waiters are woken at once; the others look from time to time.
const WOKEN_QUEUES_MAX: i64 = 1000;

/// In how many steps what is old is removed at once; the next refresh removes the rest.
const CLEAN_STEPS_MAX: usize = 20;

/// The clusters that this instance is just asking.
type UnderWay = Arc<Mutex<HashSet<i64>>>;

/// Asks the clusters that are due, until the server stops.
pub async fn run(service: ExternalResourceService, line: WaitingLine, tasks: Tasks, stopping: CancellationToken) {
    let mut session = service.store.session();
    let mut looks = interval(LOOK_INTERVAL);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (under_way, mut count, mut failed) = (UnderWay::default(), 0_u32, false);
    loop {
        tokio::select! {
            () = stopping.cancelled() => return,
            () = service.changed.notified() => {}
            _ = looks.tick() => {}
        }
        let reconciles = count.is_multiple_of(LOOKS_PER_RECONCILIATION);
        count = count.wrapping_add(1);
        match look(&service, &mut session, reconciles).await {
            Ok(due) => {
                failed = false;
                for cluster_id in due {
                    start(cluster_id, &service, &line, &under_way, &tasks, &stopping);
                }
            }
            Err(error) => {
                session.reset();
                if !failed {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "cannot look which clusters are to be asked"
                    );
                }
                failed = true;
            }
        }
    }
}

async fn look(service: &ExternalResourceService, session: &mut Session, reconciles: bool) -> Result<Vec<i64>, Error> {
    if reconciles {
        service.reconcile(session).await?;
    }
    Ok(answered(external_refresh::due(session.get().await?)).await?)
}

/// Has a cluster asked, unless this instance does so already.
fn start(
    cluster_id: i64,
    service: &ExternalResourceService,
    line: &WaitingLine,
    under_way: &UnderWay,
    tasks: &Tasks,
    stopping: &CancellationToken,
) {
    let is_new = under_way.lock().unwrap_or_else(PoisonError::into_inner).insert(cluster_id);
    if !is_new {
        return;
    }
    let refresh = Refresh { service: service.clone(), line: line.clone(), cluster_id, lease: Uuid::new_v4() };
    let (under_way, stopping) = (under_way.clone(), stopping.clone());
    tasks.spawn(async move {
        let mut session = refresh.service.store.session();
        let done = stopping.run_until_cancelled(timeout(REFRESH_TIMEOUT, refresh.run(&mut session))).await;
        if !matches!(done, Some(Ok(Ok(())))) {
            if let Some(Ok(Err(error))) = &done {
                tracing::warn!(error = error as &dyn std::error::Error, "a snapshot of a cluster could not be stored");
                refresh.service.metrics.external.refreshed("store");
            }
            // Another may try at once; without the database, when the lease is over.
            session.reset();
            let pause = if done.is_none() { Duration::ZERO } else { PROBE_INTERVAL };
            if let Ok(connection) = session.get().await {
                let _ = answered(external_refresh::failed(connection, cluster_id, refresh.lease, pause, pause)).await;
            }
        }
        under_way.lock().unwrap_or_else(PoisonError::into_inner).remove(&cluster_id);
    });
}

/// One snapshot of one cluster.
struct Refresh {
    service: ExternalResourceService,
    line: WaitingLine,
    cluster_id: i64,
    lease: Uuid,
}

impl Refresh {
    async fn run(&self, session: &mut Session) -> Result<(), StoreError> {
        let (cluster_id, lease) = (self.cluster_id, self.lease);
        let taken = answered(external_refresh::take(session.get().await?, cluster_id, lease)).await?;
        let Some((begun, is_gone)) = taken else { return Ok(()) };
        if is_gone {
            for _ in 0..CLEAN_STEPS_MAX {
                if !answered(external_refresh::clean_gone(session.get().await?, cluster_id, lease)).await? {
                    break;
                }
            }
            return Ok(());
        }
        self.clean(session).await?;
        let rows = external_queue::clusters(session.get().await?, &[cluster_id].into(), false).await?;
        let Some(row) = rows.first() else { return Ok(()) };
        let (provider, rules) = (row.provider()?, row.rules()?);
        let selector =
            Selector { resource_type: provider.resource_type.clone(), by: SelectBy::Name(provider.name.clone()) };
        // Gone just now, or written by a later release.
        let Ok(source) = self.service.source(&selector).await else { return Ok(()) };
        let asked = timeout(ASK_TIMEOUT, self.ask(&source, begun)).await;
        let interval = Duration::try_from(rules.refresh_interval).unwrap_or(PROBE_INTERVAL);
        let snapshot = match asked {
            Ok(Ok(snapshot)) => Arc::new(snapshot),
            Ok(Err(error)) => return self.failed(session, &provider.name, Some(&error), interval).await,
            Err(_) => return self.failed(session, &provider.name, None, interval).await,
        };
        let generation = answered(external_refresh::write(session.get().await?, cluster_id, &snapshot)).await?;
        let prepared = external_refresh::prepare(session.get().await?, cluster_id, snapshot.clone()).await?;
        let Some(mut prepared) = prepared else { return Ok(()) };
        for _ in 0..INSTALL_TRIES_MAX {
            if !self.catch_up(session, &mut prepared).await? {
                return Ok(());
            }
            let connection = session.get().await?;
            match answered(external_refresh::install(connection, cluster_id, lease, generation, &mut prepared)).await? {
                Installed::InForce => {
                    self.service.metrics.external.refreshed("ok");
                    return self.wake(session, &provider.name, prepared.preparation.rooms()).await;
                }
                Installed::Outrun => {}
                Installed::Superseded => {
                    self.service.metrics.external.refreshed("superseded");
                    return Ok(());
                }
            }
        }
        Err(StoreError::inconsistent("linkis_external_ticket", "more changes than a snapshot can catch up with"))
    }

    /// Brings what was prepared up to date, while nobody waits for it; false if the cluster is gone.
    async fn catch_up(&self, session: &mut Session, prepared: &mut Prepared) -> Result<bool, StoreError> {
        for _ in 0..CATCH_UPS_MAX {
            let connection = session.get().await?;
            match answered(external_refresh::catch_up(connection, self.cluster_id, prepared)).await? {
                None => return Ok(false),
                Some(changed) if changed <= CAUGHT_UP => break,
                Some(_) => {}
            }
        }
        Ok(true)
    }

    /// What the cluster says: applications before and after its queues, so that nothing is taken to be included which is not.
    async fn ask(&self, source: &Source, begun: time::OffsetDateTime) -> Result<Snapshot, FetchError> {
        let http = &self.service.http;
        let before = source.cluster.applications(http).await?;
        let queues = source.cluster.queues(http).await?;
        let after = source.cluster.applications(http).await?;
        Ok(Snapshot::new(begun, &before, queues, &after))
    }

    async fn failed(
        &self,
        session: &mut Session,
        provider: &Name,
        error: Option<&FetchError>,
        interval: Duration,
    ) -> Result<(), StoreError> {
        self.service.metrics.external.refreshed(error.map_or("timeout", FetchError::class));
        let (connection, long) = (session.get().await?, interval.max(PROBE_INTERVAL));
        let failures =
            answered(external_refresh::failed(connection, self.cluster_id, self.lease, interval, long)).await?;
        // Once, and not each time.
        if failures == Some(1) {
            let why = error.map_or_else(|| "it did not answer in time".to_owned(), ToString::to_string);
            tracing::warn!(%provider, why, "a cluster does not tell what its queues have");
        }
        Ok(())
    }

    /// Wakes those who wait for queues that have room now, here and on other instances.
    async fn wake(&self, session: &mut Session, provider: &Name, rooms: &Rooms) -> Result<(), StoreError> {
        let connection = session.get().await?;
        let spots = answered(waiting::queues(&mut *connection, provider, WOKEN_QUEUES_MAX)).await?;
        let mut freed = FreedSpots::default();
        for spot in spots {
            if let Spot::Queue { path, .. } = &spot {
                let room = rooms.room(path);
                if room.memory > 0 || room.cores > 0 {
                    freed.note(spot, MUCH);
                }
            }
        }
        if freed.is_empty() {
            return Ok(());
        }
        let own = self.line.instance_id();
        let parts: Vec<Freed> = Freed::at(&freed).into_iter().map(|part| part.from(own)).collect();
        answered(waiting::notify(connection, &parts)).await?;
        self.line.committed(&freed, iter::empty(), true);
        Ok(())
    }

    async fn clean(&self, session: &mut Session) -> Result<(), StoreError> {
        for _ in 0..CLEAN_STEPS_MAX {
            if !answered(external_refresh::clean(session.get().await?, self.cluster_id)).await? {
                break;
            }
        }
        Ok(())
    }
}

impl ExternalResourceService {
    /// Makes sure that there are clusters for all providers as they are now, and for no others: those of an earlier release had none.
    async fn reconcile(&self, session: &mut Session) -> Result<(), Error> {
        let providers = answered(super::table::read(&self.store.pool().await?)).await?;
        let known = answered(external_refresh::known(&self.store.pool().await?)).await?;
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
        let known = answered(external_refresh::known(&mut *transaction)).await?;
        for record in &records {
            let (resource_type, name) = (record.provider.resource_type.as_str(), record.provider.name.as_str());
            if known
                .iter()
                .any(|known| (known.0.as_str(), known.1.as_str(), known.2) == (resource_type, name, record.etag))
            {
                continue;
            }
            let rules = super::cluster(record).map_or(external::check::DEFAULT, |cluster| cluster.rules());
            answered(super::put_cluster(&mut transaction, &record.provider, record.etag, &rules)).await?;
        }
        for (resource_type, name, _) in &known {
            let is_there = |record: &super::ProviderRecord| {
                record.provider.resource_type.as_str() == resource_type && record.provider.name.as_str() == name
            };
            if !records.iter().any(is_there) {
                answered(external_refresh::delete(&mut transaction, resource_type, name)).await?;
            }
        }
        commit(transaction).await
    }
}
