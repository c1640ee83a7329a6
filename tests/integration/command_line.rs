//! Commands against a real server: tables, JSON, exit codes and error texts.

use std::{
    io::{BufRead as _, BufReader},
    process::{Command, Output, Stdio},
    sync::LazyLock,
};

use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};
use rm_model::{limit::Rule, operation::Grant, resource::Resource};
use rm_proto::v1 as proto;
use uuid::Uuid;

use crate::{certificates::Folder, external, harness::*};

/// A server with rows in every table that commands list.
struct World {
    database: Database,
    rm: Instance,
    /// Tickets: used, of hadoop; locked, of a user whose name changes the writing direction; ended, of hadoop.
    grants: [Grant; 3],
    _yarn: external::Yarn,
}

mod answers;
mod completion;
mod one_limit;
mod tables;
mod terminal;

pub use terminal::terminal;

const HOSTILE: &str = "mallory\u{202e}\u{200b}";

/// Renames a user as an earlier release accepted it: in the tickets, the history and the counters.
const RENAMED: &str = r#"
    UPDATE linkis_user_resource_meta_data SET "user" = E'mallory\u202e\u200b' WHERE "user" = 'mallory';
    UPDATE linkis_resource_action_record SET "user" = E'mallory\u202e\u200b' WHERE "user" = 'mallory';
    UPDATE linkis_label_resource SET scope = jsonb_build_object('user', E'mallory\u202e\u200b'),
        scope_hash = sha256(convert_to(label_set_id || E':{"user":"mallory\u202e\u200b"}', 'UTF8'))
    WHERE scope ->> 'user' = 'mallory'"#;

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
    let second = client.request_resource(&request(&em("host1"), "mallory", load(30, 4, 1))).await.granted();
    database.execute(RENAMED).await;
    client.request_resource(&request(&em("host1"), "hadoop", load(70, 1, 1))).await.refused();
    let third = client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    client.resource_released(&release(&third, "hadoop")).await.unwrap();
    client.drain(&em("host2"), "new disks").await.unwrap();
    let yarn = external::Yarn::start(external::FAIR).await;
    let clusters = external::client_of(&rm).await;
    external::put(&clusters, external::provider("default", &external::config(&yarn.address))).await.unwrap();
    World { database, rm, grants: [first, second, third], _yarn: yarn }
}

/// The program, without settings from the environment.
pub fn program(address: &str, words: &[&str]) -> Command {
    let mut command = Command::new(*PROGRAM);
    command.args(words).stdin(Stdio::null()).env("LINKIS_RM_ADDRESS", address);
    for variable in ["TOKEN_FILE", "CA_CERT", "CLIENT_CERT", "CLIENT_KEY", "TLS_SERVER_NAME"] {
        command.env_remove(format!("LINKIS_RM_{variable}"));
    }
    command
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

impl World {
    fn run(&self, words: &[&str]) -> Output {
        program(&self.rm.address, words).output().unwrap()
    }

    /// The output of a command with this exit code, with short forms of times and ids.
    #[track_caller]
    fn output(&self, words: &[&str], code: i32) -> String {
        let output = self.run(words);
        let (out, error) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(code), "{words:?}: {out}{error}");
        assert!(!format!("{out}{error}").contains(['\u{1b}', '\u{202e}', '\u{200b}']), "{words:?}: {out:?}{error:?}");
        let mut got = out + &error;
        for (grant, short) in self.grants.iter().zip(["TICKET-1", "TICKET-2", "TICKET-3"]) {
            got = got.replace(&grant.ticket_id.to_string(), short);
        }
        shorten_times(&got)
    }
}

/// Replaces times with `TIME`, and removes the padding behind them.
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

/// The message that a call returns, by the schema of the API.
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_return_documented_exit_codes() {
    let world = world().await;
    let [used, locked, _] = world.grants.each_ref().map(|grant| grant.ticket_id.to_string());
    let unknown = Uuid::now_v7().to_string();
    let user = ["--user", "alice"];
    for (words, code, got) in [
        // Tables of rows that the cookbook does not show in full.
        (&["em", "list", "--no-headers", "--limit", "1"][..], 0, "host1:9102  unreported  "),
        (&["ticket", "list", "-o", "wide", "--user", HOSTILE], 0, "mallory\\u{202e}\\u{200b}"),
        (&["ticket", "list", "-o", "wide"], 0, "REQUESTED BY"),
        // The service replies with an error.
        (&["ticket", "get", &unknown][..], 1, "there is no ticket"),
        (&["em", "get", "host9:9102"], 1, "host9:9102"),
        (&["ticket", "release", &unknown, "--yes", "--reason", "gone"], 1, "there is no ticket"),
        (&["em", "resume", "host1:9102"], 1, "host1:9102 was not drained\n"),
        (&["hold", "release", user[0], user[1]], 1, "user alice was not held\n"),
        (&["limit", "delete", "--yes", "--reason", "r", "creator=IDE"], 1, "creator=IDE"),
        (&["queue", "list", "--provider", "none"], 1, "none"),
        // The command succeeds.
        (
            &["em", "drain", "host1:9102", "--reason", "later"],
            0,
            "host1:9102 is drained since TIME by anonymous: later\n",
        ),
        (&["em", "resume", "host1:9102", "--reason", "now"], 0, "host1:9102 grants again\n"),
        (&["hold", "add", user[0], user[1], "--for", "5m", "--reason", "look"], 0, "user alice is held until TIME\n"),
        (&["hold", "list", "--no-headers"], 0, "user alice  TIME  anonymous  look  TIME\n"),
        (&["hold", "release", user[0], user[1]], 0, "user alice is not held any more\n"),
        (&["ticket", "release", &locked, "--yes", "--reason", "stuck"], 0, "ticket TICKET-2 forced at TIME\n"),
        (&["ticket", "get", &locked], 1, "ended by an operator"),
        (&["limit", "delete", "user"], 64, "add --yes, and --reason,"),
        (&["limit", "delete", "user", "--yes"], 64, "--reason: is required"),
        (&["limit", "delete", "--yes", "--reason", "too strict", "user"], 0, "deleted the limit each user\n"),
        (&["limit", "delete", "user"], 1, "there is no limit each user; linkis-rm limit list has all\n"),
        // Wrong usage.
        (&["ticket", "release", &used, "--reason", "stuck"], 64, "add --yes"),
        (&["ticket", "release", &used, "--yes"], 64, "--reason: is required"),
        (&["repair", "--reason", "r"], 64, "add --yes to confirm"),
        (&["repair", "--yes"], 64, "--reason: is required"),
        (&["ticket", "get", "7"], 64, "too short"),
        (&["em", "get", ""], 64, "EM.instance"),
        (&["hold", "add", "--for", "1m", "--reason", "r"], 64, "--em"),
        (&["hold", "add", "--user", "u", "--for", "1h", "--reason", "r"], 64, "10m"),
        (&["em", "list", "--limit", "0"], 64, "--limit"),
        (&["em", "list", "-o", "yaml"], 64, "jsonl"),
        (&["em", "list", "--watch=1ms"], 64, "100ms"),
        (&["em", "list", "--listen", "x"], 64, "--listen"),
        (&["xyzzy"], 64, "error: no command \"xyzzy\"; linkis-rm --help lists them\n"),
        (&["limit", "lst"], 64, "nearest: linkis-rm limit list\n"),
        (&["em", "list", "--state", "slient"], 64, "nearest: silent\n"),
        // Words of earlier releases.
        (&["ems", "--no-headers", "--limit", "1"], 0, "host1:9102  unreported  "),
        (&["--no-headers", "em", "host1:9102"], 0, "EPOCH "),
        (&["--listen", "here"], 64, "HOST:PORT"),
        (&["em", "list", "--address", "here"], 64, "--address 127.0.0.1:50051"),
        (&["em", "list", "--token-file", "/nowhere"], 64, "--token-file: /nowhere cannot be read"),
        (&["limit", "diff", "/nowhere"], 64, "FILE: /nowhere"),
        // No service replies.
        (&["em", "list", "--address", "127.0.0.1:1"], 2, "No service replies at 127.0.0.1:1"),
        // No call is made.
        (&["--version"], 0, "linkis-rm "),
        (&["em", "drain", "--help"], 0, "Needs the role operator or admin, or ecm for their own objects."),
        (&["completions", "bash"], 0, "complete -F _linkis"),
    ] {
        let output = world.output(words, code);
        assert!(output.contains(got), "{words:?}: {output}");
    }
    let tasks = async || {
        let lines = world.output(&["tasks", "--no-headers"], 0);
        let names: Vec<_> = lines.lines().filter_map(|line| line.split_whitespace().next()).collect();
        names.join(" ")
            == "announcing audit cluster em_goes engine_stops expiry fullest history_indexes holds label_sets lease pruning reclaim \
                refusals retention silence tokens usage user_sums"
    };
    eventually("all tasks are listed", LONG, tasks).await;
    let left = world.rm.client.tickets(None).await.unwrap();
    assert_eq!(left.iter().map(|ticket| ticket.id).collect::<Vec<_>>(), [world.grants[0].ticket_id]);
    let reasons = "SELECT count(*) FROM linkis_resource_action_record
        WHERE (action, reason) IN (('forced', 'stuck'), ('limit_deleted', 'too strict'), ('resumed', 'now'))";
    assert_eq!(world.database.count(reasons).await, 3);
    assert_invariants(&world.database, &world.rm.client).await;
}

/// A file with one limit for each of `users` users.
fn file_of_limits(users: usize) -> String {
    let limit =
        |n| format!("[[limit]]\nlabels = {{ user = \"user{n}\" }}\nmax = {{ instances = {n}, memory = \"2g\" }}\n");
    (0..users).map(limit).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_commands_apply_file_and_page_lists() {
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
    let (code, diff, _) = run(&["limit", "diff", path]);
    assert!(diff.starts_with("+ user=user0: instances=0 memory=2 GB\n"), "{diff}");
    let summary =
        "- each user: instances=1\n... and 500 more\n1500 would be added, 0 would be changed, 1 would be removed\n";
    assert!(code == Some(1) && diff.ends_with(summary), "{code:?} {diff}");
    let (code, _, error) = run(&["limit", "apply", path]);
    assert!(code == Some(64) && error.contains("add --yes"), "{error}");
    let (code, applied, _) = run(&["limit", "apply", path, "--yes", "--reason", "as agreed"]);
    assert!(code == Some(0) && applied.ends_with("1500 added, 0 changed, 1 removed\n"), "{code:?} {applied}");
    assert_eq!(run(&["limit", "diff", path]), (Some(0), "the limits are those of the file\n".into(), String::new()));
    std::fs::write(&file, file_of_limits(USERS).replace("instances = 7,", "instances = 8,")).unwrap();
    let (_, diff, _) = run(&["limit", "diff", path]);
    assert!(diff.starts_with("~ user=user7: instances=8 memory=2 GB, was instances=7 memory=2 GB\n"), "{diff}");

    let listed = |words: &[&str]| run(&[&["limit", "list", "--no-headers"], words].concat()).1;
    assert_eq!(listed(&[]).lines().count(), USERS);
    assert_eq!(listed(&["--limit", "1200"]).lines().count(), 1200);
    let schema = schema("LimitService/ListLimits");
    for (words, count) in [(&["-o", "json"][..], USERS), (&["-o", "json", "--limit", "1200"], 1200)] {
        let document = parsed(&schema, &listed(words));
        let limits = document.get_field_by_name("limits").unwrap().as_list().unwrap().len();
        let has_more = !document.get_field_by_name("next_page_token").unwrap().as_str().unwrap().is_empty();
        assert_eq!((limits, has_more), (count, count < USERS));
    }
    // A reader that closes the pipe ends the command without an error.
    for words in [&["limit", "list", "-o", "json"][..], &["limit", "list", "--watch=100ms"]] {
        let mut command = program(&rm.address, words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(command.stdout.take().unwrap()).lines();
        let read = if words.contains(&"--watch=100ms") { USERS * 2 } else { 3 };
        assert_eq!(lines.by_ref().take(read).filter(|line| line.is_ok()).count(), read);
        drop(lines);
        let output = command.wait_with_output().unwrap();
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()), "{words:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_command_prints_positions_and_shortfalls() {
    let (_database, rm) = start_with_em(em("host1"), load(10, 10, 10)).await;
    let limit = Rule { max: each_user(1).max, ..each_user(1) };
    rm.client.set_limit(&limit).await.unwrap();
    rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    let mut waiting = Vec::new();
    for _ in 1..=2 {
        waiting.push(enqueue(&rm.client, patient(&em("host1"), "hadoop", load(2, 1, 1))).await);
    }
    let output = program(&rm.address, &["waiting"]).output().unwrap();
    let got = shorten_times(&text(&output.stdout));
    let lines: Vec<Vec<&str>> = got.lines().map(|line| line.split_whitespace().collect()).collect();
    let of = |place| {
        vec![
            "hadoop",
            "user=hadoop",
            place,
            "TIME",
            "2",
            "GB",
            "1",
            "TIME",
            "host1:9102",
            "IDE",
            "spark-3.2.1",
            "1",
            "-",
        ]
    };
    assert_eq!(lines[1..], [of("1"), of("2")], "{got}");
}

/// The source line in an error of PostgreSQL is not printed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn command_with_database_error_hides_the_source_line() {
    let database = Database::fresh().await;
    let url = database.url().replace(database.options.get_database().unwrap(), "nowhere");
    for words in [&["migrate"][..], &["token", "list"]] {
        let mut command = Command::new(*PROGRAM);
        command.args(words).env("DATABASE_URL", &url).env_remove("LINKIS_RM_DATA_DIR").stdin(Stdio::null());
        let output = command.output().unwrap();
        let got = text(&output.stdout) + &text(&output.stderr);
        assert!(!output.status.success() && got.contains("nowhere"), "{words:?}: {got}");
        assert!(!got.contains("at line"), "{words:?}: {got}");
    }
}
