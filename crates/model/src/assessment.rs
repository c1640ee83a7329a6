//! Assessment: decides whether a request fits on its EM and in every limited scope, after the reservations of earlier queue
//! entries.
//!
//! [`assess`] returns the share that the EM counts, or the refusal with the wait keys. [`fits`] returns the same decision
//! without the reasons. [`head_room`] returns the amounts that are still grantable. The functions read the state that the
//! caller gives them and change nothing. Invariants 1 and 6 of ARCHITECTURE.md are decided here.
//! Callers: the ledger (under the locks) and the admission check (on a plain read).

use std::sync::Arc;

use super::{
    cap::Cap,
    em::Em,
    limit::{LimitedScope, Limits, Maximum},
    limit_mode::LimitMode,
    operation::{PlacedRequest, Rejection, RequestSpec},
    refusal::{Refusal, ScopeShortage, Shortfall, advisory_shortfalls},
    resource::{Dimension, Resource, ResourceError, behind},
    scope::{Scope, ScopeCounter, ScopeHoldings, Tally},
    wait_queue::{QueuePosition, WaitKey, WaitKeys, WaitQueues},
};

/// A request that cannot be granted now.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockedRequest {
    /// Refusal for the caller.
    pub refusal: Refusal,
    /// All wait keys of the request; true where it is short.
    pub wait_keys: WaitKeys,
}

/// Maximum number of advisory violations that a grant lists.
const ADVISORY_VIOLATIONS_MAX: usize = 32;

/// Returns the first advisory limits that a fitting request violates, at most 32.
pub fn advisory_violations<'a>(
    scopes: &[LimitedScope],
    usage: impl Fn(&ScopeCounter) -> Option<&'a ScopeHoldings>,
    from: &Resource,
    to: &Resource,
) -> Vec<Shortfall> {
    let nobody = ScopeHoldings::default();
    let watching = scopes.iter().filter(|limited| limited.in_mode(LimitMode::Advisory).next().is_some());
    watching
        .flat_map(|limited| advisory_shortfalls(limited, usage(&limited.counter).unwrap_or(&nobody), from, to))
        .take(ADVISORY_VIOLATIONS_MAX)
        .collect()
}

/// Result of a dry run of a fitting request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DryRunResult {
    /// Grantable amounts.
    pub head_room: Vec<HeadRoom>,
    /// Advisory limits that the request would violate.
    pub advisory_violations: Vec<Shortfall>,
}

/// Grantable amount in one dimension of an EM or a scope.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadRoom {
    /// EM or scope as `key=value`, for display.
    pub scope: String,
    /// The scope; `None` for an EM.
    pub of: Option<Scope>,
    /// Dimension of the amounts.
    pub dimension: Dimension,
    /// Amount that can be granted now. Negative while the use exceeds a lowered capacity or limit.
    pub available: i64,
    /// Amount that queue entries reserve; not part of `available`.
    pub ahead: i64,
    /// Capacity or limit in total.
    pub max: i64,
    /// The limit that decides, for display; empty for an EM.
    pub rule: String,
}

/// Returns the amounts that are grantable to a request without a queue position. The list contains all dimensions of the EM
/// and all limited dimensions of each scope.
///
/// # Errors
/// [`Rejection::Inconsistent`] if the EM's counters contradict each other.
pub fn head_room<'a>(
    em: &Em,
    scopes: &[LimitedScope],
    usage: impl Fn(&ScopeCounter) -> Option<&'a ScopeHoldings>,
    line: &WaitQueues,
) -> Result<Vec<HeadRoom>, Rejection> {
    let inconsistent = |source| Rejection::Inconsistent { what: format!("the EM {}", em.instance), source };
    let (left, on_em) = (em.left().map_err(inconsistent)?, WaitKey::Em(em.instance.clone()));
    let ahead = line.reserved_ahead(&on_em, None);
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
    let nothing = ScopeHoldings::default();
    for limited in scopes {
        let held = usage(&limited.counter).unwrap_or(&nothing);
        let ahead = line.ahead_at(|| WaitKey::Scope(limited.scope().clone()), None);
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
    /// Checks that `share` (the result of [`Em::project`]) fits beyond the reservations `ahead`. The refusal lists all
    /// short dimensions.
    ///
    /// # Errors
    /// [`ResourceError`] if the EM's counters contradict each other.
    pub fn assess(&self, share: &Resource, ahead: &Tally) -> Result<Result<(), Refusal>, ResourceError> {
        self.assess_growth(&share.zero_like(), share, ahead)
    }

    /// Checks that a share can change from `from`, which the counters no longer include, to `to`. A dimension that does not
    /// grow is never short, because it was granted before.
    ///
    /// # Errors
    /// [`ResourceError`] if the EM's counters contradict each other.
    pub fn assess_growth(
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

/// Decides a request on an EM and its scopes. `usage` returns the stored use of a scope; `position` is the request's queue
/// position, if any.
///
/// Returns the share that the EM counts, or the refusal with the wait keys.
///
/// # Errors
/// [`Rejection::NotProvided`], [`Rejection::OtherQueue`], [`Rejection::Inconsistent`].
pub fn assess<'a>(
    em: &Em,
    scopes: &[LimitedScope],
    usage: impl Fn(&ScopeCounter) -> Option<&'a ScopeHoldings>,
    line: &WaitQueues,
    position: Option<QueuePosition>,
    ask: &RequestSpec,
) -> Result<Result<Resource, Box<BlockedRequest>>, Rejection> {
    let not_provided = |source| Rejection::NotProvided { field: "resource", em: em.instance.clone(), source };
    let share = em.project(&ask.resource).map_err(not_provided)?;
    let ahead = line.ahead_at(|| WaitKey::Em(em.instance.clone()), position);
    let inconsistent = |source| Rejection::Inconsistent { what: format!("the EM {}", em.instance), source };
    let on_em = em.assess(&share, &ahead).map_err(inconsistent)?.err();
    if on_em.is_some()
        && let Err(ResourceError::DifferentQueue { left: provided, right: asked }) = em.total.covers(&share)
    {
        return Err(Rejection::OtherQueue { em: em.instance.clone(), provided, asked });
    }

    let (nobody, nothing) = (ScopeHoldings::default(), ask.resource.zero_like());
    let in_scope = |limited: &LimitedScope| {
        let ahead = line.ahead_at(|| WaitKey::Scope(limited.scope().clone()), position);
        ScopeShortage::of(limited, usage(&limited.counter).unwrap_or(&nobody), &nothing, &ask.resource, &ahead)
    };
    let shortages: Vec<ScopeShortage> = scopes.iter().map(in_scope).collect();

    if on_em.is_none() && shortages.iter().all(ScopeShortage::is_none) {
        return Ok(Ok(share));
    }
    let mut wait_keys = WaitKeys::from([(WaitKey::Em(em.instance.clone()), on_em.is_some())]);
    for (limited, shortage) in scopes.iter().zip(&shortages).filter(|(limited, _)| limited.is_limited()) {
        wait_keys.insert(WaitKey::Scope(limited.scope().clone()), !shortage.is_none());
    }
    match Refusal::first_of(on_em, Refusal::of_scopes(shortages)) {
        Some(refusal) => Ok(Err(Box::new(BlockedRequest { refusal, wait_keys }))),
        None => Ok(Ok(share)),
    }
}

/// Checks that an EM accepts a request at all, regardless of capacity. The decision depends on the drain, the labels of
/// both and the policy of the EM kind. Limits must also count the labels of all caps in the request.
///
/// # Errors
/// [`Rejection::EmDraining`], [`Rejection::LabelMissing`], [`Rejection::LabelRequired`], [`Rejection::EmReserved`],
/// [`Rejection::CapNotCounted`].
pub fn check_em(em: &Em, limits: &Limits, ask: &RequestSpec) -> Result<(), Rejection> {
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

/// Returns whether [`assess`] would grant a request without a queue position. Cheaper, because it collects no reasons.
pub fn fits<'a>(
    em: &Em,
    scopes: &[LimitedScope],
    usage: impl Fn(&ScopeCounter) -> Option<&'a ScopeHoldings>,
    line: &WaitQueues,
    ask: &RequestSpec,
) -> bool {
    let (Ok(share), Ok(left)) = (em.project(&ask.resource), em.left()) else { return false };
    let ahead = line.ahead_at(|| WaitKey::Em(em.instance.clone()), None);
    if !left.covers_behind(&share, |dimension| ahead.get(dimension)) {
        return false;
    }
    let (nobody, nothing) = (ScopeHoldings::default(), ask.resource.zero_like());
    !scopes.iter().any(|limited| {
        let ahead = line.ahead_at(|| WaitKey::Scope(limited.scope().clone()), None);
        ScopeShortage::is_any(limited, usage(&limited.counter).unwrap_or(&nobody), &nothing, &ask.resource, &ahead)
    })
}

/// Returns all wait keys that decide a request: its EM and its limited scopes.
pub fn wait_keys(request: &PlacedRequest, limits: &Limits) -> impl Iterator<Item = WaitKey> + use<> {
    let scopes = request.scopes(limits);
    let limited: Vec<WaitKey> = scopes
        .iter()
        .filter(|limited| limited.is_limited())
        .map(|limited| WaitKey::Scope(limited.scope().clone()))
        .collect();
    [WaitKey::Em(request.em.clone())].into_iter().chain(limited)
}
