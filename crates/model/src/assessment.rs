//! Assessment: decides whether a request fits on its EM and in every limited scope, after the reservations of earlier queue
//! entries.
//!
//! [`assess_dimensions`] compares the requested with the available amount in each dimension of the EM and of its
//! scopes. All decisions follow from this list: [`assess`] returns the share that the EM counts, or the refusal with the
//! wait keys; [`fits`] returns whether the request is granted; [`head_room`] returns the grantable amounts. The functions
//! read the state that the caller gives them and change nothing. Invariants 1 and 6 of ARCHITECTURE.md are decided here.
//! Callers: the ledger (under the locks) and the admission check (on a plain read).

use std::sync::Arc;

use super::{
    cap::Cap,
    em::{Em, EmInstance},
    external::Clusters,
    hold::Holds,
    limit::{LimitedScope, Limits, Maximum, MaximumSource},
    limit_mode::LimitMode,
    operation::{PlacedRequest, Rejection, RequestSpec},
    refusal::{Refusal, Shortfall, short_dimensions},
    resource::{Dimension, Resource, ResourceError, behind},
    scope::{Scope, ScopeCounter, ScopeHoldings, Tally},
    wait_queue::{AssessedPosition, WaitKey, WaitKeys, WaitQueues},
};

/// Place of an assessment, with the deciding limit or cap of a scope.
#[derive(Debug, Clone, Copy)]
pub enum AssessedPlace<'a> {
    /// An EM.
    Em(&'a EmInstance),
    /// A limited scope.
    Scope(&'a Scope, MaximumSource<'a>),
}

impl AssessedPlace<'_> {
    /// Returns the EM or scope as `key=value`, for display.
    pub fn name(&self) -> String {
        match self {
            Self::Em(em) => format!("em={em}"),
            Self::Scope(scope, _) => scope.to_string(),
        }
    }

    /// Returns the deciding limit or cap, for display; empty for an EM.
    pub fn rule(&self) -> String {
        match self {
            Self::Em(_) => String::new(),
            Self::Scope(_, decided_by) => decided_by.to_string(),
        }
    }
}

/// Requested and available amount of a ticket in one dimension of an EM or a scope.
#[derive(Debug, Clone)]
pub struct DimensionAssessment<'a> {
    /// EM or scope.
    pub place: AssessedPlace<'a>,
    /// Dimension of the amounts.
    pub dimension: Dimension,
    /// Amount that the ticket has already.
    pub granted: i64,
    /// Amount that the ticket wants.
    pub requested: i64,
    /// Grantable amount. Negative while the use exceeds a lowered capacity or limit.
    pub available: i64,
    /// Amount that earlier queue entries reserve; not part of `available`.
    pub ahead: i64,
    /// Capacity or limit in total.
    pub max: i64,
    /// Amount that would be grantable without any other ticket.
    pub grantable: i64,
}

impl DimensionAssessment<'_> {
    /// Returns whether the dimension refuses the ticket. A dimension that does not grow is never short, because it was
    /// granted before.
    pub fn is_short(&self) -> bool {
        self.requested > self.granted && self.requested > self.available
    }
}

/// What a ticket has already, and what it wants.
#[derive(Debug, Clone, Copy)]
pub struct AmountChange<'a> {
    /// Amounts that the ticket has.
    pub granted: &'a Resource,
    /// Amounts that the ticket wants.
    pub requested: &'a Resource,
}

/// All dimensions that decide a ticket.
#[derive(Debug, Clone)]
pub struct Assessment<'a> {
    /// Dimensions of the EM.
    pub on_em: Vec<DimensionAssessment<'a>>,
    /// Dimensions of each scope, in the order of the scopes.
    pub in_scopes: Vec<Vec<DimensionAssessment<'a>>>,
}

impl<'a> Assessment<'a> {
    /// Returns the dimensions of the EM, then those of each scope.
    pub fn places(&self) -> impl Iterator<Item = &[DimensionAssessment<'a>]> {
        [&self.on_em].into_iter().chain(&self.in_scopes).map(Vec::as_slice)
    }

    fn dimensions(&self) -> impl Iterator<Item = &DimensionAssessment<'a>> {
        self.places().flatten()
    }
}

fn is_short(assessed: &[DimensionAssessment<'_>]) -> bool {
    assessed.iter().any(DimensionAssessment::is_short)
}

impl Em {
    /// Assesses a change of a share (a result of [`Em::project`]). The counters no longer include the granted amounts.
    fn assess<'a>(
        &'a self,
        AmountChange { granted, requested }: AmountChange<'_>,
        ahead: &Tally,
    ) -> Result<Vec<DimensionAssessment<'a>>, ResourceError> {
        let left = self.left()?;
        let assess = |(dimension, max): (Dimension, i64)| {
            let is_here = left.is_for(requested, &dimension);
            let here = |amount: i64| if is_here { amount } else { 0 };
            DimensionAssessment {
                place: AssessedPlace::Em(&self.instance),
                granted: granted.get(&dimension),
                requested: requested.get(&dimension),
                available: behind(here(left.get(&dimension)), ahead.get(&dimension)),
                ahead: ahead.get(&dimension),
                max,
                grantable: here(max.saturating_sub(self.protected.get(&dimension))),
                dimension,
            }
        };
        Ok(self.total.amounts().map(assess).collect())
    }
}

impl LimitedScope {
    /// Assesses a change of a ticket's amounts. The counters include the granted ones.
    fn assess<'a>(
        &'a self,
        maxima: impl Iterator<Item = Maximum<'a>>,
        usage: &ScopeHoldings,
        AmountChange { granted, requested }: AmountChange<'_>,
        ahead: &Tally,
    ) -> Vec<DimensionAssessment<'a>> {
        let assess = |Maximum { dimension, max, decided_by }: Maximum<'a>| {
            let (granted, ahead) = (granted.get(dimension), ahead.get(dimension));
            let left = max.saturating_sub(usage.held(dimension)).saturating_add(granted);
            DimensionAssessment {
                place: AssessedPlace::Scope(self.scope(), decided_by),
                dimension: dimension.clone(),
                granted,
                requested: requested.get(dimension),
                available: behind(left, ahead),
                ahead,
                max,
                grantable: max,
            }
        };
        maxima.map(assess).collect()
    }
}

/// Assesses a change of a ticket: of its share on the EM, and of its amounts in each scope. The counters of the scopes still
/// include what the ticket has; those of the EM do not. `usage` returns the stored use of a scope.
///
/// # Errors
/// [`Rejection::Inconsistent`] if the EM's counters contradict each other.
pub fn assess_dimensions<'a, 'u>(
    em: &'a Em,
    scopes: &'a [LimitedScope],
    usage: impl Fn(&ScopeCounter) -> Option<&'u ScopeHoldings>,
    line: &WaitQueues,
    position: &AssessedPosition,
    share: AmountChange<'_>,
    amounts: AmountChange<'_>,
) -> Result<Assessment<'a>, Rejection> {
    let inconsistent = |source| Rejection::Inconsistent { what: format!("the EM {}", em.instance), source };
    let ahead = line.ahead_at(|| WaitKey::Em(em.instance.clone()), position);
    let on_em = em.assess(share, &ahead).map_err(inconsistent)?;
    let nobody = ScopeHoldings::default();
    let in_scope = |limited: &'a LimitedScope| {
        let ahead = line.ahead_at(|| WaitKey::Scope(limited.scope().clone()), position);
        limited.assess(limited.enforced(), usage(&limited.counter).unwrap_or(&nobody), amounts, &ahead)
    };
    Ok(Assessment { on_em, in_scopes: scopes.iter().map(in_scope).collect() })
}

/// Assesses a request, which has nothing yet and wants `share` on the EM.
fn assess_request<'a, 'u>(
    em: &'a Em,
    scopes: &'a [LimitedScope],
    usage: impl Fn(&ScopeCounter) -> Option<&'u ScopeHoldings>,
    line: &WaitQueues,
    position: &AssessedPosition,
    share: &Resource,
    ask: &RequestSpec,
) -> Result<Assessment<'a>, Rejection> {
    let on_em = AmountChange { granted: &share.zero_like(), requested: share };
    let in_scopes = AmountChange { granted: &ask.resource.zero_like(), requested: &ask.resource };
    assess_dimensions(em, scopes, usage, line, position, on_em, in_scopes)
}

/// A request that cannot be granted now.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockedRequest {
    /// Refusal for the caller.
    pub refusal: Refusal,
    /// All wait keys of the request; true where it is short.
    pub wait_keys: WaitKeys,
}

/// Result of a check without locks.
#[derive(Debug, Clone)]
pub enum Verdict {
    /// The request can be granted unless another request uses the capacity first.
    Fits,
    /// The request cannot be granted now.
    Refused(Box<BlockedRequest>),
    /// The waiting request cannot be granted now. The call does not know its position, which a commit returns.
    Reranked(Box<BlockedRequest>),
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
    let (nobody, nobody_ahead) = (ScopeHoldings::default(), Tally::default());
    let change = AmountChange { granted: from, requested: to };
    let violations = |limited: &LimitedScope| {
        let usage = usage(&limited.counter).unwrap_or(&nobody);
        let assessed = limited.assess(limited.in_mode(LimitMode::Advisory), usage, change, &nobody_ahead);
        short_dimensions(&assessed).map(Shortfall::from).collect::<Vec<_>>()
    };
    scopes.iter().flat_map(violations).take(ADVISORY_VIOLATIONS_MAX).collect()
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

impl From<&DimensionAssessment<'_>> for HeadRoom {
    fn from(assessed: &DimensionAssessment<'_>) -> Self {
        let DimensionAssessment { place, dimension, available, ahead, max, .. } = assessed;
        let of = match place {
            AssessedPlace::Em(_) => None,
            AssessedPlace::Scope(scope, _) => Some((*scope).clone()),
        };
        let (dimension, available, ahead, max) = (dimension.clone(), *available, *ahead, *max);
        Self { scope: place.name(), of, dimension, available, ahead, max, rule: place.rule() }
    }
}

/// Returns the amounts that are grantable to a request at `position`. The list contains all dimensions of the EM
/// and all limited dimensions of each scope.
///
/// # Errors
/// [`Rejection::Inconsistent`] if the EM's counters contradict each other.
pub fn head_room<'a>(
    em: &Em,
    scopes: &[LimitedScope],
    usage: impl Fn(&ScopeCounter) -> Option<&'a ScopeHoldings>,
    line: &WaitQueues,
    position: &AssessedPosition,
) -> Result<Vec<HeadRoom>, Rejection> {
    let nothing = em.total.zero_like();
    let change = AmountChange { granted: &nothing, requested: &nothing };
    let assessment = assess_dimensions(em, scopes, usage, line, position, change, change)?;
    Ok(assessment.dimensions().map(HeadRoom::from).collect())
}

/// Decides a request on an EM and its scopes. `usage` returns the stored use of a scope.
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
    position: &AssessedPosition,
    ask: &RequestSpec,
) -> Result<Result<Resource, Box<BlockedRequest>>, Rejection> {
    let not_provided = |source| Rejection::NotProvided { field: "resource", em: em.instance.clone(), source };
    let share = em.project(&ask.resource).map_err(not_provided)?;
    let assessment = assess_request(em, scopes, usage, line, position, &share, ask)?;
    let Some(refusal) = Refusal::of(&assessment) else { return Ok(Ok(share)) };
    let is_short_on_em = is_short(&assessment.on_em);
    if is_short_on_em
        && let Err(ResourceError::DifferentQueue { left: provided, right: asked }) = em.total.covers(&share)
    {
        return Err(Rejection::OtherQueue { em: em.instance.clone(), provided, asked });
    }
    let limited = scopes.iter().zip(&assessment.in_scopes).filter(|(limited, _)| limited.is_limited());
    let limited = limited.map(|(limited, assessed)| (WaitKey::Scope(limited.scope().clone()), is_short(assessed)));
    let wait_keys = [(WaitKey::Em(em.instance.clone()), is_short_on_em)].into_iter().chain(limited).collect();
    Ok(Err(Box::new(BlockedRequest { refusal, wait_keys })))
}

/// Checks that an EM accepts a request at all, regardless of capacity. The decision depends on the drain, the labels of
/// both and the policy of the EM kind. Limits must also count the labels of all caps in the request. A request that may wait
/// waits for the end of a drain ([`Holds::or_block`]).
///
/// [`Holds::or_block`]: super::hold::Holds::or_block
///
/// # Errors
/// [`Rejection::EmDraining`], [`Rejection::LabelMissing`], [`Rejection::LabelRequired`], [`Rejection::EmReserved`],
/// [`Rejection::CapNotCounted`].
pub fn check_em(em: &Em, limits: &Limits, ask: &RequestSpec) -> Result<(), Rejection> {
    let instance = || em.instance.clone();
    if let Some(drain) = &em.drain
        && !ask.may_wait
    {
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

/// Returns whether [`assess`] would grant a request after all queue entries. Cheaper, because it collects no reasons.
pub fn fits<'a>(
    em: &Em,
    scopes: &[LimitedScope],
    usage: impl Fn(&ScopeCounter) -> Option<&'a ScopeHoldings>,
    line: &WaitQueues,
    ask: &RequestSpec,
) -> bool {
    let Ok(share) = em.project(&ask.resource) else { return false };
    let assessment = assess_request(em, scopes, usage, line, &AssessedPosition::default(), &share, ask);
    assessment.is_ok_and(|assessment| !assessment.places().any(is_short))
}

/// Returns all wait keys that can decide a request: its EM, its limited scopes, its external queues and what is held.
pub fn all_wait_keys(
    request: &PlacedRequest,
    limits: &Limits,
    clusters: &Clusters,
    holds: &Holds,
) -> impl Iterator<Item = WaitKey> + use<> {
    let in_queue = clusters.asked(request.resource(), &request.ask.labels).map(|asked| asked.wait_keys());
    let held = holds.block(request).map(|held| held.wait_keys);
    let keys = in_queue.unwrap_or_default().into_iter().chain(held.unwrap_or_default().into_keys());
    wait_keys(request, limits).chain(keys)
}

/// Returns the wait keys of a request without an external queue: its EM and its limited scopes.
pub fn wait_keys(request: &PlacedRequest, limits: &Limits) -> impl Iterator<Item = WaitKey> + use<> {
    let scopes = request.scopes(limits);
    let limited: Vec<WaitKey> = scopes
        .iter()
        .filter(|limited| limited.is_limited())
        .map(|limited| WaitKey::Scope(limited.scope().clone()))
        .collect();
    [WaitKey::Em(request.em.clone())].into_iter().chain(limited)
}
