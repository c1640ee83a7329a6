//! Places of reclaim: the EMs at which a step tries a waiting request.
//!
//! A request that names its EM is tried there alone. A request without an EM is tried where it is queued, at the EMs of its earlier
//! choices, and at further EMs, which are drawn in each step.
//!
//! Never: reads; decides which engines end. Caller: `reclaim`.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use uuid::Uuid;

use rm_engine::{reclaim_choice::TriedRequest, reclaim_plan::policy_of};
use rm_model::{
    assessment::check_em,
    em::{Em, EmInstance},
    limit::Limits,
    operation::{PlacedRequest, RequestScopes, RequestSpec, WaitParameters},
    principal::Principal,
    reclaim::{Reclaim, ReclaimMode, ReclaimProgress},
    resource::{Dimension, Resource},
    selector::EmSelector,
    ticket::{Ticket, TicketState},
    wait_queue::{QueuePosition, WaitingRequest},
};
use rm_store::waiting::PresentRequest;

use super::reclaim_sweeps::hash;

/// The EMs of the earlier choices for a request without an EM.
#[derive(Debug)]
pub struct EarlierEms {
    /// Several if a busy engine is kept as a reserve beside idle ones.
    pub ems: BTreeSet<EmInstance>,
    /// Whether the choices end idle engines alone, so that no other EM is tried.
    is_settled: bool,
}

/// Returns the EMs of the stored choices, by request.
pub fn earlier_ems(rows: &[Reclaim]) -> HashMap<Uuid, EarlierEms> {
    let counts = |row: &&Reclaim| matches!(row.progress, ReclaimProgress::Chosen { .. } | ReclaimProgress::Recalled);
    let mut earlier = HashMap::<Uuid, EarlierEms>::new();
    for row in rows.iter().filter(counts) {
        let at = earlier.entry(row.for_ticket_id);
        let earlier = at.or_insert(EarlierEms { ems: BTreeSet::new(), is_settled: true });
        earlier.ems.insert(row.for_em.clone());
        let is_settled = row.mode != ReclaimMode::Observe && !row.busy;
        earlier.is_settled &= is_settled;
    }
    earlier
}

/// Returns the EMs with the longest idle tickets that a policy lets end.
pub fn idle_ems(limits: &Limits, tickets: &HashMap<Uuid, Ticket>) -> Vec<EmInstance> {
    let idle_since = |ticket: &Ticket| match ticket.state {
        TicketState::Used { idle_since, .. } => idle_since,
        TicketState::Locked { .. } => None,
    };
    let allowed = tickets.values().filter(|ticket| policy_of(limits, ticket).is_some());
    let mut idle: Vec<_> = allowed.filter_map(|ticket| Some((idle_since(ticket)?, ticket.id, &ticket.em))).collect();
    idle.sort_unstable();
    let mut known = BTreeSet::new();
    idle.into_iter().map(|(_, _, em)| em).filter(|em| known.insert(*em)).cloned().collect()
}

/// Returns the EMs with the newest used tickets whose engines a policy lets end while they are busy.
pub fn busy_ems(limits: &Limits, tickets: &HashMap<Uuid, Ticket>) -> Vec<EmInstance> {
    let allowed = tickets.values().filter(|ticket| policy_of(limits, ticket).is_some_and(|policy| policy.busy));
    let mut newest: Vec<_> = allowed.map(|ticket| (Reverse(ticket.id), &ticket.em)).collect();
    newest.sort_unstable();
    let mut known = BTreeSet::new();
    newest.into_iter().map(|(_, em)| em).filter(|em| known.insert(*em)).cloned().collect()
}

/// Returns a waiting request as a check decides it.
pub fn placed(position: QueuePosition, waiting: WaitingRequest, selector: EmSelector) -> PlacedRequest {
    let wait = WaitParameters {
        claim: waiting.claim.unwrap_or_default(),
        instance_id: Uuid::nil(),
        remaining: Duration::ZERO,
        is_elsewhere: false,
        priority: Some(waiting.priority),
        position: Some(position),
    };
    let spec = RequestSpec {
        principal: Principal::Service,
        ticket_id: waiting.ticket_id,
        user: waiting.user,
        creator: waiting.creator,
        engine_type: waiting.engine_type,
        resource: waiting.resource,
        labels: waiting.labels,
        selector,
        caps: waiting.caps.into_iter().map(Arc::new).collect(),
        lock_ttl: Duration::ZERO,
        request_id: None,
        return_counters: false,
        priority: waiting.priority,
        may_wait: true,
    };
    let (em, any_em) = (waiting.em, waiting.any_em);
    PlacedRequest {
        em,
        ask: Arc::new(spec),
        wait: Some(wait),
        any_em,
        is_em_unavailable: false,
        scopes: RequestScopes::default(),
    }
}

/// Returns whether an EM can grant a request once its capacity is free.
pub fn accepts(em: &Em, limits: &Limits, spec: &RequestSpec) -> bool {
    let grantable = |dimension: &Dimension| em.total.get(dimension).saturating_sub(em.protected.get(dimension));
    let is_large_enough = |share: Resource| share.amounts().all(|(dimension, amount)| amount <= grantable(&dimension));
    em.drain.is_none() && check_em(em, limits, spec).is_ok() && em.project(&spec.resource).is_ok_and(is_large_enough)
}

/// Returns a waiting request at its EM. A request that names none is also tried at the EMs of its earlier choices. Unless these end idle
/// engines alone, it is also tried at one of each of `ems` that `accepts` it, another one in each step.
pub fn tried(
    present: PresentRequest,
    earlier: Option<&EarlierEms>,
    ems: [&[EmInstance]; 2],
    step: u64,
    accepts: impl Fn(&EmInstance, &RequestSpec) -> bool,
) -> TriedRequest {
    let PresentRequest { position, request, selector } = present;
    let (ticket_id, wait_until, is_anywhere) = (request.ticket_id, request.wait_until, selector.is_some());
    let home = placed(position, request, selector.unwrap_or_default());
    let spec = home.ask.clone();
    let may_use = |em: &&EmInstance| {
        let is_kind = spec.selector.application_name.as_ref().is_none_or(|name| *name == em.application_name);
        is_anywhere && is_kind && **em != home.em && accepts(em, &spec)
    };
    let is_settled = earlier.is_some_and(|earlier| earlier.is_settled);
    let others = ems.into_iter().filter(|_| !is_settled).filter_map(|ems| drawn(ems, step, ticket_id, may_use));
    let earlier = earlier.into_iter().flat_map(|earlier| &earlier.ems).filter(may_use);
    let others: BTreeSet<EmInstance> = earlier.chain(others).cloned().collect();
    let at = |em| PlacedRequest { em, scopes: RequestScopes::default(), ..home.clone() };
    let others: Vec<PlacedRequest> = others.into_iter().map(at).collect();
    TriedRequest { ticket_id, wait_until, places: [home].into_iter().chain(others).collect() }
}

/// Returns the EM at which a request is tried in a step: the first that `may_use` allows, in an order of their own for each request and step.
fn drawn(
    ems: &[EmInstance],
    step: u64,
    ticket_id: Uuid,
    may_use: impl Fn(&&EmInstance) -> bool,
) -> Option<&EmInstance> {
    // A hash, because a request of a later page is tried in each fourth step or so, and draws different EMs then, too.
    let hash = hash(step, ticket_id);
    let count = u64::try_from(ems.len()).ok().filter(|count| *count > 0)?;
    let begin = hash % count;
    let stride = (hash >> 32..).find(|stride| gcd(*stride, count) == 1)? % count;
    let numbers = (0..count).map(|turn| (begin + turn * stride) % count);
    numbers.filter_map(|number| ems.get(usize::try_from(number).ok()?)).find(may_use)
}

/// Returns the greatest common divisor.
fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_ems_of_spread_steps_are_all() {
        let ems: Vec<EmInstance> =
            (0..100).map(|number| EmInstance::parse("em", "linkis", &format!("host{number}")).unwrap()).collect();
        let usable: BTreeSet<&EmInstance> = ems[40..44].iter().collect();
        for (period, request) in [1, 2, 4, 8, 16].into_iter().flat_map(|period| (0..20).map(move |id| (period, id))) {
            let steps = (0..60).map(|turn| turn * period);
            let drawn = steps.filter_map(|step| drawn(&ems, step, Uuid::from_u128(request), |em| usable.contains(em)));
            assert_eq!(drawn.collect::<BTreeSet<_>>(), usable, "each step of {period}, {request}");
        }
        assert_eq!(drawn(&[], 1, Uuid::nil(), |_| true), None);
        assert_eq!(drawn(&ems, 1, Uuid::nil(), |_| false), None);
    }
}
