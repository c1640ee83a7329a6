//! Tables: all SQL statements of the crowds.

use rm_model::em::EmInstance;
use sqlx::{
    PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};

use crate::Failure;

const CONNECTIONS_MAX: u32 = 4;

#[derive(Debug, Clone)]
pub(crate) struct Tables(PgPool);

impl Tables {
    pub fn of(database: PgConnectOptions) -> Self {
        Self(PgPoolOptions::new().max_connections(CONNECTIONS_MAX).connect_lazy_with(database))
    }

    /// Returns the number of tickets by the counters of all EMs of a kind. The cost does not depend on the number of
    /// tickets.
    pub async fn counted(&self, em_kind: &str) -> Result<i64, Failure> {
        let sql = "SELECT coalesce(sum((locked_resource ->> 'instances')::bigint
                + (used_resource ->> 'instances')::bigint), 0)::bigint
            FROM linkis_em_resource_meta_data WHERE em_application_name = $1";
        Ok(sqlx::query_scalar(sql).bind(em_kind).fetch_one(&self.0).await?)
    }

    /// Returns the number of stored tickets on EMs of a kind.
    pub async fn stored(&self, em_kind: &str) -> Result<i64, Failure> {
        let sql = "SELECT count(*) FROM linkis_user_resource_meta_data WHERE em_application_name = $1";
        Ok(sqlx::query_scalar(sql).bind(em_kind).fetch_one(&self.0).await?)
    }

    /// Returns the number of stored tickets on an EM.
    pub async fn stored_on(&self, em: &EmInstance) -> Result<i64, Failure> {
        let sql = "SELECT count(*) FROM linkis_user_resource_meta_data
            WHERE em_application_name = $1 AND em_instance = $2";
        let query = sqlx::query_scalar(sql).bind(em.application_name.as_str()).bind(em.instance.as_str());
        Ok(query.fetch_one(&self.0).await?)
    }

    /// Returns the number of visible resource locks. Committed batches leave none.
    pub async fn locks(&self) -> Result<i64, Failure> {
        Ok(sqlx::query_scalar("SELECT count(*) FROM linkis_resource_lock").fetch_one(&self.0).await?)
    }

    /// Does the pending maintenance of the database, so that none of it happens during a measurement.
    pub async fn settle(&self) -> Result<(), Failure> {
        sqlx::raw_sql("VACUUM ANALYZE").execute(&self.0).await?;
        sqlx::raw_sql("CHECKPOINT").execute(&self.0).await?;
        Ok(())
    }

    pub async fn close(&self) {
        self.0.close().await;
    }
}
