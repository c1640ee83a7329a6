//! How messages are read and written: as protobuf, in buffers of about their own size. Most have some hundred bytes, and every call
//! that is under way has such buffers, or is answered from one.

use std::marker::PhantomData;

use prost::Message;
use tonic::{
    Status,
    codec::{BufferSettings, Codec, EncodeBuf, Encoder},
};
use tonic_prost::ProstDecoder;

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

impl<E, D> Codec for Protobuf<E, D>
where
    E: Message + 'static,
    D: Message + Default + 'static,
{
    type Encode = E;
    type Decode = D;
    type Encoder = Writer<E>;
    type Decoder = ProstDecoder<D>;

    fn encoder(&mut self) -> Writer<E> {
        Writer(PhantomData)
    }

    fn decoder(&mut self) -> ProstDecoder<D> {
        ProstDecoder::new(buffers())
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

fn buffers() -> BufferSettings {
    BufferSettings::new(BUFFER_BYTES, PIECE_BYTES)
}
