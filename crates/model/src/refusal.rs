//! Refusals: negative replies to requests, with the short dimensions and the codes and words of Linkis.
//!
//! Invariant: texts and codes equal those of Linkis, and each refusal names a short scope (invariant 12 of ARCHITECTURE.md).
//! Callers: the assessment creates refusals; services return them to callers and count them.

use std::fmt;

use super::{
    cap::write_maxima,
    em::Em,
    limit::{LimitedScope, Maximum, MaximumSource, Rule},
    limit_mode::LimitMode,
    resource::{Dimension, Resource, Shortage, behind, whole_gb},
    scope::{ScopeHoldings, Tally},
    scope_kind::ScopeKind,
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
}

/// Short dimensions of one scope.
#[derive(Debug, Default)]
pub struct ScopeShortage {
    /// Short dimensions in order of precedence.
    pub shortfalls: Vec<Shortfall>,
    /// True if a dimension would not fit without any other ticket.
    pub never_fits: bool,
}

impl ScopeShortage {
    /// Returns the short dimensions of a scope for a change of a ticket's amounts from `from` to `to`, beyond the
    /// reservations `ahead`. A dimension that does not grow is never short.
    pub fn of(limited: &LimitedScope, usage: &ScopeHoldings, from: &Resource, to: &Resource, ahead: &Tally) -> Self {
        let shortfalls = shortfalls(limited, missing(limited.enforced(), usage, from, to, ahead));
        let never_fits = shortfalls.iter().any(|short| short.requested > short.max);
        Self { shortfalls, never_fits }
    }

    /// Returns whether [`ScopeShortage::of`] would find a short dimension.
    pub fn is_any(
        limited: &LimitedScope,
        usage: &ScopeHoldings,
        from: &Resource,
        to: &Resource,
        ahead: &Tally,
    ) -> bool {
        missing(limited.enforced(), usage, from, to, ahead).next().is_some()
    }

    /// Returns whether no dimension is short.
    pub fn is_none(&self) -> bool {
        self.shortfalls.is_empty()
    }
}

/// Returns the advisory limits that a change of a ticket's amounts from `from` to `to` violates.
pub fn advisory_shortfalls(
    limited: &LimitedScope,
    usage: &ScopeHoldings,
    from: &Resource,
    to: &Resource,
) -> Vec<Shortfall> {
    let nobody_ahead = Tally::default();
    shortfalls(limited, missing(limited.in_mode(LimitMode::Advisory), usage, from, to, &nobody_ahead))
}

/// Converts short dimensions into shortfalls, in order of precedence.
fn shortfalls<'a>(limited: &LimitedScope, missing: impl Iterator<Item = ShortDimension<'a>>) -> Vec<Shortfall> {
    let shortfall = |short: ShortDimension<'_>| Shortfall {
        scope: limited.scope().to_string(),
        kind: ScopeKind::of(limited.scope()),
        dimension: short.dimension.clone(),
        requested: short.requested,
        available: short.available,
        ahead: short.ahead,
        max: short.max,
        rule: short.decided_by.to_string(),
    };
    let mut shortfalls: Vec<_> = missing.map(shortfall).collect();
    shortfalls.sort_by_key(|short| short.dimension.precedence());
    shortfalls
}

/// A dimension whose maximum is exceeded.
struct ShortDimension<'a> {
    decided_by: MaximumSource<'a>,
    dimension: &'a Dimension,
    requested: i64,
    available: i64,
    ahead: i64,
    max: i64,
}

fn missing<'a>(
    maxima: impl Iterator<Item = Maximum<'a>>,
    usage: &'a ScopeHoldings,
    from: &'a Resource,
    to: &'a Resource,
    ahead: &'a Tally,
) -> impl Iterator<Item = ShortDimension<'a>> {
    maxima.filter_map(move |Maximum { dimension, max, decided_by }| {
        let requested = to.get(dimension);
        // Both are sums of granted amounts, so their sum does not overflow.
        let held = usage.used.get(dimension).saturating_add(usage.locked.get(dimension));
        let left = max.saturating_sub(held).saturating_add(from.get(dimension));
        let ahead = ahead.get(dimension);
        let available = behind(left, ahead);
        let is_short = requested > from.get(dimension) && requested > available;
        is_short.then_some(ShortDimension { decided_by, dimension, requested, available, ahead, max })
    })
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
    /// Returns the refusal for shortages in check order; `None` if nothing is short.
    pub fn of_scopes(shortages: Vec<ScopeShortage>) -> Option<Self> {
        let never_fits = shortages.iter().any(|shortage| shortage.never_fits);
        let shortfalls: Vec<_> = shortages.into_iter().flat_map(|shortage| shortage.shortfalls).collect();
        let first = shortfalls.first()?;
        let (code, text) = limit_code(&first.dimension);
        let reason = format!("{text}{}", shortage_text(first));
        Some(Self { shortfalls, code, reason, never_fits })
    }

    /// Returns whether no limit takes part, so that another EM may grant the request.
    pub fn is_of_em_alone(&self) -> bool {
        self.shortfalls.iter().all(|short| short.rule.is_empty())
    }

    /// Combines the refusals of the EM and the scopes; code and text are those of the EM, if it is short.
    pub fn first_of(on_em: Option<Self>, in_scopes: Option<Self>) -> Option<Self> {
        match (on_em, in_scopes) {
            (Some(mut refusal), Some(more)) => {
                refusal.shortfalls.extend(more.shortfalls);
                refusal.never_fits |= more.never_fits;
                Some(refusal)
            }
            (on_em, in_scopes) => on_em.or(in_scopes),
        }
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

    /// Returns the refusal of an EM. `shortages` must not be empty and must be in order of precedence.
    pub(super) fn of_em(em: &Em, shortages: Vec<Shortage>, never_fits: bool) -> Self {
        let scope = format!("em={}", em.instance);
        let shortfalls: Vec<_> = shortages
            .into_iter()
            .map(|short| Shortfall {
                scope: scope.clone(),
                kind: ScopeKind::Em,
                max: em.total.get(&short.dimension),
                dimension: short.dimension,
                requested: short.requested,
                available: short.available,
                ahead: short.ahead,
                rule: String::new(),
            })
            .collect();
        let (code, text) = shortfalls.first().map_or((11000, EM_SHORT), |first| em_code(&first.dimension));
        let detail = shortfalls.first().map(shortage_text).unwrap_or_default();
        let reason = format!("{text}{detail}ECM Instance:{}", em.instance.instance);
        Self { shortfalls, code, reason, never_fits }
    }
}

const EM_SHORT: &str = "ECM resources are insufficient";

/// Returns Linkis's code and text for a dimension of an EM (`RMErrorCode` 11000 to 11003).
fn em_code(dimension: &Dimension) -> (i32, &'static str) {
    match dimension {
        Dimension::Memory => (11001, "ECM memory resources are insufficient"),
        Dimension::Cores => (11002, "ECM CPU resources are insufficient"),
        Dimension::Instances => (11003, "ECM Insufficient number of instances"),
        _ => (11000, EM_SHORT),
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
        Shortfall { scope, kind: ScopeKind::Em, dimension, requested, available, ahead: 0, max, rule }
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
