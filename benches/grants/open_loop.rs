//! Open-loop load: calls become due by a clock, whether or not the service replies. The duration of a call starts when
//! it is due.

use std::{
    sync::atomic::Ordering::Relaxed,
    thread,
    time::{Duration, Instant},
};

use tokio::{sync::mpsc, task::JoinSet};

use crate::{
    Failure, Workload,
    calls::TargetEm,
    load::{Load, WARM_UP},
    meter::{Meter, UsageSample},
    random::Random,
    sample::Sample,
};

type CallResult = Result<Option<Duration>, String>;

/// Requests grants that become due at random with this rate per second, for `window` after a warm-up.
pub(crate) async fn measure(
    load: &Load,
    workload: Workload,
    rate: f64,
    window: Duration,
    meter: &mut Meter,
) -> Result<Sample, Failure> {
    #[expect(clippy::disallowed_methods, reason = "the load does not wait for the service: that is what is measured")]
    let (due, calls_due) = mpsc::unbounded_channel();
    let begun = Instant::now();
    // A thread, because the timer of the runtime has a resolution of a millisecond.
    thread::spawn(move || pace(begun, rate, WARM_UP + window, &due));
    let mut flow = LoadLoop::new(load, workload, begun + WARM_UP);
    flow.run(calls_due, meter).await?;
    let elapsed = flow.counted_from.elapsed();
    let count = flow.times.len();
    if let Some(error) = flow.error.as_ref().filter(|_| count == 0) {
        return Err(format!("nothing was answered as it should be: {error}").into());
    }
    let cost = match flow.before {
        Some(before) => Some(meter.read().await?.since(before, count as u64)),
        None => None,
    };
    let (times, errors, error) = (flow.times, flow.errors, flow.error);
    Ok(Sample { rate: count as f64 / elapsed.as_secs_f64(), times, cost, shares: Vec::new(), errors, error })
}

/// Sends the due times of calls until the receiver is dropped.
pub(crate) fn pace(begun: Instant, rate: f64, length: Duration, due: &mpsc::UnboundedSender<Instant>) {
    let mut random = Random::new(begun.elapsed().as_nanos() as u64);
    let mut next = begun;
    while next < begun + length {
        next += random.pause(rate);
        thread::sleep(next.saturating_duration_since(Instant::now()));
        if due.send(next).is_err() {
            return;
        }
    }
}

struct LoadLoop<'a> {
    load: &'a Load,
    workload: Workload,
    counted_from: Instant,
    before: Option<UsageSample>,
    random: Random,
    tasks: JoinSet<CallResult>,
    times: Vec<Duration>,
    errors: u64,
    error: Option<String>,
}

impl<'a> LoadLoop<'a> {
    fn new(load: &'a Load, workload: Workload, counted_from: Instant) -> Self {
        let (random, tasks) = (Random::new(7), JoinSet::new());
        Self { load, workload, counted_from, before: None, random, tasks, times: vec![], errors: 0, error: None }
    }

    async fn run(&mut self, mut calls_due: mpsc::UnboundedReceiver<Instant>, meter: &mut Meter) -> Result<(), Failure> {
        let mut number = 0;
        while let Some(due) = calls_due.recv().await {
            self.start(number, due);
            number += 1;
            if self.before.is_none() && due >= self.counted_from {
                self.before = Some(meter.read().await?);
            }
            while let Some(answered) = self.tasks.try_join_next() {
                self.count(answered?);
            }
        }
        while let Some(answered) = self.tasks.join_next().await {
            self.count(answered?);
        }
        Ok(())
    }

    fn start(&mut self, number: usize, due: Instant) {
        let (_, mut client) = self.load.client(number, 1);
        let place = TargetEm::choose(self.workload, &mut self.random);
        let (tally, counts) = (self.load.tally().clone(), due >= self.counted_from);
        self.tasks.spawn(async move {
            client.grant(place).await.map_err(|error| error.to_string())?;
            tally.granted.fetch_add(1, Relaxed);
            Ok(counts.then(|| due.elapsed()))
        });
    }

    fn count(&mut self, answered: CallResult) {
        match answered {
            Ok(time) => self.times.extend(time),
            Err(error) => {
                self.errors += 1;
                self.error.get_or_insert(error);
            }
        }
    }
}
