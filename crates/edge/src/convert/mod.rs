//! Conversion between messages and values of the service. [`rm_proto::convert`] converts values of the model.
//!
//! Parsers fail with a `FieldError` that names the field. No function here reads or changes state. Callers: the
//! gRPC services and the monitoring page.
//!
//! - [`external`]: providers, external queues and applications;
//! - `overview`: cluster totals, instances and tasks.

pub use rm_proto::convert::*;

pub mod external;
pub mod overview;
