//! linkis-rm: the one place that knows what every host, user, creator, label and queue of a cluster in the style of Apache
//! Linkis may use, grants it before an engine starts, follows it while it runs, and takes it back when it ends or dies.
//!
//! In reading order:
//!
//! - [`domain`]: resources, EMs, tickets and the ledger: pure decisions;
//! - [`store`]: PostgreSQL: the tables, the resource locks, and the private server;
//! - [`external`]: clusters whose queues somebody else keeps;
//! - [`service`]: the use cases, above all the committer, the one way to change anything;
//! - [`transport`]: gRPC, and the conversion between protobuf and the domain;
//! - [`tls`]: certificates, taken up anew when their files change;
//! - [`http`]: metrics, health and the page, on a listener of its own;
//! - [`server`]: puts an instance together, serves it, and takes it down;
//! - [`client`]: the RM client, for ECMs, LinkisManager and engines written in Rust;
//! - [`commands`]: what the program does other than serving, through the client;
//! - [`config`], [`limits_file`], [`telemetry`], [`metrics`], [`error`]: settings, limits in version control, logs and traces, what is
//!   counted, and why a call failed; [`files`]: those that are read again; [`notify`]: what systemd is told.
//!
//! `main → server → transport → service → {store, external} → domain`: nothing reaches back.
//!
//! With `default-features = false, features = ["client"]` there are `domain`, `client`, and of `transport` what is sent: no database, no
//! server.
//!
//! # What is always true, at every commit
//!
//! 1. Never over-committed: on every EM, used + locked ≤ total − protected, in every dimension. A capacity that was lowered under
//!    live tickets and an engine that was adopted are the visible exceptions; nothing that is short is granted until it drains.
//! 2. Counters equal tickets: an EM's used and locked are the sums over its live tickets.
//! 3. All or nothing: a ticket and the counters it moves change in one transaction.
//! 4. Nothing is held for ever: a locked ticket has a deadline in its row; a used one is given up when its EM reports without it or
//!    falls silent; a resource lock dies with its transaction, and a hold at the time in its row.
//! 5. Any instance, same answer: a decision reads the database under its locks, never an instance's memory.
//! 6. Exactly once per request: a repeated call has the effect of one and gets the same answer, until its ticket is over.
//! 7. Every refusal explains itself.
//!
//! # What is deliberately absent
//!
//! Advisory locks; triggers, but for the one on the workers of Citus; stored procedures, but for the three by which a role that may not
//! change the schema makes, indexes and drops parts of the history; a second way to write what is granted; a state kept in memory that
//! an answer depends on.

#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unreachable,
    clippy::print_stdout,
    clippy::too_many_lines
)]

#[cfg(feature = "client")]
pub mod client;
#[cfg(feature = "server")]
pub mod commands;
#[cfg(feature = "server")]
pub mod config;
pub use rm_model as domain;
#[cfg(feature = "server")]
pub mod error;
#[cfg(feature = "server")]
pub mod external;
#[cfg(feature = "server")]
pub mod files;
#[cfg(feature = "server")]
pub mod http;
#[cfg(feature = "server")]
pub mod limits_file;
#[cfg(feature = "server")]
pub mod metrics;
#[cfg(feature = "server")]
pub mod notify;
#[cfg(feature = "server")]
pub mod server;
#[cfg(feature = "server")]
pub mod service;
#[cfg(feature = "server")]
pub mod store;
#[cfg(feature = "server")]
pub mod telemetry;
#[cfg(feature = "server")]
pub mod tls;
#[cfg(feature = "client")]
pub mod transport;
