//! The ledger against a plain reference model: random operations, in batches of random size, through a store of maps.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use linkis_rm::domain::{
    adopt::Adopt,
    cap::Cap,
    drain::{Drain, DrainEm, ResumeEm},
    em::{Em, EmInstance},
    external::{
        CheckRules, Cluster, ClusterTicket, Clusters, Rooms, Snapshot as ClusterSnapshot, WhenAway, along, place_of,
    },
    ledger::{Deltas, Ledger, LineView, Snapshot, TicketPage},
    limit::{Counting, LabelSet, Limits, Pattern, Rule},
    limit_mode::LimitMode,
    line::{FreedSpots, Line, QueuePosition, Spot, Spots, WaitEntry},
    name::Name,
    operation::{
        Forced, Inited, Operation, Outcome, Reap, Rejection, Released, Reported, Request, RequestId, RequestRecord,
        RequestSpec, Unregister, Wait,
    },
    principal::Principal,
    provider::Provider,
    queue::{Naming, Queue, QueueAmounts, QueueState, Queues},
    report::{LastSign, ReportNumber},
    resource::{Dimension, LoadInstanceAmounts, Parts, Resource, YarnAmounts},
    scope::{Counter, Scope, Usage},
    ticket::{End, EndedTicket, Ticket, TicketState},
    ticket_digest::TicketDigest,
};
use proptest::prelude::*;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::harness::{em, engine, name, registration};

const EMS: usize = 3;
const USERS: usize = 2;
const QUEUES: usize = 2;

/// For which registration of an EM a caller says that it acts.
#[derive(Clone, Copy, Debug)]
enum Said {
    Nothing,
    Current,
    Older,
    Newer,
}

fn said() -> impl Strategy<Value = Said> {
    prop_oneof![6 => Just(Said::Nothing), 3 => Just(Said::Current), 1 => Just(Said::Older), 1 => Just(Said::Newer)]
}

/// One random step; tickets are named by how long ago they were asked for.
#[derive(Clone, Debug)]
enum Step {
    Register {
        em: usize,
        total: i64,
        protected: i64,
    },
    Unregister {
        em: usize,
        epoch: Said,
    },
    Request {
        em: usize,
        user: usize,
        /// As much again of a queue, if any.
        queue: Option<usize>,
        amount: i64,
        ttl: u64,
        request_id: Option<u8>,
        wait: bool,
        cap: Option<i64>,
    },
    /// A request that waits, or has waited, is tried again; perhaps on another EM.
    Retry {
        ago: usize,
        em: Option<usize>,
    },
    /// Of an engine that is new, or under the id of a ticket that there is or was.
    Adopt {
        em: usize,
        user: usize,
        used: i64,
        again: Option<usize>,
    },
    Inited {
        ago: usize,
        used: Option<i64>,
        user: usize,
        epoch: Said,
    },
    /// Mostly of one of the tickets in use, and mostly by its user.
    Reported {
        ago: usize,
        in_use: bool,
        used: i64,
        stolen: bool,
        epoch: Said,
    },
    Released {
        ago: usize,
        user: usize,
    },
    /// By an operator.
    Force {
        ago: usize,
    },
    /// For one of two reasons.
    Drain {
        em: usize,
        reason: bool,
    },
    Resume {
        em: usize,
    },
    Expire {
        ago: usize,
    },
    Lost {
        ago: usize,
    },
    /// By what was known of the EM when the batch began, or by less.
    Reap {
        em: usize,
        known: bool,
    },
    /// The batch ends, and an EM reports.
    Report {
        em: usize,
    },
    /// The batch ends, and time passes.
    Commit {
        seconds: u64,
    },
    /// The batch ends, and the caller of a request that waits goes away.
    Leave {
        ago: usize,
    },
    /// The batch ends, and a user's limit (or that of each user) is set or removed.
    Limit {
        user: Option<usize>,
        max: Option<(i64, LimitMode)>,
    },
    /// Likewise a queue's.
    QueueLimit {
        queue: Option<usize>,
        max: Option<i64>,
    },
    /// The batch ends, and a cluster shows how large its queues are, and what is used of them: the root's first.
    Cluster {
        max: [i64; PLACES],
        used: [i64; PLACES],
    },
}

/// The queues of the cluster, the root among them.
const PLACES: usize = QUEUES + 1;

fn step() -> impl Strategy<Value = Step> {
    let (em, user, ago) = (0..EMS, 0..USERS, 0..12usize);
    prop_oneof![
        2 => (em.clone(), 0..40i64, 0..10i64)
            .prop_map(|(em, total, protected)| Step::Register { em, total, protected: protected.min(total) }),
        1 => (em.clone(), said()).prop_map(|(em, epoch)| Step::Unregister { em, epoch }),
        8 => (em.clone(), user.clone(), prop::option::of(0..QUEUES), 1..12i64, 1..20u64, prop::option::weighted(0.3, 0..6u8), any::<bool>(),
            prop::option::weighted(0.4, 0..25i64))
            .prop_map(|(em, user, queue, amount, ttl, request_id, wait, cap)| {
                Step::Request { em, user, queue, amount, ttl, request_id, wait, cap }
            }),
        6 => (0..6usize, prop::option::weighted(0.2, em.clone())).prop_map(|(ago, em)| Step::Retry { ago, em }),
        3 => (em.clone(), user.clone(), 1..6i64, prop::option::weighted(0.4, ago.clone()))
            .prop_map(|(em, user, used, again)| Step::Adopt { em, user, used, again }),
        1 => (0..6usize).prop_map(|ago| Step::Leave { ago }),
        5 => (ago.clone(), prop::option::of(0..15i64), user.clone(), said())
            .prop_map(|(ago, used, user, epoch)| Step::Inited { ago, used, user, epoch }),
        6 => (ago.clone(), prop::bool::weighted(0.8), 0..15i64, prop::bool::weighted(0.1), said())
            .prop_map(|(ago, in_use, used, stolen, epoch)| Step::Reported { ago, in_use, used, stolen, epoch }),
        4 => (ago.clone(), user).prop_map(|(ago, user)| Step::Released { ago, user }),
        2 => ago.clone().prop_map(|ago| Step::Force { ago }),
        1 => (em.clone(), any::<bool>()).prop_map(|(em, reason)| Step::Drain { em, reason }),
        2 => em.clone().prop_map(|em| Step::Resume { em }),
        3 => ago.clone().prop_map(|ago| Step::Expire { ago }),
        3 => ago.prop_map(|ago| Step::Lost { ago }),
        1 => (em.clone(), prop::bool::weighted(0.8)).prop_map(|(em, known)| Step::Reap { em, known }),
        2 => em.prop_map(|em| Step::Report { em }),
        4 => (0..15u64).prop_map(|seconds| Step::Commit { seconds }),
        2 => (prop::option::of(0..USERS), prop::option::weighted(0.8, (0..30i64, mode())))
            .prop_map(|(user, max)| Step::Limit { user, max }),
        1 => (prop::option::of(0..QUEUES), prop::option::weighted(0.8, 0..30i64))
            .prop_map(|(queue, max)| Step::QueueLimit { queue, max }),
        2 => (prop::array::uniform3(5..40i64), prop::array::uniform3(0..8i64))
            .prop_map(|(max, used)| Step::Cluster { max, used }),
    ]
}

fn mode() -> impl Strategy<Value = LimitMode> {
    prop_oneof![3 => Just(LimitMode::Enforced), 1 => Just(LimitMode::Watched), 1 => Just(LimitMode::Off)]
}

fn instance(number: usize) -> EmInstance {
    em(&format!("host{number}"))
}

fn user(number: usize) -> Name {
    name(&format!("user{number}"))
}

fn amount(cores: i64) -> Resource {
    Resource::load_instance(0, cores, 0).unwrap()
}

/// So many cores of an EM, and of a queue if there is one.
fn asked_of(queue: Option<usize>, cores: i64) -> Resource {
    let Some(queue) = queue else { return amount(cores) };
    let driver = LoadInstanceAmounts { cores, ..LoadInstanceAmounts::default() };
    let yarn = YarnAmounts { queue_name: queue_name(queue), queue_cores: cores, ..YarnAmounts::default() };
    Resource::from_parts(Parts::DriverAndYarn(driver, yarn)).unwrap()
}

fn queue_name(number: usize) -> String {
    format!("queue{number}")
}

/// What a step should be answered: just enough to compare.
#[derive(Debug, PartialEq)]
enum Answer {
    Done,
    /// And how much a limit that only watches would have let through, if that was less.
    Granted(Uuid, Option<i64>),
    Refused {
        available: i64,
    },
    Waiting {
        available: i64,
    },
    Removed,
    Rolled(bool),
    No(&'static str),
}

fn answer(outcome: Result<Outcome, Rejection>) -> Answer {
    match outcome {
        Ok(
            Outcome::Registered(_)
            | Outcome::Adopted(_)
            | Outcome::Inited(_)
            | Outcome::Reported(_)
            | Outcome::Released
            | Outcome::Forced(_)
            | Outcome::Drained(_),
        ) => Answer::Done,
        Ok(Outcome::Resumed(was_drained)) => Answer::Rolled(was_drained),
        Ok(Outcome::Granted(grant)) => {
            Answer::Granted(grant.ticket_id, grant.over_watched.first().map(|over| over.available))
        }
        Ok(Outcome::Refused(refusal)) => Answer::Refused { available: refusal.shortfalls[0].available },
        Ok(Outcome::Waiting(waiting)) => Answer::Waiting { available: waiting.refusal.shortfalls[0].available },
        Ok(Outcome::Unregistered { .. }) => Answer::Removed,
        Ok(Outcome::Reaped(Some(_))) => Answer::Removed,
        Ok(Outcome::Reaped(None)) => Answer::Rolled(false),
        Ok(Outcome::Expired(rolled) | Outcome::Lost(rolled)) => Answer::Rolled(rolled),
        Err(Rejection::EmNotRegistered(_)) => Answer::No("em"),
        Err(Rejection::EmDraining { .. }) => Answer::No("draining"),
        Err(Rejection::CapNotCounted { .. }) => Answer::No("cap"),
        Err(Rejection::PlaceLost) => Answer::No("place"),
        Err(Rejection::TicketNotFound { .. }) => Answer::No("ticket"),
        Err(Rejection::TicketNotOwned { .. }) => Answer::No("owner"),
        Err(Rejection::RequestIdReused(_)) => Answer::No("request id"),
        Err(Rejection::TicketEnded { .. } | Rejection::AdoptedTooLate(_)) => Answer::No("ended"),
        Err(Rejection::TicketExists { .. }) => Answer::No("exists"),
        Err(Rejection::InitedOtherwise { .. }) => Answer::No("other use"),
        Err(Rejection::StaleEpoch { .. }) => Answer::No("older epoch"),
        Err(Rejection::EpochAhead { .. }) => Answer::No("newer epoch"),
        Err(Rejection::NotInited { .. }) => Answer::No("not in use"),
        Err(Rejection::NotEnough(refusal) | Rejection::NoMore(refusal)) => {
            Answer::Refused { available: refusal.shortfalls[0].available }
        }
        other => panic!("{other:?}"),
    }
}

/// The reference: no counters, only tickets; every sum is made anew.
#[derive(Clone, Default)]
struct Model {
    now: u64,
    ems: BTreeMap<usize, (i64, i64)>,
    /// EMs that are drained, registered or not, and for which reason.
    drained: BTreeMap<usize, bool>,
    tickets: Vec<ModelTicket>,
    request_ids: BTreeMap<u8, (ModelBody, Uuid)>,
    /// By user; `None` for each user that has none of his own.
    limits: BTreeMap<Option<usize>, (i64, LimitMode)>,
    /// Likewise by queue.
    queue_limits: BTreeMap<Option<usize>, i64>,
    /// All that ever waited, the first in line first.
    waiting: Vec<ModelWaiting>,
    /// EMs that have reported.
    reported: BTreeSet<usize>,
    /// EMs that registered since the batch began.
    registered: BTreeSet<usize>,
    /// The last signs of life when the batch began.
    signs: BTreeMap<usize, LastSign>,
    /// The epochs that registrations were answered with last.
    epochs: BTreeMap<usize, i64>,
    /// What the cluster of the queues showed last.
    cluster: Option<ModelCluster>,
}

/// What a cluster showed, and when: of the root, and of each queue.
#[derive(Clone, Copy, Debug)]
struct ModelCluster {
    begun: u64,
    max: [i64; PLACES],
    used: [i64; PLACES],
}

#[derive(Clone, Debug)]
struct ModelWaiting {
    id: Uuid,
    since: u64,
    em: usize,
    user: usize,
    queue: Option<usize>,
    amount: i64,
    ttl: u64,
    request_id: Option<u8>,
    /// Of what its user holds.
    cap: Option<i64>,
    in_line: bool,
    /// Which EM it stands at, if any, and whether it is short there.
    at_em: Option<(usize, bool)>,
    /// Whether it stands at its user's limit, and whether it is short there.
    at_user: Option<bool>,
    /// Likewise at its queue's.
    at_queue: Option<bool>,
    /// Likewise at its queue of the cluster, and at the root.
    at_cluster: [Option<bool>; 2],
}

/// What a request id stands for: EM, user, queue, amount, for how long, and cap.
type ModelBody = (usize, usize, Option<usize>, i64, u64, Option<i64>);

impl ModelWaiting {
    fn body(&self) -> ModelBody {
        (self.em, self.user, self.queue, self.amount, self.ttl, self.cap)
    }
}

/// What is available to a request on an EM, of its user's limit and of its queue's, and what there is in all.
struct Available {
    em: (i64, i64),
    user: Option<(i64, i64)>,
    queue: Option<(i64, i64)>,
    /// Of the queue, and of the root.
    cluster: Option<[(i64, i64); 2]>,
}

impl Available {
    /// What the headline of a refusal says; `None` if the request fits.
    fn short(&self, amount: i64) -> Option<i64> {
        let short = |(available, _): (i64, i64)| (amount > available).then_some(available);
        let in_cluster = || self.cluster.into_iter().flatten().find_map(short);
        short(self.em).or_else(|| self.user.and_then(short)).or_else(|| self.queue.and_then(short)).or_else(in_cluster)
    }

    fn never_fits(&self, amount: i64) -> bool {
        let others = [self.user, self.queue].into_iter().flatten().chain(self.cluster.into_iter().flatten());
        amount > self.em.1 || others.into_iter().any(|(_, max)| amount > max)
    }
}

#[derive(Clone)]
struct ModelTicket {
    id: Uuid,
    em: usize,
    user: usize,
    queue: Option<usize>,
    held: i64,
    used: bool,
    deadline: u64,
    alive: bool,
    /// What it used when it was adopted.
    adopted: Option<i64>,
    /// Whether it is counted in the cluster, and since when it is in use.
    counted: bool,
    since: u64,
}

/// How long a cluster may take to show an engine without an application, in seconds.
const SETTLE: u64 = 60;

impl Model {
    fn sum(&self, em: usize, used: bool) -> i64 {
        let of_em = self.tickets.iter().filter(|t| t.alive && t.em == em && t.used == used);
        of_em.map(|t| t.held).sum()
    }

    fn left(&self, em: usize) -> Option<i64> {
        let (total, protected) = self.ems.get(&em)?;
        Some(total - protected - self.sum(em, true) - self.sum(em, false))
    }

    fn sum_of_user(&self, user: usize, used: bool) -> i64 {
        self.tickets.iter().filter(|t| t.alive && t.user == user && t.used == used).map(|t| t.held).sum()
    }

    /// What a user may still be granted, if a limit is for him.
    fn left_of_user(&self, user: usize) -> Option<i64> {
        self.left_in(user, LimitMode::Enforced)
    }

    /// The same, if the limit that decides for him is of this mode.
    fn left_in(&self, user: usize, mode: LimitMode) -> Option<i64> {
        let max = self.max_in(user, mode)?;
        Some(max - self.sum_of_user(user, true) - self.sum_of_user(user, false))
    }

    fn max_in(&self, user: usize, mode: LimitMode) -> Option<i64> {
        let (max, of_mode) = self.limits.get(&Some(user)).or(self.limits.get(&None))?;
        (*of_mode == mode).then_some(*max)
    }

    fn sum_of_queue(&self, queue: usize, used: bool) -> i64 {
        let in_queue = self.tickets.iter().filter(|t| t.alive && t.queue == Some(queue) && t.used == used);
        in_queue.map(|t| t.held).sum()
    }

    fn max_of_queue(&self, queue: usize) -> Option<i64> {
        self.queue_limits.get(&Some(queue)).or(self.queue_limits.get(&None)).copied()
    }

    /// What may still be granted in a queue, if there is one and a limit is for it.
    fn left_of_queue(&self, queue: Option<usize>) -> Option<i64> {
        let queue = queue?;
        Some(self.max_of_queue(queue)? - self.sum_of_queue(queue, true) - self.sum_of_queue(queue, false))
    }

    /// What the cluster does not show of the tickets in a place of it: that of a queue, or the root's.
    fn unseen(&self, place: usize) -> i64 {
        let begun = self.cluster.map_or(0, |cluster| cluster.begun);
        let there = self.tickets.iter().filter(|t| t.alive && t.counted && (place == 0 || t.queue == Some(place - 1)));
        there.filter(|t| !t.used || begun < t.since + SETTLE).map(|t| t.held).sum()
    }

    /// What is left of a queue of the cluster, and of the root; and how much there is in all.
    fn left_of_cluster(&self, queue: Option<usize>) -> Option<[(i64, i64); 2]> {
        let (cluster, queue) = (self.cluster?, queue?);
        Some(
            [queue + 1, 0]
                .map(|place| (cluster.max[place] - cluster.used[place] - self.unseen(place), cluster.max[place])),
        )
    }

    /// What a request can get on an EM behind the first `ahead` of those who wait.
    fn available(
        &self,
        em: usize,
        user: usize,
        queue: Option<usize>,
        cap: Option<i64>,
        ahead: usize,
    ) -> Option<Available> {
        let (total, protected) = self.ems.get(&em)?;
        let before = || self.waiting[..ahead].iter().filter(|w| w.in_line);
        let at_em: i64 = before().filter(|w| w.at_em.is_some_and(|(at, _)| at == em)).map(|w| w.amount).sum();
        let at_user: i64 = before().filter(|w| w.user == user && w.at_user.is_some()).map(|w| w.amount).sum();
        let behind = |left: i64, ahead: i64| if left < 0 { left } else { (left - ahead).max(0) };
        let held = self.sum_of_user(user, true) + self.sum_of_user(user, false);
        // The lower of the limit and the cap.
        let max = self.max_in(user, LimitMode::Enforced).into_iter().chain(cap).min();
        let of_user = max.map(|max| (behind(max - held, at_user), max));
        let at_queue: i64 = before().filter(|w| w.queue == queue && w.at_queue.is_some()).map(|w| w.amount).sum();
        let max = queue.and_then(|queue| self.max_of_queue(queue));
        let of_queue = self.left_of_queue(queue).map(|left| behind(left, at_queue)).zip(max);
        let stand = |place: usize| {
            let there = before().filter(move |w| w.at_cluster[place].is_some() && (place == 1 || w.queue == queue));
            there.map(|w| w.amount).sum::<i64>()
        };
        let cluster = self.left_of_cluster(queue);
        let cluster = cluster.map(|[(leaf, max), (root, most)]| [(leaf - stand(0), max), (root - stand(1), most)]);
        let em = (behind(self.left(em)?, at_em), total - protected);
        Some(Available { em, user: of_user, queue: of_queue, cluster })
    }

    /// Judges a request; `number` is its position among those who wait, if it has one.
    fn request(&mut self, ask: &ModelWaiting, number: Option<usize>, may_wait: bool) -> Answer {
        if let Some((body, id)) = ask.request_id.and_then(|id| self.request_ids.get(&id)).copied() {
            if body != ask.body() {
                return Answer::No("request id");
            }
            if !self.tickets.iter().any(|t| t.id == id && t.alive) {
                return Answer::No("ended");
            }
            self.leave(number);
            return Answer::Granted(id, None);
        }
        if number.is_some_and(|number| !self.waiting[number].in_line) {
            return Answer::No("place");
        }
        let ahead = number.unwrap_or(self.waiting.len());
        let Some(available) = self.available(ask.em, ask.user, ask.queue, ask.cap, ahead) else {
            return Answer::No("em");
        };
        if self.drained.contains_key(&ask.em) {
            return Answer::No("draining");
        }
        if ask.cap.is_some() && self.is_unlimited() {
            return Answer::No("cap");
        }
        let Some(short) = available.short(ask.amount) else {
            self.leave(number);
            let watched = self.left_in(ask.user, LimitMode::Watched).filter(|left| ask.amount > *left);
            self.grant(ask);
            return Answer::Granted(ask.id, watched);
        };
        if !may_wait || available.never_fits(ask.amount) {
            self.leave(number);
            return Answer::Refused { available: short };
        }
        let em_short = ask.amount > available.em.0;
        let user_short = available.user.is_some_and(|(left, _)| ask.amount > left);
        let others = || self.waiting[..ahead].iter().filter(|w| w.in_line);
        let first_at_em = em_short && !others().any(|w| w.at_em == Some((ask.em, true)));
        let first_at_user = user_short && !others().any(|w| w.user == ask.user && w.at_user == Some(true));
        let queue_short = available.queue.is_some_and(|(left, _)| ask.amount > left);
        let first_at_queue = queue_short && !others().any(|w| w.queue == ask.queue && w.at_queue == Some(true));
        let cluster_short = available.cluster.map_or([false; 2], |places| places.map(|(left, _)| ask.amount > left));
        let first_at_leaf =
            cluster_short[0] && !others().any(|w| w.queue == ask.queue && w.at_cluster[0] == Some(true));
        let first_at_root = cluster_short[1] && !others().any(|w| w.at_cluster[1] == Some(true));
        let keeps_all = first_at_em || first_at_user || first_at_queue || first_at_leaf || first_at_root;
        let at_cluster =
            cluster_short.map(|short| (short || keeps_all && available.cluster.is_some()).then_some(short));
        let at_em = (em_short || keeps_all).then_some((ask.em, em_short));
        let at_user = (user_short || keeps_all && available.user.is_some()).then_some(user_short);
        let at_queue = (queue_short || keeps_all && available.queue.is_some()).then_some(queue_short);
        let standing = ModelWaiting { in_line: true, at_em, at_user, at_queue, at_cluster, ..ask.clone() };
        match number {
            Some(number) => self.waiting[number] = standing,
            None => self.waiting.push(ModelWaiting { since: self.now, ..standing }),
        }
        Answer::Waiting { available: short }
    }

    fn leave(&mut self, number: Option<usize>) {
        if let Some(number) = number {
            self.waiting[number].in_line = false;
        }
    }

    fn grant(&mut self, ask: &ModelWaiting) {
        let deadline = self.now + ask.ttl;
        let (id, em, user, queue, held) = (ask.id, ask.em, ask.user, ask.queue, ask.amount);
        let counted = queue.is_some() && self.cluster.is_some();
        let (used, alive, adopted, since) = (false, true, None, 0);
        self.tickets.push(ModelTicket { id, em, user, queue, held, used, deadline, alive, adopted, counted, since });
        if let Some(request_id) = ask.request_id {
            self.request_ids.insert(request_id, (ask.body(), id));
        }
    }

    /// Those in line who need not try again: they would only stand where they do.
    fn settled(&self) -> Vec<usize> {
        let is_settled = |number: &usize| {
            let w = &self.waiting[*number];
            let mut later = self.clone();
            w.in_line
                && matches!(later.request(w, Some(*number), true), Answer::Waiting { .. })
                && later.waiting[*number].stands() == w.stands()
        };
        (0..self.waiting.len()).filter(is_settled).collect()
    }

    fn is_servable(&self, number: usize) -> bool {
        let w = &self.waiting[number];
        let available = self.available(w.em, w.user, w.queue, w.cap, number);
        w.in_line
            && !self.drained.contains_key(&w.em)
            && (w.cap.is_none() || !self.is_unlimited())
            && available.is_some_and(|available| available.short(w.amount).is_none())
    }

    /// The number of the request that began to wait so long ago.
    fn waiter(&self, ago: usize) -> Option<usize> {
        self.waiting.len().checked_sub(ago + 1)
    }

    /// The number of the ticket that was asked for so long ago.
    fn ticket(&self, ago: usize) -> Option<usize> {
        self.tickets.len().checked_sub(ago + 1)
    }

    /// An engine uses so much, instead of what its ticket holds until now.
    fn use_instead(&mut self, number: usize, wanted: i64) -> Answer {
        let (em, user, held) = (self.tickets[number].em, self.tickets[number].user, self.tickets[number].held);
        if wanted > held && self.drained.contains_key(&em) {
            return Answer::No("draining");
        }
        let on_em = Some(self.left(em).unwrap() + held);
        let of_user = self.left_of_user(user).map(|left| left + held);
        let of_queue = self.left_of_queue(self.tickets[number].queue).map(|left| left + held);
        let ticket = &self.tickets[number];
        let of_cluster = self.left_of_cluster(ticket.queue).filter(|_| ticket.counted);
        let of_cluster = of_cluster.into_iter().flatten().map(|(left, _)| left + held);
        for available in on_em.into_iter().chain(of_user).chain(of_queue).chain(of_cluster) {
            if wanted > held && wanted > available {
                return Answer::Refused { available };
            }
        }
        let now = self.now;
        let ticket = &mut self.tickets[number];
        ticket.since = if ticket.used { ticket.since } else { now };
        (ticket.held, ticket.used) = (wanted, true);
        Answer::Done
    }

    /// An engine is put into the books, whether or not there is room for it.
    fn adopt(&mut self, adopted: ModelTicket) -> Answer {
        if let Some(known) = self.tickets.iter().find(|t| t.id == adopted.id) {
            let is_same = known.used
                && (known.em, known.user, known.queue) == (adopted.em, adopted.user, adopted.queue)
                && known.adopted.unwrap_or(known.held) == adopted.held;
            return match known.alive {
                false => Answer::No("ended"),
                true if is_same => Answer::Done,
                true => Answer::No("exists"),
            };
        }
        if !self.ems.contains_key(&adopted.em) {
            return Answer::No("em");
        }
        self.tickets.push(adopted);
        Answer::Done
    }

    /// The ticket that a step adopts.
    fn adopted(&self, em: usize, user: usize, used: i64, again: Option<usize>, new_id: Uuid) -> ModelTicket {
        let known = again.and_then(|ago| self.ticket(ago)).map(|number| &self.tickets[number]);
        let id = known.map_or(new_id, |known| known.id);
        // Now and then the same once more.
        let (em, user, used) = match known.filter(|_| used < 4) {
            Some(known) => (known.em, known.user, known.adopted.unwrap_or(known.held)),
            None => (em, user, used),
        };
        let (queue, deadline, alive, adopted, counted, since) = (None, 0, true, Some(used), false, 0);
        ModelTicket { id, em, user, queue, held: used, used: true, deadline, alive, adopted, counted, since }
    }

    /// What a caller says of its epoch.
    fn epoch(&self, em: usize, said: Said) -> Option<i64> {
        let current = self.epochs.get(&em).copied().unwrap_or(2);
        match said {
            Said::Nothing => None,
            Said::Current => Some(current),
            Said::Older => Some(current - 1),
            Said::Newer => Some(current + 1),
        }
    }

    /// The number of the ticket that an engine reports for.
    fn reporting(&self, ago: usize, in_use: bool) -> Option<usize> {
        let is_in_use = |number: &usize| self.tickets[*number].alive && self.tickets[*number].used;
        match in_use {
            true => (0..self.tickets.len()).rev().filter(is_in_use).nth(ago % 3),
            false => self.ticket(ago),
        }
    }

    fn remove(&mut self, em: usize) -> Answer {
        self.ems.remove(&em);
        self.reported.remove(&em);
        self.tickets.iter_mut().filter(|t| t.em == em).for_each(|t| t.alive = false);
        Answer::Removed
    }

    fn step(&mut self, step: &Step, new_id: Uuid) -> Answer {
        match *step {
            Step::Register { em, total, protected } => {
                self.ems.insert(em, (total, protected));
                self.registered.insert(em);
                Answer::Done
            }
            Step::Unregister { em, epoch } => {
                if !self.ems.contains_key(&em) {
                    return Answer::No("em");
                }
                fenced(epoch).unwrap_or_else(|| self.remove(em))
            }
            Step::Reap { em, known } => {
                let silent = known && self.reported.contains(&em) && !self.registered.contains(&em);
                if silent { self.remove(em) } else { Answer::Rolled(false) }
            }
            Step::Report { em } => {
                if self.ems.contains_key(&em) {
                    self.reported.insert(em);
                }
                Answer::Done
            }
            Step::Request { em, user, queue, amount, ttl, request_id, wait, cap } => {
                let ask = asked(new_id, em, user, amount, ttl, request_id);
                self.request(&ModelWaiting { queue, cap, ..ask }, None, wait)
            }
            Step::Retry { ago, em } => {
                let Some(number) = self.waiter(ago) else { return Answer::No("place") };
                let before = self.waiting[number].clone();
                self.request(&ModelWaiting { em: em.unwrap_or(before.em), ..before }, Some(number), true)
            }
            Step::Leave { ago } => {
                self.leave(self.waiter(ago));
                Answer::Done
            }
            Step::Adopt { em, user, used, again } => self.adopt(self.adopted(em, user, used, again, new_id)),
            Step::Inited { ago, used, user, epoch } => {
                let Some(number) = self.ticket(ago) else { return Answer::No("ticket") };
                let ticket = &self.tickets[number];
                if !ticket.alive {
                    return Answer::No("ticket");
                }
                if ticket.user != user {
                    return Answer::No("owner");
                }
                if let Some(no) = fenced(epoch) {
                    return no;
                }
                if ticket.used {
                    let is_known = used.is_none_or(|used| used == ticket.held);
                    return if is_known { Answer::Done } else { Answer::No("other use") };
                }
                self.use_instead(number, used.unwrap_or(ticket.held))
            }
            Step::Reported { ago, in_use, used, stolen, epoch } => {
                let Some(number) = self.reporting(ago, in_use) else { return Answer::No("ticket") };
                let ticket = &self.tickets[number];
                if !ticket.alive {
                    return Answer::No("ticket");
                }
                if stolen {
                    return Answer::No("owner");
                }
                match fenced(epoch) {
                    Some(no) => no,
                    None if ticket.used => self.use_instead(number, used),
                    None => Answer::No("not in use"),
                }
            }
            Step::Released { ago, user } => {
                let Some(number) = self.ticket(ago) else { return Answer::No("ticket") };
                let ticket = &mut self.tickets[number];
                if ticket.user != user {
                    return Answer::No("owner");
                }
                ticket.alive = false;
                Answer::Done
            }
            Step::Force { ago } => {
                let Some(number) = self.ticket(ago) else { return Answer::No("ticket") };
                self.tickets[number].alive = false;
                Answer::Done
            }
            Step::Drain { em, reason } => {
                if !self.ems.contains_key(&em) && !self.drained.contains_key(&em) {
                    return Answer::No("em");
                }
                self.drained.insert(em, reason);
                Answer::Done
            }
            Step::Resume { em } => match self.drained.remove(&em) {
                None if !self.ems.contains_key(&em) => Answer::No("em"),
                before => Answer::Rolled(before.is_some()),
            },
            Step::Expire { ago } => {
                let Some(number) = self.ticket(ago) else { return Answer::Rolled(false) };
                let now = self.now;
                let ticket = &mut self.tickets[number];
                let due = ticket.alive && !ticket.used && ticket.deadline <= now;
                ticket.alive &= !due;
                Answer::Rolled(due)
            }
            Step::Lost { ago } => {
                let Some(number) = self.ticket(ago) else { return Answer::Rolled(false) };
                let ticket = &mut self.tickets[number];
                let lost = ticket.alive && ticket.used;
                ticket.alive &= !lost;
                Answer::Rolled(lost)
            }
            Step::Commit { seconds } => {
                self.now += seconds;
                Answer::Done
            }
            Step::Limit { user, max } => {
                match max {
                    Some(max) => drop(self.limits.insert(user, max)),
                    None => drop(self.limits.remove(&user)),
                }
                Answer::Done
            }
            Step::QueueLimit { queue, max } => {
                match max {
                    Some(max) => drop(self.queue_limits.insert(queue, max)),
                    None => drop(self.queue_limits.remove(&queue)),
                }
                Answer::Done
            }
            Step::Cluster { max, used } => {
                self.cluster = Some(ModelCluster { begun: self.now, max, used });
                Answer::Done
            }
        }
    }

    fn is_unlimited(&self) -> bool {
        self.limits.is_empty() && self.queue_limits.is_empty()
    }

    /// The limits as rules. Whatever they are, both users and queues are counted if there are any.
    fn rules(&self) -> Limits {
        if self.is_unlimited() {
            return Limits::default();
        }
        let rule = |key: &str, value: Option<String>, dimension, max: i64, mode| Rule {
            pattern: Pattern::new(BTreeMap::from([(key.into(), value)])),
            mode,
            max: BTreeMap::from([(dimension, max)]),
        };
        let of_user = |(number, (max, mode)): (&Option<usize>, &(i64, LimitMode))| {
            rule("user", number.map(|number| user(number).to_string()), Dimension::Cores, *max, *mode)
        };
        let of_queue = |(number, max): (&Option<usize>, &i64)| {
            rule("queue", number.map(queue_name), Dimension::QueueCores, *max, LimitMode::Enforced)
        };
        let rules = self.limits.iter().map(of_user).chain(self.queue_limits.iter().map(of_queue));
        let set = |(id, key): (i64, &str)| {
            let counting = Counting::wanted(BTreeSet::from([[key.to_owned()].into()]), &BTreeMap::new());
            LabelSet { id, counting: counting.into_iter().next().unwrap(), is_counted: true }
        };
        let sets = [(USER_SET, "user"), (QUEUE_SET, "queue")].map(set).to_vec();
        Limits::new(Uuid::nil(), sets, rules)
    }

    /// The operation that a step stands for; none for a commit.
    fn operation(&self, step: &Step, new_id: Uuid) -> Option<Operation> {
        let named = |ago| self.ticket(ago).map_or((Uuid::nil(), 0), |n| (self.tickets[n].id, self.tickets[n].em));
        Some(match *step {
            Step::Register { em, total, protected } => {
                let mut register = registration(instance(em), amount(total));
                register.protected = amount(protected);
                Operation::Register(register)
            }
            Step::Unregister { em, epoch } => {
                Operation::Unregister(Unregister { em: instance(em), epoch: self.epoch(em, epoch) })
            }
            Step::Request { em, user, queue, amount, ttl, request_id, wait, cap } => {
                let ask = asked(new_id, em, user, amount, ttl, request_id);
                operation(&ModelWaiting { queue, cap, ..ask }, wait.then_some(None))
            }
            Step::Retry { ago, em } => {
                let nobody = asked(Uuid::nil(), 0, 0, 1, 1, None);
                let before = self.waiter(ago).map_or(nobody, |number| self.waiting[number].clone());
                let position = QueuePosition::new(0, time_of(before.since), before.id);
                operation(&ModelWaiting { em: em.unwrap_or(before.em), ..before }, Some(Some(position)))
            }
            Step::Adopt { em, user: number, used, again } => {
                let ticket = self.adopted(em, number, used, again, new_id);
                Operation::Adopt(Adopt {
                    ticket_id: ticket.id,
                    user: user(ticket.user),
                    creator: name("IDE"),
                    engine_type: String::new(),
                    em: instance(ticket.em),
                    labels: Default::default(),
                    engine: engine("e"),
                    used: amount(ticket.held),
                })
            }
            Step::Inited { ago, used, user: number, epoch } => {
                let (ticket_id, em) = named(ago);
                let queue = self.ticket(ago).and_then(|number| self.tickets[number].queue);
                let (used, epoch) = (used.map(|used| asked_of(queue, used)), self.epoch(em, epoch));
                let (user, em, engine) = (user(number), instance(em), engine("e"));
                Operation::Inited(Inited { ticket_id, user, em, used, engine, epoch })
            }
            Step::Reported { ago, in_use, used, stolen, epoch } => {
                let of = |number: usize| {
                    let ticket = &self.tickets[number];
                    (ticket.id, ticket.user, ticket.em, ticket.queue)
                };
                let (ticket_id, owner, em, queue) = self.reporting(ago, in_use).map_or((Uuid::nil(), 0, 0, None), of);
                let user = user((owner + usize::from(stolen)) % USERS);
                let (used, epoch) = (asked_of(queue, used), self.epoch(em, epoch));
                Operation::Reported(Reported { ticket_id, user, em: instance(em), used, epoch })
            }
            Step::Released { ago, user: number } => {
                let (ticket_id, em) = named(ago);
                Operation::Released(Released { ticket_id, user: user(number), em: instance(em) })
            }
            Step::Force { ago } => {
                let (ticket_id, em) = named(ago);
                let owner = self.ticket(ago).map_or(0, |number| self.tickets[number].user);
                let ticket = Released { ticket_id, user: user(owner), em: instance(em) };
                Operation::Force(Forced { ticket, reason: name("it hangs") })
            }
            Step::Drain { em, reason } => {
                let reason = name(if reason { "a disk" } else { "a fan" });
                Operation::Drain(DrainEm { em: instance(em), reason })
            }
            Step::Resume { em } => Operation::Resume(ResumeEm { em: instance(em), reason: None }),
            Step::Expire { ago } => {
                let (ticket_id, em) = named(ago);
                Operation::Expire(Released { ticket_id, user: user(0), em: instance(em) })
            }
            Step::Lost { ago } => {
                let (ticket_id, em) = named(ago);
                Operation::Lost(Released { ticket_id, user: user(0), em: instance(em) })
            }
            Step::Reap { em, known } => {
                let nothing = ReportNumber { epoch: 0, sequence: 0 };
                let mut last = self.signs.get(&em).copied().unwrap_or(LastSign { registered: 0, reported: nothing });
                last.reported.sequence -= i64::from(!known);
                Operation::Reap(Reap { em: instance(em), last })
            }
            Step::Commit { .. }
            | Step::Limit { .. }
            | Step::QueueLimit { .. }
            | Step::Cluster { .. }
            | Step::Leave { .. }
            | Step::Report { .. } => return None,
        })
    }
}

/// How the word of another registration than the EM's is answered.
fn fenced(said: Said) -> Option<Answer> {
    match said {
        Said::Nothing | Said::Current => None,
        Said::Older => Some(Answer::No("older epoch")),
        Said::Newer => Some(Answer::No("newer epoch")),
    }
}

/// In no queue.
fn asked(id: Uuid, em: usize, user: usize, amount: i64, ttl: u64, request_id: Option<u8>) -> ModelWaiting {
    let (at_em, at_user, at_queue) = (None, None, None);
    let (since, queue, cap, in_line, at_cluster) = (0, None, None, false, [None; 2]);
    ModelWaiting {
        id,
        since,
        em,
        user,
        queue,
        amount,
        ttl,
        request_id,
        cap,
        in_line,
        at_em,
        at_user,
        at_queue,
        at_cluster,
    }
}

impl ModelWaiting {
    /// Where it stands, and whether it is short there.
    fn stands(&self) -> Spots {
        let at_em = self.at_em.map(|(em, is_short)| (Spot::Em(instance(em)), is_short));
        let at_user = self.at_user.map(|is_short| (Spot::Scope(scope_of(self.user)), is_short));
        let queue = self.queue.map(scope_of_queue).map(Spot::Scope);
        let paths = [self.queue.map(path_of), Some("root".to_owned())];
        let in_cluster = paths.into_iter().zip(self.at_cluster).filter_map(|(path, is_short)| {
            let spot = Spot::Queue { provider: provider().name, path: path? };
            Some((spot, is_short?))
        });
        at_em.into_iter().chain(at_user).chain(queue.zip(self.at_queue)).chain(in_cluster).collect()
    }
}

/// A request; `position` is its position in line if it waits, and has one.
fn operation(ask: &ModelWaiting, position: Option<Option<QueuePosition>>) -> Operation {
    let remaining = Duration::from_secs(60);
    Operation::Request(Request {
        em: instance(ask.em),
        ask: Arc::new(RequestSpec {
            principal: Principal::Anonymous,
            ticket_id: ask.id,
            user: user(ask.user),
            creator: name("IDE"),
            engine_type: String::new(),
            resource: asked_of(ask.queue, ask.amount),
            labels: Default::default(),
            selector: Default::default(),
            caps: ask.cap.map(|most| Arc::new(cap_of_user(most))).into_iter().collect(),
            lock_ttl: Duration::from_secs(ask.ttl),
            request_id: ask
                .request_id
                .map(|id| RequestId { id: name(&id.to_string()), body_hash: body_hash(ask.body()) }),
            return_counters: false,
        }),
        wait: position.map(|position| Wait {
            instance_id: Uuid::nil(),
            remaining,
            any_em: true,
            is_elsewhere: false,
            position,
        }),
        scopes: Default::default(),
    })
}

fn cap_of_user(cores: i64) -> Cap {
    Cap { keys: BTreeSet::from(["user".to_owned()]), max: BTreeMap::from([(Dimension::Cores, cores)]) }
}

fn body_hash((em, user, queue, cores, ttl, cap): ModelBody) -> [u8; 32] {
    let mut hash = [0; 32];
    hash[0] = u8::try_from(em).unwrap();
    hash[1] = u8::try_from(user).unwrap();
    hash[2..10].copy_from_slice(&cores.to_be_bytes());
    hash[10..18].copy_from_slice(&ttl.to_be_bytes());
    hash[18..26].copy_from_slice(&cap.unwrap_or(-1).to_be_bytes());
    hash[26] = queue.map_or(0, |queue| u8::try_from(queue + 1).unwrap());
    hash
}

fn path_of(queue: usize) -> String {
    format!("root.{}", queue_name(queue))
}

fn provider() -> Provider {
    Provider { resource_type: name("Yarn"), name: name("yarn"), labels: Default::default() }
}

const CLUSTER_ID: i64 = 7;

/// What is stored of the cluster.
#[derive(Default)]
struct StoredCluster {
    snapshot: Option<Arc<ClusterSnapshot>>,
    changes: i64,
    unseen: BTreeMap<String, QueueAmounts>,
    tickets: HashMap<Uuid, ClusterTicket>,
}

impl StoredCluster {
    fn read(&self) -> Clusters {
        let Some(snapshot) = &self.snapshot else { return Clusters::default() };
        let long = time::Duration::days(3650);
        let rules = CheckRules {
            max_age: long,
            when_away: WhenAway::Refuse,
            last_known_for: long,
            refresh_interval: time::Duration::seconds(5),
        };
        let rooms = Rooms::stored(snapshot.clone(), self.unseen.clone());
        let changes = self.changes;
        let cluster = Cluster { id: CLUSTER_ID, provider: provider(), rules, is_known: true, changes, rooms };
        Clusters::new(vec![(CLUSTER_ID, provider())], [cluster], self.tickets.clone())
    }

    /// A later snapshot comes into force.
    fn install(&mut self, now: OffsetDateTime, max: [i64; PLACES], used: [i64; PLACES]) {
        let amounts = |cores| QueueAmounts { memory: 0, cores };
        let path = |place: usize| if place == 0 { "root".to_owned() } else { path_of(place - 1) };
        let queue = |place: usize| Queue {
            path: path(place),
            max: amounts(max[place]),
            used: amounts(used[place]),
            state: QueueState::Running,
            running_applications: None,
            pending_applications: None,
            custom: Default::default(),
        };
        let queues = Queues::new(Naming::Fair, (0..PLACES).map(queue)).unwrap();
        let snapshot = Arc::new(ClusterSnapshot::stored(now, queues, HashMap::new()));
        let live = self.tickets.values().map(|ticket| (ticket.path.as_str(), &ticket.held));
        self.unseen = Rooms::new(snapshot.clone(), live).all_unseen().clone();
        self.snapshot = Some(snapshot);
    }

    fn check(&self, model: &Model) {
        for (place, path) in ["root".to_owned()].into_iter().chain((0..QUEUES).map(path_of)).enumerate() {
            let unseen = self.unseen.get(&path).copied().unwrap_or_default();
            assert_eq!((unseen.cores, unseen.memory), (model.unseen(place), 0), "{path}");
        }
        let counted = model.tickets.iter().filter(|t| t.alive && t.counted).count();
        assert_eq!(self.tickets.len(), counted);
        assert!(self.tickets.values().all(|ticket| along(&ticket.path).next() == Some("root")));
    }
}

/// The tables, as maps that take what the ledger writes as the SQL does.
#[derive(Default)]
struct Tables {
    ems: HashMap<EmInstance, Em>,
    drains: HashMap<EmInstance, Arc<Drain>>,
    tickets: HashMap<Uuid, Ticket>,
    ended: HashMap<Uuid, EndedTicket>,
    request_ids: HashMap<Name, RequestRecord>,
    limits: Arc<Limits>,
    scopes: HashMap<Counter, Usage>,
    waiting: HashMap<QueuePosition, (Resource, Spots)>,
    reports: HashMap<EmInstance, ReportNumber>,
    adopted: HashMap<Uuid, Resource>,
    cluster: StoredCluster,
}

impl Tables {
    fn snapshot(&self, now: OffsetDateTime) -> Snapshot {
        let of_em = |em: &Em| Em { drain: self.drains.get(&em.instance).cloned(), ..em.clone() };
        Snapshot {
            now,
            ems: self.ems.iter().map(|(instance, em)| (instance.clone(), of_em(em))).collect(),
            drains: self.drains.clone(),
            tickets: self.tickets.clone(),
            // All of them at once.
            pages: self.ems.keys().map(|em| (em.clone(), TicketPage { after: Uuid::nil(), last: None })).collect(),
            ended: self.ended.clone(),
            inhabited: self.tickets.values().map(|ticket| ticket.em.clone()).collect(),
            reports: self.reports.clone(),
            adopted: self.adopted.clone(),
            request_ids: self.request_ids.clone(),
            limits: self.limits.clone(),
            scopes: self.scopes.clone(),
            line: self.line(),
            clusters: self.cluster.read(),
        }
    }

    fn line(&self) -> LineView {
        let mut line = Line::default();
        for (position, (resource, spots)) in &self.waiting {
            for (spot, is_short) in spots {
                line.insert(spot.clone(), *position, WaitEntry { resource: resource.clone(), is_short: *is_short });
            }
        }
        LineView { line, spots: None }
    }

    fn leave(&mut self, ticket_id: Uuid) {
        self.waiting.retain(|position, _| position.ticket_id() != ticket_id);
    }

    /// The next report of an EM, if it is registered.
    fn report(&mut self, instance: EmInstance) {
        if let Some(em) = self.ems.get(&instance) {
            let sequence = self.reports.get(&instance).map_or(1, |last| last.sequence + 1);
            self.reports.insert(instance, ReportNumber { epoch: em.epoch, sequence });
        }
    }

    /// The last signs of life of the EMs that have reported.
    fn signs(&self) -> BTreeMap<usize, LastSign> {
        let sign = |number: usize| {
            let (em, reported) = (self.ems.get(&instance(number))?, self.reports.get(&instance(number))?);
            Some((number, LastSign { registered: em.epoch, reported: *reported }))
        };
        (0..EMS).filter_map(sign).collect()
    }

    /// Other rules: counters of a label set that is new start from the true sums, those of one that is gone go.
    fn set_limits(&mut self, limits: Limits) {
        if limits.is_empty() {
            self.scopes.clear();
        } else if self.limits.is_empty() {
            for ticket in self.tickets.values() {
                for limited in limits.scopes(&ticket.ticket_labels()) {
                    let usage = self.scopes.entry(limited.counter.clone()).or_default();
                    let held = if ticket.is_locked() { &mut usage.locked } else { &mut usage.used };
                    held.add(limited.share(ticket.resource()), 1).unwrap();
                }
            }
        }
        for em in self.ems.values_mut() {
            em.counted.to = em.counted.to.max(limits.newest_label_set());
        }
        self.limits = Arc::new(limits);
    }

    fn remember(&mut self, ticket: &Ticket, end: End, at: OffsetDateTime) {
        let ended = EndedTicket { id: ticket.id, user: ticket.user.clone(), em: ticket.em.clone(), end, at };
        assert!(self.ended.insert(ticket.id, ended).is_none(), "a ticket ends once");
    }

    fn write(&mut self, deltas: Deltas, now: OffsetDateTime) {
        let ems = deltas.ems_counted.into_iter().chain(deltas.ems_updated).chain(deltas.ems_resized);
        for mut em in ems.chain(deltas.ems_stepped) {
            em.version += 1;
            let before = self.ems.insert(em.instance.clone(), em.clone()).expect("updated rows exist");
            assert_eq!(before.version + 1, em.version, "the version that was read");
        }
        for em in deltas.ems_inserted {
            assert!(self.ems.insert(em.instance.clone(), em).is_none(), "inserted rows are new");
        }
        for em in deltas.ems_deleted {
            assert_eq!(self.ems.remove(&em.instance).unwrap().version, em.version);
        }
        for (em, drain) in deltas.drains {
            match drain {
                Some(drain) => drop(self.drains.insert(em, drain)),
                None => drop(self.drains.remove(&em)),
            }
        }
        for em in deltas.reports_ended {
            self.reports.remove(&em);
        }
        for ticket in deltas.in_use {
            assert!(self.tickets.insert(ticket.id, ticket).is_some(), "updated rows exist");
        }
        for ended in deltas.ended {
            assert_eq!(self.tickets.remove(&ended.ticket.id).is_some(), ended.stored);
            self.remember(&ended.ticket, ended.end, now);
        }
        self.scopes.extend(deltas.scopes);
        self.adopted.extend(deltas.adopted.into_iter().map(|(ticket, _)| (ticket.id, ticket.resource().clone())));
        for ticket in deltas.granted.into_iter().chain(deltas.new_in_use) {
            assert!(self.tickets.insert(ticket.id, ticket).is_none(), "inserted rows are new");
        }
        for new in deltas.waiting {
            let before = self.waiting.insert(new.position, (new.request.ask.resource.clone(), new.spots));
            assert_eq!(before, None, "inserted rows are new");
        }
        for moved in deltas.moved {
            self.waiting.get_mut(&moved.position).expect("updated rows exist").1 = moved.spots;
        }
        for ticket_id in deltas.left_line {
            assert!(self.waiting.keys().any(|position| position.ticket_id() == ticket_id), "deleted rows exist");
            self.leave(ticket_id);
        }
        for delta in deltas.clusters {
            assert_eq!(
                (delta.cluster_id, delta.changes_before),
                (CLUSTER_ID, self.cluster.changes),
                "the version that was read"
            );
            self.cluster.changes = delta.changes;
            self.cluster.unseen.extend(delta.unseen);
        }
        for delta in deltas.cluster_tickets {
            match delta.ended {
                true => drop(self.cluster.tickets.remove(&delta.ticket_id)),
                false => drop(self.cluster.tickets.insert(delta.ticket_id, delta.ticket)),
            }
        }
        for record in deltas.request_ids {
            assert!(self.request_ids.insert(record.request_id.id.clone(), record).is_none());
        }
    }

    /// Counters equal the model's sums over its tickets, and the tickets are the model's.
    fn check(&self, model: &Model) {
        assert_eq!(self.ems.len(), model.ems.len());
        assert_eq!(self.reports.len(), model.reported.len());
        assert!(model.reported.iter().all(|number| self.reports.contains_key(&instance(*number))));
        for (number, (total, protected)) in &model.ems {
            let em = &self.ems[&instance(*number)];
            let counted = [&em.total, &em.protected, &em.used, &em.locked].map(|r| r.get(&Dimension::Cores));
            assert_eq!(counted, [*total, *protected, model.sum(*number, true), model.sum(*number, false)]);
            let used = model.tickets.iter().filter(|t| t.alive && t.em == *number && t.used);
            assert_eq!(em.used_tickets, TicketDigest::of(used.map(|ticket| &ticket.id)));
        }
        let reason = |(number, reason): (&usize, &bool)| (instance(*number), *reason);
        let drained: HashMap<_, _> = model.drained.iter().map(reason).collect();
        let stored = self.drains.iter().map(|(em, drain)| (em.clone(), drain.reason == name("a disk")));
        assert_eq!(stored.collect::<HashMap<_, _>>(), drained);
        let mut alive = 0;
        for expected in model.tickets.iter().filter(|t| t.alive) {
            let ticket = &self.tickets[&expected.id];
            assert_eq!(ticket.resource().get(&Dimension::Cores), expected.held);
            assert_eq!(matches!(ticket.state, TicketState::Used { .. }), expected.used);
            alive += 1;
        }
        let is_unlimited = model.is_unlimited();
        let check = |label_set_id, scope, dimension, expected: [i64; 2]| {
            let usage = self.scopes.get(&Counter { label_set_id, scope }).cloned().unwrap_or_default();
            let counted = [&usage.used, &usage.locked].map(|tally| tally.get(&dimension));
            assert_eq!(counted, if is_unlimited { [0, 0] } else { expected });
            usage
        };
        for number in 0..USERS {
            let expected = [model.sum_of_user(number, true), model.sum_of_user(number, false)];
            let usage = check(USER_SET, scope_of(number), Dimension::Cores, expected);
            let of_queues = [&usage.used, &usage.locked].map(|tally| tally.get(&Dimension::QueueCores));
            assert_eq!(of_queues, [0, 0], "what is in two queues is never one sum");
        }
        for number in 0..QUEUES {
            let expected = [model.sum_of_queue(number, true), model.sum_of_queue(number, false)];
            check(QUEUE_SET, scope_of_queue(number), Dimension::QueueCores, expected);
        }
        let queues: BTreeSet<Scope> = (0..QUEUES).map(scope_of_queue).collect();
        let in_queues = self.scopes.keys().filter(|counter| counter.label_set_id == QUEUE_SET);
        assert!(in_queues.into_iter().all(|counter| queues.contains(&counter.scope)), "nothing counts in no queue");
        assert_eq!(self.tickets.len(), alive);
        let in_line = model.waiting.iter().filter(|w| w.in_line);
        let mut stands = 0;
        for w in in_line {
            let spots = &self.waiting[&QueuePosition::new(0, time_of(w.since), w.id)].1;
            assert_eq!(*spots, w.stands());
            stands += 1;
        }
        assert_eq!(self.waiting.len(), stands);
        assert_eq!(self.ended.len(), model.tickets.len() - alive);
        self.cluster.check(model);
    }
}

/// The numbers of the two label sets that are counted.
const USER_SET: i64 = 1;
const QUEUE_SET: i64 = 2;

fn scope_of_queue(number: usize) -> Scope {
    Scope::new(BTreeMap::from([("queue".into(), queue_name(number))]))
}

fn scope_of(number: usize) -> Scope {
    Scope::new(BTreeMap::from([("user".into(), user(number).to_string())]))
}

fn time_of(seconds: u64) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp(1_800_000_000 + i64::try_from(seconds).unwrap()).unwrap()
}

/// Who can be served after the batches, and could not before, is told of it where it is short.
fn assert_woken(model: &Model, settled: &[usize], freed: &[FreedSpots]) {
    for number in settled.iter().copied().filter(|number| model.is_servable(*number)) {
        let w = &model.waiting[number];
        let is_told = |spot: &Spot| freed.iter().any(|freed| freed.contains(spot));
        let told = w.stands().iter().any(|(spot, is_short)| *is_short && is_told(spot));
        assert!(told, "nobody wakes {w:?}, freed {freed:?}");
    }
}

/// What batches of different committers may share, beside nothing: whoever comes second waits until the first is committed.
#[derive(Debug, PartialEq, Eq, Hash)]
enum Shared {
    Scope(Counter),
    RequestId(Name),
    /// Who adopts an engine may name a ticket of another EM.
    Ticket(Uuid),
    /// Of which somebody who waits for several EMs may have a place at each.
    Line,
    Cluster,
}

impl Shared {
    /// What an operation may share with those on other EMs.
    fn of(operation: &Operation, tables: &Tables, somebody_waits: bool) -> HashSet<Self> {
        let named = operation.ticket_id().and_then(|id| tables.tickets.get(&id));
        let of_em = tables.tickets.values().filter(|t| operation.steps_from().is_some() && t.em == *operation.em());
        let tickets: Vec<&Ticket> = named.into_iter().chain(of_em).collect();
        let held = tickets.iter().flat_map(|ticket| tables.limits.scopes(&ticket.ticket_labels()));
        let adopted = operation.adopts().map(|adopt| tables.limits.scopes(&adopt.ticket_labels()));
        let scopes = held.chain(adopted.into_iter().flatten()).map(|limited| limited.counter);
        let asked = operation.request().map(|request| request.counters(&tables.limits));
        let scopes = scopes.chain(asked.into_iter().flatten()).map(Self::Scope);
        let id = operation.request_id().map(|request_id| Self::RequestId(request_id.id.clone()));
        let id = id.into_iter().chain(operation.ticket_id().map(Self::Ticket));
        let id = id.chain(operation.request().map(|request| Self::Ticket(request.ask.ticket_id)));
        let waits = somebody_waits || operation.request().is_some_and(|request| request.wait.is_some());
        let in_queue = tickets.iter().any(|ticket| place_of(ticket.resource()).is_some());
        let in_queue = in_queue || operation.asks_queue().is_some();
        scopes.chain(id).chain(waits.then_some(Self::Line)).chain(in_queue.then_some(Self::Cluster)).collect()
    }
}

/// A batch that is not committed yet, and what it has locked beside its EMs.
struct Batch {
    ledger: Ledger,
    shares: HashSet<Shared>,
}

/// The model, and what it is compared with.
struct Comparison {
    model: Model,
    tables: Tables,
    /// Of each committer, the batch that it is at.
    batches: Vec<Option<Batch>>,
    /// Who waits, and could not be served before these batches.
    settled: Vec<usize>,
    /// The epochs since then.
    epochs: BTreeMap<usize, i64>,
}

impl Comparison {
    fn new(committers: usize) -> Self {
        let (model, batches) = (Model::default(), (0..committers).map(|_| None).collect());
        Self { settled: model.settled(), model, tables: Tables::default(), batches, epochs: BTreeMap::new() }
    }

    /// Carries out what a step stands for; false if it stands for no operation.
    fn apply(&mut self, number: usize, step: &Step) -> bool {
        let new_id = Uuid::from_u128(u128::try_from(number).unwrap() + 1);
        let Some(operation) = self.model.operation(step, new_id) else { return false };
        let committer = (0..EMS).find(|em| instance(*em) == *operation.em()).unwrap() % self.batches.len();
        let mut shares = Shared::of(&operation, &self.tables, self.model.waiting.iter().any(|w| w.in_line));
        let others = self.batches.iter().enumerate().filter(|(other, _)| *other != committer);
        let is_shared = others.into_iter().any(|(_, other)| other.iter().any(|b| !b.shares.is_disjoint(&shares)));
        if is_shared {
            self.commit();
            shares = Shared::of(&operation, &self.tables, self.model.waiting.iter().any(|w| w.in_line));
        }
        // With what is known after the commit.
        let operation = self.model.operation(step, new_id).unwrap();
        let (model, tables) = (&mut self.model, &self.tables);
        let begin = || Batch { ledger: Ledger::new(tables.snapshot(time_of(model.now))), shares: HashSet::new() };
        let batch = self.batches[committer].get_or_insert_with(begin);
        batch.shares.extend(shares);
        let held_before: Vec<_> = (0..EMS).map(|em| model.left(em)).collect();
        let expected = model.step(step, new_id);
        let outcome = batch.ledger.apply(&Principal::Anonymous.into(), &operation);
        if let (Step::Register { em, .. }, Ok(Outcome::Registered(registered))) = (step, &outcome) {
            let before = self.epochs.insert(*em, registered.epoch);
            assert!(before.is_none_or(|before| before < registered.epoch), "an epoch never comes back");
            model.epochs.insert(*em, registered.epoch);
        }
        assert_eq!(answer(outcome), expected, "step {number}: {step:?}, left {held_before:?}");
        true
    }

    /// Commits what every committer is at, and compares everything.
    fn commit(&mut self) {
        self.epochs.clear();
        let mut freed = Vec::new();
        for batch in self.batches.iter_mut().filter_map(Option::take) {
            let deltas = batch.ledger.finish().0;
            freed.push(deltas.freed.clone());
            self.tables.write(deltas, time_of(self.model.now));
        }
        self.tables.check(&self.model);
        assert_woken(&self.model, &self.settled, &freed);
        self.begin();
    }

    /// The next batches begin.
    fn begin(&mut self) {
        self.model.registered.clear();
        self.model.signs = self.tables.signs();
        self.settled = self.model.settled();
    }

    /// What no operation does happens between batches.
    fn between(&mut self, step: &Step) {
        let (model, tables) = (&mut self.model, &mut self.tables);
        model.step(step, Uuid::nil());
        match step {
            Step::Leave { ago } => {
                if let Some(number) = model.waiter(*ago) {
                    tables.leave(model.waiting[number].id);
                }
            }
            Step::Limit { .. } | Step::QueueLimit { .. } => tables.set_limits(model.rules()),
            Step::Report { em } => tables.report(instance(*em)),
            Step::Cluster { max, used } => tables.cluster.install(time_of(model.now), *max, *used),
            _ => {}
        }
        self.begin();
    }
}

/// Operations go to so many committers by their EMs; batches of different ones are under way at once, unless they share something.
fn run(steps: Vec<Step>, committers: usize) {
    let mut comparison = Comparison::new(committers);
    for (number, step) in steps.iter().chain([&Step::Commit { seconds: 0 }]).enumerate() {
        if !comparison.apply(number, step) {
            comparison.commit();
            comparison.between(step);
        }
    }
}

/// How many random runs: `LINKIS_RM_MODEL_CASES` for more.
fn cases() -> u32 {
    std::env::var("LINKIS_RM_MODEL_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(2000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_ledger_answers_and_counts_as_the_model_does(steps in prop::collection::vec(step(), 1..80)) {
        run(steps, 1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases() / 4, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ledgers_of_several_committers_together_do_too(steps in prop::collection::vec(step(), 1..80), committers in 2..=3usize) {
        run(steps, committers);
    }
}

/// A release is told where somebody waits for a cap of his own, also if no limit decides there.
#[test]
fn who_waits_for_a_cap_is_woken_where_no_limit_decides() {
    let request =
        |wait, cap| Step::Request { em: 0, user: 0, queue: None, amount: 5, ttl: 9, request_id: None, wait, cap };
    let steps = vec![
        Step::Register { em: 0, total: 30, protected: 0 },
        Step::Limit { user: None, max: Some((0, LimitMode::Off)) },
        request(false, None),
        request(true, Some(9)),
        Step::Commit { seconds: 1 },
        Step::Released { ago: 0, user: 0 },
    ];
    run(steps, 1);
}
