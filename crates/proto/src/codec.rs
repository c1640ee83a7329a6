//! Protobuf codec with small buffers.
//!
//! Most messages have some hundred bytes, and each call in progress owns such buffers or is sent from one. The codec
//! therefore starts with a small buffer and reserves the exact size of a larger message.
//! Callers: the generated services and clients, instead of tonic's codec.

use std::{marker::PhantomData, sync::Arc};

use prost::Message;
use tonic::{
    Status,
    codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
};

/// Initial size of a message buffer, in bytes. A larger message reserves its size in one step.
const BUFFER_BYTES: usize = 512;

/// Amount of a response stream that is sent in one piece, in bytes.
const PIECE_BYTES: usize = 32 << 10;

/// Codec that decodes messages of type `D` and encodes messages of type `E`.
#[derive(Debug)]
pub struct ProtobufCodec<E, D>(PhantomData<(E, D)>);

impl<E, D> Default for ProtobufCodec<E, D> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

/// Encoder of messages of type `E`.
#[derive(Debug)]
pub struct ProtobufEncoder<E>(PhantomData<E>);

/// Decoder of messages of type `D`.
#[derive(Debug)]
pub struct Reader<D>(PhantomData<D>);

impl<E, D> Codec for ProtobufCodec<E, D>
where
    E: Message + 'static,
    D: Message + Default + 'static,
{
    type Encode = E;
    type Decode = D;
    type Encoder = ProtobufEncoder<E>;
    type Decoder = Reader<D>;

    fn encoder(&mut self) -> ProtobufEncoder<E> {
        ProtobufEncoder(PhantomData)
    }

    fn decoder(&mut self) -> Reader<D> {
        Reader(PhantomData)
    }
}

impl<E: Message> Encoder for ProtobufEncoder<E> {
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

    /// Decodes one message.
    ///
    /// # Errors
    /// `INTERNAL` with the decode error as source. A client treats an undecodable response as a defect. The edge of a
    /// server reports an undecodable request as the caller's fault.
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
