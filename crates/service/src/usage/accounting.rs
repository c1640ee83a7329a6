//! Sums of refusals, of usage per hour, and of the use of live tickets by user.
//!
//! Caller: `rm_edge::usage`.

use std::collections::BTreeSet;

use async_recursion::async_recursion as boxed;
use time::{Duration, OffsetDateTime, macros::datetime};

use crate::error::Error;
use rm_model::{
    name::{FieldError, Name},
    refusal_sum::RefusalSum,
    resource::Dimension,
    scope_kind::ScopeKind,
    usage_sum::{UsageBy, UsageSum, hour_of},
    user_sum::UserSum,
};
use rm_store::{
    refusal,
    session::{clock, within_timeout},
    usage_hour::{self, UsageRange, UsageSumPage},
    user_sum,
};
pub use rm_store::{refusal::RefusalAt, usage_hour::UsageAt, user_sum::UserSumAt};

use super::{LOOKED_AT_ONCE, LOOKS_MAX, UsageQueries};

/// Later than any time in the tables.
const LAST: OffsetDateTime = datetime!(9999-12-31 23:00 UTC);

/// Maximum time range of one usage query.
pub const USAGE_RANGE_MAX: Duration = Duration::days(92);

/// Filter of refusal sums.
#[derive(Debug, Clone, Default)]
pub struct RefusalFilter {
    /// Only these users; `None` for all.
    pub users: Option<BTreeSet<Name>>,
    /// Only scopes of this kind.
    pub kind: Option<ScopeKind>,
    /// Only this scope.
    pub scope: Option<String>,
    /// Only this dimension.
    pub dimension: Option<String>,
    /// Only periods that begin at this time or later.
    pub from: Option<OffsetDateTime>,
    /// Only periods that begin before this time.
    pub to: Option<OffsetDateTime>,
}

impl RefusalFilter {
    /// Whether the filter has conditions without an index.
    fn looks_through(&self) -> bool {
        self.kind.is_some() || self.scope.is_some() || self.dimension.is_some()
    }

    fn matches(&self, sum: &RefusalSum) -> bool {
        self.kind.is_none_or(|kind| kind == sum.key.kind)
            && self.scope.as_ref().is_none_or(|scope| *scope == sum.key.scope)
            && self.dimension.as_ref().is_none_or(|dimension| *dimension == sum.key.dimension)
    }
}

/// Page of refusal sums.
#[derive(Debug)]
pub struct RefusalPage {
    /// Sums, the latest first.
    pub shown: Vec<RefusalSum>,
    /// Key after which the next page begins; `None` at the end.
    pub next: Option<RefusalAt>,
}

/// Query of usage sums.
#[derive(Debug, Clone)]
pub struct UsageQuery {
    /// Name by which usage is summed.
    pub by: UsageBy,
    /// Only these users, if summed by user; `None` for all.
    pub users: Option<BTreeSet<Name>>,
    /// Start of the time range; `None` for a day before its end.
    pub from: Option<OffsetDateTime>,
    /// End of the time range; `None` for now.
    pub to: Option<OffsetDateTime>,
    /// Whether each hour has its own sum.
    pub hourly: bool,
}

impl UsageQuery {
    /// Returns the range in full hours at the time `now`.
    ///
    /// # Errors
    /// [`FieldError`] if the range is empty or longer than [`USAGE_RANGE_MAX`].
    fn range(self, now: OffsetDateTime) -> Result<UsageRange, FieldError> {
        let ceiling = |at: OffsetDateTime| if hour_of(at) == at { at } else { hour_of(at) + Duration::HOUR };
        let to = ceiling(self.to.unwrap_or(now).clamp(OffsetDateTime::UNIX_EPOCH, LAST));
        let from = self.from.map_or(to.saturating_sub(Duration::DAY), hour_of);
        if from >= to {
            return Err(FieldError::new("from_time", "must be before to_time"));
        }
        if to - from > USAGE_RANGE_MAX {
            let problem = "is more than 92 days before to_time; request a shorter range";
            return Err(FieldError::new("from_time", problem));
        }
        Ok(UsageRange { by: self.by, users: self.users, from, to, hourly: self.hourly })
    }
}

/// Page of usage sums.
#[derive(Debug)]
pub struct UsagePage {
    /// Sums, up to one more than requested.
    pub sums: Vec<UsageSum>,
    /// Key after which the next page begins, if the bounded scan found fewer sums than requested.
    pub looked_to: Option<UsageAt>,
    /// Range of the sums.
    pub range: UsageRange,
    /// Time up to which all ended tickets are included.
    pub complete_until: OffsetDateTime,
}

/// Page of users by their use.
#[derive(Debug)]
pub struct UserPage {
    /// Users with their sums, the most use first; up to one more than requested.
    pub users: Vec<(Name, UserSum)>,
    /// Age of the sums; `None` before the first sums.
    pub age: Option<Duration>,
}

impl UsageQueries {
    /// Returns up to `limit` users after `after` with use in `dimension`, the most use first; among `users` if given.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn users(
        &self,
        dimension: &Dimension,
        users: Option<&BTreeSet<Name>>,
        after: Option<&UserSumAt>,
        limit: i64,
    ) -> Result<UserPage, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let age = within_timeout(user_sum::age(&mut *connection)).await?;
        let users = within_timeout(user_sum::list(&mut *connection, dimension, users, after, limit)).await?;
        Ok(UserPage { users, age })
    }

    /// Returns up to `limit` matching refusal sums after `after`, the latest first.
    ///
    /// The number of sums examined is bounded if the filter has conditions without an index, so a page may be short.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn refusals(
        &self,
        filter: &RefusalFilter,
        after: Option<RefusalAt>,
        limit: usize,
    ) -> Result<RefusalPage, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let from = filter.from.unwrap_or(OffsetDateTime::UNIX_EPOCH);
        let mut last = after.unwrap_or_else(|| RefusalAt::before(filter.to.unwrap_or(LAST)));
        // One sum more than the page shows whether another page follows.
        let (at_once, looks) =
            if filter.looks_through() { (LOOKED_AT_ONCE, LOOKS_MAX) } else { (limit.saturating_add(1), 1) };
        let mut shown = Vec::new();
        for _ in 0..looks {
            let read = i64::try_from(at_once).unwrap_or(i64::MAX);
            let found =
                within_timeout(refusal::list(&mut *connection, filter.users.as_ref(), from, last, read)).await?;
            let is_end = found.len() < at_once;
            for (at, sum) in found {
                if shown.len() == limit {
                    return Ok(RefusalPage { shown, next: Some(last) });
                }
                last = at;
                shown.extend(Some(sum).filter(|sum| filter.matches(sum)));
            }
            if is_end {
                return Ok(RefusalPage { shown, next: None });
            }
        }
        Ok(RefusalPage { shown, next: Some(last) })
    }

    /// Returns up to `limit` usage sums after `after`, by name and hour. The number of names examined is bounded, so a page may
    /// be short.
    ///
    /// # Errors
    /// [`Error::InvalidField`] for an invalid time range; database errors.
    #[boxed]
    pub async fn used(&self, query: &UsageQuery, after: Option<&UsageAt>, limit: i64) -> Result<UsagePage, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let range = query.clone().range(clock(&mut connection).await?)?;
        let complete_until = within_timeout(usage_hour::progress(&mut *connection)).await?.complete_until;
        let UsageSumPage { sums, looked_to } =
            within_timeout(usage_hour::list(&mut *connection, &range, after, limit)).await?;
        Ok(UsagePage { sums, looked_to, range, complete_until })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_times_are_rounded_to_hours_and_bounded() {
        let range = |from, to| {
            let query = UsageQuery { by: UsageBy::User, users: None, from, to, hourly: false };
            query.range(datetime!(2026-01-02 12:30 UTC)).map(|range| (range.from, range.to))
        };
        let (noon, one) = (datetime!(2026-01-02 12:00 UTC), datetime!(2026-01-02 13:00 UTC));
        assert_eq!(range(None, None), Ok((one - Duration::DAY, one)));
        assert_eq!(range(None, Some(noon)), Ok((noon - Duration::DAY, noon)));
        assert_eq!(range(Some(noon + Duration::MINUTE), Some(noon + Duration::SECOND)), Ok((noon, one)));
        assert_eq!(range(Some(one), Some(noon)).unwrap_err().field, "from_time");
        assert_eq!(range(Some(noon), Some(noon)).unwrap_err().field, "from_time");
        assert!(range(Some(one - USAGE_RANGE_MAX), Some(one)).is_ok());
        assert!(range(Some(noon - USAGE_RANGE_MAX), Some(one)).is_err());
        // Times far in the past or future do not overflow.
        for far in [datetime!(-9999-01-01 0:00 UTC), datetime!(9999-12-31 23:59:59 UTC)] {
            assert!(range(Some(far), None).is_err());
            let _ = range(None, Some(far));
        }
    }
}
