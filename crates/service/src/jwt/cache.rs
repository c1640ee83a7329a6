//! Cache of verified JWTs, by hash, in two generations: when the young one is full, it replaces the old one.
//!
//! A repeated JWT is found without a verification. Memory is bounded; JWTs that are not used are evicted.
//!
//! Caller: `jwt`.

use std::{collections::HashMap, sync::Arc};

use crate::tokens::Caller;

/// SHA-256 of a JWT.
pub type JwtHash = [u8; 32];

/// Maximum number of JWTs in the cache. The most recent half always stays.
const KNOWN_MAX: usize = 16_384;

/// The cache.
#[derive(Debug, Default)]
pub struct JwtCache {
    /// JWTs used since the last change of generations.
    young: HashMap<JwtHash, Arc<Caller>>,
    /// JWTs used before it.
    old: HashMap<JwtHash, Arc<Caller>>,
}

impl JwtCache {
    /// Returns the caller of a cached JWT, unless its credential has ended.
    pub fn get(&mut self, hash: &JwtHash) -> Option<Arc<Caller>> {
        let found = match self.young.get(hash) {
            Some(caller) => caller.clone(),
            None => {
                let caller = self.old.remove(hash)?;
                self.put(*hash, caller.clone());
                caller
            }
        };
        if found.ended.is_over() {
            self.young.remove(hash);
            return None;
        }
        Some(found)
    }

    /// Adds a verified JWT.
    pub fn put(&mut self, hash: JwtHash, caller: Arc<Caller>) {
        if self.young.len() >= KNOWN_MAX / 2 {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(hash, caller);
    }

    /// Returns the number of cached JWTs.
    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rm_model::{access::Rights, principal::Principal};

    fn hash(number: usize) -> JwtHash {
        std::array::from_fn(|place| number.to_le_bytes().get(place).copied().unwrap_or_default())
    }

    #[test]
    fn jwt_cache_keeps_used_entries_within_bound() {
        let caller =
            || Caller { principal: Principal::Anonymous, rights: Rights::of_admin(), ended: Default::default() };
        let (mut cache, one) = (JwtCache::default(), Arc::new(caller()));
        for number in 0..100_000 {
            cache.put(hash(number), one.clone());
            assert!(cache.get(&hash(0)).is_some() && cache.len() <= KNOWN_MAX);
        }
        assert!(cache.get(&hash(99_000)).is_some() && cache.get(&hash(1)).is_none());
        one.ended.end(rm_model::access::Unauthenticated::Revoked);
        assert!(cache.get(&hash(0)).is_none());
    }
}
