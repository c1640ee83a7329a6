//! Refusals: negative replies to requests, with the short dimensions and the codes and words of Linkis.
//!
//! Invariant: texts and codes equal those of Linkis, and each refusal names a short scope (invariant 12 of ARCHITECTURE.md).
//! Callers: the assessment creates refusals; services return them to callers and count them.

use std::fmt;

use super::{
    assessment::{AssessedPlace, Assessment, DimensionAssessment},
    cap::write_maxima,
    em::Em,
    hold::ExistingHold,
    limit::Rule,
    limit_mode::LimitMode,
    operation::LockKey,
    resource::{Dimension, Resource, whole_gb},
    scope_kind::ScopeKind,
    timestamp::rfc3339,
    wait_queue::WaitKey,
};

/// Reason why a request cannot be granted. [`Refusal::shortfalls`] is never empty; the first one determines code and text.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal {
    /// All short dimensions, in Linkis's order of precedence: cores, memory, instances, others.
    pub shortfalls: Vec<Shortfall>,
    /// Code of the first shortfall, from Linkis's `RMErrorCode`.
    pub code: i32,
    /// Linkis's message for the first shortfall.
    pub reason: String,
    /// True if the request would not fit without any other ticket.
    pub never_fits: bool,
}

/// One short dimension of one scope.
#[derive(Debug, Clone, PartialEq)]
pub struct Shortfall {
    /// EM, scope or queue as `key=value`, for display.
    pub scope: String,
    /// Kind of the scope.
    pub kind: ScopeKind,
    /// Short dimension.
    pub dimension: Dimension,
    /// Requested amount.
    pub requested: i64,
    /// Grantable amount. Negative while the use exceeds a lowered capacity.
    pub available: i64,
    /// Amount that earlier queue entries reserve; not part of `available`.
    pub ahead: i64,
    /// Capacity or limit in total.
    pub max: i64,
    /// Deciding limit or the request's own cap, for display; empty for an EM.
    pub rule: String,
    /// EM, or scope of one user, whose idle engines can be counted by an index; `None` for any other scope and in a message.
    pub idle_key: Option<WaitKey>,
    /// Part of the use that idle engines hold; `None` if it was not counted.
    pub idle_amount: Option<i64>,
}

impl From<&DimensionAssessment<'_>> for Shortfall {
    fn from(short: &DimensionAssessment<'_>) -> Self {
        let DimensionAssessment { place, dimension, requested, available, ahead, max, .. } = short;
        let (kind, idle_key) = match *place {
            AssessedPlace::Em(em) => (ScopeKind::Em, Some(WaitKey::Em(em.clone()))),
            AssessedPlace::Scope(scope, _) => {
                (ScopeKind::of(scope), scope.names_user().then(|| WaitKey::Scope(scope.clone())))
            }
        };
        Self {
            scope: place.name(),
            kind,
            dimension: dimension.clone(),
            requested: *requested,
            available: *available,
            ahead: *ahead,
            max: *max,
            rule: place.rule(),
            idle_key,
            idle_amount: None,
        }
    }
}

/// Returns the short dimensions of one EM or scope in order of precedence.
pub(super) fn short_dimensions<'s, 'a>(
    assessed: &'s [DimensionAssessment<'a>],
) -> impl Iterator<Item = &'s DimensionAssessment<'a>> + use<'s, 'a> {
    let mut short: Vec<_> = assessed.iter().filter(|assessed| assessed.is_short()).collect();
    short.sort_by_key(|short| short.dimension.precedence());
    short.into_iter()
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.mode {
            LimitMode::Enforced => write!(f, "{}:", self.pattern)?,
            mode => write!(f, "{} ({}):", self.pattern, mode.as_str())?,
        }
        f.write_str(if self.max.is_empty() { " only counted" } else { " at most" })?;
        write_maxima(f, &self.max)
    }
}

impl Refusal {
    /// Returns the refusal for an assessment; `None` if nothing is short. Code and text are those of the EM, if it is short.
    pub fn of(assessment: &Assessment<'_>) -> Option<Self> {
        let short: Vec<_> = assessment.places().flat_map(short_dimensions).collect();
        let never_fits = short.iter().any(|short| short.requested > short.grantable);
        let shortfalls: Vec<_> = short.iter().copied().map(Shortfall::from).collect();
        let (first, detail) = (short.first()?, shortage_text(shortfalls.first()?));
        let (code, reason) = match first.place {
            AssessedPlace::Em(em) => {
                let (code, text) = em_code(&first.dimension);
                (code, format!("{text}{detail}ECM Instance:{}", em.instance))
            }
            AssessedPlace::Scope(..) => {
                let (code, text) = limit_code(&first.dimension);
                (code, format!("{text}{detail}"))
            }
        };
        Some(Self { shortfalls, code, reason, never_fits })
    }

    /// Returns whether no limit takes part, so that another EM may grant the request.
    pub fn is_of_em_alone(&self) -> bool {
        self.shortfalls.iter().all(|short| short.rule.is_empty())
    }

    /// Adds the shortfalls of another refusal. Code and text stay.
    pub(super) fn append(&mut self, more: Self) {
        self.shortfalls.extend(more.shortfalls);
        self.never_fits |= more.never_fits;
    }

    /// Returns the refusal of a request whose EM or user is held. Another EM may grant it if only its EM is held.
    pub(super) fn of_hold(key: &LockKey, hold: &ExistingHold, resource: &Resource) -> Self {
        let held = format!("held by {} until {} ({})", hold.by, rfc3339(hold.until), hold.reason);
        Self::of_closed(&key.wait_key(), &format!("{held}; wait, or have an operator release the hold"), resource)
    }

    /// Returns the refusal of a request that waits at a drained, unhealthy or silent EM.
    pub(super) fn of_closed_em(em: &Em, resource: &Resource) -> Self {
        let state = match em.drain.as_deref() {
            Some(drain) => format!(
                "drained since {} by {} ({}); wait, or have an operator resume the EM",
                rfc3339(drain.since),
                drain.by,
                drain.reason
            ),
            None => "unhealthy or silent; wait until the EM reports that it is healthy".to_owned(),
        };
        Self::of_closed(&WaitKey::Em(em.instance.clone()), &state, resource)
    }

    /// Returns the refusal of a request that waits until an EM or a user is open again.
    fn of_closed(wait_key: &WaitKey, state: &str, resource: &Resource) -> Self {
        let (kind, code) = match wait_key {
            WaitKey::Scope(scope) => (ScopeKind::of(scope), limit_code(&Dimension::Instances).0),
            _ => (ScopeKind::Em, em_code(&Dimension::Instances).0),
        };
        let reason = format!("{wait_key} is {state}");
        let requested = resource.get(&Dimension::Instances).max(1);
        let rule = if kind == ScopeKind::Em { String::new() } else { "hold".to_owned() };
        let shortfall = Shortfall {
            scope: wait_key.to_string(),
            kind,
            dimension: Dimension::Instances,
            requested,
            available: 0,
            ahead: 0,
            max: 0,
            rule,
            idle_key: None,
            idle_amount: None,
        };
        Self { shortfalls: vec![shortfall], code, reason, never_fits: false }
    }

    /// Returns the refusal for shortfalls in external queues. The requested queue is first; `shortfalls` must not be empty.
    pub(super) fn of_queues(shortfalls: Vec<Shortfall>) -> Self {
        // A cluster temporarily without nodes, as after a failover, has a maximum of zero.
        let never_fits = shortfalls.iter().any(|short| short.requested > short.max && short.max > 0);
        let (code, text) = shortfalls.first().map_or((11_006, ""), |first| queue_code(&first.dimension));
        let detail = shortfalls.first().map(|first| format!("{} ({})", shortage_text(first), first.scope));
        let reason = format!("{text}{}", detail.unwrap_or_default());
        Self { shortfalls, code, reason, never_fits }
    }
}

/// Returns Linkis's code and text for a dimension of an EM (`RMErrorCode` 11000 to 11003).
fn em_code(dimension: &Dimension) -> (i32, &'static str) {
    match dimension {
        Dimension::Memory => (11001, "ECM memory resources are insufficient"),
        Dimension::Cores => (11002, "ECM CPU resources are insufficient"),
        Dimension::Instances => (11003, "ECM Insufficient number of instances"),
        _ => (11000, "ECM resources are insufficient"),
    }
}

/// Returns Linkis's code and text for a dimension of a limit (`RMErrorCode` 12001 to 12006). Dimensions that Linkis cannot
/// limit get its general code for refused requests.
fn limit_code(dimension: &Dimension) -> (i32, &'static str) {
    match dimension {
        Dimension::QueueCores => (12001, "Queue CPU resources are insufficient, reduce the number of executors."),
        Dimension::QueueMemory => (12002, "Insufficient queue memory resources, reduce the executor memory"),
        Dimension::QueueInstances => (12003, "Insufficient number of queue instances, idle engines can be killed"),
        Dimension::Memory => (12004, "Drive memory resources are insufficient, to reduce the drive memory"),
        Dimension::Cores => (12005, "Drive core resources are insufficient, to reduce the number of driver cores"),
        Dimension::Instances => (12006, "Insufficient number of instances, idle engines can be killed"),
        _ => (110_022, "The limit is reached"),
    }
}

/// Returns Linkis's code and text for a dimension of a queue (`RMErrorCode` 12010, 12011) or namespace (12110, 12111, since
/// 1.6).
fn queue_code(dimension: &Dimension) -> (i32, &'static str) {
    match dimension {
        Dimension::QueueCores => (12011, "Insufficient cluster queue cpu"),
        Dimension::KubernetesMillicores => (12111, "Insufficient cluster namespace cpu"),
        Dimension::KubernetesMemory => (12110, "Insufficient cluster namespace memory"),
        _ => (12010, "Insufficient cluster queue memory"),
    }
}

/// Returns the suffix that Linkis appends to every shortage, including its blanks.
fn shortage_text(short: &Shortfall) -> String {
    let (name, unit): (&str, &str) = match &short.dimension {
        Dimension::Memory | Dimension::QueueMemory | Dimension::KubernetesMemory => ("Memory", "GB"),
        Dimension::Cores | Dimension::QueueCores | Dimension::KubernetesMillicores => ("CPU", "cores"),
        Dimension::Instances | Dimension::QueueInstances => ("Instance", ""),
        Dimension::Waiting => ("Waiting", ""),
        Dimension::Custom(name) => (name, ""),
    };
    let show = |amount: i64| if unit == "GB" { format!("{}GB", whole_gb(amount)) } else { format!("{amount}{unit}") };
    format!(
        " use {name}, requestResource : {} > availableResource : {},  maxResource : {}.",
        show(short.requested),
        show(short.available),
        show(short.max)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn short(dimension: Dimension, requested: i64, available: i64, max: i64) -> Shortfall {
        let (scope, rule) = (String::new(), String::new());
        let (kind, ahead, idle_key, idle_amount) = (ScopeKind::Em, 0, None, None);
        Shortfall { scope, kind, dimension, requested, available, ahead, max, rule, idle_key, idle_amount }
    }

    /// The example of Linkis's own test of its message.
    #[test]
    fn refusal_message_equals_linkis_text() {
        assert_eq!(
            shortage_text(&short(Dimension::Memory, 644_245_094_400, -2_147_483_648, 20_454_781_747_200)),
            " use Memory, requestResource : 600GB > availableResource : -2GB,  maxResource : 19050GB."
        );
        assert_eq!(
            shortage_text(&short(Dimension::Cores, 4, 1, 10)),
            " use CPU, requestResource : 4cores > availableResource : 1cores,  maxResource : 10cores."
        );
        assert_eq!(
            shortage_text(&short(Dimension::Instances, 2, 0, 5)),
            " use Instance, requestResource : 2 > availableResource : 0,  maxResource : 5."
        );
    }
}
