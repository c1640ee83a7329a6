//! Service under test: the real server with one process per instance, on a separate database.

use std::path::Path;

use rm_devpg::EmbeddedPostgres;
use rm_proto::v1::{self as proto, limit_service_client::LimitServiceClient};
use sqlx::{ConnectOptions as _, postgres::PgConnectOptions};

use crate::{
    Failure, Workload, check,
    load::Load,
    machine,
    preload::{self, InitialState},
    process::{self, Server},
    secured, yarn,
};

/// Database and settings of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Site {
    /// Empty at first.
    Plain,
    /// Empty at first; every grant counts in three limited scopes.
    Limited,
    /// Empty at first; every grant uses an external queue two levels below the root.
    Queued,
    /// As [`Site::Limited`], with a million live tickets.
    Loaded,
    /// Empty at first, for the churn.
    Churn,
    /// Empty at first, with TLS and tokens.
    Secured,
}

impl Site {
    /// Returns the name of the database.
    pub fn database(self) -> &'static str {
        match self {
            Self::Plain => "service",
            Self::Limited => "limited",
            Self::Queued => "queued",
            Self::Loaded => "loaded",
            Self::Churn => "churn",
            Self::Secured => "secured",
        }
    }

    /// Returns the number of instances.
    fn instances(self) -> usize {
        if self == Self::Plain { crate::plan::INSTANCES_MAX } else { 1 }
    }

    /// Returns the label sets with a limit for each value.
    fn limits(self) -> &'static [&'static [&'static str]] {
        match self {
            Self::Limited | Self::Loaded => &[&["user"], &["creator"], &["user", "creator"]],
            _ => &[],
        }
    }
}

/// The running service.
pub(crate) struct Service {
    pub site: Site,
    servers: Vec<Server>,
    load: Load,
    database: PgConnectOptions,
    preloaded: InitialState,
}

impl Service {
    /// Starts the service on an empty database and registers the EMs. Certificates are written to `dir`, if the site
    /// has any.
    pub async fn start(
        database: &EmbeddedPostgres,
        site: Site,
        workloads: &[Workload],
        dir: &Path,
    ) -> Result<Self, Failure> {
        let database = machine::create_database(database, site.database()).await?;
        let mut servers = Vec::new();
        if site == Site::Secured {
            return Self::start_secured(database, dir, workloads).await;
        }
        for _ in 0..site.instances() {
            servers.push(start_server(&database, &["--external-hosts", "127.0.0.1"]).await?);
        }
        let urls: Vec<String> = servers.iter().map(Server::url).collect();
        set_limits(&urls[0], site.limits()).await?;
        let preloaded = match site {
            Site::Loaded => preload::run(&database).await?,
            _ => InitialState::default(),
        };
        let mut load = Load::connect(&urls, None).await?;
        if site == Site::Queued {
            yarn::put(&urls[0], &database, "").await?;
            load.use_queue();
        }
        for workload in workloads {
            load.register(*workload).await?;
        }
        Ok(Self { site, servers, load, database, preloaded })
    }

    async fn start_secured(database: PgConnectOptions, dir: &Path, workloads: &[Workload]) -> Result<Self, Failure> {
        let files = secured::Files::write(dir)?;
        let server = start_server(&database, &files.arguments()).await?;
        let credentials = secured::Credentials::new(&files, &database)?;
        let mut load = Load::connect(&[server.url()], Some(&credentials)).await?;
        for workload in workloads {
            load.register(*workload).await?;
        }
        Ok(Self { site: Site::Secured, servers: vec![server], load, database, preloaded: InitialState::default() })
    }

    pub fn process_ids(&self) -> Vec<u32> {
        self.servers.iter().map(Server::process_id).collect()
    }

    /// Returns the first instance.
    pub fn server(&self) -> Result<&Server, Failure> {
        self.servers.first().ok_or_else(|| "no instance".into())
    }

    pub fn load(&self) -> &Load {
        &self.load
    }

    /// Returns the size of the table of resource locks with its index, in bytes.
    pub async fn lock_table_bytes(&self) -> Result<i64, Failure> {
        let size = sqlx::query_scalar("SELECT pg_total_relation_size('linkis_resource_lock')");
        Ok(size.fetch_one(&mut self.database.connect().await?).await?)
    }

    /// Checks that the tables agree with the replies and with each other.
    pub async fn check(&self) -> Result<check::CheckResult, Failure> {
        let tickets = i64::try_from(self.load.live())? + self.preloaded.tickets;
        check::run(&mut self.database.connect().await?, self.site.database(), tickets).await
    }
}

/// Sets a limit for every value, or combination of values, of these labels. The maximum is so high that nothing is
/// refused.
async fn set_limits(url: &str, labels: &[&[&str]]) -> Result<(), Failure> {
    let mut client = LimitServiceClient::connect(url.to_owned()).await?;
    for each in labels {
        let limit = proto::Limit {
            each: each.iter().map(ToString::to_string).collect(),
            max: ["memory", "cores", "instances"].map(|dimension| (dimension.to_owned(), i64::MAX)).into(),
            ..Default::default()
        };
        client.set_limit(proto::SetLimitRequest { limit: Some(limit), ..Default::default() }).await?;
    }
    Ok(())
}

/// Starts one instance with additional options.
pub(crate) async fn start_server(database: &PgConnectOptions, arguments: &[&str]) -> Result<Server, Failure> {
    let mut command = process::command(env!("CARGO_BIN_EXE_linkis-rm"));
    command.arg("--database-url").arg(database.to_url_lossy().as_str());
    // A long lock time, so that no ticket expires before the check.
    command.args(["--listen", "127.0.0.1:0", "--lock-ttl", "1d"]).args(arguments);
    Server::start(command).await
}
