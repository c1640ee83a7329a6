//! Operations that start and end the drain of an EM. The ledger applies them also to an EM that is drained and not
//! registered.

use crate::{em::EmInstance, name::Name};

/// Operation that drains an EM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrainEm {
    /// The EM.
    pub em: EmInstance,
    /// Reason, for display.
    pub reason: Name,
}

/// Operation that ends the drain of an EM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResumeEm {
    /// The EM.
    pub em: EmInstance,
    /// Reason, for display, if the operator gave one.
    pub reason: Option<Name>,
}
