//! Frame reader: finds the HTTP/2 frames in the bytes of one direction of a connection, without a copy of them.
//!
//! The reader decodes the nine bytes before each payload, and the error code of a frame that has one. It skips the
//! payload and never validates a frame: the HTTP/2 library does that. Caller: `traffic`.

/// Size of the header of a frame, in bytes.
const HEADER_BYTES: usize = 9;

/// Type of a DATA frame, as on the wire (RFC 9113, section 6).
pub const DATA: u8 = 0;
/// Type of a HEADERS frame.
pub const HEADERS: u8 = 1;
/// Type of a RST_STREAM frame.
pub const RST_STREAM: u8 = 3;
/// Type of a SETTINGS frame.
pub const SETTINGS: u8 = 4;
/// Type of a PING frame.
pub const PING: u8 = 6;
/// Type of a GOAWAY frame.
pub const GOAWAY: u8 = 7;

/// Flag of SETTINGS and PING: an acknowledgement.
const ACK: u8 = 0x1;

/// Flag of DATA and HEADERS: the last frame of its direction in the stream.
const END_STREAM: u8 = 0x1;

/// Decoded header of a frame.
#[derive(Debug, Clone, Copy)]
pub struct Frame {
    /// Type of the frame.
    pub kind: u8,
    flags: u8,
    /// Number of its stream; 0 for the connection.
    pub stream: u32,
    /// Size of its payload, in bytes.
    pub length: usize,
    /// Error code of RST_STREAM and GOAWAY; 0 for other types.
    pub code: u32,
}

impl Frame {
    /// Returns true if the frame acknowledges a SETTINGS or PING frame.
    pub fn is_ack(&self) -> bool {
        matches!(self.kind, SETTINGS | PING) && self.flags & ACK != 0
    }

    /// Returns true if the frame is the last of its direction in its stream.
    pub fn ends_stream(&self) -> bool {
        matches!(self.kind, DATA | HEADERS) && self.flags & END_STREAM != 0
    }
}

/// Position in the frames of one direction.
#[derive(Debug)]
pub struct Frames {
    /// First bytes of the current frame, up to its error code.
    head: [u8; HEADER_BYTES + 8],
    /// Number of bytes in `head`.
    known: usize,
    /// Bytes to skip before the next frame begins.
    left: usize,
}

impl Frames {
    /// Creates a reader of frames after `preface` other bytes.
    pub fn behind(preface: usize) -> Self {
        Self { head: [0; HEADER_BYTES + 8], known: 0, left: preface }
    }

    /// Returns the bytes that are known to precede the next frame.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Returns the bytes that complete the known part of the current frame; 0 between two frames.
    pub fn unfinished(&self) -> usize {
        match (self.left, self.known) {
            (0, 0) => 0,
            (0, known) => self.head_bytes().saturating_sub(known),
            (left, _) => left,
        }
    }

    /// Reads `bytes` and passes each frame to `found` once its header is complete.
    pub fn read(&mut self, mut bytes: &[u8], mut found: impl FnMut(Frame)) {
        while !bytes.is_empty() {
            let skipped = self.left.min(bytes.len());
            self.left -= skipped;
            bytes = bytes.get(skipped..).unwrap_or_default();
            let taken = self.head_bytes().saturating_sub(self.known).min(bytes.len());
            let (first, rest) = bytes.split_at(taken);
            for (place, byte) in self.head.iter_mut().skip(self.known).zip(first) {
                *place = *byte;
            }
            self.known += taken;
            bytes = rest;
            if self.known >= HEADER_BYTES && self.known == self.head_bytes() {
                let frame = self.frame();
                self.left = (HEADER_BYTES + frame.length).saturating_sub(self.known);
                self.known = 0;
                found(frame);
            }
        }
    }

    /// Returns how many bytes of `head` the current frame needs.
    fn head_bytes(&self) -> usize {
        let [a, b, c, kind, ..] = self.head;
        if self.known < HEADER_BYTES {
            return HEADER_BYTES;
        }
        let code_ends = match kind {
            RST_STREAM => 4,
            GOAWAY => 8,
            _ => 0,
        };
        HEADER_BYTES + length([a, b, c]).min(code_ends)
    }

    fn frame(&self) -> Frame {
        let [a, b, c, kind, flags, s0, s1, s2, s3, first @ ..] = self.head;
        let length = length([a, b, c]);
        let code = match (kind, length, first) {
            (RST_STREAM, 4.., [a, b, c, d, ..]) | (GOAWAY, 8.., [_, _, _, _, a, b, c, d]) => {
                u32::from_be_bytes([a, b, c, d])
            }
            _ => 0,
        };
        let stream = u32::from_be_bytes([s0, s1, s2, s3]) & (u32::MAX >> 1);
        Frame { kind, flags, stream, length, code }
    }
}

fn length([a, b, c]: [u8; 3]) -> usize {
    usize::try_from(u32::from_be_bytes([0, a, b, c])).unwrap_or(usize::MAX)
}

/// Encodes a frame with a short payload.
pub fn encode(kind: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let [_, length @ ..] = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&length, [kind, 0].as_slice(), &stream.to_be_bytes(), payload].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_found_across_fragments() {
        let bytes = [
            b"PREFACE".as_slice(),
            &encode(SETTINGS, 0, &[]),
            &encode(HEADERS, 1, &[9; 300]),
            &encode(RST_STREAM, 0x8000_0001, &8_u32.to_be_bytes()),
            &encode(RST_STREAM, 3, &[1]),
            &encode(GOAWAY, 0, &[[0, 0, 0, 5, 0, 0, 0, 11].as_slice(), b"text"].concat()),
            &encode(DATA, 5, &[]),
        ]
        .concat();
        for cut in 0..bytes.len() {
            let (mut frames, mut found) = (Frames::behind(7), vec![]);
            let (first, second) = bytes.split_at(cut);
            frames.read(first, |frame| found.push((frame.kind, frame.stream, frame.length, frame.code)));
            let unfinished = frames.unfinished();
            frames.read(second, |frame| found.push((frame.kind, frame.stream, frame.length, frame.code)));
            let expected = [
                (SETTINGS, 0, 0, 0),
                (HEADERS, 1, 300, 0),
                (RST_STREAM, 1, 4, 8),
                (RST_STREAM, 3, 1, 0),
                (GOAWAY, 0, 12, 11),
                (DATA, 5, 0, 0),
            ];
            assert_eq!(found[..4], expected[..4], "cut at {cut}");
            assert_eq!((found.len(), frames.unfinished()), (6, 0), "cut at {cut}");
            assert!(unfinished <= second.len(), "cut at {cut}");
        }
    }
}
