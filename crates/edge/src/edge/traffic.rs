//! Traffic of a connection: its frames in both directions, counted against its allowance. Caller: `connection`.

use std::time::Instant;

use super::{
    allowance::{Allowance, ENHANCE_YOUR_CALM, Excess},
    frames::{Frames, GOAWAY, HEADERS, encode},
};

/// Units of a turn for the first frame of a call whose caller is not authenticated. Work for such callers is spread
/// between other work.
const CALL_UNITS_UNKNOWN: usize = 8;
/// Units of a turn for the first frame of a call after authentication.
const CALL_UNITS: usize = 2;

/// Frames of a connection, and the allowance for them.
#[derive(Debug)]
pub struct Traffic {
    received: Frames,
    sent: Frames,
    allowance: Allowance,
}

impl Traffic {
    /// Creates the traffic of a new connection that may have `streams` calls in progress. Its peer first sends
    /// `preface` bytes.
    pub fn new(preface: usize, streams: u32) -> Self {
        Self {
            received: Frames::behind(preface),
            sent: Frames::behind(0),
            allowance: Allowance::new(streams, Instant::now()),
        }
    }

    /// Counts the frames in `bytes` that the peer sent. Returns the units of a turn that they take.
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

    /// Returns the remaining payload of the frame that the peer is sending, in bytes.
    pub fn announced(&self) -> usize {
        self.received.left()
    }

    /// Returns the bytes that have to be sent before another frame.
    pub fn unfinished(&self) -> usize {
        self.sent.unfinished()
    }

    /// Returns the kind of frames that used up the allowance, if it is used up.
    pub fn excess(&self) -> Option<Excess> {
        self.allowance.excess()
    }

    /// Returns the GOAWAY frame that ends the connection for `excess`.
    pub fn goaway(&self, excess: Excess) -> Vec<u8> {
        let (newest, code) = (self.allowance.newest().to_be_bytes(), ENHANCE_YOUR_CALM.to_be_bytes());
        encode(GOAWAY, 0, &[&newest, &code, excess.text().as_bytes()].concat())
    }
}
