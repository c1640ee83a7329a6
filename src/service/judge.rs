//! The look before the lock: a request that cannot be granted is refused from what a plain read shows, without taking locks, and
//! many requests share one read.
//!
//! What was last seen of an EM decides only the way a request takes: if it fitted then, it goes straight to the committer, which
//! decides; if not, or if nothing was seen yet, a fresh look comes first. No answer is ever given from what was seen before.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::{mpsc, oneshot};
use tokio_util::task::TaskTracker;

use crate::{
    domain::{
        em::{Em, EmInstance},
        name::Name,
        operation::{Rejection, Request},
        refusal::Refusal,
    },
    error::Error,
    store::{
        Store, StoreError, em_resource, request_id,
        session::{Session, answered},
    },
};

/// How many looks may wait.
const QUEUE_MAX: usize = 16_384;

/// How many looks share one read.
const BATCH_MAX: usize = 1024;

/// How EMs stood when they were last seen, by this instance.
#[derive(Clone, Debug, Default)]
pub struct Seen(Arc<Mutex<HashMap<EmInstance, Em>>>);

impl Seen {
    /// Remembers how EMs stand.
    pub fn update(&self, ems: impl IntoIterator<Item = Em>) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for em in ems {
            seen.insert(em.instance.clone(), em);
        }
    }

    /// Whether the request fitted when its EM was last seen.
    fn fitted(&self, request: &Request) -> bool {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.get(&request.em).is_some_and(|em| matches!(verdict(em, request), Ok(Verdict::Fits)))
    }

    fn forget(&self, em: &EmInstance) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(em);
    }
}

/// What a look at the EM shows.
#[derive(Debug)]
pub enum Verdict {
    /// It can be granted, if nobody is faster.
    Fits,
    /// It cannot be granted now.
    Refused(Box<Refusal>),
}

fn verdict(em: &Em, request: &Request) -> Result<Verdict, Rejection> {
    let unanswerable = |source| Rejection::Unanswerable { field: "resource", em: request.em.clone(), source };
    let share = em.project(&request.resource).map_err(unanswerable)?;
    match em.judge(&share).map_err(|source| Rejection::Inconsistent { em: request.em.clone(), source })? {
        Ok(()) => Ok(Verdict::Fits),
        Err(refusal) => Ok(Verdict::Refused(Box::new(refusal))),
    }
}

/// The way to have requests looked at.
#[derive(Clone, Debug)]
pub struct Judge {
    queue: mpsc::Sender<Look>,
    seen: Seen,
}

#[derive(Debug)]
struct Look {
    request: Request,
    reply: oneshot::Sender<Result<Verdict, Error>>,
}

impl Judge {
    /// Starts the task that looks; it ends when all clones of the judge are gone.
    pub fn start(store: &Store, seen: Seen, tasks: &TaskTracker) -> Self {
        let (queue, inbox) = mpsc::channel(QUEUE_MAX);
        tasks.spawn(run(inbox, seen.clone(), store.session()));
        Self { queue, seen }
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
    while inbox.recv_many(&mut looks, BATCH_MAX).await > 0 {
        looks.retain(|look| !look.reply.is_closed());
        if looks.is_empty() {
            continue;
        }
        match answered(read(&mut session, &looks)).await {
            Ok(state) => {
                for look in looks.drain(..) {
                    if !state.ems.contains_key(&look.request.em) {
                        seen.forget(&look.request.em);
                    }
                    // A caller that is gone needs no answer.
                    let _ = look.reply.send(state.verdict(&look.request).map_err(Error::from));
                }
                seen.update(state.ems.into_values());
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

struct State {
    ems: HashMap<EmInstance, Em>,
    used_request_ids: HashSet<Name>,
}

impl State {
    fn verdict(&self, request: &Request) -> Result<Verdict, Rejection> {
        if request.request_id.as_ref().is_some_and(|id| self.used_request_ids.contains(&id.id)) {
            return Ok(Verdict::Fits);
        }
        let em = self.ems.get(&request.em).ok_or_else(|| Rejection::EmNotRegistered(request.em.clone()))?;
        verdict(em, request)
    }
}

async fn read(session: &mut Session, looks: &[Look]) -> Result<State, StoreError> {
    let connection = session.get().await?;
    let instances: HashSet<&EmInstance> = looks.iter().map(|look| &look.request.em).collect();
    let ems = em_resource::read(&mut *connection, instances).await?;
    let ids: HashSet<&Name> = looks.iter().filter_map(|look| Some(&look.request.request_id.as_ref()?.id)).collect();
    let used_request_ids = match ids.is_empty() {
        true => HashSet::new(),
        false => request_id::read(&mut *connection, &ids).await?.into_keys().collect(),
    };
    Ok(State { ems, used_request_ids })
}
