//! Crowd `line`: requests that wait for few slots. Each slot is released immediately after its grant.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tokio::task::JoinSet;

use crate::Failure;

use super::{
    callers::{ask, em, granted, registration, release},
    findings::Findings,
    stage::Stage,
};

const WAITING: u64 = 3500;
const SLOTS: [u64; 2] = [10, 1000];

/// Minimum number of served requests per second.
const SERVED_MIN: f64 = 1500.0;

const WAIT: Duration = Duration::from_secs(300);
const WAITING_LIMIT: Duration = Duration::from_secs(60);
const LIMIT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(200);

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    let waiting = stage.scaled(WAITING);
    for _ in 0..stage.options.rounds {
        for (number, slots) in (0..).zip(SLOTS) {
            if !one(stage, findings, number, slots, waiting).await? {
                return Ok(None);
            }
        }
    }
    Ok(Some(0))
}

/// Runs one wait queue. Returns true if all waiting requests were served in time.
async fn one(
    stage: &Stage,
    findings: &mut Findings,
    em_number: u64,
    slots: u64,
    waiting: u64,
) -> Result<bool, Failure> {
    let em = em(em_number)?;
    let client = stage.callers.client(0);
    client.register(registration(em.clone(), i64::try_from(slots)?)?).await?;
    let (asked, name) = (em.clone(), format!("{waiting} wait for {slots} slots"));
    let fill = move |client: rm_client::RmClient, number: u64| {
        let em = asked.clone();
        async move { Ok(granted(client.request_resource(&ask(em, number)?).await?)?.ticket_id) }
    };
    let held = stage.callers.each("slots are taken", slots, fill).await?;
    let served = Arc::new(AtomicU64::new(0));
    let mut line = JoinSet::new();
    for number in 0..waiting {
        let (client, em, served) = (stage.callers.client(number), em.clone(), served.clone());
        line.spawn(async move {
            let mut request = ask(em.clone(), number)?;
            request.wait_timeout = WAIT;
            let grant = granted(client.request_resource(&request).await?)?;
            served.fetch_add(1, Relaxed);
            Ok::<(), Failure>(client.resource_released(&grant.released(request.user)).await?)
        });
    }
    let begun = Instant::now();
    loop {
        let enqueued = client.waiting().await?.len() as u64;
        if enqueued == waiting {
            break;
        }
        if begun.elapsed() > WAITING_LIMIT {
            findings.unfinished.push(format!("{name}: only {enqueued} waited at the time limit"));
            return Ok(false);
        }
        tokio::time::sleep(POLL).await;
    }
    let work = async {
        let begun = Instant::now();
        let release_call = |number: u64, ticket| (stage.callers.client(number), release(ticket, em.clone(), number));
        let mut back = JoinSet::new();
        for (number, ticket) in (0..).zip(held) {
            let (client, released) = release_call(number, ticket);
            let released = released?;
            back.spawn(async move { client.resource_released(&released).await });
        }
        while let Some(released) = back.join_next().await {
            released??;
        }
        while let Some(done) = line.join_next().await {
            done??;
        }
        Ok(begun.elapsed().as_secs_f64())
    };
    let Some(seconds) = stage.pair(findings, &name, LIMIT, work).await? else {
        findings.unfinished.push(format!("{name}: {} served at the time limit", served.load(Relaxed)));
        return Ok(false);
    };
    findings.at_least(format!("{name}: served"), "/s", waiting as f64 / seconds, SERVED_MIN);
    Ok(true)
}
