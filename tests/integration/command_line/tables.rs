//! Tables on terminals of several widths: their rows stay apart, and their names are found as printed.

use std::{collections::BTreeSet, process::Command};

use rm_client::{ClientError, ResourceRequest, ResultResource};
use rm_model::{
    em::EmInstance,
    hold::NewHold,
    limit::LabelPattern,
    operation::LockKey,
    priority::PriorityRule,
    reclaim::{ReclaimMode, ReclaimPolicy},
};
use tokio::task::JoinHandle;

use super::{
    program, shorten_times,
    terminal::{Typed, typed_on},
    text,
};
use crate::{
    external,
    harness::*,
    identity::{token, tokens_command},
};

const WIDTHS: [u16; 3] = [80, 100, 160];

/// All commands that print a table. Rows differ at every width, and no width leaves these columns out.
const LISTS: &[(&[&str], &[&str])] = &[
    (&["em", "list"], &["EM", "STATE", "FULL", "CORES", "MEMORY"]),
    (&["ticket", "list"], &["TICKET", "USER", "EM", "STATE", "SINCE", "MEMORY", "CORES"]),
    (&["waiting"], &["USER", "WAITS FOR", "POSITION", "SINCE"]),
    (&["scope", "list"], &["SCOPE", "DIMENSION", "FULL", "USED", "MAX"]),
    (&["user", "list"], &["USER", "TICKETS", "CORES", "MEMORY"]),
    (&["limit", "list"], &["LIMIT", "MAX", "MODE"]),
    (&["refusals"], &["PERIOD", "USER", "REFUSED BY", "SHORT OF", "TIMES"]),
    (&["history", "--newest"], &["TIME", "ACTION", "USER", "WHERE", "TICKET"]),
    (&["hold", "list"], &["WHAT", "UNTIL"]),
    (&["queue", "list"], &["QUEUE", "STATE", "FULL"]),
    (&["application", "list"], &["APPLICATION", "USER", "QUEUE", "STATE"]),
    (&["instance", "list"], &["INSTANCE", "ADDRESS"]),
    (&["policy", "list"], &["KIND OF EM"]),
    (&["priority", "list"], &["REQUESTS", "DEFAULT", "MAX"]),
    (&["reclaim", "list"], &["TICKET", "USER", "EM", "IDLE SINCE", "STATE"]),
    (&["reclaim", "policy", "list"], &["TICKETS", "MODE", "IDLE AFTER", "GRACE", "PER MINUTE", "BUSY AFTER"]),
    (&["provider", "list"], &["NAME", "TYPE"]),
    (&["usage", "--by", "user"], &["NAME", "HOUR", "TICKETS"]),
    (&["usage", "--by", "em", "--hourly"], &["NAME", "HOUR", "TICKETS"]),
    (&["tasks"], &["TASK", "INSTANCE", "LAST SUCCESS", "LAG", "ERRORS"]),
    (&["audit"], &["WHAT", "COUNTER"]),
    (&["token", "list"], &["ID", "NAME", "ROLES", "STATE"]),
];

/// Lists with names that differ in their middle alone, or with whole ids, are wider than a narrow terminal.
const WIDE: [&str; 13] = [
    "ticket", "waiting", "scope", "refusals", "history", "user", "usage", "audit", "token", "policy", "priority",
    "reclaim", "provider",
];

const DOMAIN: &str = ".data-platform.prod.eu-central.example.com:9102";

/// Users whose long names differ in their middle, and one whose name needs quotes.
fn users() -> Vec<String> {
    let long = |n| format!("service-account-of-the-data-warehouse-{n}-for-nightly-reports@corp.example.com");
    vec![long(1), long(2), "team / data \"science\" $HOME".to_owned()]
}

fn long_em(n: usize) -> EmInstance {
    EmInstance::parse("em", em("any").application_name.as_str(), &format!("bdp-a0{n}{DOMAIN}")).unwrap()
}

struct World {
    rm: Instance,
    waiting: Vec<JoinHandle<Result<ResultResource, ClientError>>>,
    database: Database,
    /// Another database with tokens: a service with tokens rejects callers without one.
    tokens: Database,
    _yarn: external::Yarn,
}

async fn world() -> World {
    let (database, rm) = start().await;
    for n in 1..=4 {
        rm.client.register(registration(long_em(n), load(64, 16, 20))).await.unwrap();
    }
    rm.client.set_limit(&each_user(2)).await.unwrap();
    let mut waiting = Vec::new();
    for user in users() {
        for n in 1..=2 {
            // Only ended tickets are in the sums of usage.
            let ended = rm.client.request_resource(&request(&long_em(n), &user, load(1, 1, 1))).await.granted();
            rm.client.resource_released(&release(&ended, &user)).await.unwrap();
            rm.client.request_resource(&request(&long_em(n), &user, load(1, 1, 1))).await.granted();
        }
        rm.client.request_resource(&request(&long_em(1), &user, load(1, 1, 1))).await.refused();
        for _ in 0..2 {
            let request = ResourceRequest { wait_timeout: 10 * LONG, ..request(&long_em(3), &user, load(2, 1, 1)) };
            waiting.push(enqueue(&rm.client, request).await);
        }
    }
    for key in [LockKey::Em(long_em(3)), LockKey::Em(long_em(4)), LockKey::User(name("carol"))] {
        let hold = NewHold { key, duration: 10 * LONG, reason: name("a check of the counters") };
        rm.client.hold(&hold).await.unwrap();
    }
    let yarn = external::Yarn::start(external::FAIR).await;
    let clusters = external::client_of(&rm).await;
    external::put(&clusters, external::provider("default", &external::config(&yarn.address))).await.unwrap();
    for n in 1..=2 {
        let long = |of: &str| format!("{of}-of-the-data-platform-in-the-central-region-{n}-of-all-teams.example.com");
        let labels = [("yarnCluster".to_owned(), long("yarn"))].into();
        let provider =
            rm_proto::v1::Provider { labels, ..external::provider(&long("yarn"), &external::config(&yarn.address)) };
        external::put(&clusters, provider).await.unwrap();
        rm.client.set_policy(&name(&long("engine-manager")), &Default::default()).await.unwrap();
        let pattern = LabelPattern::new([("creator".to_owned(), Some(long("creator")))].into());
        rm.client.set_priority(&PriorityRule { pattern: pattern.clone(), default: 0, max: 60 }, "").await.unwrap();
        rm.client.set_reclaim_policy(&ReclaimPolicy::new(pattern, ReclaimMode::Observe), "").await.unwrap();
    }
    let tokens = Database::fresh().await;
    for user in users() {
        token(&tokens, &user, &["--role", "viewer", "--user", &user]);
    }
    World { rm, waiting, database, tokens, _yarn: yarn }
}

impl World {
    /// Returns the lines of a command on a terminal, its notes last.
    fn lines(&self, words: &[&str], columns: u16) -> Vec<String> {
        let (code, seen) = match words[0] {
            "token" => Typed::start_on(columns, tokens_command(&self.tokens, &words[1..])).end(),
            _ => typed_on(columns, &self.rm.address, words, ""),
        };
        assert_eq!(code, Some(i32::from(words[0] == "audit")), "{words:?}: {seen}");
        // The command about tokens names its database first.
        seen.lines().filter(|line| !line.starts_with("database: ")).map(|line| line.trim_end().to_owned()).collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminal_tables_keep_rows_apart_at_all_widths() {
    let world = world().await;
    let sums: [&[&str]; 4] = [
        &["refusals", "--no-headers"],
        &["user", "list", "--no-headers"],
        &["usage", "--by", "user", "--no-headers"],
        &["usage", "--by", "em", "--no-headers"],
    ];
    for sums in sums {
        let count = || text(&program(&world.rm.address, sums).output().unwrap().stdout).lines().count();
        let least = if sums.contains(&"em") { 2 } else { 3 };
        eventually("the sums have all users and EMs", LONG, async || count() >= least).await;
    }
    let spoilt =
        "UPDATE linkis_em_resource_meta_data SET used_resource = jsonb_set(used_resource, '{memory}', '1073741825')";
    assert_eq!(world.database.execute(spoilt).await, 4);
    // The task that chooses tickets waits for the row of its run, so that it deletes none.
    let mut fence = world.database.connect().await;
    execute(&mut fence, "BEGIN").await;
    execute(&mut fence, "SELECT FROM linkis_reclaim_writer FOR UPDATE").await;
    let chosen = "INSERT INTO linkis_reclaim (ticket_id, for_ticket_id, for_em_application_name, for_em_instance, mode, due_time)
        SELECT ticket_id, gen_random_uuid(), em_application_name, em_instance, 'OBSERVE', now() FROM linkis_user_resource_meta_data";
    world.database.execute(chosen).await;
    for (words, titles) in LISTS {
        for columns in WIDTHS {
            let lines = world.lines(words, columns);
            // A list ends with its note, an audit with its sum.
            let has_note = !["tasks", "token"].contains(&words[0]);
            let (headers, rows) = (&lines[0], &lines[1..lines.len() - usize::from(has_note)]);
            for title in *titles {
                assert!(headers.split("  ").any(|word| word.trim() == *title), "{columns}: no {title}: {lines:#?}");
            }
            // The times of an action and a ticket id are whole values, so its rows are apart by both.
            let apart: BTreeSet<&String> = rows.iter().collect();
            assert_eq!(apart.len(), rows.len(), "{columns}: rows are alike: {lines:#?}");
            assert!(!rows.is_empty(), "{words:?} {columns}");
            let widest = rows.iter().map(|line| line.chars().count()).max().unwrap_or(0);
            assert!(WIDE.contains(&words[0]) || widest <= usize::from(columns), "{columns}: {lines:#?}");
            // The first column has the name for further commands: it is whole, even if it is the only one.
            let has_limit = has_note && !["audit", "instance"].contains(&words[0]);
            let limit: &[&str] = if has_limit { &["--limit", "1"] } else { &[] };
            let single = world.lines(&[words, limit].concat(), columns);
            for line in lines.iter().chain(&single) {
                assert!(!line.split("  ").next().unwrap().contains(".."), "{columns}: a cut name: {line}");
            }
        }
    }
    for task in world.waiting {
        task.abort();
    }
}

/// Periods of different days, and refusals of different kinds within one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminal_refusals_fit_80_columns() {
    let (database, rm) = start().await;
    for n in 1..=2 {
        rm.client.register(registration(long_em(n), load(64, 16, 20))).await.unwrap();
    }
    for (n, resource) in [(1, load(200, 1, 1)), (1, load(1, 100, 1)), (2, load(200, 1, 1))] {
        rm.client.request_resource(&request(&long_em(n), "risk_model", resource)).await.refused();
    }
    let rows = async || {
        let (_, seen) = typed_on(80, &rm.address, &["refusals"], "");
        seen.lines()
            .map(str::trim_end)
            .filter(|line| line.contains("risk_model"))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    eventually("the refusals are listed", LONG, async || rows().await.len() == 3).await;
    for age in ["25 hours", "26 hours"] {
        let earlier = format!(
            "INSERT INTO linkis_resource_refusal SELECT (r2).* FROM (SELECT jsonb_populate_record(r, jsonb_build_object(
                'period_start', r.period_start - interval '{age}')) AS r2 FROM linkis_resource_refusal r
                WHERE r.period_start > now() - interval '1 hour') e"
        );
        assert!(database.execute(&earlier).await >= 3);
    }
    let (_, seen) = typed_on(80, &rm.address, &["refusals"], "");
    let titles: Vec<&str> = seen.lines().next().unwrap().split_whitespace().collect();
    assert!(titles.join(" ").starts_with("PERIOD USER REFUSED BY SHORT OF TIMES WANTED FREE LAST"), "{seen}");
    let rows = rows().await;
    assert_eq!(rows.iter().collect::<BTreeSet<_>>().len(), 9, "{seen}");
    assert!(rows.iter().all(|row| row.len() <= 80 && row.contains("  risk_model  bdp-a0")), "{seen}");
}

/// The help names the verbs of each noun.
#[test]
fn all_lists_are_among_the_tables() {
    let help = text(&program("", &["--help"]).output().unwrap().stdout);
    let verbs = |line: &str| line.rsplit_once(": ").map_or("", |(_, verbs)| verbs).to_owned();
    let with_list = help.lines().filter(|line| verbs(line).split(", ").any(|verb| verb == "list"));
    let nouns: Vec<&str> = with_list.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(nouns.len() > 10, "{nouns:?}");
    for noun in nouns {
        assert!(LISTS.iter().any(|(words, _)| *words == [noun, "list"]), "{noun} list");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminal_names_are_found_as_printed() {
    let world = world().await;
    let lines = world.lines(&["em", "list"], 80);
    assert!(lines[1].starts_with("bdp-a01  unreported "), "{lines:#?}");
    let notes = format!("4 EMs. Names end in {DOMAIN}. More columns: -o wide");
    assert_eq!(lines.last(), Some(&notes));
    let get = world.lines(&["em", "get", "bdp-a02"], 80);
    assert!(get[0].ends_with(&format!("bdp-a02{DOMAIN}")), "{get:#?}");
    let (code, seen) = typed_on(80, &world.rm.address, &["em", "get", "bdp-a0"], "");
    assert!(code == Some(1) && seen.contains("there is no EM bdp-a0; 4 begin with it: bdp-a01."), "{seen}");

    let tickets = world.lines(&["ticket", "list"], 80);
    let id = tickets[1].split_whitespace().next().unwrap();
    let get = world.lines(&["ticket", "get", id], 80);
    assert!(id.len() < 36 && get[0].starts_with("TICKET ") && get[0].ends_with(id), "{get:#?}");
    // A shell reads the quoted name of a user as printed.
    let printed =
        tickets.iter().find_map(|line| Some(line.get(line.find('"')?..=line.rfind('"')?)?.to_owned())).unwrap();
    let script = format!("{} ticket list --no-headers --user {printed}", *PROGRAM);
    let found = Command::new("sh").args(["-c", &script]).env("LINKIS_RM_ADDRESS", &world.rm.address).output().unwrap();
    let found = text(&found.stdout);
    assert!(found.lines().count() == 2 && found.lines().all(|line| line.contains(&printed)), "{printed}: {found}");
    for task in world.waiting {
        task.abort();
    }
}

/// A request that is short in two queues has a row for each: the queue, and its position there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_names_each_queue_with_its_position() {
    let (_database, rm) = start().await;
    for n in 1..=2 {
        rm.client.register(registration(long_em(n), load(4, 4, 4))).await.unwrap();
    }
    rm.client.set_limit(&each_user(1)).await.unwrap();
    let user = "wang fang/etl";
    for (n, user) in [(1, user), (2, "carol")] {
        rm.client.request_resource(&request(&long_em(n), user, load(4, 1, 1))).await.granted();
    }
    let patient = |n, user: &str| ResourceRequest { wait_timeout: LONG, ..request(&long_em(n), user, load(4, 1, 1)) };
    let mut tasks = Vec::new();
    for (n, user) in [(1, "bob"), (1, user), (2, "dave")] {
        tasks.push(enqueue(&rm.client, patient(n, user)).await);
    }
    let (code, seen) = typed_on(80, &rm.address, &["waiting"], "");
    let rows: Vec<Vec<&str>> =
        seen.lines().map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()).collect();
    assert_eq!(code, Some(0));
    let mut places: Vec<[&str; 3]> = rows[1..5].iter().map(|row| [row[0], row[1], row[2]]).collect();
    places.sort_unstable();
    let quoted = "\"user=wang fang/etl\"";
    let who = "\"wang fang/etl\"";
    assert_eq!(
        places,
        [[who, quoted, "1"], [who, "bdp-a01", "2"], ["bob", "bdp-a01", "1"], ["dave", "bdp-a02", "1"]],
        "{seen}"
    );
    assert!(seen.contains("3 waiting.") && seen.contains(&format!("Names end in {DOMAIN}")), "{seen}");
    for task in tasks {
        task.abort();
    }
}

/// A terminal shows ages, a pipe and the wide format whole times.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tables_show_ages_on_terminals_alone() {
    let (_database, rm) = start_with_em(em("host1"), load(8, 4, 4)).await;
    rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    let (_, seen) = typed_on(80, &rm.address, &["ticket", "list"], "");
    let row = seen.lines().nth(1).unwrap();
    assert!(row.contains("s    1 GB      1"), "{seen}");
    let piped = text(&program(&rm.address, &["ticket", "list"]).output().unwrap().stdout);
    assert!(shorten_times(&piped).contains("locked  TIME "), "{piped}");
    let (_, seen) = typed_on(80, &rm.address, &["ticket", "list", "-o", "wide"], "");
    assert!(shorten_times(&seen).contains("locked  TIME "), "{seen}");
    let typed = Typed::start(program(&rm.address, &["waiting"]));
    let (_, seen) = typed.end();
    assert!(seen.contains("\r\n0 waiting."), "{seen}");
}
