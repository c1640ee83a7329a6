//! Idle engines of the reports: writes since when the engine of a ticket runs no task.
//!
//! Only changes are written: an EM whose idle engines are those of its previous report costs nothing. What a failure or a locked
//! row leaves out, the next report writes.
//! Never: fails a report; the times are not part of a decision about tickets.
//! Caller: `compare`.

use rm_model::report::EmReport;
use rm_store::{
    StoreError, em_report,
    session::{Session, within_timeout},
    user_resource::{self, IdleChange},
};
use rm_telemetry::cause;
use uuid::Uuid;

use super::QueuedReport;

/// Maximum number of tickets that one statement writes: their rows are locked until it ends.
const WRITTEN_MAX: usize = 4096;

/// Maximum number of tickets in the reports that are compared at once, unless it is one report.
const COMPARED_MAX: usize = 16_384;

/// Writes the idle engines of reports. Logs errors.
pub(super) async fn write(session: &mut Session, reports: &[&QueuedReport]) {
    let mut rest = reports;
    while !rest.is_empty() {
        let (now, later) = rest.split_at(fitting(rest));
        rest = later;
        if let Err(error) = write_part(session, now).await {
            session.reset_after(&error);
            tracing::warn!(error = cause(&error), reports = reports.len(), "cannot write the idle engines of reports");
            return;
        }
    }
}

/// Returns the number of reports that are compared at once.
fn fitting(reports: &[&QueuedReport]) -> usize {
    let mut tickets = 0;
    let fits = |report: &&&QueuedReport| {
        tickets += report.report.tickets.len();
        tickets <= COMPARED_MAX
    };
    reports.iter().take_while(fits).count().max(1)
}

async fn write_part(session: &mut Session, reports: &[&QueuedReport]) -> Result<(), StoreError> {
    let connection = within_timeout(session.get()).await?;
    let stated: Vec<&EmReport> = reports.iter().map(|pending| &pending.report).collect();
    let stored = within_timeout(user_resource::idle_on(&mut *connection, &stated)).await?;
    let changes: Vec<IdleChange> = stated
        .iter()
        .zip(&stored)
        .enumerate()
        .flat_map(|(number, (report, stored))| changed(number, report, stored))
        .collect();
    let mut missing = vec![false; reports.len()];
    for part in changes.chunks(WRITTEN_MAX) {
        let written = within_timeout(user_resource::update_idle(&mut *connection, &stated, part)).await?;
        for change in part.iter().filter(|change| !written.contains(&change.ticket_id)) {
            missing[change.report] = true;
        }
    }
    let done = reports.iter().zip(missing).filter(|(_, is_missing)| !is_missing);
    let done: Vec<_> = done.map(|(pending, _)| (&pending.report, pending.idle)).collect();
    within_timeout(em_report::record_idle(connection, &done)).await
}

/// Returns the tickets whose engines are idle in one of the report with this number and `stored` only. Both are sorted.
fn changed(number: usize, report: &EmReport, stored: &[Uuid]) -> Vec<IdleChange> {
    let begun = report.idle.iter().filter(|id| stored.binary_search(id).is_err()).map(|id| (*id, true));
    let ended = stored.iter().filter(|id| report.idle.binary_search(id).is_err()).map(|id| (*id, false));
    begun.chain(ended).map(|(ticket_id, begins)| IdleChange { report: number, ticket_id, begins }).collect()
}
