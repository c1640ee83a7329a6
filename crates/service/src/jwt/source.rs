//! Key source of an issuer: a file that is polled, or an address that is fetched.
//!
//! Never: replaces usable keys after a failure.
//! Caller: `jwt`.

use std::{
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use arc_swap::ArcSwap;
use secrecy::SecretString;
use sha2::{Digest as _, Sha256};
use tokio::{
    sync::Notify,
    time::{Instant, sleep, sleep_until},
};

use crate::lock::lock;
use rm_external::{
    ServerAddress,
    allowed::AllowedHosts,
    http::{ClusterHttp, HttpFailure},
};
use rm_model::FILE_POLL_INTERVAL;
use rm_telemetry::cause;
use rm_telemetry::metrics::Metrics;

use super::{
    config::{Issuer, KeySource},
    keys::{IssuerKeys, KeysError},
};

/// Maximum size of a key set, certificate or token file, in bytes.
const BYTES_MAX: u64 = 1 << 20;

/// Interval between fetches of an address, and its minimum after a JWT with an unknown key.
const ASK_INTERVAL: Duration = Duration::from_secs(60);
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(2);

/// Reason why keys are not available.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// A file cannot be read.
    #[error("{path}: cannot be read")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// A file does not contain usable keys.
    #[error("{path}: {source}")]
    File {
        /// Path of the file.
        path: PathBuf,
        /// The error in the keys.
        source: KeysError,
    },
    /// A fetch failed.
    #[error("{address} {failure}")]
    Fetch {
        /// The address.
        address: String,
        /// The reason.
        failure: HttpFailure,
    },
    /// An address requires a token.
    #[error("{address} answered {status}: it requires a token, or rejects this one; see token_file")]
    Unauthorized {
        /// The address.
        address: String,
        /// HTTP status of the response.
        status: u16,
    },
    /// The response does not contain usable keys.
    #[error("{address}: its reply {source}")]
    Answer {
        /// The address.
        address: String,
        /// The error in the keys.
        source: KeysError,
    },
}

/// Issuer with its current keys.
#[derive(Debug)]
pub struct IssuerState {
    pub issuer: Issuer,
    keys: ArcSwap<IssuerKeys>,
    /// Hash of the last key set; `None` if it could not be read.
    seen: Mutex<Option<[u8; 32]>>,
    /// Notified of a JWT with an unknown key.
    unknown: Notify,
}

impl IssuerState {
    /// Creates an issuer without keys.
    pub fn new(issuer: Issuer) -> Self {
        Self { issuer, keys: ArcSwap::default(), seen: Mutex::default(), unknown: Notify::new() }
    }

    /// Creates an issuer with the same keys for another configuration. Streams under the copied keys end independently of the
    /// old ones.
    pub fn again(&self, issuer: Issuer) -> Self {
        let (keys, seen) = (self.keys.load().apart(), *lock(&self.seen));
        Self { issuer, keys: ArcSwap::from_pointee(keys), seen: Mutex::new(seen), unknown: Notify::new() }
    }

    /// Returns the current keys.
    pub fn keys(&self) -> Arc<IssuerKeys> {
        self.keys.load_full()
    }

    /// Whether the keys are fetched from an address.
    pub fn is_elsewhere(&self) -> bool {
        matches!(self.issuer.source, KeySource::Address { .. })
    }

    /// Requests an early fetch of the keys.
    pub fn ask_soon(&self) {
        self.unknown.notify_one();
    }

    /// Ends all streams under the keys of this issuer.
    pub fn end(&self) {
        self.keys.load().end_others(&IssuerKeys::default());
    }

    /// Applies the key file, if the source is one. Returns whether the keys have changed.
    ///
    /// # Errors
    /// [`SourceError`] if the file is not usable; the previous keys then stay in force.
    pub fn read_file(&self) -> Result<bool, SourceError> {
        let KeySource::File(path) = &self.issuer.source else { return Ok(false) };
        let json = read(path, BYTES_MAX);
        let seen = json.as_ref().ok().map(|json| Sha256::digest(json).into());
        let before = std::mem::replace(&mut *lock(&self.seen), seen);
        if seen == before && seen.is_some() {
            return Ok(false);
        }
        let json = json.map_err(|source| SourceError::Read { path: path.clone(), source })?;
        self.take_up(&json).map_err(|source| SourceError::File { path: path.clone(), source })?;
        Ok(true)
    }

    fn take_up(&self, json: &[u8]) -> Result<(), KeysError> {
        let before = self.keys.load_full();
        let now = Arc::new(IssuerKeys::read(json)?.after(&before));
        self.keys.store(now.clone());
        before.end_others(&now);
        Ok(())
    }

    /// Fetches the keys once. Logs and counts the result.
    pub async fn ask(self: Arc<Self>, allowed: AllowedHosts, metrics: Metrics) {
        let KeySource::Address { address, ca, token } = &self.issuer.source else { return };
        let taken = self.fetch(address, ca.as_deref(), token.as_deref(), allowed).await;
        self.tell(&metrics, taken);
    }

    fn tell(&self, metrics: &Metrics, taken: Result<bool, SourceError>) {
        let (issuer, keys) = (&self.issuer.name, self.keys.load().len());
        match taken {
            Ok(false) => {}
            Ok(true) => {
                metrics.jwt.reloads.inc();
                tracing::info!(issuer, keys, "the changed keys of a JWT issuer are in force");
            }
            Err(error) => {
                metrics.jwt.reload_failures.inc();
                let error = cause(&error);
                tracing::error!(
                    issuer,
                    keys,
                    error,
                    "the keys of a JWT issuer cannot be read; the previous ones stay in force"
                );
            }
        }
    }

    async fn fetch(
        &self,
        address: &ServerAddress,
        ca: Option<&Path>,
        token: Option<&Path>,
        allowed: AllowedHosts,
    ) -> Result<bool, SourceError> {
        let ca = match ca {
            Some(path) => Some(read_aside(path).await?),
            None => None,
        };
        let token = match token {
            // Read anew for each fetch, because its issuer renews it.
            Some(path) => Some(SecretString::from(String::from_utf8_lossy(&read_aside(path).await?).trim())),
            None => None,
        };
        let most = usize::try_from(BYTES_MAX).unwrap_or(usize::MAX);
        let own = || address.as_str().to_owned();
        let failed = |failure| match failure {
            HttpFailure::Unauthorized(status) => SourceError::Unauthorized { address: own(), status },
            failure => SourceError::Fetch { address: own(), failure },
        };
        // Created anew for each fetch, so that it uses the current certificates and retains no connection.
        let json =
            ClusterHttp::believing(allowed, ca).get_document(address, token.as_ref(), most).await.map_err(failed)?;
        let seen = Some(Sha256::digest(&json).into());
        if std::mem::replace(&mut *lock(&self.seen), seen) == seen {
            return Ok(false);
        }
        self.take_up(&json).map_err(|source| SourceError::Answer { address: own(), source })?;
        Ok(true)
    }

    /// Reloads the keys when they change, while the future is polled.
    pub async fn follow(self: Arc<Self>, allowed: AllowedHosts, metrics: Metrics) {
        match &self.issuer.source {
            KeySource::File(_) => self.follow_file(metrics).await,
            KeySource::Address { .. } => self.follow_address(allowed, metrics).await,
        }
    }

    async fn follow_file(self: Arc<Self>, metrics: Metrics) {
        let mut was_read = true;
        loop {
            sleep(FILE_POLL_INTERVAL).await;
            let issuing = self.clone();
            let Ok(taken) = tokio::task::spawn_blocking(move || issuing.read_file()).await else { return };
            // A missing file is logged once.
            let is_read = !matches!(taken, Err(SourceError::Read { .. }));
            if is_read || was_read {
                self.tell(&metrics, taken);
            }
            was_read = is_read;
        }
    }

    async fn follow_address(self: Arc<Self>, allowed: AllowedHosts, metrics: Metrics) {
        let mut asked = Instant::now();
        // Fetches immediately if there are no keys.
        if self.keys.load().len() == 0 {
            self.clone().ask(allowed.clone(), metrics.clone()).await;
        }
        loop {
            tokio::select! {
                () = sleep_until(asked + ASK_INTERVAL) => {}
                () = self.unknown.notified() => sleep_until(asked + ASK_AGAIN_AFTER).await,
            }
            asked = Instant::now();
            self.clone().ask(allowed.clone(), metrics.clone()).await;
        }
    }
}

async fn read_aside(path: &Path) -> Result<Vec<u8>, SourceError> {
    let own = path.to_owned();
    let read = tokio::task::spawn_blocking(move || read(&own, BYTES_MAX)).await;
    let read = read.unwrap_or_else(|error| Err(io::Error::other(error)));
    read.map_err(|source| SourceError::Read { path: path.to_owned(), source })
}

/// Reads a file of at most `most` bytes.
///
/// # Errors
/// I/O errors, and a file that is larger.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    match u64::try_from(bytes.len()) {
        Ok(length) if length <= most => Ok(bytes),
        _ => Err(io::Error::other(format!("it has more than {most} bytes"))),
    }
}
