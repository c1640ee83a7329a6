//! Many idle engines and many waiting requests.
//!
//! - `LINKIS_RM_RECLAIM`: numbers of idle engines and of waiting requests, e.g. `100000,4000` [default: 1200,300].

use std::{collections::BTreeSet, env, time::Duration};

use rm_client::{ResourceRequest, RmClient};
use rm_model::{
    em::EmInstance,
    report::{EmReport, Health},
};
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;
use uuid::Uuid;

use super::*;

const EMS: usize = 4;

/// Maximum number of tickets that are chosen at a time.
const CHOSEN_MAX: usize = 1000;

/// Starts engines on an EM that are all idle, and reports them every second.
async fn idle_em(client: RmClient, number: usize, engines: usize) -> (EmInstance, AbortOnDropHandle<()>) {
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
            let (em, idle, tickets, health) = (of.clone(), tickets.clone(), tickets.clone(), Health::Healthy);
            let report = EmReport { em, epoch, sequence, health, load: None, tickets, observed: None, idle };
            drop(client.heartbeat(&report).await);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }));
    (em, reporting)
}

/// As many tickets are chosen as requests wait, each for another request on its own EM, up to the maximum.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_requests_choose_different_tickets() {
    let sizes = env::var("LINKIS_RM_RECLAIM").unwrap_or_else(|_| "1200,300".to_owned());
    let (engines, requests) = sizes.split_once(',').unwrap();
    let [engines, requests]: [usize; 2] = [engines, requests].map(|size| size.parse().unwrap());
    let (database, rm) = start().await;
    let mut ems = Vec::new();
    for number in 0..EMS {
        ems.push(idle_em(rm.client.clone(), number, engines / EMS).await);
    }
    let idle = "SELECT count(*) FROM linkis_user_resource_meta_data WHERE idle_since IS NOT NULL";
    let all = i64::try_from(engines / EMS * EMS).unwrap();
    eventually("all are idle", Duration::from_secs(120), async || database.count(idle).await == all).await;
    let mut waiting = JoinSet::new();
    // A connection carries 1024 calls.
    let clients: Vec<RmClient> = (0..=requests / 1000).map(|_| client(&rm.address)).collect();
    for number in 0..requests {
        let (client, em) = (clients[number / 1000].clone(), ems[number % EMS].0.clone());
        let wait_timeout = Duration::from_secs(600);
        let request = request(&em, &format!("waiting{number}"), load(1, 1, 1));
        waiting.spawn(async move { client.request_resource(&ResourceRequest { wait_timeout, ..request }).await });
    }
    let count = i64::try_from(requests).unwrap();
    let waits = "SELECT count(*) FROM linkis_resource_waiting";
    eventually("all wait", Duration::from_secs(120), async || database.count(waits).await == count).await;
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
