//! Calls that affect a waiting request.

use serde_json::json;

use super::{Action, Generator, Ticket, Wanted};

impl Generator {
    /// Returns a step for a waiting request: free capacity, change its EM or limit, add another request to its queue, or cancel it.
    pub(super) fn for_a_waiter(&mut self) -> Action {
        let open: Vec<(u32, Wanted)> = self.open.iter().map(|(call, wanted)| (*call, wanted.clone())).collect();
        let Some((call, wanted)) = self.pick(&open) else { return Action::Call(self.request()) };
        let index = self.ems.iter().position(|em| em.json() == wanted.body["em"]).unwrap_or(9);
        let (em, user) = (self.ems[index].clone(), wanted.body["user"].as_str().unwrap_or_default().to_owned());
        let (rm, admin) = ("ResourceManagerService", "AdminService");
        let near: Vec<Ticket> =
            self.tickets.iter().filter(|ticket| ticket.em == em.json() || ticket.user == user).cloned().collect();
        match self.random(40) {
            0 | 1 => {
                self.open.remove(&call);
                Action::Cancel(call)
            }
            2 => {
                self.push("UsageService", "ListWaiting", json!({"em": em.json()}));
                self.push(admin, "Resume", json!({"em": em.json(), "reason": "done"}));
                Action::Call(Wanted::new(admin, "Drain", json!({"em": em.json(), "reason": "while a request waits"})))
            }
            3 => {
                self.register(index, false);
                self.next.pop_front().unwrap()
            }
            4 => {
                let max = json!({"instances": 6 + self.random(8), "cores": 40});
                self.push("UsageService", "GetScope", json!({"labels": {"user": user}}));
                Action::Call(Wanted::new(
                    "LimitService",
                    "SetLimit",
                    json!({"limit": {"labels": {}, "each": ["user"], "max": max}}),
                ))
            }
            5 => Action::Call(Wanted::new("UsageService", "ListWaiting", json!({"em": em.json()}))),
            6 => Action::Call(Wanted::new("UsageService", "ListWaiting", json!({"user": user}))),
            7..=9 => {
                // A request that reaches its wait deadline, without another step meanwhile.
                let mut short = wanted;
                short.body["wait_timeout"] = json!("1.200s");
                if let Some(body) = short.body.as_object_mut() {
                    body.remove("request_id");
                }
                self.next.push_back(Action::Await);
                Action::Call(short)
            }
            10..=12 => {
                // Another request of equal size, later in the queue.
                let mut behind = wanted;
                behind.body["user"] = json!(self.user());
                if let Some(body) = behind.body.as_object_mut() {
                    body.remove("request_id");
                }
                Action::Call(behind)
            }
            roll => {
                let Some(ticket) = self.pick(&near) else { return Action::Call(self.request()) };
                self.gone(&ticket.id);
                if ticket.engine.is_none() && roll % 3 == 0 {
                    return Action::Change("expire_ticket", vec![ticket.id]);
                }
                let body = json!({"ticket_id": ticket.id, "return_counters": roll % 5 == 0});
                Action::Call(Wanted::new(rm, "ResourceReleased", body))
            }
        }
    }
}
