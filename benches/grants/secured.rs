//! Credentials for a service with TLS and tokens, whose cost is compared with a service without them.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use hyper_util::rt::TokioIo;
use rcgen::CertifiedKey;
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, ServerName},
};
use sqlx::{ConnectOptions as _, postgres::PgConnectOptions};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::{
    metadata::{Ascii, MetadataValue},
    transport::{Channel, Endpoint},
};

use crate::{Failure, process};

/// Name in the certificate.
const HOST: &str = "rm.example";

/// A certificate and its key.
pub(crate) struct Files {
    cert: PathBuf,
    key: PathBuf,
    der: CertificateDer<'static>,
}

impl Files {
    /// Generates the certificate and writes the files.
    pub fn write(dir: &Path) -> Result<Self, Failure> {
        let CertifiedKey { cert, signing_key } = rcgen::generate_simple_self_signed([HOST.to_owned()])?;
        let files = Self { cert: dir.join("cert.pem"), key: dir.join("key.pem"), der: cert.der().clone() };
        fs::write(&files.cert, cert.pem())?;
        fs::write(&files.key, signing_key.serialize_pem())?;
        Ok(files)
    }

    /// Returns the server options for the files.
    pub fn arguments(&self) -> [&str; 4] {
        ["--tls-cert", self.cert.to_str().unwrap_or_default(), "--tls-key", self.key.to_str().unwrap_or_default()]
    }
}

/// Token of the callers, and their TLS configuration.
pub(crate) struct Credentials {
    connector: TlsConnector,
    pub authorization: MetadataValue<Ascii>,
}

impl Credentials {
    /// Creates a token with the role admin.
    pub fn new(files: &Files, database: &PgConnectOptions) -> Result<Self, Failure> {
        let mut create = process::command(env!("CARGO_BIN_EXE_linkis-rm"));
        create.args(["tokens", "create", "--name", "bench", "--owner", "bench", "--role", "admin"]);
        let created = create.arg("--database-url").arg(database.to_url_lossy().as_str()).output()?;
        if !created.status.success() {
            return Err(format!("no token: {}", String::from_utf8_lossy(&created.stderr)).into());
        }
        let token = String::from_utf8(created.stdout)?;
        let mut authorization: MetadataValue<Ascii> = format!("Bearer {}", token.trim()).parse()?;
        authorization.set_sensitive(true);
        let mut roots = RootCertStore::empty();
        roots.add(files.der.clone())?;
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let config = config.with_safe_default_protocol_versions()?.with_root_certificates(roots);
        let mut config = config.with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Self { connector: Arc::new(config).into(), authorization })
    }

    /// Connects to `endpoint` with TLS.
    pub async fn connect(&self, endpoint: &Endpoint) -> Result<Channel, Failure> {
        let connector = self.connector.clone();
        let connect = tower::service_fn(move |uri: http::Uri| {
            let connector = connector.clone();
            async move {
                let address = uri.authority().map(ToString::to_string).unwrap_or_default();
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                let host = ServerName::try_from(HOST).map_err(io::Error::other)?;
                Ok::<_, io::Error>(TokioIo::new(connector.connect(host, stream).await?))
            }
        });
        Ok(endpoint.connect_with_connector(connect).await?)
    }
}
