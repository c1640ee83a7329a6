//! `linkis_external_resource_provider`: stored configuration of the external clusters. Caller: `rm_service::external`.

use secrecy::{ExposeSecret as _, SecretString};
use sqlx::{PgConnection, PgExecutor};
use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{name::Name, principal::Principal, provider::Provider};

use super::{
    StoreError, expect_rows,
    rows::{TableName, TableRow, hash, labels_json},
};

const TABLE: TableName = TableName("linkis_external_resource_provider");

/// A provider as stored.
#[derive(Debug, Clone)]
pub struct ProviderRecord {
    /// Type, name and labels of the provider.
    pub provider: Provider,
    /// Configuration of the access to the cluster, secrets included.
    pub config: SecretString,
    /// New at each write.
    pub etag: Uuid,
    /// Principal of the last write.
    pub updated_by: Principal,
    /// Time of the last write, by the clock of the database.
    pub update_time: OffsetDateTime,
}

fn provider(row: TableRow<'_>) -> Result<ProviderRecord, StoreError> {
    let provider =
        Provider { resource_type: row.name("resource_type")?, name: row.name("name")?, labels: row.labels("labels")? };
    Ok(ProviderRecord {
        provider,
        config: row.get::<String>("config")?.into(),
        etag: row.get("etag")?,
        updated_by: row.principal("updated_by")?,
        update_time: row.get("update_time")?,
    })
}

/// Excludes other writers until the transaction ends. Readers are not blocked.
pub async fn lock(connection: &mut PgConnection) -> Result<(), StoreError> {
    let lock = "LOCK TABLE linkis_external_resource_provider IN SHARE ROW EXCLUSIVE MODE";
    sqlx::raw_sql(lock).execute(connection).await?;
    Ok(())
}

/// Returns all providers, ordered by type and name; their number is small.
pub async fn read(executor: impl PgExecutor<'_>) -> Result<Vec<ProviderRecord>, StoreError> {
    let rows = sqlx::query(
        "-- external_resource_provider::read
        SELECT resource_type, name, labels::text, config, etag, updated_by, update_time
        FROM linkis_external_resource_provider ORDER BY resource_type, name",
    )
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, provider)
}

/// Inserts or replaces a provider. Returns the time of the write.
pub async fn upsert(
    connection: &mut PgConnection,
    provider: &Provider,
    config: &SecretString,
    etag: Uuid,
    by: &Principal,
) -> Result<OffsetDateTime, StoreError> {
    let labels = labels_json(&provider.labels);
    Ok(sqlx::query_scalar(
        "-- external_resource_provider::upsert
        INSERT INTO linkis_external_resource_provider
            (resource_type, name, labels, config, etag, update_time, updated_by, labels_hash)
        VALUES ($1, $2, $3::jsonb, $4, $5, clock_timestamp(), $6, $7)
        ON CONFLICT (resource_type, name) DO UPDATE SET labels = excluded.labels, config = excluded.config,
            etag = excluded.etag, update_time = excluded.update_time, updated_by = excluded.updated_by,
            labels_hash = excluded.labels_hash
        RETURNING update_time",
    )
    .bind(provider.resource_type.as_str())
    .bind(provider.name.as_str())
    .bind(&labels)
    .bind(config.expose_secret())
    .bind(etag)
    .bind(by.as_str())
    .bind(hash(&labels).as_slice())
    .fetch_one(connection)
    .await?)
}

/// Deletes an existing provider.
///
/// # Errors
/// [`StoreError::RowCount`] if it does not exist; database errors.
pub async fn delete(connection: &mut PgConnection, resource_type: &Name, name: &Name) -> Result<(), StoreError> {
    let done = sqlx::query(
        "-- external_resource_provider::delete
        DELETE FROM linkis_external_resource_provider WHERE resource_type = $1 AND name = $2",
    )
    .bind(resource_type.as_str())
    .bind(name.as_str())
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, 1, done.rows_affected())
}
