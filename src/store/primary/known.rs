//! What is known of each host, and what follows from it.

use std::{fmt, sync::Arc};

use super::{super::StoreError, Found};

/// How a host was last seen.
#[derive(Debug, Clone)]
pub(super) enum State {
    /// Not yet.
    Unseen,
    /// It takes writes, on this timeline.
    Writable(i64),
    /// It follows another, or does not know yet whether it has to.
    InRecovery,
    /// It is set to take none.
    ReadOnly,
    /// The cell that is looked for is on another.
    Elsewhere,
    /// It starts or stops.
    NotYet(Arc<StoreError>),
    /// Its sessions are not what the service needs, or its encoding is not.
    Unfit(Arc<StoreError>),
    /// It does not let anybody in, or does not answer; `is_silent` if it says nothing at all.
    Away { error: Arc<StoreError>, is_silent: bool },
}

impl State {
    /// Why waiting for it is of no use.
    pub(super) fn hopeless(&self) -> Option<&Arc<StoreError>> {
        match self {
            Self::Unfit(error) => Some(error),
            Self::Away { error, .. } => Some(error).filter(|error| error.is_hopeless()),
            _ => None,
        }
    }

    /// Why the service cannot use it, although it answers.
    pub(super) fn unfit(&self) -> Option<&Arc<StoreError>> {
        match self {
            Self::Unfit(error) => Some(error),
            _ => None,
        }
    }

    /// Whether it lets nobody in because too many are in.
    pub(super) fn is_full(&self) -> bool {
        matches!(self, Self::Away { error, .. } if error.is_crowded())
    }
}

/// Why no host takes writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Missing {
    /// Nobody answers.
    Away,
    /// Only hosts that start or stop do.
    Starting,
    /// Only hosts in recovery do.
    InRecovery,
    /// Only hosts that are set to take no writes do.
    ReadOnly,
    /// Only a host does that the cell has left.
    Elsewhere,
    /// Only hosts do whose sessions or encoding the service cannot use, for this reason.
    Unfit(Arc<str>),
    /// It has fewer connections left than the service needs.
    Full(Arc<str>),
    /// Its disk is full, for this reason.
    DiskFull(Arc<str>),
}

impl fmt::Display for Missing {
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

/// What is known of a host, and the number of the last question that it answers.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) state: State,
    pub(super) question: u64,
}

/// What is known of all hosts.
#[derive(Debug)]
pub(super) struct Known {
    /// How often other hosts were named.
    pub(super) round: u64,
    pub(super) hosts: Vec<Seen>,
    pub(super) found: Option<Arc<Found>>,
    /// The one that was found last, as long as it may be the same again.
    pub(super) last: Option<Arc<Found>>,
    /// Whether somebody had trouble with it since it was last looked at.
    pub(super) is_doubted: bool,
    /// Whether its answer is late.
    pub(super) is_late: bool,
    /// Why it has not all connections that an instance needs.
    pub(super) short: Option<Missing>,
    /// Reason for which the last write failed, if it is a full disk.
    pub(super) full_disk: Option<Missing>,
}

/// Which of the hosts is to be used: the one on the latest timeline, and of several the one that is used already.
pub(super) fn choose(states: &[State], used: Option<usize>) -> Option<usize> {
    let writable = states.iter().enumerate().filter_map(|(index, state)| match state {
        State::Writable(timeline) => Some((*timeline, used == Some(index), std::cmp::Reverse(index))),
        _ => None,
    });
    writable.max().map(|(_, _, std::cmp::Reverse(index))| index)
}

/// Why none can be.
pub(super) fn missing(states: &[State]) -> Missing {
    let is_any = |wanted: fn(&State) -> bool| states.iter().any(wanted);
    if is_any(|state| matches!(state, State::InRecovery)) {
        Missing::InRecovery
    } else if is_any(|state| matches!(state, State::ReadOnly)) {
        Missing::ReadOnly
    } else if is_any(|state| matches!(state, State::Elsewhere)) {
        Missing::Elsewhere
    } else if let Some(error) = states.iter().find_map(State::unfit) {
        Missing::Unfit(error.to_string().into())
    } else if is_any(|state| matches!(state, State::NotYet(_))) {
        Missing::Starting
    } else {
        Missing::Away
    }
}

impl Known {
    pub(super) fn of(hosts: usize) -> Self {
        let unseen = Seen { state: State::Unseen, question: 0 };
        let (found, last, short, full_disk) = (None, None, None, None);
        Self { round: 0, hosts: vec![unseen; hosts], found, last, is_doubted: false, is_late: false, short, full_disk }
    }

    /// Whether calls are served; why not.
    pub(super) fn standing(&self) -> Result<Arc<Found>, Missing> {
        match (&self.found, self.short.as_ref().or(self.full_disk.as_ref())) {
            (Some(_), Some(why)) => Err(why.clone()),
            (Some(found), None) => Ok(found.clone()),
            (None, _) => Err(missing(&self.states())),
        }
    }

    pub(super) fn states(&self) -> Vec<State> {
        self.hosts.iter().map(|seen| seen.state.clone()).collect()
    }

    /// The one to connect to now.
    pub(super) fn usable(&self) -> Option<Arc<Found>> {
        self.found.clone().filter(|_| !self.is_doubted)
    }

    /// Whether all that is to be known of a question is known. Nobody waits for a host that said nothing the last time; but where a cell has
    /// left a host, it is about to be told which has it.
    pub(super) fn is_answered(&self, question: u64) -> bool {
        let answers = |seen: &Seen| match seen.state {
            State::Away { is_silent: true, .. } => true,
            State::Elsewhere => false,
            _ => seen.question >= question,
        };
        self.usable().is_some() || self.hosts.iter().all(answers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_on_the_latest_timeline_is_used() {
        use State::{InRecovery, ReadOnly, Unseen, Writable};
        let away = || State::Away { error: Arc::new(sqlx::Error::PoolTimedOut.into()), is_silent: false };
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
    fn why_there_is_none_is_what_comes_nearest_to_one() {
        let away = || State::Away { error: Arc::new(sqlx::Error::PoolTimedOut.into()), is_silent: true };
        let unfit = || State::Unfit(Arc::new(StoreError::Encoding { encoding: "LATIN1".to_owned() }));
        let not_yet = || State::NotYet(Arc::new(sqlx::Error::PoolTimedOut.into()));
        for (states, why) in [
            (vec![away(), State::InRecovery], Missing::InRecovery),
            (vec![not_yet(), State::ReadOnly], Missing::ReadOnly),
            (vec![away(), not_yet()], Missing::Starting),
            (vec![State::Elsewhere], Missing::Elsewhere),
            (
                vec![away(), unfit()],
                Missing::Unfit(
                    "the database has encoding LATIN1: UTF8 is needed; make another with ENCODING 'UTF8'".into(),
                ),
            ),
            (vec![State::InRecovery, unfit()], Missing::InRecovery),
            (vec![away(), State::Unseen], Missing::Away),
        ] {
            assert_eq!(missing(&states), why, "{states:?}");
        }
    }

    #[test]
    fn nobody_waits_for_a_host_that_said_nothing_the_last_time() {
        let seen = |state, question| Seen { state, question };
        let away = |is_silent| State::Away { error: Arc::new(sqlx::Error::PoolTimedOut.into()), is_silent };
        for (hosts, is_answered) in [
            (vec![seen(State::InRecovery, 7)], true),
            (vec![seen(State::InRecovery, 6)], false),
            (vec![seen(State::InRecovery, 7), seen(away(true), 3)], true),
            (vec![seen(State::InRecovery, 7), seen(away(false), 3)], false),
            (vec![seen(State::Unseen, 0)], false),
            (vec![seen(State::Elsewhere, 7)], false),
        ] {
            let known = Known { hosts, ..Known::of(0) };
            assert_eq!(known.is_answered(7), is_answered, "{known:?}");
        }
    }
}
