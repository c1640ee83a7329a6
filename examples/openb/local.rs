//! Service for one replay: a private PostgreSQL in a temporary folder, and a server on a free port.

use std::{error::Error, net::SocketAddr, path::PathBuf, time::Duration};

use linkis_rm::server::{Options, SecuritySettings, Server, ServerError, ServerExit, listen};
use rm_devpg::{EmbeddedPostgres, EmbeddedSettings};
use rm_edge::{edge::EdgeBounds, resource_manager::RequestTimeouts};
use rm_external::allowed::AllowedHosts;
use rm_service::heartbeat::LivenessTimeouts;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const ANY_FREE_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

/// Default settings of the `linkis-rm` program.
const OPTIONS: Options = Options {
    times: RequestTimeouts {
        lock_ttl: Duration::from_secs(600),
        request_timeout: Duration::from_secs(30),
        max_wait: Duration::from_secs(600),
    },
    liveness: LivenessTimeouts::DEFAULT,
    history: Duration::from_secs(7 * 24 * 3600),
    drain_timeout: Duration::from_secs(10),
    shutdown_delay: Duration::ZERO,
    bounds: EdgeBounds::DEFAULT,
    security: SecuritySettings::OPEN,
    external_hosts: AllowedHosts::NONE,
    migrates: true,
};

/// A running service.
#[derive(Debug)]
pub struct Local {
    pub address: String,
    stop: CancellationToken,
    serving: JoinHandle<Result<ServerExit, ServerError>>,
    postgres: EmbeddedPostgres,
    data_dir: PathBuf,
}

impl Local {
    pub async fn start() -> Result<Self, Box<dyn Error>> {
        let data_dir = std::env::temp_dir().join(format!("linkis-rm-openb-{}", Uuid::new_v4().simple()));
        let settings = EmbeddedSettings { data_dir: data_dir.clone(), server_options: vec![] };
        let postgres = match EmbeddedPostgres::start(settings).await {
            Ok(postgres) => postgres,
            Err(error) => {
                remove(&data_dir);
                return Err(error.into());
            }
        };
        match Self::serve(&postgres).await {
            Ok((address, stop, serving)) => Ok(Self { address, stop, serving, postgres, data_dir }),
            Err(error) => {
                postgres.stop().await;
                remove(&data_dir);
                Err(error)
            }
        }
    }

    async fn serve(
        postgres: &EmbeddedPostgres,
    ) -> Result<(String, CancellationToken, JoinHandle<Result<ServerExit, ServerError>>), Box<dyn Error>> {
        let listener = listen(ANY_FREE_PORT).await?;
        let server = Server::open(listener, None, postgres.connect_options(), OPTIONS).await?;
        let (address, stop) = (format!("http://{}", server.address()?), CancellationToken::new());
        let serving = tokio::spawn(server.serve(stop.clone().cancelled_owned()));
        Ok((address, stop, serving))
    }

    /// Stops the server, then the database, and removes their data.
    pub async fn stop(self) -> Result<(), Box<dyn Error>> {
        self.stop.cancel();
        let served = self.serving.await;
        self.postgres.stop().await;
        remove(&self.data_dir);
        served??;
        Ok(())
    }
}

fn remove(data_dir: &PathBuf) {
    match std::fs::remove_dir_all(data_dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            eprintln!("{} cannot be removed, please do: {error}", data_dir.display());
        }
        _ => {}
    }
}
