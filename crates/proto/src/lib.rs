//! The messages of the gRPC API, and their conversion to and from the model.
//!
//! Every value that this crate returns as a type of the model is validated. Messages stay in the edge and in the client;
//! the services get values of the model. Never: sends a message, or knows of connections.
//! Callers: `rm-edge`, `rm-client`, and the commands of the program.
//!
//! - [`v1`]: the generated code of `proto/linkis/rm/v1`;
//! - [`convert`]: between messages and the model, the only module that uses both;
//! - [`codec`]: encoding and decoding of messages; [`page`]: pages of lists and their tokens.

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
