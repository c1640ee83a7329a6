//! Connections of the HTTP client: TCP, or TLS with the system's certificates or given ones.
//!
//! One timeout bounds the lookup of the name, the connection and the handshake. Caller: `http`.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use hyper::Uri;
use hyper_util::{
    client::legacy::{
        Client,
        connect::{Connected, Connection, HttpConnector},
    },
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use openssl_probe::ProbeResult;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{
        self, ClientConfig, RootCertStore,
        pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem, pem::PemObject as _},
    },
};
use tower_service::Service;

use super::http::HttpFailure;

/// Certificates of servers or of a client.
pub(super) type Certificates = Vec<CertificateDer<'static>>;

/// HTTP client that follows no redirect and uses no proxy. Its requests have no body.
pub(super) type HttpClient = Client<HttpsConnector, String>;

/// Client certificate, with the certificates of its issuers, and its key.
#[derive(Debug)]
pub(super) struct ClientIdentity {
    chain: Certificates,
    key: PrivateKeyDer<'static>,
}

impl ClientIdentity {
    /// Parses a certificate and its key; `None` if there is no certificate or no key.
    pub fn parse(certificate: &[u8], key: &[u8]) -> Option<Self> {
        let chain = certificates(certificate).ok().filter(|chain| !chain.is_empty())?;
        Some(Self { chain, key: PrivateKeyDer::from_pem_slice(key).ok()? })
    }
}

/// Parses the certificates in a text.
pub(super) fn certificates(pem: &[u8]) -> Result<Certificates, pem::Error> {
    CertificateDer::pem_slice_iter(pem).collect()
}

/// Creates a client that trusts `roots`, or the system's certificates if there are none, and authenticates with
/// `identity`.
pub(super) fn client(
    roots: Option<Certificates>,
    identity: Option<ClientIdentity>,
    connect: Duration,
) -> Result<HttpClient, rustls::Error> {
    let mut trusted = RootCertStore::empty();
    match roots {
        Some(roots) => roots.into_iter().try_for_each(|root| trusted.add(root))?,
        None => drop(trusted.add_parsable_certificates(system_certificates(openssl_probe::probe()))),
    }
    let tls = match trusted.is_empty() {
        true => None,
        false => {
            let config = ClientConfig::builder().with_root_certificates(trusted);
            let config = match identity {
                Some(ClientIdentity { chain, key }) => config.with_client_auth_cert(chain, key)?,
                None => config.with_no_client_auth(),
            };
            Some(Arc::new(config))
        }
    };
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    let connector = HttpsConnector { tcp, tls, timeout: connect };
    Ok(Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).pool_max_idle_per_host(1).build(connector))
}

/// Reads the certificates that the system trusts: those of `SSL_CERT_FILE` and `SSL_CERT_DIR`, if set.
fn system_certificates(system: ProbeResult) -> Certificates {
    let folders = system.cert_dir.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten();
    let files = system.cert_file.into_iter().chain(folders.flatten().map(|entry| entry.path()));
    let mut all: Certificates =
        files.filter_map(|file| CertificateDer::pem_file_iter(file).ok()).flatten().flatten().collect();
    // A folder often has the same certificates once more.
    all.sort_unstable_by(|one, other| one.as_ref().cmp(other.as_ref()));
    all.dedup();
    all
}

/// Connector of the client.
#[derive(Debug, Clone)]
pub(super) struct HttpsConnector {
    tcp: HttpConnector,
    /// `None` without any trusted certificate.
    tls: Option<Arc<ClientConfig>>,
    timeout: Duration,
}

/// Connection, encrypted or not.
pub(super) trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

impl Connection for Box<dyn Stream> {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Service<Uri> for HttpsConnector {
    type Response = TokioIo<Box<dyn Stream>>;
    type Error = HttpFailure;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, HttpFailure>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), HttpFailure>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, address: Uri) -> Self::Future {
        let Self { mut tcp, tls, timeout: most } = self.clone();
        Box::pin(async move {
            let connected = timeout(most, async {
                let stream = tcp.call(address.clone()).await.map_err(|_| HttpFailure::Connect)?.into_inner();
                if address.scheme_str() != Some("https") {
                    return Ok(Box::new(stream) as Box<dyn Stream>);
                }
                let host = address.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
                let host = ServerName::try_from(host.to_owned()).map_err(|_| HttpFailure::Address)?;
                let tls = tls.ok_or(HttpFailure::NoClient)?;
                let stream =
                    TlsConnector::from(tls).connect(host, stream).await.map_err(|error| HttpFailure::of(&error))?;
                Ok(Box::new(stream) as Box<dyn Stream>)
            });
            connected.await.unwrap_or(Err(HttpFailure::Timeout)).map(TokioIo::new)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    #[test]
    fn system_certificate_in_file_and_folder_is_read_once() {
        let folder = std::env::temp_dir().join(format!("linkis-rm-system-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let [one, other] = ["one", "other"].map(|name| rcgen::generate_simple_self_signed([name.to_owned()]).unwrap());
        let bundle = folder.join("bundle");
        fs::write(&bundle, format!("{}{}", one.cert.pem(), other.cert.pem())).unwrap();
        fs::write(folder.join("one"), one.cert.pem()).unwrap();
        fs::write(folder.join("none"), "no certificate").unwrap();
        let read = |file: Option<&Path>, folders: &[&Path]| {
            let cert_dir = folders.iter().map(|folder| folder.to_path_buf()).collect();
            system_certificates(ProbeResult { cert_file: file.map(Path::to_path_buf), cert_dir }).len()
        };
        let found = [read(Some(&bundle), &[]), read(Some(&bundle), &[&folder]), read(None, &[&folder.join("nowhere")])];
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, [2, 2, 0]);
    }
}
