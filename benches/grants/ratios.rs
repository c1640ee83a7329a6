//! Ratios within one run, and their bounds.

use crate::{
    Workload,
    floors::Floor,
    load::Work,
    meter::Cost,
    plan::{ENOUGH, MANY, PRELOADED, SECURED, SOME, Subject, WATCHED},
    results::{Results, Series},
    service::Site,
    watchers::Audience,
};

/// A ratio with its bound, if it has one.
#[derive(Debug)]
pub(crate) struct Ratio {
    pub name: String,
    pub value: f64,
    pub wanted: Option<RatioTarget>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum RatioTarget {
    AtLeast(f64),
    AtMost(f64),
}

impl RatioTarget {
    pub fn bound(self) -> f64 {
        match self {
            Self::AtLeast(bound) | Self::AtMost(bound) => bound,
        }
    }

    pub fn sign(self) -> &'static str {
        match self {
            Self::AtLeast(_) => "≥",
            Self::AtMost(_) => "≤",
        }
    }
}

impl Ratio {
    /// Returns true if the bound is met; `None` without a bound.
    pub fn met(&self) -> Option<bool> {
        self.wanted.map(|wanted| match wanted {
            RatioTarget::AtLeast(bound) => self.value >= bound,
            RatioTarget::AtMost(bound) => self.value <= bound,
        })
    }
}

const GRANTS: Subject = Subject::Service(Site::Plain, Work::Grants);
const LIMITED: Subject = Subject::Service(Site::Limited, Work::Grants);
const QUEUED: Subject = Subject::Service(Site::Queued, Work::Grants);
const LIVES: Subject = Subject::Service(Site::Plain, Work::Lives);
const REFUSALS: Subject = Subject::Service(Site::Plain, Work::Refusals);
const FOR_UPDATE: Subject = Subject::Floor(Floor::ForUpdate);

/// Returns all ratios that were measured.
pub(crate) fn all(results: &Results) -> Vec<Ratio> {
    let of = |workload: &Workload| Of { results, workload: *workload }.ratios();
    results.workloads.iter().flat_map(of).collect()
}

/// Ratios of one workload.
struct Of<'a> {
    results: &'a Results,
    workload: Workload,
}

impl Of<'_> {
    fn ratios(&self) -> Vec<Ratio> {
        let mut ratios = Vec::new();
        ratios.extend(self.to_floors());
        ratios.extend(self.within());
        ratios.extend(self.alone());
        ratios.extend(self.instances());
        ratios.extend(PRELOADED.iter().filter_map(|(work, callers)| self.preloaded(*work, *callers)));
        ratios.extend(self.churn());
        ratios.extend(self.watched());
        ratios.extend(SECURED.iter().filter_map(|callers| self.secured(*callers)));
        ratios
    }

    fn to_floors(&self) -> Vec<Ratio> {
        // The bound also applies to whole lives, which are three operations each.
        let wanted = RatioTarget::AtLeast(match self.workload {
            Workload::Hot => 8.0,
            Workload::Spread => 2.0,
        });
        let others = [Floor::InTransaction, Floor::Literal].map(|floor| {
            let name = format!("grants / {}", floor.name());
            self.ratio(&name, self.best(GRANTS), self.best(Subject::Floor(floor)), None)
        });
        let to_floor = |name, subject| self.ratio(name, self.best(subject), self.best(FOR_UPDATE), Some(wanted));
        let main = [to_floor("grants / for_update", GRANTS), to_floor("lives (operations) / for_update", LIVES)];
        main.into_iter().chain(others).flatten().collect()
    }

    fn within(&self) -> Vec<Ratio> {
        let grants = self.best(GRANTS);
        let share = (self.workload == Workload::Hot).then_some(RatioTarget::AtLeast(0.45));
        let empty =
            grants.and_then(|best| self.results.find(Subject::Empty, self.results.workloads[0], best.step.callers));
        let (queued, limited) = (self.find(QUEUED, ENOUGH), self.find(LIMITED, ENOUGH));
        let (some, many) = (self.find(GRANTS, SOME), self.find(GRANTS, MANY));
        let found = [
            self.ratio("grants / empty handler", grants, empty, share),
            self.ratio("refusals / grants", self.best(REFUSALS), grants, Some(RatioTarget::AtLeast(3.0))),
            self.ratio("3 limited scopes / none", self.best(LIMITED), grants, Some(RatioTarget::AtLeast(0.85))),
            self.ratio("a queue / 3 limited scopes", queued, limited, None),
            self.ratio("1,000 callers / 16", many, some, Some(RatioTarget::AtLeast(0.9))),
        ];
        let cost = |whose, cost: fn(&Cost) -> f64| {
            let name = self.name(&format!("{whose} time, a queue / 3 limited scopes"));
            Some(Ratio { name, value: queued?.cost_part_of(limited?, cost)?, wanted: Some(RatioTarget::AtMost(1.4)) })
        };
        let costs = [cost("server's", |cost| cost.server), cost("PostgreSQL's", |cost| cost.postgresql)];
        found.into_iter().chain(costs).flatten().collect()
    }

    fn alone(&self) -> Option<Ratio> {
        let value = self.find(GRANTS, 1)?.p50_part_of(self.find(FOR_UPDATE, 1)?)?;
        let name = self.name("one caller's p50 / for_update's");
        Some(Ratio { name, value, wanted: Some(RatioTarget::AtMost(1.5)) })
    }

    fn instances(&self) -> Vec<Ratio> {
        let one = self.find(GRANTS, ENOUGH);
        let of = |instances| self.find(Subject::Instances(instances), ENOUGH);
        let two = self.ratio("2 instances / 1", of(2), one, Some(RatioTarget::AtLeast(0.9)));
        two.into_iter().chain(self.ratio("3 instances / 1", of(3), one, Some(RatioTarget::AtLeast(0.8)))).collect()
    }

    fn preloaded(&self, work: Work, callers: usize) -> Option<Ratio> {
        let of = |site| self.find(Subject::Service(site, work), callers);
        let what = match work {
            Work::Grants => "grants",
            Work::Lives => "lives",
            Work::Refusals => "refusals",
        };
        let name = format!("preloaded / not: {what}, {callers} at once");
        self.ratio(&name, of(Site::Loaded), of(Site::Limited), Some(RatioTarget::AtLeast(0.9)))
    }

    fn secured(&self, callers: usize) -> Option<Ratio> {
        let of = |site| self.find(Subject::Service(site, Work::Grants), callers);
        let value = of(Site::Secured)?.cost_part_of(of(Site::Plain)?, |cost| cost.server)?;
        let name = self.name(&format!("server's time with TLS and a token / without, {callers} at once"));
        Some(Ratio { name, value, wanted: Some(RatioTarget::AtMost(1.1)) })
    }

    fn watched(&self) -> Vec<Ratio> {
        let of = |(site, audience): (Site, Audience)| {
            let watched = self.find(Subject::Watched(site, audience), 0)?;
            let plain = self.find(Subject::HalfLoad(site), 0)?;
            let among = if site == Site::Loaded { ", preloaded" } else { "" };
            let ratio = |whose, cost: fn(&Cost) -> f64| {
                let name = self.name(&format!("{whose} time, {} / nobody{among}", audience.name()));
                Some(Ratio { name, value: watched.cost_part_of(plain, cost)?, wanted: Some(RatioTarget::AtMost(1.05)) })
            };
            Some([ratio("server's", |cost| cost.server), ratio("PostgreSQL's", |cost| cost.postgresql)])
        };
        WATCHED.into_iter().filter_map(of).flatten().flatten().collect()
    }

    fn churn(&self) -> Option<Ratio> {
        let churn = self.results.churns.iter().find(|churn| churn.workload == self.workload)?;
        let name = self.name("churn: last minute / first");
        Some(Ratio { name, value: churn.kept()?, wanted: Some(RatioTarget::AtLeast(0.9)) })
    }

    fn ratio(
        &self,
        name: &str,
        of: Option<&Series>,
        to: Option<&Series>,
        wanted: Option<RatioTarget>,
    ) -> Option<Ratio> {
        Some(Ratio { name: self.name(name), value: of?.part_of(to?), wanted })
    }

    fn name(&self, name: &str) -> String {
        format!("{}: {name}", self.workload.name())
    }

    fn find(&self, subject: Subject, callers: usize) -> Option<&Series> {
        self.results.find(subject, self.workload, callers)
    }

    fn best(&self, subject: Subject) -> Option<&Series> {
        self.results.best(subject, self.workload)
    }
}
