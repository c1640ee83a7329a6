//! Calls of operators: drains, holds, repairs, limits, policies and providers.

use serde_json::json;

use super::{Action, GB, Generator, KIND, Wanted};
use crate::ids::LATER;

impl Generator {
    pub(super) fn operator(&mut self) -> Action {
        let index = self.random(10) as usize;
        let em = self.ems[index].clone();
        let tickets = self.tickets.clone();
        let ticket = self.pick(&tickets);
        let call = |service, method, body| Action::Call(Wanted::new(service, method, body));
        match self.random(if self.chapter == "external" { 30 } else { 22 }) {
            20 => {
                self.push(
                    "AdminService",
                    "Hold",
                    json!({"em": em.json(), "duration": "60s", "reason": "held by hand"}),
                );
                self.push("AdminService", "ReleaseHold", json!({"em": em.json()}));
                Action::Change("hold_by_hand", vec![em.kind.to_owned(), em.host])
            }
            22.. => self.provider(),
            0 => call(
                "AdminService",
                "Drain",
                json!({"em": em.json(), "reason": format!("maintenance {}", self.random(2))}),
            ),
            1 | 2 => call("AdminService", "Resume", json!({"em": em.json(), "reason": "done"})),
            3 => {
                let id = ticket.map_or_else(|| uuid::Uuid::nil().to_string(), |ticket| ticket.id);
                let counters = self.chance(30);
                call(
                    "AdminService",
                    "ForceRelease",
                    json!({"ticket_id": id, "reason": "stuck", "return_counters": counters}),
                )
            }
            4 => {
                // Hold an EM, let calls reach their deadlines, and end the hold.
                let hold = json!({"em": em.json(), "duration": "600s", "reason": "an operator looks"});
                self.push("AdminService", "ListHolds", json!({}));
                let mut blocked = Wanted::new(
                    "ResourceManagerService",
                    "RequestResource",
                    json!({"user": self.user(), "creator": "IDE", "resource": {"load_instance": {"memory": GB, "cores": 1, "instances": 1}}, "em": em.json()}),
                );
                blocked.timeout = 400;
                self.next.push_back(Action::Call(blocked));
                self.push("AdminService", "Hold", hold.clone());
                if self.chance(50) {
                    self.push("AdminService", "ReleaseHold", json!({"em": em.json()}));
                } else {
                    self.next.push_back(Action::Change("expire_hold", vec![em.host.clone()]));
                }
                self.push("AdminService", "ListHolds", json!({}));
                call("AdminService", "Hold", hold)
            }
            5 => {
                let user = self.user();
                self.push("AdminService", "ReleaseHold", json!({"user": user}));
                self.push("AdminService", "ReleaseHold", json!({"user": user}));
                call("AdminService", "Hold", json!({"user": user, "duration": "60s", "reason": "a look"}))
            }
            6 => call("AdminService", "Audit", json!({})),
            7 => {
                self.push("AdminService", "Audit", json!({}));
                self.push("AdminService", "Repair", json!({"em": em.json(), "reason": "spoilt"}));
                self.push("AdminService", "Audit", json!({}));
                Action::Change("spoil_em", vec![em.host])
            }
            8 => call("AdminService", "Repair", json!({"scope": {"user": self.user()}, "reason": "a look"})),
            9 => call(
                "AdminService",
                "Repair",
                if self.chance(50) { json!({}) } else { json!({"scope": {"no": "such"}}) },
            ),
            10 | 11 => {
                let id = if self.chance(30) {
                    ticket.map_or_else(|| uuid::Uuid::nil().to_string(), |ticket| ticket.id)
                } else {
                    uuid::Uuid::from_u64_pair(0x1234_5678_9abc_4def, (1 << 63) | self.random(40)).to_string()
                };
                let engine = json!({"application_name": "linkis-cg-engineconn", "instance": format!("host:{}", 20000 + self.random(40))});
                call(
                    "AdminService",
                    "AdoptTicket",
                    json!({"ticket_id": id, "em": em.json(), "user": self.user(), "creator": "IDE",
                    "engine_type": "spark-3.2.1", "engine": engine, "used": self.amounts(), "return_counters": self.chance(30)}),
                )
            }
            12 => {
                for number in (0..self.tickets.len()).rev() {
                    if self.tickets[number].em == em.json() {
                        let id = self.tickets.remove(number).id;
                        self.ended.push(id);
                    }
                }
                let epoch = if self.random(4) == 0 { em.epoch } else { 0 };
                self.ems[index].registered = false;
                self.push("UsageService", "GetEm", json!({"em": em.json()}));
                self.register(index, false);
                call("ResourceManagerService", "Unregister", json!({"em": em.json(), "epoch": epoch}))
            }
            13 => {
                self.register(index, false);
                self.next.pop_front().unwrap()
            }
            14 | 15 => self.limit(),
            16 => {
                let replaced = json!({"dry_run": self.chance(60), "reason": "a plan", "limits": [
                    {"each": ["user"], "max": {"instances": 8 + self.random(3), "cores": 40}},
                    {"labels": {"creator": "IDE"}, "each": ["user"], "max": {"memory": 30 * GB}},
                    {"each": ["zone"], "max": {"cores": 60}, "mode": 2},
                    {"labels": {"user": "user3"}, "max": {"instances": 5}}]});
                call("LimitService", "ReplaceLimits", replaced)
            }
            17 => {
                let required = if self.random(4) == 0 { json!(["engine_type"]) } else { json!([]) };
                call(
                    "LimitService",
                    "SetPolicy",
                    json!({"policy": {"em_application_name": KIND, "checks": [1, 2, 3],
                    "required_labels": required, "placement": 1 + self.random(2), "em_new_after": "0s"}}),
                )
            }
            18 | 19 => self.provider(),
            _ => call("ResourceManagerService", "Unregister", json!({"em": em.json(), "epoch": em.epoch + LATER})),
        }
    }

    pub(super) fn limit(&mut self) -> Action {
        let (labels, each) = self
            .pick(&[
                (json!({}), json!(["user"])),
                (json!({"user": "user1"}), json!([])),
                (json!({"creator": "notebook"}), json!([])),
                (json!({}), json!(["creator", "user"])),
                (json!({"engine_family": "spark"}), json!([])),
                (json!({"creator": "IDE"}), json!(["user"])),
                (json!({}), json!(["queue"])),
            ])
            .unwrap();
        let max = if each == json!(["queue"]) {
            json!({"queue_cores": 20})
        } else {
            json!({"instances": 5 + self.random(6)})
        };
        let mut limit = json!({"labels": labels, "each": each, "max": max});
        if self.chance(25) {
            limit["mode"] = json!(1 + self.random(3));
        }
        if self.chance(10) {
            limit["max_text"] = json!({"memory": "20g"});
        }
        let mut body = json!({"limit": limit});
        let etags = self.etags.clone();
        if self.chance(20) {
            body["expected_etag"] = self.pick(&etags).unwrap_or(json!(""));
        }
        let method = if self.random(4) == 0 { "DeleteLimit" } else { "SetLimit" };
        if self.chance(50) {
            self.push("LimitService", "ListLimits", json!({}));
        }
        Action::Call(Wanted::new("LimitService", method, body))
    }

    pub(super) fn provider(&mut self) -> Action {
        let name = format!("cluster{}", self.random(3));
        let call = |method, body| Action::Call(Wanted::new("ExternalResourceService", method, body));
        match self.random(9) {
            7 => call("GetQueue", json!({"provider": {"name": name}, "queue_name": "default"})),
            8 => {
                let etags = json!({"expected_etag": "none"});
                let mut body = json!({"provider": {"resource_type": "Yarn", "name": name, "labels": {"yarnCluster": name}, "config": "{\"rmWebAddress\":\"http://127.0.0.1:1\"}"}});
                if self.random(4) == 0 {
                    body["expected_etag"] = etags["expected_etag"].clone();
                }
                if self.random(4) == 0 {
                    body["provider"]["labels"] = json!({"yarnCluster": "cluster0"});
                }
                call("PutProvider", body)
            }
            0 => call("ListProviders", json!({})),
            1 => call("DeleteProvider", json!({"resource_type": "Yarn", "name": name})),
            2 => call("GetQueue", json!({"provider": {"name": "none"}, "queue_name": "default"})),
            3 => call("ListQueues", json!({"provider": {"name": "none"}})),
            4 => call("ListApplications", json!({"provider": {"resource_type": "Kubernetes", "name": "none"}})),
            // No host is allowed, so the provider is refused.
            5 => call(
                "PutProvider",
                json!({"provider": {"resource_type": "Yarn", "name": name, "config": "{\"rmWebAddress\":\"http://127.0.0.1:1\"}"}}),
            ),
            _ => call(
                "PutProvider",
                json!({"provider": {"resource_type": "Yarn", "name": name, "config": "{\"unknown\":1}"}}),
            ),
        }
    }
}
