//! Format of the journal file: one compressed protobuf message with the chapters, their steps and all expected replies.
//!
//! Never: contains an identifier or a time of the recorded run; `ids` replaces them. Callers: `record` writes, `replay` reads.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    path::Path,
};

use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use prost::Message as _;

/// The whole journal.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Journal {
    /// Descriptors of the recorded service, which decode all messages.
    #[prost(bytes = "vec", tag = "1")]
    pub descriptors: Vec<u8>,
    /// Paths of the methods; a call has the index, such as that of `/linkis.rm.v1.UsageService/GetEm`.
    #[prost(string, repeated, tag = "2")]
    pub methods: Vec<String>,
    #[prost(message, repeated, tag = "3")]
    pub chapters: Vec<Chapter>,
}

/// A part of the journal that has its own database and process.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Chapter {
    #[prost(string, tag = "1")]
    pub name: String,
    /// Arguments of the program.
    #[prost(string, repeated, tag = "2")]
    pub arguments: Vec<String>,
    #[prost(message, repeated, tag = "3")]
    pub steps: Vec<Step>,
    /// Arguments of `tokens create` for each initial token. The first token is an administrator's.
    #[prost(string, repeated, tag = "4")]
    pub tokens: Vec<String>,
}

/// A call, a change of the database, or the end of a segment.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Step {
    #[prost(oneof = "Kind", tags = "1, 2, 3, 4, 6")]
    pub kind: Option<Kind>,
    /// Waiting calls that got their replies after this step, in their order.
    #[prost(message, repeated, tag = "5")]
    pub arrived: Vec<Arrived>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Kind {
    #[prost(message, tag = "1")]
    Call(Call),
    #[prost(message, tag = "2")]
    Change(Change),
    #[prost(message, tag = "3")]
    Segment(Segment),
    /// Cancels the waiting call with this number.
    #[prost(uint32, tag = "4")]
    Cancel(u32),
    /// Waits for the reply to the call with this number.
    #[prost(uint32, tag = "6")]
    Await(u32),
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Call {
    #[prost(uint32, tag = "1")]
    pub method: u32,
    /// Message with placeholders, or bytes that are no message.
    #[prost(bytes = "vec", tag = "2")]
    pub request: Vec<u8>,
    /// Whether the bytes are sent unchanged.
    #[prost(bool, tag = "3")]
    pub is_raw: bool,
    /// Number of the token, from 1; 0 for none.
    #[prost(uint32, tag = "4")]
    pub token: u32,
    /// `grpc-timeout` in milliseconds; 0 for none.
    #[prost(uint32, tag = "5")]
    pub timeout: u32,
    /// Expected reply; `None` if the call waits.
    #[prost(message, optional, tag = "6")]
    pub answer: Option<Answer>,
    /// Whether the call only reads, so that a replay may repeat it until the reply matches.
    #[prost(bool, tag = "7")]
    pub reads: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Arrived {
    /// Number of the call in the chapter.
    #[prost(uint32, tag = "1")]
    pub call: u32,
    #[prost(message, optional, tag = "2")]
    pub answer: Option<Answer>,
}

/// Compared parts of a reply.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Answer {
    #[prost(int32, tag = "1")]
    pub code: i32,
    #[prost(string, tag = "2")]
    pub reason: String,
    #[prost(btree_map = "string, string", tag = "3")]
    pub metadata: std::collections::BTreeMap<String, String>,
    /// Fields that `BadRequest` names.
    #[prost(string, repeated, tag = "4")]
    pub fields: Vec<String>,
    /// Subjects that `QuotaFailure` names.
    #[prost(string, repeated, tag = "5")]
    pub subjects: Vec<String>,
    /// Whether the reply has a `RetryInfo`.
    #[prost(bool, tag = "6")]
    pub retry: bool,
    /// Message without identifiers and times.
    #[prost(bytes = "vec", tag = "7")]
    pub message: Vec<u8>,
    /// Hash of the message instead, if it is longer than [`MESSAGE_MAX`].
    #[prost(bytes = "vec", tag = "8")]
    pub hash: Vec<u8>,
}

/// A change of the database: its name in `tables.rs`, and arguments that may be placeholders (`#7`).
#[derive(Clone, PartialEq, prost::Message)]
pub struct Change {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, repeated, tag = "2")]
    pub arguments: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Segment {
    #[prost(message, repeated, tag = "1")]
    pub tables: Vec<Table>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Table {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, repeated, tag = "2")]
    pub columns: Vec<String>,
    #[prost(uint64, tag = "3")]
    pub rows: u64,
    #[prost(fixed64, tag = "4")]
    pub hash: u64,
}

/// Maximum size of a recorded message, in bytes. A longer one is recorded as its hash.
pub const MESSAGE_MAX: usize = 4000;

pub fn read(path: &Path) -> Journal {
    let mut bytes = Vec::new();
    let file = File::open(path).unwrap_or_else(|error| panic!("{}: {error}; record it first", path.display()));
    GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    Journal::decode(&bytes[..]).unwrap()
}

pub fn write(path: &Path, journal: &Journal) {
    let mut out = GzEncoder::new(File::create(path).unwrap(), Compression::best());
    out.write_all(&journal.encode_to_vec()).unwrap();
    out.finish().unwrap();
}
