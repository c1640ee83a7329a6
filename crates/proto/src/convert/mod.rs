//! Conversion between protobuf messages and the model: the only module that uses both.
//!
//! - [`resource`]: amounts, both ways;
//! - [`limit`]: limits and scopes, both ways;
//! - [`cap`]: caps, both ways;
//! - [`audit`]: audits and repairs, both ways;
//! - [`operator`]: drains, forced releases and holds, both ways;
//! - [`request`]: parsing of requests;
//! - [`answer`]: replies, and their parsing for the RM client.

pub mod answer;
pub mod audit;
pub mod cap;
pub mod enumeration;
pub mod limit;
pub mod operator;
pub mod request;
pub mod resource;
