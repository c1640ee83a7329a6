//! The history as it goes on, for those who follow it: every line once, from whatever position.
//!
//! One reader of an instance reads what is new, as long as anybody follows; what it read lately is kept for all of them. Whoever is further
//! back reads from the table himself, one at a time, and leaves what he read to the others who come that way. Nobody waits for a
//! follower: one that takes nothing for long is ended, and goes on from its position.
//!
//! - `position`: how a place in the history is written, and whether it is still good;
//! - `recent`: what was read lately;
//! - `reader`: who reads what is new.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sqlx::PgConnection;
use tokio::{
    sync::{Notify, Semaphore, mpsc, watch},
    time::{Instant, sleep, timeout},
};

use crate::{
    domain::{action::ActionRecord, audit::Subject, name::Name, principal::Principal},
    error::Error,
    metrics::Metrics,
    store::{
        Store, StoreError, history_end, history_horizon,
        session::{answered, durable},
    },
};

use super::{fair_share::FairShare, history::History, tasks::Tasks};

mod position;
mod reader;
mod recent;

use position::Position;
use recent::{PAGE_LINES, Page, Recent};

/// How many may follow an instance.
const FOLLOWERS_MAX: usize = 256;

/// How often a follower hears how far the history is, where there is nothing to tell him.
const IDLE: Duration = Duration::from_secs(5);

/// How long a follower may leave a message untaken.
const SLOW_MAX: Duration = Duration::from_secs(60);

/// How often it is tried again to find a place in the history to begin at, or to read.
const PAUSE: Duration = Duration::from_millis(200);
const BEGIN_TRIES_MAX: u32 = 10;

/// What a follower is to see.
#[derive(Debug, Clone)]
pub struct View {
    /// Only what was done to tickets of these users.
    pub users: Option<BTreeSet<Name>>,
    /// Also what was done to tokens and providers.
    pub objects: bool,
}

impl View {
    fn sees(&self, line: &ActionRecord) -> bool {
        let is_theirs = |users: &BTreeSet<Name>| line.ticket.as_ref().is_some_and(|(_, user)| users.contains(user));
        (self.objects || !matches!(line.subject, Subject::Other(_))) && self.users.as_ref().is_none_or(is_theirs)
    }
}

/// What a follower is told.
#[derive(Debug)]
pub struct Told {
    /// Lines, behind this number, and some that he is not to see; `None` if there is nothing.
    page: Option<(Arc<Page>, i64)>,
    view: Arc<View>,
    /// From where to go on.
    pub position: String,
}

impl Told {
    /// The lines, in order.
    pub fn lines(&self) -> impl Iterator<Item = &ActionRecord> {
        let behind = self.page.iter().flat_map(|(page, number)| page.behind(*number));
        behind.filter(|line| self.view.sees(line))
    }
}

/// How far the reader is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Progress {
    /// Up to which number everything was read that it is the turn of; `None` while nobody reads.
    read_to: Option<i64>,
    /// How often the history was found to be another than before: put back to an earlier state.
    put_back: u64,
}

/// Who follows the history on this instance; clones share it.
#[derive(Clone, Debug)]
pub struct FollowService {
    store: Store,
    history: History,
    metrics: Metrics,
    tasks: Tasks,
    places: Arc<FairShare>,
    recent: Arc<Recent>,
    /// The beginning of the history, once it is known which that is.
    origin: Arc<Mutex<Option<Position>>>,
    progress: watch::Sender<Progress>,
    /// Somebody has begun to follow.
    wanted: Arc<Notify>,
    /// For those who read from the table.
    reading: Arc<Semaphore>,
}

impl FollowService {
    /// Whom nobody follows yet; [`FollowService::read_on`] has to run.
    pub fn new(store: Store, metrics: Metrics, tasks: &Tasks) -> Self {
        Self {
            store,
            history: History::default(),
            metrics,
            tasks: tasks.clone(),
            places: FairShare::of(FOLLOWERS_MAX),
            recent: Arc::default(),
            origin: Arc::default(),
            progress: watch::Sender::default(),
            wanted: Arc::default(),
            reading: Arc::new(Semaphore::new(1)),
        }
    }

    /// Tells what is behind a position, or what comes from now on, as long as somebody takes it.
    ///
    /// # Errors
    /// [`Error::Overloaded`] if too many follow, or too many of `by`; [`Error::PositionTooOld`], [`Error::PositionUnknown`];
    /// [`Error::InvalidField`].
    pub async fn follow(
        &self,
        position: &str,
        by: &Principal,
        view: View,
    ) -> Result<mpsc::Receiver<Result<Told, Error>>, Error> {
        let asked = Some(position).filter(|text| !text.is_empty()).map(Position::parse).transpose()?;
        let place = self.places.take(by).ok_or(Error::Overloaded)?;
        let held = (place, self.metrics.follow.follower());
        let from = self.begin(asked).await?;
        let (outlet, told) = Outlet::new(SLOW_MAX)?;
        let (this, view) = (self.clone(), Arc::new(view));
        self.wanted.notify_one();
        self.tasks.spawn(async move {
            let _held = held;
            let closed = outlet.tell.clone();
            tokio::select! {
                () = closed.closed() => {}
                ended = this.tell(from, &view, &outlet) => outlet.end(ended),
            }
        });
        Ok(told)
    }

    /// Where to begin.
    async fn begin(&self, asked: Option<Position>) -> Result<Position, Error> {
        if let Some(near) = self.near(asked) {
            return Ok(near);
        }
        let mut connection = self.store.operators().acquire().await?;
        let horizon = answered(history_horizon::read(&mut *connection)).await?;
        *self.origin() = Some(Position::new(horizon, 0));
        if let Some(asked) = asked {
            asked.check(horizon, answered(history_end::last_number(&mut *connection)).await?)?;
            return Ok(asked);
        }
        for _ in 0..BEGIN_TRIES_MAX {
            if let Some(number) = self.settled(&mut connection).await? {
                return Ok(Position::new(horizon, number));
            }
            // Somebody takes long to commit: from where on nothing is missing cannot be known.
            sleep(PAUSE).await;
        }
        Err(Error::Overloaded)
    }

    /// Up to which number nothing comes any more, also when another host of the database takes the writes: numbers that were given out
    /// for nothing, and that no other host has heard of, would be given out there again.
    async fn settled(&self, connection: &mut PgConnection) -> Result<Option<i64>, StoreError> {
        let settled = self.history.settled_number(&mut *connection).await?;
        if settled.is_some() {
            answered(durable(connection)).await?;
        }
        Ok(settled)
    }

    /// The same without asking the database, for those who begin now or were here a moment ago: by what was read for others.
    fn near(&self, asked: Option<Position>) -> Option<Position> {
        let (read_to, origin) = (self.progress.borrow().read_to?, (*self.origin())?);
        match asked {
            None => Some(origin.at(read_to)),
            Some(asked) => {
                let is_here = asked.number == read_to || self.recent.next(asked.number).is_some();
                Some(asked).filter(|asked| is_here && asked.at(0) == origin)
            }
        }
    }

    /// A lock that is poisoned guards nothing that a panic could have left half done.
    fn origin(&self) -> MutexGuard<'_, Option<Position>> {
        self.origin.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn tell(&self, from: Position, view: &Arc<View>, outlet: &Outlet) -> Result<(), Error> {
        let mut progress = self.progress.subscribe();
        let put_back = progress.borrow().put_back;
        let told = |page, number| Told { page, view: view.clone(), position: from.at(number).to_string() };
        let mut number = from.number;
        outlet.tell(told(None, number)).await?;
        let mut last_told = Instant::now();
        loop {
            let seen = *progress.borrow_and_update();
            if seen.put_back != put_back {
                return Err(Error::PositionUnknown);
            }
            if let Some(page) = self.next(number, seen).await? {
                let (behind, last) = (number, page.last);
                number = last;
                if page.behind(behind).any(|line| view.sees(line)) {
                    outlet.tell(told(Some((page, behind)), last)).await?;
                    last_told = Instant::now();
                }
            } else {
                // Its sender lives as long as the service.
                let _ = tokio::time::timeout_at(last_told + IDLE, progress.changed()).await;
            }
            if last_told.elapsed() >= IDLE {
                outlet.tell(told(None, number)).await?;
                last_told = Instant::now();
            }
        }
    }

    /// What comes next behind a number, if there is anything.
    async fn next(&self, number: i64, progress: Progress) -> Result<Option<Arc<Page>>, Error> {
        let Some(read_to) = progress.read_to.filter(|read_to| number < *read_to) else { return Ok(None) };
        if let Some(page) = self.recent.next(number) {
            return Ok(Some(page));
        }
        let _turn = self.reading.acquire().await.map_err(|_| Error::ShuttingDown)?;
        // Whoever had the turn before may have come by here.
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

    /// The same from the table, for all who come by there; nothing that the reader has not seen.
    async fn read_table(&self, number: i64, read_to: i64) -> Result<Option<Arc<Page>>, Error> {
        let mut connection = self.store.operators().acquire().await?;
        let limit = i64::try_from(PAGE_LINES).unwrap_or(i64::MAX);
        let mut lines = self.history.read(&mut connection, None, number, limit).await?;
        lines.retain(|line| line.number <= read_to);
        // Afterwards: what was forgotten before it was read is forgotten now.
        let horizon = answered(history_horizon::read(&mut *connection)).await?;
        Position::new(horizon, number).check(horizon, i64::MAX)?;
        self.metrics.follow.read_late.inc_by(u64::try_from(lines.len()).unwrap_or_default());
        self.recent.keep(Page::of(number, lines));
        Ok(self.recent.next(number))
    }
}

/// Where a follower is told, one message after another.
struct Outlet {
    tell: mpsc::Sender<Result<Told, Error>>,
    /// There is room for the last word, whatever he takes.
    last_word: mpsc::OwnedPermit<Result<Told, Error>>,
    slow_max: Duration,
}

impl Outlet {
    fn new(slow_max: Duration) -> Result<(Self, mpsc::Receiver<Result<Told, Error>>), Error> {
        let (tell, told) = mpsc::channel(2);
        let last_word = tell.clone().try_reserve_owned().map_err(|_| Error::defect("a channel without room"))?;
        Ok((Self { tell, last_word, slow_max }, told))
    }

    /// Tells something as soon as what was told before is taken.
    ///
    /// # Errors
    /// [`Error::FollowerTooSlow`] if that takes too long.
    async fn tell(&self, told: Told) -> Result<(), Error> {
        match timeout(self.slow_max, self.tell.reserve()).await {
            Ok(Ok(place)) => place.send(Ok(told)),
            // He is gone: whoever waits for that ends this.
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

    fn nothing(position: &str) -> Told {
        let view = Arc::new(View { users: None, objects: true });
        Told { page: None, view, position: position.into() }
    }

    #[tokio::test]
    async fn who_takes_nothing_is_ended_and_told_why() {
        let (outlet, mut told) = Outlet::new(Duration::from_millis(10)).unwrap();
        outlet.tell(nothing("first")).await.unwrap();
        let ended = outlet.tell(nothing("second")).await;
        assert!(matches!(ended, Err(Error::FollowerTooSlow)), "{ended:?}");
        outlet.end(ended);
        assert_eq!(told.recv().await.unwrap().unwrap().position, "first");
        assert!(matches!(told.recv().await, Some(Err(Error::FollowerTooSlow))), "what he had not taken stays");
        assert!(told.recv().await.is_none());
    }

    #[tokio::test]
    async fn who_takes_late_is_told_all_the_same() {
        let (outlet, mut told) = Outlet::new(Duration::from_secs(60)).unwrap();
        outlet.tell(nothing("first")).await.unwrap();
        let second = tokio::spawn(async move { outlet.tell(nothing("second")).await.map(|()| outlet) });
        assert_eq!(told.recv().await.unwrap().unwrap().position, "first");
        let outlet = second.await.unwrap().unwrap();
        assert_eq!(told.recv().await.unwrap().unwrap().position, "second");
        drop(told);
        assert!(outlet.tell(nothing("third")).await.is_ok(), "who is gone is nobody's failure");
    }
}
