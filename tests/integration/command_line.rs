//! The command line against a real server: what each command prints, as tables and as the API's own JSON, and how it ends.

use std::{
    fs::File,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::fd::OwnedFd,
    process::{Command, Output, Stdio},
    sync::LazyLock,
    time::Duration,
};

use linkis_rm::{
    client::{ResourceRequest, RmClient},
    domain::{limit::Rule, operation::Grant, resource::Resource},
    transport::proto,
};
use prost_reflect::{DescriptorPool, DynamicMessage, Kind, MessageDescriptor};
use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use uuid::Uuid;

use crate::{certificates::Folder, external, harness::*};

/// A server that has something of everything.
struct World {
    database: Database,
    rm: Instance,
    /// Of hadoop, used; of a user whose name changes the direction of writing, locked.
    grants: [Grant; 2],
    _yarn: external::Yarn,
}

const HOSTILE: &str = "mallory\u{202e}\u{200b}";

async fn world() -> World {
    let (database, rm) = start().await;
    let client = &rm.client;
    let mut big = registration(em("host1"), load(64, 16, 20));
    big.protected = load(4, 2, 0);
    client.register(big).await.unwrap();
    client.register(registration(em("host2"), load(8, 4, 4))).await.unwrap();
    let gpus = Resource::special([("gpu".to_owned(), 8)].into()).unwrap();
    client.register(registration(em("host3"), gpus)).await.unwrap();
    client.set_limit(&each_user(2)).await.unwrap();
    let first = client.request_resource(&request(&em("host1"), "hadoop", load(4, 2, 1))).await.granted();
    client.resource_inited(&inited(&first, "hadoop", Some(load(3, 2, 1)))).await.unwrap();
    let second = client.request_resource(&request(&em("host1"), HOSTILE, load(30, 4, 1))).await.granted();
    client.drain(&em("host2"), "new disks").await.unwrap();
    let yarn = external::Yarn::start(external::FAIR).await;
    let clusters = external::client_of(&rm).await;
    external::put(&clusters, external::provider("default", &external::config(&yarn.address))).await.unwrap();
    World { database, rm, grants: [first, second], _yarn: yarn }
}

/// The program, without settings of this environment.
pub fn program(address: &str, words: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(words).stdin(Stdio::null()).env("LINKIS_RM_ADDRESS", address);
    for variable in ["TOKEN_FILE", "CA_CERT", "CLIENT_CERT", "CLIENT_KEY", "TLS_SERVER_NAME"] {
        command.env_remove(format!("LINKIS_RM_{variable}"));
    }
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

impl World {
    fn run(&self, words: &[&str]) -> Output {
        program(&self.rm.address, words).output().unwrap()
    }

    /// What a command prints that ends so, with times and ids in short.
    #[track_caller]
    fn told(&self, words: &[&str], code: i32) -> String {
        let output = self.run(words);
        let (out, error) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(code), "{words:?}: {out}{error}");
        assert!(!format!("{out}{error}").contains(['\u{1b}', '\u{202e}', '\u{200b}']), "{words:?}: {out:?}{error:?}");
        let mut told = out + &error;
        for (grant, short) in self.grants.iter().zip(["TICKET-1", "TICKET-2"]) {
            told = told.replace(&grant.ticket_id.to_string(), short);
        }
        shorten_times(&told)
    }
}

/// Times of this century, to the second, as `TIME`; the blanks that stand behind them are of their columns.
fn shorten_times(text: &str) -> String {
    let mut words = String::new();
    for word in text.split_inclusive([' ', '\n']) {
        let is_time = word.starts_with("20") && word.trim_end().ends_with('Z') && word.contains('T');
        match is_time {
            true => words.extend(["TIME", word.get(word.trim_end().len()..).unwrap_or_default()]),
            false => words.push_str(word),
        }
    }
    words
}

/// What a call answers, by the API's schema.
fn schema(call: &str) -> MessageDescriptor {
    static POOL: LazyLock<DescriptorPool> = LazyLock::new(|| DescriptorPool::decode(proto::DESCRIPTORS).unwrap());
    let (service, method) = call.split_once('/').unwrap();
    let service = POOL.get_service_by_name(&format!("linkis.rm.v1.{service}")).unwrap();
    service.methods().find(|known| known.name() == method).unwrap().output()
}

#[track_caller]
fn parsed(schema: &MessageDescriptor, json: &str) -> DynamicMessage {
    let mut reader = serde_json::Deserializer::from_str(json);
    let message =
        DynamicMessage::deserialize(schema.clone(), &mut reader).unwrap_or_else(|error| panic!("{error}: {json}"));
    reader.end().unwrap();
    message
}

const TABLES: &[(&[&str], &str)] = &[
    (
        &["ems"],
        "EM          STATE               FULL           MEMORY  CORES  INSTANCES  OTHER\n\
         host1:9102  unreported           55%  33.0 GB/60.0 GB   6/14       2/20  -\n\
         host2:9102  drained,unreported    0%       0 B/8.0 GB    0/4        0/4  -\n\
         host3:9102  unreported            0%                -      -          -  special.gpu=0/8\n",
    ),
    (&["ems", "--no-headers", "--limit", "1"], "host1:9102  unreported  55%  33.0 GB/60.0 GB  6/14  2/20  -\n"),
    (
        &["em", "host2:9102"],
        "EM          host2:9102\n\
         STATE       drained,unreported\n\
         FULL        0%\n\
         MEMORY      0 B/8.0 GB\n\
         CORES       0/4\n\
         INSTANCES   0/4\n\
         LEFT        memory=8.0 GB cores=4 instances=4\n\
         REGISTERED  TIME\n\
         DRAINED     TIME by anonymous: new disks\n",
    ),
    (
        &["scopes"],
        "SCOPE                         DIMENSION  FULL  USED  LOCKED  MAX  LIMIT\n\
         user=hadoop                   instances   50%     1       0    2  each user\n\
         user=mallory\\u{202e}\\u{200b}  instances   50%     0       1    2  each user\n",
    ),
    (
        &["tickets", "--user", "hadoop"],
        "TICKET                                USER    EM          STATE  MEMORY  CORES  INSTANCES  OTHER  CREATOR  ENGINE TYPE  SINCE\n\
         TICKET-1  hadoop  host1:9102  used   3.0 GB      2          1  -      IDE      spark-3.2.1  TIME\n",
    ),
    (
        &["limits", "list"],
        "LIMIT      MAX          MODE      STATE     UPDATED BY  UPDATED\n\
         each user  instances=2  enforced  in force  anonymous   TIME\n",
    ),
    (
        &["policies"],
        "KIND OF EM                   CHECKS               PLACEMENT  REQUIRED LABELS\n\
         linkis-cg-engineconnmanager  creator,user,labels  spread     -\n",
    ),
    (&["holds"], "WHAT  UNTIL  BY  REASON  SINCE\n"),
    (&["waiting", "--no-headers"], ""),
    (
        &["providers"],
        "NAME     TYPE  LABELS  UPDATED BY  UPDATED\n\
         default  Yarn  -       anonymous   TIME\n",
    ),
    (
        &["queues", "--limit", "2"],
        "QUEUE         STATE    FULL            MEMORY  CORES  MEMORY LEFT  CORES LEFT  RUNNING  PENDING\n\
         root          running   12%  12.0 GB/100.0 GB  3/100      88.0 GB          97        -        -\n\
         root.default  running    0%      0 B/100.0 GB  0/100      88.0 GB          97        0        0\n",
    ),
    (
        &["applications", "--limit", "1"],
        "APPLICATION         USER    QUEUE  STATE     MEMORY  CORES  STARTED  NAME\n\
         application_1_0000  hadoop  etl    ACCEPTED  1.0 GB      1  TIME     job 0\n",
    ),
    (&["audit"], "consistent: 3 EMs, 2 scopes, 2 tickets\n"),
    (&["repair", "--yes"], "nothing was repaired\n"),
];

const ANSWERS: &[(&[&str], &str, Option<&str>)] = &[
    (&["overview"], "UsageService/GetOverview", None),
    (&["instances"], "UsageService/ListInstances", Some("instances")),
    (&["tasks"], "UsageService/ListTasks", None),
    (&["ems"], "UsageService/ListEms", Some("ems")),
    (&["ems", "--drained", "true", "--label", "a=b"], "UsageService/ListEms", Some("ems")),
    (&["scopes", "--label", "user=hadoop"], "UsageService/ListScopes", Some("scopes")),
    (&["history", "--newest", "--since", "1h", "--action", "drained"], "UsageService/ListActions", Some("actions")),
    (&["em", "host1:9102"], "UsageService/GetEm", None),
    (&["scopes"], "UsageService/ListScopes", Some("scopes")),
    (&["tickets"], "UsageService/ListTickets", Some("tickets")),
    (&["tickets", "--user", "nobody"], "UsageService/ListTickets", Some("tickets")),
    (&["ticket", "TICKET-1"], "UsageService/GetTicket", None),
    (&["waiting"], "UsageService/ListWaiting", Some("waiting")),
    (&["history"], "UsageService/ListActions", Some("actions")),
    (&["history", "--ticket", "TICKET-1", "--limit", "1"], "UsageService/ListActions", Some("actions")),
    (&["refusals", "--since", "1d"], "UsageService/ListRefusals", Some("refusals")),
    (&["usage", "--by", "engine-type", "--hourly"], "UsageService/GetUsage", Some("sums")),
    (&["limits", "list"], "LimitService/ListLimits", Some("limits")),
    (&["policies"], "LimitService/ListPolicies", Some("policies")),
    (&["holds"], "AdminService/ListHolds", Some("holds")),
    (&["providers"], "ExternalResourceService/ListProviders", Some("providers")),
    (&["queues"], "ExternalResourceService/ListQueues", Some("queues")),
    (&["applications"], "ExternalResourceService/ListApplications", Some("applications")),
    (&["audit"], "AdminService/Audit", None),
    (&["repair", "--yes"], "AdminService/Repair", None),
    (&["drain", "host2:9102", "--reason", "new disks"], "AdminService/Drain", None),
];

/// Scopes come in no order that means anything, and epochs are no numbers to compare.
fn sorted(words: &[&str], told: String) -> String {
    let mut lines: Vec<&str> = told.split_inclusive('\n').filter(|line| !line.starts_with("EPOCH")).collect();
    if words[0] == "scopes" {
        lines[1..].sort_unstable();
    }
    lines.concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_command_tells_people_and_programs_what_the_service_knows() {
    let world = world().await;
    for (words, expected) in TABLES {
        // Of what is as long as its column, nothing is left to compare.
        let squeeze = |text: &str| text.replace(' ', "");
        let told = sorted(words, world.told(words, 0));
        match told.contains("TIME") || told.contains("TICKET-") {
            true => assert_eq!(squeeze(&told), squeeze(expected), "{words:?}:\n{told}"),
            false => assert_eq!(&told, expected, "{words:?}:\n{told}"),
        }
    }
    let ids = world.grants.each_ref().map(|grant| grant.ticket_id.to_string());
    for (words, call, field) in ANSWERS {
        let words: Vec<_> = words.iter().map(|word| if *word == "TICKET-1" { &*ids[0] } else { *word }).collect();
        let schema = schema(call);
        let run = |format: &str| {
            let output = world.run(&[&words[..], &["-o", format]].concat());
            assert_eq!(output.status.code(), Some(0), "{words:?}: {}", text(&output.stderr));
            text(&output.stdout)
        };
        let (document, lines) = (parsed(&schema, &run("json")), run("jsonl"));
        let Some(field) = field else {
            // Audits are of different moments.
            let moves = ["AdminService/Audit", "UsageService/GetOverview", "UsageService/ListTasks"].contains(call);
            assert!(moves || document == parsed(&schema, &lines), "{words:?}");
            continue;
        };
        let Kind::Message(item) = schema.get_field_by_name(field).unwrap().kind() else { panic!("{field}") };
        let lines: Vec<_> = lines.lines().map(|line| parsed(&item, line)).collect();
        let listed = document.get_field_by_name(field).unwrap();
        let listed: Vec<_> = listed.as_list().unwrap().iter().map(|item| item.as_message().unwrap().clone()).collect();
        assert_eq!(listed, lines, "{words:?}");
        let is_none = words.contains(&"nobody")
            || words.contains(&"a=b")
            || ["waiting", "holds", "refusals", "usage"].contains(&words[0]);
        assert_eq!(listed.is_empty(), is_none, "{words:?}");
    }
    let wide = world.told(&["tickets", "-o", "wide", "--user", HOSTILE], 0);
    assert!(wide.contains("ASKED BY") && wide.contains("mallory\\u{202e}\\u{200b}"), "{wide}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_act_and_end_as_scripts_need() {
    let world = world().await;
    let [used, locked] = world.grants.each_ref().map(|grant| grant.ticket_id.to_string());
    let unknown = Uuid::now_v7().to_string();
    let user = ["--user", "alice"];
    for (words, code, told) in [
        // The answer is "no".
        (&["ticket", &unknown][..], 1, "there is no ticket"),
        (&["em", "host9:9102"], 1, "host9:9102"),
        (&["release", &unknown, "--yes", "--reason", "gone"], 1, "there is no ticket"),
        (&["resume", "host1:9102"], 1, "host1:9102 was not drained\n"),
        (&["unhold", user[0], user[1]], 1, "user alice was not held\n"),
        (&["limits", "delete", "--yes", "creator=IDE"], 1, "creator=IDE"),
        (&["queues", "--provider", "none"], 1, "none"),
        // It is done.
        (&["drain", "host1:9102", "--reason", "later"], 0, "host1:9102 is drained since TIME by anonymous: later\n"),
        (&["resume", "host1:9102", "--reason", "now"], 0, "host1:9102 grants again\n"),
        (&["hold", user[0], user[1], "--for", "5m", "--reason", "look"], 0, "user alice is held until TIME\n"),
        (&["holds", "--no-headers"], 0, "user alice  TIME  anonymous  look  TIME\n"),
        (&["unhold", user[0], user[1]], 0, "user alice is not held any more\n"),
        (&["release", &locked, "--yes", "--reason", "stuck"], 0, "ticket TICKET-2 forced at TIME\n"),
        (&["ticket", &locked], 1, "ended by an operator"),
        (&["limits", "delete", "--yes", "user"], 0, "removed the limit each user\n"),
        // It was used wrongly.
        (&["release", &used, "--reason", "stuck"], 64, "Add --yes"),
        (&["release", &used, "--yes"], 64, "--reason: say why"),
        (&["limits", "delete", "user"], 64, "Add --yes"),
        (&["repair"], 64, "Add --yes"),
        (&["ticket", "7"], 64, "ticket_id"),
        (&["em", ""], 64, "EM.instance"),
        (&["hold", "--for", "1m", "--reason", "r"], 64, "--em"),
        (&["hold", "--user", "u", "--for", "1h", "--reason", "r"], 64, "10m"),
        (&["ems", "--limit", "0"], 64, "--limit"),
        (&["ems", "-o", "yaml"], 64, "jsonl"),
        (&["ems", "--watch=1ms"], 64, "100ms"),
        (&["ems", "--listen", "x"], 64, "--listen"),
        (&["mend"], 64, "mend"),
        (&["--listen", "here"], 64, "HOST:PORT"),
        (&["ems", "--address", "here"], 64, "--address 127.0.0.1:50051"),
        (&["ems", "--token-file", "/nowhere"], 64, "--token-file: /nowhere cannot be read"),
        (&["limits", "diff", "/nowhere"], 64, "FILE: /nowhere"),
        // Nobody answers.
        (&["ems", "--address", "127.0.0.1:1"], 2, "No service answers at 127.0.0.1:1"),
        // Nothing is asked.
        (&["--version"], 0, "linkis-rm "),
        (&["drain", "--help"], 0, "Needs the role operator or admin, or ecm for what is their own.\n"),
        (&["completions", "bash"], 0, "complete -F _linkis"),
    ] {
        let output = world.told(words, code);
        assert!(output.contains(told), "{words:?}: {output}");
    }
    let left = world.rm.client.tickets(None).await.unwrap();
    assert_eq!(left.iter().map(|ticket| ticket.id).collect::<Vec<_>>(), [world.grants[0].ticket_id]);
    assert_invariants(&world.database, &world.rm.client).await;
}

/// A limit for each of so many users.
fn file_of_limits(users: usize) -> String {
    let limit =
        |n| format!("[[limit]]\nlabels = {{ user = \"user{n}\" }}\nmax = {{ instances = {n}, memory = \"2g\" }}\n");
    (0..users).map(limit).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_become_those_of_a_file_and_lists_are_read_as_far_as_somebody_wants() {
    const USERS: usize = 1500;
    let (_database, rm) = start().await;
    rm.client.set_limit(&each_user(1)).await.unwrap();
    let folder = Folder::new("command-line");
    let file = folder.0.join("limits.toml");
    std::fs::write(&file, file_of_limits(USERS)).unwrap();
    let run = |words: &[&str]| {
        let output = program(&rm.address, words).output().unwrap();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let path = file.to_str().unwrap();
    let (code, diff, _) = run(&["limits", "diff", path]);
    assert!(diff.starts_with("+ user=user0: instances=0 memory=2.0 GB\n"), "{diff}");
    let summary =
        "- each user: instances=1\n... and 500 more\n1500 would be added, 0 would be changed, 1 would be removed\n";
    assert!(code == Some(1) && diff.ends_with(summary), "{code:?} {diff}");
    let (code, _, error) = run(&["limits", "apply", path]);
    assert!(code == Some(64) && error.contains("Add --yes"), "{error}");
    let (code, applied, _) = run(&["limits", "apply", path, "--yes"]);
    assert!(code == Some(0) && applied.ends_with("1500 added, 0 changed, 1 removed\n"), "{code:?} {applied}");
    assert_eq!(run(&["limits", "diff", path]), (Some(0), "the limits are those of the file\n".into(), String::new()));
    std::fs::write(&file, file_of_limits(USERS).replace("instances = 7,", "instances = 8,")).unwrap();
    let (_, diff, _) = run(&["limits", "diff", path]);
    assert!(diff.starts_with("~ user=user7: instances=8 memory=2.0 GB, was instances=7 memory=2.0 GB\n"), "{diff}");

    let listed = |words: &[&str]| run(&[&["limits", "list", "--no-headers"], words].concat()).1;
    assert_eq!(listed(&[]).lines().count(), USERS);
    assert_eq!(listed(&["--limit", "1200"]).lines().count(), 1200);
    let schema = schema("LimitService/ListLimits");
    for (words, count) in [(&["-o", "json"][..], USERS), (&["-o", "json", "--limit", "1200"], 1200)] {
        let document = parsed(&schema, &listed(words));
        let limits = document.get_field_by_name("limits").unwrap().as_list().unwrap().len();
        let has_more = !document.get_field_by_name("next_page_token").unwrap().as_str().unwrap().is_empty();
        assert_eq!((limits, has_more), (count, count < USERS));
    }
    // Who has read enough is not told of it; who watches, until then.
    for words in [&["limits", "list", "-o", "json"][..], &["limits", "list", "--watch=100ms"]] {
        let mut command = program(&rm.address, words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(command.stdout.take().unwrap()).lines();
        let read = if words.contains(&"--watch=100ms") { USERS * 2 } else { 3 };
        assert_eq!(lines.by_ref().take(read).filter(|line| line.is_ok()).count(), read);
        drop(lines);
        let output = command.wait_with_output().unwrap();
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()), "{words:?}");
    }
}

/// A terminal of this size, and the end that programs have of it.
pub fn terminal(columns: u16, rows: u16) -> (File, OwnedFd) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap();
    let theirs = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    tcsetwinsize(&theirs, Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    (ours.into(), theirs.into())
}

/// Runs a command on a terminal where somebody types this; answers how it ended, and all that was to be seen.
fn typed_at(world: &World, words: &[&str], types: &str) -> (Option<i32>, String) {
    let (mut ours, theirs) = terminal(80, 24);
    let end = || Stdio::from(theirs.try_clone().unwrap());
    let mut command = program(&world.rm.address, words);
    let mut child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
    drop((command, theirs));
    ours.write_all(types.as_bytes()).unwrap();
    let mut seen = Vec::new();
    // The end of a terminal is told as an error.
    let _ = ours.read_to_end(&mut seen);
    (child.wait().unwrap().code(), text(&seen))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_terminal_what_destroys_asks_and_no_table_is_too_wide() {
    let world = world().await;
    let id = world.grants[0].ticket_id.to_string();
    let lives = async || lives(&world.rm.client, world.grants[0].ticket_id).await;
    let (code, seen) = typed_at(&world, &["release", &id], "its engine hangs\nn\n");
    assert!(code == Some(1) && seen.contains("Why? ") && seen.contains("[y/N]"), "{seen}");
    assert!(lives().await);
    let (code, seen) = typed_at(&world, &["tickets"], "");
    assert!(code == Some(0) && seen.lines().count() == 3 && seen.contains("TICKET"), "{seen}");
    assert!(seen.lines().all(|line| line.trim_end().chars().count() <= 80), "{seen}");
    assert!(seen.contains(&id), "ids are whole: {seen}");
    let (code, seen) = typed_at(&world, &["release", &id, "--reason", "it hangs"], "y\n");
    assert!(code == Some(0) && seen.contains(&format!("ticket {id} forced at")), "{seen}");
    assert!(!lives().await);
}

/// Somebody who waits in line, until the test is over.
fn stand_in_line(client: &RmClient, request: ResourceRequest) {
    let client = client.clone();
    tokio::spawn(async move { client.request_resource(&request).await });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_line_is_told_with_places_and_what_is_short() {
    let (_database, rm) = start().await;
    rm.client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    let limit = Rule { max: each_user(1).max, ..each_user(1) };
    rm.client.set_limit(&limit).await.unwrap();
    rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    for place in 1..=2 {
        let asked = request(&em("host1"), "hadoop", load(2, 1, 1));
        stand_in_line(&rm.client, ResourceRequest { wait_timeout: Duration::from_secs(60), ..asked });
        let stands = async || rm.client.waiting().await.unwrap().len() == place;
        eventually("it stands in line", Duration::from_secs(30), stands).await;
    }
    let output = program(&rm.address, &["waiting"]).output().unwrap();
    let told = shorten_times(&text(&output.stdout));
    let lines: Vec<Vec<&str>> = told.lines().map(|line| line.split_whitespace().collect()).collect();
    let of = |place| {
        vec![
            place,
            "hadoop",
            "user=hadoop",
            "2.0",
            "GB",
            "1",
            "1",
            "-",
            "TIME",
            "TIME",
            "host1:9102",
            "IDE",
            "spark-3.2.1",
        ]
    };
    assert_eq!(lines[1..], [of("1"), of("2")], "{told}");
}
