//! Cell: starts the services and background tasks over the tables of one cell.
//!
//! [`CellServices::start`] creates every object once and connects them. A background task of a cell never touches the
//! tables of another. Caller: `assembly`.

use std::sync::Arc;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use rm_external::http::ClusterHttp;
use rm_service::{
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
        refusals::FlushRefusals,
        self_audit::ScheduledAudit,
        unregister::FinishUnregistrations,
        usage::RollUpUsage,
    },
    committer::{CommitListeners, Committer},
    external::{ExternalResourceService, refresh},
    follow::FollowService,
    heartbeat::HeartbeatService,
    holds::HoldService,
    limits::LimitService,
    overview::OverviewService,
    refusals::RefusalRecorder,
    request_resource::RequestResourceService,
    tasks::InstanceTasks,
    ticket_lookup::TicketLookup,
    usage::UsageQueries,
    waiting::{self, LocalWaitQueue},
};
use rm_store::Store;
use rm_telemetry::metrics::Metrics;

use super::{Options, ServerError};

/// Objects that all cells of an instance share.
pub(super) struct InstanceContext<'a> {
    pub id: Uuid,
    /// Address for gRPC, as other instances read it.
    pub address: String,
    pub options: &'a Options,
    pub metrics: &'a Metrics,
    pub tasks: &'a InstanceTasks,
    pub stopping: &'a CancellationToken,
}

impl<'a> InstanceContext<'a> {
    /// Creates the context of the instance with this identifier and address.
    pub fn new(
        (id, address): (Uuid, String),
        options: &'a Options,
        (metrics, tasks, stopping): (&'a Metrics, &'a InstanceTasks, &'a CancellationToken),
    ) -> Self {
        Self { id, address, options, metrics, tasks, stopping }
    }
}

/// Services of a cell. Its background work continues until the instance stops.
pub(super) struct CellServices {
    /// Runs the background tasks.
    pub driver: Driver,
    pub committer: Committer,
    pub request_resource: RequestResourceService,
    pub heartbeat: HeartbeatService,
    pub tickets: TicketLookup,
    /// Wakes the task that ends the tickets of unregistering EMs.
    pub em_goes: Arc<Notify>,
    pub audit: AuditService,
    pub holds: HoldService,
    pub limits: LimitService,
    pub usage: UsageQueries,
    pub overviews: OverviewService,
    pub fullest: FullestScopes,
    pub follow: FollowService,
    pub external: ExternalResourceService,
}

impl CellServices {
    /// Starts the services of the cell whose tables `store` has.
    ///
    /// # Errors
    /// [`ServerError::Thread`] if the committer gets no thread.
    pub fn start(instance: &InstanceContext<'_>, store: &Store) -> Result<Self, ServerError> {
        let &InstanceContext { id, options, metrics, tasks, stopping, .. } = instance;
        let liveness = options.liveness;
        let seen = StateCache::new(metrics.clone());
        let (expiring_soon, expiring) = expiry::channel();
        let (line, leaving) =
            LocalWaitQueue::new(store.clone(), id, options.bounds.waiting, metrics.clone(), tasks, stopping.clone());
        let after_commit = CommitListeners {
            seen: seen.clone(),
            expiring_soon: expiring_soon.clone(),
            abandoned: line.leaving(),
            line: line.clone(),
        };
        let committer = Committer::start(store.clone(), after_commit, metrics.clone(), tasks);
        let committer = committer.map_err(ServerError::Thread)?;
        let admission = Admission::start(store, seen.clone(), liveness.silent_after, tasks);
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

        let limits = LimitService::new(store.clone(), counting);
        let request_resource = RequestResourceService::new(
            admission,
            committer.clone(),
            line.clone(),
            limits.clone(),
            refusals,
            metrics.clone(),
        );
        let (overviews, fullest) = overviews(instance, store, &driver);
        spawn_maintenance(instance, store, &driver, audit.clone(), fullest.clone());
        let heartbeat = HeartbeatService::start(store, seen, committer.clone(), liveness, tasks);
        let follow = FollowService::new(store.clone(), metrics.clone(), tasks);
        tasks.spawn(follow.clone().read_on(stopping.clone()));
        let external = ClusterHttp::new(options.external_hosts.clone());
        let external = ExternalResourceService::new(store.clone(), external, metrics.clone());
        tasks.spawn(refresh(external.clone(), line, tasks.clone(), stopping.clone()));
        Ok(Self {
            driver,
            committer,
            request_resource,
            heartbeat,
            tickets: TicketLookup::start(store, tasks),
            em_goes,
            audit,
            holds: HoldService::new(store.clone()),
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
    let silent_after = instance.options.liveness.silent_after;
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
    let options = instance.options;
    driver.start(RenewLease::new(instance.id, driver.holder()), Arc::default());
    driver.start(PruneHistory::new(options.history, store.schema_session()), Arc::default());
    driver.start(BuildIndexes::new(store.schema_session()), Arc::default());
    driver.start(PruneCounters::default(), Arc::default());
    driver.start(EndHolds, Arc::default());
    driver.start(RollUpUsage::default(), Arc::default());
    driver.start(ScheduledAudit::new(store.clone(), audit), Arc::default());
    let (silent_after, metrics) = (options.liveness.silent_after, instance.metrics.cluster.clone());
    let cluster = ExportClusterFigures::new(store.clone(), driver.holder(), silent_after, scopes, metrics);
    driver.start(cluster, Arc::default());
}
