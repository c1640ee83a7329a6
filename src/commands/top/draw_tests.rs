//! Tests of the rendering at usual and unusual terminal sizes.

use std::collections::BTreeMap;

use rm_proto::v1::{
    DimensionTotals, EmInstance, EmResource, EmState, EmTotals, Limit, LineTotals, LoadInstanceResource, Overview,
    Resource, ScopeTotals, ScopeUsage, Throughput, TicketTotals, WaitQueueEntry, WaitingRequest, resource::Kind,
};

use super::super::super::output::{
    terminal::TerminalSize,
    text::{is_harmful, width},
};
use super::super::state::{ClusterFeed, EmOrder, KeyPress, ViewState};
use super::{ScreenFrame, StyledLine, draw};

const HOSTILE: &str = "\u{1b}[2Jevil\u{202e}";

fn load(gb: i64, cores: i64, instances: i64) -> Option<Resource> {
    let load = LoadInstanceResource { memory: gb << 30, cores, instances };
    Some(Resource { kind: Some(Kind::LoadInstance(load)) })
}

fn em(number: i64) -> EmResource {
    let instance = if number == 3 { HOSTILE.to_owned() } else { format!("host{number:03}:9102") };
    EmResource {
        em: Some(EmInstance { application_name: "linkis-cg-engineconnmanager".into(), instance }),
        total: load(64, 16, 20),
        protected_resource: load(4, 0, 0),
        used: load(number % 50, 1, 1),
        locked: load(number % 7, 0, 1),
        silent: number == 5,
        ..Default::default()
    }
}

/// Returns a feed of 100 EMs.
fn cluster() -> ClusterFeed {
    let totals = |total, protected_amount, used, locked| DimensionTotals {
        total,
        protected_amount,
        used,
        locked,
        left: total - protected_amount - used - locked,
    };
    let dimensions = BTreeMap::from([
        ("memory".to_owned(), totals(6400 << 30, 400 << 30, 2450 << 30, 300 << 30)),
        ("cores".to_owned(), totals(1600, 0, 100, 0)),
        ("special.gpu".to_owned(), totals(8, 0, 4, 4)),
    ]);
    let of = |state: EmState, ems, dimensions| EmTotals {
        em_application_name: "linkis-cg-engineconnmanager".into(),
        state: state.into(),
        ems,
        dimensions,
    };
    let limit = Limit { max: [("instances".to_owned(), 10)].into(), name: "each user".into(), ..Default::default() };
    let scope = |user: &str, used| ScopeUsage {
        labels: [("user".to_owned(), user.to_owned())].into(),
        used: [("instances".to_owned(), used)].into(),
        limits: vec![limit.clone()],
        ..Default::default()
    };
    let overview = Overview {
        snapshot_time: Some(prost_types::Timestamp { seconds: 1_795_304_054, nanos: 0 }),
        ems: vec![of(EmState::Healthy, 99, dimensions), of(EmState::Silent, 1, BTreeMap::new())],
        tickets: Some(TicketTotals { used: 5471, locked: 12, ..Default::default() }),
        line: Some(LineTotals { waiting: 29, longest_wait: Some(prost_types::Duration { seconds: 125, nanos: 0 }) }),
        throughput: Some(Throughput { grants_per_second: 812.04, refusals_per_second: 3.25 }),
        scopes: Some(ScopeTotals {
            scopes: 12,
            fullest: vec![scope(HOSTILE, 10), scope("hadoop", 7), scope("alice", 1)],
            ..Default::default()
        }),
    };
    let waiting = |user: &str, ahead| WaitingRequest {
        user: user.into(),
        creator: "IDE".into(),
        resource: load(4, 2, 1),
        entries: vec![WaitQueueEntry { scope: "user=hadoop".into(), ahead }],
        ..Default::default()
    };
    ClusterFeed {
        address: "127.0.0.1:50051".into(),
        overview,
        ems: (0..100).map(em).collect(),
        line: vec![waiting("hadoop", 0), waiting(HOSTILE, 1)],
        ..Default::default()
    }
}

/// Returns the text without styles.
fn text_of(picture: &ScreenFrame) -> String {
    let text = |line: &StyledLine| line.iter().map(|(_, text)| text.as_str()).collect::<String>() + "\n";
    picture.lines.iter().map(text).collect()
}

fn drawn(cluster: &ClusterFeed, look: &mut ViewState, columns: usize, rows: usize) -> ScreenFrame {
    let picture = draw(cluster, look, TerminalSize { columns, rows });
    let text = text_of(&picture);
    assert_eq!(picture.lines.len(), rows, "{columns}x{rows}: {text}");
    for line in text.lines() {
        assert!(width(line) <= columns && !line.contains(is_harmful), "{columns}x{rows}: {line:?}");
    }
    picture
}

#[test]
fn screen_shows_all_overview_numbers() {
    let cluster = cluster();
    for (columns, rows) in [(80, 24), (200, 50)] {
        let text = text_of(&drawn(&cluster, &mut ViewState::default(), columns, rows));
        for part in [
            "EMs      100: 99 healthy, 1 silent\n",
            "tickets  5471 used, 12 locked   waiting 29, longest 2m5s\n",
            "rates    812.0 grants/s  3.2 refusals/s\n",
            " 45% 2.4 TB used, 300 GB locked of 5.9 TB\n",
            " 6% 100 used, 0 locked of 1600\n",
            " 100% 4 used, 4 locked of 8\n",
            " 70% instances 7 of 10\n",
            "   1  hadoop/IDE  since",
            "EMS 1-",
            " of 100, by fullness\n",
            "s: sort  r: reverse",
        ] {
            assert!(text.contains(part), "{columns}x{rows}: {part:?} is not in\n{text}");
        }
    }
    let wide = text_of(&drawn(&cluster, &mut ViewState::default(), 200, 50));
    assert!(wide.contains("\\u{1b}[2Jevil\\u{202e}"), "{wide}");
}

#[test]
fn screen_fits_every_terminal_size() {
    let full = cluster();
    for cluster in [ClusterFeed::default(), full] {
        for columns in [1, 2, 7, 20, 40, 79, 80, 132, 300] {
            for rows in [1, 2, 5, 12, 24, 25, 50, 120] {
                drawn(&cluster, &mut ViewState::default(), columns, rows);
            }
        }
    }
}

#[test]
fn keys_sort_filter_and_scroll() {
    let cluster = cluster();
    let mut look = ViewState::default();
    let ems = |look: &mut ViewState| {
        let text = text_of(&drawn(&cluster, look, 80, 24));
        let lines = text.lines().skip_while(|line| !line.starts_with("EMS")).skip(1);
        lines
            .filter_map(|line| line.split_whitespace().next()?.strip_suffix(":9102").map(str::to_owned))
            .collect::<Vec<_>>()
    };
    assert_eq!(ems(&mut look).first().map(String::as_str), Some("host048"), "48 % 50 + 48 % 7");
    assert!(look.press(KeyPress::Char('s'), 8));
    assert_eq!((look.sort, ems(&mut look).first().map(String::as_str)), (EmOrder::Name, Some("host000")));
    look.press(KeyPress::Char('r'), 8);
    assert_eq!(ems(&mut look).first().map(String::as_str), Some("host099"));
    look.press(KeyPress::Move(2), 8);
    assert_eq!(ems(&mut look).first().map(String::as_str), Some("host097"));
    look.press(KeyPress::Page(100), 8);
    assert_eq!(ems(&mut look).last().map(String::as_str), Some("host000"), "the list ends with the last EM");
    look.press(KeyPress::Char('/'), 8);
    for c in "HOST01q".chars() {
        assert!(look.press(KeyPress::Char(c), 8), "a filter contains q");
    }
    look.press(KeyPress::Backspace, 8);
    look.press(KeyPress::Enter, 8);
    assert_eq!(ems(&mut look).len(), 10.min(drawn(&cluster, &mut look, 80, 24).page));
    look.press(KeyPress::Escape, 8);
    assert_eq!(look.filter, "");
    look.press(KeyPress::Char('/'), 8);
    look.press(KeyPress::Char('!'), 8);
    assert!(ems(&mut look).is_empty());
    assert!(!look.press(KeyPress::Interrupt, 8) && !ViewState::default().press(KeyPress::Char('q'), 8));
}

#[test]
fn screen_shows_lost_connection() {
    let silent = ClusterFeed { problem: Some("the connection\nis closed".into()), ..cluster() };
    let picture = drawn(&silent, &mut ViewState::default(), 80, 24);
    let first = text_of(&picture).lines().next().map(str::to_owned).unwrap_or_default();
    assert!(first.ends_with(", no update since: the connection\\u{a}is closed"), "{first}");
}
