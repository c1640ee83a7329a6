//! gRPC transport: decodes, validates and authorizes calls, and encodes their responses.
//!
//! The services behind this module use no protobuf. They receive domain values and never validate again. The transport
//! never decides about resources and never writes. Callers: `server`; the RM client uses the messages and `convert`.
//!
//! - [`edge`]: connections, permits, byte budgets; [`authenticator`], [`access`]: authentication and permissions;
//! - [`proto`], [`convert`], [`codec`], [`message_size`]: messages; [`status`]: errors; [`deadline`]: deadlines;
//! - [`routes`], [`observe`]: dispatch and metrics of calls; [`json`]: calls as JSON;
//! - [`resource_manager`], [`limit`], [`usage`], [`external`], [`admin`]: the services;
//! - [`health`], [`reflection`], [`server_info`]: statuses, descriptors and bounds of the services.

#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unreachable,
    clippy::print_stdout,
    clippy::too_many_lines
)]

pub mod access;
pub mod admin;
pub mod authenticator;
pub mod convert;
pub mod deadline;
pub mod edge;
pub mod external;
pub mod health;
pub mod http;
pub mod json;
pub mod limit;
pub mod message_size;
pub mod observe;
pub mod reflection;
pub mod resource_manager;
pub mod routes;
pub mod server_info;
pub mod status;
pub mod tls;
pub mod usage;
