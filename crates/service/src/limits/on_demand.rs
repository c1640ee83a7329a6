//! Label sets that are counted on demand, because the cap of a request needs them and no limit does.
//!
//! The request sets a limit for its labels in mode off, which starts the counting, and waits until all tickets are counted. If
//! that is too expensive, nothing is set; the ledger then rejects the cap and names `SetLimit`.
//!
//! Invariant: the label set is counted as after `SetLimit`, behind the fence and by the background task.
//! Caller: `request_resource`.

use std::{collections::BTreeMap, sync::Arc};

use sqlx::PgConnection;
use tokio::time::Instant;

use crate::error::Error;
use rm_model::{
    cap::Cap,
    limit::{LabelPattern, Rule, RulePrecondition},
    limit_mode::LimitMode,
    operation::Rejection,
    principal::Actor,
};
use rm_store::{StoreError, label_set, session::within_timeout, user_resource};

use super::{LimitService, MARGIN, POLL, fence::FencedChange};

/// Maximum number of live tickets for which counting starts on demand. Counting them takes about a second.
const TICKETS_MAX: i64 = 10_000;

/// Maximum number of label sets up to which a request may add one. More are left to administrators.
const LABEL_SETS_MAX: usize = 8;

/// The step that is missing for a cap.
enum CountingNeed {
    /// Nothing: its label set decides, or must not be counted on demand.
    Nothing,
    /// A limit that starts the counting.
    Limit,
    /// Time: the label set is being counted.
    Time,
}

impl LimitService {
    /// Starts the counting of label sets that `caps` need, and waits until they decide. Concurrent requests share one limit per
    /// label set.
    ///
    /// # Errors
    /// [`Error::LockTimeout`] if the fence could not be closed by `deadline`; [`Error::CommitUnknown`]; database errors.
    pub async fn count_on_demand(&self, by: Actor, caps: Vec<Arc<Cap>>, deadline: Instant) -> Result<(), Error> {
        let _turn = tokio::time::timeout_at(deadline, self.on_demand.lock()).await.map_err(|_| Error::LockTimeout)?;
        for cap in caps {
            let mut needed = self.needed(&cap).await?;
            if matches!(needed, CountingNeed::Limit) {
                let change = FencedChange::Set(has_counted(&cap), RulePrecondition::Nothing);
                match self.change(&by, deadline, &change).await {
                    Ok(_) => {}
                    // Another instance was faster.
                    Err(Error::Rejected(rejection)) if matches!(*rejection, Rejection::LimitChanged { .. }) => {}
                    Err(error) => return Err(error),
                }
                needed = CountingNeed::Time;
            }
            while !matches!(needed, CountingNeed::Nothing) && Instant::now() + POLL + MARGIN < deadline {
                tokio::time::sleep(POLL).await;
                needed = self.needed(&cap).await?;
            }
        }
        Ok(())
    }

    async fn needed(&self, cap: &Cap) -> Result<CountingNeed, Error> {
        let mut connection = self.store.pool().await?.acquire().await.map_err(StoreError::from)?;
        Ok(within_timeout(needed(&mut connection, cap)).await?)
    }
}

async fn needed(connection: &mut PgConnection, cap: &Cap) -> Result<CountingNeed, StoreError> {
    let sets = label_set::read(&mut *connection).await?;
    let of_cap: Vec<_> = sets.iter().filter(|set| set.counting.keys == cap.keys).map(|set| set.is_counted).collect();
    let (is_there, is_counted) = (!of_cap.is_empty(), of_cap.contains(&true));
    let are_all_taken = !is_there && sets.len() >= LABEL_SETS_MAX;
    if is_counted || are_all_taken || user_resource::are_more_than(connection, TICKETS_MAX).await? {
        return Ok(CountingNeed::Nothing);
    }
    Ok(if is_there { CountingNeed::Time } else { CountingNeed::Limit })
}

/// Returns the limit in mode off that starts the counting of a cap's labels.
fn has_counted(cap: &Cap) -> Rule {
    let each = cap.keys.iter().map(|key| (key.clone(), None)).collect();
    Rule { pattern: LabelPattern::new(each), mode: LimitMode::Off, max: BTreeMap::new(), guarantee: BTreeMap::new() }
}
