//! The service: the real server in a process of its own, and whether its tables agree with what it answered.

use std::time::Duration;

use linkis_rm::{
    store::embedded::Embedded,
    transport::proto::{self, limit_service_client::LimitServiceClient},
};
use sqlx::{ConnectOptions as _, PgConnection, postgres::PgConnectOptions};
use tonic::transport::Channel;

use crate::{
    Failure, Sample, Workload,
    load::{Calls, Load},
    machine,
    process::{self, Server},
};

/// The running service.
pub(crate) struct Service {
    _server: Server,
    load: Load,
    limits: LimitServiceClient<Channel>,
    database: PgConnectOptions,
    granted: u64,
}

impl Service {
    /// Starts it on a fresh database, with EMs.
    pub async fn start(database: &Embedded, workloads: &[Workload]) -> Result<Self, Failure> {
        let database = machine::create_database(database, "service").await?;
        let mut command = process::command(env!("CARGO_BIN_EXE_linkis-rm"));
        command.arg("--database-url").arg(database.to_url_lossy().as_str());
        // No ticket expires while its rows are to be counted.
        command.args(["--listen", "127.0.0.1:0", "--lock-ttl", "1d"]);
        let server = Server::start(command).await?;
        let mut load = Load::connect(server.url()).await?;
        for workload in workloads {
            load.register(*workload).await?;
        }
        let limits = LimitServiceClient::connect(server.url()).await?;
        Ok(Self { _server: server, load, limits, database, granted: 0 })
    }

    /// Limits every user, every creator, and every pair of them, so high that nothing is refused.
    pub async fn set_limits(&mut self) -> Result<(), Failure> {
        for limit in limits() {
            self.limits.set_limit(proto::SetLimitRequest { limit: Some(limit) }).await?;
        }
        Ok(())
    }

    /// Takes the limits away again.
    pub async fn delete_limits(&mut self) -> Result<(), Failure> {
        for limit in limits() {
            self.limits.delete_limit(proto::DeleteLimitRequest { limit: Some(limit) }).await?;
        }
        Ok(())
    }

    /// Grants for `window`, with so many calls in flight.
    pub async fn measure(&mut self, workload: Workload, callers: u64, window: Duration) -> Result<Sample, Failure> {
        let (sample, granted) = self.load.measure(workload, callers, window).await?;
        self.granted += granted;
        Ok(sample)
    }

    /// Begins to ask for grants; they have to be given to [`Service::finish`].
    pub fn start_calls(&self, workload: Workload, callers: u64) -> Calls {
        self.load.start(workload, callers)
    }

    /// Lets the calls under way finish.
    pub async fn finish(&mut self, calls: Calls) -> Result<(), Failure> {
        self.granted += calls.finish().await?.0;
        Ok(())
    }

    /// How large the table of resource locks and its index are, in bytes.
    pub async fn lock_table_bytes(&self) -> Result<(i64, i64), Failure> {
        let sizes = sqlx::query_as(
            "SELECT pg_relation_size('linkis_resource_lock'), pg_relation_size('linkis_resource_lock_key')",
        );
        Ok(sizes.fetch_one(&mut self.database.connect().await?).await?)
    }

    /// Fails unless there is one ticket per grant, the counters of every EM are the sums over its tickets, and nothing is locked.
    pub async fn check(&self) -> Result<String, Failure> {
        let mut connection = self.database.connect().await?;
        let tickets = count(&mut connection, "SELECT count(*) FROM linkis_user_resource_meta_data").await?;
        if tickets != i64::try_from(self.granted)? {
            return Err(format!("{} grants were answered, but {tickets} tickets are stored", self.granted).into());
        }
        let wrong = count(&mut connection, WRONG_COUNTERS).await?;
        if wrong > 0 {
            return Err(format!("the counters of {wrong} EMs are not the sums over their tickets").into());
        }
        let locks = count(&mut connection, "SELECT count(*) FROM linkis_resource_lock").await?;
        if locks > 0 {
            return Err(format!("{locks} resource locks were left behind").into());
        }
        let grants = crate::table::thousands(self.granted as f64);
        Ok(format!(
            "checked: {grants} grants answered = tickets stored; counters = sums over tickets on all EMs; no resource lock is left"
        ))
    }
}

fn limits() -> impl Iterator<Item = proto::Limit> {
    let labels: [&[&str]; 3] = [&["user"], &["creator"], &["user", "creator"]];
    labels.into_iter().map(|each| proto::Limit {
        each: each.iter().map(ToString::to_string).collect(),
        max: ["memory", "cores", "instances"].map(|dimension| (dimension.to_owned(), i64::MAX)).into(),
        ..Default::default()
    })
}

/// EMs whose counters are not what their tickets say.
const WRONG_COUNTERS: &str = "
    SELECT count(*) FROM linkis_em_resource_meta_data e
    LEFT JOIN (
        SELECT em_application_name, em_instance, sum((user_locked_resource ->> 'memory')::numeric) AS memory,
            sum((user_locked_resource ->> 'cores')::numeric) AS cores,
            sum((user_locked_resource ->> 'instances')::numeric) AS instances
        FROM linkis_user_resource_meta_data GROUP BY em_application_name, em_instance
    ) t USING (em_application_name, em_instance)
    CROSS JOIN LATERAL (VALUES ('memory', coalesce(t.memory, 0)), ('cores', coalesce(t.cores, 0)),
        ('instances', coalesce(t.instances, 0))) AS d (dimension, held)
    WHERE (e.locked_resource ->> dimension)::numeric IS DISTINCT FROM held
        OR (e.used_resource ->> dimension)::numeric IS DISTINCT FROM 0
        OR (e.left_resource ->> dimension)::numeric IS DISTINCT FROM (e.total_resource ->> dimension)::numeric - held";

async fn count(connection: &mut PgConnection, query: &'static str) -> Result<i64, Failure> {
    Ok(sqlx::query_scalar(query).fetch_one(connection).await?)
}
