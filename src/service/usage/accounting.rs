//! What is told in sums: refusals, and use over time.

use std::collections::BTreeSet;

use sqlx::PgConnection;
use time::{Duration, OffsetDateTime, macros::datetime};

use crate::{
    domain::{
        name::{FieldError, Name},
        refusal_sum::RefusalSum,
        scope_kind::ScopeKind,
        usage_sum::{UsageBy, UsageSum, hour_of},
    },
    error::Error,
    store::{
        refusal::{self, RefusalAt},
        session::{answered, clock},
        usage_hour::{self, Listed, Range, UsageAt},
    },
};

use super::{Dated, LOOKED_AT_ONCE, LOOKS_MAX, Reading, Usage};

/// After everything.
const LAST: OffsetDateTime = datetime!(9999-12-31 23:00 UTC);

/// The longest time over which use is summed by one call.
pub const USAGE_RANGE_MAX: Duration = Duration::days(92);

/// Which refusals.
#[derive(Debug, Clone, Default)]
pub struct RefusalFilter {
    /// Of these users; `None` for all.
    pub users: Option<BTreeSet<Name>>,
    /// By a scope of this kind.
    pub kind: Option<ScopeKind>,
    /// By this scope.
    pub scope: Option<String>,
    /// In this dimension.
    pub dimension: Option<String>,
    /// In periods that begin then or later.
    pub from: Option<OffsetDateTime>,
    /// In periods that begin before.
    pub to: Option<OffsetDateTime>,
}

impl RefusalFilter {
    /// Whether it asks for more than an index finds.
    fn looks_through(&self) -> bool {
        self.kind.is_some() || self.scope.is_some() || self.dimension.is_some()
    }

    fn matches(&self, sum: &RefusalSum) -> bool {
        self.kind.is_none_or(|kind| kind == sum.key.kind)
            && self.scope.as_ref().is_none_or(|scope| *scope == sum.key.scope)
            && self.dimension.as_ref().is_none_or(|dimension| *dimension == sum.key.dimension)
    }
}

/// A page of refusals.
#[derive(Debug)]
pub struct Refusals {
    /// The latest first.
    pub shown: Vec<RefusalSum>,
    /// Where to go on; `None` at the end.
    pub next: Option<RefusalAt>,
}

/// Whose use, and of when; as it was asked.
#[derive(Debug, Clone)]
pub struct UsageQuery {
    /// By what.
    pub by: UsageBy,
    /// Only of these users, if it is by user.
    pub users: Option<BTreeSet<Name>>,
    /// From when.
    pub from: Option<OffsetDateTime>,
    /// Until when.
    pub to: Option<OffsetDateTime>,
    /// Whether each hour is told apart.
    pub hourly: bool,
}

impl UsageQuery {
    /// Which hours that are.
    fn range(self, now: OffsetDateTime) -> Result<Range, FieldError> {
        let ceiling = |at: OffsetDateTime| if hour_of(at) == at { at } else { hour_of(at) + Duration::HOUR };
        let to = ceiling(self.to.unwrap_or(now).clamp(OffsetDateTime::UNIX_EPOCH, LAST));
        let from = self.from.map_or(to.saturating_sub(Duration::DAY), hour_of);
        if from >= to {
            return Err(FieldError::new("from_time", "must be before to_time"));
        }
        if to - from > USAGE_RANGE_MAX {
            let problem = "is more than 92 days before to_time: ask for less at once";
            return Err(FieldError::new("from_time", problem));
        }
        Ok(Range { by: self.by, users: self.users, from, to, hourly: self.hourly })
    }
}

/// A page of use.
#[derive(Debug)]
pub struct UsedPage {
    /// Up to one more than were asked for.
    pub sums: Vec<UsageSum>,
    /// Behind which the next page begins, where fewer were found among all that this one looks at.
    pub looked_to: Option<UsageAt>,
    /// Of which hours.
    pub range: Range,
    /// All that ended before this is in it.
    pub complete_until: OffsetDateTime,
}

impl Usage {
    /// Up to `limit` sums of refusals, the latest first, from behind `after`. With filters that no index helps, it looks through so many,
    /// and may find few.
    pub async fn refusals(
        &self,
        filter: &RefusalFilter,
        after: Option<RefusalAt>,
        limit: usize,
    ) -> Result<Refusals, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let from = filter.from.unwrap_or(OffsetDateTime::UNIX_EPOCH);
        let mut last = after.unwrap_or_else(|| RefusalAt::before(filter.to.unwrap_or(LAST)));
        // One more than are shown tells whether there is more.
        let (at_once, looks) =
            if filter.looks_through() { (LOOKED_AT_ONCE, LOOKS_MAX) } else { (limit.saturating_add(1), 1) };
        let mut shown = Vec::new();
        for _ in 0..looks {
            let read = i64::try_from(at_once).unwrap_or(i64::MAX);
            let found = answered(refusal::list(&mut *connection, filter.users.as_ref(), from, last, read)).await?;
            let is_end = found.len() < at_once;
            for (at, sum) in found {
                if shown.len() == limit {
                    return Ok(Refusals { shown, next: Some(last) });
                }
                last = at;
                shown.extend(Some(sum).filter(|sum| filter.matches(sum)));
            }
            if is_end {
                return Ok(Refusals { shown, next: None });
            }
        }
        Ok(Refusals { shown, next: Some(last) })
    }

    /// Up to `limit` sums of what was used, by name and hour, from behind `after`. It looks through so many names, and may find few.
    ///
    /// # Errors
    /// [`Error::InvalidField`] for a time that cannot be summed over.
    pub async fn used(
        &self,
        query: &UsageQuery,
        after: Option<&UsageAt>,
        limit: i64,
    ) -> Result<Dated<UsedPage>, Error> {
        if let Some(Reading { mut connection, guard }) = self.standby.acquire().await? {
            let read = Box::pin(used_on(&mut connection, query, after, limit));
            if let Some(page) = guard.answered(read).await? {
                return Ok(Dated { told: page, as_of: Some(guard.mark.at) });
            }
        }
        let mut connection = self.store.operators().acquire().await?;
        let page = Box::pin(used_on(&mut connection, query, after, limit)).await?;
        Ok(Dated { told: page, as_of: None })
    }
}

async fn used_on(
    connection: &mut PgConnection,
    query: &UsageQuery,
    after: Option<&UsageAt>,
    limit: i64,
) -> Result<UsedPage, Error> {
    let range = query.clone().range(clock(connection).await?)?;
    let complete_until = answered(usage_hour::progress(&mut *connection)).await?.complete_until;
    let Listed { sums, looked_to } = answered(usage_hour::list(&mut *connection, &range, after, limit)).await?;
    Ok(UsedPage { sums, looked_to, range, complete_until })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rounded_to_full_hours_and_bounded() {
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
        // However far away it is, nothing overflows.
        for far in [datetime!(-9999-01-01 0:00 UTC), datetime!(9999-12-31 23:59:59 UTC)] {
            assert!(range(Some(far), None).is_err());
            let _ = range(None, Some(far));
        }
    }
}
