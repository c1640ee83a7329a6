//! Survey: updates the cluster view, from which placement selects EMs.
//!
//! A survey reads the EMs that changed since the last one. Three sources name them without a cost for the writer of a change.
//! The sources are the history after the last line read, an index of unhealthy EMs, and the detection of silent EMs. A survey
//! of all EMs runs once in the report interval of EMs, or every 30 s if that is shorter, and whenever there are more changes than EMs. The full
//! survey covers missed changes and refreshes the load of EMs that report to other instances, before it is too old to count.
//!
//! Invariant: a line that no survey has read has a number above [`Mark::floor`]. A line takes its number before its commit. The
//! floor therefore moves to a number only when all transactions with possibly smaller numbers have ended.
//! Caller: `admission`, through a single flight.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::time::Instant;

use crate::{error::Error, heartbeat::LivenessTimeouts, lock::lock};
use rm_model::{em::EmInstance, placement::SurveyedEm};
use rm_store::{Store, action_record, em_report, em_resource, history_tail, session::within_timeout};

use super::StateCache;

/// Maximum number of EMs that one statement surveys.
const SURVEY_PAGE: i64 = 1000;

/// Maximum interval between surveys of all EMs.
const WHOLE_PERIOD: Duration = Duration::from_secs(30);

/// Maximum age of the last detection of silent EMs: three times its period.
const LOOK_AGE: Duration = Duration::from_secs(3);

/// Number of history lines that a survey reads even if there are fewer EMs.
const LINES_MIN: i64 = 1000;

/// State that one survey leaves for the next; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Surveys(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    mark: Option<Mark>,
    /// When the last survey of all EMs began.
    whole: Option<Instant>,
    /// The EMs that the last detection found silent, and when it began.
    look: Option<(Instant, HashSet<EmInstance>)>,
    /// The EMs that surveys found unavailable when they read them last.
    unavailable: HashSet<EmInstance>,
}

impl State {
    /// Records which of some EMs were unavailable when they were read.
    fn note_unavailable(&mut self, read: &HashSet<EmInstance>, unavailable: HashSet<EmInstance>) {
        self.unavailable.retain(|em| !read.contains(em));
        self.unavailable.extend(unavailable);
    }
}

impl Surveys {
    /// Records the silent EMs of a detection that began at `began`.
    pub fn note_silent(&self, began: Instant, ems: HashSet<EmInstance>) {
        lock(&self.0).look = Some((began, ems));
    }
}

/// How far surveys have read the history.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mark {
    /// The generation of the database host.
    generation: u64,
    /// All lines up to this number have been seen; `None` if no number is known.
    floor: Option<i64>,
    /// The last number that was given out when `writers` were read.
    last: i64,
    /// The transactions that may have taken a number up to `last` and had not ended then.
    writers: HashSet<String>,
}

impl Mark {
    /// The mark of a survey that reads lines after `last` and then `writers` were read.
    fn next(before: Option<&Self>, generation: u64, last: i64, writers: HashSet<String>) -> Self {
        match before.filter(|before| before.generation == generation) {
            None => Self { generation, floor: None, last, writers },
            Some(before) if before.writers.is_disjoint(&writers) => {
                Self { generation, floor: Some(before.last), last, writers }
            }
            Some(before) => {
                let writers = before.writers.intersection(&writers).cloned().collect();
                Self { writers, ..before.clone() }
            }
        }
    }
}

/// Surveys the EMs that have changed, or all of them.
pub(super) async fn survey(
    store: Store,
    seen: StateCache,
    liveness: LivenessTimeouts,
    surveys: Surveys,
) -> Result<(), Error> {
    let began = Instant::now();
    let (number, known) = seen.choose(|view, _| (view.begin_survey(), view.len()));
    let generation = store.primary().generation();
    // The number is read first, and both before the survey: a transaction that begins later takes a larger number.
    let last = within_timeout(history_tail::last_number(&store.pool().await?)).await?;
    let writers = within_timeout(history_tail::writers(&store.pool().await?)).await?;
    let unhealthy = within_timeout(em_report::unhealthy(&store.pool().await?)).await?;
    let (before, whole, by_reports) = {
        let state = lock(&surveys.0);
        let look = state.look.as_ref().filter(|(looked, _)| *looked + LOOK_AGE >= began);
        let differs = |silent: &HashSet<EmInstance>| -> HashSet<EmInstance> {
            let unavailable: HashSet<&EmInstance> = silent.iter().chain(&unhealthy).collect();
            let known: HashSet<&EmInstance> = state.unavailable.iter().collect();
            unavailable.symmetric_difference(&known).copied().cloned().collect()
        };
        (state.mark.clone(), state.whole, look.map(|(_, silent)| differs(silent)))
    };
    let mark = Mark::next(before.as_ref(), generation, last, writers);
    let few = |floor: &i64| last.saturating_sub(*floor) <= LINES_MIN.max(i64::try_from(known).unwrap_or(i64::MAX));
    let floor = before.filter(|before| before.generation == generation).and_then(|before| before.floor).filter(few);
    let period = WHOLE_PERIOD.min(liveness.report_interval());
    let is_due = whole.is_none_or(|whole| whole + period <= began);
    let mut survey = Survey { store, seen, silent_after: liveness.silent_after, number, unavailable: HashSet::new() };
    match floor.zip(by_reports).filter(|_| !is_due) {
        Some((floor, mut ems)) => {
            ems.extend(within_timeout(action_record::ems_behind(&survey.store.pool().await?, floor)).await?);
            survey.some(ems.iter().cloned().collect()).await?;
            let mut state = lock(&surveys.0);
            state.note_unavailable(&ems, survey.unavailable);
            state.mark = Some(mark);
        }
        None => {
            survey.all().await?;
            let mut state = lock(&surveys.0);
            (state.mark, state.whole, state.unavailable) = (Some(mark), Some(began), survey.unavailable);
        }
    }
    Ok(())
}

/// Surveys `ems` alone.
pub(super) async fn survey_of(
    store: Store,
    seen: StateCache,
    liveness: LivenessTimeouts,
    surveys: Surveys,
    ems: Vec<EmInstance>,
) -> Result<(), Error> {
    let number = seen.choose(|view, _| view.begin_survey());
    let mut survey = Survey { store, seen, silent_after: liveness.silent_after, number, unavailable: HashSet::new() };
    survey.some(ems.clone()).await?;
    lock(&surveys.0).note_unavailable(&ems.into_iter().collect(), survey.unavailable);
    Ok(())
}

struct Survey {
    store: Store,
    seen: StateCache,
    silent_after: Duration,
    number: u64,
    /// The EMs that the survey found unavailable.
    unavailable: HashSet<EmInstance>,
}

impl Survey {
    async fn all(&mut self) -> Result<(), Error> {
        let mut after = None;
        loop {
            let pool = self.store.pool().await?;
            let page = within_timeout(em_report::survey(&pool, after.as_ref(), SURVEY_PAGE, self.silent_after)).await?;
            let is_last = i64::try_from(page.len()).is_ok_and(|len| len < SURVEY_PAGE);
            after = page.last().map(|last| last.instance.clone());
            self.take_over(page).await?;
            if is_last {
                break;
            }
        }
        self.seen.end_survey(self.number);
        Ok(())
    }

    /// Surveys only `ems`. Removes those that are not registered.
    async fn some(&mut self, ems: Vec<EmInstance>) -> Result<(), Error> {
        for part in ems.chunks(usize::try_from(SURVEY_PAGE).unwrap_or(usize::MAX)) {
            let pool = self.store.pool().await?;
            let found = within_timeout(em_report::survey_of(&pool, part, self.silent_after)).await?;
            let registered: HashSet<EmInstance> = found.iter().map(|found| found.instance.clone()).collect();
            self.take_over(found).await?;
            let gone: Vec<&EmInstance> = part.iter().filter(|em| !registered.contains(em)).collect();
            self.seen.choose(|view, _| view.remove_unseen(self.number, gone));
        }
        let known = self.seen.choose(|view, _| {
            view.settle_before(self.number);
            view.len()
        });
        self.seen.chosen_from(known);
        Ok(())
    }

    /// Applies a page of surveyed EMs, and reads those that have changed.
    async fn take_over(&mut self, page: Vec<SurveyedEm>) -> Result<(), Error> {
        let unavailable = page.iter().filter(|found| !found.condition.is_available);
        self.unavailable.extend(unavailable.map(|found| found.instance.clone()));
        let changed = self.seen.choose(|view, _| view.surveyed(self.number, page.clone()));
        if changed.is_empty() {
            return Ok(());
        }
        self.seen.take_over(within_timeout(em_resource::read(&self.store.pool().await?, &changed)).await?);
        // Again, for the EMs that the view did not have before they were read.
        let of_changed = page.into_iter().filter(|found| changed.contains(&found.instance)).collect();
        self.seen.choose(|view, _| view.surveyed(self.number, of_changed));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writers(names: &[&str]) -> HashSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn survey_floor_waits_for_earlier_writers() {
        let first = Mark::next(None, 1, 100, writers(&["a", "b"]));
        assert_eq!(first.floor, None, "lines of a and b may be anywhere up to 100");
        let second = Mark::next(Some(&first), 1, 200, writers(&["b", "c"]));
        assert_eq!((second.floor, second.last, &second.writers), (None, 100, &writers(&["b"])), "b has not ended");
        let third = Mark::next(Some(&second), 1, 300, writers(&["c"]));
        assert_eq!((third.floor, third.last), (Some(100), 300), "all lines up to 100 are seen");
        let fourth = Mark::next(Some(&third), 1, 400, writers(&[]));
        assert_eq!((fourth.floor, fourth.last), (Some(300), 400));
        assert_eq!(Mark::next(Some(&fourth), 2, 7, writers(&[])).floor, None, "another database server");
    }
}
