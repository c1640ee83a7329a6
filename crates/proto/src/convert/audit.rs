//! Audit and repair reports: converts them to messages and, for the RM client, back.
//!
//! A `read_…` function fails with a [`FieldError`] that names the field. Callers: `rm_edge::admin` and the
//! RM client.

use std::collections::BTreeMap;

use crate::v1 as proto;
use rm_model::{
    audit::{AuditReport, Difference, Differences, RepairReport},
    name::FieldError,
    resource::Dimension,
};

use super::answer;

fn difference(difference: &Difference) -> proto::Difference {
    let amounts =
        |amounts: &BTreeMap<Dimension, i64>| amounts.iter().map(|(key, amount)| (key.key(), *amount)).collect();
    proto::Difference {
        what: difference.what.clone(),
        counter: difference.counter.clone(),
        stored: amounts(&difference.stored),
        from_tickets: amounts(&difference.from_tickets),
        problem: difference.problem.clone(),
    }
}

fn count(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

fn messages(differences: &Differences) -> (Vec<proto::Difference>, i64) {
    (differences.first.iter().map(difference).collect(), count(differences.count))
}

/// Converts an audit report to a message.
pub fn report(report: &AuditReport) -> proto::AuditResponse {
    let (differences, difference_count) = messages(&report.differences);
    proto::AuditResponse {
        snapshot_time: Some(answer::timestamp(report.at)),
        ems: count(report.ems),
        scopes: count(report.scopes),
        tickets: i64::try_from(report.tickets).unwrap_or(i64::MAX),
        truncated: report.differences.first.len() < report.differences.count,
        differences,
        difference_count,
        notes: report.notes.clone(),
    }
}

/// Converts the result of a repair to a message.
pub fn repaired(done: &RepairReport) -> proto::RepairResponse {
    let (repaired, repaired_count) = messages(&done.repaired);
    let (remaining, remaining_count) = messages(&done.remaining);
    proto::RepairResponse { repaired, repaired_count, remaining, remaining_count }
}

fn read_difference(message: proto::Difference) -> Result<Difference, FieldError> {
    let unknown = |key: &str| FieldError::new("differences", format!("has the unknown dimension {key:?}"));
    let amounts = |amounts: BTreeMap<String, i64>| {
        let entry =
            |(key, amount): (String, i64)| Ok((Dimension::parse_key(&key).ok_or_else(|| unknown(&key))?, amount));
        amounts.into_iter().map(entry).collect::<Result<_, FieldError>>()
    };
    Ok(Difference {
        what: message.what,
        counter: message.counter,
        stored: amounts(message.stored)?,
        from_tickets: amounts(message.from_tickets)?,
        problem: message.problem,
    })
}

fn read_differences(messages: Vec<proto::Difference>, count: i64) -> Result<Differences, FieldError> {
    let first = messages.into_iter().map(read_difference).collect::<Result<_, _>>()?;
    Ok(Differences { first, count: usize::try_from(count).unwrap_or_default() })
}

/// Converts a message of the service to an audit report.
pub fn read_report(message: proto::AuditResponse) -> Result<AuditReport, FieldError> {
    Ok(AuditReport {
        at: answer::read_time("snapshot_time", message.snapshot_time)?,
        ems: usize::try_from(message.ems).unwrap_or_default(),
        scopes: usize::try_from(message.scopes).unwrap_or_default(),
        tickets: u64::try_from(message.tickets).unwrap_or_default(),
        differences: read_differences(message.differences, message.difference_count)?,
        notes: message.notes,
    })
}

/// Converts a message of the service to the result of a repair.
pub fn read_repaired(message: proto::RepairResponse) -> Result<RepairReport, FieldError> {
    Ok(RepairReport {
        repaired: read_differences(message.repaired, message.repaired_count)?,
        remaining: read_differences(message.remaining, message.remaining_count)?,
    })
}
