//! Keeps what reports tell of the engines of their tickets. As long as an EM tells of the same tickets in the same types, none is read
//! for it.

use std::collections::HashMap;

use sqlx::PgConnection;
use uuid::Uuid;

use crate::{
    domain::{
        em::EmInstance,
        name::FieldError,
        observation::{Observations, observed_of},
        report::Report,
        ticket::Ticket,
    },
    store::{
        StoreError, em_observed,
        session::{Session, answered},
        user_resource,
    },
};

/// How many tickets one statement reads, of all EMs together.
const PAGE: usize = 16_384;

/// Keeps what `reports` tell, of which there is at most one of each EM. What is wrong with those that are not kept. Tickets that do not
/// live on the EM are none of its business, and none of anybody else's: what is told of them is never shown.
pub(super) async fn keep(
    session: &mut Session,
    reports: &[&Report],
) -> Result<HashMap<EmInstance, FieldError>, StoreError> {
    let told: Vec<(&Report, &Observations)> =
        reports.iter().filter_map(|report| Some((*report, report.observed.as_ref()?))).collect();
    if told.is_empty() {
        return Ok(HashMap::new());
    }
    let connection = answered(session.get()).await?;
    let renewed = answered(em_observed::renew(&mut *connection, &told)).await?;
    let mut new = told;
    new.retain(|(report, _)| !renewed.contains(&report.em));
    if new.is_empty() {
        return Ok(HashMap::new());
    }
    let tickets = read(&mut *connection, &new).await?;
    let mut wrong = HashMap::new();
    for (report, observed) in &new {
        if let Err(error) = check(&report.em, observed, &tickets) {
            wrong.insert(report.em.clone(), error);
        }
    }
    new.retain(|(report, _)| !wrong.contains_key(&report.em));
    answered(em_observed::put(connection, &new)).await?;
    Ok(wrong)
}

async fn read(
    connection: &mut PgConnection,
    told: &[(&Report, &Observations)],
) -> Result<HashMap<Uuid, Ticket>, StoreError> {
    let ids: Vec<Uuid> = told.iter().flat_map(|(_, observed)| observed.iter()).map(|(id, _)| id).collect();
    let mut tickets = HashMap::new();
    for page in ids.chunks(PAGE) {
        tickets.extend(answered(user_resource::read(&mut *connection, page)).await?);
    }
    Ok(tickets)
}

fn check(em: &EmInstance, observed: &Observations, tickets: &HashMap<Uuid, Ticket>) -> Result<(), FieldError> {
    for (number, (ticket_id, said)) in observed.iter().enumerate() {
        if let Some(ticket) = tickets.get(&ticket_id).filter(|ticket| ticket.em == *em) {
            observed_of(ticket, &said).map_err(|error| {
                FieldError::new(format!("observed[{number}].resource"), format!("is no use of the ticket's: {error}"))
            })?;
        }
    }
    Ok(())
}
