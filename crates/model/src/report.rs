//! Reports: heartbeats of EMs with health, load and running tickets, and the consequences for the tickets.
//!
//! [`ReportOrder::of`] orders reports; [`reconcile`] compares the reported with the live tickets. A report itself never ends a
//! ticket: the committer does, after the result is checked again under the locks. Callers: the heartbeat service and
//! placement.

use std::{cmp::Ordering, collections::HashMap};

use time::OffsetDateTime;
use uuid::Uuid;

use super::{em::EmInstance, name::FieldError, observation::Observations};

text_enum! {
    /// Health that an EM reports. The texts are the values of `linkis_em_report.health`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Health {
        /// No problem.
        Healthy = "healthy",
        /// A problem, but engines can start.
        Warn = "warn",
        /// The EM must not be selected.
        Unhealthy = "unhealthy",
    }
}

/// A reported ticket that is not live on the EM; its engine must stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownTicket {
    /// Id of the ticket.
    pub id: Uuid,
    /// How it ended, if known; for display.
    pub reason: String,
}

/// Load of the EM's machine by all its processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    memory_used: i64,
    memory_max: i64,
    cpu_permille: i16,
}

impl Load {
    /// Checks a load: used and total memory in bytes, and thousandths of busy cores. `field` is the path of the load in the
    /// request.
    ///
    /// # Errors
    /// Negative amounts, more used than total memory, or more than 1000 thousandths.
    pub fn parse(field: &str, memory_used: i64, memory_max: i64, cpu_permille: i32) -> Result<Self, FieldError> {
        if memory_max < 0 {
            return Err(FieldError::new(format!("{field}.memory_max"), "must not be negative"));
        }
        if !(0..=memory_max).contains(&memory_used) {
            return Err(FieldError::new(format!("{field}.memory_used"), "must be between 0 and memory_max"));
        }
        let permille = i16::try_from(cpu_permille).ok().filter(|permille| (0..=1000).contains(permille));
        let cpu_permille =
            permille.ok_or_else(|| FieldError::new(format!("{field}.cpu_permille"), "must be between 0 and 1000"))?;
        Ok(Self { memory_used, memory_max, cpu_permille })
    }

    /// Returns the used memory in bytes.
    pub fn memory_used(&self) -> i64 {
        self.memory_used
    }

    /// Returns the total memory in bytes.
    pub fn memory_max(&self) -> i64 {
        self.memory_max
    }

    /// Returns the thousandths of busy cores.
    pub fn cpu_permille(&self) -> i16 {
        self.cpu_permille
    }

    /// Returns the load in tenths, by the busier of memory and cores: 0 to 10. The coarse unit lets EMs of similar load
    /// share requests.
    pub fn tenths(&self) -> u8 {
        let memory = i128::from(self.memory_used) * 10 / i128::from(self.memory_max.max(1));
        let cpu = i128::from(self.cpu_permille / 100);
        u8::try_from(memory.max(cpu)).unwrap_or(10)
    }
}

/// A heartbeat of an EM.
#[derive(Debug, Clone, PartialEq)]
pub struct EmReport {
    /// The EM.
    pub em: EmInstance,
    /// Epoch of the registration that sends the report.
    pub epoch: i64,
    /// Positive number; increases with each report of an epoch.
    pub sequence: i64,
    /// Reported health.
    pub health: Health,
    /// Load of the machine, if reported.
    pub load: Option<Load>,
    /// Tickets with running engines, in any order; duplicates are ignored.
    pub tickets: Vec<Uuid>,
    /// Observed use of the engines; `None` keeps the earlier observations.
    pub observed: Option<Observations>,
    /// Tickets of idle engines, which run no task: a part of `tickets`.
    pub idle: Vec<Uuid>,
}

/// State of an EM by its reports; does not exist for an EM that never reported.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmStatus {
    /// Latest health; `None` if it has not reported since its latest registration.
    pub health: Option<Health>,
    /// Latest load, if reported since its latest registration.
    pub load: Option<Load>,
    /// Arrival of the latest report, by the database clock.
    pub last_report_time: OffsetDateTime,
    /// Whether the EM is silent: neither a report nor a registration for too long.
    pub silent: bool,
}

/// Facts from reports that the placement uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EmCondition {
    /// Whether the EM may be selected.
    pub is_available: bool,
    /// Load of the machine, as [`Load::tenths`].
    pub busy: u8,
}

impl Default for EmCondition {
    /// Condition of an EM that never reported: available and idle.
    fn default() -> Self {
        Self { is_available: true, busy: 0 }
    }
}

impl EmCondition {
    /// Returns the condition after a report that just arrived.
    pub fn reported(report: &EmReport) -> Self {
        Self::of(Some(report.health), report.load, false)
    }

    fn of(health: Option<Health>, load: Option<Load>, silent: bool) -> Self {
        let is_available = !silent && health != Some(Health::Unhealthy);
        Self { is_available, busy: load.as_ref().map_or(0, Load::tenths) }
    }
}

impl From<EmStatus> for EmCondition {
    fn from(status: EmStatus) -> Self {
        Self::of(status.health, status.load, status.silent)
    }
}

/// Reported state by EM.
pub type EmStatuses = HashMap<EmInstance, EmStatus>;

/// Latest sign of life of an EM: while it is unchanged, no report and no registration arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastSignOfLife {
    /// Epoch of the registration.
    pub registered: i64,
    /// Latest report.
    pub reported: ReportNumber,
}

/// Number of a report; later reports of an EM have greater numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReportNumber {
    /// Epoch of the registration that sent the report.
    pub epoch: i64,
    /// Sequence within the epoch.
    pub sequence: i64,
}

impl ReportNumber {
    /// Returns the number of `report`.
    pub fn of(report: &EmReport) -> Self {
        Self { epoch: report.epoch, sequence: report.sequence }
    }
}

/// Order of a report relative to earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReportOrder {
    /// The report is new.
    New,
    /// The report arrived before and has no further effect.
    Repeat,
    /// A later report or registration arrived before.
    Stale,
    /// No registration has this epoch yet.
    FutureEpoch,
}

impl ReportOrder {
    /// Classifies `report` of an EM whose current epoch is `registered` and whose latest report is `last`.
    pub fn of(report: ReportNumber, registered: i64, last: Option<ReportNumber>) -> Self {
        match (report.epoch.cmp(&registered), last.map(|last| report.cmp(&last))) {
            (Ordering::Greater, _) => Self::FutureEpoch,
            (Ordering::Less, _) | (Ordering::Equal, Some(Ordering::Less)) => Self::Stale,
            (Ordering::Equal, Some(Ordering::Equal)) => Self::Repeat,
            (Ordering::Equal, Some(Ordering::Greater) | None) => Self::New,
        }
    }
}

/// A live ticket, reduced to the data that reports concern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LiveTicket {
    /// Id of the ticket.
    pub id: Uuid,
    /// Time of its confirmation; `None` while it is locked.
    pub used_time: Option<OffsetDateTime>,
    /// Number of consecutive reports without it.
    pub missed_reports: i16,
}

/// Consequences of a report for tickets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reconciliation {
    /// Reported tickets that are not live on the EM; their engines must stop.
    pub unknown: Vec<Uuid>,
    /// Tickets whose number of missed reports changes, with the new number.
    pub missed: Vec<(Uuid, i16)>,
    /// Tickets with too many missed reports, to be ended as lost.
    pub lost: Vec<Uuid>,
}

/// Compares the tickets of a report with the live tickets of the EM. Both lists are sorted by id and have no duplicates.
///
/// `previous` is the arrival of the previous report. `None` means that there was none or that this one is a repeat; then no
/// ticket counts as missing. A ticket confirmed since the previous report does not count either, because this report may be
/// older than the confirmation.
///
/// A ticket is lost after `lost_after` consecutive reports without it. A locked ticket is never lost; it expires.
pub fn reconcile(
    reported: &[Uuid],
    living: &[LiveTicket],
    previous: Option<OffsetDateTime>,
    lost_after: i16,
) -> Reconciliation {
    let mut result = Reconciliation::default();
    let mut rest = reported;
    for ticket in living {
        let (before, from) = rest.split_at(rest.partition_point(|id| *id < ticket.id));
        result.unknown.extend(before);
        let is_reported = from.first() == Some(&ticket.id);
        rest = &from[usize::from(is_reported)..];
        let Some(used_time) = ticket.used_time else { continue };
        let counts = previous.is_some_and(|previous| used_time < previous);
        let missed = match is_reported {
            true => 0,
            false => ticket.missed_reports.saturating_add(i16::from(counts)),
        };
        if missed != ticket.missed_reports {
            result.missed.push((ticket.id, missed));
        }
        if missed >= lost_after {
            result.lost.push(ticket.id);
        }
    }
    result.unknown.extend(rest);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u128) -> Uuid {
        Uuid::from_u128(number)
    }

    fn at(second: i64) -> OffsetDateTime {
        OffsetDateTime::from_unix_timestamp(second).unwrap()
    }

    fn used(number: u128, second: i64, missed_reports: i16) -> LiveTicket {
        LiveTicket { id: id(number), used_time: Some(at(second)), missed_reports }
    }

    fn of(reported: &[u128], living: &[LiveTicket], previous: Option<i64>) -> Reconciliation {
        let reported: Vec<Uuid> = reported.iter().map(|number| id(*number)).collect();
        reconcile(&reported, living, previous.map(at), 3)
    }

    #[test]
    fn report_of_ended_ticket_is_unknown() {
        let locked = LiveTicket { id: id(1), used_time: None, missed_reports: 0 };
        let result = of(&[0, 1, 2, 3, 4], &[locked, used(2, 0, 0)], Some(10));
        assert_eq!(result, Reconciliation { unknown: vec![id(0), id(3), id(4)], ..Default::default() });
    }

    #[test]
    fn missing_ticket_is_counted_until_lost_or_reported() {
        let living = [used(1, 0, 0), used(2, 0, 1), used(3, 0, 2), used(4, 0, 2), used(5, 0, i16::MAX)];
        let result = of(&[4], &living, Some(10));
        assert_eq!(result.missed, [(id(1), 1), (id(2), 2), (id(3), 3), (id(4), 0)]);
        assert_eq!(result.lost, [id(3), id(5)]);
        assert!(result.unknown.is_empty());
    }

    #[test]
    fn locked_ticket_is_never_missing() {
        let locked = LiveTicket { id: id(1), used_time: None, missed_reports: 0 };
        assert_eq!(of(&[], &[locked], Some(10)), Reconciliation::default());
    }

    #[test]
    fn ticket_confirmed_since_last_report_is_not_missing() {
        assert_eq!(of(&[], &[used(1, 10, 0), used(2, 11, 0)], Some(10)), Reconciliation::default());
        assert_eq!(of(&[], &[used(1, 9, 0)], Some(10)).missed, [(id(1), 1)]);
    }

    #[test]
    fn first_report_counts_nothing_and_ends_lost_tickets() {
        let living = [used(1, 0, 2), used(2, 0, 3), used(3, 0, 1)];
        let result = of(&[3], &living, None);
        assert_eq!((result.missed, result.lost), (vec![(id(3), 0)], vec![id(2)]));
    }

    #[test]
    fn report_order_follows_epoch_and_sequence() {
        let number = |epoch, sequence| ReportNumber { epoch, sequence };
        for (report, last, expected) in [
            (number(2, 1), None, ReportOrder::New),
            (number(2, 1), Some(number(1, 9)), ReportOrder::New),
            (number(2, 2), Some(number(2, 1)), ReportOrder::New),
            (number(2, 1), Some(number(2, 1)), ReportOrder::Repeat),
            (number(2, 1), Some(number(2, 2)), ReportOrder::Stale),
            (number(1, 9), Some(number(1, 9)), ReportOrder::Stale),
            (number(3, 1), None, ReportOrder::FutureEpoch),
        ] {
            assert_eq!(ReportOrder::of(report, 2, last), expected, "{report:?} after {last:?}");
        }
    }

    #[test]
    fn load_is_checked_and_ranked_by_busier_dimension() {
        let load = |used, max, permille| Load::parse("load", used, max, permille);
        for (memory_used, memory_max, cpu_permille, field) in [
            (-1, 1, 0, "load.memory_used"),
            (2, 1, 0, "load.memory_used"),
            (0, -1, 0, "load.memory_max"),
            (0, 0, -1, "load.cpu_permille"),
            (0, 0, 1001, "load.cpu_permille"),
            (0, 0, 65_536, "load.cpu_permille"),
        ] {
            assert_eq!(load(memory_used, memory_max, cpu_permille).unwrap_err().field, field);
        }
        let tenths = |used, max, permille| load(used, max, permille).unwrap().tenths();
        assert_eq!([tenths(0, 0, 0), tenths(50, 100, 499), tenths(59, 100, 700), tenths(0, 9, 1000)], [0, 5, 7, 10]);
        assert_eq!(tenths(i64::MAX, i64::MAX, 0), 10);
    }
}
