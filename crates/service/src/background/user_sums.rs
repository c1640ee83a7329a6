//! Sums by user: keeps the sums of the live tickets of each user, for the list of the users with the most use.
//!
//! A run reads all live tickets once, compares the stored sums with them, and then applies the changes of the history in
//! rounds. A round reads all changes since the last one and some pages of the tickets with idle engines, and then writes each
//! changed user once. The progress advances with the last write of a round. A change states the amounts after it, so changes that the first read has seen already are
//! harmless. A run ends if another instance begins one, if the database was restored to an earlier state, or if lines were
//! deleted that it has not read.
//!
//! Never: decides a grant; adds work to a commit of the committer.
//! Caller: the task driver (`background`).

use std::{collections::BTreeSet, time::Duration};

use sqlx::PgConnection;
use time::OffsetDateTime;
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
    user_sum::{self, CompleteSums, SumProgress},
};
use rm_telemetry::metrics::Metrics;

use super::{PAUSE_TIMES, Step, Task, lease::LeaseFlag};

/// Maximum number of tickets, of compared users, of history lines and of written users per step: a statement takes two to four
/// milliseconds of PostgreSQL.
const TICKETS: i64 = 500;
const COMPARED: i64 = 250;
const LINES: i64 = 250;
const WRITTEN: usize = 32;

/// Maximum number of tickets with idle engines per step, which reads an index alone, and of such steps per round.
const IDLE: i64 = 1000;
const IDLE_PAGES: usize = 10;

/// Phase of a run.
#[derive(Debug, Clone)]
enum Phase {
    /// Reads the tickets after this one.
    Tickets(Uuid),
    /// Compares the stored sums of the users after this one.
    Stored(String),
    /// Begins the next round.
    Round,
    /// Reads the changes of a round.
    Changes(SumRound),
    /// Reads tickets with idle engines.
    Idle(SumRound),
    /// Writes the sums of the changed users.
    Writes(SumRound),
}

/// One round of changes. Each changed user is written once, after all changes of the round are read.
#[derive(Debug, Clone, Copy)]
struct SumRound {
    /// Number of the last history line of the round.
    to: i64,
    /// Time before which all changes are in the round.
    until: OffsetDateTime,
    /// Number of pages of tickets with idle engines that were read.
    idle_pages: usize,
}

/// One run: all live tickets, as of a history line.
#[derive(Debug)]
struct SumRun {
    writer: Uuid,
    /// Number of the last history line of the last complete round.
    written: i64,
    /// Number of the last history line that `tickets` includes.
    read: i64,
    tickets: UserTickets,
    /// Last ticket of the last page of those with idle engines; nil after their last page.
    idle_after: Uuid,
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
        let (tickets, changed, phase) = (UserTickets::default(), BTreeSet::new(), Phase::Tickets(Uuid::nil()));
        let idle_after = Uuid::nil();
        Ok(Some(SumRun { writer, written: number, read: number, tickets, idle_after, changed, phase }))
    }

    /// Does the next step of a run. Returns `None` if the run has ended.
    async fn advance(&self, run: &mut SumRun, session: &mut Session) -> Result<Option<Step>, StoreError> {
        match run.phase.clone() {
            Phase::Tickets(after) => run.read_tickets(session.get().await?, after).await?,
            Phase::Stored(after) => run.compare(session.get().await?, &after).await?,
            Phase::Round => return self.begin_round(run, session.get().await?).await.map(Some),
            Phase::Changes(round) => run.read_changes(session.get().await?, round).await?,
            Phase::Idle(round) => run.read_idle(session.get().await?, round).await?,
            Phase::Writes(round) => return run.write_next(session, round).await,
        }
        Ok(Some(Step::More))
    }

    async fn begin_round(&self, run: &mut SumRun, connection: &mut PgConnection) -> Result<Step, StoreError> {
        // The time is read first: all changes before it have smaller numbers.
        let until = within_timeout(clock(&mut *connection)).await?;
        let Some(to) = within_timeout(self.history.settled_number(connection)).await? else {
            return Ok(Step::Done);
        };
        run.phase = Phase::Changes(SumRound { to, until, idle_pages: 0 });
        Ok(Step::More)
    }
}

impl SumRun {
    fn is_first_read(&self) -> bool {
        matches!(self.phase, Phase::Tickets(_) | Phase::Stored(_))
    }

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
            None => Phase::Round,
        };
        for (user, sum) in page {
            let _ = match self.tickets.sum(&user) == Some(sum) {
                true => self.changed.remove(&user),
                false => self.changed.insert(user),
            };
        }
        Ok(())
    }

    /// Applies a page of the changes of a round.
    async fn read_changes(&mut self, connection: &mut PgConnection, round: SumRound) -> Result<(), StoreError> {
        let lines = within_timeout(user_sum::changes(connection, self.read, round.to, LINES)).await?;
        let last = lines.last().filter(|_| is_full(lines.len(), LINES)).map(|(number, _)| *number);
        for (_, change) in lines {
            self.changed.insert(change.user.clone());
            self.tickets.apply(change);
        }
        self.read = last.unwrap_or(round.to);
        if last.is_none() {
            self.phase = Phase::Idle(round);
        }
        Ok(())
    }

    /// Applies a page of the tickets with idle engines. The next page, or the next round, continues after the page.
    async fn read_idle(&mut self, connection: &mut PgConnection, round: SumRound) -> Result<(), StoreError> {
        let page = within_timeout(user_sum::idle(connection, self.idle_after, IDLE)).await?;
        let last = page.last().copied().filter(|_| is_full(page.len(), IDLE));
        self.changed.extend(self.tickets.set_idle(self.idle_after, last, &page));
        self.idle_after = last.unwrap_or_default();
        let idle_pages = round.idle_pages + 1;
        self.phase = match last {
            Some(_) if idle_pages < IDLE_PAGES => Phase::Idle(SumRound { idle_pages, ..round }),
            _ => Phase::Writes(round),
        };
        Ok(())
    }

    /// Writes the sums of some changed users. Returns `None` if the run has ended.
    async fn write_next(&mut self, session: &mut Session, round: SumRound) -> Result<Option<Step>, StoreError> {
        let sums: Vec<_> =
            self.changed.iter().take(WRITTEN).map(|user| (user.clone(), self.tickets.sum(user))).collect();
        let is_last = sums.len() == self.changed.len();
        let to = if is_last { round.to } else { self.written };
        let complete = is_last.then(|| CompleteSums { until: round.until, idle: self.tickets.idle() });
        let progress = SumProgress { writer: self.writer, from: self.written, to, complete };
        let transaction = within_timeout(session.begin()).await?;
        if !within_timeout(user_sum::advance(&mut *transaction, &progress)).await? {
            return Ok(None);
        }
        within_timeout(user_sum::write(&mut *transaction, &sums)).await?;
        within_timeout(session.commit()).await?;
        self.written = to;
        for (user, _) in &sums {
            self.changed.remove(user);
        }
        if is_last {
            self.phase = Phase::Round;
        }
        Ok(Some(if is_last { Step::Done } else { Step::More }))
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
        // No sums are written before the end of the first read, which therefore takes half of a connection's time.
        let pause_times = if run.is_first_read() { 1 } else { PAUSE_TIMES };
        let step = self.advance(&mut run, session).await;
        self.metrics.user_sums.step.observe(begun.elapsed().as_secs_f64());
        self.metrics.user_sums.tickets.set(i64::try_from(run.tickets.len()).unwrap_or(i64::MAX));
        // A failed step is repeated: its changes are applied again.
        if !matches!(step, Ok(None)) {
            self.run = Some(run);
        }
        let step = step?.unwrap_or(Step::More);
        if step == Step::More {
            session.give_back().await;
            tokio::time::sleep(begun.elapsed() * pause_times).await;
        }
        Ok(step)
    }
}
