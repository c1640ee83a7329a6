//! Reclaim and guarantees: with many tickets, a step reads little more than with few.

use std::time::Duration;

use rm_client::ResourceRequest;
use rm_model::{
    limit::{LabelPattern, Rule},
    reclaim::{ReclaimMode, ReclaimPolicy},
    resource::Dimension,
};

use super::{
    costs::{Costs, Counting, MORE_PAGES, compare},
    for_each,
    tables::{FEW, MANY, fill},
    with_history,
};
use crate::harness::*;

/// Statements of reclaim and guarantees that this test makes.
const STATEMENTS: [&str; 6] = [
    "reclaim::all",
    "reclaim::choose",
    "user_resource::longest_idle",
    "user_resource::newest_used",
    "waiting::present",
    "waiting::promises",
];

/// Returns the costs while two entitled requests wait, with and without an EM, and steps choose a busy engine.
async fn measure(postgres: &Counting, name_of: &str, rows: i64) -> Costs {
    let database = postgres.database(name_of).await;
    let rm = with_history(&database).await;
    let rule = for_each("user", 1_000_000);
    rm.client.set_limit(&rule).await.unwrap();
    for user in ["carol", "dave"] {
        let pattern = LabelPattern::new([("user".to_owned(), Some(user.to_owned()))].into());
        let guarantee = [(Dimension::Instances, 5)].into();
        rm.client.set_limit(&Rule { pattern, guarantee, ..rule.clone() }).await.unwrap();
    }
    let full = em("template-full");
    rm.client.register(registration(full.clone(), load(2, 2, 2))).await.unwrap();
    for user in ["ann", "bob"] {
        let grant = rm.client.request_resource(&request(&full, user, load(1, 1, 1))).await.granted();
        rm.client.resource_inited(&inited(&grant, user, None)).await.unwrap();
    }
    fill(&database, rows).await;
    database
        .execute(
            "UPDATE linkis_user_resource_meta_data SET locked_time = now() - interval '1 hour',
                idle_since = CASE WHEN em_application_name = 'other' AND hashtext(ticket_id::text) % 2 = 0 THEN now() - interval '1 hour' END
                WHERE used_time IS NOT NULL",
        )
        .await;
    database.execute("VACUUM ANALYZE").await;
    let named = patient(&full, "carol", load(1, 1, 1));
    let anywhere = ResourceRequest { em: None, ..patient(&full, "dave", load(1, 1, 1)) };
    let _calls = [enqueue(&rm.client, named).await, enqueue(&rm.client, anywhere).await];
    drop(postgres.costs(&database).await);
    let each_user = for_each("user", 1).pattern;
    let min_life = Duration::from_secs(1);
    let policy = ReclaimPolicy { busy: true, min_life, ..ReclaimPolicy::new(each_user, ReclaimMode::Observe) };
    rm.client.set_reclaim_policy(&policy, "").await.unwrap();
    let chosen = async || rm.client.reclaims().await.unwrap().iter().filter(|reclaim| reclaim.busy).count();
    eventually("busy engines are chosen", LONG, async || chosen().await > 0).await;
    let steps = || rm.metric("linkis_rm_reclaim_step_seconds_count");
    let before = steps();
    eventually("more steps", LONG, async || steps() >= before + 5.0).await;
    let costs = postgres.costs(&database).await;
    rm.stop().await;
    costs
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reclaim_steps_read_bounded_pages() {
    let postgres = Counting::start(&Database::fresh().await, "plans-reclaim").await;
    let (few, many) =
        tokio::join!(measure(&postgres, "reclaim_few", FEW), measure(&postgres, "reclaim_many", 5 * MANY));
    let dear = compare("steps of reclaim", &few, &many, MORE_PAGES);
    assert!(dear.is_empty(), "{dear:#?}");
    for statement in STATEMENTS {
        assert!(many.keys().any(|made| made.starts_with(statement)) || !postgres.is_counting(), "{statement}");
    }
    postgres.stop().await;
}
