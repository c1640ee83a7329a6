//! Crowd `turns`: users that share an EM in turns, beside a user with very many requests.
//!
//! - *Trickle*: one user requests 1,000 engines at once for 100 places, and two others one after another. Each engine runs for 3 to
//!   9 s. At the start, all places are taken, and become free over 9 s. Measured is how long the two others wait.
//! - *Many users*: 400 users have ten waiting requests each for one place. Measured is the time from a release to the next grant.

use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use rm_client::{ResourceRequest, RmClient};
use rm_model::{
    em::EmInstance,
    name::Name,
    operation::{Grant, ReleaseTicket},
};

use crate::{Failure, random::Random};

use super::{
    callers::{ask, em, granted, registration},
    findings::Findings,
    stage::Stage,
};

/// One principal makes all requests.
pub(crate) const SERVER: [&str; 2] = ["--max-waiting", "5000"];

const PLACES: u64 = 100;
const AT_ONCE: u64 = 1000;
/// Duration of the trickle in a round.
const TRICKLE: Duration = Duration::from_secs(30);
/// Maximum mean wait of the users that trickle, in seconds.
const WAIT_MAX: f64 = 1.5;

const USERS: u64 = 400;
const EACH: u64 = 10;
/// Number of measured grants in a round.
const SERVED: usize = 300;
/// Maximum time from a release to the next grant, in milliseconds.
const NEXT_MAX: f64 = 40.0;

const WAIT: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(200);
/// Timeout of the entries into a queue.
const ENTRY_LIMIT: Duration = Duration::from_secs(60);

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    for round in 0..stage.options.rounds {
        trickle(stage, findings, round).await?;
        many_users(stage, findings).await?;
    }
    Ok(Some(0))
}

/// Runtime of an engine: 3 to 9 s.
fn runtime(random: &mut Random) -> Duration {
    Duration::from_millis(2999 + random.up_to(6001))
}

fn waits(em: &EmInstance, user: &str) -> Result<ResourceRequest, Failure> {
    Ok(ResourceRequest { user: Name::parse("user", user)?, wait_timeout: WAIT, ..ask(em.clone(), 0)? })
}

/// Runs an engine for `time`, and releases its ticket.
async fn run(client: RmClient, released: ReleaseTicket, time: Duration) -> Result<(), Failure> {
    tokio::time::sleep(time).await;
    Ok(client.resource_released(&released).await?)
}

async fn taken(client: &RmClient, request: &ResourceRequest) -> Result<(Grant, ReleaseTicket), Failure> {
    let grant = granted(client.request_resource(request).await?)?;
    let released = grant.released(request.user.clone());
    Ok((grant, released))
}

async fn trickle(stage: &Stage, findings: &mut Findings, round: u64) -> Result<(), Failure> {
    let (em, mut random) = (em(round)?, Random::new(round + 1));
    let client = stage.callers.client(0);
    client.register(registration(em.clone(), i64::try_from(PLACES)?)?).await?;
    let (mut held, mut engines) = (Vec::new(), JoinSet::new());
    for _ in 0..PLACES {
        held.push(taken(&client, &waits(&em, "at-the-start")?).await?.1);
    }
    for number in 0..stage.scaled(AT_ONCE) {
        let (client, request, time) = (stage.callers.client(number), waits(&em, "pig")?, runtime(&mut random));
        engines.spawn(async move {
            let (_, released) = taken(&client, &request).await?;
            run(client, released, time).await
        });
    }
    in_queue(&client, stage.scaled(AT_ONCE)).await?;
    for (number, released) in (1..).zip(held) {
        let left = runtime(&mut random).mul_f64(f64::from(number) / PLACES as f64);
        engines.spawn(run(client.clone(), released, left));
    }
    let mut others = JoinSet::new();
    for (number, user) in (0..).zip(["mouse", "dog"]) {
        let (client, request) = (stage.callers.client(number), waits(&em, user)?);
        let mut random = Random::new(100 * (round + 1) + number);
        others.spawn(async move {
            let (begun, mut waited, mut engines) = (Instant::now(), Vec::new(), JoinSet::new());
            while begun.elapsed() < TRICKLE {
                let asked = Instant::now();
                let (_, released) = taken(&client, &request).await?;
                waited.push(asked.elapsed().as_secs_f64());
                engines.spawn(run(client.clone(), released, runtime(&mut random)));
                tokio::time::sleep(random.pause(1.0)).await;
            }
            while let Some(done) = engines.join_next().await {
                done??;
            }
            Ok::<_, Failure>(waited)
        });
    }
    let mut waited = Vec::new();
    while let Some(of_one) = others.join_next().await {
        waited.extend(of_one??);
    }
    let mean = waited.iter().sum::<f64>() / waited.len().max(1) as f64;
    findings.at_most("two users beside 1,000 requests of one: mean wait", "s", mean, WAIT_MAX);
    findings.measured("their longest wait", "s", waited.iter().copied().fold(0.0, f64::max));
    while let Some(done) = engines.join_next().await {
        done??;
    }
    Ok(())
}

async fn many_users(stage: &Stage, findings: &mut Findings) -> Result<(), Failure> {
    let em = em(1000)?;
    let client = stage.callers.client(0);
    client.register(registration(em.clone(), 1)?).await?;
    let (_, mut held) = taken(&client, &waits(&em, "at-the-start")?).await?;
    let waiting = stage.scaled(USERS) * EACH;
    let mut calls = JoinSet::new();
    for number in 0..waiting {
        let client = stage.callers.client(number);
        let request = waits(&em, &format!("user{}", number % stage.scaled(USERS)))?;
        calls.spawn(async move { taken(&client, &request).await });
    }
    in_queue(&client, waiting).await?;
    let mut times = Vec::new();
    for _ in 0..SERVED.min(usize::try_from(waiting)?) {
        let released = Instant::now();
        client.resource_released(&held).await?;
        let (_, next) = calls.join_next().await.ok_or("no request waits")???;
        times.push(released.elapsed().as_secs_f64() * 1000.0);
        held = next;
    }
    times.sort_by(f64::total_cmp);
    let percentile = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    findings.measured("400 users with ten requests each: next grant, median", "ms", percentile(0.5));
    findings.at_most("400 users with ten requests each: next grant, p99", "ms", percentile(0.99), NEXT_MAX);
    calls.abort_all();
    while calls.join_next().await.is_some() {}
    client.resource_released(&held).await?;
    // A call that was aborted after its grant leaves a ticket.
    client.unregister(&em).await?;
    Ok(())
}

/// Waits until so many requests are queued.
async fn in_queue(client: &RmClient, count: u64) -> Result<(), Failure> {
    let begun = Instant::now();
    while (client.waiting().await?.len() as u64) < count {
        if begun.elapsed() > ENTRY_LIMIT {
            return Err("the requests did not enter the queue in time".into());
        }
        tokio::time::sleep(POLL).await;
    }
    Ok(())
}
