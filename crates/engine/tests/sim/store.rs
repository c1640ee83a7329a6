//! A store in memory: EMs, tickets and queue entries. The real ledger decides each batch.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use rm_engine::request::Failure;
use rm_model::{
    assessment::{BlockedRequest, Verdict},
    em::{Em, EmInstance},
    em_drain::EmDrain,
    external::Clusters,
    guarantee::{GuaranteeCheck, PromisedAmounts},
    hold::ExistingHold,
    ledger::{Deltas, HistoryLine, Ledger, LedgerSnapshot, TicketPage, WaitQueueView},
    limit::{CountingRule, LabelPattern, LabelSet, Limits, Rule},
    limit_mode::LimitMode,
    name::Name,
    operation::{KeptPosition, LockKey, Operation, Outcome, PlacedRequest, RegisterEm, RequestKey, RequestRecord},
    order::{Class, FairBy, QueueOrder, QueueRanks, QueueRules, RankedRequest},
    placement::ClusterView,
    principal::Principal,
    priority::{PRIORITY_MAX, Priorities, PriorityRule},
    report::EmCondition,
    resource::{Dimension, Resource},
    scope::{ScopeCounter, ScopeHoldings, USER},
    ticket::Ticket,
    wait_queue::{
        FreedKeys, MUCH, OwnedPosition, QueuePosition, RerankedRequest, ViewExtent, WaitKey, WaitKeyHash, WaitKeys,
        WaitQueues, WaitingRequest,
    },
};
use time::OffsetDateTime;
use uuid::Uuid;

/// Error of an action in the simulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SimError {
    /// The database is unavailable.
    Unavailable,
    /// The result of a commit is unknown.
    CommitUnknown,
    /// The deadline for locks has passed.
    LockTimeout,
    /// An action failed for a reason of its own.
    Defect,
}

/// Result of an operation.
pub type SimResult = Result<Outcome, Failure<SimError>>;

/// Notification of the instances after a change of the store.
#[derive(Debug, Clone, Default)]
pub struct Notice {
    pub freed: FreedKeys,
    /// Calls that no longer own their positions.
    pub ended: Vec<OwnedPosition>,
    /// Waiting requests with new positions or rank times.
    pub reranked: BTreeSet<RerankedRequest>,
}

impl From<FreedKeys> for Notice {
    fn from(freed: FreedKeys) -> Self {
        Self { freed, ..Self::default() }
    }
}

/// Results of one batch.
pub struct Committed {
    pub results: Vec<SimResult>,
    pub notice: Notice,
    pub ems: Vec<Em>,
    /// EMs that were unregistered.
    pub gone: Vec<EmInstance>,
}

/// A request in the stored wait queue.
struct StoredEntry {
    request: PlacedRequest,
    /// Call that owns the position; `None` while its caller is absent.
    claim: Option<Uuid>,
    instance: Uuid,
    keys: BTreeSet<WaitKey>,
    /// Rank, with the keys where the request is short.
    rank: RankedRequest,
}

/// Returns a stored request as a removal reads it.
fn waiting(position: QueuePosition, entry: &StoredEntry) -> WaitingRequest {
    let spec = &entry.request.ask;
    WaitingRequest {
        ticket_id: position.ticket_id(),
        waiting_since: position.since(),
        user: spec.user.clone(),
        creator: spec.creator.clone(),
        engine_type: spec.engine_type.clone(),
        em: entry.request.em.clone(),
        any_em: entry.request.any_em,
        resource: spec.resource.clone(),
        labels: spec.labels.clone(),
        caps: Vec::new(),
        wait_until: position.since(),
        claim: entry.claim,
        kept_until: None,
        class: Class::First,
        priority: 0,
        ahead: BTreeMap::new(),
    }
}

/// Maximum of each user, in each dimension, if users are limited.
const USER_MAX: i64 = 3;

/// Number of users with a guarantee.
const GUARANTEED_USERS: usize = 3;

/// The tables.
#[derive(Default)]
pub struct Store {
    now: i64,
    ems: BTreeMap<EmInstance, Em>,
    tickets: BTreeMap<Uuid, Ticket>,
    drains: BTreeMap<EmInstance, Arc<EmDrain>>,
    entries: BTreeMap<QueuePosition, StoredEntry>,
    line: WaitQueues,
    numbers: BTreeMap<WaitKey, u64>,
    /// EMs whose key a transaction of another program owns.
    pub contended: BTreeSet<EmInstance>,
    /// EMs that are unhealthy by their reports.
    pub unhealthy: BTreeSet<EmInstance>,
    limits: Arc<Limits>,
    scopes: HashMap<ScopeCounter, ScopeHoldings>,
    /// Holds of operators.
    holds: BTreeMap<LockKey, ExistingHold>,
    /// Requests that operators have removed.
    removed: HashMap<Uuid, Name>,
    request_ids: HashMap<RequestKey, RequestRecord>,
    /// Guarantee of the first users, in each dimension.
    guarantee: i64,
    /// Number of users with a request that a batch has entitled, in all batches.
    pub entitled: usize,
}

impl Store {
    /// Whether a ticket was granted under a request id.
    pub fn has_id(&self, ticket_id: Uuid) -> bool {
        self.request_ids.values().any(|record| record.grant.ticket_id == ticket_id)
    }

    /// Returns the condition of an EM by its reports.
    pub fn condition(&self, em: &EmInstance) -> EmCondition {
        EmCondition { is_available: !self.unhealthy.contains(em), ..EmCondition::default() }
    }

    /// Updates a cluster view.
    pub fn survey(&self, view: &mut ClusterView) {
        let survey = view.begin_survey();
        for em in self.ems.values() {
            view.update(em.clone());
            view.report(&em.instance, self.condition(&em.instance), time::Duration::ZERO);
        }
        view.end_survey(survey);
    }

    pub fn tickets(&self) -> impl Iterator<Item = &Ticket> {
        self.tickets.values()
    }

    /// Returns the number of a wait key, as its hash.
    pub fn key(&mut self, wait_key: &WaitKey) -> WaitKeyHash {
        let next = self.numbers.len() as u64;
        WaitKeyHash(*self.numbers.entry(wait_key.clone()).or_insert(next))
    }

    fn snapshot(&self, batch: &[Operation]) -> LedgerSnapshot {
        let tickets = batch.iter().filter_map(|operation| {
            let id = operation.ticket_id()?;
            Some((id, self.tickets.get(&id)?.clone()))
        });
        let leaving = || {
            let leaving = batch.iter().filter(|operation| matches!(operation, Operation::Unregister(_)));
            leaving.map(Operation::em)
        };
        let of_leaving = self.tickets.values().filter(|ticket| leaving().any(|em| *em == ticket.em));
        let tickets = tickets.chain(of_leaving.map(|ticket| (ticket.id, ticket.clone())));
        let wait_keys = self.entries.values().flat_map(|entry| &entry.keys);
        LedgerSnapshot {
            now: OffsetDateTime::from_unix_timestamp(self.now).unwrap(),
            ems: self.ems.iter().map(|(instance, em)| (instance.clone(), em.clone())).collect(),
            tickets: tickets.collect(),
            pages: leaving().map(|em| (em.clone(), TicketPage { after: Uuid::nil(), last: None })).collect(),
            ended: HashMap::new(),
            inhabited: self.tickets.values().map(|ticket| ticket.em.clone()).collect(),
            reports: HashMap::new(),
            holds: self.holds.clone().into_iter().collect(),
            drains: self.drains.iter().map(|(em, drain)| (em.clone(), drain.clone())).collect(),
            adopted: HashMap::new(),
            request_ids: self.request_ids.clone(),
            limits: self.limits.clone(),
            scopes: self.scopes.clone(),
            line: WaitQueueView {
                line: self.line.clone(),
                wait_keys: Some(wait_keys.map(|wait_key| (wait_key.clone(), ViewExtent::All)).collect()),
                ranks: self.ranks(),
            },
            kept: self.kept(),
            waiting: self
                .entries
                .iter()
                .map(|(position, entry)| (position.ticket_id(), waiting(*position, entry)))
                .collect(),
            waiting_counts: HashMap::new(),
            removed: self.removed.clone(),
            clusters: Clusters::default(),
        }
    }

    /// Returns the ranks of all waiting requests.
    fn ranks(&self) -> QueueRanks {
        let (mut ranks, entries) = (QueueRanks::default(), || self.entries.values());
        entries().for_each(|entry| ranks.own.insert(entry.rank.clone()));
        ranks.latest = entries().map(|entry| entry.rank.rank_time).max();
        let absent = entries().filter(|entry| entry.rank.is_absent && entry.rank.class != Class::Behind);
        ranks.absent_turns = absent.filter_map(|entry| entry.rank.turn.clone()).collect();
        for entry in entries().filter(|entry| entry.rank.class == Class::Entitled && !entry.rank.is_absent) {
            for scope in entry.request.guaranteed_scopes(&self.limits) {
                let (ticket_id, resource) = (Some(entry.rank.ticket_id), entry.request.resource().clone());
                ranks.promises.add(scope, PromisedAmounts { ticket_id, resource, requests: 1 });
            }
        }
        ranks
    }

    /// Returns the positions that belong to request ids.
    fn kept(&self) -> HashMap<RequestKey, KeptPosition> {
        let kept = |(position, entry): (&QueuePosition, &StoredEntry)| {
            let body_hash = entry.request.ask.request_id.as_ref()?.body_hash;
            let kept = KeptPosition { body_hash, claim: entry.claim, position: *position };
            Some((entry.request.ask.request_key()?, kept))
        };
        self.entries.iter().filter_map(kept).collect()
    }

    /// Returns the waiting requests with the EM of each.
    pub fn waiting(&self) -> Vec<(Uuid, EmInstance)> {
        self.entries.iter().map(|(position, entry)| (position.ticket_id(), entry.request.em.clone())).collect()
    }

    /// Limits the cores and the memory of each user, and guarantees some of both to the first users.
    pub fn limit_users(&mut self, guarantee: i64) {
        self.guarantee = guarantee;
        let amounts = |amount| [Dimension::Cores, Dimension::Memory].map(|dimension| (dimension, amount)).into();
        let rule = |user: Option<String>, guarantee| Rule {
            pattern: LabelPattern::new([(USER.to_owned(), user)].into()),
            mode: LimitMode::Enforced,
            max: amounts(USER_MAX),
            guarantee,
        };
        let guaranteed = (0..GUARANTEED_USERS).filter(|_| guarantee > 0);
        let guaranteed = guaranteed.map(|number| rule(Some(format!("user{number}")), amounts(guarantee)));
        let rules: Vec<Rule> = guaranteed.chain([rule(None, BTreeMap::new())]).collect();
        let counting = CountingRule::wanted([rules[0].label_set()].into(), &BTreeMap::new());
        let sets = counting.into_iter().map(|counting| LabelSet { id: 1, counting, is_counted: true });
        self.limits = Arc::new(Limits::new(Uuid::nil(), sets.collect(), rules));
    }

    /// Changes the turns and the priority of requests that enter a queue from now on.
    pub fn set_queue_rules(&mut self, fair_by: FairBy, default: i16) {
        let order = QueueOrder { fair_by, ..QueueOrder::default() };
        let pattern = LabelPattern::new([(USER.to_owned(), None)].into());
        let priorities = Priorities::new([PriorityRule { pattern, default, max: PRIORITY_MAX }]);
        self.limits = Arc::new(Limits::clone(&self.limits).with_queue_rules(QueueRules {
            order,
            priorities,
            ..QueueRules::default()
        }));
    }

    /// Holds an EM or a user.
    pub fn hold(&mut self, key: LockKey) {
        let since = OffsetDateTime::from_unix_timestamp(self.now).unwrap();
        let reason = Name::parse("reason", "audit").unwrap();
        let until = since + time::Duration::minutes(1);
        self.note_hold(&key, true);
        self.holds.insert(key, ExistingHold { reason, by: Principal::Anonymous, since, until });
    }

    /// Ends the first hold, and returns the keys where requests wait for its end.
    pub fn end_hold(&mut self) -> FreedKeys {
        let mut freed = FreedKeys::default();
        if let Some((key, _)) = self.holds.pop_first() {
            self.note_hold(&key, false);
            freed.add(key.wait_key(), MUCH);
        }
        freed
    }

    fn note_hold(&mut self, key: &LockKey, is_held: bool) {
        let LockKey::Em(em) = key else { return };
        if let Some(em) = self.ems.get_mut(em) {
            em.is_held = is_held;
            em.version += 1;
        }
    }

    /// Whether an EM or a user is held.
    pub fn is_held(&self, key: &LockKey) -> bool {
        self.holds.contains_key(key)
    }

    /// Decides a request without writing anything.
    pub fn check(&self, request: &PlacedRequest) -> SimResult {
        let operation = Operation::Request(request.clone());
        let mut ledger = Ledger::new(self.snapshot(std::slice::from_ref(&operation)));
        ledger.apply(&Principal::Anonymous.into(), &operation).map_err(|error| Failure::Rejected(Box::new(error)))
    }

    /// Applies a batch of one instance, and asserts the invariants.
    pub fn commit(&mut self, instance: Uuid, batch: &[Operation]) -> Committed {
        self.now += 1;
        let mut ledger = Ledger::new(self.snapshot(batch));
        let mut apply = |operation| {
            ledger.apply(&Principal::Anonymous.into(), operation).map_err(|error| Failure::Rejected(Box::new(error)))
        };
        let results: Vec<SimResult> = batch.iter().map(&mut apply).collect();
        self.assert_no_grant_while_drained(batch, &results);
        let (deltas, mut state) = ledger.finish();
        // The ledger states them in no order, and a seed must repeat its run.
        state.ems.sort_unstable_by(|one, other| one.instance.cmp(&other.instance));
        let (freed, ended, reranked) = (deltas.freed.clone(), deltas.ended_waits.clone(), self.reranked(&deltas));
        let entitled = self.newly_entitled(&deltas);
        self.write(instance, deltas);
        self.assert_invariants();
        self.assert_promised_once(entitled);
        Committed { results, notice: Notice { freed, ended, reranked }, ems: state.ems, gone: state.gone }
    }

    /// Returns the users with a request that a batch entitles, but without a grant in it.
    fn newly_entitled(&self, deltas: &Deltas) -> BTreeSet<Name> {
        let was_entitled = |ticket_id: Uuid| {
            self.entries.values().any(|entry| {
                entry.rank.ticket_id == ticket_id && entry.rank.class == Class::Entitled && !entry.rank.is_absent
            })
        };
        let ranks = deltas.waiting.iter().map(|delta| &delta.rank).chain(deltas.moved.iter().map(|delta| &delta.rank));
        let entitled: Vec<Uuid> = ranks
            .filter(|rank| rank.class == Class::Entitled && !was_entitled(rank.ticket_id))
            .map(|rank| rank.ticket_id)
            .collect();
        let stored = self.entries.values().map(|entry| &entry.request.ask);
        let asks = stored.chain(deltas.waiting.iter().map(|delta| &delta.request.ask));
        let users = asks.filter(|ask| entitled.contains(&ask.ticket_id)).map(|ask| ask.user.clone());
        users.filter(|user| deltas.granted.iter().all(|ticket| ticket.user != *user)).collect()
    }

    /// Asserts that what users hold and are promised is within their guarantees.
    fn assert_promised_once(&mut self, entitled: BTreeSet<Name>) {
        self.entitled += entitled.len();
        for user in entitled {
            let tickets = self.tickets.values().filter(|ticket| ticket.user == user).map(Ticket::resource);
            let is_promised = |entry: &&StoredEntry| {
                entry.rank.class == Class::Entitled && !entry.rank.is_absent && entry.request.ask.user == user
            };
            let promised: Vec<&PlacedRequest> =
                self.entries.values().filter(is_promised).map(|entry| &entry.request).collect();
            let amounts: Vec<&Resource> = tickets.chain(promised.iter().map(|request| request.resource())).collect();
            for dimension in [Dimension::Cores, Dimension::Memory] {
                // A request that does not request a dimension does not count there.
                if promised.iter().all(|request| request.resource().get(&dimension) > 0) {
                    let sum: i64 = amounts.iter().map(|resource| resource.get(&dimension)).sum();
                    assert!(sum <= self.guarantee, "{user} is promised {sum} {dimension:?}");
                }
            }
        }
    }

    fn reranked(&self, deltas: &Deltas) -> BTreeSet<RerankedRequest> {
        let decided_at = Some(OffsetDateTime::from_unix_timestamp(self.now).unwrap());
        deltas.woken.values().map(|position| RerankedRequest { position: *position, decided_at }).collect()
    }

    fn assert_no_grant_while_drained(&self, batch: &[Operation], results: &[SimResult]) {
        let (mut drained, mut granted): (BTreeSet<&EmInstance>, _) = (self.drains.keys().collect(), BTreeSet::new());
        for (operation, result) in batch.iter().zip(results) {
            match result {
                Ok(Outcome::Drained(_)) => drop(drained.insert(operation.em())),
                Ok(Outcome::Resumed(_)) => drop(drained.remove(operation.em())),
                // Granted before, under the same request id.
                Ok(Outcome::Granted(grant)) if self.has_id(grant.ticket_id) || !granted.insert(grant.ticket_id) => {}
                Ok(Outcome::Granted(grant)) => assert!(!drained.contains(&grant.em), "{} is drained", grant.em),
                _ => {}
            }
        }
    }

    fn write(&mut self, instance: Uuid, deltas: Deltas) {
        for ems in [deltas.ems_counted, deltas.ems_updated, deltas.ems_resized, deltas.ems_inserted] {
            for em in ems {
                let version = em.version + 1;
                self.ems.insert(em.instance.clone(), Em { version, ..em });
            }
        }
        for em in deltas.ems_deleted {
            self.ems.remove(&em.instance);
        }
        for (em, drain) in deltas.drains {
            if let Some(em) = self.ems.get_mut(&em) {
                em.drain.clone_from(&drain);
            }
            match drain {
                Some(drain) => drop(self.drains.insert(em, drain)),
                None => drop(self.drains.remove(&em)),
            }
        }
        for left in deltas.left_line {
            let entry = self.remove(left.ticket_id);
            assert!(entry.is_some_and(|entry| entry.claim == left.claim), "a call changes only its own position");
        }
        for record in deltas.request_ids {
            assert!(self.request_ids.insert(record.key(), record).is_none(), "an id has one ticket");
        }
        for entry in deltas.waiting {
            let (position, keys) = (entry.rank.position(), entry.wait_keys.keys().cloned().collect());
            self.line.put(position, &entry.wait_keys, entry.request.resource());
            let (claim, rank) = (entry.request.claim(), entry.rank);
            let stored = StoredEntry { claim, request: entry.request, instance, keys, rank };
            let key = stored.request.ask.request_key();
            let has_key = |entry: &StoredEntry| key.is_some() && entry.request.ask.request_key() == key;
            assert!(!self.entries.values().any(has_key), "a request id has one position");
            assert!(self.entries.insert(position, stored).is_none(), "a request has one position");
        }
        for entry in deltas.moved {
            let position = entry.rank.position();
            let mut stored = self.take(entry.rank.ticket_id).unwrap();
            assert_eq!(stored.claim, entry.claim, "a call changes only its own position");
            stored.keys = entry.wait_keys.keys().cloned().collect();
            stored.request.em = entry.em;
            stored.rank = entry.rank;
            self.line.put(position, &entry.wait_keys, stored.request.resource());
            assert!(self.entries.insert(position, stored).is_none(), "a request has one position");
        }
        for delta in deltas.reranked {
            let mut stored = self.take(delta.rank.ticket_id).unwrap();
            stored.rank = delta.rank;
            self.line.set_position(stored.rank.position());
            self.entries.insert(stored.rank.position(), stored);
        }
        for (turn, rank_time) in deltas.turns_used {
            let absent = self.entries.values_mut().filter(|entry| entry.rank.is_absent);
            let of_turn = absent.filter(|entry| entry.rank.turn.as_ref() == Some(&turn));
            of_turn.for_each(|entry| {
                (entry.rank.class, entry.rank.rank_time) = (Class::Behind, entry.rank.rank_time.max(rank_time))
            });
        }
        for line in deltas.lines {
            if let HistoryLine::RemovedFromQueue(ticket, reason, _) = line {
                self.removed.insert(ticket.id, reason);
            }
        }
        for ended in deltas.ended {
            assert!(self.tickets.remove(&ended.ticket.id).is_some() || !ended.stored);
        }
        self.scopes.extend(deltas.scopes);
        for ticket in deltas.granted {
            assert!(self.tickets.insert(ticket.id, ticket).is_none(), "a request is granted once");
        }
    }

    fn remove(&mut self, ticket_id: Uuid) -> Option<StoredEntry> {
        let entry = self.take(ticket_id)?;
        self.line.remove(ticket_id);
        Some(entry)
    }

    /// Takes the row of a request, and leaves its entries.
    fn take(&mut self, ticket_id: Uuid) -> Option<StoredEntry> {
        let position = *self.entries.keys().find(|position| position.ticket_id() == ticket_id)?;
        self.entries.remove(&position)
    }

    /// Ends a call, and returns the keys that it frees and the own requests that take its turns. The position of a request id is kept
    /// if the caller is absent.
    pub fn leave(&mut self, claim: Uuid, is_absent: bool) -> Notice {
        let mut notice = Notice::default();
        let owned = self.entries.iter().find(|(_, entry)| entry.claim == Some(claim)).map(|(position, _)| *position);
        let Some((position, mut entry)) = owned.and_then(|position| self.entries.remove_entry(&position)) else {
            return notice;
        };
        self.line.remove(position.ticket_id());
        for (turn, key) in entry.rank.turn_keys_at(entry.rank.short_at.clone()) {
            let later = |other: &&mut StoredEntry| {
                let rank = &other.rank;
                let keys = rank.turn_keys_at(rank.short_at.iter().cloned());
                !rank.is_absent
                    && rank.own_order() > entry.rank.own_order()
                    && keys.contains(&(turn.clone(), key.clone()))
            };
            if let Some(heir) = self.entries.values_mut().filter(later).min_by_key(|other| other.rank.own_order()) {
                heir.rank.rank_time = heir.rank.rank_time.max(entry.rank.rank_time);
                notice.reranked.insert(RerankedRequest { position: heir.rank.position(), decided_at: None });
            }
        }
        entry.rank.short_at.clear();
        std::mem::take(&mut entry.keys).into_iter().for_each(|wait_key| notice.freed.add(wait_key, 1));
        if is_absent && entry.request.ask.request_id.is_some() {
            entry.rank.is_absent = true;
            self.entries.insert(position, StoredEntry { claim: None, ..entry });
        }
        notice
    }

    /// Ends all positions that are kept for absent callers.
    pub fn end_absent(&mut self) {
        self.entries.retain(|_, entry| entry.claim.is_some());
    }

    /// Removes the entries of an instance that is dead.
    pub fn sweep(&mut self, instance: Uuid) -> Notice {
        let of_instance = self.entries.iter().filter(|(_, entry)| entry.instance == instance);
        let dead: Vec<Uuid> = of_instance.filter_map(|(_, entry)| entry.claim).collect();
        let mut notice = Notice::default();
        for claim in dead {
            let left = self.leave(claim, true);
            left.freed.iter().for_each(|(wait_key, requests)| notice.freed.add(wait_key.clone(), requests));
            notice.reranked.extend(left.reranked);
        }
        notice
    }

    /// Returns a waiting first that would be entitled by a check now.
    pub fn entitled_at_check(&self) -> Option<Uuid> {
        let (ranks, usage) = (self.ranks(), |counter: &ScopeCounter| self.scopes.get(counter));
        let firsts = self.entries.values().filter(|entry| entry.rank.class == Class::First && !entry.rank.is_absent);
        let entitled = |entry: &&StoredEntry| {
            let (request, displaced, limits) = (&entry.request, &BTreeSet::new(), &*self.limits);
            ranks.promises.is_entitled(GuaranteeCheck { request, displaced, limits }, usage)
        };
        firsts.into_iter().find(entitled).map(|entry| entry.rank.ticket_id)
    }

    /// Returns a stored request that the ledger would grant now, with the EM: a waiter that was forgotten.
    pub fn grantable(&self) -> Option<(Uuid, EmInstance)> {
        let grantable = |position: &QueuePosition, entry: &StoredEntry, em: &EmInstance| {
            let mut wait = entry.request.wait.clone()?;
            wait.position = Some(*position);
            wait.is_elsewhere = *em != entry.request.em;
            let request =
                PlacedRequest { em: em.clone(), wait: Some(wait), is_em_unavailable: false, ..entry.request.clone() };
            matches!(self.check(&request), Ok(Outcome::Granted(_))).then(|| (position.ticket_id(), em.clone()))
        };
        let mut present = self.entries.iter().filter(|(_, entry)| entry.claim.is_some());
        present.find_map(|(position, entry)| match entry.request.any_em {
            false => grantable(position, entry, &entry.request.em),
            true => self.ems.keys().find_map(|em| grantable(position, entry, em)),
        })
    }

    fn assert_invariants(&self) {
        for em in self.ems.values() {
            let tickets = || self.tickets.values().filter(|ticket| ticket.em == em.instance);
            for dimension in [Dimension::Cores, Dimension::Memory] {
                let sum: i64 = tickets().map(|ticket| ticket.resource().get(&dimension)).sum();
                let counted = em.locked.get(&dimension) + em.used.get(&dimension);
                assert_eq!(counted, sum, "counters equal tickets on {}", em.instance);
                assert!(sum <= em.total.get(&dimension), "{} is over-committed", em.instance);
            }
        }
        if !self.limits.is_empty() {
            let users: BTreeSet<&Name> = self.tickets.values().map(|ticket| &ticket.user).collect();
            for user in users {
                let tickets = self.tickets.values().filter(|ticket| ticket.user == *user);
                let cores: i64 = tickets.map(|ticket| ticket.resource().get(&Dimension::Cores)).sum();
                assert!(cores <= USER_MAX, "{user} is above the limit");
            }
        }
    }
}

/// Returns what the result of a check of `request` means.
pub fn verdict(request: &PlacedRequest, result: SimResult) -> Result<Verdict, Failure<SimError>> {
    let blocked = |refusal, wait_keys| Box::new(BlockedRequest { refusal, wait_keys });
    match result? {
        Outcome::Refused(refusal) => Ok(Verdict::Refused(blocked(*refusal, WaitKeys::new()))),
        Outcome::Waiting(queued) if request.position().is_some_and(|position| position != queued.position) => {
            Ok(Verdict::Reranked(blocked(queued.refusal, queued.wait_keys)))
        }
        Outcome::Waiting(queued) => Ok(Verdict::Refused(blocked(queued.refusal, queued.wait_keys))),
        _ => Ok(Verdict::Fits),
    }
}

/// Returns the registration of an EM.
pub fn register(em: &EmInstance, total: Resource) -> Operation {
    Operation::Register(RegisterEm {
        em: em.clone(),
        protected: total.zero_like(),
        total,
        labels: Default::default(),
        reserved: Default::default(),
    })
}
