//! `linkis_rm_cluster_figure`: results that one instance computes and all instances publish. Callers: the
//! cluster-figures task and the self-audit.

use std::time::Duration;

use sqlx::PgExecutor;
use time::OffsetDateTime;

use super::StoreError;

/// Name of the sums over the cluster.
pub const CLUSTER: &str = "cluster";

/// Name of the findings of the last audit.
pub const AUDIT: &str = "audit";

/// A stored result.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterFigure {
    /// Result as JSON.
    pub json: String,
    /// Time of the computation, by the clock of the database.
    pub at: OffsetDateTime,
}

/// Inserts or replaces the result `name`.
pub async fn write(executor: impl PgExecutor<'_>, name: &str, figure: &ClusterFigure) -> Result<(), StoreError> {
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

/// Marks the result as outdated, so that the next check of its age computes it again. The stored result stays until
/// then.
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

/// Returns whether the result is older than `age`; `None` if it does not exist.
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

/// Returns the result; `None` if it does not exist.
pub async fn read(executor: impl PgExecutor<'_>, name: &str) -> Result<Option<ClusterFigure>, StoreError> {
    let row: Option<(String, OffsetDateTime)> = sqlx::query_as(
        "-- cluster_figure::read
        SELECT figures::text, work_time FROM linkis_rm_cluster_figure WHERE name = $1",
    )
    .bind(name)
    .fetch_optional(executor)
    .await?;
    Ok(row.map(|(json, at)| ClusterFigure { json, at }))
}
