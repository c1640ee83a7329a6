//! The survey: what EMs are chosen by, brought up to date.

use std::time::Duration;

use crate::{
    error::Error,
    store::{Store, em_report, em_resource, session::answered},
};

use super::StateCache;

/// How many EMs one statement surveys.
const SURVEY_PAGE: i64 = 1000;

/// Looks which EMs there are, how well they are, and which have changed; and reads those.
pub(super) async fn survey(store: Store, seen: StateCache, silent_after: Duration) -> Result<(), Error> {
    let number = seen.choose(|view, _| view.begin_survey());
    let mut after = None;
    loop {
        let page = answered(em_report::survey(&store.pool().await?, after.as_ref(), SURVEY_PAGE, silent_after)).await?;
        let is_last = i64::try_from(page.len()).is_ok_and(|len| len < SURVEY_PAGE);
        after = page.last().map(|last| last.instance.clone());
        let changed = seen.choose(|view, _| view.surveyed(number, page.clone()));
        if !changed.is_empty() {
            seen.take_over(answered(em_resource::read(&store.pool().await?, &changed)).await?);
            // Again, because those that were not known had nothing that a status could have been told of.
            let of_changed = page.into_iter().filter(|found| changed.contains(&found.instance)).collect();
            seen.choose(|view, _| view.surveyed(number, of_changed));
        }
        if is_last {
            break;
        }
    }
    seen.end_survey(number);
    Ok(())
}
