//! Callers that report as EMs, with the tickets of their engines.

use std::{
    collections::{HashMap, HashSet},
    sync::Mutex,
    time::Duration,
};

use rm_client::RmClient;
use rm_model::{
    em::EmInstance,
    operation::RegisterEm,
    report::{EmReport, Health},
};
use uuid::Uuid;

use super::{
    journal::Answer,
    random::Random,
    workload::{Hosts, Shared, registered},
};
use crate::harness::*;

/// Interval between two reports of an EM.
const INTERVAL: Duration = Duration::from_millis(400);

/// Tickets of the reporting EMs.
#[derive(Debug, Default)]
pub struct Engines(Mutex<HashMap<EmInstance, HashSet<Uuid>>>);

impl Engines {
    pub fn is_reporting(&self, on: &EmInstance) -> bool {
        Hosts::REPORTING.iter().any(|host| em(host) == *on)
    }

    pub fn insert(&self, on: &EmInstance, ticket_id: Uuid) {
        if self.is_reporting(on) {
            self.0.lock().unwrap().entry(on.clone()).or_default().insert(ticket_id);
        }
    }

    pub fn remove(&self, on: &EmInstance, ticket_id: Uuid) {
        if let Some(engines) = self.0.lock().unwrap().get_mut(on) {
            engines.remove(&ticket_id);
        }
    }

    fn on(&self, on: &EmInstance) -> HashSet<Uuid> {
        self.0.lock().unwrap().get(on).cloned().unwrap_or_default()
    }
}

/// Registers, and reports until the end. Registers again when the registration is no longer valid.
pub async fn run(shared: Shared, mut random: Random, em: EmInstance) {
    let registration = RegisterEm { em: em.clone(), ..registered("any", load(60, 60, 60)) };
    while !shared.stop.is_cancelled() {
        let register = async |rm: RmClient| rm.register(registration.clone()).await;
        let Some(registered) = shared.insist(&mut random, "register", register).await else { return };
        report(&shared, &mut random, &em, registered.epoch).await;
    }
}

/// Reports until the registration is no longer valid, or the run ends.
async fn report(shared: &Shared, random: &mut Random, em: &EmInstance, epoch: i64) {
    let mut sequence = 0;
    while shared.goes_on(INTERVAL).await {
        sequence += 1;
        let report = EmReport {
            em: em.clone(),
            epoch,
            sequence,
            health: Health::Healthy,
            load: None,
            tickets: shared.engines.on(em).into_iter().collect(),
            observed: None,
            idle: vec![],
        };
        // As an EM without a reply: repeats the report, then sends the next one.
        for _ in 0..3 {
            let rm = shared.cluster.host(random.index(shared.cluster.nodes.len()));
            match shared.journal.call("heartbeat", rm.heartbeat(&report)).await {
                Answer::Done(heartbeat) => {
                    for unknown in heartbeat.unknown_tickets {
                        let got = || {
                            format!("{} was granted on {em}, and is not known there: {}", unknown.id, unknown.reason)
                        };
                        shared.journal.check(!unknown.reason.contains("no longer in the history"), got);
                        shared.engines.remove(em, unknown.id);
                    }
                    break;
                }
                Answer::Rejected => return,
                Answer::Nothing | Answer::Unclear => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }
}
