//! Observations of engines in reports: stores the observed use per EM.
//!
//! If an EM reports the same tickets and types as before, no ticket is read. Otherwise each observation is checked against its
//! ticket.
//!
//! Never: stores an observation that contradicts its ticket.
//! Caller: `upsert`.

use std::collections::HashMap;

use sqlx::PgConnection;
use uuid::Uuid;

use crate::error::Error;
use rm_model::{
    em::EmInstance,
    name::FieldError,
    observation::{Observations, observed_of},
    report::EmReport,
};
use rm_store::{
    StoreError, em_observed,
    session::{Session, within_timeout},
    user_resource,
};
use rm_telemetry::cause;

/// Maximum number of tickets that one statement reads, of all EMs together.
const PAGE: usize = 16_384;

type ReportObservations<'a> = (&'a EmReport, &'a Observations);

/// Stores the observations of `reports`, at most one report per EM. Returns the error of each EM whose observations were not
/// stored.
///
/// Observations of tickets that do not live on the EM are stored but never returned.
pub(super) async fn upsert(session: &mut Session, reports: &[&EmReport]) -> HashMap<EmInstance, Error> {
    let told = reports.iter().filter_map(|report| Some((*report, report.observed.as_ref()?)));
    let (mut parts, mut failed) = (vec![Vec::from_iter(told)], HashMap::new());
    while let Some(mut part) = parts.pop() {
        if part.is_empty() {
            continue;
        }
        match upsert_part(session, &part).await {
            Ok(wrong) => failed.extend(wrong.into_iter().map(|(em, error)| (em, error.into()))),
            Err(error) => {
                session.reset_after(&error);
                let is_of_one = !error.is_unavailable() && !error.is_lock_timeout();
                if is_of_one && part.len() > 1 {
                    // One report must not fail the others; halving identifies it.
                    let rest = part.split_off(part.len() / 2);
                    parts.extend([rest, part]);
                    continue;
                }
                let error = Error::from(error);
                // Defects are logged where the call is answered.
                if !error.is_defect() {
                    let (error, reports) = (cause(&error), part.len());
                    tracing::error!(error, reports, "the observed use of reports could not be stored");
                }
                failed.extend(part.iter().map(|(report, _)| (report.em.clone(), error.clone())));
            }
        }
    }
    failed
}

async fn upsert_part(
    session: &mut Session,
    told: &[ReportObservations<'_>],
) -> Result<HashMap<EmInstance, FieldError>, StoreError> {
    let connection = within_timeout(session.get()).await?;
    let renewed = within_timeout(em_observed::renew(&mut *connection, told)).await?;
    let mut new = told.to_vec();
    new.retain(|(report, _)| !renewed.contains(&report.em));
    if new.is_empty() {
        return Ok(HashMap::new());
    }
    let wrong = check(&mut *connection, &new).await?;
    new.retain(|(report, _)| !wrong.contains_key(&report.em));
    within_timeout(em_observed::put(connection, &new)).await?;
    Ok(wrong)
}

/// Returns the first invalid observation of each report. Reads a bounded number of tickets at a time.
async fn check(
    connection: &mut PgConnection,
    told: &[ReportObservations<'_>],
) -> Result<HashMap<EmInstance, FieldError>, StoreError> {
    let mut rest = told.iter().flat_map(|(report, observed)| {
        let of_report = observed.iter().enumerate();
        of_report.map(move |(number, (ticket_id, said))| (&report.em, number, ticket_id, said))
    });
    let mut wrong = HashMap::new();
    loop {
        let page: Vec<_> = rest.by_ref().take(PAGE).collect();
        if page.is_empty() {
            return Ok(wrong);
        }
        let ids: Vec<Uuid> = page.iter().map(|(_, _, ticket_id, _)| *ticket_id).collect();
        let tickets = within_timeout(user_resource::read(&mut *connection, &ids)).await?;
        for (em, number, ticket_id, said) in page {
            let ticket = tickets.get(&ticket_id).filter(|ticket| ticket.em == *em);
            if let Some(Err(error)) = ticket.map(|ticket| observed_of(ticket, &said)) {
                wrong.entry(em.clone()).or_insert_with(|| {
                    let problem = format!("does not match the type of the ticket: {error}");
                    FieldError::new(format!("observed[{number}].resource"), problem)
                });
            }
        }
    }
}
