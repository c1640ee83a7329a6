//! Busy engines that end for requests within a guarantee.

use std::{collections::BTreeSet, time::Duration};

use rm_client::{ResourceRequest, ResultResource, RmClient};
use rm_model::{
    limit::{LabelPattern, Rule},
    limit_mode::LimitMode,
    name::Labels,
    resource::Dimension,
};
use uuid::Uuid;

use super::{
    choice::{Ecm, Reaction, quick, wait},
    exempt::chosen_times,
    *,
};

/// A policy that also ends busy engines, a second after their grants.
fn busy(mode: ReclaimMode) -> ReclaimPolicy {
    ReclaimPolicy { busy: true, min_life: Duration::from_secs(1), ..quick(mode) }
}

/// Guarantees a tenant some of ten instances.
async fn guarantee(client: &RmClient, tenant: &str, instances: i64) {
    let pattern = LabelPattern::new([("tenant".to_owned(), Some(tenant.to_owned()))].into());
    let [max, guarantee] = [10, instances].map(|instances| [(Dimension::Instances, instances)].into());
    client.set_limit(&Rule { pattern, mode: LimitMode::Enforced, max, guarantee }).await.unwrap();
}

/// Returns a request for an instance, by a user of a tenant: `red` or, one of several, `red-1`.
fn of_tenant(ecm: &Ecm, user: &str) -> ResourceRequest {
    let tenant = user.split('-').next().unwrap();
    let labels = Labels::parse("labels", [("tenant".to_owned(), tenant.to_owned())].into()).unwrap();
    ResourceRequest { labels, ..ecm.request(user, "spark") }
}

/// Returns the tickets that are chosen, and those of them whose engines end while they are busy.
async fn chosen(client: &RmClient) -> (BTreeSet<Uuid>, BTreeSet<Uuid>) {
    let reclaims = client.reclaims().await.unwrap().into_iter().filter(|reclaim| reclaim.withdrawn_time.is_none());
    let chosen: Vec<(Uuid, bool)> =
        reclaims.map(|reclaim| (reclaim.ticket_id.parse().unwrap(), reclaim.busy)).collect();
    let busy = chosen.iter().filter(|(_, busy)| *busy).map(|(ticket_id, _)| *ticket_id).collect();
    (chosen.into_iter().map(|(ticket_id, _)| ticket_id).collect(), busy)
}

/// Waits until the tickets are as old as the policies demand: until then, the older ones among them would be chosen, and stay chosen.
async fn all_are_old(database: &Database) {
    let young =
        "SELECT count(*) FROM linkis_user_resource_meta_data WHERE locked_time > clock_timestamp() - interval '1 s'";
    eventually("all are old", LONG, async || database.count(young).await == 0).await;
}

/// One of three tenants with 50, 30 and 20 % borrows all. Observe and stop choose the same engines: the idle one, and the newest others
/// down to the guarantee. Each tenant then has its part, that of a single user one after the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenants_get_their_guarantees_back() {
    let (database, rm) = start().await;
    for (tenant, instances) in [("red", 5), ("green", 3), ("blue", 2)] {
        guarantee(&rm.client, tenant, instances).await;
    }
    let ecm = Ecm::register(&rm.client, "host1", 10, Reaction::Stops).await;
    let idle = ecm.engine_of(of_tenant(&ecm, "blue"), true).await;
    let mut engines = Vec::new();
    for _ in 0..9 {
        engines.push(ecm.engine_of(of_tenant(&ecm, "blue"), false).await);
    }
    let users = ["red", "red", "red", "red", "red", "green-1", "green-2", "green-3"];
    let calls = users.map(|user| wait(&rm.client, of_tenant(&ecm, user)));
    let newest: BTreeSet<Uuid> = engines[2..].iter().copied().collect();
    let expected: BTreeSet<Uuid> = newest.iter().copied().chain([idle]).collect();
    all_are_old(&database).await;
    rm.client.set_reclaim_policy(&busy(ReclaimMode::Observe), "").await.unwrap();
    eventually("all are chosen", LONG, async || chosen(&rm.client).await == (expected.clone(), newest.clone())).await;
    let steps = rm.metric("linkis_rm_reclaim_step_seconds_count");
    eventually("more steps", LONG, async || rm.metric("linkis_rm_reclaim_step_seconds_count") > steps + 3.0).await;
    assert_eq!((chosen(&rm.client).await.0, ecm.to_stop()), (expected.clone(), [].into()));
    rm.client.set_reclaim_policy(&busy(ReclaimMode::Stop), "").await.unwrap();
    for call in calls {
        assert!(matches!(call.await.unwrap(), ResultResource::Available(_)));
    }
    assert_eq!((ecm.to_stop(), ecm.live()), (expected, engines[..2].iter().copied().collect()));
    let reasons = "SELECT count(*) FROM linkis_resource_action_record
        WHERE action = 'recalled' AND reason LIKE 'busy; the entitled request % waits'";
    assert_eq!((database.recorded("recalled").await, database.count(reasons).await), (8, 7));
    assert_eq!(rm.metric("linkis_rm_reclaim_recalled_busy_total"), 7.0);
    assert_invariants(&database, &rm.client).await;
}

/// The requests of one user are entitled one after the other. The engines for all of them are chosen once: their grace periods run together.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_for_turns_of_one_user_are_chosen_once() {
    let (database, rm) = start().await;
    guarantee(&rm.client, "red", 9).await;
    let ecm = Ecm::register(&rm.client, "host1", 10, Reaction::Stops).await;
    for _ in 0..10 {
        ecm.engine_of(of_tenant(&ecm, "blue"), false).await;
    }
    all_are_old(&database).await;
    rm.client.set_reclaim_policy(&busy(ReclaimMode::Stop), "").await.unwrap();
    let calls: Vec<_> = (0..9).map(|_| wait(&rm.client, of_tenant(&ecm, "red"))).collect();
    for call in calls {
        assert!(matches!(call.await.unwrap(), ResultResource::Available(_)));
    }
    let totals = ["chosen", "recalled"].map(|of| rm.metric(&format!("linkis_rm_reclaim_{of}_total")));
    assert_eq!(totals, [9.0, 9.0]);
    assert_invariants(&database, &rm.client).await;
}

/// A busy engine that an operator withdraws stays, and another one is chosen. Without `busy`, none is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn withdrawn_busy_engine_stays() {
    let (database, rm) = start().await;
    guarantee(&rm.client, "red", 1).await;
    let ecm = Ecm::register(&rm.client, "host1", 2, Reaction::Ignores).await;
    let [first, second] = [ecm.engine("bob", "spark", false).await, ecm.engine("bob", "spark", false).await];
    all_are_old(&database).await;
    let grace = Duration::from_secs(60);
    rm.client.set_reclaim_policy(&ReclaimPolicy { grace, ..busy(ReclaimMode::Stop) }, "").await.unwrap();
    // A request without a guarantee chooses none.
    let _other = wait(&rm.client, ecm.request("carol", "sql"));
    let _call = wait(&rm.client, of_tenant(&ecm, "red"));
    let all = |ticket_id: Uuid| (BTreeSet::from([ticket_id]), BTreeSet::from([ticket_id]));
    eventually("the newest one is chosen", LONG, async || chosen(&rm.client).await == all(second)).await;
    rm.client.withdraw_reclaim(second, "a long task").await.unwrap();
    eventually("the other one is chosen", LONG, async || chosen(&rm.client).await == all(first)).await;
    database.execute("UPDATE linkis_reclaim SET due_time = clock_timestamp()").await;
    eventually("it is recalled", LONG, async || ecm.to_stop() == [first].into()).await;
    rm.client.set_reclaim_policy(&quick(ReclaimMode::Stop), "").await.unwrap();
    eventually("none is chosen", LONG, async || chosen(&rm.client).await.0.is_empty()).await;
    assert_eq!(ecm.live(), [first, second].into());
}

/// The idle engines that replace a busy one stay chosen, also for a request that is tried at another EM in each step.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_engine_on_one_em_replaces_busy_one_on_another() {
    let (database, rm) = start().await;
    guarantee(&rm.client, "red", 2).await;
    let [home, busy_one, idle, rest] =
        ["host1", "host2", "host3", "host4"].map(|name| Ecm::register(&rm.client, name, 1, Reaction::Ignores));
    let (home, busy_one, idle, rest) = (home.await, busy_one.await, idle.await, rest.await);
    home.engine_of(of_tenant(&home, "red"), false).await;
    let engine = busy_one.engine("bob", "spark", false).await;
    let others = [idle.engine("ann", "spark", false).await, rest.engine("ann", "spark", false).await];
    all_are_old(&database).await;
    let of_all = ReclaimPolicy { grace: Duration::from_secs(200), ..busy(ReclaimMode::Stop) };
    let pattern = LabelPattern::new([("user".to_owned(), Some("ann".to_owned()))].into());
    let of_idle = ReclaimPolicy { pattern, busy: false, ..of_all.clone() };
    for policy in [of_idle, of_all] {
        rm.client.set_reclaim_policy(&policy, "").await.unwrap();
    }
    let call = wait(&rm.client, ResourceRequest { em: None, ..of_tenant(&home, "red") });
    let busy_ones = BTreeSet::from([engine]);
    eventually("the busy one is chosen", LONG, async || {
        chosen(&rm.client).await == (busy_ones.clone(), busy_ones.clone())
    })
    .await;
    idle.rest();
    rest.rest();
    let is_replaced = async || {
        let (all, of_busy) = chosen(&rm.client).await;
        all.len() == 2 && of_busy == busy_ones && others.iter().any(|other| all.contains(other))
    };
    eventually("an idle one is chosen, and the busy one is a reserve", LONG, is_replaced).await;
    let rows = chosen_times(&rm.client).await;
    let steps = || rm.metric("linkis_rm_reclaim_step_seconds_count");
    let before = steps();
    eventually("more steps", LONG, async || steps() >= before + 6.0).await;
    assert_eq!(chosen_times(&rm.client).await, rows);
    drop(call);
    assert_invariants(&database, &rm.client).await;
}

/// A request without an EM that waits at one EM ends a busy engine on another one, where its tenant borrows nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn busy_engine_on_another_em_ends_for_request_without_em() {
    let (database, rm) = start().await;
    guarantee(&rm.client, "red", 2).await;
    let [home, other] = ["host1", "host2"].map(|name| Ecm::register(&rm.client, name, 1, Reaction::Stops));
    let (home, other) = (home.await, other.await);
    home.engine_of(of_tenant(&home, "red"), false).await;
    let engine = other.engine("bob", "spark", false).await;
    rm.client.set_reclaim_policy(&busy(ReclaimMode::Stop), "").await.unwrap();
    let call = wait(&rm.client, ResourceRequest { em: None, ..of_tenant(&home, "red") });
    assert!(matches!(call.await.unwrap(), ResultResource::Available(_)));
    assert_eq!((other.to_stop(), home.to_stop()), ([engine].into(), [].into()));
    assert_invariants(&database, &rm.client).await;
}
