//! Closed-loop callers of the crowds: each repeats its request immediately after the reply, for a bounded time.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use rm_client::{ResourceRequest, ResultResource};
use rm_model::em::EmInstance;
use tokio::task::JoinSet;

use crate::{Failure, load::WARM_UP, random::Random, sample::median};

use super::{callers::Callers, findings::millis};

/// Duration of the measurement, after a warm-up.
pub(crate) const WINDOW: Duration = Duration::from_secs(5);

/// Result of the callers.
#[derive(Default)]
pub(crate) struct ClosedLoopResult {
    /// Replies per second.
    pub rate: f64,
    /// Median duration of a call, in milliseconds.
    pub p50: f64,
    /// Number of grants by EM, with those of the warm-up.
    pub on: HashMap<EmInstance, i64>,
}

impl ClosedLoopResult {
    pub fn granted(&self) -> i64 {
        self.on.values().sum()
    }
}

/// Runs `count` callers for `window`. All requests must be refused if `refused`, else granted.
pub(crate) async fn ask(
    callers: &Callers,
    count: u64,
    window: Duration,
    refused: bool,
    request: impl Fn(&mut Random) -> Result<ResourceRequest, Failure> + Clone + Send + 'static,
) -> Result<ClosedLoopResult, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let counted_from = Instant::now() + WARM_UP;
    let mut all = JoinSet::new();
    for number in 0..count {
        let (client, stop, request) = (callers.client(number), stop.clone(), request.clone());
        all.spawn(async move {
            let (mut random, mut times, mut on) = (Random::new(number + 1), Vec::new(), HashMap::new());
            while !stop.load(Relaxed) {
                let request = request(&mut random)?;
                let begun = Instant::now();
                let answer = client.request_resource(&request).await?;
                if begun >= counted_from {
                    times.push(begun.elapsed());
                }
                match answer {
                    ResultResource::Available(grant) if !refused => *on.entry(grant.em).or_default() += 1,
                    ResultResource::NotEnough(_) if refused => {}
                    answer => return Err(format!("not as it should be: {answer:?}").into()),
                }
            }
            Ok::<_, Failure>((times, on))
        });
    }
    tokio::time::sleep(WARM_UP + window).await;
    stop.store(true, Relaxed);
    let (mut seen, mut times) = (ClosedLoopResult::default(), Vec::new());
    while let Some(done) = all.join_next().await {
        let (some, on): (Vec<Duration>, HashMap<EmInstance, i64>) = done??;
        times.extend(some);
        for (em, count) in on {
            *seen.on.entry(em).or_default() += count;
        }
    }
    seen.rate = times.len() as f64 / window.as_secs_f64();
    seen.p50 = median(times.iter().map(|time| millis(*time)));
    Ok(seen)
}
