//! Roll-up of usage: adds the ended tickets of the history to sums per hour, each ticket once.
//!
//! The progress is a row that moves in the transaction that adds, so any instance can continue. The roll-up reads only numbers
//! up to which the history is complete, so lines that commit late are included.
//!
//! Never: adds a ticket twice.
//! Caller: the task driver (`background`).

use std::time::Duration;

use sqlx::PgConnection;
use tokio::time::Instant;

use crate::history::HistoryReader;
use rm_model::usage_sum::{NAMES_MAX, UsageSums};
use rm_store::{
    StoreError, Work, ended_use,
    session::{Session, clock, within_timeout},
    usage_hour::{self, RollUpProgress},
};

use super::{Step, Task};

/// Maximum number of history numbers per step, so that a step is short.
const NUMBERS: i64 = 10_000;

/// Pause after a step with work left, as a multiple of its duration: a long history leaves most of the time to other work.
const REST_TIMES: u32 = 3;

/// Interval between updates of the progress while no ticket ends.
const TOLD_EVERY: time::Duration = time::Duration::seconds(30);

/// Maximum time by which a line's time precedes its commit: longer than a transaction may take.
const LINES_LATE: time::Duration = time::Duration::seconds(30);

/// Background task that sums the ended tickets.
#[derive(Debug, Default)]
pub struct RollUpUsage {
    history: HistoryReader,
}

impl RollUpUsage {
    /// Adds the tickets that ended by the next lines. Returns whether more lines follow.
    async fn roll_up(&self, session: &mut Session) -> Result<bool, StoreError> {
        // Reads the end of the history in the transaction that stores the progress. Another primary may not know the numbers
        // assigned last and would assign them to lines that would never be counted.
        let counted = self.count_next(within_timeout(session.begin()).await?).await?;
        if counted.is_some() {
            within_timeout(session.commit()).await?;
        }
        session.idle().await;
        Ok(counted.unwrap_or(false))
    }

    /// Adds in the current transaction. Returns `None` if there is nothing to store or another instance was faster.
    async fn count_next(&self, transaction: &mut PgConnection) -> Result<Option<bool>, StoreError> {
        let now = within_timeout(clock(&mut *transaction)).await?;
        let Some(settled) = within_timeout(self.history.settled_number(&mut *transaction)).await? else {
            return Ok(None);
        };
        let from = within_timeout(usage_hour::progress(&mut *transaction)).await?;
        let first = within_timeout(ended_use::next_number(&mut *transaction, from.last_number)).await?;
        // Numbers before it belong to deleted lines, or to none.
        let first = first.map_or(settled, |first| first - 1).clamp(from.last_number, settled.max(from.last_number));
        let until = settled.min(first.saturating_add(NUMBERS));
        let complete_until = if until == settled { now - LINES_LATE } else { from.complete_until };
        if until <= from.last_number && complete_until - from.complete_until < TOLD_EVERY {
            return Ok(None);
        }
        let ended = within_timeout(ended_use::list(&mut *transaction, from.last_number, until)).await?;
        let sums = UsageSums::of(&ended);
        let to = RollUpProgress { last_number: until, complete_until };
        if !within_timeout(usage_hour::advance(&mut *transaction, from.last_number, to)).await? {
            return Ok(None);
        }
        let (known, names) = within_timeout(usage_hour::known(&mut *transaction, &sums)).await?;
        let sums = sums.within_bounds(&known, names, NAMES_MAX);
        within_timeout(usage_hour::add(transaction, &sums)).await?;
        Ok(Some(until < settled))
    }
}

impl Task for RollUpUsage {
    const NAME: &'static str = "usage";
    const WORK: Work = Work::Long;
    const PERIOD: Duration = Duration::from_secs(5);
    const LEASED: bool = true;

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        let begun = Instant::now();
        if !self.roll_up(session).await? {
            return Ok(Step::Done);
        }
        tokio::time::sleep(begun.elapsed() * REST_TIMES).await;
        Ok(Step::More)
    }
}
