//! Allowance of a connection for frames that are no part of a completed call: resets, pings, settings, window updates
//! and the like.
//!
//! Each such frame costs credit. Completed calls, sent data and time earn credit, up to a bound. A connection without
//! credit is ended. An honest client may send these frames in proportion to its completed calls, and a burst besides.
//!
//! The reset of a call that has been in progress for a while is free, once for each call. The number of concurrent
//! calls of a connection bounds such resets. They occur when a crowd of waiting calls is cut off, or when deadlines
//! expire.
//!
//! Caller: `traffic`.

use std::time::{Duration, Instant};

use rm_model::text_enum;

use super::frames::{DATA, Frame, GOAWAY, HEADERS, PING, RST_STREAM, SETTINGS};

/// Initial and maximum credit of a connection, per call that it may have in progress: one reset, or sixteen pings.
const CREDIT_PER_STREAM: u32 = 16;

/// Minimum number of calls for the credit, so that a small bound still permits an honest burst.
const STREAMS_MIN: u32 = 256;

/// Divisor of the maximum credit; the quotient is regained each second.
const REGAINED_EACH_SECOND: u32 = 4;

/// Interval between two times at which credit is regained. Rounding loses little credit at this interval.
const REGAINED_EVERY: Duration = Duration::from_millis(20);

/// Credit that a completed call earns: the cost of its reset.
const ANSWER_EARNS: u32 = 16;

/// Credit that a sent DATA frame earns. Window updates and a ping follow such a frame.
const DATA_EARNS: u32 = 4;

/// Cost of the reset of a call, by either side. Starting a call is free.
const RESET_COSTS: u32 = 16;

/// Factor of the cost of resets while the caller is not authenticated. Such a connection serves a few health checks.
const UNKNOWN_FACTOR: u32 = 4;

/// Cost of a SETTINGS frame: it may affect every stream of the connection.
const SETTINGS_COSTS: u32 = 16;

/// Cost of every other frame that is no part of a call, and of each short piece of a message.
const FRAME_COSTS: u32 = 1;

/// Size below which a DATA frame is a short piece of a message, in bytes.
const SHORT_DATA_BYTES: usize = 64;

/// Interval between two marks of the newest stream. A call is settled one to two intervals after its start; its reset
/// is free then.
const MARKED_EVERY: Duration = Duration::from_millis(25);

/// Error code REFUSED_STREAM (RFC 9113, section 7).
const REFUSED_STREAM: u32 = 7;
/// Error code ENHANCE_YOUR_CALM: the peer sends too much.
pub const ENHANCE_YOUR_CALM: u32 = 11;
/// Error codes for which the HTTP/2 library resets a stream because of the peer: PROTOCOL_ERROR, FLOW_CONTROL_ERROR,
/// STREAM_CLOSED, FRAME_SIZE_ERROR.
const PEER_ERRORS: [u32; 4] = [1, 3, 5, 6];

text_enum! {
    /// Why a connection is ended: the kind of frames that used up its credit.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Excess {
        /// Resets of calls.
        Resets = "resets",
        /// PING frames.
        Pings = "pings",
        /// SETTINGS frames.
        Settings = "settings",
        /// Other frames.
        Frames = "frames",
        /// An excess that the HTTP/2 library found.
        Library = "library",
    }
}

impl Excess {
    /// Returns the text for the peer. A gRPC client that receives `too_many_pings` pings less.
    pub fn text(self) -> &'static str {
        match self {
            Self::Resets => "too_many_resets",
            Self::Pings => "too_many_pings",
            Self::Settings => "too_many_settings",
            Self::Frames | Self::Library => "too_many_frames",
        }
    }
}

/// Credit of one connection.
#[derive(Debug)]
pub struct Allowance {
    most: u32,
    credit: u32,
    regained_at: Instant,
    /// Number of the newest stream.
    newest: u32,
    /// Number of calls that the peer started.
    begun: u64,
    /// Number of settled calls that the peer reset.
    settled_resets: u64,
    /// Number of the newest settled stream.
    settled: u32,
    /// The newest stream at `marked_at`.
    mark: u32,
    marked_at: Instant,
    /// Whether the caller is authenticated.
    is_known: bool,
    excess: Option<Excess>,
}

impl Allowance {
    /// Creates the allowance of a new connection that may have `streams` calls in progress.
    pub fn new(streams: u32, now: Instant) -> Self {
        let most = streams.max(STREAMS_MIN).saturating_mul(CREDIT_PER_STREAM);
        Self {
            most,
            credit: most,
            regained_at: now,
            newest: 0,
            begun: 0,
            settled_resets: 0,
            settled: 0,
            mark: 0,
            marked_at: now,
            is_known: false,
            excess: None,
        }
    }

    /// Returns the kind of frames that used up the credit, if it is used up.
    pub fn excess(&self) -> Option<Excess> {
        self.excess
    }

    /// Sets whether the caller is authenticated.
    pub fn set_known(&mut self, is_known: bool) {
        self.is_known = is_known;
    }

    /// Returns the number of the newest stream that the peer started.
    pub fn newest(&self) -> u32 {
        self.newest
    }

    /// Counts a frame that the peer sent.
    pub fn received(&mut self, frame: Frame, now: Instant) {
        match frame.kind {
            HEADERS if frame.stream > self.newest => {
                self.settle(now);
                self.newest = frame.stream;
                self.begun += 1;
            }
            DATA if frame.length >= SHORT_DATA_BYTES || frame.ends_stream() => {}
            RST_STREAM => {
                self.settle(now);
                if frame.stream <= self.settled && self.settled_resets < self.begun {
                    self.settled_resets += 1;
                } else {
                    let factor = if self.is_known { 1 } else { UNKNOWN_FACTOR };
                    self.charge(RESET_COSTS * factor, Excess::Resets, now);
                }
            }
            SETTINGS if !frame.is_ack() => self.charge(SETTINGS_COSTS, Excess::Settings, now),
            PING => self.charge(FRAME_COSTS, Excess::Pings, now),
            _ => self.charge(FRAME_COSTS, Excess::Frames, now),
        }
    }

    /// Counts a frame that was sent to the peer.
    pub fn sent(&mut self, frame: Frame, now: Instant) {
        match frame.kind {
            _ if frame.ends_stream() => self.earn(ANSWER_EARNS),
            DATA => self.earn(DATA_EARNS),
            RST_STREAM if frame.code == REFUSED_STREAM => self.charge(FRAME_COSTS, Excess::Frames, now),
            RST_STREAM if PEER_ERRORS.contains(&frame.code) => self.charge(RESET_COSTS, Excess::Frames, now),
            GOAWAY if frame.code == ENHANCE_YOUR_CALM => self.excess = self.excess.or(Some(Excess::Library)),
            _ => {}
        }
    }

    fn earn(&mut self, credit: u32) {
        self.credit = self.credit.saturating_add(credit).min(self.most);
    }

    fn charge(&mut self, cost: u32, excess: Excess, now: Instant) {
        let passed = now.saturating_duration_since(self.regained_at);
        if passed >= REGAINED_EVERY {
            let regained = passed.as_micros().saturating_mul(u128::from(self.most / REGAINED_EACH_SECOND)) / 1_000_000;
            self.regained_at = now;
            self.earn(u32::try_from(regained).unwrap_or(u32::MAX));
        }
        match self.credit.checked_sub(cost) {
            Some(left) => self.credit = left,
            None => self.excess = self.excess.or(Some(excess)),
        }
    }

    /// Updates which streams are settled at `now`.
    fn settle(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.marked_at);
        if passed >= MARKED_EVERY {
            self.settled = if passed >= 2 * MARKED_EVERY { self.newest } else { self.mark };
            (self.mark, self.marked_at) = (self.newest, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edge::frames::{Frames, encode};

    const STREAMS: u32 = 1024;

    /// A connection with generated frames and its own clock.
    struct Connection {
        allowance: Allowance,
        now: Instant,
        next_stream: u32,
    }

    impl Connection {
        fn new() -> Self {
            let now = Instant::now();
            let mut allowance = Allowance::new(STREAMS, now);
            allowance.set_known(true);
            Self { allowance, now, next_stream: 1 }
        }

        fn receive(&mut self, kind: u8, stream: u32, payload: &[u8]) {
            let mut frames = Frames::behind(0);
            frames.read(&encode(kind, stream, payload), |frame| self.allowance.received(frame, self.now));
        }

        fn send(&mut self, kind: u8, flags: u8, payload: &[u8]) {
            let mut bytes = encode(kind, 1, payload);
            bytes[4] = flags;
            Frames::behind(0).read(&bytes, |frame| self.allowance.sent(frame, self.now));
        }

        fn begin(&mut self) -> u32 {
            let stream = self.next_stream;
            self.next_stream += 2;
            self.receive(HEADERS, stream, &[0; 30]);
            self.receive(DATA, stream, &[0; 80]);
            stream
        }

        fn reset(&mut self, stream: u32) {
            self.receive(RST_STREAM, stream, &8_u32.to_be_bytes());
        }

        fn answer(&mut self) {
            self.send(HEADERS, 0, &[0; 10]);
            self.send(DATA, 0, &[0; 50]);
            self.send(HEADERS, 1, &[0; 10]);
        }

        fn pass(&mut self, time: Duration) {
            self.now += time;
        }
    }

    /// Frames of a connection, and the time that passes between them.
    type Step = fn(&mut Connection);

    /// Returns the number of steps until the credit is used up.
    fn steps_until_excess(
        connection: &mut Connection,
        mut step: impl FnMut(&mut Connection),
    ) -> (usize, Option<Excess>) {
        let steps = (0..100_000).take_while(|_| {
            step(connection);
            connection.allowance.excess().is_none()
        });
        (steps.count(), connection.allowance.excess())
    }

    #[test]
    fn frame_flood_exhausts_credit() {
        let pause = Duration::from_micros(10);
        for (excess, most, step) in [
            (
                Excess::Resets,
                1100,
                (|c: &mut Connection| {
                    let stream = c.begin();
                    c.reset(stream);
                }) as Step,
            ),
            // One call that is old enough is reset repeatedly.
            (Excess::Resets, 1100, |c| c.reset(1)),
            (Excess::Pings, 20_000, |c| c.receive(PING, 0, &[0; 8])),
            (Excess::Settings, 1100, |c| c.receive(SETTINGS, 0, &[])),
            (Excess::Frames, 20_000, |c| c.receive(8, 0, &[0, 0, 0, 1])),
            (Excess::Frames, 20_000, |c| c.receive(DATA, 1, &[])),
            (Excess::Frames, 20_000, |c| c.receive(0xfe, 0, &[])),
            // Calls that the library resets because they are malformed.
            (Excess::Frames, 1100, |c| {
                c.begin();
                c.send(RST_STREAM, 0, &1_u32.to_be_bytes());
            }),
        ] {
            let mut connection = Connection::new();
            connection.begin();
            connection.pass(Duration::from_secs(1));
            let (steps, found) = steps_until_excess(&mut connection, |connection| {
                connection.pass(pause);
                step(connection);
            });
            assert_eq!(found, Some(excess), "{steps} steps");
            assert!(steps <= most, "{excess:?}: {steps} steps");
        }
        let mut unknown = Connection::new();
        unknown.allowance.set_known(false);
        let (steps, found) = steps_until_excess(&mut unknown, |connection| {
            let stream = connection.begin();
            connection.reset(stream);
        });
        assert_eq!((steps, found), (256, Some(Excess::Resets)), "a fourth before authentication");
        let mut connection = Connection::new();
        connection.send(GOAWAY, 0, &[[0; 4], ENHANCE_YOUR_CALM.to_be_bytes()].concat());
        assert_eq!(connection.allowance.excess(), Some(Excess::Library));
    }

    #[test]
    fn honest_traffic_keeps_its_credit() {
        let honest: [(&str, Step); 5] = [
            ("50,000 calls a second, each with a ping and a window update, every third reset before its answer", |c| {
                for n in 0..1000 {
                    let stream = c.begin();
                    c.receive(PING, 0, &[0; 8]);
                    c.receive(8, 0, &[0, 0, 0, 1]);
                    if n % 3 == 0 { c.reset(stream) } else { c.answer() }
                }
                c.pass(Duration::from_millis(20));
            }),
            ("deadlines of 60 ms at every call while no reply is sent", |c| {
                let calls: Vec<u32> = (0..STREAMS).map(|_| c.begin()).collect();
                c.pass(Duration::from_millis(60));
                calls.into_iter().for_each(|stream| c.reset(stream));
            }),
            ("crowds of waiting calls that are cancelled and repeated", |c| {
                let calls: Vec<u32> = (0..STREAMS).map(|_| c.begin()).collect();
                c.pass(Duration::from_secs(3));
                calls.into_iter().for_each(|stream| c.reset(stream));
                for _ in 0..STREAMS / 2 {
                    let stream = c.begin();
                    c.reset(stream);
                }
            }),
            ("resets that arrive after the replies", |c| {
                let calls: Vec<u32> = (0..STREAMS).map(|_| c.begin()).collect();
                calls.iter().for_each(|_| c.answer());
                calls.into_iter().for_each(|stream| c.reset(stream));
            }),
            ("a stream that is read, with two window updates and a ping for each message", |c| {
                for _ in 0..1000 {
                    c.send(DATA, 0, &[0; 100]);
                    c.receive(8, 0, &[0, 0, 0, 1]);
                    c.receive(8, 1, &[0, 0, 0, 1]);
                    c.receive(PING, 0, &[0; 8]);
                }
            }),
        ];
        for (what, step) in honest {
            let mut connection = Connection::new();
            let (steps, found) = (0..300).fold((0, None), |(steps, found), _| {
                step(&mut connection);
                (steps + usize::from(found.is_none()), connection.allowance.excess())
            });
            assert_eq!((steps, found), (300, None), "{what}");
        }
    }
}
