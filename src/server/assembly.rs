//! The services of an instance and its background tasks, put together.

use std::{sync::Arc, time::Duration};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    external::http::Http,
    metrics::Metrics,
    service::{
        admission::{Admission, StateCache},
        audit::AuditService,
        background::{
            Driver,
            announcing::Announcing,
            cluster::ClusterAsAWhole,
            counting::CountLabelSets,
            expiry,
            fullest::{FullestScopes, ListFullest},
            going::Going,
            holds::EndHolds,
            indexing::Indexing,
            lease::{Holder, Lease},
            pruning::Pruning,
            refusals::KeepRefusals,
            retention::Retention,
            self_audit::SelfAudit,
            silence::Silence,
            usage::RollUpUsage,
        },
        committer::{AfterCommit, Committer},
        external::{ExternalResourceService, refresh},
        follow::FollowService,
        heartbeat::HeartbeatService,
        holds::HoldService,
        limits::LimitService,
        overview::Overviews,
        refusals::Refusals,
        request_resource::RequestResourceService,
        standby::{Standby, Watching},
        tasks::Tasks,
        ticket_lookup::TicketLookup,
        tokens::{ReadTokens, Tokens},
        usage::Usage,
        waiting::{self, WaitingLine},
    },
    store::Store,
    transport::{
        self,
        admin::Admin,
        edge::Received,
        external::ExternalResource,
        message_size::{LIMITS_BYTES_MAX, Limited, MESSAGE_BYTES_MAX, QUESTION_BYTES_MAX, compressible},
        proto,
        proto::{
            admin_service_server::AdminServiceServer, external_resource_service_server::ExternalResourceServiceServer,
            limit_service_server::LimitServiceServer, usage_service_server::UsageServiceServer,
        },
        resource_manager::ResourceManager,
        routes::Routes,
        server_info::ServerInfo,
    },
};

use super::{Options, ServerError};

/// What people are shown of the whole cluster, and what keeps it: the list of the fullest scopes, and the signs of life of instances.
fn overviews(
    store: &Store,
    metrics: &Metrics,
    tasks: &Tasks,
    driver: &Driver,
    (silent_after, announcing): (Duration, Announcing),
) -> (Overviews, FullestScopes) {
    let fullest = FullestScopes::default();
    driver.start(ListFullest::new(fullest.clone()), Arc::default());
    driver.start(announcing, Arc::default());
    (Overviews::new(store.clone(), silent_after, fullest.clone(), metrics.clone(), tasks), fullest)
}

/// The services of an instance and its background tasks, and what people are shown of the whole cluster.
pub(super) fn assemble(
    instance_id: Uuid,
    store: &Store,
    options: &Options,
    tokens: &Tokens,
    metrics: &Metrics,
    tasks: &Tasks,
    (stopping, address): (&CancellationToken, String),
) -> Result<(Routes<Received>, Overviews), ServerError> {
    let seen = StateCache::new(metrics.clone());
    let (expiring_soon, expiring) = expiry::channel();
    let (line, leaving) =
        WaitingLine::new(store.clone(), instance_id, options.bounds.waiting, metrics.clone(), tasks, stopping.clone());
    let after_commit = AfterCommit {
        seen: seen.clone(),
        expiring_soon: expiring_soon.clone(),
        abandoned: line.leaving(),
        line: line.clone(),
    };
    let info = ServerInfo {
        instance_id,
        times: options.times,
        patience: options.patience,
        history: options.history,
        tls: options.security.tls.is_some(),
    };
    let committer = Committer::start(store.clone(), options.committers, after_commit, metrics.clone(), tasks);
    let committer = committer.map_err(ServerError::Thread)?;
    let admission = Admission::start(store, seen.clone(), options.patience.silent_after, tasks);
    let (em_goes, counting) = (Arc::<Notify>::default(), Arc::<Notify>::default());
    let turned_down = expiry::TurnedDown::default();
    tasks.spawn(expiry::run_timers(committer.clone(), expiring, turned_down.clone(), stopping.clone()));
    let driver = Driver::new(store.clone(), tasks.clone(), metrics.clone(), stopping.clone());
    let (holder, wake) = (Holder::default(), Arc::default);
    driver.start(ReadTokens::new(tokens.clone()), wake());
    driver.start(expiry::Sweep::new(expiring_soon, turned_down, holder.clone(), metrics.clone()), wake());
    driver.start(Silence::new(committer.clone(), options.patience, holder.clone()), wake());
    let refusals = Refusals::new(metrics.clone());
    driver.start(KeepRefusals::new(refusals.clone(), line.instance_id(), metrics.clone()), wake());
    driver.start(Going::new(committer.clone(), holder.clone(), metrics.jobs("em_goes")), em_goes.clone());
    let watch = |watching: Watching| tasks.spawn(watching.run(stopping.clone()));
    let standby = Standby::start(options.standby.clone(), store, instance_id, metrics, watch);
    let audit = AuditService::new(store.clone(), standby.clone());
    let silent_after = options.patience.silent_after;
    driver.start(CountLabelSets::new(committer.clone(), holder.clone(), metrics.jobs("label_sets")), counting.clone());

    tasks.spawn(waiting::run(line.clone(), leaving));
    tasks.spawn(waiting::live(line.clone()));
    tasks.spawn(waiting::listen(line.clone(), admission.clone()));

    let request_resource =
        RequestResourceService::new(admission, committer.clone(), line.clone(), refusals, metrics.clone());
    let announcing = Announcing::new(info.instance_id, address, metrics.clone(), driver.running());
    let (overviews, fullest) = overviews(store, metrics, tasks, &driver, (silent_after, announcing));
    keep_house(&driver, &holder, store, options, audit.clone(), fullest.clone(), metrics);
    let heartbeat = HeartbeatService::start(store, seen, committer.clone(), options.patience, tasks);
    let tickets = TicketLookup::start(store, tasks);
    let admin = Admin::new(
        audit,
        committer.clone(),
        tickets.clone(),
        HoldService::new(store.clone()),
        options.times.request_timeout,
    );
    let manager = ResourceManager::new(committer, request_resource, heartbeat, tickets, em_goes, options.times);
    let limits = LimitService::new(store.clone(), counting);
    let usage = Usage::new(store.clone(), standby, silent_after);
    let follow = FollowService::new(store.clone(), metrics.clone(), tasks);
    tasks.spawn(follow.clone().read_on(stopping.clone()));
    let usage = transport::usage::Usage::new(usage, limits.clone(), overviews.clone(), fullest, follow, info);
    let external = Http::new(options.external_hosts.clone());
    let external = ExternalResourceService::new(store.clone(), external, metrics.clone());
    tasks.spawn(refresh(external.clone(), line, tasks.clone(), stopping.clone()));
    let external = ExternalResource::new(external, options.times.request_timeout);
    let limits = transport::limit::Limit::new(limits, options.times.request_timeout);
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            // So that grpcurl can show the details of errors.
            .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
    };
    let routes = Routes::default()
        .and(Limited::new(manager))
        .and(compressible!(LimitServiceServer::new(limits)).max_decoding_message_size(LIMITS_BYTES_MAX))
        .and(compressible!(UsageServiceServer::new(usage)).max_decoding_message_size(MESSAGE_BYTES_MAX))
        .and(compressible!(ExternalResourceServiceServer::new(external)).max_decoding_message_size(MESSAGE_BYTES_MAX))
        .and(compressible!(AdminServiceServer::new(admin)).max_decoding_message_size(MESSAGE_BYTES_MAX))
        .and(compressible!(reflection().build_v1()?).max_decoding_message_size(QUESTION_BYTES_MAX))
        .and(compressible!(reflection().build_v1alpha()?).max_decoding_message_size(QUESTION_BYTES_MAX));
    Ok((routes, overviews))
}

/// The background tasks that concern no call: what is over goes, and what there is is summed and audited.
fn keep_house(
    driver: &Driver,
    holder: &Holder,
    store: &Store,
    options: &Options,
    audit: AuditService,
    scopes: FullestScopes,
    metrics: &Metrics,
) {
    driver.start(Lease::new(holder.clone()), Arc::default());
    driver.start(Retention::new(options.history, holder.clone(), store.schema_session()), Arc::default());
    driver.start(Indexing::new(holder.clone(), store.schema_session()), Arc::default());
    driver.start(Pruning::new(holder.clone()), Arc::default());
    driver.start(EndHolds::new(holder.clone()), Arc::default());
    driver.start(RollUpUsage::new(holder.clone()), Arc::default());
    driver.start(SelfAudit::new(store.clone(), audit, holder.clone()), Arc::default());
    let (silent_after, metrics) = (options.patience.silent_after, metrics.cluster.clone());
    let cluster = ClusterAsAWhole::new(store.clone(), holder.clone(), silent_after, scopes, metrics);
    driver.start(cluster, Arc::default());
}
