//! A probe for each instance: ten calls a second, independent of earlier results, so that outages have a length.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use rm_client::{ResourceRequest, ResultResource};
use rm_model::em::EmInstance;
use tokio::task::JoinSet;

use super::{journal::Answer, workload::Shared};
use crate::harness::*;

const INTERVAL: Duration = Duration::from_millis(100);

/// Times of the correct replies to each probe.
#[derive(Debug)]
pub struct Probes(Vec<Mutex<Vec<Instant>>>);

/// EM of a probe.
pub fn em_of_probe(node: usize) -> EmInstance {
    em(&format!("probe{node}"))
}

impl Probes {
    pub fn start(shared: &Shared, tasks: &mut JoinSet<()>) -> Arc<Self> {
        let nodes = shared.cluster.nodes.len();
        let probes = Arc::new(Self((0..nodes).map(|_| Mutex::new(vec![Instant::now()])).collect()));
        for node in 0..nodes {
            tasks.spawn(probes.clone().run(shared.clone(), node));
        }
        probes
    }

    async fn run(self: Arc<Self>, shared: Shared, node: usize) {
        let mut calls = JoinSet::new();
        for number in 0.. {
            if !shared.goes_on(INTERVAL).await {
                break;
            }
            calls.spawn(self.clone().ask(shared.clone(), node, number));
            while calls.try_join_next().is_some() {}
        }
        calls.join_all().await;
    }

    async fn ask(self: Arc<Self>, shared: Shared, node: usize, number: usize) {
        let user = format!("probe{node}-{number}");
        let request = request(&em_of_probe(node), &user, load(1, 1, 1));
        let request = ResourceRequest { lock_ttl: Some(Duration::from_secs(2)), ..request };
        let answer = shared.journal.call("request", shared.cluster.probe(node).request_resource(&request)).await;
        shared.journal.asked(&request, matches!(answer, Answer::Unclear));
        match answer {
            Answer::Done(ResultResource::Available(grant)) => {
                self.0[node].lock().unwrap().push(Instant::now());
                shared.journal.granted(&request, &grant);
                shared.journal.note(grant.ticket_id, "release asked", |life| life.release_asked = true);
                let ticket = release(&grant, &user);
                // Failed requests expire.
                let rm = shared.cluster.probe(node);
                if let Answer::Done(()) = shared.journal.call("released", rm.resource_released(&ticket)).await {
                    shared.journal.note(grant.ticket_id, "released", |life| life.over = true);
                }
            }
            Answer::Done(ResultResource::NotEnough(refusal)) => {
                // The use of all callers of the creator may exceed a limit.
                self.0[node].lock().unwrap().push(Instant::now());
                let got = || format!("a probe was refused: {}", refusal.reason);
                shared.journal.check(!refusal.is_of_em_alone(), got);
            }
            Answer::Rejected | Answer::Nothing | Answer::Unclear => {}
        }
    }

    /// Returns whether each probe got a reply since.
    pub fn all_since(&self, since: Instant) -> bool {
        self.0.iter().all(|answers| *answers.lock().unwrap().last().unwrap() > since)
    }

    /// Returns the longest time without a reply of any probe, from `since` until now.
    pub fn longest_outage(&self, since: Instant) -> Duration {
        let outage = |answers: &Vec<Instant>| {
            let gaps = answers.windows(2).filter(|pair| pair[1] > since).map(|pair| pair[1] - pair[0].max(since));
            gaps.max().unwrap_or_default()
        };
        self.0.iter().map(|answers| outage(&answers.lock().unwrap())).max().unwrap_or_default()
    }
}
