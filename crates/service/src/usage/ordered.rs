//! EMs in an order of the overview. The overview gives the order, and only the EMs of a page are read.
//!
//! Caller: `rm_edge::usage`.

use async_recursion::async_recursion as boxed;

use crate::error::Error;
use rm_model::{
    em::Em,
    em_order::{EmOrder, EmPlace},
    overview::Overview,
    report::EmStatus,
};
use rm_store::em_resource::EmFilter;

use super::{LOOKED_AT_ONCE, LOOKS_MAX, UsageQueries};

/// Page of EMs in an order of the overview.
#[derive(Debug)]
pub struct OrderedEmPage {
    /// EMs, each with the status by its reports.
    pub shown: Vec<(Em, Option<EmStatus>)>,
    /// Place after which the next page begins; `None` at the end.
    pub next: Option<EmPlace>,
}

impl UsageQueries {
    /// Returns up to `limit` matching EMs after the place `after`, with at least `min_fullness` percent used or locked, in an
    /// order of `overview`.
    ///
    /// The number of EMs examined is bounded, so a page may be short.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn ems_in_order(
        &self,
        (order, overview): (EmOrder, &Overview),
        (filter, min_fullness): (&EmFilter, u8),
        after: Option<&EmPlace>,
        limit: usize,
    ) -> Result<OrderedEmPage, Error> {
        let has_conditions = filter.has_conditions() || min_fullness > 0;
        // One EM more than the page shows whether another page follows.
        let most = if has_conditions { LOOKED_AT_ONCE * LOOKS_MAX } else { limit.saturating_add(1) };
        let places = order.places(overview, filter.application_name.as_ref(), after, most);
        let (mut shown, mut last) = (Vec::new(), None::<&EmPlace>);
        for some in places.chunks(LOOKED_AT_ONCE) {
            let named: Vec<_> = some.iter().map(|place| place.em.clone()).collect();
            let mut found = self.ems_by_name(&named).await?;
            for place in some {
                let is_shown = |(em, status): &(Em, Option<EmStatus>)| {
                    em.fullness_percent() >= min_fullness.into() && filter.matches(em, status.as_ref())
                };
                let matching = found.remove(&place.em).filter(is_shown);
                if matching.is_some() && shown.len() == limit {
                    return Ok(OrderedEmPage { shown, next: last.cloned() });
                }
                shown.extend(matching);
                last = Some(place);
            }
        }
        Ok(OrderedEmPage { shown, next: last.filter(|_| places.len() == most).cloned() })
    }
}
