//! Wait queues: large requests beside small ones, and reservations of a request that waits for its own limit.

use std::time::Duration;

use linkis_rm::{
    client::{ResourceRequest, ResultResource},
    domain::{
        limit::{LabelPattern, Rule},
        operation::Grant,
        resource::{Dimension, Resource},
    },
};

use super::{Case, Wrong, case};
use crate::harness::*;

/// Longer than any case waits.
const LONG: Duration = Duration::from_secs(60);

/// A step of a case on one EM.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// Registers the EM with so many cores.
    Register(i64),
    /// Limits a user to so many cores.
    Limit(&'static str, i64),
    /// Requests so many cores for a user.
    Request(&'static str, i64),
    /// Requests so many cores for a user, and waits.
    Wait(&'static str, i64),
    /// Releases the oldest ticket.
    Release,
    /// Awaits the grants of so many waiting requests, and counts those that still wait.
    Served(usize),
}

/// Result of a step; steps that only prepare have none.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Reply {
    Granted,
    Refused,
    /// Number of requests that still wait.
    Waiting(usize),
}

use Reply::{Granted, Refused, Waiting};

const STEPS: [Case<&[Step], &[Reply]>; 3] = [
    case(
        "volcano-sh/volcano#748, #947",
        "small requests starve a large one",
        &[
            Step::Register(4),
            Step::Request("small", 1),
            Step::Request("small", 1),
            Step::Request("small", 1),
            Step::Request("small", 1),
            Step::Wait("large", 4),
            Step::Release,
            Step::Request("small", 1),
            Step::Release,
            Step::Request("small", 1),
            Step::Release,
            Step::Request("small", 1),
            Step::Release,
            Step::Served(1),
            Step::Request("small", 1),
        ],
        &[Granted, Granted, Granted, Granted, Refused, Refused, Refused, Waiting(0), Refused],
    ),
    case(
        "kubernetes-sigs/kueue#4809, volcano-sh/volcano#2534",
        "the head of a queue reserves more than its own limit",
        &[
            Step::Register(8),
            Step::Limit("x", 2),
            Step::Request("x", 2),
            Step::Wait("x", 2),
            Step::Request("y", 1),
            Step::Request("y", 1),
            Step::Request("y", 1),
            Step::Request("y", 1),
            Step::Request("y", 1),
            Step::Request("y", 1),
        ],
        &[Granted, Granted, Granted, Granted, Granted, Refused, Refused],
    ),
    case(
        "volcano-sh/volcano#1096",
        "two large requests share what is released and neither is granted",
        &[
            Step::Register(3),
            Step::Request("x", 2),
            Step::Wait("y", 2),
            Step::Wait("z", 2),
            Step::Release,
            Step::Served(1),
        ],
        &[Granted, Waiting(1)],
    ),
];

async fn replies(rm: &Instance, steps: &[Step]) -> Vec<Reply> {
    let (host, client) = (em("host1"), &rm.client);
    let (mut grants, mut waiting, mut replies) = (Vec::<(Grant, &str)>::new(), Vec::<Call>::new(), Vec::new());
    for step in steps {
        match *step {
            Step::Register(cores) => {
                client.register(registration(host.clone(), Resource::cpu(cores).unwrap())).await.unwrap();
            }
            Step::Limit(user, cores) => {
                let pattern = LabelPattern::new([("user".to_owned(), Some(user.to_owned()))].into());
                let max = [(Dimension::Cores, cores)].into();
                client.set_limit(&Rule { pattern, mode: Default::default(), max }).await.unwrap();
            }
            Step::Request(user, cores) => {
                let call = request(&host, user, Resource::cpu(cores).unwrap());
                replies.push(match client.request_resource(&call).await.unwrap() {
                    ResultResource::Available(grant) => {
                        grants.push((grant, user));
                        Granted
                    }
                    ResultResource::NotEnough(_) => Refused,
                });
            }
            Step::Wait(user, cores) => {
                let before = client.waiting().await.unwrap().len();
                let call = request(&host, user, Resource::cpu(cores).unwrap());
                waiting.push(ask_in_task(client, ResourceRequest { wait_timeout: LONG, ..call }));
                eventually("it waits", LONG, async || client.waiting().await.unwrap().len() > before).await;
            }
            Step::Release => {
                let (grant, user) = grants.remove(0);
                client.resource_released(&release(&grant, user)).await.unwrap();
            }
            Step::Served(count) => {
                let served = || waiting.iter().filter(|call| call.is_finished()).count();
                eventually("it is granted", LONG, async || served() >= count).await;
                replies.push(Waiting(client.waiting().await.unwrap().len()));
                assert_eq!(served(), count);
            }
        }
    }
    waiting.into_iter().for_each(|call| call.abort());
    replies
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queue_with_large_request_serves_it_in_turn() {
    let mut wrong = Wrong::default();
    for case in &STEPS {
        let (database, rm) = start().await;
        wrong.compare(case, replies(&rm, case.input).await);
        assert_books(&database, &rm.client).await;
    }
    wrong.none();
}
