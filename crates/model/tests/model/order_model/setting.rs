//! Settings of the order model: keys with capacities, and the requests that can enter there.

use std::{collections::BTreeMap, sync::Arc};

use rm_model::{
    limit::{CountingRule, LabelPattern, LabelSet, Limits, Rule},
    limit_mode::LimitMode,
    name::Labels,
    operation::{PlacedRequest, RequestSpec},
    order::{AnyEm, FairBy},
    resource::{Dimension, Resource},
    scope::{CREATOR, Scope, TicketLabels, USER},
    selector::EmSelector,
    wait_queue::WaitKey,
};
use uuid::Uuid;

use super::world::ticket_id;
use crate::harness::{em, name, spec};

pub const KEYS: usize = 3;
pub const DIMENSIONS: usize = 2;
pub const USERS: usize = 3;

/// Amounts by key and dimension.
pub type Amounts = [[u8; DIMENSIONS]; KEYS];

/// Kind of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Em,
    /// A scope of all users.
    Creator,
    /// The scope of user 0.
    Private,
}

/// A request that can enter once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    pub user: usize,
    /// Amounts at the keys; those at the first key apply to any EM for a request that names none.
    pub amounts: Amounts,
    pub priority: i16,
    pub any_em: bool,
}

impl Spec {
    /// A request of one dimension.
    pub fn new(user: usize, amounts: [u8; KEYS]) -> Self {
        Self { user, amounts: amounts.map(|amount| [amount, 0]), priority: 0, any_em: false }
    }

    pub fn with_priority(self, priority: i16) -> Self {
        Self { priority, ..self }
    }

    /// The request without an EM. Keys 0 and 1 must be EMs.
    pub fn on_any_em(self) -> Self {
        Self { any_em: true, ..self }
    }

    /// Returns the amounts of the request on the EM of a key.
    pub fn amounts_on(&self, em: usize) -> Amounts {
        let mut amounts = self.amounts;
        if self.any_em {
            amounts.swap(0, em);
        }
        amounts
    }

    fn placed(&self, request: usize) -> PlacedRequest {
        let amounts = (0..KEYS).flat_map(|key| counted(key, &self.amounts));
        let amounts = amounts.map(|(dimension, amount)| (dimension.name().to_owned(), amount));
        let resource = Resource::special(amounts.collect()).unwrap();
        let spec = spec(ticket_id(request), &format!("user{}", self.user), resource);
        let spec = RequestSpec { creator: name("schedulis"), priority: self.priority, ..spec };
        PlacedRequest::new(em("em0"), &Arc::new(spec), self.any_em)
    }
}

/// Returns the amounts at a key, as limits and requests count them.
pub fn counted(key: usize, amounts: &Amounts) -> BTreeMap<Dimension, i64> {
    let amounts = amounts[key].iter().enumerate().filter(|(_, amount)| **amount > 0);
    amounts.map(|(at, amount)| (Dimension::Custom(format!("{key}.{at}").into()), i64::from(*amount))).collect()
}

#[derive(Debug)]
pub struct Setting {
    pub name: String,
    pub kinds: [Kind; KEYS],
    pub keys: [WaitKey; KEYS],
    pub max: Amounts,
    /// Guarantees of the scopes; 0 for none.
    pub guarantee: Amounts,
    pub limits: Limits,
    /// The requests with their amounts in the scopes, if a scope has a guarantee.
    pub placed: Vec<PlacedRequest>,
    pub requests: Vec<Spec>,
    pub turns: [Option<Arc<str>>; USERS],
    pub any_em: AnyEm,
    /// Seconds between two events.
    pub step: i32,
}

impl Setting {
    pub fn new(name: &str, kinds: [Kind; KEYS], max: [u8; KEYS], requests: Vec<Spec>) -> Self {
        let scope = |label: &str, value: &str| {
            WaitKey::Scope(Scope::new(BTreeMap::from([(label.to_owned(), value.to_owned())])))
        };
        let key = |at: usize| match kinds[at] {
            Kind::Em => WaitKey::Em(em(&format!("em{at}"))),
            Kind::Creator => scope(CREATOR, "schedulis"),
            Kind::Private => scope(USER, "user0"),
        };
        Self {
            name: name.to_owned(),
            kinds,
            keys: std::array::from_fn(key),
            max: max.map(|max| [max, 0]),
            guarantee: Amounts::default(),
            limits: Limits::default(),
            placed: vec![],
            step: if requests.iter().all(|spec| spec.priority == 0) { 1 } else { 20 },
            requests,
            turns: turns(&FairBy::default()),
            any_em: AnyEm::of(&EmSelector::default()),
        }
    }

    pub fn with_fair_by(self, fair_by: FairBy) -> Self {
        Self { turns: turns(&fair_by), ..self }
    }

    /// The setting with guarantees of scopes. A custom dimension counts the amounts at each key.
    pub fn with_guarantee(self, guarantee: [u8; KEYS]) -> Self {
        let guarantee = guarantee.map(|guarantee| [guarantee, 0]);
        let rule = |key: usize| {
            let WaitKey::Scope(scope) = &self.keys[key] else { return None };
            let labels = scope.labels().iter().map(|(label, value)| (label.clone(), Some(value.clone())));
            let (pattern, mode) = (LabelPattern::new(labels.collect()), LimitMode::Enforced);
            Some(Rule { pattern, mode, max: counted(key, &self.max), guarantee: counted(key, &guarantee) })
        };
        let rules: Vec<Rule> = (0..KEYS).filter_map(rule).collect();
        let counting = CountingRule::wanted(rules.iter().map(Rule::label_set).collect(), &BTreeMap::new());
        let sets = counting.into_iter().zip(1..).map(|(counting, id)| LabelSet { id, counting, is_counted: true });
        let limits = Limits::new(Uuid::nil(), sets.collect(), rules);
        let placed = self.requests.iter().enumerate().map(|(request, spec)| spec.placed(request)).collect();
        Self { guarantee, limits, placed, ..self }
    }

    /// Largest difference of two priorities, in seconds.
    pub fn spread(&self) -> i32 {
        let priorities = || self.requests.iter().map(|spec| i32::from(spec.priority));
        priorities().max().unwrap_or(0) - priorities().min().unwrap_or(0)
    }
}

fn turns(fair_by: &FairBy) -> [Option<Arc<str>>; USERS] {
    let (em, labels, resource) = (em("em0"), Labels::default(), Resource::memory(1).unwrap());
    std::array::from_fn(|user| {
        fair_by.turn_of(&TicketLabels::new(&format!("user{user}"), "schedulis", "", &labels, &em, &resource))
    })
}

/// Settings with the shapes of order.md: one key, own limits, two shared keys, any EM, priorities, guarantees.
pub fn named() -> Vec<Setting> {
    use Kind::{Creator, Em, Private};
    let spec = Spec::new;
    let private = [Em, Creator, Private];
    let of_tenant = |(user, amounts, priority)| spec(user, amounts).with_priority(priority);
    let tenant = [(2, 0, 0), (0, 1, 0), (0, 1, 0), (1, 1, 0), (1, 1, 30), (2, 0, 0)]
        .map(|(user, amount, priority)| of_tenant((user, [1, amount, 0], priority)));
    let limited = [(0, [1, 0, 1], 0), (2, [1, 0, 0], 0), (0, [1, 1, 0], -60), (0, [1, 1, 1], 30), (1, [2, 1, 0], 0)];
    let guarantees = [(0, [1, 1, 1]), (0, [2, 0, 2]), (0, [1, 2, 1]), (1, [2, 1, 0]), (1, [1, 2, 0]), (2, [3, 0, 0])]
        .map(|(user, amounts)| spec(user, amounts));
    let any_em = vec![
        spec(0, [1, 0, 0]),
        spec(0, [1, 0, 1]).on_any_em(),
        spec(0, [1, 0, 1]),
        spec(1, [0, 1, 1]),
        spec(1, [1, 0, 1]).on_any_em(),
        spec(2, [1, 0, 0]).on_any_em(),
    ];
    vec![
        Setting::new("one key", private, [1, 9, 9], [0, 0, 0, 1, 1, 2].map(|user| spec(user, [1, 0, 0])).into()),
        Setting::new(
            "large and small",
            private,
            [3, 9, 9],
            vec![
                spec(0, [2, 0, 0]),
                spec(0, [1, 0, 0]),
                spec(0, [2, 0, 0]),
                spec(1, [1, 0, 0]),
                spec(1, [3, 0, 0]),
                spec(2, [2, 0, 0]),
            ],
        ),
        Setting::new(
            "own limit",
            private,
            [2, 9, 1],
            vec![
                spec(0, [1, 0, 1]),
                spec(0, [1, 0, 1]),
                spec(0, [1, 0, 0]),
                spec(1, [1, 0, 0]),
                spec(1, [2, 0, 0]),
                spec(2, [1, 0, 0]),
            ],
        ),
        Setting::new(
            "two shared keys",
            private,
            [1, 1, 9],
            vec![
                spec(0, [1, 0, 0]),
                spec(0, [0, 1, 0]),
                spec(0, [1, 1, 0]),
                spec(1, [1, 1, 0]),
                spec(1, [0, 1, 0]),
                spec(2, [1, 0, 0]),
            ],
        ),
        Setting::new(
            "all keys",
            private,
            [2, 1, 1],
            vec![
                spec(0, [1, 1, 1]),
                spec(0, [1, 0, 1]),
                spec(0, [0, 1, 0]),
                spec(1, [1, 1, 0]),
                spec(1, [1, 1, 0]),
                spec(2, [2, 0, 0]),
            ],
        ),
        Setting::new(
            "any EM",
            [Em, Em, Creator],
            [1, 1, 9],
            vec![
                spec(0, [1, 0, 0]).on_any_em(),
                spec(0, [1, 0, 0]).on_any_em(),
                spec(0, [1, 0, 0]),
                spec(1, [1, 0, 0]).on_any_em(),
                spec(1, [0, 1, 0]),
                spec(2, [1, 0, 0]).on_any_em(),
            ],
        ),
        Setting::new(
            "any EM and a limit",
            [Em, Em, Private],
            [1, 1, 1],
            vec![
                spec(0, [1, 0, 1]).on_any_em(),
                spec(0, [1, 0, 1]).on_any_em(),
                spec(0, [1, 0, 0]).on_any_em(),
                spec(1, [1, 0, 0]).on_any_em(),
                spec(1, [1, 0, 0]).on_any_em(),
            ],
        ),
        Setting::new(
            "priority",
            private,
            [1, 9, 1],
            vec![
                spec(0, [1, 0, 0]).with_priority(-60),
                spec(0, [1, 0, 0]).with_priority(30),
                spec(0, [1, 0, 0]),
                spec(1, [1, 0, 0]),
                spec(1, [1, 0, 0]).with_priority(30),
                spec(2, [1, 0, 0]).with_priority(-60),
            ],
        ),
        dimensions(),
        Setting::new(
            "no turns",
            private,
            [2, 1, 1],
            vec![
                spec(0, [1, 0, 1]),
                spec(0, [1, 1, 0]),
                spec(0, [2, 0, 0]).with_priority(30),
                spec(1, [1, 0, 0]),
                spec(1, [1, 1, 0]),
            ],
        )
        .with_fair_by(FairBy::new([])),
        Setting::new("guarantee of a tenant", private, [1, 9, 9], tenant.into()).with_guarantee([0, 2, 0]),
        Setting::new("guarantee and a limit", private, [2, 9, 1], limited.map(of_tenant).into())
            .with_guarantee([0, 1, 0]),
        Setting::new("two guarantees", private, [3, 9, 2], guarantees.into()).with_guarantee([0, 3, 1]),
        Setting::new("guarantee at any EM", [Em, Em, Creator], [1, 1, 9], any_em).with_guarantee([0, 0, 1]),
    ]
}

/// An EM of two dimensions, where a newcomer can fit beside own requests that wait for the other dimension.
pub fn dimensions() -> Setting {
    let spec = |user, amounts: [u8; DIMENSIONS]| Spec {
        amounts: [amounts, [0; DIMENSIONS], [0; DIMENSIONS]],
        ..Spec::new(user, [0; KEYS])
    };
    let requests =
        vec![spec(2, [1, 0]), spec(0, [4, 0]), spec(0, [1, 4]), spec(0, [0, 1]), spec(1, [1, 1]), spec(1, [2, 3])];
    let setting = Setting::new("two dimensions", [Kind::Em, Kind::Creator, Kind::Private], [4, 9, 9], requests);
    Setting { max: [[4, 4], [9, 9], [9, 9]], ..setting }
}

/// Returns a setting that follows from a number.
pub fn random(seed: u64) -> Setting {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut below = |bound: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) % bound
    };
    let has_ems = below(3) == 0;
    let has_priorities = below(3) == 0;
    let kinds = [Kind::Em, if has_ems { Kind::Em } else { Kind::Creator }, Kind::Private];
    let max: [u8; KEYS] = std::array::from_fn(|_| 1 + below(3) as u8);
    let requests = (0..5 + below(3)).map(|number| {
        let user = if number < 3 { number as usize } else { below(USERS as u64) as usize };
        let mut at = |key: usize, chance: u64| {
            let amount = 1 + below(u64::from(max[key])) as u8;
            if below(4) < chance { amount } else { 0 }
        };
        let mut amounts = [at(0, 3), at(1, 2), if user == 0 { at(2, 2) } else { 0 }];
        let any_em = has_ems && below(2) == 0;
        if any_em {
            (amounts[0], amounts[1]) = (amounts[0].clamp(1, max[0].min(max[1])), 0);
        } else if amounts == [0; KEYS] {
            amounts[0] = 1;
        }
        let priority = if has_priorities { [-60, 0, 0, 30][below(4) as usize] } else { 0 };
        Spec { any_em, ..Spec::new(user, amounts).with_priority(priority) }
    });
    let requests = requests.collect();
    let setting = Setting::new(&format!("seed {seed}"), kinds, max, requests);
    let mut guarantee = |key: usize| if kinds[key] == Kind::Em { 0 } else { below(u64::from(max[key]) + 1) as u8 };
    match [0, guarantee(1), guarantee(2)] {
        [0, 0, 0] => setting,
        guarantee => setting.with_guarantee(guarantee),
    }
}
