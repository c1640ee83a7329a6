//! Network edge: decodes, validates and authorizes calls, and encodes their responses; serves the page over HTTP.
//!
//! The services behind this crate use no protobuf. They receive values of `rm-model` and never validate again. The edge
//! never decides about resources, and has no SQL. Caller: the server of the root package.
//!
//! - [`edge`]: connections, permits, byte budgets; [`authenticator`], [`access`]: authentication and permissions;
//! - [`convert`], [`message_size`]: messages; [`status`]: errors; [`deadline`]: deadlines;
//! - [`routes`], [`observe`]: dispatch and metrics of calls; [`json`]: calls as JSON;
//! - [`resource_manager`], [`limit`], [`usage`], [`external`], [`admin`]: the services;
//! - [`health`], [`reflection`], [`server_info`]: statuses, descriptors and bounds of the services;
//! - [`http`]: metrics, health and the page; [`tls`]: certificates of both listeners.

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
pub mod assembly;
pub mod authenticator;
pub mod connections;
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
mod rpc;
pub mod server_info;
pub mod status;
pub mod tls;
pub mod usage;
