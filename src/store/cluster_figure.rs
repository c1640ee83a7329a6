//! `linkis_rm_cluster_figure`: what one instance works out of the cluster for all of them to tell.

use std::time::Duration;

use sqlx::PgExecutor;
use time::OffsetDateTime;

use super::StoreError;

/// Sums over the cluster.
pub const CLUSTER: &str = "cluster";

/// What the last audit found.
pub const AUDIT: &str = "audit";

/// What was worked out.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// As JSON.
    pub json: String,
    /// When, by the database's clock.
    pub at: OffsetDateTime,
}

/// Writes it in place of what was there.
pub async fn write(executor: impl PgExecutor<'_>, name: &str, figure: &Figure) -> Result<(), StoreError> {
    sqlx::query(
        "-- cluster_figure::write
        INSERT INTO linkis_rm_cluster_figure (name, figures, work_time) VALUES ($1, $2::text::jsonb, $3)
        ON CONFLICT (name) DO UPDATE SET figures = excluded.figures, work_time = excluded.work_time",
    )
    .bind(name)
    .bind(&figure.json)
    .bind(figure.at)
    .execute(executor)
    .await?;
    Ok(())
}

/// Has it worked out anew as soon as somebody looks whether it is time: it stays until then.
pub async fn is_outdated(executor: impl PgExecutor<'_>, name: &str) -> Result<(), StoreError> {
    sqlx::query(
        "-- cluster_figure::is_outdated
        UPDATE linkis_rm_cluster_figure SET work_time = 'epoch' WHERE name = $1",
    )
    .bind(name)
    .execute(executor)
    .await?;
    Ok(())
}

/// Whether it was worked out longer ago than that; `None` if it never was.
pub async fn is_older(executor: impl PgExecutor<'_>, name: &str, age: Duration) -> Result<Option<bool>, StoreError> {
    let is_older = sqlx::query_scalar(
        "-- cluster_figure::is_older
        SELECT work_time < clock_timestamp() - make_interval(secs => $2) FROM linkis_rm_cluster_figure WHERE name = $1",
    )
    .bind(name)
    .bind(age.as_secs_f64())
    .fetch_optional(executor)
    .await?;
    Ok(is_older)
}

/// What is there; `None` if it was never worked out.
pub async fn read(executor: impl PgExecutor<'_>, name: &str) -> Result<Option<Figure>, StoreError> {
    let row: Option<(String, OffsetDateTime)> = sqlx::query_as(
        "-- cluster_figure::read
        SELECT figures::text, work_time FROM linkis_rm_cluster_figure WHERE name = $1",
    )
    .bind(name)
    .fetch_optional(executor)
    .await?;
    Ok(row.map(|(json, at)| Figure { json, at }))
}
