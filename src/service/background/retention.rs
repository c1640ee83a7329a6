//! Retention: forgets request ids and ended tickets that are older than the history has to reach, and makes room for what comes.

use std::time::Duration;

use crate::store::{
    StoreError, action_record, history_part, refusal, request_id,
    session::{Session, answered},
    usage_hour,
};

use super::{Step, Task, lease::Holder};

/// How many rows one statement removes: few enough to keep nobody waiting.
const BITE: i64 = 1000;

/// How long use by the hour is told at least, however short the history: three months, and the rest of a day.
const USAGE_KEPT: Duration = Duration::from_secs(93 * 24 * 3600);

/// Removes what is older than the history, and makes its next parts.
#[derive(Debug)]
pub struct Retention {
    history: Duration,
    holder: Holder,
}

impl Retention {
    /// Of a history that reaches back so far.
    pub fn new(history: Duration, holder: Holder) -> Self {
        Self { history, holder }
    }
}

impl Task for Retention {
    const NAME: &'static str = "retention";
    const PERIOD: Duration = Duration::from_secs(20);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        if !self.holder.holds() {
            return Ok(Step::Done);
        }
        answered(history_part::make(session.get().await?, self.history)).await?;
        let mut more = answered(history_part::drop_oldest(session.get().await?, self.history)).await?;
        more |= answered(action_record::forget_rest(session.get().await?, self.history, BITE)).await?;
        more |= answered(request_id::delete_expired(session.get().await?, self.history, BITE)).await?;
        more |= answered(refusal::delete_expired(session.get().await?, self.history, BITE)).await?;
        let usage_kept = self.history.max(USAGE_KEPT);
        more |= answered(usage_hour::delete_expired(session.get().await?, usage_kept, BITE)).await?;
        Ok(if more { Step::More } else { Step::Done })
    }
}
