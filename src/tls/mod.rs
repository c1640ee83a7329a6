//! TLS: the certificate and key that are shown, and the certificates by which callers' own are believed; read again when their files
//! change, so that nothing has to be started anew for them.
//!
//! - [`expiry`]: when certificates are over; [`names`]: who a caller's certificate is for;
//! - `turns`: whose handshake is computed next.

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

use crate::files::LOOK_INTERVAL;

use turns::Turns;

pub mod expiry;
pub mod names;
mod turns;

/// The largest file that is read: thousands of certificates.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Where certificates and keys are; all in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// The certificate that is shown, and those between it and a root.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// By which callers' certificates are believed; `None` if they are not asked for any.
    pub client_ca: Option<PathBuf>,
}

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{path}: cannot be read")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file holds no PEM of the kind.
    #[error("{path}: holds no {what} in PEM")]
    Pem {
        /// Which.
        path: PathBuf,
        /// What it should hold.
        what: &'static str,
    },
    /// A certificate is none, or does not go together with its key.
    #[error("{path}: its certificate cannot be used")]
    Certificate {
        /// Where the certificate is.
        path: PathBuf,
        /// Why not.
        source: rustls::Error,
    },
    /// No caller's certificate can be believed by these.
    #[error("{path}: nobody's certificate can be believed by it")]
    ClientCa {
        /// Which file.
        path: PathBuf,
        /// Why not.
        source: VerifierBuilderError,
    },
}

/// What handshakes are made with.
#[derive(Debug)]
struct Configs {
    grpc: Arc<ServerConfig>,
    http: Arc<ServerConfig>,
    expiry: Expiry,
}

/// When the first certificate of each file is over; `None` where there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expiry {
    /// Of those that are shown.
    pub cert: Option<OffsetDateTime>,
    /// Of those by which callers' own are believed.
    pub client_ca: Option<OffsetDateTime>,
}

/// What the files were like at a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    /// SHA-256 of what they hold.
    Hash([u8; 32]),
    /// They cannot be read.
    Unreadable,
}

/// The certificates in force.
#[derive(Debug)]
pub struct Tls {
    files: Files,
    /// What the files were like at the first look.
    first: Seen,
    current: ArcSwap<Configs>,
    turns: Turns,
    reloads: AtomicU64,
    failed_reloads: AtomicU64,
}

impl Tls {
    /// Reads them for the first time.
    ///
    /// # Errors
    /// If they cannot be used.
    pub fn read(files: Files) -> Result<Arc<Self>, TlsError> {
        let contents = Contents::read(&files)?;
        let (current, first) = (ArcSwap::from_pointee(contents.configs(&files)?), Seen::Hash(contents.hash()));
        let (turns, reloads, failed_reloads) = (Turns::default(), AtomicU64::new(0), AtomicU64::new(0));
        Ok(Arc::new(Self { files, first, current, turns, reloads, failed_reloads }))
    }

    /// Encrypts a connection of gRPC from `address`.
    ///
    /// # Errors
    /// If the other side does not go along.
    pub async fn grpc<S>(&self, stream: S, address: Option<IpAddr>) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let acceptor = self.current.load().grpc.clone().into();
        self.turns.handshake(&acceptor, stream, address).await
    }

    /// Encrypts a connection of HTTP: whoever looks whether an instance is alive has no certificate.
    ///
    /// # Errors
    /// If the other side does not go along.
    pub async fn http<S>(&self, stream: S, address: Option<IpAddr>) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let acceptor = self.current.load().http.clone().into();
        self.turns.handshake(&acceptor, stream, address).await
    }

    /// When the certificates in force are over.
    pub fn expiry(&self) -> Expiry {
        self.current.load().expiry
    }

    /// How often files that had changed were taken up.
    pub fn reloads(&self) -> u64 {
        self.reloads.load(Ordering::Relaxed)
    }

    /// How often they could not be used.
    pub fn failed_reloads(&self) -> u64 {
        self.failed_reloads.load(Ordering::Relaxed)
    }

    /// Takes up what changes, until the server stops. What cannot be used leaves what was before in force.
    pub async fn follow(self: Arc<Self>, stopping: CancellationToken) {
        let mut seen = self.first;
        while stopping.run_until_cancelled(tokio::time::sleep(LOOK_INTERVAL)).await.is_some() {
            let (tls, before) = (self.clone(), seen);
            // Files may be on a disk that does not answer.
            let looked = tokio::task::spawn_blocking(move || tls.look(before));
            match stopping.run_until_cancelled(looked).await {
                Some(Ok(now)) => seen = now,
                Some(Err(error)) => tracing::error!(%error, "cannot look at the certificates"),
                None => return,
            }
        }
    }

    /// Takes up what has changed since the files were like `before`; tells what they are like now.
    fn look(&self, before: Seen) -> Seen {
        let contents = Contents::read(&self.files);
        let seen = contents.as_ref().map_or(Seen::Unreadable, |contents| Seen::Hash(contents.hash()));
        if seen == before {
            return seen;
        }
        match contents.and_then(|contents| contents.configs(&self.files)) {
            Ok(configs) => {
                self.current.store(Arc::new(configs));
                self.reloads.fetch_add(1, Ordering::Relaxed);
                tracing::info!("certificates have changed: new connections get the new ones");
            }
            Err(error) => {
                self.failed_reloads.fetch_add(1, Ordering::Relaxed);
                let error = &error as &dyn std::error::Error;
                tracing::error!(error, "certificates have changed and cannot be used: those before stay in force");
            }
        }
        seen
    }
}

/// What stands in the files.
struct Contents {
    cert: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

impl Contents {
    fn read(files: &Files) -> Result<Self, TlsError> {
        let client_ca = files.client_ca.as_ref().map(read).transpose()?;
        Ok(Self { cert: read(&files.cert)?, key: read(&files.key)?, client_ca })
    }

    fn hash(&self) -> [u8; 32] {
        let part = |bytes: &[u8]| -> [u8; 32] { Sha256::digest(bytes).into() };
        let client_ca = self.client_ca.as_deref().map(part);
        let parts = [Some(part(&self.cert)), Some(part(&self.key)), client_ca];
        parts.into_iter().flatten().fold(Sha256::new(), |hash, part| hash.chain_update(part)).finalize().into()
    }

    fn configs(&self, files: &Files) -> Result<Configs, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let verifier = match (&files.client_ca, &self.client_ca) {
            (Some(path), Some(pem)) => {
                let ca_error = |source| TlsError::ClientCa { path: path.clone(), source };
                let roots = Arc::new(roots(path, pem)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone());
                // Whoever has no certificate shows a token.
                Some(verifier.allow_unauthenticated().build().map_err(ca_error)?)
            }
            _ => None,
        };
        let config = |verifier: Option<Arc<_>>, protocol: &[u8]| {
            let unusable = |source| TlsError::Certificate { path: files.cert.clone(), source };
            let builder = versions(provider.clone()).map_err(unusable)?;
            let asks = verifier.is_some();
            let builder = match verifier {
                Some(verifier) => builder.with_client_cert_verifier(verifier),
                None => builder.with_no_client_auth(),
            };
            let (cert, key) = (certificates(&files.cert, &self.cert)?, self.key(&files.key)?);
            let mut config = builder.with_single_cert(cert, key).map_err(unusable)?;
            config.alpn_protocols = vec![protocol.to_vec()];
            if asks {
                // Of a session that is taken up again, nobody would look at the certificate again.
                config.session_storage = Arc::new(NoServerSessionStorage {});
                config.send_tls13_tickets = 0;
            }
            Ok(Arc::new(config))
        };
        Ok(Configs { grpc: config(verifier, b"h2")?, http: config(None, b"http/1.1")?, expiry: self.expiry(files)? })
    }

    fn expiry(&self, files: &Files) -> Result<Expiry, TlsError> {
        let earliest = |path: &Path, pem: &[u8]| Ok(expiry::earliest(&certificates(path, pem)?));
        let client_ca = files.client_ca.as_ref().zip(self.client_ca.as_ref());
        let client_ca = client_ca.map(|(path, pem)| earliest(path, pem)).transpose()?.flatten();
        Ok(Expiry { cert: earliest(&files.cert, &self.cert)?, client_ca })
    }

    fn key(&self, path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
        PrivateKeyDer::from_pem_slice(&self.key)
            .map_err(|_| TlsError::Pem { path: path.to_owned(), what: "private key" })
    }
}

/// TLS 1.2 and 1.3.
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

/// All certificates of a file; there has to be one.
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
