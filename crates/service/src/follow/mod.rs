//! `FollowActions`: streams the history to followers, each line once, from a given position.
//!
//! One reader per instance reads the new lines while there is a follower, and a cache of pages serves all followers. A follower
//! that is further back reads pages from the table, one follower at a time, and adds them to the cache. A follower that takes
//! no message for `SLOW_MAX` is ended, and can continue from its position.
//! Never: delays a writer or another follower for a slow one; skips a line that commits late (invariant 10 of ARCHITECTURE.md).
//! Caller: the RPC service `rm_edge::usage`.
//!
//! - `position`: position of a follower; `page_cache`: the cache of pages; `reader`: the reader of new lines.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_recursion::async_recursion as boxed;
use sqlx::PgConnection;
use tokio::{
    sync::{Notify, Semaphore, mpsc, watch},
    time::{Instant, sleep, timeout},
};

use crate::{error::Error, lock::lock};
use rm_model::{action::ActionRecord, audit::Subject, name::Name, principal::Principal};
use rm_store::{
    Store, StoreError, history_horizon, history_tail,
    session::{durable, within_timeout},
};
use rm_telemetry::metrics::Metrics;

use super::{fair_semaphore::FairSemaphore, history::HistoryReader, tasks::InstanceTasks};

mod page_cache;
mod position;
mod reader;

use page_cache::{HistoryPage, HistoryPageCache, PAGE_LINES};
use position::Position;

/// Maximum number of followers of an instance.
const FOLLOWERS_MAX: usize = 256;

/// Interval of messages with the position alone, while there are no new lines.
const IDLE: Duration = Duration::from_secs(5);

/// Time that a follower may leave a message untaken before the stream ends.
const SLOW_MAX: Duration = Duration::from_secs(60);

/// Pause between attempts to find the start position or to read a page, and the maximum number of attempts for the start
/// position.
const PAUSE: Duration = Duration::from_millis(200);
const BEGIN_TRIES_MAX: u32 = 10;

/// Filter of the lines that a follower may read.
#[derive(Debug, Clone)]
pub struct FollowFilter {
    /// Only lines about tickets of these users; `None` for all users.
    pub users: Option<BTreeSet<Name>>,
    /// Whether lines about tokens and providers are included.
    pub objects: bool,
}

impl FollowFilter {
    fn allows(&self, line: &ActionRecord) -> bool {
        let is_theirs = |users: &BTreeSet<Name>| line.ticket.as_ref().is_some_and(|(_, user)| users.contains(user));
        (self.objects || !matches!(line.subject, Subject::Other(_))) && self.users.as_ref().is_none_or(is_theirs)
    }
}

/// Message to a follower.
#[derive(Debug)]
pub struct FollowEvent {
    /// Page with the new lines, and the number after which they begin; `None` if there are no new lines.
    page: Option<(Arc<HistoryPage>, i64)>,
    view: Arc<FollowFilter>,
    /// Position from which to continue after this message.
    pub position: String,
}

impl FollowEvent {
    /// Returns the lines that the filter allows, in order.
    pub fn lines(&self) -> impl Iterator<Item = &ActionRecord> {
        let behind = self.page.iter().flat_map(|(page, number)| page.behind(*number));
        behind.filter(|line| self.view.allows(line))
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct ReaderProgress {
    /// Number up to which all lines were read; `None` while there is no follower.
    read_to: Option<i64>,
    /// Number of times that the history was found to be reset to an earlier state.
    put_back: u64,
}

/// Followers of the history on this instance. Clones share them.
#[derive(Clone, Debug)]
pub struct FollowService {
    store: Store,
    history: HistoryReader,
    metrics: Metrics,
    tasks: InstanceTasks,
    places: Arc<FairSemaphore>,
    recent: Arc<HistoryPageCache>,
    /// Beginning of the history; `None` until it is read.
    origin: Arc<Mutex<Option<Position>>>,
    progress: watch::Sender<ReaderProgress>,
    /// Notifies the reader of a new follower.
    wanted: Arc<Notify>,
    /// Permit to read a page from the table.
    reading: Arc<Semaphore>,
}

impl FollowService {
    /// Creates the service. [`FollowService::read_on`] must run for followers to get lines.
    pub fn new(store: Store, metrics: Metrics, tasks: &InstanceTasks) -> Self {
        Self {
            store,
            history: HistoryReader::default(),
            metrics,
            tasks: tasks.clone(),
            places: FairSemaphore::of(FOLLOWERS_MAX),
            recent: Arc::default(),
            origin: Arc::default(),
            progress: watch::Sender::default(),
            wanted: Arc::default(),
            reading: Arc::new(Semaphore::new(1)),
        }
    }

    /// Starts a stream of the lines after `position`, or of future lines if `position` is empty. The stream ends when its
    /// receiver is dropped.
    ///
    /// # Errors
    /// - [`Error::Overloaded`] if there are too many followers, or too many of `by`.
    /// - [`Error::PositionTooOld`] if lines after the position have been deleted.
    /// - [`Error::PositionUnknown`] if the position is not of this history.
    /// - [`Error::InvalidField`] if the position is malformed.
    #[boxed]
    pub async fn follow(
        &self,
        position: &str,
        by: &Principal,
        view: FollowFilter,
    ) -> Result<mpsc::Receiver<Result<FollowEvent, Error>>, Error> {
        let asked = Some(position).filter(|text| !text.is_empty()).map(Position::parse).transpose()?;
        let place = self.places.acquire(by).ok_or(Error::Overloaded)?;
        let held = (place, self.metrics.follow.follower());
        let from = self.start_position(asked).await?;
        let (outlet, told) = FollowerSender::new(SLOW_MAX)?;
        let (this, view) = (self.clone(), Arc::new(view));
        self.wanted.notify_one();
        self.tasks.spawn(async move {
            let _held = held;
            let closed = outlet.tell.clone();
            tokio::select! {
                () = closed.closed() => {}
                ended = this.send_events(from, &view, &outlet) => outlet.end(ended),
            }
        });
        Ok(told)
    }

    /// Returns the start position.
    async fn start_position(&self, asked: Option<Position>) -> Result<Position, Error> {
        if let Some(near) = self.near(asked) {
            return Ok(near);
        }
        let mut connection = self.store.operators().acquire().await?;
        let horizon = within_timeout(history_horizon::read(&mut *connection)).await?;
        *lock(&self.origin) = Some(Position::new(horizon, 0));
        if let Some(asked) = asked {
            asked.check(horizon, within_timeout(history_tail::last_number(&mut *connection)).await?)?;
            return Ok(asked);
        }
        for _ in 0..BEGIN_TRIES_MAX {
            if let Some(number) = self.settled(&mut connection).await? {
                return Ok(Position::new(horizon, number));
            }
            // A long transaction keeps the last complete number unknown.
            sleep(PAUSE).await;
        }
        Err(Error::Overloaded)
    }

    /// Returns the number up to which the history is complete, also after a failover; `None` if an open transaction hides it.
    ///
    /// Waits until the numbers are as durable as a commit: a new primary would assign numbers again that it has not received.
    async fn settled(&self, connection: &mut PgConnection) -> Result<Option<i64>, StoreError> {
        let settled = self.history.settled_number(&mut *connection).await?;
        if settled.is_some() {
            within_timeout(durable(connection)).await?;
        }
        Ok(settled)
    }

    /// Returns the start position without a database read, if the cache or the reader's progress shows it.
    fn near(&self, asked: Option<Position>) -> Option<Position> {
        let (read_to, origin) = (self.progress.borrow().read_to?, (*lock(&self.origin))?);
        match asked {
            None => Some(origin.at(read_to)),
            Some(asked) => {
                let is_here = asked.number == read_to || self.recent.next(asked.number).is_some();
                Some(asked).filter(|asked| is_here && asked.at(0) == origin)
            }
        }
    }

    async fn send_events(
        &self,
        from: Position,
        view: &Arc<FollowFilter>,
        outlet: &FollowerSender,
    ) -> Result<(), Error> {
        let mut progress = self.progress.subscribe();
        let put_back = progress.borrow().put_back;
        let told = |page, number| FollowEvent { page, view: view.clone(), position: from.at(number).to_string() };
        let mut number = from.number;
        outlet.send(told(None, number)).await?;
        let mut last_told = Instant::now();
        loop {
            let seen = *progress.borrow_and_update();
            if seen.put_back != put_back {
                return Err(Error::PositionUnknown);
            }
            if let Some(page) = self.next(number, seen).await? {
                let (behind, last) = (number, page.last);
                number = last;
                if page.behind(behind).any(|line| view.allows(line)) {
                    outlet.send(told(Some((page, behind)), last)).await?;
                    last_told = Instant::now();
                }
            } else {
                // The sender lives as long as the service.
                let _ = tokio::time::timeout_at(last_told + IDLE, progress.changed()).await;
            }
            if last_told.elapsed() >= IDLE {
                outlet.send(told(None, number)).await?;
                last_told = Instant::now();
            }
        }
    }

    /// Returns the page with the lines after `number`, or `None` if there are none yet.
    async fn next(&self, number: i64, progress: ReaderProgress) -> Result<Option<Arc<HistoryPage>>, Error> {
        let Some(read_to) = progress.read_to.filter(|read_to| number < *read_to) else { return Ok(None) };
        if let Some(page) = self.recent.next(number) {
            return Ok(Some(page));
        }
        let _turn = self.reading.acquire().await.map_err(|_| Error::ShuttingDown)?;
        // The previous permit holder may have cached the page.
        if let Some(page) = self.recent.next(number) {
            return Ok(Some(page));
        }
        loop {
            match self.read_table(number, read_to).await {
                Err(Error::Overloaded) => sleep(PAUSE).await,
                read => return read,
            }
        }
    }

    /// Reads a page from the table into the cache. Lines that the reader has not read yet are left out.
    async fn read_table(&self, number: i64, read_to: i64) -> Result<Option<Arc<HistoryPage>>, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let limit = i64::try_from(PAGE_LINES).unwrap_or(i64::MAX);
        let mut lines = self.history.read(&mut connection, None, number, limit).await?;
        lines.retain(|line| line.number <= read_to);
        // Reads the horizon afterwards, so that lines deleted before the read are detected.
        let horizon = within_timeout(history_horizon::read(&mut *connection)).await?;
        Position::new(horizon, number).check(horizon, i64::MAX)?;
        self.metrics.follow.read_late.inc_by(u64::try_from(lines.len()).unwrap_or_default());
        self.recent.keep(HistoryPage::of(number, lines));
        Ok(self.recent.next(number))
    }
}

/// Sender of a follower's messages, one at a time.
struct FollowerSender {
    tell: mpsc::Sender<Result<FollowEvent, Error>>,
    /// Reserved slot for the final error, available even if the follower takes nothing.
    last_word: mpsc::OwnedPermit<Result<FollowEvent, Error>>,
    slow_max: Duration,
}

impl FollowerSender {
    fn new(slow_max: Duration) -> Result<(Self, mpsc::Receiver<Result<FollowEvent, Error>>), Error> {
        let (tell, told) = mpsc::channel(2);
        let last_word = tell.clone().try_reserve_owned().map_err(|_| Error::defect("a full channel"))?;
        Ok((Self { tell, last_word, slow_max }, told))
    }

    /// Sends a message as soon as the previous one is taken.
    ///
    /// # Errors
    /// [`Error::FollowerTooSlow`] if the previous message is not taken in time.
    async fn send(&self, told: FollowEvent) -> Result<(), Error> {
        match timeout(self.slow_max, self.tell.reserve()).await {
            Ok(Ok(place)) => place.send(Ok(told)),
            // The follower is gone; the stream's task ends by itself.
            Ok(Err(_)) => {}
            Err(_) => return Err(Error::FollowerTooSlow),
        }
        Ok(())
    }

    fn end(self, ended: Result<(), Error>) {
        if let Err(error) = ended {
            self.last_word.send(Err(error));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing(position: &str) -> FollowEvent {
        let view = Arc::new(FollowFilter { users: None, objects: true });
        FollowEvent { page: None, view, position: position.into() }
    }

    #[tokio::test]
    async fn follower_without_reads_is_ended_with_reason() {
        let (outlet, mut told) = FollowerSender::new(Duration::from_millis(10)).unwrap();
        outlet.send(nothing("first")).await.unwrap();
        let ended = outlet.send(nothing("second")).await;
        assert!(matches!(ended, Err(Error::FollowerTooSlow)), "{ended:?}");
        outlet.end(ended);
        assert_eq!(told.recv().await.unwrap().unwrap().position, "first");
        assert!(matches!(told.recv().await, Some(Err(Error::FollowerTooSlow))), "the unread messages stay");
        assert!(told.recv().await.is_none());
    }

    #[tokio::test]
    async fn follower_with_late_read_gets_reason() {
        let (outlet, mut told) = FollowerSender::new(Duration::from_secs(60)).unwrap();
        outlet.send(nothing("first")).await.unwrap();
        let second = tokio::spawn(async move { outlet.send(nothing("second")).await.map(|()| outlet) });
        assert_eq!(told.recv().await.unwrap().unwrap().position, "first");
        let outlet = second.await.unwrap().unwrap();
        assert_eq!(told.recv().await.unwrap().unwrap().position, "second");
        drop(told);
        assert!(outlet.send(nothing("third")).await.is_ok(), "a follower that left causes no error");
    }
}
