//! The reference: no counters, only tickets; every sum is made anew.

use std::collections::{BTreeMap, BTreeSet};

use linkis_rm::domain::{
    limit::{Counting, LabelSet, Limits, Pattern, Rule},
    limit_mode::LimitMode,
    line::{Spot, Spots},
    report::LastSign,
    resource::Dimension,
};
use uuid::Uuid;

use super::named::*;
/// What there is.
#[derive(Clone, Default)]
pub(super) struct Model {
    pub(super) now: u64,
    pub(super) ems: BTreeMap<usize, (i64, i64)>,
    /// EMs that are drained, registered or not, and for which reason.
    pub(super) drained: BTreeMap<usize, bool>,
    pub(super) tickets: Vec<ModelTicket>,
    pub(super) request_ids: BTreeMap<u8, (ModelBody, Uuid)>,
    /// By user; `None` for each user that has none of his own.
    pub(super) limits: BTreeMap<Option<usize>, (i64, LimitMode)>,
    /// Likewise by queue.
    pub(super) queue_limits: BTreeMap<Option<usize>, i64>,
    /// All that ever waited, the first in line first.
    pub(super) waiting: Vec<ModelWaiting>,
    /// EMs that have reported.
    pub(super) reported: BTreeSet<usize>,
    /// EMs that registered since the batch began.
    pub(super) registered: BTreeSet<usize>,
    /// The last signs of life when the batch began.
    pub(super) signs: BTreeMap<usize, LastSign>,
    /// The epochs that registrations were answered with last.
    pub(super) epochs: BTreeMap<usize, i64>,
    /// What the cluster of the queues showed last.
    pub(super) cluster: Option<ModelCluster>,
}

/// What a cluster showed, and when: of the root, and of each queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModelCluster {
    pub(super) begun: u64,
    pub(super) max: [i64; PLACES],
    pub(super) used: [i64; PLACES],
}

#[derive(Clone, Debug)]
pub(super) struct ModelWaiting {
    pub(super) id: Uuid,
    pub(super) since: u64,
    pub(super) em: usize,
    pub(super) user: usize,
    pub(super) queue: Option<usize>,
    pub(super) amount: i64,
    pub(super) ttl: u64,
    pub(super) request_id: Option<u8>,
    /// Of what its user holds.
    pub(super) cap: Option<i64>,
    pub(super) in_line: bool,
    /// Which EM it stands at, if any, and whether it is short there.
    pub(super) at_em: Option<(usize, bool)>,
    /// Whether it stands at its user's limit, and whether it is short there.
    pub(super) at_user: Option<bool>,
    /// Likewise at its queue's.
    pub(super) at_queue: Option<bool>,
    /// Likewise at its queue of the cluster, and at the root.
    pub(super) at_cluster: [Option<bool>; 2],
}

/// What a request id stands for: EM, user, queue, amount, for how long, and cap.
pub(super) type ModelBody = (usize, usize, Option<usize>, i64, u64, Option<i64>);

impl ModelWaiting {
    pub(super) fn body(&self) -> ModelBody {
        (self.em, self.user, self.queue, self.amount, self.ttl, self.cap)
    }
}

impl ModelWaiting {
    /// Where it stands, and whether it is short there.
    pub(super) fn stands(&self) -> Spots {
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

/// What is available to a request on an EM, of its user's limit and of its queue's, and what there is in all.
pub(super) struct Available {
    pub(super) em: (i64, i64),
    pub(super) user: Option<(i64, i64)>,
    pub(super) queue: Option<(i64, i64)>,
    /// Of the queue, and of the root.
    pub(super) cluster: Option<[(i64, i64); 2]>,
}

impl Available {
    /// What the headline of a refusal says; `None` if the request fits.
    pub(super) fn short(&self, amount: i64) -> Option<i64> {
        let short = |(available, _): (i64, i64)| (amount > available).then_some(available);
        let in_cluster = || self.cluster.into_iter().flatten().find_map(short);
        short(self.em).or_else(|| self.user.and_then(short)).or_else(|| self.queue.and_then(short)).or_else(in_cluster)
    }

    pub(super) fn never_fits(&self, amount: i64) -> bool {
        let others = [self.user, self.queue].into_iter().flatten().chain(self.cluster.into_iter().flatten());
        amount > self.em.1 || others.into_iter().any(|(_, max)| amount > max)
    }
}

#[derive(Clone)]
pub(super) struct ModelTicket {
    pub(super) id: Uuid,
    pub(super) em: usize,
    pub(super) user: usize,
    pub(super) queue: Option<usize>,
    pub(super) held: i64,
    pub(super) used: bool,
    pub(super) deadline: u64,
    pub(super) alive: bool,
    /// What it used when it was adopted.
    pub(super) adopted: Option<i64>,
    /// Whether it is counted in the cluster, and since when it is in use.
    pub(super) counted: bool,
    pub(super) since: u64,
}

/// How long a cluster may take to show an engine without an application, in seconds.
const SETTLE: u64 = 60;

impl Model {
    pub(super) fn sum(&self, em: usize, used: bool) -> i64 {
        let of_em = self.tickets.iter().filter(|t| t.alive && t.em == em && t.used == used);
        of_em.map(|t| t.held).sum()
    }

    pub(super) fn left(&self, em: usize) -> Option<i64> {
        let (total, protected) = self.ems.get(&em)?;
        Some(total - protected - self.sum(em, true) - self.sum(em, false))
    }

    pub(super) fn sum_of_user(&self, user: usize, used: bool) -> i64 {
        self.tickets.iter().filter(|t| t.alive && t.user == user && t.used == used).map(|t| t.held).sum()
    }

    /// What a user may still be granted, if a limit is for him.
    pub(super) fn left_of_user(&self, user: usize) -> Option<i64> {
        self.left_in(user, LimitMode::Enforced)
    }

    /// The same, if the limit that decides for him is of this mode.
    pub(super) fn left_in(&self, user: usize, mode: LimitMode) -> Option<i64> {
        let max = self.max_in(user, mode)?;
        Some(max - self.sum_of_user(user, true) - self.sum_of_user(user, false))
    }

    pub(super) fn max_in(&self, user: usize, mode: LimitMode) -> Option<i64> {
        let (max, of_mode) = self.limits.get(&Some(user)).or(self.limits.get(&None))?;
        (*of_mode == mode).then_some(*max)
    }

    pub(super) fn sum_of_queue(&self, queue: usize, used: bool) -> i64 {
        let in_queue = self.tickets.iter().filter(|t| t.alive && t.queue == Some(queue) && t.used == used);
        in_queue.map(|t| t.held).sum()
    }

    pub(super) fn max_of_queue(&self, queue: usize) -> Option<i64> {
        self.queue_limits.get(&Some(queue)).or(self.queue_limits.get(&None)).copied()
    }

    /// What may still be granted in a queue, if there is one and a limit is for it.
    pub(super) fn left_of_queue(&self, queue: Option<usize>) -> Option<i64> {
        let queue = queue?;
        Some(self.max_of_queue(queue)? - self.sum_of_queue(queue, true) - self.sum_of_queue(queue, false))
    }

    /// What the cluster does not show of the tickets in a place of it: that of a queue, or the root's.
    pub(super) fn unseen(&self, place: usize) -> i64 {
        let begun = self.cluster.map_or(0, |cluster| cluster.begun);
        let there = self.tickets.iter().filter(|t| t.alive && t.counted && (place == 0 || t.queue == Some(place - 1)));
        there.filter(|t| !t.used || begun < t.since + SETTLE).map(|t| t.held).sum()
    }

    /// What is left of a queue of the cluster, and of the root; and how much there is in all.
    pub(super) fn left_of_cluster(&self, queue: Option<usize>) -> Option<[(i64, i64); 2]> {
        let (cluster, queue) = (self.cluster?, queue?);
        Some(
            [queue + 1, 0]
                .map(|place| (cluster.max[place] - cluster.used[place] - self.unseen(place), cluster.max[place])),
        )
    }

    /// What a request can get on an EM behind the first `ahead` of those who wait.
    pub(super) fn available(
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

    /// The number of the request that began to wait so long ago.
    pub(super) fn waiter(&self, ago: usize) -> Option<usize> {
        self.waiting.len().checked_sub(ago + 1)
    }

    /// The number of the ticket that was asked for so long ago.
    pub(super) fn ticket(&self, ago: usize) -> Option<usize> {
        self.tickets.len().checked_sub(ago + 1)
    }

    pub(super) fn is_unlimited(&self) -> bool {
        self.limits.is_empty() && self.queue_limits.is_empty()
    }

    /// The limits as rules. Whatever they are, both users and queues are counted if there are any.
    pub(super) fn rules(&self) -> Limits {
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
}
