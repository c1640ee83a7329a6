//! Choice of the engines to end, so that waiting requests fit: idle engines, and busy ones for entitled requests.
//!
//! A trial subtracts the amounts of tickets from the counters, and assesses the request as a check does. So all keys
//! of the request count, and all requests before it. Either a set of tickets makes the request fit, or none is chosen. The set contains
//! no ticket that it does not need, and takes no scope below its guarantee. Requests are served in the order of their positions, from
//! one state: a request that fits then counts as granted, so no two get the same capacity.
//!
//! Never: ends an engine; decides whether a ticket may be chosen, which the reclaim policies do. The capacity of an external queue is
//! not tried: its cluster shows the end of an engine later. Caller: `reclaim_plan`.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
};

use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    assessment::Verdict,
    em::EmInstance,
    ledger,
    limit::LimitedScope,
    operation::PlacedRequest,
    resource::{Dimension, Resource, ResourceError},
    scope::{Scope, ScopeCounter, ScopeHoldings},
    ticket::Ticket,
    wait_queue::WaitKey,
};

use super::observed_state::CheckState;

/// Maximum number of tickets that are tried for one request at each key where it is short.
pub const TRIED_MAX: usize = 64;

/// Ticket whose engine the policies allow to end.
#[derive(Debug, Clone)]
pub struct ReclaimableTicket {
    /// The ticket.
    pub ticket: Ticket,
    /// Activity of its engine.
    pub activity: EngineActivity,
    /// Time before which it does not end: the end of its grace period.
    pub ready_at: OffsetDateTime,
    /// Its choice for a waiting request by an earlier plan.
    pub chosen: Option<EarlierChoice>,
}

/// Activity of an engine, in the order in which engines end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum EngineActivity {
    /// It runs no task; the longest idle one ends first.
    Idle {
        /// Time since which it is idle.
        since: OffsetDateTime,
    },
    /// It runs a task, or has done so a short time ago, and then ends first. Then comes the lowest priority, and then the newest one.
    Busy {
        /// Whether it runs a task.
        is_working: bool,
        /// Priority of requests with the labels of the ticket.
        priority: i16,
        /// Time of the grant.
        granted: Reverse<OffsetDateTime>,
    },
}

/// Choice of a ticket by an earlier plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct EarlierChoice {
    /// Number of the choice, in the order of their times.
    pub number: usize,
    /// Ticket id of the request.
    pub request: Uuid,
}

/// A waiting request at each EM where it is tried: at one EM if it names its EM.
#[derive(Debug, Clone)]
pub struct TriedRequest {
    /// Ticket id of the request.
    pub ticket_id: Uuid,
    /// Deadline of waiting.
    pub wait_until: OffsetDateTime,
    /// The request at each EM, its own first.
    pub places: Vec<PlacedRequest>,
}

/// Tickets whose end makes a waiting request fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReclaimChoice {
    /// Ticket id of the request.
    pub request: Uuid,
    /// EM at which the request then fits.
    pub em: EmInstance,
    /// The tickets, in the order of the choice.
    pub tickets: Vec<ChosenTicket>,
}

/// Ticket of a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChosenTicket {
    /// Its id.
    pub id: Uuid,
    /// Whether its engine ends also while it runs tasks.
    pub busy: bool,
}

/// Counters, less the amounts of tickets that end, and with those of requests that then fit.
#[derive(Debug)]
pub struct ReclaimTrial {
    state: CheckState,
    /// Holdings of scopes for their guarantees: without tickets that may end, and without requests that fit only by the trial.
    certain: HashMap<ScopeCounter, ScopeHoldings>,
    /// Tickets that are chosen.
    taken: BTreeSet<Uuid>,
    /// Requests that fit.
    served: BTreeSet<Uuid>,
}

/// Direction of a change of the counters.
#[derive(Clone, Copy)]
enum Change {
    /// The ticket ends.
    End,
    /// A ticket that was taken as ended stays.
    Keep,
}

/// A ticket with the counters that contain it.
struct Candidate<'a> {
    reclaimable: &'a ReclaimableTicket,
    counters: Vec<LimitedScope>,
}

/// All candidates, and those whose end frees capacity at a key.
struct Candidates<'a> {
    all: Vec<Candidate<'a>>,
    at: HashMap<WaitKey, Vec<usize>>,
}

impl<'a> Candidates<'a> {
    fn new(all: Vec<Candidate<'a>>) -> Self {
        let mut at = HashMap::<_, Vec<usize>>::new();
        for (number, candidate) in all.iter().enumerate() {
            let scopes: BTreeSet<&Scope> = candidate.counters.iter().map(LimitedScope::scope).collect();
            let scopes = scopes.into_iter().map(|scope| WaitKey::Scope(scope.clone()));
            for wait_key in scopes.chain([WaitKey::Em(candidate.reclaimable.ticket.em.clone())]) {
                at.entry(wait_key).or_default().push(number);
            }
        }
        Self { all, at }
    }

    fn at(&self, wait_key: &WaitKey) -> impl Iterator<Item = &Candidate<'a>> {
        self.at.get(wait_key).into_iter().flatten().filter_map(|number| self.all.get(*number))
    }
}

/// A set of tickets that makes a request fit at a place.
struct Solution<'a> {
    place: &'a PlacedRequest,
    tickets: Vec<&'a Candidate<'a>>,
    costs: Costs,
}

/// Costs of a solution, the heaviest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Costs {
    /// Tickets of busy engines.
    busy: usize,
    /// Tickets without an earlier choice for the request.
    new: usize,
    /// All tickets.
    all: usize,
}

impl Candidate<'_> {
    fn id(&self) -> Uuid {
        self.reclaimable.ticket.id
    }

    fn is_busy(&self) -> bool {
        matches!(self.reclaimable.activity, EngineActivity::Busy { .. })
    }
}

impl ReclaimTrial {
    /// Creates a trial. The state contains the EMs and counters of all requests and tickets.
    pub fn new(state: CheckState) -> Self {
        Self { certain: state.scopes.clone(), state, taken: BTreeSet::new(), served: BTreeSet::new() }
    }

    /// Takes it as possible that a used ticket ends: no guarantee relies on it.
    pub fn may_end(&mut self, ticket: &Ticket) {
        if let Ok(certain) = changed(&self.certain, &self.counters(ticket), ticket.resource(), Change::End) {
            self.certain.extend(certain);
        }
    }

    /// Takes a used ticket as ended.
    pub fn end(&mut self, ticket: &Ticket) {
        let counters = self.counters(ticket);
        self.change(ticket, &counters, Change::End);
    }

    /// Leaves a request out that is served by other tickets.
    pub fn leave(&mut self, ticket_id: Uuid) {
        self.state.line.line.remove(ticket_id);
        self.state.line.ranks.promises.remove(ticket_id);
    }

    /// Chooses tickets among `tickets` for those of `requests` that do not fit yet. The requests are in the order of their positions.
    pub fn choose(&mut self, requests: &[TriedRequest], tickets: &[ReclaimableTicket]) -> Vec<ReclaimChoice> {
        let candidate = |reclaimable| Candidate { reclaimable, counters: self.counters(&reclaimable.ticket) };
        let candidates = Candidates::new(tickets.iter().map(candidate).collect());
        let mut choices = Vec::new();
        for request in requests {
            if self.served.contains(&request.ticket_id) {
                continue;
            }
            if let Some(place) = request.places.iter().find(|place| self.fits(place)) {
                self.serve(place);
                continue;
            }
            let solutions: Vec<_> =
                request.places.iter().filter_map(|place| self.solve(request, place, &candidates)).collect();
            let Some(best) = solutions.into_iter().min_by_key(|solution| solution.costs) else { continue };
            for candidate in &best.tickets {
                self.change(&candidate.reclaimable.ticket, &candidate.counters, Change::End);
                self.taken.insert(candidate.id());
            }
            self.serve(best.place);
            let chosen = |candidate: &&Candidate<'_>| ChosenTicket { id: candidate.id(), busy: candidate.is_busy() };
            let tickets = best.tickets.iter().map(chosen).collect();
            choices.push(ReclaimChoice { request: request.ticket_id, em: best.place.em.clone(), tickets });
        }
        choices
    }

    fn counters(&self, ticket: &Ticket) -> Vec<LimitedScope> {
        match self.state.ems.get(&ticket.em) {
            Some(em) => ledger::counters(&self.state.limits, em.counted, ticket.id, &ticket.ticket_labels()),
            None => Vec::new(),
        }
    }

    /// Returns tickets that make a request fit at a place; `None` if all together do not suffice.
    fn solve<'a>(
        &mut self,
        request: &TriedRequest,
        place: &'a PlacedRequest,
        candidates: &'a Candidates<'a>,
    ) -> Option<Solution<'a>> {
        let own = |candidate: &Candidate<'_>| {
            candidate.reclaimable.chosen.is_some_and(|chosen| chosen.request == request.ticket_id)
        };
        let scopes = place.scopes(&self.state.limits);
        let of_request = scopes.iter().map(|at| (at.counter.clone(), self.certain(&at.counter))).collect();
        let mut tickets = self.tried(request, (place, &of_request), candidates);
        // Busy engines come last, also if they were chosen earlier: they end only if idle ones do not suffice. Earlier choices come first, so
        // that their grace periods end. An idle engine that the request could use comes after other idle ones.
        tickets.sort_by_key(|candidate| {
            let ReclaimableTicket { ticket, activity, chosen, .. } = candidate.reclaimable;
            let number = chosen.map_or(usize::MAX, |chosen| chosen.number);
            (candidate.is_busy(), !own(candidate), number, is_same_kind(ticket, place), *activity, ticket.id)
        });
        let ended = self.end_enough(&tickets, place, &of_request)?;
        let mut needed = ended.clone();
        for (number, candidate) in ended.into_iter().enumerate().rev() {
            self.change(&candidate.reclaimable.ticket, &candidate.counters, Change::Keep);
            match self.fits(place) {
                true => drop(needed.remove(number)),
                false => drop(self.change(&candidate.reclaimable.ticket, &candidate.counters, Change::End)),
            }
        }
        self.keep(&needed);
        let costs = Costs {
            busy: needed.iter().filter(|candidate| candidate.is_busy()).count(),
            new: needed.iter().filter(|candidate| !own(candidate)).count(),
            all: needed.len(),
        };
        Some(Solution { place, tickets: needed, costs })
    }

    /// Takes tickets as ended with which the request fits, and returns them: idle ones alone if they suffice. `tickets` has the idle ones
    /// first. Where a guarantee refuses some, the largest ones end first in another attempt: small ones may have used up what it leaves.
    fn end_enough<'a>(
        &mut self,
        tickets: &[&'a Candidate<'a>],
        place: &PlacedRequest,
        of_request: &HashMap<ScopeCounter, ScopeHoldings>,
    ) -> Option<Vec<&'a Candidate<'a>>> {
        let idle = tickets.partition_point(|candidate| !candidate.is_busy());
        let dimensions = shortage(&self.state, place)?.dimensions;
        // Amounts that the request does not need make no ticket larger.
        let useful = |resource: &Resource, at| resource.get(at).min(place.resource().get(at));
        let amounts = |candidate: &Candidate<'_>| {
            dimensions.iter().map(|at| useful(candidate.reclaimable.ticket.resource(), at)).collect()
        };
        for count in BTreeSet::from([idle, tickets.len()]) {
            let mut order = tickets[..count].to_vec();
            for largest_first in [false, true] {
                if largest_first {
                    order.sort_by_cached_key(|candidate| Reverse::<Vec<i64>>(amounts(candidate)));
                }
                let ended = self.end_each(&order, place, of_request);
                if !ended.is_empty() && self.fits(place) {
                    return Some(ended);
                }
                self.keep(&ended);
                if ended.len() == order.len() {
                    break;
                }
            }
        }
        None
    }

    /// Takes tickets as used again that were taken as ended.
    fn keep(&mut self, tickets: &[&Candidate<'_>]) {
        for candidate in tickets {
            self.change(&candidate.reclaimable.ticket, &candidate.counters, Change::Keep);
        }
    }

    /// Takes those of `tickets` as ended, one after the other, whose end takes no scope below its guarantee, and returns them.
    fn end_each<'a>(
        &mut self,
        tickets: &[&'a Candidate<'a>],
        place: &PlacedRequest,
        of_request: &HashMap<ScopeCounter, ScopeHoldings>,
    ) -> Vec<&'a Candidate<'a>> {
        let mut ended = tickets.to_vec();
        ended.retain(|candidate| {
            !self.is_guaranteed(candidate, place, of_request)
                && self.change(&candidate.reclaimable.ticket, &candidate.counters, Change::End)
        });
        ended
    }

    /// Returns whether the end of a ticket would take a scope below its guarantee. The scopes of the request, with what they held
    /// before it chose, count it as granted, and may stay as they were.
    fn is_guaranteed(
        &self,
        candidate: &Candidate<'_>,
        place: &PlacedRequest,
        of_request: &HashMap<ScopeCounter, ScopeHoldings>,
    ) -> bool {
        let ended = candidate.reclaimable.ticket.resource();
        candidate.counters.iter().any(|at| {
            let held = self.certain(&at.counter);
            at.guarantees().any(|(dimension, guarantee)| {
                let amount = ended.get(dimension);
                let left = held.held(dimension).saturating_sub(amount);
                let is_short = |left: i64| amount > 0 && left < guarantee;
                match of_request.get(&at.counter) {
                    Some(before) => {
                        let left = left.saturating_add(place.resource().get(dimension));
                        is_short(left) && left < before.held(dimension)
                    }
                    None => is_short(left),
                }
            })
        })
    }

    fn certain(&self, counter: &ScopeCounter) -> ScopeHoldings {
        self.certain.get(counter).cloned().unwrap_or_default()
    }

    /// Returns the tickets to try for a request: for each key where it is short, those with earlier choices and the longest idle ones. For
    /// an entitled request, there are as many of busy engines, but for those of its own user and its own guarantee.
    fn tried<'a>(
        &self,
        request: &TriedRequest,
        (place, of_request): (&PlacedRequest, &HashMap<ScopeCounter, ScopeHoldings>),
        candidates: &'a Candidates<'a>,
    ) -> Vec<&'a Candidate<'a>> {
        let Some(shortage) = shortage(&self.state, place) else { return Vec::new() };
        let guaranteed = place.guaranteed_scopes(&self.state.limits);
        let is_entitled = !guaranteed.is_empty() && self.state.is_entitled(place);
        let is_own = |candidate: &Candidate<'_>| {
            candidate.reclaimable.ticket.user == place.ask.user
                || candidate.counters.iter().any(|at| guaranteed.contains(at.scope()))
        };
        let can_end = |candidate: &&Candidate<'_>| {
            !self.taken.contains(&candidate.id())
                && candidate.reclaimable.ready_at < request.wait_until
                && (!candidate.is_busy() || is_entitled && !is_own(candidate))
                && self.lessens(candidate, &shortage)
        };
        let mut tried = BTreeMap::new();
        for wait_key in &shortage.wait_keys {
            let (busy, idle): (Vec<_>, Vec<_>) =
                candidates.at(wait_key).filter(can_end).partition(|candidate| candidate.is_busy());
            for mut at_key in [idle, busy] {
                at_key
                    .sort_by_key(|candidate| (candidate.reclaimable.chosen.is_none(), candidate.reclaimable.activity));
                let may_end = at_key.into_iter().filter(|candidate| !self.is_guaranteed(candidate, place, of_request));
                tried.extend(may_end.take(TRIED_MAX).map(|candidate| (candidate.id(), candidate)));
            }
        }
        tried.into_values().collect()
    }

    /// Returns whether a ticket has an amount of a dimension of which a request is short.
    fn lessens(&self, candidate: &Candidate<'_>, shortage: &Shortage) -> bool {
        let Ticket { em, .. } = &candidate.reclaimable.ticket;
        let resource = candidate.reclaimable.ticket.resource();
        let on_em = self.state.ems.get(em).and_then(|em| em.share(resource).ok());
        let has = |resource: &Resource, dimension: &Dimension| resource.get(dimension) > 0;
        let is_short = |dimension: &Dimension| {
            has(resource, dimension) || on_em.as_ref().is_some_and(|on_em| has(on_em, dimension))
        };
        shortage.dimensions.iter().any(is_short)
    }

    /// Counts a request as granted at a place.
    fn serve(&mut self, place: &PlacedRequest) {
        let ticket_id = place.ask.ticket_id;
        self.served.insert(ticket_id);
        self.leave(ticket_id);
        // The next own request has the turn.
        if let Some(now) = self.state.now {
            let ranks = &mut self.state.line.ranks;
            ranks.own.granted(ticket_id, ranks.rank_time(now));
        }
        let resource = place.resource();
        if let Some(em) = self.state.ems.get_mut(&place.em)
            && let Ok(locked) = em.share(resource).and_then(|share| em.locked.add(&share))
        {
            em.locked = locked;
        }
        for at in place.scopes(&self.state.limits).iter() {
            let usage = self.state.scopes.entry(at.counter.clone()).or_default();
            // A sum that overflows stays, and the request counts nowhere.
            let _ = usage.locked.add(at.share(resource), 1);
        }
    }

    /// Changes the counters by a used ticket. Returns false, without a change, if they do not contain it.
    fn change(&mut self, ticket: &Ticket, counters: &[LimitedScope], change: Change) -> bool {
        let Some(em) = self.state.ems.get(&ticket.em) else { return false };
        let used = em.share(ticket.resource()).and_then(|share| match change {
            Change::End => em.used.minus(&share),
            Change::Keep => em.used.add(&share),
        });
        let [scopes, certain] =
            [&self.state.scopes, &self.certain].map(|scopes| changed(scopes, counters, ticket.resource(), change));
        let (Ok(used), Ok(scopes)) = (used, scopes) else { return false };
        if let Some(em) = self.state.ems.get_mut(&ticket.em) {
            em.used = used;
        }
        self.state.scopes.extend(scopes);
        self.certain.extend(certain.unwrap_or_default());
        true
    }

    fn fits(&self, request: &PlacedRequest) -> bool {
        matches!(self.state.verdict(request), Ok(Verdict::Fits))
    }
}

/// Returns the holdings of `counters` after a change by a ticket.
fn changed(
    scopes: &HashMap<ScopeCounter, ScopeHoldings>,
    counters: &[LimitedScope],
    resource: &Resource,
    change: Change,
) -> Result<Vec<(ScopeCounter, ScopeHoldings)>, ResourceError> {
    let after = counters.iter().map(|at| {
        let mut usage = scopes.get(&at.counter).cloned().unwrap_or_default();
        match change {
            Change::End => usage.used.minus(at.share(resource))?,
            Change::Keep => usage.used.add(at.share(resource), 1)?,
        }
        Ok((at.counter.clone(), usage))
    });
    after.collect()
}

/// Where and of what a request is short.
struct Shortage {
    wait_keys: BTreeSet<WaitKey>,
    dimensions: BTreeSet<Dimension>,
}

/// Returns the shortage of a request; `None` if it fits, or can never fit.
fn shortage(state: &CheckState, request: &PlacedRequest) -> Option<Shortage> {
    match state.verdict(request) {
        Ok(Verdict::Refused(short) | Verdict::Reranked(short)) if !short.refusal.never_fits => Some(Shortage {
            wait_keys: short.wait_keys.into_iter().filter(|(_, is_short)| *is_short).map(|(key, _)| key).collect(),
            dimensions: short.refusal.shortfalls.into_iter().map(|short| short.dimension).collect(),
        }),
        _ => None,
    }
}

/// Returns the keys at which a request is short; none if it fits, or can never fit.
pub fn short_keys(state: &CheckState, request: &PlacedRequest) -> BTreeSet<WaitKey> {
    shortage(state, request).map(|shortage| shortage.wait_keys).unwrap_or_default()
}

/// Returns whether the request could use the engine of the ticket.
fn is_same_kind(ticket: &Ticket, request: &PlacedRequest) -> bool {
    let spec = &request.ask;
    ticket.user == spec.user && ticket.creator == spec.creator && ticket.engine_type == spec.engine_type
}
