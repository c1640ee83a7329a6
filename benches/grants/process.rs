//! Child processes, none of which outlives this process, and the folder for temporary files.

use std::{
    ffi::OsStr,
    fs,
    io::{self, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant, SystemTime},
};

use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::oneshot;

use crate::Failure;

/// Timeout until a server serves. It migrates its schema first.
const READY_TIMEOUT: Duration = Duration::from_secs(30);

/// Time between the end signal to a child and its kill.
const STOP_TIMEOUT: Duration = Duration::from_secs(15);
const STOP_POLL: Duration = Duration::from_millis(20);

/// Returns a command without this process's environment, except the search path and the log filter. The child gets a
/// signal if this process's main thread ends without ending the child; that thread has to start it.
pub(crate) fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM"]).arg(program);
    command.env_clear().env("LC_ALL", "C").stdin(Stdio::null());
    for name in ["PATH", "RUST_LOG"] {
        command.envs(std::env::var_os(name).map(|value| (name, value)));
    }
    command
}

/// Child process that ends when the value is dropped.
#[derive(Debug)]
pub(crate) struct ChildGuard(Child);

impl ChildGuard {
    pub fn start(command: &mut Command) -> Result<Self, Failure> {
        let name = command.get_args().nth(2).unwrap_or_default().to_string_lossy().into_owned();
        command
            .spawn()
            .map(Self)
            .map_err(|error| format!("cannot start {name} by setpriv (util-linux): {error}").into())
    }

    /// Waits for the end of the child.
    pub async fn ended(&mut self) -> io::Result<ExitStatus> {
        loop {
            if let Some(status) = self.0.try_wait()? {
                return Ok(status);
            }
            tokio::time::sleep(STOP_POLL).await;
        }
    }

    /// Returns true until the child has ended.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(None))
    }
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let begun = Instant::now();
        if self.is_alive() {
            // A child that gets no signal is killed below.
            let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
        }
        while self.is_alive() {
            if begun.elapsed() >= STOP_TIMEOUT {
                let _ = self.0.kill();
                let _ = self.0.wait();
                return;
            }
            thread::sleep(STOP_POLL);
        }
    }
}

/// Server in its own process, which logs its addresses.
#[derive(Debug)]
pub(crate) struct Server {
    process: ChildGuard,
    addresses: ServerAddresses,
}

/// Addresses in the log of a server.
#[derive(Debug, Default)]
struct ServerAddresses {
    grpc: String,
    http: String,
}

impl Server {
    /// Starts the server and waits until it serves.
    pub async fn start(mut command: Command) -> Result<Self, Failure> {
        command.env("LINKIS_RM_LOG_FORMAT", "text");
        let mut process = ChildGuard::start(command.stdout(Stdio::null()).stderr(Stdio::piped()))?;
        let log = process.0.stderr.take().ok_or("a server's log cannot be read")?;
        let (found, addresses) = oneshot::channel();
        thread::spawn(move || follow_log(BufReader::new(log), found));
        match tokio::time::timeout(READY_TIMEOUT, addresses).await {
            Ok(Ok(addresses)) => Ok(Self { process, addresses }),
            Ok(Err(_)) => Err("a server ended before it served; its log is above".into()),
            Err(_) => Err(format!("a server did not serve within {} s", READY_TIMEOUT.as_secs()).into()),
        }
    }

    pub fn process_id(&self) -> u32 {
        self.process.0.id()
    }

    /// Returns the gRPC address.
    pub fn url(&self) -> String {
        format!("http://{}", self.addresses.grpc)
    }

    /// Returns the address of the page.
    pub fn http_address(&self) -> &str {
        &self.addresses.http
    }
}

/// Reads a server's log to its end, so that the server never waits for a reader. Prints warnings and errors.
fn follow_log(log: impl io::BufRead, found: oneshot::Sender<ServerAddresses>) {
    let (mut found, mut addresses) = (Some(found), ServerAddresses::default());
    let word = |text: &str| text.split_whitespace().next().unwrap_or_default().to_owned();
    for line in log.lines().map_while(Result::ok) {
        if let Some((_, address)) = line.split_once("http_address=") {
            addresses.http = word(address);
        }
        match line.split_once("serving address=") {
            Some((_, address)) => {
                addresses.grpc = word(address);
                found.take().map(|found| found.send(std::mem::take(&mut addresses)));
            }
            None if line.contains(" INFO ") => {}
            None => eprintln!("  server: {line}"),
        }
    }
}

/// Temporary folder that is removed with its content when the value is dropped.
#[derive(Debug)]
pub(crate) struct TemporaryDir(PathBuf);

impl TemporaryDir {
    /// Creates the folder in `TMPDIR`.
    pub fn create() -> Result<Self, Failure> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_millis();
        let path = std::env::temp_dir().join(format!("linkis-rm-grants-{}-{now}", std::process::id()));
        fs::create_dir(&path).map_err(|error| format!("cannot create {}: {error}", path.display()))?;
        Ok(Self(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TemporaryDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("cannot remove {}: {error}", self.0.display());
        }
    }
}
