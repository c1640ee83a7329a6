//! Digests of sets of tickets: whether two sets are the same is told by comparing a few bytes.

use uuid::Uuid;

/// How many tickets a set has, and their ids, all xored.
///
/// Sets that differ have the same digest only by an accident of random ids, or because somebody chose ids for it. That needs no
/// protection: an EM chooses only what it reports of itself, and could as well name tickets whose engines are gone.
///
/// A digest only spares reading tickets, so it must never be in the way of an operation on one: a digest that was spoilt counts on
/// from where it is, below zero if it must, until a repair mends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TicketDigest {
    /// How many tickets.
    pub count: i64,
    /// Their ids, all xored.
    pub xor: Uuid,
}

impl TicketDigest {
    /// That of a set; each ticket may occur only once.
    pub fn of<'a>(ids: impl IntoIterator<Item = &'a Uuid>) -> Self {
        let mut digest = Self::default();
        ids.into_iter().for_each(|id| digest.insert(*id));
        digest
    }

    /// Adds a ticket that is not in the set.
    pub fn insert(&mut self, id: Uuid) {
        self.join(&Self { count: 1, xor: id });
    }

    /// Removes a ticket that is in the set.
    pub fn remove(&mut self, id: Uuid) {
        self.join(&Self { count: -1, xor: id });
    }

    /// Adds another set, which has no ticket in common with this one.
    pub fn join(&mut self, other: &Self) {
        self.count = self.count.saturating_add(other.count);
        self.xor = Uuid::from_u128(self.xor.as_u128() ^ other.xor.as_u128());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_sets_have_equal_digests_however_they_came_about() {
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
    fn other_sets_have_others() {
        let ids = [1, 2, 3].map(Uuid::from_u128);
        let digest = TicketDigest::of(&ids);
        // 1 ^ 2 ^ 3 is 0: as many tickets with another sum, and another number with the same one.
        for other in [&ids[..2], &[ids[0], ids[1], Uuid::from_u128(4)], &[], &[Uuid::nil()]] {
            assert_ne!(TicketDigest::of(other), digest, "{other:?}");
        }
    }
}
