//! Counters as they stood right after a commit, for those who keep a copy of them.

use super::{em::Em, limit::ScopeUsage};

/// What an operation was counted in.
#[derive(Debug, Clone, PartialEq)]
pub struct Counters {
    /// The EM, with the version that its row then had; `None` if it is not registered any more.
    pub em: Option<Em>,
    /// The scopes in which its ticket counts, or counted until then, of label sets that decide.
    pub scopes: Vec<ScopeUsage>,
}
