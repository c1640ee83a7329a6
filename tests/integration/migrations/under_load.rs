//! Counters of an earlier release are converted while calls continue.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, RwLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use rm_client::{ResourceRequest, RmClient};
use rm_model::{
    limit::{LabelPattern, Rule},
    operation::Grant,
    resource::{Dimension, LoadInstanceAmounts, Resource, ResourceParts, YarnAmounts},
};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::harness::*;

const CALLERS: usize = 36;
const EMS: usize = 20;

/// Number of tickets of each caller during the test.
const HELD: usize = 80;

/// Converts the counters to those of the first release, between two commits. Tickets that lack a label are in no scope, no request has a
/// label "queue", and each scope has one sum of all queues.
const COUNTED_BEFORE: &str = "
    BEGIN;
    LOCK TABLE linkis_resource_limit_version IN ACCESS EXCLUSIVE MODE;
    UPDATE linkis_label_set SET lacking = 'skipped', family = 'skipped', queues = 'summed';
    DELETE FROM linkis_label_resource WHERE scope ->> 'engine_type' = '' OR scope ? 'queue';
    UPDATE linkis_label_resource r SET
        used_resource = used_resource || jsonb_strip_nulls(jsonb_build_object('queue_cores', nullif(used, 0))),
        locked_resource = locked_resource || jsonb_strip_nulls(jsonb_build_object('queue_cores', nullif(locked, 0)))
    FROM (
        SELECT \"user\", engine_type, sum((user_used_resource -> 'yarnResource' ->> 'queueCores')::bigint) AS used,
            sum((user_locked_resource -> 'yarnResource' ->> 'queueCores')::bigint) AS locked
        FROM linkis_user_resource_meta_data GROUP BY \"user\", engine_type) t
    WHERE r.scope = jsonb_build_object('user', t.\"user\", 'engine_type', t.engine_type);
    UPDATE linkis_resource_limit_version SET oldest_writer = 1, version = gen_random_uuid();
    COMMIT";

/// Returns a limit for each user and each value of another label.
fn each_with(label: &str, dimension: Dimension, max: i64) -> Rule {
    let labels = [("user".to_owned(), None), (label.to_owned(), None)];
    Rule {
        pattern: LabelPattern::new(BTreeMap::from(labels)),
        mode: Default::default(),
        max: [(dimension, max)].into(),
    }
}

/// The engines of one user: with and without a type, with and without a queue.
struct Caller {
    number: usize,
    turn: usize,
    instances: Arc<RwLock<Vec<RmClient>>>,
    held: VecDeque<Grant>,
}

impl Caller {
    /// Returns a client of a serving instance.
    fn rm(&mut self) -> RmClient {
        self.turn += 1;
        let instances = self.instances.read().unwrap();
        instances[(self.number + self.turn) % instances.len()].clone()
    }

    fn user(&self) -> String {
        format!("user{}", self.number % 4)
    }

    /// Requests a ticket, and confirms two of three engines: one with the granted amounts, one with less.
    async fn begin(&mut self) {
        let rm = self.rm();
        let em1 = em(&format!("host{}", (self.number * 7 + self.turn) % EMS));
        let resource = asked(self.turn);
        let ask = ResourceRequest {
            engine_type: ["", "spark-3.2.1"][self.turn / 2 % 2].to_owned(),
            ..request(&em1, &self.user(), resource.clone())
        };
        let grant = rm.request_resource(&ask).await.granted();
        let used = (self.turn % 3 == 1).then(|| less(&resource));
        if !self.turn.is_multiple_of(3) {
            self.rm().resource_inited(&inited(&grant, &self.user(), used)).await.unwrap();
        }
        self.held.push_back(grant);
    }

    async fn end_oldest(&mut self) {
        let grant = self.held.pop_front().unwrap();
        self.rm().resource_released(&release(&grant, &self.user())).await.unwrap();
    }
}

fn asked(turn: usize) -> Resource {
    let driver = LoadInstanceAmounts { memory: 2 * GB, cores: 2, instances: 1 };
    match ["", "etl", "adhoc"][turn % 5 % 3] {
        "" => Resource::from_parts(ResourceParts::LoadInstance(driver)).unwrap(),
        queue => {
            let yarn = YarnAmounts { queue_cores: 4, queue_name: queue.to_owned(), ..YarnAmounts::default() };
            Resource::from_parts(ResourceParts::DriverAndYarn(driver, yarn)).unwrap()
        }
    }
}

fn less(asked: &Resource) -> Resource {
    match asked.parts() {
        ResourceParts::DriverAndYarn(driver, yarn) => {
            let (driver, yarn) = (LoadInstanceAmounts { cores: 1, ..driver }, YarnAmounts { queue_cores: 1, ..yarn });
            Resource::from_parts(ResourceParts::DriverAndYarn(driver, yarn)).unwrap()
        }
        _ => load(1, 1, 1),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_of_earlier_release_are_recounted_under_load() {
    let (database, stays, restarts) = two().await;
    for number in 0..EMS {
        stays.client.register(registration(em(&format!("host{number}")), load(9999, 9999, 9999))).await.unwrap();
    }
    stays.client.set_limit(&each_with("engine_type", Dimension::Instances, 100_000)).await.unwrap();
    stays.client.set_limit(&each_with("queue", Dimension::QueueCores, 100_000)).await.unwrap();
    let instances = Arc::new(RwLock::new(vec![stays.client.clone(), restarts.client.clone()]));
    let (stop, served, filled) =
        (CancellationToken::new(), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut callers = JoinSet::new();
    for number in 0..CALLERS {
        let (stop, served, filled) = (stop.clone(), served.clone(), filled.clone());
        let mut caller = Caller { number, turn: 0, instances: instances.clone(), held: VecDeque::new() };
        callers.spawn(async move {
            while caller.held.len() < HELD {
                caller.begin().await;
            }
            filled.fetch_add(1, Relaxed);
            // An unexpected reply ends the test.
            while !stop.is_cancelled() {
                caller.begin().await;
                caller.end_oldest().await;
                served.fetch_add(1, Relaxed);
            }
        });
    }
    let all_filled = async || filled.load(Relaxed) == CALLERS;
    eventually("there are thousands of tickets", Duration::from_secs(120), all_filled).await;

    instances.write().unwrap().truncate(1);
    // The stopped instances reply to their open calls first.
    restarts.stop().await;
    let at = served.load(Relaxed);
    database.execute(COUNTED_BEFORE).await;
    let restarts = Instance::start(&database).await;
    instances.write().unwrap().push(restarts.client.clone());
    // New label sets; the earlier ones have the first two numbers.
    let anew = "SELECT count(*) FROM linkis_label_set
        WHERE lacking = 'empty' AND queues = 'apart' AND state = 'counted' AND label_set_id > 2";
    let all_anew = async || database.count(anew).await == 2;
    eventually("all are counted anew", Duration::from_secs(180), all_anew).await;
    assert!(served.load(Relaxed) > at, "others are served meanwhile");
    stop.cancel();
    while let Some(ended) = callers.join_next().await {
        ended.unwrap();
    }

    for rm in [&stays, &restarts] {
        assert_eq!(assert_invariants(&database, &rm.client).await, CALLERS * HELD);
        rm.client.set_limit(&each_with("engine_type", Dimension::Instances, 1)).await.unwrap();
        let ask = ResourceRequest { engine_type: String::new(), ..request(&em("host0"), "user0", load(1, 1, 1)) };
        let refusal = rm.client.request_resource(&ask).await.refused();
        assert_eq!(refusal.shortfalls[0].scope, "engine_type=,user=user0");
        rm.client.set_limit(&each_with("engine_type", Dimension::Instances, 100_000)).await.unwrap();
    }
    assert_eq!(database.count("SELECT oldest_writer::bigint FROM linkis_resource_limit_version").await, 7);
}
