//! The program as it starts without settings: with a private PostgreSQL of its own.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::Path,
    process::Command,
    time::Duration,
};

use linkis_rm::store::embedded::{DATABASE, PORT, USER};
use rustix::{process::Uid, thread::set_thread_res_uid};
use sqlx::{ConnectOptions as _, postgres::PgConnectOptions};

use crate::harness::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_keeps_its_data_stops_cleanly_and_recovers_from_kill_nine() {
    let data_dir = scratch("private");
    let arguments = ["--data-dir", data_dir.to_str().unwrap()];
    let host = em("host1");
    let process = Process::start(&arguments);
    process.client.register(registration(host.clone(), load(10, 10, 10))).await.unwrap();
    let first = process.client.request_resource(&request(&host, "hadoop", load(1, 1, 1))).await.granted();
    assert_eq!(process.terminate(), Some(0));
    assert!(!data_dir.join("data/postmaster.pid").exists(), "PostgreSQL has stopped, too");

    let process = Process::start(&arguments);
    assert!(lives(&process.client, first.ticket_id).await, "data is kept");
    let second = process.client.request_resource(&request(&host, "hadoop", load(1, 1, 1))).await.granted();
    process.kill();
    // At once: the old PostgreSQL may still be stopping.
    let process = Process::start(&arguments);
    for grant in [&first, &second] {
        assert!(lives(&process.client, grant.ticket_id).await, "nothing that was told is lost");
    }
    assert_eq!(process.client.em(&host).await.unwrap().locked, load(2, 2, 2));
    process.client.resource_released(&release(&first, "hadoop")).await.unwrap();
    assert_eq!(process.terminate(), Some(0));
    std::fs::remove_dir_all(data_dir).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_instance_on_the_same_folder_is_told_so() {
    let data_dir = scratch("shared-private");
    let arguments = ["--data-dir", data_dir.to_str().unwrap()];
    let process = Process::start(&arguments);
    let second = std::process::Command::new(env!("CARGO_BIN_EXE_linkis-rm"))
        .args(["--listen", "127.0.0.1:0"])
        .args(arguments)
        .env_remove("DATABASE_URL")
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(1));
    let told = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(told.contains(data_dir.to_str().unwrap()), "{told}");
    eventually("the first still serves", Duration::from_secs(1), || async { process.client.ems().await.is_ok() }).await;
    // Tokens are made beside it, and when it does not run.
    let create = ["tokens", "create", "--name", "a", "--owner", "o", "--role", "admin"];
    let token = || {
        let made = Command::new(PROGRAM).args(create).args(arguments).env_remove("DATABASE_URL").output().unwrap();
        assert!(made.status.success() && made.stdout.starts_with(b"lrm_"), "{made:?}");
    };
    token();
    let locks = || async { process.client.ems().await.is_err() };
    eventually("it is known", Duration::from_secs(5), locks).await;
    assert_eq!(process.terminate(), Some(0));
    token();
    std::fs::remove_dir_all(data_dir).unwrap();
}

/// Connects to the server in `socket_dir` from a thread that belongs to `uid`.
fn connect_as(uid: u32, socket_dir: &Path) -> Result<(), sqlx::Error> {
    let options =
        PgConnectOptions::new_without_pgpass().socket(socket_dir).port(PORT).username(USER).database(DATABASE);
    let connecting = std::thread::spawn(move || {
        set_thread_res_uid(None, Some(Uid::from_raw(uid)), None).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(options.connect()).map(drop)
    });
    connecting.join().unwrap()
}

/// Not even where the folder of the socket is open, nor if the data was made by a release that trusted its folder, and ran as
/// `nobody`; that data is taken over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_other_account_can_connect() {
    const NOBODY: u32 = 65534;
    let is_root = rustix::process::geteuid().is_root();
    let data_dir = scratch("private-access");
    let arguments = ["--data-dir", data_dir.to_str().unwrap()];
    let host = em("host1");
    let process = Process::start(&arguments);
    process.client.register(registration(host.clone(), load(10, 10, 10))).await.unwrap();
    let grant = process.client.request_resource(&request(&host, "hadoop", load(1, 1, 1))).await.granted();
    assert_eq!(process.terminate(), Some(0));

    fs::write(data_dir.join("data/pg_hba.conf"), "local all all trust\n").unwrap();
    if is_root {
        let handed = Command::new("chown").args(["-R", "nobody", "data", "socket"]).current_dir(&data_dir).status();
        assert!(handed.unwrap().success());
    }
    let process = Process::start(&arguments);
    assert!(lives(&process.client, grant.ticket_id).await, "data is kept");
    let socket_dir = data_dir.join("socket");
    assert_eq!(fs::metadata(&socket_dir).unwrap().mode() & 0o7777, 0o700);
    connect_as(rustix::process::geteuid().as_raw(), &socket_dir).unwrap();
    // Only root can be somebody else.
    if is_root {
        fs::set_permissions(&socket_dir, Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(socket_dir.join(format!(".s.PGSQL.{PORT}")), Permissions::from_mode(0o777)).unwrap();
        let refused = connect_as(NOBODY, &socket_dir).unwrap_err().to_string();
        assert!(refused.contains("Peer authentication failed"), "{refused}");
    }
    for path in ["data", "socket"] {
        assert_ne!(fs::metadata(data_dir.join(path)).unwrap().uid(), NOBODY, "{path}");
    }
    assert_eq!(process.terminate(), Some(0));
    fs::remove_dir_all(data_dir).unwrap();
}
