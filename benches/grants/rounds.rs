//! All measurements, interleaved and repeated, so that a machine that changes its speed changes it for all alike.

use std::{path::Path, time::Duration};

use linkis_rm::store::embedded::Embedded;

use crate::{
    Arguments, Failure, Sample, Workload,
    floors::{CLIENTS, Floors},
    load::{CALLERS, Load, WARM_UP},
    machine,
    process::{self, Server},
    service::Service,
};

/// How many of the numbers of clients are measured again in every round.
const CLIENTS_KEPT: usize = 2;

/// How many calls are in flight where limits are set.
const LIMITED_CALLERS: [u64; 2] = [256, 1024];

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subject {
    /// pgbench.
    ForUpdate,
    /// The service.
    Service,
    /// The service, with limits, so that every grant counts in three scopes.
    Limited,
    /// The server whose handler answers at once.
    Empty,
}

/// One thing, measured in every round.
#[derive(Debug)]
pub(crate) struct Series {
    pub subject: Subject,
    pub workload: Workload,
    pub callers: u64,
    pub samples: Vec<Sample>,
}

/// Everything that was measured.
#[derive(Debug)]
pub(crate) struct Results {
    pub workloads: Vec<Workload>,
    pub series: Vec<Series>,
    /// What the service's tables said afterwards.
    pub checked: String,
}

/// What is to be measured: who, where, how many at once.
type Step = (Subject, Workload, u64);

/// Measures everything.
pub(crate) async fn run(arguments: &Arguments, database: &Embedded, dir: &Path) -> Result<Results, Failure> {
    let workloads = arguments.workloads();
    let floors = Floors::prepare(database, dir).await?;
    let service = Service::start(database, &workloads).await?;
    let mut command = process::command(std::env::current_exe()?);
    command.arg("--empty-server");
    let empty_server = Server::start(command).await?;
    let empty = Load::connect(empty_server.url()).await?;
    let mut bench = Bench { floors, service, empty, series: Vec::new(), seconds_left: 0.0 };

    let per_workload = CLIENTS_KEPT + 1 + CALLERS.len() + LIMITED_CALLERS.len();
    let per_round = workloads.len() * per_workload + CALLERS.len();
    let measurements = per_round as u64 * arguments.rounds;
    bench.seconds_left = seconds(arguments.window() + WARM_UP) * measurements as f64;
    let scouting = Duration::from_secs(arguments.seconds.div_ceil(2));
    bench.seconds_left += seconds(scouting) * (workloads.len() * CLIENTS.len()) as f64;

    let mut steps = Vec::new();
    for workload in &workloads {
        steps.extend(bench.scout(*workload, scouting).await?);
        steps.extend(CALLERS.map(|callers| (Subject::Service, *workload, callers)));
        steps.extend(LIMITED_CALLERS.map(|callers| (Subject::Limited, *workload, callers)));
    }
    // It does not look at what is asked of it, so that one workload is enough.
    steps.extend(CALLERS.map(|callers| (Subject::Empty, workloads[0], callers)));
    for round in 1..=arguments.rounds {
        machine::checkpoint(database).await?;
        for step in &steps {
            bench.measure(&format!("round {round} of {}", arguments.rounds), *step, arguments.window()).await?;
        }
    }
    eprintln!("comparing the service's tables with its answers");
    let checked = bench.service.check().await?;
    Ok(Results { workloads, series: bench.series, checked })
}

struct Bench {
    floors: Floors,
    service: Service,
    empty: Load,
    series: Vec<Series>,
    seconds_left: f64,
}

impl Bench {
    /// Finds the numbers of clients at which the floor is highest; a single one is always among them, as it is also timed.
    async fn scout(&mut self, workload: Workload, window: Duration) -> Result<Vec<Step>, Failure> {
        let mut found = Vec::new();
        for clients in CLIENTS {
            let step = (Subject::ForUpdate, workload, clients);
            self.tell("finding the best number of clients", step, window);
            found.push((self.floors.measure(workload, clients, window).await?.rate, clients));
        }
        found.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut clients: Vec<u64> = found.iter().take(CLIENTS_KEPT).map(|(_, clients)| *clients).collect();
        if !clients.contains(&1) {
            clients.push(1);
        }
        clients.sort_unstable();
        Ok(clients.into_iter().map(|clients| (Subject::ForUpdate, workload, clients)).collect())
    }

    async fn measure(&mut self, round: &str, step: Step, window: Duration) -> Result<(), Failure> {
        self.tell(round, step, window + WARM_UP);
        let (subject, workload, callers) = step;
        let sample = match subject {
            Subject::ForUpdate => self.floors.measure(workload, callers, window).await?,
            Subject::Service => self.service.measure(workload, callers, window).await?,
            Subject::Limited => {
                self.service.set_limits().await?;
                let sample = self.service.measure(workload, callers, window).await?;
                self.service.delete_limits().await?;
                sample
            }
            Subject::Empty => self.empty.measure(workload, callers, window).await?.0,
        };
        let known = self.series.iter_mut().find(|s| (s.subject, s.workload, s.callers) == step);
        match known {
            Some(series) => series.samples.push(sample),
            None => self.series.push(Series { subject, workload, callers, samples: vec![sample] }),
        }
        Ok(())
    }

    /// Says what comes next, which takes `window`.
    fn tell(&mut self, when: &str, (subject, workload, callers): Step, window: Duration) {
        let what = match subject {
            Subject::ForUpdate => "for_update",
            Subject::Service => "linkis-rm",
            Subject::Limited => "linkis-rm with limits",
            Subject::Empty => "empty handler",
        };
        eprintln!("{:>5.0} s left, {when}: {what}, {}, {callers} at once", self.seconds_left, workload.name());
        self.seconds_left = (self.seconds_left - seconds(window)).max(0.0);
    }
}

fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}
