//! Kinds of scopes: a small fixed set, for metrics and statistics that cannot have one entry per scope.
//!
//! Callers: refusals, their statistics and the metrics.

use super::scope::{CREATOR, NAMESPACE, QUEUE, Scope, USER};

text_enum! {
    /// Kind of a scope, by its labels, in check order. Replies and metrics contain the texts.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum ScopeKind {
        /// An EM.
        Em = "em",
        /// A creator alone.
        Creator = "creator",
        /// A user alone.
        User = "user",
        /// Any other label, or several together.
        Labels = "labels",
        /// An external queue or a namespace alone.
        Queue = "queue",
    }
}

impl ScopeKind {
    /// Returns the kind of a limited scope.
    pub fn of(scope: &Scope) -> Self {
        let mut keys = scope.labels().keys().map(String::as_str);
        match (keys.next(), keys.next()) {
            (Some(CREATOR), None) => Self::Creator,
            (Some(USER), None) => Self::User,
            (Some(QUEUE | NAMESPACE), None) => Self::Queue,
            _ => Self::Labels,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scope_kind_follows_number_of_labels() {
        let of = |keys: &[&str]| {
            ScopeKind::of(&Scope::new(keys.iter().map(|key| ((*key).to_owned(), "x".to_owned())).collect())).as_str()
        };
        assert_eq!(
            [of(&["user"]), of(&["creator"]), of(&["queue"]), of(&["namespace"])],
            ["user", "creator", "queue", "queue"]
        );
        assert_eq!([of(&["team"]), of(&["user", "queue"]), of(&["creator", "user"]), of(&["em"])], ["labels"; 4]);
        for kind in ScopeKind::ALL {
            assert_eq!(ScopeKind::parse(kind.as_str()), Some(kind));
        }
        assert_eq!(ScopeKind::parse("host"), None);
    }
}
