//! The log of an instance: its start, its decisions and its errors.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use rm_proto::v1 as proto;
use rustix::process::{Pid, Signal};
use serde_json::Value;
use tonic::{Request, transport::Channel};

use crate::{certificates::Folder, harness::*, identity::*};

/// A program with its log in a file, mostly as JSON.
struct Logging {
    child: Child,
    log: PathBuf,
}

impl Logging {
    async fn start(database: &Database, folder: &Folder, settings: &[&str]) -> Self {
        let started = Self::spawn(database, folder, settings);
        eventually("it serves", LONG, || async { started.line("serving").is_some() }).await;
        started
    }

    fn spawn(database: &Database, folder: &Folder, settings: &[&str]) -> Self {
        let (log, url) = (folder.0.join("log"), database.url().replace("postgres@", "postgres:hunter2@"));
        let mut command = Command::new(*PROGRAM);
        command.args(["--listen", "127.0.0.1:0", "--database-url", &url]).args(settings);
        command.env_remove("RUST_LOG").env_remove("LINKIS_RM_DATA_DIR").stdout(Stdio::null());
        let child = command.stderr(File::create(&log).unwrap()).spawn().unwrap();
        Self { child, log }
    }

    fn text(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    /// Every line is an object; the last may be half written.
    fn lines(&self) -> Vec<Value> {
        let text = self.text();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
    }

    fn line(&self, message: &str) -> Option<Value> {
        self.lines().into_iter().find(|line| line["message"] == message)
    }

    fn decisions(&self) -> Vec<Value> {
        self.lines().into_iter().filter(|line| line["target"] == "linkis_rm::decisions").collect()
    }

    async fn connect(&self) -> Channel {
        let address = typed(self.line("serving").unwrap()["address"].as_str().unwrap());
        channel_to(&address).await
    }

    fn stop(mut self) {
        rustix::process::kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
    }
}

impl Drop for Logging {
    fn drop(&mut self) {
        // The process has ended, unless the test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_begins_with_version_page_and_instance() {
    let (database, folder) = (Database::fresh().await, Folder::new("first-line"));
    let process = Logging::start(&database, &folder, &[]).await;
    let (lines, serving) = (process.lines(), process.line("serving").unwrap());
    let is = |line: usize, field: &str, expected: &str| {
        assert_eq!(lines[line][field].as_str(), Some(expected), "{}", lines[line]);
    };
    is(0, "message", "linkis-rm starts");
    is(0, "version", env!("CARGO_PKG_VERSION"));
    // A build for tests has no revision, so that a commit does not rebuild it.
    is(0, "revision", "dev");
    let http_address = lines[1]["http_address"].as_str().unwrap();
    assert!(http_address.starts_with("127.0.0.1:"), "{}", lines[1]);
    is(0, "page", &format!("http://{http_address}/"));
    is(1, "message", "instance created");
    is(1, "address", serving["address"].as_str().unwrap());
    is(1, "protection", "nothing; every caller may do everything until a token is created");
    let socket = database.options.get_socket().unwrap().display();
    is(1, "database", &format!("{socket} ({})", database.options.get_database().unwrap()));
    let mut usage = proto::usage_service_client::UsageServiceClient::new(process.connect().await);
    let info = usage.get_server_info(proto::GetServerInfoRequest {}).await.unwrap().into_inner();
    is(1, "instance", &info.instance_id);
    assert!(process.decisions().is_empty(), "not at info");
    process.stop();
    let text = fs::read_to_string(folder.0.join("log")).unwrap();
    assert!(!text.contains("hunter2") && text.contains("all calls finished"), "{text}");
}

/// Returns the exit code and the log, as JSON, of a service whose private database cannot start.
fn failed_start(rust_log: &str) -> (Option<i32>, Vec<Value>) {
    let mut command = Command::new(*PROGRAM);
    command.args(["--listen", "127.0.0.1:0", "--data-dir", "/dev/null/data"]).env("RUST_LOG", rust_log);
    command.env_remove("DATABASE_URL").env_remove("LINKIS_RM_LOG_FORMAT");
    let ended = command.output().unwrap();
    let text = String::from_utf8(ended.stderr).unwrap();
    let line = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    (ended.status.code(), text.lines().map(line).collect())
}

#[test]
fn log_of_failed_start_ends_with_the_error() {
    let (code, lines) = failed_start("info");
    let (first, last) = (&lines[0], lines.last().unwrap());
    assert_eq!((code, first["message"].as_str()), (Some(1), Some("linkis-rm starts")), "{lines:#?}");
    assert!(first["page"].as_str().is_some_and(|page| page.starts_with("http://127.0.0.1:")), "{first}");
    assert_eq!((last["level"].as_str(), last["message"].as_str()), (Some("ERROR"), Some("linkis-rm ends")), "{last}");
    assert!(last["error"].as_str().is_some_and(|error| error.contains("/dev/null/data")), "{last}");
    for rust_log in ["off", "linkis_rm::decisions=debug"] {
        let (code, lines) = failed_start(rust_log);
        assert_eq!((code, lines.len()), (Some(1), 1), "every filter keeps the error alone: {lines:#?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn debug_log_shows_each_decision_with_trace() {
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    let (database, folder) = (Database::fresh().await, Folder::new("decisions"));
    let process = Logging::start(&database, &folder, &["--log-level", "debug", "--log-format", "json"]).await;
    let mut rm = rm_of(&process.connect().await, "");
    rm.register(register("host1")).await.unwrap();
    let mut traced = Request::new(ask("host1", "alice", 1));
    traced.metadata_mut().insert("traceparent", format!("00-{TRACE}-00f067aa0ba902b7-00").parse().unwrap());
    let ticket_id = granted(rm.request_resource(traced).await.unwrap().into_inner());
    rm.request_resource(ask("host1", "bob", 16)).await.unwrap();
    rm.request_resource(ask("host1", "bob", 17)).await.unwrap();
    rm.request_resource(ask("nowhere", "bob", 1)).await.unwrap_err();
    rm.resource_released(proto::ResourceReleasedRequest { ticket_id: ticket_id.clone(), ..Default::default() })
        .await
        .unwrap();

    eventually("all decisions are logged", LONG, || async { process.decisions().len() >= 6 }).await;
    let decisions = process.decisions();
    let em = "linkis-cg-engineconnmanager/host1:9102";
    let has = |at: usize, fields: &[(&str, &str)]| {
        for (field, expected) in fields {
            assert_eq!(decisions[at][field].as_str(), Some(*expected), "{field} of {:#?}", decisions[at]);
        }
    };
    has(0, &[("operation", "register"), ("outcome", "done"), ("em", em), ("by", "anonymous")]);
    has(1, &[("operation", "request"), ("outcome", "granted"), ("em", em), ("user", "alice"), ("creator", "IDE")]);
    has(1, &[("ticket_id", &ticket_id), ("trace_id", TRACE), ("level", "DEBUG")]);
    let scope = format!("em={em}");
    has(2, &[("outcome", "refused"), ("user", "bob"), ("scope", &scope), ("dimension", "cores")]);
    has(3, &[("outcome", "never_fits"), ("scope", &scope)]);
    has(4, &[("outcome", "failed"), ("user", "bob")]);
    assert!(decisions[4]["error"].as_str().unwrap().contains("nowhere"), "{:#?}", decisions[4]);
    has(5, &[("operation", "released"), ("outcome", "done"), ("ticket_id", &ticket_id), ("user", "alice"), ("em", em)]);
    assert!(decisions[5].get("trace_id").is_none() && decisions.len() == 6, "{decisions:#?}");
    process.stop();
}

/// The text format has no colours outside a terminal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_log_has_no_colours_outside_terminal() {
    let (database, folder) = (Database::fresh().await, Folder::new("text"));
    let process = Logging::spawn(&database, &folder, &["--log-format", "text"]);
    eventually("it serves", LONG, || async { process.text().contains(" serving ") }).await;
    let text = process.text();
    let first = text.lines().next().unwrap();
    for part in [" INFO ", "linkis-rm starts", concat!("version=\"", env!("CARGO_PKG_VERSION"), "\""), "page=\"http://"]
    {
        assert!(first.contains(part), "{part}: {first}");
    }
    assert!(!text.contains('\u{1b}') && !text.contains("hunter2"), "{text}");
    process.stop();
}
