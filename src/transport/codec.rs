//! How messages are read and written: as protobuf, in buffers of about their own size. Most have some hundred bytes, and every call
//! that is under way has such buffers, or is answered from one.

use std::{marker::PhantomData, sync::Arc};

use prost::Message;
use tonic::{
    Status,
    codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
};

/// What a buffer has room for to begin with, in bytes. What is larger makes room for itself, all at once.
const BUFFER_BYTES: usize = 512;

/// How much of a stream of answers is sent at once, in bytes.
const PIECE_BYTES: usize = 32 << 10;

/// Messages of type `D` are read, and of type `E` written.
#[derive(Debug)]
pub struct Protobuf<E, D>(PhantomData<(E, D)>);

impl<E, D> Default for Protobuf<E, D> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

/// Writes messages.
#[derive(Debug)]
pub struct Writer<E>(PhantomData<E>);

/// Reads messages.
#[derive(Debug)]
pub struct Reader<D>(PhantomData<D>);

impl<E, D> Codec for Protobuf<E, D>
where
    E: Message + 'static,
    D: Message + Default + 'static,
{
    type Encode = E;
    type Decode = D;
    type Encoder = Writer<E>;
    type Decoder = Reader<D>;

    fn encoder(&mut self) -> Writer<E> {
        Writer(PhantomData)
    }

    fn decoder(&mut self) -> Reader<D> {
        Reader(PhantomData)
    }
}

impl<E: Message> Encoder for Writer<E> {
    type Item = E;
    type Error = Status;

    fn encode(&mut self, message: E, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.reserve(message.encoded_len());
        message.encode(buffer).map_err(|error| Status::internal(error.to_string()))
    }

    fn buffer_settings(&self) -> BufferSettings {
        buffers()
    }
}

impl<D: Message + Default> Decoder for Reader<D> {
    type Item = D;
    type Error = Status;

    /// INTERNAL with its cause: for a client, an answer that is no message is a defect. The edge of a server makes it the caller's fault.
    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<D>, Status> {
        D::decode(bytes).map(Some).map_err(|error| {
            let mut status = Status::internal(error.to_string());
            status.set_source(Arc::new(error));
            status
        })
    }

    fn buffer_settings(&self) -> BufferSettings {
        buffers()
    }
}

fn buffers() -> BufferSettings {
    BufferSettings::new(BUFFER_BYTES, PIECE_BYTES)
}
