//! Commands on a terminal: confirmation of destructive commands, width of tables, and progress of slow calls.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::fd::OwnedFd,
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use rm_model::{hold::NewHold, operation::LockKey};
use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};

use crate::{certificates::Folder, harness::*};

use super::{program, text, world};

/// Opens a terminal of this size. Returns both of its ends.
pub fn terminal(columns: u16, rows: u16) -> (File, OwnedFd) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap();
    let theirs = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    tcsetwinsize(&theirs, Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    (ours.into(), theirs.into())
}

/// A command on a terminal, with the text on it.
pub struct Typed {
    child: Child,
    terminal: File,
    chunks: mpsc::Receiver<Vec<u8>>,
    seen: Vec<u8>,
}

impl Typed {
    pub fn start(command: Command) -> Self {
        Self::start_on(80, command)
    }

    /// Starts a command on a terminal with this many columns.
    pub fn start_on(columns: u16, mut command: Command) -> Self {
        let (terminal, theirs) = terminal(columns, 24);
        let end = || Stdio::from(theirs.try_clone().unwrap());
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        drop((command, theirs));
        let (sender, chunks) = mpsc::sync_channel(64);
        let mut reader = terminal.try_clone().unwrap();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // A read at the end of a terminal returns an error.
            while let Ok(read @ 1..) = reader.read(&mut bytes) {
                let _ = sender.send(bytes[..read].to_vec());
            }
        });
        Self { child, terminal, chunks, seen: vec![] }
    }

    /// Waits until this is to be seen.
    #[track_caller]
    pub fn until(&mut self, what: &str) {
        self.press_until("", what);
    }

    /// Presses a key, again after each reply of the terminal, until `what` is to be seen.
    #[track_caller]
    pub fn press_until(&mut self, key: &str, what: &str) {
        let deadline = Instant::now() + LONG;
        while !text(&self.seen).contains(what) {
            self.types(key);
            let chunk = self.chunks.recv_timeout(deadline.saturating_duration_since(Instant::now()));
            self.seen.extend(chunk.unwrap_or_else(|_| panic!("{what:?} in {:?}", text(&self.seen))));
        }
    }

    pub fn types(&self, keys: &str) {
        (&self.terminal).write_all(keys.as_bytes()).unwrap();
    }

    /// Returns the exit code and all text of the terminal.
    pub fn end(mut self) -> (Option<i32>, String) {
        while let Ok(chunk) = self.chunks.recv_timeout(LONG) {
            self.seen.extend(chunk);
        }
        (self.child.wait().unwrap().code(), text(&self.seen))
    }
}

/// Runs a command on a terminal with typed input. Returns the exit code and the output.
fn typed_at(address: &str, words: &[&str], types: &str) -> (Option<i32>, String) {
    typed_on(80, address, words, types)
}

/// As [`typed_at`], on a terminal with this many columns.
pub fn typed_on(columns: u16, address: &str, words: &[&str], types: &str) -> (Option<i32>, String) {
    let typed = Typed::start_on(columns, program(address, words));
    typed.types(types);
    typed.end()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminal_commands_confirm_and_fit_width() {
    let world = world().await;
    let (id, address) = (world.grants[0].ticket_id.to_string(), &world.rm.address);
    let mut holder =
        world.database.transaction("LOCK TABLE linkis_em_resource_meta_data IN ACCESS EXCLUSIVE MODE").await;
    let mut audit = Typed::start(program(address, &["audit"]));
    audit.until("auditing \u{2026} ");
    execute(&mut holder, "ROLLBACK").await;
    let (code, seen) = audit.end();
    assert!(seen.contains(&format!("{ERASE}consistent: 3 EMs, 2 scopes, 2 tickets")), "{seen:?}");
    assert_eq!(code, Some(0));

    let lives = async || lives(&world.rm.client, world.grants[0].ticket_id).await;
    let (code, seen) = typed_at(address, &["ticket", "release", &id], "n\n");
    assert!(code == Some(1) && seen.contains("[y/N]") && !seen.contains("Why?"), "{seen}");
    let about = format!(
        "Release ticket {id} of hadoop, spark-3.2.1 on host1:9102 (memory=3 GB cores=2 instances=1, used since"
    );
    assert!(seen.replace("\r\n", "").contains(&about), "{seen}");
    let (code, seen) = typed_at(address, &["limit", "delete", "user"], "y\n\n");
    assert!(code == Some(64) && seen.contains("Why? ") && seen.contains("--reason: is required"), "{seen}");
    assert!(lives().await);
    let (code, seen) = typed_at(address, &["ticket", "list"], "");
    assert!(code == Some(0) && seen.lines().count() == 4 && seen.contains("TICKET"), "{seen}");
    assert!(seen.lines().all(|line| line.trim_end().chars().count() <= 80), "{seen}");
    assert!(seen.contains(&id[28..]) && !seen.contains(&id), "ids have their ends: {seen}");
    let (code, seen) = typed_at(address, &["ticket", "release", &id], "y\nits engine hangs\n");
    assert!(code == Some(0) && seen.contains("Why? ") && seen.contains(&format!("ticket {id} forced at")), "{seen}");
    assert!(!lives().await);
}

/// A question names the object, and what the act does to it. A declined act changes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminal_questions_name_the_object() {
    let (database, rm) = start().await;
    for instance in ["host1.example.com", "host2.example.com"] {
        rm.client.register(registration(em(instance), load(8, 4, 4))).await.unwrap();
    }
    let set = ["limit", "set", "team=data science", "--max", "cores=4"];
    assert!(program(&rm.address, &set).status().unwrap().success());
    let mut wanted = request(&em("host1.example.com"), "wang fang/etl", load(2, 1, 1));
    wanted.engine_type = String::new();
    let locked = rm.client.request_resource(&wanted).await.granted().ticket_id.to_string();
    for (words, question) in [
        (
            &["ticket", "release", &locked[28..]][..],
            "of \"wang fang/etl\" on host1.example.com:9102 (memory=2 GB cores=1",
        ),
        (
            &["em", "unregister", "host1"],
            "Its tickets end: locked memory=2 GB cores=1 instances=1. Unregister host1.exampl",
        ),
        (&["em", "unregister", "host2"], "It has no tickets. Unregister host2.example.com:9102?"),
        (&["limit", "delete", "team=data science"], "Delete the limit \"team=data science\", cores=4  set "),
        (&["limit", "set", "team=data science", "--max", "cores=5"], "\"team=data science\"now  cores=4  set "),
        (&["repair", "--em", "host1"], "sets the counters of host1.example.com:9102 to the sums of its tickets"),
        (&["repair", "--scope", "user=wang fang/etl"], "the counters of \"user=wang fang/etl\" to"),
    ] {
        let (code, seen) = typed_at(&rm.address, words, "n\n");
        let is_shown = seen.replace("\r\n  ", "").replace("\r\n", "").contains(question);
        assert!(code == Some(1) && is_shown && seen.contains("nothing was done"), "{words:?}: {seen}");
    }
    let (code, seen) = typed_at(&rm.address, &["limit", "delete", "team=data", "science"], "");
    assert!(code == Some(64) && seen.contains("\"science\" has no value; write LABEL=VALUE"), "{seen}");
    assert_eq!(rm.client.tickets(None).await.unwrap().len(), 1);
    assert_invariants(&database, &rm.client).await;
}

/// A confirmed change does not overwrite a change that another administrator made during the question.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminal_limits_change_detects_concurrent_change() {
    let (_database, rm) = start().await;
    rm.client.set_limit(&each_user(2)).await.unwrap();
    let folder = Folder::new("command-line-meanwhile");
    folder.write("limits.toml", "[[limit]]\neach = [\"creator\"]\nmax = { instances = 7 }\n");
    let file = folder.0.join("limits.toml");
    let (apply, delete) = (["limit", "apply", file.to_str().unwrap()], ["limit", "delete", "user"]);
    for (words, got, instances) in [(&apply[..], "meanwhile", 3), (&delete[..], "anonymous", 4)] {
        let mut typed = Typed::start(program(&rm.address, words));
        typed.until("[y/N]");
        rm.client.set_limit(&each_user(instances)).await.unwrap();
        typed.types("y\nas agreed\n");
        let (code, seen) = typed.end();
        assert!(code == Some(1) && seen.contains(got), "{code:?} {seen}");
        assert_eq!(rm.client.limits().await.unwrap(), [each_user(instances)]);
    }
    // Without a concurrent change, the command succeeds.
    for (words, left) in [(&delete[..], 0), (&apply[..], 1)] {
        let (code, seen) = typed_at(&rm.address, words, "y\nas agreed\n");
        assert_eq!((code, rm.client.limits().await.unwrap().len()), (Some(0), left), "{seen}");
    }
}

/// Back to the start of the line, which becomes empty.
const ERASE: &str = "\r\u{1b}[K";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminal_migration_shows_progress() {
    let database = Database::empty().await;
    // Another transaction creates a table of the same name and stays open.
    let mut holder = database.connect().await;
    execute(&mut holder, "BEGIN; CREATE TABLE linkis_resource_limit ()").await;
    let mut command = Command::new(*PROGRAM);
    command.arg("migrate").env("DATABASE_URL", database.url()).env_remove("LINKIS_RM_DATA_DIR");
    let mut migrate = Typed::start(command);
    migrate.until("migrating the schema \u{2026} ");
    execute(&mut holder, "ROLLBACK").await;
    let (code, seen) = migrate.end();
    assert!(seen.contains(" migrations were applied"), "{seen:?}");
    assert_eq!(code, Some(0));
}

/// The service replies before all tickets are counted. The command shows the rest at a terminal until the limits decide.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminal_limits_apply_waits_for_counting() {
    let database = Database::fresh().await;
    let request_timeout = Duration::from_secs(2);
    let rm = Instance::start_with(&database, settings().with_time("--request-timeout", request_timeout)).await;
    for host in ["host1", "host2"] {
        rm.client.register(registration(em(host), load(8, 4, 4))).await.unwrap();
        rm.client.request_resource(&request(&em(host), "hadoop", load(1, 1, 1))).await.granted();
    }
    let folder = Folder::new("command-line-counting");
    folder.write("limits.toml", "[[limit]]\neach = [\"creator\"]\nmax = { instances = 7 }\n");
    let file = folder.0.join("limits.toml");
    // A hold on the EM delays the counting.
    let key = LockKey::Em(em("host1"));
    let held = NewHold { key: key.clone(), duration: Duration::from_secs(600), reason: name("a look") };
    rm.client.hold(&held).await.unwrap();
    let words = ["limit", "apply", file.to_str().unwrap(), "--yes", "--reason", "as agreed"];
    let mut apply = Typed::start(program(&rm.address, &words));
    apply.until("changing the limits, and counting tickets for them, 1 EM left \u{2026} ");
    let replied = r#"grpc_server_handled_total{grpc_type="unary",grpc_service="linkis.rm.v1.LimitService",grpc_method="ReplaceLimits",grpc_code="OK"}"#;
    // To the dry run and to the change.
    eventually("the service replies", LONG, async || rm.metric(replied) >= 2.0).await;
    rm.client.release_hold(&key).await.unwrap();
    let (code, seen) = apply.end();
    assert!(seen.contains("1 added, 0 changed, 0 removed") && !seen.contains("still being counted"), "{seen:?}");
    assert_eq!(code, Some(0));
    let listed = text(&program(&rm.address, &["limit", "list"]).output().unwrap().stdout);
    assert!(listed.contains("  in force  "), "{listed}");
}
