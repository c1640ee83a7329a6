//! Idle engines that may not end for a request: they hide no other ones, and the request is not tried at their EMs.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rm_client::{ResourceRequest, ResultResource, RmClient};
use rm_model::{name::Labels, operation::RegisterEm, selector::EmSelector};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{
    choice::{Ecm, Reaction, may_end, quick, wait, waiting},
    *,
};

/// Number of idle engines that a policy exempts, twice: more than two pages of an EM or user, and together more than a page of the cell.
const EXEMPT: i64 = 300;

/// Number of requests that wait at another EM: more than a step looks at.
const OTHERS: usize = 120;

/// Starts the exempt engines.
async fn keep_many(ecm: &Arc<Ecm>) {
    let mut starting = JoinSet::new();
    for _ in 0..20 {
        let ecm = ecm.clone();
        starting.spawn(async move {
            for _ in 0..EXEMPT / 20 {
                ecm.engine("keeper", "notebook", true).await;
            }
        });
    }
    starting.join_all().await;
}

async fn chosen(client: &RmClient) -> BTreeSet<Uuid> {
    client.reclaims().await.unwrap().iter().map(|reclaim| reclaim.ticket_id.parse().unwrap()).collect()
}

/// Returns the times at which tickets were chosen.
pub async fn chosen_times(client: &RmClient) -> Vec<String> {
    client.reclaims().await.unwrap().iter().map(|reclaim| format!("{:?}", reclaim.due_time)).collect()
}

/// The engines that may end are idle for a shorter time than many others on their EM, and in the cell. Most steps look at requests elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exempt_idle_engines_hide_no_other_ones() {
    let (database, rm) = start().await;
    let size = 2 * EXEMPT + 3;
    let registration = registration(em("host1"), load(size, size, size));
    let ecm = Arc::new(Ecm::register_as(&rm.client, registration, Reaction::Ignores).await);
    let [small, full] = ["host2", "host3"].map(|name| Ecm::register(&rm.client, name, 1, Reaction::Ignores));
    let (small, full) = (small.await, full.await);
    rm.client.set_reclaim_policy(&policy(&[("user", Some("keeper"))], ReclaimMode::Off), "").await.unwrap();
    let idle = "SELECT count(*) FROM linkis_user_resource_meta_data WHERE idle_since IS NOT NULL";
    let mut may_end = BTreeSet::new();
    for half in 1..=2 {
        keep_many(&ecm).await;
        eventually("they are idle", LONG, async || database.count(idle).await == half * (EXEMPT + 1) - 1).await;
        may_end.insert(ecm.idle_engine("ann", "sql").await);
    }
    let elsewhere = small.idle_engine("ann", "sql").await;
    for ecm in [&ecm, &full] {
        ecm.engine("bob", "spark", false).await;
    }
    rm.client.set_reclaim_policy(&quick(ReclaimMode::Observe), "").await.unwrap();
    let others = (0..OTHERS).map(|number| wait(&rm.client, full.request(&format!("user{number}"), "spark")));
    let others: Vec<_> = others.collect();
    waiting(&rm.client, OTHERS).await;
    let two = ResourceRequest { resource: load(2, 2, 2), ..ecm.request("bob", "spark") };
    let anywhere = ResourceRequest { em: None, ..ecm.request("carol", "spark") };
    let call = wait(&rm.client, two);
    eventually("both are chosen", LONG, async || chosen(&rm.client).await == may_end).await;
    // The request without an EM reads the longest idle engines of the cell.
    let calls = [call, wait(&rm.client, anywhere)];
    may_end.insert(elsewhere);
    eventually("the third one is chosen", LONG, async || chosen(&rm.client).await == may_end).await;
    // They stay chosen while the pages move on.
    let steps = || rm.metric("linkis_rm_reclaim_step_seconds_count");
    let (before, rows) = (steps(), chosen_times(&rm.client).await);
    eventually("more steps", LONG, async || steps() >= before + 5.0).await;
    assert_eq!(chosen_times(&rm.client).await, rows);
    drop((others, calls));
    assert_invariants(&database, &rm.client).await;
}

/// An engine that a policy only observes delays the end of another one, on another EM, by nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn observed_engine_delays_no_other_one() {
    let (_database, rm) = start().await;
    let [full, observed, other] =
        ["host1", "host2", "host3"].map(|name| Ecm::register(&rm.client, name, 1, Reaction::Stops));
    let (full, observed, other) = (full.await, observed.await, other.await);
    full.engine("bob", "spark", false).await;
    let shown = observed.idle_engine("ann", "spark").await;
    other.engine("bob", "spark", false).await;
    rm.client.set_reclaim_policy(&quick(ReclaimMode::Stop), "").await.unwrap();
    let observe = ReclaimPolicy {
        pattern: policy(&[("user", Some("ann"))], ReclaimMode::Off).pattern,
        ..quick(ReclaimMode::Observe)
    };
    rm.client.set_reclaim_policy(&observe, "").await.unwrap();
    // The request is queued at the full EM, because the others are drained.
    for name in ["host2", "host3"] {
        rm.client.drain(&em(name), "maintenance").await.unwrap();
    }
    let call = wait(&rm.client, ResourceRequest { em: None, ..full.request("carol", "sql") });
    waiting(&rm.client, 1).await;
    for name in ["host2", "host3"] {
        assert!(rm.client.resume(&em(name), "").await.unwrap());
    }
    eventually("it is shown", LONG, async || chosen(&rm.client).await == [shown].into()).await;
    other.rest();
    assert!(matches!(call.await.unwrap(), ResultResource::Available(_)));
    assert_eq!((observed.live().len(), other.live().len()), (1, 0));
}

/// A request without an EM takes no engine of an EM whose labels do not allow it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_without_em_takes_engines_where_labels_allow_it() {
    let (_database, rm) = start().await;
    let labels = |pairs: &[(&str, &str)]| {
        let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Labels::parse("labels", pairs.collect::<BTreeMap<_, _>>()).unwrap()
    };
    let em_of = |name: &str, own: &[(&str, &str)], reserved: &[(&str, &str)]| {
        let (labels, reserved) = (labels(own), labels(reserved));
        let registration = RegisterEm { labels, reserved, ..registration(em(name), load(100, 100, 1)) };
        let client = rm.client.clone();
        async move { Ecm::register_as(&client, registration, Reaction::Ignores).await }
    };
    let full = em_of("host1", &[("zone", "a")], &[]).await;
    full.engine("bob", "spark", false).await;
    let others =
        [em_of("host2", &[("zone", "b")], &[]).await, em_of("host3", &[("zone", "a")], &[("team", "x")]).await];
    others[0].idle_engine("bob", "spark").await;
    let request = others[1].request("bob", "spark");
    others[1].engine_of(ResourceRequest { labels: labels(&[("team", "x")]), ..request }, true).await;
    eventually("two may end", LONG, async || may_end(&rm.client).await == 2).await;
    rm.client.set_reclaim_policy(&quick(ReclaimMode::Observe), "").await.unwrap();
    let selector = EmSelector { required: labels(&[("zone", "a")]), ..EmSelector::default() };
    let call = wait(&rm.client, ResourceRequest { em: None, selector, ..full.request("ann", "sql") });
    waiting(&rm.client, 1).await;
    let steps = || rm.metric("linkis_rm_reclaim_step_seconds_count");
    let before = steps();
    eventually("more steps", LONG, async || steps() >= before + 4.0).await;
    assert_eq!(chosen(&rm.client).await, [].into());
    let allowed = em_of("host4", &[("zone", "a")], &[]).await;
    // The waiting request would take its capacity at once.
    drop(call);
    waiting(&rm.client, 0).await;
    let engine = allowed.idle_engine("bob", "spark").await;
    let selector = EmSelector { required: labels(&[("zone", "a")]), ..EmSelector::default() };
    let call = wait(&rm.client, ResourceRequest { em: None, selector, ..full.request("ann", "sql") });
    eventually("it is chosen", LONG, async || chosen(&rm.client).await == [engine].into()).await;
    drop(call);
}
