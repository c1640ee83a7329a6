//! `top` on terminals of two sizes: what it shows is what the overview tells, also while a trace is replayed, and it gives the terminal back.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fs::File,
    io::{Read as _, Write as _},
    process::{Child, Stdio},
    sync::{Arc, Mutex, mpsc},
    time::{Duration, Instant},
};

use linkis_rm::{
    client::{ResourceRequest, ResultResource, RmClient},
    domain::{
        limit::Rule,
        resource::{Dimension, Resource},
    },
    transport::proto::{DimensionTotals, EmState, Overview, ScopeUsage},
};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

use crate::{
    command_line::{program, terminal},
    harness::*,
};

/// How long what is awaited on a terminal may take.
const LONG: Duration = Duration::from_secs(30);

const SIZES: [(u16, u16); 2] = [(80, 24), (200, 50)];

/// `top`, on a terminal of its own.
struct Top {
    child: Child,
    terminal: File,
    chunks: mpsc::Receiver<Vec<u8>>,
    seen: String,
}

impl Top {
    fn start(address: &str, (columns, rows): (u16, u16), no_color: &str) -> Self {
        let (ours, theirs) = terminal(columns, rows);
        let end = || Stdio::from(theirs.try_clone().unwrap());
        let mut command = program(address, &["top", "--interval", "500ms"]);
        command.stdin(end()).stdout(end()).stderr(end()).env("NO_COLOR", no_color).env("TERM", "xterm");
        let child = command.spawn().unwrap();
        drop((command, theirs));
        let (sender, chunks) = mpsc::sync_channel(64);
        let mut reader = ours.try_clone().unwrap();
        std::thread::spawn(move || {
            let mut bytes = [0; 8192];
            while let Ok(read @ 1..) = reader.read(&mut bytes) {
                if sender.send(bytes[..read].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { child, terminal: ours, chunks, seen: String::new() }
    }

    /// What is found in a whole picture, as soon as there is one in which it is.
    fn until<T>(&mut self, what: &str, mut find: impl FnMut(Vec<String>) -> Option<T>) -> T {
        let deadline = Instant::now() + LONG;
        loop {
            if let Some(found) = find(self.picture()) {
                return found;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let chunk = self.chunks.recv_timeout(left);
            let chunk = chunk.unwrap_or_else(|_| panic!("{what}: {:#?}", self.picture()));
            self.seen.push_str(&String::from_utf8_lossy(&chunk));
        }
    }

    /// The lines of a picture in which this stands.
    fn until_shows(&mut self, what: &str) -> Vec<String> {
        self.until(what, |lines| lines.iter().any(|line| line.contains(what)).then_some(lines))
    }

    /// The lines of the last whole picture.
    fn picture(&self) -> Vec<String> {
        let pictures: Vec<&str> = self.seen.split("\u{1b}[H").collect();
        let whole = pictures.iter().rev().find(|picture| picture.contains("\u{1b}[J")).copied().unwrap_or_default();
        let text = |line: &str| {
            let mut pieces = line.split('\u{1b}');
            let mut text = pieces.next().unwrap_or_default().to_owned();
            for piece in pieces {
                // What stands behind a sequence, which ends with a letter.
                text.push_str(piece.split_once(|c: char| c.is_ascii_alphabetic()).map_or("", |(_, rest)| rest));
            }
            text
        };
        whole.split("\r\n").map(text).collect()
    }

    fn press(&self, keys: &str) {
        (&self.terminal).write_all(keys.as_bytes()).unwrap();
    }

    /// Ends it; answers all that was written to the terminal.
    fn quit(mut self) -> String {
        self.press("q");
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
        while let Ok(chunk) = self.chunks.recv() {
            self.seen.push_str(&String::from_utf8_lossy(&chunk));
        }
        self.seen
    }
}

/// What has to stand somewhere on the screen, by this overview.
fn expected(overview: &Overview) -> Vec<String> {
    let mut totals: BTreeMap<&str, DimensionTotals> = BTreeMap::new();
    for (dimension, some) in overview.ems.iter().flat_map(|ems| &ems.dimensions) {
        let sum = totals.entry(dimension).or_default();
        sum.used += some.used;
        sum.locked += some.locked;
        sum.total += some.total - some.protected_amount;
    }
    let shown = |dimension: &str, amount: i64| match dimension {
        // Whole ones are used here.
        "memory" if amount == 0 => "0 B".to_owned(),
        "memory" => format!("{}.0 GB", amount / GB),
        _ => amount.to_string(),
    };
    let amounts = totals.iter().map(|(dimension, sum)| {
        let full = (sum.used + sum.locked) * 100 / sum.total;
        let [used, locked, total] = [sum.used, sum.locked, sum.total].map(|amount| shown(dimension, amount));
        format!(" {full}% {used} used, {locked} locked of {total}")
    });
    let (tickets, line) = (overview.tickets.clone().unwrap_or_default(), overview.line.unwrap_or_default());
    let rates = overview.throughput.unwrap_or_default();
    let mut states: BTreeMap<i32, i64> = BTreeMap::new();
    for ems in &overview.ems {
        *states.entry(ems.state).or_default() += ems.ems;
    }
    let word = |state: i32| match EmState::try_from(state).unwrap() {
        EmState::Draining => "drained".to_owned(),
        state => state.as_str_name().replace("EM_STATE_", "").to_lowercase(),
    };
    let count: i64 = states.values().sum();
    let states: Vec<_> = states.into_iter().map(|(state, count)| format!("{count} {}", word(state))).collect();
    let others = [
        format!("EMs      {count}: {}", states.join(", ")),
        format!("tickets  {} used, {} locked   waiting {}", tickets.used, tickets.locked, line.waiting),
        format!("rates    {:.1} grants/s  {:.1} refusals/s", rates.grants_per_second, rates.refusals_per_second),
    ];
    amounts.chain(others).chain(overview.scopes.iter().flat_map(|scopes| scopes.fullest.first()).map(fullest)).collect()
}

/// What stands behind the bar of a scope with one maximum.
fn fullest(scope: &ScopeUsage) -> String {
    let (dimension, max) = scope.limits[0].max.first_key_value().unwrap();
    let of = |amounts: &BTreeMap<String, i64>| amounts.get(dimension).copied().unwrap_or(0);
    let held = of(&scope.used) + of(&scope.locked);
    let name = dimension.strip_prefix("special.").unwrap_or(dimension);
    format!("] {:>3}% {name} {held} of {max}", held * 100 / max)
}

fn shows(lines: &[String], overview: &Overview) -> bool {
    expected(overview).iter().all(|told| lines.iter().any(|line| line.contains(told)))
}

/// Overviews, by the second that they are of, as it is shown.
type Known = Arc<Mutex<BTreeMap<String, Vec<Overview>>>>;

/// Asks for them so often that none is missed, as long as there is time for it.
async fn follow(client: RmClient, known: Known) {
    loop {
        let overview = client.overview().await.unwrap();
        let at = OffsetDateTime::from_unix_timestamp(overview.snapshot_time.unwrap().seconds).unwrap();
        known.lock().unwrap().entry(at.format(&Rfc3339).unwrap()).or_default().push(overview);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

impl Top {
    /// Waits until what is shown of a second is what was told of it; answers which second that is, the overview, and the picture. Seconds of
    /// which nobody else was told are nothing to compare with.
    fn agrees(&mut self, known: &Known, before: &BTreeSet<String>) -> (String, Overview, Vec<String>) {
        self.until("what an overview tells", |lines| {
            let known = known.lock().unwrap();
            let mut others = known.iter().filter(|(second, _)| !before.contains(*second));
            let (second, overviews) = others.find(|(second, _)| lines[0].contains(*second))?;
            let overview = overviews.iter().find(|overview| shows(&lines, overview))?;
            Some((second.clone(), overview.clone(), lines))
        })
    }
}

fn assert_fits(lines: &[String], (columns, rows): (u16, u16)) {
    assert_eq!(lines.len(), usize::from(rows));
    assert!(lines.iter().all(|line| line.chars().count() <= usize::from(columns)), "{lines:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn top_shows_overview_and_restores_terminal() {
    let (_database, rm) = start().await;
    for (host, gb) in [("host1", 64), ("host2", 8)] {
        rm.client.register(registration(em(host), load(gb, 16, 20))).await.unwrap();
    }
    rm.client.set_limit(&each_user(2)).await.unwrap();
    rm.client.drain(&em("host2"), "new disks").await.unwrap();
    let used = rm.client.request_resource(&request(&em("host1"), "hadoop", load(4, 2, 1))).await.granted();
    rm.client.resource_inited(&inited(&used, "hadoop", None)).await.unwrap();
    rm.client.request_resource(&request(&em("host1"), "alice", load(30, 4, 1))).await.granted();
    // Which are the fullest is worked out every few seconds.
    let known = || async { rm.client.overview().await.unwrap().scopes.is_some_and(|scopes| scopes.fullest.len() == 2) };
    eventually("the fullest scopes are known", LONG, known).await;
    let known = Known::default();
    let _asking = AbortOnDropHandle::new(tokio::spawn(follow(rm.client.clone(), known.clone())));
    let sizes = SIZES.into_iter().flat_map(|size| ["", "1"].map(|no_color| (size, no_color)));
    for (size, no_color) in sizes {
        let mut top = Top::start(&rm.address, size, no_color);
        let (_, overview, lines) = top.agrees(&known, &BTreeSet::new());
        assert_eq!(overview.tickets.map(|tickets| (tickets.used, tickets.locked)), Some((1, 1)));
        assert_fits(&lines, size);
        let lines = top.until_shows("HOSTS 1-2 of 2, by fullness");
        let scopes = lines.iter().position(|line| line == "FULLEST SCOPES").expect("they are known") + 1;
        assert!(lines[scopes].starts_with("user=") && lines[scopes].ends_with(" 50% instances 1 of 2"), "{lines:#?}");
        top.press("s");
        let lines = top.until_shows("HOSTS 1-2 of 2, by name");
        let first = lines.iter().position(|line| line.starts_with("HOSTS")).unwrap() + 1;
        assert!(lines[first].starts_with("host1:9102 "), "{lines:#?}");
        let seen = top.quit();
        assert_eq!(seen.contains("\u{1b}[32m"), no_color.is_empty(), "colours");
        assert!(seen.ends_with("\u{1b}[?25h\u{1b}[?1049l"), "the screen of before is back");
    }
    assert_eq!(program(&rm.address, &["top"]).output().unwrap().status.code(), Some(64), "no terminal");
}

/// The columns of a file of the trace.
fn trace<const N: usize>(text: &'static str, columns: [&str; N]) -> Vec<[&'static str; N]> {
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().unwrap().split(',').collect();
    let places = columns.map(|column| names.iter().position(|name| *name == column).unwrap());
    lines.map(|line| line.split(',').collect::<Vec<_>>()).map(|line| places.map(|place| line[place])).collect()
}

/// Thousandths of cores and of GPUs, and memory in MiB; nothing where there is none.
fn amounts(cpu: &str, memory: &str, gpus: i64) -> Resource {
    let named = [("cpu_milli", cpu.parse().unwrap()), ("memory_mib", memory.parse().unwrap()), ("gpu_milli", gpus)];
    let named = named.into_iter().filter(|(name, amount)| *name != "gpu_milli" || *amount > 0);
    Resource::special(named.map(|(name, amount)| (name.to_owned(), amount)).collect()).unwrap()
}

/// The nodes of the openb trace register.
async fn register_nodes(client: &RmClient) {
    let text = include_str!("../../examples/openb/data/openb_node_list_all_node.csv");
    let mut calls = JoinSet::new();
    for [name, cpu, memory, gpus] in trace(text, ["sn", "cpu_milli", "memory_mib", "gpu"]) {
        let node = registration(em(name), amounts(cpu, memory, 1000 * gpus.parse::<i64>().unwrap()));
        let client = client.clone();
        calls.spawn(async move { client.register(node).await.unwrap() });
        if calls.len() == 64 {
            calls.join_next().await.unwrap().unwrap();
        }
    }
    calls.join_all().await;
}

/// Its tasks ask for resources wherever they are, most of them use them, and the oldest give them back, until the trace is over.
async fn replay(client: RmClient) {
    let text = include_str!("../../examples/openb/data/openb_pod_list_default.csv");
    let mut live = VecDeque::new();
    for [name, cpu, memory, gpus, share] in trace(text, ["name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"]) {
        let need = amounts(cpu, memory, gpus.parse::<i64>().unwrap() * share.parse::<i64>().unwrap());
        let user = format!("user{}", &name[name.len() - 1..]);
        let task = ResourceRequest { em: None, ..request(&em("any"), &user, need) };
        let ResultResource::Available(grant) = client.request_resource(&task).await.unwrap() else { continue };
        if live.len() % 3 > 0 {
            client.resource_inited(&inited(&grant, &user, None)).await.unwrap();
        }
        live.push_back((grant, user));
        if live.len() > 200
            && let Some((grant, user)) = live.pop_front()
        {
            client.resource_released(&release(&grant, &user)).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn while_a_trace_is_replayed_top_shows_what_the_overview_tells() {
    let (_database, rm) = start().await;
    register_nodes(&rm.client).await;
    let cpu: BTreeMap<Dimension, i64> = [(Dimension::from("cpu_milli"), 600_000)].into();
    rm.client.set_limit(&Rule { max: cpu, ..each_user(1) }).await.unwrap();
    let known = Known::default();
    let _asking = AbortOnDropHandle::new(tokio::spawn(follow(rm.client.clone(), known.clone())));
    let mut tops = SIZES.map(|size| Top::start(&rm.address, size, ""));
    let replaying = AbortOnDropHandle::new(tokio::spawn(replay(rm.client.clone())));
    let mut tickets = BTreeSet::new();
    for (top, size) in tops.iter_mut().zip(SIZES) {
        top.until_shows("EMs      1523: ");
        let mut agreed = BTreeSet::new();
        while agreed.len() < 4 {
            let (second, overview, lines) = top.agrees(&known, &agreed);
            assert_fits(&lines, size);
            tickets.extend(overview.tickets.map(|tickets| tickets.used));
            agreed.insert(second);
        }
        top.until_shows("FULLEST SCOPES");
    }
    assert!(tickets.len() > 2, "the trace goes on meanwhile: {tickets:?}");
    drop(replaying);
    for top in tops {
        top.quit();
    }
}
