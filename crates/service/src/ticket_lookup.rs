//! Ticket lookup: returns the user and EM of a ticket for calls with only its id. Many lookups share one read.
//!
//! A plain read is enough, because user and EM of a ticket never change. The ledger checks under the locks whether the ticket
//! lives.
//!
//! Callers: the RPC services `rm_edge::resource_manager` and `rm_edge::admin`.

use std::collections::{HashMap, HashSet};

use async_recursion::async_recursion as boxed;
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};
use uuid::Uuid;

use crate::{error::Error, tasks::InstanceTasks};
use rm_model::{
    action::{Action, ActionRecord},
    audit::Subject,
    em::EmInstance,
    external::place_of,
    operation::{Rejection, ReleaseTicket, TicketRef},
};
use rm_store::{
    Store, StoreError, action_record,
    session::{Session, answered_within, within_timeout},
    user_resource, waiting,
};

/// Maximum number of lookups that wait.
const QUEUE_MAX: usize = 16_384;

/// Maximum number of lookups that share one read.
const BATCH_MAX: usize = 1024;

/// Handle of the lookups. Clones share it.
#[derive(Clone, Debug)]
pub struct TicketLookup {
    queue: mpsc::Sender<Lookup>,
    store: Store,
}

#[derive(Debug)]
struct Lookup {
    ticket_id: Uuid,
    reply: oneshot::Sender<Result<ReleaseTicket, Error>>,
}

impl TicketLookup {
    /// Starts the task that reads; it ends when all clones of the handle are dropped.
    pub fn start(store: &Store, tasks: &InstanceTasks) -> Self {
        let (queue, inbox) = mpsc::channel(QUEUE_MAX);
        tasks.spawn(run(inbox, store.session()));
        Self { queue, store: store.clone() }
    }

    /// Returns the external queue (YARN queue or Kubernetes namespace) of a live ticket, as its request named it. `None` if it
    /// has none.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn queue_of(&self, ticket_id: Uuid) -> Result<Option<String>, Error> {
        let found = within_timeout(user_resource::read(&self.store.pool().await?, &[ticket_id])).await?;
        Ok(found.get(&ticket_id).and_then(|ticket| place_of(ticket.resource())).map(|(_, name)| name.to_owned()))
    }

    /// Returns the EM of a request that waits, or that an operator has removed from its queues.
    ///
    /// # Errors
    /// - [`Rejection::NotWaiting`] if no request waits under this ticket id.
    /// - Database errors.
    #[boxed]
    pub async fn em_of_waiting(&self, ticket_id: Uuid) -> Result<EmInstance, Error> {
        let found = async {
            let pool = self.store.pool().await?;
            if let Some(em) = waiting::em_of(&pool, ticket_id).await? {
                return Ok::<_, StoreError>(Some(em));
            }
            Ok(match action_record::list(&pool, Some(ticket_id), 0, 1).await?.pop() {
                Some(ActionRecord { action: Action::RemovedFromQueue, subject: Subject::Em(em), .. }) => Some(em),
                _ => None,
            })
        };
        within_timeout(found).await?.ok_or_else(|| Rejection::NotWaiting(ticket_id).into())
    }

    /// Completes a ticket reference with the user and EM that the caller omitted.
    ///
    /// # Errors
    /// - [`Rejection::TicketNotFound`] if the ticket is neither live nor in the history, or if the given user or EM is wrong.
    /// - [`Error::Overloaded`] if too many lookups wait.
    /// - Database errors; [`Error::Unavailable`] if the database has not replied by `deadline`.
    #[boxed]
    pub async fn complete(&self, named: TicketRef, deadline: Instant) -> Result<ReleaseTicket, Error> {
        match named {
            TicketRef { ticket_id, user: Some(user), em: Some(em) } => Ok(ReleaseTicket { ticket_id, user, em }),
            TicketRef { ticket_id, user, em } => {
                let found = self.find(ticket_id, deadline).await?;
                let is_right = user.is_none_or(|user| user == found.user) && em.is_none_or(|em| em == found.em);
                is_right.then_some(found).ok_or_else(|| Rejection::TicketNotFound { ticket_id, ended: None }.into())
            }
        }
    }

    async fn find(&self, ticket_id: Uuid, deadline: Instant) -> Result<ReleaseTicket, Error> {
        let (reply, answer) = oneshot::channel();
        self.queue.try_send(Lookup { ticket_id, reply })?;
        let answer = async { answer.await.unwrap_or(Err(Error::ShuttingDown)) };
        answered_within(deadline.saturating_duration_since(Instant::now()), answer).await
    }
}

async fn run(mut inbox: mpsc::Receiver<Lookup>, mut session: Session) {
    let mut lookups = Vec::with_capacity(BATCH_MAX);
    while inbox.recv_many(&mut lookups, BATCH_MAX).await > 0 {
        lookups.retain(|lookup| !lookup.reply.is_closed());
        if lookups.is_empty() {
            continue;
        }
        let reused = session.is_open();
        let mut found = within_timeout(read(&mut session, &lookups)).await;
        if reused && found.is_err() {
            // A connection that broke while idle costs one new connection.
            session.reset();
            found = within_timeout(read(&mut session, &lookups)).await;
        }
        if found.is_err() {
            session.reset();
        }
        let found = found.map_err(Error::from);
        for Lookup { ticket_id, reply } in lookups.drain(..) {
            let answer = match &found {
                Ok(found) => found
                    .get(&ticket_id)
                    .cloned()
                    .ok_or_else(|| Rejection::TicketNotFound { ticket_id, ended: None }.into()),
                Err(error) => Err(error.clone()),
            };
            // A caller that is gone needs no reply.
            let _ = reply.send(answer);
        }
    }
}

/// Reads user and EM of live tickets, and then of ended ones. A ticket that ends between the reads is found by the second one.
async fn read(session: &mut Session, lookups: &[Lookup]) -> Result<HashMap<Uuid, ReleaseTicket>, StoreError> {
    let connection = session.get().await?;
    let ids: HashSet<Uuid> = lookups.iter().map(|lookup| lookup.ticket_id).collect();
    let mut ids: Vec<Uuid> = ids.into_iter().collect();
    let mut found = user_resource::owners(&mut *connection, &ids).await?;
    ids.retain(|id| !found.contains_key(id));
    if !ids.is_empty() {
        let ended = action_record::read(&mut *connection, &ids).await?.into_values();
        found.extend(
            ended.map(|ended| (ended.id, ReleaseTicket { ticket_id: ended.id, user: ended.user, em: ended.em })),
        );
    }
    Ok(found)
}
