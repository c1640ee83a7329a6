//! Principals and actors: the caller of a change, carried from the edge to the history line.
//!
//! Callers: the edge creates them, the ledger copies them into history lines, and permits are shared by principal.

use std::{fmt, sync::Arc};

use super::name::{FieldError, Name};

/// Name under which a caller acts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Principal {
    /// A caller without authentication, where none is required; may do everything.
    Anonymous,
    /// The service itself, for expiry, loss and other background work.
    Service,
    /// A named caller.
    Named(Name),
}

impl Principal {
    /// Parses the name of a principal.
    ///
    /// # Errors
    /// The text is not a valid name.
    pub fn parse(field: &str, text: &str) -> Result<Self, FieldError> {
        let known = [Self::Anonymous, Self::Service].into_iter().find(|principal| principal.as_str() == text);
        known.map_or_else(|| Name::parse(field, text).map(Self::Named), Ok)
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Anonymous => "anonymous",
            Self::Service => "linkis-rm",
            Self::Named(name) => name.as_str(),
        }
    }
}

/// A principal with address and reason. The history records the latter two for operators and administrators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Actor {
    /// Principal of the change.
    pub principal: Principal,
    /// Network address of the call, or name of the machine of a command; `None` if it is not recorded.
    pub address: Option<Arc<str>>,
    /// Reason in the caller's words; `None` if none was given or the change contains it.
    pub reason: Option<Name>,
}

impl Actor {
    /// Returns the name of the principal.
    pub fn as_str(&self) -> &str {
        self.principal.as_str()
    }

    /// Returns the address, if recorded.
    pub fn address(&self) -> Option<&str> {
        self.address.as_deref()
    }

    /// Returns the reason, if given.
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
