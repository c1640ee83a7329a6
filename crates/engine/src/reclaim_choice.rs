//! Choice of the idle engines to end, so that waiting requests fit.
//!
//! A trial subtracts the amounts of tickets from the counters, and assesses the request as a check does. So all keys
//! of the request count, and all requests before it. Either a set of tickets makes the request fit, or none is chosen. The set contains
//! no ticket that it does not need, and takes no scope below its guarantee. Requests are served in the order of their positions, from
//! one state: a request that fits then counts as granted, so no two get the same capacity.
//!
//! Never: ends an engine; decides whether a ticket may be chosen, which the reclaim policies do. The capacity of an external queue is
//! not tried: its cluster shows the end of an engine later. Caller: `reclaim_plan`.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    assessment::Verdict,
    em::EmInstance,
    ledger,
    limit::LimitedScope,
    operation::PlacedRequest,
    resource::{Resource, ResourceError},
    scope::{ScopeCounter, ScopeHoldings},
    ticket::Ticket,
    wait_queue::WaitKey,
};

use super::observed_state::CheckState;

/// Maximum number of tickets that are tried for one request at each key where it is short.
pub const TRIED_MAX: usize = 64;

/// Ticket of an idle engine that the policies allow to end.
#[derive(Debug, Clone)]
pub struct IdleTicket {
    /// The ticket.
    pub ticket: Ticket,
    /// Time since which its engine is idle.
    pub idle_since: OffsetDateTime,
    /// Time before which it does not end: the end of its grace period.
    pub ready_at: OffsetDateTime,
    /// Its choice for a waiting request by an earlier plan.
    pub chosen: Option<EarlierChoice>,
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
    /// Ids of the tickets, in the order of the choice.
    pub tickets: Vec<Uuid>,
}

/// Counters, less the amounts of tickets that end, and with those of requests that then fit.
#[derive(Debug)]
pub struct ReclaimTrial {
    state: CheckState,
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

/// An idle ticket with the counters that contain it.
struct Candidate<'a> {
    idle: &'a IdleTicket,
    counters: Vec<LimitedScope>,
    /// Keys at which its end frees capacity.
    wait_keys: BTreeSet<WaitKey>,
}

/// A set of tickets that makes a request fit at a place, with its costs: tickets without an earlier choice for the request, then all.
struct Solution<'a> {
    place: &'a PlacedRequest,
    tickets: Vec<&'a Candidate<'a>>,
    costs: (usize, usize),
}

impl ReclaimTrial {
    /// Creates a trial. The state contains the EMs and counters of all requests and tickets.
    pub fn new(state: CheckState) -> Self {
        Self { state, taken: BTreeSet::new(), served: BTreeSet::new() }
    }

    /// Takes a used ticket as ended.
    pub fn end(&mut self, ticket: &Ticket) {
        let counters = self.counters(ticket);
        self.change(ticket, &counters, Change::End);
    }

    /// Leaves a request out that is served by other tickets.
    pub fn leave(&mut self, ticket_id: Uuid) {
        self.state.line.line.remove(ticket_id);
    }

    /// Chooses tickets among `idle` for those of `requests` that do not fit yet. The requests are in the order of their positions.
    pub fn choose(&mut self, requests: &[TriedRequest], idle: &[IdleTicket]) -> Vec<ReclaimChoice> {
        let candidates: Vec<Candidate<'_>> = idle.iter().map(|idle| self.candidate(idle)).collect();
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
                self.change(&candidate.idle.ticket, &candidate.counters, Change::End);
                self.taken.insert(candidate.idle.ticket.id);
            }
            self.serve(best.place);
            let tickets = best.tickets.iter().map(|candidate| candidate.idle.ticket.id).collect();
            choices.push(ReclaimChoice { request: request.ticket_id, em: best.place.em.clone(), tickets });
        }
        choices
    }

    fn candidate<'a>(&self, idle: &'a IdleTicket) -> Candidate<'a> {
        let counters = self.counters(&idle.ticket);
        let scopes = counters.iter().map(|limited| WaitKey::Scope(limited.scope().clone()));
        let wait_keys = scopes.chain([WaitKey::Em(idle.ticket.em.clone())]).collect();
        Candidate { idle, counters, wait_keys }
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
        candidates: &'a [Candidate<'a>],
    ) -> Option<Solution<'a>> {
        let own =
            |candidate: &Candidate<'_>| candidate.idle.chosen.is_some_and(|chosen| chosen.request == request.ticket_id);
        let mut tickets = self.tried(request, place, candidates);
        // Earlier choices come first, so that their grace periods end. An engine that the request could use comes last.
        tickets.sort_by_key(|candidate| {
            let IdleTicket { ticket, idle_since, chosen, .. } = candidate.idle;
            let number = chosen.map_or(usize::MAX, |chosen| chosen.number);
            (!own(candidate), number, is_same_kind(ticket, place), *idle_since, ticket.id)
        });
        let scopes = place.scopes(&self.state.limits);
        let of_request = scopes.iter().map(|at| (at.counter.clone(), self.holdings(&at.counter))).collect();
        tickets.retain(|candidate| {
            !self.is_guaranteed(candidate, place, &of_request)
                && self.change(&candidate.idle.ticket, &candidate.counters, Change::End)
        });
        let suffices = !tickets.is_empty() && self.fits(place);
        let mut needed = tickets.clone();
        for number in (0..tickets.len()).rev() {
            let candidate = tickets[number];
            self.change(&candidate.idle.ticket, &candidate.counters, Change::Keep);
            match suffices && !self.fits(place) {
                true => drop(self.change(&candidate.idle.ticket, &candidate.counters, Change::End)),
                false => drop(needed.remove(number)),
            }
        }
        for candidate in &needed {
            self.change(&candidate.idle.ticket, &candidate.counters, Change::Keep);
        }
        let new = needed.iter().filter(|candidate| !own(candidate)).count();
        let costs = (new, needed.len());
        suffices.then_some(Solution { place, tickets: needed, costs })
    }

    /// Returns whether the end of a ticket would take a scope below its guarantee. The scopes of the request, with what they held
    /// before it chose, count it as granted, and may stay as they were.
    fn is_guaranteed(
        &self,
        candidate: &Candidate<'_>,
        place: &PlacedRequest,
        of_request: &HashMap<ScopeCounter, ScopeHoldings>,
    ) -> bool {
        let ended = candidate.idle.ticket.resource();
        candidate.counters.iter().any(|at| {
            let held = self.holdings(&at.counter);
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

    fn holdings(&self, counter: &ScopeCounter) -> ScopeHoldings {
        self.state.scopes.get(counter).cloned().unwrap_or_default()
    }

    /// Returns the tickets to try for a request: for each key where it is short, those with earlier choices and the longest idle ones.
    fn tried<'a>(
        &self,
        request: &TriedRequest,
        place: &PlacedRequest,
        candidates: &'a [Candidate<'a>],
    ) -> Vec<&'a Candidate<'a>> {
        let short = short_keys(&self.state, place);
        let can_end = |candidate: &&Candidate<'_>| {
            !self.taken.contains(&candidate.idle.ticket.id) && candidate.idle.ready_at < request.wait_until
        };
        let mut tried = BTreeMap::new();
        for wait_key in &short {
            let at_key = candidates.iter().filter(|candidate| candidate.wait_keys.contains(wait_key)).filter(can_end);
            let mut at_key: Vec<_> = at_key.collect();
            at_key.sort_by_key(|candidate| (candidate.idle.chosen.is_none(), candidate.idle.idle_since));
            tried.extend(at_key.into_iter().take(TRIED_MAX).map(|candidate| (candidate.idle.ticket.id, candidate)));
        }
        tried.into_values().collect()
    }

    /// Counts a request as granted at a place.
    fn serve(&mut self, place: &PlacedRequest) {
        let ticket_id = place.ask.ticket_id;
        self.served.insert(ticket_id);
        self.leave(ticket_id);
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
        let scopes = counters.iter().map(|at| {
            let mut usage = self.state.scopes.get(&at.counter).cloned().unwrap_or_default();
            changed(&mut usage, at, ticket.resource(), change)?;
            Ok((at.counter.clone(), usage))
        });
        let (Ok(used), Ok(scopes)) = (used, scopes.collect::<Result<Vec<_>, ResourceError>>()) else { return false };
        if let Some(em) = self.state.ems.get_mut(&ticket.em) {
            em.used = used;
        }
        self.state.scopes.extend(scopes);
        true
    }

    fn fits(&self, request: &PlacedRequest) -> bool {
        matches!(self.state.verdict(request), Ok(Verdict::Fits))
    }
}

fn changed(
    usage: &mut ScopeHoldings,
    at: &LimitedScope,
    resource: &Resource,
    change: Change,
) -> Result<(), ResourceError> {
    match change {
        Change::End => usage.used.minus(at.share(resource)),
        Change::Keep => usage.used.add(at.share(resource), 1),
    }
}

/// Returns the keys at which a request is short; none if it fits, or can never fit.
pub fn short_keys(state: &CheckState, request: &PlacedRequest) -> BTreeSet<WaitKey> {
    match state.verdict(request) {
        Ok(Verdict::Refused(short) | Verdict::Reranked(short)) if !short.refusal.never_fits => {
            short.wait_keys.into_iter().filter(|(_, is_short)| *is_short).map(|(wait_key, _)| wait_key).collect()
        }
        _ => BTreeSet::new(),
    }
}

/// Returns whether the request could use the engine of the ticket.
fn is_same_kind(ticket: &Ticket, request: &PlacedRequest) -> bool {
    let spec = &request.ask;
    ticket.user == spec.user && ticket.creator == spec.creator && ticket.engine_type == spec.engine_type
}
