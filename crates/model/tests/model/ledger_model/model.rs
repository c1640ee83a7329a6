//! The reference model: tickets without counters. Every sum is computed from the tickets.

use std::collections::{BTreeMap, BTreeSet};

use rm_model::{
    limit_mode::LimitMode,
    report::LastSignOfLife,
    wait_queue::{WaitKey, WaitKeys},
};
use uuid::Uuid;

use super::ticket_references::*;

/// State of the model.
#[derive(Clone, Default)]
pub(super) struct Model {
    pub(super) now: u64,
    pub(super) ems: BTreeMap<usize, ModelEm>,
    /// Drained EMs, registered or not, with the reason.
    pub(super) drained: BTreeMap<usize, bool>,
    pub(super) tickets: Vec<ModelTicket>,
    /// Request ids, by user and id.
    pub(super) request_ids: BTreeMap<(usize, u8), (ModelBody, Uuid)>,
    /// Limits, by label set and values; `None` for each value.
    pub(super) limits: BTreeMap<(usize, Values), ModelRule>,
    /// Whether requests must state an engine type.
    pub(super) needs_engine_type: bool,
    /// All requests that ever waited, in queue order.
    pub(super) waiting: Vec<ModelWaiting>,
    /// EMs that have reported.
    pub(super) reported: BTreeSet<usize>,
    /// EMs that registered since the batch began.
    pub(super) registered: BTreeSet<usize>,
    /// Requests that entered a wait queue since the batch began; no operator can know of them.
    pub(super) entered: BTreeSet<Uuid>,
    /// Requests that an operator has removed.
    pub(super) removed: BTreeSet<Uuid>,
    /// Last signs of life at the begin of the batch.
    pub(super) signs: BTreeMap<usize, LastSignOfLife>,
    /// Epochs of the last registrations, by their replies.
    pub(super) epochs: BTreeMap<usize, i64>,
    /// The last snapshot of the external cluster.
    pub(super) cluster: Option<ModelCluster>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ModelEm {
    pub(super) total: i64,
    pub(super) protected: i64,
    /// Whether the EM is reserved for the first tenant.
    pub(super) reserved: bool,
    pub(super) zone: bool,
}

/// A snapshot: its time, the root, each queue, and applications.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModelCluster {
    pub(super) begun: u64,
    pub(super) max: [i64; PLACES],
    pub(super) used: [i64; PLACES],
    pub(super) shown: [i64; APPLICATIONS],
}

/// The labels of a request, without the EM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Who {
    pub(super) user: usize,
    pub(super) tenant: Option<usize>,
    pub(super) zone: bool,
    pub(super) engine_type: Option<usize>,
    pub(super) queue: Option<usize>,
}

impl Who {
    /// A missing label counts as an empty one; without a queue it counts in none.
    pub(super) fn values(&self, set: usize, em: usize) -> Option<Values> {
        match set {
            USER_SET => Some([Some(self.user), None]),
            QUEUE_SET => self.queue.map(|queue| [Some(queue), None]),
            FAMILY_SET => Some([Some(em), self.engine_type.map(|engine_type| ENGINE_TYPES[engine_type].1)]),
            TENANT_SET => Some([Some(self.user), self.tenant]),
            other => unreachable!("{other}"),
        }
    }
}

/// Required labels of a request: its zone, or the tenant of the request if it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Required {
    Zone,
    Tenant,
}

/// A limit on cores (of an EM or a queue), on instances, or on both.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModelRule {
    pub(super) scarce: Option<i64>,
    pub(super) instances: Option<i64>,
    pub(super) mode: LimitMode,
}

/// A dimension of a scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Scarce,
    Instances,
}

impl What {
    /// Returns the dimensions in the order of a label set.
    fn of(set: usize) -> [Self; 2] {
        if set == QUEUE_SET { [Self::Instances, Self::Scarce] } else { [Self::Scarce, Self::Instances] }
    }

    /// Returns the amount of an engine with this number of cores.
    fn held(self, cores: i64) -> i64 {
        if self == Self::Scarce { cores } else { 1 }
    }
}

/// Wait key of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    Em(usize),
    Scope(usize, Values),
    /// The root of the cluster, or one of its queues.
    Queue(usize),
}

impl Place {
    /// Whether the requests of one user alone wait here.
    pub(super) fn is_private(self) -> bool {
        matches!(self, Self::Scope(set, values) if scope_of(set, values).to_string().contains("user="))
    }

    fn wait_key(self) -> WaitKey {
        match self {
            Self::Em(em) => WaitKey::Em(instance(em)),
            Self::Scope(set, values) => WaitKey::Scope(scope_of(set, values)),
            Self::Queue(place) => WaitKey::Queue { provider: provider().name, path: path_of(place) },
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct ModelWaiting {
    pub(super) id: Uuid,
    pub(super) since: u64,
    /// The call that owns the position.
    pub(super) claim: Uuid,
    pub(super) em: usize,
    /// EM of the request's body; the request can wait at another.
    pub(super) named_em: usize,
    pub(super) who: Who,
    pub(super) requires: Option<Required>,
    pub(super) amount: i64,
    pub(super) ttl: u64,
    pub(super) request_id: Option<u8>,
    /// The use of its user.
    pub(super) cap: Option<i64>,
    pub(super) is_queued: bool,
    /// Wait keys, with whether the request is short there.
    pub(super) at: BTreeMap<Place, bool>,
}

/// Content of a request id.
pub(super) type ModelBody = (usize, Who, Option<Required>, i64, u64, Option<i64>);

impl ModelWaiting {
    pub(super) fn body(&self) -> ModelBody {
        (self.named_em, self.who, self.requires, self.amount, self.ttl, self.cap)
    }

    /// Wait keys, with whether the request is short there.
    pub(super) fn wait_keys(&self) -> WaitKeys {
        self.at.iter().map(|(place, is_short)| (place.wait_key(), *is_short)).collect()
    }
}

/// Amounts at a wait key: for each dimension the needed, available and total amount.
#[derive(Debug)]
pub(super) struct Room {
    pub(super) place: Place,
    pub(super) of: Vec<[i64; 3]>,
}

impl Room {
    /// Available amount of the first shortfall.
    pub(super) fn short(&self) -> Option<i64> {
        self.of.iter().find_map(|[need, available, _]| (need > available).then_some(*available))
    }

    pub(super) fn never_fits(&self) -> bool {
        self.of.iter().any(|[need, _, max]| need > max)
    }
}

#[derive(Clone)]
pub(super) struct ModelTicket {
    pub(super) id: Uuid,
    pub(super) em: usize,
    pub(super) who: Who,
    pub(super) held: i64,
    pub(super) used: bool,
    pub(super) deadline: u64,
    pub(super) alive: bool,
    /// Use at the adoption.
    pub(super) adopted: Option<i64>,
    /// Whether the ticket counts in the cluster, the start of its use, and its application.
    pub(super) counted: bool,
    pub(super) since: u64,
    pub(super) application: Option<usize>,
}

/// A locked ticket.
pub(super) const NEW: ModelTicket = ModelTicket {
    id: Uuid::nil(),
    em: 0,
    who: Who { user: 0, tenant: None, zone: false, engine_type: None, queue: None },
    held: 0,
    used: false,
    deadline: 0,
    alive: true,
    adopted: None,
    counted: false,
    since: 0,
    application: None,
};

/// Seconds after which an engine without an application counts as shown by the cluster.
const SETTLE: u64 = 60;

/// Remaining amount behind earlier entries.
fn behind(left: i64, ahead: i64) -> i64 {
    if left < 0 { left } else { (left - ahead).max(0) }
}

impl Model {
    pub(super) fn on_em(&self, em: usize, used: bool) -> impl Iterator<Item = &ModelTicket> {
        self.tickets.iter().filter(move |t| t.alive && t.em == em && t.used == used)
    }

    pub(super) fn left(&self, em: usize) -> Option<i64> {
        let ModelEm { total, protected, .. } = self.ems.get(&em)?;
        let held: i64 = self.tickets.iter().filter(|t| t.alive && t.em == em).map(|t| t.held).sum();
        Some(total - protected - held)
    }

    fn held(&self, set: usize, values: Values, what: What) -> i64 {
        let there = self.tickets.iter().filter(|t| t.alive && t.who.values(set, t.em) == Some(values));
        there.map(|t| what.held(t.held)).sum()
    }

    /// The maximum of a scope if the deciding limit has this mode. The first matching limit that names the dimension decides; a
    /// weightier label comes first.
    fn max_in(&self, mode: LimitMode, set: usize, values: Values, what: What) -> Option<i64> {
        let shapes = [[true, true], [true, false], [false, true], [false, false]];
        let decides = shapes.into_iter().find_map(|shape| {
            let pattern = [0, 1].map(|place| values[place].filter(|_| shape[place]));
            // A missing label has no value that a limit could match.
            let is_shape = [0, 1].into_iter().all(|place| shape[place] == pattern[place].is_some());
            let rule = self.limits.get(&(set, pattern)).filter(|_| is_shape)?;
            let max = if what == What::Scarce { rule.scarce } else { rule.instances };
            Some((max?, rule.mode))
        });
        decides.filter(|(_, decided)| *decided == mode).map(|(max, _)| max)
    }

    /// `kept` returns the reservations of other entries.
    fn in_scopes(
        &self,
        mode: LimitMode,
        (em, who, cores): (usize, Who, i64),
        cap: Option<i64>,
        ahead: impl Fn(Place, What) -> i64,
    ) -> Vec<Room> {
        let in_set = |set: usize| {
            let values = who.values(set, em)?;
            let place = Place::Scope(set, values);
            let of = |what: What| {
                let cap = cap.filter(|_| set == USER_SET && what == What::Scarce);
                let max = self.max_in(mode, set, values, what).into_iter().chain(cap).min()?;
                Some([what.held(cores), behind(max - self.held(set, values, what), ahead(place, what)), max])
            };
            let of: Vec<_> = What::of(set).into_iter().filter_map(of).collect();
            (!of.is_empty()).then_some(Room { place, of })
        };
        (0..SETS.len()).filter_map(in_set).collect()
    }

    /// Violations of advisory limits: the amounts that would be available.
    pub(super) fn advisory_violations(&self, ask: &ModelWaiting) -> Option<i64> {
        let advisory = self.in_scopes(LimitMode::Advisory, (ask.em, ask.who, ask.amount), None, |_, _| 0);
        advisory.iter().find_map(Room::short)
    }

    /// Use that a running engine can report: on its EM, in its scopes and in its queue.
    pub(super) fn left_for_growth(&self, ticket: &ModelTicket) -> Vec<i64> {
        let scopes = (0..SETS.len()).filter_map(|set| {
            let values = ticket.who.values(set, ticket.em)?;
            let max = self.max_in(LimitMode::Enforced, set, values, What::Scarce)?;
            Some(max - self.held(set, values, What::Scarce))
        });
        let cluster = self.left_of_cluster(ticket.who.queue).filter(|_| ticket.counted);
        let cluster = cluster.into_iter().flatten().map(|(_, left, _)| left);
        let left = self.left(ticket.em).into_iter().chain(scopes).chain(cluster);
        left.map(|left| left + ticket.held).collect()
    }

    /// Unseen use of the tickets in a queue or the root.
    pub(super) fn unseen(&self, place: usize) -> i64 {
        let Some(cluster) = self.cluster else { return 0 };
        let is_there = |t: &&ModelTicket| t.alive && t.counted && (place == 0 || t.who.queue == Some(place - 1));
        let unseen = |t: &ModelTicket| match (t.used, t.application) {
            (false, _) => t.held,
            (true, Some(application)) => (t.held - cluster.shown[application]).max(0),
            (true, None) if cluster.begun < t.since + SETTLE => t.held,
            (true, None) => 0,
        };
        self.tickets.iter().filter(is_there).map(unseen).sum()
    }

    /// Remaining amounts of a queue and of the root, and their totals.
    fn left_of_cluster(&self, queue: Option<usize>) -> Option<[(usize, i64, i64); 2]> {
        let (cluster, queue) = (self.cluster?, queue?);
        let left = |place: usize| cluster.max[place] - cluster.used[place] - self.unseen(place);
        Some([queue + 1, 0].map(|place| (place, left(place), cluster.max[place])))
    }

    /// Amounts that a request can get on an EM behind the first `ahead` entries.
    pub(super) fn rooms(&self, ask: &ModelWaiting, ahead: usize) -> Option<Vec<Room>> {
        let em = self.ems.get(&ask.em)?;
        let kept = |place: Place, what: What| {
            let before = self.waiting[..ahead].iter().filter(|w| w.is_queued && w.at.contains_key(&place));
            before.map(|w| what.held(w.amount)).sum::<i64>()
        };
        let on_em = Place::Em(ask.em);
        let left = behind(self.left(ask.em)?, kept(on_em, What::Scarce));
        let mut rooms = vec![Room { place: on_em, of: vec![[ask.amount, left, em.total - em.protected]] }];
        rooms.extend(self.in_scopes(LimitMode::Enforced, (ask.em, ask.who, ask.amount), ask.cap, kept));
        for (place, left, max) in self.left_of_cluster(ask.who.queue).into_iter().flatten() {
            let place = Place::Queue(place);
            rooms.push(Room { place, of: vec![[ask.amount, left - kept(place, What::Scarce), max]] });
        }
        Some(rooms)
    }

    /// Returns the rejection of a request by its EM. A request that may wait waits for the end of a drain.
    pub(super) fn rejection(&self, ask: &ModelWaiting, may_wait: bool) -> Option<&'static str> {
        let em = self.ems.get(&ask.em)?;
        let is_first_tenant = ask.who.tenant == Some(0);
        let lacks = match ask.requires {
            Some(Required::Zone) => !em.zone,
            Some(Required::Tenant) => ask.who.tenant.is_some() && !(em.reserved && is_first_tenant),
            None => false,
        };
        let reasons = [
            (self.drained.contains_key(&ask.em) && !may_wait, "draining"),
            (self.needs_engine_type && ask.who.engine_type.is_none(), "label missing"),
            (lacks, "label required"),
            (em.reserved && !is_first_tenant, "reserved"),
            (ask.cap.is_some() && self.limits.is_empty(), "cap"),
        ];
        reasons.into_iter().find(|(is_so, _)| *is_so).map(|(_, reason)| reason)
    }

    /// Returns the number of the waiting request with the user and request id of `ask`.
    pub(super) fn kept(&self, ask: &ModelWaiting) -> Option<usize> {
        ask.request_id?;
        let is_same = |w: &ModelWaiting| (w.who.user, w.request_id) == (ask.who.user, ask.request_id);
        self.waiting.iter().position(|w| w.is_queued && is_same(w))
    }

    /// Returns the number of the request that entered the queue this many requests ago.
    pub(super) fn waiter(&self, ago: usize) -> Option<usize> {
        self.waiting.len().checked_sub(ago + 1)
    }

    /// Returns the number of the ticket that was requested this many tickets ago.
    pub(super) fn ticket(&self, ago: usize) -> Option<usize> {
        self.tickets.len().checked_sub(ago + 1)
    }
}
