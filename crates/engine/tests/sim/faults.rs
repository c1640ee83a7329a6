//! Faults: crashes, callers that leave, contended keys, drains, holds, unhealthy and unregistered EMs, lost entries, shutdowns,
//! removals by operators, repeated calls.

use rm_engine::request::{Action, Event, WaitResult};
use rm_model::{
    name::Name,
    operation::{DrainEm, LockKey, Operation, ResumeEm, UnregisterEm},
};

use crate::{
    instance::Call,
    world::{Faults, World},
};

impl World {
    /// Lets one fault happen to an instance.
    pub fn disturb(&mut self, number: usize) {
        self.steps += 1;
        // Some of them lose entries or end calls, and are not orderly.
        let kinds: &[usize] = match self.shape.faults {
            Faults::All => &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 19, 20, 21, 21, 22],
            _ => &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 14, 15, 16, 17, 20, 21, 21, 22],
        };
        match self.choices.of(kinds).unwrap_or_default() {
            0 => self.crash(number),
            1..=3 => self.cancel(number),
            4 | 5 => {
                if let Some(em) = self.choices.of(&self.ems) {
                    self.store.contended.insert(em);
                }
            }
            6 | 7 => drop(self.store.contended.pop_first()),
            8 | 9 => {
                let Some(em) = self.choices.of(&self.ems) else { return };
                let reason = Name::parse("reason", "disk").unwrap();
                self.submit_operation(number, Operation::Drain(DrainEm { em, reason }));
            }
            10 => {
                let Some(em) = self.choices.of(&self.ems) else { return };
                self.submit_operation(number, Operation::Resume(ResumeEm { em, reason: None }));
            }
            11 => {
                // Other instances take it for dead.
                let notice = self.store.sweep(self.instances[number].id);
                self.publish(None, notice);
            }
            12 => self.shut_down(number),
            13 => {
                let user = LockKey::User(self.user());
                let em = self.choices.of(&self.ems).map(LockKey::Em);
                let key = if self.choices.one_in(4) { Some(user) } else { em };
                key.into_iter().for_each(|key| self.store.hold(key));
            }
            16 | 17 => {
                let (em, is_healthy) = (self.choices.of(&self.ems), self.choices.one_in(2));
                em.iter().for_each(|em| self.report(number, em, is_healthy));
            }
            18 => {
                let Some(em) = self.choices.of(&self.ems) else { return };
                self.submit_operation(number, Operation::Unregister(UnregisterEm { em, epoch: None }));
            }
            19 => self.register(number),
            20 => self.remove_waiting(number),
            21 => self.come_again(number),
            22 => self.store.end_absent(),
            _ => {
                let freed = self.store.end_hold();
                self.publish(None, freed.into());
            }
        }
    }

    /// An instance dies, and a new one takes its place.
    fn crash(&mut self, number: usize) {
        let dead = self.instances.swap_remove(number);
        self.add_instance();
        let notice = self.store.sweep(dead.id);
        self.publish(None, notice);
    }

    /// A caller leaves.
    fn cancel(&mut self, number: usize) {
        let calls: Vec<u64> = self.instances[number].calls.keys().copied().collect();
        let Some(call) = self.choices.of(&calls) else { return };
        if let Some(Call { handle, .. }) = self.instances[number].calls.remove(&call) {
            self.end(number, handle, false);
            self.notify(number);
        }
    }

    /// Ends all sleeping and pausing requests of an instance.
    fn shut_down(&mut self, number: usize) {
        let rests = |call: &Call| matches!(call.action, Some(Action::Wait | Action::Pause));
        let calls = &self.instances[number].calls;
        let calls: Vec<u64> = calls.iter().filter(|(_, call)| rests(call)).map(|(number, _)| *number).collect();
        calls.into_iter().for_each(|call| self.step(number, call, Event::Woken(WaitResult::Stopping)));
    }
}
