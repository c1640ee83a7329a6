//! Which instance does what one does for all: the one that holds the lease. If it dies, another takes it when it ends; if two hold it
//! for a moment, some work is done twice, and the second time finds nothing to do.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use uuid::Uuid;

use crate::store::{
    StoreError, lease,
    session::{Session, answered},
};

use super::{Step, Task};

/// The lease on all background work.
const BACKGROUND: &str = "background";

/// Whether this instance holds the lease.
#[derive(Clone, Debug, Default)]
pub struct Holder(Arc<AtomicBool>);

impl Holder {
    /// Whether it does.
    pub fn holds(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Takes the lease, and renews it.
#[derive(Debug)]
pub struct Lease {
    instance_id: Uuid,
    holder: Holder,
}

impl Lease {
    /// Of an instance that does not hold it yet.
    pub fn new(holder: Holder) -> Self {
        Self { instance_id: Uuid::new_v4(), holder }
    }
}

impl Task for Lease {
    const NAME: &'static str = "lease";
    const PERIOD: Duration = Duration::from_secs(1);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        let held = match session.get().await {
            Ok(connection) => answered(lease::hold(connection, BACKGROUND, self.instance_id)).await,
            Err(error) => Err(error),
        };
        // Who cannot renew it may have lost it.
        self.holder.0.store(matches!(held, Ok(true)), Ordering::Relaxed);
        held.map(|_| Step::Done)
    }

    /// Another need not wait for the end of the lease.
    async fn end(&mut self, session: &mut Session) {
        if self.holder.0.swap(false, Ordering::Relaxed)
            && let Ok(connection) = session.get().await
        {
            // Without the database it ends by itself.
            let _ = answered(lease::give_back(connection, BACKGROUND, self.instance_id)).await;
        }
    }
}
