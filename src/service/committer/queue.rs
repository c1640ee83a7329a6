//! Who is next: what callers want before what touches many tickets or is done in the background, of which each batch takes a little.

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

/// What large operations and those of the background may cost together in a batch that callers wait for.
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

/// The queues, and what was taken out of them but not yet into a batch.
pub(super) struct Queues {
    callers: mpsc::Receiver<Pending>,
    large: mpsc::Receiver<Pending>,
    background: mpsc::Receiver<Pending>,
    first: VecDeque<Pending>,
    then: VecDeque<Pending>,
    later: VecDeque<Pending>,
    /// Whether the large ones were before the background in the last batch.
    large_first: bool,
    last_called: Option<Instant>,
}

/// Where operations are put.
#[derive(Clone, Debug)]
pub(super) struct Doors {
    /// What callers wait for, and touches one ticket.
    pub callers: mpsc::Sender<Pending>,
    /// What callers wait for, and may touch many: behind the others, so that these do not wait for it.
    pub large: mpsc::Sender<Pending>,
    /// What nobody waits for.
    pub background: mpsc::Sender<Pending>,
}

impl Queues {
    pub fn new() -> (Doors, Self) {
        let (callers, called) = mpsc::channel(WAITING_MAX);
        let (large, waiting) = mpsc::channel(WAITING_MAX);
        let (background, rest) = mpsc::channel(WAITING_MAX);
        let queues = Self {
            callers: called,
            large: waiting,
            background: rest,
            first: VecDeque::new(),
            then: VecDeque::new(),
            later: VecDeque::new(),
            large_first: false,
            last_called: None,
        };
        (Doors { callers, large, background }, queues)
    }

    /// Waits until there is something to do; false if there never will be again.
    pub async fn wait(&mut self) -> bool {
        if !self.first.is_empty() || !self.then.is_empty() || !self.later.is_empty() {
            return true;
        }
        tokio::select! {
            biased;
            called = self.callers.recv() => match called {
                Some(pending) => self.first.push_back(pending),
                None => return false,
            },
            Some(pending) = self.large.recv() => self.then.push_back(pending),
            Some(pending) = self.background.recv() => self.later.push_back(pending),
        }
        true
    }

    /// The operations of the next batch.
    pub fn next(&mut self) -> Vec<Pending> {
        fill(&mut self.callers, &mut self.first);
        fill(&mut self.large, &mut self.then);
        fill(&mut self.background, &mut self.later);
        let now = Instant::now();
        if !self.first.is_empty() {
            self.last_called = Some(now);
        }
        let is_called = self.last_called.is_some_and(|last| now.duration_since(last) < CALLED_RECENTLY);
        let mut batch = Vec::with_capacity(self.first.len().min(BATCH_COST_MAX));
        take(&mut self.first, BATCH_COST_MAX, &mut batch);
        let most = if is_called { BACKGROUND_COST_MAX } else { BATCH_COST_MAX };
        // In turns, so that neither waits for ever.
        self.large_first = !self.large_first;
        let mut in_turn = [&mut self.then, &mut self.later];
        if !self.large_first {
            in_turn.reverse();
        }
        let mut left = most;
        for queue in in_turn {
            left -= take(queue, left, &mut batch);
        }
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

/// Takes the first operations that cost no more than `cost_max` together; how much they do.
fn take(from: &mut VecDeque<Pending>, cost_max: usize, batch: &mut Vec<Pending>) -> usize {
    let mut cost = 0;
    while let Some(pending) = from.pop_front_if(|pending| cost + pending.operation.cost() <= cost_max) {
        cost += pending.operation.cost();
        batch.push(pending);
    }
    cost
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;
    use crate::{
        domain::{
            em::EmInstance,
            operation::{Operation, Released, Unregister},
            principal::Principal,
        },
        service::committer::Progress,
    };

    fn pending(operation: Operation) -> Pending {
        let (reply, _) = oneshot::channel();
        let (by, deadline) = (Principal::Anonymous, Instant::now());
        Pending { by, operation, deadline, progress: Progress::default(), reply, waits: None, _room: None }
    }

    fn em(host: &str) -> EmInstance {
        EmInstance::parse("em", "ecm", host).unwrap()
    }

    fn goes(host: &str) -> Pending {
        pending(Operation::Unregister(Unregister { em: em(host), epoch: None }))
    }

    fn hosts(batch: &[Pending]) -> Vec<String> {
        batch.iter().map(|pending| pending.operation.em().instance.to_string()).collect()
    }

    #[tokio::test]
    async fn what_a_caller_waits_for_stands_behind_little_that_nobody_waits_for() {
        let (doors, mut queues) = Queues::new();
        for _ in 0..1000 {
            doors.background.try_send(goes("background")).unwrap();
        }
        doors.large.try_send(goes("large")).unwrap();
        let mut before = Vec::new();
        while !before.contains(&"large".to_owned()) {
            // Somebody calls all the while: then a batch takes one of these.
            let user = crate::domain::name::Name::parse("user", "hadoop").unwrap();
            let released = Released { ticket_id: uuid::Uuid::nil(), user, em: em("caller") };
            doors.callers.try_send(pending(Operation::Released(released))).unwrap();
            let batch = hosts(&queues.next());
            assert_eq!(batch[0], "caller");
            before.extend(batch.into_iter().filter(|host| host != "caller"));
        }
        assert!(before.len() <= 2, "{before:?}");
        // And the others go on, however many callers there are.
        for _ in 0..10 {
            doors.large.try_send(goes("large")).unwrap();
        }
        doors.callers.try_send(goes("caller")).unwrap();
        let next: Vec<String> = (0..4).flat_map(|_| hosts(&queues.next())).collect();
        assert!(next.iter().any(|host| host == "background") && next.iter().any(|host| host == "large"), "{next:?}");
    }
}
