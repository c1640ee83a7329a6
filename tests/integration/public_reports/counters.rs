//! Counters of EMs, users and limits: concurrent and repeated calls, lowered capacity, two machines with one identity.

use std::{collections::BTreeMap, time::Duration};

use linkis_rm::domain::{
    limit::{LabelPattern, Rule},
    operation::Grant,
    report::{EmReport, Health},
    resource::{Dimension, Resource},
};
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
        let (database, rm) = start().await;
        rm.client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
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

/// A step of a case on one EM and one user.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// Registers the EM with so many cores.
    Register(i64),
    /// Limits the user to so many cores.
    Limit(i64),
    /// Requests so many cores: granted, or refused with the number that is available.
    Request(i64),
    /// Releases so many tickets, the oldest first.
    Release(usize),
    /// Reads how many cores the EM has left.
    Left,
    /// Calls Unregister with the epoch of the registration before the last.
    StaleUnregister,
    /// Calls Heartbeat with the epoch of the registration before the last.
    StaleHeartbeat,
}

/// Result of a step; steps that only prepare have none.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Reply {
    Granted,
    Refused(i64),
    Left(i64),
    /// A limit below the user's tickets.
    OverLimit,
    FailedPrecondition,
    Other,
}

use Reply::{FailedPrecondition, Granted, Left, OverLimit, Refused};

const STEPS: [Case<&[Step], &[Reply]>; 3] = [
    case(
        "YUNIKORN-2171, YARN-11964",
        "an EM comes back smaller than its tickets",
        &[
            Step::Register(8),
            Step::Request(2),
            Step::Request(2),
            Step::Request(2),
            Step::Request(2),
            Step::Register(4),
            Step::Left,
            Step::Request(1),
            Step::Request(0),
            Step::Release(3),
            Step::Left,
            Step::Request(2),
        ],
        &[Granted, Granted, Granted, Granted, Left(-4), Refused(-4), Granted, Left(2), Granted],
    ),
    case(
        "kubernetes-sigs/kueue#5176",
        "a limit is set below the tickets of its scope",
        &[
            Step::Register(100),
            Step::Request(2),
            Step::Request(2),
            Step::Request(2),
            Step::Request(2),
            Step::Limit(3),
            Step::Request(1),
            Step::Release(3),
            Step::Request(1),
            Step::Request(1),
        ],
        &[Granted, Granted, Granted, Granted, OverLimit, Refused(-5), Granted, Refused(0)],
    ),
    case(
        "hashicorp/nomad#1240, hashicorp/consul#4741",
        "two machines register under one identity",
        &[
            Step::Register(8),
            Step::Register(8),
            Step::Request(2),
            Step::StaleUnregister,
            Step::StaleHeartbeat,
            Step::Left,
        ],
        &[Granted, FailedPrecondition, FailedPrecondition, Left(6)],
    ),
];

async fn replies(rm: &Instance, steps: &[Step]) -> Vec<Reply> {
    let (host, client) = (em("host1"), &rm.client);
    let (mut epochs, mut grants, mut replies) = (Vec::new(), Vec::<Grant>::new(), Vec::new());
    let stale = |refused: Option<tonic::Code>| match refused {
        Some(tonic::Code::FailedPrecondition) => FailedPrecondition,
        _ => Reply::Other,
    };
    for step in steps {
        let reply = match *step {
            Step::Register(cores) => {
                epochs.push(client.register(registration(host.clone(), load(100, cores, 100))).await.unwrap().epoch);
                None
            }
            Step::Limit(cores) => {
                let pattern = LabelPattern::new([("user".to_owned(), Some("alice".to_owned()))].into());
                let rule = Rule { pattern, mode: Default::default(), max: [(Dimension::Cores, cores)].into() };
                (!client.set_limit(&rule).await.unwrap().is_empty()).then_some(OverLimit)
            }
            Step::Request(cores) => {
                let reply = client.request_resource(&request(&host, "alice", load(1, cores, 1))).await.unwrap();
                Some(match reply {
                    linkis_rm::client::ResultResource::Available(grant) => {
                        grants.push(grant);
                        Granted
                    }
                    linkis_rm::client::ResultResource::NotEnough(refusal) => Refused(refusal.shortfalls[0].available),
                })
            }
            Step::Release(tickets) => {
                for grant in grants.drain(..tickets) {
                    client.resource_released(&release(&grant, "alice")).await.unwrap();
                }
                None
            }
            Step::Left => {
                let left = client.em(&host).await.unwrap().left().unwrap();
                Some(Left(left.get(&Dimension::Cores)))
            }
            Step::StaleUnregister => {
                let before = epochs[epochs.len() - 2];
                Some(stale(client.unregister_fenced(&host, before).await.err().and_then(|error| error.code())))
            }
            Step::StaleHeartbeat => {
                let report = EmReport {
                    em: host.clone(),
                    epoch: epochs[epochs.len() - 2],
                    sequence: 1,
                    health: Health::Healthy,
                    load: None,
                    tickets: vec![],
                    observed: None,
                };
                Some(stale(client.heartbeat(&report).await.err().and_then(|error| error.code())))
            }
        };
        replies.extend(reply);
    }
    replies
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_with_lowered_capacity_refuse_until_it_fits() {
    let mut wrong = Wrong::default();
    for case in &STEPS {
        let (database, rm) = start().await;
        wrong.compare(case, replies(&rm, case.input).await);
        let books = tokio::time::timeout(Duration::from_secs(60), assert_books(&database, &rm.client));
        books.await.expect("an audit");
    }
    wrong.none();
}
