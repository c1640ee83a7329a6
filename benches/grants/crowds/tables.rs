//! What is looked at in the service's tables, and the one row that an operator writes by hand. All statements of the crowds are here.

use linkis_rm::domain::em::EmInstance;
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

    /// How many tickets the counters of all EMs of a kind say; cheap, however many there are.
    pub async fn counted(&self, em_kind: &str) -> Result<i64, Failure> {
        let sql = "SELECT coalesce(sum((locked_resource ->> 'instances')::bigint
                + (used_resource ->> 'instances')::bigint), 0)::bigint
            FROM linkis_em_resource_meta_data WHERE em_application_name = $1";
        Ok(sqlx::query_scalar(sql).bind(em_kind).fetch_one(&self.0).await?)
    }

    /// How many tickets are stored on EMs of a kind.
    pub async fn stored(&self, em_kind: &str) -> Result<i64, Failure> {
        let sql = "SELECT count(*) FROM linkis_user_resource_meta_data WHERE em_application_name = $1";
        Ok(sqlx::query_scalar(sql).bind(em_kind).fetch_one(&self.0).await?)
    }

    /// How many tickets are stored on an EM.
    pub async fn stored_on(&self, em: &EmInstance) -> Result<i64, Failure> {
        let sql = "SELECT count(*) FROM linkis_user_resource_meta_data
            WHERE em_application_name = $1 AND em_instance = $2";
        let query = sqlx::query_scalar(sql).bind(em.application_name.as_str()).bind(em.instance.as_str());
        Ok(query.fetch_one(&self.0).await?)
    }

    /// How many counters are kept of users whose names begin so.
    pub async fn scopes_of(&self, users: &str) -> Result<i64, Failure> {
        let sql = "SELECT count(*) FROM linkis_label_resource WHERE starts_with(scope ->> 'user', $1)";
        Ok(sqlx::query_scalar(sql).bind(users).fetch_one(&self.0).await?)
    }

    /// How many resource locks are seen; none is, but for what an operator holds.
    pub async fn locks(&self) -> Result<i64, Failure> {
        Ok(sqlx::query_scalar("SELECT count(*) FROM linkis_resource_lock").fetch_one(&self.0).await?)
    }

    /// Holds an EM, as the README tells operators to.
    pub async fn hold(&self, em: &EmInstance) -> Result<(), Failure> {
        let sql = "INSERT INTO linkis_resource_lock (scope, em_application_name, em_instance) VALUES ('em', $1, $2)";
        let query = sqlx::query(sql).bind(em.application_name.as_str()).bind(em.instance.as_str());
        query.execute(&self.0).await?;
        Ok(())
    }

    /// Lets it go.
    pub async fn let_go(&self, em: &EmInstance) -> Result<(), Failure> {
        let sql =
            "DELETE FROM linkis_resource_lock WHERE scope = 'em' AND em_application_name = $1 AND em_instance = $2";
        let query = sqlx::query(sql).bind(em.application_name.as_str()).bind(em.instance.as_str());
        query.execute(&self.0).await?;
        Ok(())
    }

    /// Does what the database would do in its own time after much was written, so that it does not do it while something is measured.
    pub async fn settle(&self) -> Result<(), Failure> {
        sqlx::raw_sql("VACUUM ANALYZE").execute(&self.0).await?;
        sqlx::raw_sql("CHECKPOINT").execute(&self.0).await?;
        Ok(())
    }

    pub async fn close(&self) {
        self.0.close().await;
    }
}
