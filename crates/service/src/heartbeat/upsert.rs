//! Storage of reports: all queued reports in one statement, at most one per EM.
//!
//! A report whose row another transaction locks is deferred up to `HELD_TIMEOUT`. Reports of one EM are stored in order of
//! arrival.
//!
//! Never: waits for a row lock; replies before the observations are stored.
//! Caller: `heartbeat`, which spawns [`run`].

use std::{collections::HashSet, sync::atomic::Ordering};

use time::OffsetDateTime;
use tokio::{
    sync::mpsc,
    time::{Duration, Instant},
};

use crate::{admission::StateCache, error::Error};
use rm_model::{
    em::EmInstance,
    name::FieldError,
    operation::Rejection,
    report::{EmCondition, EmReport, ReportNumber, ReportOrder},
    ticket_digest::TicketDigest,
    wait_queue::{FreedKeys, MUCH, WaitKey},
};
use rm_store::{
    StoreError,
    em_report::{self, ReportArrival},
    session::{Session, within_timeout},
    waiting::{self, FreedNotification},
};
use rm_telemetry::cause;

use super::{QueuedReport, ReportMismatch, ReportResult, observations};

/// Maximum number of reports per statement, besides deferred ones.
const BATCH_MAX: usize = 256;

/// Maximum number of deferred reports: those behind another report of their EM, or with a locked row.
const CARRIED_MAX: usize = 256;

/// Maximum time for which a report's row may be locked. Transactions of a healthy service end sooner.
const HELD_TIMEOUT: Duration = Duration::from_secs(1);

/// Minimum interval between statements unless the last one was full. Reports are not urgent, so those that arrive meanwhile
/// share the next statement. A single report after a pause is stored immediately.
const INTERVAL: Duration = Duration::from_millis(50);

/// Report, and the time since which its row is locked by another transaction.
struct BlockedReport {
    pending: QueuedReport,
    held_since: Option<Instant>,
}

/// Stores reports until all senders are dropped. Reports with different tickets go to `differing`.
pub(super) async fn run(
    mut inbox: mpsc::Receiver<QueuedReport>,
    differing: mpsc::Sender<ReportMismatch>,
    session: Session,
    seen: StateCache,
    silent_after: Duration,
) {
    let mut keeper = ReportWriter { session, differing, seen, silent_after };
    let mut arrived = Vec::with_capacity(BATCH_MAX);
    let mut waiting: Vec<BlockedReport> = Vec::new();
    let mut not_before = Instant::now();
    loop {
        tokio::time::sleep_until(not_before).await;
        // Deferred reports do not wait for new ones.
        let longest = if waiting.is_empty() { Duration::MAX } else { Duration::ZERO };
        let received = tokio::time::timeout(longest, inbox.recv_many(&mut arrived, BATCH_MAX)).await;
        if received == Ok(0) {
            return;
        }
        not_before = Instant::now() + if arrived.len() < BATCH_MAX { INTERVAL } else { Duration::ZERO };
        waiting.extend(arrived.drain(..).map(|pending| BlockedReport { pending, held_since: None }));
        let (batch, mut later) = first_of_each(std::mem::take(&mut waiting));
        // Blocked reports come before later ones of their EM.
        waiting = keeper.upsert(batch).await;
        waiting.append(&mut later);
        for turned_away in waiting.drain(CARRIED_MAX.min(waiting.len())..) {
            turned_away.pending.answer(Err(Error::Overloaded));
        }
    }
}

/// Splits off the first report of each EM, in the order of their row locks. All others follow in order of arrival.
fn first_of_each(waiting: Vec<BlockedReport>) -> (Vec<BlockedReport>, Vec<BlockedReport>) {
    let wanted = waiting.into_iter().filter(|waiting| waiting.pending.is_wanted());
    let (mut batch, mut later): (Vec<BlockedReport>, Vec<BlockedReport>) = (wanted.collect(), Vec::new());
    // A stable sort keeps the order of arrival per EM.
    batch.sort_by(|a, b| a.pending.report.em.cmp(&b.pending.report.em));
    let mut firsts: Vec<BlockedReport> = Vec::with_capacity(batch.len());
    for next in batch {
        match firsts.last() {
            Some(last) if last.pending.report.em == next.pending.report.em => later.push(next),
            _ => firsts.push(next),
        }
    }
    (firsts, later)
}

struct ReportWriter {
    session: Session,
    differing: mpsc::Sender<ReportMismatch>,
    /// Placement's cache.
    seen: StateCache,
    silent_after: Duration,
}

impl ReportWriter {
    /// Stores reports, one per EM, and replies to those that are complete or refused. Returns the reports with a locked row.
    async fn upsert(&mut self, batch: Vec<BlockedReport>) -> Vec<BlockedReport> {
        let (mut parts, mut held) = (vec![batch], Vec::new());
        while let Some(part) = parts.pop() {
            if part.is_empty() {
                continue;
            }
            let reused = self.session.is_open();
            let reports: Vec<&EmReport> = part.iter().map(|waiting| &waiting.pending.report).collect();
            match upsert(&mut self.session, &reports, self.silent_after).await {
                Ok(met) => {
                    let opened = opened(&reports, &met);
                    let mut failed = observations::upsert(&mut self.session, &acceptable(&reports, &met)).await;
                    for (waiting, met) in part.into_iter().zip(met) {
                        let not_observed = failed.remove(&waiting.pending.report.em);
                        held.extend(self.respond(waiting, met, not_observed));
                    }
                    self.notify(opened).await;
                }
                Err(error) if error.is_lock_timeout() => {
                    // Another transaction locks the whole table.
                    let tried = part.into_iter().filter_map(|waiting| defer(waiting.pending, waiting.held_since));
                    held.extend(tried);
                }
                Err(error) => {
                    self.session.reset_after(&error);
                    parts.extend(after_error(part, error, reused));
                }
            }
        }
        held
    }

    /// Notifies the requests that wait for EMs to be healthy. A lost notification costs a poll.
    async fn notify(&mut self, opened: FreedKeys) {
        if opened.is_empty() {
            return;
        }
        let opened: Vec<_> = FreedNotification::at(&opened).into_iter().map(FreedNotification::of_conditions).collect();
        let notified = async { waiting::notify(self.session.get().await?, &opened).await };
        if let Err(error) = within_timeout(notified).await {
            self.session.reset_after(&error);
            tracing::warn!(error = cause(&error), "cannot wake the requests that wait for an EM to be healthy");
        }
    }

    /// Replies to a report by its verdict, or with the error of its observations. Returns the report if its row is locked.
    fn respond(
        &self,
        waiting: BlockedReport,
        met: Option<ReportArrival>,
        not_observed: Option<Error>,
    ) -> Option<BlockedReport> {
        let BlockedReport { pending, held_since } = waiting;
        if met.is_some_and(|met| met.kept) {
            // The cache is updated before the reply, so that a caller can rely on it.
            self.seen.report(&pending.report);
        }
        if let Some(error) = not_observed {
            pending.answer(Err(error));
            return None;
        }
        match ReportVerdict::of(&pending.report, (pending.tickets, pending.idle), met) {
            Ok(ReportVerdict::Complete) => pending.answer(Ok(ReportResult::default())),
            Ok(ReportVerdict::Differs { previous, any_missed, are_tickets_new, is_idle_new }) => {
                let differing = ReportMismatch { pending, previous, any_missed, are_tickets_new, is_idle_new };
                let sent = self.differing.try_send(differing);
                if let Err(mpsc::error::TrySendError::Full(differing)) = sent {
                    // The report is stored; its repetition will be compared.
                    differing.pending.answer(Err(Error::Overloaded));
                }
            }
            Ok(ReportVerdict::Held) => return defer(pending, held_since),
            Err(error) => pending.answer(Err(error)),
        }
        None
    }
}

/// Defers a report that is blocked since `since`, or fails it after [`HELD_TIMEOUT`].
fn defer(pending: QueuedReport, since: Option<Instant>) -> Option<BlockedReport> {
    let since = since.unwrap_or_else(Instant::now);
    pending.is_contended.store(true, Ordering::Relaxed);
    if since.elapsed() < HELD_TIMEOUT {
        return Some(BlockedReport { pending, held_since: Some(since) });
    }
    pending.answer(Err(Error::LockTimeout));
    None
}

/// Decides the retry after a database error. Returns the parts to try again; all others get `error`.
fn after_error(mut part: Vec<BlockedReport>, error: StoreError, reused: bool) -> Vec<Vec<BlockedReport>> {
    if reused && error.is_unavailable() {
        // A connection that broke while idle costs one new connection.
        return vec![part];
    }
    if !error.is_unavailable() && part.len() > 1 {
        // One report must not fail the others; halving identifies it.
        tracing::warn!(error = cause(&error), reports = part.len(), "reports failed; retrying in halves");
        let rest = part.split_off(part.len() / 2);
        return vec![rest, part];
    }
    let error = Error::from(error);
    // Defects are logged where the call is answered.
    if !error.is_defect() {
        tracing::error!(error = cause(&error), reports = part.len(), "reports failed");
    }
    part.into_iter().for_each(|waiting| waiting.pending.answer(Err(error.clone())));
    vec![]
}

/// Returns the reports that are the latest of their EMs: stored now, or repetitions of the stored one.
fn acceptable<'a>(reports: &[&'a EmReport], met: &[Option<ReportArrival>]) -> Vec<&'a EmReport> {
    let is_last = |report: &EmReport, met: &ReportArrival| {
        let last = met.last.map(|(last, _)| last);
        met.kept || ReportOrder::of(ReportNumber::of(report), met.registered, last) == ReportOrder::Repeat
    };
    let taken = reports.iter().zip(met).filter(|(report, met)| met.is_some_and(|met| is_last(report, &met)));
    taken.map(|(report, _)| *report).collect()
}

/// Returns the EMs that are available by reports that were stored now, and were not before.
fn opened(reports: &[&EmReport], met: &[Option<ReportArrival>]) -> FreedKeys {
    let mut opened = FreedKeys::default();
    for (report, met) in reports.iter().zip(met) {
        if met.is_some_and(|met| met.kept && met.was_unavailable) && EmCondition::reported(report).is_available {
            opened.add(WaitKey::Em(report.em.clone()), MUCH);
        }
    }
    opened
}

/// Stores reports. Returns the state that each one met; `None` if its EM is not registered.
async fn upsert(
    session: &mut Session,
    reports: &[&EmReport],
    silent_after: Duration,
) -> Result<Vec<Option<ReportArrival>>, StoreError> {
    let connection = within_timeout(session.get()).await?;
    let mut all = within_timeout(em_report::update(&mut *connection, reports, silent_after)).await?;
    let rest: Vec<&EmReport> =
        reports.iter().zip(&all).filter(|(_, met)| met.is_none()).map(|(report, _)| *report).collect();
    if rest.is_empty() {
        return Ok(all);
    }
    let first = within_timeout(em_report::insert(&mut *connection, &rest)).await?;
    let met = within_timeout(em_report::read_arrivals(&mut *connection, &rest)).await?;
    let mut met = rest.into_iter().zip(met).map(|(report, met)| met.map(|met| of_first(report, met, &first)));
    for slot in all.iter_mut().filter(|slot| slot.is_none()) {
        *slot = met.next().flatten();
    }
    Ok(all)
}

/// Corrects the state that an EM's first report met: the statement reads the row that it has inserted.
fn of_first(report: &EmReport, met: ReportArrival, first: &HashSet<EmInstance>) -> ReportArrival {
    match first.contains(&report.em) {
        true => ReportArrival { last: None, kept: true, ..met },
        false => met,
    }
}

/// Verdict on a report by the state that it met.
#[derive(Debug, PartialEq)]
enum ReportVerdict {
    /// The report contains exactly the used tickets of its EM, and those of idle engines; no comparison is needed.
    Complete,
    /// The tickets must be compared.
    Differs {
        /// Time of the previous report; `None` if no ticket can be missing in this one.
        previous: Option<OffsetDateTime>,
        /// Whether a ticket may have been missing in the previous report.
        any_missed: bool,
        /// Whether the tickets differ, or may have been missing.
        are_tickets_new: bool,
        /// Whether the tickets of idle engines differ.
        is_idle_new: bool,
    },
    /// Another transaction locks the row.
    Held,
}

impl ReportVerdict {
    fn of(
        report: &EmReport,
        (tickets, idle): (TicketDigest, TicketDigest),
        met: Option<ReportArrival>,
    ) -> Result<Self, Error> {
        let met = met.ok_or_else(|| Rejection::EmNotRegistered(report.em.clone()))?;
        let last = met.last.map(|(last, _)| last);
        let previous = match ReportOrder::of(ReportNumber::of(report), met.registered, last) {
            ReportOrder::New if met.kept => met.last.map(|(_, at)| at),
            ReportOrder::New => return Ok(Self::Held),
            ReportOrder::Repeat => None,
            ReportOrder::Stale => {
                let em = report.em.clone();
                return Err(Rejection::StaleReport { em, registered: met.registered, last }.into());
            }
            ReportOrder::FutureEpoch => {
                let problem =
                    format!("is higher than the epoch of the registration, {}; give that epoch", met.registered);
                return Err(FieldError::new("epoch", problem).into());
            }
        };
        let are_tickets_new = tickets != met.used_tickets || met.any_missed;
        let is_idle_new = idle != met.idle_tickets;
        Ok(match are_tickets_new || is_idle_new {
            false => Self::Complete,
            true => Self::Differs { previous, any_missed: met.any_missed, are_tickets_new, is_idle_new },
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::{Semaphore, oneshot};
    use uuid::Uuid;

    use super::*;
    use rm_model::report::Health;

    fn report(host: &str, epoch: i64, sequence: i64, tickets: &[u128]) -> EmReport {
        let em = EmInstance::parse("em", "ecm", host).unwrap();
        let tickets = tickets.iter().map(|id| Uuid::from_u128(*id)).collect();
        EmReport { em, epoch, sequence, health: Health::Healthy, load: None, tickets, observed: None, idle: vec![] }
    }

    fn met(last: Option<(i64, i64)>, kept: bool, used: &[u128], any_missed: bool) -> Option<ReportArrival> {
        let last = last.map(|(epoch, sequence)| (ReportNumber { epoch, sequence }, OffsetDateTime::UNIX_EPOCH));
        let used: Vec<Uuid> = used.iter().map(|id| Uuid::from_u128(*id)).collect();
        let (used_tickets, idle_tickets) = (TicketDigest::of(&used), TicketDigest::default());
        let was_unavailable = false;
        Some(ReportArrival { registered: 2, last, kept, used_tickets, any_missed, idle_tickets, was_unavailable })
    }

    fn verdict(report: &EmReport, met: Option<ReportArrival>) -> Result<ReportVerdict, Error> {
        ReportVerdict::of(report, (TicketDigest::of(&report.tickets), TicketDigest::of(&report.idle)), met)
    }

    #[test]
    fn report_equal_to_tickets_is_complete() {
        let report = report("a", 2, 5, &[1, 2]);
        let before = Some((2, 4));
        let previous = Some(OffsetDateTime::UNIX_EPOCH);
        let differs =
            |any_missed| ReportVerdict::Differs { previous, any_missed, are_tickets_new: true, is_idle_new: false };
        assert_eq!(verdict(&report, met(before, true, &[2, 1], false)).unwrap(), ReportVerdict::Complete);
        assert_eq!(verdict(&report, met(before, true, &[2, 1], true)).unwrap(), differs(true));
        for other in [&[1][..], &[1, 2, 4], &[1, 4]] {
            assert_eq!(verdict(&report, met(before, true, other, false)).unwrap(), differs(false), "{other:?}");
        }
    }

    #[test]
    fn report_repeated_or_first_counts_no_missing_ticket() {
        let report = report("a", 2, 5, &[1]);
        let nothing =
            ReportVerdict::Differs { previous: None, any_missed: true, are_tickets_new: true, is_idle_new: false };
        assert_eq!(verdict(&report, met(None, true, &[1], true)).unwrap(), nothing);
        assert_eq!(verdict(&report, met(Some((2, 5)), false, &[1], true)).unwrap(), nothing);
        assert_eq!(verdict(&report, met(Some((2, 5)), false, &[1], false)).unwrap(), ReportVerdict::Complete);
    }

    #[test]
    fn report_not_stored_is_queued_or_refused() {
        assert_eq!(
            verdict(&report("a", 2, 5, &[]), met(Some((2, 4)), false, &[], false)).unwrap(),
            ReportVerdict::Held
        );
        assert_eq!(verdict(&report("a", 2, 1, &[]), met(None, false, &[], false)).unwrap(), ReportVerdict::Held);
        for (epoch, sequence) in [(2, 3), (1, 9)] {
            let stale = verdict(&report("a", epoch, sequence, &[]), met(Some((2, 4)), false, &[], false));
            assert!(matches!(stale, Err(Error::Rejected(_))), "{stale:?}");
        }
        let unborn = verdict(&report("a", 3, 1, &[]), met(None, false, &[], false));
        assert!(matches!(unborn, Err(Error::InvalidField(_))), "{unborn:?}");
        assert!(matches!(verdict(&report("a", 2, 1, &[]), None), Err(Error::Rejected(_))));
    }

    #[test]
    fn reports_of_one_em_are_stored_in_order() {
        let room = Arc::new(Semaphore::new(1));
        let mut answers = Vec::new();
        let mut waiting = |host, sequence| {
            let (reply, answer) = oneshot::channel();
            answers.push(answer);
            let (report, deadline) = (report(host, 2, sequence, &[]), Instant::now() + Duration::from_secs(60));
            let _room = room.clone().try_acquire_many_owned(0).unwrap();
            let pending = QueuedReport {
                report,
                tickets: TicketDigest::default(),
                idle: TicketDigest::default(),
                deadline,
                reply,
                is_contended: Default::default(),
                _room,
            };
            BlockedReport { pending, held_since: None }
        };
        let arrived = vec![waiting("b", 1), waiting("a", 3), waiting("b", 2), waiting("a", 1), waiting("b", 3)];
        let told = |waiting: &[BlockedReport]| -> Vec<(String, i64)> {
            let told = |waiting: &BlockedReport| waiting.pending.report.clone();
            waiting.iter().map(told).map(|report| (report.em.instance.to_string(), report.sequence)).collect()
        };
        let (first, later) = first_of_each(arrived);
        assert_eq!(told(&first), [("a".to_owned(), 3), ("b".to_owned(), 1)]);
        let (first, later) = first_of_each(later);
        assert_eq!(told(&first), [("a".to_owned(), 1), ("b".to_owned(), 2)]);
        // The caller is gone.
        answers.clear();
        assert!(first_of_each(later).0.is_empty());
    }
}
