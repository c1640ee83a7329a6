//! Secrets that no log shows.

use std::{
    fs::{self, File},
    process::{Command, Stdio},
    time::Duration,
};

use rm_proto::v1 as proto;
use sha2::{Digest as _, Sha256};

use crate::{
    certificates::{FAR, Folder, authority, certify, connect_to},
    harness::*,
    identity::{ask, em_message, granted, register, rm_of, token},
    jwt,
};

/// Ends with the test.
struct Ended(std::process::Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trace_log_of_all_credentials_shows_no_secret() {
    let (database, folder) = (Database::fresh().await, Folder::new("secrets"));
    let admin = token(&database, "admin", &["--role", "admin"]);
    let refused = token(&Database::fresh().await, "elsewhere", &["--role", "admin"]);
    let ca = authority("ca");
    let server = certify(&ca, &["rm.example"], &[], FAR);
    folder.write_all(&server, &ca);
    let (files, log) = (folder.tls(Settings::default()), folder.0.join("log"));
    let signer = jwt::Signer::ec("k");
    folder.write("keys", &jwt::key_set(&[&signer]));
    let believed = folder.0.join("jwt");
    folder.write("jwt", &jwt::config(folder.0.join("keys").to_str().unwrap(), serde_json::json!({})).to_string());
    let claims = |more| jwt::claims("boss", more);
    let (good, bad) =
        (signer.sign(&claims(serde_json::json!({}))), signer.sign(&claims(serde_json::json!({"aud": "x"}))));
    let url = database.url().replace("postgres@", "postgres:hunter2@");
    let mut command = Command::new(*PROGRAM);
    command.args(["--listen", "127.0.0.1:0", "--database-url", &url]).env("RUST_LOG", "trace");
    command.env("LINKIS_RM_LOG_FORMAT", "text");
    command.args(files.arguments());
    command.args(["--jwt-config".as_ref(), believed.as_os_str()]);
    command.env_remove("LINKIS_RM_DATA_DIR").stdout(Stdio::null()).stderr(File::create(&log).unwrap());
    let mut process = Ended(command.spawn().unwrap());
    let address = || {
        let text = String::from_utf8_lossy(&fs::read(&log).unwrap()).into_owned();
        let line = text.lines().find_map(|line| Some(line.split_once("serving address=")?.1.trim().to_owned()));
        line.filter(|address| address.contains(':'))
    };
    eventually("it serves", Duration::from_secs(30), || async { address().is_some() }).await;

    let channel = connect_to(&address().unwrap(), &ca, Some(&certify(&ca, &["host1"], &[], FAR))).await.unwrap();
    let mut rm = rm_of(&channel, &admin);
    rm.register(register("host1")).await.unwrap();
    let ticket_id = granted(rm.request_resource(ask("host1", "alice", 1)).await.unwrap().into_inner());
    let engine = Some(proto::EngineInstance { application_name: "e".into(), instance: "host1:1".into() });
    let (user, em) = ("alice".to_owned(), em_message("host1"));
    let inited = proto::ResourceInitedRequest { ticket_id: ticket_id.clone(), user, em, engine, ..Default::default() };
    rm.resource_inited(inited).await.unwrap();
    rm.resource_released(proto::ResourceReleasedRequest { ticket_id, ..Default::default() }).await.unwrap();
    rm_of(&channel, &refused).register(register("host1")).await.unwrap_err();
    rm_of(&channel, &admin[..20]).register(register("host1")).await.unwrap_err();
    rm_of(&channel, &good).register(register("host1")).await.unwrap();
    rm_of(&channel, &bad).register(register("host1")).await.unwrap_err();
    let pid = rustix::process::Pid::from_child(&process.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(process.0.wait().unwrap().code(), Some(0));

    let text = String::from_utf8_lossy(&fs::read(&log).unwrap()).into_owned();
    assert!(
        text.contains("TRACE") && text.contains("DEBUG") && text.contains("the caller is not authenticated"),
        "{text}"
    );
    let hash: [u8; 32] = Sha256::digest(&admin).into();
    let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    let key = server.key.lines().nth(1).unwrap();
    let [signed, mistaken] = [&good, &bad].map(|jwt| jwt.rsplit_once('.').unwrap().1);
    let of_jwts = [signed, mistaken, &good[..good.len() - signed.len()][60..120]];
    let of_tokens = [&admin[4..20], &refused[4..20], &hex[..16], &format!("{:?}", &hash[..8])[1..20], "hunter2", key];
    for secret in of_tokens.into_iter().chain(of_jwts) {
        let lines: Vec<_> = text.lines().filter(|line| line.to_lowercase().contains(&secret.to_lowercase())).collect();
        assert!(lines.is_empty(), "{secret}: {lines:#?}");
    }
}
