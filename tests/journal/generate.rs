//! The calls of a recording, by a seeded generator that learns from the answers. Replaying needs none of it.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use base64::Engine as _;
use prost::Message as _;
use prost_reflect::{DynamicMessage, MessageDescriptor};
use serde_json::{Value, json};
use tonic::Status;

/// The token with which the journal looks at the waiting requests.
pub const ADMIN: u32 = 0;

/// The chapters, each with a seed by its place; the name decides the weights.
pub const CHAPTERS: &[&str] =
    &["plain", "limits", "waiting", "reports", "operators", "labels", "external", "malformed", "crowded", "mixed"];

const GB: i64 = 1 << 30;
const KIND: &str = "linkis-cg-engineconnmanager";

pub fn arguments(chapter: &str) -> Vec<String> {
    let mut arguments = vec!["--em-silent-after", "1h", "--em-lost-after", "3h", "--max-wait", "30m"];
    if chapter == "external" {
        // Where nothing listens.
        arguments.extend(["--external-hosts", "127.0.0.1:1"]);
    }
    arguments.into_iter().map(str::to_owned).collect()
}

/// The next step of a recording.
pub enum Action {
    Call(Wanted),
    Change(&'static str, Vec<String>),
    Cancel(u32),
}

/// A call to make.
#[derive(Clone)]
pub struct Wanted {
    pub service: &'static str,
    pub method: &'static str,
    pub body: Value,
    /// Bytes that are no message, instead of the body.
    pub raw: Option<Vec<u8>>,
    pub token: u32,
    pub timeout: u32,
    /// Whether it may wait in the queue.
    pub waits: bool,
    /// How long the answer has to stay the same until it is recorded.
    pub late: Option<Duration>,
}

impl Wanted {
    fn new(service: &'static str, method: &'static str, body: Value) -> Self {
        Self { service, method, body, raw: None, token: 0, timeout: 0, waits: false, late: None }
    }

    pub fn path(&self) -> String {
        format!("/linkis.rm.v1.{}/{}", self.service, self.method)
    }

    pub fn is_dry(&self) -> bool {
        self.body["dry_run"] == true
    }

    pub fn bytes(&self, descriptor: &MessageDescriptor) -> Vec<u8> {
        if let Some(raw) = &self.raw {
            return raw.clone();
        }
        let message = DynamicMessage::deserialize(descriptor.clone(), self.body.clone());
        message.unwrap_or_else(|error| panic!("{}: {error}: {}", self.method, self.body)).encode_to_vec()
    }
}

#[derive(Clone)]
struct Em {
    kind: &'static str,
    host: String,
    index: i64,
    epoch: i64,
    sequence: i64,
    registered: bool,
}

impl Em {
    fn json(&self) -> Value {
        json!({"application_name": self.kind, "instance": self.host})
    }
}

#[derive(Clone)]
struct Ticket {
    id: String,
    user: String,
    em: Value,
    resource: Value,
    engine: Option<Value>,
}

pub struct Generator {
    random: u64,
    chapter: &'static str,
    ems: Vec<Em>,
    tickets: Vec<Ticket>,
    ended: Vec<String>,
    open: BTreeMap<u32, Wanted>,
    next: VecDeque<Action>,
    requests: u64,
    pages: BTreeMap<&'static str, Value>,
    etags: Vec<Value>,
    position: Option<Value>,
    calls: usize,
}

const USERS: u64 = 10;

impl Generator {
    pub fn new(chapter: &'static str) -> Self {
        let seed = CHAPTERS.iter().position(|name| *name == chapter).unwrap_or_default() as u64;
        let mut ems: Vec<Em> = (0..8).map(|index| Em::at(KIND, index)).collect();
        ems.push(Em::at("linkis-cg-gpu", 8));
        ems.push(Em::at("linkis-cg-solo", 9));
        let mut generator = Self {
            random: 0x9e37_79b9_7f4a_7c15 ^ (seed + 1),
            chapter,
            ems,
            tickets: Vec::new(),
            ended: Vec::new(),
            open: BTreeMap::new(),
            next: VecDeque::new(),
            requests: 0,
            pages: BTreeMap::new(),
            etags: Vec::new(),
            position: None,
            calls: 0,
        };
        for index in 0..generator.ems.len() {
            generator.register(index, true);
        }
        for (labels, each, max) in [
            (json!({}), json!(["user"]), json!({"instances": 9, "cores": 40})),
            (json!({"creator": "IDE"}), json!(["user"]), json!({"memory": 30 * GB})),
            (json!({"user": "user3"}), json!([]), json!({"instances": 5})),
        ] {
            generator.push("LimitService", "SetLimit", json!({"limit": {"labels": labels, "each": each, "max": max}}));
        }
        generator
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.random(100) < percent
    }

    fn pick<T: Clone>(&mut self, of: &[T]) -> Option<T> {
        (!of.is_empty()).then(|| of[self.random(of.len() as u64) as usize].clone())
    }

    fn push(&mut self, service: &'static str, method: &'static str, body: Value) {
        self.next.push_back(Action::Call(Wanted::new(service, method, body)));
    }

    /// A registration, and the first report, which states a load, so that no two EMs are alike.
    fn register(&mut self, index: usize, first: bool) {
        let grown = if first { 0 } else { self.random(3) as i64 };
        let chapter = self.chapter;
        let em = &mut self.ems[index];
        em.registered = true;
        em.sequence = 0;
        let total = match em.kind {
            "linkis-cg-gpu" => json!({"special": {"resources": {"gpu_milli": 8000, "slots": 12}}}),
            _ if matches!(chapter, "waiting" | "crowded" | "mixed") => {
                json!({"load_instance": {"memory": (12 + em.index + grown) * GB, "cores": 9 + em.index + grown, "instances": 4}})
            }
            _ => {
                json!({"load_instance": {"memory": (16 + em.index + grown) * GB, "cores": 14 + em.index + grown, "instances": 9}})
            }
        };
        let mut body = json!({"em": em.json(), "total": total, "labels": {"zone": format!("z{}", em.index % 3), "host": format!("h{}", em.index)}});
        if em.index == 6 {
            body["reserved_labels"] = json!({"team": "blue"});
        }
        if em.kind != "linkis-cg-gpu" {
            body["protected_resource"] = json!({"load_instance": {"memory": GB, "cores": 1, "instances": 1}});
        }
        self.push("ResourceManagerService", "Register", body);
        self.next.push_back(Action::Call(Wanted::new("ResourceManagerService", "Heartbeat", json!({"first": index}))));
    }

    fn heartbeat(&mut self, index: usize, health: u64) -> Wanted {
        let em = &mut self.ems[index];
        em.sequence += 1;
        let em = em.clone();
        let here: Vec<Ticket> =
            self.tickets.iter().filter(|ticket| ticket.em == em.json() && ticket.engine.is_some()).cloned().collect();
        let mut ids = Vec::new();
        for ticket in &here {
            if self.random(40) > 0 {
                ids.extend(uuid::Uuid::parse_str(&ticket.id).unwrap().as_bytes());
            }
        }
        if self.chance(15)
            && let Some(ended) = self.ended.last()
        {
            ids.extend(uuid::Uuid::parse_str(ended).unwrap().as_bytes());
        }
        let base64 = |bytes: &[u8]| base64::engine::general_purpose::STANDARD.encode(bytes);
        let observed: Vec<Value> = here
            .iter()
            .take(2)
            .map(|ticket| json!({"ticket_id": base64(uuid::Uuid::parse_str(&ticket.id).unwrap().as_bytes()), "resource": ticket.resource}))
            .collect();
        let epoch = if self.random(25) == 0 { em.epoch + (1 << 40) } else { em.epoch };
        let sequence = match self.random(20) {
            0 => (em.sequence - 1).max(1),
            1 => 1,
            _ => em.sequence,
        };
        let body = json!({"em": em.json(), "epoch": epoch, "sequence": sequence, "health": health,
            "load": {"cpu_permille": (em.index % 8) * 100 + 50}, "ticket_ids": base64(&ids), "observed": observed});
        Wanted::new("ResourceManagerService", "Heartbeat", body)
    }

    /// The next call or change.
    pub fn next(&mut self) -> Action {
        if let Some(action) = self.next.pop_front() {
            return match action {
                Action::Call(wanted) if wanted.body.get("first").is_some() => {
                    let index = wanted.body["first"].as_u64().unwrap() as usize;
                    self.ems[index].sequence += 1;
                    let em = self.ems[index].clone();
                    let body = json!({"em": em.json(), "epoch": em.epoch, "sequence": em.sequence, "health": 1,
                        "load": {"cpu_permille": (em.index % 8) * 100 + 50}});
                    Action::Call(Wanted::new("ResourceManagerService", "Heartbeat", body))
                }
                action => action,
            };
        }
        self.calls += 1;
        if self.calls % 470 == 460 {
            return self.late();
        }
        if self.open.len() > 5 {
            let call = *self.open.keys().next().unwrap();
            self.open.remove(&call);
            return Action::Cancel(call);
        }
        let full = self.tickets.len() as u64;
        let operators = if matches!(self.chapter, "operators" | "mixed" | "limits" | "external") { 16 } else { 5 };
        let reads = if self.chapter == "plain" { 25 } else { 16 };
        let roll = self.random(100);
        if roll < operators {
            return self.operator();
        }
        if roll < operators + reads {
            return self.read();
        }
        let malformed = if self.chapter == "malformed" { 25 } else { 4 };
        if roll < operators + reads + malformed {
            return Action::Call(self.malformed());
        }
        let reports = if self.chapter == "reports" { 14 } else { 4 };
        if roll < operators + reads + malformed + reports {
            let index = self.random(10) as usize;
            let health = if self.random(12) == 0 { 3 } else { 1 + self.random(2) };
            return Action::Call(self.heartbeat(index, health));
        }
        if self.random(150) < full {
            return self.end();
        }
        match self.random(10) {
            0..=4 => Action::Call(self.request()),
            5..=7 => self.inited(),
            8 => self.reported(),
            _ => self.end(),
        }
    }

    fn user(&mut self) -> String {
        // A few users have most of the requests.
        let few = self.chance(50);
        let user = self.random(if few { 3 } else { USERS });
        format!("user{user}")
    }

    fn amounts(&mut self) -> Value {
        let large = self.random(12) == 0;
        let memory = if large { 20 + self.random(40) } else { 1 + self.random(6) };
        json!({"load_instance": {"memory": memory as i64 * GB, "cores": 1 + self.random(4), "instances": 1}})
    }

    fn request(&mut self) -> Wanted {
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
        if self.chance(30) {
            // A request id that was used before comes with the same body or another.
            self.requests += 1;
            let number = if self.chance(25) { self.random(self.requests) } else { self.requests };
            body["request_id"] = json!(format!("request-{number}"));
        }
        let waiting = match self.chapter {
            "waiting" => 60,
            "crowded" | "mixed" => 30,
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

    fn inited(&mut self) -> Action {
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
        Action::Call(Wanted::new("ResourceManagerService", "ResourceInited", body))
    }

    fn epoch_of(&self, em: &Value) -> i64 {
        self.ems.iter().find(|known| known.json() == *em).map_or(0, |em| em.epoch)
    }

    fn reported(&mut self) -> Action {
        let tickets = self.tickets.clone();
        let Some(ticket) = self.pick(&tickets) else { return Action::Call(self.request()) };
        let used = if self.chance(40) { ticket.resource.clone() } else { self.amounts() };
        let mut body = json!({"ticket_id": ticket.id, "user": ticket.user, "em": ticket.em, "used": used});
        if self.chance(20) {
            body["return_counters"] = json!(true);
        }
        Action::Call(Wanted::new("ResourceManagerService", "ResourceReported", body))
    }

    fn end(&mut self) -> Action {
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

    fn gone(&mut self, id: &str) {
        self.tickets.retain(|ticket| ticket.id != id);
        self.ended.push(id.to_owned());
    }

    fn operator(&mut self) -> Action {
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
                // An EM that is held, calls that come to their deadlines, and the end of the hold.
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
                    "required_labels": required, "placement": 1 + self.random(2)}}),
                )
            }
            18 | 19 => self.provider(),
            _ => call("ResourceManagerService", "Unregister", json!({"em": em.json(), "epoch": em.epoch + (1 << 40)})),
        }
    }

    fn limit(&mut self) -> Action {
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

    fn provider(&mut self) -> Action {
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
            // No host may be asked: it is refused.
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

    fn read(&mut self) -> Action {
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
            10 => paged(self, "ListScopes", json!({})),
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

    /// Reads of what periodic tasks write.
    fn late(&mut self) -> Action {
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

    fn malformed(&mut self) -> Wanted {
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

    /// A call was answered.
    pub fn answered(&mut self, _call: u32, wanted: &Wanted, output: Option<&Value>, _error: Option<&Status>) {
        let Some(output) = output else { return };
        let body = &wanted.body;
        match wanted.method {
            "Register" => {
                let epoch = output["em"]["epoch"].as_i64().unwrap_or_default();
                if let Some(em) = self.ems.iter_mut().find(|em| em.json() == body["em"]) {
                    (em.epoch, em.registered) = (epoch, true);
                }
            }
            "RequestResource" if !wanted.is_dry() => {
                let available = &output["available"];
                if let Some(id) = available["ticket_id"].as_str() {
                    self.granted(id, available["em"].clone(), wanted);
                }
            }
            "ResourceInited" => {
                if let Some(ticket) = self.tickets.iter_mut().find(|ticket| body["ticket_id"] == ticket.id) {
                    ticket.engine = Some(body["engine"].clone());
                }
            }
            "AdoptTicket" => {
                let id = body["ticket_id"].as_str().unwrap_or_default().to_owned();
                if self.tickets.iter().all(|ticket| ticket.id != id) {
                    let user = body["user"].as_str().unwrap_or_default().to_owned();
                    let engine = Some(body["engine"].clone());
                    self.tickets.push(Ticket {
                        id,
                        user,
                        em: body["em"].clone(),
                        resource: body["used"].clone(),
                        engine,
                    });
                }
            }
            "ResourceReleased" | "ForceRelease" => {
                let id = body["ticket_id"].as_str().unwrap_or_default().to_owned();
                self.gone(&id);
            }
            "ListLimits" => {
                self.etags = output["limits"]
                    .as_array()
                    .map(|limits| limits.iter().map(|limit| limit["etag"].clone()).collect())
                    .unwrap_or_default()
            }
            "FollowActions" => self.position = Some(output["position"].clone()),
            "ListEms" | "ListTickets" | "ListScopes" | "ListWaiting" | "ListActions" => {
                if let Some(token) = output["next_page_token"].as_str().filter(|token| !token.is_empty()) {
                    let mut next = body.clone();
                    next["page_token"] = json!(token);
                    self.pages.insert(wanted.method, next);
                }
            }
            _ => {}
        }
    }

    fn granted(&mut self, id: &str, em: Value, wanted: &Wanted) {
        if self.tickets.iter().all(|ticket| ticket.id != id) {
            let user = wanted.body["user"].as_str().unwrap_or_default().to_owned();
            self.tickets.push(Ticket {
                id: id.to_owned(),
                user,
                em,
                resource: wanted.body["resource"].clone(),
                engine: None,
            });
        }
    }

    /// A call waits.
    pub fn waits(&mut self, call: u32, wanted: &Wanted) {
        self.open.insert(call, wanted.clone());
    }

    /// A call that waited was answered.
    pub fn arrived(&mut self, call: u32, granted: bool, id: Option<&str>) {
        let Some(wanted) = self.open.remove(&call) else { return };
        if let (true, Some(id)) = (granted, id) {
            let solo = json!({"application_name": "linkis-cg-solo", "instance": "em9:9102"});
            let em = wanted.body.get("em").cloned().unwrap_or(solo);
            self.granted(id, em, &wanted);
        }
    }
}

impl Em {
    fn at(kind: &'static str, index: i64) -> Self {
        Self { kind, host: format!("em{index}:9102"), index, epoch: 0, sequence: 0, registered: false }
    }
}
