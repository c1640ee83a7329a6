//! The service as its callers meet it: a real server on a free port, a real PostgreSQL, the real client.

mod ambiguous;
mod api;
mod audit;
mod bad_input;
mod choosing;
mod conformance;
mod contention;
mod crash;
mod crowds;
mod edge;
mod expiry;
mod faults;
mod harness;
mod heartbeat;
mod ledger_model;
mod ledger_steps;
mod lifecycle;
mod limits;
mod metrics;
mod migrations;
mod operators;
mod plans;
mod private_database;
mod proxy;
mod traps;
mod waiting;
