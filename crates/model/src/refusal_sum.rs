//! Refusal statistics: numbers of refusals by user, scope, dimension and limit, with the amounts of the latest one.
//!
//! The number of keys is bounded: further ones are summed as "the others" of their kind and dimension. The statistics
//! decide nothing.
//! Callers: the refusal service, which counts, the store, and the call that lists the sums.

use time::OffsetDateTime;

use super::{refusal::Shortfall, scope_kind::ScopeKind};

/// Replaces the EM of a request that named none, because the closest EM is arbitrary.
const ANY_EM: &str = "em=any";

/// Maximum length of a key's texts in bytes. A refusal with a longer key counts among the others.
pub const KEY_BYTES_MAX: usize = 4096;

/// Key of the statistics. The key of the others, which have no individual count, has empty texts except the dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RefusalKey<T> {
    /// User of the request.
    pub user: T,
    /// Kind of the first short scope.
    pub kind: ScopeKind,
    /// First short scope, as in the reply; `em=any` if the request named no EM.
    pub scope: T,
    /// Short dimension.
    pub dimension: T,
    /// Deciding limit, as in the reply; empty for an EM.
    pub rule: T,
}

impl<'a> RefusalKey<&'a str> {
    /// Returns the key of a refusal whose first shortfall is `first`.
    pub fn of(user: &'a str, first: &'a Shortfall, any_em: bool) -> Self {
        let scope = if any_em && first.kind == ScopeKind::Em { ANY_EM } else { first.scope.as_str() };
        let key = Self { user, kind: first.kind, scope, dimension: first.dimension.name(), rule: &first.rule };
        if key.bytes() > KEY_BYTES_MAX { Self::others(first.kind, first.dimension.class()) } else { key }
    }

    /// Returns the key of the others. There are few such keys, so they always fit.
    pub fn others(kind: ScopeKind, dimension: &'static str) -> Self {
        Self { user: "", kind, scope: "", dimension, rule: "" }
    }

    fn bytes(&self) -> usize {
        self.user.len() + self.scope.len() + self.dimension.len() + self.rule.len()
    }

    /// Returns a copy with owned texts.
    pub fn to_owned(&self) -> RefusalKey<String> {
        RefusalKey {
            user: self.user.to_owned(),
            kind: self.kind,
            scope: self.scope.to_owned(),
            dimension: self.dimension.to_owned(),
            rule: self.rule.to_owned(),
        }
    }
}

impl RefusalKey<String> {
    /// Returns a copy with borrowed texts.
    pub fn as_ref(&self) -> RefusalKey<&str> {
        RefusalKey {
            user: &self.user,
            kind: self.kind,
            scope: &self.scope,
            dimension: &self.dimension,
            rule: &self.rule,
        }
    }

    /// Returns whether the key is one of the others.
    pub fn is_others(&self) -> bool {
        self.user.is_empty()
    }
}

/// Number of refusals, and the latest one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefusalCount<At> {
    /// Number of refusals.
    pub refusals: u64,
    /// Requested amount of the latest refusal.
    pub last_requested: i64,
    /// Grantable amount at the latest refusal.
    pub last_available: i64,
    /// Time of the latest refusal.
    pub last: At,
}

impl<At> RefusalCount<At> {
    /// Replaces the time, for a conversion between clocks.
    pub fn at<Other>(self, last: Other) -> RefusalCount<Other> {
        let Self { refusals, last_requested, last_available, .. } = self;
        RefusalCount { refusals, last_requested, last_available, last }
    }
}

impl<At: Ord + Copy> RefusalCount<At> {
    /// Adds refusals and keeps the latest one of both.
    pub fn add(&mut self, more: Self) {
        let latest = if more.last >= self.last { more } else { *self };
        *self = Self { refusals: self.refusals.saturating_add(more.refusals), ..latest };
    }
}

/// Refusals of one key within one period, over all instances.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusalSum {
    /// Start of the period, by the database clock.
    pub period_start: OffsetDateTime,
    /// Key of the refusals.
    pub key: RefusalKey<String>,
    /// Number of refusals, and the latest one.
    pub count: RefusalCount<OffsetDateTime>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource::Dimension;

    fn short(kind: ScopeKind, scope: &str, dimension: Dimension) -> Shortfall {
        Shortfall {
            scope: scope.to_owned(),
            kind,
            dimension,
            requested: 2,
            available: 1,
            ahead: 0,
            max: 1,
            rule: String::new(),
            idle_key: None,
            idle_amount: None,
        }
    }

    #[test]
    fn refusal_without_named_em_has_scope_any() {
        let first = short(ScopeKind::Em, "em=a/b", Dimension::Cores);
        assert_eq!(RefusalKey::of("alice", &first, false).scope, "em=a/b");
        assert_eq!(RefusalKey::of("alice", &first, true).scope, "em=any");
        let first = short(ScopeKind::User, "user=alice", Dimension::Cores);
        assert_eq!(RefusalKey::of("alice", &first, true).scope, "user=alice");
    }

    #[test]
    fn refusal_with_long_key_counts_as_others() {
        let long = short(ScopeKind::Labels, &"x".repeat(KEY_BYTES_MAX), Dimension::Custom("gpu".into()));
        let key = RefusalKey::of("alice", &long, false).to_owned();
        assert!(key.is_others());
        assert_eq!((key.kind, key.dimension.as_str()), (ScopeKind::Labels, "special"));
    }

    #[test]
    fn refusal_sum_keeps_latest_refusal() {
        let count = |refusals, last_requested, last| RefusalCount { refusals, last_requested, last_available: 0, last };
        for (one, other) in [(count(1, 5, 1), count(2, 7, 2)), (count(2, 7, 2), count(1, 5, 1))] {
            let mut sum = one;
            sum.add(other);
            assert_eq!(sum, count(3, 7, 2));
        }
        let mut sum = count(u64::MAX, 1, 1);
        sum.add(count(1, 1, 1));
        assert_eq!(sum.refusals, u64::MAX);
    }
}
