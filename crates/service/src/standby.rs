//! Standby reads: reads that may be stale by up to 10 seconds, on a standby, so that they do not load the primary.
//!
//! The age is known without comparing clocks or log positions. The instance writes a timestamp (mark) to the primary about once
//! a second. A standby that has replayed a mark has all earlier commits. A standby that is too old, silent or not replicating
//! is not used; the primary is.
//!
//! Never: returns a read of unknown age.
//! Callers: `usage` and `audit`; the server spawns the monitor.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use sqlx::{Postgres, pool::PoolConnection};
use time::OffsetDateTime;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::error::Error;
use rm_model::FILE_POLL_INTERVAL;
use rm_store::{
    Store, StoreError, Work,
    connect_target::ConnectTarget,
    server_instance,
    session::{Session, within_short_timeout},
    standby::{CONNECTIONS_MAX, StandbyHost, StandbySearch},
};
use rm_telemetry::metrics::Metrics;

use super::history::HistoryReader;

/// Maximum age of a read; beyond it, the primary is used.
const LAG_MAX: Duration = Duration::from_secs(10);

/// Pause between writing a mark and checking it on the standby, and between that check and the next mark.
const PAUSE: Duration = Duration::from_millis(500);

/// Maximum number of marks that the standby has not replayed: those of twice the maximum age.
const MARKS_MAX: usize = 20;

/// Maximum number of reads that wait for a connection, and their timeout.
const WAITING_MAX: usize = 32;
const WAIT_MAX: Duration = Duration::from_secs(2);

/// A mark: a moment that the primary has recorded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReplayMark {
    /// Time by the database's clock.
    pub at: OffsetDateTime,
    /// Number up to which the history was complete.
    pub settled: i64,
    /// Lower bound of the time by the local clock.
    noted: Instant,
}

/// A usable standby.
#[derive(Debug, Clone)]
struct UsableStandby {
    host: StandbyHost,
    /// Last replayed mark: all earlier commits are on the standby.
    mark: ReplayMark,
    /// Sequence number of the host; changes with the host.
    number: u64,
}

/// Handle of the standby, if one is configured. Clones share it.
#[derive(Clone, Debug)]
pub struct StandbyReader(Option<Arc<StandbyInner>>);

#[derive(Debug)]
struct StandbyInner {
    well: watch::Sender<Option<UsableStandby>>,
    admitted: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    metrics: Metrics,
}

/// Connection to the standby for one read.
#[derive(Debug)]
pub struct StandbyRead {
    /// The connection.
    pub connection: PoolConnection<Postgres>,
    /// Age and validity of the read.
    pub guard: FreshnessGuard,
}

/// Bound on the age of a read. Detects that the standby was lost during the read.
#[derive(Debug)]
pub struct FreshnessGuard {
    /// Mark of the standby: all earlier commits are in the read.
    pub mark: ReplayMark,
    number: u64,
    shared: Arc<StandbyInner>,
    _permits: [OwnedSemaphorePermit; 2],
}

impl StandbyReader {
    /// Creates the handle for the standby at `target`, if any, and starts its monitor by `spawn`. The monitor writes marks
    /// under `instance_id`.
    pub fn start(
        target: Option<ConnectTarget>,
        store: &Store,
        instance_id: Uuid,
        metrics: &Metrics,
        spawn: impl FnOnce(StandbyMonitor),
    ) -> Self {
        let shared = target.map(|target| {
            let shared = Arc::new(StandbyInner {
                well: watch::Sender::new(None),
                admitted: Arc::new(Semaphore::new(CONNECTIONS_MAX as usize + WAITING_MAX)),
                connections: Arc::new(Semaphore::new(CONNECTIONS_MAX as usize)),
                metrics: metrics.clone(),
            });
            spawn(StandbyMonitor {
                shared: shared.clone(),
                looking: StandbySearch::new(target),
                store: store.clone(),
                history: HistoryReader::default(),
                instance_id,
                marks: VecDeque::new(),
                generation: store.primary().generation(),
                number: 0,
            });
            shared
        });
        Self(shared)
    }

    /// Returns a connection to the standby; `None` if the primary must be used.
    ///
    /// # Errors
    /// [`Error::Overloaded`] if too many reads use the standby.
    pub async fn acquire(&self) -> Result<Option<StandbyRead>, Error> {
        let Some(shared) = &self.0 else { return Ok(None) };
        if shared.usable().is_none() {
            shared.metrics.standby.passed_on();
            return Ok(None);
        }
        let admitted = shared.admitted.clone().try_acquire_owned().map_err(|_| Error::Overloaded)?;
        let turn = timeout(WAIT_MAX, shared.connections.clone().acquire_owned()).await;
        let turn = turn.map_err(|_| Error::Overloaded)?.map_err(|_| Error::ShuttingDown)?;
        // Checked again after the wait.
        if let Some(UsableStandby { host, mark, number }) = shared.usable()
            && let Ok(connection) = host.pool.acquire().await
        {
            let guard = FreshnessGuard { mark, number, shared: shared.clone(), _permits: [admitted, turn] };
            return Ok(Some(StandbyRead { connection, guard }));
        }
        shared.metrics.standby.passed_on();
        Ok(None)
    }
}

impl StandbyInner {
    fn usable(&self) -> Option<UsableStandby> {
        self.well.borrow().clone().filter(|well| well.mark.noted.elapsed() < LAG_MAX)
    }
}

impl FreshnessGuard {
    /// Awaits a read on the standby. Returns `None` if the primary must be used, because the standby was lost or failed. A
    /// standby may have to cancel a read in order to continue its replay.
    ///
    /// # Errors
    /// [`Error::InvalidField`] and [`Error::Denied`], which the primary would return too.
    pub async fn answered<T>(&self, read: impl Future<Output = Result<T, Error>>) -> Result<Option<T>, Error> {
        let mut well = self.shared.well.subscribe();
        let left = well.wait_for(|well| well.as_ref().is_none_or(|well| well.number != self.number));
        let ended = tokio::select! {
            biased;
            ended = read => ended.map(Some),
            _ = left => Ok(None),
        };
        let metrics = &self.shared.metrics.standby;
        match ended {
            Ok(Some(told)) => {
                metrics.answered();
                Ok(Some(told))
            }
            Err(error @ (Error::InvalidField(_) | Error::Denied(_))) => Err(error),
            Ok(None) | Err(_) => {
                metrics.passed_on();
                Ok(None)
            }
        }
    }
}

/// Monitor of the standby.
pub struct StandbyMonitor {
    shared: Arc<StandbyInner>,
    looking: StandbySearch,
    store: Store,
    history: HistoryReader,
    instance_id: Uuid,
    /// Last mark that the standby has replayed, and later ones, the oldest first.
    marks: VecDeque<ReplayMark>,
    /// Generation of the primary on which the marks were written.
    generation: u64,
    number: u64,
}

impl StandbyMonitor {
    /// Monitors the standby until shutdown.
    pub async fn run(mut self, stopping: CancellationToken) {
        let mut session = self.store.background_session(Work::Short);
        let watched = async {
            let (mut was_well, mut file_read) = (false, Instant::now());
            loop {
                if self.mark(&mut session).await.is_err() {
                    // The search for a primary logs the error.
                    session.reset();
                }
                session.give_back().await;
                sleep(PAUSE).await;
                let looked = self.look().await;
                if was_well && let Err(error) = &looked {
                    let error: &dyn std::error::Error = error;
                    tracing::warn!(error, "the standby does not respond; the primary serves the reads");
                }
                was_well = looked.is_ok();
                if file_read.elapsed() >= FILE_POLL_INTERVAL {
                    file_read = Instant::now();
                    if self.looking.read_again().await {
                        self.clear();
                    }
                }
                sleep(PAUSE).await;
            }
        };
        stopping.run_until_cancelled(watched).await;
    }

    /// Writes a mark on the primary.
    async fn mark(&mut self, session: &mut Session) -> Result<(), StoreError> {
        let (noted, generation) = (Instant::now(), self.store.primary().generation());
        if generation != self.generation {
            // The new primary may lack commits of the old one.
            self.generation = generation;
            self.marks.clear();
            self.clear();
        }
        let connection = session.get().await?;
        let settled = within_short_timeout(self.history.settled_number(connection)).await?;
        let Some(settled) = settled else { return Ok(()) };
        let Some(at) = within_short_timeout(server_instance::mark(session.get().await?, self.instance_id)).await?
        else {
            return Ok(());
        };
        if self.marks.len() == MARKS_MAX {
            self.marks.pop_front();
        }
        self.marks.push_back(ReplayMark { at, settled, noted });
        Ok(())
    }

    /// Reads the last mark that the standby has replayed.
    async fn look(&mut self) -> Result<(), StoreError> {
        let looked = self.looking.look(self.instance_id).await;
        let (before, metrics) = (self.shared.well.borrow().clone(), &self.shared.metrics.standby);
        let (host, marked) = match looked {
            Ok(looked) => looked,
            Err(error) => {
                self.clear();
                return Err(error);
            }
        };
        // Only an equal time counts: a later time may come from another clock, or from another history of the database.
        let known = self.marks.iter().position(|mark| mark.at == marked);
        self.marks.drain(..known.unwrap_or_default());
        let before = before.filter(|before| before.host.place == host.place);
        let mark = known.and_then(|_| self.marks.front().copied()).or(before.as_ref().map(|before| before.mark));
        let Some(mark) = mark else { return Ok(()) };
        if before.is_none() {
            self.number += 1;
            tracing::info!(host = host.place, "a standby serves reads that may be stale");
        }
        metrics.lags(mark.noted.elapsed());
        self.shared.well.send_replace(Some(UsableStandby { host, mark, number: self.number }));
        Ok(())
    }

    /// Records that there is no usable standby.
    fn clear(&self) {
        self.shared.well.send_replace(None);
        self.shared.metrics.standby.away();
    }
}
