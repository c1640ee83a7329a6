//! Health: publishes whether the instance accepts calls, over gRPC and HTTP. Caller: the server.

use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic_health::server::HealthReporter;

use rm_edge::{admin::AdminRpc, external::ExternalResourceRpc, http::Readiness, resource_manager::ResourceManagerRpc};
use rm_proto::v1::{
    admin_service_server::AdminServiceServer, external_resource_service_server::ExternalResourceServiceServer,
    limit_service_server::LimitServiceServer, resource_manager_service_server::ResourceManagerServiceServer,
    usage_service_server::UsageServiceServer,
};
use rm_store::Store;
use rm_telemetry::metrics::{Metrics, components::PoolConnections};

/// Interval between two publications without a change.
const HEALTH_INTERVAL: Duration = Duration::from_secs(1);

/// Service name whose status is SERVING while the process runs, in every other condition.
pub(super) const LIVENESS: &str = "liveness";

/// Publishers of the readiness.
pub(super) struct HealthState {
    pub grpc: HealthReporter,
    pub readiness: watch::Sender<Readiness>,
    pub metrics: Metrics,
}

/// Publishes the readiness until the server stops: ready while the database accepts writes.
pub(super) async fn watch_health(health: HealthState, store: Store, stopping: CancellationToken) {
    // An orchestrator that checks this service does not restart an instance because of its database.
    health.grpc.set_service_status(LIVENESS, tonic_health::ServingStatus::Serving).await;
    loop {
        let changed = store.primary().changed();
        let database = store.primary().standing();
        health.metrics.database.observe(
            database
                .as_ref()
                .ok()
                .map(|found| PoolConnections { open: found.pool.size(), idle: found.pool.num_idle() }),
        );
        health.publish(database.map_or_else(|why| Readiness::NoDatabase(why.to_string()), |_| Readiness::Ready)).await;
        tokio::select! {
            biased;
            () = stopping.cancelled() => break,
            () = changed => {}
            () = tokio::time::sleep(HEALTH_INTERVAL) => {}
        }
    }
    health.publish(Readiness::Stopping).await;
}

impl HealthState {
    /// Publishes a readiness over gRPC and HTTP.
    pub async fn publish(&self, readiness: Readiness) {
        let is_ready = readiness == Readiness::Ready;
        let _ = self.readiness.send_replace(readiness);
        if is_ready {
            self.grpc.set_serving::<ResourceManagerServiceServer<ResourceManagerRpc>>().await;
            self.grpc.set_serving::<UsageServiceServer<rm_edge::usage::UsageRpc>>().await;
            self.grpc.set_serving::<LimitServiceServer<rm_edge::limit::LimitRpc>>().await;
            self.grpc.set_serving::<AdminServiceServer<AdminRpc>>().await;
            self.grpc.set_serving::<ExternalResourceServiceServer<ExternalResourceRpc>>().await;
            self.grpc.set_service_status("", tonic_health::ServingStatus::Serving).await;
        } else {
            self.grpc.set_not_serving::<ResourceManagerServiceServer<ResourceManagerRpc>>().await;
            self.grpc.set_not_serving::<UsageServiceServer<rm_edge::usage::UsageRpc>>().await;
            self.grpc.set_not_serving::<LimitServiceServer<rm_edge::limit::LimitRpc>>().await;
            self.grpc.set_not_serving::<AdminServiceServer<AdminRpc>>().await;
            self.grpc.set_not_serving::<ExternalResourceServiceServer<ExternalResourceRpc>>().await;
            self.grpc.set_service_status("", tonic_health::ServingStatus::NotServing).await;
        }
    }
}
