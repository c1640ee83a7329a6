//! Server info: identity, timeouts and bounds of an instance, as `GetServerInfo` returns them.
//!
//! A client reads its own timeouts and batch sizes from here instead of assuming them. Caller: `usage`; the server of the
//! root package fills the values once, at its start.

use std::time::Duration;

use uuid::Uuid;

use rm_model::{cap::CAPS_MAX, limit, name, selector::PREFERENCES_MAX};
use rm_service::heartbeat::LivenessTimeouts;

use super::{
    convert::{
        self,
        request::{RESERVED_MAX, TICKETS_MAX},
    },
    message_size::{HEARTBEAT_BYTES_MAX, LIMITS_BYTES_MAX, MESSAGE_BYTES_MAX},
    resource_manager::{LOCK_TTL_MAX, RequestTimeouts},
    usage::GET_MAX,
};
use rm_proto::page::{PAGE_SIZE, PAGE_SIZE_MAX};
use rm_proto::v1 as proto;

/// Settings of an instance that callers can read.
#[derive(Debug, Clone, Copy)]
pub struct ServerInfo {
    /// Identifier of the instance, new at each start.
    pub instance_id: Uuid,
    /// Timeouts of calls.
    pub times: RequestTimeouts,
    /// Timeouts of missing heartbeats.
    pub liveness: LivenessTimeouts,
    /// Retention time of ended tickets and request ids.
    pub history: Duration,
    /// Whether connections are encrypted.
    pub tls: bool,
}

impl ServerInfo {
    /// Converts the settings to a response.
    pub fn message(&self) -> proto::GetServerInfoResponse {
        let Self { instance_id, times, liveness, history, tls } = self;
        proto::GetServerInfoResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            instance_id: instance_id.to_string(),
            bounds: Some(bounds(times)),
            report_interval: duration(liveness.report_interval()),
            em_silent_after: duration(liveness.silent_after),
            em_lost_after: duration(liveness.lost_after),
            lost_after_reports: liveness.lost_after_reports.into(),
            history: duration(*history),
            tls: *tls,
            // The service sets it per call, because the first token may be created at any time.
            authentication: false,
            checks: convert::limit::checks(),
        }
    }
}

fn bounds(times: &RequestTimeouts) -> proto::ServerBounds {
    let count = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
    let bytes = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
    let size = |number: i64| i32::try_from(number).unwrap_or(i32::MAX);
    proto::ServerBounds {
        max_wait: duration(times.max_wait),
        request_timeout: duration(times.request_timeout),
        default_lock_ttl: duration(times.lock_ttl),
        max_lock_ttl: duration(LOCK_TTL_MAX),
        max_message_bytes: bytes(MESSAGE_BYTES_MAX),
        max_heartbeat_bytes: bytes(HEARTBEAT_BYTES_MAX),
        max_limits_bytes: bytes(LIMITS_BYTES_MAX),
        default_page_size: size(PAGE_SIZE),
        max_page_size: size(PAGE_SIZE_MAX),
        max_batch_get: count(GET_MAX),
        max_name_chars: count(name::NAME_CHARS_MAX),
        max_labels: count(name::LABELS_MAX),
        max_labels_bytes: count(name::LABELS_BYTES_MAX),
        max_reserved_labels: count(RESERVED_MAX),
        max_preferred_labels: count(PREFERENCES_MAX),
        max_caps: count(CAPS_MAX),
        max_heartbeat_tickets: count(TICKETS_MAX),
        max_limits: count(convert::limit::LIMITS_MAX),
        max_limit_labels: count(limit::LABELS_MAX),
        max_limit_dimensions: count(limit::DIMENSIONS_MAX),
        max_label_sets: count(limit::LABEL_SETS_MAX),
    }
}

pub(super) fn duration(duration: Duration) -> Option<prost_types::Duration> {
    prost_types::Duration::try_from(duration).ok()
}
