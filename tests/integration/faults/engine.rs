//! Caller that requests resources and ends its engine in one of many ways.

use std::{
    env,
    time::{Duration, Instant},
};

use rm_client::{ResourceRequest, ResultResource, RmClient};
use rm_model::{
    cap::Cap,
    em::EmInstance,
    name::Labels,
    operation::{ConfirmTicket, Grant, ReleaseTicket, UpdateTicket},
    resource::{Dimension, Resource},
};

use super::{
    journal::{Answer, Life},
    queues,
    random::Random,
    workload::{ENGINE_TYPES, Hosts, RETRY, Shared, TENANT, TENANTS, is_alone, of_tenant, of_zone},
};
use crate::harness::*;

/// Time for which a grant stays locked.
const TTL: Duration = Duration::from_secs(3);

/// Maximum time to repeat a request without a known result.
const REPEAT_MAX: Duration = Duration::from_secs(30);

/// A late call of an EM that has registered again.
const OLDER: &str = "an older registration";

/// Returns the use of a grant in its queue; `None` if no reply named the queue.
fn of(request: &ResourceRequest, grant: &Grant, used: Resource, application_id: &str) -> Option<Resource> {
    let path = grant.queue.as_ref().map(|queue| queue.path.trim_start_matches("root."));
    let is_known = path.is_some() || request.queue_names.is_empty();
    is_known.then(|| queues::use_of(&request.resource, path, used, application_id))
}

/// Returns the name of a request in the summary, by whether its labels admit it to the EM.
fn kind(request: &ResourceRequest) -> &'static str {
    let is_let_in = request.em.as_ref().is_none_or(|em| may_go(request, em));
    if is_let_in { "request" } else { TURNED_AWAY }
}

const TURNED_AWAY: &str = "request to be turned away";

/// Whether a request may go to an EM, by the labels of both.
fn may_go(request: &ResourceRequest, on: &EmInstance) -> bool {
    let is_let_in = *on != em(Hosts::RESERVED) || request.labels == of_tenant(Some(TENANT)) || !is_alone();
    is_let_in && (request.selector.required == Labels::default() || Hosts::is_in_zone(on))
}

/// An engine that requests repeatedly.
pub struct Caller {
    shared: Shared,
    random: Random,
    number: usize,
    turn: usize,
}

/// Result of a request.
enum End {
    Granted(Grant),
    Refused,
    Unclear,
}

impl Caller {
    pub fn new(shared: Shared, random: Random, number: usize) -> Self {
        Self { shared, random, number, turn: 0 }
    }

    pub async fn run(mut self) {
        loop {
            let pause = self.random.millis(5, 80);
            if !self.shared.goes_on(pause).await {
                return;
            }
            self.turn += 1;
            let request = self.request();
            match self.random.between(0, 99) {
                0..10 => self.dry_run(request).await,
                10..20 => self.go_away(request).await,
                20..35 => self.ask_twice_at_once(request).await,
                _ => self.live(request).await,
            }
        }
    }

    /// A request of a user with this request alone, or sometimes of a user with others and a shared lock.
    fn request(&mut self) -> ResourceRequest {
        let user = match self.random.percent(25) {
            true => format!("shared{}", self.random.between(0, 4)),
            false => format!("caller{}-{}", self.number, self.turn),
        };
        let (memory, cores) = (self.random.between(1, 6), self.random.between(1, 4));
        let resource = match queues::are_kept() && self.random.percent(30) {
            true => queues::in_queue(&mut self.random, memory, cores),
            false => load(memory, cores, 1),
        };
        let queue_names = queues::names(&mut self.random, &resource);
        let em = Hosts::pick(&mut self.random);
        let creator = name(self.random.pick(["IDE", "notebook", "batch"]));
        let mut request = ResourceRequest::new(em, name(&user), creator, resource);
        if is_alone() {
            request.engine_type = self.random.pick(ENGINE_TYPES).to_owned();
            request.labels = of_tenant(self.random.pick(TENANTS));
            if self.random.percent(8) {
                request.selector.required = of_zone();
            }
        }
        let wait_timeout = match self.random.percent(35) {
            true => self.random.millis(50, 3000),
            false => Duration::ZERO,
        };
        let mut caps = Vec::new();
        if self.random.percent(20) {
            let keys = self.random.pick([&["creator"][..], &["creator", "user"]]).iter().map(|key| (*key).to_owned());
            caps.push(Cap { keys: keys.collect(), max: [(Dimension::Cores, self.random.between(2, 60))].into() });
        }
        let request_id = self.random.percent(60).then(|| format!("request{}-{}", self.number, self.turn));
        if request_id.is_some() && !user.starts_with("shared") {
            self.shared.journal.asks_one(&user);
        }
        ResourceRequest { lock_ttl: Some(TTL), wait_timeout, caps, request_id, queue_names, ..request }
    }

    async fn dry_run(&mut self, request: ResourceRequest) {
        let rm = self.shared.client(&mut self.random);
        let kind = if kind(&request) == TURNED_AWAY { TURNED_AWAY } else { "dry run" };
        let answer = self.shared.journal.call(kind, rm.dry_run(&request)).await;
        let is_fair = kind != TURNED_AWAY || !matches!(answer, Answer::Done(_));
        self.shared.journal.check(is_fair, || format!("{request:?} was let in: {answer:?}"));
    }

    /// Cancels the request while it is in progress, perhaps in a wait queue.
    async fn go_away(&mut self, request: ResourceRequest) {
        let rm = self.shared.client(&mut self.random);
        let patience = self.random.millis(1, 400);
        let call = self.shared.journal.call(kind(&request), rm.request_resource(&request));
        match tokio::time::timeout(patience, call).await {
            Ok(answer) => {
                if let End::Granted(grant) = self.answered(&request, answer) {
                    self.engine(&request, grant).await;
                }
            }
            Err(_) => {
                self.shared.journal.cancelled("request");
                self.shared.journal.asked(&request, true);
            }
        }
    }

    /// Repeats a request before its reply, as an impatient client.
    async fn ask_twice_at_once(&mut self, request: ResourceRequest) {
        if request.request_id.is_none() {
            return self.live(request).await;
        }
        let (first, second) = (self.shared.client(&mut self.random), self.shared.client(&mut self.random));
        let journal = &self.shared.journal;
        let kind = match kind(&request) {
            "request" => "request sent twice",
            kind => kind,
        };
        let answers = tokio::join!(
            journal.call(kind, first.request_resource(&request)),
            journal.call(kind, second.request_resource(&request))
        );
        let (first, second) = (self.answered(&request, answers.0), self.answered(&request, answers.1));
        match (first, second) {
            (End::Granted(grant), _) | (_, End::Granted(grant)) => self.engine(&request, grant).await,
            (End::Unclear, _) | (_, End::Unclear) => self.live(request).await,
            (End::Refused, End::Refused) => {}
        }
    }

    /// Repeats a request with a request id until it has a result. Then runs the engine.
    async fn live(&mut self, request: ResourceRequest) {
        let start = Instant::now();
        loop {
            let rm = self.shared.client(&mut self.random);
            let answer = self.shared.journal.call(kind(&request), rm.request_resource(&request)).await;
            match self.answered(&request, answer) {
                End::Granted(grant) => return self.engine(&request, grant).await,
                End::Refused => return,
                End::Unclear if request.request_id.is_none() || start.elapsed() > REPEAT_MAX => return,
                End::Unclear => tokio::time::sleep(RETRY).await,
            }
        }
    }

    /// Records the reply to a request.
    fn answered(&self, request: &ResourceRequest, answer: Answer<ResultResource>) -> End {
        let journal = &self.shared.journal;
        journal.asked(request, matches!(answer, Answer::Unclear));
        match answer {
            Answer::Done(ResultResource::Available(grant)) => {
                journal.granted(request, &grant);
                if request.em.as_ref().is_some_and(|em| *em != grant.em) {
                    journal.violation(format!("granted on another EM than was asked for: {grant:?}"));
                }
                let got = || format!("{request:?} was let in: {grant:?}");
                journal.check(may_go(request, &grant.em), got);
                End::Granted(grant)
            }
            Answer::Done(ResultResource::NotEnough(_)) | Answer::Rejected => End::Refused,
            Answer::Nothing | Answer::Unclear => End::Unclear,
        }
    }

    /// Runs an engine from its start to its end; some never start.
    async fn engine(&mut self, request: &ResourceRequest, grant: Grant) {
        self.random.pause(0, 150).await;
        if self.random.percent(20) && request.request_id.is_some() {
            self.repeat(request, &grant).await;
        }
        match self.random.between(0, 99) {
            // No further call: the ticket expires.
            0..15 => return,
            // Cancelled.
            15..25 => return self.release(request, &grant).await,
            _ => {}
        }
        if self.report_in(request, &grant).await {
            self.random.pause(0, 300).await;
            if self.random.percent(40) {
                self.report_use(request, &grant).await;
            }
            if self.shared.engines.is_reporting(&grant.em) && self.random.percent(20) {
                let note = |life: &mut Life| life.engine_gone = true;
                self.shared.journal.note(grant.ticket_id, "its engine died", note);
                self.shared.engines.remove(&grant.em, grant.ticket_id);
                return;
            }
        }
        self.release(request, &grant).await;
    }

    /// Repeats a granted request.
    async fn repeat(&mut self, request: &ResourceRequest, grant: &Grant) {
        let rm = self.shared.client(&mut self.random);
        let answer = self.shared.journal.call("request", rm.request_resource(request)).await;
        if let Answer::Done(answer) = answer {
            // A violation is reported once.
            let same = Grant { advisory_violations: vec![], queue: None, ..grant.clone() };
            let is_same = matches!(&answer, ResultResource::Available(again) if *again == same);
            self.shared.journal.check(is_same, || format!("{grant:?} was asked for again, and answered {answer:?}"));
        }
    }

    /// Confirms the engine with its use. Returns false if the engine may not run.
    async fn report_in(&mut self, request: &ResourceRequest, grant: &Grant) -> bool {
        let application_id = if self.random.percent(30) { "application_1_1" } else { "" };
        let used = self.used(&request.resource).and_then(|used| of(request, grant, used, application_id));
        let report = ConfirmTicket { epoch: self.epoch(grant), ..inited(grant, request.user.as_str(), used) };
        if let Some([older, _]) = self.shared.epochs.get(&grant.em).filter(|_| self.random.percent(5)) {
            let late = ConfirmTicket { epoch: Some(*older), ..report.clone() };
            let rm = self.shared.client(&mut self.random);
            let answer = self.shared.journal.call(OLDER, rm.resource_inited(&late)).await;
            let got = || format!("{late:?} was believed: {answer:?}");
            self.shared.journal.check(!matches!(answer, Answer::Done(_)), got);
        }
        // A report must name the engine as soon as it may be confirmed.
        self.shared.engines.insert(&grant.em, grant.ticket_id);
        self.shared.journal.note(grant.ticket_id, "inited asked", |life| life.init_asked = true);
        let report_in = async |rm: RmClient| rm.resource_inited(&report).await;
        let runs = self.shared.insist(&mut self.random, "inited", report_in).await.is_some();
        match runs {
            true => self.shared.journal.note(grant.ticket_id, "inited", |life| life.inited = true),
            false => self.shared.journal.note(grant.ticket_id, "inited rejected", |_| {}),
        }
        runs
    }

    /// Returns the epoch of the engine's EM, if it is sent and known.
    fn epoch(&mut self, grant: &Grant) -> Option<i64> {
        let [_, current] = self.shared.epochs.get(&grant.em)?;
        (is_alone() && self.random.percent(30)).then_some(*current)
    }

    /// Reports another use, sometimes with the application id for the first time.
    async fn report_use(&mut self, request: &ResourceRequest, grant: &Grant) {
        let used = load(self.random.between(0, 8), self.random.between(0, 5), 1);
        for application_id in [self.random.pick(["", "application_1_1"]), "application_1_2"] {
            let Some(used) = of(request, grant, used.clone(), application_id) else { return };
            let got = grant.reported(request.user.clone(), used.clone());
            let report = UpdateTicket { epoch: self.epoch(grant), ..got };
            let report_use = async |rm: RmClient| rm.resource_reported(&report).await;
            if self.shared.insist(&mut self.random, "reported", report_use).await.is_none() {
                return;
            }
            self.shared.journal.note(grant.ticket_id, "reported", |life| life.reported = Some(used));
            if self.random.percent(70) {
                return;
            }
        }
    }

    /// Returns a use of the granted amount, less, or more.
    fn used(&mut self, granted: &Resource) -> Option<Resource> {
        let cores = granted.get(&Dimension::Cores);
        match self.random.between(0, 9) {
            0..5 => None,
            5..8 => Some(load(1, 1, 1)),
            _ => Some(load(7, cores + 1, 1)),
        }
    }

    async fn release(&mut self, request: &ResourceRequest, grant: &Grant) {
        let ticket = release(grant, request.user.as_str());
        if self.random.percent(10) {
            self.release_of_another(&ticket).await;
        }
        self.shared.journal.note(grant.ticket_id, "release asked", |life| life.release_asked = true);
        for _ in 0..=i32::from(self.random.percent(25)) {
            // An earlier release needs all fields.
            let alone = self.random.percent(40) && env::var("LINKIS_RM_FAULTS_OTHER").is_err();
            let give_back = async |rm: RmClient| match alone {
                true => rm.ticket_released(ticket.ticket_id).await,
                false => rm.resource_released(&ticket).await,
            };
            if self.shared.insist(&mut self.random, "released", give_back).await.is_some() {
                self.shared.journal.note(grant.ticket_id, "released", |life| life.over = true);
            }
        }
        self.shared.engines.remove(&grant.em, grant.ticket_id);
    }

    async fn release_of_another(&mut self, ticket: &ReleaseTicket) {
        let rm = self.shared.client(&mut self.random);
        let stolen = ReleaseTicket { user: name("thief"), ..ticket.clone() };
        let answer = self.shared.journal.call("release of another's", rm.resource_released(&stolen)).await;
        self.shared.journal.check(!matches!(answer, Answer::Done(())), || format!("a thief released {ticket:?}"));
    }
}
