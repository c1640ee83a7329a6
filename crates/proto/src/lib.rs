//! The messages of the gRPC API, and their conversion to and from the model.
//!
//! The server and the client use this crate; each value that it returns as a type of the model is validated. A message is never passed on
//! beyond the edge. This crate must not know how a message is sent.
//!
//! - [`v1`]: the generated code of `proto/linkis/rm/v1`;
//! - [`convert`]: between messages and the model, the only module that knows both;
//! - [`codec`]: reading and writing of messages; [`page`]: pages of lists and their tokens.

#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unreachable,
    clippy::print_stdout,
    clippy::too_many_lines
)]

pub mod codec;
pub mod convert;
pub mod page;

/// The generated code of package `linkis.rm.v1`.
#[expect(clippy::too_many_lines, reason = "generated code")]
pub mod v1 {
    tonic::include_proto!("linkis.rm.v1");

    /// The descriptors of all files, for server reflection.
    pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
}
