//! Reports of EMs: signs of life, and which engines live there; what follows from one for the tickets.

use std::{cmp::Ordering, collections::HashMap};

use time::OffsetDateTime;
use uuid::Uuid;

use super::{em::EmInstance, name::FieldError, observation::Observations};

/// How well an EM says it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// Nothing is wrong.
    Healthy,
    /// Something is wrong, but engines can start.
    Warn,
    /// It is not chosen for requests.
    Unhealthy,
}

impl Health {
    /// As it stands in `linkis_em_report.health`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Warn => "warn",
            Self::Unhealthy => "unhealthy",
        }
    }

    /// The reverse of [`Health::as_str`].
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Healthy, Self::Warn, Self::Unhealthy].into_iter().find(|health| health.as_str() == text)
    }
}

/// A ticket that an EM reported although it does not live there: its engine has to stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownTicket {
    /// Which.
    pub id: Uuid,
    /// How it ended, if that is known; for people.
    pub reason: String,
}

/// How busy a host is, whoever keeps it busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    memory_used: i64,
    memory_max: i64,
    cpu_permille: i16,
}

impl Load {
    /// The bytes in use, of how many, and the thousandths of the cores that are busy; `field` is the path of the load in the request.
    ///
    /// # Errors
    /// For amounts below zero, more used than there is, or more than 1000 thousandths.
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

    /// Bytes in use.
    pub fn memory_used(&self) -> i64 {
        self.memory_used
    }

    /// Bytes that there are.
    pub fn memory_max(&self) -> i64 {
        self.memory_max
    }

    /// Thousandths of the cores that are busy.
    pub fn cpu_permille(&self) -> i16 {
        self.cpu_permille
    }

    /// How busy it is in tenths, by the busier of memory and cores: 0 to 10. No finer, so that hosts which are about as busy share
    /// what comes.
    pub fn tenths(&self) -> u8 {
        let memory = i128::from(self.memory_used) * 10 / i128::from(self.memory_max.max(1));
        let cpu = i128::from(self.cpu_permille / 100);
        u8::try_from(memory.max(cpu)).unwrap_or(10)
    }
}

/// What an EM reports.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Which EM.
    pub em: EmInstance,
    /// The registration that it belongs to.
    pub epoch: i64,
    /// Above zero; grows with each report of an epoch.
    pub sequence: i64,
    /// How well it is.
    pub health: Health,
    /// How busy its host is, if it tells.
    pub load: Option<Load>,
    /// The tickets whose engines live there, in any order; to name one twice says no more than once.
    pub tickets: Vec<Uuid>,
    /// What their engines really use, as far as it tells; `None` leaves what an earlier report told.
    pub observed: Option<Observations>,
}

/// What is known of an EM by its reports; of one that has never reported there is none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmStatus {
    /// How well it is; `None` if it has not reported since it registered last.
    pub health: Option<Health>,
    /// How busy its host is, if it has told since it registered last.
    pub load: Option<Load>,
    /// When its last report came, by the database's clock.
    pub last_report_time: OffsetDateTime,
    /// Whether neither a report nor a registration has come for too long.
    pub silent: bool,
}

/// What choosing needs to know of an EM by its reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Condition {
    /// Whether it may be chosen for a request.
    pub is_available: bool,
    /// How busy its host is, as [`Load::tenths`].
    pub busy: u8,
}

impl Default for Condition {
    /// Of one that has never reported: nothing speaks against it, and it counts as idle.
    fn default() -> Self {
        Self { is_available: true, busy: 0 }
    }
}

impl Condition {
    /// By a report that has just come.
    pub fn reported(report: &Report) -> Self {
        Self::of(Some(report.health), report.load, false)
    }

    fn of(health: Option<Health>, load: Option<Load>, silent: bool) -> Self {
        let is_available = !silent && health != Some(Health::Unhealthy);
        Self { is_available, busy: load.as_ref().map_or(0, Load::tenths) }
    }
}

impl From<EmStatus> for Condition {
    fn from(status: EmStatus) -> Self {
        Self::of(status.health, status.load, status.silent)
    }
}

/// What is known of EMs by their reports.
pub type Statuses = HashMap<EmInstance, EmStatus>;

/// The last sign of life of an EM: as long as it stays the same, nothing was heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastSign {
    /// The epoch of its registration.
    pub registered: i64,
    /// Its last report.
    pub reported: ReportNumber,
}

/// Which report of an EM: later ones are greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReportNumber {
    /// The registration that it belongs to.
    pub epoch: i64,
    /// Its number within the epoch.
    pub sequence: i64,
}

impl ReportNumber {
    /// That of `report`.
    pub fn of(report: &Report) -> Self {
        Self { epoch: report.epoch, sequence: report.sequence }
    }
}

/// What a report is to those that came before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// It is new.
    New,
    /// It came before: it counts once.
    Repeat,
    /// A later one, or a later registration, came before.
    Stale,
    /// No registration has its epoch yet.
    FutureEpoch,
}

impl Arrival {
    /// What `report` is to an EM that registered last as `registered`, and whose last report was `last`.
    pub fn of(report: ReportNumber, registered: i64, last: Option<ReportNumber>) -> Self {
        match (report.epoch.cmp(&registered), last.map(|last| report.cmp(&last))) {
            (Ordering::Greater, _) => Self::FutureEpoch,
            (Ordering::Less, _) | (Ordering::Equal, Some(Ordering::Less)) => Self::Stale,
            (Ordering::Equal, Some(Ordering::Equal)) => Self::Repeat,
            (Ordering::Equal, Some(Ordering::Greater) | None) => Self::New,
        }
    }
}

/// A live ticket, as far as reports concern it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LiveTicket {
    /// Its name.
    pub id: Uuid,
    /// When its engine reported in; `None` while it is locked.
    pub used_time: Option<OffsetDateTime>,
    /// In how many reports in a row it was missing.
    pub missed_reports: i16,
}

/// What follows from a report for tickets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reconciliation {
    /// Reported, but not living on the EM: those engines have to stop.
    pub unknown: Vec<Uuid>,
    /// Tickets whose count of missed reports changes, and what to.
    pub missed: Vec<(Uuid, i16)>,
    /// Tickets that were missing too often: to be given up.
    pub lost: Vec<Uuid>,
}

/// Compares the tickets that an EM reports with those that live on it; both in the order of their ids, and each once. `previous` is
/// when the report before came; `None` if there was none, or if this one is a repeat: then nothing is counted as missing. So it is
/// for a ticket whose engine reported in since the report before: this one may have been written earlier. A ticket is lost after
/// `lost_after` reports in a row without it. A locked ticket never is: it expires.
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
    fn what_does_not_live_there_is_unknown() {
        let locked = LiveTicket { id: id(1), used_time: None, missed_reports: 0 };
        let result = of(&[0, 1, 2, 3, 4], &[locked, used(2, 0, 0)], Some(10));
        assert_eq!(result, Reconciliation { unknown: vec![id(0), id(3), id(4)], ..Default::default() });
    }

    #[test]
    fn what_is_missing_counts_until_it_is_lost_or_back() {
        let living = [used(1, 0, 0), used(2, 0, 1), used(3, 0, 2), used(4, 0, 2), used(5, 0, i16::MAX)];
        let result = of(&[4], &living, Some(10));
        assert_eq!(result.missed, [(id(1), 1), (id(2), 2), (id(3), 3), (id(4), 0)]);
        assert_eq!(result.lost, [id(3), id(5)]);
        assert!(result.unknown.is_empty());
    }

    #[test]
    fn a_locked_ticket_is_never_missing() {
        let locked = LiveTicket { id: id(1), used_time: None, missed_reports: 0 };
        assert_eq!(of(&[], &[locked], Some(10)), Reconciliation::default());
    }

    #[test]
    fn an_engine_that_reported_in_since_the_report_before_is_not_missing() {
        assert_eq!(of(&[], &[used(1, 10, 0), used(2, 11, 0)], Some(10)), Reconciliation::default());
        assert_eq!(of(&[], &[used(1, 9, 0)], Some(10)).missed, [(id(1), 1)]);
    }

    #[test]
    fn the_first_report_and_a_repeat_count_nothing_but_give_up_what_is_lost_already() {
        let living = [used(1, 0, 2), used(2, 0, 3), used(3, 0, 1)];
        let result = of(&[3], &living, None);
        assert_eq!((result.missed, result.lost), (vec![(id(3), 0)], vec![id(2)]));
    }

    #[test]
    fn arrivals() {
        let number = |epoch, sequence| ReportNumber { epoch, sequence };
        for (report, last, expected) in [
            (number(2, 1), None, Arrival::New),
            (number(2, 1), Some(number(1, 9)), Arrival::New),
            (number(2, 2), Some(number(2, 1)), Arrival::New),
            (number(2, 1), Some(number(2, 1)), Arrival::Repeat),
            (number(2, 1), Some(number(2, 2)), Arrival::Stale),
            (number(1, 9), Some(number(1, 9)), Arrival::Stale),
            (number(3, 1), None, Arrival::FutureEpoch),
        ] {
            assert_eq!(Arrival::of(report, 2, last), expected, "{report:?} after {last:?}");
        }
    }

    #[test]
    fn load_is_checked_and_ranked_by_the_busier_of_memory_and_cores() {
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
