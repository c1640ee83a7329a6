//! `top` on terminals of two sizes: it shows the overview, and restores the terminal at its end.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read as _, Write as _},
    process::{Child, Stdio},
    sync::{Arc, Mutex, mpsc},
    time::{Duration, Instant},
};

use rm_client::RmClient;
use rm_proto::v1::{DimensionTotals, EmState, Overview, ScopeUsage};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    command_line::{program, terminal},
    harness::*,
};

const SIZES: [(u16, u16); 2] = [(80, 24), (200, 50)];

/// `top` on a terminal.
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

    /// Waits for a complete picture in which `find` has a result.
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

    /// Waits for a picture with this text, and returns its lines.
    fn until_shows(&mut self, what: &str) -> Vec<String> {
        self.until(what, |lines| lines.iter().any(|line| line.contains(what)).then_some(lines))
    }

    /// Returns the lines of the last complete picture.
    fn picture(&self) -> Vec<String> {
        let pictures: Vec<&str> = self.seen.split("\u{1b}[H").collect();
        let whole = pictures.iter().rev().find(|picture| picture.contains("\u{1b}[J")).copied().unwrap_or_default();
        let text = |line: &str| {
            let mut pieces = line.split('\u{1b}');
            let mut text = pieces.next().unwrap_or_default().to_owned();
            for piece in pieces {
                // Text behind an escape sequence, which ends with a letter.
                text.push_str(piece.split_once(|c: char| c.is_ascii_alphabetic()).map_or("", |(_, rest)| rest));
            }
            text
        };
        whole.split("\r\n").map(text).collect()
    }

    fn press(&self, keys: &str) {
        (&self.terminal).write_all(keys.as_bytes()).unwrap();
    }

    /// Ends `top`, and returns all output.
    fn quit(mut self) -> String {
        self.press("q");
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
        while let Ok(chunk) = self.chunks.recv() {
            self.seen.push_str(&String::from_utf8_lossy(&chunk));
        }
        std::mem::take(&mut self.seen)
    }
}

impl Drop for Top {
    fn drop(&mut self) {
        // The process has ended, unless the test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the expected texts of an overview.
fn expected(overview: &Overview) -> Vec<String> {
    let mut totals: BTreeMap<&str, DimensionTotals> = BTreeMap::new();
    for (dimension, some) in overview.ems.iter().flat_map(|ems| &ems.dimensions) {
        let sum = totals.entry(dimension).or_default();
        sum.used += some.used;
        sum.locked += some.locked;
        sum.total += some.total - some.protected_amount;
    }
    let shown = |dimension: &str, amount: i64| match dimension {
        // The test uses whole gigabytes.
        "memory" if amount == 0 => "0 B".to_owned(),
        "memory" => format!("{} GB", amount / GB),
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

/// Text behind the bar of a scope with one maximum.
fn fullest(scope: &ScopeUsage) -> String {
    let (dimension, max) = scope.limits[0].max.first_key_value().unwrap();
    let of = |amounts: &BTreeMap<String, i64>| amounts.get(dimension).copied().unwrap_or(0);
    let held = of(&scope.used) + of(&scope.locked);
    let name = dimension.strip_prefix("special.").unwrap_or(dimension);
    format!("] {:>3}% {name} {held} of {max}", held * 100 / max)
}

fn shows(lines: &[String], overview: &Overview) -> bool {
    expected(overview).iter().all(|got| lines.iter().any(|line| line.contains(got)))
}

/// Overviews by their second, as `top` shows it.
type Known = Arc<Mutex<BTreeMap<String, Vec<Overview>>>>;

/// Requests overviews so often that none is missed, if the machine is fast enough.
async fn follow(client: RmClient, known: Known) {
    loop {
        let overview = client.overview().await.unwrap();
        let at = OffsetDateTime::from_unix_timestamp(overview.snapshot_time.unwrap().seconds).unwrap();
        known.lock().unwrap().entry(at.format(&Rfc3339).unwrap()).or_default().push(overview);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

impl Top {
    /// Waits until the picture equals an overview of the same second with one used ticket and this many locked tickets. Returns the
    /// picture. Seconds without a known overview are skipped.
    fn agrees(&mut self, known: &Known, locked: i64) -> Vec<String> {
        self.until("the picture of an overview", |lines| {
            let known = known.lock().unwrap();
            let (_, overviews) = known.iter().find(|(second, _)| lines[0].contains(*second))?;
            let tickets = |overview: &Overview| overview.tickets.as_ref().map(|sums| (sums.used, sums.locked));
            let mut equal = overviews.iter().filter(|overview| tickets(overview) == Some((1, locked)));
            equal.any(|overview| shows(&lines, overview)).then_some(lines)
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
    // The fullest scopes are computed every few seconds.
    let known = || async { rm.client.overview().await.unwrap().scopes.is_some_and(|scopes| scopes.fullest.len() == 2) };
    eventually("the fullest scopes are known", LONG, known).await;
    let known = Known::default();
    let _asking = AbortOnDropHandle::new(tokio::spawn(follow(rm.client.clone(), known.clone())));
    let sizes = SIZES.into_iter().flat_map(|size| ["", "1"].map(|no_color| (size, no_color)));
    for (size, no_color) in sizes {
        let mut top = Top::start(&rm.address, size, no_color);
        // An earlier overview includes the ticket of the previous terminal size.
        assert_fits(&top.agrees(&known, 1), size);
        let grant = rm.client.request_resource(&request(&em("host1"), "bob", load(1, 1, 1))).await.granted();
        top.agrees(&known, 2);
        rm.client.resource_released(&release(&grant, "bob")).await.unwrap();
        let lines = top.until_shows("EMS 1-2 of 2, by fullness");
        let scopes = lines.iter().position(|line| line == "FULLEST SCOPES").expect("they are known") + 1;
        assert!(lines[scopes].starts_with("user=") && lines[scopes].ends_with(" 50% instances 1 of 2"), "{lines:#?}");
        top.press("s");
        let lines = top.until_shows("EMS 1-2 of 2, by name");
        let first = lines.iter().position(|line| line.starts_with("EMS")).unwrap() + 1;
        assert!(lines[first].starts_with("host1:9102 "), "{lines:#?}");
        let seen = top.quit();
        assert_eq!(seen.contains("\u{1b}[32m"), no_color.is_empty(), "colours");
        assert!(seen.ends_with("\u{1b}[?25h\u{1b}[?1049l"), "the screen of before is back");
    }
    assert_eq!(program(&rm.address, &["top"]).output().unwrap().status.code(), Some(64), "no terminal");
}
