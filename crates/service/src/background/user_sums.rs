//! Sums by user: keeps the sums of the live tickets of each user, for the list of the users with the most use.
//!
//! A run reads all live tickets once, compares the stored sums with them, and then applies the changes of the history. Each
//! step writes the sums of the changed users in the transaction that advances the progress. A change states the amounts after
//! it, so changes that the first read has seen already are harmless. A run ends if another instance begins one, if the
//! database was restored to an earlier state, or if lines were deleted that it has not read.
//!
//! Never: decides a grant; adds work to a commit of the committer.
//! Caller: the task driver (`background`).

use std::{collections::BTreeSet, time::Duration};

use sqlx::PgConnection;
use tokio::time::Instant;
use uuid::Uuid;

use crate::history::HistoryReader;
use rm_model::{
    name::Name,
    user_sum::{UserSum, UserTickets},
};
use rm_store::{
    StoreError, Work,
    session::{Session, clock, within_timeout},
    user_sum::{self, SumProgress},
};
use rm_telemetry::metrics::Metrics;

use super::{Step, Task, lease::LeaseFlag};

/// Maximum number of tickets, of compared users, of history lines and of written users per step: a statement takes two to four
/// milliseconds of PostgreSQL.
const TICKETS: i64 = 500;
const COMPARED: i64 = 250;
const LINES: i64 = 250;
const WRITTEN: usize = 32;

/// Phase of a run.
#[derive(Debug)]
enum Phase {
    /// Reads the tickets after this one.
    Tickets(Uuid),
    /// Compares the stored sums of the users after this one.
    Stored(String),
    /// Applies changes.
    Changes,
}

/// One run: all live tickets, as of a history line.
#[derive(Debug)]
struct SumRun {
    writer: Uuid,
    /// Number of the last applied history line.
    number: i64,
    tickets: UserTickets,
    /// Users whose stored sums may differ.
    changed: BTreeSet<Name>,
    phase: Phase,
}

/// Background task that sums the live tickets by user.
#[derive(Debug)]
pub struct SumByUser {
    history: HistoryReader,
    holder: LeaseFlag,
    metrics: Metrics,
    run: Option<SumRun>,
}

impl SumByUser {
    /// Creates the task without a run. Only the owner of the lease runs.
    pub fn new(holder: LeaseFlag, metrics: Metrics) -> Self {
        Self { history: HistoryReader::default(), holder, metrics, run: None }
    }

    /// Begins a run at the present end of the history. Returns `None` if a writer of the history takes too long.
    async fn begin(&self, session: &mut Session) -> Result<Option<SumRun>, StoreError> {
        let connection = session.get().await?;
        let Some(number) = within_timeout(self.history.settled_number(&mut *connection)).await? else {
            return Ok(None);
        };
        let writer = Uuid::new_v4();
        within_timeout(user_sum::begin(connection, writer, number)).await?;
        let phase = Phase::Tickets(Uuid::nil());
        Ok(Some(SumRun { writer, number, tickets: UserTickets::default(), changed: BTreeSet::new(), phase }))
    }

    /// Does the next step of a run. Returns `None` if the run has ended.
    async fn advance(&self, run: &mut SumRun, session: &mut Session) -> Result<Option<Step>, StoreError> {
        match &run.phase {
            &Phase::Tickets(after) => run.read_tickets(session.get().await?, after).await?,
            Phase::Stored(after) => run.compare(session.get().await?, &after.clone()).await?,
            Phase::Changes => return self.write_next(run, session).await,
        }
        Ok(Some(Step::More))
    }

    /// Applies the next changes and writes the sums of some changed users. Returns `None` if the run has ended.
    async fn write_next(&self, run: &mut SumRun, session: &mut Session) -> Result<Option<Step>, StoreError> {
        let transaction = within_timeout(session.begin()).await?;
        // The time is read first: all changes before it have smaller numbers.
        let now = within_timeout(clock(&mut *transaction)).await?;
        let Some(settled) = within_timeout(self.history.settled_number(&mut *transaction)).await? else {
            session.idle().await;
            return Ok(Some(Step::Done));
        };
        let to = run.apply_next(&mut *transaction, settled).await?;
        let written: Vec<_> =
            run.changed.iter().take(WRITTEN).map(|user| (user.clone(), run.tickets.sum(user))).collect();
        let is_complete = to == settled && written.len() == run.changed.len();
        let progress =
            SumProgress { writer: run.writer, from: run.number, to, complete_until: is_complete.then_some(now) };
        if !within_timeout(user_sum::advance(&mut *transaction, &progress)).await? {
            session.idle().await;
            return Ok(None);
        }
        within_timeout(user_sum::write(&mut *transaction, &written)).await?;
        within_timeout(session.commit()).await?;
        session.idle().await;
        run.number = to;
        for (user, _) in &written {
            run.changed.remove(user);
        }
        Ok(Some(if is_complete { Step::Done } else { Step::More }))
    }
}

impl SumRun {
    /// Adds a page of the live tickets.
    async fn read_tickets(&mut self, connection: &mut PgConnection, after: Uuid) -> Result<(), StoreError> {
        let page = within_timeout(user_sum::tickets(connection, after, TICKETS)).await?;
        self.phase = match page.last().filter(|_| is_full(page.len(), TICKETS)) {
            Some(last) => Phase::Tickets(last.ticket_id),
            None => Phase::Stored(String::new()),
        };
        page.into_iter().for_each(|ticket| self.tickets.apply(ticket));
        if matches!(self.phase, Phase::Stored(_)) {
            self.changed = self.tickets.users().cloned().collect();
        }
        Ok(())
    }

    /// Compares a page of the stored sums with the tickets: only different ones have to be written.
    async fn compare(&mut self, connection: &mut PgConnection, after: &str) -> Result<(), StoreError> {
        let page: Vec<(Name, UserSum)> = within_timeout(user_sum::stored(connection, after, COMPARED)).await?;
        self.phase = match page.last().filter(|_| is_full(page.len(), COMPARED)) {
            Some((user, _)) => Phase::Stored(user.to_string()),
            None => Phase::Changes,
        };
        for (user, sum) in page {
            let _ = match self.tickets.sum(&user) == Some(sum) {
                true => self.changed.remove(&user),
                false => self.changed.insert(user),
            };
        }
        Ok(())
    }

    /// Applies the next changes up to line `settled`, unless many users wait for their write. Returns the number of the last
    /// applied line.
    async fn apply_next(&mut self, connection: &mut PgConnection, settled: i64) -> Result<i64, StoreError> {
        if self.changed.len() >= WRITTEN || settled <= self.number {
            return Ok(self.number);
        }
        let lines = within_timeout(user_sum::changes(connection, self.number, settled, LINES)).await?;
        let last = lines.last().filter(|_| is_full(lines.len(), LINES)).map_or(settled, |(number, _)| *number);
        for (_, change) in lines {
            self.changed.insert(change.user.clone());
            self.tickets.apply(change);
        }
        Ok(last)
    }
}

fn is_full(entries: usize, limit: i64) -> bool {
    i64::try_from(entries).is_ok_and(|entries| entries == limit)
}

impl Task for SumByUser {
    const NAME: &'static str = "user_sums";
    const WORK: Work = Work::Long;
    const PERIOD: Duration = Duration::from_secs(2);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        if !self.holder.holds() {
            self.run = None;
            self.metrics.user_sums.tickets.set(0);
            return Ok(Step::Done);
        }
        let begun = Instant::now();
        let run = match self.run.take() {
            Some(run) => Some(run),
            None => self.begin(session).await?,
        };
        let Some(mut run) = run else { return Ok(Step::Done) };
        let step = self.advance(&mut run, session).await;
        self.metrics.user_sums.step.observe(begun.elapsed().as_secs_f64());
        self.metrics.user_sums.tickets.set(i64::try_from(run.tickets.len()).unwrap_or(i64::MAX));
        // A failed step is repeated: its changes are applied again.
        if !matches!(step, Ok(None)) {
            self.run = Some(run);
        }
        let step = step?.unwrap_or(Step::More);
        if step == Step::More {
            tokio::time::sleep(begun.elapsed()).await;
        }
        Ok(step)
    }
}
