//! The look before the lock: a request that cannot be granted is refused from what a plain read shows, without taking locks, and
//! many requests share one read.
//!
//! What was last seen of an EM decides only the way a request takes: if it fitted then, it goes straight to the committer, which
//! decides; if not, or if nothing was seen yet, a fresh look comes first. No answer is ever given from what was seen before.
//!
//! - `cache`: what this instance has last seen; `survey`: what EMs are chosen by, brought up to date;
//! - `look`: the fresh look, for many requests at a time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use crate::{
    domain::{
        em::EmInstance,
        judgement::{Room, Short},
        operation::{Rejection, Request, RequestSpec},
    },
    error::Error,
    service::{shared_try::SharedTry, tasks::Tasks},
    store::{
        Store, em_resource,
        session::{answered, answered_within},
    },
    telemetry::traces,
};

mod cache;
mod look;
mod survey;

pub use cache::StateCache;
use look::{Look, State};
pub use survey::Surveys;
use survey::survey;

/// How many looks may wait.
const QUEUE_MAX: usize = 16_384;

/// How old a survey may be by which it is told that nothing fits.
const SURVEY_AGE: Duration = Duration::from_secs(1);

/// What a look shows.
#[derive(Debug)]
pub enum Verdict {
    /// It can be granted, if nobody is faster.
    Fits,
    /// It cannot be granted now.
    Refused(Box<Short>),
}

/// The way to have requests looked at.
#[derive(Clone, Debug)]
pub struct Admission {
    queue: mpsc::Sender<Look>,
    seen: StateCache,
    store: Store,
    silent_after: Duration,
    surveyed: SharedTry,
    surveys: Surveys,
    /// Whether the limits are being changed, and no look gets past that.
    fenced: Arc<AtomicBool>,
}

impl Admission {
    /// Surveys the EMs that have changed, so that what they are chosen by is no older than a second, as far as it is not newer by what came through this
    /// instance. All who ask at once share one survey, or its failure.
    ///
    /// # Errors
    /// Those of the database; [`Error::Unavailable`] if it has not answered until `deadline`.
    pub async fn survey(&self, deadline: Instant) -> Result<(), Error> {
        self.surveyed.done(SURVEY_AGE, deadline, || self.surveying()).await
    }

    /// The same, but nobody waits for a survey as long as there was one lately: the next goes on meanwhile.
    pub async fn survey_beside(&self, deadline: Instant) -> Result<(), Error> {
        self.surveyed.begin(SURVEY_AGE, || self.surveying());
        self.surveyed.done(SURVEY_AGE * 2, deadline, || self.surveying()).await
    }

    fn surveying(&self) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        survey(self.store.clone(), self.seen.clone(), self.silent_after, self.surveys.clone())
    }

    /// Where the look for silent EMs records what it finds.
    pub fn surveys(&self) -> Surveys {
        self.surveys.clone()
    }

    /// Sees some EMs anew.
    pub async fn see(&self, ems: &[EmInstance]) -> Result<(), Error> {
        let found = answered(em_resource::read(&self.store.pool().await?, ems)).await?;
        self.seen.take_over(found);
        Ok(())
    }

    /// The best EM on which the request fitted when it was last seen, but for those in `except` and those that somebody holds; what it
    /// takes there is counted as taken, until the EM is seen anew or [`Admission::settle`]d.
    pub fn choose(&self, ask: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance> {
        self.seen.choose(|view, policies| view.choose(ask, policies, except))
    }

    /// The same, without counting anything as taken.
    pub fn best(&self, ask: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance> {
        self.seen.choose(|view, policies| view.best(ask, policies, except))
    }

    /// The same among those that somebody is known to hold.
    pub fn best_held(&self, ask: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance> {
        self.seen.choose(|view, policies| view.best_held(ask, policies, except))
    }

    /// Whether somebody is known to hold an EM.
    pub fn is_held(&self, em: &EmInstance) -> bool {
        self.seen.choose(|view, _| view.is_held(em))
    }

    /// The EM has not granted what it was chosen for.
    pub fn settle(&self, em: &EmInstance) {
        self.seen.choose(|view, _| view.settle(em));
    }

    /// The EM that tells best why the request fits nowhere, and where it may stand in line: one that somebody holds only where no other is
    /// such.
    pub fn closest(&self, ask: &RequestSpec) -> Option<EmInstance> {
        self.seen.choose(|view, policies| view.closest(ask, policies))
    }

    /// Why no EM can be chosen for the request.
    pub fn none_for(&self, ask: &RequestSpec) -> Rejection {
        match self.seen.choose(|view, policies| view.matching(ask, policies)) {
            0 => Rejection::NoEmMatches(ask.selector.to_string()),
            matching => Rejection::NoEmAvailable { matching },
        }
    }

    /// Starts the task that looks; it ends when all clones of what is answered are gone. EMs that report are silent after `silent_after`.
    pub fn start(store: &Store, seen: StateCache, silent_after: Duration, tasks: &Tasks) -> Self {
        let (queue, inbox) = mpsc::channel(QUEUE_MAX);
        let fenced = Arc::new(AtomicBool::new(false));
        tasks.spawn(look::run(inbox, seen.clone(), store.session(), fenced.clone()));
        let (surveyed, surveys) = (SharedTry::new(tasks), Surveys::default());
        Self { queue, seen, store: store.clone(), silent_after, surveyed, surveys, fenced }
    }

    /// Whether a fresh look is due before the request goes to the committer.
    pub fn is_doubtful(&self, request: &Request) -> bool {
        !self.seen.fitted(request)
    }

    /// How a request that stands in line was to be judged when what it needs was last seen; `None` if that was not seen.
    pub fn last_seen(&self, request: &Request) -> Option<Verdict> {
        self.seen.verdict(request)
    }

    /// What a fresh look shows. A request whose request id was used before fits, as long as its ticket lives: its answer was given then.
    ///
    /// # Errors
    /// Why the ledger would reject it, and those of the database. At `deadline`, [`Error::LockTimeout`] if the limits are being
    /// changed, and [`Error::Unavailable`] if the database has not answered.
    pub fn look<'a>(
        &'a self,
        request: Request,
        deadline: Instant,
    ) -> impl Future<Output = Result<Verdict, Error>> + Send + use<'a> {
        self.ask(request, None, deadline)
    }

    /// The same, and how much there was room for then, wherever the request is judged.
    ///
    /// # Errors
    /// As of [`Admission::look`].
    pub async fn look_closely(&self, request: Request, deadline: Instant) -> Result<(Verdict, Room), Error> {
        let (room, mut told) = oneshot::channel();
        let verdict = self.ask(request, Some(room), deadline).await?;
        Ok((verdict, told.try_recv().unwrap_or_default()))
    }

    /// It is in the queue when this returns, and not in the future, of which there are as many as calls under way.
    fn ask<'a>(
        &'a self,
        request: Request,
        room: Option<oneshot::Sender<Room>>,
        deadline: Instant,
    ) -> impl Future<Output = Result<Verdict, Error>> + Send + use<'a> {
        let traced = traces::step("look");
        let (reply, answer) = oneshot::channel();
        let queued = self.queue.try_send(Look { request, room, reply }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Error::Overloaded,
            mpsc::error::TrySendError::Closed(_) => Error::ShuttingDown,
        });
        async move {
            let _traced = traced;
            queued?;
            let answer = async { answer.await.unwrap_or(Err(Error::ShuttingDown)) };
            match answered_within(deadline.saturating_duration_since(Instant::now()), answer).await {
                Err(Error::Unavailable(_)) if self.fenced.load(Ordering::Relaxed) => Err(Error::LockTimeout),
                answer => answer,
            }
        }
    }
}
