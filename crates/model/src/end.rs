//! How tickets end.

use std::fmt;

/// How a ticket came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The caller gave it back.
    Released,
    /// Its engine did not report in before the deadline.
    Expired,
    /// Its EM was unregistered.
    Unregistered,
    /// Its EM reported without it too often, or fell silent.
    Lost,
    /// An operator ended it.
    Forced,
}

impl End {
    /// All there are.
    pub const ALL: [Self; 5] = [Self::Released, Self::Expired, Self::Unregistered, Self::Lost, Self::Forced];

    /// As it stands in `linkis_resource_action_record.action`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::Expired => "expired",
            Self::Unregistered => "unregistered",
            Self::Lost => "lost",
            Self::Forced => "forced",
        }
    }

    /// The reverse of [`End::as_str`].
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|end| end.as_str() == text)
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Released => "was released",
            Self::Expired => "expired",
            Self::Unregistered => "went when its EM was unregistered",
            Self::Lost => "was given up as lost",
            Self::Forced => "was ended by an operator",
        })
    }
}
