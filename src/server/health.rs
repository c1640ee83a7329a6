//! Who is told whether calls may be sent here.

use std::{fmt, future::Future, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use tokio::{
    net::TcpListener,
    sync::{Notify, mpsc, watch},
    task::JoinSet,
    time::Instant,
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic_health::server::HealthReporter;
use tower_layer::Layer as _;
use uuid::Uuid;

use crate::{
    domain::{
        limit::{Rule, RuleChanges},
        principal::Principal,
    },
    error::Error,
    external::{allowed::AllowedHosts, http::Http},
    http::{
        self, Readiness,
        page::{
            self, Site,
            history::{History, Sources},
            picture::Pictures,
        },
    },
    metrics::Metrics,
    notify,
    service::{
        admission::{Admission, StateCache},
        audit::AuditService,
        background::{
            Driver,
            announcing::{Announcing, told_address},
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
        heartbeat::{HeartbeatService, LivenessTimeouts},
        holds::HoldService,
        jwt::{Jwt, JwtError},
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
    store::{Opening, Store, StoreError, primary::Missing, target::Target},
    tls::{self, Tls, TlsError},
    transport::{
        self,
        admin::Admin,
        edge::{self, Bounds, Calls, Edge, Listen, Listener, Received},
        external::ExternalResource,
        identity::Identity,
        json::Schema,
        message_size::{LIMITS_BYTES_MAX, Limited, MESSAGE_BYTES_MAX, QUESTION_BYTES_MAX, compressible},
        observe::{self, Observe},
        proto,
        proto::{
            admin_service_server::AdminServiceServer, external_resource_service_server::ExternalResourceServiceServer,
            limit_service_server::LimitServiceServer, resource_manager_service_server::ResourceManagerServiceServer,
            usage_service_server::UsageServiceServer,
        },
        resource_manager::{RequestTimeouts, ResourceManager},
        routes::Routes,
        server_info::ServerInfo,
    },
};

/// How often an instance tells how its connections to the database stand.
const HEALTH_INTERVAL: Duration = Duration::from_secs(1);

/// The service that health tells to be there as long as the process is, whatever else is not.
pub(super) const LIVENESS: &str = "liveness";

/// Who is told whether calls may be sent here.
pub(super) struct Health {
    pub grpc: HealthReporter,
    pub readiness: watch::Sender<Readiness>,
    pub metrics: Metrics,
}

/// Tells load balancers whether to send calls here: while the database answers, and until the server is told to stop.
pub(super) async fn watch_health(health: Health, store: Store, stopping: CancellationToken) {
    // Whoever would restart an instance because its database is away asks for this.
    health.grpc.set_service_status(LIVENESS, tonic_health::ServingStatus::Serving).await;
    loop {
        let changed = store.primary().changed();
        let standing = store.primary().standing();
        health.metrics.database.observe(standing.as_ref().ok().map(|found| &found.pool));
        health.publish(standing.map_or_else(Readiness::NoDatabase, |_| Readiness::Ready)).await;
        tokio::select! {
            biased;
            () = stopping.cancelled() => break,
            () = changed => {}
            () = tokio::time::sleep(HEALTH_INTERVAL) => {}
        }
    }
    health.publish(Readiness::Stopping).await;
}

impl Health {
    pub async fn publish(&self, readiness: Readiness) {
        let _ = self.readiness.send_replace(readiness);
        if readiness == Readiness::Ready {
            self.grpc.set_serving::<ResourceManagerServiceServer<ResourceManager>>().await;
            self.grpc.set_serving::<UsageServiceServer<transport::usage::Usage>>().await;
            self.grpc.set_serving::<LimitServiceServer<transport::limit::Limit>>().await;
            self.grpc.set_serving::<AdminServiceServer<Admin>>().await;
            self.grpc.set_serving::<ExternalResourceServiceServer<ExternalResource>>().await;
            self.grpc.set_service_status("", tonic_health::ServingStatus::Serving).await;
        } else {
            self.grpc.set_not_serving::<ResourceManagerServiceServer<ResourceManager>>().await;
            self.grpc.set_not_serving::<UsageServiceServer<transport::usage::Usage>>().await;
            self.grpc.set_not_serving::<LimitServiceServer<transport::limit::Limit>>().await;
            self.grpc.set_not_serving::<AdminServiceServer<Admin>>().await;
            self.grpc.set_not_serving::<ExternalResourceServiceServer<ExternalResource>>().await;
            self.grpc.set_service_status("", tonic_health::ServingStatus::NotServing).await;
        }
    }
}
