//! Assignment of EMs to committers.
//!
//! Each EM belongs to one committer, so that batches of different committers share no EM and operations on an EM share one
//! queue. Instances with the same number of committers assign EMs equally. A committer then waits for one committer of each
//! other instance at most, and never for two that wait for each other's EMs.
//!
//! Never: a condition of correctness; the locks alone decide which operation proceeds.
//! Callers: the committer (`submit` and undo operations).

use std::{iter, sync::Arc};

use rm_model::em::EmInstance;

/// One value per committer.
#[derive(Clone, Debug)]
pub(super) struct PerCommitter<D> {
    first: D,
    others: Arc<[D]>,
}

impl<D> PerCommitter<D> {
    /// Creates the values of the first committer and of all others.
    pub fn new(first: D, others: impl IntoIterator<Item = D>) -> Self {
        Self { first, others: others.into_iter().collect() }
    }

    /// Returns the value of the committer of `em`.
    pub fn of(&self, em: &EmInstance) -> &D {
        if self.others.is_empty() {
            return &self.first;
        }
        let number = number(em, self.others.len() + 1);
        number.checked_sub(1).and_then(|other| self.others.get(other)).unwrap_or(&self.first)
    }

    /// Maps each value, keeping the assignment.
    pub fn map<E>(&self, map: impl Fn(&D) -> E) -> PerCommitter<E> {
        PerCommitter::new(map(&self.first), self.others.iter().map(map))
    }
}

/// Returns the index of the committer of `em`, below `committers`.
fn number(em: &EmInstance, committers: usize) -> usize {
    let committers = u64::try_from(committers).unwrap_or(u64::MAX).max(1);
    usize::try_from(hash(em) % committers).unwrap_or_default()
}

/// Hashes an EM equally in every release and on every platform, which the hashes of the standard library do not promise.
///
/// The hash is FNV-1a with murmur's finalizer, because consecutive names differ in few bits.
fn hash(em: &EmInstance) -> u64 {
    let names = [em.application_name.as_str(), em.instance.as_str()];
    // No name contains a zero byte, so the separator keeps different pairs of names distinct.
    let bytes = names.into_iter().flat_map(|name| name.bytes().chain(iter::once(0)));
    let hash = bytes
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    let mixed = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    mixed ^ (mixed >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn em(host: &str) -> EmInstance {
        EmInstance::parse("em", "linkis-cg-engineconnmanager", host).unwrap()
    }

    /// Instances of different releases run together and must assign EMs equally.
    #[test]
    fn every_release_deals_alike() {
        let hosts = ["host1:9102", "host2:9102", "host3:9102", "host4:9102", "10.0.0.1:9102"];
        let dealt = |committers| hosts.map(|host| number(&em(host), committers));
        assert_eq!((dealt(1), dealt(2), dealt(3)), ([0; 5], [0, 0, 1, 1, 1], [0, 0, 0, 2, 0]));
    }

    #[test]
    fn every_committer_has_its_part_of_ems_that_are_named_alike() {
        // Consecutive names, and every second or tenth one: a hash that mixes badly would leave a committer without EMs.
        for (step, committers) in [(1, 2), (1, 3), (1, 16), (2, 2), (2, 4), (10, 2), (10, 16)] {
            let mut ems = vec![0; committers];
            (0..1000 * committers).for_each(|n| ems[number(&em(&format!("host{}:9102", n * step)), committers)] += 1);
            assert!(ems.iter().all(|ems| (850..1150).contains(ems)), "{step} {committers}: {ems:?}");
        }
    }

    #[test]
    fn an_em_is_always_the_same_ones() {
        let dealt = PerCommitter::new(0, 1..16);
        let all: std::collections::BTreeSet<usize> = (0..1000).map(|n| *dealt.of(&em(&format!("host{n}")))).collect();
        assert_eq!(all.len(), 16);
        assert!((0..100).all(|n| dealt.of(&em(&format!("host{n}"))) == dealt.of(&em(&format!("host{n}")))));
        assert_eq!(PerCommitter::new("only", []).of(&em("host1")), &"only");
        assert_eq!(dealt.map(|number| number + 1).of(&em("host1")), &(dealt.of(&em("host1")) + 1));
    }
}
