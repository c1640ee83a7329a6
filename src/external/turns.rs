//! Turns: few large answers are taken in at once. Whoever is slow to send his shares a part of the turns with others who are, so that those
//! who are not wait for none of them.

use std::{
    collections::HashSet,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use reqwest::Url;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout_at},
};

use super::http::Failure;

/// How many large answers are taken in at once: each may have the largest size, and takes what is read of it besides.
pub(super) const LARGE_ANSWERS_MAX: usize = 4;

/// How many of them may be slow.
const SLOW_ANSWERS_MAX: usize = LARGE_ANSWERS_MAX - 1;

/// Of how many addresses it is known that they are slow; then all are found out anew. There are few providers, of few addresses each.
const KNOWN_MAX: usize = 1024;

/// Who may send a large answer; clones share it.
#[derive(Debug, Clone)]
pub(super) struct Turns {
    all: Arc<Semaphore>,
    slow: Arc<Semaphore>,
    known: Arc<Known>,
    /// How long an answer may take that has its turn, or it is slow.
    quick: Duration,
}

/// What was slow the last time, without what is asked there.
#[derive(Debug, Default)]
struct Known(Mutex<HashSet<Url>>);

impl Known {
    fn lock(&self) -> MutexGuard<'_, HashSet<Url>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A turn, for as long as this lives.
#[derive(Debug)]
pub(super) struct Turn {
    turns: Turns,
    of: Url,
    begun: Instant,
    /// That of those who are slow.
    slow: Option<OwnedSemaphorePermit>,
    _one: OwnedSemaphorePermit,
}

impl Turns {
    /// An answer that takes longer than `quick` once it has its turn is slow.
    pub fn new(quick: Duration) -> Self {
        let (all, slow) = (Semaphore::new(LARGE_ANSWERS_MAX), Semaphore::new(SLOW_ANSWERS_MAX));
        Self { all: Arc::new(all), slow: Arc::new(slow), known: Arc::default(), quick }
    }

    /// Waits for the turn of what stands at an address: if it was slow the last time, behind all others who were.
    ///
    /// # Errors
    /// [`Failure::Stopping`].
    pub async fn wait(&self, address: &Url) -> Result<Turn, Failure> {
        let mut of = address.clone();
        of.set_query(None);
        let is_slow = self.known.lock().contains(&of);
        let slow = match is_slow {
            true => Some(take(&self.slow).await?),
            false => None,
        };
        let one = take(&self.all).await?;
        Ok(Turn { turns: self.clone(), of, begun: Instant::now(), slow, _one: one })
    }

    /// How many there are just now.
    #[cfg(test)]
    pub fn free(&self) -> usize {
        self.all.available_permits()
    }

    /// All of them.
    #[cfg(test)]
    pub async fn all(&self) -> OwnedSemaphorePermit {
        let all = u32::try_from(LARGE_ANSWERS_MAX).unwrap();
        self.all.clone().acquire_many_owned(all).await.unwrap()
    }
}

async fn take(from: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, Failure> {
    from.clone().acquire_owned().await.map_err(|_| Failure::Stopping)
}

impl Turn {
    /// What comes next of the answer: if it does not come until then, among those that are slow.
    ///
    /// # Errors
    /// [`Failure::Timeout`]: others who are slow have all that is left to them; and its own.
    pub async fn keep<T>(&mut self, coming: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        let mut coming = pin!(coming);
        if let Some(until) = self.until() {
            match timeout_at(until, &mut coming).await {
                Ok(come) => return come,
                Err(_) => self.becomes_slow()?,
            }
        }
        coming.await
    }

    /// Until when the answer may come; `None` for one that is slow already.
    fn until(&self) -> Option<Instant> {
        self.slow.is_none().then(|| self.begun + self.turns.quick)
    }

    /// The answer did not come until then: it goes on only where no more are slow than may be, and is known for it in either case.
    fn becomes_slow(&mut self) -> Result<(), Failure> {
        let mut known = self.turns.known.lock();
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(self.of.clone());
        drop(known);
        self.slow = Some(self.turns.slow.clone().try_acquire_owned().map_err(|_| Failure::Timeout)?);
        Ok(())
    }

    /// All of the answer has come: if that was soon enough, it is slow no longer.
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
    async fn who_was_slow_waits_for_others_who_were_until_he_is_quick() {
        let turns = Turns::new(Duration::from_secs(60));
        let url = |path: &str| Url::parse(&format!("http://rm/{path}")).unwrap();
        let mut first = Vec::new();
        for n in 0..LARGE_ANSWERS_MAX {
            first.push(turns.wait(&url(&format!("slow{n}?page=1"))).await.unwrap());
        }
        assert!(first.iter().all(|turn| turn.until() == Some(turn.begun + turns.quick)));
        let became: Vec<_> = first.iter_mut().map(Turn::becomes_slow).collect();
        assert_eq!(became, [Ok(()), Ok(()), Ok(()), Err(Failure::Timeout)]);
        drop(first.pop());
        // The one that gave up has no turn before one of the others, and whoever is quick has his at once.
        let again = tokio::spawn({
            let turns = turns.clone();
            async move { turns.wait(&url("slow3?page=2")).await.unwrap() }
        });
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        let quick = tokio::time::timeout(Duration::from_secs(10), turns.wait(&url("quick"))).await;
        drop(quick.expect("there is one").unwrap());
        assert!(!again.is_finished());
        drop(first.pop());
        let again = again.await.unwrap();
        assert_eq!(again.until(), None);
        again.read();
        assert!(!turns.known.lock().contains(&url("slow3")) && turns.known.lock().len() == LARGE_ANSWERS_MAX - 1);
    }
}
