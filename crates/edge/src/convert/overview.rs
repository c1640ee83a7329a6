//! Overview: converts the cluster totals, the instances and their background tasks to messages.
//!
//! A caller that is bound to users gets only the totals of the EMs. Callers: `crate::usage` and the
//! monitoring page.

use std::time::Duration;

use prost_types::Timestamp;
use time::OffsetDateTime;

use rm_model::overview::{DimensionTotals, EmChange, EmState, EmTotals, Overview, ScopeTotals, TicketTotals};
use rm_proto::v1 as proto;
use rm_service::overview::{RemainingWork, WatchUpdate};
use rm_service::overview::{ServerInstance, TaskReport};

use super::{
    answer::{em_message, ticket, timestamp},
    limit::scope_usage,
};

/// Maximum number of EM changes in one message of a watch.
const CHANGES_MAX: usize = 1000;

/// Converts the cluster totals to a message. A caller that `is_bound` to users gets only the totals of the EMs.
pub fn overview(overview: &Overview, is_bound: bool) -> proto::Overview {
    let ems = proto::Overview {
        snapshot_time: Some(timestamp(overview.at)),
        ems: overview.ems.iter().map(|((application, state), totals)| em_totals(application, *state, totals)).collect(),
        ..Default::default()
    };
    if is_bound {
        return ems;
    }
    proto::Overview {
        tickets: Some(ticket_totals(&overview.tickets)),
        line: Some(proto::LineTotals {
            waiting: overview.line.waiting,
            longest_wait: overview.line.longest_seconds.and_then(seconds),
        }),
        throughput: Some(proto::Throughput {
            grants_per_second: overview.throughput.grants,
            refusals_per_second: overview.throughput.refusals,
        }),
        scopes: Some(scope_totals(&overview.scopes)),
        ..ems
    }
}

/// Converts seconds to a duration. A negative value, as after a clock that was set back, becomes zero.
fn seconds(seconds: f64) -> Option<prost_types::Duration> {
    Duration::try_from_secs_f64(seconds.max(0.0)).ok().and_then(|duration| duration.try_into().ok())
}

fn em_totals(application_name: &str, state: EmState, totals: &EmTotals) -> proto::EmTotals {
    let sums = |sums: &DimensionTotals| proto::DimensionTotals {
        total: sums.total,
        protected_amount: sums.protected,
        used: sums.used,
        locked: sums.locked,
        left: sums.left(),
    };
    proto::EmTotals {
        em_application_name: application_name.to_owned(),
        state: proto::EmState::from(state).into(),
        ems: totals.ems,
        dimensions: totals.dimensions.iter().map(|(dimension, totals)| (dimension.key(), sums(totals))).collect(),
    }
}

fn ticket_totals(totals: &TicketTotals) -> proto::TicketTotals {
    let idle = totals.idle.amounts.iter();
    proto::TicketTotals {
        used: totals.used,
        locked: totals.locked,
        locked_partial: totals.is_locked_partial,
        oldest_locked: totals.oldest_locked.as_ref().map(ticket),
        idle: totals.idle.tickets,
        idle_amounts: idle.map(|(dimension, amount)| (dimension.key(), *amount)).collect(),
    }
}

fn scope_totals(totals: &ScopeTotals) -> proto::ScopeTotals {
    proto::ScopeTotals {
        scopes: totals.scopes,
        over_limit: totals.over_limit,
        fullest: totals.fullest.iter().map(scope_usage).collect(),
        renew_time: totals.at.map(timestamp),
    }
}

/// Converts one observation of a watch: the totals and the changes since the previous message.
pub fn watched(seen: &WatchUpdate, is_bound: bool) -> proto::WatchResponse {
    let state = |state: Option<EmState>| state.map_or(proto::EmState::Unspecified, proto::EmState::from).into();
    let change = |change: &EmChange| proto::EmChange {
        em: Some(em_message(&change.em)),
        before: state(change.before),
        after: state(change.after),
    };
    proto::WatchResponse {
        overview: Some(overview(&seen.snapshot.overview, is_bound)),
        em_changes: seen.changes.iter().take(CHANGES_MAX).map(change).collect(),
        em_changes_partial: seen.changes.len() > CHANGES_MAX,
    }
}

/// Converts an instance and its start time to a message.
pub fn server_instance((instance, start_time): &(ServerInstance, OffsetDateTime)) -> proto::ServerInstance {
    proto::ServerInstance {
        instance_id: instance.id.to_string(),
        version: instance.version.clone(),
        start_time: Some(timestamp(*start_time)),
        address: instance.address.clone(),
        grants_per_second: instance.throughput.grants,
        refusals_per_second: instance.throughput.refusals,
    }
}

/// Converts the report of one background task of an instance to a message.
pub fn task_status(instance: &ServerInstance, report: &TaskReport) -> proto::TaskStatus {
    let count = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    proto::TaskStatus {
        task: report.task.clone(),
        instance_id: instance.id.to_string(),
        last_run_time: moment(report.last_run),
        last_success_time: moment(report.last_success),
        lag: seconds(report.lag),
        steps: count(report.steps),
        errors: count(report.errors),
        last_error: report.last_error.clone().unwrap_or_default(),
    }
}

/// Converts seconds since 1970 to a timestamp; zero and invalid values become `None`.
fn moment(since_1970: f64) -> Option<Timestamp> {
    let since = Duration::try_from_secs_f64(since_1970).ok().filter(|since| !since.is_zero())?;
    let nanos = i32::try_from(since.subsec_nanos()).ok()?;
    Some(Timestamp { seconds: i64::try_from(since.as_secs()).ok()?, nanos })
}

/// Converts the progress of a background job to a message.
pub fn job(job: &RemainingWork) -> proto::Job {
    proto::Job { kind: job.kind.to_owned(), subject: job.subject.clone(), left: job.left }
}
