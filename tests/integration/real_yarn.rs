//! Tests with a real YARN, if its jars exist (`tests/yarn/fetch`, `LINKIS_RM_YARN_LIB`): every queue equals the reply of YARN.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs, io,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use rm_client::{ResourceRequest, ResultResource, RmClient};
use rm_proto::v1::{self as proto, external_resource_service_client::ExternalResourceServiceClient as Client};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tonic::transport::Channel;

use crate::{external_queues::in_queue, harness::*};

const RESOURCE_MANAGER: &str = "org.apache.hadoop.yarn.server.resourcemanager.ResourceManager";
const NODE_MANAGER: &str = "org.apache.hadoop.yarn.server.nodemanager.NodeManager";
const ADMIN: &str = "org.apache.hadoop.yarn.client.cli.RMAdminCLI";

/// Timeout of the start of a virtual machine, on a busy machine.
const START: Duration = Duration::from_secs(120);

/// Returns the folder of the jars. Without it, prints that the test is skipped.
fn jars() -> Option<PathBuf> {
    let lib = std::env::var_os("LINKIS_RM_YARN_LIB").filter(|lib| !lib.is_empty());
    if lib.is_none() {
        eprintln!("skipped: no LINKIS_RM_YARN_LIB; set it to what tests/yarn/fetch prints");
    }
    lib.map(PathBuf::from)
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn xml(properties: &[(String, String)]) -> String {
    let property =
        |(name, value): &(String, String)| format!("<property><name>{name}</name><value>{value}</value></property>\n");
    format!("<configuration>\n{}</configuration>", properties.iter().map(property).collect::<String>())
}

/// Processes of one cluster, in a new folder.
struct Yarn {
    lib: PathBuf,
    folder: PathBuf,
    processes: Vec<Child>,
    /// Addresses of its ResourceManagers.
    addresses: Vec<String>,
}

impl Drop for Yarn {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Yarn {
    /// Configuration of every process.
    fn configure(lib: PathBuf, name: &str, scheduler: &str, managers: usize) -> Self {
        // A node starts no container while its folder's disk has no room for unprivileged users. Memory has room.
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { scratch_in(memory, name) } else { scratch(name) };
        remove_at_end(&folder);
        let conf = folder.join("conf");
        fs::create_dir_all(&conf).unwrap();
        let dir = |name: &str| folder.join(name).display().to_string();
        let mut properties: Vec<(String, String)> = [
            (
                "yarn.resourcemanager.scheduler.class",
                format!("org.apache.hadoop.yarn.server.resourcemanager.scheduler.{scheduler}"),
            ),
            ("yarn.scheduler.fair.allocation.file", dir("conf/fair-scheduler.xml")),
            ("yarn.scheduler.maximum-allocation-mb", "102400".into()),
            ("yarn.scheduler.maximum-allocation-vcores", "100".into()),
            ("yarn.nodemanager.resource.memory-mb", "102400".into()),
            ("yarn.nodemanager.resource.cpu-vcores", "100".into()),
            ("yarn.nodemanager.disk-health-checker.enable", "false".into()),
            ("yarn.nodemanager.vmem-check-enabled", "false".into()),
            ("yarn.nodemanager.local-dirs", dir("local")),
            ("yarn.nodemanager.log-dirs", dir("logs")),
            ("yarn.nodemanager.address", format!("127.0.0.1:{}", free_port())),
            ("yarn.nodemanager.localizer.address", format!("127.0.0.1:{}", free_port())),
            ("yarn.nodemanager.webapp.address", format!("127.0.0.1:{}", free_port())),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        let mut addresses = Vec::new();
        for manager in 1..=managers {
            let suffix = if managers == 1 { String::new() } else { format!(".rm{manager}") };
            for address in
                ["address", "scheduler.address", "resource-tracker.address", "admin.address", "webapp.address"]
            {
                let at = format!("127.0.0.1:{}", free_port());
                if address == "webapp.address" {
                    addresses.push(format!("http://{at}"));
                }
                properties.push((format!("yarn.resourcemanager.{address}{suffix}"), at));
            }
        }
        if managers > 1 {
            let ids: Vec<_> = (1..=managers).map(|manager| format!("rm{manager}")).collect();
            let ha = [
                ("enabled", "true".to_owned()),
                ("automatic-failover.enabled", "false".into()),
                ("rm-ids", ids.join(",")),
            ];
            properties.extend(ha.map(|(name, value)| (format!("yarn.resourcemanager.ha.{name}"), value)));
            properties.push(("yarn.resourcemanager.cluster-id".into(), "test".into()));
            // A node without an active ResourceManager waits about this long before the next one: half a minute by default. It
            // can try the wrong one several times.
            for whose in ["", "nodemanager."] {
                let name = format!("yarn.{whose}resourcemanager.connect.retry-interval.ms");
                properties.push((name, "500".into()));
            }
        }
        fs::write(conf.join("yarn-site.xml"), xml(&properties)).unwrap();
        let core = [("fs.defaultFS", "file:///"), ("hadoop.tmp.dir", &dir("tmp"))];
        fs::write(conf.join("core-site.xml"), xml(&core.map(|(name, value)| (name.into(), value.into())))).unwrap();
        Self { lib, folder, processes: vec![], addresses }
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.folder.join("conf").join(file), text).unwrap();
    }

    fn java(&self, class: &str, arguments: &[&str]) -> Command {
        let log = |name: &str| {
            let file = fs::File::options().create(true).append(true).open(self.folder.join(name)).unwrap();
            Stdio::from(file)
        };
        let class_path = format!("{}:{}/*", self.folder.join("conf").display(), self.lib.display());
        let mut command = Command::new("java");
        command.args([
            "--add-opens",
            "java.base/java.lang=ALL-UNNAMED",
            "--add-opens",
            "java.base/java.util=ALL-UNNAMED",
        ]);
        command.args(["-Xmx400m", "-cp", &class_path, class]).args(arguments);
        command.stdin(Stdio::null()).stdout(log("out.log")).stderr(log("out.log"));
        command
    }

    fn start(&mut self, class: &str, arguments: &[&str]) {
        let process = self.java(class, arguments).spawn().unwrap();
        self.processes.push(process);
    }

    fn admin(&self, arguments: &[&str]) {
        let status = self.java(ADMIN, arguments).status().unwrap();
        assert!(status.success(), "rmadmin {arguments:?}: {}", self.log());
    }

    fn log(&self) -> String {
        let log = fs::read_to_string(self.folder.join("out.log")).unwrap_or_default();
        log.get(log.floor_char_boundary(log.len().saturating_sub(4000))..).unwrap_or_default().to_owned()
    }

    /// The reply of YARN, parsed by other code.
    async fn ask(&self, path: &str) -> Option<Value> {
        serde_json::from_str(&self.call("GET", path, "").await.ok()?.1).ok()
    }

    /// Calls the first ResourceManager. Returns the head and the body of the reply.
    async fn call(&self, method: &str, path: &str, body: &str) -> io::Result<(String, String)> {
        let address = self.addresses[0].strip_prefix("http://").unwrap();
        let mut stream = TcpStream::connect(address).await?;
        // A reply in HTTP/1.0 is whole, and ends with the connection.
        let head = format!(
            "{method} {path} HTTP/1.0\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {}",
            body.len()
        );
        stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).await?;
        let mut reply = String::new();
        stream.read_to_string(&mut reply).await?;
        let (head, body) = reply.split_once("\r\n\r\n").ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok((head.to_owned(), body.to_owned()))
    }

    /// Asserts that the first reply of a ResourceManager equals the stored fixture, without numbers and times. With
    /// LINKIS_RM_RECORD, the reply is stored.
    async fn says_as_recorded(&self, manager: usize, file: &str) {
        let address = self.addresses[manager].strip_prefix("http://").unwrap();
        let mut stream = TcpStream::connect(address).await.unwrap();
        let question = format!("GET /ws/v1/cluster/scheduler HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        stream.write_all(question.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let is_of_moment = |line: &&str| line.starts_with("Date:") || line.starts_with("Expires:");
        let answer: String = answer.split_inclusive("\r\n").filter(|line| !is_of_moment(line)).collect();
        let kept = repo_root().join("tests/fixtures/yarn").join(file);
        if std::env::var_os("LINKIS_RM_RECORD").is_some() {
            fs::write(&kept, &answer).unwrap();
        }
        assert_eq!(without_numbers(&answer), without_numbers(&fs::read_to_string(&kept).unwrap()), "{file}");
    }

    /// Starts an application that only sleeps. YARN starts its process again if a start fails. Returns its id.
    async fn submit(&self, queue: &str, memory: i64, cores: i64) -> String {
        let (_, new) = self.call("POST", "/ws/v1/cluster/apps/new-application?user.name=hadoop", "").await.unwrap();
        let new: Value = serde_json::from_str(&new).unwrap();
        let id = new["application-id"].as_str().unwrap().to_owned();
        let application = serde_json::json!({
            "application-id": id, "application-name": "sleeps", "application-type": "YARN", "queue": queue,
            "am-container-spec": {"commands": {"command": "sleep 300"}},
            "resource": {"memory": memory, "vCores": cores}, "unmanaged-AM": false,
        });
        let path = "/ws/v1/cluster/apps?user.name=hadoop";
        let (_, got) = self.call("POST", path, &application.to_string()).await.unwrap();
        assert!(got.is_empty(), "{got}");
        id
    }

    async fn kill(&self, id: &str) {
        let path = format!("/ws/v1/cluster/apps/{id}/state?user.name=hadoop");
        let (head, _) = self.call("PUT", &path, r#"{"state": "KILLED"}"#).await.unwrap();
        assert!(head.split(' ').nth(1).is_some_and(|status| status.starts_with('2')), "{head}");
    }

    /// State and diagnostics of each application.
    async fn applications(&self) -> Vec<[Value; 2]> {
        let (_, list) = self.call("GET", "/ws/v1/cluster/apps", "").await.unwrap_or_default();
        let list: Value = serde_json::from_str(&list).unwrap_or_default();
        let applications = list["apps"]["app"].as_array().into_iter().flatten();
        applications.map(|one| [one["state"].clone(), one["diagnostics"].clone()]).collect()
    }

    /// Maximum and use of every queue, in MB and cores, and whether it runs, by path.
    async fn queues(&self) -> Option<BTreeMap<String, [i64; 5]>> {
        let answer = self.ask("/ws/v1/cluster/scheduler").await?;
        let info = &answer["scheduler"]["schedulerInfo"];
        let mut all = BTreeMap::new();
        match info["type"].as_str()? {
            "fairScheduler" => fair(&info["rootQueue"], &mut all),
            _ => drop(capacity(info, &mut all)),
        }
        Some(all)
    }
}

/// Removes ports, lengths and seconds, which differ in each run.
fn without_numbers(answer: &str) -> String {
    answer.split(|letter: char| letter.is_ascii_digit()).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("#")
}

fn pair(amounts: &Value) -> [i64; 2] {
    [amounts["memory"].as_i64().unwrap(), amounts["vCores"].as_i64().unwrap()]
}

fn fair(queue: &Value, all: &mut BTreeMap<String, [i64; 5]>) {
    let ([memory, cores], [used, used_cores]) = (pair(&queue["maxResources"]), pair(&queue["usedResources"]));
    all.insert(queue["queueName"].as_str().unwrap().into(), [memory, cores, used, used_cores, 1]);
    for inner in queue["childQueues"]["queue"].as_array().into_iter().flatten() {
        fair(inner, all);
    }
}

/// Returns the use of a queue, and inserts the queue into `all`.
fn capacity(queue: &Value, all: &mut BTreeMap<String, [i64; 5]>) -> [i64; 2] {
    let inner = queue["queues"]["queue"].as_array().into_iter().flatten();
    let sums = inner.map(|inner| capacity(inner, all)).fold([0, 0], |[a, b], [c, d]| [a + c, b + d]);
    let max = &queue["capacities"]["queueCapacitiesByPartition"][0]["effectiveMaxResource"];
    let used = if queue["resourcesUsed"].is_object() { pair(&queue["resourcesUsed"]) } else { sums };
    let [memory, cores] = pair(max);
    let runs = i64::from(queue["state"].as_str().is_none_or(|state| state == "RUNNING"));
    all.insert(queue["queuePath"].as_str().unwrap().into(), [memory, cores, used[0], used[1], runs]);
    used
}

async fn listed(client: &Client<Channel>) -> BTreeMap<String, [i64; 5]> {
    let call = proto::ListQueuesRequest { page_size: 1000, ..Default::default() };
    let Ok(page) = client.clone().list_queues(call).await else { return BTreeMap::new() };
    let row = |queue: proto::Queue| {
        let runs = i64::from(queue.state() == proto::QueueState::Running);
        let (max, used) = (queue.max.unwrap(), queue.used.unwrap());
        (queue.path, [max.memory >> 20, max.cores, used.memory >> 20, used.cores, runs])
    };
    page.into_inner().queues.into_iter().map(row).collect()
}

/// Waits until both return equal queues, for which `is_so` holds.
async fn agree(yarn: &Yarn, client: &Client<Channel>, what: &str, is_so: impl Fn(&BTreeMap<String, [i64; 5]>) -> bool) {
    let last = RefCell::default();
    eventually(what, START, async || {
        let (got, said) = (listed(client).await, yarn.queues().await.unwrap_or_default());
        let both = format!("{got:?}\n{said:?}");
        if last.replace(both.clone()) != both {
            println!("{what}: {both}\n{:?}", yarn.applications().await);
        }
        !said.is_empty() && said == got && is_so(&got)
    })
    .await;
}

async fn provided(yarn: &Yarn) -> (Instance, Client<Channel>) {
    let (_, rm) = start().await;
    let client = Client::connect(rm.address.clone()).await.unwrap();
    let config =
        serde_json::json!({"rmWebAddress": yarn.addresses.join(";"), "refreshInterval": "1s", "maxAge": "30s"})
            .to_string();
    let provider =
        proto::Provider { resource_type: "Yarn".into(), name: "default".into(), config, ..Default::default() };
    let call = proto::PutProviderRequest { provider: Some(provider), expected_etag: None };
    client.clone().put_provider(call).await.unwrap();
    (rm, client)
}

/// For both schedulers: before any application, with one, and after a change of queues.
async fn follows(mut yarn: Yarn, queue: &str, stops: Option<&str>, change: impl Fn(&Yarn)) {
    let path = "root.eng.etl";
    yarn.start(RESOURCE_MANAGER, &[]);
    yarn.start(NODE_MANAGER, &[]);
    let (_rm, client) = provided(&yarn).await;
    agree(&yarn, &client, "the node is there", |queues| queues.get("root").is_some_and(|root| root[0] == 102_400))
        .await;
    let application_id = yarn.submit(queue, 12_288, 3).await;
    agree(&yarn, &client, "it runs", |queues| [path, "root"].iter().all(|path| queues[*path][2..4] == [12_288, 3]))
        .await;
    let call = proto::ListApplicationsRequest { queue_name: queue.into(), ..Default::default() };
    let applications = client.clone().list_applications(call).await.unwrap().into_inner().applications;
    let [application] = &applications[..] else { panic!("{applications:?}") };
    let allocated = Some(proto::QueueAmounts { memory: 12 << 30, cores: 3, ..Default::default() });
    assert_eq!(
        (&application.application_id, application.queue.as_str(), application.allocated),
        (&application_id, path, allocated)
    );
    change(&yarn);
    agree(&yarn, &client, "there is another queue", |queues| {
        queues.contains_key("root.eng.new") && stops.is_none_or(|stops| queues[stops][4] == 0)
    })
    .await;
    yarn.kill(&application_id).await;
    agree(&yarn, &client, "it is over", |queues| queues["root"][2] == 0).await;
}

fn fair_queues(etl: &str, more: &str) -> String {
    format!(
        r#"<allocations><queue name="eng"><maxResources>81920 mb,80 vcores</maxResources>
            <queue name="etl"><maxResources>{etl}</maxResources></queue><queue name="adhoc"/>{more}</queue>
            <queue name="default"/></allocations>"#
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fair_scheduler_queues_match_yarn() {
    let Some(lib) = jars() else { return };
    let yarn = Yarn::configure(lib, "yarn-fair", "fair.FairScheduler", 1);
    yarn.write("fair-scheduler.xml", &fair_queues("40960 mb,40 vcores", ""));
    follows(yarn, "root.eng.etl", None, |yarn| {
        yarn.write("fair-scheduler.xml", &fair_queues("51200 mb,50 vcores", r#"<queue name="new"/>"#));
        yarn.admin(&["-refreshQueues"]);
    })
    .await;
}

fn capacity_queues(more: &[(&str, &str)]) -> String {
    let properties = [
        ("resource-calculator", "org.apache.hadoop.yarn.util.resource.DominantResourceCalculator"),
        ("maximum-am-resource-percent", "1.0"),
        ("root.queues", "eng,default"),
        ("root.eng.capacity", "80"),
        ("root.default.capacity", "20"),
        ("root.eng.etl.capacity", "75"),
        ("root.eng.etl.maximum-capacity", "90"),
        ("root.eng.adhoc.capacity", "25"),
    ];
    let named = |(name, value): &(&str, &str)| (format!("yarn.scheduler.capacity.{name}"), (*value).to_owned());
    xml(&properties.iter().chain(more).map(named).collect::<Vec<_>>())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn capacity_scheduler_queues_match_yarn() {
    let Some(lib) = jars() else { return };
    let yarn = Yarn::configure(lib, "yarn-capacity", "capacity.CapacityScheduler", 1);
    yarn.write("capacity-scheduler.xml", &capacity_queues(&[("root.eng.queues", "etl,adhoc")]));
    follows(yarn, "etl", Some("root.eng.adhoc"), |yarn| {
        let changed =
            [("root.eng.queues", "etl,adhoc,new"), ("root.eng.new.capacity", "0"), ("root.eng.adhoc.state", "STOPPED")];
        yarn.write("capacity-scheduler.xml", &capacity_queues(&changed));
        yarn.admin(&["-refreshQueues"]);
    })
    .await;
}

/// Results of the requests of one caller.
#[derive(Debug, Default)]
struct Served {
    granted: usize,
    refused: usize,
}

/// Requests and releases a small amount of a queue until `stop`.
async fn ask_and_ask(rm: RmClient, queue: &str, granted: Arc<AtomicUsize>, stop: Arc<AtomicBool>) -> Served {
    let ask = ResourceRequest { wait_timeout: START, ..in_queue(queue, 1) };
    let mut served = Served::default();
    while !stop.load(Ordering::SeqCst) {
        match rm.request_resource(&ask).await.unwrap() {
            ResultResource::Available(grant) => {
                served.granted += 1;
                granted.fetch_add(1, Ordering::SeqCst);
                rm.resource_released(&release(&grant, "hadoop")).await.unwrap();
            }
            ResultResource::NotEnough(_) => served.refused += 1,
        }
    }
    served
}

/// A failover delays only requests while no ResourceManager has a node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resource_manager_failover_delays_one_request() {
    let Some(lib) = jars() else { return };
    let mut yarn = Yarn::configure(lib, "yarn-ha", "fair.FairScheduler", 2);
    yarn.write("fair-scheduler.xml", &fair_queues("40960 mb,40 vcores", ""));
    for id in ["-Dyarn.resourcemanager.ha.id=rm1", "-Dyarn.resourcemanager.ha.id=rm2"] {
        yarn.start(RESOURCE_MANAGER, &[id]);
    }
    yarn.start(NODE_MANAGER, &[]);
    let (rm, client) = provided(&yarn).await;
    let etl = async || {
        let call = proto::GetQueueRequest { provider: None, queue_name: "eng.etl".into() };
        client.clone().get_queue(call).await
    };
    eventually("both are there", START, async || {
        etl().await.is_err_and(|error| error.message().matches("is not the active").count() == 2)
    })
    .await;
    yarn.says_as_recorded(0, "standby-alone-3.4.2.txt").await;
    yarn.admin(&["-transitionToActive", "rm1"]);
    yarn.says_as_recorded(1, "standby-3.4.2.txt").await;
    // The free amount is positive once the node is registered.
    let has_room = async || etl().await.is_ok_and(|got| got.into_inner().queue.unwrap().left.unwrap().memory > 0);
    eventually("the first is active", START, async || has_room().await).await;
    rm.client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
    let (granted, stop) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
    let asking = tokio::spawn({
        let (rm, granted, stop) = (rm.client.clone(), granted.clone(), stop.clone());
        async move { ask_and_ask(rm, "eng.etl", granted, stop).await }
    });
    let more = async |count: usize| {
        let before = granted.load(Ordering::SeqCst);
        eventually("requests are granted", START, async || granted.load(Ordering::SeqCst) >= before + count).await;
    };
    more(20).await;
    yarn.admin(&["-transitionToStandby", "rm1"]);
    yarn.admin(&["-transitionToActive", "rm2"]);
    eventually("the second is active", START, async || etl().await.is_ok()).await;
    eventually("it has the node", START, async || has_room().await).await;
    more(100).await;
    stop.store(true, Ordering::SeqCst);
    let served = asking.await.unwrap();
    println!("{served:?}");
    assert!(served.refused <= 1, "{served:?}");
    assert_eq!(etl().await.unwrap().into_inner().queue.unwrap().path, "root.eng.etl");
}
