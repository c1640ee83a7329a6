//! Carries batches out, whatever happens to their transactions, and answers the callers.

use std::{collections::BTreeMap, sync::Arc};

use tokio::{
    sync::{mpsc, oneshot},
    time::{Duration, Instant},
};

use crate::{
    domain::{
        limit::Limits,
        operation::{Grant, LockKey, Operation, Outcome, Released, Request},
    },
    error::Error,
    service::expiry,
    store::{Store, StoreError, resource_lock, session::Session, user_resource::Due},
};

use super::{
    AfterCommit, Pending, Progress,
    batch::{self, BatchError, Committed},
};

/// How often a batch is tried again that found that somebody else had written the same rows.
const RETRIES_MAX: u32 = 5;

/// How long an operation without a caller may take.
const DETACHED_TIMEOUT: Duration = Duration::from_secs(10);

/// Operations set aside, by a key of theirs that others hold.
pub(super) type SetAside = BTreeMap<LockKey, Vec<Pending>>;

/// Carries batches out on a connection of its own.
pub(super) struct Worker {
    session: Session,
    answers: Arc<Answers>,
    /// Those of the last batch.
    limits: Arc<Limits>,
}

impl Worker {
    pub fn new(store: &Store, answers: Arc<Answers>) -> Self {
        Self { session: store.session(), answers, limits: Arc::default() }
    }

    pub fn session(&mut self) -> &mut Session {
        &mut self.session
    }

    /// Carries out what is still wanted of `batch`, and answers it, all but what is returned: operations on keys that others
    /// hold, which wait again.
    pub async fn commit(&mut self, batch: Vec<Pending>) -> SetAside {
        let mut aside = SetAside::new();
        let mut parts = vec![(batch.into_iter().filter(Pending::begin).collect::<Vec<_>>(), 0)];
        while let Some((part, tries)) = parts.pop() {
            if part.is_empty() {
                continue;
            }
            let reused = self.session.is_open();
            match self.run(&part).await {
                Ok(committed) => self.answers.committed(part, committed),
                Err(BatchError::Held) => match self.split(part, &mut aside).await {
                    Ok(rest) => parts.push((rest, tries)),
                    Err(()) => self.session.reset(),
                },
                Err(BatchError::Unknown { transaction_id, committed }) => {
                    self.session.reset();
                    match self.session.transaction_committed(&transaction_id).await {
                        Some(true) => self.answers.committed(part, committed),
                        Some(false) => parts.push((part, tries)),
                        None => answer_all(part, &Error::CommitUnknown),
                    }
                }
                // Nothing was committed, so a connection that broke while it was idle costs no more than a new one.
                Err(BatchError::Store(error)) if reused && error.is_unavailable() => {
                    self.session.reset();
                    parts.push((part, tries));
                }
                Err(BatchError::Store(error)) => {
                    self.session.reset();
                    if let Some(retry) = after_error(part, tries, error) {
                        parts.extend(retry);
                    }
                }
            }
        }
        aside
    }

    async fn run(&mut self, part: &[Pending]) -> Result<Committed, BatchError> {
        let operations: Vec<&Operation> = part.iter().map(|pending| &pending.operation).collect();
        let committed = batch::run(self.session.get().await?, &operations, &self.limits).await?;
        self.limits = committed.standing.limits.clone();
        Ok(committed)
    }

    /// Finds out which keys others hold, and sets the operations on them aside; answers with the rest.
    async fn split(&mut self, part: Vec<Pending>, aside: &mut SetAside) -> Result<Vec<Pending>, ()> {
        let keys = batch::lock_keys(part.iter().map(|pending| &pending.operation));
        let held = match self.session.get().await {
            Ok(connection) => resource_lock::held(connection, &keys).await,
            Err(error) => Err(error),
        };
        let held = match held {
            Ok(held) => held,
            Err(error) => {
                answer_all(part, &error.into());
                return Err(());
            }
        };
        let mut rest = Vec::with_capacity(part.len());
        for pending in part {
            match pending.operation.lock_keys().find(|key| held.contains(key)) {
                Some(key) => {
                    pending.set_aside();
                    aside.entry(key).or_default().push(pending);
                }
                None if pending.reply.is_closed() => {}
                None if pending.deadline <= Instant::now() => answer_all(vec![pending], &Error::LockTimeout),
                None => rest.push(pending),
            }
        }
        Ok(rest)
    }
}

/// What to do about a batch that the store failed: the parts to try again, after their number of tries.
fn after_error(part: Vec<Pending>, tries: u32, error: StoreError) -> Option<Vec<(Vec<Pending>, u32)>> {
    if error.is_race() && tries < RETRIES_MAX {
        tracing::warn!(
            error = &error as &dyn std::error::Error,
            tries,
            "somebody else wrote the same rows; trying again"
        );
        return Some(vec![(part, tries + 1)]);
    }
    if !error.is_unavailable() && part.len() > 1 {
        // One operation must not fail its neighbours: each on its own tells which one it was.
        tracing::warn!(error = &error as &dyn std::error::Error, operations = part.len(), "a batch failed; one by one");
        return Some(part.into_iter().map(|pending| (vec![pending], tries)).collect());
    }
    let error = Error::from(error);
    tracing::error!(error = &error as &dyn std::error::Error, operations = part.len(), "operations failed");
    answer_all(part, &error);
    None
}

fn answer_all(part: Vec<Pending>, error: &Error) {
    for pending in part {
        // A caller that is gone needs no answer: nothing was changed for it.
        let _ = pending.reply.send(Err(error.clone()));
    }
}

/// Tells callers, and the rest of the service, what was committed.
pub(super) struct Answers {
    after_commit: AfterCommit,
    queue: mpsc::WeakSender<Pending>,
}

impl Answers {
    pub fn new(after_commit: AfterCommit, queue: mpsc::WeakSender<Pending>) -> Self {
        Self { after_commit, queue }
    }

    fn committed(&self, part: Vec<Pending>, committed: Committed) {
        self.after_commit.seen.update(committed.standing);
        for (pending, answer) in part.into_iter().zip(committed.answers) {
            let undo = match (&pending.operation, &answer) {
                (Operation::Request(request), Ok(Outcome::Granted(grant))) => self.granted(request, grant),
                _ => None,
            };
            let gone = pending.reply.send(answer.map_err(Error::from)).is_err();
            if let (true, Some(release)) = (gone, undo) {
                self.submit_detached(Operation::Released(release));
            }
        }
    }

    /// Has the expiry of a grant watched, and answers how to undo it if its caller is gone: nothing is granted to such a one,
    /// unless a request id lets it come back for the ticket.
    fn granted(&self, request: &Request, grant: &Grant) -> Option<Released> {
        let ticket = grant.released(request.user.clone());
        if request.lock_ttl <= expiry::HORIZON {
            let due = Due { within: request.lock_ttl, ticket: ticket.clone() };
            // Without a listener the server is shutting down; another instance's sweep will find it.
            let _ = self.after_commit.expiring_soon.send(due);
        }
        request.request_id.is_none().then_some(ticket)
    }

    /// Queues an operation that nobody waits for.
    fn submit_detached(&self, operation: Operation) {
        let (reply, answer) = oneshot::channel();
        let deadline = Instant::now() + DETACHED_TIMEOUT;
        let pending = Pending { operation, deadline, progress: Progress::default(), reply };
        if self.queue.upgrade().is_none_or(|queue| queue.try_send(pending).is_err()) {
            tracing::warn!("a grant whose caller is gone could not be undone; it will expire");
            return;
        }
        // Somebody has to want the answer, or the operation is not carried out.
        tokio::spawn(answer);
    }
}
