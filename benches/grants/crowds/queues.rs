//! Grants in a queue of an external cluster, beside others that need none: while it tells of very many queues, and while it is away.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use linkis_rm::{
    client::{ResourceRequest, ResultResource},
    domain::resource::{LoadInstanceAmounts, Parts, Resource, YarnAmounts},
};

use crate::{Failure, calls::QUEUE, random::Random, yarn};

use super::{
    callers::{USERS, ask, em},
    findings::{Findings, millis},
    open,
    stage::{CALM, OtherCall, Stage},
};

pub(crate) const SERVER: [&str; 2] = ["--external-hosts", "127.0.0.1"];

/// How many queues it tells of, and how much of each: nine megabytes, every second.
const QUEUES: u64 = 1000;
const BYTES_EACH: usize = 9000;

/// What a snapshot of so many may cost anybody's grant, in milliseconds.
const MORE_MAX: f64 = 5.0;

/// When what it showed last is too old, so that requests in its queues are refused.
const RULES: &str = r#", "whenDown": "refuse", "maxAge": "3s""#;
const OLD: Duration = Duration::from_secs(3);

/// How long each is looked at, and how soon it has to be served again: one refresh of a second, and what it takes.
const WINDOW: Duration = Duration::from_secs(15);
const BACK_SECONDS_MAX: f64 = 2.0;

/// Of callers in the queue; as many others as a stage has.
const PER_SECOND: f64 = 300.0;

/// How fast others have to be while it is away, as a part of how fast they are.
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
        findings.told(format!("in a queue, p99: {name}"), "ms", millis(large.p99));
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

/// It dies under load, and comes back.
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
        findings.told(format!("in a queue, p99: {name}"), "ms", millis(seen.times().p99));
        findings.told(format!("in a queue, refused: {name}"), "", seen.failed as f64);
    }
    let meanwhile = stage.rate_of_grants().await?;
    cluster.be_away(false);
    served_again(stage, findings, granted).await?;
    // A table grows all the while, and a machine is not the same for minutes: what was before counts as much as what comes after.
    let around = f64::midpoint(before, stage.rate_of_grants().await?);
    findings.at_least(
        "without a queue, as fast as before and after: the cluster is away",
        "",
        meanwhile / around,
        AWAY_MIN,
    );
    Ok(())
}

/// How soon its queues are served again.
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
    Err("nobody is served in its queue although it is back".into())
}

fn request(number: u64) -> Result<ResourceRequest, Failure> {
    let driver = LoadInstanceAmounts { memory: 1 << 30, cores: 1, instances: 1 };
    let queue_name = QUEUE.to_owned();
    let yarn = YarnAmounts { queue_memory: 1 << 30, queue_cores: 1, queue_name, ..YarnAmounts::default() };
    let resource = Resource::from_parts(Parts::DriverAndYarn(driver, yarn))?;
    Ok(ResourceRequest { resource, ..ask(em(0)?, number)? })
}

/// Callers in the queue; one that is refused counts as failed.
fn in_queue(
    stage: &Stage,
    granted: &Arc<AtomicU64>,
) -> open::Calls<impl FnMut(u64, Random) -> OtherCall + Send + 'static> {
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
    open::Calls { per_second: PER_SECOND, call }
}
