//! Which instance does what one does for all: the one that holds the lease. If it dies, another takes it when it ends; if two hold it
//! for a moment, some work is done twice, and the second time finds nothing to do.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;
use uuid::Uuid;

use crate::store::{
    StoreError, Work, lease,
    session::{Session, answered_soon},
};

use super::{Step, Task};

/// The lease on all background work.
const BACKGROUND: &str = "background";

/// How long one that hands the lease over leaves it to the others.
const HANDED_OVER: Duration = Duration::from_secs(3);

/// Whether this instance holds the lease.
#[derive(Clone, Debug, Default)]
pub struct Holder {
    holds: Arc<AtomicBool>,
    hands_over: Arc<AtomicBool>,
}

impl Holder {
    /// Whether it does.
    pub fn holds(&self) -> bool {
        self.holds.load(Ordering::Relaxed)
    }

    /// It could not do its work: the lease goes to another instance, if there is one.
    pub fn hand_over(&self) {
        self.hands_over.store(true, Ordering::Relaxed);
    }
}

/// Takes the lease, and renews it.
#[derive(Debug)]
pub struct Lease {
    instance_id: Uuid,
    holder: Holder,
    /// Until when others may take it.
    leaves_it_until: Instant,
}

impl Lease {
    /// Of an instance that does not hold it yet.
    pub fn new(instance_id: Uuid, holder: Holder) -> Self {
        Self { instance_id, holder, leaves_it_until: Instant::now() }
    }

    /// Takes it or renews it, if it is not another's.
    async fn hold(&self, session: &mut Session) -> Result<(), StoreError> {
        // Nobody holds its row for long.
        let held = async { lease::hold(session.get().await?, BACKGROUND, self.instance_id).await };
        let held = answered_soon(held).await;
        // Who cannot renew it may have lost it.
        self.holder.holds.store(matches!(held, Ok(true)), Ordering::Relaxed);
        held.map(drop)
    }
}

impl Task for Lease {
    const NAME: &'static str = "lease";
    const WORK: Work = Work::Vital;
    const PERIOD: Duration = Duration::from_secs(1);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        if self.holder.hands_over.swap(false, Ordering::Relaxed) && self.holder.holds() {
            self.leaves_it_until = Instant::now() + HANDED_OVER;
            self.end(session).await;
        }
        if Instant::now() < self.leaves_it_until {
            return Ok(Step::Done);
        }
        let mut held = self.hold(session).await;
        if held.is_err() {
            // A connection that broke meanwhile says nothing of the lease: with a new one, nothing that goes on need stop for long.
            session.reset();
            held = self.hold(session).await;
        }
        held.map(|()| Step::Done)
    }

    /// Another need not wait for the end of the lease.
    async fn end(&mut self, session: &mut Session) {
        if self.holder.holds.swap(false, Ordering::Relaxed)
            && let Ok(connection) = session.get().await
        {
            // Without the database it ends by itself.
            let _ = answered_soon(lease::give_back(connection, BACKGROUND, self.instance_id)).await;
        }
    }
}
