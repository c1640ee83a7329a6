//! The engine: scheduling of requests and operations, as pure values.
//!
//! The engine decides what a request does next, which operations share a batch, what follows from the failure of a batch, and
//! which waiting requests check again. It never decides a grant: the ledger of `rm-model` does, on rows that are locked. A loss of
//! its state costs latency, never a wrong grant.
//!
//! Never: reads a clock, waits, or accesses the database. `rm-service` passes in the time and carries out the results.
//!
//! - Requests: [`request`], from the submission to the reply.
//! - Commits: [`commit_queue`] selects the operations of a batch; [`batch_policy`] decides what follows from a failure;
//!   [`contended_keys`] has the operations whose keys others own.
//! - State as last observed: [`observed_state`] for checks; [`placement_changes`] for placements.
//! - Waiting requests: [`waiter_index`], with [`wake_reason`]; [`reclaim_choice`] and [`reclaim_plan`] choose idle engines to end for them.
//! - Deadlines: [`expiry_budgets`].

#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unreachable,
    clippy::print_stdout,
    clippy::too_many_lines,
    clippy::iter_over_hash_type
)]

pub mod batch_policy;
pub mod commit_queue;
pub mod contended_keys;
pub mod expiry_budgets;
pub mod observed_state;
pub mod placement_changes;
pub mod reclaim_choice;
pub mod reclaim_plan;
pub mod request;
pub mod waiter_index;
pub mod wake_reason;
