//! The look before the lock: a request that cannot be granted is refused from what a plain read shows, without taking locks, and
//! many requests share one read.
//!
//! What was last seen of an EM decides only the way a request takes: if it fitted then, it goes straight to the committer, which
//! decides; if not, or if nothing was seen yet, a fresh look comes first. No answer is ever given from what was seen before.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
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
use uuid::Uuid;

use crate::{
    domain::{
        em::{Em, EmInstance},
        judgement::{self, Room, Short, judge},
        ledger::{LineView, PostCommitState},
        limit::Limits,
        line::{Extent, viewed_spots},
        name::Name,
        operation::{Rejection, Request, RequestRecord, RequestSpec},
        scope::{Counter, Usage},
        ticket::EndedTicket,
    },
    error::Error,
    service::{shared_try::SharedTry, tasks::Tasks},
    store::{
        Store, StoreError, action_record, em_report, em_resource, label_resource,
        limit::InForce,
        request_id,
        session::{Session, answered, answered_within},
        waiting,
    },
};

mod cache;

pub use cache::StateCache;

/// How many looks may wait.
const QUEUE_MAX: usize = 16_384;

/// How many looks share one read.
const BATCH_MAX: usize = 1024;

/// How many EMs one statement surveys.
const SURVEY_PAGE: i64 = 1000;

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
    /// Whether the limits are being changed, and no look gets past that.
    fenced: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Look {
    request: Request,
    /// Whoever wants to know how much there is room for is told before the verdict.
    room: Option<oneshot::Sender<Room>>,
    reply: oneshot::Sender<Result<Verdict, Error>>,
}

impl Admission {
    /// Surveys all EMs, so that what they are chosen by is no older than a second, as far as it is not newer by what came through this
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
        survey(self.store.clone(), self.seen.clone(), self.silent_after)
    }

    /// Sees some EMs anew.
    pub async fn see(&self, ems: &[EmInstance]) -> Result<(), Error> {
        let found = answered(em_resource::read(self.store.pool(), ems)).await?;
        self.seen.take_over(found);
        Ok(())
    }

    /// The best EM on which the request fitted when it was last seen, but for those in `except`; what it takes there is counted as
    /// taken, until the EM is seen anew or [`Admission::settle`]d.
    pub fn choose(&self, ask: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance> {
        self.seen.choose(|view, policies| view.choose(ask, policies, except))
    }

    /// The same, without counting anything as taken.
    pub fn best(&self, ask: &RequestSpec, except: &[EmInstance]) -> Option<EmInstance> {
        self.seen.choose(|view, policies| view.best(ask, policies, except))
    }

    /// The EM has not granted what it was chosen for.
    pub fn settle(&self, em: &EmInstance) {
        self.seen.choose(|view, _| view.settle(em));
    }

    /// The EM that tells best why the request fits nowhere.
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

    /// Starts the task that looks; it ends when all clones of the judge are gone. EMs that report are silent after `silent_after`.
    pub fn start(store: &Store, seen: StateCache, silent_after: Duration, tasks: &Tasks) -> Self {
        let (queue, inbox) = mpsc::channel(QUEUE_MAX);
        let fenced = Arc::new(AtomicBool::new(false));
        tasks.spawn(run(inbox, seen.clone(), store.session(), fenced.clone()));
        Self { queue, seen, store: store.clone(), silent_after, surveyed: SharedTry::new(tasks), fenced }
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
    pub async fn look(&self, request: Request, deadline: Instant) -> Result<Verdict, Error> {
        self.ask(request, None, deadline).await
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

    async fn ask(
        &self,
        request: Request,
        room: Option<oneshot::Sender<Room>>,
        deadline: Instant,
    ) -> Result<Verdict, Error> {
        let (reply, answer) = oneshot::channel();
        self.queue.try_send(Look { request, room, reply }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Error::Overloaded,
            mpsc::error::TrySendError::Closed(_) => Error::ShuttingDown,
        })?;
        let answer = async { answer.await.unwrap_or(Err(Error::ShuttingDown)) };
        match answered_within(deadline.saturating_duration_since(Instant::now()), answer).await {
            Err(Error::Unavailable(_)) if self.fenced.load(Ordering::Relaxed) => Err(Error::LockTimeout),
            answer => answer,
        }
    }
}

/// Looks which EMs there are, how well they are, and which have changed; and reads those.
async fn survey(store: Store, seen: StateCache, silent_after: Duration) -> Result<(), Error> {
    let number = seen.choose(|view, _| view.begin_survey());
    let mut after = None;
    loop {
        let page = answered(em_report::survey(store.pool(), after.as_ref(), SURVEY_PAGE, silent_after)).await?;
        let is_last = i64::try_from(page.len()).is_ok_and(|len| len < SURVEY_PAGE);
        after = page.last().map(|last| last.instance.clone());
        let changed = seen.choose(|view, _| view.surveyed(number, page.clone()));
        if !changed.is_empty() {
            seen.take_over(answered(em_resource::read(store.pool(), &changed)).await?);
            // Again, because those that were not known had nothing that a status could have been told of.
            let of_changed = page.into_iter().filter(|found| changed.contains(&found.instance)).collect();
            seen.choose(|view, _| view.surveyed(number, of_changed));
        }
        if is_last {
            break;
        }
    }
    seen.end_survey(number);
    Ok(())
}

async fn run(mut inbox: mpsc::Receiver<Look>, seen: StateCache, mut session: Session, fenced: Arc<AtomicBool>) {
    let mut looks = Vec::with_capacity(BATCH_MAX);
    let mut limits = Arc::default();
    while inbox.recv_many(&mut looks, BATCH_MAX).await > 0 {
        looks.retain(|look| !look.reply.is_closed());
        if looks.is_empty() {
            continue;
        }
        let (reused, commits) = (session.is_open(), seen.commits());
        let mut state = answered(read(&mut session, &looks, &limits)).await;
        while state.as_ref().is_err_and(StoreError::is_lock_timeout) && looks.iter().any(|look| !look.reply.is_closed())
        {
            // The limits are being changed: soon there will be others to look by.
            fenced.store(true, Ordering::Relaxed);
            state = answered(read(&mut session, &looks, &limits)).await;
        }
        fenced.store(false, Ordering::Relaxed);
        if reused && state.is_err() {
            // A connection that broke while it was idle costs no more than a new one.
            session.reset();
            state = answered(read(&mut session, &looks, &limits)).await;
        }
        match state {
            Ok(state) => {
                limits = state.limits.clone();
                let answer = |look: Look| {
                    if !state.ems.contains_key(&look.request.em) {
                        seen.forget(&look.request.em);
                    }
                    if let Some(room) = look.room {
                        // A caller that is gone needs no answer.
                        let _ = room.send(state.room(&look.request));
                    }
                    (state.verdict(&look.request).map_err(Error::from), look.reply)
                };
                let answers: Vec<_> = looks.drain(..).map(answer).collect();
                // Before anybody is told: what follows may depend on it.
                seen.update_by_look(state.into_post_commit_state(), commits);
                for (answer, reply) in answers {
                    // A caller that is gone needs no answer.
                    let _ = reply.send(answer);
                }
            }
            Err(error) => {
                session.reset();
                let error = Error::from(error);
                for look in looks.drain(..) {
                    let _ = look.reply.send(Err(error.clone()));
                }
            }
        }
    }
}

/// What requests are judged by.
#[derive(Debug, Default)]
struct State {
    ems: HashMap<EmInstance, Em>,
    /// Only by a view of all EMs.
    limits: Arc<Limits>,
    scopes: HashMap<Counter, Usage>,
    request_ids: HashMap<Name, RequestRecord>,
    /// What was granted under those request ids and is over.
    ended: HashMap<Uuid, EndedTicket>,
    line: LineView,
}

impl State {
    /// Whether the request fits, by what is known of what it needs.
    fn fits(&self, request: &Request) -> bool {
        let asked = request.ask.request_id.as_ref();
        if asked.is_some_and(|asked| self.request_ids.contains_key(&asked.id)) {
            return true;
        }
        self.ems.get(&request.em).filter(|em| judgement::admit(em, &self.limits, &request.ask).is_ok()).is_some_and(
            |em| {
                let scopes = request.scopes(&self.limits);
                judgement::fits(em, &scopes, |scope| self.scopes.get(scope), &self.line.line, &request.ask)
            },
        )
    }

    fn verdict(&self, request: &Request) -> Result<Verdict, Rejection> {
        if let Some(asked) = &request.ask.request_id
            && let Some(record) = self.request_ids.get(&asked.id)
        {
            let (request_id, ended) = (asked.id.to_string(), self.ended.get(&record.grant.ticket_id));
            return match ended.cloned().map(Box::new) {
                _ if record.request_id != *asked => Err(Rejection::RequestIdReused(request_id)),
                Some(ended) => Err(Rejection::TicketEnded { request_id, ended }),
                None => Ok(Verdict::Fits),
            };
        }
        let em = self.ems.get(&request.em).ok_or_else(|| Rejection::EmNotRegistered(request.em.clone()))?;
        let position = request.wait.as_ref().and_then(|wait| wait.position);
        if position.is_some_and(|position| self.line.line.spots_of(position).is_empty()) {
            return Err(Rejection::PlaceLost);
        }
        judgement::admit(em, &self.limits, &request.ask)?;
        let scopes = request.scopes(&self.limits);
        let usage = |counter: &Counter| self.scopes.get(counter);
        Ok(match judge(em, &scopes, usage, &self.line.line, position, &request.ask)? {
            Ok(_) => Verdict::Fits,
            Err(mut short) => {
                if let Some(position) = position {
                    short.spots = self.line.line.stand(position, &short.spots);
                }
                Verdict::Refused(short)
            }
        })
    }

    /// How much there is room for, and where the request goes beyond what is only watched; nothing where the verdict tells why.
    fn room(&self, request: &Request) -> Room {
        let Some(em) = self.ems.get(&request.em) else { return Room::default() };
        let (scopes, asked) = (request.scopes(&self.limits), &request.ask.resource);
        let usage = |counter: &Counter| self.scopes.get(counter);
        Room {
            head_room: judgement::head_room(em, &scopes, usage, &self.line.line).unwrap_or_default(),
            over_watched: judgement::beyond_watched(&scopes, usage, &asked.zero_like(), asked),
        }
    }

    fn into_post_commit_state(self) -> PostCommitState {
        let (ems, scopes) = (self.ems.into_values().collect(), self.scopes.into_iter().collect());
        PostCommitState { ems, gone: vec![], scopes, limits: self.limits, line: self.line }
    }
}

async fn read(session: &mut Session, looks: &[Look], known: &Arc<Limits>) -> Result<State, StoreError> {
    let connection = session.get().await?;
    let instances: HashSet<&EmInstance> = looks.iter().map(|look| &look.request.em).collect();
    let (InForce { limits, anybody_waits, .. }, mut ems) =
        em_resource::read_in_force(&mut *connection, known, instances).await?;
    ems.retain(|_, em| em.is_registered());
    let ids: HashSet<&Name> = looks.iter().filter_map(|look| Some(&look.request.ask.request_id.as_ref()?.id)).collect();
    let request_ids = match ids.is_empty() {
        true => HashMap::new(),
        false => request_id::read(&mut *connection, &ids).await?,
    };
    let ended = match request_ids.is_empty() {
        true => HashMap::new(),
        false => {
            let granted: Vec<Uuid> = request_ids.values().map(|record| record.grant.ticket_id).collect();
            action_record::read(&mut *connection, &granted).await?
        }
    };
    let scopes: BTreeSet<Counter> = looks.iter().flat_map(|look| look.request.counters(&limits)).collect();
    let scopes = match scopes.is_empty() {
        true => HashMap::new(),
        false => label_resource::read(&mut *connection, &scopes).await?,
    };
    let line = match anybody_waits {
        true => {
            let spots = viewed_spots(looks.iter().map(|look| &look.request).flat_map(|request| {
                let extent = Extent::of(request.wait.as_ref().and_then(|wait| wait.position));
                judgement::spots(request, &limits).map(move |spot| (spot, extent))
            }));
            let positions = looks.iter().filter_map(|look| look.request.wait.as_ref()?.position);
            let in_line: Vec<Uuid> = positions.map(|position| position.ticket_id()).collect();
            LineView { line: waiting::line(&mut *connection, &spots, &in_line).await?, spots: Some(spots) }
        }
        false => LineView::default(),
    };
    Ok(State { ems, limits, scopes, request_ids, ended, line })
}
