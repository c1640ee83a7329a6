//! Who calls: carried from the edge to what is written, so that it is known of everything who did it.

use std::{fmt, sync::Arc};

use super::name::{FieldError, Name};

/// Who wants something done.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Principal {
    /// A caller that did not say who it is: it may do everything.
    Anonymous,
    /// The service itself, which does what falls due and ends what is lost.
    Service,
    /// A caller by name.
    Named(Name),
}

impl Principal {
    /// A principal by its name.
    ///
    /// # Errors
    /// If it is no name.
    pub fn parse(field: &str, text: &str) -> Result<Self, FieldError> {
        let known = [Self::Anonymous, Self::Service].into_iter().find(|principal| principal.as_str() == text);
        known.map_or_else(|| Name::parse(field, text).map(Self::Named), Ok)
    }

    /// Its name.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Anonymous => "anonymous",
            Self::Service => "linkis-rm",
            Self::Named(name) => name.as_str(),
        }
    }
}

/// Who does something, from where, and why: the history remembers the latter two of what operators and administrators do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Actor {
    /// Who.
    pub principal: Principal,
    /// The address that the call comes from, or the machine where a command was typed; `None` where that is not remembered.
    pub address: Option<Arc<str>>,
    /// Why, in their own words; `None` where none was given, or what is done tells it itself.
    pub reason: Option<Name>,
}

impl Actor {
    /// The name of the principal.
    pub fn as_str(&self) -> &str {
        self.principal.as_str()
    }

    /// Where from, if that is remembered.
    pub fn address(&self) -> Option<&str> {
        self.address.as_deref()
    }

    /// Why, if that was said.
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_ref().map(Name::as_str)
    }
}

impl From<Principal> for Actor {
    fn from(principal: Principal) -> Self {
        Self { principal, address: None, reason: None }
    }
}

impl From<&Principal> for Actor {
    fn from(principal: &Principal) -> Self {
        principal.clone().into()
    }
}

impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
