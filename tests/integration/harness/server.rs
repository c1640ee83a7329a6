//! Servers of the tests: each is the built program in its own process, with its log and metrics. Dropping a server kills its process.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
};

use super::*;

/// Settings of a server: its flags with their values.
#[derive(Clone, Default)]
pub struct Settings(BTreeMap<&'static str, String>);

/// The settings of most tests.
pub fn settings() -> Settings {
    let few = [("--history", "1h"), ("--drain-timeout", "5s"), ("--external-hosts", "127.0.0.1")];
    Settings(few.map(|(flag, value)| (flag, value.to_owned())).into())
}

impl Settings {
    /// Returns the settings with another value of a flag; empty for a flag without a value.
    pub fn with(mut self, flag: &'static str, value: impl ToString) -> Self {
        self.0.insert(flag, value.to_string());
        self
    }

    /// Returns the settings with another duration of a flag.
    pub fn with_time(self, flag: &'static str, time: Duration) -> Self {
        self.with(flag, format!("{}ms", time.as_millis()))
    }

    pub fn arguments(&self) -> impl Iterator<Item = &str> {
        self.0.iter().flat_map(|(flag, value)| [*flag, value]).filter(|word| !word.is_empty())
    }
}

/// Any free port of this machine.
pub const ANY_PORT: &str = "127.0.0.1:0";

/// A port of this machine that was free a moment ago.
pub fn free_address() -> SocketAddr {
    std::net::TcpListener::bind(ANY_PORT).unwrap().local_addr().unwrap()
}

/// A server in a process of its own, and its metrics.
pub struct Instance {
    pub client: RmClient,
    pub address: String,
    /// Address of metrics and health.
    pub http: SocketAddr,
    pub metrics: Metrics,
    process: Process,
}

impl Instance {
    pub async fn start(database: &Database) -> Self {
        Self::start_with(database, settings()).await
    }

    pub async fn start_with(database: &Database, settings: Settings) -> Self {
        Self::start_at(database, settings, ANY_PORT).await
    }

    pub async fn start_at(database: &Database, settings: Settings, listen: &str) -> Self {
        Self::start_on(&database.url(), settings, listen).await
    }

    /// Starts a server on the database of any URL.
    pub async fn start_on(url: &str, settings: Settings, listen: &str) -> Self {
        Self::start_by(settings.with("--database-url", url), listen, ANY_PORT).await
    }

    /// Starts a server whose settings name its database.
    pub async fn start_by(settings: Settings, listen: &str, http: &str) -> Self {
        let mut command = Command::new(*PROGRAM);
        command.args(["--http-listen", http]).args(settings.arguments());
        let listen = listen.to_owned();
        let starting = move || Process::spawn(&listen, &mut command, |line| println!("{line}"));
        let process = tokio::task::spawn_blocking(starting).await.unwrap();
        let http = process.http();
        let scheme = if settings.0.contains_key("--tls-cert") { "https" } else { "http" };
        let metrics = Metrics { url: format!("{scheme}://{http}/metrics") };
        let (client, address) = (process.client.clone(), process.address.clone());
        Self { client, address, http, metrics, process }
    }

    /// The value of a metric with its labels, or 0 if it is not exported yet.
    pub fn metric(&self, series: &str) -> f64 {
        let text = self.metrics.text();
        let value = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.map_or(0.0, |value| value.parse().unwrap())
    }

    /// The value of a counter, or 0 if it is not exported yet.
    pub fn counter(&self, series: &str) -> u64 {
        self.metric(series) as u64
    }

    /// Freezes the process (SIGSTOP) or continues it (SIGCONT).
    pub fn freeze(&self, frozen: bool) {
        self.process.freeze(frozen);
    }

    pub async fn stop(self) -> ServerExit {
        tokio::task::spawn_blocking(move || self.process.stop()).await.unwrap()
    }
}

/// Returns the reason why no server starts on a database.
pub async fn refusal(database_url: &str, settings: Settings) -> String {
    let mut command = Command::new(*PROGRAM);
    command.args(["--database-url", database_url, "--listen", ANY_PORT, "--http-listen", ""]);
    command.args(settings.arguments()).env_remove("DATABASE_URL").env("LINKIS_RM_LOG_FORMAT", "text");
    let ended = tokio::task::spawn_blocking(move || ran(&mut command));
    let ended = tokio::time::timeout(LONG, ended).await.expect("it is refused in time").unwrap();
    assert_eq!(ended.code, Some(1), "{}", ended.err);
    ended.err
}

/// The metrics of a server. They are read over HTTP.
#[derive(Clone)]
pub struct Metrics {
    url: String,
}

impl Metrics {
    /// All metrics as Prometheus reads them.
    pub fn text(&self) -> String {
        // Without a process for each of the many reads; `curl` does TLS.
        if let Some(address) = self.url.strip_prefix("http://").and_then(|url| url.strip_suffix("/metrics")) {
            let (mut stream, mut reply) = (TcpStream::connect(address).unwrap(), String::new());
            write!(stream, "GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n").unwrap();
            stream.read_to_string(&mut reply).unwrap();
            let (head, body) = reply.split_once("\r\n\r\n").unwrap();
            assert!(head.contains(" 200 "), "{head}");
            return body.to_owned();
        }
        let output = Command::new("curl").args(["--silent", "--insecure", "--fail", &self.url]).output().unwrap();
        assert!(output.status.success(), "{} is read", self.url);
        String::from_utf8(output.stdout).unwrap()
    }
}

/// How a server ended after SIGTERM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerExit {
    /// All calls in progress were completed.
    Drained,
    /// Some calls were in progress at the drain timeout.
    CutOff,
}

/// The address of a server with its scheme.
pub fn typed(address: &str) -> String {
    if address.starts_with("unix:") { address.to_owned() } else { format!("http://{address}") }
}

/// A server in its own process.
pub struct Process {
    child: Child,
    pub client: RmClient,
    pub address: String,
    /// Log lines until it served.
    pub start_log: Vec<String>,
    /// Reads the later log lines. Returns how the server ended.
    log: Option<std::thread::JoinHandle<ServerExit>>,
}

impl Process {
    /// Starts the program on a free port without settings of this environment, and waits until it serves.
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_command(Command::new(*PROGRAM).args(arguments), |line| println!("{line}"))
    }

    /// Starts the program on a given address.
    pub fn start_at(listen: &str, arguments: &[&str]) -> Self {
        Self::spawn(listen, Command::new(*PROGRAM).args(arguments), |line| println!("{line}"))
    }

    /// Starts a prepared command; `log_line` receives its later log lines.
    pub fn start_command(command: &mut Command, log_line: impl FnMut(String) + Send + 'static) -> Self {
        Self::spawn("127.0.0.1:0", command, log_line)
    }

    /// Starts a server on a database that takes no writes yet. Returns it before it serves.
    pub fn start_unready(database_url: &str) -> Self {
        let (address, http) = (free_address(), free_address());
        let mut command = Command::new(*PROGRAM);
        command.args(["--database-url", database_url, "--listen", &address.to_string()]);
        command.args(["--http-listen", &http.to_string()]).args(settings().arguments());
        let child = command.env_remove("DATABASE_URL").env("LINKIS_RM_LOG_FORMAT", "text").spawn().unwrap();
        let start = Instant::now();
        while TcpStream::connect(http).is_err() {
            assert!(start.elapsed() < LONG, "the page is served");
            std::thread::sleep(Duration::from_millis(20));
        }
        let address = typed(&address.to_string());
        let start_log = vec![format!("metrics and health over HTTP address={http}")];
        Self { child, client: client(&address), address, start_log, log: None }
    }

    fn spawn(listen: &str, command: &mut Command, mut log_line: impl FnMut(String) + Send + 'static) -> Self {
        let cell = command.get_args().find_map(|word| Some(word.to_str()?.split_once('#')?.1.to_owned()));
        let mut child = command
            .args(["--listen", listen])
            .env_remove("DATABASE_URL")
            .env_remove("LINKIS_RM_DATA_DIR")
            .envs(cell.map(|cell| ("LINKIS_RM_CELL", cell)))
            .env("RUST_LOG", "info")
            .env("LINKIS_RM_LOG_FORMAT", "text")
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let mut start_log = Vec::new();
        let address = log.by_ref().find_map(|line| {
            let address = line.split_once("serving address=").map(|(_, address)| typed(address));
            start_log.push(line);
            address
        });
        let address = address.unwrap_or_else(|| panic!("it does not serve:\n{}", start_log.join("\n")));
        // The log is read until its end, because a full pipe would stop the process.
        let log = std::thread::spawn(move || {
            let mut exit = ServerExit::Drained;
            for line in log {
                if line.contains("some calls were still open") {
                    exit = ServerExit::CutOff;
                }
                log_line(line);
            }
            exit
        });
        Self { child, client: client(&address), address, start_log, log: Some(log) }
    }

    /// Address of metrics and health.
    pub fn http(&self) -> SocketAddr {
        let address = |line: &String| line.split_once("metrics and health over HTTP address=")?.1.parse().ok();
        self.start_log.iter().find_map(address).unwrap_or_else(|| panic!("{:?}", self.start_log))
    }

    /// Freezes the process (SIGSTOP) or continues it (SIGCONT).
    pub fn freeze(&self, frozen: bool) {
        let signal = if frozen { Signal::STOP } else { Signal::CONT };
        rustix::process::kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Resident memory in bytes.
    pub fn memory(&self) -> usize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.strip_suffix("kB"));
        resident.unwrap().trim().parse::<usize>().unwrap() * 1024
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// kill -9.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends SIGTERM, and waits for the end. Returns how the server ended.
    pub fn stop(mut self) -> ServerExit {
        rustix::process::kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success(), "the server stops in order");
        self.log.take().map_or(ServerExit::Drained, |log| log.join().unwrap())
    }

    /// Sends SIGTERM. Returns the exit code.
    pub fn terminate(mut self) -> Option<i32> {
        let pid = Pid::from_child(&self.child);
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
        self.child.wait().unwrap().code()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process has ended, unless the test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
