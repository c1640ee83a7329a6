//! TLS of the listeners: the server certificate, and the CA for client certificates.
//!
//! Changed files are reloaded without a restart; unusable ones leave the earlier certificates in force. Handshakes are
//! bounded. Never: authenticates a call; the edge does, with [`names`].
//! Callers: the server of the root package, the edge and the HTTP listener.
//!
//! - [`expiry`]: end of validity; [`names`]: EMs that a client certificate names;
//! - `handshakes`: permits and order of the handshakes.

use std::{
    fs::File,
    io::{self, Read as _},
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use arc_swap::ArcSwap;
use rustls::{
    RootCertStore, ServerConfig,
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier},
};
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

use rm_model::FILE_POLL_INTERVAL;
use rm_telemetry::cause;

use handshakes::HandshakePermits;

pub mod expiry;
mod handshakes;
pub mod names;

/// Maximum size of a file, in bytes. It fits thousands of certificates.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Paths of certificates and keys, all in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// Server certificate with its intermediate certificates.
    pub cert: PathBuf,
    /// Key of the server certificate.
    pub key: PathBuf,
    /// CA of client certificates; `None` if clients send none.
    pub client_ca: Option<PathBuf>,
}

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{path}: cannot be read")]
    Read {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A file has no PEM of the required kind.
    #[error("{path}: contains no {what} in PEM")]
    Pem {
        /// The file.
        path: PathBuf,
        /// Required kind.
        what: &'static str,
    },
    /// A certificate is invalid or does not match its key.
    #[error("{path}: its certificate cannot be used")]
    Certificate {
        /// File of the certificate.
        path: PathBuf,
        /// Error of the library.
        source: rustls::Error,
    },
    /// The CA file cannot verify client certificates.
    #[error("{path}: contains no usable certificate authority")]
    ClientCa {
        /// The file.
        path: PathBuf,
        /// Error of the library.
        source: VerifierBuilderError,
    },
}

/// Configurations of handshakes.
#[derive(Debug)]
struct TlsConfigs {
    grpc: Arc<ServerConfig>,
    http: Arc<ServerConfig>,
    expiry: CertificateExpiry,
}

/// Earliest end of validity in each file; `None` without one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CertificateExpiry {
    /// End of the server certificates.
    pub cert: Option<OffsetDateTime>,
    /// End of the CA of client certificates.
    pub client_ca: Option<OffsetDateTime>,
}

/// State of the files at one read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FileFingerprint {
    /// SHA-256 of their content.
    Hash([u8; 32]),
    /// Unreadable.
    Unreadable,
}

/// Certificates in force.
#[derive(Debug)]
pub struct Tls {
    files: TlsFiles,
    /// State of the files at the first read.
    first: FileFingerprint,
    current: ArcSwap<TlsConfigs>,
    turns: HandshakePermits,
    reloads: AtomicU64,
    failed_reloads: AtomicU64,
}

impl Tls {
    /// Reads the files for the first time.
    ///
    /// # Errors
    /// Files that cannot be read or used.
    pub fn read(files: TlsFiles) -> Result<Arc<Self>, TlsError> {
        let contents = FileContents::read(&files)?;
        let (current, first) =
            (ArcSwap::from_pointee(contents.configs(&files)?), FileFingerprint::Hash(contents.hash()));
        let (turns, reloads, failed_reloads) = (HandshakePermits::default(), AtomicU64::new(0), AtomicU64::new(0));
        Ok(Arc::new(Self { files, first, current, turns, reloads, failed_reloads }))
    }

    /// Performs the handshake of a gRPC connection from `address`.
    ///
    /// # Errors
    /// A failed handshake.
    pub async fn grpc<S>(&self, stream: S, address: Option<IpAddr>) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let acceptor = self.current.load().grpc.clone().into();
        self.turns.handshake(&acceptor, stream, address).await
    }

    /// Performs the handshake of an HTTP connection, without a client certificate: health probes have none.
    ///
    /// # Errors
    /// A failed handshake.
    pub async fn http<S>(&self, stream: S, address: Option<IpAddr>) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let acceptor = self.current.load().http.clone().into();
        self.turns.handshake(&acceptor, stream, address).await
    }

    /// Returns the expiry of the certificates in force.
    pub fn expiry(&self) -> CertificateExpiry {
        self.current.load().expiry
    }

    /// Returns the number of successful reloads.
    pub fn reloads(&self) -> u64 {
        self.reloads.load(Ordering::Relaxed)
    }

    /// Returns the number of failed reloads.
    pub fn failed_reloads(&self) -> u64 {
        self.failed_reloads.load(Ordering::Relaxed)
    }

    /// Reloads changed files until the server stops. Unusable files leave the certificates in force unchanged.
    pub async fn follow(self: Arc<Self>, stopping: CancellationToken) {
        let mut seen = self.first;
        while stopping.run_until_cancelled(tokio::time::sleep(FILE_POLL_INTERVAL)).await.is_some() {
            let (tls, before) = (self.clone(), seen);
            // A file may be on a disk that does not respond.
            let looked = tokio::task::spawn_blocking(move || tls.look(before));
            match stopping.run_until_cancelled(looked).await {
                Some(Ok(now)) => seen = now,
                Some(Err(error)) => tracing::error!(%error, "cannot check the certificate files"),
                None => return,
            }
        }
    }

    /// Reloads the files if their state differs from `before`. Returns their state.
    fn look(&self, before: FileFingerprint) -> FileFingerprint {
        let contents = FileContents::read(&self.files);
        let seen =
            contents.as_ref().map_or(FileFingerprint::Unreadable, |contents| FileFingerprint::Hash(contents.hash()));
        if seen == before {
            return seen;
        }
        match contents.and_then(|contents| contents.configs(&self.files)) {
            Ok(configs) => {
                self.current.store(Arc::new(configs));
                self.reloads.fetch_add(1, Ordering::Relaxed);
                tracing::info!("certificates changed: new connections use the new ones");
            }
            Err(error) => {
                self.failed_reloads.fetch_add(1, Ordering::Relaxed);
                let error = cause(&error);
                tracing::error!(
                    error,
                    "certificates changed and cannot be used: the certificates before stay in force"
                );
            }
        }
        seen
    }
}

/// Content of the files.
struct FileContents {
    cert: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

impl FileContents {
    fn read(files: &TlsFiles) -> Result<Self, TlsError> {
        let client_ca = files.client_ca.as_ref().map(read).transpose()?;
        Ok(Self { cert: read(&files.cert)?, key: read(&files.key)?, client_ca })
    }

    fn hash(&self) -> [u8; 32] {
        let part = |bytes: &[u8]| -> [u8; 32] { Sha256::digest(bytes).into() };
        let client_ca = self.client_ca.as_deref().map(part);
        let parts = [Some(part(&self.cert)), Some(part(&self.key)), client_ca];
        parts.into_iter().flatten().fold(Sha256::new(), |hash, part| hash.chain_update(part)).finalize().into()
    }

    fn configs(&self, files: &TlsFiles) -> Result<TlsConfigs, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let verifier = match (&files.client_ca, &self.client_ca) {
            (Some(path), Some(pem)) => {
                let ca_error = |source| TlsError::ClientCa { path: path.clone(), source };
                let roots = Arc::new(roots(path, pem)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone());
                // A client without a certificate can use a token.
                Some(verifier.allow_unauthenticated().build().map_err(ca_error)?)
            }
            _ => None,
        };
        let config = |verifier: Option<Arc<_>>, protocol: &[u8]| {
            let unusable = |source| TlsError::Certificate { path: files.cert.clone(), source };
            let builder = versions(provider.clone()).map_err(unusable)?;
            let verifies_clients = verifier.is_some();
            let builder = match verifier {
                Some(verifier) => builder.with_client_cert_verifier(verifier),
                None => builder.with_no_client_auth(),
            };
            let (cert, key) = (certificates(&files.cert, &self.cert)?, self.key(&files.key)?);
            let mut config = builder.with_single_cert(cert, key).map_err(unusable)?;
            config.alpn_protocols = vec![protocol.to_vec()];
            if verifies_clients {
                // A resumed session would skip the check of the client certificate.
                config.session_storage = Arc::new(NoServerSessionStorage {});
                config.send_tls13_tickets = 0;
            }
            Ok(Arc::new(config))
        };
        Ok(TlsConfigs { grpc: config(verifier, b"h2")?, http: config(None, b"http/1.1")?, expiry: self.expiry(files)? })
    }

    fn expiry(&self, files: &TlsFiles) -> Result<CertificateExpiry, TlsError> {
        let earliest = |path: &Path, pem: &[u8]| Ok(expiry::earliest(&certificates(path, pem)?));
        let client_ca = files.client_ca.as_ref().zip(self.client_ca.as_ref());
        let client_ca = client_ca.map(|(path, pem)| earliest(path, pem)).transpose()?.flatten();
        Ok(CertificateExpiry { cert: earliest(&files.cert, &self.cert)?, client_ca })
    }

    fn key(&self, path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
        PrivateKeyDer::from_pem_slice(&self.key)
            .map_err(|_| TlsError::Pem { path: path.to_owned(), what: "private key" })
    }
}

/// Returns a builder for TLS 1.2 and 1.3.
fn versions(
    provider: Arc<CryptoProvider>,
) -> Result<rustls::ConfigBuilder<ServerConfig, rustls::WantsVerifier>, rustls::Error> {
    ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()
}

fn read(path: &PathBuf) -> Result<Vec<u8>, TlsError> {
    let failed = |source| TlsError::Read { path: path.clone(), source };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(FILE_BYTES_MAX).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

/// Returns all certificates of a file.
///
/// # Errors
/// [`TlsError::Pem`] if the file has none.
fn certificates(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.ok().filter(|found| !found.is_empty());
    found.ok_or_else(|| TlsError::Pem { path: path.to_owned(), what: "certificate" })
}

fn roots(path: &Path, pem: &[u8]) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path, pem)? {
        let unusable = |source| TlsError::Certificate { path: path.to_owned(), source };
        roots.add(certificate).map_err(unusable)?;
    }
    Ok(roots)
}
