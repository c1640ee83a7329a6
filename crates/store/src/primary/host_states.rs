//! State of each database host as of its last probe, and the choice of the primary.
//!
//! The module makes no connection. Callers: the parent module and the probe tasks.

use std::{fmt, sync::Arc};

use super::{super::StoreError, PrimaryHost};

/// State of a host at its last probe.
#[derive(Debug, Clone)]
pub(super) enum HostState {
    /// Not probed yet.
    Unseen,
    /// Accepts writes, on this timeline.
    Writable(i64),
    /// Recovers: a standby, or a host that has not finished its start.
    InRecovery,
    /// Read-only by configuration.
    ReadOnly,
    /// Does not own the cell.
    Elsewhere,
    /// Starting or stopping.
    NotYet(Arc<StoreError>),
    /// Unsuitable sessions or encoding.
    Unfit(Arc<StoreError>),
    /// Rejects connections, or does not respond; `is_silent` if there was no response at all.
    Away { error: Arc<StoreError>, is_silent: bool },
}

impl HostState {
    /// Returns the error if waiting for this host cannot help.
    pub(super) fn hopeless(&self) -> Option<&Arc<StoreError>> {
        match self {
            Self::Unfit(error) => Some(error),
            Self::Away { error, .. } => Some(error).filter(|error| error.is_hopeless()),
            _ => None,
        }
    }

    /// Returns the reason why the service cannot use the host although it responds.
    pub(super) fn unfit(&self) -> Option<&Arc<StoreError>> {
        match self {
            Self::Unfit(error) => Some(error),
            _ => None,
        }
    }

    /// Returns whether the host rejects connections because all its slots are in use.
    pub(super) fn is_full(&self) -> bool {
        matches!(self, Self::Away { error, .. } if error.is_crowded())
    }
}

/// Reason why no host serves writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoPrimaryReason {
    /// No host responds.
    Away,
    /// The only responding hosts are starting or stopping.
    Starting,
    /// The only responding hosts are in recovery.
    InRecovery,
    /// The only responding hosts are read-only by configuration.
    ReadOnly,
    /// The only responding host does not own the cell any more.
    Elsewhere,
    /// The sessions or the encoding of the responding hosts do not suit the service, for this reason.
    Unfit(Arc<str>),
    /// The database has fewer free connections than an instance needs.
    Full(Arc<str>),
    /// The disk of the database is full.
    DiskFull(Arc<str>),
}

impl fmt::Display for NoPrimaryReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unfit(why) | Self::Full(why) | Self::DiskFull(why) => why,
            Self::Away => "the database does not answer",
            Self::Starting => "the database starts or stops",
            Self::InRecovery => "the database is in recovery, a standby",
            Self::ReadOnly => "the database is set to take no writes",
            Self::Elsewhere => "the cell is being moved to another worker",
        })
    }
}

/// State of a host, and the number of the last probe request that it answers.
#[derive(Debug, Clone)]
pub(super) struct HostObservation {
    pub(super) state: HostState,
    pub(super) question: u64,
}

/// States of all hosts.
#[derive(Debug)]
pub(super) struct HostStates {
    /// Number of times that the hosts were replaced.
    pub(super) round: u64,
    pub(super) hosts: Vec<HostObservation>,
    pub(super) found: Option<Arc<PrimaryHost>>,
    /// The last primary, while it may become the primary again with its pools.
    pub(super) last: Option<Arc<PrimaryHost>>,
    /// Whether a connection to the primary failed since its last probe.
    pub(super) is_doubted: bool,
    /// Whether the primary's reply is late.
    pub(super) is_late: bool,
    /// Reason why the instance lacks connections that it needs.
    pub(super) short: Option<NoPrimaryReason>,
    /// Error text of the last failed write, if the disk is full.
    pub(super) full_disk: Option<NoPrimaryReason>,
}

/// Returns the index of the host to use: the host on the latest timeline, and among equals the present primary.
pub(super) fn choose(states: &[HostState], used: Option<usize>) -> Option<usize> {
    let writable = states.iter().enumerate().filter_map(|(index, state)| match state {
        HostState::Writable(timeline) => Some((*timeline, used == Some(index), std::cmp::Reverse(index))),
        _ => None,
    });
    writable.max().map(|(_, _, std::cmp::Reverse(index))| index)
}

/// Returns the reason why no host can be used, from the host that is nearest to accepting writes.
pub(super) fn missing(states: &[HostState]) -> NoPrimaryReason {
    let is_any = |wanted: fn(&HostState) -> bool| states.iter().any(wanted);
    if is_any(|state| matches!(state, HostState::InRecovery)) {
        NoPrimaryReason::InRecovery
    } else if is_any(|state| matches!(state, HostState::ReadOnly)) {
        NoPrimaryReason::ReadOnly
    } else if is_any(|state| matches!(state, HostState::Elsewhere)) {
        NoPrimaryReason::Elsewhere
    } else if let Some(error) = states.iter().find_map(HostState::unfit) {
        NoPrimaryReason::Unfit(error.to_string().into())
    } else if is_any(|state| matches!(state, HostState::NotYet(_))) {
        NoPrimaryReason::Starting
    } else {
        NoPrimaryReason::Away
    }
}

impl HostStates {
    pub(super) fn of(hosts: usize) -> Self {
        let unseen = HostObservation { state: HostState::Unseen, question: 0 };
        let (found, last, short, full_disk) = (None, None, None, None);
        Self { round: 0, hosts: vec![unseen; hosts], found, last, is_doubted: false, is_late: false, short, full_disk }
    }

    /// Returns the primary if calls are served, or the reason why they are not.
    pub(super) fn standing(&self) -> Result<Arc<PrimaryHost>, NoPrimaryReason> {
        match (&self.found, self.short.as_ref().or(self.full_disk.as_ref())) {
            (Some(_), Some(why)) => Err(why.clone()),
            (Some(found), None) => Ok(found.clone()),
            (None, _) => Err(missing(&self.states())),
        }
    }

    pub(super) fn states(&self) -> Vec<HostState> {
        self.hosts.iter().map(|seen| seen.state.clone()).collect()
    }

    /// Returns the primary, unless it is doubted.
    pub(super) fn usable(&self) -> Option<Arc<PrimaryHost>> {
        self.found.clone().filter(|_| !self.is_doubted)
    }

    /// Returns whether a probe request needs no further wait. A host that was silent at its last probe is not waited
    /// for. A host that lost the cell is waited for, because the coordinator is about to name the new owner.
    pub(super) fn is_answered(&self, question: u64) -> bool {
        let answers = |seen: &HostObservation| match seen.state {
            HostState::Away { is_silent: true, .. } => true,
            HostState::Elsewhere => false,
            _ => seen.question >= question,
        };
        self.usable().is_some() || self.hosts.iter().all(answers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn primary_on_latest_timeline_is_chosen() {
        use HostState::{InRecovery, ReadOnly, Unseen, Writable};
        let away = || HostState::Away { error: Arc::new(sqlx::Error::PoolTimedOut.into()), is_silent: false };
        for (states, used, chosen) in [
            (vec![Unseen], None, None),
            (vec![InRecovery, ReadOnly, away()], Some(0), None),
            (vec![InRecovery, Writable(1)], Some(0), Some(1)),
            (vec![Writable(1), Writable(1)], None, Some(0)),
            (vec![Writable(1), Writable(1)], Some(1), Some(1)),
            (vec![Writable(1), Writable(2)], Some(0), Some(1)),
            (vec![Writable(3), Writable(2)], Some(1), Some(0)),
            (vec![away(), Writable(1), Unseen], None, Some(1)),
        ] {
            assert_eq!(choose(&states, used), chosen, "{states:?} {used:?}");
        }
    }

    #[test]
    fn no_primary_reason_is_of_nearest_host() {
        let away = || HostState::Away { error: Arc::new(sqlx::Error::PoolTimedOut.into()), is_silent: true };
        let unfit = || HostState::Unfit(Arc::new(StoreError::Encoding { encoding: "LATIN1".to_owned() }));
        let not_yet = || HostState::NotYet(Arc::new(sqlx::Error::PoolTimedOut.into()));
        for (states, why) in [
            (vec![away(), HostState::InRecovery], NoPrimaryReason::InRecovery),
            (vec![not_yet(), HostState::ReadOnly], NoPrimaryReason::ReadOnly),
            (vec![away(), not_yet()], NoPrimaryReason::Starting),
            (vec![HostState::Elsewhere], NoPrimaryReason::Elsewhere),
            (
                vec![away(), unfit()],
                NoPrimaryReason::Unfit(
                    "the database has encoding LATIN1, but UTF8 is needed; create another with ENCODING 'UTF8'".into(),
                ),
            ),
            (vec![HostState::InRecovery, unfit()], NoPrimaryReason::InRecovery),
            (vec![away(), HostState::Unseen], NoPrimaryReason::Away),
        ] {
            assert_eq!(missing(&states), why, "{states:?}");
        }
    }

    #[test]
    fn probe_round_ends_without_hosts_silent_before() {
        let seen = |state, question| HostObservation { state, question };
        let away = |is_silent| HostState::Away { error: Arc::new(sqlx::Error::PoolTimedOut.into()), is_silent };
        for (hosts, is_answered) in [
            (vec![seen(HostState::InRecovery, 7)], true),
            (vec![seen(HostState::InRecovery, 6)], false),
            (vec![seen(HostState::InRecovery, 7), seen(away(true), 3)], true),
            (vec![seen(HostState::InRecovery, 7), seen(away(false), 3)], false),
            (vec![seen(HostState::Unseen, 0)], false),
            (vec![seen(HostState::Elsewhere, 7)], false),
        ] {
            let known = HostStates { hosts, ..HostStates::of(0) };
            assert_eq!(known.is_answered(7), is_answered, "{known:?}");
        }
    }
}
