//! The history, read so that nothing that is committed late is skipped.
//!
//! Lines have the numbers that they took before their commit, so that behind a line that is seen, one with a smaller number may still
//! come. Who has read on to the larger one would never see it. So lines are told only up to the first number that is missing, unless it
//! is known that it never comes: once everybody who could have taken it is done.

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

use crate::{
    domain::action::ActionRecord,
    error::Error,
    store::{StoreError, action_record, history_end, session::answered},
};

/// How long a reader waits for those who write: many times what a batch takes. Whoever takes longer hides what comes behind his
/// lines from those who read on.
const WRITERS_WAIT_MAX: Duration = Duration::from_millis(250);

/// How often it looks whether they are done.
const WRITERS_POLL: Duration = Duration::from_millis(5);

/// Reads the history.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// Up to this number nothing comes any more.
    settled: Arc<AtomicI64>,
}

impl History {
    /// Up to `limit` lines, oldest first, from behind number `after`; of one ticket, or of all.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn read(
        &self,
        connection: &mut PgConnection,
        ticket_id: Option<Uuid>,
        after: i64,
        limit: i64,
    ) -> Result<Vec<ActionRecord>, Error> {
        let lines = answered(action_record::list(&mut *connection, ticket_id, after, limit)).await?;
        // What is done to a ticket is done under its EM's lock: one after another, commits included.
        if ticket_id.is_some() || self.whole(after, &lines) == lines.len() {
            return Ok(lines);
        }
        answered(self.settle(connection)).await?;
        let mut lines = answered(action_record::list(&mut *connection, None, after, limit)).await?;
        lines.truncate(self.whole(after, &lines));
        Ok(lines)
    }

    /// The number up to which nothing comes any more.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn settled(&self, connection: &mut PgConnection) -> Result<i64, Error> {
        answered(self.settle(connection)).await?;
        Ok(self.settled.load(Ordering::Acquire))
    }

    /// Up to which number nothing comes any more; `None` if that cannot be known without waiting for long.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn settled_number(&self, connection: &mut PgConnection) -> Result<Option<i64>, StoreError> {
        self.settle(connection).await
    }

    /// How many of the lines behind number `after` have nothing between them that may still come.
    fn whole(&self, after: i64, lines: &[ActionRecord]) -> usize {
        let settled = self.settled.load(Ordering::Acquire);
        whole(after, settled, lines.iter().map(|line| line.number))
    }

    /// Waits, but not for long, until all that have taken numbers so far are done; answers with the last of these numbers if they are.
    async fn settle(&self, connection: &mut PgConnection) -> Result<Option<i64>, StoreError> {
        let give_up = Instant::now() + WRITERS_WAIT_MAX;
        // In this order: whoever begins to write after the first look takes a larger number.
        let last = history_end::last_number(&mut *connection).await?;
        let mut writers = history_end::writers(&mut *connection).await?;
        while !writers.is_empty() && Instant::now() < give_up {
            sleep(WRITERS_POLL).await;
            let now = history_end::writers(&mut *connection).await?;
            writers.retain(|writer| now.contains(writer));
        }
        if !writers.is_empty() {
            return Ok(None);
        }
        self.settled.store(last, Ordering::Release);
        Ok(Some(last))
    }
}

/// How many of `numbers`, which follow `after` in order, are at most `settled` or follow without a gap.
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
    fn lines_are_told_up_to_the_first_number_that_may_still_come() {
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
