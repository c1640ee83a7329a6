//! Use over time: the ends in the history are summed by the hour, step by step, each of them once. How far it is stands in the database and
//! moves in the transaction that counts, so that any instance goes on where another ended. What is committed late is waited for.

use std::time::Duration;

use sqlx::PgConnection;
use tokio::time::Instant;

use crate::{
    domain::usage_sum::{NAMES_MAX, UsageSums},
    service::history::History,
    store::{
        StoreError, Work, ended_use,
        session::{Session, answered, clock},
        usage_hour::{self, Progress},
    },
};

use super::{Step, Task, lease::Holder};

/// How many numbers of the history one step goes through, whatever they are of: so little that it is soon done.
const NUMBERS: i64 = 10_000;

/// A step that has more to do rests so many times as long as it took: of a long history, most of the time is others'.
const REST_TIMES: u32 = 3;

/// How often it is told that nothing has ended.
const TOLD_EVERY: time::Duration = time::Duration::seconds(30);

/// How long before a line's commit its time may be, at most: longer than a transaction may take.
const LINES_LATE: time::Duration = time::Duration::seconds(30);

/// Sums what ended.
#[derive(Debug)]
pub struct RollUpUsage {
    holder: Holder,
    history: History,
}

impl RollUpUsage {
    /// Where the lease is held.
    pub fn new(holder: Holder) -> Self {
        Self { holder, history: History::default() }
    }

    /// Counts what ended by the next lines; true if there are more behind them.
    async fn roll_up(&self, session: &mut Session) -> Result<bool, StoreError> {
        // How far the history is, is asked where it is noted: another host of the database, or the same one after a crash, may not know of
        // the numbers that were given out last, and gives them to lines that would never be counted.
        let counted = self.count_next(answered(session.begin()).await?).await?;
        if counted.is_some() {
            answered(session.commit()).await?;
        }
        session.rest().await;
        Ok(counted.unwrap_or(false))
    }

    /// The same in a transaction; `None` if there is nothing to be told, or somebody else was faster.
    async fn count_next(&self, transaction: &mut PgConnection) -> Result<Option<bool>, StoreError> {
        let now = answered(clock(&mut *transaction)).await?;
        let Some(settled) = answered(self.history.settled_number(&mut *transaction)).await? else { return Ok(None) };
        let from = answered(usage_hour::progress(&mut *transaction)).await?;
        let first = answered(ended_use::next_number(&mut *transaction, from.last_number)).await?;
        // What went before was given to lines that are gone, or to none.
        let first = first.map_or(settled, |first| first - 1).clamp(from.last_number, settled.max(from.last_number));
        let until = settled.min(first.saturating_add(NUMBERS));
        let complete_until = if until == settled { now - LINES_LATE } else { from.complete_until };
        if until <= from.last_number && complete_until - from.complete_until < TOLD_EVERY {
            return Ok(None);
        }
        let ended = answered(ended_use::list(&mut *transaction, from.last_number, until)).await?;
        let sums = UsageSums::of(&ended);
        let to = Progress { last_number: until, complete_until };
        if !answered(usage_hour::advance(&mut *transaction, from.last_number, to)).await? {
            return Ok(None);
        }
        let (known, names) = answered(usage_hour::known(&mut *transaction, &sums)).await?;
        let sums = sums.within_bounds(&known, names, NAMES_MAX);
        answered(usage_hour::add(transaction, &sums)).await?;
        Ok(Some(until < settled))
    }
}

impl Task for RollUpUsage {
    const NAME: &'static str = "usage";
    const WORK: Work = Work::Long;
    const PERIOD: Duration = Duration::from_secs(5);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        if !self.holder.holds() {
            return Ok(Step::Done);
        }
        let begun = Instant::now();
        if !self.roll_up(session).await? {
            return Ok(Step::Done);
        }
        tokio::time::sleep(begun.elapsed() * REST_TIMES).await;
        Ok(Step::More)
    }
}
