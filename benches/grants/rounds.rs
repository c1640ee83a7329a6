//! Rounds: all measurements, interleaved and repeated, so that a change of the machine's speed affects all of them.

use std::{path::Path, time::Duration};

use rm_devpg::EmbeddedPostgres;

use crate::{
    Arguments, Failure, Workload,
    check::CheckResult,
    churn,
    floors::{self, Floors},
    load::{Load, WARM_UP, Work},
    machine,
    meter::Meter,
    open_loop,
    plan::{self, ENOUGH, Step, Subject},
    process::{self, Server},
    results::{Results, Series},
    sample::Sample,
    service::{Service, Site},
    watchers::Watchers,
};

/// Runs all measurements.
pub(crate) async fn run(arguments: &Arguments, database: &EmbeddedPostgres, dir: &Path) -> Result<Results, Failure> {
    let mut bench = Bench::start(arguments, database, dir).await?;
    if arguments.rounds > 0 {
        let steps = match (arguments.secured, arguments.watched) {
            (true, _) => plan::secured_round(Workload::Hot),
            (_, true) => plan::watched_round(&arguments.workloads(), arguments.preload),
            _ => plan::round(&arguments.workloads(), arguments.preload),
        };
        let per_round: f64 = steps.iter().map(|step| seconds(length(*step, arguments.window()))).sum();
        bench.seconds_left = per_round * arguments.rounds as f64;
        for round in 1..=arguments.rounds {
            machine::checkpoint(database).await?;
            for step in &steps {
                bench.measure(&format!("round {round} of {}", arguments.rounds), *step, arguments.window()).await?;
            }
        }
    }
    let mut churns = Vec::new();
    if let Some(minutes) = arguments.churn {
        let service = bench.add_service(database, Site::Churn, &arguments.workloads(), dir).await?;
        for workload in arguments.workloads() {
            churns.push(churn::run(service, workload, minutes).await?);
        }
    }
    let checked = bench.check().await?;
    Ok(Results { workloads: arguments.workloads(), series: grouped(bench.series), churns, checked })
}

/// Groups series that differ only in their callers, in the order of the report.
fn grouped(series: Vec<Series>) -> Vec<Series> {
    let mut groups: Vec<Vec<Series>> = Vec::new();
    for one in series {
        let of = |step: Step| (step.subject, step.workload);
        match groups.iter_mut().find(|group| of(group[0].step) == of(one.step)) {
            Some(group) => group.push(one),
            None => groups.push(vec![one]),
        }
    }
    groups.into_iter().flatten().collect()
}

struct Bench {
    floors: Floors,
    services: Vec<Service>,
    empty_server: Server,
    empty: Load,
    meter: Meter,
    series: Vec<Series>,
    seconds_left: f64,
}

impl Bench {
    async fn start(arguments: &Arguments, database: &EmbeddedPostgres, dir: &Path) -> Result<Self, Failure> {
        let floors = Floors::prepare(database, dir).await?;
        let mut command = process::command(std::env::current_exe()?);
        command.arg("--empty-server");
        let empty_server = Server::start(command).await?;
        let empty = Load::connect(&[empty_server.url()], None).await?;
        let meter = Meter::new(&database.connect_options(), Vec::new()).await?;
        let (services, series) = (Vec::new(), Vec::new());
        let mut bench = Self { floors, services, empty_server, empty, meter, series, seconds_left: 0.0 };
        if arguments.rounds > 0 {
            let sites = match (arguments.secured, arguments.watched) {
                (true, _) => vec![Site::Plain, Site::Secured],
                (_, true) => plan::watched_sites(arguments.preload),
                _ => {
                    let loaded = arguments.preload.then_some(Site::Loaded);
                    [Site::Plain, Site::Limited, Site::Queued].into_iter().chain(loaded).collect()
                }
            };
            for site in sites {
                bench.add_service(database, site, &arguments.workloads(), dir).await?;
            }
        }
        Ok(bench)
    }

    async fn add_service(
        &mut self,
        database: &EmbeddedPostgres,
        site: Site,
        workloads: &[Workload],
        dir: &Path,
    ) -> Result<&Service, Failure> {
        eprintln!("starting the service ({site:?})");
        let service = Service::start(database, site, workloads, dir).await?;
        self.services.push(service);
        self.services.last().ok_or_else(|| "no service".into())
    }

    async fn measure(&mut self, round: &str, step: Step, window: Duration) -> Result<(), Failure> {
        self.log(round, step, length(step, window));
        let sample = self.sample(step, window).await?;
        if let Some(error) = &sample.error {
            eprintln!("  {} calls failed; the first: {error}", sample.errors);
        }
        match self.series.iter_mut().find(|series| series.step == step) {
            Some(series) => series.samples.push(sample),
            None => self.series.push(Series { step, samples: vec![sample] }),
        }
        Ok(())
    }

    async fn sample(&mut self, step: Step, window: Duration) -> Result<Sample, Failure> {
        let Step { subject, workload, callers } = step;
        if let Subject::Floor(floor) = subject {
            self.meter.turn_to(floors::DATABASE, Vec::new());
            return self.floors.measure(floor, workload, callers, window, &mut self.meter).await;
        }
        if let Subject::HalfLoad(site) | Subject::Watched(site, _) = subject {
            let (rate, service) = (self.half_rate(site, workload), find(&self.services, site)?);
            self.meter.turn_to(site.database(), service.process_ids());
            let watchers = match subject {
                Subject::Watched(_, audience) => Some(Watchers::open(service.server()?, audience).await?),
                _ => None,
            };
            let sample = open_loop::measure(service.load(), workload, rate, window, &mut self.meter).await?;
            // Closed immediately, because their cost would count in every other measurement.
            watchers.map_or(Ok(()), Watchers::close)?;
            return Ok(sample);
        }
        let (site, job) = step.job().ok_or("the measurement is not defined")?;
        if subject == Subject::Empty {
            self.meter.turn_to("", vec![self.empty_server.process_id()]);
            return self.empty.measure(job, window, &mut self.meter).await;
        }
        let service = find(&self.services, site)?;
        self.meter.turn_to(site.database(), service.process_ids());
        service.load().measure(job, window, &mut self.meter).await
    }

    /// Returns half of the median rate of the service so far.
    fn half_rate(&self, site: Site, workload: Workload) -> f64 {
        let full = Step::new(Subject::Service(site, Work::Grants), workload, ENOUGH);
        let rate = self.series.iter().find(|series| series.step == full).map_or(0.0, Series::rate);
        (rate / 2.0).max(1.0)
    }

    async fn check(&self) -> Result<Vec<CheckResult>, Failure> {
        let mut checked = Vec::new();
        for service in &self.services {
            eprintln!("comparing the service's tables with its answers ({:?})", service.site);
            checked.push(service.check().await?);
        }
        Ok(checked)
    }

    /// Prints the next measurement, which takes `window`.
    fn log(&mut self, when: &str, step: Step, window: Duration) {
        let (what, place) = (step.subject.name(), step.workload.name());
        let at_once = if step.callers > 0 { format!(", {} at once", step.callers) } else { String::new() };
        eprintln!("{:>5.0} s left, {when}: {what}, {place}{at_once}", self.seconds_left);
        self.seconds_left = (self.seconds_left - seconds(window)).max(0.0);
    }
}

/// Returns the duration of a measurement.
fn length(step: Step, window: Duration) -> Duration {
    let warm_up = if matches!(step.subject, Subject::Floor(_)) { Duration::ZERO } else { WARM_UP };
    window + warm_up
}

fn find(services: &[Service], site: Site) -> Result<&Service, Failure> {
    services.iter().find(|service| service.site == site).ok_or_else(|| "a service that was not started".into())
}

fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}
