//! Simulation of many committers on a database with more cores than this machine has. The steps cost what
//! `docs/MEASURING.md` states.
//!
//! Each caller repeats its request for a random EM after the reply. Each committer takes all operations that wait for
//! its EMs, up to 512, and performs the steps of a batch. A batch also waits for a database core and for committers
//! that lock the same users or scopes. It waits for commits with a notification, and for the disk, which writes the log
//! for all waiting commits together.

use std::{
    cmp::Ordering,
    collections::{BTreeSet, BinaryHeap, VecDeque},
    fmt::Write as _,
};

use crate::{committers::SharedScope, random::Random, report::thousands};

/// Number of callers: the default bound of concurrent requests of an instance.
const CALLERS: usize = 4096;
const BATCH_MAX: usize = 512;
const USERS: u64 = 1000;
const COMMITTERS: [usize; 5] = [1, 2, 4, 8, 16];
const SECONDS: f64 = 4.0;

/// Cost of the steps in microseconds. A pair is the cost of a batch and of each operation in it.
struct Costs {
    /// Network round trip; a batch has four or five.
    round_trip: f64,
    /// Work of the database until all rows are locked and read.
    read: (f64, f64),
    /// Additional read work with scopes.
    scopes: (f64, f64),
    /// Decision and writes.
    write: (f64, f64),
    /// Additional write work per scope row.
    write_scopes: f64,
    /// Duration of a log write.
    flush: f64,
    /// Time from the commit to the caller's next request.
    heard: f64,
}

/// With these costs PostgreSQL works 0.6 ms for a single grant. In a batch of 256, a grant costs 30 µs, or 48 µs with a
/// limit per user. Network and disk have usual values.
const COSTS: Costs = Costs {
    round_trip: 100.0,
    read: (250.0, 6.0),
    scopes: (100.0, 7.0),
    write: (350.0, 22.0),
    write_scopes: 12.0,
    flush: 900.0,
    heard: 500.0,
};

/// Setting of a simulation.
#[derive(Clone, Copy)]
struct Setting {
    cores: usize,
    committers: usize,
    sharing: SharedScope,
    /// Whether a request waits elsewhere, so that every commit notifies.
    notifies: bool,
}

/// Returns a table of the rates by number of committers.
pub(crate) fn text() -> String {
    let columns = [
        ("nothing", SharedScope::Nothing, false),
        ("notifying", SharedScope::Nothing, true),
        ("users", SharedScope::Users, false),
        ("a creator", SharedScope::Creator, false),
    ];
    let mut text = format!(
        "grants/s by simulation, {CALLERS} callers, 100 EMs and more; batches share\n{:>6} {:>10}",
        "cores", "committers"
    );
    for (name, ..) in columns {
        // Writing to a string does not fail.
        let _ = write!(text, " {name:>24}");
    }
    for cores in [2, 8, 32] {
        for committers in COMMITTERS {
            let _ = write!(text, "\n{cores:>6} {committers:>10}");
            for (_, sharing, notifies) in columns {
                let found = Simulation::new(Setting { cores, committers, sharing, notifies }).run();
                let _ = write!(text, " {:>24}", found.text());
            }
        }
    }
    text
}

/// Result of a simulation.
struct SimulationResult {
    per_second: f64,
    /// Largest cause of waiting, with its fraction of the batches' time.
    wall: (&'static str, f64),
}

impl SimulationResult {
    fn text(&self) -> String {
        let (what, part) = self.wall;
        format!("{} ({what} {:.0} %)", thousands(self.per_second), 100.0 * part)
    }
}

/// Step of a committer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum CommitterStage {
    Begin,
    Read,
    Lock,
    Write,
    Commit,
    End,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    Go(usize, CommitterStage),
    /// This number of callers repeat their requests.
    Ask(usize),
}

/// Event with its time. The earliest is the greatest.
#[derive(PartialEq)]
struct At(f64, Event);

impl Eq for At {}

impl Ord for At {
    fn cmp(&self, other: &Self) -> Ordering {
        other.0.total_cmp(&self.0)
    }
}

impl PartialOrd for At {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[derive(Default)]
struct Committer {
    waiting: usize,
    batch: usize,
    busy: bool,
    wants: BTreeSet<u64>,
    /// Start of the wait for rows that other committers lock.
    since: f64,
}

/// Waiting times of all batches by cause, in microseconds.
#[derive(Default)]
struct Waits {
    cores: f64,
    shared: f64,
    notify: f64,
    disk: f64,
}

struct Simulation {
    setting: Setting,
    random: Random,
    events: BinaryHeap<At>,
    committers: Vec<Committer>,
    /// Time at which each core is free.
    cores: Vec<f64>,
    held: BTreeSet<u64>,
    /// Committers that wait for locked rows, in order.
    queue: VecDeque<usize>,
    notify_free: f64,
    /// Start of the last planned log write.
    flush_begins: f64,
    waits: Waits,
    done: usize,
}

impl Simulation {
    fn new(setting: Setting) -> Self {
        let committers = (0..setting.committers).map(|_| Committer::default()).collect();
        let (cores, events) = (vec![0.0; setting.cores], BinaryHeap::from([At(0.0, Event::Ask(CALLERS))]));
        let (random, held, queue, waits) = (Random::new(7), BTreeSet::new(), VecDeque::new(), Waits::default());
        let (notify_free, flush_begins, done) = (0.0, -COSTS.flush, 0);
        Self { setting, random, events, committers, cores, held, queue, notify_free, flush_begins, waits, done }
    }

    fn run(mut self) -> SimulationResult {
        let end = SECONDS * 1e6;
        while let Some(At(now, event)) = self.events.pop().filter(|At(now, _)| *now < end) {
            match event {
                Event::Ask(callers) => self.ask(now, callers),
                Event::Go(committer, step) => self.go(now, committer, step),
            }
        }
        let all = end * self.setting.committers as f64;
        let Waits { cores, shared, notify, disk } = self.waits;
        let waits = [("cores", cores), ("rows", shared), ("notify", notify), ("disk", disk)];
        let most = waits.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or(("", 0.0));
        SimulationResult { per_second: self.done as f64 / SECONDS, wall: (most.0, most.1 / all) }
    }

    fn at(&mut self, time: f64, event: Event) {
        self.events.push(At(time, event));
    }

    fn ask(&mut self, now: f64, callers: usize) {
        for _ in 0..callers {
            let number = self.random.up_to(self.committers.len() as u64) as usize - 1;
            self.committers[number].waiting += 1;
        }
        for number in 0..self.committers.len() {
            let committer = &mut self.committers[number];
            if committer.waiting > 0 && !committer.busy {
                committer.busy = true;
                self.at(now, Event::Go(number, CommitterStage::Begin));
            }
        }
    }

    fn go(&mut self, now: f64, number: usize, step: CommitterStage) {
        let operations = self.committers[number].batch as f64;
        let of = |(batch, each): (f64, f64)| batch + each * operations;
        let is_counted = self.setting.sharing != SharedScope::Nothing;
        match step {
            CommitterStage::Begin => self.begin(now, number),
            CommitterStage::Read => {
                let scopes = if is_counted { of(COSTS.scopes) + COSTS.round_trip } else { 0.0 };
                let read = self.work(now + 2.0 * COSTS.round_trip, of(COSTS.read) + scopes);
                let next = if self.setting.sharing == SharedScope::Creator {
                    CommitterStage::Lock
                } else {
                    CommitterStage::Write
                };
                self.at(read, Event::Go(number, next));
            }
            CommitterStage::Lock => self.lock(now, number),
            CommitterStage::Write => {
                let scopes =
                    if is_counted { COSTS.write_scopes * self.committers[number].wants.len() as f64 } else { 0.0 };
                let written = self.work(now + COSTS.round_trip, of(COSTS.write) + scopes);
                self.at(written, Event::Go(number, CommitterStage::Commit));
            }
            CommitterStage::Commit => {
                let begins = if self.setting.notifies { self.notify_free.max(now) } else { now };
                let done = self.flush(begins + COSTS.round_trip);
                self.waits.notify += begins - now;
                self.waits.disk += done - begins - COSTS.round_trip;
                if self.setting.notifies {
                    self.notify_free = done;
                }
                self.at(done, Event::Go(number, CommitterStage::End));
            }
            CommitterStage::End => self.end(now, number),
        }
    }

    fn begin(&mut self, now: f64, number: usize) {
        let committer = &mut self.committers[number];
        committer.batch = committer.waiting.min(BATCH_MAX);
        committer.waiting -= committer.batch;
        let users = match self.setting.sharing {
            SharedScope::Nothing => 0,
            SharedScope::Users => USERS,
            SharedScope::Creator => 1,
        };
        let (random, wants) = (&mut self.random, 0..if users > 0 { committer.batch } else { 0 });
        committer.wants = wants.map(|_| random.up_to(users)).collect();
        // Resource locks of users are acquired first; scope rows are locked after all reads.
        let next = if self.setting.sharing == SharedScope::Users { CommitterStage::Lock } else { CommitterStage::Read };
        self.at(now, Event::Go(number, next));
    }

    fn lock(&mut self, now: f64, number: usize) {
        self.committers[number].since = now;
        self.queue.push_back(number);
        self.serve(now);
    }

    /// Continues every committer whose rows are neither locked nor wanted by an earlier waiter, because that one
    /// already locks a part of them.
    fn serve(&mut self, now: f64) {
        let mut wanted = BTreeSet::new();
        for number in std::mem::take(&mut self.queue) {
            let committer = &self.committers[number];
            let is_free = committer.wants.is_disjoint(&self.held) && committer.wants.is_disjoint(&wanted);
            if is_free {
                self.waits.shared += now - committer.since;
                self.held.extend(&committer.wants);
                let next = if self.setting.sharing == SharedScope::Users {
                    CommitterStage::Read
                } else {
                    CommitterStage::Write
                };
                self.at(now, Event::Go(number, next));
            } else {
                wanted.extend(&committer.wants);
                self.queue.push_back(number);
            }
        }
    }

    /// Uses the core that is free first. Returns the end of the work.
    fn work(&mut self, now: f64, takes: f64) -> f64 {
        let Some(core) = self.cores.iter_mut().min_by(|a, b| a.total_cmp(b)) else { return now + takes };
        let begins = core.max(now);
        self.waits.cores += begins - now;
        *core = begins + takes;
        *core
    }

    /// Joins the next log write. Returns its end.
    fn flush(&mut self, now: f64) -> f64 {
        if now > self.flush_begins {
            self.flush_begins = now.max(self.flush_begins + COSTS.flush);
        }
        self.flush_begins + COSTS.flush
    }

    fn end(&mut self, now: f64, number: usize) {
        let committer = &mut self.committers[number];
        let (answered, wants) = (std::mem::take(&mut committer.batch), std::mem::take(&mut committer.wants));
        self.done += answered;
        self.held = self.held.difference(&wants).copied().collect();
        self.at(now + COSTS.heard, Event::Ask(answered));
        let committer = &mut self.committers[number];
        committer.busy = committer.waiting > 0;
        if committer.busy {
            self.at(now, Event::Go(number, CommitterStage::Begin));
        }
        self.serve(now);
    }
}
