//! Whether a request can be granted: by its EM and by every limited scope, behind those who stand in line before it.

use super::{
    em::{Em, EmInstance},
    limit::{LimitedScope, Limits},
    line::{Line, QueuePosition, Spot, Spots},
    operation::{Ask, Rejection},
    refusal::{Refusal, ScopeShortage},
    resource::Resource,
    scope::{Counter, Usage},
};

/// Why a request cannot be granted now.
#[derive(Debug, Clone, PartialEq)]
pub struct Short {
    /// For its caller.
    pub refusal: Refusal,
    /// Everywhere where it is judged; true where it is short.
    pub spots: Spots,
}

/// Judges a request. `usage` tells what a scope holds; `position` is where it stands in line, if it does.
///
/// Answers with what the EM would count of it.
///
/// # Errors
/// [`Rejection::Unanswerable`], [`Rejection::Inconsistent`].
pub fn judge<'a>(
    em: &Em,
    scopes: &[LimitedScope],
    usage: impl Fn(&Counter) -> Option<&'a Usage>,
    line: &Line,
    position: Option<QueuePosition>,
    ask: &Ask,
) -> Result<Result<Resource, Box<Short>>, Rejection> {
    let unanswerable = |source| Rejection::Unanswerable { field: "resource", em: em.instance.clone(), source };
    let share = em.project(&ask.resource).map_err(unanswerable)?;
    let ahead = line.ahead_at(|| Spot::Em(em.instance.clone()), position);
    let inconsistent = |source| Rejection::Inconsistent { what: format!("the EM {}", em.instance), source };
    let on_em = em.judge(&share, &ahead).map_err(inconsistent)?.err();

    let (nobody, nothing) = (Usage::default(), ask.resource.zero_like());
    let in_scope = |limited: &LimitedScope| {
        let ahead = line.ahead_at(|| Spot::Scope(limited.scope().clone()), position);
        ScopeShortage::of(limited, usage(&limited.counter).unwrap_or(&nobody), &nothing, &ask.resource, &ahead)
    };
    let shortages: Vec<ScopeShortage> = scopes.iter().map(in_scope).collect();

    if on_em.is_none() && shortages.iter().all(ScopeShortage::is_none) {
        return Ok(Ok(share));
    }
    let mut spots = Spots::from([(Spot::Em(em.instance.clone()), on_em.is_some())]);
    for (limited, shortage) in scopes.iter().zip(&shortages).filter(|(limited, _)| limited.is_limited()) {
        spots.insert(Spot::Scope(limited.scope().clone()), !shortage.is_none());
    }
    match Refusal::first_of(on_em, Refusal::of_scopes(shortages)) {
        Some(refusal) => Ok(Err(Box::new(Short { refusal, spots }))),
        None => Ok(Ok(share)),
    }
}

/// Whether [`judge`] would grant the request to one who has no position in line, without saying why not.
pub fn fits<'a>(
    em: &Em,
    scopes: &[LimitedScope],
    usage: impl Fn(&Counter) -> Option<&'a Usage>,
    line: &Line,
    ask: &Ask,
) -> bool {
    let (Ok(share), Ok(left)) = (em.project(&ask.resource), em.left()) else { return false };
    let ahead = line.ahead_at(|| Spot::Em(em.instance.clone()), None);
    if !left.covers_behind(&share, |dimension| ahead.get(dimension)) {
        return false;
    }
    let (nobody, nothing) = (Usage::default(), ask.resource.zero_like());
    !scopes.iter().any(|limited| {
        let ahead = line.ahead_at(|| Spot::Scope(limited.scope().clone()), None);
        ScopeShortage::is_any(limited, usage(&limited.counter).unwrap_or(&nobody), &nothing, &ask.resource, &ahead)
    })
}

/// Everywhere where a request is judged on `em`.
pub fn spots(em: &EmInstance, limits: &Limits, ask: &Ask) -> impl Iterator<Item = Spot> + use<> {
    let limited = limits.scopes(&ask.ticket_labels(em)).into_iter().filter(LimitedScope::is_limited);
    [Spot::Em(em.clone())].into_iter().chain(limited.map(|limited| Spot::Scope(limited.counter.scope)))
}
