//! The cookbook: every line of it is run, and answers what it says.
//!
//! - `WRITE_COOKBOOK`: writes what the lines answer into the cookbook instead.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use linkis_rm::{
    client::ResourceRequest,
    domain::{
        adopt::Adopt,
        em::EmInstance,
        hold::NewHold,
        limit::{Pattern, Rule},
        limit_mode::LimitMode,
        name::Labels,
        operation::{LockKey, Register},
        report::{Health, Report},
        resource::{Dimension, LoadInstanceAmounts, Parts, Resource, YarnAmounts},
    },
    transport::proto::{self, usage_service_client::UsageServiceClient},
};
use uuid::Uuid;

use crate::external::{FAIR, Yarn, client_of, config, provider, put};
use crate::harness::*;

const COOKBOOK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/COOKBOOK.md");

/// Where the lines say that the service is.
const ADDRESS: &str = "127.0.0.1:50051";

/// The release of grpcurl that is made if there is none.
const GRPCURL: &str = "github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3";

/// What else than times, UUIDs and tokens is another each time.
const VOLATILE: [&str; 20] = [
    // Tells times, too.
    "after",
    "epoch",
    "lag",
    "steps",
    "errors",
    "grantsPerSecond",
    "refusalsPerSecond",
    "longestWait",
    "age",
    "address",
    "version",
    "etag",
    "config",
    "nextPageToken",
    "followToken",
    "periodStart",
    "coreSeconds",
    "byteSeconds",
    "completeUntil",
    "holdUntil",
];

/// The folder of a grpcurl: one that is there, or one that is made.
fn grpcurl() -> Option<PathBuf> {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/tools");
    let home = env::var_os("HOME").map(|home| Path::new(&home).join("go/bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    let places: Vec<PathBuf> = env::split_paths(&path).chain(home).chain([tools.clone()]).collect();
    let found = |places: &[PathBuf]| places.iter().find(|place| place.join("grpcurl").is_file()).cloned();
    if let Some(place) = found(&places) {
        return Some(place);
    }
    let go = env::split_paths(&path).chain(["/usr/local/go/bin".into()]).find(|place| place.join("go").is_file())?;
    let made = Command::new(go.join("go")).args(["install", GRPCURL]).env("GOBIN", &tools).output();
    made.ok().filter(|made| made.status.success())?;
    found(&[tools])
}

/// A line of the cookbook, and what it says that it answers.
#[derive(Debug, Clone, Default)]
struct Recipe {
    line: String,
    answer: Vec<String>,
}

/// The recipes of a text, each where it stands among what is not of a recipe.
fn recipes(text: &str) -> Vec<Result<Recipe, String>> {
    let (mut parts, mut inside, mut goes_on) = (Vec::new(), false, false);
    for line in text.lines() {
        match (inside, line, parts.last_mut()) {
            (true, "```", _) => inside = false,
            (true, ..) if line.starts_with("$ ") => {
                parts.push(Ok(Recipe { line: line.to_owned(), answer: vec![] }));
                goes_on = is_unfinished(line);
                continue;
            }
            (true, _, Some(Ok(recipe))) if goes_on => {
                recipe.line = format!("{}\n{line}", recipe.line);
                goes_on = is_unfinished(&recipe.line);
                continue;
            }
            (true, _, Some(Ok(recipe))) => {
                recipe.answer.push(line.to_owned());
                continue;
            }
            (false, "```console", _) => inside = true,
            _ => {}
        }
        parts.push(Err(line.to_owned()));
    }
    parts
}

/// Whether a command goes on in the next line.
fn is_unfinished(command: &str) -> bool {
    command.ends_with('\\') || command.matches('\'').count() % 2 == 1
}

/// A line of an answer without what is another each time.
fn settled(line: &str) -> String {
    // What is said of a hold ends with its end.
    let line = line.split(" until 20").next().unwrap_or(line);
    let Some((key, value)) = line.split_once(':') else { return line.trim_end().to_owned() };
    let (name, value) = (key.trim().trim_matches('"'), value.trim());
    let text = value.trim_end_matches(',').trim_matches('"');
    let is_time = name.ends_with("Time") || name == "waitUntil" || name == "waitingSince";
    let is_chance = Uuid::parse_str(text).is_ok() && !text.starts_with("5d1b8e2c");
    match is_time || is_chance || VOLATILE.contains(&name) {
        true => format!("{key}: (any)"),
        false => format!("{key}: {value}"),
    }
}

fn run(line: &str, address: &str, path: &Path) -> Output {
    let rest = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths([path.to_owned()].into_iter().chain(env::split_paths(&rest))).unwrap();
    let line = line.trim_start_matches("$ ").replace(ADDRESS, address);
    Command::new("sh").args(["-c", &line]).env("PATH", path).output().unwrap()
}

fn labels(of: &[(&str, &str)]) -> Labels {
    let pairs = of.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    Labels::parse("labels", pairs.collect()).unwrap()
}

fn rule(of: &[(&str, Option<&str>)], mode: LimitMode, max: &[(Dimension, i64)]) -> Rule {
    let pattern: BTreeMap<_, _> = of.iter().map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned))).collect();
    Rule { pattern: Pattern::new(pattern), mode, max: max.iter().cloned().collect() }
}

/// An engine, and what it has of a queue.
fn in_queue((gb, cores): (i64, i64), queue_name: &str, (queue_gb, queue_cores): (i64, i64)) -> Resource {
    let driver = LoadInstanceAmounts { memory: gb * GB, cores, instances: 1 };
    let (queue_name, application_id) = (queue_name.into(), String::new());
    let (queue_memory, queue_instances) = (queue_gb * GB, 1);
    let yarn = YarnAmounts { queue_memory, queue_cores, queue_instances, queue_name, application_id };
    Resource::from_parts(Parts::DriverAndYarn(driver, yarn)).unwrap()
}

async fn adopt(rm: &Instance, number: u8, host: &EmInstance, user: &str, creator: &str, used: Resource) {
    let adopt = Adopt {
        ticket_id: Uuid::parse_str(&format!("5d1b8e2c-6f0a-4f59-9a55-2f9b1c4f7a{number:02x}")).unwrap(),
        user: name(user),
        creator: name(creator),
        engine_type: "spark-3.2.1".into(),
        em: host.clone(),
        labels: labels(&[("tenant", "blue")]),
        engine: engine(&format!("engine{number}")),
        used,
    };
    rm.client.adopt_ticket(&adopt).await.unwrap();
}

/// Three hosts, a few engines, limits, one who waits, and a cluster with queues.
async fn cluster(rm: &Instance) -> Yarn {
    let hosts = ["host1", "host2", "host3"].map(em);
    for (host, zone) in hosts.iter().zip(["east", "east", "west"]) {
        let (total, protected) = (load(64, 16, 20), load(4, 2, 0));
        let register = Register { labels: labels(&[("zone", zone)]), protected, ..registration(host.clone(), total) };
        let epoch = rm.client.register(register).await.unwrap().epoch;
        let health = if zone == "west" { Health::Unhealthy } else { Health::Healthy };
        let report =
            Report { em: host.clone(), epoch, sequence: 1, health, load: None, tickets: vec![], observed: None };
        rm.client.heartbeat(&report).await.unwrap();
    }
    for rule in [
        rule(&[("user", None)], LimitMode::Enforced, &[(Dimension::Instances, 10), (Dimension::Cores, 20)]),
        rule(&[("user", Some("hadoop")), ("creator", Some("IDE"))], LimitMode::Enforced, &[(Dimension::Instances, 2)]),
        rule(&[("engine_type", None)], LimitMode::Off, &[]),
        rule(&[("tenant", None)], LimitMode::Watched, &[(Dimension::Cores, 16)]),
        rule(&[("user", None), ("em_application", None)], LimitMode::Off, &[]),
        rule(&[("user", None), ("engine_type", None)], LimitMode::Off, &[]),
        rule(&[("user", None), ("queue", None)], LimitMode::Off, &[]),
    ] {
        rm.client.set_limit(&rule).await.unwrap();
    }
    adopt(rm, 1, &hosts[0], "hadoop", "IDE", load(40, 12, 1)).await;
    adopt(rm, 2, &hosts[1], "hadoop", "IDE", in_queue((4, 2), "root.eng.etl", (16, 8))).await;
    adopt(rm, 3, &hosts[1], "alice", "Schedulis", in_queue((8, 4), "root.eng.etl", (4, 2))).await;
    let over = rm.client.request_resource(&request(&hosts[1], "bob", load(4, 2, 1))).await.granted();
    rm.client.resource_released(&release(&over, "bob")).await.unwrap();
    let locked = ResourceRequest { labels: labels(&[("tenant", "red")]), ..request(&hosts[1], "alice", load(2, 1, 1)) };
    rm.client.request_resource(&locked).await.granted();
    rm.client.request_resource(&request(&hosts[1], "bob", load(1, 15, 1))).await.refused();
    rm.client.drain(&hosts[2], "a new mainboard").await.unwrap();
    let hold =
        NewHold { key: LockKey::User(name("carol")), duration: Duration::from_secs(600), reason: name("a look") };
    rm.client.hold(&hold).await.unwrap();
    let yarn = Yarn::start(FAIR).await;
    put(&client_of(rm).await, provider("default", &config(&yarn.address))).await.unwrap();
    yarn
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_line_of_the_cookbook_answers_what_it_says() {
    let Some(grpcurl) = grpcurl() else {
        return skip_without("grpcurl", &format!("it cannot be made: go install {GRPCURL}"));
    };
    let (database, rm) = start().await;
    let _yarn = cluster(&rm).await;
    let wait_timeout = Duration::from_secs(300);
    let asked = ResourceRequest { wait_timeout, ..request(&em("host2"), "hadoop", load(4, 2, 1)) };
    let client = rm.client.clone();
    let waiting = tokio::spawn(async move { client.request_resource(&asked).await });
    let usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let seen = || async {
        let overview = rm.client.overview().await.unwrap();
        let (line, scopes) = (overview.line.unwrap().waiting, overview.scopes.unwrap());
        let told = rm.client.tasks().await.unwrap().tasks.iter().any(|task| task.last_success_time.is_some());
        let refusals = usage.clone().list_refusals(proto::ListRefusalsRequest::default()).await.unwrap();
        let by = proto::UsageBy::User.into();
        let used = usage.clone().get_usage(proto::GetUsageRequest { by, ..Default::default() }).await.unwrap();
        let are_remembered = !refusals.into_inner().refusals.is_empty() && !used.into_inner().sums.is_empty();
        line == 1 && scopes.scopes == 14 && scopes.over_limit == 1 && told && are_remembered
    };
    eventually("everything is seen", Duration::from_secs(60), seen).await;
    let text = fs::read_to_string(COOKBOOK).unwrap();
    let address = rm.address.replace("http://", "");
    let (mut parts, mut wrong) = (recipes(&text), Vec::new());
    for recipe in parts.iter_mut().filter_map(|part| part.as_mut().ok()) {
        let (line, to, path) = (recipe.line.clone(), address.clone(), grpcurl.clone());
        let done = tokio::task::spawn_blocking(move || run(&line, &to, &path)).await.unwrap();
        assert!(done.status.success() && !done.stdout.is_empty(), "{}\n{done:?}", recipe.line);
        let answer: Vec<String> = String::from_utf8(done.stdout).unwrap().lines().map(str::to_owned).collect();
        let [said, told] =
            [&recipe.answer, &answer].map(|lines| lines.iter().map(|line| settled(line)).collect::<Vec<_>>());
        if said != told {
            wrong.push((recipe.line.clone(), told));
        }
        recipe.answer = answer;
    }
    waiting.abort();
    drop(database);
    if env::var_os("WRITE_COOKBOOK").is_some() {
        let lines = parts.into_iter().flat_map(|part| match part {
            Ok(recipe) => [vec![recipe.line], recipe.answer].concat(),
            Err(line) => vec![line],
        });
        let text: Vec<String> = lines.collect();
        fs::write(COOKBOOK, text.join("\n").replace(&address, ADDRESS) + "\n").unwrap();
        return;
    }
    assert!(wrong.is_empty(), "the cookbook says something else; WRITE_COOKBOOK=1 writes what is so: {wrong:#?}");
}

#[test]
fn recipes_are_found_where_they_stand() {
    let text = "A line.\n\n```console\n$ a -d '{\n  b}' \\\n  c\nx: 1\ny\n$ d\n```\nend";
    let parts = recipes(text);
    let found: Vec<_> = parts.iter().filter_map(|part| part.as_ref().ok()).collect();
    assert_eq!((found[0].line.as_str(), found[0].answer.len()), ("$ a -d '{\n  b}' \\\n  c", 2));
    assert_eq!((found[1].line.as_str(), found[1].answer.len()), ("$ d", 0));
    let rest: Vec<_> = parts.iter().filter_map(|part| part.as_ref().err()).collect();
    assert_eq!(rest, ["A line.", "", "```console", "```", "end"]);
}
