//! Tickets that the task `reclaim` may choose: those of the longest idle engines, and the newest used ones. Each read is a page, so that
//! many tickets that a policy exempts hide no other ones for long.
//! Callers: this task, and the idle amounts of refusals.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    StoreError,
    rows::{column, em_columns},
};
use rm_model::{em::EmInstance, name::Name};

/// Places where requests are short.
#[derive(Debug, Default)]
pub struct ReclaimPlaces {
    /// EMs.
    pub ems: BTreeSet<EmInstance>,
    /// Users, for scopes that name one.
    pub users: BTreeSet<Name>,
    /// Whether a scope without a user is among them.
    pub any_user: bool,
}

/// Minimum number of tickets that are read for each of many places.
const OF_ONE_MIN: i64 = 16;

/// Multiples of the tickets of one place: the number for scopes without a user, and in total.
const OF_ALL_TIMES: i64 = 4;
const IN_TOTAL_TIMES: i64 = 16;

/// Position of a ticket in the order of idle engines, the longest idle one first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct IdlePosition {
    /// Time since which its engine is idle.
    pub since: OffsetDateTime,
    /// The ticket.
    pub ticket_id: Uuid,
}

/// Position of a ticket in the order of used tickets, the newest first.
pub type UsedPosition = Reverse<Uuid>;

/// Tickets of a page.
#[derive(Debug)]
pub struct ReclaimablePage<P> {
    /// The tickets, in their order.
    pub tickets: Vec<Uuid>,
    /// Position after which the next page begins; `None` after the last page. The page contains all tickets before it, in each place.
    pub next: Option<P>,
}

/// Ticket of a page, and the number of its place.
struct PageRow<P> {
    place: i64,
    ticket_id: Uuid,
    position: P,
}

impl<P: Ord + Copy> ReclaimablePage<P> {
    /// Creates a page of up to `of_one` tickets of each place.
    fn new(rows: &[PageRow<P>], of_one: i64) -> Self {
        let mut by_place = BTreeMap::<i64, (i64, P)>::new();
        for row in rows {
            let (count, last) = by_place.entry(row.place).or_insert((0, row.position));
            (*count, *last) = (*count + 1, row.position);
        }
        let is_full = |place: i64, count: i64| count >= if place == ANY_USER { of_one * OF_ALL_TIMES } else { of_one };
        let full = by_place.iter().filter(|(place, (count, _))| is_full(**place, *count)).map(|(_, (_, last))| *last);
        let in_total = i64::try_from(rows.len()).unwrap_or(i64::MAX);
        let last = rows.last().filter(|_| in_total >= of_one * IN_TOTAL_TIMES).map(|row| row.position);
        Self { tickets: rows.iter().map(|row| row.ticket_id).collect(), next: full.chain(last).min() }
    }
}

impl<P> ReclaimablePage<P> {
    /// Appends a later page.
    pub fn append(&mut self, later: Self) {
        self.tickets.extend(later.tickets);
        self.next = later.next;
    }
}

/// Number of the place of scopes without a user.
const ANY_USER: i64 = 0;

/// Returns the tickets of the engines that have been idle for the longest time, after a position: up to `of_one` in each of `places`, four
/// times as many for scopes without a user, and sixteen times as many in total.
pub async fn longest_idle(
    connection: &mut PgConnection,
    places: &ReclaimPlaces,
    after: Option<IdlePosition>,
    of_one: i64,
) -> Result<ReclaimablePage<IdlePosition>, StoreError> {
    let (application_names, instances) = em_columns(&places.ems);
    let rows: Vec<(i64, Uuid, OffsetDateTime)> = sqlx::query_as(
        r#"-- user_resource::longest_idle
        SELECT place, ticket_id, idle_since FROM (
            SELECT k.place, t.ticket_id, t.idle_since
            FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS k (em_application_name, em_instance, place)
            CROSS JOIN LATERAL (
                SELECT t.ticket_id, t.idle_since FROM linkis_user_resource_meta_data t
                WHERE t.em_application_name = k.em_application_name AND t.em_instance = k.em_instance AND t.idle_since IS NOT NULL
                    AND (t.idle_since, t.ticket_id) > ($8, $9)
                ORDER BY t.em_application_name, t.em_instance, t.idle_since, t.ticket_id LIMIT $5) t
            UNION ALL
            SELECT -k.place, t.ticket_id, t.idle_since FROM unnest($3::text[]) WITH ORDINALITY AS k (name, place)
            CROSS JOIN LATERAL (
                SELECT t.ticket_id, t.idle_since FROM linkis_user_resource_meta_data t
                WHERE t."user" = k.name AND t.idle_since IS NOT NULL AND (t.idle_since, t.ticket_id) > ($8, $9)
                ORDER BY t."user", t.idle_since, t.ticket_id LIMIT $5) t
            UNION ALL
            SELECT 0, t.ticket_id, t.idle_since FROM (
                SELECT ticket_id, idle_since FROM linkis_user_resource_meta_data
                WHERE $4 AND idle_since IS NOT NULL AND (idle_since, ticket_id) > ($8, $9)
                ORDER BY idle_since, ticket_id LIMIT $6) t
        ) d ORDER BY idle_since, ticket_id LIMIT $7"#,
    )
    .bind(application_names)
    .bind(instances)
    .bind(column(&places.users.iter().collect::<Vec<_>>(), |name| name.as_str()))
    .bind(places.any_user)
    .bind(of_one)
    .bind(of_one * OF_ALL_TIMES)
    .bind(of_one * IN_TOTAL_TIMES)
    .bind(after.map_or(OffsetDateTime::UNIX_EPOCH, |after| after.since))
    .bind(after.map_or(Uuid::nil(), |after| after.ticket_id))
    .fetch_all(connection)
    .await?;
    let row = |(place, ticket_id, since)| PageRow { place, ticket_id, position: IdlePosition { since, ticket_id } };
    Ok(ReclaimablePage::new(&rows.into_iter().map(row).collect::<Vec<_>>(), of_one))
}

/// Returns the newest used tickets, by the times of their requests, in each of `places`: those that were requested up to `until`, after a
/// position. Their numbers are those of [`longest_idle`], but each of many places has fewer, so that none takes the room of another one.
pub async fn newest_used(
    connection: &mut PgConnection,
    places: &ReclaimPlaces,
    until: OffsetDateTime,
    after: Option<UsedPosition>,
    of_one: i64,
) -> Result<ReclaimablePage<UsedPosition>, StoreError> {
    let (application_names, instances) = em_columns(&places.ems);
    let count = i64::try_from(places.ems.len() + places.users.len()).unwrap_or(i64::MAX).max(1);
    let of_each = (of_one * IN_TOTAL_TIMES / count).clamp(OF_ONE_MIN, of_one);
    let last = after.map_or(last_id(until), |Reverse(after)| {
        last_id(until).min(Uuid::from_u128(after.as_u128().saturating_sub(1)))
    });
    let rows: Vec<(i64, Uuid, bool)> = sqlx::query_as(
        // The limits bound the rows that are read, also where many tickets are locked.
        r#"-- user_resource::newest_used
        SELECT place, ticket_id, is_used FROM (
            SELECT k.place, t.ticket_id, t.is_used
            FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS k (em_application_name, em_instance, place)
            CROSS JOIN LATERAL (
                SELECT t.ticket_id, t.used_time IS NOT NULL AS is_used FROM linkis_user_resource_meta_data t
                WHERE t.em_application_name = k.em_application_name AND t.em_instance = k.em_instance AND t.ticket_id <= $8
                ORDER BY t.em_application_name DESC, t.em_instance DESC, t.ticket_id DESC LIMIT $5) t
            UNION ALL
            SELECT -k.place, t.ticket_id, t.is_used FROM unnest($3::text[]) WITH ORDINALITY AS k (name, place)
            CROSS JOIN LATERAL (
                SELECT t.ticket_id, t.used_time IS NOT NULL AS is_used FROM linkis_user_resource_meta_data t
                WHERE t."user" = k.name AND t.ticket_id <= $8 ORDER BY t."user" DESC, t.ticket_id DESC LIMIT $5) t
            UNION ALL
            SELECT 0, t.ticket_id, true FROM (
                SELECT ticket_id FROM linkis_user_resource_meta_data
                WHERE $4 AND used_time IS NOT NULL AND ticket_id <= $8 ORDER BY ticket_id DESC LIMIT $6) t
        ) d ORDER BY ticket_id DESC LIMIT $7"#,
    )
    .bind(application_names)
    .bind(instances)
    .bind(column(&places.users.iter().collect::<Vec<_>>(), |name| name.as_str()))
    .bind(places.any_user)
    .bind(of_each)
    .bind(of_one * OF_ALL_TIMES)
    .bind(of_one * IN_TOTAL_TIMES)
    .bind(last)
    .fetch_all(connection)
    .await?;
    let row =
        |(place, ticket_id, _): &_| PageRow { place: *place, ticket_id: *ticket_id, position: Reverse(*ticket_id) };
    let page = ReclaimablePage::new(&rows.iter().map(row).collect::<Vec<_>>(), of_each);
    let tickets = rows.into_iter().filter(|(_, _, is_used)| *is_used).map(|(_, ticket_id, _)| ticket_id).collect();
    Ok(ReclaimablePage { tickets, ..page })
}

/// Returns the last ticket id of a time: ids begin with the milliseconds of their requests.
fn last_id(time: OffsetDateTime) -> Uuid {
    let milliseconds = u64::try_from(time.unix_timestamp_nanos() / 1_000_000).unwrap_or_default();
    uuid::Builder::from_unix_timestamp_millis(milliseconds, &[0xFF; 10]).into_uuid()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page of tickets at these places, in the order of their numbers.
    fn page_of(places: &[i64], of_one: i64) -> ReclaimablePage<usize> {
        let row = |(position, place): (usize, &i64)| PageRow { place: *place, ticket_id: Uuid::nil(), position };
        ReclaimablePage::new(&places.iter().enumerate().map(row).collect::<Vec<_>>(), of_one)
    }

    #[test]
    fn next_page_begins_after_last_ticket_of_first_full_place() {
        assert_eq!(page_of(&[1, 1, -1, 2], 3).next, None, "no place is full");
        assert_eq!(
            page_of(&[1, -1, 1, -1, 1, 2, -1], 3).next,
            Some(4),
            "the next page repeats later tickets of other places"
        );
        assert_eq!(page_of(&[ANY_USER; 11], 3).next, None);
        assert_eq!(page_of(&[ANY_USER; 12], 3).next, Some(11));
        let many: Vec<i64> = (1..=16).collect();
        assert_eq!(page_of(&many, 1).next, Some(0), "each place is full");
        let many: Vec<i64> = (1..=48).collect();
        assert_eq!(page_of(&many, 3).next, Some(47), "the page is full");
    }

    #[test]
    fn last_id_of_time_follows_ids_until_then() {
        let time = OffsetDateTime::from_unix_timestamp_nanos(1_700_000_000_123_456_789).unwrap();
        let id_of = |milliseconds: u64| {
            let at = u64::try_from(time.unix_timestamp_nanos() / 1_000_000).unwrap() + milliseconds;
            Uuid::new_v7(uuid::Timestamp::from_unix(uuid::NoContext, at / 1000, (at % 1000) as u32 * 1_000_000))
        };
        assert!(id_of(0) <= last_id(time) && last_id(time) < id_of(1));
    }
}
