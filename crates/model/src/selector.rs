//! Which EMs a request may go to, and which it would rather.

use std::fmt;

use super::name::{Labels, Name};

/// How many preferences a request may have.
pub const PREFERENCES_MAX: usize = 4;

/// The heaviest preference.
pub const WEIGHT_MAX: u32 = 100;

/// What a request says of the EM that it wants. What it requires holds for an EM that it names, too; the rest only where one is chosen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selector {
    /// Only EMs of this application.
    pub application_name: Option<Name>,
    /// Labels that the EM must have, with these values.
    pub required: Labels,
    /// Labels that it had better have: at most [`PREFERENCES_MAX`].
    pub preferred: Vec<Preference>,
    /// Whether to spread or to pack; `None` as the policy of the kind of EM says.
    pub placement: Option<Placement>,
}

/// For people: what an EM must have to be chosen.
impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.application_name {
            write!(f, "of the application {name} ")?;
        }
        write!(f, "with the labels {:?}", self.required.as_map())
    }
}

/// A label that an EM had better have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preference {
    /// Which.
    pub key: String,
    /// With which value.
    pub value: String,
    /// What it weighs beside the others: 1 to [`WEIGHT_MAX`].
    pub weight: u32,
}

/// Which of the EMs with room is chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Placement {
    /// The one with the largest free share: hosts fill evenly.
    #[default]
    Spread,
    /// The one with the smallest free share that still does: hosts fill one after another, and others stay free for what is large.
    Pack,
}

impl Placement {
    /// As it stands in `linkis_em_meta_data.placement`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Spread => "spread",
            Self::Pack => "pack",
        }
    }

    /// The reverse of [`Placement::as_str`].
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Spread, Self::Pack].into_iter().find(|placement| placement.as_str() == text)
    }
}
