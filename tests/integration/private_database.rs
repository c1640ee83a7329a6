//! The program as it starts without settings: with a private PostgreSQL of its own.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::Path,
    process::Command,
    time::Duration,
};

use rm_devpg::{DATABASE, PORT, USER};
use rustix::{process::Uid, thread::set_thread_res_uid};
use sqlx::{ConnectOptions as _, postgres::PgConnectOptions};

use crate::harness::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn private_database_survives_stop_and_kill() {
    let data_dir = scratch("private");
    let arguments = ["--data-dir", data_dir.to_str().unwrap()];
    let em1 = em("host1");
    let process = Process::start(&arguments);
    process.client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap();
    let first = process.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    assert_eq!(process.terminate(), Some(0));
    assert!(!data_dir.join("data/postmaster.pid").exists(), "PostgreSQL has stopped, too");

    let process = Process::start(&arguments);
    assert!(lives(&process.client, first.ticket_id).await, "data is kept");
    let second = process.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    process.kill();
    // At once: the old PostgreSQL may still be stopping.
    let process = Process::start(&arguments);
    for grant in [&first, &second] {
        assert!(lives(&process.client, grant.ticket_id).await, "no acknowledged ticket is lost");
    }
    assert_eq!(process.client.em(&em1).await.unwrap().locked, load(2, 2, 2));
    process.client.resource_released(&release(&first, "hadoop")).await.unwrap();
    assert_eq!(process.terminate(), Some(0));
    std::fs::remove_dir_all(data_dir).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn data_dir_of_running_instance_is_refused() {
    let data_dir = scratch("shared-private");
    let arguments = ["--data-dir", data_dir.to_str().unwrap()];
    let process = Process::start(&arguments);
    let second = std::process::Command::new(*PROGRAM)
        .args(["--listen", "127.0.0.1:0"])
        .args(arguments)
        .env_remove("DATABASE_URL")
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(1));
    let got = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(got.contains(data_dir.to_str().unwrap()), "{got}");
    eventually("the first still serves", Duration::from_secs(1), || async { process.client.ems().await.is_ok() }).await;
    // Tokens are made beside it, and when it does not run.
    let create = ["token", "create", "--name", "a", "--owner", "o", "--role", "admin"];
    let token = || {
        let made = Command::new(*PROGRAM).args(create).args(arguments).env_remove("DATABASE_URL").output().unwrap();
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

/// Other accounts are refused, even if the folder of the socket is open, or an earlier release that ran as `postgres` created the data.
/// The account takes over such data.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn private_database_refuses_other_accounts() {
    const NOBODY: u32 = 65534;
    let is_root = rustix::process::geteuid().is_root();
    let data_dir = scratch("private-access");
    let arguments = ["--data-dir", data_dir.to_str().unwrap()];
    let em1 = em("host1");
    let process = Process::start(&arguments);
    process.client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap();
    let grant = process.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
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
    // Only root can run as another account.
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

/// Runs the program with these arguments only. Returns its exit code and outputs.
async fn ended(words: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(*PROGRAM);
    command.args(words).env_remove("DATABASE_URL").env_remove("LINKIS_RM_DATA_DIR");
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let [out, error] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    (output.status.code(), out, error)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn command_without_database_makes_none() {
    let data_dir = scratch("no-database");
    let folder = data_dir.to_str().unwrap();
    let create = ["token", "create", "--name", "a", "--owner", "o", "--role", "admin", "--data-dir", folder];
    let revoke = ["token", "revoke", "--yes", "--name", "a", "--reason", "r", "--data-dir", folder];
    for words in [&create[..], &["token", "list", "--data-dir", folder], &revoke, &["migrate", "--data-dir", folder]] {
        for is_there in [false, true] {
            if is_there {
                fs::create_dir_all(&data_dir).unwrap();
            }
            let (code, out, error) = ended(words).await;
            assert!(code == Some(2) && out.is_empty(), "{words:?}: {code:?} {out} {error}");
            let wanted = format!("no database in {folder}; name the service's database by --data-dir or DATABASE_URL");
            assert!(error.contains(&wanted), "{words:?}: {error}");
            assert_eq!(fs::exists(&data_dir).unwrap(), is_there, "{words:?}");
            if is_there {
                assert_eq!(fs::read_dir(&data_dir).unwrap().count(), 0, "{words:?}");
                fs::remove_dir(&data_dir).unwrap();
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn command_names_its_database_and_instances() {
    let data_dir = scratch("named-database");
    let folder = data_dir.to_str().unwrap();
    let create = |user| ["token", "create", "--name", user, "--owner", "o", "--role", "admin", "--data-dir", folder];
    let process = Process::start(&["--data-dir", folder]);
    let announced = || async {
        let (code, out, error) = ended(&create("a")).await;
        assert!(code == Some(0) && out.starts_with("lrm_") && error.contains(folder), "{code:?} {out} {error}");
        error.contains("1 instance serves from it")
    };
    eventually("the instance is named", Duration::from_secs(20), announced).await;
    assert_eq!(process.terminate(), Some(0));
    let (code, out, error) = ended(&create("b")).await;
    assert!(code == Some(0) && out.starts_with("lrm_"), "{code:?} {out} {error}");
    assert!(error.contains("no instance serves from it"), "{error}");
    fs::remove_dir_all(data_dir).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn data_dir_full_of_other_files_is_refused() {
    let data_dir = scratch("other-files");
    fs::create_dir_all(data_dir.join("photos")).unwrap();
    fs::write(data_dir.join("notes.txt"), "mine").unwrap();
    let folder = data_dir.to_str().unwrap();
    let (code, _, error) = ended(&["--listen", "127.0.0.1:0", "--data-dir", folder]).await;
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("notes.txt") && error.contains("--data-dir"), "{error}");
    let mut left: Vec<_> = fs::read_dir(&data_dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["notes.txt", "photos"], "nothing is made there");
    // A new file system has this folder.
    fs::remove_file(data_dir.join("notes.txt")).unwrap();
    fs::rename(data_dir.join("photos"), data_dir.join("lost+found")).unwrap();
    assert_eq!(Process::start(&["--data-dir", folder]).terminate(), Some(0));
    fs::remove_dir_all(data_dir).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn command_line_error_shows_no_password() {
    let url = "postgres://u:Kw7x/Qz9v?Lm3t@h/db";
    for words in [
        &[url][..],
        &["--listen", url],
        &["--database-url", url],
        &["--database-url", "postgres://u:Kw7x#Qz9v,Lm3t@h/db"],
        &["--lock-ttl", url, "--history", url],
        &["token", "list", url],
        &["token", "list", "--database-url", url],
        &["health", "--address", url],
        &["em", "list", "--address", url],
        &["em", "list", "--output", url],
    ] {
        let (code, out, error) = ended(words).await;
        assert!(code.is_some_and(|code| code != 0) && !error.is_empty(), "{words:?}: {code:?} {error}");
        for piece in ["Kw7x", "Qz9v", "Lm3t"] {
            assert!(!error.contains(piece) && !out.contains(piece), "{words:?}: {error}");
        }
    }
}
