//! Random steps of the model.

use proptest::prelude::*;
use rm_model::limit_mode::LimitMode;

use super::{model::*, ticket_references::*};

/// Registration of an EM that a call names.
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

/// One random step. A ticket is named by the number of tickets that were requested after it.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Register {
        em: usize,
        total: i64,
        protected: i64,
        /// Whether the EM is reserved for the first tenant, and whether it has the label of the zone.
        reserved: bool,
        zone: bool,
    },
    Unregister {
        em: usize,
        epoch: Said,
    },
    Request {
        em: usize,
        /// A queue of `who` gets an equal amount.
        who: Who,
        requires: Option<Required>,
        amount: i64,
        ttl: u64,
        request_id: Option<u8>,
        wait: bool,
        cap: Option<i64>,
    },
    /// Repeats a request that waits or has waited, perhaps on another EM.
    Retry {
        ago: usize,
        em: Option<usize>,
    },
    /// A new engine, or the id of a ticket that is or was live.
    Adopt {
        em: usize,
        who: Who,
        used: i64,
        application: Option<usize>,
        again: Option<usize>,
    },
    /// Another call with the body and the request id of a waiting request.
    Repeat {
        ago: usize,
        wait: bool,
    },
    Inited {
        ago: usize,
        used: Option<i64>,
        application: Option<usize>,
        user: usize,
        epoch: Said,
    },
    /// Mostly for a used ticket, and mostly by its user.
    Reported {
        ago: usize,
        in_use: bool,
        used: i64,
        application: Option<usize>,
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
    /// A request that entered a wait queue, by an operator.
    Remove {
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
    Undo {
        ago: usize,
    },
    /// With the last sign of life at the begin of the batch, or an earlier one.
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
    /// The batch ends, and the caller of a waiting request cancels.
    Leave {
        ago: usize,
    },
    /// The batch ends, and the limit of a label set, for some values or for each, is set or removed.
    Limit {
        set: usize,
        values: Values,
        rule: Option<ModelRule>,
    },
    /// The batch ends, and the requirement of an engine type changes.
    Policy {
        engine_type: bool,
    },
    /// The batch ends, and a cluster shows the capacity and the use of its queues, the root first, and its applications.
    Cluster {
        max: [i64; PLACES],
        used: [i64; PLACES],
        shown: [i64; APPLICATIONS],
    },
}

pub(super) fn step() -> impl Strategy<Value = Step> {
    let (em, user, ago) = (0..EMS, 0..USERS, 0..12usize);
    prop_oneof![
        3 => (em.clone(), 0..40i64, 0..10i64, prop::bool::weighted(0.3), any::<bool>())
            .prop_map(|(em, total, protected, reserved, zone)| {
                Step::Register { em, total, protected: protected.min(total), reserved, zone }
            }),
        1 => (em.clone(), said()).prop_map(|(em, epoch)| Step::Unregister { em, epoch }),
        9 => request(),
        6 => (0..6usize, prop::option::weighted(0.2, em.clone())).prop_map(|(ago, em)| Step::Retry { ago, em }),
        3 => (0..6usize, any::<bool>()).prop_map(|(ago, wait)| Step::Repeat { ago, wait }),
        3 => (em.clone(), who(), 1..6i64, application(), prop::option::weighted(0.4, ago.clone()))
            .prop_map(|(em, who, used, application, again)| Step::Adopt { em, who, used, application, again }),
        1 => (0..6usize).prop_map(|ago| Step::Leave { ago }),
        2 => (0..6usize).prop_map(|ago| Step::Remove { ago }),
        5 => (ago.clone(), prop::option::of(0..15i64), application(), user.clone(), said())
            .prop_map(|(ago, used, application, user, epoch)| Step::Inited { ago, used, application, user, epoch }),
        6 => (ago.clone(), prop::bool::weighted(0.8), 0..15i64, application(), prop::bool::weighted(0.1), said())
            .prop_map(|(ago, in_use, used, application, stolen, epoch)| {
                Step::Reported { ago, in_use, used, application, stolen, epoch }
            }),
        4 => (ago.clone(), user).prop_map(|(ago, user)| Step::Released { ago, user }),
        2 => ago.clone().prop_map(|ago| Step::Force { ago }),
        1 => (em.clone(), any::<bool>()).prop_map(|(em, reason)| Step::Drain { em, reason }),
        2 => em.clone().prop_map(|em| Step::Resume { em }),
        3 => ago.clone().prop_map(|ago| Step::Expire { ago }),
        3 => ago.clone().prop_map(|ago| Step::Lost { ago }),
        2 => ago.prop_map(|ago| Step::Undo { ago }),
        1 => (em.clone(), prop::bool::weighted(0.8)).prop_map(|(em, known)| Step::Reap { em, known }),
        2 => em.prop_map(|em| Step::Report { em }),
        4 => (0..15u64).prop_map(|seconds| Step::Commit { seconds }),
        5 => limit(),
        1 => prop::bool::weighted(0.3).prop_map(|engine_type| Step::Policy { engine_type }),
        2 => (prop::array::uniform3(5..40i64), prop::array::uniform3(0..8i64), prop::array::uniform3(0..8i64))
            .prop_map(|(max, used, shown)| Step::Cluster { max, used, shown }),
    ]
}

fn request() -> impl Strategy<Value = Step> {
    let requires = prop_oneof![Just(Required::Zone), Just(Required::Tenant)];
    let asked = (0..EMS, who(), prop::option::weighted(0.2, requires), 1..12i64, 1..20u64);
    let how = (prop::option::weighted(0.3, 0..6u8), any::<bool>(), prop::option::weighted(0.3, 0..25i64));
    (asked, how).prop_map(|((em, who, requires, amount, ttl), (request_id, wait, cap))| {
        // A request carries its required labels.
        let who = Who { zone: who.zone || requires == Some(Required::Zone), ..who };
        Step::Request { em, who, requires, amount, ttl, request_id, wait, cap }
    })
}

fn limit() -> impl Strategy<Value = Step> {
    let max = [prop::option::weighted(0.7, 0..30i64).boxed(), prop::option::weighted(0.5, 0..5i64).boxed()];
    let rule = (max, mode()).prop_map(|([scarce, instances], mode)| {
        // At least one.
        let scarce = scarce.or(instances.is_none().then_some(10));
        ModelRule { scarce, instances, mode }
    });
    (0..SETS.len(), who(), 0..EMS, prop::array::uniform2(any::<bool>()), prop::option::weighted(0.8, rule)).prop_map(
        |(set, who, em, fixed, rule)| {
            let named = who.values(set, em).unwrap_or_default();
            let values = [0, 1].map(|place| named[place].filter(|_| fixed[place]));
            Step::Limit { set, values, rule }
        },
    )
}

fn who() -> impl Strategy<Value = Who> {
    let carried = (prop::option::weighted(0.6, 0..TENANTS), prop::bool::weighted(0.1));
    (0..USERS, carried, prop::option::weighted(0.7, 0..ENGINE_TYPES.len()), prop::option::of(0..QUEUES))
        .prop_map(|(user, (tenant, zone), engine_type, queue)| Who { user, tenant, zone, engine_type, queue })
}

fn application() -> impl Strategy<Value = Option<usize>> {
    prop::option::weighted(0.4, 0..APPLICATIONS)
}

fn mode() -> impl Strategy<Value = LimitMode> {
    prop_oneof![3 => Just(LimitMode::Enforced), 1 => Just(LimitMode::Advisory), 1 => Just(LimitMode::Off)]
}
