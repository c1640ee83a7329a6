//! Crowd `queues`: grants in an external queue beside grants without one, while the cluster reports very many queues,
//! and while it is unavailable.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use rm_client::{ResourceRequest, ResultResource};
use rm_model::resource::{LoadInstanceAmounts, Resource, ResourceParts, YarnAmounts};

use crate::{Failure, calls::QUEUE, random::Random, yarn};

use super::{
    callers::{USERS, ask, em},
    findings::{Findings, millis},
    open,
    stage::{CALM, OtherCall, Stage},
};

pub(crate) const SERVER: [&str; 2] = ["--external-hosts", "127.0.0.1"];

/// Number of queues that the cluster reports, and the bytes of each: nine megabytes every second.
const QUEUES: u64 = 1000;
const BYTES_EACH: usize = 9000;

/// Maximum increase of the p99 of any grant by such snapshots, in milliseconds.
const MORE_MAX: f64 = 5.0;

/// Provider settings: requests are refused once the last snapshot is too old.
const RULES: &str = r#", "whenDown": "refuse", "maxAge": "3s""#;
const OLD: Duration = Duration::from_secs(3);

/// Duration of each measurement.
const WINDOW: Duration = Duration::from_secs(15);
/// Maximum time until the queue is served again: one refresh interval of a second, and the refresh.
const BACK_SECONDS_MAX: f64 = 2.0;

/// Rate of the callers in the external queue, beside the others of the stage.
const PER_SECOND: f64 = 300.0;

/// Minimum rate of other callers while the cluster is unavailable, as a fraction of their usual rate.
const AWAY_MIN: f64 = 0.9;

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    stage.callers.register(1).await?;
    let cluster = yarn::put(&stage.url(), stage.database(), RULES).await?;
    let granted = Arc::new(AtomicU64::new(0));
    let queues = usize::try_from(stage.scaled(QUEUES))?;
    for _ in 0..stage.options.rounds {
        let (_, calm) = in_queue(stage, &granted).during(CALM, std::future::pending::<()>()).await?;
        let name = format!("snapshots of {queues} queues every second");
        let work = async {
            cluster.grow(queues, BYTES_EACH);
            in_queue(stage, &granted).during(WINDOW, std::future::pending::<()>()).await
        };
        let Some((_, large)) = stage.pair(findings, &name, WINDOW * 2, work).await? else { return Ok(None) };
        let (calm, large) = (calm.times(), large.times());
        findings.measured(format!("in a queue, p99: {name}"), "ms", millis(large.p99));
        findings.at_most(format!("in a queue, p99 more: {name}"), "ms", millis(large.p99) - millis(calm.p99), MORE_MAX);
        let others = findings.passes.iter().find(|passes| passes.name == name).and_then(|passes| passes.pairs.last());
        if let Some(more) = others.map(|pair| millis(pair.during.p99) - millis(pair.calm.p99)) {
            findings.at_most(format!("without one, p99 more: {name}"), "ms", more, MORE_MAX);
        }
        cluster.grow(0, 0);
        away(stage, findings, &cluster, &granted).await?;
    }
    Ok(Some(i64::try_from(granted.load(Relaxed))?))
}

/// Makes the cluster unavailable under load, and available again.
async fn away(
    stage: &Stage,
    findings: &mut Findings,
    cluster: &yarn::Cluster,
    granted: &Arc<AtomicU64>,
) -> Result<(), Failure> {
    let before = stage.rate_of_grants().await?;
    let name = "the cluster is away";
    let work = async {
        cluster.be_away(true);
        tokio::time::sleep(OLD).await;
        in_queue(stage, granted).during(WINDOW, std::future::pending::<()>()).await
    };
    if let Some((_, seen)) = stage.pair(findings, name, WINDOW * 2, work).await? {
        findings.measured(format!("in a queue, p99: {name}"), "ms", millis(seen.times().p99));
        findings.measured(format!("in a queue, refused: {name}"), "", seen.failed as f64);
    }
    let meanwhile = stage.rate_of_grants().await?;
    cluster.be_away(false);
    served_again(stage, findings, granted).await?;
    // A table grows and the machine changes within minutes, so the rates before and after count equally.
    let around = f64::midpoint(before, stage.rate_of_grants().await?);
    findings.at_least(
        "without a queue, as fast as before and after: the cluster is away",
        "",
        meanwhile / around,
        AWAY_MIN,
    );
    Ok(())
}

/// Measures how soon the queue is served again.
async fn served_again(stage: &Stage, findings: &mut Findings, granted: &Arc<AtomicU64>) -> Result<(), Failure> {
    let (client, begun) = (stage.callers.client(0), Instant::now());
    while begun.elapsed() < WINDOW * 2 {
        if let ResultResource::Available(_) = client.request_resource(&request(0)?).await? {
            granted.fetch_add(1, Relaxed);
            findings.at_most("served again when it is back", "s", begun.elapsed().as_secs_f64(), BACK_SECONDS_MAX);
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Err("no request is granted in its queue although the cluster replies again".into())
}

fn request(number: u64) -> Result<ResourceRequest, Failure> {
    let driver = LoadInstanceAmounts { memory: 1 << 30, cores: 1, instances: 1 };
    let queue_name = QUEUE.to_owned();
    let yarn = YarnAmounts { queue_memory: 1 << 30, queue_cores: 1, queue_name, ..YarnAmounts::default() };
    let resource = Resource::from_parts(ResourceParts::DriverAndYarn(driver, yarn))?;
    Ok(ResourceRequest { resource, ..ask(em(0)?, number)? })
}

/// Returns the calls in the external queue. A refusal counts as a failure.
fn in_queue(
    stage: &Stage,
    granted: &Arc<AtomicU64>,
) -> open::OpenLoopLoad<impl FnMut(u64, Random) -> OtherCall + Send + 'static> {
    let (callers, granted) = (stage.callers.clone(), granted.clone());
    let call = move |number: u64, _: Random| -> OtherCall {
        let (client, granted) = (callers.client(number), granted.clone());
        Box::pin(async move {
            match client.request_resource(&request(number % USERS)?).await? {
                ResultResource::Available(_) => {
                    granted.fetch_add(1, Relaxed);
                    Ok(Instant::now())
                }
                ResultResource::NotEnough(refusal) => Err(format!("refused: {}", refusal.reason).into()),
            }
        })
    };
    open::OpenLoopLoad { per_second: PER_SECOND, call }
}
