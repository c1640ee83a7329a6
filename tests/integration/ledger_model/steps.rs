//! What may happen: random steps.

use linkis_rm::domain::limit_mode::LimitMode;
use proptest::prelude::*;

use super::named::*;
/// For which registration of an EM a caller says that it acts.
#[derive(Clone, Copy, Debug)]
pub(super) enum Said {
    Nothing,
    Current,
    Older,
    Newer,
}

pub(super) fn said() -> impl Strategy<Value = Said> {
    prop_oneof![6 => Just(Said::Nothing), 3 => Just(Said::Current), 1 => Just(Said::Older), 1 => Just(Said::Newer)]
}

/// One random step; tickets are named by how long ago they were asked for.
#[derive(Clone, Debug)]
pub(super) enum Step {
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

pub(super) fn step() -> impl Strategy<Value = Step> {
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
