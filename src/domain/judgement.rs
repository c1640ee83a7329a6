//! Whether a request can be granted: by its EM and by every limited scope, behind those who stand in line before it.

use super::{
    em::Em,
    limit::{LimitedScope, Limits},
    line::{Line, QueuePosition, Spot, Spots},
    operation::{Ask, Rejection, Request},
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

/// Whether a request may go to an EM at all, whatever there is room for: by the labels of both, and the policy of its kind.
///
/// # Errors
/// [`Rejection::LabelMissing`], [`Rejection::LabelRequired`], [`Rejection::EmReserved`].
pub fn admit(em: &Em, limits: &Limits, ask: &Ask) -> Result<(), Rejection> {
    let instance = || em.instance.clone();
    let policy = limits.policies().get(&em.instance.application_name);
    if let Some(key) = policy.and_then(|policy| policy.lacking(|key| ask.carries(key))) {
        return Err(Rejection::LabelMissing { em: instance(), key: key.to_owned() });
    }
    let required = ask.selector.required.as_map().iter();
    if let Some((key, value)) = required.into_iter().find(|(key, value)| em.label(key) != Some(*value)) {
        return Err(Rejection::LabelRequired { em: instance(), key: key.clone(), value: value.clone() });
    }
    let reserved = em.reserved.as_map().iter();
    if let Some((key, value)) = reserved.into_iter().find(|(key, value)| !ask.has(key, value)) {
        return Err(Rejection::EmReserved { em: instance(), key: key.clone(), value: value.clone() });
    }
    Ok(())
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

/// Everywhere where a request is judged.
pub fn spots(request: &Request, limits: &Limits) -> impl Iterator<Item = Spot> + use<> {
    let scopes = request.scopes(limits);
    let limited: Vec<Spot> = scopes
        .iter()
        .filter(|limited| limited.is_limited())
        .map(|limited| Spot::Scope(limited.scope().clone()))
        .collect();
    [Spot::Em(request.em.clone())].into_iter().chain(limited)
}
