//! That an EM is to be drained, or to grant again.

use crate::{em::EmInstance, name::Name};

/// Nothing new is to be granted on an EM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrainEm {
    /// Which EM.
    pub em: EmInstance,
    /// Why, for people.
    pub reason: Name,
}

/// An EM is to grant again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResumeEm {
    /// Which EM.
    pub em: EmInstance,
    /// Why, for people, if that is told.
    pub reason: Option<Name>,
}
