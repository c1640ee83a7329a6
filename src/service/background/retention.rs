//! Retention: forgets request ids and ended tickets that are older than the history has to reach, and makes room for what comes.

use std::time::Duration;

use crate::store::{
    StoreError, Work, action_record, history_part, refusal, request_id,
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
    schema: Option<Session>,
}

impl Retention {
    /// Of a history that reaches back so far. Its parts are made and dropped by `schema`, if what changes the schema is done elsewhere.
    pub fn new(history: Duration, holder: Holder, schema: Option<Session>) -> Self {
        Self { history, holder, schema }
    }
}

impl Task for Retention {
    const NAME: &'static str = "retention";
    const WORK: Work = Work::Long;
    const PERIOD: Duration = Duration::from_secs(20);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        if !self.holder.holds() {
            return Ok(Step::Done);
        }
        let (history, usage_kept) = (self.history, self.history.max(USAGE_KEPT));
        let mut left = Left { more: false, failed: None };
        left.parts(history, self.schema.as_mut().unwrap_or(session)).await?;
        left.note(answered(action_record::forget_rest(session.get().await?, history, BITE)).await, session)?;
        left.note(answered(request_id::delete_expired(session.get().await?, history, BITE)).await, session)?;
        left.note(answered(request_id::delete_earlier(session.get().await?, history, BITE)).await, session)?;
        left.note(answered(refusal::delete_expired(session.get().await?, history, BITE)).await, session)?;
        left.note(answered(usage_hour::delete_expired(session.get().await?, usage_kept, BITE)).await, session)?;
        match left.failed {
            Some(error) => Err(error),
            None => Ok(if left.more { Step::More } else { Step::Done }),
        }
    }
}

/// What a step leaves.
struct Left {
    more: bool,
    failed: Option<StoreError>,
}

impl Left {
    /// Makes and drops parts of the history.
    async fn parts(&mut self, history: Duration, session: &mut Session) -> Result<(), StoreError> {
        let made = answered(history_part::make(session.get().await?, history)).await;
        self.note(made.map(|()| false), session)?;
        let dropped = answered(history_part::drop_oldest(session.get().await?, history)).await;
        self.note(dropped, session)
    }

    /// One kind could not be removed, because somebody holds it: that keeps no other. Without the database, nothing can.
    fn note(&mut self, done: Result<bool, StoreError>, session: &mut Session) -> Result<(), StoreError> {
        match done {
            Ok(more) => self.more |= more,
            Err(error) if error.is_unavailable() => return Err(error),
            Err(error) => {
                session.reset();
                self.failed.get_or_insert(error);
            }
        }
        Ok(())
    }
}
