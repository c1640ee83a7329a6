//! The committer: the one way to change anything.
//!
//! Calls put their operations into a queue. A task takes everything that waits there, carries it out in one transaction, and
//! answers each caller after the commit; what arrives meanwhile is the next batch. There is no timer: alone, an operation is a
//! batch of one, and under load hundreds share the cost of a commit. The transaction runs in the committer's task, so a call
//! that is cancelled cannot leave one half done.
//!
//! - `batch`: one transaction: lock, read, decide, write, unlock, commit;
//! - `evidence`: whether a batch was committed whose connection broke;
//! - `worker`: carries a batch out whatever happens to the transaction;
//! - `lanes`: where operations on keys that others hold wait, so that they stall nobody else.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

use tokio::{
    sync::{mpsc, oneshot},
    time::{Duration, Instant},
};
use uuid::Uuid;

use crate::{
    domain::operation::{Operation, Outcome},
    error::Error,
    metrics::{Held, Metrics},
    store::{Store, user_resource::Due},
};

use super::{judge::Seen, tasks::Tasks};

mod batch;
mod evidence;
mod lanes;
mod worker;

/// A committer that has had nothing to do for so long waits outside a transaction.
const REST_AFTER: Duration = Duration::from_secs(1);

/// How many operations may wait; more are turned away, because they would only wait longer than their callers do.
const QUEUE_MAX: usize = 16_384;

/// How many operations share a transaction. Larger batches are hardly cheaper per operation, and make everyone wait longer.
const BATCH_MAX: usize = 512;

/// The way into the committer's queue.
#[derive(Clone, Debug)]
pub struct Committer {
    queue: mpsc::Sender<Pending>,
    metrics: Metrics,
}

/// What other parts of the service are told after a commit.
#[derive(Debug)]
pub struct AfterCommit {
    /// How full the EMs were left.
    pub seen: Seen,
    /// Grants that expire before the next sweep would find them.
    pub expiring_soon: mpsc::UnboundedSender<Due>,
    /// Requests that stand in line although their callers are gone.
    pub abandoned: mpsc::UnboundedSender<Uuid>,
}

impl Committer {
    /// Starts the committer's task; it ends when all clones of the committer are gone and everything is answered.
    ///
    /// It has a thread of its own: on one that it shared with the calls, each of its statements would wait until the calls that
    /// the last batch has woken have had their turn.
    ///
    /// # Errors
    /// If there is no thread for it.
    pub fn start(store: Store, after_commit: AfterCommit, metrics: Metrics, tasks: &Tasks) -> io::Result<Self> {
        let (queue, inbox) = mpsc::channel(QUEUE_MAX);
        let answers = worker::Answers::start(after_commit, queue.downgrade(), metrics.clone(), tasks);
        let lanes = lanes::Lanes::new(store.clone(), answers, metrics.clone(), tasks.clone());
        let worker = worker::Worker::new(&store, lanes.answers(), metrics.clone());
        tasks.spawn_apart("committer", run(inbox, Arc::new(lanes), worker))?;
        Ok(Self { queue, metrics })
    }

    /// Has an operation carried out, and answers after its commit.
    ///
    /// A future that is dropped takes its operation out of the queue, if its transaction has not begun.
    ///
    /// # Errors
    /// [`Error::LockTimeout`] at `deadline`, if the operation was not yet carried out.
    pub async fn submit(&self, operation: Operation, deadline: Instant) -> Result<Outcome, Error> {
        let done = self.carry_out(operation, deadline).await;
        done.inspect_err(|error| self.metrics.committer.failed(error))
    }

    async fn carry_out(&self, operation: Operation, deadline: Instant) -> Result<Outcome, Error> {
        let (reply, mut answer) = oneshot::channel();
        let progress = Progress::default();
        let waits = Some(self.metrics.committer.queued());
        let pending = Pending { operation, deadline, progress: progress.clone(), reply, waits };
        self.queue.try_send(pending).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Error::Overloaded,
            mpsc::error::TrySendError::Closed(_) => Error::ShuttingDown,
        })?;
        let answered = match tokio::time::timeout_at(deadline, &mut answer).await {
            Ok(answered) => answered,
            Err(_) if progress.abandon() => return Err(Error::LockTimeout),
            // Its transaction runs: only its end says what to answer.
            Err(_) => answer.await,
        };
        answered.unwrap_or(Err(Error::ShuttingDown))
    }
}

async fn run(mut inbox: mpsc::Receiver<Pending>, lanes: Arc<lanes::Lanes>, mut worker: worker::Worker) {
    let mut arrived = Vec::with_capacity(BATCH_MAX);
    loop {
        if tokio::time::timeout(REST_AFTER, inbox.recv_many(&mut arrived, BATCH_MAX)).await.is_err() {
            worker.session().rest().await;
            inbox.recv_many(&mut arrived, BATCH_MAX).await;
        }
        if arrived.is_empty() {
            return;
        }
        arrived.iter_mut().for_each(|pending| pending.waits = None);
        let batch = lanes.divert(arrived.drain(..));
        for (key, operations) in worker.commit(batch).await {
            lanes.set_aside(key, operations);
        }
    }
}

/// An operation that waits to be carried out, and who waits for its answer.
#[derive(Debug)]
struct Pending {
    operation: Operation,
    deadline: Instant,
    progress: Progress,
    reply: oneshot::Sender<Result<Outcome, Error>>,
    /// Where it counts as waiting.
    waits: Option<Held>,
}

/// Whether an operation is still only waiting: decided between its caller and the committer, once.
#[derive(Clone, Debug, Default)]
struct Progress(Arc<AtomicU8>);

const WAITING: u8 = 0;
const RUNNING: u8 = 1;
const ABANDONED: u8 = 2;

impl Progress {
    fn change(&self, from: u8, to: u8) -> bool {
        self.0.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The caller gives up; false if it is too late for that.
    fn abandon(&self) -> bool {
        self.change(WAITING, ABANDONED)
    }
}

impl Pending {
    /// The committer begins; false if nobody wants it any more.
    fn begin(&self) -> bool {
        !self.reply.is_closed() && self.progress.change(WAITING, RUNNING)
    }

    /// Back to waiting: the transaction did not take place.
    fn set_aside(&self) {
        self.progress.change(RUNNING, WAITING);
    }

    /// Whether somebody still waits for it.
    fn is_wanted(&self) -> bool {
        !self.reply.is_closed() && self.progress.0.load(Ordering::Acquire) != ABANDONED
    }

    /// Answers the caller; false if it is gone.
    fn answer(self, answer: Result<Outcome, Error>) -> bool {
        self.reply.send(answer).is_ok()
    }
}
