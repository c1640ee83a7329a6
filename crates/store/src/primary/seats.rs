//! Connections that an instance needs to be ready: one per task that keeps one, and one in each pool.
//!
//! The connections are opened in advance, the committer's first, and wait here for their tasks. An instance that cannot
//! open all of them serves no calls. If PostgreSQL refuses one, the instance closes the unused ones: another instance
//! may need them.
//!
//! Callers: the start of the server, and one task that restores missing connections.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use async_recursion::async_recursion as boxed;
use sqlx::{Connection as _, PgConnection, Postgres, pool::PoolConnection};
use tokio::{
    task::JoinSet,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    super::{
        StoreError,
        session::{self, ALIVE_TIMEOUT},
    },
    Lender, NoPrimaryReason, Primary, PrimaryHost, full,
};

/// Number of tasks that keep a connection, besides the committer and the listener. The tasks are the checks of
/// admission, the look-up of tickets, two tasks for reports and two for the wait queues.
pub(super) const OTHERS_MAX: u32 = 6;

/// Interval between checks for missing connections.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum number of consecutive timeouts before a connection counts as missing: the network may be slow for a while.
const TIMEOUTS_MAX: u32 = 3;

/// Interval between warnings about a missing connection.
const WARN_INTERVAL: Duration = Duration::from_secs(10);

/// Kind of task that a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seat {
    /// The committer.
    Committer,
    /// Another task that keeps a connection.
    Other,
    /// The task that listens for notifications.
    Listener,
}

impl Seat {
    const COUNT: usize = 3;
}

/// Count of the connections in use by tasks, and the connections opened in advance.
#[derive(Debug, Default)]
pub(super) struct Seats {
    taken: Arc<[AtomicU32; Seat::COUNT]>,
    reserved: Mutex<Vec<(Seat, PgConnection, u64)>>,
}

/// Counts a connection as in use by a task until dropped.
#[derive(Debug)]
pub struct TakenSeat {
    taken: Arc<[AtomicU32; Seat::COUNT]>,
    seat: Seat,
}

impl Drop for TakenSeat {
    fn drop(&mut self) {
        if let Some(taken) = self.taken.get(self.seat as usize) {
            taken.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Seats {
    /// Returns the number of connections for `seat`, in use or opened in advance, of `generation`.
    fn count(&self, seat: Seat, generation: u64) -> u32 {
        let taken = self.taken.get(seat as usize).map_or(0, |taken| taken.load(Ordering::Relaxed));
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        reserved.retain(|(_, _, of)| *of == generation);
        let waiting = reserved.iter().filter(|(of, ..)| *of == seat).count();
        taken.saturating_add(u32::try_from(waiting).unwrap_or(u32::MAX))
    }

    fn pop(&self, seat: Seat, generation: u64) -> Option<PgConnection> {
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        reserved.retain(|(_, _, of)| *of == generation);
        let at = reserved.iter().position(|(of, ..)| *of == seat)?;
        Some(reserved.swap_remove(at).1)
    }

    fn push(&self, seat: Seat, connection: PgConnection, generation: u64) {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner).push((seat, connection, generation));
    }

    fn clear(&self) {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Evidence that the database has too few connections.
enum Shortage {
    /// PostgreSQL refused a connection, with this error text.
    Refused(String),
    /// PostgreSQL responds on existing connections, and no further connection opens in time.
    Timeout,
}

impl Shortage {
    fn of(error: &StoreError) -> Option<Self> {
        match error {
            StoreError::Database(sqlx::Error::PoolTimedOut) => Some(Self::Timeout),
            StoreError::Database(refused) if error.is_crowded() => {
                Some(Self::Refused(crate::error::database_text(refused)))
            }
            _ => None,
        }
    }

    fn why(&self) -> NoPrimaryReason {
        match self {
            Self::Refused(why) => full(why),
            Self::Timeout => full("no further connection is available in time, as with a full pooler"),
        }
    }
}

impl Primary {
    /// Returns a connection opened in advance that still responds, and its generation.
    ///
    /// The committer and the listener open their own connections, because they run on another runtime. The reserved
    /// connection of such a seat is closed, and the result is `None`.
    pub(in super::super) async fn reserved(&self, seat: Seat) -> Option<(PgConnection, u64)> {
        let generation = self.generation();
        let mut connection = self.shared.seats.pop(seat, generation)?;
        if seat == Seat::Other {
            session::check(&mut connection).await.ok()?;
            return Some((connection, generation));
        }
        // The close must reach the server before another connection is opened.
        let _ = timeout(ALIVE_TIMEOUT, connection.close()).await;
        None
    }

    /// Counts a connection as in use by a task.
    pub(in super::super) fn take(&self, seat: Seat) -> TakenSeat {
        let taken = self.shared.seats.taken.clone();
        if let Some(taken) = taken.get(seat as usize) {
            taken.fetch_add(1, Ordering::Relaxed);
        }
        TakenSeat { taken, seat }
    }

    /// Borrows a connection of a pool. Returns it with the generation of its host.
    pub(in super::super) async fn lend(&self, lender: Lender) -> Result<(PoolConnection<Postgres>, u64), StoreError> {
        let found = self.found().await?;
        let pool = match lender {
            Lender::Pool => &found.pool,
            Lender::Operators => &found.operators,
            Lender::Lanes => &found.lanes,
        };
        Ok((pool.acquire().await?, found.generation))
    }

    /// Opens the missing connections of an instance, the committer's first.
    ///
    /// # Errors
    /// [`StoreError::NoPrimary`], with [`NoPrimaryReason::Full`] if the database has too few; database errors.
    #[boxed]
    pub async fn equip(&self) -> Result<(), StoreError> {
        let found = self.usable().await?;
        let opened = self.open_all(&found).await;
        opened.map_err(|error| match Shortage::of(&error) {
            Some(shortage) => StoreError::NoPrimary { why: shortage.why(), hosts: found.place.clone() },
            None => error,
        })
    }

    /// Opens the missing connections. Returns the error of the database unchanged.
    async fn open_all(&self, found: &Arc<PrimaryHost>) -> Result<(), StoreError> {
        let opened = self.open_missing(found).await;
        if let Err(error) = &opened
            && matches!(Shortage::of(error), Some(Shortage::Refused(_)))
        {
            self.shared.seats.clear();
        }
        opened
    }

    /// Opens the committer's connection, then the others concurrently: each takes long on a busy machine.
    /// Connections opened before an error stay for the next check.
    async fn open_missing(&self, found: &Arc<PrimaryHost>) -> Result<(), StoreError> {
        let all = [(Seat::Committer, 1), (Seat::Other, OTHERS_MAX), (Seat::Listener, 1)];
        if self.shared.seats.count(Seat::Committer, found.generation) == 0 {
            self.open_seat(Seat::Committer, found).await?;
        }
        let mut opening = JoinSet::new();
        for (seat, wanted) in all {
            for _ in self.shared.seats.count(seat, found.generation)..wanted {
                let (primary, found) = (self.clone(), found.clone());
                opening.spawn(async move { primary.open_seat(seat, &found).await });
            }
        }
        for pool in found.pools().into_iter().filter(|pool| pool.size() == 0) {
            let (primary, found, pool) = (self.clone(), found.clone(), pool.clone());
            opening.spawn(async move {
                // A pool does not report why it gets no connection.
                drop(primary.connect_to(&found, &[]).await?);
                drop(pool.acquire().await?);
                Ok(())
            });
        }
        while let Some(opened) = opening.join_next().await {
            opened.unwrap_or_else(|_| Err(self.missing()))?;
        }
        // A task may have opened its own connection meanwhile.
        for (seat, wanted) in all {
            while self.shared.seats.count(seat, found.generation) > wanted
                && self.shared.seats.pop(seat, found.generation).is_some()
            {}
        }
        Ok(())
    }

    async fn open_seat(&self, seat: Seat, found: &PrimaryHost) -> Result<(), StoreError> {
        let (connection, generation) = self.connect_to(found, &[]).await?;
        if generation != self.generation() {
            return Err(self.missing());
        }
        self.shared.seats.push(seat, connection, generation);
        Ok(())
    }

    /// Checks every second for missing connections, until `stopping`. Calls fail with the reason while one is missing.
    #[boxed]
    pub async fn stay_equipped(self, stopping: CancellationToken) {
        let (mut warned, mut timeouts) = (None::<Instant>, 0);
        while stopping.run_until_cancelled(tokio::time::sleep(LOOK_INTERVAL)).await.is_some() {
            let Ok(found) = self.usable().await else { continue };
            let short = match self.open_all(&found).await.as_ref().map_err(Shortage::of) {
                Ok(()) => None,
                Err(Some(Shortage::Timeout)) if timeouts < TIMEOUTS_MAX => {
                    timeouts += 1;
                    continue;
                }
                Err(Some(shortage)) => Some(shortage.why()),
                // The host itself failed; the probe tasks report that.
                Err(None) => continue,
            };
            timeouts = if short.is_none() { 0 } else { timeouts };
            let is_over = short.is_none() && warned.take().is_some();
            if is_over {
                tracing::info!("the database has enough connections again");
            }
            if let Some(why) = &short
                && warned.is_none_or(|warned| warned.elapsed() >= WARN_INTERVAL)
            {
                tracing::warn!("not ready: {why}");
                warned = Some(Instant::now());
            }
            self.shared.set_short(short);
        }
    }
}

impl super::PrimaryInner {
    fn set_short(&self, short: Option<NoPrimaryReason>) {
        self.known.send_if_modified(|known| {
            let is_news = known.short != short;
            known.short = short;
            is_news
        });
    }
}
