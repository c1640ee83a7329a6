//! Crowds: an EM with thousands of tickets unregisters in every possible way, and thousands of deadlines are in the same second.
//!
//! The tickets of a crowd request no cores, so limits of cores do not refuse them. All label sets count them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use rm_client::{ResourceRequest, ResultResource, RmClient};
use rm_model::{
    em::EmInstance,
    operation::{Grant, RegisterEm},
    report::{EmReport, Health},
};
use tokio::task::JoinSet;

use super::{
    journal::Answer,
    random::Random,
    workload::{Hosts, RETRY, Shared, registered},
};
use crate::harness::*;

/// Kind of the crowd's EMs, which has its own policy.
pub const KIND: &str = "linkis-cg-crowd";

/// User and creator of all tickets of crowds.
pub const CROWD: &str = "crowd";

/// Number of callers of a crowd.
const CALLERS: usize = 64;

/// Time for which tickets of the crowded EM stay locked, longer than the EM is registered.
const TTL: Duration = Duration::from_secs(300);

/// Maximum time to create a crowd, which stays smaller under a low limit.
const FILL_MAX: Duration = Duration::from_secs(120);

/// Maximum time until a silent EM is lost; after it, the test unregisters the EM.
const LOST_MAX: Duration = Duration::from_secs(25);

/// Returns the EM of a crowd.
pub fn em_of_crowd(host: &str) -> EmInstance {
    EmInstance::parse("em", KIND, em(host).instance.as_str()).unwrap()
}

fn room(host: &str) -> RegisterEm {
    RegisterEm { em: em_of_crowd(host), ..registered("any", load(1 << 20, 100, 1 << 20)) }
}

/// Fills an EM and removes it: unregistered, unregistered and registered again, or silent until it is lost.
pub async fn big_em(shared: Shared, mut random: Random) {
    let host = em_of_crowd(Hosts::CROWDED);
    let register = async |rm: RmClient| rm.register(room(Hosts::CROWDED)).await;
    let unregister = async |rm: RmClient| rm.unregister(&host).await;
    while shared.goes_on(random.millis(0, 500)).await {
        let Some(em) = shared.insist(&mut random, "register", register).await else { return };
        fill(&shared, &mut random, Hosts::CROWDED, shared.crowd, |_| TTL, FILL_MAX).await;
        match random.between(0, 9) {
            // A short run has no time for it.
            0..3 if shared.crowd > super::CROWD_SHORT => fall_silent(&shared, &mut random, em.epoch).await,
            0..7 => {
                shared.insist(&mut random, "unregister", unregister).await;
                shared.insist(&mut random, "register", register).await;
                fill(&shared, &mut random, Hosts::CROWDED, shared.crowd / 10, |_| TTL, FILL_MAX).await;
            }
            _ => {}
        }
        shared.insist(&mut random, "unregister", unregister).await;
    }
}

/// Sends a single report, without the running engines. One missing report has no effect on a ticket.
async fn fall_silent(shared: &Shared, random: &mut Random, epoch: i64) {
    let em = em_of_crowd(Hosts::CROWDED);
    let report = EmReport {
        em: em.clone(),
        epoch,
        sequence: 1,
        health: Health::Healthy,
        load: None,
        tickets: Vec::new(),
        observed: None,
        idle: vec![],
    };
    let heartbeat = async |rm: RmClient| rm.heartbeat(&report).await;
    shared.insist(random, "heartbeat", heartbeat).await;
    let silent = Instant::now();
    while silent.elapsed() < LOST_MAX && shared.goes_on(Duration::from_millis(500)).await {
        let rm = shared.client(random);
        if let Answer::Rejected = shared.journal.call("usage", rm.em(&em)).await {
            return;
        }
    }
}

/// Requests thousands of tickets with deadlines in the same second, and makes no further call for them.
pub async fn deadlines(shared: Shared, mut random: Random) {
    let register = async |rm: RmClient| rm.register(room(Hosts::DUE)).await;
    shared.insist(&mut random, "register", register).await;
    while shared.goes_on(random.millis(0, 3000)).await {
        let time = random.millis(2000, if shared.crowd > super::CROWD_SHORT { 12_000 } else { 4000 });
        let due = Instant::now() + time;
        let ttl = move |random: &mut Random| {
            (due + random.millis(0, 1000)).saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
        };
        fill(&shared, &mut random, Hosts::DUE, shared.crowd, ttl, time).await;
        if !shared.goes_on((due + Duration::from_secs(1)).saturating_duration_since(Instant::now())).await {
            break;
        }
    }
}

/// Makes many callers request one ticket after another up to this number, each locked for `ttl`. Half of the remaining tickets
/// are confirmed.
async fn fill(
    shared: &Shared,
    random: &mut Random,
    host: &'static str,
    count: usize,
    ttl: impl Fn(&mut Random) -> Duration + Copy + Send + 'static,
    longest: Duration,
) {
    let (end, left) = (Instant::now() + longest, Arc::new(AtomicUsize::new(count)));
    let mostly = random.index(shared.cluster.nodes.len());
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        let (shared, mut random, left) = (shared.clone(), random.fork(), left.clone());
        callers.spawn(async move {
            while left.load(Relaxed) > 0 && Instant::now() < end && shared.goes_on(Duration::ZERO).await {
                let lock_ttl = ttl(&mut random);
                let Some(grant) = ask(&shared, &mut random, mostly, host, lock_ttl).await else {
                    tokio::time::sleep(RETRY).await;
                    continue;
                };
                let _ = left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
                if lock_ttl == TTL && random.percent(50) {
                    come_in_use(&shared, &mut random, mostly, &grant).await;
                }
            }
        });
    }
    while let Some(ended) = callers.join_next().await {
        ended.unwrap();
    }
}

/// Returns an instance: mostly one for the whole crowd, as of one manager, and sometimes another.
fn client_of_crowd(shared: &Shared, random: &mut Random, mostly: usize) -> RmClient {
    if random.percent(95) { shared.cluster.client(mostly) } else { shared.client(random) }
}

/// Requests a ticket of the crowd, without repetitions.
async fn ask(shared: &Shared, random: &mut Random, mostly: usize, host: &str, lock_ttl: Duration) -> Option<Grant> {
    let request = ResourceRequest::new(Some(em_of_crowd(host)), name(CROWD), name(CROWD), load(1, 0, 1));
    let request = ResourceRequest { lock_ttl: Some(lock_ttl), ..request };
    let rm = client_of_crowd(shared, random, mostly);
    let answer = shared.journal.call("request", rm.request_resource(&request)).await;
    shared.journal.asked(&request, matches!(answer, Answer::Unclear));
    let Answer::Done(ResultResource::Available(grant)) = answer else { return None };
    shared.journal.granted(&request, &grant);
    Some(grant)
}

/// Confirms the engine once; some engines then report a higher use. A ticket without a reply ends with its EM, or expires.
async fn come_in_use(shared: &Shared, random: &mut Random, mostly: usize, grant: &Grant) {
    let report = inited(grant, CROWD, None);
    shared.journal.note(grant.ticket_id, "inited asked", |life| life.init_asked = true);
    let rm = client_of_crowd(shared, random, mostly);
    if let Answer::Done(_) = shared.journal.call("inited", rm.resource_inited(&report)).await {
        shared.journal.note(grant.ticket_id, "inited", |life| life.inited = true);
    }
    if random.percent(80) {
        return;
    }
    let used = load(2, 0, 1);
    let report = grant.reported(name(CROWD), used.clone());
    if let Answer::Done(_) = shared.journal.call("reported", rm.resource_reported(&report)).await {
        shared.journal.note(grant.ticket_id, "reported", |life| life.reported = Some(used));
    }
}
