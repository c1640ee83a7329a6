//! Operations of the steps.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Duration,
};

use rm_model::{
    adoption::AdoptTicket,
    cap::Cap,
    limit::{CountingRule, LabelPattern, LabelSet, Limits, Rule},
    name::Labels,
    operation::{
        ConfirmTicket, DrainEm, ForceRelease, MarkEmLost, Operation, PlacedRequest, RegisterEm, ReleaseTicket,
        RemoveWaiting, RequestId, RequestSpec, ResumeEm, UnregisterEm, UpdateTicket, WaitParameters,
    },
    order::{FairBy, QueueOrder, QueueRules},
    policy::Policy,
    principal::Principal,
    report::{LastSignOfLife, ReportNumber},
    resource::Dimension,
    selector::{EmSelector, Placement},
    wait_queue::QueuePosition,
};
use uuid::Uuid;

use crate::harness::{engine, name, registration};

use super::{model::*, steps::*, ticket_references::*};

impl Model {
    /// Returns the ticket that a step adopts.
    pub(super) fn adopted(&self, step: &Step, new_id: Uuid) -> ModelTicket {
        let Step::Adopt { em, who, used, application, again } = *step else { unreachable!("{step:?}") };
        let known = again.and_then(|ago| self.ticket(ago)).map(|number| &self.tickets[number]);
        let id = known.map_or(new_id, |known| known.id);
        // Sometimes repeats the adoption.
        let (em, who, used) = match known.filter(|_| used < 4) {
            Some(known) => (known.em, known.who, known.adopted.unwrap_or(known.held)),
            None => (em, who, used),
        };
        let (adopted, since) = (Some(used), self.now);
        let application = application.filter(|_| who.queue.is_some());
        ModelTicket { id, em, who, held: used, used: true, adopted, since, application, ..NEW }
    }

    /// Returns the repeat of a waiting request by a new call.
    pub(super) fn repeated(&self, ago: usize, new_id: Uuid) -> ModelWaiting {
        let with_id = self.waiting.iter().rev().filter(|w| w.is_queued && w.request_id.is_some());
        let waiting = with_id.clone().nth(ago % with_id.count().max(1)).cloned().unwrap_or_else(unknown);
        let (em, is_queued, at) = (waiting.named_em, false, BTreeMap::new());
        ModelWaiting { id: new_id, claim: new_id, em, is_queued, at, ..waiting }
    }

    /// Returns the epoch of a call.
    pub(super) fn epoch(&self, em: usize, said: Said) -> Option<i64> {
        let current = self.epochs.get(&em).copied().unwrap_or(2);
        match said {
            Said::Nothing => None,
            Said::Current => Some(current),
            Said::Older => Some(current - 1),
            Said::Newer => Some(current + 1),
        }
    }

    /// Returns the number of the ticket that an engine reports for.
    pub(super) fn reporting(&self, ago: usize, in_use: bool) -> Option<usize> {
        let is_in_use = |number: &usize| self.tickets[*number].alive && self.tickets[*number].used;
        match in_use {
            true => (0..self.tickets.len()).rev().filter(is_in_use).nth(ago % 3),
            false => self.ticket(ago),
        }
    }

    /// Returns the operation of a step; `None` for a commit.
    pub(super) fn operation(&self, step: &Step, new_id: Uuid) -> Option<Operation> {
        let named = |ago| self.ticket(ago).map_or((Uuid::nil(), 0), |n| (self.tickets[n].id, self.tickets[n].em));
        Some(match *step {
            Step::Register { em, total, protected, reserved, zone } => {
                let total = provided(total, 1000);
                Operation::Register(RegisterEm {
                    protected: provided(protected, 0),
                    labels: labels(None, zone),
                    reserved: labels(reserved.then_some(0), false),
                    ..registration(instance(em), total)
                })
            }
            Step::Unregister { em, epoch } => {
                Operation::Unregister(UnregisterEm { em: instance(em), epoch: self.epoch(em, epoch) })
            }
            Step::Request { wait, .. } => operation(&asked(step, new_id), wait.then_some(None)),
            Step::Retry { ago, em } => {
                let before = self.waiter(ago).map_or_else(unknown, |number| self.waiting[number].clone());
                let position = QueuePosition::new(0, time_of(before.since), before.id);
                operation(&ModelWaiting { em: em.unwrap_or(before.em), ..before }, Some(Some(position)))
            }
            Step::Repeat { ago, wait } => operation(&self.repeated(ago, new_id), wait.then_some(None)),
            Step::Adopt { .. } => {
                let ticket = self.adopted(step, new_id);
                Operation::Adopt(AdoptTicket {
                    ticket_id: ticket.id,
                    user: user(ticket.who.user),
                    creator: name("IDE"),
                    engine_type: ticket.who.engine_type(),
                    em: instance(ticket.em),
                    labels: labels(ticket.who.tenant, ticket.who.zone),
                    engine: engine("e"),
                    used: asked_of(ticket.who.queue, ticket.held, ticket.application),
                })
            }
            Step::Inited { ago, used, application, user: number, epoch } => {
                let (ticket_id, em) = named(ago);
                let queue = self.ticket(ago).and_then(|number| self.tickets[number].who.queue);
                let (used, epoch) = (used.map(|used| asked_of(queue, used, application)), self.epoch(em, epoch));
                let (user, em, engine) = (user(number), instance(em), engine("e"));
                Operation::Inited(ConfirmTicket { ticket_id, user, em, used, engine, epoch })
            }
            Step::Reported { ago, in_use, used, application, stolen, epoch } => {
                let of = |number: usize| {
                    let ticket = &self.tickets[number];
                    (ticket.id, ticket.who.user, ticket.em, ticket.who.queue)
                };
                let (ticket_id, owner, em, queue) = self.reporting(ago, in_use).map_or((Uuid::nil(), 0, 0, None), of);
                let user = user((owner + usize::from(stolen)) % USERS);
                let (used, epoch) = (asked_of(queue, used, application), self.epoch(em, epoch));
                Operation::Reported(UpdateTicket { ticket_id, user, em: instance(em), used, epoch })
            }
            Step::Released { ago, user: number } => {
                let (ticket_id, em) = named(ago);
                Operation::Released(ReleaseTicket { ticket_id, user: user(number), em: instance(em) })
            }
            Step::Force { ago } => {
                let (ticket_id, em) = named(ago);
                let owner = self.ticket(ago).map_or(0, |number| self.tickets[number].who.user);
                let ticket = ReleaseTicket { ticket_id, user: user(owner), em: instance(em) };
                Operation::Force(ForceRelease { ticket, reason: name("it hangs") })
            }
            Step::Remove { ago } => {
                let waiting = self.waiter(ago).map(|number| (self.waiting[number].id, self.waiting[number].em));
                let (ticket_id, em) = waiting.unwrap_or((Uuid::nil(), 0));
                Operation::Remove(RemoveWaiting { ticket_id, em: instance(em), reason: name("a mistake") })
            }
            Step::Drain { em, reason } => {
                let reason = name(if reason { "a disk" } else { "a fan" });
                Operation::Drain(DrainEm { em: instance(em), reason })
            }
            Step::Resume { em } => Operation::Resume(ResumeEm { em: instance(em), reason: None }),
            Step::Expire { ago } => {
                let (ticket_id, em) = named(ago);
                Operation::Expire(ReleaseTicket { ticket_id, user: user(0), em: instance(em) })
            }
            Step::Lost { ago } => {
                let (ticket_id, em) = named(ago);
                Operation::Lost(ReleaseTicket { ticket_id, user: user(0), em: instance(em) })
            }
            Step::Undo { ago } => {
                let (ticket_id, em) = named(ago);
                Operation::Undo(ReleaseTicket { ticket_id, user: user(0), em: instance(em) })
            }
            Step::Reap { em, known } => {
                let nothing = ReportNumber { epoch: 0, sequence: 0 };
                let mut last =
                    self.signs.get(&em).copied().unwrap_or(LastSignOfLife { registered: 0, reported: nothing });
                last.reported.sequence -= i64::from(!known);
                Operation::Reap(MarkEmLost { em: instance(em), last })
            }
            Step::Commit { .. }
            | Step::Limit { .. }
            | Step::Policy { .. }
            | Step::Cluster { .. }
            | Step::Leave { .. }
            | Step::Report { .. } => return None,
        })
    }
}

impl Who {
    fn engine_type(&self) -> String {
        self.engine_type.map(|number| ENGINE_TYPES[number].0.to_owned()).unwrap_or_default()
    }
}

/// Returns the label of a tenant, and of the zone.
fn labels(tenant_number: Option<usize>, zone: bool) -> Labels {
    let of_tenant = tenant_number.map(|number| ("tenant".to_owned(), tenant(number)));
    let of_zone = zone.then(|| ("zone".to_owned(), "x".to_owned()));
    Labels::parse("labels", of_tenant.into_iter().chain(of_zone).collect()).unwrap()
}

/// Returns the request of a step with a request id.
pub(super) fn asked(step: &Step, id: Uuid) -> ModelWaiting {
    let Step::Request { em, who, requires, amount, ttl, request_id, cap, .. } = *step else { unreachable!("{step:?}") };
    let (since, is_queued, at) = (0, false, BTreeMap::new());
    let (claim, named_em) = (id, em);
    ModelWaiting { id, since, claim, em, named_em, who, requires, amount, ttl, request_id, cap, is_queued, at }
}

/// A request that does not wait.
fn unknown() -> ModelWaiting {
    let (em, who, requires, request_id, wait, cap) = (0, NEW.who, None, None, true, None);
    asked(&Step::Request { em, who, requires, amount: 1, ttl: 1, request_id, wait, cap }, Uuid::nil())
}

/// Returns a request; `position` is its queue position, if it is queued.
fn operation(ask: &ModelWaiting, position: Option<Option<QueuePosition>>) -> Operation {
    let remaining = Duration::from_secs(60);
    let required = match ask.requires {
        Some(Required::Zone) => labels(None, true),
        Some(Required::Tenant) => labels(ask.who.tenant, false),
        None => Labels::default(),
    };
    Operation::Request(PlacedRequest {
        em: instance(ask.em),
        ask: Arc::new(RequestSpec {
            principal: Principal::Anonymous,
            ticket_id: ask.id,
            user: user(ask.who.user),
            creator: name("IDE"),
            engine_type: ask.who.engine_type(),
            resource: asked_of(ask.who.queue, ask.amount, None),
            labels: labels(ask.who.tenant, ask.who.zone),
            selector: EmSelector { required, ..EmSelector::default() },
            caps: ask.cap.map(|most| Arc::new(cap_of_user(most))).into_iter().collect(),
            lock_ttl: Duration::from_secs(ask.ttl),
            request_id: ask
                .request_id
                .map(|id| RequestId { id: name(&id.to_string()), body_hash: body_hash(ask.body()) }),
            return_counters: false,
            priority: 0,
            may_wait: position.is_some(),
        }),
        wait: position.map(|position| WaitParameters {
            claim: ask.claim,
            instance_id: Uuid::nil(),
            remaining,
            is_elsewhere: false,
            priority: None,
            position,
        }),
        any_em: true,
        is_em_unavailable: false,
        scopes: Default::default(),
    })
}

fn cap_of_user(cores: i64) -> Cap {
    Cap { keys: BTreeSet::from(["user".to_owned()]), max: BTreeMap::from([(Dimension::Cores, cores)]) }
}

fn body_hash(body: ModelBody) -> [u8; 32] {
    let mut hasher = DefaultHasher::new();
    body.hash(&mut hasher);
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&hasher.finish().to_be_bytes());
    hash
}

/// Returns the limits of the model. All label sets are counted if any limit exists.
pub(super) fn rules(model: &Model) -> Limits {
    let required = model.needs_engine_type.then(|| "engine_type".to_owned());
    let policy = Policy::default().with(required.into_iter().collect(), Placement::default());
    let policies = BTreeMap::from([(instance(0).application_name, policy)]);
    // The model knows no turns.
    let order = QueueOrder { fair_by: FairBy::new([]), ..QueueOrder::default() };
    let queue_rules = QueueRules { order, ..QueueRules::default() };
    if model.limits.is_empty() {
        return Limits::default().with_policies(policies).with_queue_rules(queue_rules);
    }
    let rule = |((set, values), rule): (&(usize, Values), &ModelRule)| {
        let named =
            |(key, value): (&&str, &Option<usize>)| ((*key).to_owned(), value.map(|value| value_of(key, value)));
        let scarce = if *set == QUEUE_SET { Dimension::QueueCores } else { Dimension::Cores };
        let max = [(scarce, rule.scarce), (Dimension::Instances, rule.instances)].into_iter();
        Rule {
            pattern: LabelPattern::new(SETS[*set].iter().zip(values).map(named).collect()),
            mode: rule.mode,
            max: max.filter_map(|(dimension, max)| Some((dimension, max?))).collect(),
            guarantee: Default::default(),
        }
    };
    let sets = SETS.iter().enumerate().map(|(set, keys)| {
        let keys: BTreeSet<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        let counting = CountingRule::wanted(BTreeSet::from([keys]), &BTreeMap::new()).pop_first().unwrap();
        LabelSet { id: label_set_id(set), counting, is_counted: true }
    });
    Limits::new(Uuid::nil(), sets.collect(), model.limits.iter().map(rule))
        .with_policies(policies)
        .with_queue_rules(queue_rules)
}
