//! `linkis_em_meta_data`: kinds of EMs (application names), and the policy of each. Callers: [`super::limit`],
//! registration and policy changes.

use std::{collections::BTreeMap, time::Duration};

use sqlx::{PgConnection, PgExecutor};

use rm_model::{name::Name, policy::Policy, selector::Placement};

use super::{StoreError, rows::TableName};

const TABLE: TableName = TableName("linkis_em_meta_data");

/// Returns all policies by application name.
pub async fn read(executor: impl PgExecutor<'_>) -> Result<BTreeMap<Name, Policy>, StoreError> {
    let rows: Vec<(String, String, Vec<String>, String, i32)> = sqlx::query_as(
        "-- policy::read
        SELECT em_name, resource_request_policy, required_labels, placement, em_new_after_ms FROM linkis_em_meta_data
        ORDER BY em_name",
    )
    .fetch_all(executor)
    .await?;
    let policy = |(name, checks, required_labels, placement, new_after): (String, String, Vec<String>, String, i32)| {
        let placement = Placement::parse(&placement)
            .ok_or_else(|| StoreError::inconsistent(TABLE.0, format!("{name}: {placement}")))?;
        let new_after = Duration::from_millis(u64::try_from(new_after).unwrap_or_default());
        let policy =
            Policy::parse(&checks).with(required_labels.into_iter().collect(), placement).with_em_new_after(new_after);
        Ok((TABLE.name("em_name", &name)?, policy))
    };
    rows.into_iter().map(policy).collect()
}

/// Inserts the default policy, with all limits, for kinds of EMs that have none.
pub async fn insert(connection: &mut PgConnection, application_names: &[&str]) -> Result<(), StoreError> {
    sqlx::query(
        "-- policy::insert
        INSERT INTO linkis_em_meta_data (em_name, resource_request_policy)
        SELECT DISTINCT em_name, $2 FROM unnest($1::text[]) AS d (em_name) ORDER BY 1 ON CONFLICT DO NOTHING",
    )
    .bind(application_names)
    .bind(Policy::default().to_string())
    .execute(connection)
    .await?;
    Ok(())
}

/// Inserts or replaces the policy of a kind of EMs.
pub async fn upsert(connection: &mut PgConnection, application_name: &Name, policy: &Policy) -> Result<(), StoreError> {
    sqlx::query(
        "-- policy::upsert
        INSERT INTO linkis_em_meta_data (em_name, resource_request_policy, required_labels, placement, em_new_after_ms)
        VALUES ($1, $2, $3, $4, $5)
        ON CONFLICT (em_name) DO UPDATE SET resource_request_policy = excluded.resource_request_policy,
            required_labels = excluded.required_labels, placement = excluded.placement,
            em_new_after_ms = excluded.em_new_after_ms",
    )
    .bind(application_name.as_str())
    .bind(policy.to_string())
    .bind(policy.required_labels().iter().map(String::as_str).collect::<Vec<_>>())
    .bind(policy.placement().as_str())
    .bind(i32::try_from(policy.em_new_after().as_millis()).unwrap_or(i32::MAX))
    .execute(connection)
    .await?;
    Ok(())
}
