//! Expiry: what no engine reported in for is rolled back when its deadline passes.
//!
//! The deadline in the ticket's row is the truth. Every instance looks ahead for deadlines that come near, whoever granted the
//! ticket, and sets a timer for each; so the tickets of an instance that died expire as punctually as its own, and a ticket that
//! is inited long before its deadline costs no timer. The roll-back itself is an operation like any other, judged again under the locks.

use std::{collections::HashSet, time::Duration};

use tokio::{sync::mpsc, task::JoinSet, time::Instant};
use tokio_stream::StreamExt as _;
use tokio_util::{sync::CancellationToken, time::DelayQueue};
use uuid::Uuid;

use crate::{
    domain::operation::{Operation, Released},
    store::{
        Store, StoreError,
        session::{Session, answered},
        user_resource::{self, Due},
    },
};

use super::committer::Committer;

/// How far each sweep looks ahead.
pub const HORIZON: Duration = Duration::from_secs(2);

/// How often to look: also the most by which the shortest grants of an instance that died can expire late.
const SWEEP_INTERVAL: Duration = Duration::from_millis(500);

/// How many tickets one sweep takes on; the next one takes the rest.
const SWEEP_MAX: i64 = 5000;

/// So that a timer does not fire just before the database's clock gets there.
const SLACK: Duration = Duration::from_millis(2);

/// How long one roll-back may wait for its locks; the next sweep tries again.
const ROLLBACK_TIMEOUT: Duration = Duration::from_secs(5);

/// Rolls overdue tickets back until `stop`.
pub async fn run(
    store: Store,
    committer: Committer,
    mut expiring_soon: mpsc::UnboundedReceiver<Due>,
    stop: CancellationToken,
) {
    let mut watch =
        Watch { committer, timers: DelayQueue::new(), watched: HashSet::new(), rolling_back: JoinSet::new() };
    // Of its own: whatever else waits for connections, tickets expire.
    let mut session = store.session();
    let mut sweeps = tokio::time::interval(SWEEP_INTERVAL);
    sweeps.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut reachable = true;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = sweeps.tick() => match watch.sweep(&mut session).await {
                Ok(due) => {
                    reachable = true;
                    due.into_iter().for_each(|due| watch.set_timer(due));
                }
                Err(error) => {
                    session.reset();
                    if reachable {
                        tracing::warn!(error = &error as &dyn std::error::Error, "cannot look for expired tickets");
                    }
                    reachable = false;
                }
            },
            Some(due) = expiring_soon.recv() => watch.set_timer(due),
            Some(due) = watch.timers.next() => watch.roll_back(due.into_inner()),
            Some(done) = watch.rolling_back.join_next() => watch.forget(done),
        }
    }
}

struct Watch {
    committer: Committer,
    timers: DelayQueue<Released>,
    /// Tickets with a timer, or whose roll-back is under way.
    watched: HashSet<Uuid>,
    rolling_back: JoinSet<Uuid>,
}

impl Watch {
    /// Deadlines that come near and are not watched yet.
    async fn sweep(&self, session: &mut Session) -> Result<Vec<Due>, StoreError> {
        let watched = self.watched.iter().copied().collect();
        answered(user_resource::due(session.get().await?, HORIZON, watched, SWEEP_MAX)).await
    }

    fn set_timer(&mut self, due: Due) {
        if self.watched.insert(due.ticket.ticket_id) {
            self.timers.insert(due.ticket, due.within + SLACK);
        }
    }

    fn roll_back(&mut self, ticket: Released) {
        let committer = self.committer.clone();
        self.rolling_back.spawn(async move {
            let ticket_id = ticket.ticket_id;
            let deadline = Instant::now() + ROLLBACK_TIMEOUT;
            if let Err(error) = committer.submit(Operation::Expire(ticket), deadline).await {
                tracing::warn!(%ticket_id, error = &error as &dyn std::error::Error, "a ticket could not expire yet");
            }
            ticket_id
        });
    }

    fn forget(&mut self, done: Result<Uuid, tokio::task::JoinError>) {
        match done {
            Ok(ticket_id) => {
                self.watched.remove(&ticket_id);
            }
            // Which one is not known: without marks, the next sweep finds what is still there.
            Err(_) => self.watched.clear(),
        }
    }
}
