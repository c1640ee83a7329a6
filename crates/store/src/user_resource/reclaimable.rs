//! Tickets that the task `reclaim` may choose: those of the longest idle engines, and the newest used ones. Each read is bounded.
//! Callers: this task, and the idle amounts of refusals.

use std::collections::BTreeSet;

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

/// Maximum number of tickets that are returned for each EM and user, for scopes without a user, and in total.
const OF_ONE_MAX: i64 = 256;
const OF_ONE_MIN: i64 = 16;
const OF_ALL_MAX: i64 = 1000;
const IN_TOTAL_MAX: i64 = 4096;

/// Returns the tickets of the engines that have been idle for the longest time, in each of `places`.
pub async fn longest_idle(connection: &mut PgConnection, places: &ReclaimPlaces) -> Result<Vec<Uuid>, StoreError> {
    let (application_names, instances) = em_columns(&places.ems);
    let ids = sqlx::query_scalar(
        r#"-- user_resource::longest_idle
        SELECT ticket_id FROM (
            SELECT t.ticket_id, t.idle_since FROM unnest($1::text[], $2::text[]) AS k (em_application_name, em_instance)
            CROSS JOIN LATERAL (
                SELECT t.ticket_id, t.idle_since FROM linkis_user_resource_meta_data t
                WHERE t.em_application_name = k.em_application_name AND t.em_instance = k.em_instance AND t.idle_since IS NOT NULL
                ORDER BY t.em_application_name, t.em_instance, t.idle_since LIMIT $5) t
            UNION
            SELECT t.ticket_id, t.idle_since FROM unnest($3::text[]) AS k (name)
            CROSS JOIN LATERAL (
                SELECT t.ticket_id, t.idle_since FROM linkis_user_resource_meta_data t
                WHERE t."user" = k.name AND t.idle_since IS NOT NULL ORDER BY t."user", t.idle_since LIMIT $5) t
            UNION
            SELECT t.ticket_id, t.idle_since FROM (
                SELECT ticket_id, idle_since FROM linkis_user_resource_meta_data
                WHERE $4 AND idle_since IS NOT NULL ORDER BY idle_since LIMIT $6) t
        ) d ORDER BY idle_since LIMIT $7"#,
    )
    .bind(application_names)
    .bind(instances)
    .bind(column(&places.users.iter().collect::<Vec<_>>(), |name| name.as_str()))
    .bind(places.any_user)
    .bind(OF_ONE_MAX)
    .bind(OF_ALL_MAX)
    .bind(IN_TOTAL_MAX)
    .fetch_all(connection)
    .await?;
    Ok(ids)
}

/// Returns the newest used tickets, by the times of their requests, in each of `places`: those that were requested up to `until`. Each
/// of many places has fewer, so that none takes the room of another one.
pub async fn newest_used(
    connection: &mut PgConnection,
    places: &ReclaimPlaces,
    until: OffsetDateTime,
) -> Result<Vec<Uuid>, StoreError> {
    let (application_names, instances) = em_columns(&places.ems);
    let count = i64::try_from(places.ems.len() + places.users.len()).unwrap_or(i64::MAX).max(1);
    let of_one = (IN_TOTAL_MAX / count).clamp(OF_ONE_MIN, OF_ONE_MAX);
    let ids = sqlx::query_scalar(
        // The inner limits bound the rows that are read, also where many tickets are locked.
        r#"-- user_resource::newest_used
        SELECT ticket_id FROM (
            SELECT t.ticket_id FROM unnest($1::text[], $2::text[]) AS k (em_application_name, em_instance)
            CROSS JOIN LATERAL (
                SELECT t.ticket_id, t.used_time FROM linkis_user_resource_meta_data t
                WHERE t.em_application_name = k.em_application_name AND t.em_instance = k.em_instance AND t.ticket_id <= $8
                ORDER BY t.em_application_name DESC, t.em_instance DESC, t.ticket_id DESC LIMIT $5) t
            WHERE t.used_time IS NOT NULL
            UNION
            SELECT t.ticket_id FROM unnest($3::text[]) AS k (name)
            CROSS JOIN LATERAL (
                SELECT t.ticket_id, t.used_time FROM linkis_user_resource_meta_data t
                WHERE t."user" = k.name AND t.ticket_id <= $8 ORDER BY t."user" DESC, t.ticket_id DESC LIMIT $5) t
            WHERE t.used_time IS NOT NULL
            UNION
            SELECT t.ticket_id FROM (
                SELECT ticket_id FROM linkis_user_resource_meta_data
                WHERE $4 AND used_time IS NOT NULL AND ticket_id <= $8 ORDER BY ticket_id DESC LIMIT $6) t
        ) d ORDER BY ticket_id DESC LIMIT $7"#,
    )
    .bind(application_names)
    .bind(instances)
    .bind(column(&places.users.iter().collect::<Vec<_>>(), |name| name.as_str()))
    .bind(places.any_user)
    .bind(of_one)
    .bind(OF_ALL_MAX)
    .bind(IN_TOTAL_MAX)
    .bind(last_id(until))
    .fetch_all(connection)
    .await?;
    Ok(ids)
}

/// Returns the last ticket id of a time: ids begin with the milliseconds of their requests.
fn last_id(time: OffsetDateTime) -> Uuid {
    let milliseconds = u64::try_from(time.unix_timestamp_nanos() / 1_000_000).unwrap_or_default();
    uuid::Builder::from_unix_timestamp_millis(milliseconds, &[0xFF; 10]).into_uuid()
}

#[cfg(test)]
mod tests {
    use super::*;

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
