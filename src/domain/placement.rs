//! Choosing the EM for a request that names none: by what was last seen, so only a proposal; the ledger decides.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, HashMap},
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use super::{
    em::{Em, EmInstance},
    operation::Ask,
    report::{EmStatus, Load, Statuses},
    resource::{Left, Resource, ResourceType},
    scope::Tally,
};

/// All EMs as they were last seen, ready to choose among.
#[derive(Debug, Default)]
pub struct View {
    hosts: HashMap<EmInstance, Host>,
    /// The labels that EMs carry, and how many do: those decide where a request may go. Others are for limits alone.
    label_keys: BTreeMap<String, usize>,
}

/// An EM, and what choosing needs of it, worked out once.
#[derive(Debug)]
struct Host {
    em: Em,
    left: Left,
    status: Option<EmStatus>,
}

impl Host {
    /// One that never reported is available: nothing speaks against it.
    fn is_available(&self) -> bool {
        self.status.as_ref().is_none_or(EmStatus::is_available)
    }

    fn busy(&self) -> u8 {
        let load = self.status.and_then(|status| status.load);
        load.as_ref().map_or(0, Load::tenths)
    }
}

impl View {
    /// Of all EMs there are.
    pub fn new(ems: impl IntoIterator<Item = Em>, statuses: &Statuses) -> Self {
        let mut view = Self::default();
        for em in ems {
            let status = statuses.get(&em.instance).copied();
            view.insert(em, status);
        }
        view
    }

    /// An EM is seen anew; how well it is stays as it was.
    pub fn update(&mut self, em: Em) {
        let status = self.remove(&em.instance);
        self.insert(em, status);
    }

    /// An EM has gone.
    pub fn remove(&mut self, em: &EmInstance) -> Option<EmStatus> {
        let host = self.hosts.remove(em)?;
        for key in host.em.labels.as_map().keys() {
            if let Some(count) = self.label_keys.get_mut(key) {
                *count -= 1;
            }
        }
        self.label_keys.retain(|_, count| *count > 0);
        host.status
    }

    fn insert(&mut self, em: Em, status: Option<EmStatus>) {
        // One that contradicts itself is no candidate; whoever names it is told so.
        let Ok(left) = em.left() else { return };
        for key in em.labels.as_map().keys() {
            *self.label_keys.entry(key.clone()).or_default() += 1;
        }
        self.hosts.insert(em.instance.clone(), Host { em, left, status });
    }

    /// Up to `most` EMs on which the request fits, the best first: those with the largest free share of the dimension that the
    /// request takes the most of; of these, those whose hosts are the least busy in tenths, where one that does not tell counts as
    /// idle. Ties are spread, differently for each ticket. EMs that are silent or unhealthy are left out.
    pub fn candidates(&self, ask: &Ask, most: usize) -> Vec<EmInstance> {
        let mut shares = Shares::of(ask);
        let mut found: Vec<_> = self
            .matching_hosts(ask)
            .filter(|host| host.is_available())
            .filter_map(|host| {
                let share = shares.on(&host.em)?;
                let fits = host.left.covers(share);
                fits.then(|| (free_share(host, share), host.busy(), spread(&host.em, ask), &host.em.instance))
            })
            .collect();
        let best = |a: &(f64, u8, u64, _), b: &(f64, u8, u64, _)| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2)));
        if found.len() > most {
            found.select_nth_unstable_by(most, best);
            found.truncate(most);
        }
        found.sort_by(best);
        found.into_iter().map(|(.., instance)| instance.clone()).collect()
    }

    /// The EM that tells best why the request fits nowhere: of those that match it, one that could answer for it, with the largest
    /// free share. `None` if no EM matches that is neither silent nor unhealthy.
    pub fn closest(&self, ask: &Ask) -> Option<EmInstance> {
        let mut shares = Shares::of(ask);
        let mut nearness = |host: &Host| {
            let share = shares.on(&host.em)?;
            // One that is too small for ever says less than one that is only full.
            let judged = host.em.judge(share, &Tally::default());
            let fits_when_empty = !matches!(judged, Ok(Err(refusal)) if refusal.never_fits);
            Some((fits_when_empty, free_share(host, share)))
        };
        let by_nearness = |a: &(&Host, Option<(bool, f64)>), b: &(&Host, Option<(bool, f64)>)| match (a.1, b.1) {
            (Some(a), Some(b)) => a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)),
            (a, b) => a.is_some().cmp(&b.is_some()),
        };
        let available = self.matching_hosts(ask).filter(|host| host.is_available());
        available.map(|host| (host, nearness(host))).max_by(by_nearness).map(|(host, _)| host.em.instance.clone())
    }

    /// How many EMs match the request, also if they are silent or unhealthy.
    pub fn matching(&self, ask: &Ask) -> usize {
        self.matching_hosts(ask).count()
    }

    /// Those that say the same as the request: an EM labelled tenant=a serves only tenant a, and tenant a is served only there.
    fn matching_hosts(&self, ask: &Ask) -> impl Iterator<Item = &Host> {
        let says_the_same = |host: &&Host| {
            let (ours, asked) = (host.em.labels.as_map(), ask.labels.as_map());
            self.label_keys.keys().all(|key| ours.get(key) == asked.get(key))
        };
        self.hosts.values().filter(says_the_same)
    }
}

/// What EMs of each type would count of a request: the same for all of them.
struct Shares<'a> {
    ask: &'a Ask,
    by_type: Vec<(ResourceType, Option<Resource>)>,
}

impl<'a> Shares<'a> {
    fn of(ask: &'a Ask) -> Self {
        Self { ask, by_type: Vec::new() }
    }

    /// `None` if the EM cannot answer for the request.
    fn on(&mut self, em: &Em) -> Option<&Resource> {
        let kind = em.resource_type();
        let known = self.by_type.iter().position(|(known, _)| *known == kind).unwrap_or_else(|| {
            self.by_type.push((kind, em.share(&self.ask.resource).ok()));
            self.by_type.len() - 1
        });
        // Only custom dimensions are another matter for each EM.
        let counts = |share: &&Resource| kind != ResourceType::Special || em.provides(share).is_ok();
        self.by_type.get(known).and_then(|(_, share)| share.as_ref()).filter(counts)
    }
}

/// How much of the dimension that the request takes the most of is free, as a share of what can be granted in all.
#[expect(clippy::cast_precision_loss, reason = "a rank among EMs, not an amount")]
fn free_share(host: &Host, share: &Resource) -> f64 {
    let shares = share.amounts().filter(|(_, asked)| *asked > 0).map(|(dimension, asked)| {
        let capacity = host.em.total.get(&dimension) - host.em.protected.get(&dimension);
        let of_capacity = |amount: i64| if capacity > 0 { amount as f64 / capacity as f64 } else { f64::NEG_INFINITY };
        (asked as f64 / capacity.max(1) as f64, of_capacity(host.left.get(&dimension)))
    });
    let dominant = shares.max_by(|a, b| a.0.partial_cmp(&b.0).unwrap_or(Ordering::Equal));
    dominant.map_or(1.0, |(_, free)| free)
}

fn spread(em: &Em, ask: &Ask) -> u64 {
    let mut hasher = DefaultHasher::new();
    (ask.ticket_id, &em.instance).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, time::Duration};

    use time::OffsetDateTime;
    use uuid::Uuid;

    use super::*;
    use crate::domain::{
        name::{Labels, Name},
        report::Health,
    };

    fn name(text: &str) -> Name {
        Name::parse("name", text).unwrap()
    }

    fn labels(tenant: &str) -> Labels {
        let pairs = (!tenant.is_empty()).then(|| ("tenant".to_owned(), tenant.to_owned()));
        Labels::parse("labels", pairs.into_iter().collect::<BTreeMap<_, _>>()).unwrap()
    }

    fn em(host: &str, total: (i64, i64), locked: (i64, i64), tenant: &str) -> Em {
        let load = |(memory, cores)| Resource::load(memory, cores).unwrap();
        Em {
            instance: EmInstance { application_name: name("ecm"), instance: name(host) },
            total: load(total),
            protected: load((0, 0)),
            used: load((0, 0)),
            locked: load(locked),
            used_tickets: Default::default(),
            labels: labels(tenant),
            epoch: 1,
            register_time: OffsetDateTime::UNIX_EPOCH,
            version: 1,
            going: None,
            counted: Default::default(),
        }
    }

    fn ask(number: u128, memory: i64, cores: i64, tenant: &str) -> Ask {
        Ask {
            principal: crate::domain::principal::Principal::Anonymous,
            ticket_id: Uuid::from_u128(number),
            user: name("hadoop"),
            creator: name("IDE"),
            engine_type: String::new(),
            resource: Resource::load(memory, cores).unwrap(),
            labels: labels(tenant),
            lock_ttl: Duration::from_secs(1),
            request_id: None,
        }
    }

    fn hosts(ems: &[Em], ask: &Ask, most: usize) -> Vec<String> {
        View::new(ems.iter().cloned(), &Statuses::new())
            .candidates(ask, most)
            .into_iter()
            .map(|em| em.instance.to_string())
            .collect()
    }

    #[test]
    fn the_freest_in_the_dominant_dimension_comes_first_and_full_ones_never() {
        let ems = [
            em("half", (100, 100), (50, 50), ""),
            em("full", (100, 100), (95, 0), ""),
            em("memory", (100, 100), (10, 90), ""),
            em("cores", (100, 100), (85, 0), ""),
        ];
        assert_eq!(hosts(&ems, &ask(1, 10, 1, ""), 9), ["memory", "half", "cores"], "memory dominates");
        assert_eq!(hosts(&ems, &ask(1, 1, 20, ""), 9)[2], "half", "cores dominate, and two have all of theirs");
        assert_eq!(hosts(&ems, &ask(1, 10, 1, ""), 1), ["memory"]);
    }

    #[test]
    fn labels_have_to_say_the_same() {
        let ems = [em("a", (9, 9), (0, 0), "a"), em("b", (9, 9), (0, 0), "b"), em("none", (9, 9), (0, 0), "")];
        assert_eq!(hosts(&ems, &ask(1, 1, 1, "a"), 9), ["a"]);
        assert_eq!(hosts(&ems, &ask(1, 1, 1, ""), 9), ["none"]);
        assert_eq!(hosts(&ems, &ask(1, 1, 1, "c"), 9), [""; 0]);
        assert_eq!(View::new(ems.clone(), &Statuses::new()).closest(&ask(1, 99, 1, "c")), None);
        assert_eq!(hosts(&ems[2..], &ask(1, 1, 1, "c"), 9), ["none"], "no EM has tenants: the label is for limits");
    }

    #[test]
    fn what_changes_is_seen() {
        let mut view = View::new([em("a", (9, 9), (9, 9), "a")], &Statuses::new());
        let found = |view: &View, tenant| view.candidates(&ask(1, 1, 1, tenant), 9).len();
        view.update(em("a", (9, 9), (0, 0), "a"));
        assert_eq!((found(&view, "a"), found(&view, "")), (1, 0));
        view.update(em("a", (9, 9), (0, 0), ""));
        assert_eq!((found(&view, "a"), found(&view, "")), (1, 1), "no EM has tenants any more");
        view.update(em("b", (9, 9), (0, 0), "b"));
        assert_eq!((found(&view, "a"), found(&view, "b")), (0, 1));
        view.remove(&em("b", (9, 9), (0, 0), "b").instance);
        assert_eq!((found(&view, "a"), found(&view, "b")), (1, 1));
    }

    #[test]
    fn ties_are_spread() {
        let ems: Vec<Em> = (0..10).map(|n| em(&format!("host{n}"), (100, 100), (0, 0), "")).collect();
        let first: BTreeSet<String> = (0..100).flat_map(|n| hosts(&ems, &ask(n, 1, 1, ""), 1)).collect();
        assert_eq!(first.len(), 10);
    }

    fn status(health: Option<Health>, silent: bool, cpu_permille: i32) -> EmStatus {
        let load = Load::parse("load", 0, 0, cpu_permille).ok();
        EmStatus { health, load, last_report_time: OffsetDateTime::UNIX_EPOCH, silent }
    }

    #[test]
    fn the_silent_and_the_unhealthy_are_left_out_but_count_as_matching() {
        let ems: Vec<Em> = ["silent", "sick", "warned", "new"].map(|host| em(host, (9, 9), (0, 0), "")).into();
        let of = |health, silent| status(health, silent, 0);
        let told = [of(Some(Health::Healthy), true), of(Some(Health::Unhealthy), false), of(Some(Health::Warn), false)];
        let statuses: Statuses = ems.iter().map(|em| em.instance.clone()).zip(told).collect();
        let mut found = View::new(ems.clone(), &statuses).candidates(&ask(1, 1, 1, ""), 9);
        found.sort();
        assert_eq!(found, [&ems[3], &ems[2]].map(|em| em.instance.clone()));
        assert_eq!(View::new(ems[..2].to_vec(), &statuses).closest(&ask(1, 99, 1, "")), None);
        assert_eq!(
            View::new(ems[..3].to_vec(), &statuses).closest(&ask(1, 99, 1, "")).as_ref(),
            Some(&ems[2].instance)
        );
        assert_eq!(View::new(ems, &statuses).matching(&ask(1, 1, 1, "")), 4);
    }

    #[test]
    fn of_equal_shares_the_least_busy_comes_first_and_equally_busy_ones_are_spread() {
        let ems: Vec<Em> = (0..6).map(|n| em(&format!("host{n}"), (100, 100), (0, 0), "")).collect();
        let busy = [900, 505, 560, 500, 510, 599].map(|permille| status(None, false, permille));
        let statuses: Statuses = ems.iter().map(|em| em.instance.clone()).zip(busy).collect();
        let view = View::new(ems.clone(), &statuses);
        let first = |n| view.candidates(&ask(n, 1, 1, ""), 6);
        assert!((0..100).all(|n| first(n)[5] == ems[0].instance));
        assert_eq!((0..100).map(|n| first(n).swap_remove(0)).collect::<BTreeSet<_>>().len(), 5);
        let freer = em("freer", (200, 200), (0, 0), "");
        let busier = Em { locked: Resource::load(1, 1).unwrap(), ..ems[1].clone() };
        let statuses = Statuses::from([(freer.instance.clone(), status(None, false, 1000))]);
        let best = View::new([busier, freer.clone()], &statuses).candidates(&ask(1, 1, 1, ""), 1);
        assert_eq!(best, [freer.instance], "the free share decides first");
    }

    #[test]
    fn the_closest_is_full_rather_than_too_small() {
        let ems = [em("small", (10, 10), (0, 0), ""), em("full", (100, 100), (90, 90), "")];
        assert_eq!(View::new(ems, &Statuses::new()).closest(&ask(1, 50, 50, "")).unwrap().instance.as_str(), "full");
    }
}
