//! Generator of the recorded calls: random by a fixed seed, and guided by the replies. Caller: `record`; a replay needs no generator.
//!
//! The name of a chapter selects the weights of the calls. A call in progress is known to the generator as waiting, so that later calls
//! can cancel it or free its capacity.
//!
//! - `requests`, `waiters`, `operators`, `queues`, `reads`, `roles`: calls of one kind each.

mod operators;
mod queues;
mod reads;
mod requests;
mod roles;
mod waiters;

pub use roles::tokens;

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use base64::Engine as _;
use prost::Message as _;
use prost_reflect::{DynamicMessage, MessageDescriptor};
use serde_json::{Value, json};
use tonic::Status;

use crate::{cluster::ADDRESS, ids::LATER};

/// Names of the chapters. The index of a chapter is its seed.
pub const CHAPTERS: &[&str] =
    &["plain", "limits", "waiting", "reports", "operators", "roles", "external", "malformed", "mixed", "yarn"];

const GB: i64 = 1 << 30;
const KIND: &str = "linkis-cg-engineconnmanager";

pub fn arguments(chapter: &str) -> Vec<String> {
    let mut arguments = vec!["--em-silent-after", "1h", "--em-lost-after", "3h", "--max-wait", "30m"];
    if chapter == "external" {
        // No server listens there.
        arguments.extend(["--external-hosts", "127.0.0.1:1"]);
    }
    if chapter == "yarn" {
        arguments.extend(["--external-hosts", ADDRESS]);
    }
    arguments.into_iter().map(str::to_owned).collect()
}

/// Next step of a recording.
pub enum Action {
    Call(Wanted),
    Change(&'static str, Vec<String>),
    Cancel(u32),
    /// Waits for the reply to the last call.
    Await,
}

/// A call to make.
#[derive(Clone)]
pub struct Wanted {
    pub service: &'static str,
    pub method: &'static str,
    pub body: Value,
    /// Bytes that are no message; sent instead of the body.
    pub raw: Option<Vec<u8>>,
    pub token: u32,
    pub timeout: u32,
    /// Whether the call may wait in the queue.
    pub waits: bool,
    /// Time for which the reply must stay equal before it is recorded; `None` records the first reply.
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
    is_unhealthy: bool,
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
    /// State of the external cluster.
    cluster: u64,
}

const USERS: u64 = 10;

/// Number of the health in reports.
const UNHEALTHY: u64 = 3;

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
            cluster: 0,
        };
        // The age of an EM differs between a recording and a replay.
        for kind in [KIND, "linkis-cg-gpu", "linkis-cg-solo"] {
            let policy = json!({"em_application_name": kind, "checks": [1, 2, 3], "em_new_after": "0s"});
            generator.push("LimitService", "SetPolicy", json!({"policy": policy}));
        }
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
        if chapter == "yarn" {
            generator.put_cluster();
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

    /// Pushes the registration of an EM and its first report, which states a load, so that no two EMs are equal.
    fn register(&mut self, index: usize, first: bool) {
        let grown = if first { 0 } else { self.random(3) as i64 };
        let chapter = self.chapter;
        let em = &mut self.ems[index];
        em.registered = true;
        em.sequence = 0;
        let total = match em.kind {
            "linkis-cg-gpu" => json!({"special": {"resources": {"gpu_milli": 8000, "slots": 12}}}),
            _ if matches!(chapter, "waiting" | "mixed") => {
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
        let epoch = if self.random(25) == 0 { em.epoch + LATER } else { em.epoch };
        let sequence = match self.random(20) {
            0 => (em.sequence - 1).max(1),
            1 => 1,
            _ => em.sequence,
        };
        let body = json!({"em": em.json(), "epoch": epoch, "sequence": sequence, "health": health,
            "load": {"cpu_permille": (em.index % 8) * 100 + 50}, "ticket_ids": base64(&ids), "observed": observed});
        Wanted::new("ResourceManagerService", "Heartbeat", body)
    }

    /// Returns the next step.
    pub fn next(&mut self) -> Action {
        let mut action = self.step();
        // Requests that are woken together are granted in any order.
        if self.open.len() > 1 && self.wakes_several(&action) {
            self.next.push_front(action);
            let (call, _) = self.open.pop_last().expect("two calls wait");
            return Action::Cancel(call);
        }
        if self.chapter == "roles"
            && let Action::Call(wanted) = &mut action
        {
            wanted.token = self.token_for(wanted);
        }
        action
    }

    /// Whether a step can wake requests that wait for different keys.
    fn wakes_several(&self, action: &Action) -> bool {
        match action {
            Action::Call(wanted) => match wanted.method {
                "Resume" | "ReleaseHold" | "Register" | "SetLimit" | "DeleteLimit" | "ReplaceLimits" | "SetPolicy"
                | "DeletePolicy" => true,
                "Heartbeat" => self.ems.iter().any(|em| em.is_unhealthy && wanted.body["em"] == em.json()),
                _ => false,
            },
            Action::Change(name, _) => matches!(*name, "expire_hold" | "cluster_shows"),
            _ => false,
        }
    }

    fn step(&mut self) -> Action {
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
        let (open_max, for_waiters) = match self.chapter {
            "yarn" => (9, 25),
            "waiting" | "mixed" => (7, 20),
            _ => (5, 8),
        };
        if self.open.len() > open_max {
            let call = *self.open.keys().next().unwrap();
            self.open.remove(&call);
            return Action::Cancel(call);
        }
        if !self.open.is_empty() && self.chance(for_waiters) {
            return self.for_a_waiter();
        }
        if self.chapter == "yarn" && self.chance(6) {
            return self.cluster();
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
            let health = if self.random(12) == 0 { UNHEALTHY } else { 1 + self.random(2) };
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

    /// Processes the reply to a call.
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
            "Heartbeat" => {
                if let Some(em) = self.ems.iter_mut().find(|em| em.json() == body["em"]) {
                    em.is_unhealthy = body["health"] == UNHEALTHY;
                }
            }
            "RequestResource" if !wanted.is_dry() => {
                let available = &output["available"];
                if let Some(id) = available["ticket_id"].as_str() {
                    self.granted(id, available, wanted);
                }
            }
            "ResourceInited" => {
                if let Some(ticket) = self.tickets.iter_mut().find(|ticket| body["ticket_id"] == ticket.id) {
                    ticket.engine = Some(body["engine"].clone());
                    if self.chapter == "yarn" && body["used"].is_object() {
                        ticket.resource = body["used"].clone();
                    }
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
            "ListEms" | "ListTickets" | "ListWaiting" | "ListActions" => {
                if let Some(token) = output["next_page_token"].as_str().filter(|token| !token.is_empty()) {
                    let mut next = body.clone();
                    next["page_token"] = json!(token);
                    self.pages.insert(wanted.method, next);
                }
            }
            _ => {}
        }
    }

    fn granted(&mut self, id: &str, available: &Value, wanted: &Wanted) {
        if self.tickets.iter().all(|ticket| ticket.id != id) {
            let user = wanted.body["user"].as_str().unwrap_or_default().to_owned();
            let mut resource = wanted.body["resource"].clone();
            if let Some(queue) = available["queue_name"].as_str().filter(|queue| !queue.is_empty()) {
                resource["driver_and_yarn"]["yarn"]["queue_name"] = json!(queue);
            }
            self.tickets.push(Ticket { id: id.to_owned(), user, em: available["em"].clone(), resource, engine: None });
        }
    }

    /// Processes that a call waits.
    pub fn waits(&mut self, call: u32, wanted: &Wanted) {
        self.open.insert(call, wanted.clone());
    }

    /// Processes the reply to a call that waited: the id of a granted ticket, and the grant.
    pub fn arrived(&mut self, call: u32, id: Option<&str>, available: &Value) {
        if let (Some(wanted), Some(id)) = (self.open.remove(&call), id) {
            self.granted(id, available, &wanted);
        }
    }
}

impl Em {
    fn at(kind: &'static str, index: i64) -> Self {
        Self {
            kind,
            host: format!("em{index}:9102"),
            index,
            epoch: 0,
            sequence: 0,
            registered: false,
            is_unhealthy: false,
        }
    }
}
