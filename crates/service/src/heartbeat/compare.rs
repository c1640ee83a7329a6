//! Comparison of reported tickets with the live tickets of an EM: many EMs at a time, a page of tickets each.
//!
//! A used ticket that is missing from several consecutive reports is lost; a reported ticket that does not live on the EM is
//! unknown.
//!
//! Never: ends a ticket; it only returns the lost ones.
//! Caller: `heartbeat`, which spawns [`run`].

use std::collections::HashMap;

use sqlx::PgConnection;
use tokio::sync::mpsc;
use uuid::Uuid;

use crate::error::Error;
use rm_model::{
    em::EmInstance,
    operation::{ReleaseTicket, ended_at},
    report::{EmReport, LiveTicket, UnknownTicket, reconcile},
    ticket::EndedTicket,
};
use rm_store::{
    StoreError, action_record, em_report,
    session::{Session, within_timeout},
    user_resource,
};
use rm_telemetry::cause;

use super::{ReportMismatch, ReportResult, idle};

/// Maximum number of reports that are compared at once.
const BATCH_MAX: usize = 64;

/// Maximum number of tickets that one statement reads, of all EMs together.
const PAGE: usize = 16_384;

/// Maximum number of unknown tickets in a reply; later replies contain the others.
const UNKNOWN_MAX: usize = 1000;

/// Maximum number of tickets that one report makes lost: as many as the timeout allows. The next report continues.
const LOST_MAX: usize = 16_384;

/// Report in comparison.
struct Comparison {
    differing: ReportMismatch,
    /// Id of the last ticket of the EM that was read.
    cursor: Uuid,
    /// Number of reported tickets compared so far.
    compared: usize,
    is_done: bool,
    /// Whether a ticket is missing, or was missing until this report.
    any_missed: bool,
    unknown: Vec<Uuid>,
    lost: Vec<Uuid>,
}

/// Compares reports until all senders are dropped.
pub(super) async fn run(mut inbox: mpsc::Receiver<ReportMismatch>, mut session: Session, lost_after: i16) {
    let mut arrived = Vec::with_capacity(BATCH_MAX);
    while inbox.recv_many(&mut arrived, BATCH_MAX).await > 0 {
        let mut parts: Vec<Vec<Comparison>> = vec![arrived.drain(..).map(Comparison::new).collect()];
        while let Some(mut part) = parts.pop() {
            part.retain(|comparison| comparison.differing.pending.is_wanted());
            if part.is_empty() {
                continue;
            }
            let reused = session.is_open();
            match compare(&mut session, &mut part, lost_after).await {
                Ok(found) => {
                    let idle = part.iter().filter(|comparison| comparison.differing.is_idle_new);
                    let idle: Vec<_> = idle.map(|comparison| &comparison.differing.pending).collect();
                    idle::write(&mut session, &idle).await;
                    let answered = part.into_iter().zip(found);
                    answered.for_each(|(comparison, found)| comparison.differing.pending.answer(Ok(found)));
                }
                Err(error) => {
                    session.reset();
                    parts.extend(after_error(part, error, reused));
                }
            }
        }
    }
}

/// Decides the retry after a database error. Returns the parts to try again; all others get `error`.
fn after_error(part: Vec<Comparison>, error: StoreError, reused: bool) -> Vec<Vec<Comparison>> {
    let is_unavailable = error.is_unavailable();
    if is_unavailable && !reused || error.is_lock_timeout() || !is_unavailable && part.len() == 1 {
        let error = Error::from(error);
        // Defects are logged where the call is answered.
        if !error.is_defect() {
            let (error, reports) = (cause(&error), part.len());
            tracing::error!(error, reports, "reports could not be compared");
        }
        part.into_iter().for_each(|comparison| comparison.differing.pending.answer(Err(error.clone())));
        return vec![];
    }
    let mut part: Vec<Comparison> = part.into_iter().map(Comparison::again).collect();
    if is_unavailable {
        // A connection that broke while idle costs one new connection.
        return vec![part];
    }
    // One report must not fail the others; halving identifies it.
    tracing::warn!(error = cause(&error), reports = part.len(), "reports failed; retrying in halves");
    let rest = part.split_off(part.len() / 2);
    vec![rest, part]
}

impl Comparison {
    fn new(differing: ReportMismatch) -> Self {
        let (unknown, lost) = (Vec::new(), Vec::new());
        let is_done = !differing.are_tickets_new;
        Self { differing, cursor: Uuid::nil(), compared: 0, is_done, any_missed: false, unknown, lost }
    }

    /// Restarts the comparison. A missing ticket is counted once, even if the count was written before the error.
    fn again(self) -> Self {
        let written = self.any_missed;
        let previous = self.differing.previous.filter(|_| !written);
        Self::new(ReportMismatch { previous, any_missed: self.differing.any_missed || written, ..self.differing })
    }

    fn report(&self) -> &EmReport {
        &self.differing.pending.report
    }

    /// Compares the next tickets of the EM, which are fewer than `limit` on the last page. Returns the tickets whose number of
    /// missed reports changes, with the new number.
    fn page(&mut self, living: &[LiveTicket], limit: usize, lost_after: i16) -> Vec<(Uuid, i16)> {
        let rest = &self.differing.pending.report.tickets[self.compared..];
        let upto = match living.last().filter(|_| living.len() >= limit) {
            Some(last) => {
                self.cursor = last.id;
                rest.partition_point(|id| *id <= last.id)
            }
            None => {
                self.is_done = true;
                rest.len()
            }
        };
        let found = reconcile(&rest[..upto], living, self.differing.previous, lost_after);
        self.compared += upto;
        extend(&mut self.unknown, found.unknown, UNKNOWN_MAX);
        extend(&mut self.lost, found.lost, LOST_MAX);
        let is_missing = |ticket: &LiveTicket| ticket.missed_reports > 0;
        self.any_missed |= !found.missed.is_empty() || living.iter().any(is_missing);
        found.missed
    }
}

/// Appends `ids` up to a total of `most`.
fn extend(all: &mut Vec<Uuid>, ids: Vec<Uuid>, most: usize) {
    let room = most.saturating_sub(all.len());
    all.extend(ids.into_iter().take(room));
}

/// Compares reports and returns the consequences of each.
async fn compare(
    session: &mut Session,
    part: &mut [Comparison],
    lost_after: i16,
) -> Result<Vec<ReportResult>, StoreError> {
    let connection = within_timeout(session.get()).await?;
    loop {
        let mut open: Vec<&mut Comparison> = part.iter_mut().filter(|comparison| !comparison.is_done).collect();
        if open.is_empty() {
            break;
        }
        let limit = (PAGE / open.len()).max(1);
        let ems: Vec<_> = open.iter().map(|comparison| (&comparison.report().em, comparison.cursor)).collect();
        let most = i64::try_from(limit).unwrap_or(i64::MAX);
        let living = within_timeout(user_resource::living(&mut *connection, &ems, most)).await?;
        for (comparison, living) in open.iter_mut().zip(living) {
            let missed = comparison.page(&living, limit, lost_after);
            if !missed.is_empty() {
                within_timeout(user_resource::update_missed(&mut *connection, comparison.report(), &missed)).await?;
            }
        }
    }
    let reset = part.iter().filter(|comparison| comparison.differing.any_missed && !comparison.any_missed);
    let reset: Vec<&EmReport> = reset.map(Comparison::report).collect();
    if !reset.is_empty() {
        within_timeout(em_report::none_missed(&mut *connection, &reset)).await?;
    }
    let ended = ended(&mut *connection, part).await?;
    let mut found = Vec::with_capacity(part.len());
    for comparison in part {
        let em = &comparison.report().em;
        let unknown = comparison.unknown.iter().map(|id| UnknownTicket { id: *id, reason: reason(&ended, id, em) });
        let lost = lost(&mut *connection, comparison).await?;
        found.push(ReportResult { unknown: unknown.collect(), lost });
    }
    Ok(found)
}

/// Reads the ended tickets among the unknown ones, on any EM.
async fn ended(connection: &mut PgConnection, part: &[Comparison]) -> Result<HashMap<Uuid, EndedTicket>, StoreError> {
    let unknown: Vec<Uuid> = part.iter().flat_map(|comparison| &comparison.unknown).copied().collect();
    let mut ended = HashMap::new();
    for ids in unknown.chunks(UNKNOWN_MAX) {
        ended.extend(within_timeout(action_record::read(&mut *connection, ids)).await?);
    }
    Ok(ended)
}

/// Returns the reason for an unknown ticket. A ticket of another EM gets the reason of a ticket that never existed.
fn reason(ended: &HashMap<Uuid, EndedTicket>, id: &Uuid, em: &EmInstance) -> String {
    match ended.get(id).filter(|ended| ended.em == *em) {
        Some(ended) => ended_at(ended),
        None => "is not a ticket of this EM, or its end is no longer in the history".to_owned(),
    }
}

/// Returns the tickets that the report makes lost, with their users.
async fn lost(connection: &mut PgConnection, comparison: &Comparison) -> Result<Vec<ReleaseTicket>, StoreError> {
    if comparison.lost.is_empty() {
        return Ok(vec![]);
    }
    let users = within_timeout(user_resource::users(connection, &comparison.lost)).await?;
    let em = &comparison.report().em;
    Ok(users.into_iter().map(|(ticket_id, user)| ReleaseTicket { ticket_id, user, em: em.clone() }).collect())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use time::OffsetDateTime;
    use tokio::{
        sync::{Semaphore, oneshot},
        time::{Duration, Instant},
    };

    use super::*;
    use crate::heartbeat::QueuedReport;
    use rm_model::{em::EmInstance, report::Health, ticket_digest::TicketDigest};

    fn ids(numbers: &[u128]) -> Vec<Uuid> {
        numbers.iter().map(|number| Uuid::from_u128(*number)).collect()
    }

    fn comparison(reported: &[u128], any_missed: bool) -> Comparison {
        let em = EmInstance::parse("em", "ecm", "host1").unwrap();
        let (epoch, sequence, health, load) = (1, 2, Health::Healthy, None);
        let report =
            EmReport { em, epoch, sequence, health, load, tickets: ids(reported), observed: None, idle: vec![] };
        let (tickets, idle) = (TicketDigest::of(&report.tickets), TicketDigest::default());
        let _room = Arc::new(Semaphore::new(0)).try_acquire_many_owned(0).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let (reply, is_contended) = (oneshot::channel().0, Default::default());
        let pending = QueuedReport { report, tickets, idle, deadline, reply, is_contended, _room };
        let previous = OffsetDateTime::from_unix_timestamp(100).ok();
        Comparison::new(ReportMismatch { pending, previous, any_missed, are_tickets_new: true, is_idle_new: false })
    }

    fn living(tickets: &[(u128, i16)]) -> Vec<LiveTicket> {
        let used_time = Some(OffsetDateTime::UNIX_EPOCH);
        let live = |(id, missed_reports): &(u128, i16)| (Uuid::from_u128(*id), *missed_reports);
        tickets.iter().map(live).map(|(id, missed_reports)| LiveTicket { id, used_time, missed_reports }).collect()
    }

    #[test]
    fn report_comparison_by_pages_equals_single_page() {
        let tickets = [(2, 0), (4, 1), (6, 2), (8, 0), (10, 0)];
        let reported = [1, 2, 3, 4, 7, 8, 9, 11, 12];
        let (missed, lost) = (vec![(4, 0), (6, 3), (10, 1)], ids(&[6]));
        for limit in 1..=6 {
            let (mut comparison, mut found) = (comparison(&reported, true), vec![]);
            for page in tickets.chunks(limit).chain([&[][..]]) {
                if !comparison.is_done {
                    found.extend(comparison.page(&living(page), limit, 3));
                }
            }
            assert!(comparison.is_done && comparison.any_missed);
            assert_eq!(found.iter().map(|(id, missed)| (id.as_u128(), *missed)).collect::<Vec<_>>(), missed, "{limit}");
            assert_eq!((comparison.unknown, comparison.lost), (ids(&[1, 3, 7, 9, 11, 12]), lost.clone()), "{limit}");
        }
    }

    #[test]
    fn report_comparison_after_failure_counts_once() {
        let mut before = comparison(&[], false);
        assert!(before.page(&living(&[]), 1, 3).is_empty());
        let mut again = before.again();
        assert_eq!(again.page(&living(&[(1, 0)]), 9, 3), [(Uuid::from_u128(1), 1)], "nothing was counted");
        let mut again = again.again();
        assert!(again.page(&living(&[(1, 1), (2, 0)]), 9, 3).is_empty());
        assert!(again.any_missed && again.differing.any_missed);
    }

    #[test]
    fn report_without_missing_tickets_resets_counts() {
        let any_missed = |tickets: &[(u128, i16)]| {
            let mut comparison = comparison(&[1, 2], true);
            comparison.page(&living(tickets), 9, 3);
            comparison.any_missed
        };
        assert!(!any_missed(&[(1, 0), (2, 0)]));
        assert!(any_missed(&[(1, 0), (2, 1)]), "it returned just now");
        assert!(any_missed(&[(1, 0), (3, 0)]), "it is missing");
    }
}
