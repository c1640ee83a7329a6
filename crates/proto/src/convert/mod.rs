//! Between protobuf and the domain: the only place that knows both.
//!
//! - [`resource`]: amounts, both ways;
//! - [`limit`]: limits and scopes, both ways;
//! - [`cap`]: caps, both ways;
//! - [`audit`]: audits and repairs, both ways;
//! - [`operator`]: drains, forced releases and holds, both ways;
//! - [`request`]: what callers send;
//! - [`answer`]: what callers are told, and, for the RM client, back again.

pub mod answer;
pub mod audit;
pub mod cap;
pub mod limit;
pub mod operator;
pub mod request;
pub mod resource;
