//! The look before the lock: a request that cannot be granted is refused from what a plain read shows, without taking locks, and
//! many requests share one read.
//!
//! What was last seen of an EM decides only the way a request takes: if it fitted then, it goes straight to the committer, which
//! decides; if not, or if nothing was seen yet, a fresh look comes first. No answer is ever given from what was seen before.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::{Duration, Instant},
};

use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use crate::{
    domain::{
        em::{Em, EmInstance},
        judgement::{self, Short, judge},
        ledger::{LineView, Standing},
        limit::Limits,
        line::Line,
        name::Name,
        operation::{Ask, Rejection, Request, RequestRecord},
        placement::View,
        report::Statuses,
        scope::{Counter, Usage},
    },
    error::Error,
    metrics::Metrics,
    service::tasks::Tasks,
    store::{
        Store, StoreError, em_report, em_resource, label_resource,
        limit::InForce,
        request_id,
        session::{Session, answered},
        waiting,
    },
};

/// How many looks may wait.
const QUEUE_MAX: usize = 16_384;

/// How many looks share one read.
const BATCH_MAX: usize = 1024;

/// How many EMs one statement reads when all are seen anew.
const SEE_ALL_PAGE: i64 = 1000;

/// How things stood when they were last seen, by this instance.
#[derive(Clone, Debug)]
pub struct Seen {
    state: Arc<Mutex<State>>,
    choice: Arc<Choice>,
    metrics: Metrics,
}

/// What EMs are chosen by. Whoever chooses, and there may be many at a time, keeps no commit waiting: what was committed is put down
/// here, and the next one who chooses takes it over.
#[derive(Debug, Default)]
struct Choice {
    view: RwLock<View>,
    /// EMs as they stand since the view was made, `None` for one that went; nothing as long as nobody has chosen.
    changes: Mutex<Option<HashMap<EmInstance, Option<Em>>>>,
}

impl Choice {
    fn note(&self, ems: &[Em], gone: &[EmInstance]) {
        let mut changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(changes) = &mut *changes {
            changes.extend(gone.iter().map(|em| (em.clone(), None)));
            changes.extend(ems.iter().map(|em| (em.instance.clone(), Some(em.clone()))));
        }
    }

    fn replace(&self, view: View) {
        *self.view.write().unwrap_or_else(PoisonError::into_inner) = view;
        *self.changes.lock().unwrap_or_else(PoisonError::into_inner) = Some(HashMap::new());
    }

    fn look<T>(&self, look: impl FnOnce(&View) -> T) -> T {
        let changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner).as_mut().map(std::mem::take);
        let changes = changes.unwrap_or_default();
        if !changes.is_empty() {
            let mut view = self.view.write().unwrap_or_else(PoisonError::into_inner);
            for (instance, em) in changes {
                match em {
                    Some(em) => view.update(em),
                    None => drop(view.remove(&instance)),
                }
            }
        }
        look(&self.view.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Seen {
    /// Nothing has been seen yet.
    pub fn new(metrics: Metrics) -> Self {
        Self { state: Arc::default(), choice: Arc::default(), metrics }
    }

    /// Remembers how things stand.
    pub fn update(&self, standing: Standing) {
        self.choice.note(&standing.ems, &standing.gone);
        let mut seen = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if standing.limits.version() != seen.limits.version() {
            // Counters of other label sets would only fill the memory.
            seen.scopes.clear();
            seen.limits = standing.limits;
        }
        for gone in &standing.gone {
            seen.ems.remove(gone);
        }
        seen.ems.extend(standing.ems.into_iter().map(|em| (em.instance.clone(), em)));
        seen.scopes.extend(standing.scopes);
        match standing.line.spots {
            Some(spots) => seen.line.line.replace(spots, &standing.line.line),
            None => seen.line.line = Line::default(),
        }
        self.metrics.caches.seen(seen.ems.len(), seen.scopes.len(), seen.line.line.spots());
    }

    /// Whether the request fitted when what it needs was last seen.
    fn fitted(&self, request: &Request) -> bool {
        let seen = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        seen.fits(request)
    }

    /// Makes `ems` all the EMs there are to choose among, and `statuses` what is known of them by their reports.
    fn replace_ems(&self, ems: Vec<Em>, statuses: &Statuses) {
        self.metrics.caches.chosen_from(ems.len());
        self.choice.replace(View::new(ems, statuses));
    }

    /// Remembers how some EMs stand.
    fn take_over(&self, ems: HashMap<EmInstance, Em>) {
        let ems: Vec<Em> = ems.into_values().collect();
        self.choice.note(&ems, &[]);
    }

    fn forget(&self, em: &EmInstance) {
        self.choice.note(&[], std::slice::from_ref(em));
        self.state.lock().unwrap_or_else(PoisonError::into_inner).ems.remove(em);
    }
}

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
pub struct Judge {
    queue: mpsc::Sender<Look>,
    seen: Seen,
    store: Store,
    silent_after: Duration,
    /// When all EMs were last seen.
    seen_all: Arc<tokio::sync::Mutex<Option<Instant>>>,
}

#[derive(Debug)]
struct Look {
    request: Request,
    reply: oneshot::Sender<Result<Verdict, Error>>,
}

impl Judge {
    /// Sees all EMs anew, if that was last done longer than `age` ago. Many who ask at once share one read.
    pub async fn see_all(&self, age: Duration) -> Result<(), Error> {
        let asked = Instant::now();
        let mut seen_all = self.seen_all.lock().await;
        if seen_all.is_some_and(|last| last + age >= asked) {
            return Ok(());
        }
        let (start, mut ems) = (Instant::now(), Vec::new());
        loop {
            let after = ems.last().map(|em: &Em| em.instance.clone());
            let page = answered(em_resource::list(self.store.pool(), after.as_ref(), SEE_ALL_PAGE)).await?;
            let is_last = i64::try_from(page.len()).is_ok_and(|len| len < SEE_ALL_PAGE);
            ems.extend(page);
            if is_last {
                break;
            }
        }
        let statuses = answered(self.statuses()).await?;
        self.seen.replace_ems(ems, &statuses);
        *seen_all = Some(start);
        Ok(())
    }

    /// Sees some EMs anew.
    pub async fn see(&self, ems: &[EmInstance]) -> Result<(), Error> {
        let found = answered(em_resource::read(self.store.pool(), ems)).await?;
        self.seen.take_over(found);
        Ok(())
    }

    /// What is known of all EMs by their reports.
    async fn statuses(&self) -> Result<Statuses, StoreError> {
        let (mut statuses, mut after) = (Statuses::new(), None);
        loop {
            let page =
                answered(em_report::list(self.store.pool(), after.as_ref(), SEE_ALL_PAGE, self.silent_after)).await?;
            let is_last = i64::try_from(page.len()).is_ok_and(|len| len < SEE_ALL_PAGE);
            after = page.last().map(|(em, _)| em.clone());
            statuses.extend(page);
            if is_last {
                return Ok(statuses);
            }
        }
    }

    /// Up to `most` EMs on which the request fitted when they were last seen, the best first.
    pub fn candidates(&self, ask: &Ask, most: usize) -> Vec<EmInstance> {
        self.seen.choice.look(|view| view.candidates(ask, most))
    }

    /// The EM that tells best why the request fits nowhere.
    pub fn closest(&self, ask: &Ask) -> Option<EmInstance> {
        self.seen.choice.look(|view| view.closest(ask))
    }

    /// Why no EM can be chosen for the request.
    pub fn none_for(&self, ask: &Ask) -> Rejection {
        match self.seen.choice.look(|view| view.matching(ask)) {
            0 => Rejection::NoEmMatches(format!("{:?}", ask.labels.as_map())),
            matching => Rejection::NoEmAvailable { matching },
        }
    }

    /// Starts the task that looks; it ends when all clones of the judge are gone. EMs that report are silent after `silent_after`.
    pub fn start(store: &Store, seen: Seen, silent_after: Duration, tasks: &Tasks) -> Self {
        let (queue, inbox) = mpsc::channel(QUEUE_MAX);
        tasks.spawn(run(inbox, seen.clone(), store.session()));
        Self { queue, seen, store: store.clone(), silent_after, seen_all: Arc::default() }
    }

    /// Whether a fresh look is due before the request goes to the committer.
    pub fn is_doubtful(&self, request: &Request) -> bool {
        !self.seen.fitted(request)
    }

    /// What a fresh look shows. A request whose request id was used before fits: its answer was given then.
    pub async fn look(&self, request: Request) -> Result<Verdict, Error> {
        let (reply, answer) = oneshot::channel();
        self.queue.try_send(Look { request, reply }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Error::Overloaded,
            mpsc::error::TrySendError::Closed(_) => Error::ShuttingDown,
        })?;
        answer.await.unwrap_or(Err(Error::ShuttingDown))
    }
}

async fn run(mut inbox: mpsc::Receiver<Look>, seen: Seen, mut session: Session) {
    let mut looks = Vec::with_capacity(BATCH_MAX);
    let mut limits = Arc::default();
    while inbox.recv_many(&mut looks, BATCH_MAX).await > 0 {
        looks.retain(|look| !look.reply.is_closed());
        if looks.is_empty() {
            continue;
        }
        let reused = session.is_open();
        let mut state = answered(read(&mut session, &looks, &limits)).await;
        while state.as_ref().is_err_and(StoreError::is_lock_timeout) && looks.iter().any(|look| !look.reply.is_closed())
        {
            // The limits are being changed: soon there will be others to look by.
            state = answered(read(&mut session, &looks, &limits)).await;
        }
        if reused && state.is_err() {
            // A connection that broke while it was idle costs no more than a new one.
            session.reset();
            state = answered(read(&mut session, &looks, &limits)).await;
        }
        match state {
            Ok(state) => {
                limits = state.limits.clone();
                for look in looks.drain(..) {
                    if !state.ems.contains_key(&look.request.em) {
                        seen.forget(&look.request.em);
                    }
                    // A caller that is gone needs no answer.
                    let _ = look.reply.send(state.verdict(&look.request).map_err(Error::from));
                }
                seen.update(state.into_standing());
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
    line: LineView,
}

impl State {
    /// Whether the request fits, by what is known of what it needs.
    fn fits(&self, request: &Request) -> bool {
        let asked = request.ask.request_id.as_ref();
        if asked.is_some_and(|asked| self.request_ids.contains_key(&asked.id)) {
            return true;
        }
        self.ems.get(&request.em).is_some_and(|em| {
            let scopes = self.limits.scopes(&request.ask.ticket_labels(&request.em));
            judgement::fits(em, &scopes, |scope| self.scopes.get(scope), &self.line.line, &request.ask)
        })
    }

    fn verdict(&self, request: &Request) -> Result<Verdict, Rejection> {
        if let Some(asked) = &request.ask.request_id
            && let Some(record) = self.request_ids.get(&asked.id)
        {
            return match record.request_id == *asked {
                true => Ok(Verdict::Fits),
                false => Err(Rejection::RequestIdReused(asked.id.to_string())),
            };
        }
        let em = self.ems.get(&request.em).ok_or_else(|| Rejection::EmNotRegistered(request.em.clone()))?;
        let place = request.wait.as_ref().and_then(|wait| wait.place);
        if place.is_some_and(|place| self.line.line.spots_of(place).is_empty()) {
            return Err(Rejection::PlaceLost);
        }
        let scopes = self.limits.scopes(&request.ask.ticket_labels(&request.em));
        let usage = |counter: &Counter| self.scopes.get(counter);
        Ok(match judge(em, &scopes, usage, &self.line.line, place, &request.ask)? {
            Ok(_) => Verdict::Fits,
            Err(mut short) => {
                if let Some(place) = place {
                    short.spots = self.line.line.stand(place, &short.spots);
                }
                Verdict::Refused(short)
            }
        })
    }

    fn into_standing(self) -> Standing {
        let (ems, scopes) = (self.ems.into_values().collect(), self.scopes.into_iter().collect());
        Standing { ems, gone: vec![], scopes, limits: self.limits, line: self.line }
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
    let labels = looks.iter().map(|look| look.request.ask.ticket_labels(&look.request.em));
    let scopes: BTreeSet<Counter> = labels.flat_map(|l| limits.scopes(&l)).map(|limited| limited.counter).collect();
    let scopes = match scopes.is_empty() {
        true => HashMap::new(),
        false => label_resource::read(&mut *connection, &scopes).await?,
    };
    let line = match anybody_waits {
        true => {
            let requests = looks.iter().map(|look| &look.request);
            let spots = requests.flat_map(|request| judgement::spots(&request.em, &limits, &request.ask)).collect();
            let places = looks.iter().filter_map(|look| look.request.wait.as_ref()?.place);
            let in_line: Vec<Uuid> = places.map(|place| place.ticket_id).collect();
            LineView { line: waiting::line(&mut *connection, &spots, &in_line).await?, spots: Some(spots) }
        }
        false => LineView::default(),
    };
    Ok(State { ems, limits, scopes, request_ids, line })
}
