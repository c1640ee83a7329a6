//! Reads that may be a little old, from a standby of the database: they take nothing from those that commit.
//!
//! How old an answer may be is known without comparing clocks or places in logs: about once a second an instance says in the database that
//! it lives, and at which moment that was. A standby that knows of it knows everything that was committed before. One that has not heard
//! for `LAG_MAX`, does not answer, or follows nobody any more is not asked: the primary is.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use sqlx::{Postgres, pool::PoolConnection};
use time::OffsetDateTime;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    error::Error,
    files::LOOK_INTERVAL,
    metrics::Metrics,
    store::{
        Store, StoreError, Work, server_instance,
        session::{Session, answered_soon},
        standby::{CONNECTIONS_MAX, Host, Looking},
        target::Target,
    },
};

use super::history::History;

/// The oldest that an answer may be; beyond it the primary is asked.
const LAG_MAX: Duration = Duration::from_secs(10);

/// How long after the instance has said that it lives it is looked whether the standby knows, and how long after that it says so again.
const PAUSE: Duration = Duration::from_millis(500);

/// How many moments are kept of which the standby has not heard yet: those of twice as long as it may be behind.
const MARKS_MAX: usize = 20;

/// How many reads may wait for a connection, and for how long.
const WAITING_MAX: usize = 32;
const WAIT_MAX: Duration = Duration::from_secs(2);

/// A moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mark {
    /// By the database's clock.
    pub at: OffsetDateTime,
    /// Up to which number the history was whole then.
    pub settled: i64,
    /// By this machine's clock, or sooner.
    noted: Instant,
}

/// A standby that can be asked.
#[derive(Debug, Clone)]
struct Well {
    host: Host,
    /// Everything that was committed before is known there.
    mark: Mark,
    /// Counts up whenever another host is asked.
    number: u64,
}

/// The standby, if there is one; clones share it.
#[derive(Clone, Debug)]
pub struct Standby(Option<Arc<Shared>>);

#[derive(Debug)]
struct Shared {
    well: watch::Sender<Option<Well>>,
    admitted: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    metrics: Metrics,
}

/// A connection to the standby for one read, and what is known of it.
#[derive(Debug)]
pub struct Reading {
    /// To the standby.
    pub connection: PoolConnection<Postgres>,
    /// What holds of it.
    pub guard: Guard,
}

/// How old an answer may be, and whether the standby is still there that gives it.
#[derive(Debug)]
pub struct Guard {
    /// Everything that was committed before is in the answer.
    pub mark: Mark,
    number: u64,
    shared: Arc<Shared>,
    _permits: [OwnedSemaphorePermit; 2],
}

impl Standby {
    /// At `target`, if there is one: looked for from now on, for the instance that announces itself by this name, until the server stops.
    pub fn start(
        target: Option<Target>,
        store: &Store,
        instance_id: Uuid,
        metrics: &Metrics,
        spawn: impl FnOnce(Watching),
    ) -> Self {
        let shared = target.map(|target| {
            let shared = Arc::new(Shared {
                well: watch::Sender::new(None),
                admitted: Arc::new(Semaphore::new(CONNECTIONS_MAX as usize + WAITING_MAX)),
                connections: Arc::new(Semaphore::new(CONNECTIONS_MAX as usize)),
                metrics: metrics.clone(),
            });
            spawn(Watching {
                shared: shared.clone(),
                looking: Looking::new(target),
                store: store.clone(),
                history: History::default(),
                instance_id,
                marks: VecDeque::new(),
                generation: store.primary().generation(),
                number: 0,
            });
            shared
        });
        Self(shared)
    }

    /// A connection to it, if it knows all but the last moments; `None` if the primary is to be asked.
    ///
    /// # Errors
    /// [`Error::Overloaded`] if too many read there.
    pub async fn acquire(&self) -> Result<Option<Reading>, Error> {
        let Some(shared) = &self.0 else { return Ok(None) };
        if shared.usable().is_none() {
            shared.metrics.standby.passed_on();
            return Ok(None);
        }
        let admitted = shared.admitted.clone().try_acquire_owned().map_err(|_| Error::Overloaded)?;
        let turn = timeout(WAIT_MAX, shared.connections.clone().acquire_owned()).await;
        let turn = turn.map_err(|_| Error::Overloaded)?.map_err(|_| Error::ShuttingDown)?;
        // As it is now.
        if let Some(Well { host, mark, number }) = shared.usable()
            && let Ok(connection) = host.pool.acquire().await
        {
            let guard = Guard { mark, number, shared: shared.clone(), _permits: [admitted, turn] };
            return Ok(Some(Reading { connection, guard }));
        }
        shared.metrics.standby.passed_on();
        Ok(None)
    }
}

impl Shared {
    fn usable(&self) -> Option<Well> {
        self.well.borrow().clone().filter(|well| well.mark.noted.elapsed() < LAG_MAX)
    }
}

impl Guard {
    /// How a read at the standby ended; `None` if the primary is to be asked instead, because the standby has gone meanwhile or could not do
    /// it: it may have to end a read to go on following.
    ///
    /// # Errors
    /// What the caller did wrong.
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

/// What keeps looking at the standby.
pub struct Watching {
    shared: Arc<Shared>,
    looking: Looking,
    store: Store,
    history: History,
    instance_id: Uuid,
    /// Of which the standby may not have heard yet, the oldest first; and the last of which it has.
    marks: VecDeque<Mark>,
    /// Of the primary that they were made at.
    generation: u64,
    number: u64,
}

impl Watching {
    /// Looks until the server stops.
    pub async fn run(mut self, stopping: CancellationToken) {
        let mut session = self.store.background_session(Work::Short);
        let watched = async {
            let (mut was_well, mut file_read) = (false, Instant::now());
            loop {
                if self.mark(&mut session).await.is_err() {
                    // Whoever looks for the primary tells of it.
                    session.reset();
                }
                session.give_back().await;
                sleep(PAUSE).await;
                let looked = self.look().await;
                if was_well && let Err(error) = &looked {
                    let error: &dyn std::error::Error = error;
                    tracing::warn!(error, "the standby cannot be asked; the primary is");
                }
                was_well = looked.is_ok();
                if file_read.elapsed() >= LOOK_INTERVAL {
                    file_read = Instant::now();
                    if self.looking.read_again().await {
                        self.forget();
                    }
                }
                sleep(PAUSE).await;
            }
        };
        stopping.run_until_cancelled(watched).await;
    }

    /// Says at the primary that the instance lives.
    async fn mark(&mut self, session: &mut Session) -> Result<(), StoreError> {
        let (noted, generation) = (Instant::now(), self.store.primary().generation());
        if generation != self.generation {
            // What another primary knew, the next one may not.
            self.generation = generation;
            self.marks.clear();
            self.forget();
        }
        let connection = session.get().await?;
        let settled = answered_soon(self.history.settled_number(connection)).await?;
        let Some(settled) = settled else { return Ok(()) };
        let Some(at) = answered_soon(server_instance::mark(session.get().await?, self.instance_id)).await? else {
            return Ok(());
        };
        if self.marks.len() == MARKS_MAX {
            self.marks.pop_front();
        }
        self.marks.push_back(Mark { at, settled, noted });
        Ok(())
    }

    /// Looks of which of these moments the standby knows.
    async fn look(&mut self) -> Result<(), StoreError> {
        let looked = self.looking.look(self.instance_id).await;
        let (before, metrics) = (self.shared.well.borrow().clone(), &self.shared.metrics.standby);
        let (host, marked) = match looked {
            Ok(looked) => looked,
            Err(error) => {
                self.forget();
                return Err(error);
            }
        };
        // Just that moment, and not a later one: by another machine's clock it may be later, and be of another life of the database.
        let known = self.marks.iter().position(|mark| mark.at == marked);
        self.marks.drain(..known.unwrap_or_default());
        let before = before.filter(|before| before.host.place == host.place);
        let mark = known.and_then(|_| self.marks.front().copied()).or(before.as_ref().map(|before| before.mark));
        let Some(mark) = mark else { return Ok(()) };
        if before.is_none() {
            self.number += 1;
            tracing::info!(host = host.place, "a standby answers what may be a little old");
        }
        metrics.lags(mark.noted.elapsed());
        self.shared.well.send_replace(Some(Well { host, mark, number: self.number }));
        Ok(())
    }

    /// Nothing is known of a standby.
    fn forget(&self) {
        self.shared.well.send_replace(None);
        self.shared.metrics.standby.away();
    }
}
