//! Tickets that the task `reclaim` may choose, by place: those of the longest idle engines, and the newest used ones. Each read is a page of
//! each place.
//! Callers: this task, and the idle amounts of refusals.

use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{StoreError, rows::column};
use rm_model::{em::EmInstance, name::Name};

/// Place where requests are short.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ReclaimPlace {
    /// An EM.
    Em(EmInstance),
    /// The scopes of a user.
    User(Name),
    /// The scopes without a user: all tickets of the cell. A page is four times as long.
    Cell,
}

/// Number of pages of another place that a page of [`ReclaimPlace::Cell`] is as long as.
const CELL_TIMES: usize = 4;

impl ReclaimPlace {
    fn em(&self) -> Option<&EmInstance> {
        match self {
            Self::Em(em) => Some(em),
            Self::User(_) | Self::Cell => None,
        }
    }

    fn user(&self) -> Option<&str> {
        match self {
            Self::User(user) => Some(user.as_str()),
            Self::Em(_) | Self::Cell => None,
        }
    }

    /// Returns the number of tickets of a full page.
    pub fn page_size(&self, of_each: usize) -> usize {
        match self {
            Self::Em(_) | Self::User(_) => of_each,
            Self::Cell => of_each * CELL_TIMES,
        }
    }
}

/// Order of the tickets of a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReclaimOrder {
    /// Those of idle engines, the longest idle one first.
    LongestIdle,
    /// The used ones, the latest request first.
    NewestUsed {
        /// Time of the first request.
        until: OffsetDateTime,
    },
}

/// Position of a ticket in a [`ReclaimOrder`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReclaimPosition {
    /// Time since which its engine is idle. Without meaning in the order of the requests, which is that of the ids.
    idle_since: OffsetDateTime,
    ticket_id: Uuid,
}

/// Page of the tickets of a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacePage {
    /// The tickets, in their order.
    pub tickets: Vec<Uuid>,
    /// Position of the last ticket; `None` if no ticket follows.
    pub next: Option<ReclaimPosition>,
}

/// Row of a page.
#[derive(Debug)]
struct PageRow {
    /// Number of the place, from 1.
    place: i64,
    ticket_id: Uuid,
    idle_since: OffsetDateTime,
    is_used: bool,
}

/// Returns a page of each of `places`, after its position, with `of_each` tickets at most.
pub async fn reclaimable(
    connection: &mut PgConnection,
    order: ReclaimOrder,
    places: &[(&ReclaimPlace, Option<ReclaimPosition>)],
    of_each: usize,
) -> Result<Vec<PlacePage>, StoreError> {
    if places.is_empty() {
        return Ok(Vec::new());
    }
    let ems: Vec<Option<&EmInstance>> = places.iter().map(|(place, _)| place.em()).collect();
    let users: Vec<Option<&str>> = places.iter().map(|(place, _)| place.user()).collect();
    let first = match order {
        ReclaimOrder::LongestIdle => ReclaimPosition { idle_since: OffsetDateTime::UNIX_EPOCH, ticket_id: Uuid::nil() },
        ReclaimOrder::NewestUsed { until } => ReclaimPosition { idle_since: until, ticket_id: first_id_after(until) },
    };
    let after: Vec<_> = places.iter().map(|(_, after)| after.unwrap_or(first)).collect();
    let statement = match order {
        ReclaimOrder::LongestIdle => LONGEST_IDLE,
        ReclaimOrder::NewestUsed { .. } => NEWEST_USED,
    };
    let rows: Vec<(i64, Uuid, OffsetDateTime, bool)> = sqlx::query_as(statement)
        .bind(column(&ems, |em| em.map(|em| em.application_name.as_str())))
        .bind(column(&ems, |em| em.map(|em| em.instance.as_str())))
        .bind(users)
        .bind(after.iter().map(|after| after.idle_since).collect::<Vec<_>>())
        .bind(after.iter().map(|after| after.ticket_id).collect::<Vec<_>>())
        .bind(i64::try_from(of_each).unwrap_or(i64::MAX))
        .bind(i64::try_from(of_each * CELL_TIMES).unwrap_or(i64::MAX))
        .fetch_all(connection)
        .await?;
    let row = |(place, ticket_id, idle_since, is_used)| PageRow { place, ticket_id, idle_since, is_used };
    let mut rows = rows.into_iter().map(row).peekable();
    let page = |(number, (place, _)): (usize, &(&ReclaimPlace, _))| {
        let is_here = |row: &PageRow| usize::try_from(row.place).is_ok_and(|place| place == number + 1);
        let of_place: Vec<PageRow> = std::iter::from_fn(|| rows.next_if(is_here)).collect();
        page(&of_place, place.page_size(of_each))
    };
    Ok(places.iter().enumerate().map(page).collect())
}

/// Returns the page of one place, which is full with so many rows.
fn page(rows: &[PageRow], full: usize) -> PlacePage {
    let position = |row: &PageRow| ReclaimPosition { idle_since: row.idle_since, ticket_id: row.ticket_id };
    PlacePage {
        tickets: rows.iter().filter(|row| row.is_used).map(|row| row.ticket_id).collect(),
        next: rows.last().filter(|_| rows.len() >= full).map(position),
    }
}

const LONGEST_IDLE: &str = r#"-- user_resource::longest_idle
    SELECT k.place, t.ticket_id, t.idle_since, true AS is_used
    FROM unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[], $5::uuid[])
        WITH ORDINALITY AS k (em_application_name, em_instance, "user", idle_since, ticket_id, place)
    CROSS JOIN LATERAL (
        (SELECT t.ticket_id, t.idle_since FROM linkis_user_resource_meta_data t
        WHERE t.em_application_name = k.em_application_name AND t.em_instance = k.em_instance AND t.idle_since IS NOT NULL
            AND (t.idle_since, t.ticket_id) > (k.idle_since, k.ticket_id)
        ORDER BY t.em_application_name, t.em_instance, t.idle_since, t.ticket_id LIMIT $6)
        UNION ALL
        (SELECT t.ticket_id, t.idle_since FROM linkis_user_resource_meta_data t
        WHERE t."user" = k."user" AND t.idle_since IS NOT NULL AND (t.idle_since, t.ticket_id) > (k.idle_since, k.ticket_id)
        ORDER BY t."user", t.idle_since, t.ticket_id LIMIT $6)
        UNION ALL
        (SELECT t.ticket_id, t.idle_since FROM linkis_user_resource_meta_data t
        WHERE k.em_instance IS NULL AND k."user" IS NULL AND t.idle_since IS NOT NULL
            AND (t.idle_since, t.ticket_id) > (k.idle_since, k.ticket_id)
        ORDER BY t.idle_since, t.ticket_id LIMIT $7)) t
    ORDER BY k.place, t.idle_since, t.ticket_id"#;

/// The limits bound the rows that are read, also where many tickets are locked.
const NEWEST_USED: &str = r#"-- user_resource::newest_used
    SELECT k.place, t.ticket_id, k.idle_since, t.used_time IS NOT NULL AS is_used
    FROM unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[], $5::uuid[])
        WITH ORDINALITY AS k (em_application_name, em_instance, "user", idle_since, ticket_id, place)
    CROSS JOIN LATERAL (
        (SELECT t.ticket_id, t.used_time FROM linkis_user_resource_meta_data t
        WHERE t.em_application_name = k.em_application_name AND t.em_instance = k.em_instance AND t.ticket_id < k.ticket_id
        ORDER BY t.em_application_name DESC, t.em_instance DESC, t.ticket_id DESC LIMIT $6)
        UNION ALL
        (SELECT t.ticket_id, t.used_time FROM linkis_user_resource_meta_data t
        WHERE t."user" = k."user" AND t.ticket_id < k.ticket_id ORDER BY t."user" DESC, t.ticket_id DESC LIMIT $6)
        UNION ALL
        (SELECT t.ticket_id, t.used_time FROM linkis_user_resource_meta_data t
        WHERE k.em_instance IS NULL AND k."user" IS NULL AND t.ticket_id < k.ticket_id
        ORDER BY t.ticket_id DESC LIMIT $7)) t
    ORDER BY k.place, t.ticket_id DESC"#;

/// Returns a ticket id after all those of a time: ids begin with the milliseconds of their requests.
fn first_id_after(time: OffsetDateTime) -> Uuid {
    let milliseconds = u64::try_from(time.unix_timestamp_nanos() / 1_000_000).unwrap_or_default();
    uuid::Builder::from_unix_timestamp_millis(milliseconds + 1, &[0; 10]).into_uuid()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_without_room_left_has_next_one() {
        let row = |number| PageRow {
            place: 1,
            ticket_id: Uuid::from_u128(number),
            idle_since: OffsetDateTime::UNIX_EPOCH,
            is_used: number != 2,
        };
        let rows: Vec<PageRow> = (1..=3).map(row).collect();
        let found = [3, 4].map(|full| page(&rows, full));
        let last = ReclaimPosition { idle_since: OffsetDateTime::UNIX_EPOCH, ticket_id: Uuid::from_u128(3) };
        assert_eq!(found.each_ref().map(|page| page.next), [Some(last), None]);
        assert_eq!(found[0].tickets, [1, 3].map(Uuid::from_u128));
    }

    #[test]
    fn first_id_after_time_follows_ids_until_then() {
        let time = OffsetDateTime::from_unix_timestamp_nanos(1_700_000_000_123_456_789).unwrap();
        let id_of = |milliseconds: u64| {
            let at = u64::try_from(time.unix_timestamp_nanos() / 1_000_000).unwrap() + milliseconds;
            Uuid::new_v7(uuid::Timestamp::from_unix(uuid::NoContext, at / 1000, (at % 1000) as u32 * 1_000_000))
        };
        assert!(id_of(0) < first_id_after(time) && first_id_after(time) <= id_of(1));
    }
}
