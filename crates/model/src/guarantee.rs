//! Guarantees: amounts that the waiting requests of a scope get before all other requests.
//!
//! A first is *entitled* if it is within the guarantee of each scope that guarantees amounts which it requests. The held amounts, its own
//! amounts and those of other entitled requests count: a guarantee is not promised twice. It reserves nothing, so capacity that a scope
//! does not use is granted to others.
//! Never: reads or writes rows. Callers: the ranks of waiting requests, in the ledger and in the check.

use std::collections::{BTreeSet, HashMap};

use uuid::Uuid;

use crate::{
    limit::{LimitedScope, Limits},
    operation::PlacedRequest,
    resource::{Dimension, Resource},
    scope::{Scope, ScopeCounter, ScopeHoldings},
};

/// Amounts that present entitled requests wait for, in the scopes that were read.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Promises(HashMap<Scope, Vec<PromisedAmounts>>);

/// Entitled requests of a scope with equal amounts.
#[derive(Debug, Clone, PartialEq)]
pub struct PromisedAmounts {
    /// The request, if the batch or check decides it, or it is an own one of these; `None` for others.
    pub ticket_id: Option<Uuid>,
    /// Amounts of each request.
    pub resource: Resource,
    /// Number of requests.
    pub requests: i64,
}

impl Promises {
    /// Adds entitled requests of a scope.
    pub fn add(&mut self, scope: Scope, promised: PromisedAmounts) {
        self.0.entry(scope).or_default().push(promised);
    }

    /// Sets the scopes in which a decided request is entitled; none if it is not. Returns whether they have changed.
    pub fn set(&mut self, ticket_id: Uuid, scopes: Vec<Scope>, resource: &Resource) -> bool {
        let before = self.remove(ticket_id);
        let has_changed = before.len() != scopes.len() || !scopes.iter().all(|scope| before.contains(scope));
        for scope in scopes {
            self.add(scope, PromisedAmounts { ticket_id: Some(ticket_id), resource: resource.clone(), requests: 1 });
        }
        has_changed
    }

    /// Removes a decided request, and returns the scopes in which it was entitled.
    pub fn remove(&mut self, ticket_id: Uuid) -> Vec<Scope> {
        let mut scopes = Vec::new();
        for (scope, promised) in &mut self.0 {
            let before = promised.len();
            promised.retain(|promised| promised.ticket_id != Some(ticket_id));
            if promised.len() < before {
                scopes.push(scope.clone());
            }
        }
        scopes
    }

    /// Returns the amount that requests other than `ticket_id` and `displaced` wait for.
    fn of_others(&self, scope: &Scope, dimension: &Dimension, ticket_id: Uuid, displaced: &BTreeSet<Uuid>) -> i64 {
        let promised = self.0.get(scope).into_iter().flatten();
        let is_other = |known: Uuid| known != ticket_id && !displaced.contains(&known);
        let others = promised.filter(|promised| promised.ticket_id.is_none_or(is_other));
        let amounts = others.map(|others| others.resource.get(dimension).saturating_mul(others.requests));
        amounts.fold(0, i64::saturating_add)
    }
}

/// A first whose entitlement is decided.
#[derive(Debug, Clone, Copy)]
pub struct GuaranteeCheck<'a> {
    /// The request.
    pub request: &'a PlacedRequest,
    /// Present own requests that will be behind it, and then wait for nothing that is guaranteed.
    pub displaced: &'a BTreeSet<Uuid>,
    /// Limits with the guarantees.
    pub limits: &'a Limits,
}

impl Promises {
    /// Returns whether a first is entitled. Where it is so already, the other requests were entitled after it, and do not count.
    pub fn is_entitled<'a>(
        &self,
        GuaranteeCheck { request, displaced, limits }: GuaranteeCheck<'_>,
        usage: impl Fn(&ScopeCounter) -> Option<&'a ScopeHoldings>,
    ) -> bool {
        let scopes = request.scopes(limits);
        let mut guaranteed = guaranteed_amounts(&scopes, request.resource()).peekable();
        let is_within = |GuaranteedAmount { limited, dimension, requested, guarantee }: GuaranteedAmount<'_>| {
            let held = usage(&limited.counter).map_or(0, |usage| usage.held(dimension));
            let promised = match self.has(limited.scope(), request) {
                true => 0,
                false => self.of_others(limited.scope(), dimension, request.ask.ticket_id, displaced),
            };
            held.saturating_add(requested).saturating_add(promised) <= guarantee
        };
        guaranteed.peek().is_some() && guaranteed.all(is_within)
    }

    /// Returns whether an entitled request is not entitled yet in all of its scopes with guarantees.
    pub fn lacks(&self, request: &PlacedRequest, limits: &Limits) -> bool {
        request.guaranteed_scopes(limits).iter().any(|scope| !self.has(scope, request))
    }

    /// Returns whether a request is entitled in a scope, with the same amounts.
    fn has(&self, scope: &Scope, request: &PlacedRequest) -> bool {
        let mut promised = self.0.get(scope).into_iter().flatten();
        promised.any(|own| own.ticket_id == Some(request.ask.ticket_id) && own.resource == *request.resource())
    }
}

/// Guarantee of a scope in a dimension of which a request requests an amount.
struct GuaranteedAmount<'a> {
    limited: &'a LimitedScope,
    dimension: &'a Dimension,
    requested: i64,
    guarantee: i64,
}

fn guaranteed_amounts<'a>(
    scopes: &'a [LimitedScope],
    resource: &'a Resource,
) -> impl Iterator<Item = GuaranteedAmount<'a>> {
    scopes.iter().flat_map(move |limited| {
        limited.guarantees().filter_map(move |(dimension, guarantee)| {
            let requested = resource.get(dimension);
            (requested > 0).then_some(GuaranteedAmount { limited, dimension, requested, guarantee })
        })
    })
}

impl PlacedRequest {
    /// Returns the scopes with guarantees that decide whether the request is entitled.
    pub fn guaranteed_scopes(&self, limits: &Limits) -> Vec<Scope> {
        let scopes = self.scopes(limits);
        let mut guaranteed: Vec<Scope> =
            guaranteed_amounts(&scopes, self.resource()).map(|of| of.limited.scope().clone()).collect();
        guaranteed.dedup();
        guaranteed
    }
}
