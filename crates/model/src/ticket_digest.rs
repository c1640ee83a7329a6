//! Digests of ticket sets: comparing two digests shows whether two sets are equal without reading the tickets.
//!
//! Callers: the ledger, which maintains the digest of each EM, and the heartbeat service, which compares it with reports.
//! Never: decides whether a ticket exists.

use uuid::Uuid;

/// Number of the tickets in a set, and the XOR of their ids.
///
/// Different sets have the same digest only by coincidence of random ids, or if the ids were chosen for it. No protection
/// is needed: an EM can choose only what it reports about itself, and could as well report tickets whose engines have
/// ended.
///
/// A digest only saves reads, so it must never prevent an operation on a ticket. A wrong digest continues from its value,
/// even below zero, until a repair corrects it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TicketDigest {
    /// Number of tickets.
    pub count: i64,
    /// XOR of their ids.
    pub xor: Uuid,
}

impl TicketDigest {
    /// Returns the digest of a set without duplicates.
    pub fn of<'a>(ids: impl IntoIterator<Item = &'a Uuid>) -> Self {
        let mut digest = Self::default();
        ids.into_iter().for_each(|id| digest.insert(*id));
        digest
    }

    /// Adds a ticket that the set does not contain.
    pub fn insert(&mut self, id: Uuid) {
        self.join(&Self { count: 1, xor: id });
    }

    /// Removes a ticket of the set.
    pub fn remove(&mut self, id: Uuid) {
        self.join(&Self { count: -1, xor: id });
    }

    /// Adds a disjoint set.
    pub fn join(&mut self, other: &Self) {
        self.count = self.count.saturating_add(other.count);
        self.xor = Uuid::from_u128(self.xor.as_u128() ^ other.xor.as_u128());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticket_digest_of_equal_sets_is_equal() {
        let ids = [1, 2, 3, u128::MAX].map(Uuid::from_u128);
        let mut digest = TicketDigest::of(&ids);
        assert_eq!(digest, TicketDigest::of(ids.iter().rev()));
        digest.remove(ids[1]);
        assert_eq!(digest, TicketDigest::of(&[ids[3], ids[0], ids[2]]));
        digest.join(&TicketDigest::of(&[ids[1]]));
        assert_eq!(digest, TicketDigest::of(&ids));
        ids.iter().for_each(|id| digest.remove(*id));
        assert_eq!(digest, TicketDigest::default());
    }

    #[test]
    fn ticket_digest_of_other_sets_differs() {
        let ids = [1, 2, 3].map(Uuid::from_u128);
        let digest = TicketDigest::of(&ids);
        // 1 ^ 2 ^ 3 is 0: an equal number with another XOR, and another number with an equal XOR.
        for other in [&ids[..2], &[ids[0], ids[1], Uuid::from_u128(4)], &[], &[Uuid::nil()]] {
            assert_ne!(TicketDigest::of(other), digest, "{other:?}");
        }
    }
}
