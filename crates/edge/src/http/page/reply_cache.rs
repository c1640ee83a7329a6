//! Shared responses: one computation for all callers of a list within a moment.
//!
//! Many viewers open the same page, and each page requests the same lists every few seconds. The cache is bounded in
//! entries and bytes, and an entry lives for less than a second. Caller: `api`.

use std::{
    collections::HashMap,
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Maximum age of a response, below the interval at which a page repeats its requests.
const AGE_MAX: Duration = Duration::from_millis(900);

/// Maximum number of cached responses.
const KEPT_MAX: usize = 64;
/// Maximum size of a cached response, in bytes.
const BYTES_MAX: usize = 1 << 16;

/// Key of a cached response.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct QueryKey {
    /// Name of the call.
    pub method: String,
    /// Query of the call.
    pub query: String,
    /// Whether the caller is an operator. Operators get more fields.
    pub is_of_operator: bool,
}

/// Time of the request and the response. The caller that computes the response holds the lock.
type CachedReply = Arc<tokio::sync::Mutex<Option<(Instant, Arc<str>)>>>;

/// Cached responses.
#[derive(Debug, Default)]
pub struct ReplyCache(Mutex<HashMap<QueryKey, CachedReply>>);

impl ReplyCache {
    /// Returns the cached response, or the result of `compute`. Callers that arrive during the computation wait for it. A
    /// failure is not cached, so the next caller repeats it.
    ///
    /// # Errors
    /// Errors of `compute`.
    pub async fn get<E>(
        &self,
        question: QueryKey,
        compute: impl Future<Output = Result<String, E>>,
    ) -> Result<Arc<str>, E> {
        let Some(kept) = self.kept(question) else { return compute.await.map(Arc::from) };
        let mut kept = kept.lock().await;
        if let Some((at, answer)) = &*kept
            && at.elapsed() < AGE_MAX
        {
            return Ok(answer.clone());
        }
        let at = Instant::now();
        *kept = None;
        let answer: Arc<str> = compute.await?.into();
        *kept = Some((at, answer.clone())).filter(|_| answer.len() <= BYTES_MAX);
        Ok(answer)
    }

    /// Returns the entry of a key; `None` if the cache is full.
    fn kept(&self, question: QueryKey) -> Option<CachedReply> {
        // The guarded state stays consistent if a holder panics.
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= KEPT_MAX && !all.contains_key(&question) {
            let is_old = |kept: &CachedReply| {
                kept.try_lock().is_ok_and(|kept| kept.as_ref().is_none_or(|(at, _)| at.elapsed() >= AGE_MAX))
            };
            all.retain(|_, kept| !is_old(kept));
        }
        let has_room = all.len() < KEPT_MAX || all.contains_key(&question);
        has_room.then(|| all.entry(question).or_default().clone())
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    fn question(query: &str, is_of_operator: bool) -> QueryKey {
        QueryKey { method: "ListTickets".into(), query: query.into(), is_of_operator }
    }

    /// Makes all entries too old, or keeps them young.
    fn age(answers: &ReplyCache, are_old: bool) {
        for kept in answers.0.lock().unwrap().values() {
            if let Some((at, _)) = &mut *kept.try_lock().unwrap() {
                *at = if are_old { *at - AGE_MAX } else { *at + Duration::from_secs(3600) };
            }
        }
    }

    #[tokio::test]
    async fn reply_cache_shares_concurrent_calls() {
        let (answers, calls) = (ReplyCache::default(), AtomicUsize::new(0));
        let compute = async || Ok::<_, Infallible>(calls.fetch_add(1, Ordering::Relaxed).to_string());
        let get = async |query: &str, is_of_operator| {
            let Ok(answer) = answers.get(question(query, is_of_operator), compute()).await;
            answer.to_string()
        };
        assert_eq!(get("a", false).await, "0");
        age(&answers, false);
        assert_eq!(get("a", false).await, "0");
        assert_eq!([get("b", false).await, get("a", true).await], ["1", "2"], "replies differ by caller");
        answers.0.lock().unwrap().clear();
        assert_eq!(get("b", false).await, "3");
        age(&answers, true);
        assert_eq!(get("b", false).await, "4", "the cached reply is too old");
        let failed = answers.get(question("c", false), async { Err::<String, _>("no") }).await;
        assert_eq!(failed.unwrap_err(), "no");
        assert_eq!(get("c", false).await, "5", "failures are not cached");
    }

    #[tokio::test]
    async fn reply_cache_is_bounded() {
        let answers = ReplyCache::default();
        let get = async |query: String, text: String| {
            let Ok(answer) = answers.get(question(&query, false), async { Ok::<_, Infallible>(text) }).await;
            answer.to_string()
        };
        let large = "x".repeat(BYTES_MAX + 1);
        assert_eq!(get("large".into(), large.clone()).await, large);
        assert_eq!(get("large".into(), "small".into()).await, "small");
        for n in 0..2 * KEPT_MAX {
            assert_eq!(get(format!("{n}"), format!("{n}")).await, n.to_string());
            age(&answers, false);
        }
        assert_eq!(answers.0.lock().unwrap().len(), KEPT_MAX);
        answers.0.lock().unwrap().values().for_each(|kept| {
            let long_ago = Instant::now() - AGE_MAX;
            *kept.try_lock().unwrap() = Some((long_ago, "old".into()));
        });
        assert_eq!(get("one more".into(), "more".into()).await, "more");
        assert_eq!(answers.0.lock().unwrap().len(), 1);
    }
}
