//! What scopes hold, as it is listed.

use std::collections::{BTreeMap, BTreeSet};

use sqlx::PgConnection;

use crate::{
    domain::{
        limit::{ScopeUsage, sort_fullest},
        name::Name,
        operation::Rejection,
        scope::Scope,
    },
    error::Error,
    store::{
        label_resource::{self, Indexed, Looked},
        session::answered,
    },
};

use super::LimitService;

/// How many scopes are looked at at once where not all of them are shown, and how often, at most, for one page.
const SCOPES_AT_ONCE: usize = 1000;
const SCOPE_LOOKS_MAX: usize = 5;

/// Which scopes.
#[derive(Debug, Default)]
pub struct ScopeFilter {
    /// Only those of these users.
    pub users: Option<BTreeSet<Name>>,
    /// Only those with all of these labels.
    pub labels: BTreeMap<String, String>,
}

impl ScopeFilter {
    /// Whether a scope is among them, but for its user.
    pub fn matches(&self, scope: &Scope) -> bool {
        self.labels.iter().all(|(key, value)| scope.labels().get(key) == Some(value))
    }

    /// Those that the index finds which finds the fewest, and others besides.
    async fn read(&self, connection: &mut PgConnection, after: &[u8], limit: i64) -> Result<Looked, Error> {
        if let Some(users) = &self.users {
            return Ok(answered(label_resource::list_of(connection, users, after, limit)).await?);
        }
        let indexed = [Indexed::EngineType, Indexed::Creator].into_iter();
        let mut indexed = indexed.filter_map(|label| Some((label, self.labels.get(label.label())?.as_str())));
        match indexed.next() {
            Some((label, value)) => {
                let list = label_resource::list_with(connection, (label, value), after, limit);
                Ok(answered(list).await?)
            }
            None => Ok(answered(label_resource::list(connection, after, limit)).await?),
        }
    }
}

/// A page of scopes.
#[derive(Debug)]
pub struct Scopes {
    /// In no order that means anything.
    pub shown: Vec<ScopeUsage>,
    /// The place behind which the next page begins; `None` if nothing follows.
    pub next: Option<Vec<u8>>,
}

impl LimitService {
    /// One scope, by its labels; it holds nothing if nobody counts there.
    ///
    /// # Errors
    /// [`Rejection::ScopeNotCounted`].
    pub async fn scope(&self, scope: &Scope) -> Result<ScopeUsage, Error> {
        let mut connection = self.store.pool().await?.acquire().await?;
        let limits = answered(self.current(&mut connection)).await?;
        let limited = limits.deciding_at(scope);
        let limited = limited.ok_or_else(|| Rejection::ScopeNotCounted { keys: scope.keys() })?;
        let stored = answered(label_resource::read_one(&mut *connection, &limited.counter)).await?;
        Ok(ScopeUsage::new(limited, stored))
    }

    /// A page of up to `limit` scopes that hold something and match, from behind the place `after` (empty for the first). It looks through so
    /// many scopes, those included that are just being counted or go, and may find few.
    pub async fn scopes(&self, filter: &ScopeFilter, after: &[u8], limit: usize) -> Result<Scopes, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let limits = answered(self.current(&mut connection)).await?;
        let (mut shown, mut last) = (Vec::new(), after.to_vec());
        for look in 0..SCOPE_LOOKS_MAX {
            // Mostly all of those without labels to look for are shown; one more tells whether there are more.
            let is_whole = look == 0 && filter.labels.is_empty();
            let at_once = if is_whole { limit.saturating_add(1) } else { SCOPES_AT_ONCE };
            let read = i64::try_from(at_once).unwrap_or(i64::MAX);
            let page = filter.read(&mut connection, &last, read).await?;
            for (place, counter, usage) in page.scopes {
                if shown.len() == limit {
                    return Ok(Scopes { shown, next: Some(last) });
                }
                last = place;
                if !usage.usage.is_nothing() && filter.matches(&counter.scope) {
                    shown.push(ScopeUsage::new(limits.of_counter(counter), usage));
                }
            }
            match page.last {
                Some(place) => last = place,
                None => return Ok(Scopes { shown, next: None }),
            }
        }
        Ok(Scopes { shown, next: Some(last) })
    }

    /// The scopes of some users that match and hold a share of a maximum, the largest first; and whether not all were looked at.
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
