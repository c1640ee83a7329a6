//! Conversion between protobuf messages and domain values. Every rule of that mapping is here.
//!
//! Parsers check every field, so that no later code validates again. They fail with a `FieldError` that names the
//! field. No function here reads or changes state. Callers: the services of `transport`, the monitoring page and the RM
//! client.
//!
//! - [`resource`] (amounts);
//! - [`limit`]: limits, policies and scopes; [`cap`]: caps of a request;
//! - [`external`]: providers, external queues and applications;
//! - [`audit`]: audits and repairs; [`operator`]: drains, forced releases and holds;
//! - `overview`: cluster totals, instances and tasks;
//! - [`request`]: requests; [`answer`]: responses, and back for the RM client.

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
