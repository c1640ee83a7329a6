//! Process of the private server: start, supervision and stop.
//!
//! Signals are sent under a lock, so that none reaches another process with a reused pid. A server of an earlier, killed run
//! is stopped first. Never: outlives this process. Caller: the parent module.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, timeout};

use super::account::setpriv_failed;
use super::cluster::PostgresCluster;
use super::error::EmbeddedError;
use super::{StopResult, spawn_thread};

/// Time to wait for the server of an earlier run, which may still be stopping.
const OLD_SERVER_WAIT: Duration = Duration::from_secs(10);
/// Time after which the server of an earlier run is signalled to stop.
const OLD_SERVER_PATIENCE: Duration = Duration::from_secs(1);
const OLD_SERVER_POLL: Duration = Duration::from_millis(200);
/// Timeout of the start. After a crash the server first replays up to `max_wal_size` of changes.
const READY_WAIT: Duration = Duration::from_secs(600);
const READY_POLL: Duration = Duration::from_millis(10);
const FAST_STOP_WAIT: Duration = Duration::from_secs(10);
const IMMEDIATE_STOP_WAIT: Duration = Duration::from_secs(5);

/// A running server, signalled to stop when dropped.
///
/// The thread that watches the server is not joined: it ends with the server, and the end of this process must not wait
/// for it.
#[derive(Debug)]
pub(super) struct PostgresProcess {
    pid: Pid,
    /// False from before the pid is released. Signals are sent under this lock, so that none reaches another process
    /// with the same pid.
    alive: Arc<Mutex<bool>>,
    ended: watch::Receiver<Option<ExitStatus>>,
}

impl PostgresProcess {
    /// Starts the server and waits until it accepts connections.
    ///
    /// # Errors
    /// [`EmbeddedError::Ended`] with the complaints in its log; [`EmbeddedError::NotReady`] after the timeout.
    pub(super) async fn start(cluster: &PostgresCluster) -> Result<Self, EmbeddedError> {
        let pid_file = cluster.data_dir().join("postmaster.pid");
        let begun = Instant::now();
        loop {
            remove_stale(cluster);
            let is_locked = || cluster.lock_files().iter().any(|file| file.exists());
            let was_locked = is_locked();
            let log = cluster.open_log()?;
            let log_from = log.metadata().map(|metadata| metadata.len()).unwrap_or(0);
            let server = Self::spawn(cluster.server_command(log)?).await?;
            let Some(status) = server.ready(&pid_file, cluster).await? else { return Ok(server) };
            // A lock file that exists or existed belongs to another server, which may have started in between; its end
            // is waited for.
            if !(was_locked || is_locked()) || begun.elapsed() >= OLD_SERVER_WAIT {
                let detail = cluster.log_tail(log_from);
                return Err(EmbeddedError::Ended { status, detail, log: cluster.log_path() });
            }
            if begun.elapsed() >= OLD_SERVER_PATIENCE {
                interrupt_old(&pid_file, &cluster.data_dir());
            }
            sleep(OLD_SERVER_POLL).await;
        }
    }

    /// Spawns the server from a thread that lives until the server has ended: the death signal is sent when the thread
    /// ends.
    async fn spawn(mut command: Command) -> Result<Self, EmbeddedError> {
        let alive = Arc::new(Mutex::new(true));
        let (started_tx, started_rx) = oneshot::channel();
        let (ended_tx, ended) = watch::channel(None);
        let alive_there = Arc::clone(&alive);
        spawn_thread("postgres-wait", move || match command.spawn() {
            Ok(child) => {
                let _ = started_tx.send(Ok(Pid::from_child(&child)));
                ended_tx.send_replace(Some(wait(child, &alive_there)));
            }
            Err(error) => drop(started_tx.send(Err(error))),
        })?;
        match started_rx.await {
            Ok(Ok(pid)) => Ok(Self { pid, alive, ended }),
            Ok(Err(error)) => Err(setpriv_failed(error)),
            Err(_) => Err(EmbeddedError::Thread(io::Error::other("it ended early"))),
        }
    }

    /// Waits until the server is ready; returns its exit status if it ended instead.
    async fn ready(&self, pid_file: &Path, cluster: &PostgresCluster) -> Result<Option<ExitStatus>, EmbeddedError> {
        let pid = self.pid.as_raw_nonzero().get();
        let polled = async {
            while !fs::read_to_string(pid_file).is_ok_and(|text| is_ready(&text, pid)) {
                sleep(READY_POLL).await;
            }
        };
        tokio::select! {
            status = self.ended() => Ok(Some(status)),
            within = timeout(READY_WAIT, polled) => match within {
                Ok(()) => Ok(None),
                Err(_) => Err(EmbeddedError::NotReady { waited_s: READY_WAIT.as_secs(), log: cluster.log_path() }),
            },
        }
    }

    /// Waits for the end of the server.
    pub(super) async fn ended(&self) -> ExitStatus {
        let mut ended = self.ended.clone();
        let status = ended.wait_for(Option::is_some).await.map(|status| *status);
        // The thread reports a status before it ends, so one always exists.
        status.ok().flatten().unwrap_or_else(|| ExitStatus::from_raw(-1))
    }

    /// Stops the server: in order, then without a last checkpoint, then by SIGKILL.
    pub(super) async fn stop(&self) -> StopResult {
        if let Some(status) = *self.ended.borrow() {
            return StopResult::Before(status);
        }
        for (signal, stop_timeout, outcome) in [
            (Signal::INT, FAST_STOP_WAIT, StopResult::InOrder as fn(ExitStatus) -> StopResult),
            (Signal::QUIT, IMMEDIATE_STOP_WAIT, StopResult::AtOnce),
        ] {
            self.signal(signal);
            if let Ok(status) = timeout(stop_timeout, self.ended()).await {
                return outcome(status);
            }
        }
        self.signal(Signal::KILL);
        StopResult::ByForce(self.ended().await)
    }

    fn signal(&self, signal: Signal) {
        let alive = self.alive.lock().unwrap_or_else(PoisonError::into_inner);
        if *alive && let Err(error) = kill_process(self.pid, signal) {
            tracing::warn!(?signal, %error, "cannot signal the PostgreSQL server");
        }
    }
}

impl Drop for PostgresProcess {
    fn drop(&mut self) {
        self.signal(Signal::INT);
    }
}

fn wait(mut child: Child, alive: &Mutex<bool>) -> ExitStatus {
    let pid = WaitId::Pid(Pid::from_child(&child));
    while let Err(rustix::io::Errno::INTR) = waitid(pid.clone(), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {}
    *alive.lock().unwrap_or_else(PoisonError::into_inner) = false;
    child.wait().unwrap_or_else(|_| ExitStatus::from_raw(-1))
}

/// Returns whether `postmaster.pid` belongs to `pid` and its eighth line says that connections are accepted.
fn is_ready(pid_file: &str, pid: i32) -> bool {
    owner(pid_file) == Some(pid) && pid_file.lines().nth(7).is_some_and(|line| line.trim() == "ready")
}

/// Returns the pid of the server, from the first line of `postmaster.pid`.
fn owner(pid_file: &str) -> Option<i32> {
    pid_file.lines().next()?.trim().parse().ok().filter(|pid| *pid > 0)
}

/// Removes the lock files of a crash. The pid in them may now belong to another process, which PostgreSQL cannot
/// distinguish from a running server. The caller owns the state directory, and every server process has the data as its
/// directory.
fn remove_stale(cluster: &PostgresCluster) {
    let left: Vec<_> = cluster.lock_files().into_iter().filter(|file| file.exists()).collect();
    if !left.is_empty() && processes_in(&cluster.data_dir()).is_ok_and(|pids| pids.is_empty()) {
        tracing::warn!("the PostgreSQL server was not stopped in order the last time; it recovers now");
        for file in left {
            // If this fails, PostgreSQL names the file in its error.
            let _ = fs::remove_file(file);
        }
    }
}

/// Signals the server of an earlier, crashed run to stop.
fn interrupt_old(pid_file: &Path, data_dir: &Path) {
    let Some(old) = fs::read_to_string(pid_file).ok().as_deref().and_then(owner) else { return };
    if processes_in(data_dir).is_ok_and(|pids| pids.contains(&old))
        && let Some(pid) = Pid::from_raw(old)
    {
        tracing::warn!(pid = old, "stopping the PostgreSQL server an earlier run left behind");
        let _ = kill_process(pid, Signal::INT);
    }
}

/// Waits for the end of an earlier run's server, and signals it if it does not stop. Returns false if it continues.
pub(super) fn end_old(data_dir: &Path) -> bool {
    let begun = Instant::now();
    // An unreadable process list ends the wait.
    while processes_in(data_dir).is_ok_and(|pids| !pids.is_empty()) {
        if begun.elapsed() >= OLD_SERVER_WAIT {
            return false;
        }
        if begun.elapsed() >= OLD_SERVER_PATIENCE {
            interrupt_old(&data_dir.join("postmaster.pid"), data_dir);
        }
        thread::sleep(OLD_SERVER_POLL);
    }
    true
}

/// Returns the processes whose working directory is `dir`, by any path.
fn processes_in(dir: &Path) -> io::Result<Vec<i32>> {
    let identity = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let wanted = identity(dir)?;
    Ok(fs::read_dir("/proc")?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| identity(Path::new(&format!("/proc/{pid}/cwd"))).is_ok_and(|found| found == wanted))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PID_FILE: &str = "4711\n/state/data\n1700000000\n5432\n/state/socket\n\n  1234567    98304\nready   \n";

    #[test]
    fn server_is_ready_when_eighth_line_of_own_pid_file_says_so() {
        assert!(is_ready(PID_FILE, 4711));
        assert!(!is_ready(PID_FILE, 4712));
        assert!(!is_ready(&PID_FILE.replace("ready", "starting"), 4711));
        assert!(!is_ready("4711\n/state/data\n", 4711));
        assert!(!is_ready("", 4711));
    }

    #[test]
    fn pid_file_with_positive_first_line_names_owner() {
        assert_eq!(owner(PID_FILE), Some(4711));
        assert_eq!(owner("-4711\n"), None);
        assert_eq!(owner("\n4711\n"), None);
    }
}
