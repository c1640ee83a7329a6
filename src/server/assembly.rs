//! Assembly: builds the gRPC routes of an instance from the services of its cell. Caller: the server, once at its
//! start.

use std::sync::Arc;

use tonic_reflection::pb::{v1, v1alpha};

use rm_edge::{
    admin::AdminRpc,
    compressible,
    edge::RequestBody,
    external::ExternalResourceRpc,
    limit::LimitRpc,
    message_size::{LIMITS_BYTES_MAX, MESSAGE_BYTES_MAX, MessageSizeLimit, QUESTION_BYTES_MAX},
    reflection::Reflection,
    resource_manager::ResourceManagerRpc,
    routes::Routes,
    server_info::ServerInfo,
};
use rm_proto::v1::{
    admin_service_server::AdminServiceServer, external_resource_service_server::ExternalResourceServiceServer,
    limit_service_server::LimitServiceServer, usage_service_server::UsageServiceServer,
};
use rm_service::{
    overview::OverviewService,
    tokens::{RefreshTokens, TokenCache},
};
use rm_store::Store;

use super::{
    ServerError,
    cell::{CellServices, InstanceContext},
};

/// Starts the cell. Returns the routes of all calls, and the overviews for the page.
pub(super) fn assemble(
    instance: &InstanceContext<'_>,
    store: &Store,
    tokens: &TokenCache,
) -> Result<(Routes<RequestBody>, OverviewService), ServerError> {
    let cell = CellServices::start(instance, store)?;
    // Tokens belong to the instance and not to a cell.
    cell.driver.start(RefreshTokens::new(tokens.clone()), Arc::default());
    let overviews = cell.overviews.clone();
    Ok((routes(instance, cell)?, overviews))
}

/// Returns the routes of all calls of a cell.
fn routes(instance: &InstanceContext<'_>, cell: CellServices) -> Result<Routes<RequestBody>, ServerError> {
    let options = instance.options;
    let (times, timeout) = (options.times, options.times.request_timeout);
    let info = ServerInfo {
        instance_id: instance.id,
        times,
        liveness: options.liveness,
        history: options.history,
        tls: options.security.tls.is_some(),
    };
    let CellServices { committer, tickets, limits, .. } = cell;
    let admin = AdminRpc::new(cell.audit, committer.clone(), tickets.clone(), cell.holds, timeout);
    let manager =
        ResourceManagerRpc::new(committer, cell.request_resource, cell.heartbeat, tickets, cell.em_goes, times);
    let usage =
        rm_edge::usage::UsageRpc::new(cell.usage, limits.clone(), cell.overviews, cell.fullest, cell.follow, info);
    let external = ExternalResourceRpc::new(cell.external, timeout);
    let limits = LimitRpc::new(limits, timeout);
    let reflection = v1::server_reflection_server::ServerReflectionServer::new(Reflection::v1()?);
    let reflection_alpha = v1alpha::server_reflection_server::ServerReflectionServer::new(Reflection::v1alpha()?);
    Ok(Routes::default()
        .and(MessageSizeLimit::new(manager))
        .and(compressible!(LimitServiceServer::new(limits)).max_decoding_message_size(LIMITS_BYTES_MAX))
        .and(compressible!(UsageServiceServer::new(usage)).max_decoding_message_size(MESSAGE_BYTES_MAX))
        .and(compressible!(ExternalResourceServiceServer::new(external)).max_decoding_message_size(MESSAGE_BYTES_MAX))
        .and(compressible!(AdminServiceServer::new(admin)).max_decoding_message_size(MESSAGE_BYTES_MAX))
        .and(compressible!(reflection).max_decoding_message_size(QUESTION_BYTES_MAX))
        .and(compressible!(reflection_alpha).max_decoding_message_size(QUESTION_BYTES_MAX)))
}
