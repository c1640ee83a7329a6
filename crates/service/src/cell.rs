//! Cell: starts the services and background tasks over the tables of one cell.
//!
//! [`CellServices::start`] creates every object once and connects them. A background task of a cell never touches the
//! tables of another. Caller: the server of the root package, once at its start.

use std::{io, sync::Arc, time::Duration};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use rm_external::{allowed::AllowedHosts, http::ClusterHttp};
use rm_store::Store;
use rm_telemetry::metrics::Metrics;

use crate::{
    admission::{Admission, StateCache},
    audit::AuditService,
    background::{
        Driver,
        announce::AnnounceInstance,
        build_indexes::BuildIndexes,
        cluster_figures::ExportClusterFigures,
        count_label_sets::CountLabelSets,
        expiry,
        fullest::{FullestScopes, RefreshFullest},
        holds::EndHolds,
        lease::RenewLease,
        lost_ems::DetectLostEms,
        prune_counters::PruneCounters,
        prune_history::PruneHistory,
        reclaim::{EngineStops, ReclaimIdle, RefreshEngineStops},
        refusals::FlushRefusals,
        self_audit::ScheduledAudit,
        unregister::FinishUnregistrations,
        usage::RollUpUsage,
        user_sums::SumByUser,
    },
    committer::{CommitListeners, Committer},
    external::{ExternalResourceService, refresh},
    follow::FollowService,
    heartbeat::{HeartbeatService, LivenessTimeouts},
    holds::HoldService,
    idle_amounts::IdleAmounts,
    limits::LimitService,
    overview::OverviewService,
    reclaims::ReclaimService,
    refusals::RefusalRecorder,
    request_resource::RequestResourceService,
    tasks::InstanceTasks,
    ticket_lookup::TicketLookup,
    tokens::{RefreshTokens, TokenCache},
    usage::UsageQueries,
    waiting::{self, LocalWaitQueue},
};

/// Settings of a cell.
#[derive(Debug)]
pub struct CellSettings {
    /// Timeouts of missing heartbeats.
    pub liveness: LivenessTimeouts,
    /// Retention time of ended tickets and request ids.
    pub history: Duration,
    /// Maximum number of waiting requests.
    pub waiting_max: usize,
    /// Network hosts at which external clusters may be called.
    pub external_hosts: AllowedHosts,
}

/// Identity, settings and objects of the instance that its cells share.
#[derive(Debug)]
pub struct InstanceContext<'a> {
    /// Identifier of the instance.
    pub id: Uuid,
    /// Address for gRPC, as other instances read it.
    pub address: String,
    /// Settings of each cell.
    pub settings: CellSettings,
    /// Metrics of the instance.
    pub metrics: &'a Metrics,
    /// Tasks of the instance, which the background tasks join.
    pub tasks: &'a InstanceTasks,
    /// Cancelled when the instance stops.
    pub stopping: &'a CancellationToken,
    /// Tokens of the instance, which one of its tasks reads again.
    pub tokens: &'a TokenCache,
}

/// Services of a cell. Its background work continues until the instance stops.
pub struct CellServices {
    /// Decides and writes; the only writer of tickets and counters.
    pub committer: Committer,
    /// Decides requests for resources.
    pub request_resource: RequestResourceService,
    /// Receives heartbeats.
    pub heartbeat: HeartbeatService,
    /// Completes references to tickets.
    pub tickets: TicketLookup,
    /// Wakes the task that ends the tickets of unregistering EMs.
    pub em_goes: Arc<Notify>,
    /// Audits and repairs the counters.
    pub audit: AuditService,
    /// Resource holds.
    pub holds: HoldService,
    /// Chosen tickets.
    pub reclaims: ReclaimService,
    /// Limits and policies.
    pub limits: LimitService,
    /// Reads of EMs, tickets and history.
    pub usage: UsageQueries,
    /// Overviews of the cluster.
    pub overviews: OverviewService,
    /// The fullest scopes.
    pub fullest: FullestScopes,
    /// Streams of the history.
    pub follow: FollowService,
    /// External clusters and queues.
    pub external: ExternalResourceService,
}

impl CellServices {
    /// Starts the services of the cell whose tables `store` has.
    ///
    /// # Errors
    /// Errors of the system if the committer gets no thread.
    pub fn start(instance: &InstanceContext<'_>, store: &Store) -> io::Result<Self> {
        let &InstanceContext { id, ref settings, metrics, tasks, stopping, .. } = instance;
        let liveness = settings.liveness;
        let seen = StateCache::new(liveness.report_interval(), metrics.clone());
        let (expiring_soon, expiring) = expiry::channel();
        let (line, leaving) =
            LocalWaitQueue::new(store.clone(), id, settings.waiting_max, metrics.clone(), tasks, stopping.clone());
        let after_commit = CommitListeners {
            seen: seen.clone(),
            expiring_soon: expiring_soon.clone(),
            abandoned: line.leaving(),
            line: line.clone(),
        };
        let committer = Committer::start(store.clone(), after_commit, metrics.clone(), tasks)?;
        let admission = Admission::start(store, seen.clone(), liveness, tasks);
        let (em_goes, counting) = (Arc::<Notify>::default(), Arc::<Notify>::default());
        let turned_down = expiry::RejectedTimers::default();
        tasks.spawn(expiry::run_timers(committer.clone(), expiring, turned_down.clone(), stopping.clone()));
        let driver = Driver::new(store.clone(), tasks.clone(), metrics.clone(), stopping.clone());
        let (holder, wake) = (driver.holder(), Arc::default);
        driver.start(expiry::ExpirySweep::new(expiring_soon, turned_down, holder.clone(), metrics.clone()), wake());
        driver.start(DetectLostEms::new(committer.clone(), liveness, holder.clone(), admission.surveys()), wake());
        let refusals = RefusalRecorder::new(metrics.clone());
        driver.start(FlushRefusals::new(refusals.clone(), line.instance_id(), metrics.clone()), wake());
        driver.start(
            FinishUnregistrations::new(committer.clone(), holder.clone(), metrics.jobs("em_goes")),
            em_goes.clone(),
        );
        let jobs = metrics.jobs("label_sets");
        driver.start(CountLabelSets::new(committer.clone(), holder.clone(), jobs), counting.clone());
        let audit = AuditService::new(store.clone());

        tasks.spawn(waiting::run(line.clone(), leaving));
        tasks.spawn(waiting::renew(line.clone()));
        tasks.spawn(waiting::listen(line.clone(), admission.clone()));

        driver.start(EndHolds(admission.clone()), Arc::default());
        let holds = HoldService::new(store.clone(), admission.clone());
        let limits = LimitService::new(store.clone(), counting);
        let request_resource = RequestResourceService::new(
            admission,
            committer.clone(),
            line.clone(),
            limits.clone(),
            refusals,
            IdleAmounts::start(store, seen.clone(), metrics.clone(), tasks, stopping.clone()),
            metrics.clone(),
        );
        let (overviews, fullest) = overviews(instance, store, &driver);
        spawn_maintenance(instance, store, &driver, audit.clone(), fullest.clone());
        let stops = EngineStops::default();
        driver.start(RefreshEngineStops::new(stops.clone()), Arc::default());
        let heartbeat = HeartbeatService::start(store, seen, committer.clone(), liveness, stops, tasks);
        let follow = FollowService::new(store.clone(), metrics.clone(), tasks);
        tasks.spawn(follow.clone().read_on(stopping.clone()));
        let external = ClusterHttp::new(settings.external_hosts.clone());
        let external = ExternalResourceService::new(store.clone(), external, metrics.clone());
        tasks.spawn(refresh(external.clone(), line, tasks.clone(), stopping.clone()));
        Ok(Self {
            committer,
            request_resource,
            heartbeat,
            tickets: TicketLookup::start(store, tasks),
            em_goes,
            audit,
            holds,
            reclaims: ReclaimService::new(store.clone()),
            limits,
            usage: UsageQueries::new(store.clone(), liveness.silent_after),
            overviews,
            fullest,
            follow,
            external,
        })
    }
}

/// Creates the overviews of a cell and starts their sources: the list of the fullest scopes, and the announcements of
/// the instance.
fn overviews(instance: &InstanceContext<'_>, store: &Store, driver: &Driver) -> (OverviewService, FullestScopes) {
    let fullest = FullestScopes::default();
    driver.start(RefreshFullest::new(fullest.clone()), Arc::default());
    let announcing =
        AnnounceInstance::new(instance.id, instance.address.clone(), instance.metrics.clone(), driver.running());
    driver.start(announcing, Arc::default());
    let silent_after = instance.settings.liveness.silent_after;
    let (metrics, tasks) = (instance.metrics.clone(), instance.tasks);
    (OverviewService::new(store.clone(), silent_after, fullest.clone(), metrics, tasks), fullest)
}

/// Starts the background tasks that serve no call: deletion of expired rows, sums, and audits.
fn spawn_maintenance(
    instance: &InstanceContext<'_>,
    store: &Store,
    driver: &Driver,
    audit: AuditService,
    scopes: FullestScopes,
) {
    driver.start(RefreshTokens::new(instance.tokens.clone()), Arc::default());
    driver.start(RenewLease::new(instance.id, driver.holder()), Arc::default());
    driver.start(PruneHistory::new(instance.settings.history, store.schema_session()), Arc::default());
    driver.start(BuildIndexes::new(store.schema_session()), Arc::default());
    driver.start(PruneCounters::default(), Arc::default());
    driver.start(RollUpUsage::default(), Arc::default());
    driver.start(SumByUser::new(driver.holder(), instance.metrics.clone()), Arc::default());
    driver.start(ScheduledAudit::new(store.clone(), audit), Arc::default());
    let (silent_after, metrics) = (instance.settings.liveness.silent_after, instance.metrics.cluster.clone());
    driver.start(ReclaimIdle::new(driver.holder(), silent_after, instance.metrics.clone()), Arc::default());
    let cluster = ExportClusterFigures::new(store.clone(), driver.holder(), silent_after, scopes, metrics);
    driver.start(cluster, Arc::default());
}
