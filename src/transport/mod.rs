//! gRPC: decodes, validates and answers; nothing past it knows protobuf, and nothing past it validates again.
//!
//! - [`proto`]: the generated code of `proto/linkis/rm/v1`;
//! - [`convert`]: between protobuf and the domain, the only place that knows both;
//! - [`status`]: from errors to gRPC statuses;
//! - [`deadline`]: how long a call may wait;
//! - [`edge`]: what callers may take of an instance: connections, calls, bytes, time;
//! - [`identity`]: who calls; [`access`]: who may make which call;
//! - [`observe`]: counts every call; [`routes`]: which service answers it; [`reflection`]: what the services are; [`health`]: whether they serve;
//! - [`codec`]: how messages are read and written; [`message_size`]: how large they may be;
//! - [`page`]: the pages of what is listed;
//! - [`json`]: the same calls with JSON, for those who have no gRPC;
//! - [`server_info`]: what an instance tells of itself;
//! - [`resource_manager`], [`limit`], [`usage`], [`external`], [`admin`]: the services.

#[cfg(feature = "server")]
pub mod access;
#[cfg(feature = "server")]
pub mod admin;
#[cfg(feature = "server")]
pub mod codec;
pub mod convert;
#[cfg(feature = "server")]
pub mod deadline;
#[cfg(feature = "server")]
pub mod edge;
#[cfg(feature = "server")]
pub mod external;
#[cfg(feature = "server")]
pub mod health;
#[cfg(feature = "server")]
pub mod identity;
#[cfg(feature = "server")]
pub mod json;
#[cfg(feature = "server")]
pub mod limit;
#[cfg(feature = "server")]
pub mod message_size;
#[cfg(feature = "server")]
pub mod observe;
#[cfg(feature = "server")]
pub mod page;
#[cfg(feature = "server")]
pub mod reflection;
#[cfg(feature = "server")]
pub mod resource_manager;
#[cfg(feature = "server")]
pub mod routes;
#[cfg(feature = "server")]
pub mod server_info;
#[cfg(feature = "server")]
pub mod status;
#[cfg(feature = "server")]
pub mod usage;

/// The generated code of package `linkis.rm.v1`.
#[expect(clippy::too_many_lines, reason = "nobody reads it")]
pub mod proto {
    tonic::include_proto!("linkis.rm.v1");

    /// The descriptors of all files, for server reflection.
    pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
}
