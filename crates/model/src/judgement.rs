//! Whether a request can be granted: by its EM and by every limited scope, behind those who stand in line before it.

use std::sync::Arc;

use super::{
    cap::Cap,
    em::Em,
    limit::{LimitedScope, Limits, Maximum},
    limit_mode::LimitMode,
    line::{Line, QueuePosition, Spot, Spots},
    operation::{Rejection, Request, RequestSpec},
    refusal::{Refusal, ScopeShortage, Shortfall, over_watched},
    resource::{Dimension, Resource, ResourceError, behind},
    scope::{Counter, Scope, Tally, Usage},
};

/// Why a request cannot be granted now.
#[derive(Debug, Clone, PartialEq)]
pub struct Short {
    /// For its caller.
    pub refusal: Refusal,
    /// Everywhere where it is judged; true where it is short.
    pub spots: Spots,
}

/// How many places a grant tells where it goes beyond limits that only watch.
const OVER_WATCHED_MAX: usize = 32;

/// Where a request that fits goes beyond limits that only watch: the first such places.
pub fn beyond_watched<'a>(
    scopes: &[LimitedScope],
    usage: impl Fn(&Counter) -> Option<&'a Usage>,
    from: &Resource,
    to: &Resource,
) -> Vec<Shortfall> {
    let nobody = Usage::default();
    let watching = scopes.iter().filter(|limited| limited.in_mode(LimitMode::Watched).next().is_some());
    watching
        .flat_map(|limited| over_watched(limited, usage(&limited.counter).unwrap_or(&nobody), from, to))
        .take(OVER_WATCHED_MAX)
        .collect()
}

/// What a dry run tells of a request that fits.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Room {
    /// How much there is room for.
    pub head_room: Vec<HeadRoom>,
    /// Where it goes beyond limits that only watch.
    pub over_watched: Vec<Shortfall>,
}

/// How much one dimension of an EM or a scope has room for.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadRoom {
    /// Where, as key=value, for people.
    pub scope: String,
    /// The scope; `None` for an EM.
    pub of: Option<Scope>,
    /// In which dimension.
    pub dimension: Dimension,
    /// How much could be granted now; below zero while a capacity or a limit that was lowered drains.
    pub available: i64,
    /// How much is kept for requests that wait in line, and so is not available.
    pub ahead: i64,
    /// How much there is in all.
    pub max: i64,
    /// The limit that decides, for people; empty for an EM.
    pub rule: String,
}

/// How much could be granted now to one who has no position in line, wherever it would be judged: on its EM in all dimensions that the
/// EM provides, in scopes in all that rules limit.
///
/// # Errors
/// [`Rejection::Inconsistent`].
pub fn head_room<'a>(
    em: &Em,
    scopes: &[LimitedScope],
    usage: impl Fn(&Counter) -> Option<&'a Usage>,
    line: &Line,
) -> Result<Vec<HeadRoom>, Rejection> {
    let inconsistent = |source| Rejection::Inconsistent { what: format!("the EM {}", em.instance), source };
    let (left, on_em) = (em.left().map_err(inconsistent)?, Spot::Em(em.instance.clone()));
    let ahead = line.ahead(&on_em, None);
    let scope = format!("em={}", em.instance);
    let provided = em.total.amounts().map(|(dimension, max)| HeadRoom {
        scope: scope.clone(),
        of: None,
        available: behind(left.get(&dimension), ahead.get(&dimension)),
        ahead: ahead.get(&dimension),
        max,
        rule: String::new(),
        dimension,
    });
    let mut rooms: Vec<HeadRoom> = provided.collect();
    let nothing = Usage::default();
    for limited in scopes {
        let held = usage(&limited.counter).unwrap_or(&nothing);
        let ahead = line.ahead_at(|| Spot::Scope(limited.scope().clone()), None);
        rooms.extend(limited.enforced().map(|Maximum { dimension, max, decided_by }| {
            let held = held.used.get(dimension).saturating_add(held.locked.get(dimension));
            HeadRoom {
                scope: limited.scope().to_string(),
                of: Some(limited.scope().clone()),
                dimension: dimension.clone(),
                available: behind(max.saturating_sub(held), ahead.get(dimension)),
                ahead: ahead.get(dimension),
                max,
                rule: decided_by.to_string(),
            }
        }));
    }
    Ok(rooms)
}

impl Em {
    /// Whether `share` (what [`Em::project`] returned) can be granted now, while `ahead` is kept for others; a refusal tells
    /// everything that is short.
    pub fn judge(&self, share: &Resource, ahead: &Tally) -> Result<Result<(), Refusal>, ResourceError> {
        self.judge_growth(&share.zero_like(), share, ahead)
    }

    /// Whether a share that was `from`, and is not counted any more, can become `to`. What does not grow is never short: it
    /// was granted before.
    pub fn judge_growth(
        &self,
        from: &Resource,
        to: &Resource,
        ahead: &Tally,
    ) -> Result<Result<(), Refusal>, ResourceError> {
        let grows = |dimension: &Dimension| to.get(dimension) > from.get(dimension);
        let mut shortages = self.left()?.shortages_behind(to, |dimension| ahead.get(dimension));
        shortages.retain(|short| grows(&short.dimension));
        if shortages.is_empty() {
            return Ok(Ok(()));
        }
        let nothing = self.total.zero_like();
        let capacity = Resource::left(&self.total, &self.protected, &nothing, &nothing)?;
        let never_fits = capacity.shortages(to).iter().any(|short| grows(&short.dimension));
        Ok(Err(Refusal::of_em(self, shortages, never_fits)))
    }
}

/// Judges a request. `usage` tells what a scope holds; `position` is where it stands in line, if it does.
///
/// Answers with what the EM would count of it.
///
/// # Errors
/// [`Rejection::Unanswerable`], [`Rejection::OtherQueue`], [`Rejection::Inconsistent`].
pub fn judge<'a>(
    em: &Em,
    scopes: &[LimitedScope],
    usage: impl Fn(&Counter) -> Option<&'a Usage>,
    line: &Line,
    position: Option<QueuePosition>,
    ask: &RequestSpec,
) -> Result<Result<Resource, Box<Short>>, Rejection> {
    let unanswerable = |source| Rejection::Unanswerable { field: "resource", em: em.instance.clone(), source };
    let share = em.project(&ask.resource).map_err(unanswerable)?;
    let ahead = line.ahead_at(|| Spot::Em(em.instance.clone()), position);
    let inconsistent = |source| Rejection::Inconsistent { what: format!("the EM {}", em.instance), source };
    let on_em = em.judge(&share, &ahead).map_err(inconsistent)?.err();
    if on_em.is_some()
        && let Err(ResourceError::DifferentQueue { left: provided, right: asked }) = em.total.covers(&share)
    {
        return Err(Rejection::OtherQueue { em: em.instance.clone(), provided, asked });
    }

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

/// Whether a request may go to an EM at all, whatever there is room for: whether it is drained, by the labels of both, the policy of its
/// kind, and whether the request is counted by the labels of its caps.
///
/// # Errors
/// [`Rejection::EmDraining`], [`Rejection::LabelMissing`], [`Rejection::LabelRequired`], [`Rejection::EmReserved`],
/// [`Rejection::CapNotCounted`].
pub fn admit(em: &Em, limits: &Limits, ask: &RequestSpec) -> Result<(), Rejection> {
    let instance = || em.instance.clone();
    if let Some(drain) = &em.drain {
        return Err(Rejection::EmDraining { em: instance(), drain: drain.clone() });
    }
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
    if !ask.caps.is_empty() {
        let scopes = limits.scopes_under(&ask.ticket_labels(&em.instance), &ask.caps);
        let is_counted = |cap: &&Arc<Cap>| scopes.iter().any(|limited| limited.cap.as_ref() == Some(*cap));
        if let Some(cap) = ask.caps.iter().find(|cap| !is_counted(cap)) {
            return Err(Rejection::CapNotCounted { em: instance(), keys: cap.key_list() });
        }
    }
    Ok(())
}

/// Whether [`judge`] would grant the request to one who has no position in line, without saying why not.
pub fn fits<'a>(
    em: &Em,
    scopes: &[LimitedScope],
    usage: impl Fn(&Counter) -> Option<&'a Usage>,
    line: &Line,
    ask: &RequestSpec,
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
