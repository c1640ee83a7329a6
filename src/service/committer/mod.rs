//! The committer: the one way to change anything.
//!
//! Calls put their operations into a queue. A task takes everything that waits there, carries it out in one transaction, and
//! answers each caller after the commit; what arrives meanwhile is the next batch. There is no timer: alone, an operation is a
//! batch of one, and under load hundreds share the cost of a commit. The transaction runs in the committer's task, so a call
//! that is cancelled cannot leave one half done.
//!
//! There may be several such tasks, each with a thread, a connection and EMs of its own: their batches share only limited scopes, users that
//! rules count, and external clusters. Each of these is locked in the one order, as it is against other instances.
//!
//! - `dealt`: which of them an operation goes to;
//! - `queue`: who is next;
//! - `batch`: one transaction: lock, read, decide, write, unlock, commit;
//! - `counters`: what stands after it, for those who want that told;
//! - `evidence`: whether a batch was committed whose connection broke;
//! - `worker`: carries a batch out whatever happens to the transaction;
//! - `lanes`: where operations on keys that others hold wait, so that they stall nobody else.

use std::{
    io, iter,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

use tokio::{
    runtime::Handle,
    sync::{mpsc, oneshot},
    time::{Duration, Instant},
};
use uuid::Uuid;

use crate::{
    domain::{
        counters::Counters,
        name::Name,
        operation::{Operation, Outcome},
        principal::{Actor, Principal},
    },
    error::Error,
    metrics::{Held, Metrics},
    store::{Store, user_resource::Due},
    telemetry::{decisions::Told, traces},
};

use super::{admission::StateCache, tasks::Tasks, waiting::WaitingLine};

mod batch;
mod counters;
mod dealt;
mod evidence;
mod lanes;
mod queue;
mod worker;

use batch::Wanted;
use dealt::Dealt;
use queue::{BATCH_COST_MAX, Called, Doors, Place, Queues, Room};

/// A committer that has had nothing to do for so long waits outside a transaction.
const REST_AFTER: Duration = Duration::from_secs(1);

/// How long after its deadline an operation is waited for whose transaction runs then: longer than most take that got so far.
const END_TIMEOUT: Duration = Duration::from_millis(500);

/// How long an operation for which there is no other EM waits for whoever holds one, before it is looked whether there is another by now.
const HOLDER_PATIENCE: Duration = Duration::from_secs(1);

/// How long an operation without a caller may take.
const DETACHED_TIMEOUT: Duration = Duration::from_secs(10);

/// The way into the committer's queues.
#[derive(Clone, Debug)]
pub struct Committer {
    doors: Dealt<Doors>,
    room: Room,
    line: WaitingLine,
    undoing: Undoing,
    metrics: Metrics,
}

/// For how long an operation waits.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// Until when.
    pub until: Instant,
    /// From when on it may be tried on another EM, if it may: then it does not wait any longer for whoever holds this one, but is taken out,
    /// and its caller told [`Error::LockTimeout`] before his time.
    goes_at: Option<Instant>,
}

impl From<Instant> for Patience {
    fn from(until: Instant) -> Self {
        Self { until, goes_at: None }
    }
}

impl Patience {
    /// Of one that may be tried on another EM.
    pub fn elsewhere(until: Instant) -> Self {
        Self { until, goes_at: Some(Instant::now()) }
    }

    /// Of one for which there was no other EM, and may be by and by.
    pub fn for_a_moment(until: Instant) -> Self {
        Self { until, goes_at: Some(Instant::now() + HOLDER_PATIENCE) }
    }

    /// Whether it waits no longer for whoever holds the EM.
    fn may_go(self) -> bool {
        self.goes_at.is_some_and(|goes_at| goes_at <= Instant::now())
    }

    /// Whether an answer says that somebody holds the EM: then the operation is not carried out, and there is time for another EM.
    pub fn turned_away<T>(self, answer: &Result<T, Error>) -> bool {
        self.goes_at.is_some() && matches!(answer, Err(Error::LockTimeout)) && Instant::now() < self.until
    }
}

/// What other parts of the service are told after a commit.
#[derive(Debug)]
pub struct AfterCommit {
    /// How full the EMs were left.
    pub seen: StateCache,
    /// Grants that expire before the next sweep would find them.
    pub expiring_soon: mpsc::Sender<Due>,
    /// Requests that stand in line although their callers are gone.
    pub abandoned: mpsc::UnboundedSender<Uuid>,
    /// Those who wait in line here.
    pub line: WaitingLine,
}

impl Committer {
    /// Starts so many tasks, and at least one; they end when all clones of the committer are gone and everything is answered.
    ///
    /// Each has a thread of its own: on one that it shared with the calls, each of its statements would wait until the calls that
    /// the last batch has woken have had their turn.
    ///
    /// # Errors
    /// If there is no thread for one.
    pub fn start(
        store: Store,
        committers: u16,
        after_commit: AfterCommit,
        metrics: Metrics,
        tasks: &Tasks,
    ) -> io::Result<Self> {
        let called = Called::default();
        let (first, queues) = Queues::new(called.clone());
        let (others, of_others): (Vec<_>, Vec<_>) = (1..committers).map(|_| Queues::new(called.clone())).unzip();
        let doors = Dealt::new(first, others);
        let queues_of_callers = Arc::new(doors.map(|doors| doors.callers.downgrade()));
        let undoing = Undoing { queues: queues_of_callers, metrics: metrics.clone() };
        let (line, seen) = (after_commit.line.clone(), after_commit.seen.clone());
        let answers = worker::Answers::start(after_commit, undoing.clone(), committers > 1, tasks);
        let told = (answers, seen, line.clone());
        let lanes = Arc::new(lanes::Lanes::new(store.clone(), told, metrics.clone(), tasks.clone()));
        for queues in iter::once(queues).chain(of_others) {
            let worker =
                worker::Worker::new(store.committer_session(), lanes.answers(), metrics.clone(), Arc::default());
            tasks.spawn_apart("committer", run(queues, lanes.clone(), worker))?;
        }
        Ok(Self { doors, room: Room::default(), line, undoing, metrics })
    }

    /// Has an operation carried out that a caller waits for, and answers after its commit.
    ///
    /// It is in its queue when this returns, and not in the future: there are as many of these as there are calls under way, and each
    /// that is within another takes the room of both. A future that is dropped takes its operation out of the queue, if its
    /// transaction has not begun.
    ///
    /// # Errors
    /// [`Error::LockTimeout`] at the end of its patience, if a key of the operation is contended then; [`Error::NotBegun`] if it was not
    /// carried out for another reason, and [`Error::CommitUnknown`] soon after it, if its transaction has no end; [`Error::Overloaded`] if too many wait. [`Patience::turned_away`] tells a `LockTimeout` before that.
    pub fn submit<'a>(
        &'a self,
        by: Actor,
        operation: Operation,
        patience: Patience,
    ) -> impl Future<Output = Result<Outcome, Error>> + Send + use<'a> {
        let queue = self.doors.of(operation.em()).called(&operation);
        self.carry_out(queue, by, operation, patience, None)
    }

    /// The same; if they are `wanted`, also tells the counters right after the commit, unless the operation was counted nowhere.
    ///
    /// # Errors
    /// As of [`Committer::submit`].
    pub fn submit_counted<'a>(
        &'a self,
        by: Actor,
        operation: Operation,
        patience: Patience,
        wanted: bool,
    ) -> impl Future<Output = Result<(Outcome, Option<Box<Counters>>), Error>> + Send + use<'a> {
        let queue = self.doors.of(operation.em()).called(&operation);
        let (tell, told) = wanted.then(oneshot::channel).unzip();
        let done = self.carry_out(queue, by, operation, patience, tell);
        async move {
            let outcome = done.await?;
            // They are told before the outcome is.
            Ok((outcome, told.and_then(|mut told| told.try_recv().ok())))
        }
    }

    /// Has an operation carried out that nobody waits for: whoever waits for others goes first.
    ///
    /// # Errors
    /// As of [`Committer::submit`].
    pub fn submit_in_background<'a>(
        &'a self,
        operation: Operation,
        deadline: Instant,
    ) -> impl Future<Output = Result<Outcome, Error>> + Send + use<'a> {
        let queue = self.doors.of(operation.em()).uncalled(&operation);
        self.carry_out(queue, Principal::Service.into(), operation, deadline.into(), None)
    }

    fn carry_out<'a>(
        &'a self,
        queue: &mpsc::Sender<Pending>,
        by: Actor,
        operation: Operation,
        patience: Patience,
        counters: Option<TellCounters>,
    ) -> impl Future<Output = Result<Outcome, Error>> + Send + use<'a> {
        let told = Told::of(&by.principal, &operation);
        let mut queued = self.put(queue, by, operation, patience, counters);
        async move {
            // Where it is: what is moved here is kept twice.
            let done = match &mut queued {
                Ok(answer) => answer.wait(patience.until).await,
                Err(error) => Err(error.clone()),
            };
            told.tell(&done);
            if let Err(error) = &done
                && !patience.turned_away(&done)
            {
                self.metrics.committer.failed(error);
            }
            done
        }
    }

    /// Puts an operation into a queue.
    fn put(
        &self,
        queue: &mpsc::Sender<Pending>,
        by: Actor,
        operation: Operation,
        patience: Patience,
        counters: Option<TellCounters>,
    ) -> Result<Answer, Error> {
        // More than fits into a batch would stay in its queue for ever, and with it all that is behind it.
        if operation.cost() > BATCH_COST_MAX {
            return Err(Error::defect("an operation costs more than a batch"));
        }
        let (reply, answer) = oneshot::channel();
        let (progress, place) = (Progress::default(), self.room.take(&operation).ok_or(Error::Overloaded)?);
        let undo = holder(&operation).map(|user| (by.principal.clone(), user));
        let answer = Answer { answer, progress: progress.clone(), undo, undoing: self.undoing.clone() };
        let waits = Some(self.metrics.committer.queued());
        let making_room = self.line.making_room(&operation);
        let trace = traces::operation(operation.kind());
        let pending = Pending { by, operation, patience, progress, reply, counters, waits, trace, _room: Some(place) };
        queue.try_send(pending).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Error::Overloaded,
            mpsc::error::TrySendError::Closed(_) => Error::ShuttingDown,
        })?;
        if let Some(spot) = making_room {
            self.line.room_comes(spot);
        }
        Ok(answer)
    }
}

/// Where the counters after a commit are told.
type TellCounters = oneshot::Sender<Box<Counters>>;

/// Whom a grant is taken back from if nobody hears of it; `None` if it can be asked for again by its request id.
fn holder(operation: &Operation) -> Option<Name> {
    match operation {
        Operation::Request(request) if request.ask.request_id.is_none() => Some(request.ask.user.clone()),
        _ => None,
    }
}

/// An answer that somebody waits for. If it is dropped with a grant in it that nobody has looked at, the grant is taken back: whoever
/// told it saw somebody waiting.
struct Answer {
    answer: oneshot::Receiver<Result<Outcome, Error>>,
    progress: Progress,
    /// Who asked for a grant that would be taken back, and for whom.
    undo: Option<(Principal, Name)>,
    undoing: Undoing,
}

impl Answer {
    /// Waits for it: until `deadline`, if the operation is only waiting then; and hardly longer if its transaction runs.
    async fn wait(&mut self, deadline: Instant) -> Result<Outcome, Error> {
        let answered = match tokio::time::timeout_at(deadline, &mut self.answer).await {
            Ok(answered) => answered,
            Err(_) => match self.progress.abandon() {
                Some(error) => return Err(error),
                // Its transaction runs: its end says best what to answer, but may be long in coming where the database is.
                None => match tokio::time::timeout_at(deadline + END_TIMEOUT, &mut self.answer).await {
                    Ok(answered) => answered,
                    Err(_) => return Err(Error::CommitUnknown),
                },
            },
        };
        answered.unwrap_or(Err(Error::ShuttingDown))
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        let Some((by, user)) = self.undo.take() else { return };
        // From here on, who tells it sees that nobody waits.
        self.answer.close();
        if let Ok(Ok(Outcome::Granted(grant))) = self.answer.try_recv() {
            self.undoing.submit(by, Operation::Released(grant.released(user)));
        }
    }
}

/// Queues operations that undo what nobody has heard of.
#[derive(Clone, Debug)]
struct Undoing {
    queues: Arc<Dealt<mpsc::WeakSender<Pending>>>,
    metrics: Metrics,
}

impl Undoing {
    fn submit(&self, by: Principal, operation: Operation) {
        let (by, queue) = (by.into(), self.queues.of(operation.em()).upgrade());
        let (reply, answer) = oneshot::channel();
        let patience = (Instant::now() + DETACHED_TIMEOUT).into();
        let waits = Some(self.metrics.committer.queued());
        let (progress, trace) = (Progress::default(), traces::Operation::default());
        let pending = Pending { by, operation, patience, progress, reply, counters: None, waits, trace, _room: None };
        let queued = queue.is_some_and(|queue| queue.try_send(pending).is_ok());
        match Handle::try_current() {
            // Somebody has to want the answer, or the operation is not carried out.
            Ok(runtime) if queued => drop(runtime.spawn(async move {
                if let Ok(Err(error)) = answer.await
                    && error.is_defect()
                {
                    tracing::error!(
                        error = &error as &dyn std::error::Error,
                        "a grant whose caller is gone stays until it expires"
                    );
                }
            })),
            _ => tracing::warn!("a grant whose caller is gone could not be undone; it will expire"),
        }
    }
}

async fn run(mut queues: Queues, lanes: Arc<lanes::Lanes>, mut worker: worker::Worker) {
    loop {
        let is_open = match tokio::time::timeout(REST_AFTER, queues.wait()).await {
            Ok(is_open) => is_open,
            Err(_) => {
                worker.session().rest().await;
                queues.wait().await
            }
        };
        if !is_open {
            lanes.close();
            worker.session().rest().await;
            return;
        }
        let mut batch = queues.next();
        batch.iter_mut().for_each(|pending| pending.waits = None);
        let batch = lanes.divert(batch.into_iter());
        for (key, operations) in worker.commit(batch).await {
            lanes.set_aside(key, operations, &worker.limits());
        }
    }
}

/// An operation that waits to be carried out, and who waits for its answer.
#[derive(Debug)]
struct Pending {
    by: Actor,
    operation: Operation,
    patience: Patience,
    progress: Progress,
    reply: oneshot::Sender<Result<Outcome, Error>>,
    /// Whoever wants the counters, too: told before the answer.
    counters: Option<TellCounters>,
    /// Where it counts as waiting.
    waits: Option<Held>,
    /// Ends with it.
    trace: traces::Operation,
    /// Held until it is answered; what undoes something has room in any case.
    _room: Option<Place>,
}

/// Whether an operation is still only waiting: decided between its caller and the committer, once.
#[derive(Clone, Debug, Default)]
struct Progress(Arc<AtomicU8>);

const WAITING: u8 = 0;
const RUNNING: u8 = 1;
const ABANDONED: u8 = 2;
/// It waits for a key that another transaction, or a row that an operator wrote, holds.
const CONTENDED: u8 = 3;

impl Progress {
    fn change(&self, from: u8, to: u8) -> bool {
        self.0.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The caller gives up: why the operation was not carried out until then; `None` if it is too late for that.
    fn abandon(&self) -> Option<Error> {
        // Twice, because the key may become free in between.
        let reasons = [(WAITING, Error::NotBegun), (CONTENDED, Error::LockTimeout), (WAITING, Error::NotBegun)];
        reasons.into_iter().find(|(from, _)| self.change(*from, ABANDONED)).map(|(_, error)| error)
    }

    /// Whether its key is contended, as long as the operation only waits.
    fn set_contended(&self, is_contended: bool) {
        let (from, to) = if is_contended { (WAITING, CONTENDED) } else { (CONTENDED, WAITING) };
        self.change(from, to);
    }

    /// Why an operation that only waits was not carried out until its deadline.
    fn timeout(&self) -> Error {
        if self.0.load(Ordering::Acquire) == CONTENDED { Error::LockTimeout } else { Error::NotBegun }
    }
}

impl Pending {
    /// The committer begins; false if nobody wants it any more.
    fn begin(&self) -> bool {
        let begins = || self.progress.change(WAITING, RUNNING) || self.progress.change(CONTENDED, RUNNING);
        !self.reply.is_closed() && begins()
    }

    /// Back to waiting: the transaction did not take place, because a key is contended.
    fn set_aside(&mut self) {
        self.trace.set_aside();
        self.progress.change(RUNNING, CONTENDED);
    }

    /// For the batch.
    fn wanted(&self) -> Wanted<'_> {
        Wanted { by: &self.by, operation: &self.operation, counters: self.counters.is_some() }
    }

    /// Whether somebody still waits for it.
    fn is_wanted(&self) -> bool {
        !self.reply.is_closed() && self.progress.0.load(Ordering::Acquire) != ABANDONED
    }

    /// Answers the caller; false if it is gone.
    fn answer(self, answer: Result<Outcome, Error>) -> bool {
        let Self { reply, trace, .. } = self;
        if answer.is_err() {
            trace.failed();
        }
        // Before whoever hears of it goes on.
        drop(trace);
        reply.send(answer).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        domain::{em::EmInstance, operation::Grant},
        transport::edge::{Bounds, Edge},
    };

    type Reply = oneshot::Sender<Result<Outcome, Error>>;

    fn answer() -> (Reply, Answer, mpsc::Sender<Pending>, mpsc::Receiver<Pending>) {
        let ((reply, answer), (queue, inbox)) = (oneshot::channel(), mpsc::channel(1));
        let metrics = Metrics::new([], Edge::new(Bounds::DEFAULT, None).gauges());
        let undo = Name::parse("user", "hadoop").ok().map(|user| (Principal::Anonymous, user));
        let undoing = Undoing { queues: Arc::new(Dealt::new(queue.downgrade(), [])), metrics };
        (reply, Answer { answer, progress: Progress::default(), undo, undoing }, queue, inbox)
    }

    fn granted() -> Result<Outcome, Error> {
        let em = EmInstance::parse("em", "ecm", "host1").unwrap();
        let (ticket_id, expires_at) = (Uuid::from_u128(7), time::OffsetDateTime::UNIX_EPOCH);
        Ok(Outcome::Granted(Grant { ticket_id, em, expires_at, over_watched: Vec::new(), queue: None, counters: None }))
    }

    #[tokio::test]
    async fn a_grant_that_nobody_looked_at_is_taken_back() {
        let (reply, answer, _queue, mut inbox) = answer();
        reply.send(granted()).unwrap();
        drop(answer);
        let pending = inbox.try_recv().unwrap();
        assert!(
            matches!(&pending.operation, Operation::Released(released) if released.ticket_id == Uuid::from_u128(7)),
            "{pending:?}"
        );
        assert!(pending.is_wanted());
    }

    #[tokio::test]
    async fn operation_timeout_names_lock_only_when_contended() {
        for (is_contended, expected) in [(None, "NotBegun"), (Some(true), "LockTimeout"), (Some(false), "NotBegun")] {
            let (_reply, mut waits, ..) = answer();
            // Another transaction held the key, and does not any more.
            is_contended.into_iter().for_each(|is_contended| {
                waits.progress.set_contended(true);
                waits.progress.set_contended(is_contended);
            });
            let error = waits.wait(Instant::now()).await.unwrap_err();
            assert_eq!(format!("{error:?}"), expected, "{is_contended:?}");
        }
    }

    #[tokio::test]
    async fn a_grant_that_somebody_has_seen_stays() {
        let (reply, mut seen, _queue, mut inbox) = answer();
        reply.send(granted()).unwrap();
        (&mut seen.answer).await.unwrap().unwrap();
        drop(seen);
        assert!(inbox.try_recv().is_err());
        // And where nobody waits any more, whoever tells it is told so.
        let (reply, gone, _queue, mut inbox) = answer();
        drop(gone);
        assert!(reply.send(granted()).is_err() && inbox.try_recv().is_err());
    }
}
