//! Traffic of a connection: its frames in both directions, counted against its allowance.

use std::time::Instant;

use super::{
    allowance::{Allowance, ENHANCE_YOUR_CALM, Excess},
    frames::{Frames, GOAWAY, HEADERS, encode},
};

/// Units of a turn that the first frame of a call takes while the caller is not known, and afterwards. Work for a caller who is not known
/// comes in small portions between that for others.
const CALL_UNITS_UNKNOWN: usize = 8;
const CALL_UNITS: usize = 2;

/// Frames of a connection, and the allowance for them.
#[derive(Debug)]
pub struct Traffic {
    received: Frames,
    sent: Frames,
    allowance: Allowance,
}

impl Traffic {
    /// Traffic of a new connection that may have `streams` calls under way, and whose peer first sends `preface` bytes.
    pub fn new(preface: usize, streams: u32) -> Self {
        Self {
            received: Frames::behind(preface),
            sent: Frames::behind(0),
            allowance: Allowance::new(streams, Instant::now()),
        }
    }

    /// Counts the frames in `bytes` that the peer sent, and returns how many units of a turn they take.
    pub fn receive(&mut self, bytes: &[u8], is_known: bool) -> usize {
        let (mut units, now) = (0, Instant::now());
        let call_units = if is_known { CALL_UNITS } else { CALL_UNITS_UNKNOWN };
        self.allowance.set_known(is_known);
        self.received.read(bytes, |frame| {
            units += if frame.kind == HEADERS { call_units } else { 1 };
            self.allowance.received(frame, now);
        });
        units
    }

    /// Counts the frames in `bytes` that were sent to the peer.
    pub fn send(&mut self, bytes: &[u8]) {
        let now = Instant::now();
        self.sent.read(bytes, |frame| self.allowance.sent(frame, now));
    }

    /// Bytes of the payload that the peer is known to be sending.
    pub fn announced(&self) -> usize {
        self.received.left()
    }

    /// Bytes that have to be sent before another frame may be.
    pub fn unfinished(&self) -> usize {
        self.sent.unfinished()
    }

    /// Returns the kind of frames that used up the allowance, if it is used up.
    pub fn excess(&self) -> Option<Excess> {
        self.allowance.excess()
    }

    /// The frame that ends the connection for `excess`.
    pub fn goaway(&self, excess: Excess) -> Vec<u8> {
        let (newest, code) = (self.allowance.newest().to_be_bytes(), ENHANCE_YOUR_CALM.to_be_bytes());
        encode(GOAWAY, 0, &[&newest, &code, excess.text().as_bytes()].concat())
    }
}
