//! `linkis-rm health`, and the notifications to systemd.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    os::unix::net::UnixDatagram,
    process::{Command, Output},
    task::{Context, Poll},
};

use tokio_util::task::AbortOnDropHandle;
use tonic::{
    Code, Status,
    body::Body,
    server::NamedService,
    transport::{Server, server::TcpIncoming},
};

use crate::{
    certificates::{FAR, Folder, authority, certify},
    harness::*,
    proxy::FaultPlan,
};

/// Runs `linkis-rm health` with these arguments. Returns the exit code and the output.
async fn health(words: &[&str]) -> (i32, String) {
    let mut command = Command::new(*PROGRAM);
    // In a container, the command has the settings of the service.
    command.arg("health").args(words).env_remove("LINKIS_RM_ADDRESS");
    command.env("LINKIS_RM_LISTEN", "0.0.0.0:1").env("DATABASE_URL", "postgres://elsewhere/rm");
    let ended = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let Output { status, stdout, stderr } = ended;
    let got = [stdout, stderr].map(|text| String::from_utf8(text).unwrap()).concat();
    (status.code().unwrap(), got)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_command_reports_state_and_reason() {
    let database = Database::fresh().await;
    let (proxy, behind) = database.behind_proxy("health");
    let instance = Instance::start(&behind).await;
    let address = instance.address.as_str();
    let serves = || async { health(&["--address", address]).await == (0, format!("{address} serves\n")) };
    eventually("it serves", LONG, serves).await;
    assert_eq!(health(&["--address", address, "--service", "liveness"]).await.0, 0);
    let (code, got) = health(&["--address", address, "--service", "nonesuch"]).await;
    assert!(code == 1 && got.contains("has no service \"nonesuch\""), "{got}");

    proxy.set_fault_plan(FaultPlan::Hole);
    proxy.cut_all();
    let says_so = || async {
        let (code, got) = health(&["--address", address]).await;
        code == 1 && got.contains("does not serve: it stops, or its database does not reply")
    };
    eventually("it says that it does not serve", LONG, says_so).await;
    assert_eq!(health(&["--address", address, "--service", "liveness"]).await.0, 0, "the process is alive");
    proxy.set_fault_plan(FaultPlan::Fair);
    eventually("it serves again", LONG, serves).await;

    let gone = address.to_owned();
    instance.stop().await;
    let (code, got) = health(&["--address", &gone]).await;
    assert!(code == 1 && got.contains("does not reply: ") && got.contains("refused"), "{got}");
    let (code, got) = health(&["--address", "nowhere"]).await;
    assert!(code == 1 && got.contains("is not the address of a service"), "{got}");
}

/// A fake service with this reply to a health check.
#[derive(Clone)]
struct Says(Status);

impl NamedService for Says {
    const NAME: &'static str = "grpc.health.v1.Health";
}

impl tower::Service<http::Request<Body>> for Says {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<http::Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<Body>) -> Self::Future {
        ready(Ok(self.0.clone().into_http()))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_command_escapes_foreign_text() {
    for (code, prefix) in [(Code::Unavailable, "does not reply: "), (Code::Internal, "fails the health check: ")] {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = Server::builder().add_service(Says(Status::new(code, "\u{1b}[2Jgone\u{202e}")));
        let _serving = AbortOnDropHandle::new(tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener))));
        let (code, got) = health(&["--address", &address]).await;
        assert!(code == 1 && got.contains(prefix), "{got:?}");
        assert!(got.contains(r"\u{1b}[2Jgone\u{202e}") && !got.contains(['\u{1b}', '\u{202e}']), "{got:?}");
    }
}

/// One good instance does not outweigh a failed one, and a silent instance delays no result.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_command_requires_every_instance() {
    let (_database, instance) = start().await;
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let both = format!("{},{}", instance.address, silent.local_addr().unwrap());
    let only_the_silent_does_not = || async {
        let (code, got) = health(&["--address", &both, "--timeout", "300ms"]).await;
        code == 1 && got.contains(&format!("{} serves", instance.address)) && got.contains("no reply within 300ms")
    };
    eventually("the silent instance is named", LONG, only_the_silent_does_not).await;
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_command_verifies_server_certificate() {
    let (database, folder) = (Database::fresh().await, Folder::new("health-tls"));
    let ca = authority("ca");
    folder.write_all(&certify(&ca, &["localhost"], &[], FAR), &ca);
    let instance = Instance::start_with(&database, folder.tls(settings())).await;
    let port = instance.address.rsplit_once(':').unwrap().1;
    let address = format!("https://localhost:{port}");
    let file = folder.0.join("ca");
    let believed = ["--address", &address, "--ca-cert", file.to_str().unwrap()];
    // Health needs no token.
    eventually("it serves", LONG, || async { health(&believed).await.0 == 0 }).await;
    let (code, got) = health(&["--address", &address]).await;
    assert!(code == 1 && got.contains("does not reply") && got.contains("certificate"), "{got}");
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn systemd_receives_ready_and_stopping() {
    let (database, folder) = (Database::fresh().await, Folder::new("notify"));
    let path = folder.0.join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    let got = || {
        let mut text = [0; 256];
        let length = socket.recv(&mut text).unwrap();
        String::from_utf8_lossy(&text[..length]).into_owned()
    };
    let mut command = Command::new(*PROGRAM);
    command.args(["--database-url", &database.url()]).env("NOTIFY_SOCKET", &path);
    let process = Process::start_command(&mut command, |_| ());
    assert_eq!(got(), "READY=1\n");
    assert_eq!(process.terminate(), Some(0));
    assert_eq!(got(), "STOPPING=1\n");
}
