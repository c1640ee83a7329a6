//! State as this instance last observed it, through its own commits and checks.
//!
//! The observed state selects the path of a request: straight to the commit queue, or to a check first. It also checks queued
//! requests before they try again.
//!
//! Never: grants or refuses; delays a commit. Large evictions are spread over many commits.
//! Callers: `rm-service`'s `admission`, `committer` (after each commit) and `heartbeat`.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    fmt,
    hash::Hash,
    mem,
    sync::Arc,
};

use rm_model::{
    assessment::{self, BlockedRequest, DryRunResult, Verdict, assess},
    em::{Em, EmInstance},
    external::Clusters,
    hold::Holds,
    ledger::{PostCommitState, WaitQueueView},
    limit::Limits,
    name::Name,
    operation::{KeptPosition, PlacedRequest, Rejection, RequestKey, RequestRecord},
    order::{Class, DecidedRank, QueueRanks},
    scope::{ScopeCounter, ScopeHoldings},
    ticket::EndedTicket,
    wait_queue::{AssessedPosition, QueuePosition},
};
use time::OffsetDateTime;
use uuid::Uuid;

/// Maximum number of observed EMs, and of observed scopes.
pub(crate) const EMS_MAX: usize = 100_000;
const SCOPES_MAX: usize = 100_000;

/// Number of retired entries that each commit drops, besides as many as it inserts.
const RETIRED_MIN: usize = 64;

/// Rows on which requests are decided, as read by a check or as cached.
#[derive(Debug, Clone, Default)]
pub struct CheckState {
    /// EMs by their instances.
    pub ems: HashMap<EmInstance, Em>,
    /// Limits; in the cache, those of the last commit or check.
    pub limits: Arc<Limits>,
    /// Holdings of the counted scopes.
    pub scopes: HashMap<ScopeCounter, ScopeHoldings>,
    /// Request ids in use.
    pub request_ids: HashMap<RequestKey, RequestRecord>,
    /// Ended tickets that were granted under these request ids.
    pub ended: HashMap<Uuid, EndedTicket>,
    /// Entries of the wait queues.
    pub line: WaitQueueView,
    /// Positions that belong to the requests' ids; empty in the cache.
    pub kept: HashMap<RequestKey, KeptPosition>,
    /// Reasons of the removals of requests that are no longer queued; empty in the cache.
    pub removed: HashMap<Uuid, Name>,
    /// Holds on the EMs and users; empty in the cache.
    pub holds: Holds,
    /// Clusters of the requested external queues; empty in the cache.
    pub clusters: Clusters,
    /// Database time of the read, if external queues or ranks were read.
    pub now: Option<OffsetDateTime>,
}

impl CheckState {
    /// Whether the request fits by this state. State that is missing counts as not fitting.
    pub fn fits(&self, request: &PlacedRequest) -> bool {
        if request.ask.request_key().is_some_and(|key| self.request_ids.contains_key(&key)) {
            return true;
        }
        self.ems.get(&request.em).is_some_and(|em| {
            let fits = |scopes: &[_]| {
                assessment::fits(em, scopes, |scope| self.scopes.get(scope), &self.line.line, &request.ask)
            };
            em.drain.is_none()
                && !request.is_em_unavailable
                && assessment::check_em(em, &self.limits, &request.ask).is_ok()
                && fits(&request.scopes(&self.limits))
        })
    }

    /// Decides the request by this state.
    ///
    /// # Errors
    /// The rejection that the ledger would return.
    pub fn verdict(&self, request: &PlacedRequest) -> Result<Verdict, Rejection> {
        if let (Some(id), Some(key)) = (&request.ask.request_id, request.ask.request_key())
            && let Some(record) = self.request_ids.get(&key)
        {
            let (request_id, ended) = (id.id.to_string(), self.ended.get(&record.grant.ticket_id));
            return match ended.cloned().map(Box::new) {
                _ if record.request_id != *id => Err(Rejection::RequestIdReused(request_id)),
                Some(ended) => Err(Rejection::TicketEnded { request_id, ended }),
                None => Ok(Verdict::Fits),
            };
        }
        let em = self.ems.get(&request.em).ok_or_else(|| Rejection::EmNotRegistered(request.em.clone()))?;
        let kept = request.ask.request_key().and_then(|key| self.kept.get(&key));
        let own = request.stored_position(&self.line.line, kept, &self.removed)?;
        // A call with the request id of a waiting request is decided at the position of that.
        let position = own.or(kept.map(|kept| kept.position));
        assessment::check_em(em, &self.limits, &request.ask)?;
        if position.is_none() {
            self.limits.queue_rules().priorities.check(request)?;
        }
        let decided = self.decided(request, position);
        let assessed = match &decided {
            Some(decided) => decided.assess(|position| self.assess(em, request, position))?,
            None => self.assess(em, request, &position.into())?,
        };
        Ok(match self.holds.or_block(em, assessed, request) {
            Ok(()) => Verdict::Fits,
            Err(mut short) => {
                let rank = decided.map(|decided| decided.rank);
                let ranked = rank.as_ref().map(|rank| rank.position());
                if let Some(position) = position {
                    let position = ranked.unwrap_or(position);
                    short.wait_keys = self.line.line.keys_for(position, &short.wait_keys, rank.as_ref());
                }
                let lacks_promise = rank.as_ref().is_some_and(|rank| rank.class == Class::Entitled)
                    && self.line.ranks.promises.lacks(request, &self.limits);
                let is_known = |ranked| own == Some(ranked) && request.position() == Some(ranked) && !lacks_promise;
                match own.is_some() && ranked.is_some_and(|ranked| !is_known(ranked)) {
                    true => Verdict::Reranked(short),
                    false => Verdict::Refused(short),
                }
            }
        })
    }

    /// Returns whether a waiting request is entitled by this state.
    pub fn is_entitled(&self, request: &PlacedRequest) -> bool {
        let decided = self.decided(request, self.line.line.position_of(request.ask.ticket_id));
        decided.is_some_and(|decided| decided.rank.class == Class::Entitled)
    }

    /// Returns the rank of a request; `None` if no ranks were read.
    fn decided(&self, request: &PlacedRequest, stored: Option<QueuePosition>) -> Option<DecidedRank> {
        let rules = (&*self.limits, self.now?);
        let wait_keys = assessment::all_wait_keys(request, &self.limits, &self.clusters, &self.holds);
        Some(self.line.ranks.decide(request, stored.map(|stored| stored.ticket_id()), wait_keys, rules, |counter| {
            self.scopes.get(counter)
        }))
    }

    /// Assesses a request on its EM, in its scopes and in its external queue.
    fn assess(
        &self,
        em: &Em,
        request: &PlacedRequest,
        position: &AssessedPosition,
    ) -> Result<Result<(), Box<BlockedRequest>>, Rejection> {
        let scopes = request.scopes(&self.limits);
        let usage = |counter: &ScopeCounter| self.scopes.get(counter);
        let assessed = assess(em, &scopes, usage, &self.line.line, position, &request.ask)?;
        Ok(match self.now {
            Some(now) => {
                self.clusters.judge(assessed, request, position, &self.limits, &self.line.line, now).map(|_| ())
            }
            None => assessed.map(|_| ()),
        })
    }

    /// Returns the head-room and the exceeded advisory limits; empty if the verdict explains the rejection.
    pub fn room(&self, request: &PlacedRequest) -> DryRunResult {
        let Some(em) = self.ems.get(&request.em) else { return DryRunResult::default() };
        let (scopes, resource) = (request.scopes(&self.limits), request.resource());
        let usage = |counter: &ScopeCounter| self.scopes.get(counter);
        let kept = request.ask.request_key().and_then(|key| self.kept.get(&key));
        let position = self.decided(request, kept.map(|kept| kept.position)).map(|decided| decided.position);
        let position = position.unwrap_or_default();
        DryRunResult {
            head_room: assessment::head_room(em, &scopes, usage, &self.line.line, &position).unwrap_or_default(),
            advisory_violations: assessment::advisory_violations(&scopes, usage, &resource.zero_like(), resource),
        }
    }

    /// Converts the state for the cache.
    pub fn into_post_commit_state(self) -> PostCommitState {
        let (ems, scopes) = (self.ems.into_values().collect(), self.scopes.into_iter().collect());
        PostCommitState { ems, gone: vec![], scopes, limits: self.limits, line: self.line }
    }
}

/// Observed state, with its entries in order of insertion.
#[derive(Debug, Default)]
pub struct ObservedState {
    state: CheckState,
    /// Keys of the EMs and scopes, the oldest first. Some of the EMs may have been removed.
    ems: VecDeque<EmInstance>,
    scopes: VecDeque<ScopeCounter>,
    retired: RetiredEntries,
    commits: u64,
}

impl ObservedState {
    /// Stores the state after a commit.
    pub fn update(&mut self, after: PostCommitState) {
        self.commits += 1;
        self.observe(after);
    }

    /// Returns the number of commits stored.
    pub fn commits(&self) -> u64 {
        self.commits
    }

    /// Returns the state that a check has read, without what commits have changed since their number was `commits`; `None` if
    /// the limits have changed.
    pub fn unchanged_part(&self, mut after: PostCommitState, commits: u64) -> Option<PostCommitState> {
        if self.commits != commits {
            let known = &self.state;
            if after.limits.version() != known.limits.version() {
                return None;
            }
            after.ems.retain(|em| !known.ems.contains_key(&em.instance));
            after.scopes.retain(|(scope, _)| !known.scopes.contains_key(scope));
            // A later commit may have changed the positions.
            after.line.ranks = QueueRanks::default();
            let wait_keys = after.line.wait_keys.take().unwrap_or_default();
            after.line.wait_keys =
                Some(wait_keys.into_iter().filter(|(wait_key, _)| !known.line.line.contains(wait_key)).collect());
        }
        Some(after)
    }

    /// Stores state that was read.
    pub fn observe(&mut self, after: PostCommitState) {
        self.retired.drop_some(after.scopes.len());
        if after.limits.version() != self.state.limits.version() {
            // Counters of other label sets would only use memory.
            self.scopes.clear();
            self.retired.add(mem::take(&mut self.state.scopes).into_iter().map(drop));
            self.state.limits = after.limits;
        }
        for gone in &after.gone {
            self.state.ems.remove(gone);
        }
        if after.line.wait_keys.is_none() {
            self.retired.add(mem::take(&mut self.state.line.line).into_dropped());
        }
        let Self { state, ems, scopes, .. } = self;
        // An evicted entry costs a check, and nothing else.
        store(&mut state.ems, ems, EMS_MAX, after.ems.into_iter().map(|em| (em.instance.clone(), em)));
        store(&mut state.scopes, scopes, SCOPES_MAX, after.scopes);
        if let Some(wait_keys) = after.line.wait_keys {
            after.line.ranks.own.positions().for_each(|position| state.line.line.set_position(position));
            state.line.line.replace(wait_keys, &after.line.line);
        }
    }

    /// Removes an EM that is not registered any more.
    pub fn evict(&mut self, em: &EmInstance) {
        self.state.ems.remove(em);
    }

    /// Returns the observed state. What is missing there was not observed.
    pub fn state(&self) -> &CheckState {
        &self.state
    }
}

/// Retired entries. Each commit locks the cache, so each drops a few of them instead of one dropping all.
#[derive(Default)]
pub(crate) struct RetiredEntries(VecDeque<Box<dyn Iterator<Item = ()> + Send>>);

impl RetiredEntries {
    pub fn add(&mut self, entries: impl Iterator<Item = ()> + Send + 'static) {
        if entries.size_hint().0 > 0 {
            self.0.push_back(Box::new(entries));
        }
    }

    /// Drops a few entries more than `arrived`, so that the retired entries decrease with each commit.
    pub fn drop_some(&mut self, arrived: usize) {
        let mut left = arrived.saturating_add(RETIRED_MIN);
        while left > 0
            && let Some(entries) = self.0.front_mut()
        {
            match entries.next() {
                Some(()) => left -= 1,
                None => drop(self.0.pop_front()),
            }
        }
    }
}

impl fmt::Debug for RetiredEntries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Retired").field(&self.0.len()).finish()
    }
}

/// Inserts entries. Each new key above `most` keys evicts the oldest.
fn store<K: Clone + Eq + Hash, V>(
    seen: &mut HashMap<K, V>,
    order: &mut VecDeque<K>,
    most: usize,
    entries: impl IntoIterator<Item = (K, V)>,
) {
    for (key, value) in entries {
        match seen.entry(key) {
            Entry::Occupied(mut entry) => drop(entry.insert(value)),
            Entry::Vacant(entry) => {
                order.push_back(entry.key().clone());
                entry.insert(value);
            }
        }
        if order.len() > most
            && let Some(oldest) = order.pop_front()
        {
            seen.remove(&oldest);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{collections::BTreeMap, ops::Range};

    use rm_model::{name::Labels, resource::Resource, scope::Scope};

    use super::*;

    /// Number of EMs and scopes of one commit.
    pub(crate) const COMMIT: usize = 1000;

    pub(crate) fn commits(most: usize) -> impl Iterator<Item = Range<usize>> {
        (0..most + 3 * COMMIT).step_by(COMMIT).map(|begin| begin..begin + COMMIT)
    }

    pub(crate) fn instance(number: usize) -> EmInstance {
        EmInstance::parse("em", "ecm", &format!("host{number}")).unwrap()
    }

    fn em(number: usize) -> Em {
        let none = Resource::memory(0).unwrap();
        Em {
            instance: instance(number),
            total: none.clone(),
            protected: none.clone(),
            used: none.clone(),
            locked: none,
            used_tickets: Default::default(),
            labels: Labels::default(),
            reserved: Labels::default(),
            epoch: 1,
            register_time: OffsetDateTime::UNIX_EPOCH,
            version: 1,
            going: None,
            counted: Default::default(),
            drain: None,
            is_held: false,
        }
    }

    fn counter(number: usize) -> ScopeCounter {
        let scope = Scope::new(BTreeMap::from([("user".to_owned(), format!("user{number}"))]));
        ScopeCounter { label_set_id: 1, scope }
    }

    fn nothing() -> PostCommitState {
        PostCommitState { ems: vec![], gone: vec![], scopes: vec![], limits: Arc::default(), line: Default::default() }
    }

    #[test]
    fn observed_state_within_bound_keeps_latest() {
        let mut observed = ObservedState::default();
        for numbers in commits(EMS_MAX.max(SCOPES_MAX)) {
            let first = numbers.start;
            let scopes = numbers.clone().map(|number| (counter(number), ScopeHoldings::default())).collect();
            observed.update(PostCommitState { ems: numbers.map(em).collect(), scopes, ..nothing() });
            let seen = &observed;
            assert!(seen.state.ems.contains_key(&instance(first)) && seen.state.scopes.contains_key(&counter(first)));
            assert!(seen.state.ems.len() <= EMS_MAX && seen.ems.len() <= EMS_MAX);
            assert!(seen.state.scopes.len() <= SCOPES_MAX && seen.scopes.len() <= SCOPES_MAX);
        }
        let seen = &observed;
        assert!(!seen.state.ems.contains_key(&instance(0)) && !seen.state.scopes.contains_key(&counter(0)));
    }

    #[test]
    fn observed_state_when_full_evicts_as_many_as_arrive() {
        let mut observed = ObservedState::default();
        let sizes = |observed: &ObservedState| (observed.state.ems.len(), observed.state.scopes.len());
        for numbers in commits(EMS_MAX.max(SCOPES_MAX)) {
            let before = sizes(&observed);
            let scopes = numbers.clone().map(|number| (counter(number), ScopeHoldings::default())).collect();
            observed.update(PostCommitState { ems: numbers.map(em).collect(), scopes, ..nothing() });
            let after = sizes(&observed);
            assert!(after.0 >= before.0 && after.1 >= before.1, "{before:?} before a commit, {after:?} after it");
        }
    }

    #[test]
    fn observed_state_after_limits_change_drops_few_at_a_time() {
        let mut observed = ObservedState::default();
        let scopes = (0..10_000).map(|number| (counter(number), ScopeHoldings::default())).collect();
        observed.update(PostCommitState { scopes, ..nothing() });
        let limits = Arc::new(Limits::new(Uuid::from_u128(1), vec![], []));
        let of_other_limits = || PostCommitState { limits: limits.clone(), ..nothing() };
        observed.update(of_other_limits());
        assert!(observed.state.scopes.is_empty());
        let mut commits = 0;
        while !observed.retired.0.is_empty() {
            observed.update(of_other_limits());
            commits += 1;
        }
        assert_eq!(commits, 10_000 / RETIRED_MIN + 1);
    }
}
