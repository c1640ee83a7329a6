//! Where many committers would stand in each other's way, on a database with more cores than there are here: by simulation, from what
//! their steps cost by the figures in `docs/MEASURING.md`.
//!
//! Callers ask, hear, and ask again, each time for an EM at random; each committer takes all that waits for its EMs, up to 512, and goes
//! through the steps of a batch. What it waits for besides its own steps: one of the database's cores, whoever holds users or scopes that it
//! wants, whoever commits with a notification, and the disk, which writes the log for all who wait for it at once.

mod cells;

use std::{
    cmp::Ordering,
    collections::{BTreeSet, BinaryHeap, VecDeque},
    fmt::Write as _,
};

use crate::{committers::Sharing, random::Random, report::thousands};

/// Of an instance's callers, as many as are judged at once.
const CALLERS: usize = 4096;
const BATCH_MAX: usize = 512;
const USERS: u64 = 1000;
const COMMITTERS: [usize; 5] = [1, 2, 4, 8, 16];
const SECONDS: f64 = 4.0;

/// What the steps cost, in microseconds. Those of a batch, and of each operation in it.
struct Costs {
    /// From one machine to the other and back, four times or five in a batch.
    round_trip: f64,
    /// The database's work until everything is locked and read.
    read: (f64, f64),
    /// The same for scopes.
    scopes: (f64, f64),
    /// Deciding, and writing.
    write: (f64, f64),
    /// The same for scopes, each of which is another's row.
    write_scopes: f64,
    /// Until the disk has the log.
    flush: f64,
    /// From the commit until a caller has heard of it, and asks again.
    heard: f64,
}

/// So that PostgreSQL works 0.6 ms for a grant alone, and for each of 256 in a batch 30 µs, 48 where each user has a limit; and besides, a way
/// between machines, and a disk, as are usual.
const COSTS: Costs = Costs {
    round_trip: 100.0,
    read: (250.0, 6.0),
    scopes: (100.0, 7.0),
    write: (350.0, 22.0),
    write_scopes: 12.0,
    flush: 900.0,
    heard: 500.0,
};

/// A setting that is simulated.
#[derive(Clone, Copy)]
struct Setting {
    cores: usize,
    committers: usize,
    sharing: Sharing,
    /// Whether somebody waits in line elsewhere, so that every commit notifies.
    notifies: bool,
}

/// What is told of each number of committers.
pub(crate) fn text() -> String {
    let columns = [
        ("nothing", Sharing::Nothing, false),
        ("notifying", Sharing::Nothing, true),
        ("users", Sharing::Users, false),
        ("a creator", Sharing::Creator, false),
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
    // Writing to a string does not fail.
    let _ = write!(text, "\n\n{}", cells::text());
    text
}

/// What came of it.
struct Found {
    per_second: f64,
    /// For what batches waited most beside their own steps, and what part of their time.
    wall: (&'static str, f64),
}

impl Found {
    fn text(&self) -> String {
        let (what, part) = self.wall;
        format!("{} ({what} {:.0} %)", thousands(self.per_second), 100.0 * part)
    }
}

/// Where a committer is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Begin,
    Read,
    Lock,
    Write,
    Commit,
    End,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    Go(usize, Step),
    /// So many callers ask again.
    Ask(usize),
}

/// The earliest is the greatest.
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
    /// Since when it waits for what others hold.
    since: f64,
}

/// For what batches waited, in microseconds of all of them.
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
    /// When each core is free.
    cores: Vec<f64>,
    held: BTreeSet<u64>,
    /// Who waits for what is held, the first first.
    queue: VecDeque<usize>,
    notify_free: f64,
    /// When the last writing of the log that is planned begins.
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

    fn run(mut self) -> Found {
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
        Found { per_second: self.done as f64 / SECONDS, wall: (most.0, most.1 / all) }
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
                self.at(now, Event::Go(number, Step::Begin));
            }
        }
    }

    fn go(&mut self, now: f64, number: usize, step: Step) {
        let operations = self.committers[number].batch as f64;
        let of = |(batch, each): (f64, f64)| batch + each * operations;
        let is_counted = self.setting.sharing != Sharing::Nothing;
        match step {
            Step::Begin => self.begin(now, number),
            Step::Read => {
                let scopes = if is_counted { of(COSTS.scopes) + COSTS.round_trip } else { 0.0 };
                let read = self.work(now + 2.0 * COSTS.round_trip, of(COSTS.read) + scopes);
                let next = if self.setting.sharing == Sharing::Creator { Step::Lock } else { Step::Write };
                self.at(read, Event::Go(number, next));
            }
            Step::Lock => self.lock(now, number),
            Step::Write => {
                let scopes =
                    if is_counted { COSTS.write_scopes * self.committers[number].wants.len() as f64 } else { 0.0 };
                let written = self.work(now + COSTS.round_trip, of(COSTS.write) + scopes);
                self.at(written, Event::Go(number, Step::Commit));
            }
            Step::Commit => {
                let begins = if self.setting.notifies { self.notify_free.max(now) } else { now };
                let done = self.flush(begins + COSTS.round_trip);
                self.waits.notify += begins - now;
                self.waits.disk += done - begins - COSTS.round_trip;
                if self.setting.notifies {
                    self.notify_free = done;
                }
                self.at(done, Event::Go(number, Step::End));
            }
            Step::End => self.end(now, number),
        }
    }

    fn begin(&mut self, now: f64, number: usize) {
        let committer = &mut self.committers[number];
        committer.batch = committer.waiting.min(BATCH_MAX);
        committer.waiting -= committer.batch;
        let users = match self.setting.sharing {
            Sharing::Nothing => 0,
            Sharing::Users => USERS,
            Sharing::Creator => 1,
        };
        let (random, wants) = (&mut self.random, 0..if users > 0 { committer.batch } else { 0 });
        committer.wants = wants.map(|_| random.up_to(users)).collect();
        // Users have resource locks, which come first; scopes' rows are locked when all else is read.
        let next = if self.setting.sharing == Sharing::Users { Step::Lock } else { Step::Read };
        self.at(now, Event::Go(number, next));
    }

    fn lock(&mut self, now: f64, number: usize) {
        self.committers[number].since = now;
        self.queue.push_back(number);
        self.serve(now);
    }

    /// Lets those go on who want nothing that is held, nor what somebody before them wants: he has locked a part of it.
    fn serve(&mut self, now: f64) {
        let mut wanted = BTreeSet::new();
        for number in std::mem::take(&mut self.queue) {
            let committer = &self.committers[number];
            let is_free = committer.wants.is_disjoint(&self.held) && committer.wants.is_disjoint(&wanted);
            if is_free {
                self.waits.shared += now - committer.since;
                self.held.extend(&committer.wants);
                let next = if self.setting.sharing == Sharing::Users { Step::Read } else { Step::Write };
                self.at(now, Event::Go(number, next));
            } else {
                wanted.extend(&committer.wants);
                self.queue.push_back(number);
            }
        }
    }

    /// On the core that is free first.
    fn work(&mut self, now: f64, takes: f64) -> f64 {
        let Some(core) = self.cores.iter_mut().min_by(|a, b| a.total_cmp(b)) else { return now + takes };
        let begins = core.max(now);
        self.waits.cores += begins - now;
        *core = begins + takes;
        *core
    }

    /// With whoever else waits for the disk.
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
            self.at(now, Event::Go(number, Step::Begin));
        }
        self.serve(now);
    }
}
