//! Search in the history: by index where partitions have one, else by scanning a bounded number of lines per page.
//!
//! Caller: `usage`.

use sqlx::PgConnection;
use time::OffsetDateTime;

use crate::error::Error;
use rm_model::action::ActionRecord;
use rm_store::{
    action_record::{self, ActionKey, NumberRange},
    history_partition,
    session::within_timeout,
};

/// Number of lines to scan per page: at first, because matches are mostly recent, and at most. Each line may be on a separate
/// database page.
const LINES_LOOKED_FIRST: i64 = 200;
const LINES_LOOKED_MAX: i64 = 3000;

/// Maximum delay between a line's time and its number: from the clock read of its batch to its insertion.
const LATE: time::Duration = time::Duration::seconds(5);

/// Narrows `numbers` to those that lines of the filter's time range may have.
pub(super) async fn span(
    connection: &mut PgConnection,
    filter: &action_record::ActionFilter,
    numbers: NumberRange,
) -> Result<NumberRange, Error> {
    let NumberRange { mut after, mut last } = numbers;
    if let Some(from) = filter.from {
        let first = within_timeout(action_record::number_before(&mut *connection, from.saturating_sub(LATE))).await?;
        after = after.max(first);
    }
    if let Some(to) = filter.to {
        let end = within_timeout(action_record::number_before(&mut *connection, to.saturating_add(LATE))).await?;
        last = last.min(end);
    }
    Ok(NumberRange { after, last: last.max(after) })
}

/// Result of a search.
pub(super) struct SearchPage {
    /// Lines in the requested order.
    pub lines: Vec<ActionRecord>,
    /// Numbers that were examined.
    pub looked: NumberRange,
}

/// Returns up to `limit` matching lines of `span`: by an index, or by a bounded scan.
pub(super) async fn find(
    connection: &mut PgConnection,
    filter: &action_record::ActionFilter,
    span: NumberRange,
    newest_first: bool,
    limit: i64,
) -> Result<SearchPage, Error> {
    if filter.ticket_id.is_some() {
        let lines = within_timeout(action_record::list_matching(connection, filter, span, newest_first, limit)).await?;
        return Ok(SearchPage { lines, looked: span });
    }
    let few = limit.saturating_add(LINES_LOOKED_FIRST).min(LINES_LOOKED_MAX);
    let found = scan(connection, filter, span, newest_first, (limit, few)).await?;
    if found.looked == span || count(&found.lines) >= limit {
        return Ok(found);
    }
    let Some(key) = filter.key() else {
        return scan(connection, filter, span, newest_first, (limit, LINES_LOOKED_MAX)).await;
    };
    // One part has indexes, the other is scanned.
    let indexes = within_timeout(history_partition::indexed(connection)).await?;
    let edge = indexes.map_or(0, |indexes| indexes.below.saturating_sub(1)).clamp(span.after, span.last);
    let (indexed, rest) = (NumberRange { last: edge, ..span }, NumberRange { after: edge, ..span });
    let mut found = SearchPage { lines: Vec::new(), looked: span };
    for part in if newest_first { [rest, indexed] } else { [indexed, rest] } {
        let left = limit.saturating_sub(count(&found.lines));
        let SearchPage { lines, looked } = match indexes.filter(|_| part == indexed) {
            Some(indexes) => find_by_key(connection, (filter, &key), (part, indexes.until), newest_first, left).await?,
            None => scan(connection, filter, part, newest_first, (left, LINES_LOOKED_MAX)).await?,
        };
        found.lines.extend(lines);
        // Earlier parts were examined completely.
        found.looked = match newest_first {
            true => NumberRange { after: looked.after, ..span },
            false => NumberRange { last: looked.last, ..span },
        };
        if looked != part || count(&found.lines) >= limit {
            break;
        }
    }
    Ok(found)
}

fn count(lines: &[ActionRecord]) -> i64 {
    i64::try_from(lines.len()).unwrap_or(i64::MAX)
}

/// Returns up to `limit` matching lines of `span`, where each partition has an index. Partitions end at full hours.
async fn find_by_key(
    connection: &mut PgConnection,
    by: (&action_record::ActionFilter, &ActionKey),
    span: (NumberRange, OffsetDateTime),
    newest_first: bool,
    limit: i64,
) -> Result<SearchPage, Error> {
    let found = action_record::list_by_key(connection, by, span, newest_first, (limit, LINES_LOOKED_MAX));
    let (lines, looked) = within_timeout(found).await?;
    Ok(SearchPage { lines, looked })
}

/// Returns up to `limit` matching lines among the first `many` of `span`.
async fn scan(
    connection: &mut PgConnection,
    filter: &action_record::ActionFilter,
    span: NumberRange,
    newest_first: bool,
    (limit, many): (i64, i64),
) -> Result<SearchPage, Error> {
    let looked = within_timeout(action_record::cut(&mut *connection, span, newest_first, many)).await?;
    let lines = within_timeout(action_record::list_matching(connection, filter, looked, newest_first, limit)).await?;
    Ok(SearchPage { lines, looked })
}
