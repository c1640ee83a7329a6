//! Worked examples: the order on one EM after events at exact times, in seconds.

use std::collections::BTreeMap;

use rm_model::{
    name::{Labels, Name},
    order::{AnyEm, Class, FairBy, OwnRequests, RankedRequest, TurnKey, is_private, new_rank_time},
    resource::Resource,
    scope::{Scope, TicketLabels},
    selector::EmSelector,
    wait_queue::{QueuePosition, WaitKey},
};
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use super::{
    scenes::{KINDS, play},
    setting::{Setting, Spec},
    world::Event::{self, Check, Enter, Leave},
};
use crate::harness::em;

fn at(seconds: i64) -> OffsetDateTime {
    OffsetDateTime::UNIX_EPOCH + Duration::seconds(seconds)
}

fn scope(labels: &[(&str, &str)]) -> WaitKey {
    WaitKey::Scope(Scope::new(labels.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()))
}

fn on_em() -> WaitKey {
    WaitKey::Em(em("em1"))
}

/// Waiting requests with names.
#[derive(Default)]
struct Example {
    own: OwnRequests,
    names: BTreeMap<Uuid, String>,
}

impl Example {
    fn id(&self, name: &str) -> Uuid {
        *self.names.iter().find(|(_, other)| *other == name).unwrap().0
    }

    fn enter(&mut self, name: &str, seconds: i64, priority: i16, keys: &[WaitKey]) {
        let id = Uuid::from_u128(self.names.len() as u128);
        self.names.insert(id, name.to_owned());
        let turn = format!("user={}", &name[..1]);
        self.own.insert(RankedRequest::new(id, Some(turn.into()), at(seconds), priority));
        self.requeue(name, seconds, keys);
    }

    fn requeue(&mut self, name: &str, seconds: i64, keys: &[WaitKey]) {
        self.own.requeue(self.id(name), keys.iter().cloned().collect(), at(seconds));
    }

    fn grant(&mut self, name: &str, seconds: i64) {
        self.own.take_reranked();
        self.own.granted(self.id(name), at(seconds));
    }

    fn get(&self, name: &str) -> &RankedRequest {
        self.own.get(self.id(name)).unwrap()
    }

    /// The class, and the seconds by which the request goes.
    fn rank(&self, name: &str) -> (Class, i64) {
        let request = self.get(name);
        (request.class, request.position().since().unix_timestamp())
    }

    /// The names of the present requests in order.
    fn order(&self) -> Vec<&str> {
        let waiting = self.names.iter().filter_map(|(id, name)| Some((self.own.get(*id)?, name)));
        let mut present: Vec<_> = waiting.filter(|(request, _)| !request.is_absent).collect();
        present.sort_by_key(|(request, _)| request.position());
        present.into_iter().map(|(_, name)| name.as_str()).collect()
    }
}

#[test]
fn order_of_pig_and_mouse_alternates() {
    let mut example = Example::default();
    let pigs: Vec<String> = (1..=40).map(|number| format!("p{number}")).collect();
    pigs.iter().zip(1..).for_each(|(pig, seconds)| example.enter(pig, seconds, 0, &[on_em()]));
    example.enter("m", 50, 0, &[on_em()]);
    assert_eq!(example.order()[..3], ["p1", "m", "p2"]);
    example.grant("p1", 60);
    assert_eq!(example.order()[..3], ["m", "p2", "p3"]);
    assert_eq!((example.rank("m"), example.rank("p2")), ((Class::First, 50), (Class::First, 60)));
    assert_eq!(example.rank("p3"), (Class::Behind, 3));
    let reranked = example.own.take_reranked();
    let p2 = QueuePosition::new(-(1 << 14), at(2), example.id("p2"));
    assert_eq!(reranked, BTreeMap::from([(example.id("p2"), p2)]), "one promotion, with the former position");
}

#[test]
fn order_at_own_limit_does_not_age() {
    let mut example = Example::default();
    let limit = scope(&[("user", "alice"), ("creator", "IDE"), ("engine", "spark")]);
    example.enter("a1", 10, 0, std::slice::from_ref(&limit));
    example.enter("a2", 20, 0, &[on_em()]);
    assert_eq!((example.rank("a1"), example.rank("a2")), ((Class::First, 10), (Class::First, 20)));
    example.enter("b", 30, 0, &[on_em()]);
    example.requeue("a1", 90, &[on_em()]);
    assert_eq!(example.order(), ["a2", "b", "a1"]);
    assert_eq!(example.rank("a1"), (Class::Behind, 90));
    example.requeue("a1", 95, &[limit]);
    example.requeue("a1", 99, &[on_em()]);
    assert_eq!(example.get("a1").rank_time, at(90), "the second time does not count anew");
}

#[test]
fn order_of_absent_request_is_kept() {
    for is_granted in [false, true] {
        let mut example = Example::default();
        example.enter("p1", 1, 0, &[on_em()]);
        example.enter("p2", 2, 0, &[on_em()]);
        example.own.absent(example.id("p1"));
        assert_eq!(example.rank("p2"), (Class::First, 2));
        example.enter("q", 6, 0, &[on_em()]);
        if is_granted {
            example.grant("p2", 7);
        }
        example.own.returned(example.id("p1"));
        let (rank, order) = if is_granted { (7, vec!["q", "p1"]) } else { (1, vec!["p1", "q", "p2"]) };
        assert_eq!((example.rank("p1"), example.order()), ((Class::First, rank), order));
    }
}

#[test]
fn order_with_priority_has_head_start() {
    let mut example = Example::default();
    example.enter("ab", 0, -60, &[on_em()]);
    assert_eq!(example.rank("ab"), (Class::First, 60));
    example.enter("ai", 10, 30, &[on_em()]);
    assert_eq!((example.rank("ai"), example.rank("ab")), ((Class::First, -20), (Class::Behind, 60)));
    example.grant("ai", 12);
    assert_eq!(example.rank("ab"), (Class::First, 72));
    // A request goes at the latest when those would that enter as many seconds later as their priority is higher.
    example.enter("c", 101, 30, &[on_em()]);
    example.enter("d", 103, 30, &[on_em()]);
    assert_eq!(example.order(), ["c", "ab", "d"]);
}

/// Request 0 has the EM, and requests 1 to 3 are of one tenant with the guarantee 2.
#[test]
fn guarantee_is_promised_once() {
    let tenant = |user: usize, priority: i16| Spec::new(user, [1, 1, 0]).with_priority(priority);
    let requests = vec![Spec::new(2, [1, 0, 0]), tenant(0, 0), tenant(1, 0), tenant(2, 30)];
    let setting = Setting::new("guarantee", KINDS, [1, 9, 9], requests).with_guarantee([0, 2, 0]);
    let classes = |events: &[Event], requests: [usize; 2]| {
        let world = play(&setting, events);
        requests.map(|request| world.get(request).class)
    };
    let mut events: Vec<Event> = (0..4).map(|request| Enter(request, 0)).collect();
    assert_eq!(classes(&events, [1, 2]), [Class::Entitled; 2]);
    assert_eq!(classes(&events, [2, 3]), [Class::Entitled, Class::First], "0 held + 1 requested + 2 promised");
    events.extend([Leave(1), Check(3)]);
    assert_eq!(classes(&events, [2, 3]), [Class::Entitled; 2]);
}

#[test]
fn order_at_two_keys_promotes_at_each() {
    let mut example = Example::default();
    let creator = scope(&[("creator", "IDE")]);
    example.enter("a1", 1, 0, &[on_em(), creator.clone()]);
    example.enter("a2", 2, 0, &[on_em()]);
    example.enter("a3", 3, 0, std::slice::from_ref(&creator));
    example.enter("a4", 4, 0, &[creator]);
    example.enter("b", 5, 0, &[on_em()]);
    example.grant("a1", 9);
    assert_eq!(example.order(), ["b", "a2", "a3", "a4"]);
    assert_eq!((example.rank("a2"), example.rank("a3")), ((Class::First, 9), (Class::First, 9)));
    example.own.left(example.id("a3"));
    assert_eq!(example.rank("a4"), (Class::First, 9), "no gain by the end of another request");
}

#[test]
fn order_without_em_groups_equal_conditions() {
    let selector = |label: &str| {
        let labels = BTreeMap::from([("zone".to_owned(), label.to_owned())]);
        AnyEm::of(&EmSelector { required: Labels::parse("labels", labels).unwrap(), ..EmSelector::default() })
    };
    let named = EmSelector { application_name: Some(Name::parse("em", "zone").unwrap()), ..EmSelector::default() };
    assert_ne!(AnyEm::of(&named), AnyEm::of(&EmSelector::default()));
    let mut own = OwnRequests::default();
    let mut enter = |number: u128, any_em: Option<AnyEm>, em_name: &str| {
        let id = Uuid::from_u128(number);
        let request = RankedRequest::new(id, Some("user=a".into()), at(number as i64), 0);
        own.insert(RankedRequest { any_em, ..request });
        own.requeue(id, [WaitKey::Em(em(em_name))].into(), at(number as i64));
        own.get(id).unwrap().class
    };
    assert_eq!(enter(1, Some(selector("a")), "em1"), Class::First);
    assert_eq!(enter(2, Some(selector("a")), "em2"), Class::Behind, "any EM of zone a");
    assert_eq!(enter(3, Some(selector("b")), "em1"), Class::First, "any EM of zone b");
    assert_eq!(enter(4, None, "em1"), Class::First, "one EM");
    assert_eq!(enter(5, None, "em1"), Class::Behind);
    // A move to another EM keeps the turn at any EM.
    own.requeue(Uuid::from_u128(1), [WaitKey::Em(em("em3"))].into(), at(9));
    assert_eq!(own.get(Uuid::from_u128(2)).unwrap().class, Class::Behind);
    assert_eq!(own.get(Uuid::from_u128(2)).unwrap().rank_time, at(2));
    let first = own.get(Uuid::from_u128(1)).unwrap();
    assert_eq!(first.turn_key(&WaitKey::Em(em("em3"))), TurnKey::AnyEm(selector("a")));
}

#[test]
fn order_without_turns_is_by_entry_time() {
    let fair_by = FairBy::new([]);
    let (labels, resource, em) = (Labels::default(), Resource::memory(1).unwrap(), em("em1"));
    let of_alice = TicketLabels::new("alice", "IDE", "", &labels, &em, &resource);
    assert_eq!(fair_by.turn_of(&of_alice), None);
    let mut own = OwnRequests::default();
    for number in 0..3 {
        let id = Uuid::from_u128(number);
        own.insert(RankedRequest::new(id, None, at(7), 0));
        own.requeue(id, [on_em()].into(), at(7));
        assert_eq!(own.get(id).unwrap().position(), QueuePosition::new(0, at(7), id));
    }
    own.take_reranked();
    own.granted(Uuid::from_u128(0), at(9));
    assert!(own.take_reranked().is_empty());
}

#[test]
fn order_by_several_labels_gives_turn_by_combination() {
    let fair_by = FairBy::new(["user".to_owned(), "creator".to_owned(), "team".to_owned()]);
    let (resource, em) = (Resource::memory(1).unwrap(), em("em1"));
    let turn = |user: &str, creator: &str| {
        fair_by.turn_of(&TicketLabels::new(user, creator, "", &Labels::default(), &em, &resource))
    };
    assert_eq!(turn("pig", "IDE").as_deref(), Some("creator=IDE,team=,user=pig"));
    assert_ne!(turn("c", "a,team=,user=b"), turn("b,team=,user=c", "a"));
    let long = "x".repeat(2000);
    assert_ne!(turn("pig", &long), turn("dog", &long));
    assert!(turn("pig", &long).unwrap().len() < 100);
    for turn in [turn("pig", "IDE"), turn("=a,b", r"\"), turn("pig", &long)] {
        for (labels, expected) in [
            (vec![("user", "pig")], false),
            (vec![("creator", "IDE"), ("engine", "spark"), ("team", ""), ("user", "pig")], true),
        ] {
            assert_eq!(is_private(turn.as_deref(), &scope(&labels)), expected, "{turn:?}");
        }
    }
    assert!(is_private(Some("user=pig"), &scope(&[("user", "pig")])));
    assert!(!is_private(None, &scope(&[("user", "pig")])));
    assert!(!is_private(Some("user=pig"), &on_em()));
}

#[test]
fn rank_time_after_clock_steps_back_is_later() {
    let latest = at(100);
    assert_eq!(new_rank_time(at(100), Some(latest)), latest + Duration::MICROSECOND);
    assert_eq!(new_rank_time(at(90), Some(latest)), latest + Duration::MICROSECOND);
    assert_eq!(new_rank_time(at(101), Some(latest)), at(101));
    assert_eq!(new_rank_time(at(90), None), at(90));
}
