//! The cluster under test: one PostgreSQL, and several instances of the service, each connected through its own proxy.

use std::{
    collections::VecDeque,
    env,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex, RwLock},
    time::Duration,
};

use rm_client::RmClient;
use rm_devpg::{EmbeddedPostgres, EmbeddedSettings};
use rustix::process::{Pid, Signal};
use sqlx::{ConnectOptions as _, PgConnection, postgres::PgConnectOptions};

use super::{clock::Clock, credentials::Credentials, random::Random};
use crate::{harness::*, proxy::Proxy};

/// Timeout of a call.
const CALLER_TIMEOUT: Duration = Duration::from_secs(4);

/// Timeout of a call that always gets the service's own reply.
const PROBE_TIMEOUT: Duration = Duration::from_secs(40);

/// Maximum number of database connections: enough for three instances and some observers, and few enough to be exhausted.
pub const CONNECTIONS_MAX: usize = 140;

/// Number of stored log lines of each instance.
const LOG_LINES: usize = 200;

/// The system under test, with all targets of faults.
pub struct Cluster {
    postgres: tokio::sync::Mutex<Option<EmbeddedPostgres>>,
    folder: PathBuf,
    /// Connection options of the database, without the proxies.
    pub options: PgConnectOptions,
    pub nodes: Vec<Node>,
    /// Credentials of callers; `None` beside another release, which may not support them.
    pub credentials: Option<Arc<Credentials>>,
}

/// One instance of the service.
pub struct Node {
    pub proxy: Proxy,
    /// Clock of the instance; `None` if it cannot be set.
    pub clock: Option<Clock>,
    program: Mutex<Programs>,
    process: Mutex<Option<Process>>,
    credentials: Option<Arc<Credentials>>,
    clients: RwLock<Clients>,
    log: Arc<Mutex<VecDeque<String>>>,
    /// Log lines of a defect.
    defects: Arc<Mutex<Vec<String>>>,
}

/// The program of an instance: the current build, alternating with another release if there is one.
struct Programs {
    other: Option<String>,
    is_next: bool,
}

impl Programs {
    fn next(&mut self) -> String {
        self.is_next = !self.is_next;
        self.other.clone().filter(|_| self.is_next).unwrap_or_else(|| PROGRAM.to_string())
    }
}

#[derive(Clone)]
struct Clients {
    address: String,
    caller: RmClient,
    host: RmClient,
    probe: RmClient,
}

impl Clients {
    fn new(address: &str, credentials: Option<&Arc<Credentials>>) -> Self {
        let Some(credentials) = credentials else {
            let [caller, host, probe] =
                [CALLER_TIMEOUT, CALLER_TIMEOUT, PROBE_TIMEOUT].map(|timeout| hurried(address, timeout));
            return Self { address: address.to_owned(), caller, host, probe };
        };
        let address = address.replace("http://", "https://");
        let caller = credentials.client(&address, CALLER_TIMEOUT);
        let (host, probe) = (credentials.host(&address, CALLER_TIMEOUT), credentials.client(&address, PROBE_TIMEOUT));
        Self { address, caller, host, probe }
    }
}

impl Cluster {
    pub async fn start(instances: usize) -> Self {
        let folder = scratch("faults");
        remove_at_end(&folder);
        let postgres = EmbeddedPostgres::start(settings(&folder)).await.unwrap();
        let options = postgres.connect_options();
        let is_alone = env::var("LINKIS_RM_FAULTS_OTHER").is_err();
        let begin = || Arc::new(Credentials::begin(&folder, url(postgres.socket_dir(), "postgres")));
        let credentials = is_alone.then(begin);
        let start = |number| Node::start(number, postgres.socket_dir(), &folder, credentials.clone());
        let nodes = (0..instances).map(start).collect();
        Self { postgres: tokio::sync::Mutex::new(Some(postgres)), folder, options, nodes, credentials }
    }

    /// Returns a client of an instance for reporting EMs.
    pub fn host(&self, node: usize) -> RmClient {
        self.nodes[node].clients.read().unwrap().host.clone()
    }

    /// Replaces the token of the callers, and revokes the previous one.
    ///
    /// # Errors
    /// A description of the failure.
    pub async fn replace_token(&self) -> Result<(), String> {
        let Some(credentials) = &self.credentials else { return Ok(()) };
        credentials.replace_token(&self.addresses(), || self.nodes.iter().for_each(Node::meet_again)).await
    }

    /// Replaces all certificates, and the authority of client certificates.
    ///
    /// # Errors
    /// A description of the failure.
    pub async fn replace_certificates(&self, random: &mut Random) -> Result<(), String> {
        let Some(credentials) = &self.credentials else { return Ok(()) };
        let hand_out = || self.nodes.iter().for_each(Node::meet_again);
        credentials.replace_certificates(&self.addresses(), random, hand_out).await
    }

    fn addresses(&self) -> Vec<String> {
        self.nodes.iter().map(|node| node.clients.read().unwrap().address.clone()).collect()
    }

    /// Returns a client of an instance for callers.
    pub fn client(&self, node: usize) -> RmClient {
        self.nodes[node].clients.read().unwrap().caller.clone()
    }

    /// Returns a client of an instance with a long timeout.
    pub fn probe(&self, node: usize) -> RmClient {
        self.nodes[node].clients.read().unwrap().probe.clone()
    }

    /// Opens a connection to the database without the proxies.
    pub async fn connect(&self) -> Result<PgConnection, sqlx::Error> {
        self.options.clone().application_name("faults").connect().await
    }

    /// Ends PostgreSQL by a signal to the postmaster. QUIT is an immediate shutdown, without a checkpoint.
    pub async fn crash_postgres(&self, signal: Signal) {
        let mut postgres = self.postgres.lock().await;
        let running = postgres.take().expect("it runs");
        let pid_file = std::fs::read_to_string(self.folder.join("data/postmaster.pid")).unwrap();
        let pid = Pid::from_raw(pid_file.lines().next().unwrap().parse().unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
        running.died().await;
    }

    /// Starts PostgreSQL again, which recovers.
    pub async fn restart_postgres(&self) {
        *self.postgres.lock().await = Some(EmbeddedPostgres::start(settings(&self.folder)).await.unwrap());
    }

    /// Stops everything in order. Returns the defects that the instances logged.
    pub async fn stop(&self) -> Vec<String> {
        for node in &self.nodes {
            if let Some(process) = node.process.lock().unwrap().take() {
                assert_eq!(process.terminate(), Some(0), "an instance stops in order:\n{}", node.log());
            }
        }
        if let Some(postgres) = self.postgres.lock().await.take() {
            postgres.stop().await;
        }
        self.nodes.iter().flat_map(|node| node.defects.lock().unwrap().clone()).collect()
    }
}

fn settings(folder: &Path) -> EmbeddedSettings {
    let server_options = vec![("max_connections".to_owned(), CONNECTIONS_MAX.to_string())];
    EmbeddedSettings { data_dir: folder.to_owned(), server_options }
}

impl Node {
    fn start(number: usize, postgres: &Path, folder: &Path, credentials: Option<Arc<Credentials>>) -> Self {
        let proxy = Proxy::start(&format!("faults-{number}"), postgres);
        let clock = Clock::in_folder(folder, number);
        // Every second instance starts with the other release.
        let mut programs = Programs { other: env::var("LINKIS_RM_FAULTS_OTHER").ok(), is_next: number % 2 == 1 };
        let (log, defects) = (Arc::default(), Arc::default());
        let program = programs.next();
        let settings = (clock.as_ref(), credentials.as_deref());
        let process = start_process(&program, &proxy, settings, &log, &defects);
        let clients = RwLock::new(Clients::new(&process.address, credentials.as_ref()));
        let (program, process) = (Mutex::new(programs), Mutex::new(Some(process)));
        Self { proxy, clock, program, process, credentials, clients, log, defects }
    }

    /// Opens new clients with the current credentials.
    fn meet_again(&self) {
        let mut clients = self.clients.write().unwrap();
        *clients = Clients::new(&clients.address.replace("https://", "http://"), self.credentials.as_ref());
    }

    /// Kills an instance (SIGKILL).
    pub fn kill(&self) {
        self.process.lock().unwrap().take().expect("it runs").kill();
    }

    /// Starts an instance again, at another address. Blocks until it serves.
    pub fn restart(&self) {
        let program = self.program.lock().unwrap().next();
        let settings = (self.clock.as_ref(), self.credentials.as_deref());
        let process = start_process(&program, &self.proxy, settings, &self.log, &self.defects);
        *self.clients.write().unwrap() = Clients::new(&process.address, self.credentials.as_ref());
        *self.process.lock().unwrap() = Some(process);
    }

    /// Freezes an instance (SIGSTOP), or continues it (SIGCONT).
    pub fn freeze(&self, frozen: bool) {
        self.process.lock().unwrap().as_ref().expect("it runs").freeze(frozen);
    }

    /// Returns the end of the log of an instance.
    pub fn log(&self) -> String {
        Vec::from_iter(self.log.lock().unwrap().iter().cloned()).join("\n")
    }
}

fn start_process(
    program: &str,
    proxy: &Proxy,
    (clock, credentials): (Option<&Clock>, Option<&Credentials>),
    log: &Arc<Mutex<VecDeque<String>>>,
    defects: &Arc<Mutex<Vec<String>>>,
) -> Process {
    let url = url(proxy.folder(), "postgres");
    let arguments = ["--database-url", &url, "--lock-ttl", "4s", "--em-silent-after", "4s", "--em-lost-after", "10s"];
    let (log, defects) = (log.clone(), defects.clone());
    let mut command = Command::new(program);
    if let Some(clock) = clock {
        clock.rule(&mut command);
    }
    command.args(credentials.map(Credentials::arguments).unwrap_or_default());
    // An environment variable, because another release may lack the setting.
    command.env("LINKIS_RM_EXTERNAL_HOSTS", "127.0.0.1");
    Process::start_command(command.args(arguments), move |line| {
        if line.contains("panicked at") || line.contains("a defect") || line.contains("inconsistent") {
            defects.lock().unwrap().push(line.clone());
        }
        let mut log = log.lock().unwrap();
        log.push_back(line);
        if log.len() > LOG_LINES {
            log.pop_front();
        }
    })
}
