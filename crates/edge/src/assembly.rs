//! Assembly: builds the gRPC routes of an instance from the services of its cell. Caller: the server of the root package,
//! once at its start.

use prost_reflect::DescriptorError;
use tonic_reflection::pb::{v1, v1alpha};

use rm_proto::v1::{
    admin_service_server::AdminServiceServer, external_resource_service_server::ExternalResourceServiceServer,
    limit_service_server::LimitServiceServer, usage_service_server::UsageServiceServer,
};
use rm_service::cell::CellServices;

use crate::{
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
    usage::UsageRpc,
};

/// Returns the routes of all calls of a cell.
///
/// # Errors
/// Unreadable descriptors: a defect of the build.
pub fn routes(cell: CellServices, info: ServerInfo) -> Result<Routes<RequestBody>, DescriptorError> {
    let (times, timeout) = (info.times, info.times.request_timeout);
    let CellServices { committer, tickets, limits, .. } = cell;
    let admin = AdminRpc::new(cell.audit, committer.clone(), tickets.clone(), cell.holds, cell.reclaims, timeout);
    let manager =
        ResourceManagerRpc::new(committer, cell.request_resource, cell.heartbeat, tickets, cell.em_goes, times);
    let usage = UsageRpc::new(cell.usage, limits.clone(), cell.overviews, cell.fullest, cell.follow, info);
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
