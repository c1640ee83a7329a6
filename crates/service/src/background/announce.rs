//! Announcement: renews the row of this instance, with its address, throughput and task reports.
//!
//! Other instances list the rows for operators, and delete rows that are not renewed.
//!
//! Never: decides anything about tickets or EMs.
//! Caller: the task driver (`background`).

use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use rm_model::overview::Throughput;
use rm_store::{
    StoreError, Work,
    server_instance::{self, ServerInstance, TaskReport},
    session::{Session, within_short_timeout},
};
use rm_telemetry::metrics::Metrics;

use super::{RunningTasks, Step, Task};

/// Background task that renews the instance's row.
#[derive(Debug)]
pub struct AnnounceInstance {
    id: Uuid,
    address: String,
    metrics: Metrics,
    running: RunningTasks,
    /// Time, grants and refusals at the previous renewal.
    before: (Instant, u64, u64),
}

impl AnnounceInstance {
    /// Creates the task of the instance at `address`, whose requests are counted by `metrics` and whose tasks are `running`.
    pub fn new(id: Uuid, address: String, metrics: Metrics, running: RunningTasks) -> Self {
        Self { id, address, metrics, running, before: (Instant::now(), 0, 0) }
    }

    /// Returns the grants and refusals per second since the previous call.
    fn throughput(&mut self) -> Throughput {
        let (then, granted_then, refused_then) = self.before;
        let (now, (granted, refused)) = (Instant::now(), self.metrics.requests.answered());
        self.before = (now, granted, refused);
        let seconds = now.duration_since(then).as_secs_f64().max(f64::MIN_POSITIVE);
        // A rate beyond the range of `u32` cannot occur.
        let rate =
            |now: u64, then: u64| f64::from(u32::try_from(now.saturating_sub(then)).unwrap_or(u32::MAX)) / seconds;
        Throughput { grants: rate(granted, granted_then), refusals: rate(refused, refused_then) }
    }
}

impl Task for AnnounceInstance {
    const NAME: &'static str = "announcing";
    const WORK: Work = Work::Vital;
    const PERIOD: Duration = Duration::from_secs(2);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        let report = |(name, reading): (&'static str, rm_telemetry::metrics::TaskReading)| TaskReport {
            task: name.to_owned(),
            last_run: reading.last_run,
            last_success: reading.last_success,
            lag: reading.lag,
            steps: reading.steps,
            errors: reading.errors,
            last_error: reading.last_error,
        };
        let instance = ServerInstance {
            id: self.id,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            address: self.address.clone(),
            throughput: self.throughput(),
            tasks: self.running.readings().into_iter().map(report).collect(),
        };
        within_short_timeout(server_instance::announce(session.get().await?, &instance)).await?;
        within_short_timeout(server_instance::delete_dead(session.get().await?)).await?;
        Ok(Step::Done)
    }

    /// Deletes the row, so that the list is correct before its deadline.
    async fn end(&mut self, session: &mut Session) {
        if let Ok(connection) = session.get().await {
            // Other instances delete the row after its deadline if the database does not reply now.
            let _ = within_short_timeout(server_instance::deregister(connection, self.id)).await;
        }
    }
}

/// Returns the address to announce. The host name replaces an unspecified IP address, at which no client could connect.
pub fn address_text(address: &std::net::SocketAddr) -> String {
    let machine = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    match address.ip().is_unspecified().then(machine).flatten() {
        Some(machine) => format!("{}:{}", machine.trim(), address.port()),
        None => address.to_string(),
    }
}
