//! What a limit does where it decides: refuse, tell, or only have its label set counted.

/// What a rule does about what goes beyond its maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LimitMode {
    /// It is refused.
    #[default]
    Enforced,
    /// It is granted, told and counted as a violation.
    Watched,
    /// It is granted. Such a rule needs no maximum: its label set is counted.
    Off,
}

impl LimitMode {
    const ALL: [Self; 3] = [Self::Enforced, Self::Watched, Self::Off];

    /// As administrators write it, and as it stands in the tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Enforced => "enforced",
            Self::Watched => "watched",
            Self::Off => "off",
        }
    }

    /// The reverse of [`LimitMode::as_str`].
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.as_str() == text)
    }
}
