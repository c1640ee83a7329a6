//! Which committer an operation goes to: that of its EM.
//!
//! An EM is always the same committer's, so that batches of different ones share no EM, and what waits for an EM is in one queue. Instances
//! that have as many deal alike, without talking: a committer then waits for one other of each instance, and never for two
//! that wait for each other's EMs. Nothing is right because of it: who may go on is decided by the locks.

use std::{iter, sync::Arc};

use crate::domain::em::EmInstance;

/// Something that each committer has one of.
#[derive(Clone, Debug)]
pub(super) struct Dealt<D> {
    first: D,
    others: Arc<[D]>,
}

impl<D> Dealt<D> {
    pub fn new(first: D, others: impl IntoIterator<Item = D>) -> Self {
        Self { first, others: others.into_iter().collect() }
    }

    /// That of the committer whose EM this is.
    pub fn of(&self, em: &EmInstance) -> &D {
        if self.others.is_empty() {
            return &self.first;
        }
        let number = number(em, self.others.len() + 1);
        number.checked_sub(1).and_then(|other| self.others.get(other)).unwrap_or(&self.first)
    }

    /// The same of something else of each.
    pub fn map<E>(&self, map: impl Fn(&D) -> E) -> Dealt<E> {
        Dealt::new(map(&self.first), self.others.iter().map(map))
    }
}

/// Which of so many committers has an EM.
fn number(em: &EmInstance, committers: usize) -> usize {
    let committers = u64::try_from(committers).unwrap_or(u64::MAX).max(1);
    usize::try_from(hash(em) % committers).unwrap_or_default()
}

/// The same in every release and on every machine, which those of the standard library do not promise: FNV-1a, and then
/// murmur's finalizer, because names that count up differ in few bits.
fn hash(em: &EmInstance) -> u64 {
    let names = [em.application_name.as_str(), em.instance.as_str()];
    // No name has a zero in it, so that two names never read like two others.
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

    /// Instances of different releases run side by side, and have to deal alike.
    #[test]
    fn every_release_deals_alike() {
        let hosts = ["host1:9102", "host2:9102", "host3:9102", "host4:9102", "10.0.0.1:9102"];
        let dealt = |committers| hosts.map(|host| number(&em(host), committers));
        assert_eq!((dealt(1), dealt(2), dealt(3)), ([0; 5], [0, 0, 1, 1, 1], [0, 0, 0, 2, 0]));
    }

    #[test]
    fn every_committer_has_its_part_of_ems_that_are_named_alike() {
        // Every one, and every other: of hashes that mix badly, some would have none of the second.
        for (step, committers) in [(1, 2), (1, 3), (1, 16), (2, 2), (2, 4), (10, 2), (10, 16)] {
            let mut ems = vec![0; committers];
            (0..1000 * committers).for_each(|n| ems[number(&em(&format!("host{}:9102", n * step)), committers)] += 1);
            assert!(ems.iter().all(|ems| (850..1150).contains(ems)), "{step} {committers}: {ems:?}");
        }
    }

    #[test]
    fn an_em_is_always_the_same_ones() {
        let dealt = Dealt::new(0, 1..16);
        let all: std::collections::BTreeSet<usize> = (0..1000).map(|n| *dealt.of(&em(&format!("host{n}")))).collect();
        assert_eq!(all.len(), 16);
        assert!((0..100).all(|n| dealt.of(&em(&format!("host{n}"))) == dealt.of(&em(&format!("host{n}")))));
        assert_eq!(Dealt::new("only", []).of(&em("host1")), &"only");
        assert_eq!(dealt.map(|number| number + 1).of(&em("host1")), &(dealt.of(&em("host1")) + 1));
    }
}
