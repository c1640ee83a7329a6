//! The model: resources, EMs, tickets, limits, wait queues, access rights, and the rules that decide on them.
//!
//! All code here is pure: no I/O, no clock and no randomness. Services pass in the time and the stored rows, and write the
//! results.
//!
//! - [`name`]: names and labels; [`principal`]: callers; [`access`]: roles and rights; [`token`]: credentials;
//! - [`resource`]: amounts and their arithmetic; [`em`]: EMs; [`em_drain`], [`hold`]: restrictions by operators;
//! - [`ticket`]: tickets; [`ticket_end`]: their ends; [`adoption`]: adoption; [`ticket_digest`]: digests of ticket sets;
//! - [`scope`], [`limit`], [`limit_mode`], [`cap`], [`policy`]: counters, limits and where they apply;
//! - [`provider`], [`queue`], [`external`]: external clusters, their queues and the capacity of these;
//! - [`refusal`], [`refusal_sum`]: refusals in Linkis's words, and their statistics; [`scope_kind`]: kinds of scopes;
//! - [`usage_sum`]: use over time; [`user_sum`]: use of live tickets by user;
//! - [`observation`]: observed use, which decides nothing; [`report`]: heartbeats;
//! - [`wait_queue`]: wait queues; [`order`], [`priority`]: their order; [`guarantee`]: guaranteed amounts; [`reclaim`]: policies by which engines end; [`assessment`]: assessment of a request; [`selector`], [`placement`]: choice of an EM;
//! - [`action`], [`recorded_state`]: the history; [`audit`]: stored counters against tickets; [`counters`]: counters after a commit;
//! - [`overview`]: cluster totals; [`em_order`]: orders of EMs; [`timestamp`]: times as text;
//! - [`text_enum!`]: enumerations with texts;
//! - [`operation`]: operations and their outcomes; [`ledger`]: `(state, operation) → (outcome, deltas)`.

#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unreachable,
    clippy::print_stdout,
    clippy::too_many_lines
)]

#[macro_use]
mod text_enum;

pub mod access;
pub mod action;
pub mod adoption;
pub mod assessment;
pub mod audit;
pub mod cap;
pub mod counters;
pub mod em;
pub mod em_drain;
pub mod em_order;
pub mod external;
pub mod guarantee;
pub mod hold;
pub mod ledger;
pub mod limit;
pub mod limit_mode;
pub mod name;
pub mod observation;
pub mod operation;
pub mod order;
pub mod overview;
pub mod placement;
pub mod policy;
pub mod principal;
pub mod priority;
pub mod provider;
pub mod queue;
pub mod reclaim;
pub mod recorded_state;
pub mod refusal;
pub mod refusal_sum;
pub mod report;
pub mod resource;
pub mod scope;
pub mod scope_kind;
pub mod selector;
pub mod ticket;
pub mod ticket_digest;
pub mod ticket_end;
pub mod timestamp;
pub mod token;
pub mod usage_sum;
pub mod user_sum;
pub mod visits;
pub mod wait_queue;

/// Interval between two reads of a file that may change while the service runs: database URLs, certificates, JWT issuers. Its content is
/// compared, because Kubernetes replaces a link above the file.
pub const FILE_POLL_INTERVAL: std::time::Duration = std::time::Duration::from_secs(3);
