//! Injector: causes one fault after another, and waits after each until every instance serves again.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use sqlx::PgConnection;

use super::{
    clock::Clock,
    cluster::{CONNECTIONS_MAX, Cluster, Node},
    probe::Probes,
    random::Random,
    workload::Shared,
};
use crate::proxy::{Cut, FaultPlan};

/// Maximum time after a fault until every instance serves again.
pub const RECOVERY_MAX: Duration = Duration::from_secs(30);

/// Name of the fault in which callers get an error for a revoked token.
pub const REVOCATION: &str = "a token is revoked";

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// kill -9 of an instance, and a new one.
    Kill,
    /// kill -9 of each instance, one after another.
    KillEach,
    /// kill -9 of the postmaster, which is started again soon.
    KillPostmaster,
    /// SIGSTOP of an instance for longer than the database lets a transaction sit idle.
    FreezeLong,
    /// SIGSTOP of an instance for a moment.
    FreezeShort,
    /// pg_terminate_backend of some connections.
    Terminate,
    /// PostgreSQL ends immediately, and is started again soon.
    Crash,
    /// PostgreSQL ends immediately, and is down for longer than an instance waits for the evidence of a commit.
    CrashLong,
    /// Commits without a reply.
    CutAfterCommit,
    /// Commits that never arrive.
    CutBeforeCommit,
    /// All connections of an instance break.
    CutAll,
    /// All bytes are late: a slow disk, a slow network.
    Slow,
    /// Nothing passes for a while, then everything does.
    Hole,
    /// A firewall drops the state of all connections of an instance. They stay open and pass no bytes.
    Forgotten,
    /// No connection can be opened, and open ones end.
    Exhaust,
    /// The clock of an instance jumps by up to two days, and back.
    Clock,
    /// The token of all callers is replaced, and the old one revoked.
    Revocation,
    /// The certificates of the instances and of EMs are replaced, with the authority of client certificates.
    Certificates,
    /// Two of the other faults concurrently.
    Two,
}

impl Fault {
    const ALL: [Self; 18] = [
        Self::Clock,
        Self::Kill,
        Self::FreezeLong,
        Self::FreezeShort,
        Self::Terminate,
        Self::Crash,
        Self::CutAfterCommit,
        Self::CutBeforeCommit,
        Self::CutAll,
        Self::Slow,
        Self::Hole,
        Self::Exhaust,
        // Last, so that a short run omits the slow faults, which take up to a quarter of a minute.
        Self::Revocation,
        Self::Certificates,
        Self::CrashLong,
        Self::Forgotten,
        Self::KillEach,
        Self::KillPostmaster,
    ];

    /// Faults that are too long for a short run.
    const LONG: usize = 6;

    /// Faults that every long run injects, before all others.
    pub const STORM: [Self; 5] =
        [Self::KillEach, Self::KillPostmaster, Self::FreezeLong, Self::FreezeShort, Self::Crash];

    /// Faults that can occur during another fault.
    const PAIRS: ([Self; 6], [Self; 5]) = (
        [Self::FreezeLong, Self::FreezeShort, Self::Crash, Self::Hole, Self::Exhaust, Self::Forgotten],
        [Self::Terminate, Self::CutAfterCommit, Self::CutBeforeCommit, Self::CutAll, Self::Slow],
    );

    pub fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill -9 and restart",
            Self::KillEach => "kill -9 of each instance",
            Self::KillPostmaster => "kill -9 of the postmaster",
            Self::FreezeLong => "SIGSTOP, 5.5 to 8 s",
            Self::FreezeShort => "SIGSTOP, up to 2 s",
            Self::Terminate => "terminated connections",
            Self::Crash => "PostgreSQL crashes",
            Self::CrashLong => "PostgreSQL away, 8 to 11 s",
            Self::CutAfterCommit => "cut after COMMIT",
            Self::CutBeforeCommit => "cut before COMMIT",
            Self::CutAll => "all connections cut",
            Self::Slow => "slow way to the disk",
            Self::Hole => "black hole for a while",
            Self::Forgotten => "connections forgotten",
            Self::Exhaust => "no connections left",
            Self::Clock => "a clock jumps",
            Self::Revocation => REVOCATION,
            Self::Certificates => "certificates replaced",
            Self::Two => "two of these at once",
        }
    }
}

/// Results of the faults of one kind.
#[derive(Clone, Copy, Debug, Default)]
pub struct Toll {
    pub injected: u32,
    /// Longest time without a reply to a probe, from the beginning of the fault.
    pub outage: Duration,
    /// Longest time from the end of the fault until every probe got a reply.
    pub recovery: Duration,
}

/// Causes the faults of a run.
pub struct Injector {
    shared: Shared,
    probes: Arc<Probes>,
    random: Random,
    pub tolls: BTreeMap<Fault, Toll>,
}

impl Injector {
    pub fn new(shared: Shared, probes: Arc<Probes>, random: Random) -> Self {
        Self { shared, probes, random, tolls: BTreeMap::new() }
    }

    /// Causes all kinds of faults, in a new random order each time, until `budget` has passed.
    pub async fn run(&mut self, budget: Duration) {
        let end = Instant::now() + budget;
        let is_short = budget < Duration::from_secs(60);
        if !is_short {
            for fault in Fault::STORM {
                self.inject(fault).await;
            }
        }
        loop {
            let mut deck = Fault::ALL.to_vec();
            match is_short {
                true => deck.truncate(Fault::ALL.len() - Fault::LONG),
                false => deck.extend([Fault::Two; 4]),
            }
            if self.shared.cluster.credentials.is_none() {
                deck.retain(|fault| ![Fault::Revocation, Fault::Certificates].contains(fault));
            }
            if !Clock::can_be_set() {
                deck.retain(|fault| *fault != Fault::Clock);
            }
            self.random.shuffle(&mut deck);
            for fault in deck {
                if Instant::now() >= end {
                    return;
                }
                self.inject(fault).await;
                self.random.pause(100, if is_short { 300 } else { 1500 }).await;
            }
        }
    }

    fn expect(&self, done: Result<(), String>) {
        if let Err(what) = done {
            self.shared.journal.violation(what);
        }
    }

    async fn inject(&mut self, fault: Fault) {
        self.shared.journal.break_now(fault.name());
        let start = Instant::now();
        let cluster = self.shared.cluster.clone();
        let violations = self.shared.journal.book().violations.len();
        let mut broken = fault.name().to_owned();
        match fault {
            Fault::Two => {
                let (first, second) = Fault::PAIRS;
                let (first, second) = (self.random.pick(first), self.random.pick(second));
                broken = format!("{} and {}", first.name(), second.name());
                let (mut random, mut other) = (self.random.fork(), self.random.fork());
                tokio::join!(
                    break_and_mend(&cluster, first, &mut random),
                    break_and_mend(&cluster, second, &mut other)
                );
            }
            Fault::Revocation => self.expect(cluster.replace_token().await),
            Fault::Certificates => {
                let replaced = cluster.replace_certificates(&mut self.random).await;
                self.expect(replaced);
            }
            fault => break_and_mend(&cluster, fault, &mut self.random).await,
        }
        let mended = Instant::now();
        let mut is_last = false;
        while !self.probes.all_since(mended) {
            if is_last {
                self.shared.journal.violation(format!("an instance does not serve {RECOVERY_MAX:?} after its end"));
                break;
            }
            is_last = mended.elapsed() > RECOVERY_MAX;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let toll = self.tolls.entry(fault).or_default();
        toll.injected += 1;
        toll.recovery = toll.recovery.max(mended.elapsed());
        toll.outage = toll.outage.max(self.probes.longest_outage(start));
        self.shared.journal.mended();
        if self.shared.journal.book().violations.len() > violations {
            eprintln!("what was broken: {broken}");
            for (number, node) in self.shared.cluster.nodes.iter().enumerate() {
                eprintln!("the log of instance {number}:\n{}", node.log());
            }
        }
    }
}

/// Causes a fault, and ends it after a while.
async fn break_and_mend(cluster: &Arc<Cluster>, fault: Fault, random: &mut Random) {
    let number = random.index(cluster.nodes.len());
    let node = &cluster.nodes[number];
    match fault {
        Fault::Kill => kill(cluster.clone(), number, random.millis(0, 1000)).await,
        Fault::KillEach => {
            for number in 0..cluster.nodes.len() {
                kill(cluster.clone(), number, random.millis(0, 1000)).await;
            }
        }
        Fault::KillPostmaster => crash(cluster, Signal::KILL, random.millis(0, 2500)).await,
        Fault::FreezeLong => freeze(node, random.millis(5500, 8000)).await,
        Fault::FreezeShort => freeze(node, random.millis(50, 2000)).await,
        Fault::Terminate => {
            for _ in 0..random.between(1, 5) {
                terminate(cluster, random.between(1, 100)).await;
                random.pause(0, 300).await;
            }
        }
        Fault::Crash => crash(cluster, Signal::QUIT, random.millis(0, 2500)).await,
        Fault::CrashLong => crash(cluster, Signal::QUIT, random.millis(8000, 11_000)).await,
        Fault::CutAfterCommit => cut_commits(cluster, Cut::AfterCommit, random).await,
        Fault::CutBeforeCommit => cut_commits(cluster, Cut::BeforeCommit, random).await,
        Fault::CutAll => node.proxy.cut_all(),
        Fault::Forgotten => node.proxy.forget_all(),
        Fault::Slow => bad_weather(cluster, FaultPlan::Slow(random.millis(10, 150)), random).await,
        Fault::Hole => bad_weather(cluster, FaultPlan::Hole, random).await,
        Fault::Exhaust => exhaust(cluster, random.millis(1000, 2500)).await,
        Fault::Clock => jump(node, random).await,
        // Injected by the caller of this function.
        Fault::Two | Fault::Revocation | Fault::Certificates => {}
    }
}

async fn kill(cluster: Arc<Cluster>, number: usize, away: Duration) {
    cluster.nodes[number].kill();
    tokio::time::sleep(away).await;
    tokio::task::spawn_blocking(move || cluster.nodes[number].restart()).await.unwrap();
}

async fn freeze(node: &Node, time: Duration) {
    node.freeze(true);
    tokio::time::sleep(time).await;
    node.freeze(false);
}

async fn crash(cluster: &Cluster, signal: Signal, away: Duration) {
    cluster.crash_postgres(signal).await;
    tokio::time::sleep(away).await;
    cluster.restart_postgres().await;
}

/// Cuts a few commits on random instances.
async fn cut_commits(cluster: &Cluster, cut: Cut, random: &mut Random) {
    for _ in 0..random.between(1, 4) {
        let count = u32::try_from(random.between(1, 3)).unwrap();
        cluster.nodes[random.index(cluster.nodes.len())].proxy.cut_commits(cut, count);
        random.pause(50, 300).await;
    }
    cluster.nodes.iter().for_each(|node| node.proxy.cut_commits(cut, 0));
}

/// Applies a plan to the proxy of one instance, or of all.
async fn bad_weather(cluster: &Cluster, weather: FaultPlan, random: &mut Random) {
    let struck = match random.percent(30) {
        true => &cluster.nodes[..],
        false => std::slice::from_ref(&cluster.nodes[random.index(cluster.nodes.len())]),
    };
    struck.iter().for_each(|node| node.proxy.set_fault_plan(weather));
    random.pause(500, 2500).await;
    struck.iter().for_each(|node| node.proxy.set_fault_plan(FaultPlan::Fair));
}

/// Ends each connection of the service with a probability of `percent`.
async fn terminate(cluster: &Cluster, percent: i64) {
    let Ok(mut admin) = cluster.connect().await else { return };
    let _ = terminate_on(&mut admin, percent).await;
}

async fn terminate_on(admin: &mut PgConnection, percent: i64) -> Result<(), sqlx::Error> {
    sqlx::query(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE application_name = 'linkis-rm' AND random() * 100 < $1",
    )
    .bind(percent)
    .execute(admin)
    .await?;
    Ok(())
}

/// Sets the clock of an instance ahead or back a few times, and then right.
async fn jump(node: &Node, random: &mut Random) {
    let Some(clock) = &node.clock else { return };
    for _ in 0..random.between(1, 4) {
        clock.set(random.between(-2 * 86_400, 2 * 86_400));
        random.pause(200, 1500).await;
    }
    clock.set(0);
}

/// Ends the connections of the service and occupies all connections of the database for `time`.
async fn exhaust(cluster: &Cluster, time: Duration) {
    let end = Instant::now() + time;
    let Ok(mut admin) = cluster.connect().await else { return };
    let mut held = Vec::new();
    while Instant::now() < end {
        while held.len() < CONNECTIONS_MAX
            && let Ok(connection) = cluster.connect().await
        {
            held.push(connection);
        }
        let _ = terminate_on(&mut admin, 100).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
