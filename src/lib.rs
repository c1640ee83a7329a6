//! linkis-rm: a resource manager for compute clusters in the style of Apache Linkis.
//!
//! Before an engine starts, linkis-rm grants its resources on an EM within the limits of users, creators, labels and
//! external queues. It tracks their use while the engine runs, and frees them when the engine ends or fails.
//!
//! The crates, in reading order:
//!
//! - [`rm_model`]: resources, EMs, tickets, limits and the ledger: all decisions, without I/O;
//! - [`rm_store`]: PostgreSQL: the tables, the resource locks and the search for the primary;
//! - [`rm_external`]: YARN and Kubernetes clusters;
//! - [`rm_service`]: the use cases, above all the committer, which alone writes tickets and counters;
//! - [`rm_proto`]: the messages of the API, and their conversion to the model;
//! - [`rm_edge`]: gRPC, TLS, HTTP and the page, authentication;
//! - [`rm_client`]: the RM client, for EMs, LinkisManager and engines written in Rust;
//! - [`rm_telemetry`]: logs, traces and metrics; [`rm_devpg`]: the private PostgreSQL.
//!
//! This crate is the program:
//!
//! - [`server`]: start, operation and stop of an instance; [`notify`]: notifications for systemd;
//! - [`commands`]: the commands, through the client; [`config`]: settings; [`limits_file`]: limits in version control.
//!
//! docs/ARCHITECTURE.md has the walk of one request, the invariants, and the files of each kind of change. The test
//! `workspace` enforces which crate may use which.

#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unreachable,
    clippy::print_stdout,
    clippy::too_many_lines
)]

pub mod commands;
pub mod config;
pub mod limits_file;
pub mod notify;
pub mod server;
