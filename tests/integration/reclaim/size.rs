//! Many engines and many waiting requests.
//!
//! - `LINKIS_RM_RECLAIM`: numbers of engines and of waiting requests, e.g. `100000,4000` [default: 1200,300].

use std::{collections::BTreeSet, env, time::Duration};

use rm_client::{ResourceRequest, RmClient};
use rm_model::{
    em::EmInstance,
    limit::Rule,
    limit_mode::LimitMode,
    report::{EmReport, Health},
    resource::Dimension,
};
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;
use uuid::Uuid;

use super::*;

const EMS: usize = 4;

/// Maximum number of tickets that are chosen at a time.
const CHOSEN_MAX: usize = 1000;

/// Returns the numbers of engines and of waiting requests.
fn sizes() -> [usize; 2] {
    let sizes = env::var("LINKIS_RM_RECLAIM").unwrap_or_else(|_| "1200,300".to_owned());
    let (engines, requests) = sizes.split_once(',').unwrap();
    [engines, requests].map(|size| size.parse().unwrap())
}

/// Starts an instance at which one caller may send all requests.
async fn start_for_many() -> (Database, Instance) {
    let database = Database::fresh().await;
    let rm = Instance::start_with(&database, settings().with("--max-waiting", 100_000)).await;
    (database, rm)
}

/// Starts engines on full EMs that are all idle or all busy, and whose EMs report every second.
async fn full_ems(rm: &Instance, engines: usize, is_idle: bool) -> Vec<(EmInstance, AbortOnDropHandle<()>)> {
    let mut ems = Vec::new();
    for number in 0..EMS {
        ems.push(full_em(rm.client.clone(), number, engines / EMS, is_idle).await);
    }
    ems
}

async fn full_em(
    client: RmClient,
    number: usize,
    engines: usize,
    is_idle: bool,
) -> (EmInstance, AbortOnDropHandle<()>) {
    let em = em(&format!("host{number}"));
    let size = i64::try_from(engines).unwrap();
    let epoch = client.register(registration(em.clone(), load(size, size, size))).await.unwrap().epoch;
    let mut starting = JoinSet::new();
    for caller in 0..50 {
        let (client, em) = (client.clone(), em.clone());
        starting.spawn(async move {
            let mut tickets = Vec::new();
            for _ in (caller..engines).step_by(50) {
                let user = format!("user{caller}");
                let grant = client.request_resource(&request(&em, &user, load(1, 1, 1))).await.granted();
                client.resource_inited(&inited(&grant, &user, None)).await.unwrap();
                tickets.push(grant.ticket_id);
            }
            tickets
        });
    }
    let tickets: Vec<Uuid> = starting.join_all().await.concat();
    let of = em.clone();
    let reporting = AbortOnDropHandle::new(tokio::spawn(async move {
        for sequence in 1.. {
            let idle = if is_idle { tickets.clone() } else { Vec::new() };
            let (em, tickets, health) = (of.clone(), tickets.clone(), Health::Healthy);
            let report = EmReport { em, epoch, sequence, health, load: None, tickets, observed: None, idle };
            drop(client.heartbeat(&report).await);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }));
    (em, reporting)
}

/// Sends requests of as many users that wait at the EMs.
async fn all_wait(
    (database, rm): (&Database, &Instance),
    ems: &[(EmInstance, AbortOnDropHandle<()>)],
    requests: usize,
) -> JoinSet<()> {
    let mut waiting = JoinSet::new();
    // A connection carries 1024 calls.
    let clients: Vec<RmClient> = (0..=requests / 1000).map(|_| client(&rm.address)).collect();
    for number in 0..requests {
        let (client, em) = (clients[number / 1000].clone(), ems[number % EMS].0.clone());
        let wait_timeout = Duration::from_secs(600);
        let request = request(&em, &format!("waiting{number}"), load(1, 1, 1));
        waiting.spawn(async move { drop(client.request_resource(&ResourceRequest { wait_timeout, ..request }).await) });
    }
    let count = i64::try_from(requests).unwrap();
    let waits = "SELECT count(*) FROM linkis_resource_waiting";
    eventually("all wait", Duration::from_secs(120), async || database.count(waits).await == count).await;
    waiting
}

/// A policy recalls no more busy engines for many entitled requests within a minute than it allows. At most the maximum is chosen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_entitled_requests_recall_at_most_rate() {
    let [engines, requests] = sizes();
    let (database, rm) = start_for_many().await;
    let each_user = LabelPattern::new([("user".to_owned(), None)].into());
    let [max, guarantee] = [1_000_000, 1].map(|instances| [(Dimension::Instances, instances)].into());
    rm.client.set_limit(&Rule { pattern: each_user, mode: LimitMode::Enforced, max, guarantee }).await.unwrap();
    let ems = full_ems(&rm, engines, false).await;
    let waiting = all_wait((&database, &rm), &ems, requests).await;
    let entitled = "SELECT count(*) FROM linkis_resource_waiting WHERE class = 0";
    assert_eq!(database.count(entitled).await, i64::try_from(requests).unwrap());
    let second = Duration::from_secs(1);
    let policy = policy(&[("user", None)], ReclaimMode::Stop);
    let policy = ReclaimPolicy { busy: true, min_life: second, grace: second, per_minute: 20, ..policy };
    rm.client.set_reclaim_policy(&policy, "").await.unwrap();
    let recalled = || ["", "_busy"].map(|kind| rm.metric(&format!("linkis_rm_reclaim_recalled{kind}_total")));
    eventually("the rate is used", LONG, async || recalled()[0] >= 20.0).await;
    let steps = || rm.metric("linkis_rm_reclaim_step_seconds_count");
    let before = steps();
    eventually("more steps", LONG, async || steps() >= before + 5.0).await;
    assert_eq!(recalled(), [20.0, 20.0]);
    assert!(database.count("SELECT count(*) FROM linkis_reclaim").await <= i64::try_from(CHOSEN_MAX).unwrap());
    let [steps, seconds] = ["count", "sum"].map(|of| rm.metric(&format!("linkis_rm_reclaim_step_seconds_{of}")));
    println!("{steps} steps of {:.0} ms on average", 1000.0 * seconds / steps);
    drop(waiting);
}

/// As many tickets are chosen as requests wait, each for another request on its own EM, up to the maximum.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_requests_choose_different_tickets() {
    let [engines, requests] = sizes();
    let (database, rm) = start_for_many().await;
    let ems = full_ems(&rm, engines, true).await;
    let idle = "SELECT count(*) FROM linkis_user_resource_meta_data WHERE idle_since IS NOT NULL";
    let all = i64::try_from(engines / EMS * EMS).unwrap();
    eventually("all are idle", Duration::from_secs(120), async || database.count(idle).await == all).await;
    let waiting = all_wait((&database, &rm), &ems, requests).await;
    let second = Duration::from_secs(1);
    let policy = ReclaimPolicy { idle_after: second, ..policy(&[("user", None)], ReclaimMode::Observe) };
    let done = || ["count", "sum"].map(|of| rm.metric(&format!("linkis_rm_reclaim_step_seconds_{of}")));
    let before = done();
    rm.client.set_reclaim_policy(&policy, "").await.unwrap();
    let expected = requests.min(CHOSEN_MAX);
    // Where a page came before an earlier one had its choices, a request has too many until its next turn.
    eventually("all are chosen", Duration::from_secs(300), async || {
        let reclaims = rm.client.reclaims().await.unwrap();
        let distinct: BTreeSet<&str> = reclaims.iter().map(|reclaim| reclaim.for_ticket_id.as_str()).collect();
        (reclaims.len(), distinct.len()) == (expected, expected)
    })
    .await;
    let on_its_em = "SELECT count(*) FROM linkis_reclaim r JOIN linkis_user_resource_meta_data t USING (ticket_id)
        JOIN linkis_resource_waiting w ON w.ticket_id = r.for_ticket_id WHERE w.em_instance = t.em_instance";
    assert_eq!(database.count(on_its_em).await, i64::try_from(expected).unwrap());
    // Later steps of an unchanged state change nothing.
    let chosen = async || {
        let reclaims = rm.client.reclaims().await.unwrap();
        reclaims.into_iter().map(|reclaim| (reclaim.ticket_id, reclaim.for_ticket_id)).collect::<BTreeSet<_>>()
    };
    let (rows, steps) = (chosen().await, done()[0]);
    eventually("more steps", LONG, async || done()[0] >= steps + 5.0).await;
    assert_eq!(chosen().await, rows);
    let [steps, seconds] = done();
    let (steps, seconds) = (steps - before[0], seconds - before[1]);
    println!("{steps} steps of {:.0} ms on average", 1000.0 * seconds / steps);
    drop(waiting);
}

/// All chosen tickets are withdrawn twice, and others are chosen each time. A fifth of the sizes, because withdrawals take turns.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_withdrawn_tickets_leave_room_for_others() {
    let [engines, requests] = sizes().map(|size| size / 5);
    let (database, rm) = start_for_many().await;
    let ems = full_ems(&rm, engines, true).await;
    let waiting = all_wait((&database, &rm), &ems, requests).await;
    let second = Duration::from_secs(1);
    let policy = ReclaimPolicy { idle_after: second, ..policy(&[("user", None)], ReclaimMode::Observe) };
    rm.client.set_reclaim_policy(&policy, "").await.unwrap();
    let expected = i64::try_from(requests.min(CHOSEN_MAX)).unwrap();
    let (chosen, withdrawn) = ["NULL", "NOT NULL"]
        .map(|of| format!("SELECT count(*) FROM linkis_reclaim WHERE withdrawn_time IS {of}"))
        .into();
    for round in 0..2 {
        eventually("others are chosen", Duration::from_secs(300), async || database.count(&chosen).await == expected)
            .await;
        assert_eq!(database.count(&withdrawn).await, round * expected);
        let reclaims = rm.client.reclaims().await.unwrap();
        for reclaim in reclaims.into_iter().filter(|reclaim| reclaim.withdrawn_time.is_none()) {
            rm.client.withdraw_reclaim(reclaim.ticket_id.parse().unwrap(), "they stay").await.unwrap();
        }
    }
    eventually("others are chosen", Duration::from_secs(300), async || database.count(&chosen).await == expected).await;
    drop(waiting);
}
