//! Use cases of the resource manager, between `rm-edge` and `rm-store`.
//!
//! A request passes `request_resource`, `admission` (check and placement), `committer` (decision and write) and, if it waits,
//! `waiting`. All operations on tickets and EMs go through the committer; only an audit repair corrects rows outside it.
//! Never: handles the wire format, which is that of `rm-edge`; decides outside `rm-model`.
//! Callers: `rm-edge`, and the server of the root package.
//!
//! - Requests: [`request_resource`], [`admission`], [`committer`], [`waiting`], `read_state` (shared reads), [`idle_amounts`] (of refusals).
//! - Limits and locks: [`limits`], [`holds`], [`reclaims`], [`audit`] (audit and repair of the counters), [`external`] (YARN, Kubernetes).
//! - EMs and tickets: [`heartbeat`], [`ticket_lookup`]. Callers: [`tokens`], [`jwt`]. Failures: [`error`].
//! - Reads: [`usage`], [`history`], [`follow`], [`overview`], [`refusals`].
//! - Infrastructure: [`background`], [`tasks`], [`fair_semaphore`] (fair semaphore), [`single_flight`] (single flight).

#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unreachable,
    clippy::print_stdout,
    clippy::too_many_lines
)]

pub mod admission;
pub mod audit;
pub mod background;
pub mod cell;
mod commit;
pub mod committer;
pub mod error;
pub mod external;
pub mod fair_semaphore;
pub mod follow;
pub mod heartbeat;
pub mod history;
pub mod holds;
pub mod idle_amounts;
pub mod jwt;
pub mod limits;
mod lock;
mod lock_attempts;
pub mod overview;
mod read_state;
pub mod reclaims;
pub mod refusals;
pub mod request_resource;
pub mod single_flight;
pub mod tasks;
pub mod ticket_lookup;
pub mod tokens;
pub mod usage;
pub mod waiting;
