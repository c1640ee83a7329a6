//! README and pages: each block of the README is run or compared with a shipped file, and new pages are short.

use std::{collections::BTreeSet, fs};

use prost::Message as _;
use prost_reflect::{DescriptorPool, DynamicMessage};
use rm_proto::v1 as proto;
use serde_json::Value;

use crate::{
    harness::*,
    identity::{ask, register, rm_of},
};

const README: &str = include_str!("../../README.md");
const CARGO: &str = include_str!("../../Cargo.toml");
const COMPOSE: &str = include_str!("../../docker-compose.yml");
const UNIT: &str = include_str!("../../deploy/systemd/linkis-rm.service");
const SYSUSERS: &str = include_str!("../../deploy/systemd/linkis-rm.sysusers");
const CHART: &str = include_str!("../../deploy/helm/linkis-rm/Chart.yaml");
const VALUES: &str = include_str!("../../deploy/helm/linkis-rm/values.yaml");

/// Maximum size of a page.
const PAGE_BYTES_MAX: u64 = 12_000;

/// Older pages above the maximum.
const LONG_PAGES: [&str; 7] =
    ["API.md", "ARCHITECTURE.md", "CELLS.md", "CHANGING.md", "EXTERNAL.md", "FAILOVER.md", "SECURITY.md"];

/// Returns the blocks of a page, each with its language.
fn blocks(page: &str) -> Vec<(&str, &str)> {
    let fenced = page.split("```").skip(1).step_by(2);
    fenced.map(|block| block.split_once('\n').unwrap()).collect()
}

/// Returns whether a shipped file has what a shell line of the README names; `None` for an unknown line.
fn is_shipped(line: &str) -> Option<bool> {
    let has = |text: &str, lines: &[&str]| lines.iter().all(|line| text.lines().any(|found| found.trim() == *line));
    let exists = |path: &str| repo_root().join(path).is_file();
    Some(match line {
        "cargo run --release" => has(CARGO, &["default-run = \"linkis-rm\""]),
        "target/release/linkis-rm demo" => has(CARGO, &["[[bin]]", "name = \"linkis-rm\"", "path = \"src/main.rs\""]),
        "docker compose up" => {
            has(COMPOSE, &["postgres:", "rm1: &rm", "rm2:", "gateway:", "- \"127.0.0.1:50051:50051\""])
        }
        "kubectl create secret generic linkis-rm-database --from-literal=url='postgres://…'" => {
            has(VALUES, &["existingSecret: linkis-rm-database", "key: url"])
        }
        "kubectl create secret tls linkis-rm-tls --cert=tls.crt --key=tls.key" => {
            README.contains("--set tls.existingSecret=linkis-rm-tls")
        }
        "helm install linkis-rm deploy/helm/linkis-rm --set tls.existingSecret=linkis-rm-tls" => {
            has(CHART, &["name: linkis-rm"]) && VALUES.contains("\ntls:\n  existingSecret: \"\"\n")
        }
        "install -m 755 target/release/linkis-rm /usr/local/bin/" => has(UNIT, &["ExecStart=/usr/local/bin/linkis-rm"]),
        "install -m 644 -D deploy/systemd/linkis-rm.sysusers /usr/lib/sysusers.d/linkis-rm.conf && systemd-sysusers" => {
            SYSUSERS.contains("\nu linkis-rm ") && has(UNIT, &["User=linkis-rm"])
        }
        "install -m 644 deploy/systemd/linkis-rm.service /etc/systemd/system/ && systemctl enable --now linkis-rm" => {
            exists("deploy/systemd/linkis-rm.service") && has(UNIT, &["[Install]", "WantedBy=multi-user.target"])
        }
        _ => return None,
    })
}

#[test]
fn readme_shell_lines_match_shipped_files() {
    let scripts = blocks(README).into_iter().filter(|(language, _)| *language == "sh");
    let lines: Vec<&str> = scripts.flat_map(|(_, script)| script.lines()).collect();
    let wrong: Vec<&str> = lines.iter().copied().filter(|line| is_shipped(line) != Some(true)).collect();
    assert!(wrong.is_empty() && lines.len() == 9, "neither run nor shipped: {wrong:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readme_refusal_equals_reply() {
    let (_database, rm) = start().await;
    let mut caller = rm_of(&channel_to(&rm.address).await, "");
    caller.register(register("host1")).await.unwrap();
    caller.request_resource(ask("host1", "alice", 4)).await.unwrap();
    let amounts = proto::LoadInstanceResource { memory: GB, cores: 13, instances: 1 };
    let resource = Some(proto::Resource { kind: Some(proto::resource::Kind::LoadInstance(amounts)) });
    let request = proto::RequestResourceRequest { resource, ..ask("host1", "bob", 13) };
    let reply = caller.request_resource(request).await.unwrap().into_inner();
    let pool = DescriptorPool::decode(proto::DESCRIPTORS).unwrap();
    let descriptor = pool.get_message_by_name("linkis.rm.v1.RequestResourceResponse").unwrap();
    let reply = DynamicMessage::decode(descriptor, reply.encode_to_vec().as_slice()).unwrap();
    let shown = blocks(README).into_iter().find(|(language, _)| *language == "json").unwrap().1;
    assert_eq!(serde_json::to_value(&reply).unwrap(), serde_json::from_str::<Value>(shown).unwrap());
    rm.stop().await;
}

/// The README's commands run elsewhere; its text blocks are pictures.
#[test]
fn readme_blocks_are_run_or_compared() {
    let languages: BTreeSet<&str> = blocks(README).into_iter().map(|(language, _)| language).collect();
    assert_eq!(languages, BTreeSet::from(["console", "json", "sh", "text", "toml"]));
}

#[test]
fn pages_are_short() {
    let docs = repo_root().join("docs");
    for folder in [docs.clone(), docs.join("cookbook")] {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let (name, bytes) = (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len());
            if name.ends_with(".md") {
                let is_long = bytes > PAGE_BYTES_MAX;
                assert_eq!(is_long, LONG_PAGES.contains(&name.as_str()), "{name} has {bytes} bytes");
            }
        }
    }
}
