//! JWT authentication: verifies JWTs of configured issuers, such as Kubernetes or an OpenID Connect provider.
//!
//! A verified JWT is cached by its hash until it expires. Cheap conditions on the unverified claims reject most invalid JWTs
//! before a signature is checked. Configuration and keys are reloaded when they change.
//!
//! Never: contacts the database or an issuer to authenticate a call.
//! Callers: `rm_edge::authenticator`, and the server, which spawns [`JwtAuthenticator::follow`].
//!
//! - [`config`]: issuers, and the rights that their claims give; `claims`: the evaluation of claims;
//! - `keys`: keys of an issuer, and signatures; `source`: where keys come from; `cache`: verified JWTs.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use arc_swap::ArcSwap;
use async_recursion::async_recursion as boxed;
use jsonwebtoken::{Algorithm, dangerous::insecure_decode_claims, decode_header};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use tokio::{task::JoinSet, time::Instant};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::{lock::lock, tokens::Caller};
use rm_external::allowed::AllowedHosts;
use rm_model::{
    FILE_POLL_INTERVAL,
    access::{JWT_BYTES_MAX, JwtRejection},
    principal::Principal,
};
use rm_telemetry::cause;
use rm_telemetry::metrics::Metrics;

use cache::JwtCache;
use config::JwtConfigError;
use keys::LEEWAY_SECONDS;
use source::{IssuerState, SourceError};

mod cache;
mod claims;
pub mod config;
mod keys;
mod source;

/// Maximum size of the configuration, in bytes.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Maximum wait for keys from addresses at start; later replies are still accepted.
const FIRST_KEYS_WITHIN: Duration = Duration::from_secs(5);

/// Maximum lifetime of a JWT, in effect unlimited.
const LIFETIME_MAX: Duration = Duration::from_secs(10 * 366 * 24 * 3600);

/// Reason why JWTs cannot be verified.
#[derive(Debug, thiserror::Error)]
pub enum JwtError {
    /// The configuration file cannot be read.
    #[error("{path}: cannot be read")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The I/O error.
        source: std::io::Error,
    },
    /// The configuration is invalid.
    #[error("{path}")]
    Config {
        /// Path of the file.
        path: PathBuf,
        /// The error in the configuration.
        source: JwtConfigError,
    },
    /// The key file of an issuer is not usable.
    #[error("the keys of {issuer:?} cannot be used")]
    Keys {
        /// Name of the issuer.
        issuer: String,
        /// The error in the keys.
        source: SourceError,
    },
}

/// Authenticator of JWTs.
#[derive(Debug)]
pub struct JwtAuthenticator {
    path: PathBuf,
    allowed: AllowedHosts,
    /// Hash of the configuration at start.
    first: ConfigHash,
    issuers: ArcSwap<Vec<Arc<IssuerState>>>,
    known: Mutex<JwtCache>,
    metrics: Metrics,
}

/// SHA-256 of the configuration; `None` if it cannot be read.
type ConfigHash = Option<[u8; 32]>;

/// Result of the last reload.
#[derive(Debug, Clone, Copy)]
struct ReloadResult {
    in_force: ConfigHash,
    /// Hash of a configuration that is not usable. Retried, because keys that it names may appear, but logged once.
    unusable: Option<ConfigHash>,
}

/// Claims that are read before the signature is verified.
#[derive(Deserialize)]
struct UnverifiedClaims {
    iss: Option<String>,
    exp: Option<f64>,
}

impl JwtAuthenticator {
    /// Reads the configuration and the key files. Addresses of keys must be on `allowed` hosts.
    ///
    /// # Errors
    /// [`JwtError`] if a file cannot be read or is invalid.
    pub fn read(path: PathBuf, allowed: AllowedHosts, metrics: Metrics) -> Result<Arc<Self>, JwtError> {
        let json =
            source::read(&path, CONFIG_BYTES_MAX).map_err(|source| JwtError::Read { path: path.clone(), source })?;
        let read = config::read(&json, &allowed);
        let read = read.map_err(|source| JwtError::Config { path: path.clone(), source })?;
        let issuers: Vec<Arc<IssuerState>> =
            read.into_iter().map(|issuer| Arc::new(IssuerState::new(issuer))).collect();
        for issuing in &issuers {
            let issuer = || issuing.issuer.name.clone();
            issuing.read_file().map_err(|source| JwtError::Keys { issuer: issuer(), source })?;
        }
        let first = Some(Sha256::digest(&json).into());
        Ok(Arc::new(Self {
            path,
            allowed,
            first,
            issuers: ArcSwap::from_pointee(issuers),
            known: Mutex::default(),
            metrics,
        }))
    }

    /// Returns the caller with the JWT `shown`.
    ///
    /// # Errors
    /// The reason why the JWT is not accepted.
    pub fn find(&self, shown: &str) -> Result<Arc<Caller>, JwtRejection> {
        let found = match shown.len() > JWT_BYTES_MAX {
            true => Err(JwtRejection::TooLarge),
            false => self.find_short(shown),
        };
        found.inspect_err(|_| self.metrics.jwt.refused.inc())
    }

    fn find_short(&self, shown: &str) -> Result<Arc<Caller>, JwtRejection> {
        let hash = Sha256::digest(shown).into();
        let known = || lock(&self.known);
        if let Some(caller) = known().get(&hash) {
            return Ok(caller);
        }
        let caller = Arc::new(self.check(shown)?);
        let count = {
            let mut known = known();
            known.put(hash, caller.clone());
            known.len()
        };
        self.metrics.jwt.cached.set(i64::try_from(count).unwrap_or(i64::MAX));
        Ok(caller)
    }

    fn check(&self, shown: &str) -> Result<Caller, JwtRejection> {
        let header = decode_header(shown).map_err(|_| JwtRejection::Malformed)?;
        if header.crit.is_some() {
            return Err(JwtRejection::Malformed);
        }
        if ![Algorithm::RS256, Algorithm::ES256, Algorithm::EdDSA].contains(&header.alg) {
            return Err(JwtRejection::Algorithm);
        }
        let glance: UnverifiedClaims = insecure_decode_claims(shown).map_err(|_| JwtRejection::Malformed)?;
        let named = glance.iss.ok_or(JwtRejection::Issuer)?;
        let issuers = self.issuers.load();
        let issuing = issuers.iter().find(|issuing| issuing.issuer.issuer == named).ok_or(JwtRejection::Issuer)?;
        let left = left(glance.exp.ok_or(JwtRejection::Malformed)?).ok_or(JwtRejection::Expired)?;
        let until = Instant::now() + left.min(LIFETIME_MAX);
        let keys = issuing.keys();
        let key = keys.find(header.kid.as_deref(), header.alg).inspect_err(|bad| {
            if *bad == JwtRejection::UnknownKey {
                issuing.ask_soon();
            }
        })?;
        let claims = key.check(shown, &issuing.issuer)?;
        let (name, rights) = claims::caller(&issuing.issuer, &claims).ok_or(JwtRejection::Malformed)?;
        Ok(Caller { principal: Principal::Named(name), rights, ended: key.ended.until(until, JwtRejection::Expired) })
    }

    /// Fetches the keys from addresses, for at most `FIRST_KEYS_WITHIN`, so that an instance can authenticate callers when it
    /// starts.
    #[boxed]
    pub async fn first_keys(&self) {
        let mut asked = JoinSet::new();
        for issuing in self.issuers.load().iter().filter(|issuing| issuing.is_elsewhere()) {
            asked.spawn(issuing.clone().ask(self.allowed.clone(), self.metrics.clone()));
        }
        let all = async { while asked.join_next().await.is_some() {} };
        if tokio::time::timeout(FIRST_KEYS_WITHIN, all).await.is_err() {
            tracing::error!("the keys of an issuer are not loaded yet; its JWTs are rejected until then");
        }
    }

    /// Reloads configuration and keys when they change, until shutdown. An unusable configuration leaves the previous one in
    /// force.
    #[boxed]
    pub async fn follow(self: Arc<Self>, stopping: CancellationToken) {
        let mut following = self.follow_all();
        let mut looked = ReloadResult { in_force: self.first, unusable: None };
        while stopping.run_until_cancelled(tokio::time::sleep(FILE_POLL_INTERVAL)).await.is_some() {
            let (jwt, before) = (self.clone(), looked);
            // A blocking task: a file system may not reply.
            let looking = tokio::task::spawn_blocking(move || jwt.reload(before));
            match stopping.run_until_cancelled(looking).await {
                Some(Ok(now)) => {
                    if now.in_force != before.in_force {
                        following = self.follow_all();
                    }
                    looked = now;
                }
                Some(Err(error)) => tracing::error!(%error, "cannot read the JWT configuration"),
                None => break,
            }
        }
        drop(following);
    }

    /// Starts the reload of each issuer's keys; it ends when the handles are dropped.
    fn follow_all(&self) -> Vec<AbortOnDropHandle<()>> {
        let issuers = self.issuers.load();
        let follow = |issuing: &Arc<IssuerState>| issuing.clone().follow(self.allowed.clone(), self.metrics.clone());
        issuers.iter().map(|issuing| AbortOnDropHandle::new(tokio::spawn(follow(issuing)))).collect()
    }

    /// Applies the configuration if it has changed since `before`.
    fn reload(&self, before: ReloadResult) -> ReloadResult {
        let json = source::read(&self.path, CONFIG_BYTES_MAX);
        let seen = json.as_ref().ok().map(|json| Sha256::digest(json).into());
        if seen == before.in_force {
            return ReloadResult { unusable: None, ..before };
        }
        let read = json.map_err(|source| JwtError::Read { path: self.path.clone(), source });
        let taken = read.and_then(|json| self.apply(&json));
        match taken {
            Ok(()) => {
                self.metrics.jwt.reloads.inc();
                tracing::info!("the changed JWT configuration is in force");
                return ReloadResult { in_force: seen, unusable: None };
            }
            Err(error) if before.unusable != Some(seen) => {
                self.metrics.jwt.reload_failures.inc();
                let error = cause(&error);
                tracing::error!(error, "the changed JWT configuration cannot be used; the previous one stays in force");
            }
            Err(_) => {}
        }
        ReloadResult { unusable: Some(seen), ..before }
    }

    /// Applies a configuration. Issuers without a change retain their keys and streams.
    fn apply(&self, json: &[u8]) -> Result<(), JwtError> {
        let read = config::read(json, &self.allowed);
        let read = read.map_err(|source| JwtError::Config { path: self.path.clone(), source })?;
        let before = self.issuers.load_full();
        let mut issuers = Vec::with_capacity(read.len());
        for issuer in read {
            if let Some(same) = before.iter().find(|before| before.issuer == issuer) {
                issuers.push(same.clone());
                continue;
            }
            let name = issuer.name.clone();
            let issuing = match before.iter().find(|before| before.issuer.source == issuer.source) {
                // The keys stay, because their source may be unavailable now. Streams under the old claims end.
                Some(before) => before.again(issuer),
                None => IssuerState::new(issuer),
            };
            issuing.read_file().map_err(|source| JwtError::Keys { issuer: name, source })?;
            issuers.push(Arc::new(issuing));
        }
        let gone = before.iter().filter(|before| !issuers.iter().any(|now| Arc::ptr_eq(before, now)));
        let gone: Vec<Arc<IssuerState>> = gone.cloned().collect();
        self.issuers.store(Arc::new(issuers));
        gone.iter().for_each(|issuing| issuing.end());
        Ok(())
    }
}

/// Returns the remaining lifetime of a JWT with this `exp` (seconds since the epoch), leeway included; `None` if it has
/// expired.
fn left(end: f64) -> Option<Duration> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let end = Duration::try_from_secs_f64(end.clamp(0.0, 1e12)).ok()? + Duration::from_secs(LEEWAY_SECONDS);
    end.checked_sub(now).filter(|left| !left.is_zero())
}
