//! Property tests of external queues: a simulated cluster with applications of this service and of others.

use proptest::prelude::*;
use uuid::Uuid;

use super::*;
use crate::queue::{QueueNaming, is_in};

const PATHS: [&str; 4] = ["root", "root.a", "root.a.x", "root.b"];
const LEAVES: [&str; 2] = ["root.a.x", "root.b"];

fn amounts(n: i64) -> QueueAmounts {
    QueueAmounts { memory: n, cores: n }
}

fn at(seconds: i64) -> OffsetDateTime {
    OffsetDateTime::UNIX_EPOCH + Duration::seconds(seconds)
}

fn queues(max: [i64; 4], used: impl Fn(&str) -> i64) -> QueueTree {
    let queue = |(path, max): (&str, i64)| ExternalQueue {
        path: path.into(),
        max: amounts(max),
        used: amounts(used(path)),
        state: QueueState::Running,
        running_applications: None,
        pending_applications: None,
        custom: Default::default(),
    };
    QueueTree::new(QueueNaming::Fair, PATHS.into_iter().zip(max).map(queue)).unwrap()
}

/// A ticket, and its application in the simulated cluster.
#[derive(Debug, Clone)]
struct Engine {
    path: &'static str,
    held: QueueHolding,
    /// Amount that the cluster allocates to the application; at most the granted amount.
    allocated: i64,
    live: bool,
}

/// State of the simulated cluster, and the counts under test.
struct World {
    now: i64,
    /// Use by other applications, per leaf queue.
    others: [i64; 2],
    engines: Vec<Engine>,
    rooms: QueueCapacities,
    /// A prepared snapshot, and the ticket changes since.
    prepared: Option<(QueueCapacities, Vec<HoldingChange>)>,
    /// Preparation that is reused for every snapshot, whether or not it is installed.
    kept: SnapshotPreparation,
}

impl World {
    fn new(max: [i64; 4], others: [i64; 2]) -> Self {
        let used =
            |path: &str| LEAVES.into_iter().zip(others).filter(|(leaf, _)| is_in(leaf, path)).map(|(_, n)| n).sum();
        let snapshot = ClusterSnapshot::new(at(0), &[], queues(max, used), &[]);
        let snapshot = Arc::new(snapshot);
        let (rooms, kept) = (QueueCapacities::new(snapshot.clone(), []), SnapshotPreparation::new(snapshot));
        Self { now: 0, others, engines: vec![], rooms, prepared: None, kept }
    }

    /// Returns the use of all applications in a queue and its descendants.
    fn used(&self, path: &str) -> i64 {
        let others = LEAVES.into_iter().zip(self.others).filter(|(leaf, _)| is_in(leaf, path)).map(|(_, n)| n);
        let ours = self.engines.iter().filter(|engine| is_in(engine.path, path)).map(|engine| engine.allocated);
        others.chain(ours).sum()
    }

    fn applications(&self) -> Vec<Application> {
        let application = |(n, engine): (usize, &Engine)| Application {
            id: n.to_string(),
            name: String::new(),
            user: String::new(),
            queue: engine.path.into(),
            state: "RUNNING".into(),
            allocated: amounts(engine.allocated),
            start_millis: 0,
        };
        self.engines.iter().enumerate().filter(|(_, engine)| engine.allocated > 0).map(application).collect()
    }

    fn change(&mut self, n: usize, to: Option<QueueHolding>) {
        let engine = &mut self.engines[n];
        let from = Some(engine.held.clone()).filter(|_| engine.live);
        let change = HoldingChange { path: engine.path.into(), from, to: to.clone() };
        engine.live = to.is_some();
        engine.held = to.unwrap_or_else(|| engine.held.clone());
        self.told(n, change);
    }

    fn told(&mut self, n: usize, change: HoldingChange) {
        self.rooms.apply(&change);
        let Engine { path, held, live, .. } = self.engines[n].clone();
        let ticket = ClusterTicket { cluster_id: 1, path: path.into(), held };
        self.kept.put(&ClusterTicketDelta { ticket_id: Uuid::from_u128(n as u128), ticket, change: 0, ended: !live });
        if let Some((_, since)) = &mut self.prepared {
            since.push(change);
        }
    }

    fn grant(&mut self, path: &'static str, n: i64) -> bool {
        if self.rooms.judge(path, amounts(n), |_| QueueAmounts::default()).is_err() {
            return false;
        }
        let held = QueueHolding { amounts: amounts(n), phase: TicketPhase::Locked };
        self.engines.push(Engine { path, held: held.clone(), allocated: 0, live: true });
        self.told(self.engines.len() - 1, HoldingChange { path: path.into(), from: None, to: Some(held) });
        true
    }

    fn live(&self) -> impl Iterator<Item = (&str, &QueueHolding)> {
        self.engines.iter().filter(|engine| engine.live).map(|engine| (engine.path, &engine.held))
    }

    fn used_shown(&self, path: &str) -> i64 {
        self.rooms.snapshot.queues.find(path).unwrap().used.memory
    }

    fn unseen(&self, path: &str) -> i64 {
        self.rooms.unseen.get(path).copied().unwrap_or_default().memory
    }
}

#[derive(Debug, Clone)]
enum Step {
    Grant(usize, i64),
    /// The engine confirms, with an application id or without.
    Inited(usize, bool),
    /// The application id becomes known.
    Known(usize),
    End(usize),
    /// The cluster changes the allocation of an application.
    Allocate(usize, i64),
    /// Takes a snapshot while an allocation changes between the queue reply and the application reply.
    Prepare(usize, i64, bool),
    Install,
    Pass(i64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..2_usize, 1..40_i64).prop_map(|(leaf, n)| Step::Grant(leaf, n)),
        3 => (0..12_usize, any::<bool>()).prop_map(|(n, known)| Step::Inited(n, known)),
        1 => (0..12_usize).prop_map(Step::Known),
        1 => (0..12_usize).prop_map(Step::End),
        3 => (0..12_usize, 0..40_i64).prop_map(|(n, to)| Step::Allocate(n, to)),
        2 => (0..12_usize, 0..40_i64, any::<bool>()).prop_map(|(n, to, early)| Step::Prepare(n, to, early)),
        2 => Just(Step::Install),
        1 => (1..50_i64).prop_map(Step::Pass),
    ]
}

impl World {
    fn allocate(&mut self, n: usize, to: i64) {
        let now = self.now;
        let Some(engine) = self.engines.get_mut(n) else { return };
        let granted = engine.held.amounts.memory;
        // A ticket without an application id is assumed to use its full grant once it is taken as shown.
        let settled =
            matches!(engine.held.phase, TicketPhase::Used { since, application_id: None } if at(now) - since >= SETTLE);
        engine.allocated = match engine.live {
            true if settled => granted,
            true => to.min(granted),
            false => to.min(engine.allocated),
        };
    }

    fn step(&mut self, step: &Step, max: [i64; 4]) {
        self.now += 1;
        match *step {
            Step::Grant(leaf, n) => drop(self.grant(LEAVES[leaf], n)),
            Step::Inited(n, known) => {
                let Some(engine) =
                    self.engines.get(n).filter(|engine| engine.live && engine.held.phase == TicketPhase::Locked)
                else {
                    return;
                };
                let application_id = known.then(|| n.to_string());
                let held = QueueHolding {
                    phase: TicketPhase::Used { since: at(self.now), application_id },
                    ..engine.held.clone()
                };
                self.change(n, Some(held));
            }
            Step::Known(n) => {
                let Some(Engine {
                    live: true,
                    held: QueueHolding { amounts, phase: TicketPhase::Used { since, .. } },
                    ..
                }) = self.engines.get(n)
                else {
                    return;
                };
                let phase = TicketPhase::Used { since: *since, application_id: Some(n.to_string()) };
                let held = QueueHolding { amounts: *amounts, phase };
                self.change(n, Some(held));
            }
            Step::End(n) if self.engines.get(n).is_some_and(|engine| engine.live) => self.change(n, None),
            Step::End(_) => {}
            Step::Allocate(n, to) => self.allocate(n, to),
            Step::Prepare(n, to, early) => {
                (0..self.engines.len()).for_each(|n| self.allocate(n, self.engines[n].allocated));
                let (begun, before) = (at(self.now), self.applications());
                if early {
                    self.allocate(n, to);
                }
                let told = queues(max, |path| self.used(path));
                if !early {
                    self.allocate(n, to);
                }
                let snapshot = Arc::new(ClusterSnapshot::new(begun, &before, told, &self.applications()));
                self.kept.renew(snapshot.clone()).unwrap();
                let rooms = QueueCapacities::new(snapshot, self.live());
                self.prepared = Some((rooms, vec![]));
            }
            Step::Install => {
                if let Some((prepared, since)) = self.prepared.take() {
                    self.rooms.install(prepared, &since).unwrap();
                }
            }
            Step::Pass(seconds) => self.now += seconds,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(500) })]

    /// Any order of grants, reports, ends and snapshots: the counts equal those of the live tickets. Each ticket counts
    /// with at least its grant, so all grants fit.
    #[test]
    fn queue_demand_counts_each_ticket_once(
        others in [0..30_i64, 0..30_i64],
        max in [60..160_i64, 20..120_i64, 20..100_i64, 20..100_i64],
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let mut world = World::new(max, others);
        for step in &steps {
            let granted = world.engines.len();
            world.step(step, max);
            let fresh = QueueCapacities::new(world.rooms.snapshot.clone(), world.live());
            prop_assert_eq!(&fresh.unseen, &world.rooms.unseen, "after {:?}", step);
            let fresh = QueueCapacities::new(world.kept.rooms().snapshot.clone(), world.live());
            prop_assert_eq!(&fresh.unseen, &world.kept.rooms().unseen, "the kept counts, after {:?}", step);
            prop_assert_eq!(world.kept.tickets(), world.live().count());
            for (path, max) in PATHS.into_iter().zip(max) {
                let of_others: i64 = LEAVES.into_iter().zip(others).filter(|(leaf, _)| is_in(leaf, path)).map(|(_, n)| n).sum();
                let held: i64 = world.live().filter(|(leaf, _)| is_in(leaf, path)).map(|(_, held)| held.amounts.memory).sum();
                let counted = world.used_shown(path) + world.unseen(path);
                prop_assert!(counted >= of_others + held, "{} after {:?}: {} < {} + {}", path, step, counted, of_others, held);
                if world.engines.len() > granted && is_in(world.engines[granted].path, path) {
                    prop_assert!(counted <= max, "{} after {:?}: granted beyond {}", path, step, max);
                }
            }
        }
    }

    /// With all applications known and shown by a snapshot, each ticket counts with exactly its grant.
    #[test]
    fn queue_demand_counts_visible_applications_exactly(
        others in [0..30_i64, 0..30_i64],
        engines in prop::collection::vec((0..2_usize, 1..30_i64, 0..40_i64), 1..10),
    ) {
        let max = [1000; 4];
        let mut world = World::new(max, others);
        for (n, (leaf, granted, allocated)) in engines.into_iter().enumerate() {
            world.grant(LEAVES[leaf], granted);
            world.step(&Step::Inited(n, true), max);
            world.step(&Step::Allocate(n, allocated), max);
        }
        world.step(&Step::Prepare(99, 0, true), max);
        world.step(&Step::Install, max);
        for path in PATHS {
            let of_others: i64 = LEAVES.into_iter().zip(others).filter(|(leaf, _)| is_in(leaf, path)).map(|(_, n)| n).sum();
            let held: i64 = world.live().filter(|(leaf, _)| is_in(leaf, path)).map(|(_, held)| held.amounts.memory).sum();
            prop_assert_eq!(world.used_shown(path) + world.unseen(path), of_others + held);
        }
    }
}

#[test]
fn queue_burst_is_granted_up_to_head_room() {
    for (max, fits) in [([500, 400, 100, 0], 8), ([500, 50, 100, 0], 4), ([30, 400, 100, 0], 2)] {
        let mut world = World::new(max, [0, 0]);
        let granted = (0..30).filter(|_| world.grant("root.a.x", 12)).count();
        assert_eq!(granted, fits, "{max:?}");
    }
}

#[test]
fn queue_refusal_lists_shortfalls_and_closed_queues() {
    let mut world = World::new([100, 20, 10, 100], [0, 0]);
    assert!(world.grant("root.a.x", 5));
    let nobody = |_: &str| QueueAmounts::default();
    let short = |path: &str, left, ahead, max| ShortQueue {
        path: path.into(),
        left: amounts(left),
        ahead: amounts(ahead),
        max: amounts(max),
    };
    let refused = world.rooms.judge("root.a.x", amounts(16), nobody).unwrap_err();
    assert_eq!(refused, QueueShortage::Short(vec![short("root.a.x", 5, 0, 10), short("root.a", 15, 0, 20)]));
    let someone = |path: &str| if path == "root" { amounts(90) } else { QueueAmounts::default() };
    let refused = world.rooms.judge("root.b", amounts(6), someone).unwrap_err();
    assert_eq!(refused, QueueShortage::Short(vec![short("root", 95, 90, 100)]), "another request waits for the rest");
    assert!(world.rooms.judge("root.b", QueueAmounts { memory: 5, cores: -3 }, someone).is_ok());
    assert!(matches!(world.rooms.judge("root.z", amounts(1), nobody), Err(QueueShortage::Queue(_))));
    let mut all: Vec<_> = world.rooms.snapshot.queues.behind(None).cloned().collect();
    all[1].state = QueueState::Draining;
    let snapshot = ClusterSnapshot::new(at(1), &[], QueueTree::new(QueueNaming::Fair, all).unwrap(), &[]);
    let rooms = QueueCapacities::new(Arc::new(snapshot), []);
    let closed = rooms.judge("root.a.x", amounts(1), nobody).unwrap_err();
    assert_eq!(closed, QueueShortage::State { path: "root.a".into(), state: QueueState::Draining });
}

#[test]
fn older_cluster_snapshot_is_not_installed() {
    let mut world = World::new([100; 4], [0, 0]);
    let of = |seconds| {
        QueueCapacities::new(Arc::new(ClusterSnapshot::new(at(seconds), &[], queues([seconds; 4], |_| 0), &[])), [])
    };
    assert_eq!(world.rooms.install(of(5), &[]), Ok(()));
    for older in [5, 4] {
        assert_eq!(world.rooms.install(of(older), &[]), Err(StaleSnapshot));
    }
    assert!(!world.grant("root", 6));
}

#[test]
fn ticket_without_application_is_visible_after_settling() {
    let max = [100; 4];
    let mut world = World::new(max, [0, 0]);
    assert!(world.grant("root.b", 60));
    world.step(&Step::Inited(0, false), max);
    let unseen = |world: &mut World| {
        world.step(&Step::Prepare(99, 0, true), max);
        world.step(&Step::Install, max);
        world.unseen("root")
    };
    world.now = 30;
    assert_eq!(unseen(&mut world), 60, "it may not have started");
    world.now = 61;
    world.engines[0].allocated = 60;
    assert_eq!((unseen(&mut world), world.used_shown("root")), (0, 60));
    assert!(!world.grant("root.b", 41) && world.grant("root.b", 40));
}

#[test]
fn application_above_grant_counts_its_use() {
    let max = [100; 4];
    let mut world = World::new(max, [0, 0]);
    assert!(world.grant("root.b", 10) && world.grant("root.b", 10));
    world.step(&Step::Inited(0, true), max);
    world.engines[0].allocated = 30;
    let applications = world.applications();
    let snapshot = ClusterSnapshot::new(at(5), &applications, queues(max, |path| world.used(path)), &applications);
    let rooms = QueueCapacities::new(Arc::new(snapshot), world.live());
    assert_eq!(world.rooms.install(rooms, &[]), Ok(()));
    assert_eq!((world.used_shown("root"), world.unseen("root")), (30, 10), "nothing is left for another request");
}
