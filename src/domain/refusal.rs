//! "Not enough resources", explained: what is short, by how much, and in the words and codes that Linkis's users know.

use super::{
    em::Em,
    resource::{Dimension, Shortage, whole_gb},
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
    /// In which dimension.
    pub dimension: Dimension,
    /// How much was asked.
    pub requested: i64,
    /// How much could have been granted; negative while a capacity that was lowered drains.
    pub available: i64,
    /// How much there is in all.
    pub max: i64,
}

impl Refusal {
    /// A refusal by `em`; `shortages` must not be empty, and comes in order of precedence.
    pub(super) fn of_em(em: &Em, shortages: Vec<Shortage>, never_fits: bool) -> Self {
        let scope = format!("em={}", em.instance);
        let shortfalls: Vec<_> = shortages
            .into_iter()
            .map(|short| Shortfall {
                scope: scope.clone(),
                max: em.total.get(&short.dimension),
                dimension: short.dimension,
                requested: short.requested,
                available: short.available,
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

/// The suffix that Linkis appends to every shortage, to the letter, its blanks included.
fn shortage_text(short: &Shortfall) -> String {
    let (name, unit): (&str, &str) = match &short.dimension {
        Dimension::Memory | Dimension::QueueMemory | Dimension::KubernetesMemory => ("Memory", "GB"),
        Dimension::Cores | Dimension::QueueCores | Dimension::KubernetesCores => ("CPU", "cores"),
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
        Shortfall { scope: String::new(), dimension, requested, available, max }
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
