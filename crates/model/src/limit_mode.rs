//! Mode of a limit: the effect of a request above the maximum.
//!
//! Stored limits and history lines contain the names, so a name never changes its meaning.

/// Effect of a rule above its maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LimitMode {
    /// The request is refused.
    #[default]
    Enforced,
    /// The request is granted; the violation is returned and counted.
    Advisory,
    /// The request is granted. The rule needs no maximum and only makes its label set counted.
    Off,
}

impl LimitMode {
    const ALL: [Self; 3] = [Self::Enforced, Self::Advisory, Self::Off];

    /// Returns the name in configurations and tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Enforced => "enforced",
            Self::Advisory => "advisory",
            Self::Off => "off",
        }
    }

    /// Parses a name from [`LimitMode::as_str`]; `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.as_str() == text)
    }
}
