//! Single flight: one run of an action that all concurrent callers share.
//!
//! A caller states how old a run may be. If no run is recent enough, one task runs the action, and all callers that wait
//! meanwhile get its result.
//!
//! Never: runs the action twice at once; cancels a run because a caller is gone.
//! Callers: `admission` (surveys), `overview` and `waiting` (renewals).

use std::{
    future::Future,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{sync::watch, time::Instant};

use crate::{error::Error, lock::lock};
use rm_store::session::answered_within;

use super::tasks::InstanceTasks;

/// Single flight of one action. Clones share it.
#[derive(Clone, Debug)]
pub struct SingleFlight {
    state: Arc<Mutex<FlightState>>,
    tasks: InstanceTasks,
}

#[derive(Debug, Default)]
struct FlightState {
    /// Start of the last successful run.
    done: Option<Instant>,
    /// The run in progress.
    running: Option<Flight>,
}

/// Run of the action: its start, and its result once it has ended.
#[derive(Clone, Debug)]
struct Flight {
    began: Instant,
    ended: watch::Receiver<Option<Result<(), Error>>>,
}

impl SingleFlight {
    /// Creates a single flight without a run. Runs are spawned among `tasks`.
    pub fn new(tasks: &InstanceTasks) -> Self {
        Self { state: Arc::default(), tasks: tasks.clone() }
    }

    /// Waits until a run has succeeded that began at most `age` ago; starts one if necessary.
    ///
    /// Mostly a recent run exists; the boxed future of a wait then costs nothing.
    ///
    /// # Errors
    /// The error of a run that failed while the caller waited, whenever that run began: another run would soon fail too.
    /// [`Error::Unavailable`] at `deadline`.
    pub async fn run_recent<F>(&self, age: Duration, deadline: Instant, action: impl Fn() -> F) -> Result<(), Error>
    where
        F: Future<Output = Result<(), Error>> + Send + 'static,
    {
        let asked = Instant::now();
        match self.join(|began| began + age >= asked, &action) {
            Some(running) => Box::pin(self.wait(running, age, (asked, deadline), &action)).await,
            None => Ok(()),
        }
    }

    async fn wait<F>(
        &self,
        running: Flight,
        age: Duration,
        (asked, deadline): (Instant, Instant),
        action: &impl Fn() -> F,
    ) -> Result<(), Error>
    where
        F: Future<Output = Result<(), Error>> + Send + 'static,
    {
        let is_fresh = |began: Instant| began + age >= asked;
        let shared = async {
            // Waits for two runs at most: one in progress that began too early, and the next.
            let mut next = Some(running);
            while let Some(mut running) = next {
                let ended = running.ended.wait_for(Option::is_some).await.map(|ended| ended.clone());
                // A task that ended without a result has panicked, or its runtime has ended.
                ended.ok().flatten().unwrap_or(Err(Error::ShuttingDown))?;
                if is_fresh(running.began) {
                    break;
                }
                next = self.join(is_fresh, action);
            }
            Ok(())
        };
        answered_within(deadline.saturating_duration_since(asked), shared).await
    }

    /// Starts the action without waiting, unless it is running or a run succeeded that began at most `age` ago.
    pub fn start<F>(&self, age: Duration, action: impl Fn() -> F)
    where
        F: Future<Output = Result<(), Error>> + Send + 'static,
    {
        let asked = Instant::now();
        drop(self.join(|began| began + age >= asked, &action));
    }

    /// Returns the run in progress or a new one; `None` if the last successful run is recent enough.
    fn join<F>(&self, is_fresh: impl Fn(Instant) -> bool, action: impl Fn() -> F) -> Option<Flight>
    where
        F: Future<Output = Result<(), Error>> + Send + 'static,
    {
        let mut state = lock(&self.state);
        if state.done.is_some_and(is_fresh) {
            return None;
        }
        if let Some(running) = &state.running {
            return Some(running.clone());
        }
        let (end, ended) = watch::channel(None);
        let running = Flight { began: Instant::now(), ended };
        let (began, shared, action) = (running.began, self.clone(), action());
        self.tasks.spawn(async move {
            let result = action.await;
            let mut state = lock(&shared.state);
            state.running = None;
            if result.is_ok() {
                state.done = Some(began);
            }
            drop(state);
            end.send_replace(Some(result));
        });
        state.running = Some(running.clone());
        Some(running)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::{sync::Semaphore, task::JoinSet};

    use super::*;

    /// Action that counts its runs and waits for a permit.
    #[derive(Clone)]
    struct CountingAction(Arc<AtomicUsize>, Arc<Semaphore>, Result<(), Error>);

    impl CountingAction {
        async fn act(self) -> Result<(), Error> {
            self.0.fetch_add(1, Ordering::Relaxed);
            self.1.acquire().await.unwrap().forget();
            self.2
        }

        fn count(&self) -> usize {
            self.0.load(Ordering::Relaxed)
        }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    async fn ask(shared: &SingleFlight, counted: &CountingAction, count: usize) -> JoinSet<Result<(), Error>> {
        let mut calls = JoinSet::new();
        for _ in 0..count {
            let (shared, counted) = (shared.clone(), counted.clone());
            calls.spawn(async move { shared.run_recent(Duration::ZERO, soon(), || counted.clone().act()).await });
        }
        while counted.count() == 0 {
            tokio::task::yield_now().await;
        }
        calls
    }

    #[tokio::test]
    async fn single_flight_failure_reaches_all_callers() {
        let shared = SingleFlight::new(&InstanceTasks::here());
        let counted = CountingAction(Arc::default(), Arc::new(Semaphore::new(0)), Err(Error::LockTimeout));
        let mut calls = ask(&shared, &counted, 20).await;
        // Callers that came during the run do not start another one either.
        tokio::task::yield_now().await;
        counted.1.add_permits(1);
        while let Some(answer) = calls.join_next().await {
            assert!(matches!(answer.unwrap(), Err(Error::LockTimeout)));
        }
        assert_eq!(counted.count(), 1);
    }

    #[tokio::test]
    async fn single_flight_late_callers_share_second_run() {
        let shared = SingleFlight::new(&InstanceTasks::here());
        let counted = CountingAction(Arc::default(), Arc::new(Semaphore::new(0)), Ok(()));
        let first = ask(&shared, &counted, 1).await;
        let later = ask(&shared, &counted, 20).await;
        counted.1.add_permits(2);
        assert!(first.join_all().await.iter().chain(&later.join_all().await).all(Result::is_ok));
        assert_eq!(counted.count(), 2);
        shared.run_recent(Duration::from_secs(60), soon(), || counted.clone().act()).await.unwrap();
        assert_eq!(counted.count(), 2, "a recent run is used");
    }

    #[tokio::test]
    async fn single_flight_caller_fails_at_deadline() {
        let shared = SingleFlight::new(&InstanceTasks::here());
        let counted = CountingAction(Arc::default(), Arc::new(Semaphore::new(0)), Ok(()));
        let deadline = Instant::now() + Duration::from_millis(20);
        let answer = shared.run_recent(Duration::ZERO, deadline, || counted.clone().act()).await;
        assert!(matches!(answer, Err(Error::Unavailable(_))), "{answer:?}");
    }
}
