//! Who is next: what callers want before what is done in the background, of which each batch takes a little.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::{
    sync::mpsc,
    time::{Duration, Instant},
};

use crate::domain::operation::STEP_TICKETS_MAX;

use super::Pending;

/// How many operations may wait, or be set aside; more are turned away, because they would only wait longer than their callers do.
pub(super) const WAITING_MAX: usize = 16_384;

/// What the operations of one transaction may cost. Larger batches are hardly cheaper per operation, and make everyone wait longer.
pub(super) const BATCH_COST_MAX: usize = 512;

/// What the background operations of a batch may cost that callers wait for.
const BACKGROUND_COST_MAX: usize = STEP_TICKETS_MAX;

/// For how long after a caller's operation the next one is expected.
const CALLED_RECENTLY: Duration = Duration::from_millis(100);

// No operation costs more than a batch.
const _: () = assert!(STEP_TICKETS_MAX <= BATCH_COST_MAX && BACKGROUND_COST_MAX >= STEP_TICKETS_MAX);

/// Room for operations that wait, wherever they do.
#[derive(Clone, Debug, Default)]
pub(super) struct Room(Arc<AtomicUsize>);

/// The room that one operation takes until it is answered.
#[derive(Debug)]
pub(super) struct Place(Arc<AtomicUsize>);

impl Room {
    /// Room for one more; `None` if there is none.
    pub fn take(&self) -> Option<Place> {
        let place = Place(self.0.clone());
        // Counted first: dropped again if it was one too many.
        (place.0.fetch_add(1, Ordering::Relaxed) < WAITING_MAX).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The two queues, and what was taken out of them but not yet into a batch.
pub(super) struct Queues {
    callers: mpsc::Receiver<Pending>,
    background: mpsc::Receiver<Pending>,
    first: VecDeque<Pending>,
    later: VecDeque<Pending>,
    last_called: Option<Instant>,
}

impl Queues {
    pub fn new(callers: mpsc::Receiver<Pending>, background: mpsc::Receiver<Pending>) -> Self {
        Self { callers, background, first: VecDeque::new(), later: VecDeque::new(), last_called: None }
    }

    /// Waits until there is something to do; false if there never will be again.
    pub async fn wait(&mut self) -> bool {
        if !self.first.is_empty() || !self.later.is_empty() {
            return true;
        }
        tokio::select! {
            biased;
            called = self.callers.recv() => match called {
                Some(pending) => self.first.push_back(pending),
                None => return false,
            },
            Some(pending) = self.background.recv() => self.later.push_back(pending),
        }
        true
    }

    /// The operations of the next batch.
    pub fn next(&mut self) -> Vec<Pending> {
        fill(&mut self.callers, &mut self.first);
        fill(&mut self.background, &mut self.later);
        let now = Instant::now();
        if !self.first.is_empty() {
            self.last_called = Some(now);
        }
        let is_called = self.last_called.is_some_and(|last| now.duration_since(last) < CALLED_RECENTLY);
        let mut batch = Vec::with_capacity(self.first.len().min(BATCH_COST_MAX));
        take(&mut self.first, BATCH_COST_MAX, &mut batch);
        take(&mut self.later, if is_called { BACKGROUND_COST_MAX } else { BATCH_COST_MAX }, &mut batch);
        batch
    }
}

/// Takes over what waits, up to what a batch may hold.
fn fill(queue: &mut mpsc::Receiver<Pending>, into: &mut VecDeque<Pending>) {
    while into.len() < BATCH_COST_MAX {
        let Ok(pending) = queue.try_recv() else { return };
        into.push_back(pending);
    }
}

/// Takes the first operations that cost no more than `cost_max` together.
fn take(from: &mut VecDeque<Pending>, cost_max: usize, batch: &mut Vec<Pending>) {
    let mut cost = 0;
    while let Some(pending) = from.pop_front_if(|pending| cost + pending.operation.cost() <= cost_max) {
        cost += pending.operation.cost();
        batch.push(pending);
    }
}
