//! Selectors: the EMs that a request may use, and its preferences among them.
//!
//! Callers: placement, which applies all conditions, and the assessment, which applies the required labels.

use std::fmt;

use super::name::{Labels, Name};

/// Maximum number of preferences in one request.
pub const PREFERENCES_MAX: usize = 4;

/// Maximum weight of a preference.
pub const WEIGHT_MAX: u32 = 100;

/// Conditions of a request on its EM. Required labels also apply to an EM that the request names; the other conditions only
/// apply to placement.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EmSelector {
    /// Application name of the EM; `None` for any.
    pub application_name: Option<Name>,
    /// Labels with values that the EM must have.
    pub required: Labels,
    /// Preferred labels of the EM; at most [`PREFERENCES_MAX`].
    pub preferred: Vec<Preference>,
    /// Placement; `None` for that of the EM kind's policy.
    pub placement: Option<Placement>,
}

/// For display: the conditions on an EM.
impl fmt::Display for EmSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.application_name {
            write!(f, "of the application {name} ")?;
        }
        write!(f, "with the labels {:?}", self.required.as_map())
    }
}

/// A preferred label of the EM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preference {
    /// Key of the label.
    pub key: String,
    /// Value of the label.
    pub value: String,
    /// Weight relative to other preferences: 1 to [`WEIGHT_MAX`].
    pub weight: u32,
}

text_enum! {
    /// Selection among the EMs with capacity. The texts are the values of `linkis_em_meta_data.placement`.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub enum Placement {
        /// The EM with the largest free share, so that EMs fill evenly.
        #[default]
        Spread = "spread",
        /// The EM with the smallest sufficient free share, so that other EMs stay free for large requests.
        Pack = "pack",
    }
}
