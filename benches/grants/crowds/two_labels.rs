//! Crowd `two-labels`: requests that require two labels. Many EMs have one of them, and no EM has both.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use rm_client::{ResourceRequest, ResultResource, RmClient};
use rm_model::{
    name::{Labels, Name},
    operation::RegisterEm,
    selector::EmSelector,
};
use tokio::task::JoinSet;

use crate::{Failure, load::WARM_UP};

use super::{
    callers::{KIND, PLENTY, ask, em, granted, registration, user},
    findings::Findings,
    open,
    spent::CostMeasurement,
    stage::{CALM, OtherCall, Stage},
};

/// Numbers of EMs, half with one label and half with the other.
const SIZES: [u64; 2] = [100, 10_000];

/// Maximum cost of a request among many EMs, as a multiple of its cost among few.
const GROWTH_MAX: f64 = 1.3;

const LABELS: [&str; 2] = ["disk", "zone"];
const CALLERS: u64 = 8;
const WINDOW: Duration = Duration::from_secs(5);

/// Rate of the grants without an EM, beside the requests with two labels.
const CHOOSING_PER_SECOND: f64 = 200.0;

/// Maximum p99 of these grants, as a multiple of their p99 before.
const CHOOSING_MAX: f64 = 1.5;

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    let (mut registered, mut chosen, mut costs) = (0, 0, vec![Vec::new(); SIZES.len()]);
    for (size, costs) in SIZES.into_iter().zip(&mut costs) {
        let ems = stage.scaled(size).max(2);
        let first = registered;
        let register = move |client: RmClient, number: u64| async move {
            let number = first + number;
            let labels = BTreeMap::from([(LABELS[(number % 2) as usize].to_owned(), "x".to_owned())]);
            let labels = Labels::parse("labels", labels)?;
            client.register(RegisterEm { labels, ..registration(em(number)?, PLENTY)? }).await?;
            Ok(())
        };
        stage.callers.each("EMs register", ems.saturating_sub(first), register).await?;
        registered = registered.max(ems);
        for _ in 0..stage.options.rounds {
            let name = format!("{size} EMs, two labels that none has together");
            costs.push(alone(stage, findings, &name).await?);
            chosen += beside(stage, findings, &name).await?;
        }
    }
    for (few, many) in costs[0].iter().zip(&costs[1]) {
        let name = format!("service for a request: {} EMs, beside {}", SIZES[1], SIZES[0]);
        findings.at_most(name, "", many / few, GROWTH_MAX);
    }
    Ok(Some(chosen))
}

fn request(labels: &[&str]) -> Result<ResourceRequest, Failure> {
    let required = labels.iter().map(|key| ((*key).to_owned(), "x".to_owned())).collect();
    let required = Labels::parse("labels", required)?;
    let selector = EmSelector { application_name: Some(Name::parse("em", KIND)?), required, ..EmSelector::default() };
    Ok(ResourceRequest { em: None, selector, ..ask(em(0)?, 0)? })
}

/// Requests that no EM matches, from several callers until they are stopped. Counts the replies.
struct UnmatchedRequests {
    stop: Arc<AtomicBool>,
    replies: Arc<AtomicU64>,
    callers: JoinSet<Result<(), Failure>>,
}

impl UnmatchedRequests {
    fn begin(stage: &Stage, callers: u64) -> Result<Self, Failure> {
        let (stop, replies) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let mut asking = Self { stop: stop.clone(), replies: replies.clone(), callers: JoinSet::new() };
        for number in 0..callers {
            let (client, stop, replies) = (stage.callers.client(number), stop.clone(), replies.clone());
            let request = request(&LABELS)?;
            asking.callers.spawn(async move {
                while !stop.load(Relaxed) {
                    // A refusal, or the error that no EM has these labels.
                    if let Ok(ResultResource::Available(grant)) = client.request_resource(&request).await {
                        return Err(format!("an EM has both labels: {grant:?}").into());
                    }
                    replies.fetch_add(1, Relaxed);
                }
                Ok(())
            });
        }
        Ok(asking)
    }

    async fn end(mut self) -> Result<(), Failure> {
        self.stop.store(true, Relaxed);
        while let Some(ended) = self.callers.join_next().await {
            ended??;
        }
        Ok(())
    }
}

/// Measures the requests alone. Returns the time of the service per request, in microseconds.
async fn alone(stage: &Stage, findings: &mut Findings, name: &str) -> Result<f64, Failure> {
    let asking = UnmatchedRequests::begin(stage, CALLERS)?;
    tokio::time::sleep(WARM_UP).await;
    let (spent, before) = (CostMeasurement::begin(stage).await?, asking.replies.load(Relaxed));
    tokio::time::sleep(WINDOW).await;
    let replies = asking.replies.load(Relaxed) - before;
    let (cost, elapsed) = spent.each(replies).await?;
    asking.end().await?;
    findings.measured(format!("{name}: replies"), "/s", replies as f64 / elapsed.as_secs_f64());
    findings.measured(format!("{name}: service for each"), "µs", cost.server);
    findings.measured(format!("{name}: PostgreSQL for each"), "µs", cost.postgresql);
    Ok(cost.server)
}

/// Compares the durations of requests without an EM, with and without one caller of unmatched requests. Returns the
/// number of grants.
async fn beside(stage: &Stage, findings: &mut Findings, name: &str) -> Result<i64, Failure> {
    let granted_in_all = Arc::<AtomicU64>::default();
    let choosing = || {
        let (callers, granted_in_all) = (stage.callers.clone(), granted_in_all.clone());
        let call = move |number: u64, _| -> OtherCall {
            let (client, granted_in_all) = (callers.client(number), granted_in_all.clone());
            Box::pin(async move {
                let request = ResourceRequest { user: user(number)?, ..request(&LABELS[..1])? };
                granted(client.request_resource(&request).await?)?;
                granted_in_all.fetch_add(1, Relaxed);
                Ok(std::time::Instant::now())
            })
        };
        open::OpenLoopLoad { per_second: CHOOSING_PER_SECOND, call }
    };
    let (_, calm) = choosing().during(CALM, std::future::pending::<()>()).await?;
    let asking = UnmatchedRequests::begin(stage, 1)?;
    let (_, during) = choosing().during(CALM, std::future::pending::<()>()).await?;
    asking.end().await?;
    for seen in [&calm, &during] {
        findings.note_failed(&format!("while: {name}"), seen);
    }
    let [before, after] = [&calm, &during].map(|seen| super::findings::millis(seen.times().p99));
    findings.measured(format!("{name}: p99 of grants that name no EM, before"), "ms", before);
    findings.measured(format!("{name}: p99 of grants that name no EM, meanwhile"), "ms", after);
    findings.at_most(
        format!("{name}: p99 of grants that name no EM, meanwhile and before"),
        "",
        after / before,
        CHOOSING_MAX,
    );
    Ok(i64::try_from(granted_in_all.load(Relaxed))?)
}
