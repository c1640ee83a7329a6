//! Where the keys of an issuer come from: a file that is looked at, or an address that is asked.

use std::{
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use arc_swap::ArcSwap;
use secrecy::SecretString;
use sha2::{Digest as _, Sha256};
use tokio::{
    sync::Notify,
    time::{Instant, sleep, sleep_until},
};

use crate::{
    external::{
        Address,
        allowed::AllowedHosts,
        http::{Failure, Http},
    },
    files::LOOK_INTERVAL,
    metrics::Metrics,
};

use super::{
    config::{Issuer, Source},
    keys::{Keys, KeysError},
};

/// The most that is read of keys, certificates or a token.
const BYTES_MAX: u64 = 1 << 20;

/// How often an address is asked, and how often at most if somebody shows a JWT with a key that is not known.
const ASK_INTERVAL: Duration = Duration::from_secs(60);
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(2);

/// Why keys cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// A file cannot be read.
    #[error("{path}: cannot be read")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file holds something else.
    #[error("{path}: {source}")]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        source: KeysError,
    },
    /// An address did not answer.
    #[error("{address} {failure}")]
    Fetch {
        /// Which.
        address: String,
        /// Why not.
        failure: Failure,
    },
    /// An address wants to know who asks.
    #[error("{address} answered {status}: it wants a token, or another; see token_file")]
    Unauthorized {
        /// Which.
        address: String,
        /// What it answered.
        status: u16,
    },
    /// It answered something else.
    #[error("{address}: what it answers {source}")]
    Answer {
        /// Which.
        address: String,
        /// What is wrong.
        source: KeysError,
    },
}

/// An issuer, and its keys as they are now.
#[derive(Debug)]
pub struct Issuing {
    pub issuer: Issuer,
    keys: ArcSwap<Keys>,
    /// What the keys were read from, by its hash; `None` if it could not be read.
    seen: Mutex<Option<[u8; 32]>>,
    /// Somebody has shown a JWT with a key that is not known.
    unknown: Notify,
}

impl Issuing {
    /// Without any keys.
    pub fn new(issuer: Issuer) -> Self {
        Self { issuer, keys: ArcSwap::default(), seen: Mutex::default(), unknown: Notify::new() }
    }

    /// The same keys for another configuration of the issuer; what goes on under them goes on its own way.
    pub fn again(&self, issuer: Issuer) -> Self {
        let (keys, seen) = (self.keys.load().apart(), *self.seen());
        Self { issuer, keys: ArcSwap::from_pointee(keys), seen: Mutex::new(seen), unknown: Notify::new() }
    }

    /// Its keys.
    pub fn keys(&self) -> Arc<Keys> {
        self.keys.load_full()
    }

    /// Whether somebody has to be asked for its keys.
    pub fn is_elsewhere(&self) -> bool {
        matches!(self.issuer.source, Source::Address { .. })
    }

    /// Has its keys asked for before it is time.
    pub fn ask_soon(&self) {
        self.unknown.notify_one();
    }

    /// Ends whatever goes on under its keys.
    pub fn end(&self) {
        self.keys.load().end_others(&Keys::default());
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Option<[u8; 32]>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes up its keys, if they are in a file; tells whether they have changed.
    ///
    /// # Errors
    /// If they cannot be used; what was before stays in force.
    pub fn read_file(&self) -> Result<bool, SourceError> {
        let Source::File(path) = &self.issuer.source else { return Ok(false) };
        let json = read(path, BYTES_MAX);
        let seen = json.as_ref().ok().map(|json| Sha256::digest(json).into());
        let before = std::mem::replace(&mut *self.seen(), seen);
        if seen == before && seen.is_some() {
            return Ok(false);
        }
        let json = json.map_err(|source| SourceError::Read { path: path.clone(), source })?;
        self.take_up(&json).map_err(|source| SourceError::File { path: path.clone(), source })?;
        Ok(true)
    }

    fn take_up(&self, json: &[u8]) -> Result<(), KeysError> {
        let before = self.keys.load_full();
        let now = Arc::new(Keys::read(json)?.after(&before));
        self.keys.store(now.clone());
        before.end_others(&now);
        Ok(())
    }

    /// Asks for its keys once; says and counts what came of it.
    pub async fn ask(self: Arc<Self>, allowed: AllowedHosts, metrics: Metrics) {
        let Source::Address { address, ca, token } = &self.issuer.source else { return };
        let taken = self.fetch(address, ca.as_deref(), token.as_deref(), allowed).await;
        self.tell(&metrics, taken);
    }

    fn tell(&self, metrics: &Metrics, taken: Result<bool, SourceError>) {
        let (issuer, keys) = (&self.issuer.name, self.keys.load().len());
        match taken {
            Ok(false) => {}
            Ok(true) => {
                metrics.jwt.reloads.inc();
                tracing::info!(issuer, keys, "the keys of an issuer of JWTs have changed and are in force");
            }
            Err(error) => {
                metrics.jwt.reload_failures.inc();
                let error = &error as &dyn std::error::Error;
                tracing::error!(
                    issuer,
                    keys,
                    error,
                    "the keys of an issuer of JWTs cannot be had: those before stay in force"
                );
            }
        }
    }

    async fn fetch(
        &self,
        address: &Address,
        ca: Option<&Path>,
        token: Option<&Path>,
        allowed: AllowedHosts,
    ) -> Result<bool, SourceError> {
        let ca = match ca {
            Some(path) => Some(read_aside(path).await?),
            None => None,
        };
        let token = match token {
            // As it is now: whoever issues it renews it.
            Some(path) => Some(SecretString::from(String::from_utf8_lossy(&read_aside(path).await?).trim())),
            None => None,
        };
        let most = usize::try_from(BYTES_MAX).unwrap_or(usize::MAX);
        let own = || address.as_str().to_owned();
        let failed = |failure| match failure {
            Failure::Unauthorized(status) => SourceError::Unauthorized { address: own(), status },
            failure => SourceError::Fetch { address: own(), failure },
        };
        // Made anew each time, so that it believes what stands in the file then, and keeps no connection.
        let json = Http::believing(allowed, ca).get_document(address, token.as_ref(), most).await.map_err(failed)?;
        let seen = Some(Sha256::digest(&json).into());
        if std::mem::replace(&mut *self.seen(), seen) == seen {
            return Ok(false);
        }
        self.take_up(&json).map_err(|source| SourceError::Answer { address: own(), source })?;
        Ok(true)
    }

    /// Takes up keys that change, for as long as this is polled.
    pub async fn follow(self: Arc<Self>, allowed: AllowedHosts, metrics: Metrics) {
        match &self.issuer.source {
            Source::File(_) => self.follow_file(metrics).await,
            Source::Address { .. } => self.follow_address(allowed, metrics).await,
        }
    }

    async fn follow_file(self: Arc<Self>, metrics: Metrics) {
        let mut was_read = true;
        loop {
            sleep(LOOK_INTERVAL).await;
            let issuing = self.clone();
            let Ok(taken) = tokio::task::spawn_blocking(move || issuing.read_file()).await else { return };
            // A file that is away is told once.
            let is_read = !matches!(taken, Err(SourceError::Read { .. }));
            if is_read || was_read {
                self.tell(&metrics, taken);
            }
            was_read = is_read;
        }
    }

    async fn follow_address(self: Arc<Self>, allowed: AllowedHosts, metrics: Metrics) {
        let mut asked = Instant::now();
        // Who has none yet asks at once.
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

/// What stands in a file of at most so many bytes.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    match u64::try_from(bytes.len()) {
        Ok(length) if length <= most => Ok(bytes),
        _ => Err(io::Error::other(format!("it has more than {most} bytes"))),
    }
}
