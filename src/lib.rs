//! linkis-rm: a resource manager for compute clusters in the style of Apache Linkis.
//!
//! Before an engine starts, linkis-rm grants its resources on an EM within the limits of users, creators, labels and
//! external queues. It tracks their use while the engine runs, and frees them when the engine ends or fails.
//!
//! In reading order:
//!
//! - [`domain`]: resources, EMs, tickets and the ledger: pure decisions;
//! - [`store`]: PostgreSQL: the tables, the resource locks, and the private server;
//! - [`external`]: YARN and Kubernetes clusters;
//! - [`service`]: the use cases, above all the committer, the only writer of tickets and counters;
//! - [`transport`]: gRPC, and the conversion between protobuf and the domain;
//! - [`tls`]: certificates, reloaded when their files change;
//! - [`http`]: metrics, health and the page, on a listener of its own;
//! - [`server`]: start, operation and stop of an instance;
//! - [`client`]: the RM client, for EMs, LinkisManager and engines written in Rust;
//! - [`commands`]: the commands of the program, through the client;
//! - [`config`], [`limits_file`]: settings, and limits in version control;
//! - [`telemetry`], [`metrics`], [`error`]: logs and traces, metrics, and errors of calls;
//! - [`notify`]: notifications for systemd.
//!
//! `main → server → transport → service → {store, external} → domain`: no module uses an earlier one.
//!
//! A program that calls the service depends on `rm-client` and `rm-proto`: no database and no server.
//!
//! # Invariants at every commit
//!
//! 1. No over-commitment: on every EM, used + locked ≤ total − protected, in every dimension. Two visible exceptions
//!    exist: a capacity that was lowered below the live tickets, and an adopted engine. A dimension that is short
//!    grants nothing until tickets end.
//! 2. Counters equal tickets: an EM's used and locked amounts are the sums over its live tickets.
//! 3. Atomic changes: a ticket and its counters change in one transaction.
//! 4. No permanent reservation: a locked ticket has a deadline in its row. A used ticket ends when its EM reports
//!    without it or is lost. A resource lock ends with its transaction, and a hold at the time in its row.
//! 5. Any instance, one result: a decision reads the database under its locks, never the memory of an instance.
//! 6. One effect per request: a repeated call has the effect of one and gets its reply, until the ticket ends.
//! 7. Every refusal states its reason.
//!
//! # Deliberate omissions
//!
//! - advisory locks;
//! - triggers, except the one on the workers of Citus;
//! - stored procedures, except three for a role without the right to change the schema: they create, index and drop
//!   partitions of the history;
//! - a second path that writes grants;
//! - state in memory on which a reply depends.

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
