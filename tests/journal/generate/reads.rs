//! Calls that read, and malformed calls.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Action, Generator, Wanted};

impl Generator {
    pub(super) fn read(&mut self) -> Action {
        let index = self.random(10) as usize;
        let em = self.ems[index].json();
        let tickets = self.tickets.clone();
        let ticket = self.pick(&tickets);
        let ended = self.ended.last().cloned();
        let id = match self.random(4) {
            0 => ended,
            _ => ticket.as_ref().map(|ticket| ticket.id.clone()),
        };
        let id = id.unwrap_or_else(|| uuid::Uuid::nil().to_string());
        let user = self.user();
        let page_size = 1 + self.random(8);
        let paged = |generator: &mut Self, method: &'static str, mut body: Value| {
            let page = generator.pages.remove(method);
            if let Some(mut next) = page {
                std::mem::swap(&mut body, &mut next);
            } else {
                body["page_size"] = json!(page_size);
            }
            Wanted::new("UsageService", method, body)
        };
        let wanted = match self.random(20) {
            0 => Wanted::new("UsageService", "GetEm", json!({"em": em})),
            1 => Wanted::new(
                "UsageService",
                "BatchGetEms",
                json!({"ems": [em, {"application_name": "none", "instance": "none"}]}),
            ),
            2 => paged(self, "ListEms", json!({"labels": {"zone": "z1"}})),
            3 => paged(self, "ListEms", json!({"min_fullness_percent": 50})),
            4 | 5 => Wanted::new("UsageService", "GetTicket", json!({"ticket_id": id})),
            6 => {
                let engine = ticket.and_then(|ticket| ticket.engine);
                Wanted::new(
                    "UsageService",
                    "GetTicket",
                    json!({"engine": engine.unwrap_or(json!({"application_name": "a", "instance": "b"}))}),
                )
            }
            7 => Wanted::new(
                "UsageService",
                "BatchGetTickets",
                json!({"ticket_ids": [id, uuid::Uuid::nil().to_string()]}),
            ),
            8 => paged(self, "ListTickets", json!({"user": user})),
            9 => paged(self, "ListTickets", json!({"em": em, "state": "used"})),
            // One page: whether another follows also depends on counters of nothing, which tasks remove.
            10 => Wanted::new("UsageService", "ListScopes", json!({"page_size": 1000})),
            11 => Wanted::new("UsageService", "GetScope", json!({"labels": {"user": user}})),
            12 => Wanted::new(
                "UsageService",
                "GetScope",
                json!({"labels": if self.chance(50) { json!({"no": "such"}) } else { json!({"user": user, "creator": "IDE"}) }}),
            ),
            13 => paged(self, "ListWaiting", json!({})),
            14 => Wanted::new("UsageService", "ListWaiting", json!({"em": em})),
            15 => paged(self, "ListActions", json!({"user": user, "newest_first": true})),
            16 => Wanted::new("UsageService", "ListActions", json!({"ticket_id": id})),
            17 => Wanted::new("LimitService", "ListPolicies", json!({})),
            18 => Wanted::new("LimitService", "ListLimits", json!({"page_size": 3})),
            _ => Wanted::new("UsageService", "GetServerInfo", json!({})),
        };
        Action::Call(wanted)
    }

    /// Returns a call that reads results of periodic tasks.
    pub(super) fn late(&mut self) -> Action {
        let mut late = |method, body, millis| {
            let mut wanted = Wanted::new("UsageService", method, body);
            wanted.late = Some(Duration::from_millis(millis));
            self.next.push_back(Action::Call(wanted));
        };
        late("GetOverview", json!({}), 1500);
        late("Watch", json!({}), 1200);
        late("ListRefusals", json!({"page_size": 1000}), 2500);
        late("ListRefusals", json!({"user": "user1", "page_size": 1000}), 200);
        late("ListInstances", json!({}), 200);
        late("ListTasks", json!({}), 600);
        let hours = json!({"by": 1, "from_time": "2020-01-01T00:00:00Z", "to_time": "2020-01-02T00:00:00Z"});
        late("GetUsage", hours, 100);
        late("GetUsage", json!({}), 100);
        let position = self.position.clone();
        late("FollowActions", json!({"position": position.unwrap_or(json!(""))}), 600);
        late("FollowActions", json!({"position": "no position"}), 200);
        self.next.pop_front().unwrap()
    }

    pub(super) fn malformed(&mut self) -> Wanted {
        let index = self.random(10) as usize;
        let em = self.ems[index].json();
        let tickets = self.tickets.clone();
        let id = self.pick(&tickets).map_or_else(String::new, |ticket| ticket.id);
        let rm = "ResourceManagerService";
        let long = "x".repeat(300);
        let engine = json!({"application_name": "a", "instance": "b"});
        match self.random(16) {
            0 => Wanted { raw: Some(vec![0xff, 0xff, 0xff]), ..Wanted::new(rm, "RequestResource", json!({})) },
            1 => Wanted { raw: Some(vec![0x12, 0x02, 0xff, 0xfe]), ..Wanted::new(rm, "RequestResource", json!({})) },
            2 => {
                Wanted::new(rm, "RequestResource", json!({"em": em, "user": "", "resource": {"memory": {"memory": 1}}}))
            }
            3 => Wanted::new(
                rm,
                "RequestResource",
                json!({"em": em, "user": long, "creator": "IDE", "resource": self.amounts()}),
            ),
            4 => Wanted::new(
                rm,
                "RequestResource",
                json!({"em": em, "user": "u", "creator": "IDE", "resource": {"load_instance": {"memory": -1}}}),
            ),
            5 => Wanted::new(rm, "RequestResource", json!({"em": em, "user": "u", "creator": "IDE"})),
            6 => Wanted::new(
                rm,
                "Register",
                json!({"em": em, "total": {"memory": {"memory": 5}}, "protected_resource": {"memory": {"memory": 6}}}),
            ),
            7 => Wanted::new(rm, "Register", json!({"em": em, "total": {"memory": {"memory": 5}}})),
            8 => Wanted::new(
                rm,
                "ResourceInited",
                json!({"ticket_id": "no uuid", "user": "u", "em": em, "engine": engine}),
            ),
            9 => Wanted::new(rm, "ResourceInited", json!({"ticket_id": id, "user": "u", "em": em})),
            10 => Wanted::new(rm, "Heartbeat", json!({"em": em, "epoch": 1, "sequence": 0})),
            11 => {
                Wanted::new("LimitService", "SetLimit", json!({"limit": {"each": ["user"], "max": {"instances": -1}}}))
            }
            12 => {
                Wanted::new("LimitService", "SetLimit", json!({"limit": {"each": ["user"], "max": {"queue_cores": 5}}}))
            }
            13 => {
                Wanted::new("AdminService", "Hold", json!({"em": em, "user": "u", "duration": "60s", "reason": "both"}))
            }
            14 => Wanted::new("UsageService", "ListTickets", json!({"page_token": "no token"})),
            _ => Wanted::new(
                "AdminService",
                "ForceRelease",
                json!({"ticket_id": uuid::Uuid::nil().to_string(), "reason": long}),
            ),
        }
    }
}
