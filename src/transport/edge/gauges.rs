//! How much of the edge is taken, and how often somebody was turned away.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use crate::tls::{Expiry, Tls};

use super::{Bounds, allowance::Excess, share::Share};

/// Counted since the instance started, or held now.
#[derive(Debug)]
pub struct EdgeGauges {
    tls: Option<Arc<Tls>>,
    pub(super) held_connections: Share,
    pub(super) held_bytes: Share,
    /// Those of them that are in bodies which are not small.
    pub(super) held_large_bytes: Share,
    pub(super) calls: Counter,
    pub(super) refused: Counter,
    pub(super) accept_errors: Counter,
    pub(super) ungreeted: Counter,
    /// Connections that were ended, each reason at its index in [`Excess::ALL`].
    ended: [Counter; Excess::ALL.len()],
    pub(super) slowed: Counter,
    pub(super) handshakes_failed: Counter,
    pub(super) shed: Counter,
    pub(super) turned_away: Counter,
    pub(super) late: Counter,
}

/// Only grows, except for calls under way.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub fn take_away(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl EdgeGauges {
    pub(super) fn new(bounds: &Bounds, tls: Option<Arc<Tls>>) -> Self {
        Self {
            tls,
            held_connections: Share::of(bounds.connections),
            held_bytes: Share::of(bounds.body_bytes),
            held_large_bytes: Share::of(bounds.body_bytes / 2),
            calls: Counter::default(),
            refused: Counter::default(),
            accept_errors: Counter::default(),
            ungreeted: Counter::default(),
            ended: Default::default(),
            slowed: Counter::default(),
            handshakes_failed: Counter::default(),
            shed: Counter::default(),
            turned_away: Counter::default(),
            late: Counter::default(),
        }
    }

    /// Connections that are open.
    pub fn connections(&self) -> u64 {
        as_u64(self.held_connections.taken())
    }

    /// Calls under way.
    pub fn calls(&self) -> u64 {
        self.calls.get()
    }

    /// Bytes of the bodies of calls under way: what is announced counts from its announcement.
    pub fn bytes_in_flight(&self) -> u64 {
        as_u64(self.held_bytes.taken())
    }

    /// Connections that were turned away because there were too many.
    pub fn connections_refused(&self) -> u64 {
        self.refused.get()
    }

    /// How often a connection could not be accepted.
    pub fn accept_errors(&self) -> u64 {
        self.accept_errors.get()
    }

    /// Connections that were closed because they did not speak HTTP/2 in time, or nobody showed on them who he was.
    pub fn handshakes_late(&self) -> u64 {
        self.ungreeted.get()
    }

    /// Counts a connection that is ended for `excess`.
    pub(super) fn end_for(&self, excess: Excess) {
        let counted = Excess::ALL.iter().zip(&self.ended).find(|(reason, _)| **reason == excess);
        counted.into_iter().for_each(|(_, counter)| counter.add());
    }

    /// Connections that were ended because of too many frames, by the kind of the frames.
    pub fn connections_ended(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Excess::ALL.iter().zip(&self.ended).map(|(reason, counter)| (reason.name(), counter.get()))
    }

    /// New connections that waited, or were closed, because a connection of their address had been ended.
    pub fn connections_slowed(&self) -> u64 {
        self.slowed.get()
    }

    /// Connections whose TLS handshake failed.
    pub fn handshakes_failed(&self) -> u64 {
        self.handshakes_failed.get()
    }

    /// How often certificates that had changed were taken up.
    pub fn certificates_reloaded(&self) -> u64 {
        self.tls.as_ref().map_or(0, |tls| tls.reloads())
    }

    /// How often they could not be used.
    pub fn certificates_unusable(&self) -> u64 {
        self.tls.as_ref().map_or(0, |tls| tls.failed_reloads())
    }

    /// When the certificates in force are over; `None` if nothing is encrypted.
    pub fn certificate_expiry(&self) -> Option<Expiry> {
        self.tls.as_ref().map(|tls| tls.expiry())
    }

    /// Calls that were turned away because there was no room for their bodies, or answers.
    pub fn calls_shed(&self) -> u64 {
        self.shed.get()
    }

    /// Calls that were turned away because there were too many.
    pub fn calls_turned_away(&self) -> u64 {
        self.turned_away.get()
    }

    /// Calls whose bodies took too long to arrive.
    pub fn bodies_late(&self) -> u64 {
        self.late.get()
    }
}

fn as_u64(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}
