//! History reader: reads the history in order without skipping lines that commit late.
//!
//! A line takes its number before its commit. A line with a smaller number can therefore appear after a larger one was read.
//! Reads end at the first missing number until all transactions that may have taken it have ended.
//!
//! Never: waits longer than `WRITERS_WAIT_MAX` for writers.
//! Callers: `follow`, `usage` and `background::usage`.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use sqlx::PgConnection;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use crate::error::Error;
use rm_model::action::ActionRecord;
use rm_store::{StoreError, action_record, history_tail, session::within_timeout};

/// Maximum time that a read waits for writers: many times the duration of a batch. A longer transaction hides all later lines.
const WRITERS_WAIT_MAX: Duration = Duration::from_millis(250);

/// Interval between checks whether the writers have ended.
const WRITERS_POLL: Duration = Duration::from_millis(5);

/// Reads the history. Clones share what is known of it.
#[derive(Clone, Debug, Default)]
pub struct HistoryReader {
    /// Number up to which the history is complete.
    settled: Arc<AtomicI64>,
}

impl HistoryReader {
    /// Returns up to `limit` lines after number `after`, oldest first, of one ticket or of all.
    ///
    /// # Errors
    /// Database errors.
    pub async fn read(
        &self,
        connection: &mut PgConnection,
        ticket_id: Option<Uuid>,
        after: i64,
        limit: i64,
    ) -> Result<Vec<ActionRecord>, Error> {
        let lines = within_timeout(action_record::list(&mut *connection, ticket_id, after, limit)).await?;
        // Changes of one ticket are serialized by the lock of its EM, commits included.
        if ticket_id.is_some() || self.whole(after, &lines) == lines.len() {
            return Ok(lines);
        }
        within_timeout(self.wait_for_gaps(connection)).await?;
        let mut lines = within_timeout(action_record::list(&mut *connection, None, after, limit)).await?;
        lines.truncate(self.whole(after, &lines));
        Ok(lines)
    }

    /// Waits for writers up to `WRITERS_WAIT_MAX` and returns the number up to which the history is complete.
    ///
    /// # Errors
    /// Database errors.
    pub async fn last_settled(&self, connection: &mut PgConnection) -> Result<i64, Error> {
        within_timeout(self.wait_for_gaps(connection)).await?;
        Ok(self.settled.load(Ordering::Acquire))
    }

    /// Returns the last assigned number if the history is complete up to it; `None` if a writer runs longer than
    /// `WRITERS_WAIT_MAX`.
    ///
    /// # Errors
    /// Database errors.
    pub async fn settled_number(&self, connection: &mut PgConnection) -> Result<Option<i64>, StoreError> {
        self.wait_for_gaps(connection).await
    }

    /// Returns the number of lines after number `after` without a gap that may still be filled.
    fn whole(&self, after: i64, lines: &[ActionRecord]) -> usize {
        let settled = self.settled.load(Ordering::Acquire);
        whole(after, settled, lines.iter().map(|line| line.number))
    }

    /// Waits up to [`WRITERS_WAIT_MAX`] until all transactions that have taken numbers so far have ended. Returns the last
    /// number if they have.
    async fn wait_for_gaps(&self, connection: &mut PgConnection) -> Result<Option<i64>, StoreError> {
        let give_up = Instant::now() + WRITERS_WAIT_MAX;
        // The number is read first: a transaction that begins later takes a larger number.
        let last = history_tail::last_number(&mut *connection).await?;
        let mut writers = history_tail::writers(&mut *connection).await?;
        while !writers.is_empty() && Instant::now() < give_up {
            sleep(WRITERS_POLL).await;
            let now = history_tail::writers(&mut *connection).await?;
            writers.retain(|writer| now.contains(writer));
        }
        if !writers.is_empty() {
            return Ok(None);
        }
        self.settled.store(last, Ordering::Release);
        Ok(Some(last))
    }
}

/// Returns how many of `numbers`, which follow `after` in order, are at most `last_settled` or follow without a gap.
fn whole(after: i64, settled: i64, numbers: impl IntoIterator<Item = i64>) -> usize {
    let mut before = after.max(settled);
    let follows = |number: &i64| {
        let is_whole = *number <= before || *number == before.saturating_add(1);
        before = before.max(*number);
        is_whole
    };
    numbers.into_iter().take_while(follows).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_reader_stops_at_first_uncommitted_number() {
        for (after, settled, numbers, told) in [
            (0, 0, &[1, 2, 3][..], 3),
            (0, 0, &[2, 3], 0),
            (0, 0, &[1, 3, 4], 1),
            (0, 3, &[2, 3, 4], 3),
            (0, 4, &[1, 3, 5, 7], 3),
            (4, 0, &[5, 6, 8], 2),
            (4, 7, &[6, 9], 1),
            (9, 4, &[10, 12], 1),
            (i64::MAX, 0, &[], 0),
        ] {
            assert_eq!(whole(after, settled, numbers.iter().copied()), told, "{after} {settled} {numbers:?}");
        }
    }
}
