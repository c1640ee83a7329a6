//! Counters of EMs and users beside concurrent and repeated calls.

use std::collections::BTreeMap;

use rm_model::resource::{Dimension, Resource};
use tokio::task::JoinSet;

use super::{Case, Wrong, case};
use crate::harness::*;

/// Calls that are made for each ticket, all at once.
#[derive(Debug, Clone, Copy)]
enum Repeated {
    /// ResourceInited of 40 tickets, each so often, with half of the memory used.
    Inited(usize),
    /// ResourceReleased of the first 20 of 40 tickets, each so often.
    Released(usize),
}

/// Sums of an EM and of its user: used and locked, each in GiB, cores and instances.
type Sums = [[i64; 3]; 2];

const REPEATED: [Case<Repeated, Sums>; 2] = [
    case(
        "apache/linkis#1137",
        "a concurrent confirmation moves locked to used twice",
        Repeated::Inited(2),
        [[80, 40, 40], [0, 0, 0]],
    ),
    case(
        "apache/linkis#1140, hashicorp/nomad#10694",
        "a repeated release is credited more than once",
        Repeated::Released(3),
        [[0, 0, 0], [80, 20, 20]],
    ),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_with_concurrent_repeats_equal_tickets() {
    let mut wrong = Wrong::default();
    for case in &REPEATED {
        let (database, rm) = start_with_em(em("host1"), load(1000, 1000, 1000)).await;
        rm.client.set_limit(&each_user(1000)).await.unwrap();
        let mut grants = Vec::new();
        for _ in 0..40 {
            grants.push(rm.client.request_resource(&request(&em("host1"), "alice", load(4, 1, 1))).await.granted());
        }
        let mut calls = JoinSet::new();
        let (affected, times) = match case.input {
            Repeated::Inited(times) => (40, times),
            Repeated::Released(times) => (20, times),
        };
        for grant in grants.iter().take(affected).flat_map(|grant| vec![grant.clone(); times]) {
            let (client, is_release) = (rm.client.clone(), matches!(case.input, Repeated::Released(_)));
            calls.spawn(async move {
                match is_release {
                    true => client.resource_released(&release(&grant, "alice")).await.unwrap(),
                    false => drop(client.resource_inited(&inited(&grant, "alice", Some(load(2, 1, 1)))).await.unwrap()),
                }
            });
        }
        calls.join_all().await;
        let sums = |used: &Resource, locked: &Resource| {
            [used, locked].map(|held| {
                let [memory, cores, instances] =
                    [Dimension::Memory, Dimension::Cores, Dimension::Instances].map(|dimension| held.get(&dimension));
                [memory / GB, cores, instances]
            })
        };
        let host = rm.client.em(&em("host1")).await.unwrap();
        wrong.compare(case, sums(&host.used, &host.locked));
        let user = rm.client.scope(&BTreeMap::from([("user".to_owned(), "alice".to_owned())])).await.unwrap();
        let counted = [user.usage.used, user.usage.locked].map(|tally| tally.get(&Dimension::Instances));
        assert_eq!(counted, case.right.map(|[_, _, instances]| instances), "{}: the user's counter", case.source);
        assert_invariants(&database, &rm.client).await;
    }
    wrong.none();
}
