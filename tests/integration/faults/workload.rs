//! Callers of the run: several dozen tasks that make random calls of all kinds through random instances.

use std::{
    collections::HashMap,
    env,
    sync::Arc,
    time::{Duration, Instant},
};

use rm_client::{ClientError, RmClient};
use rm_model::{
    em::EmInstance,
    hold::NewHold,
    name::Labels,
    operation::{LockKey, RegisterEm, ReleaseTicket},
    resource::Resource,
};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{
    administrator::Administrator,
    adopter,
    cluster::Cluster,
    crowd,
    ecm::{self, Engines},
    engine::Caller,
    journal::{Answer, Journal},
    probe::em_of_probe,
    queues,
    random::Random,
};
use crate::harness::*;

/// Number of concurrent callers.
const CALLERS: usize = 36;

/// Maximum time to retry a call, longer than any outage; beyond it, a failure is a violation.
const TRIES_MAX: Duration = Duration::from_secs(60);

/// Pause before a retry.
pub const RETRY: Duration = Duration::from_millis(50);

/// Amount that no EM grants, at any size.
pub fn protected() -> Resource {
    load(1, 1, 0)
}

/// The types of engines, and the tenants, that requests may name.
pub const ENGINE_TYPES: [&str; 4] = ["", "", "spark-3.2.1", "hive-2.3.3"];
pub const TENANTS: [Option<&str>; 4] = [None, None, Some(TENANT), Some("b")];

/// The tenant that an EM is reserved for.
pub const TENANT: &str = "a";

/// The label of a tenant.
pub fn of_tenant(tenant: Option<&str>) -> Labels {
    labels(tenant.map(|tenant| ("tenant", tenant)))
}

/// The label of the large EMs, and of the reserved one.
pub fn of_zone() -> Labels {
    labels(Some(("zone", "x")))
}

fn labels(label: Option<(&str, &str)>) -> Labels {
    let label = label.map(|(key, value)| (key.to_owned(), value.to_owned()));
    Labels::parse("labels", label.into_iter().collect()).unwrap()
}

/// Whether no earlier release serves beside this one. An earlier release may lack some calls.
pub fn is_alone() -> bool {
    env::var("LINKIS_RM_FAULTS_OTHER").is_err()
}

/// The epochs of EMs that register twice at the beginning: the stale one, and the current one.
pub type Epochs = HashMap<EmInstance, [i64; 2]>;

/// State that all tasks of the workload share.
#[derive(Clone)]
pub struct Shared {
    pub cluster: Arc<Cluster>,
    pub journal: Arc<Journal>,
    pub engines: Arc<Engines>,
    pub epochs: Arc<Epochs>,
    /// Number of tickets of a crowd.
    pub crowd: usize,
    /// Cancelled when callers must begin nothing new.
    pub stop: CancellationToken,
}

/// The EMs, by their use in the run.
pub struct Hosts;

impl Hosts {
    /// Small, so that they refuse requests, and callers wait.
    pub const HOT: [&str; 2] = ["hot0", "hot1"];
    /// Large EMs.
    pub const BIG: [&str; 3] = ["big0", "big1", "big2"];
    /// A large EM, reserved for one tenant.
    pub const RESERVED: &str = "reserved";
    /// Report their tickets.
    pub const REPORTING: [&str; 2] = ["ecm0", "ecm1"];
    /// Is resized repeatedly.
    pub const RESIZED: &str = "resized";
    /// Registers and unregisters repeatedly.
    pub const FLEETING: &str = "fleeting";
    /// Registers, is filled by a crowd, and unregisters.
    pub const CROWDED: &str = "crowded";
    /// Has the tickets with deadlines in the same second.
    pub const DUE: &str = "due";

    /// Whether an EM is in the zone.
    pub fn is_in_zone(host: &EmInstance) -> bool {
        Self::BIG.into_iter().chain([Self::RESERVED]).any(|zoned| em(zoned) == *host)
    }

    /// Returns a random EM for a request; `None` for any EM.
    pub fn pick(random: &mut Random) -> Option<EmInstance> {
        Some(em(match random.between(0, 99) {
            0..35 => random.pick(Self::HOT),
            35..50 => random.pick(Self::BIG),
            50..65 => random.pick(Self::REPORTING),
            65..75 => Self::RESIZED,
            75..85 => Self::FLEETING,
            85..89 => Self::RESERVED,
            _ => return None,
        }))
    }
}

pub fn registered(host: &str, size: Resource) -> RegisterEm {
    let in_zone = is_alone() && Hosts::is_in_zone(&em(host));
    let labels = if in_zone { of_zone() } else { Labels::default() };
    let reserved = of_tenant((is_alone() && host == Hosts::RESERVED).then_some(TENANT));
    RegisterEm { protected: protected(), labels, reserved, ..registration(em(host), size) }
}

impl Shared {
    /// Returns a client of a random instance.
    pub fn client(&self, random: &mut Random) -> RmClient {
        self.cluster.client(random.index(self.cluster.nodes.len()))
    }

    /// Repeats a call through random instances until its result is known. Returns `None` if it was rejected.
    pub async fn insist<T, F: Future<Output = Result<T, ClientError>>>(
        &self,
        random: &mut Random,
        kind: &'static str,
        call: impl Fn(RmClient) -> F,
    ) -> Option<T> {
        let start = Instant::now();
        while start.elapsed() < TRIES_MAX {
            match self.journal.call(kind, call(self.client(random))).await {
                Answer::Done(done) => return Some(done),
                Answer::Rejected => return None,
                Answer::Nothing | Answer::Unclear => tokio::time::sleep(RETRY).await,
            }
        }
        self.journal.violation(format!("{kind} could not be done within {TRIES_MAX:?}"));
        None
    }

    /// Whether the workload is to end; sleeps for a moment if not.
    pub async fn goes_on(&self, pause: Duration) -> bool {
        tokio::select! {
            () = self.stop.cancelled() => false,
            () = tokio::time::sleep(pause) => true,
        }
    }
}

/// Registers the EMs, and starts all callers.
pub async fn start(shared: &mut Shared, random: &mut Random) -> JoinSet<()> {
    let sized =
        |hosts: &[&str], size: Resource| Vec::from_iter(hosts.iter().map(|host| registered(host, size.clone())));
    let mut registrations = sized(&Hosts::HOT, load(33, 17, 12));
    registrations.extend(sized(&Hosts::BIG, load(2000, 2000, 2000)));
    registrations.extend(sized(&[Hosts::RESERVED], load(100, 100, 100)));
    let mut epochs = Epochs::new();
    for registration in registrations {
        let register = async || shared.cluster.probe(0).register(registration.clone()).await.unwrap().epoch;
        epochs.insert(registration.em.clone(), [register().await, register().await]);
    }
    shared.epochs = Arc::new(epochs);
    let mut registrations = sized(&[Hosts::RESIZED], load(20, 20, 20));
    registrations.extend(sized(&[Hosts::FLEETING], load(200, 200, 200)));
    registrations.extend(
        (0..shared.cluster.nodes.len())
            .map(|node| RegisterEm { em: em_of_probe(node), ..registered("probe", load(100_000, 100_000, 100_000)) }),
    );
    for registration in registrations {
        shared.cluster.probe(0).register(registration).await.unwrap();
    }
    queues::start(&shared.cluster, random.fork()).await;
    let administrator = Administrator::begin(shared.clone(), random.fork()).await;
    let mut tasks = JoinSet::new();
    for number in 0..CALLERS {
        tasks.spawn(Caller::new(shared.clone(), random.fork(), number).run());
    }
    tasks.spawn(adopter::run(shared.clone(), random.fork()));
    tasks.spawn(resizer(shared.clone(), random.fork()));
    tasks.spawn(mover(shared.clone(), random.fork()));
    // An earlier release may have no drains or other holds.
    if env::var("LINKIS_RM_FAULTS_OTHER").is_err() {
        tasks.spawn(drainer(shared.clone(), random.fork()));
        tasks.spawn(holder(shared.clone(), random.fork()));
    }
    tasks.spawn(onlooker(shared.clone(), random.fork()));
    tasks.spawn(crowd::big_em(shared.clone(), random.fork()));
    tasks.spawn(crowd::deadlines(shared.clone(), random.fork()));
    tasks.spawn(administrator.run());
    tasks
}

/// Starts the reporting EMs, which continue until `stop`, after the callers whose engines they report.
pub fn start_reporting(shared: &Shared, random: &mut Random, end: &CancellationToken) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    for host in Hosts::REPORTING {
        let shared = Shared { stop: end.clone(), ..shared.clone() };
        tasks.spawn(ecm::run(shared, random.fork(), em(host)));
    }
    tasks
}

/// Lowers the capacity of an EM below what is in use, and raises it again.
async fn resizer(shared: Shared, mut random: Random) {
    while shared.goes_on(random.millis(200, 1500)).await {
        let cores = random.between(2, 24);
        let size = registered(Hosts::RESIZED, load(24, cores, 24));
        shared.insist(&mut random, "register", |rm| resize(rm, size.clone())).await;
    }
}

async fn resize(rm: RmClient, registration: RegisterEm) -> Result<i64, ClientError> {
    Ok(rm.register(registration).await?.epoch)
}

/// Unregisters an EM with all of its tickets, and registers it again.
async fn mover(shared: Shared, mut random: Random) {
    let em1 = em(Hosts::FLEETING);
    let (mut older, mut current) = (None, None);
    while shared.goes_on(random.millis(500, 3000)).await {
        if let Some(older) = older {
            let late = shared.client(&mut random);
            let late = late.unregister_fenced(&em1, older);
            let answer = shared.journal.call("an older registration", late).await;
            shared.journal.check(!matches!(answer, Answer::Done(_)), || format!("{em1} went by the word of {older}"));
        }
        match current.filter(|_| random.percent(50)) {
            // A registration without a reply may be later.
            Some(epoch) => {
                let unregister = async |rm: RmClient| rm.unregister_fenced(&em1, epoch).await;
                shared.insist(&mut random, "fenced unregister", unregister).await;
            }
            None => {
                let unregister = async |rm: RmClient| rm.unregister(&em1).await;
                shared.insist(&mut random, "unregister", unregister).await;
            }
        }
        random.pause(0, 200).await;
        let registration = registered(Hosts::FLEETING, load(200, 200, 200));
        let epoch = shared.insist(&mut random, "register", |rm| resize(rm, registration.clone())).await;
        if let Some(epoch) = epoch.filter(|_| is_alone()) {
            (older, current) = (current, Some(epoch));
        }
    }
}

/// Drains EMs, and resumes each.
async fn drainer(shared: Shared, mut random: Random) {
    while shared.goes_on(random.millis(100, 1000)).await {
        let em1 = em(random.pick([Hosts::HOT[0], Hosts::BIG[0], Hosts::BIG[1], Hosts::FLEETING]));
        let drain = async |rm: RmClient| rm.drain(&em1, "a fault").await;
        shared.insist(&mut random, "drain", drain).await;
        random.pause(0, 400).await;
        let resume = async |rm: RmClient| rm.resume(&em1, "").await;
        shared.insist(&mut random, "resume", resume).await;
    }
}

/// Holds EMs and users for a moment. No call changes a held EM.
async fn holder(shared: Shared, mut random: Random) {
    /// Longer than the reads below usually take.
    const HELD: Duration = Duration::from_secs(5);
    while shared.goes_on(random.millis(500, 3000)).await {
        let em1 = em(random.pick(Hosts::HOT));
        let key = match random.between(0, 3) {
            0 => LockKey::User(name(&format!("user{}", random.between(0, 5)))),
            _ => LockKey::Em(em1.clone()),
        };
        let new = NewHold { key: key.clone(), duration: HELD, reason: name("a fault") };
        let begun = Instant::now();
        shared.insist(&mut random, "hold", async |rm: RmClient| rm.hold(&new).await).await;
        if matches!(key, LockKey::Em(_)) {
            let version = async |random: &mut Random| match shared.client(random).em(&em1).await {
                Ok(em) => Some((em.epoch, em.version)),
                Err(_) => None,
            };
            let before = version(&mut random).await;
            random.pause(0, 300).await;
            let after = version(&mut random).await;
            let is_known = before.is_some() && after.is_some() && begun.elapsed() < HELD;
            shared.journal.check(!is_known || before == after, || {
                format!("{em1} changed from {before:?} to {after:?} while held")
            });
        }
        shared.insist(&mut random, "release of a hold", async |rm: RmClient| rm.release_hold(&key).await).await;
    }
}

/// Makes calls that only read, or that must be rejected.
async fn onlooker(shared: Shared, mut random: Random) {
    while shared.goes_on(random.millis(5, 60)).await {
        let rm = shared.client(&mut random);
        let journal = &shared.journal;
        match random.between(0, 7) {
            0 => drop(journal.call("usage", rm.ems()).await),
            1 => drop(journal.call("usage", rm.tickets(None)).await),
            2 => drop(journal.call("usage", rm.scopes()).await),
            3 => drop(journal.call("usage", rm.waiting()).await),
            4 => drop(journal.call("usage", rm.em(&em(Hosts::FLEETING))).await),
            5 => drop(journal.call("usage", rm.ticket(Uuid::now_v7())).await),
            6 => drop(journal.call("usage", rm.policies()).await),
            _ => {
                let nothing = ReleaseTicket { ticket_id: Uuid::now_v7(), user: name("nobody"), em: em(Hosts::BIG[0]) };
                let answer = journal.call("release of nothing", rm.resource_released(&nothing)).await;
                journal.check(!matches!(answer, Answer::Done(())), || "a ticket was released that never was".into());
            }
        }
    }
}
