//! "Not enough resources", explained: what is short, by how much, and in the words and codes that Linkis's users know.

use std::fmt;

use super::{
    cap::write_maxima,
    em::Em,
    limit::{Decider, LimitedScope, Maximum, Rule},
    limit_mode::LimitMode,
    resource::{Dimension, Resource, Shortage, behind, whole_gb},
    scope::{Tally, Usage},
    scope_kind::ScopeKind,
};

/// Why a request cannot be granted. [`Refusal::shortfalls`] is never empty; its first one is the headline.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal {
    /// Everything that is short, in Linkis's order of precedence: cores, memory, instances, then the rest.
    pub shortfalls: Vec<Shortfall>,
    /// Linkis's code for the headline, from its `RMErrorCode`.
    pub code: i32,
    /// Linkis's message for the headline.
    pub reason: String,
    /// True if it would not fit even if nothing were granted.
    pub never_fits: bool,
}

/// One dimension of one scope that is short.
#[derive(Debug, Clone, PartialEq)]
pub struct Shortfall {
    /// What is short, as key=value, for people.
    pub scope: String,
    /// What that is.
    pub kind: ScopeKind,
    /// In which dimension.
    pub dimension: Dimension,
    /// How much was asked.
    pub requested: i64,
    /// How much could have been granted; negative while a capacity that was lowered drains.
    pub available: i64,
    /// How much is kept for requests that wait in line before this one; it is not available.
    pub ahead: i64,
    /// How much there is in all.
    pub max: i64,
    /// The limit that decided, or the request's own cap, for people; empty for an EM.
    pub rule: String,
}

/// What is short in one scope, and whether it always would be.
#[derive(Debug, Default)]
pub struct ScopeShortage {
    /// In order of precedence.
    pub shortfalls: Vec<Shortfall>,
    /// True if something would not fit even if nothing were granted.
    pub never_fits: bool,
}

impl ScopeShortage {
    /// What is short in a limited scope for a resource that is counted as `from` to become `to`, while `ahead` is kept for others.
    /// What does not grow is never short.
    pub fn of(limited: &LimitedScope, usage: &Usage, from: &Resource, to: &Resource, ahead: &Tally) -> Self {
        let shortfalls = shortfalls(limited, missing(limited.enforced(), usage, from, to, ahead));
        let never_fits = shortfalls.iter().any(|short| short.requested > short.max);
        Self { shortfalls, never_fits }
    }

    /// Whether anything would be, without saying what.
    pub fn is_any(limited: &LimitedScope, usage: &Usage, from: &Resource, to: &Resource, ahead: &Tally) -> bool {
        missing(limited.enforced(), usage, from, to, ahead).next().is_some()
    }

    /// Whether nothing is short.
    pub fn is_none(&self) -> bool {
        self.shortfalls.is_empty()
    }
}

/// Where a resource that is counted as `from` to become `to` goes beyond rules that only watch.
pub fn over_watched(limited: &LimitedScope, usage: &Usage, from: &Resource, to: &Resource) -> Vec<Shortfall> {
    let nobody_ahead = Tally::default();
    shortfalls(limited, missing(limited.in_mode(LimitMode::Watched), usage, from, to, &nobody_ahead))
}

/// What is missing in a scope, in order of precedence.
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

/// A dimension in which not so much is allowed.
struct ShortDimension<'a> {
    decided_by: Decider<'a>,
    dimension: &'a Dimension,
    requested: i64,
    available: i64,
    ahead: i64,
    max: i64,
}

fn missing<'a>(
    maxima: impl Iterator<Item = Maximum<'a>>,
    usage: &'a Usage,
    from: &'a Resource,
    to: &'a Resource,
    ahead: &'a Tally,
) -> impl Iterator<Item = ShortDimension<'a>> {
    maxima.filter_map(move |Maximum { dimension, max, decided_by }| {
        let requested = to.get(dimension);
        // Both are sums of amounts that were granted, which together fit.
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
    /// The refusal that a list of shortages makes, in the order in which they were checked; none if nothing is short.
    pub fn of_scopes(shortages: Vec<ScopeShortage>) -> Option<Self> {
        let never_fits = shortages.iter().any(|shortage| shortage.never_fits);
        let shortfalls: Vec<_> = shortages.into_iter().flat_map(|shortage| shortage.shortfalls).collect();
        let first = shortfalls.first()?;
        let (code, text) = limit_code(&first.dimension);
        let reason = format!("{text}{}", shortage_text(first));
        Some(Self { shortfalls, code, reason, never_fits })
    }

    /// Whether no limit has a part in it, so that another EM may grant it.
    pub fn is_of_em_alone(&self) -> bool {
        self.shortfalls.iter().all(|short| short.rule.is_empty())
    }

    /// All that is short on an EM and in scopes; the headline is the EM's, if it is short.
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

    /// The refusal that shortfalls in queues of a cluster make, the queue that was asked for first; they must not be empty.
    pub(super) fn of_queues(shortfalls: Vec<Shortfall>) -> Self {
        // A cluster without a node, as after a failover, has nothing; that does not last.
        let never_fits = shortfalls.iter().any(|short| short.requested > short.max && short.max > 0);
        let (code, text) = shortfalls.first().map_or((11_006, ""), |first| queue_code(&first.dimension));
        let detail = shortfalls.first().map(|first| format!("{} ({})", shortage_text(first), first.scope));
        let reason = format!("{text}{}", detail.unwrap_or_default());
        Self { shortfalls, code, reason, never_fits }
    }

    /// A refusal by `em`; `shortages` must not be empty, and comes in order of precedence.
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

/// Linkis's code and text for a dimension of an EM (its `RMErrorCode`, 11000 to 11003).
fn em_code(dimension: &Dimension) -> (i32, &'static str) {
    match dimension {
        Dimension::Memory => (11001, "ECM memory resources are insufficient"),
        Dimension::Cores => (11002, "ECM CPU resources are insufficient"),
        Dimension::Instances => (11003, "ECM Insufficient number of instances"),
        _ => (11000, EM_SHORT),
    }
}

/// Linkis's code and text for a dimension of a limit (its `RMErrorCode`, 12001 to 12006). What Linkis cannot limit gets the code
/// by which it refuses requests in general.
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

/// Linkis's code and text for a dimension of a cluster's queue (its `RMErrorCode`, 12010 and 12011), or namespace (12110 and 12111, in 1.6).
fn queue_code(dimension: &Dimension) -> (i32, &'static str) {
    match dimension {
        Dimension::QueueCores => (12011, "Insufficient cluster queue cpu"),
        Dimension::KubernetesMillicores => (12111, "Insufficient cluster namespace cpu"),
        Dimension::KubernetesMemory => (12110, "Insufficient cluster namespace memory"),
        _ => (12010, "Insufficient cluster queue memory"),
    }
}

/// The suffix that Linkis appends to every shortage, to the letter, its blanks included.
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

    /// The vector of Linkis's own test of its message.
    #[test]
    fn the_message_is_linkis_s_to_the_letter() {
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
