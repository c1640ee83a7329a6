//! Open-loop calls: they become due by a clock while other work runs, whether or not the service replies.
//!
//! The duration of a call starts when it is due, so the effect of a pause is measured completely. Caller:
//! `stage`.

use std::{
    future::Future,
    thread,
    time::{Duration, Instant},
};

use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
};

use crate::{Failure, load::WARM_UP, open_loop::pace, random::Random};

/// Maximum number of calls in progress. Further due calls wait here, and their waiting time counts.
const ON_THEIR_WAY_MAX: usize = 8000;

/// Maximum duration of a run.
const LENGTH_MAX: Duration = Duration::from_secs(24 * 3600);

/// Results of the calls that became due during the work.
#[derive(Debug, Default)]
pub(crate) struct OpenLoopResult {
    /// Duration of each call from its due time to its reply, of any kind.
    times: Vec<Duration>,
    /// Times of the expected replies, since the start.
    served: Vec<Duration>,
    pub failed: u64,
    /// The first error.
    pub error: Option<String>,
    length: Duration,
}

/// Number of calls and their durations.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Times {
    pub calls: usize,
    pub p50: Duration,
    pub p99: Duration,
    pub max: Duration,
}

impl OpenLoopResult {
    pub fn times(&self) -> Times {
        let mut sorted = self.times.clone();
        sorted.sort_unstable();
        let at = |part: f64| {
            let last = sorted.len().saturating_sub(1);
            sorted.get(((sorted.len() as f64 * part) as usize).min(last)).copied().unwrap_or_default()
        };
        Times { calls: sorted.len(), p50: at(0.5), p99: at(0.99), max: at(1.0) }
    }

    /// Returns the longest time without an expected reply, up to the end of the run.
    pub fn gap(&self) -> Duration {
        let mut served = self.served.clone();
        served.sort_unstable();
        if served.last().is_none_or(|last| *last < self.length) {
            served.push(self.length);
        }
        let (mut before, mut longest) = (Duration::ZERO, Duration::ZERO);
        for at in served {
            longest = longest.max(at - before);
            before = at;
        }
        longest
    }
}

/// Rate and function of the calls. They become due at random. The function returns the time of its reply.
pub(crate) struct OpenLoopLoad<C> {
    pub per_second: f64,
    pub call: C,
}

impl<C, F> OpenLoopLoad<C>
where
    C: FnMut(u64, Random) -> F + Send + 'static,
    F: Future<Output = Result<Instant, Failure>> + Send + 'static,
{
    /// Makes the calls during `work`. The work starts after a warm-up and is cancelled after `limit`.
    pub async fn during<T>(
        self,
        limit: Duration,
        work: impl Future<Output = T>,
    ) -> Result<(Option<T>, OpenLoopResult), Failure> {
        #[expect(
            clippy::disallowed_methods,
            reason = "the load does not wait for the service: that is what is measured"
        )]
        let (due, calls_due) = mpsc::unbounded_channel();
        let (stop, stopped) = oneshot::channel();
        let (begun, rate) = (Instant::now(), self.per_second);
        // A thread, because the timer of the runtime has a resolution of a millisecond.
        thread::spawn(move || pace(begun, rate, LENGTH_MAX, &due));
        let counted_from = begun + WARM_UP;
        let flow = ScenarioLoop {
            call: self.call,
            counted_from,
            tasks: JoinSet::new(),
            seen: OpenLoopResult::default(),
            number: 0,
        };
        let flow = tokio::spawn(flow.run(calls_due, stopped));
        tokio::time::sleep_until(counted_from.into()).await;
        let done = tokio::time::timeout(limit, work).await.ok();
        // A receiver that was dropped means that the flow failed; its error follows.
        let _ = stop.send(());
        Ok((done, flow.await??))
    }
}

type TimedReply = (Instant, Instant, Result<(), String>);

struct ScenarioLoop<C> {
    call: C,
    counted_from: Instant,
    tasks: JoinSet<TimedReply>,
    seen: OpenLoopResult,
    number: u64,
}

impl<C, F> ScenarioLoop<C>
where
    C: FnMut(u64, Random) -> F,
    F: Future<Output = Result<Instant, Failure>> + Send + 'static,
{
    async fn run(
        mut self,
        mut calls_due: mpsc::UnboundedReceiver<Instant>,
        mut stopped: oneshot::Receiver<()>,
    ) -> Result<OpenLoopResult, Failure> {
        loop {
            let may_start = self.tasks.len() < ON_THEIR_WAY_MAX;
            tokio::select! {
                biased;
                _ = &mut stopped => break,
                Some(answered) = self.tasks.join_next() => self.count(answered?),
                Some(due) = calls_due.recv(), if may_start => self.start(due),
            }
        }
        let ended = Instant::now();
        self.seen.length = ended.saturating_duration_since(self.counted_from);
        calls_due.close();
        while let Some(due) = calls_due.recv().await {
            if due < ended && self.tasks.len() < ON_THEIR_WAY_MAX {
                self.start(due);
            } else if due < ended {
                self.count((due, Instant::now(), Err("too many others are on their way".to_owned())));
            }
        }
        while let Some(answered) = self.tasks.join_next().await {
            self.count(answered?);
        }
        Ok(self.seen)
    }

    fn start(&mut self, due: Instant) {
        self.number += 1;
        let call = (self.call)(self.number, Random::new(self.number));
        self.tasks.spawn(async move {
            match call.await {
                Ok(served) => (due, served, Ok(())),
                Err(error) => (due, Instant::now(), Err(error.to_string())),
            }
        });
    }

    fn count(&mut self, (due, answered, served): TimedReply) {
        let error = served.err();
        if let Some(error) = error.as_ref() {
            self.seen.failed += 1;
            self.seen.error.get_or_insert_with(|| error.clone());
        }
        if due >= self.counted_from {
            self.seen.times.push(answered.saturating_duration_since(due));
            if error.is_none() {
                self.seen.served.push(answered.saturating_duration_since(self.counted_from));
            }
        }
    }
}
