//! Request body of a call, as it arrives: one message, or the queries of a stream.
//!
//! The byte budgets are charged before the service reads a message. The charges are the announced length, the length
//! after decompression, and the size of the decoded fields. A message beyond a budget fails its call and never waits.
//! Caller: `service`.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use http_body::{Body as HttpBody, Frame};
use tokio::time::{Sleep, sleep};
use tonic::{Status, body::Body, codegen::Bytes};

use crate::status::to_status;
use rm_model::name::FieldError;
use rm_service::error::Error;

use super::{
    PREFIX_BYTES, UNCOUNTED_BYTES,
    fields::{FIELD_BYTES, FIELDS_MAX, FieldScanner},
    gzip,
    service::{CallPermit, StreamDeadline},
};

/// Request body as it arrives.
#[derive(Debug)]
pub struct RequestBody {
    body: Body,
    kind: BodyEncoding,
}

#[derive(Debug)]
enum BodyEncoding {
    Message(MessageBuffer),
    /// Queries of some bytes each, until the caller or the server ends the stream.
    Stream(StreamDeadline),
}

impl RequestBody {
    /// Creates the body of `call` with one message of at most `limit` bytes. A message in gzip is decompressed here.
    pub(super) fn message(body: Body, call: Arc<CallPermit>, is_gzip: bool, limit: usize) -> Self {
        Self { body, kind: BodyEncoding::Message(MessageBuffer::new(call, is_gzip, limit)) }
    }

    /// Creates the body of a stream that ends with `closing`.
    pub(super) fn stream(body: Body, closing: StreamDeadline) -> Self {
        Self { body, kind: BodyEncoding::Stream(closing) }
    }
}

/// First bytes of a body, with the length of its message.
#[derive(Debug, Default)]
struct MessagePrefix {
    bytes: [u8; PREFIX_BYTES],
    known: usize,
}

impl MessagePrefix {
    /// Reads bytes of the prefix. Returns the announced size of the body, or `None` until the prefix is complete.
    fn read(&mut self, data: &[u8]) -> Option<usize> {
        for (place, byte) in self.bytes.iter_mut().skip(self.known).zip(data) {
            *place = *byte;
            self.known += 1;
        }
        self.body_bytes()
    }

    fn body_bytes(&self) -> Option<usize> {
        let [_, a, b, c, d] = self.bytes;
        let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
        (self.known == PREFIX_BYTES).then(|| length.saturating_add(PREFIX_BYTES))
    }

    /// Returns true if the flag of the prefix has arrived and marks a compressed message.
    ///
    /// # Errors
    /// [`Error::CompressedFlag`] if the flag is neither 0 nor 1, or is 1 without an encoding.
    fn is_compressed(&self, is_gzip: bool) -> Result<bool, Error> {
        let [flag, ..] = self.bytes;
        match flag {
            0 => Ok(false),
            1 if is_gzip => Ok(self.known > 0),
            1 => Err(Error::CompressedFlag("1, and grpc-encoding names no encoding; name it, or send the flag 0")),
            _ => Err(Error::CompressedFlag("neither 0 nor 1; send 0 for a message that is not compressed")),
        }
    }
}

/// Returns the prefix of an uncompressed message of this size in bytes.
fn prefix(bytes: usize) -> [u8; PREFIX_BYTES] {
    let [a, b, c, d] = u32::try_from(bytes).unwrap_or(u32::MAX).to_be_bytes();
    [0, a, b, c, d]
}

/// One message and its charge to the byte budgets.
///
/// Its announced size is charged first, because the decoder allocates it then. A compressed message is charged its
/// decompressed size before it is decompressed. The size of the decoded fields is charged as they arrive. A charge that
/// does not fit fails the call and never waits.
struct MessageBuffer {
    call: Arc<CallPermit>,
    prefix: MessagePrefix,
    received: usize,
    fields: FieldScanner,
    is_gzip: bool,
    /// Maximum size, in bytes.
    limit: usize,
    /// Bytes of a compressed message that have arrived.
    packed: Vec<u8>,
    late: Option<Pin<Box<Sleep>>>,
}

impl fmt::Debug for MessageBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("prefix", &self.prefix)
            .field("received", &self.received)
            .finish_non_exhaustive()
    }
}

impl MessageBuffer {
    fn new(call: Arc<CallPermit>, is_gzip: bool, limit: usize) -> Self {
        let (prefix, fields) = (MessagePrefix::default(), FieldScanner::default());
        Self { call, prefix, received: 0, fields, is_gzip, limit, packed: Vec::new(), late: None }
    }

    /// Returns true if the whole message has arrived.
    fn is_whole(&self) -> bool {
        self.prefix.body_bytes().is_some_and(|bytes| self.received >= bytes)
    }

    /// Charges `data` and returns the bytes that the service reads now, if any.
    fn take(&mut self, mut data: Bytes) -> Result<Option<Bytes>, Error> {
        let (before, announced) = (self.received, self.prefix.read(&data));
        let is_compressed = self.prefix.is_compressed(self.is_gzip)?;
        if let Some(announced) = announced {
            if announced > self.limit.saturating_add(PREFIX_BYTES) {
                return Err(self.too_large());
            }
            // Bytes after the message do not belong to the call.
            data.truncate(announced.saturating_sub(before));
        }
        self.received = before.saturating_add(data.len());
        if is_compressed {
            return self.take_packed(&data, announced);
        }
        if announced.is_some_and(|announced| announced > UNCOUNTED_BYTES) {
            self.fields.read(data.get(PREFIX_BYTES.saturating_sub(before)..).unwrap_or_default());
        }
        self.reserve(announced.unwrap_or_default())?;
        Ok(Some(data))
    }

    /// Charges a piece of a compressed message. Returns the decompressed message when it is complete.
    fn take_packed(&mut self, data: &[u8], announced: Option<usize>) -> Result<Option<Bytes>, Error> {
        self.packed.extend_from_slice(data);
        self.reserve(announced.unwrap_or_default())?;
        if !self.is_whole() {
            return Ok(None);
        }
        let packed = std::mem::take(&mut self.packed);
        let packed = packed.get(PREFIX_BYTES..).unwrap_or_default();
        let length = gzip::length(packed).ok_or_else(spoilt)?;
        if length > self.limit {
            // The length is read from the last bytes of the input, which may be arbitrary.
            return Err(if gzip::is_longer(packed, self.limit) { self.too_large() } else { spoilt() });
        }
        self.reserve(self.received.saturating_add(length))?;
        let mut unpacked = Vec::with_capacity(PREFIX_BYTES + length);
        unpacked.extend(prefix(length));
        gzip::unpack(packed, length, &mut unpacked).ok_or_else(spoilt)?;
        if unpacked.len() > UNCOUNTED_BYTES {
            self.fields.read(unpacked.get(PREFIX_BYTES..).unwrap_or_default());
            self.reserve(self.received.saturating_add(length))?;
        }
        Ok(Some(unpacked.into()))
    }

    /// Charges the known size to the budgets: `bytes` or the received ones, and the decoded fields.
    fn reserve(&self, bytes: usize) -> Result<(), Error> {
        let fields = self.fields.count();
        if fields > FIELDS_MAX {
            return Err(FieldError::new("the message", format!("has more than {FIELDS_MAX} fields")).into());
        }
        let bytes = bytes.max(self.received).saturating_add(fields.saturating_mul(FIELD_BYTES));
        // The largest message fits if its connection has no other.
        if self.call.take(bytes.min(self.call.edge.bounds.connection_bytes())) {
            return Ok(());
        }
        self.call.edge.gauges.shed.add();
        Err(Error::TooManyBytes)
    }

    fn too_large(&self) -> Error {
        Error::MessageTooLarge { limit: self.limit }
    }

    /// Returns the error of a body that ends before its message.
    fn cut_off(&self) -> Error {
        if self.received == 0 {
            return Error::NoMessage;
        }
        FieldError::new("the message", "ends before its announced length; send all of it").into()
    }

    /// Completes after the timeout without further bytes.
    fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<Error> {
        let longest = self.call.edge.bounds.body_timeout;
        ready!(self.late.get_or_insert_with(|| Box::pin(sleep(longest))).as_mut().poll(cx));
        self.call.edge.gauges.late.add();
        Poll::Ready(Error::BodyTimeout(longest))
    }

    fn poll_frame(
        &mut self,
        mut body: Pin<&mut Body>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        while !self.is_whole() {
            let frame = match body.as_mut().poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(None) => return Poll::Ready(Some(Err(to_status(self.cut_off())))),
                Poll::Ready(end) => return Poll::Ready(end),
                Poll::Pending => return self.poll_late(cx).map(|error| Some(Err(to_status(error)))),
            };
            match frame.into_data().map(|data| self.take(data)) {
                Ok(Ok(Some(data))) => return Poll::Ready(Some(Ok(Frame::data(data)))),
                Ok(Ok(None)) => {}
                Ok(Err(error)) => return Poll::Ready(Some(Err(to_status(error)))),
                Err(_trailers) => return Poll::Ready(Some(Err(to_status(self.cut_off())))),
            }
        }
        Poll::Ready(None)
    }
}

fn spoilt() -> Error {
    FieldError::new(
        "the message",
        "does not match its gzip trailer after decompression; compress it as one gzip member",
    )
    .into()
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Self { body, kind } = &mut *self;
        let mut body = Pin::new(body);
        match kind {
            BodyEncoding::Message(message) => message.poll_frame(body, cx),
            BodyEncoding::Stream(closing) => match body.as_mut().poll_frame(cx) {
                // The response states why the stream ends.
                Poll::Pending => closing.poll(cx).map(|_| None),
                frame => frame,
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            BodyEncoding::Message(message) => message.is_whole(),
            BodyEncoding::Stream(_) => self.body.is_end_stream(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::gzip::tests::pack, *};
    use crate::edge::{Edge, EdgeBounds, connection::Peer, service::CallClass};
    use crate::message_size::HEARTBEAT_BYTES_MAX;

    struct TestCaller {
        edge: Arc<Edge>,
        peer: Arc<Peer>,
    }

    impl TestCaller {
        fn new(body_bytes: usize) -> Self {
            let edge = Edge::new(EdgeBounds { body_bytes, ..EdgeBounds::DEFAULT }, None);
            let peer = Arc::new(Peer::new(&edge, None, None));
            Self { edge, peer }
        }

        fn message(&self) -> MessageBuffer {
            let call = Arc::new(CallPermit::begin(&self.edge, Some(&self.peer), CallClass::Work).unwrap());
            MessageBuffer::new(call, true, HEARTBEAT_BYTES_MAX)
        }

        fn bytes(&self) -> usize {
            usize::try_from(self.edge.gauges.bytes_in_flight()).unwrap()
        }
    }

    fn body(flag: u8, message: &[u8]) -> Bytes {
        let [_, length @ ..] = prefix(message.len());
        [&[flag], length.as_slice(), message].concat().into()
    }

    #[test]
    fn message_length_is_read_across_fragments() {
        let message = [0, 0, 0, 1, 2, 9, 9];
        for cut in 0..message.len() {
            let (first, second) = message.split_at(cut);
            let mut prefix = MessagePrefix::default();
            let lengths = [prefix.read(first), prefix.read(second)];
            assert_eq!(lengths, [(cut >= PREFIX_BYTES).then_some(263), Some(263)], "cut at {cut}");
        }
    }

    /// A small compressed message is charged its decompressed size before it is read.
    #[test]
    fn compressed_message_uses_budget_of_its_content() {
        let message = [&[10, 0x80, 0x80, 0x40], vec![7; 1 << 20].as_slice()].concat();
        let packed = body(1, &pack(&message));
        for cut in 0..packed.len() {
            let caller = TestCaller::new(64 << 20);
            let mut received = caller.message();
            let (first, second) = (packed.slice(..cut), packed.slice(cut..));
            assert_eq!(received.take(first).unwrap().unwrap_or_default(), [0; 0][..]);
            assert!(caller.bytes() <= packed.len(), "not known yet");
            assert_eq!(received.take(second).unwrap().unwrap(), body(0, &message));
            assert_eq!(caller.bytes(), packed.len() + message.len() + FIELD_BYTES, "cut at {cut}");
        }
        let caller = TestCaller::new(16 << 20);
        let mut messages: Vec<_> = (0..5).map(|_| caller.message()).collect();
        let taken = messages.iter_mut().filter_map(|message| message.take(packed.clone()).ok()).count();
        assert_eq!(taken, 3, "a connection has a quarter");
    }

    #[test]
    fn compressed_message_with_false_length_is_rejected() {
        let packed = pack(&[7; 1 << 20]);
        for behind in [[0; 4], 100_u32.to_le_bytes()] {
            let lie = body(1, &[packed.as_slice(), &behind].concat());
            let caller = TestCaller::new(64 << 20);
            let mut message = caller.message();
            assert!(matches!(message.take(lie), Err(Error::InvalidField(_))));
        }
        let take = |bytes: &[u8]| TestCaller::new(64 << 20).message().take(body(1, bytes));
        let spoilt = [packed.as_slice(), &[0xff; 4]].concat();
        assert!(matches!(take(&spoilt), Err(Error::InvalidField(_))), "the stated length is far above the real one");
        let too_large = pack(&vec![7; HEARTBEAT_BYTES_MAX + 1]);
        assert!(matches!(take(&too_large), Err(Error::MessageTooLarge { limit: HEARTBEAT_BYTES_MAX })));
    }

    #[test]
    fn decoded_fields_are_charged_to_the_budget() {
        let of = |fields: usize| body(0, &[0x3a, 0].repeat(fields));
        let caller = TestCaller::new(64 << 20);
        let mut message = caller.message();
        let whole = of(50_000);
        for piece in whole.chunks(16_385) {
            message.take(Bytes::copy_from_slice(piece)).unwrap();
        }
        assert_eq!(caller.bytes(), whole.len() + 50_000 * FIELD_BYTES);
        assert!(message.is_whole() && message.take(of(1)).unwrap().is_some_and(|behind| behind.is_empty()));
        let (mut second, mut third) = (caller.message(), caller.message());
        assert!(second.take(of(50_000)).is_ok(), "14 of the 16 MB of its connection");
        assert!(matches!(third.take(of(50_000)), Err(Error::TooManyBytes)));
        for body in [of(FIELDS_MAX + 1), body(1, &pack(&[0x3a, 0].repeat(FIELDS_MAX + 1)))] {
            assert!(matches!(TestCaller::new(64 << 20).message().take(body), Err(Error::InvalidField(_))));
        }
        let least = TestCaller::new(super::super::BODY_BYTES_LEAST);
        assert!(least.message().take(of(FIELDS_MAX)).is_ok(), "the largest message fits alone");
        // The fields of a small message are not counted.
        let caller = TestCaller::new(64 << 20);
        let mut small = caller.message();
        small.take(of(1000)).unwrap();
        assert_eq!(caller.bytes(), 2005);
    }
}
