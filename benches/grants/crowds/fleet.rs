//! Fleet: many EMs with engines that all report.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use rm_model::{
    em::{Em, EmInstance},
    report::{EmReport, Health},
};
use uuid::Uuid;

use crate::{Failure, random::Random};

use super::{
    callers::Callers,
    open,
    stage::{OtherCall, Stage},
};

pub(crate) const EMS: u64 = 10_000;
pub(crate) const PER_EM: u64 = 100;

/// Interval between two reports of an EM.
const INTERVAL: Duration = Duration::from_secs(10);

#[derive(Clone)]
pub(crate) struct Fleet {
    ems: Arc<[(Em, Vec<Uuid>)]>,
    callers: Callers,
    /// Number of the last report of the fleet; it also increases for each single EM.
    sequence: Arc<AtomicI64>,
}

impl Fleet {
    /// Registers the EMs and starts their engines.
    pub async fn start(stage: &Stage) -> Result<Self, Failure> {
        let count = stage.scaled(EMS);
        let ems = stage.callers.register(count).await?;
        let tickets = stage.callers.start_engines(count * PER_EM, PER_EM).await?;
        let tickets = tickets.chunks(PER_EM as usize).map(|tickets| tickets.to_vec());
        let ems = ems.into_iter().zip(tickets).collect();
        Ok(Self { ems, callers: stage.callers.clone(), sequence: Arc::default() })
    }

    pub fn len(&self) -> u64 {
        self.ems.len() as u64
    }

    pub fn tickets(&self) -> i64 {
        self.ems.iter().map(|(_, tickets)| tickets.len() as i64).sum()
    }

    pub fn em(&self, number: u64) -> &EmInstance {
        &self.ems[(number % self.len()) as usize].0.instance
    }

    /// Returns the reports of all EMs, in turn.
    pub fn reports(&self) -> open::OpenLoopLoad<impl FnMut(u64, Random) -> OtherCall + Send + 'static> {
        let fleet = self.clone();
        let call = move |_, _| -> OtherCall {
            let fleet = fleet.clone();
            Box::pin(async move {
                let sequence = fleet.sequence.fetch_add(1, Relaxed) + 1;
                let (em, tickets) = &fleet.ems[(sequence as u64 % fleet.len()) as usize];
                let report = EmReport {
                    em: em.instance.clone(),
                    epoch: em.epoch,
                    sequence,
                    health: Health::Healthy,
                    load: None,
                    tickets: tickets.clone(),
                    observed: None,
                    idle: vec![],
                };
                let answer = fleet.callers.client(sequence as u64).heartbeat(&report).await?;
                match answer.unknown_tickets.len() {
                    0 => Ok(Instant::now()),
                    unknown => Err(format!("{unknown} tickets of an EM are not known").into()),
                }
            })
        };
        open::OpenLoopLoad { per_second: self.len() as f64 / INTERVAL.as_secs_f64(), call }
    }
}
