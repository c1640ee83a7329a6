//! Lease: selects the instance that runs the tasks that one instance does for all.
//!
//! A row with a deadline names the owner, which renews it each second. If the owner dies, another instance takes the lease
//! after the deadline. Two instances may own it for a moment; some work is then done twice, and the second run finds nothing to
//! do.
//!
//! Never: a condition of correctness; the locks and versions of the rows decide.
//! Callers: all tasks that check [`LeaseFlag::holds`]; the task driver (`background`) runs the renewal.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;
use uuid::Uuid;

use rm_store::{
    StoreError, Work, lease, limit,
    session::{Session, within_short_timeout},
};

use super::{Step, Task};

/// Returns the name of the lease on all background work. A release with another writer number has a lease of its own, because
/// one of the two may not write.
fn background() -> String {
    format!("background of writer {}", limit::WRITER)
}

/// Time during which an instance that steps down does not take the lease.
const HANDED_OVER: Duration = Duration::from_secs(3);

/// Flag: whether this instance owns the lease. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct LeaseFlag {
    holds: Arc<AtomicBool>,
    hands_over: Arc<AtomicBool>,
}

impl LeaseFlag {
    /// Whether this instance owns the lease.
    pub fn holds(&self) -> bool {
        self.holds.load(Ordering::Relaxed)
    }

    /// Releases the lease to another instance, because this one fails to do the work.
    pub fn step_down(&self) {
        self.hands_over.store(true, Ordering::Relaxed);
    }
}

/// Background task that takes and renews the lease.
#[derive(Debug)]
pub struct RenewLease {
    instance_id: Uuid,
    holder: LeaseFlag,
    /// Time until which only other instances may take the lease.
    leaves_it_until: Instant,
}

impl RenewLease {
    /// Creates the task of an instance that does not own the lease.
    pub fn new(instance_id: Uuid, holder: LeaseFlag) -> Self {
        Self { instance_id, holder, leaves_it_until: Instant::now() }
    }

    /// Takes or renews the lease unless another instance owns it.
    async fn acquire_or_renew(&self, session: &mut Session) -> Result<(), StoreError> {
        // The row is never locked for long.
        let held = async { lease::hold(session.get().await?, &background(), self.instance_id).await };
        let held = within_short_timeout(held).await;
        // The lease may be lost if its renewal failed.
        self.holder.holds.store(matches!(held, Ok(true)), Ordering::Relaxed);
        held.map(drop)
    }
}

impl Task for RenewLease {
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
        let mut held = self.acquire_or_renew(session).await;
        if held.is_err() {
            // A broken connection says nothing about the lease. A renewal on a new connection lets running work continue.
            session.reset();
            held = self.acquire_or_renew(session).await;
        }
        held.map(|()| Step::Done)
    }

    /// Releases the lease, so that another instance need not wait for its deadline.
    async fn end(&mut self, session: &mut Session) {
        if self.holder.holds.swap(false, Ordering::Relaxed)
            && let Ok(connection) = session.get().await
        {
            // The lease ends at its deadline if the database does not reply.
            let _ = within_short_timeout(lease::give_back(connection, &background(), self.instance_id)).await;
        }
    }
}
