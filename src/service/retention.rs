//! Retention: forgets request ids and ended tickets that are older than history has to reach.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::store::{Store, StoreError, action_record, request_id, session::answered};

/// How often to look.
const INTERVAL: Duration = Duration::from_secs(60);

/// How many rows one statement removes: few enough to keep nobody waiting.
const BITE: i64 = 5000;

/// Removes what is older than `history`, until `stop`.
pub async fn run(store: Store, history: Duration, stop: CancellationToken) {
    let mut rounds = tokio::time::interval(INTERVAL);
    rounds.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = rounds.tick() => if let Err(error) = answered(round(&store, history)).await {
                tracing::warn!(error = &error as &dyn std::error::Error, "cannot remove what is older than the history");
            }
        }
    }
}

async fn round(store: &Store, history: Duration) -> Result<(), StoreError> {
    while action_record::forget(store.pool(), history, BITE).await? {}
    while request_id::forget(store.pool(), history, BITE).await? {}
    Ok(())
}
