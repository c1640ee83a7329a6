//! Permits for large responses: a semaphore that bounds the memory of concurrent responses.
//!
//! Slow responses are limited to a part of the permits, so that slow servers cannot block quick ones. An address whose
//! last response was slow waits for a permit of that part first. Caller: `http`.

use std::{
    collections::HashSet,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout_at},
};
use url::Url;

use super::http::HttpFailure;

/// Maximum number of concurrent large responses. Each may have the maximum size, plus the memory of its parsed form.
pub(super) const LARGE_ANSWERS_MAX: usize = 4;

/// Maximum number of slow responses among them.
const SLOW_ANSWERS_MAX: usize = LARGE_ANSWERS_MAX - 1;

/// Maximum number of addresses recorded as slow; then the record is cleared. The bound is generous: providers are few,
/// with few addresses each.
const KNOWN_MAX: usize = 1024;

/// Semaphores for large responses. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct LargeReplyPermits {
    all: Arc<Semaphore>,
    slow: Arc<Semaphore>,
    known: Arc<SlowServers>,
    /// Time with a permit after which a response counts as slow.
    quick: Duration,
}

/// Addresses whose last response was slow, without their queries.
#[derive(Debug, Default)]
struct SlowServers(Mutex<HashSet<Url>>);

impl SlowServers {
    fn lock(&self) -> MutexGuard<'_, HashSet<Url>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Permit for a large response, returned when dropped.
#[derive(Debug)]
pub(super) struct LargeReplyPermit {
    turns: LargeReplyPermits,
    of: Url,
    begun: Instant,
    /// Second permit, of the slow part.
    slow: Option<OwnedSemaphorePermit>,
    _one: OwnedSemaphorePermit,
}

impl LargeReplyPermits {
    /// Creates the semaphores. A response with a permit for longer than `quick` counts as slow.
    pub fn new(quick: Duration) -> Self {
        let (all, slow) = (Semaphore::new(LARGE_ANSWERS_MAX), Semaphore::new(SLOW_ANSWERS_MAX));
        Self { all: Arc::new(all), slow: Arc::new(slow), known: Arc::default(), quick }
    }

    /// Waits for a permit for the response of an address. If its last response was slow, waits for a permit of the slow
    /// part first.
    ///
    /// # Errors
    /// [`HttpFailure::Stopping`].
    pub async fn wait(&self, address: &Url) -> Result<LargeReplyPermit, HttpFailure> {
        let mut of = address.clone();
        of.set_query(None);
        let is_slow = self.known.lock().contains(&of);
        let slow = match is_slow {
            true => Some(take(&self.slow).await?),
            false => None,
        };
        let one = take(&self.all).await?;
        Ok(LargeReplyPermit { turns: self.clone(), of, begun: Instant::now(), slow, _one: one })
    }

    /// Returns the number of free permits.
    #[cfg(test)]
    pub fn free(&self) -> usize {
        self.all.available_permits()
    }

    /// Takes all permits.
    #[cfg(test)]
    pub async fn all(&self) -> OwnedSemaphorePermit {
        let all = u32::try_from(LARGE_ANSWERS_MAX).unwrap();
        self.all.clone().acquire_many_owned(all).await.unwrap()
    }
}

async fn take(from: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, HttpFailure> {
    from.clone().acquire_owned().await.map_err(|_| HttpFailure::Stopping)
}

impl LargeReplyPermit {
    /// Waits for the next piece of the response. If the response becomes slow meanwhile, takes a permit of the slow
    /// part.
    ///
    /// # Errors
    /// [`HttpFailure::Timeout`] if the slow part has no free permit; errors of `coming`.
    pub async fn keep<T>(&mut self, coming: impl Future<Output = Result<T, HttpFailure>>) -> Result<T, HttpFailure> {
        let mut coming = pin!(coming);
        if let Some(until) = self.until() {
            match timeout_at(until, &mut coming).await {
                Ok(come) => return come,
                Err(_) => self.becomes_slow()?,
            }
        }
        coming.await
    }

    /// Returns when the response becomes slow; `None` if it is slow already.
    fn until(&self) -> Option<Instant> {
        self.slow.is_none().then(|| self.begun + self.turns.quick)
    }

    /// Records the address as slow, and takes a permit of the slow part if one is free.
    fn becomes_slow(&mut self) -> Result<(), HttpFailure> {
        let mut known = self.turns.known.lock();
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(self.of.clone());
        drop(known);
        self.slow = Some(self.turns.slow.clone().try_acquire_owned().map_err(|_| HttpFailure::Timeout)?);
        Ok(())
    }

    /// Ends the reading of the response. If it was quick, the address no longer counts as slow.
    pub fn read(&self) {
        if self.begun.elapsed() < self.turns.quick {
            self.turns.known.lock().remove(&self.of);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn slow_address_waits_for_slow_permit_until_quick_reply() {
        let turns = LargeReplyPermits::new(Duration::from_secs(60));
        let url = |path: &str| Url::parse(&format!("http://rm/{path}")).unwrap();
        let mut first = Vec::new();
        for n in 0..LARGE_ANSWERS_MAX {
            first.push(turns.wait(&url(&format!("slow{n}?page=1"))).await.unwrap());
        }
        assert!(first.iter().all(|turn| turn.until() == Some(turn.begun + turns.quick)));
        let became: Vec<_> = first.iter_mut().map(LargeReplyPermit::becomes_slow).collect();
        assert_eq!(became, [Ok(()), Ok(()), Ok(()), Err(HttpFailure::Timeout)]);
        drop(first.pop());
        // The response without a slow permit waits for another slow one, and a quick response gets a permit
        // immediately.
        let again = tokio::spawn({
            let turns = turns.clone();
            async move { turns.wait(&url("slow3?page=2")).await.unwrap() }
        });
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        let quick = tokio::time::timeout(Duration::from_secs(10), turns.wait(&url("quick"))).await;
        drop(quick.expect("a permit is free").unwrap());
        assert!(!again.is_finished());
        drop(first.pop());
        let again = again.await.unwrap();
        assert_eq!(again.until(), None);
        again.read();
        assert!(!turns.known.lock().contains(&url("slow3")) && turns.known.lock().len() == LARGE_ANSWERS_MAX - 1);
    }
}
