//! Plan of the measurements: which steps a round has, and in which order.

use crate::{
    Workload,
    floors::{CLIENTS, Floor},
    load::{Job, Work},
    service::Site,
    watchers::Audience,
};

/// Numbers of calls in flight.
pub(crate) const CALLERS: [usize; 4] = [1, 16, 256, 1000];
/// Number of callers that the rate of many is compared with. Many should not be slower.
pub(crate) const SOME: usize = 16;
pub(crate) const MANY: usize = 1000;
/// Number of callers for figures that do not depend on it.
pub(crate) const ENOUGH: usize = 256;

/// Maximum number of instances that share one database.
pub(crate) const INSTANCES_MAX: usize = 3;

/// Subject of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subject {
    /// pgbench.
    Floor(Floor),
    /// The empty server.
    Empty,
    /// The service with closed-loop callers.
    Service(Site, Work),
    /// Several instances of the service, with closed-loop grants.
    Instances(usize),
    /// As [`Self::HalfLoad`], with open pages and `top`s.
    Watched(Site, Audience),
    /// The service with open-loop grants at half its maximum rate.
    HalfLoad(Site),
}

/// One measurement of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    pub subject: Subject,
    pub workload: Workload,
    pub callers: usize,
}

impl Subject {
    pub fn name(self) -> String {
        let site = |site| match site {
            Site::Plain | Site::Churn => "",
            Site::Limited => ", 3 scopes",
            Site::Queued => ", queue",
            Site::Loaded => ", preloaded",
            Site::Secured => ", secured",
        };
        match self {
            Self::Floor(floor) => floor.name().to_owned(),
            Self::Empty => "empty handler".to_owned(),
            Self::Service(at, Work::Grants) => format!("grants{}", site(at)),
            Self::Service(at, Work::Lives) => format!("lives{}", site(at)),
            Self::Service(at, Work::Refusals) => format!("refusals{}", site(at)),
            Self::Instances(instances) => format!("grants, {instances} instances"),
            Self::Watched(at, audience) => format!("grants{}, half load, {}", site(at), audience.name()),
            Self::HalfLoad(at) => format!("grants{}, half load", site(at)),
        }
    }
}

impl Step {
    pub fn new(subject: Subject, workload: Workload, callers: usize) -> Self {
        Self { subject, workload, callers }
    }

    /// Returns the job of the callers, if the step is a closed loop.
    pub fn job(self) -> Option<(Site, Job)> {
        let (site, work, instances) = match self.subject {
            Subject::Service(site, work) => (site, work, 1),
            Subject::Instances(instances) => (Site::Plain, Work::Grants, instances),
            Subject::Empty => (Site::Plain, Work::Grants, 1),
            _ => return None,
        };
        Some((site, Job { work, workload: self.workload, callers: self.callers, instances }))
    }
}

/// Returns the steps of a round.
pub(crate) fn round(workloads: &[Workload], preload: bool) -> Vec<Step> {
    let mut steps = Vec::new();
    for workload in workloads {
        // The most important floor comes last, so that it is measured close to the service.
        for floor in Floor::ALL.into_iter().rev() {
            steps.extend(CLIENTS.map(|clients| Step::new(Subject::Floor(floor), *workload, clients)));
        }
        // The empty handler ignores the request, so one workload suffices.
        steps.extend(of_service(*workload, *workload == workloads[0], preload));
    }
    steps
}

/// Returns the steps of a round that measures only TLS and a token.
pub(crate) fn secured_round(workload: Workload) -> Vec<Step> {
    let sites = [Site::Plain, Site::Secured];
    let of = |callers| sites.map(|site| Step::new(Subject::Service(site, Work::Grants), workload, callers));
    SECURED.into_iter().flat_map(of).collect()
}

/// Numbers of callers for the measurements of TLS and a token.
pub(crate) const SECURED: [usize; 3] = [1, SOME, ENOUGH];

/// Returns the sites on which pages and `top`s are measured.
pub(crate) fn watched_sites(preload: bool) -> Vec<Site> {
    [Site::Plain].into_iter().chain(preload.then_some(Site::Loaded)).collect()
}

/// Returns the steps of a round that measures only pages and `top`s.
pub(crate) fn watched_round(workloads: &[Workload], preload: bool) -> Vec<Step> {
    let watched = |(site, audience)| Subject::Watched(site, audience);
    // First the full load, which determines half load, and half load without viewers.
    let alone = |site| [Subject::Service(site, Work::Grants), Subject::HalfLoad(site)];
    let [few, many, loaded] = WATCHED;
    let plain = alone(Site::Plain).into_iter().chain([watched(few), watched(many)]);
    let loaded = alone(Site::Loaded).into_iter().chain([watched(loaded)]).filter(|_| preload);
    let subjects: Vec<Subject> = plain.chain(loaded).collect();
    let callers = |subject| if matches!(subject, Subject::Service(..)) { ENOUGH } else { 0 };
    let of = |workload: &Workload| {
        subjects.iter().map(|subject| Step::new(*subject, *workload, callers(*subject))).collect::<Vec<_>>()
    };
    workloads.iter().flat_map(of).collect()
}

/// Viewers of each site. Ten viewers that list 10,000 EMs beside a full load would measure the lists and not the
/// viewers.
pub(crate) const WATCHED: [(Site, Audience); 3] =
    [(Site::Plain, Audience::Few), (Site::Plain, Audience::Many), (Site::Loaded, Audience::Few)];

/// Returns all steps of one workload except the floors. Compared steps are adjacent.
fn of_service(workload: Workload, ceiling: bool, preload: bool) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut add = |subject, callers| steps.push(Step::new(subject, workload, callers));
    for callers in CALLERS {
        add(Subject::Service(Site::Plain, Work::Grants), callers);
        if callers == ENOUGH {
            (2..=INSTANCES_MAX).for_each(|instances| add(Subject::Instances(instances), callers));
            add(Subject::HalfLoad(Site::Plain), 0);
        }
        if ceiling {
            add(Subject::Empty, callers);
        }
        add(Subject::Service(Site::Limited, Work::Grants), callers);
        if callers == ENOUGH {
            add(Subject::Service(Site::Queued, Work::Grants), callers);
        }
        if preload && PRELOADED.contains(&(Work::Grants, callers)) {
            add(Subject::Service(Site::Loaded, Work::Grants), callers);
        }
    }
    for work in [Work::Refusals, Work::Lives] {
        add(Subject::Service(Site::Plain, work), ENOUGH);
        add(Subject::Service(Site::Plain, work), MANY);
        if preload {
            add(Subject::Service(Site::Limited, work), ENOUGH);
            add(Subject::Service(Site::Loaded, work), ENOUGH);
        }
    }
    steps
}

/// Main figures, which a million live tickets should not change.
pub(crate) const PRELOADED: [(Work, usize); 5] =
    [(Work::Grants, ENOUGH), (Work::Grants, MANY), (Work::Lives, ENOUGH), (Work::Refusals, ENOUGH), (Work::Grants, 1)];
