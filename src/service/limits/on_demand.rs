//! Label sets that requests have counted by their caps, where no limit has.
//!
//! A request with a cap for labels that nothing is counted by sets the limit that has them counted: for each value, in the mode off. The
//! call waits until all tickets are counted. It does so only while this is cheap; else the ledger rejects the cap, and names `SetLimit`.
//!
//! Invariant: a label set is counted as after `SetLimit`, behind the fence and by the background task.
//! Caller: `request_resource`.

use std::{collections::BTreeMap, sync::Arc};

use sqlx::PgConnection;
use tokio::time::Instant;

use crate::{
    domain::{
        cap::Cap,
        limit::{Expected, Pattern, Rule},
        limit_mode::LimitMode,
        operation::Rejection,
        principal::Actor,
    },
    error::Error,
    store::{StoreError, label_set, session::answered, user_resource},
};

use super::{LimitService, MARGIN, POLL, fence::Change};

/// Maximum number of live tickets that a call has counted. Counting them takes about a second.
const TICKETS_MAX: i64 = 10_000;

/// Maximum number of label sets up to which a request has another one counted. The rest is left to administrators.
const LABEL_SETS_MAX: usize = 8;

/// What a label set of a cap needs.
enum Needed {
    /// Nothing: it decides, or must not be counted by a call.
    Nothing,
    /// A limit that has it counted.
    Limit,
    /// Time: it is being counted.
    Time,
}

impl LimitService {
    /// Has the label sets of caps counted that nothing is counted by, and waits until they decide. However many requests need a label set,
    /// one limit is set for it.
    ///
    /// # Errors
    /// [`Error::LockTimeout`] if that was not possible until `deadline`; [`Error::CommitUnknown`]; those of the database.
    pub async fn count_on_demand(&self, by: Actor, caps: Vec<Arc<Cap>>, deadline: Instant) -> Result<(), Error> {
        let _turn = tokio::time::timeout_at(deadline, self.on_demand.lock()).await.map_err(|_| Error::LockTimeout)?;
        for cap in caps {
            let mut needed = self.needed(&cap).await?;
            if matches!(needed, Needed::Limit) {
                let change = Change::Set(has_counted(&cap), Expected::Nothing);
                match self.change(&by, deadline, &change).await {
                    Ok(_) => {}
                    // Another instance was first.
                    Err(Error::Rejected(rejection)) if matches!(*rejection, Rejection::LimitChanged { .. }) => {}
                    Err(error) => return Err(error),
                }
                needed = Needed::Time;
            }
            while !matches!(needed, Needed::Nothing) && Instant::now() + POLL + MARGIN < deadline {
                tokio::time::sleep(POLL).await;
                needed = self.needed(&cap).await?;
            }
        }
        Ok(())
    }

    async fn needed(&self, cap: &Cap) -> Result<Needed, Error> {
        let mut connection = self.store.pool().await?.acquire().await.map_err(StoreError::from)?;
        Ok(answered(needed(&mut connection, cap)).await?)
    }
}

async fn needed(connection: &mut PgConnection, cap: &Cap) -> Result<Needed, StoreError> {
    let sets = label_set::read(&mut *connection).await?;
    let of_cap: Vec<_> = sets.iter().filter(|set| set.counting.keys == cap.keys).map(|set| set.is_counted).collect();
    let (is_there, is_counted) = (!of_cap.is_empty(), of_cap.contains(&true));
    let are_all_taken = !is_there && sets.len() >= LABEL_SETS_MAX;
    if is_counted || are_all_taken || user_resource::are_more_than(connection, TICKETS_MAX).await? {
        return Ok(Needed::Nothing);
    }
    Ok(if is_there { Needed::Time } else { Needed::Limit })
}

/// The limit that has the labels of a cap counted, and limits nothing.
fn has_counted(cap: &Cap) -> Rule {
    let each = cap.keys.iter().map(|key| (key.clone(), None)).collect();
    Rule { pattern: Pattern::new(each), mode: LimitMode::Off, max: BTreeMap::new() }
}
