//! The program as it starts without settings: with a private PostgreSQL of its own.

use std::time::Duration;

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
    assert_eq!(process.terminate(), Some(0));
    std::fs::remove_dir_all(data_dir).unwrap();
}
