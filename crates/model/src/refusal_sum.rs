//! Refusals, summed: who met which limit, how often, and how much was asked last.

use time::OffsetDateTime;

use super::{refusal::Shortfall, scope_kind::ScopeKind};

/// Instead of the EM, of a request that named none: which one came closest says nothing.
const ANY_EM: &str = "em=any";

/// How long a text about one kind of refusals may be, in bytes: one that is longer is counted among the others.
pub const KEY_BYTES_MAX: usize = 4096;

/// What refusals are told apart by. Of those that are not told apart any further, the others, all texts but the dimension are empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RefusalKey<T> {
    /// Whose request.
    pub user: T,
    /// What was short first: a scope of which kind.
    pub kind: ScopeKind,
    /// Which, as the answer said; `em=any` of a request that named no EM.
    pub scope: T,
    /// In which dimension.
    pub dimension: T,
    /// By which limit, as the answer said; empty for an EM.
    pub rule: T,
}

impl<'a> RefusalKey<&'a str> {
    /// What a refusal counts as whose first shortfall is `first`.
    pub fn of(user: &'a str, first: &'a Shortfall, any_em: bool) -> Self {
        let scope = if any_em && first.kind == ScopeKind::Em { ANY_EM } else { first.scope.as_str() };
        let key = Self { user, kind: first.kind, scope, dimension: first.dimension.name(), rule: &first.rule };
        if key.bytes() > KEY_BYTES_MAX { Self::others(first.kind, first.dimension.class()) } else { key }
    }

    /// What those are counted as of which there would be too many kinds: so few that there is always room for them.
    pub fn others(kind: ScopeKind, dimension: &'static str) -> Self {
        Self { user: "", kind, scope: "", dimension, rule: "" }
    }

    fn bytes(&self) -> usize {
        self.user.len() + self.scope.len() + self.dimension.len() + self.rule.len()
    }

    /// The same with texts of its own.
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
    /// The same, borrowed.
    pub fn as_ref(&self) -> RefusalKey<&str> {
        RefusalKey {
            user: &self.user,
            kind: self.kind,
            scope: &self.scope,
            dimension: &self.dimension,
            rule: &self.rule,
        }
    }

    /// Whether it is of those that are not told apart any further.
    pub fn is_others(&self) -> bool {
        self.user.is_empty()
    }
}

/// How often, and how it was last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefusalCount<At> {
    /// How often.
    pub refusals: u64,
    /// How much was asked the last time.
    pub last_requested: i64,
    /// How much there would have been.
    pub last_available: i64,
    /// When that was.
    pub last: At,
}

impl<At> RefusalCount<At> {
    /// The same by another clock.
    pub fn at<Other>(self, last: Other) -> RefusalCount<Other> {
        let Self { refusals, last_requested, last_available, .. } = self;
        RefusalCount { refusals, last_requested, last_available, last }
    }
}

impl<At: Ord + Copy> RefusalCount<At> {
    /// Counts more in.
    pub fn add(&mut self, more: Self) {
        let latest = if more.last >= self.last { more } else { *self };
        *self = Self { refusals: self.refusals.saturating_add(more.refusals), ..latest };
    }
}

/// Refusals of one kind within one period, by all instances.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusalSum {
    /// When the period began, by the database's clock.
    pub period_start: OffsetDateTime,
    /// Which.
    pub key: RefusalKey<String>,
    /// How often.
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
        }
    }

    #[test]
    fn whoever_names_no_em_is_refused_by_any() {
        let first = short(ScopeKind::Em, "em=a/b", Dimension::Cores);
        assert_eq!(RefusalKey::of("alice", &first, false).scope, "em=a/b");
        assert_eq!(RefusalKey::of("alice", &first, true).scope, "em=any");
        let first = short(ScopeKind::User, "user=alice", Dimension::Cores);
        assert_eq!(RefusalKey::of("alice", &first, true).scope, "user=alice");
    }

    #[test]
    fn what_would_take_too_much_room_is_one_of_the_others() {
        let long = short(ScopeKind::Labels, &"x".repeat(KEY_BYTES_MAX), Dimension::Custom("gpu".into()));
        let key = RefusalKey::of("alice", &long, false).to_owned();
        assert!(key.is_others());
        assert_eq!((key.kind, key.dimension.as_str()), (ScopeKind::Labels, "special"));
    }

    #[test]
    fn the_last_is_told_whichever_is_counted_first() {
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
