//! Token cache: all tokens in memory, reloaded when they change.
//!
//! Lookups never read the database, regardless of the number of calls with unknown tokens. The task compares a version in the
//! database every two seconds, so each instance applies a new or revoked token within 5 s.
//!
//! Never: contains a token in clear text, only its hash.
//! Callers: `rm_edge::authenticator` (lookups); `background` runs the reload.

use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use async_recursion::async_recursion as boxed;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use rm_model::{
    access::{Rights, Unauthenticated},
    principal::Principal,
    token::TokenHash,
};
use rm_store::{
    Store, StoreError,
    session::{Session, within_short_timeout, within_timeout},
    token::{self, StoredToken},
};
use rm_telemetry::cause;

use super::background::{Step, Task};

/// Interval between comparisons of the version: the maximum time until a revocation is effective.
const PERIOD: Duration = Duration::from_secs(2);

/// Interval between reloads without a new version: rows may be deleted by hand, and clocks drift.
const READ_INTERVAL: Duration = Duration::from_secs(60);

/// Interval between writes of the last use of tokens.
const USE_INTERVAL: Duration = Duration::from_secs(60);

/// Maximum number of tokens per statement that writes the last use.
const USED_MAX: usize = 1000;

/// Caller of a call, with its rights.
#[derive(Debug, Clone)]
pub struct Caller {
    /// Principal in the history.
    pub principal: Principal,
    /// Rights of the caller.
    pub rights: Rights,
    /// Signals that the credential has ended. Long-running streams of the caller then end.
    pub ended: CallerExpiry,
}

/// Signal that a caller's credential has ended. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct CallerExpiry {
    cancelled: CancellationToken,
    why: Arc<OnceLock<Unauthenticated>>,
    /// Deadline of the credential, with the reason after it. No task is needed for it.
    until: Option<(Instant, Unauthenticated)>,
}

impl CallerExpiry {
    /// Returns the signal with the deadline `until`, after which the credential has ended for the reason `why`.
    pub fn until(&self, until: Instant, why: impl Into<Unauthenticated>) -> Self {
        Self { until: Some((until, why.into())), ..self.clone() }
    }

    /// Waits until the credential has ended. Returns the reason.
    #[boxed]
    pub async fn why(&self) -> Unauthenticated {
        let over = async {
            match self.until {
                Some((until, why)) => {
                    tokio::time::sleep_until(until).await;
                    why
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.cancelled.cancelled() => self.why.get().copied().unwrap_or(Unauthenticated::Unknown),
            why = over => why,
        }
    }

    /// Whether the credential has ended.
    pub fn is_over(&self) -> bool {
        self.cancelled.is_cancelled() || self.until.is_some_and(|(until, _)| until <= Instant::now())
    }

    /// Ends the credential for the reason `why`.
    pub(super) fn end(&self, why: Unauthenticated) {
        // The first reason is final.
        let _ = self.why.set(why);
        self.cancelled.cancel();
    }
}

/// Token in the cache.
#[derive(Debug)]
struct Token {
    id: Uuid,
    caller: Arc<Caller>,
    /// Expiry; `None` beyond the range of the clock.
    until: Option<Instant>,
    is_revoked: bool,
    /// Whether the token was used since the last write of its use.
    was_used: Arc<AtomicBool>,
}

impl Token {
    fn check(&self, now: Instant) -> Result<(), Unauthenticated> {
        match self.until {
            _ if self.is_revoked => Err(Unauthenticated::Revoked),
            Some(until) if until <= now => Err(Unauthenticated::Expired),
            _ => Ok(()),
        }
    }
}

#[derive(Debug)]
struct KnownTokens {
    by_hash: HashMap<TokenHash, Token>,
    /// Caller of calls without a token; `None` if any token exists, even an unreadable one.
    anonymous: Option<Arc<Caller>>,
}

impl KnownTokens {
    /// Creates a cache without tokens.
    fn nothing() -> Self {
        let (principal, rights, ended) = (Principal::Anonymous, Rights::of_admin(), CallerExpiry::default());
        Self { by_hash: HashMap::new(), anonymous: Some(Arc::new(Caller { principal, rights, ended })) }
    }
}

/// Token cache of an instance. Clones share it.
#[derive(Debug, Clone)]
pub struct TokenCache(Arc<ArcSwap<KnownTokens>>);

impl Default for TokenCache {
    /// Creates a cache without tokens.
    fn default() -> Self {
        Self(Arc::new(ArcSwap::from_pointee(KnownTokens::nothing())))
    }
}

impl TokenCache {
    /// Reads all tokens for the first time.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn read(store: &Store) -> Result<Self, StoreError> {
        let tokens = Self::default();
        tokens.replace(within_timeout(token::read(&store.pool().await?)).await?, Instant::now());
        Ok(tokens)
    }

    /// Returns the caller of calls without a token, with all rights. `None` if any token exists: calls without a token are then
    /// rejected.
    pub fn anonymous(&self) -> Option<Arc<Caller>> {
        self.0.load().anonymous.clone()
    }

    /// Returns the caller with the token `shown`.
    ///
    /// # Errors
    /// The reason why the token is not accepted.
    pub fn find(&self, shown: &str) -> Result<Arc<Caller>, Unauthenticated> {
        let hash = TokenHash::of(shown).ok_or(Unauthenticated::Unknown)?;
        let known = self.0.load();
        let token = known.by_hash.get(&hash).ok_or(Unauthenticated::Unknown)?;
        token.check(Instant::now())?;
        if !token.was_used.load(Ordering::Relaxed) {
            token.was_used.store(true, Ordering::Relaxed);
        }
        Ok(token.caller.clone())
    }

    /// Replaces all tokens by `stored`, which was read after `asked`.
    fn replace(&self, stored: Vec<Result<StoredToken, StoreError>>, asked: Instant) {
        let before = self.0.load_full();
        let anonymous = match &before.anonymous {
            _ if !stored.is_empty() => None,
            Some(anonymous) => Some(anonymous.clone()),
            None => KnownTokens::nothing().anonymous,
        };
        let sound = stored.into_iter().filter_map(|stored| {
            let log = |error: &StoreError| {
                tracing::error!(error = cause(error), "a token row cannot be read; its token is rejected")
            };
            stored.inspect_err(log).ok()
        });
        let by_hash = sound.map(|stored| (stored.hash, known(stored, &before, asked))).collect();
        let known = Arc::new(KnownTokens { by_hash, anonymous });
        self.0.store(known.clone());
        let gone = before.by_hash.iter().filter(|(hash, _)| !known.by_hash.contains_key(*hash));
        gone.for_each(|(_, token)| token.caller.ended.end(Unauthenticated::Unknown));
        if let (Some(anonymous), None) = (&before.anonymous, &known.anonymous) {
            anonymous.ended.end(Unauthenticated::Missing);
        }
    }

    /// Ends the streams of tokens that are revoked or expired.
    fn end_overdue(&self) {
        let now = Instant::now();
        for token in self.0.load().by_hash.values() {
            if let Err(why) = token.check(now) {
                token.caller.ended.end(why);
            }
        }
    }

    /// Returns up to [`USED_MAX`] tokens that were used since the last call.
    fn take_used(&self) -> Vec<Uuid> {
        let known = self.0.load();
        let used = known.by_hash.values().filter(|token| token.was_used.load(Ordering::Relaxed)).take(USED_MAX);
        used.map(|token| {
            token.was_used.store(false, Ordering::Relaxed);
            token.id
        })
        .collect()
    }
}

/// Converts a row. A token that was cached before keeps its end signal and its use.
fn known(stored: StoredToken, before: &KnownTokens, asked: Instant) -> Token {
    let StoredToken { id, hash, name, rights, left, is_revoked } = stored;
    let (was_used, ended) = match before.by_hash.get(&hash) {
        Some(token) => (token.was_used.clone(), token.caller.ended.clone()),
        None => Default::default(),
    };
    let caller = Arc::new(Caller { principal: Principal::Named(name), rights, ended });
    Token { id, caller, until: asked.checked_add(left), is_revoked, was_used }
}

/// Background task that reloads the token cache.
#[derive(Debug)]
pub struct RefreshTokens {
    tokens: TokenCache,
    version: Option<i64>,
    read: Instant,
    noted: Instant,
}

impl RefreshTokens {
    /// Creates the task after the first read.
    pub fn new(tokens: TokenCache) -> Self {
        Self { tokens, version: None, read: Instant::now(), noted: Instant::now() }
    }
}

impl Task for RefreshTokens {
    const NAME: &'static str = "tokens";

    const PERIOD: Duration = PERIOD;

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        self.tokens.end_overdue();
        let connection = session.get().await?;
        // Bounded, because a silently lost connection would never reply, and revocations would be missed.
        let (asked, version) = (Instant::now(), within_short_timeout(token::version(&mut *connection)).await?);
        if self.version != Some(version) || self.read.elapsed() >= READ_INTERVAL {
            self.tokens.replace(within_timeout(token::read(&mut *connection)).await?, asked);
            (self.version, self.read) = (Some(version), asked);
            self.tokens.end_overdue();
        }
        if self.noted.elapsed() >= USE_INTERVAL {
            let used = self.tokens.take_used();
            if !used.is_empty() {
                within_timeout(token::note_use(&mut *connection, &used)).await?;
            }
            self.noted = Instant::now();
        }
        Ok(Step::Done)
    }
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret as _;

    use super::*;
    use rm_model::{name::Name, token};

    fn stored(chance: u8, left: Duration, is_revoked: bool) -> (String, StoredToken) {
        let (token, hash) = token::make([chance; 43]).unwrap();
        let name = Name::parse("name", "alice").unwrap();
        let token = token.expose_secret().to_owned();
        (token, StoredToken { id: Uuid::nil(), hash, name, rights: Rights::of_admin(), left, is_revoked })
    }

    #[test]
    fn token_authenticates_until_expiry_or_revocation() {
        let (hour, now, tokens) = (Duration::from_secs(3600), Instant::now(), TokenCache::default());
        let anonymous = tokens.anonymous().expect("no token is required");
        let ((good, a), (over, b), (revoked, c)) =
            (stored(1, hour, false), stored(2, Duration::ZERO, false), stored(3, hour, true));
        tokens.replace(vec![Ok(a), Ok(b), Ok(c)], now);
        assert!(tokens.anonymous().is_none());
        assert_eq!(anonymous.ended.why.get(), Some(&Unauthenticated::Missing), "a stream without a token ends");
        let caller = tokens.find(&good).unwrap();
        assert_eq!(caller.principal.as_str(), "alice");
        let refused = [&over, &revoked, &stored(4, hour, false).0, &String::new()];
        assert_eq!(refused.map(|token| tokens.find(token).unwrap_err()), {
            use Unauthenticated::{Expired, Revoked, Unknown};
            [Expired, Revoked, Unknown, Unknown]
        });
        assert_eq!((tokens.take_used().len(), tokens.take_used().len()), (1, 0));

        tokens.replace(vec![Ok(stored(1, hour, false).1)], now);
        tokens.end_overdue();
        assert!(!caller.ended.cancelled.is_cancelled(), "the token is unchanged");
        tokens.replace(vec![Ok(stored(1, hour, true).1)], now);
        tokens.end_overdue();
        assert_eq!(caller.ended.why.get(), Some(&Unauthenticated::Revoked));
        assert_eq!(tokens.find(&good).unwrap_err(), Unauthenticated::Revoked);
    }

    #[test]
    fn stream_ends_when_token_row_is_deleted() {
        let (tokens, (token, row)) = (TokenCache::default(), stored(1, Duration::MAX, false));
        tokens.replace(vec![Ok(row)], Instant::now());
        let caller = tokens.find(&token).unwrap();
        tokens.replace(vec![], Instant::now());
        assert!(caller.ended.cancelled.is_cancelled());
        assert!(tokens.anonymous().is_some_and(|anonymous| !anonymous.ended.is_over()), "no token exists again");
        assert_eq!(tokens.find(&token).unwrap_err(), Unauthenticated::Unknown);
        tokens.replace(vec![Err(StoreError::inconsistent("linkis_rm_token", "its EMs"))], Instant::now());
        assert!(tokens.anonymous().is_none(), "a malformed row still requires tokens");
    }
}
