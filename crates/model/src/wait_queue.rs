//! Wait queues: the order of waiting requests at each wait key, and the capacity that earlier entries reserve.
//!
//! A waiting request has an entry at every key (EM, scope or external queue) where it is short. A later request is assessed
//! as if all earlier entries at its keys were granted. It can overtake only by using nothing that they wait for, so freed
//! capacity accumulates for a large request until it fits.
//!
//! At keys where it is not short, a request reserves nothing. The exception is the head of a queue, which reserves at all of its
//! keys, so that it is granted eventually; but a request that is short at private keys only (those of one user, or of one turn)
//! reserves nothing elsewhere: a user at a personal limit would keep capacity idle.
//! Never: wakes or grants a request. Callers: the assessment, the ledger, the store and the admission's state cache.

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    fmt, mem,
    sync::{Arc, OnceLock},
};

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    cap::Cap,
    em::EmInstance,
    name::{Labels, Name},
    order::{Class, RankedRequest},
    resource::Resource,
    scope::{Scope, Tally},
    visits::visit,
};

/// Wait key: an EM, scope or external queue that requests wait for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WaitKey {
    /// An EM.
    Em(EmInstance),
    /// A limited scope.
    Scope(Scope),
    /// A queue of an external cluster.
    Queue {
        /// Name of the provider.
        provider: Name,
        /// Path of the queue.
        path: String,
    },
}

impl WaitKey {
    /// Whether the requests of one user alone wait here.
    fn is_of_user(&self) -> bool {
        matches!(self, Self::Scope(scope) if scope.names_user())
    }
}

/// For display; not parsed.
impl fmt::Display for WaitKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Em(em) => write!(f, "em={em}"),
            Self::Scope(scope) => scope.fmt(f),
            Self::Queue { provider, path } => write!(f, "provider={provider},queue={path}"),
        }
    }
}

/// Length of a [`QueuePosition`] in bytes.
pub const POSITION_BYTES: usize = 26;

/// Position of a request, the sort key of its entries. The position is the same in all queues, so two queues can never wait
/// for each other. The bytes sort by class, then by the time of the class less the head start, then by ticket id.
/// [`super::order`] computes it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueuePosition([u8; POSITION_BYTES]);

impl QueuePosition {
    /// Creates a position from the weight of the class (the highest first), the time less the head start and the id of the future
    /// ticket.
    pub fn new(weight: i16, since: OffsetDateTime, ticket_id: Uuid) -> Self {
        let rank = u16::MAX - weight.cast_unsigned().wrapping_add(1 << 15);
        let micros = i64::try_from(since.unix_timestamp_nanos() / 1000).unwrap_or(i64::MAX);
        let since = micros.cast_unsigned().wrapping_add(1 << 63);
        let mut bytes = [0; POSITION_BYTES];
        let fields = rank.to_be_bytes().into_iter().chain(since.to_be_bytes()).chain(ticket_id.into_bytes());
        bytes.iter_mut().zip(fields).for_each(|(byte, field)| *byte = field);
        Self(bytes)
    }

    /// Parses a stored position; `None` if the length is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Parses the displayed form; `None` if it is no position.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = |at: usize| u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok();
        let bytes: Option<Vec<u8>> = (0..POSITION_BYTES).map(digits).collect();
        Self::from_bytes(&bytes?).filter(|_| text.len() == 2 * POSITION_BYTES)
    }

    /// Returns the bytes to store.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the time less the head start, in microseconds.
    pub fn since(&self) -> OffsetDateTime {
        let mut micros = [0; 8];
        micros.copy_from_slice(&self.0[2..10]);
        let micros = u64::from_be_bytes(micros).wrapping_sub(1 << 63).cast_signed();
        OffsetDateTime::from_unix_timestamp_nanos(i128::from(micros) * 1000).unwrap_or(OffsetDateTime::UNIX_EPOCH)
    }

    /// Returns the id of the ticket that a grant creates.
    pub fn ticket_id(&self) -> Uuid {
        let mut ticket_id = [0; 16];
        ticket_id.copy_from_slice(&self.0[POSITION_BYTES - 16..]);
        Uuid::from_bytes(ticket_id)
    }
}

impl fmt::Debug for QueuePosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueuePosition({self})")
    }
}

/// In hexadecimal digits.
impl fmt::Display for QueuePosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Position at which a request is assessed. The default is after all entries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AssessedPosition {
    /// The position; `None` after all entries.
    pub position: Option<QueuePosition>,
    /// Keys where the request is assessed at another position.
    pub elsewhere: BTreeMap<WaitKey, QueuePosition>,
    /// Own requests that are later in own order, and keep nothing from the request although their positions are earlier.
    pub later_own: BTreeMap<WaitKey, Uuid>,
}

impl From<Option<QueuePosition>> for AssessedPosition {
    fn from(position: Option<QueuePosition>) -> Self {
        Self { position, ..Self::default() }
    }
}

impl AssessedPosition {
    /// Returns the position at a key; `None` after all entries.
    pub fn at(&self, wait_key: &WaitKey) -> Option<QueuePosition> {
        self.elsewhere.get(wait_key).copied().or(self.position)
    }
}

/// Entry of a request in one wait queue.
#[derive(Debug, Clone, PartialEq)]
pub struct QueueEntry {
    /// Requested amounts.
    pub resource: Resource,
    /// Whether the request is short here; otherwise the entry only reserves capacity.
    pub is_short: bool,
}

/// 64-bit hash of a wait key. A collision causes a spurious check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WaitKeyHash(pub u64);

/// Wait keys of a request; true where it is short.
pub type WaitKeys = BTreeMap<WaitKey, bool>;

/// Whether a request is short at a key that it has at every EM: capacity that is freed at an EM does not serve it then.
pub fn is_short_at_every_em(wait_keys: &WaitKeys) -> bool {
    let is_everywhere = |wait_key: &WaitKey| match wait_key {
        WaitKey::Em(_) => false,
        WaitKey::Scope(scope) => !scope.names_em(),
        WaitKey::Queue { .. } => true,
    };
    wait_keys.iter().any(|(wait_key, is_short)| *is_short && is_everywhere(wait_key))
}

/// Number of requests for "unknown, possibly many".
pub const MUCH: u32 = u32::MAX;

/// Maximum number of requests that removed entries wake at one wait key.
pub const RESERVATIONS_COUNTED_MAX: u32 = 4;

/// Wait keys with freed capacity or fewer earlier entries, each with the approximate number of requests that caused it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FreedKeys(BTreeMap<WaitKey, u32>);

impl FreedKeys {
    /// Adds freed capacity of `requests` requests at a key.
    pub fn add(&mut self, wait_key: WaitKey, requests: u32) {
        let noted = self.0.entry(wait_key).or_default();
        *noted = noted.saturating_add(requests);
    }

    /// Adds the reservation of one removed request at a key. It is no capacity: above [`RESERVATIONS_COUNTED_MAX`] a few requests
    /// check, and each granted one wakes the next.
    pub fn add_reservation(&mut self, wait_key: WaitKey) {
        let noted = self.0.entry(wait_key).or_default();
        *noted = if *noted < RESERVATIONS_COUNTED_MAX { *noted + 1 } else { MUCH };
    }

    /// Replaces numbers above `most` by [`MUCH`].
    pub fn counted_up_to(mut self, most: u32) -> Self {
        self.0.values_mut().filter(|requests| **requests > most).for_each(|requests| *requests = MUCH);
        self
    }

    /// Returns whether capacity was freed at a key.
    pub fn contains(&self, wait_key: &WaitKey) -> bool {
        self.0.contains_key(wait_key)
    }

    /// Returns whether no capacity was freed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns each key with the number of requests that freed capacity; [`MUCH`] if unknown.
    pub fn iter(&self) -> impl Iterator<Item = (&WaitKey, u32)> {
        self.0.iter().map(|(wait_key, requests)| (wait_key, *requests))
    }
}

/// A waiting request as lists show it.
#[derive(Debug, Clone, PartialEq)]
pub struct WaitingRequest {
    /// Id of the ticket that a grant creates.
    pub ticket_id: Uuid,
    /// Start of waiting, by the database clock.
    pub waiting_since: OffsetDateTime,
    /// User of the request.
    pub user: Name,
    /// Application of the user.
    pub creator: Name,
    /// Engine type; may be empty.
    pub engine_type: String,
    /// EM of the latest decision.
    pub em: EmInstance,
    /// Whether the request can be granted on any EM.
    pub any_em: bool,
    /// Requested amounts.
    pub resource: Resource,
    /// Labels of the request.
    pub labels: Labels,
    /// Caps of the request.
    pub caps: Vec<Cap>,
    /// Deadline of waiting.
    pub wait_until: OffsetDateTime,
    /// Call that owns the position; `None` while its caller is absent.
    pub claim: Option<Uuid>,
    /// Time until which the position is kept for an absent caller; `None` if the caller is present.
    pub kept_until: Option<OffsetDateTime>,
    /// Class of the latest decision.
    pub class: Class,
    /// Head start, in seconds.
    pub priority: i16,
    /// Keys where the request is short, for display, with the number of earlier short entries.
    pub ahead: BTreeMap<String, i64>,
}

/// A waiting request whose position or rank time another one has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RerankedRequest {
    /// The position.
    pub position: QueuePosition,
    /// Time of the decision that stored the position, by the database clock; `None` if only the rank time has changed, and a check
    /// computes the position.
    pub decided_at: Option<OffsetDateTime>,
}

/// The position of a waiting request, and the call that owns it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnedPosition {
    /// Id of the ticket that a grant creates.
    pub ticket_id: Uuid,
    /// The call; `None` while the caller is absent.
    pub claim: Option<Uuid>,
}

/// How much of a wait queue was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ViewExtent {
    /// All entries that affect a request at the end of the queue.
    All,
    /// All entries up to this position, inclusive.
    UpTo(QueuePosition),
}

impl ViewExtent {
    /// Returns the extent that includes both.
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::UpTo(one), Self::UpTo(two)) => Self::UpTo(one.max(two)),
            _ => Self::All,
        }
    }
}

/// Keys that were read, with their extents.
pub type ViewedKeys = BTreeMap<WaitKey, ViewExtent>;

/// Returns the keys and extents that several requests need together.
pub fn viewed_keys(requests: impl IntoIterator<Item = (WaitKey, ViewExtent)>) -> ViewedKeys {
    let mut wait_keys = ViewedKeys::new();
    for (wait_key, extent) in requests {
        wait_keys.entry(wait_key).and_modify(|viewed| *viewed = viewed.and(extent)).or_insert(extent);
    }
    wait_keys
}

/// The wait queues of some wait keys, and the wait keys of each request in them.
#[derive(Debug, Clone, Default)]
pub struct WaitQueues {
    queues: HashMap<Arc<WaitKey>, Arc<WaitQueue>>,
    /// Requests by the ticket that a grant creates, so that an operation on a request visits only its own keys.
    requests: HashMap<Uuid, QueuedRequest>,
}

/// A request in some wait queues. It has one position in all of them.
#[derive(Debug, Clone)]
struct QueuedRequest {
    position: QueuePosition,
    keys: Vec<Arc<WaitKey>>,
}

/// Entries of one wait key.
#[derive(Debug, Clone, Default)]
struct WaitQueue {
    entries: BTreeMap<QueuePosition, QueueEntry>,
    /// The first entry that is short here.
    first_short: Option<QueuePosition>,
    /// Sum of all entries; computed at the first use.
    total: OnceLock<Tally>,
    /// Sums of the entries before every [`STRIDE`]th position; computed at the first use by a later position.
    marks: OnceLock<BTreeMap<QueuePosition, Tally>>,
}

/// Number of entries between two marks.
const STRIDE: usize = 32;

impl WaitQueue {
    fn total(&self) -> &Tally {
        self.total.get_or_init(|| sum(self.entries.values()))
    }

    fn marks(&self) -> &BTreeMap<QueuePosition, Tally> {
        self.marks.get_or_init(|| {
            let (mut marks, mut before) = (BTreeMap::new(), Tally::default());
            for (number, (position, entry)) in self.entries.iter().enumerate() {
                visit();
                if number.is_multiple_of(STRIDE) {
                    marks.insert(*position, before.clone());
                }
                before.add_up(&entry.resource);
            }
            marks
        })
    }

    /// Returns the sum of the entries before `position`.
    fn sum_before(&self, position: QueuePosition) -> Tally {
        let (mut near, mut tally) = (self.entries.range(..position), Tally::default());
        if near.clone().nth(STRIDE).is_some()
            && let Some((mark, before)) = self.marks().range(..=position).next_back()
        {
            (near, tally) = (self.entries.range(*mark..position), before.clone());
        }
        for (_, entry) in near {
            visit();
            tally.add_up(&entry.resource);
        }
        tally
    }

    fn insert(&mut self, position: QueuePosition, entry: QueueEntry) {
        self.remove(position);
        if entry.is_short && self.first_short.is_none_or(|first| position < first) {
            self.first_short = Some(position);
        }
        if let Some(total) = self.total.get_mut() {
            total.add_up(&entry.resource);
        }
        self.marks.take();
        self.entries.insert(position, entry);
    }

    fn remove(&mut self, position: QueuePosition) -> Option<QueueEntry> {
        let entry = self.entries.remove(&position)?;
        if self.first_short == Some(position) {
            let mut behind = self.entries.range(position..).inspect(|_| visit());
            self.first_short = behind.find(|(_, other)| other.is_short).map(|(other, _)| *other);
        }
        if self.total.get_mut().is_some_and(|total| !total.take_off(&entry.resource)) {
            self.total.take();
        }
        self.marks.take();
        Some(entry)
    }

    /// Returns the positions that only this queue contains, and those that only `other` contains.
    fn difference(&self, other: &Self) -> (Vec<QueuePosition>, Vec<QueuePosition>) {
        let only = |one: &Self, two: &Self| {
            let positions = one.entries.keys().inspect(|_| visit());
            positions.filter(|position| !two.entries.contains_key(position)).copied().collect()
        };
        (only(self, other), only(other, self))
    }
}

impl WaitQueues {
    /// Returns the sum of the entries at a key before `position`, or of all entries without a position.
    pub fn reserved_ahead(&self, wait_key: &WaitKey, position: Option<QueuePosition>) -> Tally {
        match (self.queues.get(wait_key), position) {
            (None, _) => Tally::default(),
            (Some(queue), None) => queue.total().clone(),
            (Some(queue), Some(position)) => queue.sum_before(position),
        }
    }

    /// Returns the amounts that a request reserves at a key; `None` if it has no entry there.
    pub fn reserved_by(&self, wait_key: &WaitKey, ticket_id: Uuid) -> Option<&Resource> {
        Some(&self.queues.get(wait_key)?.entries.get(&self.position_of(ticket_id)?)?.resource)
    }

    /// Returns the sum of the entries that precede a request at a key. Computes the key only if an entry exists.
    pub fn ahead_at(&self, wait_key: impl FnOnce() -> WaitKey, position: &AssessedPosition) -> Tally {
        if self.is_empty() {
            return Tally::default();
        }
        let wait_key = wait_key();
        let at = position.at(&wait_key);
        let mut ahead = self.reserved_ahead(&wait_key, at);
        // The stored position of the request itself may be earlier.
        let itself = at.map(|at| at.ticket_id());
        let is_ahead =
            |ticket_id: &Uuid| self.position_of(*ticket_id).is_some_and(|stored| at.is_none_or(|at| stored < at));
        let excluded = itself.into_iter().chain(position.later_own.get(&wait_key).copied()).filter(is_ahead);
        for reserved in excluded.filter_map(|ticket_id| self.reserved_by(&wait_key, ticket_id)) {
            // A sum that has saturated stays: the request then waits there, too.
            let _ = ahead.take_off(reserved);
        }
        ahead
    }

    /// Selects the keys at which a request is queued: those where it is short. The first short entry of a key is queued at
    /// all of its keys, unless it is short at private keys only: those of one user, or of one turn.
    pub fn keys_for(&self, position: QueuePosition, wait_keys: &WaitKeys, rank: Option<&RankedRequest>) -> WaitKeys {
        let is_first = |wait_key: &WaitKey| self.first_short(wait_key).is_none_or(|first| position <= first);
        let short = || wait_keys.iter().filter(|(_, is_short)| **is_short).map(|(wait_key, _)| wait_key);
        let is_private =
            |wait_key: &WaitKey| wait_key.is_of_user() || rank.is_some_and(|rank| rank.is_private(wait_key));
        let keeps_all = short().any(is_first) && !short().all(is_private);
        wait_keys
            .iter()
            .filter(|(_, is_short)| **is_short || keeps_all)
            .map(|(wait_key, short)| (wait_key.clone(), *short))
            .collect()
    }

    /// Returns the first position at a key where the request is short.
    pub fn first_short(&self, wait_key: &WaitKey) -> Option<QueuePosition> {
        self.queues.get(wait_key)?.first_short
    }

    /// Returns the position of a request; `None` if it is in no wait queue.
    pub fn position_of(&self, ticket_id: Uuid) -> Option<QueuePosition> {
        self.requests.get(&ticket_id).map(|request| request.position)
    }

    /// Returns the wait keys of a queued request; empty if it is not queued.
    pub fn keys_of(&self, ticket_id: Uuid) -> WaitKeys {
        let Some(QueuedRequest { position, keys }) = self.requests.get(&ticket_id) else { return WaitKeys::new() };
        let is_short = |key: &Arc<WaitKey>| Some(self.queues.get(key)?.entries.get(position)?.is_short);
        keys.iter().inspect(|_| visit()).filter_map(|key| Some((WaitKey::clone(key), is_short(key)?))).collect()
    }

    /// Inserts an entry at a key. The request has this position from now on, also at its other keys.
    pub fn insert(&mut self, wait_key: WaitKey, position: QueuePosition, entry: QueueEntry) {
        self.insert_at(self.key(wait_key), position, entry);
    }

    /// Removes all entries of a request.
    pub fn remove(&mut self, ticket_id: Uuid) {
        let Some(QueuedRequest { position, keys }) = self.requests.remove(&ticket_id) else { return };
        for key in keys {
            visit();
            self.remove_entry(&key, position);
        }
    }

    /// Sets the wait keys of a request to exactly `wait_keys`, and its position. Queues without a change keep their sums.
    pub fn put(&mut self, position: QueuePosition, wait_keys: &WaitKeys, resource: &Resource) {
        self.set_position(position);
        let keys = self.requests.get(&position.ticket_id()).map(|request| &request.keys);
        let left: Vec<Arc<WaitKey>> = (keys.into_iter().flatten())
            .inspect(|_| visit())
            .filter(|key| !wait_keys.contains_key(&***key))
            .cloned()
            .collect();
        for key in left {
            self.remove_at(&key, position);
        }
        for (wait_key, is_short) in wait_keys {
            let entry = QueueEntry { resource: resource.clone(), is_short: *is_short };
            let before = self.queues.get(wait_key).and_then(|queue| queue.entries.get(&position));
            if before != Some(&entry) {
                self.insert(wait_key.clone(), position, entry);
            }
        }
    }

    /// Copies the queues of `wait_keys` from `other`, each up to its extent.
    pub fn replace(&mut self, wait_keys: ViewedKeys, other: &Self) {
        for (wait_key, extent) in wait_keys {
            let (queue, key) = (other.queues.get(&wait_key), self.key(wait_key));
            match extent {
                ViewExtent::All => self.replace_all(&key, queue),
                ViewExtent::UpTo(last) => self.replace_first(&key, last, queue),
            }
        }
    }

    /// Returns the number of non-empty wait queues.
    pub fn wait_keys(&self) -> usize {
        self.queues.len()
    }

    /// Replaces a whole wait queue.
    fn replace_all(&mut self, key: &Arc<WaitKey>, other: Option<&Arc<WaitQueue>>) {
        let (before, after) = (self.queues.remove(key).unwrap_or_default(), other.cloned().unwrap_or_default());
        let (left, entered) = before.difference(&after);
        left.into_iter().for_each(|position| self.forget(key, position));
        entered.into_iter().for_each(|position| self.note(key, position));
        if !after.entries.is_empty() {
            self.queues.insert(key.clone(), after);
        }
    }

    /// Replaces the entries of a wait queue up to `last`. A queue without a difference keeps its sums.
    fn replace_first(&mut self, key: &Arc<WaitKey>, last: QueuePosition, other: Option<&Arc<WaitQueue>>) {
        let before = self.queues.get(key).map(|queue| &queue.entries);
        let after = other.map(|queue| &queue.entries);
        let in_before = |position: &QueuePosition| before.and_then(|entries| entries.get(position));
        let in_after = |position: &QueuePosition| after.and_then(|entries| entries.get(position));
        let first = |entries| Option::into_iter(entries).flat_map(|entries: &BTreeMap<_, _>| entries.range(..=last));
        let left = first(before).inspect(|_| visit()).filter(|(position, _)| in_after(position).is_none());
        let left: Vec<QueuePosition> = left.map(|(position, _)| *position).collect();
        let entered = first(after).inspect(|_| visit()).filter(|(position, entry)| in_before(position) != Some(entry));
        let entered: Vec<(QueuePosition, QueueEntry)> =
            entered.map(|(position, entry)| (*position, entry.clone())).collect();
        left.into_iter().for_each(|position| self.remove_at(key, position));
        entered.into_iter().for_each(|(position, entry)| self.insert_at(key.clone(), position, entry));
    }

    /// Returns the stored instance of the wait key, or a new one.
    fn key(&self, wait_key: WaitKey) -> Arc<WaitKey> {
        self.queues.get_key_value(&wait_key).map(|(key, _)| key.clone()).unwrap_or_else(|| Arc::new(wait_key))
    }

    fn insert_at(&mut self, key: Arc<WaitKey>, position: QueuePosition, entry: QueueEntry) {
        self.note(&key, position);
        Arc::make_mut(self.queues.entry(key).or_default()).insert(position, entry);
    }

    /// Moves the entries of a request to this position. A queue never has two entries of one request.
    pub fn set_position(&mut self, position: QueuePosition) {
        let request = self.requests.get_mut(&position.ticket_id());
        let Some(request) = request.filter(|request| request.position != position) else { return };
        let before = mem::replace(&mut request.position, position);
        for key in &request.keys {
            visit();
            let queue = self.queues.get_mut(key).map(Arc::make_mut);
            if let Some(queue) = queue
                && let Some(entry) = queue.remove(before)
            {
                queue.insert(position, entry);
            }
        }
    }

    /// Adds a wait key to a request at this position.
    fn note(&mut self, key: &Arc<WaitKey>, position: QueuePosition) {
        self.set_position(position);
        let new = || QueuedRequest { position, keys: Vec::new() };
        let request = self.requests.entry(position.ticket_id()).or_insert_with(new);
        if !request.keys.contains(key) {
            request.keys.push(key.clone());
        }
    }

    /// Removes the entry of a request from one wait queue, and the key from the request.
    fn remove_at(&mut self, key: &Arc<WaitKey>, position: QueuePosition) {
        self.forget(key, position);
        self.remove_entry(key, position);
    }

    /// Removes one wait key of a request.
    fn forget(&mut self, key: &Arc<WaitKey>, position: QueuePosition) {
        if let Entry::Occupied(mut request) = self.requests.entry(position.ticket_id()) {
            request.get_mut().keys.retain(|other| other != key);
            if request.get().keys.is_empty() {
                request.remove();
            }
        }
    }

    /// Removes an entry from a wait queue, and the queue with its last entry.
    fn remove_entry(&mut self, key: &Arc<WaitKey>, position: QueuePosition) {
        let Some(queue) = self.queues.get_mut(key) else { return };
        let queue = Arc::make_mut(queue);
        queue.remove(position);
        if queue.entries.is_empty() {
            self.queues.remove(key);
        }
    }

    /// Returns whether a key has entries.
    pub fn contains(&self, wait_key: &WaitKey) -> bool {
        self.queues.contains_key(wait_key)
    }

    /// Drops the content one wait queue or request at a time, so that the caller can yield in between.
    pub fn into_dropped(self) -> impl Iterator<Item = ()> + Send {
        self.queues.into_iter().map(drop).chain(self.requests.into_iter().map(drop))
    }

    /// Returns whether all wait queues are empty.
    pub fn is_empty(&self) -> bool {
        self.queues.is_empty()
    }
}

fn sum<'a>(entries: impl Iterator<Item = &'a QueueEntry>) -> Tally {
    let mut sum = Tally::default();
    for entry in entries {
        visit();
        sum.add_up(&entry.resource);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{resource::Dimension, visits};

    fn id(number: u128) -> Uuid {
        Uuid::from_u128(number)
    }

    fn position(number: u128) -> QueuePosition {
        QueuePosition::new(0, OffsetDateTime::UNIX_EPOCH, id(number))
    }

    fn em(host: &str) -> WaitKey {
        WaitKey::Em(EmInstance::parse("em", "ecm", host).unwrap())
    }

    fn scope(label: &str, value: &str) -> WaitKey {
        WaitKey::Scope(Scope::new(BTreeMap::from([(label.to_owned(), value.to_owned())])))
    }

    fn user(name: &str) -> WaitKey {
        scope("user", name)
    }

    /// Queues a request at the selected keys. Its number is its position and the number of requested cores.
    fn enqueue(line: &mut WaitQueues, number: u128, wait_keys: &[(WaitKey, bool)]) -> WaitKeys {
        let entries = line.keys_for(position(number), &wait_keys.iter().cloned().collect(), None);
        let resource = Resource::cpu(i64::try_from(number).unwrap()).unwrap();
        for (wait_key, is_short) in &entries {
            line.insert(
                wait_key.clone(),
                position(number),
                QueueEntry { resource: resource.clone(), is_short: *is_short },
            );
        }
        entries
    }

    #[test]
    fn wait_queue_head_alone_reserves_where_not_short() {
        let mut line = WaitQueues::default();
        let wait_keys = [(em("a"), false), (scope("creator", "c"), true)];
        assert_eq!(enqueue(&mut line, 1, &wait_keys).len(), 2, "the first at creator=c");
        assert_eq!(enqueue(&mut line, 2, &wait_keys), BTreeMap::from([(scope("creator", "c"), true)]));
        let ahead =
            |line: &WaitQueues, wait_key, position| line.reserved_ahead(&wait_key, position).get(&Dimension::Cores);
        assert_eq!(ahead(&line, em("a"), None), 1, "the amounts of one entry, because all wait for one limit");
        assert_eq!(ahead(&line, scope("creator", "c"), None), 1 + 2);
        line.remove(id(1));
        assert_eq!(enqueue(&mut line, 2, &wait_keys).len(), 2, "now the first");
    }

    #[test]
    fn wait_queue_head_at_own_limit_reserves_nothing_elsewhere() {
        let mut line = WaitQueues::default();
        let at_own_limit = [(em("a"), false), (user("u"), true)];
        assert_eq!(enqueue(&mut line, 1, &at_own_limit), BTreeMap::from([(user("u"), true)]));
        let also_at_shared = [(em("a"), false), (user("v"), true), (scope("creator", "c"), true)];
        assert_eq!(enqueue(&mut line, 2, &also_at_shared).len(), 3, "another user can wait at creator=c");
    }

    #[test]
    fn wait_queue_positions_are_ordered_and_exclude_own_entry() {
        let mut line = WaitQueues::default();
        for number in [3, 1, 2] {
            enqueue(&mut line, number, &[(em("a"), true)]);
        }
        let ahead = |wait_key, number: Option<u128>| {
            line.reserved_ahead(&wait_key, number.map(position)).get(&Dimension::Cores)
        };
        assert_eq!([1, 2, 3, 4].map(|number| ahead(em("a"), Some(number))), [0, 1, 1 + 2, 1 + 2 + 3]);
        assert_eq!((ahead(em("a"), None), ahead(em("b"), None)), (6, 0));
        line.remove(id(2));
        assert_eq!(line.reserved_ahead(&em("a"), None).get(&Dimension::Cores), 1 + 3);
    }

    #[test]
    fn wait_queue_reservation_of_many_entries_is_exact() {
        let mut line = WaitQueues::default();
        let ahead =
            |line: &WaitQueues, number| line.reserved_ahead(&em("a"), Some(position(number))).get(&Dimension::Cores);
        let sum = |numbers: std::ops::Range<u128>| i64::try_from(numbers.sum::<u128>()).unwrap();
        for number in 1..=200 {
            enqueue(&mut line, number, &[(em("a"), true)]);
            assert_eq!(ahead(&line, number), sum(1..number));
        }
        for gone in 1..=100 {
            line.remove(id(gone));
            assert_eq!(ahead(&line, 180), sum(gone + 1..180));
        }
        assert_eq!((ahead(&line, 101), ahead(&line, 1000)), (0, sum(101..201)));
    }

    /// Creates `count` requests, each waiting for another EM.
    fn line_of_keys(count: u128) -> WaitQueues {
        let mut line = WaitQueues::default();
        for number in 0..count {
            enqueue(&mut line, number, &[(em(&format!("host{number}")), true)]);
        }
        line
    }

    /// Compares the visits of one operation at two sizes.
    fn assert_flat(what: &str, visits: impl Fn(u128) -> u64) {
        let [small, large] = [visits(100), visits(1000)];
        assert!(large * 10 <= small.max(1) * 13, "{what}: {small} visits at 100, {large} at 1,000");
    }

    #[test]
    fn wait_queues_with_many_keys_visit_own_entries() {
        let (own, key) = (position(7), em("host7"));
        let entry = || QueueEntry { resource: Resource::cpu(7).unwrap(), is_short: true };
        let mut seen = WaitQueues::default();
        seen.insert(key.clone(), own, entry());
        assert_flat("leave and enter", |count| {
            let mut line = line_of_keys(count);
            let visits = visits::count(|| {
                assert_eq!(line.keys_of(own.ticket_id()).len(), 1);
                line.remove(own.ticket_id());
                line.insert(key.clone(), own, entry());
            });
            assert_eq!(line.wait_keys(), usize::try_from(count).unwrap());
            visits
        });
        for extent in [ViewExtent::All, ViewExtent::UpTo(own)] {
            assert_flat("replace", |count| {
                let mut line = line_of_keys(count);
                visits::count(|| line.replace([(key.clone(), extent)].into(), &seen))
                    + visits::count(|| line.replace([(key.clone(), extent)].into(), &WaitQueues::default()))
            });
        }
    }

    #[test]
    fn wait_queue_after_fruitless_retry_keeps_its_sums() {
        let line_of = |count: u128| {
            let mut line = WaitQueues::default();
            (0..count).for_each(|number| drop(enqueue(&mut line, number, &[(em("a"), true)])));
            assert!(line.reserved_ahead(&em("a"), Some(position(count))) == line.reserved_ahead(&em("a"), None));
            line
        };
        assert_flat("retry", |count| {
            let mut line = line_of(count);
            visits::count(|| {
                // At equal distance from a mark in both sizes.
                let last = count / 32 * 32 - 1;
                let resource = Resource::cpu(i64::try_from(last).unwrap()).unwrap();
                line.put(position(last), &[(em("a"), true)].into(), &resource);
                line.reserved_ahead(&em("a"), Some(position(last)));
            })
        });
        assert_flat("leave", |count| {
            let mut line = line_of(count);
            visits::count(|| {
                line.remove(id(3));
                line.reserved_ahead(&em("a"), None);
            })
        });
    }

    /// Returns a generator of numbers below a bound.
    fn random_numbers() -> impl FnMut(u64) -> u64 {
        let mut random = 7_u64;
        move |below| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        }
    }

    /// A position of a request: of two ranks the smaller is earlier.
    fn at_rank(number: u128, rank: u64) -> QueuePosition {
        let since = OffsetDateTime::UNIX_EPOCH + std::time::Duration::from_micros(rank);
        QueuePosition::new(0, since, id(number))
    }

    #[test]
    fn wait_queues_after_random_changes_agree_with_plain_list() {
        let (keys, mut next) = ([em("a"), em("b"), user("u")], random_numbers());
        let (mut line, mut plain) = (WaitQueues::default(), BTreeMap::<(usize, u128), (i64, bool)>::new());
        // The requests change their positions, too.
        let mut ranks: [u64; 12] = std::array::from_fn(|number| number as u64);
        for _ in 0..20_000 {
            let (number, cores) = (u128::from(next(12)), i64::try_from(next(3)).unwrap());
            let own: Vec<(usize, bool)> =
                (0..3).filter_map(|at| Some((at, next(2) == 0)).filter(|_| next(2) == 0)).collect();
            let wait_keys: WaitKeys = own.iter().map(|(at, is_short)| (keys[*at].clone(), *is_short)).collect();
            let resource = Resource::cpu(cores).unwrap();
            match next(4) {
                0 => {
                    plain.retain(|(_, other), _| *other != number);
                    line.remove(id(number));
                }
                1 => {
                    if next(2) == 0 {
                        ranks[number as usize] = next(12);
                    }
                    plain.retain(|(_, other), _| *other != number);
                    plain.extend(own.iter().map(|(at, is_short)| ((*at, number), (cores, *is_short))));
                    line.put(at_rank(number, ranks[number as usize]), &wait_keys, &resource);
                }
                kind => {
                    // Another view of one queue, whole or up to a position.
                    let (at, last) = (usize::try_from(next(3)).unwrap(), at_rank(next(12).into(), next(12)));
                    let (is_whole, mut other) = (kind == 2, WaitQueues::default());
                    let extent = if is_whole { ViewExtent::All } else { ViewExtent::UpTo(last) };
                    let is_read = |position: QueuePosition| is_whole || position <= last;
                    plain.retain(|(key, number), _| *key != at || !is_read(at_rank(*number, ranks[*number as usize])));
                    for number in 0..12 {
                        if next(2) == 0 {
                            continue;
                        }
                        let rank = if next(4) == 0 { next(12) } else { ranks[number as usize] };
                        let (cores, is_short) = (i64::try_from(next(3)).unwrap(), next(2) == 0);
                        let resource = Resource::cpu(cores).unwrap();
                        other.insert(keys[at].clone(), at_rank(number, rank), QueueEntry { resource, is_short });
                        if is_read(at_rank(number, rank)) {
                            ranks[number as usize] = rank;
                            plain.insert((at, number), (cores, is_short));
                        }
                    }
                    line.replace([(keys[at].clone(), extent)].into(), &other);
                }
            }
            let position = |number: u128| at_rank(number, ranks[number as usize]);
            let is_in = |at: usize| plain.keys().any(|(key, _)| *key == at);
            assert_eq!(line.wait_keys(), (0..3).filter(|at| is_in(*at)).count());
            for (at, key) in keys.iter().enumerate() {
                let sum = |last: Option<u128>| {
                    plain
                        .iter()
                        .filter(|((key, number), _)| {
                            *key == at && last.is_none_or(|last| position(*number) < position(last))
                        })
                        .map(|(_, (cores, _))| cores)
                        .sum::<i64>()
                };
                assert_eq!(line.contains(key), is_in(at));
                assert_eq!(line.reserved_ahead(key, None).get(&Dimension::Cores), sum(None));
                assert_eq!(line.reserved_ahead(key, Some(position(number))).get(&Dimension::Cores), sum(Some(number)));
                let is_first = !plain.iter().any(|((key, other), (_, is_short))| {
                    *key == at && position(*other) < position(number) && *is_short
                });
                let wait_keys = WaitKeys::from([(key.clone(), true), (em("other"), false)]);
                assert_eq!(
                    line.keys_for(position(number), &wait_keys, None).len(),
                    1 + usize::from(is_first && !key.is_of_user())
                );
            }
            let own: WaitKeys = plain
                .iter()
                .filter(|((_, other), _)| *other == number)
                .map(|((at, _), (_, is_short))| (keys[*at].clone(), *is_short))
                .collect();
            assert_eq!(line.position_of(id(number)), Some(position(number)).filter(|_| !own.is_empty()));
            assert_eq!(line.keys_of(id(number)), own);
        }
    }

    /// A view of one key shows that a request has moved. It is at one position at each key, and reserves once.
    #[test]
    fn wait_queue_request_at_other_position_leaves_former_one() {
        for extent in [ViewExtent::All, ViewExtent::UpTo(position(5))] {
            let mut queues = WaitQueues::default();
            for number in 1..=9 {
                enqueue(&mut queues, number, &[(em("a"), true), (em("b"), true)]);
            }
            let earlier = QueuePosition::new(0, OffsetDateTime::UNIX_EPOCH - time::Duration::seconds(1), id(9));
            let mut seen = WaitQueues::default();
            seen.put(earlier, &WaitKeys::from([(em("a"), true)]), &Resource::cpu(9).unwrap());
            queues.replace([(em("a"), extent)].into(), &seen);
            assert_eq!(queues.position_of(id(9)), Some(earlier), "{extent:?}");
            let total = |wait_key| queues.reserved_ahead(&wait_key, None).get(&Dimension::Cores);
            let expected = if extent == ViewExtent::All { 9 } else { 9 + 6 + 7 + 8 };
            assert_eq!((total(em("a")), total(em("b"))), (expected, 45), "{extent:?}");
            assert_eq!(
                queues.reserved_ahead(&em("b"), Some(position(1))).get(&Dimension::Cores),
                9,
                "before all others"
            );
            queues.remove(id(9));
            assert_eq!(queues.reserved_ahead(&em("b"), None).get(&Dimension::Cores), 45 - 9, "{extent:?}");
        }
    }

    #[test]
    fn wait_queue_with_reservations_finds_head_directly() {
        assert_flat("head", |count| {
            let mut line = WaitQueues::default();
            for number in 0..count {
                line.insert(
                    em("a"),
                    position(number),
                    QueueEntry { resource: Resource::cpu(1).unwrap(), is_short: false },
                );
            }
            let wait_keys = WaitKeys::from([(em("a"), true), (user("u"), false)]);
            visits::count(|| assert_eq!(line.keys_for(position(count), &wait_keys, None).len(), 2))
        });
    }
}
