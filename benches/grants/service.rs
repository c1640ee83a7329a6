//! Service under test: the real server with one process per instance, on a separate database.

use std::path::Path;

use rm_devpg::EmbeddedPostgres;
use sqlx::{ConnectOptions as _, postgres::PgConnectOptions};

use crate::{
    Failure, Workload, check,
    committers::{self, COMMITTERS, SharedScope},
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
    /// Empty at first; its instances have different numbers of committers.
    Committers(SharedScope),
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
            Self::Committers(sharing) => sharing.database(),
        }
    }

    /// Returns the number of committers of each instance.
    fn committers(self) -> Vec<usize> {
        match self {
            Self::Plain => vec![1; crate::plan::INSTANCES_MAX],
            Self::Committers(_) => COMMITTERS.to_vec(),
            _ => vec![1],
        }
    }

    /// Returns the label sets with a limit for each value.
    fn limits(self) -> &'static [&'static [&'static str]] {
        match self {
            Self::Limited | Self::Loaded => &[&["user"], &["creator"], &["user", "creator"]],
            Self::Committers(sharing) => sharing.limits(),
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
        for committers in site.committers() {
            let arguments = ["--external-hosts", "127.0.0.1", "--committers", &committers.to_string()];
            servers.push(start_server(&database, &arguments).await?);
        }
        let urls: Vec<String> = servers.iter().map(Server::url).collect();
        committers::set_limits(&urls[0], site.limits()).await?;
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

/// Starts one instance with additional options.
pub(crate) async fn start_server(database: &PgConnectOptions, arguments: &[&str]) -> Result<Server, Failure> {
    let mut command = process::command(env!("CARGO_BIN_EXE_linkis-rm"));
    command.arg("--database-url").arg(database.to_url_lossy().as_str());
    // A long lock time, so that no ticket expires before the check.
    command.args(["--listen", "127.0.0.1:0", "--lock-ttl", "1d"]).args(arguments);
    Server::start(command).await
}
