//! Field counter: counts the fields of a protobuf message as its bytes arrive, before it is decoded.
//!
//! Two bytes of a message may decode to a hundred, so the byte budget charges fields besides bytes. Nested content is
//! not counted: it grows about tenfold, and only until it is converted. The counter never rejects a message. Caller:
//! `body`.

use crate::convert::request::TICKETS_MAX;
use rm_proto::v1 as proto;

/// Maximum number of fields of a message: the longest list, and all other fields of any message.
pub const FIELDS_MAX: usize = TICKETS_MAX + 1024;

/// Size of one decoded field, in bytes: the largest that callers other than administrators may send.
pub const FIELD_BYTES: usize = size_of::<proto::ObservedUse>();

/// Position in a message, and the number of its fields so far.
#[derive(Debug, Default)]
pub(super) struct FieldScanner {
    count: usize,
    next: FieldPart,
    /// Value and bits so far of the number that is being read.
    number: u64,
    bits: u32,
}

/// Next part of a message.
#[derive(Debug, Default, Clone, Copy)]
enum FieldPart {
    /// Number and type of a field.
    #[default]
    Key,
    /// Value of a numeric field.
    Number,
    /// Length of a field.
    Length,
    /// Remaining bytes of a field.
    Content(u64),
    /// Bytes that are no protobuf.
    Nonsense,
}

impl FieldPart {
    fn content(bytes: u64) -> Self {
        if bytes == 0 { Self::Key } else { Self::Content(bytes) }
    }
}

impl FieldScanner {
    /// Returns the number of fields so far.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Reads the next bytes of the message.
    pub fn read(&mut self, mut bytes: &[u8]) {
        while let Some((byte, rest)) = bytes.split_first() {
            bytes = match self.next {
                FieldPart::Nonsense => return,
                FieldPart::Content(left) => {
                    let here = usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
                    let (content, rest) = bytes.split_at(here);
                    self.next = FieldPart::content(left.saturating_sub(content.len() as u64));
                    rest
                }
                FieldPart::Key | FieldPart::Number | FieldPart::Length => {
                    self.read_number(*byte);
                    rest
                }
            };
        }
    }

    /// Reads one byte of a number, and evaluates the number after its last byte.
    fn read_number(&mut self, byte: u8) {
        self.number |= u64::from(byte & 0x7f) << self.bits;
        self.bits += 7;
        if byte & 0x80 != 0 {
            if self.bits > u64::BITS {
                self.next = FieldPart::Nonsense;
            }
            return;
        }
        let number = std::mem::take(&mut self.number);
        self.bits = 0;
        self.next = match self.next {
            // Field number 0 is not valid.
            FieldPart::Key if number >> 3 == 0 => FieldPart::Nonsense,
            FieldPart::Key => {
                self.count += 1;
                match number & 7 {
                    0 => FieldPart::Number,
                    1 => FieldPart::Content(8),
                    2 => FieldPart::Length,
                    // A group: its fields are counted, too.
                    3 | 4 => FieldPart::Key,
                    5 => FieldPart::Content(4),
                    _ => FieldPart::Nonsense,
                }
            }
            FieldPart::Length => FieldPart::content(number),
            _ => FieldPart::Key,
        };
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    #[test]
    fn field_count_is_independent_of_fragments() {
        let resource =
            proto::Resource { kind: Some(proto::resource::Kind::Cpu(proto::CpuResource { cores: i64::MAX })) };
        let one = proto::ObservedUse { ticket_id: vec![7; 300], resource: Some(resource) };
        let heartbeat =
            proto::HeartbeatRequest { epoch: -1, sequence: 300, observed: vec![one; 5], ..Default::default() };
        // A double, a float, and a group with one field, all of unknown numbers.
        let unknown = [0xf9, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0xfd, 1, 1, 2, 3, 4, 0xfb, 1, 8, 1, 0xfc, 1];
        let message = [heartbeat.encode_to_vec().as_slice(), &[0x3a, 0].repeat(50), &unknown].concat();
        assert_eq!(proto::HeartbeatRequest::decode(message.as_slice()).unwrap().observed.len(), 55);
        for cut in 0..message.len() {
            let (first, second) = message.split_at(cut);
            let mut fields = FieldScanner::default();
            fields.read(first);
            fields.read(second);
            assert_eq!(fields.count(), 7 + 50 + 5, "cut at {cut}");
        }
    }

    #[test]
    fn field_count_stops_at_invalid_message() {
        for nonsense in [
            [0xff; 20].as_slice(),
            &[0x3f; 20],
            &[0; 20],
            &[0x3a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1],
        ] {
            let mut fields = FieldScanner::default();
            fields.read(nonsense);
            fields.read(&[0x3a, 0].repeat(50));
            assert!(fields.count() <= 1, "{nonsense:?}");
        }
    }
}
