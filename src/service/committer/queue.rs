//! Who is next: what callers want before what touches many tickets or is done in the background, of which each batch takes a little.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::{
    sync::mpsc,
    time::{Duration, Instant},
};

use crate::domain::operation::{Operation, STEP_TICKETS_MAX};

use super::Pending;

/// How many operations may wait, or be set aside; more are turned away, because they would only wait longer than their callers do.
pub(super) const WAITING_MAX: usize = 16_384;

/// With how many waiting no more requests may.
const REQUESTS_MAX: usize = WAITING_MAX / 2;

/// What the operations of one transaction may cost. Larger batches are hardly cheaper per operation, and make everyone wait longer.
pub(super) const BATCH_COST_MAX: usize = 512;

/// What large operations and those of the background may cost together in a batch that callers wait for: beside a full load, they go on at
/// three tenths of the rate of an idle service.
const BACKGROUND_COST_MAX: usize = 64;

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
    /// Room for one more; `None` if there is none. Those that ask for something leave half of the room to those that give back.
    pub fn take(&self, operation: &Operation) -> Option<Place> {
        let most = if operation.request().is_some() { REQUESTS_MAX } else { WAITING_MAX };
        let place = Place(self.0.clone());
        // Counted first: dropped again if it was one too many.
        (place.0.fetch_add(1, Ordering::Relaxed) < most).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The queues.
pub(super) struct Queues {
    callers: Queue,
    /// What has to share [`BACKGROUND_COST_MAX`]: large, steps, background.
    in_turn: [Queue; 3],
    /// Which of these comes first in the next batch.
    turn: usize,
    called: Called,
}

/// When a caller last wanted something, of whichever committer: what nobody waits for holds scopes and users, and the database's cores, that
/// callers of the others need.
#[derive(Clone, Debug, Default)]
pub(super) struct Called(Arc<Mutex<Option<Instant>>>);

impl Called {
    /// Whether somebody calls, or has just called.
    fn is_recent(&self, calls: bool) -> bool {
        let now = Instant::now();
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if calls {
            *last = Some(now);
        }
        last.is_some_and(|last| now.saturating_duration_since(last) < CALLED_RECENTLY)
    }
}

/// What waits, and what was taken over of it but not yet into a batch.
struct Queue {
    waiting: mpsc::Receiver<Pending>,
    next: VecDeque<Pending>,
}

/// Where operations are put that are one committer's.
#[derive(Clone, Debug)]
pub(super) struct Doors {
    /// What callers wait for, and touches one ticket.
    pub callers: mpsc::Sender<Pending>,
    /// What callers wait for, and may touch many: behind the others, so that these do not wait for it.
    pub large: mpsc::Sender<Pending>,
    /// What nobody waits for, and touches many: few of them at once, each of which is followed by the next. Behind what touches one
    /// ticket each would stand behind thousands.
    pub steps: mpsc::Sender<Pending>,
    /// What nobody waits for, and touches one ticket.
    pub background: mpsc::Sender<Pending>,
}

impl Doors {
    /// For what a caller waits for: one that touches many tickets waits behind those that do not.
    pub fn called(&self, operation: &Operation) -> &mpsc::Sender<Pending> {
        if operation.cost() == 1 { &self.callers } else { &self.large }
    }

    /// For what nobody waits for.
    pub fn uncalled(&self, operation: &Operation) -> &mpsc::Sender<Pending> {
        if operation.cost() == 1 { &self.background } else { &self.steps }
    }
}

impl Queues {
    /// Those of one committer, who hears of the callers of all.
    pub fn new(called: Called) -> (Doors, Self) {
        let (callers, waited_for) = Queue::new();
        let (large, waiting) = Queue::new();
        let (steps, following) = Queue::new();
        let (background, rest) = Queue::new();
        let queues = Self { callers: waited_for, in_turn: [waiting, following, rest], turn: 0, called };
        (Doors { callers, large, steps, background }, queues)
    }

    /// Waits until there is something to do; false if there never will be again.
    pub async fn wait(&mut self) -> bool {
        let [large, steps, background] = &mut self.in_turn;
        if [&self.callers, large, steps, background].iter().any(|queue| !queue.next.is_empty()) {
            return true;
        }
        tokio::select! {
            biased;
            called = self.callers.waiting.recv() => match called {
                Some(pending) => self.callers.next.push_back(pending),
                None => return false,
            },
            Some(pending) = large.waiting.recv() => large.next.push_back(pending),
            Some(pending) = steps.waiting.recv() => steps.next.push_back(pending),
            Some(pending) = background.waiting.recv() => background.next.push_back(pending),
        }
        true
    }

    /// The operations of the next batch.
    pub fn next(&mut self) -> Vec<Pending> {
        self.callers.fill();
        self.in_turn.iter_mut().for_each(Queue::fill);
        let is_called = self.called.is_recent(!self.callers.next.is_empty());
        let mut batch = Vec::with_capacity(self.callers.next.len().min(BATCH_COST_MAX));
        self.callers.take(BATCH_COST_MAX, &mut batch);
        let mut left = if is_called { BACKGROUND_COST_MAX } else { BATCH_COST_MAX };
        // In turns, so that none waits for ever: who came first comes last in the next batch.
        let (begin, count) = (self.turn, self.in_turn.len());
        for number in (0..count).map(|after| (begin + after) % count) {
            let taken = self.in_turn[number].take(left, &mut batch);
            if taken > 0 && self.turn == begin {
                self.turn = (number + 1) % count;
            }
            left -= taken;
        }
        batch
    }
}

impl Queue {
    fn new() -> (mpsc::Sender<Pending>, Self) {
        let (door, waiting) = mpsc::channel(WAITING_MAX);
        (door, Self { waiting, next: VecDeque::new() })
    }

    /// Takes over what waits, up to what a batch may hold.
    fn fill(&mut self) {
        while self.next.len() < BATCH_COST_MAX {
            let Ok(pending) = self.waiting.try_recv() else { return };
            self.next.push_back(pending);
        }
    }

    /// Takes the first operations that cost no more than `cost_max` together; how much they do.
    fn take(&mut self, cost_max: usize, batch: &mut Vec<Pending>) -> usize {
        let mut cost = 0;
        while let Some(pending) = self.next.pop_front_if(|pending| cost + pending.operation.cost() <= cost_max) {
            cost += pending.operation.cost();
            batch.push(pending);
        }
        cost
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;
    use crate::{
        domain::{
            em::EmInstance,
            operation::{Released, Unregister},
            principal::Principal,
        },
        service::committer::Progress,
    };

    fn pending(operation: Operation) -> Pending {
        let (reply, _) = oneshot::channel();
        let (by, patience) = (Principal::Anonymous.into(), Instant::now().into());
        let (progress, trace) = (Progress::default(), Default::default());
        Pending { by, operation, patience, progress, reply, counters: None, waits: None, trace, _room: None }
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
        let (doors, mut queues) = Queues::new(Called::default());
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

    #[tokio::test]
    async fn a_step_does_not_stand_behind_what_touches_one_ticket() {
        let (doors, mut queues) = Queues::new(Called::default());
        let user = crate::domain::name::Name::parse("user", "hadoop").unwrap();
        let of = |host: &str| Released { ticket_id: uuid::Uuid::nil(), user: user.clone(), em: em(host) };
        for _ in 0..2000 {
            doors.background.try_send(pending(Operation::Expire(of("expires")))).unwrap();
        }
        for _ in 0..10 {
            doors.callers.try_send(pending(Operation::Released(of("caller")))).unwrap();
            doors.steps.try_send(pending(Operation::EndTickets(em("goes")))).unwrap();
            let next: Vec<String> = (0..3).flat_map(|_| hosts(&queues.next())).collect();
            assert!(next.iter().any(|host| host == "goes") && next.iter().any(|host| host == "expires"), "{next:?}");
        }
    }
}
