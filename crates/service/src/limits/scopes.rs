//! Use of scopes: single scopes, and pages of scopes with a filter.
//!
//! Caller: `rm_edge::usage`.

use std::collections::{BTreeMap, BTreeSet};

use async_recursion::async_recursion as boxed;
use sqlx::PgConnection;

use crate::error::Error;
use rm_model::{
    limit::{ScopeUsage, sort_fullest},
    name::Name,
    operation::Rejection,
    scope::Scope,
};
use rm_store::{
    label_resource::{self, IndexFilter, ScopeScan},
    session::within_timeout,
};

use super::LimitService;

/// Number of scopes per read if a filter applies, and maximum number of reads per page.
const SCOPES_AT_ONCE: usize = 1000;
const SCOPE_LOOKS_MAX: usize = 5;

/// Filter of scopes.
#[derive(Debug, Default)]
pub struct ScopeFilter {
    /// Only scopes of these users; `None` for all.
    pub users: Option<BTreeSet<Name>>,
    /// Only scopes with all of these labels.
    pub labels: BTreeMap<String, String>,
}

impl ScopeFilter {
    /// Whether a scope has the labels of the filter; its user is not checked.
    pub fn matches(&self, scope: &Scope) -> bool {
        self.labels.iter().all(|(key, value)| scope.labels().get(key) == Some(value))
    }

    /// Reads scopes by the most selective index. The result may contain scopes that do not match.
    async fn read(&self, connection: &mut PgConnection, after: &[u8], limit: i64) -> Result<ScopeScan, Error> {
        if let Some(users) = &self.users {
            return Ok(within_timeout(label_resource::list_of(connection, users, after, limit)).await?);
        }
        let indexed = [IndexFilter::EngineType, IndexFilter::Creator].into_iter();
        let mut indexed = indexed.filter_map(|label| Some((label, self.labels.get(label.label())?.as_str())));
        match indexed.next() {
            Some((label, value)) => {
                let list = label_resource::list_with(connection, (label, value), after, limit);
                Ok(within_timeout(list).await?)
            }
            None => Ok(within_timeout(label_resource::list(connection, after, limit)).await?),
        }
    }
}

/// Page of scopes.
#[derive(Debug)]
pub struct ScopePage {
    /// Scopes, in no particular order.
    pub shown: Vec<ScopeUsage>,
    /// Key after which the next page begins; `None` at the end.
    pub next: Option<Vec<u8>>,
}

impl LimitService {
    /// Returns one scope, by its labels. A scope without tickets has no use.
    ///
    /// # Errors
    /// [`Rejection::ScopeNotCounted`] if no label set counts these labels.
    #[boxed]
    pub async fn scope(&self, scope: &Scope) -> Result<ScopeUsage, Error> {
        let mut connection = self.store.pool().await?.acquire().await?;
        let limits = within_timeout(self.current(&mut connection)).await?;
        let limited = limits.deciding_at(scope);
        let limited = limited.ok_or_else(|| Rejection::ScopeNotCounted { keys: scope.keys() })?;
        let stored = within_timeout(label_resource::read_one(&mut *connection, &limited.counter)).await?;
        Ok(ScopeUsage::new(limited, stored))
    }

    /// Returns up to `limit` matching scopes with use, after the key `after` (empty for the first page).
    ///
    /// The number of scopes read is bounded, including those of label sets that do not decide, so a page may be short.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn scopes(&self, filter: &ScopeFilter, after: &[u8], limit: usize) -> Result<ScopePage, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let limits = within_timeout(self.current(&mut connection)).await?;
        let (mut shown, mut last) = (Vec::new(), after.to_vec());
        for look in 0..SCOPE_LOOKS_MAX {
            // Mostly all scopes match if there is no label filter. One more scope shows whether another page follows.
            let is_whole = look == 0 && filter.labels.is_empty();
            let at_once = if is_whole { limit.saturating_add(1) } else { SCOPES_AT_ONCE };
            let read = i64::try_from(at_once).unwrap_or(i64::MAX);
            let page = filter.read(&mut connection, &last, read).await?;
            for (place, counter, usage) in page.scopes {
                if shown.len() == limit {
                    return Ok(ScopePage { shown, next: Some(last) });
                }
                last = place;
                if !usage.usage.is_nothing() && filter.matches(&counter.scope) {
                    shown.push(ScopeUsage::new(limits.of_counter(counter), usage));
                }
            }
            match page.last {
                Some(place) => last = place,
                None => return Ok(ScopePage { shown, next: None }),
            }
        }
        Ok(ScopePage { shown, next: Some(last) })
    }

    /// Returns the matching scopes of the filter's users that use a share of a maximum, the largest share first. Also returns
    /// whether some scopes were not read.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn fullest_of_users(&self, filter: &ScopeFilter) -> Result<(Vec<ScopeUsage>, bool), Error> {
        let (mut fullest, mut after) = (Vec::new(), Vec::new());
        for _ in 0..SCOPE_LOOKS_MAX {
            let page = self.scopes(filter, &after, SCOPES_AT_ONCE).await?;
            fullest.extend(page.shown.into_iter().filter(|scope| scope.fullness() > 0.0));
            match page.next {
                Some(next) => after = next,
                None => {
                    sort_fullest(&mut fullest);
                    return Ok((fullest, false));
                }
            }
        }
        sort_fullest(&mut fullest);
        Ok((fullest, true))
    }
}
