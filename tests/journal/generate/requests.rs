//! Requests for resources, and the calls of a ticket until its end.

use serde_json::{Value, json};

use super::{Action, GB, Generator, KIND, Ticket, USERS, Wanted};

impl Generator {
    pub(super) fn user(&mut self) -> String {
        // A few users make most of the requests.
        let few = self.chance(50);
        let user = self.random(if few { 3 } else { USERS });
        format!("user{user}")
    }

    pub(super) fn amounts(&mut self) -> Value {
        let large = self.random(12) == 0;
        let memory = if large { 20 + self.random(40) } else { 1 + self.random(6) };
        json!({"load_instance": {"memory": memory as i64 * GB, "cores": 1 + self.random(4), "instances": 1}})
    }

    pub(super) fn request(&mut self) -> Wanted {
        let user = self.user();
        let creator = self.pick(&["IDE", "IDE", "notebook", "scheduler"]).unwrap();
        let engine = self.pick(&["spark-3.2.1", "spark-3.2.1", "hive-2.3.3", "python-3", ""]).unwrap();
        let mut body = json!({"user": user, "creator": creator, "engine_type": engine, "resource": self.amounts()});
        let named = self.chance(60);
        let index = self.random(10) as usize;
        let em = self.ems[index].clone();
        if named {
            body["em"] = em.json();
            if em.kind == "linkis-cg-gpu" && self.random(5) > 0 {
                body["resource"] =
                    json!({"special": {"resources": {"gpu_milli": 500 * (1 + self.random(4)), "slots": 1}}});
            }
            if em.index == 6 && self.chance(70) {
                body["labels"] = json!({"team": "blue"});
            }
        } else {
            let kind = self.random(12);
            body["em_application_name"] = json!(if kind == 0 { "linkis-cg-solo" } else { KIND });
            match self.random(8) {
                0 => body["required_labels"] = json!({"zone": format!("z{}", self.random(4))}),
                1 => {
                    body["preferred_labels"] =
                        json!([{"key": "zone", "value": format!("z{}", self.random(3)), "weight": 10}])
                }
                2 => body["placement"] = json!(2),
                3 => body["labels"] = json!({"team": "blue"}),
                _ => {}
            }
        }
        match self.random(24) {
            0 => body["dry_run"] = json!(true),
            1 | 2 => body["return_counters"] = json!(true),
            3 => body["caps"] = json!([{"labels": ["user"], "max": {"instances": 1 + self.random(6)}}]),
            4 => body["caps"] = json!([{"labels": ["zone"], "max": {"instances": 2}}]),
            5 => body["lock_ttl"] = json!("120s"),
            6 => body["required_labels"] = json!({"zone": "z1", "host": format!("h{}", em.index)}),
            7 => body["labels"] = json!({"project": format!("p{}", self.random(3))}),
            8 => {
                body["resource"] = json!({"driver_and_yarn": {"load_instance": {"memory": GB, "cores": 1, "instances": 1},
                "yarn": {"queue_name": format!("q{}", self.random(3)), "queue_memory": 4 * GB, "queue_cores": 4, "queue_instances": 1}}})
            }
            9 => {
                body["resource"] = json!({"driver_and_kubernetes": {"load_instance": {"memory": GB, "cores": 1, "instances": 1},
                "kubernetes": {"namespace": "ns", "memory": 2 * GB, "millicores": 1500}}})
            }
            10 => {
                body["resource"] = json!({"json": {"resource_type": "LoadInstance", "document": "{\"memory\":1073741824,\"cores\":1,\"instances\":1}"}})
            }
            11 => body["priority"] = json!(1),
            12 => body["resource"] = json!({"memory": {"memory": GB}}),
            13 => body["resource"] = json!({"special": {"resources": {"unknown": 1}}}),
            _ => {}
        }
        if self.chapter == "yarn" && self.chance(70) {
            self.name_queue(&mut body);
        }
        if self.chance(30) {
            // Repeats an earlier request id, with an equal or another body.
            self.requests += 1;
            let number = if self.chance(25) { self.random(self.requests) } else { self.requests };
            body["request_id"] = json!(format!("request-{number}"));
        }
        let waiting = match self.chapter {
            "waiting" => 60,
            "mixed" | "yarn" => 30,
            _ => 10,
        };
        let mut wanted = Wanted::new("ResourceManagerService", "RequestResource", body);
        if wanted.body["dry_run"] != true && self.chance(waiting) {
            if self.chance(20) {
                wanted.body["wait_timeout"] = json!("0.040s");
            } else if named || wanted.body["em_application_name"] == "linkis-cg-solo" {
                wanted.body["wait_timeout"] = json!("1500s");
                wanted.waits = true;
            }
        }
        wanted
    }

    pub(super) fn inited(&mut self) -> Action {
        let locked: Vec<Ticket> = self.tickets.iter().filter(|ticket| ticket.engine.is_none()).cloned().collect();
        let again = self.random(12) == 0;
        let from = if again { self.tickets.clone() } else { locked };
        let Some(ticket) = self.pick(&from) else { return Action::Call(self.request()) };
        let number = self.random(60);
        let engine =
            json!({"application_name": "linkis-cg-engineconn", "instance": format!("host:{}", 30000 + number)});
        let mut body = json!({"ticket_id": ticket.id, "user": ticket.user, "em": ticket.em, "engine": engine});
        match self.random(10) {
            0 => body["used"] = self.amounts(),
            1 => body["return_counters"] = json!(true),
            2 => body["used"] = ticket.resource.clone(),
            3 => body["epoch"] = json!(self.epoch_of(&ticket.em)),
            4 if self.chance(30) => body["user"] = json!("user99"),
            5 if self.chance(30) => body["epoch"] = json!(1i64 << 50),
            _ => {}
        }
        if self.chapter == "yarn"
            && let Some(used) = self.used_in_queue(&ticket.resource)
        {
            body["used"] = used;
        }
        Action::Call(Wanted::new("ResourceManagerService", "ResourceInited", body))
    }

    pub(super) fn epoch_of(&self, em: &Value) -> i64 {
        self.ems.iter().find(|known| known.json() == *em).map_or(0, |em| em.epoch)
    }

    pub(super) fn reported(&mut self) -> Action {
        let tickets = self.tickets.clone();
        let Some(ticket) = self.pick(&tickets) else { return Action::Call(self.request()) };
        let mut used = if self.chance(40) { ticket.resource.clone() } else { self.amounts() };
        if self.chapter == "yarn" {
            used = self.used_in_queue(&ticket.resource).unwrap_or(used);
        }
        let mut body = json!({"ticket_id": ticket.id, "user": ticket.user, "em": ticket.em, "used": used});
        if self.chance(20) {
            body["return_counters"] = json!(true);
        }
        Action::Call(Wanted::new("ResourceManagerService", "ResourceReported", body))
    }

    pub(super) fn end(&mut self) -> Action {
        let tickets = self.tickets.clone();
        let Some(ticket) = self.pick(&tickets) else { return Action::Call(self.request()) };
        if ticket.engine.is_none() && self.random(14) == 0 {
            self.gone(&ticket.id);
            return Action::Change("expire_ticket", vec![ticket.id]);
        }
        let mut body = json!({"ticket_id": ticket.id});
        match self.random(8) {
            0 => body["user"] = json!(ticket.user),
            1 => body["em"] = ticket.em,
            2 => body["return_counters"] = json!(true),
            3 => {
                if let Some(ended) = self.ended.last() {
                    body["ticket_id"] = json!(ended);
                }
            }
            4 if self.chance(20) => body["user"] = json!("user99"),
            _ => {}
        }
        Action::Call(Wanted::new("ResourceManagerService", "ResourceReleased", body))
    }

    pub(super) fn gone(&mut self, id: &str) {
        self.tickets.retain(|ticket| ticket.id != id);
        self.ended.push(id.to_owned());
    }
}
