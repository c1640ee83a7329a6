//! gRPC transport: decodes, validates and authorizes calls, and encodes their responses.
//!
//! The services behind this module use no protobuf. They receive domain values and never validate again. The transport
//! never decides about resources and never writes. Callers: `server`; the RM client uses the messages and `convert`.
//!
//! - [`edge`]: connections, permits, byte budgets; [`identity`], [`access`]: authentication and permissions;
//! - [`proto`], [`convert`], [`codec`], [`message_size`]: messages; [`status`]: errors; [`deadline`]: deadlines;
//! - [`routes`], [`observe`]: dispatch and metrics of calls; [`page`]: pages of lists; [`json`]: calls as JSON;
//! - [`resource_manager`], [`limit`], [`usage`], [`external`], [`admin`]: the services;
//! - [`health`], [`reflection`], [`server_info`]: statuses, descriptors and bounds of the services.

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

/// Generated code of package `linkis.rm.v1`.
#[expect(clippy::too_many_lines, reason = "nobody reads it")]
pub mod proto {
    tonic::include_proto!("linkis.rm.v1");

    /// Descriptors of all files, for server reflection.
    pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
}
