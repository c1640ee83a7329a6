//! `demo`: its objects, its refusals, and its removal after a signal and after a kill.

use std::{
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use rm_model::ticket::{Ticket, TicketState};
use rustix::process::{Pid, Signal, kill_process};

use crate::{command_line::program, harness::*, identity::token};

/// Upper bound of a wait for a condition.
const PATIENCE: Duration = Duration::from_secs(60);

/// Exit code of a command that is not possible in the current state.
const EXIT_REFUSED: i32 = 1;

/// A running demo; killed on drop.
struct DemoProcess(Child);

impl DemoProcess {
    fn start(address: &str) -> Self {
        let mut command = program(address, &["demo"]);
        Self(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    fn interrupt(mut self) -> Output {
        let pid = Pid::from_child(&self.0);
        kill_process(pid, Signal::INT).unwrap();
        let status = self.0.wait().unwrap();
        let read = |from: &mut dyn std::io::Read| {
            let mut bytes = Vec::new();
            from.read_to_end(&mut bytes).unwrap();
            bytes
        };
        let (stdout, stderr) = (read(self.0.stdout.as_mut().unwrap()), read(self.0.stderr.as_mut().unwrap()));
        Output { status, stdout, stderr }
    }
}

impl Drop for DemoProcess {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn run(mut command: Command) -> (Option<i32>, String) {
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    (output.status.code(), text_of(&output))
}

fn text_of(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
}

/// Waits until the demo has a used ticket on a reporting EM, and a limit.
async fn await_demo(rm: &Instance) {
    let lives = || async {
        let (ems, tickets) = (rm.client.ems().await.unwrap(), rm.client.tickets(None).await.unwrap());
        ems.len() == 12 && tickets.iter().any(|ticket| !ticket.is_locked())
    };
    eventually("the demo has EMs and a used ticket", PATIENCE, lives).await;
}

async fn assert_no_objects(rm: &Instance) {
    assert_eq!(rm.client.ems().await.unwrap().len(), 0);
    assert_eq!(rm.client.limits().await.unwrap().len(), 0);
    assert_eq!(rm.client.tickets(None).await.unwrap().len(), 0);
    assert_eq!(rm.client.waiting().await.unwrap().len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demo_interrupted_removes_its_objects() {
    let (_database, rm) = start().await;
    let demo = DemoProcess::start(&rm.address);
    await_demo(&rm).await;
    let tickets = rm.client.tickets(None).await.unwrap();
    assert!(tickets.iter().all(|ticket| ticket.user.as_str().starts_with("demo-")), "{tickets:?}");
    let is_idle = |ticket: &Ticket| matches!(ticket.state, TicketState::Used { idle_since: Some(_), .. });
    let idle = || async { rm.client.tickets(None).await.unwrap().iter().any(is_idle) };
    eventually("an engine is idle", PATIENCE, idle).await;
    let ended = tokio::task::spawn_blocking(|| demo.interrupt()).await.unwrap();
    assert_eq!(ended.status.code(), Some(0), "{}", text_of(&ended));
    assert!(text_of(&ended).ends_with("removed 12 EMs and 3 limits of the demo\n"), "{}", text_of(&ended));
    let is_empty = || async { rm.client.waiting().await.unwrap().is_empty() };
    eventually("cancelled requests have left their wait queues", PATIENCE, is_empty).await;
    assert_no_objects(&rm).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demo_beside_other_em_is_refused() {
    let (_database, rm) = start_with_host1().await;
    let (code, text) = run(program(&rm.address, &["demo"])).await;
    assert_eq!(code, Some(EXIT_REFUSED), "{text}");
    assert!(text.contains("host1:9102 is registered"), "{text}");
    assert_eq!((rm.client.ems().await.unwrap().len(), rm.client.limits().await.unwrap().len()), (1, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demo_killed_is_removed_by_clean() {
    let (_database, rm) = start().await;
    let demo = DemoProcess::start(&rm.address);
    await_demo(&rm).await;
    drop(demo);
    let (code, text) = run(program(&rm.address, &["demo"])).await;
    assert_eq!(code, Some(EXIT_REFUSED), "{text}");
    assert!(text.contains("linkis-rm demo --clean"), "{text}");
    let (code, text) = run(program(&rm.address, &["demo", "--clean"])).await;
    assert_eq!((code, text.as_str()), (Some(0), "removed 12 EMs and 3 limits of the demo\n"));
    let is_empty = || async { rm.client.waiting().await.unwrap().is_empty() };
    eventually("requests of the killed demo have left their wait queues", PATIENCE, is_empty).await;
    assert_no_objects(&rm).await;
    let (code, text) = run(program(&rm.address, &["demo", "--clean"])).await;
    assert_eq!((code, text.as_str()), (Some(0), "removed 0 EMs and 0 limits of the demo\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demo_without_administrator_names_required_token() {
    let (database, rm) = start().await;
    let folder = scratch("demo-token");
    std::fs::create_dir_all(&folder).unwrap();
    let viewer = token(&database, "a viewer", &["--role", "viewer"]);
    let file = folder.join("token");
    std::fs::write(&file, viewer).unwrap();
    let asks = || async { rm.client.ems().await.is_err() };
    eventually("the service requires a token", PATIENCE, asks).await;
    for with_token in [false, true] {
        let mut command = program(&rm.address, &["demo"]);
        if with_token {
            command.arg("--token-file").arg(&file);
        }
        let (code, text) = run(command).await;
        assert_eq!(code, Some(EXIT_REFUSED), "{text}");
        assert!(text.contains("needs an administrator's token"), "{text}");
    }
}
