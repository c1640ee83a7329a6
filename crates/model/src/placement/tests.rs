//! Tests of placement, with examples and against an exhaustive choice.

use std::{collections::BTreeSet, time::Duration};

use proptest::prelude::*;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    label_sets::{RECENT_SEARCHES, SCANNED_MAX, SETS_MAX},
    *,
};
use crate::{
    em_drain::EmDrain,
    name::Labels,
    policy::Check,
    resource::Dimension,
    selector::{EmSelector, Preference},
};

fn name(text: &str) -> Name {
    Name::parse("name", text).unwrap()
}

fn labels(pairs: &[(&str, &str)]) -> Labels {
    let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    Labels::parse("labels", pairs.collect::<BTreeMap<_, _>>()).unwrap()
}

fn em(host: &str, total: (i64, i64), locked: (i64, i64)) -> Em {
    let load = |(memory, cores)| Resource::load(memory, cores).unwrap();
    Em {
        instance: EmInstance { application_name: name("ecm"), instance: name(host) },
        total: load(total),
        protected: load((0, 0)),
        used: load((0, 0)),
        locked: load(locked),
        used_tickets: Default::default(),
        labels: Labels::default(),
        reserved: Labels::default(),
        epoch: 1,
        register_time: OffsetDateTime::UNIX_EPOCH,
        version: 1,
        going: None,
        counted: Default::default(),
        drain: None,
        is_held: false,
    }
}

fn labelled_of(host: &str, total: (i64, i64), own: &[(&str, &str)]) -> Em {
    Em { labels: labels(own), ..em(host, total, (0, 0)) }
}

fn labelled(host: &str, own: &[(&str, &str)], reserved: &[(&str, &str)]) -> Em {
    Em { labels: labels(own), reserved: labels(reserved), ..em(host, (100, 100), (0, 0)) }
}

fn ask(memory: i64, cores: i64) -> RequestSpec {
    RequestSpec {
        principal: crate::principal::Principal::Anonymous,
        ticket_id: Uuid::nil(),
        user: name("hadoop"),
        creator: name("IDE"),
        engine_type: String::new(),
        resource: Resource::load(memory, cores).unwrap(),
        labels: Labels::default(),
        selector: EmSelector::default(),
        caps: Default::default(),
        lock_ttl: Duration::from_secs(1),
        request_id: None,
        return_counters: false,
        priority: 0,
        may_wait: false,
    }
}

fn small() -> RequestSpec {
    ask(1, 1)
}

fn packed() -> RequestSpec {
    RequestSpec { selector: EmSelector { placement: Some(Placement::Pack), ..EmSelector::default() }, ..small() }
}

/// Returns a request that carries, requires and prefers labels.
fn asking(carried: &[(&str, &str)], required: &[(&str, &str)], preferred: &[(&str, &str, u32)]) -> RequestSpec {
    let preference = |(key, value, weight): &(&str, &str, u32)| Preference {
        key: (*key).into(),
        value: (*value).into(),
        weight: *weight,
    };
    let all = carried.iter().chain(required).copied().chain(preferred.iter().map(|(key, value, _)| (*key, *value)));
    let selector = EmSelector {
        required: labels(required),
        preferred: preferred.iter().map(preference).collect(),
        ..EmSelector::default()
    };
    RequestSpec { labels: labels(&all.collect::<Vec<_>>()), selector, ..ask(1, 1) }
}

fn view(ems: impl IntoIterator<Item = Em>) -> ClusterView {
    let mut view = ClusterView::default();
    ems.into_iter().for_each(|em| view.update(em));
    view.expire(&without_new_ems());
    view
}

/// Returns policies by which no EM is new.
fn without_new_ems() -> Policies {
    let policy = Policy::default().with_em_new_after(Duration::ZERO);
    ["ecm", "other"].map(|kind| (name(kind), policy.clone())).into()
}

/// Returns all EMs on which the request fits, the best first.
fn in_order(view: &mut ClusterView, ask: &RequestSpec) -> Vec<String> {
    let mut found: Vec<EmInstance> = Vec::new();
    view.expire(&without_new_ems());
    while let Some(em) = view.best(ask, &Policies::new(), &found) {
        found.push(em);
    }
    found.into_iter().map(|em| em.instance.to_string()).collect()
}

fn best(view: &mut ClusterView, ask: &RequestSpec) -> Option<String> {
    view.expire(&without_new_ems());
    view.best(ask, &Policies::new(), &[]).map(|em| em.instance.to_string())
}

fn surveyed(instance: &EmInstance, version: i64, condition: EmCondition) -> SurveyedEm {
    let (report_age, registration_age) = Default::default();
    SurveyedEm { instance: instance.clone(), version: (1, version), condition, report_age, registration_age }
}

/// Time of a report.
const NOW: time::Duration = time::Duration::ZERO;

fn condition(is_available: bool, busy: u8) -> EmCondition {
    EmCondition { is_available, busy }
}

#[test]
fn placement_prefers_em_freest_in_largest_requested_dimension() {
    let mut view = view([
        em("half", (100, 100), (50, 50)),
        em("full", (100, 100), (95, 0)),
        em("memory", (100, 100), (10, 90)),
        em("cores", (100, 100), (85, 0)),
    ]);
    assert_eq!(in_order(&mut view, &ask(10, 1)), ["memory", "half", "cores"], "the most memory");
    assert_eq!(in_order(&mut view, &ask(1, 20))[2], "half", "the most cores, and two EMs have all of theirs");
    let packed = RequestSpec {
        selector: EmSelector { placement: Some(Placement::Pack), ..EmSelector::default() },
        ..ask(10, 1)
    };
    assert_eq!(in_order(&mut view, &packed), ["cores", "half", "memory"]);
}

#[test]
fn placement_pack_spares_unrequested_dimensions() {
    // The fullest EM in memory has free cores; the others have none.
    let mut view = view([
        em("cores left", (100, 100), (80, 40)),
        em("none left", (100, 100), (30, 100)),
        em("none at all", (100, 0), (50, 0)),
    ]);
    let packed = RequestSpec {
        selector: EmSelector { placement: Some(Placement::Pack), ..EmSelector::default() },
        ..ask(10, 0)
    };
    assert_eq!(in_order(&mut view, &packed), ["none at all", "none left", "cores left"]);
    let with_cores = RequestSpec { selector: packed.selector.clone(), ..ask(10, 1) };
    assert_eq!(in_order(&mut view, &with_cores), ["cores left"]);
}

#[test]
fn placement_follows_policy_of_em_kind() {
    let mut view = view([em("free", (100, 100), (0, 0)), em("half", (100, 100), (50, 50))]);
    let policies = |required: &[&str], placement| {
        let required = required.iter().map(|key| (*key).to_owned()).collect();
        Policies::from([(name("ecm"), Policy::new(Check::ALL).with(required, placement))])
    };
    let best = |view: &mut ClusterView, ask: &RequestSpec, policies: &Policies| {
        view.best(ask, policies, &[]).map(|em| em.instance.to_string())
    };
    assert_eq!(best(&mut view, &ask(1, 1), &policies(&[], Placement::Pack)).as_deref(), Some("half"));
    assert_eq!(best(&mut view, &ask(1, 1), &policies(&[], Placement::Spread)).as_deref(), Some("free"));
    let needs = policies(&["engine_type"], Placement::Spread);
    assert_eq!(best(&mut view, &ask(1, 1), &needs), None);
    assert_eq!(view.matching(&ask(1, 1), &needs), 0);
    let spark = RequestSpec { engine_type: "spark".into(), ..ask(1, 1) };
    assert_eq!(best(&mut view, &spark, &needs).as_deref(), Some("free"));
}

#[test]
fn placement_required_labels_match_and_other_labels_do_not_exclude() {
    let mut view = view([
        labelled("a", &[("tenant", "a"), ("zone", "x")], &[]),
        labelled("b", &[("tenant", "b"), ("rack", "r1")], &[]),
        labelled("none", &[], &[]),
    ]);
    let mut found = |ask: &RequestSpec| in_order(&mut view, ask).into_iter().collect::<BTreeSet<_>>();
    let set = |hosts: &[&str]| hosts.iter().map(|host| (*host).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(found(&asking(&[], &[("tenant", "a")], &[])), set(&["a"]));
    assert_eq!(found(&asking(&[], &[("tenant", "a"), ("zone", "x")], &[])), set(&["a"]));
    assert_eq!(found(&asking(&[], &[("tenant", "a"), ("zone", "y")], &[])), set(&[]));
    assert_eq!(found(&asking(&[("tenant", "a")], &[], &[])), set(&["a", "b", "none"]), "only counted");
}

#[test]
fn placement_reserved_em_accepts_labels_of_any_kind() {
    let mut view = view([
        labelled("open", &[], &[]),
        labelled("of-a", &[], &[("tenant", "a")]),
        labelled("of-a-x", &[], &[("tenant", "a"), ("zone", "x")]),
    ]);
    let mut found = |ask: &RequestSpec| in_order(&mut view, ask).into_iter().collect::<Vec<_>>();
    let sorted = |mut hosts: Vec<String>| {
        hosts.sort();
        hosts
    };
    assert_eq!(found(&ask(1, 1)), ["open"]);
    assert_eq!(found(&asking(&[("tenant", "b")], &[], &[])), ["open"]);
    for by in [asking(&[("tenant", "a")], &[], &[]), asking(&[], &[], &[("tenant", "a", 1)])] {
        assert_eq!(sorted(found(&by)), ["of-a", "open"]);
    }
    assert_eq!(sorted(found(&asking(&[("zone", "x"), ("tenant", "a")], &[], &[]))), ["of-a", "of-a-x", "open"]);
    assert_eq!(found(&asking(&[], &[("tenant", "a")], &[])), ["of-a"], "a reserved label is also a label of the EM");
    assert_eq!(found(&asking(&[("zone", "x")], &[("tenant", "a")], &[])).len(), 2);
    assert_eq!(view.matching(&asking(&[], &[("tenant", "b")], &[]), &Policies::new()), 0);
}

#[test]
fn placement_preferred_labels_precede_free_share() {
    let full = |host: &str, own: &[(&str, &str)], locked| Em {
        locked: Resource::load(locked, 0).unwrap(),
        ..labelled(host, own, &[])
    };
    let mut view = view([
        full("both", &[("zone", "x"), ("disk", "ssd")], 90),
        full("zone", &[("zone", "x")], 80),
        full("disk", &[("disk", "ssd")], 10),
        full("none", &[], 0),
    ]);
    let preferring = |zone, disk| asking(&[], &[], &[("zone", "x", zone), ("disk", "ssd", disk)]);
    assert_eq!(in_order(&mut view, &preferring(2, 1)), ["both", "zone", "disk", "none"]);
    assert_eq!(in_order(&mut view, &preferring(1, 2)), ["both", "disk", "zone", "none"]);
    assert_eq!(best(&mut view, &asking(&[], &[("disk", "ssd")], &[("zone", "x", 1)])).as_deref(), Some("both"));
}

#[test]
fn placement_common_label_has_own_order() {
    let hosts = 3 * SCANNED_MAX;
    let of = |n: usize| labelled(&format!("host{n}"), &[("tenant", ["a", "b"][n % 2])], &[]);
    let mut view = view((0..hosts).map(of));
    let wants = asking(&[], &[("tenant", "a")], &[]);
    assert!(best(&mut view, &wants).is_some() && view.label_sets.len() == 1);
    view.update(Em { locked: Resource::load(0, 0).unwrap(), version: 2, ..of(2) });
    let moved = Em { labels: labels(&[("tenant", "b")]), version: 2, ..of(4) };
    view.update(moved);
    view.update(labelled("other-kind", &[("tenant", "a")], &[("zone", "x")]));
    assert_eq!(in_order(&mut view, &wants).len(), hosts / 2 - 1);
    assert_eq!(in_order(&mut view, &asking(&[("zone", "x")], &[("tenant", "a")], &[])).len(), hosts / 2);
    assert_eq!(view.matching(&wants, &Policies::new()), hosts / 2 - 1);
}

/// Thousands of common labels on EMs with different reservations: the size depends only on the labels of the EMs.
#[test]
fn placement_common_labels_use_bounded_memory() {
    let (rows, reservations) = (40, 40 * (SCANNED_MAX + 1));
    let of = |n: usize| {
        labelled(&format!("host{n}"), &[("row", &format!("row{}", n % rows))], &[("tenant", &n.to_string())])
    };
    let mut view = view((0..reservations).map(of));
    let groups = |view: &ClusterView| -> usize {
        let pools = view.pools.all();
        pools.map(|pool| pool.by_set.len()).sum()
    };
    for n in 0..rows {
        let wants = asking(&[("tenant", &n.to_string())], &[("row", &format!("row{n}"))], &[]);
        assert_eq!(best(&mut view, &wants), Some(format!("host{n}")));
    }
    assert_eq!((view.label_sets.len(), groups(&view)), (rows, reservations));
    (0..reservations).for_each(|n| view.remove(&of(n).instance));
    assert_eq!((view.pools.all().count(), groups(&view)), (0, 0));
}

#[test]
fn placement_respects_requested_application() {
    let other = |host: &str| Em {
        instance: EmInstance { application_name: name("other"), instance: name(host) },
        ..em(host, (100, 100), (50, 50))
    };
    let mut view = view([em("ecm", (100, 100), (0, 0)), other("other")]);
    let wants = |application: &str| RequestSpec {
        selector: EmSelector { application_name: Some(name(application)), ..EmSelector::default() },
        ..ask(1, 1)
    };
    assert_eq!(in_order(&mut view, &wants("other")), ["other"]);
    assert_eq!(in_order(&mut view, &ask(1, 1)), ["ecm", "other"]);
    assert_eq!(view.closest(&wants("neither"), &Policies::new()), None);
}

#[test]
fn cluster_view_applies_newer_rows_only() {
    let mut view = view([em("a", (9, 9), (9, 9))]);
    assert_eq!(best(&mut view, &ask(1, 1)), None);
    view.update(Em { version: 3, ..em("a", (9, 9), (0, 0)) });
    assert_eq!(best(&mut view, &ask(1, 1)).as_deref(), Some("a"));
    view.update(Em { version: 2, ..em("a", (9, 9), (9, 9)) });
    assert_eq!(best(&mut view, &ask(1, 1)).as_deref(), Some("a"));
    view.update(Em { epoch: 2, ..em("a", (9, 9), (9, 9)) });
    assert_eq!(best(&mut view, &ask(1, 1)), None, "a new registration counts anew");
    view.remove(&em("a", (9, 9), (0, 0)).instance);
    assert_eq!(view.closest(&ask(1, 1), &Policies::new()), None);
}

#[test]
fn cluster_view_counts_assumed_grants_until_settled() {
    let ems: Vec<Em> = (0..10).map(|n| em(&format!("host{n}"), (100, 100), (0, 0))).collect();
    let mut view = view(ems.clone());
    let mut on: BTreeMap<EmInstance, u32> = BTreeMap::new();
    for _ in 0..1000 {
        *on.entry(view.choose(&ask(1, 1), &Policies::new(), &[]).unwrap()).or_default() += 1;
    }
    assert!(on.len() == 10 && on.values().all(|count| *count == 100), "{on:?}");
    assert_eq!(view.choose(&ask(1, 1), &Policies::new(), &[]), None);
    view.settle(&ems[3].instance);
    assert_eq!(best(&mut view, &ask(1, 1)).as_deref(), Some("host3"), "the request that fitted nowhere fits again");
    // A survey clears assumed grants, except those made during the survey.
    for _ in 0..100 {
        assert!(view.choose(&ask(1, 1), &Policies::new(), &[]).is_some());
    }
    let found = |em: &Em| surveyed(&em.instance, 1, EmCondition::default());
    let survey = view.begin_survey();
    assert!(view.surveyed(survey, ems.iter().map(found).collect()).is_empty());
    view.end_survey(survey);
    assert_eq!(in_order(&mut view, &ask(1, 1)).len(), 10);
}

#[test]
fn survey_finds_new_changed_and_removed_ems() {
    let mut view = view(["same", "changed", "gone", "sick"].map(|host| em(host, (9, 9), (0, 0))));
    let found = |host: &str, version, is_available| {
        surveyed(&em(host, (9, 9), (0, 0)).instance, version, condition(is_available, 0))
    };
    let survey = view.begin_survey();
    // A report after the start of the survey is more recent than its result.
    view.report(&em("same", (9, 9), (0, 0)).instance, condition(true, 3), NOW);
    let changed = view.surveyed(
        survey,
        vec![found("changed", 2, true), found("new", 1, true), found("same", 1, false), found("sick", 1, false)],
    );
    assert_eq!(changed.iter().map(|em| em.instance.as_str()).collect::<Vec<_>>(), ["changed", "new"]);
    view.update(em("late", (9, 9), (0, 0)));
    view.end_survey(survey);
    let mut left = in_order(&mut view, &ask(1, 1));
    left.sort();
    assert_eq!(left, ["changed", "late", "same"]);
}

#[test]
fn placement_unavailable_ems_count_as_matching() {
    let ems = ["sick", "well"].map(|host| em(host, (9, 9), (0, 0)));
    let mut view = view(ems.clone());
    view.report(&ems[0].instance, condition(false, 0), NOW);
    assert_eq!(in_order(&mut view, &ask(1, 1)), ["well"]);
    assert_eq!(view.closest(&ask(99, 1), &Policies::new()).as_ref(), Some(&ems[1].instance));
    view.report(&ems[1].instance, condition(false, 0), NOW);
    assert_eq!(view.closest(&ask(99, 1), &Policies::new()), None);
    assert_eq!(view.matching(&ask(1, 1), &Policies::new()), 2);
    // The health is unknown after a new registration.
    view.update(Em { epoch: 2, ..ems[0].clone() });
    assert_eq!(in_order(&mut view, &ask(1, 1)), ["sick"]);
}

#[test]
fn placement_of_equal_free_shares_prefers_least_busy() {
    let ems: Vec<Em> = (0..3).map(|n| em(&format!("host{n}"), (100, 100), (0, 0))).collect();
    let mut view = view(ems.clone());
    for (em, busy) in ems.iter().zip([9, 1, 5]) {
        view.report(&em.instance, condition(true, busy), NOW);
    }
    assert_eq!(in_order(&mut view, &ask(1, 1)), ["host1", "host2", "host0"]);
    view.update(Em { locked: Resource::load(1, 1).unwrap(), version: 2, ..ems[1].clone() });
    assert_eq!(in_order(&mut view, &small()), ["host1", "host2", "host0"], "the machines of the others are busier");
    view.update(Em { locked: Resource::load(70, 70).unwrap(), version: 3, ..ems[1].clone() });
    assert_eq!(in_order(&mut view, &small()), ["host2", "host1", "host0"], "the others have more free capacity");
    assert_eq!(best(&mut view, &packed()).as_deref(), Some("host1"), "pack ignores the load");
    // A completely busy machine gets what fits on no other.
    view.report(&ems[2].instance, condition(true, 10), NOW);
    view.report(&ems[0].instance, condition(true, 10), NOW);
    assert_eq!(in_order(&mut view, &small())[0], "host1");
    assert_eq!(in_order(&mut view, &RequestSpec { resource: Resource::load(31, 1).unwrap(), ..small() }).len(), 2);
}

/// The load of a report counts for 20 s, by the age of the report.
#[test]
fn placement_ignores_load_of_stale_report() {
    let ems = [("busy", (0, 0)), ("half", (50, 50))].map(|(instance, locked)| em(instance, (100, 100), locked));
    let seconds = time::Duration::seconds;
    let mut view = ClusterView::default().with_load_lifetime(seconds(20));
    ems.iter().for_each(|em| view.update(em.clone()));
    let best_at = |view: &mut ClusterView, now| {
        view.set_time(seconds(now));
        best(view, &small()).unwrap()
    };
    view.report(&ems[0].instance, condition(true, 9), seconds(0));
    assert_eq!([best_at(&mut view, 0), best_at(&mut view, 19), best_at(&mut view, 20)], ["half", "half", "busy"]);
    // An equal report counts anew, and a survey finds the age of a report to another instance.
    view.report(&ems[0].instance, condition(true, 9), seconds(20));
    view.report(&ems[0].instance, condition(true, 9), seconds(30));
    assert_eq!([best_at(&mut view, 40), best_at(&mut view, 49), best_at(&mut view, 50)], ["half", "half", "busy"]);
    let survey = view.begin_survey();
    let found = surveyed(&ems[0].instance, 1, condition(true, 9));
    view.surveyed(survey, vec![SurveyedEm { report_age: seconds(15), ..found.clone() }]);
    assert_eq!([best_at(&mut view, 50), best_at(&mut view, 54), best_at(&mut view, 55)], ["half", "half", "busy"]);
    let survey = view.begin_survey();
    view.surveyed(survey, vec![SurveyedEm { report_age: seconds(3600), ..found }]);
    assert_eq!(best_at(&mut view, 55), "busy");
    view.report(&ems[0].instance, condition(true, 9), seconds(56));
    view.remove(&ems[0].instance);
    assert_eq!(best_at(&mut view, 80), "half");
}

/// Selects EMs for `count` requests, and returns how many each one got.
fn selections(view: &mut ClusterView, wants: &RequestSpec, count: u32) -> BTreeMap<String, u32> {
    let mut on = BTreeMap::new();
    for _ in 0..count {
        let em = view.choose(wants, &Policies::new(), &[]).unwrap();
        *on.entry(em.instance.to_string()).or_default() += 1;
    }
    on
}

/// A new EM beside ten that are more than half full gets a sixth of the requests. The groups are those of all EMs and of a label set,
/// and a few EMs.
#[test]
fn placement_bounds_new_em() {
    let seconds = time::Duration::seconds;
    for (old, required) in [(10, false), (10, true), (3 * SCANNED_MAX, true), (1, false)] {
        let full = |n: usize| Em {
            locked: Resource::load(6000, 6000).unwrap(),
            ..labelled_of(&format!("old{n}"), (10_000, 10_000), &[("zone", "x")])
        };
        let mut view = view((0..old).map(full));
        let zone: &[_] = if required { &[("zone", "x")] } else { &[] };
        let selector = EmSelector { required: labels(zone), ..EmSelector::default() };
        let wants = RequestSpec { labels: labels(zone), selector, ..small() };
        view.choose(&wants, &Policies::new(), &[]).unwrap();
        view.update(labelled_of("new", (10_000, 10_000), &[("zone", "x")]));
        view.expire(&Policies::new());
        let count = 20 * old as u32;
        let on = selections(&mut view, &wants, count);
        let new = on["new"];
        assert!(
            new * old as u32 <= 2 * (count - new) && new * (old as u32 + 1) >= count,
            "{new} of {count} beside {old} EMs"
        );
        // The survey finds the time of the registration.
        let survey = view.begin_survey();
        view.set_time(seconds(30));
        let found = surveyed(&labelled("new", &[], &[]).instance, 1, EmCondition::default());
        view.surveyed(survey, vec![SurveyedEm { registration_age: seconds(29), ..found }]);
        for (now, is_new) in [(60, true), (61, false)] {
            view.set_time(seconds(now));
            view.expire(&Policies::new());
            assert_eq!(selections(&mut view, &wants, 10).get("new") == Some(&10), !is_new, "at {now} s");
        }
    }
}

/// The bound only ranks: a new EM gets what fits on no other, and pack placement has no bound.
#[test]
fn placement_bound_of_new_em_refuses_nothing() {
    let full = |n: usize| em(&format!("old{n}"), (100, 100), (99, 99));
    let mut view = view((0..10).map(full));
    view.update(em("new", (100, 100), (0, 0)));
    assert_eq!(
        selections(&mut view, &RequestSpec { resource: Resource::load(10, 10).unwrap(), ..small() }, 10),
        BTreeMap::from([("new".to_owned(), 10)])
    );
    let mut view = self::view((0..10).map(|n| em(&format!("old{n}"), (100, 100), (0, 0))));
    view.update(em("new", (100, 100), (50, 50)));
    assert_eq!(selections(&mut view, &packed(), 10), BTreeMap::from([("new".to_owned(), 10)]));
    // A new registration is new again; other changes keep its age.
    let mut view = self::view((0..10).map(full));
    let old = em("old", (100, 100), (0, 0));
    view.update(old.clone());
    view.expire(&without_new_ems());
    view.update(Em { version: 2, total: Resource::load(200, 200).unwrap(), ..old.clone() });
    assert_eq!(selections(&mut view, &small(), 5).get("old"), Some(&5));
    view.update(Em { epoch: 2, ..old });
    assert_eq!(selections(&mut view, &small(), 5).get("old"), None);
}

#[test]
fn placement_of_waiting_request_uses_closed_em() {
    let drain =
        EmDrain { reason: name("disk"), by: crate::principal::Principal::Anonymous, since: OffsetDateTime::UNIX_EPOCH };
    let drained = Em { drain: Some(drain.into()), ..em("drained", (100, 100), (100, 100)) };
    let (sick, full) = (em("sick", (10, 10), (0, 0)), em("full", (20, 20), (20, 20)));
    let mut view = view([drained.clone(), sick.clone(), full.clone()]);
    view.report(&sick.instance, condition(false, 0), time::Duration::ZERO);
    let closed = |em: &Em| view.closed(&em.instance);
    let expected = [Some(ClosedEm::Drained), Some(ClosedEm::Unavailable), None];
    assert_eq!([&drained, &sick, &full].map(closed), expected);
    let nearest = |view: &mut ClusterView, size, may_wait| {
        let spec = RequestSpec { may_wait, ..ask(size, size) };
        view.closest(&spec, &Policies::new()).map(|em| em.instance.to_string())
    };
    for (size, waits, does_not_wait) in [(5, "full", "full"), (50, "drained", "full"), (500, "full", "full")] {
        assert_eq!(nearest(&mut view, size, true).as_deref(), Some(waits), "{size}");
        assert_eq!(nearest(&mut view, size, false).as_deref(), Some(does_not_wait), "{size}");
    }
    view.remove(&full.instance);
    for (size, waits) in [(5, "drained"), (50, "drained"), (500, "drained")] {
        assert_eq!(nearest(&mut view, size, true).as_deref(), Some(waits), "the ledger refuses what never fits");
        assert_eq!(nearest(&mut view, size, false), None);
    }
    view.remove(&drained.instance);
    assert_eq!(nearest(&mut view, 500, true).as_deref(), Some("sick"));
}

#[test]
fn placement_closest_em_is_full_rather_than_too_small() {
    let mut view = view([em("small", (10, 10), (0, 0)), em("full", (100, 100), (90, 90))]);
    assert_eq!(view.closest(&ask(50, 50), &Policies::new()).unwrap().instance.as_str(), "full");
    assert_eq!(view.closest(&ask(500, 50), &Policies::new()).unwrap().instance.as_str(), "small");
}

#[test]
fn placement_waiting_request_avoids_contended_em() {
    let (held, full) = (em("held", (100, 100), (50, 50)), em("full", (50, 50), (50, 50)));
    let mut view = view([held.clone(), full.clone(), em("small", (10, 10), (0, 0))]);
    let home = |view: &mut ClusterView, cores| {
        view.closest(&ask(cores, cores), &Policies::new()).unwrap().instance.to_string()
    };
    assert_eq!(home(&mut view, 20), "held");
    view.note_contended(&held.instance, true);
    assert_eq!(home(&mut view, 20), "full");
    assert_eq!(home(&mut view, 80), "held");
    // The request never fits on the small EM.
    view.note_contended(&full.instance, true);
    assert_eq!(home(&mut view, 20), "held");
}

#[test]
fn placement_contended_em_is_chosen_only_on_demand() {
    let held: Vec<Em> = (0..300).map(|n| em(&format!("held{n}"), (100, 100), (0, 0))).collect();
    let mut view = view(held.iter().cloned().chain([em("free", (100, 100), (50, 50))]));
    let held_best = |view: &mut ClusterView, ask: &RequestSpec, except: &[EmInstance]| {
        view.best_blocked(ask, &Policies::new(), except).map(|em| em.instance.to_string())
    };
    assert_eq!(held_best(&mut view, &ask(1, 1), &[]), None);
    held.iter().for_each(|em| view.note_contended(&em.instance, true));
    assert_eq!(in_order(&mut view, &ask(1, 1)), ["free"]);
    assert_eq!(in_order(&mut view, &ask(60, 1)), [""; 0]);
    let packed = RequestSpec {
        selector: EmSelector { placement: Some(Placement::Pack), ..EmSelector::default() },
        ..ask(60, 0)
    };
    assert_eq!(best(&mut view, &packed), None);
    // The second-freest of the contended EMs.
    view.update(Em { version: 2, ..em("held7", (100, 100), (1, 1)) });
    let others: Vec<EmInstance> =
        held.iter().map(|em| em.instance.clone()).filter(|em| em != &held[7].instance).collect();
    assert_eq!(held_best(&mut view, &ask(60, 1), &others).as_deref(), Some("held7"));
    assert_eq!(held_best(&mut view, &packed, &[]).as_deref(), Some("held7"));
    assert_eq!(held_best(&mut view, &ask(100, 1), &others), None);
    // The EM stays contended across a registration, and is used again as soon as it is released.
    view.update(Em { epoch: 2, ..em("held7", (200, 200), (0, 0)) });
    assert_eq!(best(&mut view, &ask(60, 1)), None);
    view.note_contended(&held[7].instance, false);
    assert_eq!(best(&mut view, &ask(60, 1)).as_deref(), Some("held7"));
    view.remove(&held[8].instance);
    view.update(held[8].clone());
    assert!(view.is_contended(&held[8].instance) && !in_order(&mut view, &ask(60, 1)).contains(&"held8".to_owned()));
}

/// The EMs are full in the dimension that requests need little of, so the dominant dimension excludes none.
#[test]
fn placement_remembers_full_ems_beside_contended_one() {
    let full = |n: usize| em(&format!("host{n}"), (100, 100), (0, 100));
    let held = em("held", (100, 100), (0, 0));
    let mut view = view((0..100).map(full).chain([held.clone()]));
    view.note_contended(&held.instance, true);
    let wants = ask(10, 1);
    let is_remembered =
        |view: &ClusterView| view.pools.all().all(|pool| pool.all.is_known_to_be_full_for(&wants.resource));
    assert!(best(&mut view, &wants).is_none() && is_remembered(&view));
    let held_best = view.best_blocked(&wants, &Policies::new(), &[]);
    assert_eq!(held_best.as_ref(), Some(&held.instance));
    view.update(Em { version: 2, ..em("held", (100, 100), (1, 1)) });
    assert!(is_remembered(&view), "changes of the contended EMs have no effect");
    view.note_contended(&held.instance, false);
    assert!(!is_remembered(&view));
    assert_eq!(best(&mut view, &wants).as_deref(), Some("held"));
}

/// Number of EMs: a quarter of them has any two required labels, which is more than the scan bound.
const HOSTS: u8 = 5 * SCANNED_MAX as u8;

/// A step that is applied to the view and to a plain list.
#[derive(Debug, Clone)]
enum Step {
    See { host: u8, total: (i64, i64), locked: (i64, i64), own: Vec<(u8, u8)>, reserved: Vec<(u8, u8)> },
    Remove(u8),
    Report { host: u8, is_available: bool, busy: u8 },
    Hold { host: u8, is_held: bool },
    Choose { amount: (i64, i64), carried: Vec<(u8, u8)>, required: Vec<(u8, u8)>, pack: bool },
    Settle,
}

fn steps() -> impl Strategy<Value = Step> {
    let host = || 0..HOSTS;
    let pairs = |most| prop::collection::vec((0..2_u8, 0..2_u8), 0..most);
    let amount = || (0..20_i64, 0..20_i64);
    prop_oneof![
        6 => (host(), amount(), amount(), pairs(3), pairs(2)).prop_map(|(host, total, locked, own, reserved)| {
            let locked = (locked.0.min(total.0), locked.1.min(total.1));
            Step::See { host, total, locked, own, reserved }
        }),
        1 => host().prop_map(Step::Remove),
        3 => (host(), 0..8_u8, 0..=10_u8)
            .prop_map(|(host, health, busy)| Step::Report { host, is_available: health > 0, busy }),
        1 => (host(), any::<bool>()).prop_map(|(host, is_held)| Step::Hold { host, is_held }),
        8 => (amount(), pairs(3), pairs(3), any::<bool>())
            .prop_map(|(amount, carried, required, pack)| Step::Choose { amount, carried, required, pack }),
        1 => Just(Step::Settle),
    ]
}

fn to_labels(pairs: &[(u8, u8)], offset: u8) -> Labels {
    let pairs = pairs.iter().map(|(key, value)| (format!("k{}", key + offset), format!("v{value}")));
    Labels::parse("labels", pairs.collect::<BTreeMap<_, _>>()).unwrap()
}

/// Returns the dominant dimension of a request among the matching EMs with the same reserved labels.
fn dominant(ems: &[&Em], reserved: &Labels, ask: &RequestSpec) -> Dimension {
    let alike: Vec<&&Em> = ems.iter().filter(|em| em.reserved == *reserved).collect();
    let part = |dimension: &Dimension| {
        let whole = alike.iter().map(|em| em.total.get(dimension)).sum::<i64>();
        const WHOLE: i128 = 1_000_000_000_000_000_000;
        i128::from(ask.resource.get(dimension)) * WHOLE / i128::from(whole.max(1))
    };
    let asked = ask.resource.amounts().filter(|(_, asked)| *asked > 0).map(|(dimension, _)| dimension);
    asked.max_by_key(part).unwrap_or(Dimension::Memory)
}

/// Returns the score of an EM with a load for a request.
fn score(em: &Em, busy: u8, dominant: &Dimension, ask: &RequestSpec) -> (bool, i64) {
    let left = em.left().unwrap();
    let share = left.get(dominant) * 1_000_000_000 / em.total.get(dominant).max(1);
    match ask.selector.placement {
        Some(Placement::Pack) => {
            let spares = |dimension| ask.resource.get(&dimension) == 0 && left.get(&dimension) > 0;
            (!ask.resource.amounts().any(|(dimension, _)| spares(dimension)), -share)
        }
        _ => (true, share.min(100_000_000 * (10 - i64::from(busy)))),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    /// With any groups, orders and remembered sizes, the search returns the same as an exhaustive comparison.
    #[test]
    fn placement_equals_exhaustive_search(steps in prop::collection::vec(steps(), 1..200)) {
        let (mut view, mut plain, mut version) = (ClusterView::default(), BTreeMap::<EmInstance, (Em, EmCondition)>::new(), 0);
        let mut held = BTreeSet::new();
        let named = |host: u8| em(&format!("host{host}"), (0, 0), (0, 0)).instance;
        for host in 0..HOSTS {
            let (total, locked) = (i64::from(host % 5 * 5), i64::from(host % 4 * 5));
            let seen = Em {
                labels: to_labels(&[(0, host % 2), (1, host / 2 % 2)], 0),
                ..em(&format!("host{host}"), (total, 20), (locked.min(total), locked))
            };
            plain.insert(seen.instance.clone(), (seen.clone(), EmCondition::default()));
            view.update(seen);
        }
        for step in steps {
            version += 1;
            match step {
                Step::See { host, total, locked, own, reserved } => {
                    let seen = Em {
                        labels: to_labels(&own, 0), reserved: to_labels(&reserved, 2), version,
                        ..em(&format!("host{host}"), total, locked)
                    };
                    let known = plain.get(&seen.instance).map(|(_, condition)| *condition);
                    plain.insert(seen.instance.clone(), (seen.clone(), known.unwrap_or_default()));
                    view.update(seen);
                }
                Step::Remove(host) => {
                    plain.remove(&named(host));
                    view.remove(&named(host));
                }
                Step::Report { host, is_available, busy } => {
                    if let Some((_, known)) = plain.get_mut(&named(host)) {
                        *known = condition(is_available, busy);
                    }
                    view.report(&named(host), condition(is_available, busy), NOW);
                }
                Step::Hold { host, is_held } => {
                    match is_held {
                        true => held.insert(named(host)),
                        false => held.remove(&named(host)),
                    };
                    view.note_contended(&named(host), is_held);
                }
                Step::Settle => {
                    let all: Vec<EmInstance> = plain.keys().cloned().collect();
                    all.iter().for_each(|em| view.settle(em));
                    // No grant happens here, so the stored amounts are unchanged.
                }
                Step::Choose { amount, carried, required, pack } => {
                    view.expire(&without_new_ems());
                    let required = to_labels(&required, 0);
                    let mut all = to_labels(&carried, 2).as_map().clone();
                    all.extend(required.as_map().clone());
                    let placement = Some(if pack { Placement::Pack } else { Placement::Spread });
                    let ask = RequestSpec {
                        labels: Labels::parse("labels", all).unwrap(),
                        selector: EmSelector { required, placement, ..EmSelector::default() },
                        ..ask(amount.0, amount.1)
                    };
                    let matches = |em: &Em| {
                        ask.selector.required.as_map().iter().all(|(key, value)| em.label(key) == Some(value))
                            && em.admits(ask.labels.as_map())
                    };
                    let fitting = |(em, condition): &&(Em, EmCondition)| {
                        condition.is_available && matches(em) && em.left().unwrap().covers(&ask.resource)
                    };
                    let possible = plain.values().filter(fitting).map(|(em, _)| &em.instance);
                    let (of_held, possible): (BTreeSet<_>, BTreeSet<_>) = possible.partition(|em| held.contains(*em));
                    let found = [view.best(&ask, &Policies::new(), &[]), view.best_blocked(&ask, &Policies::new(), &[])];
                    let matching: Vec<&Em> = plain.values().map(|(em, _)| em).filter(|em| matches(em)).collect();
                    let mut dominants = BTreeMap::new();
                    let mut score = |em: &EmInstance| {
                        let (em, condition) = &plain[em];
                        let of_pool = dominants.entry(em.reserved.as_map());
                        let dominant = of_pool.or_insert_with(|| dominant(&matching, &em.reserved, &ask));
                        score(em, condition.busy, dominant, &ask)
                    };
                    for (found, possible) in found.iter().zip([possible, of_held]) {
                        prop_assert_eq!(found.is_some(), !possible.is_empty(), "{:?} of {:?}", found, possible);
                        prop_assert!(found.iter().all(|em| possible.contains(em)));
                        let best = possible.into_iter().map(&mut score).max();
                        prop_assert_eq!(found.as_ref().map(&mut score), best);
                    }
                    let closest = view.closest(&ask, &Policies::new());
                    let known = plain.values().any(|(em, condition)| condition.is_available && matches(em));
                    prop_assert_eq!(closest.is_some(), known);
                    prop_assert_eq!(view.matching(&ask, &Policies::new()), plain.values().filter(|(em, _)| matches(em)).count());
                    // The chosen share counts as granted until it is settled.
                    if let Some(em) = view.choose(&ask, &Policies::new(), &[]) {
                        view.settle(&em);
                    }
                }
            }
        }
    }
}

/// Number of EMs that a repeated request visits for placement, refusal and count.
fn visits(view: &mut ClusterView, ask: &RequestSpec) -> u64 {
    let policies = Policies::new();
    let decide = |view: &mut ClusterView| {
        let before = view.candidates.visits.get();
        view.best(ask, &policies, &[]);
        view.closest(ask, &policies);
        view.matching(ask, &policies);
        view.candidates.visits.get() - before
    };
    decide(view);
    decide(view)
}

/// Returns the visits among few and among many EMs.
fn visits_at_two_sizes(ask: &RequestSpec, em: impl Fn(usize) -> Em) -> (u64, u64) {
    let [few, many] = [100, 10_000].map(|size| visits(&mut view((0..size).map(&em)), ask));
    (few, many)
}

fn assert_flat((few, many): (u64, u64)) {
    assert!(many * 10 <= few * 13 + 10, "{few} EMs are visited among few, {many} among many");
}

#[test]
fn placement_label_pair_on_no_em_visits_none() {
    let either = |n: usize| labelled(&format!("host{n}"), &[[("zone", "x"), ("disk", "ssd")][n % 2]], &[]);
    assert_flat(visits_at_two_sizes(&asking(&[], &[("zone", "x"), ("disk", "ssd")], &[]), either));
}

#[test]
fn placement_label_pair_on_full_ems_remembers() {
    let full = |n: usize| Em {
        locked: Resource::load(0, 100).unwrap(),
        ..labelled(&format!("host{n}"), &[("zone", "x"), ("disk", "ssd")], &[])
    };
    let both = asking(&[], &[("zone", "x"), ("disk", "ssd")], &[]);
    let wants = RequestSpec { resource: Resource::load(10, 1).unwrap(), ..both.clone() };
    assert_flat(visits_at_two_sizes(&wants, full));
    let too_large = RequestSpec { resource: Resource::load(10, 101).unwrap(), ..both };
    assert_flat(visits_at_two_sizes(&too_large, full));
}

/// A selection visits few EMs, with any loads, and beside as many new EMs as others.
#[test]
fn placement_among_loads_and_new_ems_visits_few() {
    let [few, many] = [100, 10_000].map(|size| {
        let of = |n: usize| em(&format!("em{n}"), (1000, 1000), (n as i64 % 700, 0));
        let mut view = view((0..size).map(of));
        (0..size).for_each(|n| view.report(&of(n).instance, condition(true, (n % 11) as u8), NOW));
        (size..2 * size).for_each(|n| view.update(of(n)));
        selections(&mut view, &small(), 10);
        let before = view.candidates.visits.get();
        selections(&mut view, &small(), 100);
        view.candidates.visits.get() - before
    });
    assert_flat((few, many));
}

#[test]
fn placement_preferred_labels_on_no_em_visit_none() {
    let pairs = [("zone", "x"), ("disk", "ssd"), ("rack", "r1"), ("net", "fast")];
    let one_of = |n: usize| labelled(&format!("host{n}"), &[pairs[n % 2], ("tenant", "a")], &[]);
    let preferred = pairs.map(|(key, value)| (key, value, 1));
    assert_flat(visits_at_two_sizes(&asking(&[], &[("tenant", "a")], &preferred), one_of));
}

#[test]
fn placement_dimension_on_no_em_visits_none() {
    let of = |amounts: &[(&str, i64)]| {
        Resource::special(amounts.iter().map(|(name, amount)| ((*name).to_owned(), *amount)).collect()).unwrap()
    };
    let gpu = |n: usize| {
        let none = of(&[("gpu", 0)]);
        let em = em(&format!("host{n}"), (0, 0), (0, 0));
        Em { total: of(&[("gpu", 8)]), protected: none.clone(), used: none.clone(), locked: none, ..em }
    };
    assert_flat(visits_at_two_sizes(&RequestSpec { resource: of(&[("tpu", 1)]), ..ask(0, 0) }, gpu));
}

#[test]
fn placement_largest_em_removed_narrows_search() {
    let large = em("large", (10_000, 10_000), (0, 0));
    let mut view = view((0..1000).map(|n| em(&format!("host{n}"), (100, 100), (50, 0))).chain([large.clone()]));
    assert_eq!(best(&mut view, &ask(60, 0)).as_deref(), Some("large"));
    view.remove(&large.instance);
    let before = view.candidates.visits.get();
    assert_eq!(best(&mut view, &ask(60, 0)), None);
    assert_eq!(view.candidates.visits.get() - before, 0, "no EM has as large a free share");
}

/// Returns ten labels, and a view of EMs that have all of them.
fn view_of_ten_labels() -> (ClusterView, Vec<(String, String)>) {
    let ten: Vec<_> = (0..10).map(|n| (format!("k{n}"), "v".to_owned())).collect();
    let pairs: Vec<(&str, &str)> = ten.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    (view((0..2 * SCANNED_MAX).map(|n| labelled(&format!("host{n}"), &pairs, &[]))), ten)
}

/// Returns a request that requires the labels whose bits are set.
fn requiring(ten: &[(String, String)], bits: usize) -> RequestSpec {
    let required = ten.iter().enumerate().filter(|(number, _)| bits >> number & 1 == 1);
    let required: Vec<_> = required.map(|(_, (key, value))| (key.as_str(), value.as_str())).collect();
    asking(&[], &required, &[])
}

/// Every EM is a member of each of 1,023 sets.
#[test]
fn label_sets_of_one_em_are_bounded() {
    let (mut view, ten) = view_of_ten_labels();
    for bits in 1..1 << ten.len() {
        assert!(best(&mut view, &requiring(&ten, bits)).is_some());
    }
    let of_em = |view: &ClusterView| view.candidates.iter().map(|(_, host)| host.label_sets.len()).max();
    assert_eq!((view.label_sets.len(), of_em(&view)), (SETS_OF_EM_MAX, Some(SETS_OF_EM_MAX)), "recent sets stay");
    let groups = |view: &ClusterView| view.pools.all().map(|pool| pool.by_set.len()).sum::<usize>();
    assert_eq!(groups(&view), SETS_OF_EM_MAX);
    // One set stays in use; the others are no longer requested.
    (0..RECENT_SEARCHES).for_each(|_| assert!(best(&mut view, &requiring(&ten, 1)).is_some()));
    (1000..1010).for_each(|bits| assert!(best(&mut view, &requiring(&ten, bits)).is_some()));
    let kept = |bits| {
        let required = requiring(&ten, bits).selector.required;
        let labels = required.as_map().iter().map(|(key, value)| (key.clone(), value.clone())).collect();
        view.label_sets.contains(&labels)
    };
    assert!(kept(1) && (1000..1010).all(kept) && !kept(2));
    assert_eq!(
        (view.label_sets.len(), groups(&view), of_em(&view)),
        (SETS_OF_EM_MAX, SETS_OF_EM_MAX, Some(SETS_OF_EM_MAX))
    );
}

#[test]
fn label_sets_of_a_new_em_are_bounded() {
    let (mut view, ten) = view_of_ten_labels();
    let half =
        |n: usize| ten[5 * n..5 * n + 5].iter().map(|(key, value)| (key.as_str(), value.as_str())).collect::<Vec<_>>();
    let ems = (0..4 * SCANNED_MAX).map(|n| labelled(&format!("host{n}"), &half(n % 2), &[]));
    ems.for_each(|em| view.update(Em { version: 2, ..em }));
    for bits in (1..1 << 5).flat_map(|bits| [bits, bits << 5]) {
        assert!(best(&mut view, &requiring(&ten, bits)).is_some());
    }
    assert_eq!(view.label_sets.len(), 62);
    let all: Vec<_> = ten.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    view.update(labelled("all", &all, &[]));
    assert_eq!(view.label_sets.len(), SETS_OF_EM_MAX);
    for bits in 1..1 << ten.len() {
        let found = in_order(&mut view, &requiring(&ten, bits));
        assert!(found.contains(&"all".to_owned()), "{bits}");
    }
}

/// Each pair of labels is on no EM.
#[test]
fn label_sets_without_ems_are_bounded() {
    let kinds = 48;
    let of = |n: usize| labelled(&format!("host{n}"), &[(&format!("k{}", n % kinds), "v")], &[]);
    let mut view = view((0..kinds * (SCANNED_MAX + 1)).map(of));
    for (a, b) in (0..kinds).flat_map(|a| (a + 1..kinds).map(move |b| (a, b))) {
        assert_eq!(best(&mut view, &asking(&[], &[(&format!("k{a}"), "v"), (&format!("k{b}"), "v")], &[])), None);
    }
    assert_eq!(view.label_sets.len(), SETS_MAX);
}
