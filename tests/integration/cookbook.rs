//! Cookbook: the commands of its pages print what the pages show, each page on a cluster of its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use rm_client::ResourceRequest;
use rm_model::{
    adoption::AdoptTicket,
    em::EmInstance,
    hold::NewHold,
    limit::{LabelPattern, Rule},
    limit_mode::LimitMode,
    name::Labels,
    operation::{LockKey, RegisterEm},
    report::{EmReport, Health},
    resource::{Dimension, LoadInstanceAmounts, Resource, ResourceParts, YarnAmounts},
};
use rm_proto::v1::{self as proto, usage_service_client::UsageServiceClient};
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::command_line::program;
use crate::documents::{World, verify};
use crate::external::{FAIR, Yarn, client_of, config, provider, put};
use crate::harness::*;

const INDEX: &str = include_str!("../../docs/COOKBOOK.md");

const QUESTIONS: &str = include_str!("../../docs/cookbook/questions.md");

/// Pages of the cookbook.
const PAGES: [(&str, &str); 6] = [
    ("cookbook/users.md", include_str!("../../docs/cookbook/users.md")),
    ("cookbook/clients.md", include_str!("../../docs/cookbook/clients.md")),
    ("cookbook/questions.md", QUESTIONS),
    ("cookbook/operators.md", include_str!("../../docs/cookbook/operators.md")),
    ("cookbook/administrators.md", include_str!("../../docs/cookbook/administrators.md")),
    ("cookbook/sharing.md", include_str!("../../docs/cookbook/sharing.md")),
];

/// Maximum size of a page.
const PAGE_BYTES_MAX: usize = 12_000;

fn labels(of: &[(&str, &str)]) -> Labels {
    let pairs = of.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    Labels::parse("labels", pairs.collect()).unwrap()
}

fn rule(of: &[(&str, Option<&str>)], mode: LimitMode, max: &[(Dimension, i64)]) -> Rule {
    let pattern: BTreeMap<_, _> = of.iter().map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned))).collect();
    Rule {
        pattern: LabelPattern::new(pattern),
        mode,
        max: max.iter().cloned().collect(),
        guarantee: Default::default(),
    }
}

/// Returns the resource of an engine with amounts of a queue.
fn in_queue((gb, cores): (i64, i64), queue_name: &str, (queue_gb, queue_cores): (i64, i64)) -> Resource {
    let driver = LoadInstanceAmounts { memory: gb * GB, cores, instances: 1 };
    let (queue_name, application_id) = (queue_name.into(), String::new());
    let (queue_memory, queue_instances) = (queue_gb * GB, 1);
    let yarn = YarnAmounts { queue_memory, queue_cores, queue_instances, queue_name, application_id };
    Resource::from_parts(ResourceParts::DriverAndYarn(driver, yarn)).unwrap()
}

async fn adopt(rm: &Instance, number: u8, host: &EmInstance, user: &str, creator: &str, used: Resource) -> Uuid {
    let ticket_id = Uuid::parse_str(&format!("5d1b8e2c-6f0a-4f59-9a55-2f9b1c4f7a{number:02x}")).unwrap();
    let adopt = AdoptTicket {
        ticket_id,
        user: name(user),
        creator: name(creator),
        engine_type: "spark-3.2.1".into(),
        em: host.clone(),
        labels: labels(&[("tenant", "blue")]),
        engine: engine(&format!("engine{number}")),
        used,
    };
    rm.client.adopt_ticket(&adopt).await.unwrap();
    ticket_id
}

/// Sets up three EMs with a few engines, limits, a drain, a hold, and an external cluster with queues.
async fn cluster(rm: &Instance) -> Yarn {
    let ems = ["host1", "host2", "host3"].map(em);
    let mut reports = Vec::new();
    for (host, zone) in ems.iter().zip(["east", "east", "west"]) {
        let (total, protected) = (load(64, 16, 20), load(4, 2, 0));
        let register = RegisterEm { labels: labels(&[("zone", zone)]), protected, ..registration(host.clone(), total) };
        let epoch = rm.client.register(register).await.unwrap().epoch;
        let health = if zone == "west" { Health::Unhealthy } else { Health::Healthy };
        let report = EmReport {
            em: host.clone(),
            epoch,
            sequence: 1,
            health,
            load: None,
            tickets: vec![],
            observed: None,
            idle: vec![],
        };
        rm.client.heartbeat(&report).await.unwrap();
        reports.push(report);
    }
    for rule in [
        rule(&[("user", None)], LimitMode::Enforced, &[(Dimension::Instances, 10), (Dimension::Cores, 20)]),
        rule(&[("user", Some("hadoop")), ("creator", Some("IDE"))], LimitMode::Enforced, &[(Dimension::Instances, 2)]),
        rule(&[("engine_type", None)], LimitMode::Off, &[]),
        rule(&[("tenant", None)], LimitMode::Advisory, &[(Dimension::Cores, 16)]),
        rule(&[("user", None), ("em_application", None)], LimitMode::Off, &[]),
        rule(&[("user", None), ("engine_type", None)], LimitMode::Off, &[]),
        rule(&[("user", None), ("queue", None)], LimitMode::Off, &[]),
    ] {
        rm.client.set_limit(&rule).await.unwrap();
    }
    let idle = vec![adopt(rm, 1, &ems[0], "hadoop", "IDE", load(40, 12, 1)).await];
    let report = EmReport { sequence: 2, tickets: idle.clone(), idle, ..reports.swap_remove(0) };
    rm.client.heartbeat(&report).await.unwrap();
    adopt(rm, 2, &ems[1], "hadoop", "IDE", in_queue((4, 2), "root.eng.etl", (16, 8))).await;
    adopt(rm, 3, &ems[1], "alice", "Schedulis", in_queue((8, 4), "root.eng.etl", (4, 2))).await;
    let over = rm.client.request_resource(&request(&ems[1], "bob", load(4, 2, 1))).await.granted();
    rm.client.resource_released(&release(&over, "bob")).await.unwrap();
    let locked = ResourceRequest { labels: labels(&[("tenant", "red")]), ..request(&ems[1], "alice", load(2, 1, 1)) };
    rm.client.request_resource(&locked).await.granted();
    rm.client.request_resource(&request(&ems[1], "bob", load(1, 15, 1))).await.refused();
    rm.client.drain(&ems[2], "a new mainboard").await.unwrap();
    let hold =
        NewHold { key: LockKey::User(name("carol")), duration: Duration::from_secs(600), reason: name("a look") };
    rm.client.hold(&hold).await.unwrap();
    let yarn = Yarn::start(FAIR).await;
    put(&client_of(rm).await, provider("default", &config(&yarn.address))).await.unwrap();
    yarn
}

/// Starts a service whose EMs are not silent before a slow machine has run a page.
async fn start_patient() -> (Database, Instance) {
    let database = Database::fresh().await;
    let (silent_after, lost_after) = (Duration::from_secs(600), Duration::from_secs(1200));
    let patient = settings().with_time("--em-silent-after", silent_after).with_time("--em-lost-after", lost_after);
    let rm = Instance::start_with(&database, patient).await;
    (database, rm)
}

/// A cluster with a request that waits, all of it visible in every list.
struct Cluster {
    database: Database,
    rm: Instance,
    yarn: Yarn,
    waiting: JoinHandle<()>,
}

impl Cluster {
    async fn start() -> Self {
        let (database, rm) = start_patient().await;
        let yarn = cluster(&rm).await;
        let wait_timeout = Duration::from_secs(300);
        let asked = ResourceRequest { wait_timeout, ..request(&em("host2"), "hadoop", load(4, 2, 1)) };
        let client = rm.client.clone();
        let waiting = tokio::spawn(async move { drop(client.request_resource(&asked).await) });
        let usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
        let is_visible = || async {
            let overview = rm.client.overview().await.unwrap();
            let (line, scopes) = (overview.line.unwrap().waiting, overview.scopes.unwrap());
            let idle = overview.tickets.unwrap().idle;
            let tasks = rm.client.tasks().await.unwrap().tasks;
            let refusals = usage.clone().list_refusals(proto::ListRefusalsRequest::default()).await.unwrap();
            let by = proto::UsageBy::User.into();
            let used = usage.clone().get_usage(proto::GetUsageRequest { by, ..Default::default() }).await.unwrap();
            let users = usage.clone().list_users(proto::ListUsersRequest::default()).await.unwrap();
            let is_recorded = !users.into_inner().users.is_empty()
                && !refusals.into_inner().refusals.is_empty()
                && !used.into_inner().sums.is_empty();
            let has_run = tasks.iter().any(|task| task.last_success_time.is_some());
            line == 1 && idle == 1 && scopes.scopes == 14 && scopes.over_limit == 1 && has_run && is_recorded
        };
        eventually("the cluster is visible in every list", Duration::from_secs(60), is_visible).await;
        Self { database, rm, yarn, waiting }
    }

    async fn verify(self, page: &'static str) {
        let world = World {
            addresses: vec![
                ("127.0.0.1:50051", self.rm.address.replace("http://", "")),
                ("target/release/linkis-rm", "linkis-rm".to_owned()),
                ("rm1.example.com:8088", self.yarn.address.replace("http://", "")),
            ],
            variables: vec![
                ("LINKIS_RM_ADDRESS", self.rm.address.replace("http://", "")),
                ("DATABASE_URL", self.database.url()),
            ],
        };
        verify(page, world).await;
        self.waiting.abort();
        self.rm.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cookbook_for_users_prints_its_outputs() {
    Cluster::start().await.verify("docs/cookbook/users.md").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cookbook_for_clients_prints_its_outputs() {
    let (_database, rm) = start_patient().await;
    let addresses = vec![("127.0.0.1:50051", rm.address.replace("http://", ""))];
    let variables = vec![("LINKIS_RM_ADDRESS", rm.address.replace("http://", ""))];
    verify("docs/cookbook/clients.md", World { addresses, variables }).await;
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cookbook_for_operators_prints_its_outputs() {
    Cluster::start().await.verify("docs/cookbook/operators.md").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cookbook_for_administrators_prints_its_outputs() {
    Cluster::start().await.verify("docs/cookbook/administrators.md").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cookbook_for_sharing_prints_its_outputs() {
    Cluster::start().await.verify("docs/cookbook/sharing.md").await;
}

/// Each row of the table has one command, which replies to its question: it prints a row below the headers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cookbook_for_questions_has_one_command_each() {
    let world = Cluster::start().await;
    let rows = QUESTIONS.lines().filter(|line| line.starts_with("| ") && line.contains('?'));
    let commands: Vec<(&str, &str)> = rows.map(|row| (row, row.split('`').nth(1).unwrap())).collect();
    assert!(commands.len() > 20, "{commands:?}");
    for (row, command) in commands {
        let words: Vec<&str> = command.strip_prefix("linkis-rm ").unwrap().split(' ').collect();
        let output = program(&world.rm.address, &words).output().unwrap();
        let (reply, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let lines = reply.lines().count();
        assert!(
            output.status.success() && (lines > 1 || ["audit", "provider", "repair"].contains(&words[0])),
            "{row}: {reply}{error}"
        );
    }
    world.waiting.abort();
    world.rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readme_commands_succeed() {
    Cluster::start().await.verify("README.md").await;
}

#[test]
fn readme_is_short() {
    let readme = include_str!("../../README.md");
    assert!(readme.lines().count() <= 180 && readme.len() <= 9000, "{} bytes", readme.len());
}

/// The recipes of a text as lines of the index.
fn index_lines(file: &str, page: &str) -> Vec<String> {
    let headings = page.lines().filter_map(|line| line.strip_prefix("## "));
    let line = |heading: &str| {
        let anchor = heading.to_lowercase().replace(' ', "-");
        let anchor: String = anchor.chars().filter(|c| c.is_alphanumeric() || "-_".contains(*c)).collect();
        format!("- [{heading}]({file}#{anchor})")
    };
    headings.map(line).collect()
}

#[test]
fn cookbook_index_lists_every_recipe() {
    let listed: BTreeSet<&str> = INDEX.lines().filter(|line| line.starts_with("- [")).collect();
    let recipes: Vec<String> = PAGES.iter().flat_map(|(file, page)| index_lines(file, page)).collect();
    assert_eq!(listed, recipes.iter().map(String::as_str).collect());
}

#[test]
fn cookbook_pages_are_short_and_name_their_readers() {
    for (file, page) in PAGES {
        assert!(page.len() <= PAGE_BYTES_MAX, "{file} has {} bytes", page.len());
        assert!(page.lines().nth(2).is_some_and(|line| line.starts_with("For ")), "{file} begins with its readers");
    }
}
