//! Files that are shipped beside the program: they name existing metrics, settings and files.

use std::{
    collections::BTreeSet,
    fs,
    path::PathBuf,
    process::{Command, Output},
    time::Duration,
};

use rm_client::ResourceRequest;
use serde_json::Value;

use crate::{
    certificates::{FAR, Folder, authority, certify},
    harness::*,
};

const ALERTS: &str = include_str!("../../deploy/prometheus/alerts.yml");
const ALERTS_TEST: &str = include_str!("../../deploy/prometheus/alerts_test.yml");
const DASHBOARD: &str = include_str!("../../deploy/grafana/linkis-rm.json");
const UNIT: &str = include_str!("../../deploy/systemd/linkis-rm.service");
const ALERTS_PAGE: &str = include_str!("../../docs/ALERTS.md");

/// Files that configure the program.
const SHIPPED: [(&str, &str); 6] = [
    ("the chart", include_str!("../../deploy/helm/linkis-rm/templates/deployment.yaml")),
    ("the chart's values", include_str!("../../deploy/helm/linkis-rm/values.yaml")),
    ("the compose file", include_str!("../../docker-compose.yml")),
    ("the image", include_str!("../../Dockerfile")),
    ("the unit", UNIT),
    ("the unit's environment", include_str!("../../deploy/systemd/linkis-rm.env")),
];

fn folder(name: &str) -> PathBuf {
    repo_root().join("deploy").join(name)
}

/// Runs a tool; `None` if it is not installed.
fn tool(command: &mut Command) -> Option<Output> {
    let ended = command.output().ok();
    if ended.is_none() {
        skip_without(&command.get_program().to_string_lossy(), ".ci/run gets what it can");
    }
    ended
}

fn output_of(ended: &Output) -> String {
    [&ended.stdout, &ended.stderr].map(|out| String::from_utf8_lossy(out).into_owned()).concat()
}

/// Returns the metrics that an expression names.
fn metrics(expression: &str) -> impl Iterator<Item = &str> {
    let words = expression.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| ["linkis_rm_", "grpc_server_", "process_"].iter().any(|prefix| word.starts_with(prefix)))
}

/// Returns the settings that a text names by their environment variables.
fn variables(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'));
    words.filter(|word| word.strip_prefix("LINKIS_RM_").is_some_and(|name| !name.is_empty())).collect()
}

/// Returns all expressions of a dashboard.
fn expressions(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            for (key, value) in members {
                match value {
                    Value::String(text) if key == "expr" || key == "query" => found.push(text.clone()),
                    value => expressions(value, found),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| expressions(value, found)),
        _ => {}
    }
}

/// The names of all alerts.
fn alerts() -> Vec<&'static str> {
    ALERTS.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect()
}

/// Metrics that exist only after a fetch from an external cluster.
const SELDOM: [&str; 1] = ["linkis_rm_external_fetches_total"];

/// The names of all series of an instance, by family.
fn exported(instance: &Instance) -> BTreeSet<String> {
    let text = instance.metrics.text();
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let names = types.flat_map(|(name, kind)| match kind {
        "histogram" => ["_bucket", "_sum", "_count"].map(|part| format!("{name}{part}")).to_vec(),
        _ => vec![name.to_owned()],
    });
    names.collect()
}

/// Else a panel would be empty, and an alert silent, for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dashboard_and_alerts_name_existing_metrics() {
    let (database, instance) = start().await;
    // Some are there only once something has happened, or with a certificate.
    let folder = Folder::new("deploy-tls");
    let ca = authority("ca");
    folder.write_all(&certify(&ca, &["localhost"], &[], FAR), &ca);
    let encrypted = Instance::start_with(&database, folder.tls(settings())).await;
    let (client, em1) = (&instance.client, em("host1"));
    client.set_limit(&each_user(20)).await.unwrap();
    client.register(registration(em1.clone(), load(64, 16, 20))).await.unwrap();
    let grant = client.request_resource(&request(&em1, "alice", load(1, 1, 1))).await.granted();
    let patient = ResourceRequest { wait_timeout: Duration::from_secs(60), ..request(&em1, "alice", load(64, 1, 1)) };
    let waits = tokio::spawn({
        let client = client.clone();
        async move { client.request_resource(&patient).await }
    });
    let stands = || async { client.waiting().await.unwrap().len() == 1 };
    eventually("it stands in line", Duration::from_secs(30), stands).await;
    client.resource_released(&release(&grant, "alice")).await.unwrap();
    waits.await.unwrap().granted();
    client.audit().await.unwrap();

    let mut of_dashboard = Vec::new();
    expressions(&serde_json::from_str(DASHBOARD).unwrap(), &mut of_dashboard);
    let named = metrics(ALERTS).chain(of_dashboard.iter().flat_map(|expression| metrics(expression)));
    let named: BTreeSet<&str> = named.filter(|name| !SELDOM.contains(name)).collect();
    assert!(named.len() > 40, "{named:?}");
    let missing = || {
        let there = &exported(&instance) | &exported(&encrypted);
        named.iter().copied().filter(|name| !there.contains(*name)).collect::<Vec<_>>()
    };
    let all_are_there = async || {
        let missing = missing();
        println!("not exported: {missing:?}");
        missing.is_empty()
    };
    eventually("all metrics are exported", LONG, all_are_there).await;
    instance.stop().await;
    encrypted.stop().await;
}

/// Parts that an alert of `rules` lacks: a description, a link to its paragraph in `page`, or a part of that paragraph.
fn alert_gaps(rules: &str, page: &str) -> Vec<String> {
    let mut gaps = Vec::new();
    for rule in rules.split("- alert: ").skip(1) {
        let name = rule.lines().next().unwrap_or_default();
        let field = |key: &str| rule.lines().find_map(|line| line.trim().strip_prefix(key)?.strip_prefix(": "));
        let runbook = format!("docs/ALERTS.md#{}", name.to_lowercase());
        if !field("description").is_some_and(|text| text.ends_with('.')) {
            gaps.push(format!("{name}: no description in full sentences"));
        }
        if field("runbook_url") != Some(runbook.as_str()) {
            gaps.push(format!("{name}: runbook_url is not {runbook}"));
        }
        let section = page.split_once(&format!("\n## {name}\n")).map_or("", |(_, rest)| rest);
        let section = section.split("\n#").next().unwrap_or_default();
        let severity = format!("- **Severity:** {}.", field("severity").unwrap_or_default());
        for part in [&severity, "- **Meaning:** ", "- **Impact:** ", "- **Action:** "] {
            if !section.lines().any(|line| line.starts_with(part)) {
                gaps.push(format!("{name}: no \"{}\" in docs/ALERTS.md", part.trim()));
            }
        }
    }
    gaps
}

#[test]
fn alerts_have_tests_and_runbooks() {
    let alerts = alerts();
    assert!(alerts.len() >= 20, "{alerts:?}");
    for alert in alerts {
        let tests = ALERTS_TEST.lines().filter(|line| line.contains(&format!("alertname: {alert}"))).count();
        assert!(tests >= 2, "{alert} is tested in a healthy and in a faulty state");
    }
    assert_eq!(alert_gaps(ALERTS, ALERTS_PAGE), Vec::<String>::new());
}

#[test]
fn alert_gaps_lists_each_missing_part() {
    let rules = "- alert: A\n  severity: info\n  description: Late\n  runbook_url: docs/ALERTS.md#b\n";
    let complete = rules.replace("Late", "Calls are late.").replace("#b", "#a");
    let section = "\n## A\n\n- **Severity:** info.\n- **Meaning:** m\n- **Impact:** i\n- **Action:** a\n";
    assert_eq!(alert_gaps(rules, "").len(), 6);
    assert_eq!(alert_gaps(&complete, &section.replace("info", "critical")).len(), 1);
    assert!(alert_gaps(&complete, section).is_empty());
}

#[test]
fn alert_rules_pass_promtool_tests() {
    for arguments in [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]] {
        let Some(ended) = tool(Command::new("promtool").args(arguments).current_dir(folder("prometheus"))) else {
            return;
        };
        assert!(ended.status.success(), "{}", output_of(&ended));
    }
}

/// Else a setting would have no effect.
#[test]
fn shipped_files_name_known_settings() {
    let help = |arguments: &[&str]| {
        let ended = Command::new(*PROGRAM).args(arguments).output().unwrap();
        assert!(ended.status.success(), "{}", output_of(&ended));
        output_of(&ended)
    };
    let helps = [help(&["--help"]), help(&["serve", "--help"])].concat();
    let known = variables(&helps);
    assert!(known.len() > 30, "{known:?}");
    for (file, text) in SHIPPED {
        let named = variables(text);
        assert!(!named.is_empty(), "{file} names none");
        assert!(named.is_subset(&known), "{file} names {:?}", &named - &known);
    }
}

/// How much of the machine the unit can reach, by systemd's own reckoning: less than 2 of 10.
#[test]
fn systemd_unit_is_valid_and_confined() {
    let scratch = Folder::new("unit");
    let unit = scratch.0.join("linkis-rm.service");
    fs::write(&unit, UNIT.replace("/usr/local/bin/linkis-rm", &PROGRAM)).unwrap();
    let Some(verified) = tool(Command::new("systemd-analyze").arg("verify").arg(&unit)) else { return };
    assert!(verified.status.success() && output_of(&verified).is_empty(), "{}", output_of(&verified));
    let mut security = Command::new("systemd-analyze");
    let security = security.args(["security", "--offline=true", "--threshold=20"]).arg(&unit).output().unwrap();
    assert!(security.status.success(), "{}", output_of(&security));
}
