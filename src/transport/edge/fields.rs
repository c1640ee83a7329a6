//! How many fields a message has, counted as its bytes arrive and before anybody reads them: two bytes may become a hundred. What is
//! within fields is not counted. It becomes some ten times its bytes, and that only until it is looked at.

use crate::transport::{convert::request::TICKETS_MAX, proto};

/// The most fields that a message may have: the longest list, and beside it all that any message has.
pub const FIELDS_MAX: usize = TICKETS_MAX + 1024;

/// What one of many fields becomes, in bytes: the largest that others than administrators may send.
pub const FIELD_BYTES: usize = size_of::<proto::ObservedUse>();

/// The fields that were seen so far.
#[derive(Debug, Default)]
pub(super) struct Fields {
    count: usize,
    next: Part,
    /// What is known of the number that is being read, and of how many bits that is.
    number: u64,
    bits: u32,
}

/// What comes next in a message.
#[derive(Debug, Default, Clone, Copy)]
enum Part {
    /// The number and the type of a field.
    #[default]
    Key,
    /// A field that is a number.
    Number,
    /// How long a field is.
    Length,
    /// So many bytes of a field.
    Content(u64),
    /// Nothing that can be read, by anybody.
    Nonsense,
}

impl Part {
    fn content(bytes: u64) -> Self {
        if bytes == 0 { Self::Key } else { Self::Content(bytes) }
    }
}

impl Fields {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Reads on.
    pub fn read(&mut self, mut bytes: &[u8]) {
        while let Some((byte, rest)) = bytes.split_first() {
            bytes = match self.next {
                Part::Nonsense => return,
                Part::Content(left) => {
                    let here = usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
                    let (content, rest) = bytes.split_at(here);
                    self.next = Part::content(left.saturating_sub(content.len() as u64));
                    rest
                }
                Part::Key | Part::Number | Part::Length => {
                    self.read_number(*byte);
                    rest
                }
            };
        }
    }

    /// Reads a byte of a number, and what it says if it is the last one.
    fn read_number(&mut self, byte: u8) {
        self.number |= u64::from(byte & 0x7f) << self.bits;
        self.bits += 7;
        if byte & 0x80 != 0 {
            if self.bits > u64::BITS {
                self.next = Part::Nonsense;
            }
            return;
        }
        let number = std::mem::take(&mut self.number);
        self.bits = 0;
        self.next = match self.next {
            // No field has this number.
            Part::Key if number >> 3 == 0 => Part::Nonsense,
            Part::Key => {
                self.count += 1;
                match number & 7 {
                    0 => Part::Number,
                    1 => Part::Content(8),
                    2 => Part::Length,
                    // A group: its fields count, too.
                    3 | 4 => Part::Key,
                    5 => Part::Content(4),
                    _ => Part::Nonsense,
                }
            }
            Part::Length => Part::content(number),
            _ => Part::Key,
        };
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    #[test]
    fn fields_are_counted_however_they_are_cut() {
        let resource =
            proto::Resource { kind: Some(proto::resource::Kind::Cpu(proto::CpuResource { cores: i64::MAX })) };
        let one = proto::ObservedUse { ticket_id: vec![7; 300], resource: Some(resource) };
        let heartbeat =
            proto::HeartbeatRequest { epoch: -1, sequence: 300, observed: vec![one; 5], ..Default::default() };
        // A double, a float, and a group with a field of its own, which nobody knows.
        let unknown = [0xf9, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0xfd, 1, 1, 2, 3, 4, 0xfb, 1, 8, 1, 0xfc, 1];
        let message = [heartbeat.encode_to_vec().as_slice(), &[0x3a, 0].repeat(50), &unknown].concat();
        assert_eq!(proto::HeartbeatRequest::decode(message.as_slice()).unwrap().observed.len(), 55);
        for cut in 0..message.len() {
            let (first, second) = message.split_at(cut);
            let mut fields = Fields::default();
            fields.read(first);
            fields.read(second);
            assert_eq!(fields.count(), 7 + 50 + 5, "cut at {cut}");
        }
    }

    #[test]
    fn what_is_no_message_is_not_read_on() {
        for nonsense in [
            [0xff; 20].as_slice(),
            &[0x3f; 20],
            &[0; 20],
            &[0x3a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1],
        ] {
            let mut fields = Fields::default();
            fields.read(nonsense);
            fields.read(&[0x3a, 0].repeat(50));
            assert!(fields.count() <= 1, "{nonsense:?}");
        }
    }
}
