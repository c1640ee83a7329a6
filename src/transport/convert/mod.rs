//! Between protobuf and the domain: the only place that knows both.
//!
//! - [`resource`]: amounts, both ways;
//! - [`limit`]: limits and scopes, both ways;
//! - [`cap`]: caps, both ways;
//! - [`external`]: providers and queues, both ways;
//! - [`audit`]: audits and repairs, both ways;
//! - `overview`: the whole cluster, its instances, and what they do;
//! - [`operator`]: drains, forced releases and holds, both ways;
//! - [`request`]: what callers send;
//! - [`answer`]: what callers are told, and, for the RM client, back again.

pub mod answer;
pub mod audit;
pub mod cap;
#[cfg(feature = "server")]
pub mod external;
pub mod limit;
pub mod operator;
#[cfg(feature = "server")]
pub mod overview;
pub mod request;
pub mod resource;
