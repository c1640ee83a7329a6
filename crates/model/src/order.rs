//! The order of waiting requests: users take turns, and the requests of one user go in that user's own order.
//!
//! Requests with an equal turn are *own* requests of each other. A request is *behind* if an own present request is earlier
//! in own order and short at a key where it is short, too. Otherwise it is a *first*. Firsts go by rank time, then requests
//! behind go by the time since which they wait. A priority moves both by a head start. A granted first hands its turn to the
//! next own request at each key, which then goes after all firsts that wait already.
//!
//! Invariant: rank times only rise, and a request never gains by the end of another one. At each key, at most one request
//! of each other turn of equal priority goes before a first.
//! Never: decides whether a request fits, or reads a clock.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
    sync::Arc,
    time::Duration,
};

use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    assessment::BlockedRequest,
    guarantee::{GuaranteeCheck, Promises},
    limit::{Limits, PatternChange},
    operation::{PlacedRequest, Rejection},
    priority::{Priorities, PriorityRule},
    reclaim::{ReclaimPolicies, ReclaimPolicy},
    scope::{ScopeCounter, ScopeHoldings, TicketLabels, USER},
    selector::EmSelector,
    wait_queue::{AssessedPosition, QueuePosition, WaitKey},
};

/// Maximum number of labels by which requests take turns.
pub const FAIR_BY_MAX: usize = 8;
/// Maximum length of the names of these labels together, in bytes.
pub const FAIR_BY_BYTES_MAX: usize = 512;

/// Maximum length of a turn with its values, in bytes: an index has it.
const TURN_BYTES_MAX: usize = 1024;

/// Time for which the position of an absent caller is kept, without configuration. Zero is also valid: none is kept.
pub const POSITION_KEPT: Duration = Duration::from_secs(60);
/// Minimum of a time above zero.
pub const POSITION_KEPT_MIN: Duration = Duration::from_secs(1);
/// Maximum of the time.
pub const POSITION_KEPT_MAX: Duration = Duration::from_secs(3600);

/// Order of the waiting requests of a cluster. A change affects requests that enter a queue, or whose callers become absent, after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueOrder {
    /// Turns of the requests.
    pub fair_by: FairBy,
    /// Time for which the position of a request id is kept after the loss of its caller.
    pub position_kept: Duration,
}

impl Default for QueueOrder {
    fn default() -> Self {
        Self { fair_by: FairBy::default(), position_kept: POSITION_KEPT }
    }
}

/// Rules of the wait queues: the positions of entering requests, and the engines that are taken back for waiting ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QueueRules {
    /// Turns, and the time for which positions are kept.
    pub order: QueueOrder,
    /// Head starts.
    pub priorities: Priorities,
    /// Engines that can be taken back.
    pub reclaim: ReclaimPolicies,
}

/// Rules of the wait queues in a [`crate::limit::LimitReplacement`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QueueRuleReplacement {
    /// New order.
    pub order: Option<QueueOrder>,
    /// All new priority rules.
    pub priorities: Option<Priorities>,
    /// All new reclaim policies.
    pub reclaim: Option<ReclaimPolicies>,
}

/// Changed rules of the wait queues.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QueueRuleChanges {
    /// Another order: before and after.
    pub order: Option<(QueueOrder, QueueOrder)>,
    /// Priority rules.
    pub priorities: Vec<PatternChange<PriorityRule>>,
    /// Reclaim policies.
    pub reclaim: Vec<PatternChange<ReclaimPolicy>>,
}

impl QueueRules {
    /// Returns the changes by a replacement.
    pub fn changes_to(&self, new: &QueueRuleReplacement) -> QueueRuleChanges {
        let order = new.order.as_ref().filter(|order| **order != self.order);
        let priorities = new.priorities.as_ref().map(|priorities| self.priorities.changes_to(priorities));
        let reclaim = new.reclaim.as_ref().map(|reclaim| self.reclaim.changes_to(reclaim));
        QueueRuleChanges {
            order: order.map(|order| (self.order.clone(), order.clone())),
            priorities: priorities.unwrap_or_default(),
            reclaim: reclaim.unwrap_or_default(),
        }
    }
}

/// Labels by which requests take turns. Without labels, each request has a turn of its own, and requests go in the order in which they enter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FairBy(BTreeSet<String>);

impl Default for FairBy {
    /// Turns by user.
    fn default() -> Self {
        Self::new([USER.to_owned()])
    }
}

impl FairBy {
    /// Creates turns by these labels.
    pub fn new(labels: impl IntoIterator<Item = String>) -> Self {
        Self(labels.into_iter().collect())
    }

    /// Returns the labels.
    pub fn labels(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// Returns the turn of a request, such as `user=alice`, or `None` without labels. A missing label has the value "", as
    /// in scopes. A backslash escapes separators, so that unequal values have unequal turns. Long values are replaced by their hash.
    pub fn turn_of(&self, labels: &TicketLabels<'_>) -> Option<Arc<str>> {
        let escaped = |text: &str| text.replace('\\', r"\\").replace(',', r"\,").replace('=', r"\=");
        let pair = |label: &String| format!("{}={}", escaped(label), escaped(labels.get(label).unwrap_or_default()));
        let turn = self.0.iter().map(pair).collect::<Vec<_>>().join(",");
        if turn.len() > TURN_BYTES_MAX {
            let names: Vec<String> = self.0.iter().map(|label| escaped(label)).collect();
            let hash = Sha256::digest(&turn).iter().fold(String::new(), |hex, byte| format!("{hex}{byte:02x}"));
            return Some(format!("{}=#{hash}", names.join(",")).into());
        }
        (!turn.is_empty()).then(|| turn.into())
    }
}

/// Returns whether only requests of a turn can wait at a key, while all waiting requests have turns by the same labels: a scope whose
/// labels include all labels of the turn.
pub fn is_private(turn: Option<&str>, wait_key: &WaitKey) -> bool {
    let (WaitKey::Scope(scope), Some(turn)) = (wait_key, turn) else { return false };
    let names = label_names(turn);
    !names.is_empty() && names.iter().all(|label| scope.labels().contains_key(label))
}

/// Returns the names of the labels of a turn.
fn label_names(turn: &str) -> Vec<String> {
    let (mut names, mut name, mut is_name, mut is_escaped) = (Vec::new(), String::new(), true, false);
    for letter in turn.chars() {
        match letter {
            '\\' if !is_escaped => {
                is_escaped = true;
                continue;
            }
            ',' if !is_escaped => {
                if is_name {
                    names.push(std::mem::take(&mut name));
                }
                is_name = true;
            }
            '=' if !is_escaped && is_name => {
                names.push(std::mem::take(&mut name));
                is_name = false;
            }
            letter if is_name => name.push(letter),
            _ => {}
        }
        is_escaped = false;
    }
    names
}

/// Returns the rank time of a request that enters or takes a turn: the database clock, and never before the latest rank time.
pub fn new_rank_time(now: OffsetDateTime, latest: Option<OffsetDateTime>) -> OffsetDateTime {
    latest.map_or(now, |latest| now.max(latest.saturating_add(time::Duration::MICROSECOND)))
}

/// Class of a waiting request, the first part of its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// A first within the guarantees of its scopes.
    Entitled,
    /// A request without an earlier own one at its keys.
    First,
    /// A request with an earlier own one at one of its keys.
    Behind,
}

impl Class {
    /// Returns the number to store.
    pub const fn number(self) -> i16 {
        match self {
            Self::Entitled => 0,
            Self::First => 1,
            Self::Behind => 2,
        }
    }

    /// Returns the class of a stored number; `None` if there is none.
    pub const fn of_number(number: i16) -> Option<Self> {
        match number {
            0 => Some(Self::Entitled),
            1 => Some(Self::First),
            2 => Some(Self::Behind),
            _ => None,
        }
    }

    /// Returns the class in the bytes of a position, which sort the highest number first.
    const fn weight(self) -> i16 {
        match self {
            Self::Entitled => 1 << 14,
            Self::First => 0,
            Self::Behind => -(1 << 14),
        }
    }
}

/// SHA-256 of the conditions on the EM of a request that names none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AnyEm(pub [u8; 32]);

impl AnyEm {
    /// Returns the hash of the application name and the required labels.
    pub fn of(selector: &EmSelector) -> Self {
        let labels = selector.required.as_map().iter().flat_map(|(key, value)| [key.as_str(), value]);
        let texts = [selector.application_name.as_ref().map_or("", |name| name.as_str())].into_iter().chain(labels);
        let mut hash = Sha256::new();
        for text in texts {
            hash.update((text.len() as u64).to_be_bytes());
            hash.update(text);
        }
        Self(hash.finalize().into())
    }
}

/// Key at which own requests take turns: a wait key, or any EM under equal conditions.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TurnKey {
    /// A wait key.
    At(WaitKey),
    /// The EMs of requests that name none, regardless of the EM where a request is queued.
    AnyEm(AnyEm),
}

/// Sort key of own requests: entry time less head start, then ticket id, as in the positions of requests behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OwnOrder {
    /// Entry time less the head start.
    pub time: OffsetDateTime,
    ticket_id: Uuid,
}

/// A waiting request with the values that determine its position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankedRequest {
    /// Id of the ticket that a grant creates.
    pub ticket_id: Uuid,
    /// Turn, constant while the request waits; `None` if it has no own requests.
    pub turn: Option<Arc<str>>,
    /// Entry time.
    pub entered: OffsetDateTime,
    /// Time by which a first goes; never before `entered`.
    pub rank_time: OffsetDateTime,
    /// Head start in seconds; negative to let later requests pass.
    pub priority: i16,
    /// Class of the latest decision.
    pub class: Class,
    /// Whether the call of the request has ended. The request then keeps its position, and own requests pass it.
    pub is_absent: bool,
    /// Conditions on the EM, if the request names none.
    pub any_em: Option<AnyEm>,
    /// Keys where the request is short.
    pub short_at: BTreeSet<WaitKey>,
    /// Whether the request has been short at a key where other users wait.
    pub was_shared: bool,
}

impl RankedRequest {
    /// Creates a newcomer at the rank time `now`.
    pub fn entering(request: &PlacedRequest, rules: &QueueRules, now: OffsetDateTime) -> Self {
        let spec = &request.ask;
        let turn = rules.order.fair_by.turn_of(&spec.ticket_labels(&request.em));
        let newcomer = Self::new(spec.ticket_id, turn, now, rules.priorities.priority_of(request));
        Self { any_em: request.any_em.then(|| AnyEm::of(&spec.selector)), ..newcomer }
    }

    /// Creates a request that enters at the rank time `now`, as a first that is short nowhere.
    pub fn new(ticket_id: Uuid, turn: Option<Arc<str>>, now: OffsetDateTime, priority: i16) -> Self {
        Self {
            ticket_id,
            turn,
            entered: now,
            rank_time: now,
            priority,
            class: Class::First,
            is_absent: false,
            any_em: None,
            short_at: BTreeSet::new(),
            was_shared: false,
        }
    }

    /// Returns the request as a check at a shared key compares it. After shortages at private keys alone, the request enters
    /// there at `now`, a new rank time, because the time at its own limits does not count.
    pub fn at_shared_key(&self, now: OffsetDateTime) -> Self {
        let mut request = self.clone();
        if !request.was_shared {
            (request.entered, request.rank_time) = (now, now);
        }
        request
    }

    /// Returns the position, the same at all keys.
    pub fn position(&self) -> QueuePosition {
        let time = if self.class == Class::Behind { self.entered } else { self.rank_time };
        QueuePosition::new(self.class.weight(), self.before(time), self.ticket_id)
    }

    /// Returns whether only own requests wait at a key, by the labels of the turn.
    pub fn is_private(&self, wait_key: &WaitKey) -> bool {
        is_private(self.turn.as_deref(), wait_key)
    }

    /// Returns the turn keys at which own requests can precede the request, if it waits at some of `wait_keys`; none if it has no
    /// own requests.
    pub fn turn_keys_at(&self, wait_keys: impl IntoIterator<Item = WaitKey>) -> BTreeSet<(Arc<str>, TurnKey)> {
        let keys: Vec<TurnKey> = wait_keys.into_iter().map(|wait_key| self.turn_key(&wait_key)).collect();
        queue_keys(self, keys).collect()
    }

    /// Returns the place among own requests.
    pub fn own_order(&self) -> OwnOrder {
        OwnOrder { time: self.before(self.entered), ticket_id: self.ticket_id }
    }

    fn before(&self, time: OffsetDateTime) -> OffsetDateTime {
        time.saturating_sub(time::Duration::seconds(self.priority.into()))
    }

    /// Returns the key at which the request takes turns while it is queued at `wait_key`.
    pub fn turn_key(&self, wait_key: &WaitKey) -> TurnKey {
        match (self.any_em, wait_key) {
            (Some(any_em), WaitKey::Em(_)) => TurnKey::AnyEm(any_em),
            _ => TurnKey::At(wait_key.clone()),
        }
    }

    /// Returns the keys at which the request takes turns.
    fn turn_keys(&self) -> BTreeSet<TurnKey> {
        self.short_at.iter().map(|wait_key| self.turn_key(wait_key)).collect()
    }
}

/// Waiting requests, by turn and key in own order, and the events that change their ranks.
///
/// For an event of one request, a part of the waiting requests is enough. At each key of the request, before and after the
/// event, these are its own requests up to the second present one. Later in own order than the request, they are those up
/// to the next present one. At each other key of all these, it is the first present own request. A request that was not
/// read keeps its rank.
#[derive(Debug, Clone, Default)]
pub struct OwnRequests {
    requests: BTreeMap<Uuid, RankedRequest>,
    queues: BTreeMap<(Arc<str>, TurnKey), BTreeSet<OwnOrder>>,
    /// Requests whose rank has changed, with their positions before.
    reranked: BTreeMap<Uuid, QueuePosition>,
}

impl OwnRequests {
    /// Inserts a stored request, or a new request, which the caller then requeues.
    pub fn insert(&mut self, request: RankedRequest) {
        for key in queue_keys(&request, request.turn_keys()) {
            self.queues.entry(key).or_default().insert(request.own_order());
        }
        self.requests.insert(request.ticket_id, request);
    }

    /// Inserts a request, or replaces it.
    pub fn replace(&mut self, request: RankedRequest) {
        self.remove(request.ticket_id);
        self.insert(request);
    }

    /// Returns a request.
    pub fn get(&self, ticket_id: Uuid) -> Option<&RankedRequest> {
        self.requests.get(&ticket_id)
    }

    /// Returns whether there are no requests.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Returns the positions of the present requests.
    pub fn positions(&self) -> impl Iterator<Item = QueuePosition> {
        self.requests.values().filter(|request| !request.is_absent).map(RankedRequest::position)
    }

    /// Begins the turn of a request anew, unless it is behind.
    pub fn begin_turn(&mut self, ticket_id: Uuid, now: OffsetDateTime) {
        if let Some(request) = self.requests.get_mut(&ticket_id).filter(|request| request.class != Class::Behind) {
            request.rank_time = request.rank_time.max(now);
        }
    }

    /// Marks the absent requests of a turn that was used: they begin a new one when they return.
    pub fn use_absent(&mut self, turn: &str) {
        let of_turn = |request: &&mut RankedRequest| request.is_absent && request.turn.as_deref() == Some(turn);
        self.requests.values_mut().filter(of_turn).for_each(|request| request.class = Class::Behind);
    }

    /// Returns the ticket ids of all requests.
    pub fn ticket_ids(&self) -> impl Iterator<Item = Uuid> {
        self.requests.keys().copied()
    }

    /// Returns the requests whose rank has changed since the last call, with their positions before.
    pub fn take_reranked(&mut self) -> BTreeMap<Uuid, QueuePosition> {
        std::mem::take(&mut self.reranked)
    }

    /// Returns the class of a request among its own ones: behind if an earlier present one is short at a key where it is
    /// short, too. An entitled request stays entitled otherwise.
    pub fn class_of(&self, request: &RankedRequest) -> Class {
        let own_order = request.own_order();
        let mut firsts = queue_keys(request, request.turn_keys()).filter_map(|key| self.present_at(&key).next());
        if firsts.any(|first| first.own_order() < own_order) { Class::Behind } else { request.class.min(Class::First) }
    }

    /// Returns whether a present own request that is earlier in own order is short at `wait_key`.
    pub fn has_earlier_at(&self, request: &RankedRequest, wait_key: &WaitKey) -> bool {
        let keys = queue_keys(request, [request.turn_key(wait_key)]);
        keys.filter_map(|key| Some(self.present_at(&key).next()?.own_order())).any(|first| first < request.own_order())
    }

    /// Returns the position of a newcomer at all of `wait_keys`. Where an own request precedes it, it is assessed as one behind.
    fn entering_position(
        &self,
        request: &RankedRequest,
        wait_keys: impl IntoIterator<Item = WaitKey>,
    ) -> AssessedPosition {
        let behind = RankedRequest { class: Class::Behind, ..request.clone() }.position();
        let has_earlier = |wait_key: &WaitKey| self.has_earlier_at(request, wait_key);
        let elsewhere = wait_keys.into_iter().filter(has_earlier).map(|wait_key| (wait_key, behind)).collect();
        AssessedPosition { elsewhere, ..Some(request.position()).into() }
    }

    /// Returns the own request at a key that is later in own order than `request`, and has an earlier position than `position`.
    pub fn later_own_at(&self, request: &RankedRequest, wait_key: &WaitKey, position: QueuePosition) -> Option<Uuid> {
        let mut keys = queue_keys(request, [request.turn_key(wait_key)]);
        let first = self.present_at(&keys.next()?).find(|own| own.ticket_id != request.ticket_id)?;
        let is_later = first.own_order() > request.own_order() && first.position() < position;
        is_later.then_some(first.ticket_id)
    }

    /// Returns the present own requests that are later in own order and short at some of `wait_keys`.
    fn later_own(&self, request: &RankedRequest, wait_keys: &[WaitKey]) -> BTreeSet<Uuid> {
        let keys = queue_keys(request, wait_keys.iter().map(|wait_key| request.turn_key(wait_key)));
        let own = keys.flat_map(|key| self.present_at(&key).map(|own| own.own_order()).collect::<Vec<_>>());
        own.filter(|own| *own > request.own_order()).map(|own| own.ticket_id).collect()
    }

    /// Sets the keys where a request is short, when it enters and after each check. `now` is a new rank time.
    ///
    /// A request that leaves a key hands its turn there. At the first shared key where it is short, it enters anew.
    pub fn requeue(&mut self, ticket_id: Uuid, short_at: BTreeSet<WaitKey>, now: OffsetDateTime) {
        let Some(before) = self.remove(ticket_id) else { return };
        let mut request = RankedRequest { short_at, ..before.clone() };
        let (left, mut touched) = (before.turn_keys(), request.turn_keys());
        self.hand(&before, left.difference(&touched), before.rank_time, Bound::Excluded(before.own_order()));
        if !before.was_shared && !request.short_at.iter().all(|wait_key| request.is_private(wait_key)) {
            request = RankedRequest { was_shared: true, ..request.at_shared_key(now) };
            self.reranked.entry(ticket_id).or_insert(before.position());
        }
        self.insert(request);
        touched.extend(left);
        self.reclassify(&before, touched);
    }

    /// Removes a granted request. A first uses its turn up: its heirs go after all requests that wait at `now`, a new rank
    /// time.
    pub fn granted(&mut self, ticket_id: Uuid, now: OffsetDateTime) {
        let Some(request) = self.remove(ticket_id) else { return };
        self.reranked.remove(&ticket_id);
        if request.class != Class::Behind {
            self.hand(&request, &request.turn_keys(), now, Bound::Unbounded);
        }
        self.reclassify(&request, request.turn_keys());
    }

    /// Removes a request that is cancelled, refused or removed. Its heirs go at its rank time at the earliest.
    pub fn left(&mut self, ticket_id: Uuid) {
        let Some(request) = self.remove(ticket_id) else { return };
        self.reranked.remove(&ticket_id);
        self.hand(&request, &request.turn_keys(), request.rank_time, Bound::Excluded(request.own_order()));
        self.reclassify(&request, request.turn_keys());
    }

    /// Marks a request absent: an own request takes the turn, at the later of both rank times.
    pub fn absent(&mut self, ticket_id: Uuid) {
        let Some(request) = self.requests.get_mut(&ticket_id) else { return };
        request.is_absent = true;
        let request = request.clone();
        self.hand(&request, &request.turn_keys(), request.rank_time, Bound::Excluded(request.own_order()));
        self.reclassify(&request, request.turn_keys());
    }

    /// Marks a request present. Its rank time stays, so that it returns to its place, unless an own request used its turn.
    pub fn returned(&mut self, ticket_id: Uuid) {
        let Some(request) = self.requests.get_mut(&ticket_id) else { return };
        request.is_absent = false;
        let request = request.clone();
        self.reclassify(&request, request.turn_keys());
    }

    /// Hands the turn of a request at `keys`: raises the rank times of the own requests from `start` on, up to the first
    /// present one at each key.
    fn hand<'a>(
        &mut self,
        from: &RankedRequest,
        keys: impl IntoIterator<Item = &'a TurnKey>,
        time: OffsetDateTime,
        start: Bound<OwnOrder>,
    ) {
        for key in queue_keys(from, keys.into_iter().cloned()) {
            let heirs: Vec<Uuid> = self.own_at(&key, start).map(|own| own.ticket_id).collect();
            for ticket_id in heirs {
                let Some(own) = self.requests.get_mut(&ticket_id) else { continue };
                if own.rank_time < time {
                    self.reranked.entry(ticket_id).or_insert(own.position());
                    own.rank_time = time;
                }
                if !own.is_absent {
                    break;
                }
            }
        }
    }

    /// Computes the classes again that an event of `request` at `keys` can change: those of the first present request at
    /// each key, and of requests that were firsts there. The class of an absent request is computed when it returns.
    fn reclassify(&mut self, request: &RankedRequest, keys: impl IntoIterator<Item = TurnKey>) {
        let mut touched = BTreeSet::new();
        for key in queue_keys(request, keys) {
            let present = self.present_at(&key).enumerate();
            touched.extend(
                present.filter(|(at, own)| *at == 0 || own.class != Class::Behind).map(|(_, own)| own.ticket_id),
            );
        }
        for ticket_id in touched {
            let Some(class) = self.requests.get(&ticket_id).map(|own| self.class_of(own)) else { continue };
            let Some(own) = self.requests.get_mut(&ticket_id).filter(|own| own.class != class) else { continue };
            self.reranked.entry(ticket_id).or_insert(own.position());
            own.class = class;
        }
    }

    fn remove(&mut self, ticket_id: Uuid) -> Option<RankedRequest> {
        let request = self.requests.remove(&ticket_id)?;
        for key in queue_keys(&request, request.turn_keys()) {
            if let Some(queue) = self.queues.get_mut(&key) {
                queue.remove(&request.own_order());
            }
        }
        Some(request)
    }

    /// Returns the own requests at a key from `start` on, in own order.
    fn own_at(&self, key: &(Arc<str>, TurnKey), start: Bound<OwnOrder>) -> impl Iterator<Item = &RankedRequest> {
        let queue = self.queues.get(key).into_iter().flat_map(move |queue| queue.range((start, Bound::Unbounded)));
        queue.filter_map(|own_order| self.requests.get(&own_order.ticket_id))
    }

    fn present_at(&self, key: &(Arc<str>, TurnKey)) -> impl Iterator<Item = &RankedRequest> {
        self.own_at(key, Bound::Unbounded).filter(|own| !own.is_absent)
    }
}

/// Returns the queues of the own requests of `request` at `keys`; none if it has no own requests.
fn queue_keys(
    request: &RankedRequest,
    keys: impl IntoIterator<Item = TurnKey>,
) -> impl Iterator<Item = (Arc<str>, TurnKey)> {
    let turn = request.turn.clone();
    keys.into_iter().filter_map(move |key| Some((turn.clone()?, key)))
}

/// Ranks that a batch or a check has read: those of the requests that it decides and of their own requests.
#[derive(Debug, Clone, Default)]
pub struct QueueRanks {
    /// The requests.
    pub own: OwnRequests,
    /// Latest rank time of any waiting request.
    pub latest: Option<OffsetDateTime>,
    /// Turns with absent firsts.
    pub absent_turns: BTreeSet<Arc<str>>,
    /// Amounts of other entitled requests, in the scopes with guarantees.
    pub promises: Promises,
}

/// A request with the position at which a check assesses it.
#[derive(Debug, Clone)]
pub struct DecidedRank {
    /// The rank: as stored, with the class by the present own requests, or that of a newcomer.
    pub rank: RankedRequest,
    /// The position.
    pub position: AssessedPosition,
    /// The position, as if own requests that are later in own order kept nothing; `None` if none has an earlier position.
    own_position: Option<AssessedPosition>,
}

impl DecidedRank {
    /// Assesses the request. A short request waits at the keys where other turns make it short, or else at all keys where it is short.
    /// If it waited where only a later own request precedes it, that one would fall behind, and precede it again after it has left.
    ///
    /// # Errors
    /// The errors of `assess`.
    pub fn assess<T>(
        &self,
        assess: impl Fn(&AssessedPosition) -> Result<Result<T, Box<BlockedRequest>>, Rejection>,
    ) -> Result<Result<T, Box<BlockedRequest>>, Rejection> {
        let mut assessed = assess(&self.position)?;
        if let (Err(short), Some(own_position)) = (&mut assessed, &self.own_position)
            && let Err(of_others) = assess(own_position)?
        {
            short.wait_keys = of_others.wait_keys;
        }
        Ok(assessed)
    }
}

impl QueueRanks {
    /// Returns the next rank time at the database time `now`.
    pub fn rank_time(&self, now: OffsetDateTime) -> OffsetDateTime {
        new_rank_time(now, self.latest)
    }

    /// Ranks a request whose entry is stored under `stored`, or a newcomer without. `wait_keys` are all keys at which it can wait;
    /// `usage` returns the holdings of its scopes.
    pub fn decide<'a>(
        &self,
        request: &PlacedRequest,
        stored: Option<Uuid>,
        wait_keys: impl IntoIterator<Item = WaitKey>,
        (limits, now): (&Limits, OffsetDateTime),
        usage: impl Fn(&ScopeCounter) -> Option<&'a ScopeHoldings>,
    ) -> DecidedRank {
        let guaranteed = |rank: &RankedRequest, wait_keys: &[WaitKey]| {
            let displaced = &self.own.later_own(rank, wait_keys);
            match rank.class {
                Class::Behind => Class::Behind,
                _ if self.promises.is_entitled(GuaranteeCheck { request, displaced, limits }, &usage) => {
                    Class::Entitled
                }
                _ => Class::First,
            }
        };
        let (now, wait_keys) = (self.rank_time(now), wait_keys.into_iter().collect::<Vec<_>>());
        let stored = stored.and_then(|ticket_id| self.own.get(ticket_id));
        let (rank, position) = match stored {
            Some(stored) => {
                let mut rank = match stored.is_absent {
                    true => self.returning(stored, wait_keys.iter().cloned(), now),
                    false => RankedRequest { class: self.own.class_of(stored), ..stored.clone() },
                };
                rank.class = guaranteed(&rank, &wait_keys);
                let mut position = AssessedPosition::from(Some(rank.position()));
                if !rank.was_shared {
                    let entering = rank.at_shared_key(now);
                    let shared = || wait_keys.iter().filter(|wait_key| !rank.is_private(wait_key)).cloned();
                    position.elsewhere = shared().map(|wait_key| (wait_key, entering.position())).collect();
                    position.elsewhere.extend(self.own.entering_position(&entering, shared()).elsewhere);
                }
                (rank, position)
            }
            None => {
                let mut rank = RankedRequest::entering(request, limits.queue_rules(), now);
                rank.class = guaranteed(&rank, &wait_keys);
                let position = self.own.entering_position(&rank, wait_keys.iter().cloned());
                (rank, position)
            }
        };
        let later_own = wait_keys.into_iter().filter_map(|wait_key| {
            let own = self.own.later_own_at(&rank, &wait_key, position.at(&wait_key)?)?;
            Some((wait_key, own))
        });
        let own_position = AssessedPosition { later_own: later_own.collect(), ..position.clone() };
        let own_position = Some(own_position).filter(|own_position| !own_position.later_own.is_empty());
        DecidedRank { rank, position, own_position }
    }

    /// Returns the rank of a request whose caller comes back, at any of its keys. No turn was handed to the absent request. If it was
    /// behind, or an own request used the turn, its rank time is `now` as soon as it is a first.
    fn returning(
        &self,
        stored: &RankedRequest,
        wait_keys: impl IntoIterator<Item = WaitKey>,
        now: OffsetDateTime,
    ) -> RankedRequest {
        let short_at = wait_keys.into_iter().collect();
        let returning = RankedRequest { short_at, is_absent: false, ..stored.clone() };
        let class = self.own.class_of(&returning);
        let has_lost_turn = stored.class == Class::Behind && class != Class::Behind;
        let rank_time = if has_lost_turn { now } else { stored.rank_time };
        RankedRequest { class, rank_time, ..returning }
    }
}
