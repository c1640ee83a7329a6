//! Gauges and counters of the edge, for the metrics.
//!
//! Counters start at zero with the instance. Never: a basis of a decision. Callers: the modules of the edge update them;
//! `metrics` and the history of the page read them.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use crate::tls::{CertificateExpiry, Tls};

use super::{EdgeBounds, allowance::Excess, byte_budget::ByteBudget};

/// Gauges and counters of one edge.
#[derive(Debug)]
pub struct EdgeGauges {
    tls: Option<Arc<Tls>>,
    pub(super) held_connections: ByteBudget,
    pub(super) held_bytes: ByteBudget,
    /// Bytes of large bodies, as part of `held_bytes`.
    pub(super) held_large_bytes: ByteBudget,
    pub(super) calls: EdgeCounter,
    pub(super) refused: EdgeCounter,
    pub(super) accept_errors: EdgeCounter,
    pub(super) ungreeted: EdgeCounter,
    /// Ended connections, each reason at its index in [`Excess::ALL`].
    ended: [EdgeCounter; Excess::ALL.len()],
    pub(super) slowed: EdgeCounter,
    pub(super) handshakes_failed: EdgeCounter,
    pub(super) shed: EdgeCounter,
    pub(super) rejected: EdgeCounter,
    pub(super) late: EdgeCounter,
}

/// Counter that only grows, except the one of calls in progress.
#[derive(Debug, Default)]
pub(super) struct EdgeCounter(AtomicU64);

impl EdgeCounter {
    /// Counts one more.
    pub fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts one less: a call has ended.
    pub fn take_away(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl EdgeGauges {
    pub(super) fn new(bounds: &EdgeBounds, tls: Option<Arc<Tls>>) -> Self {
        Self {
            tls,
            held_connections: ByteBudget::of(bounds.connections),
            held_bytes: ByteBudget::of(bounds.body_bytes),
            held_large_bytes: ByteBudget::of(bounds.body_bytes / 2),
            calls: EdgeCounter::default(),
            refused: EdgeCounter::default(),
            accept_errors: EdgeCounter::default(),
            ungreeted: EdgeCounter::default(),
            ended: Default::default(),
            slowed: EdgeCounter::default(),
            handshakes_failed: EdgeCounter::default(),
            shed: EdgeCounter::default(),
            rejected: EdgeCounter::default(),
            late: EdgeCounter::default(),
        }
    }

    /// Returns the number of open connections.
    pub fn connections(&self) -> u64 {
        as_u64(self.held_connections.taken())
    }

    /// Returns the number of calls in progress.
    pub fn calls(&self) -> u64 {
        self.calls.get()
    }

    /// Returns the bytes of the request bodies of calls in progress. A body counts with its announced size.
    pub fn bytes_in_flight(&self) -> u64 {
        as_u64(self.held_bytes.taken())
    }

    /// Returns the number of connections that were refused at the connection limit.
    pub fn connections_refused(&self) -> u64 {
        self.refused.get()
    }

    /// Returns the number of failures to accept a connection.
    pub fn accept_errors(&self) -> u64 {
        self.accept_errors.get()
    }

    /// Returns the number of connections that were closed at their deadline: no TLS or HTTP/2 preface in time, or no
    /// authenticated call in a crowd.
    pub fn handshake_timeouts(&self) -> u64 {
        self.ungreeted.get()
    }

    /// Counts a connection that is ended for `excess`.
    pub(super) fn end_for(&self, excess: Excess) {
        let counted = Excess::ALL.iter().zip(&self.ended).find(|(reason, _)| **reason == excess);
        counted.into_iter().for_each(|(_, counter)| counter.add());
    }

    /// Returns the number of connections that were ended for too many frames, by the kind of frames.
    pub fn connections_ended(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Excess::ALL.iter().zip(&self.ended).map(|(reason, counter)| (reason.as_str(), counter.get()))
    }

    /// Returns the number of new connections that waited, or were closed, after another connection of their address had
    /// been ended.
    pub fn connections_slowed(&self) -> u64 {
        self.slowed.get()
    }

    /// Returns the number of failed TLS handshakes.
    pub fn handshakes_failed(&self) -> u64 {
        self.handshakes_failed.get()
    }

    /// Returns the number of successful certificate reloads.
    pub fn certificates_reloaded(&self) -> u64 {
        self.tls.as_ref().map_or(0, |tls| tls.reloads())
    }

    /// Returns the number of failed certificate reloads.
    pub fn certificates_unusable(&self) -> u64 {
        self.tls.as_ref().map_or(0, |tls| tls.failed_reloads())
    }

    /// Returns when the current certificates expire; `None` without TLS.
    pub fn certificate_expiry(&self) -> Option<CertificateExpiry> {
        self.tls.as_ref().map(|tls| tls.expiry())
    }

    /// Returns the number of calls that were rejected for the size of their request or response.
    pub fn calls_shed(&self) -> u64 {
        self.shed.get()
    }

    /// Returns the number of calls that were rejected without a permit.
    pub fn calls_rejected(&self) -> u64 {
        self.rejected.get()
    }

    /// Returns the number of calls whose body timed out.
    pub fn body_timeouts(&self) -> u64 {
        self.late.get()
    }
}

fn as_u64(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}
