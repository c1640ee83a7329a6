//! Providers: clusters whose queues somebody else keeps, and which of them a request belongs to.

use std::{cmp::Reverse, collections::BTreeMap};

use super::name::{Labels, Name};

/// How many providers there may be: all of them are looked at whenever one is chosen.
pub const PROVIDERS_MAX: usize = 32;

/// A cluster, by what it is called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Provider {
    /// What it is, as Linkis calls it.
    pub resource_type: Name,
    /// Its name.
    pub name: Name,
    /// The labels of the requests that it is for.
    pub labels: Labels,
}

impl Provider {
    /// Whether `labels` has all of its own.
    fn is_for(&self, labels: &BTreeMap<String, String>) -> bool {
        self.labels.as_map().iter().all(|(key, value)| labels.get(key) == Some(value))
    }
}

/// The provider among those of a type that a request with these labels belongs to: the one with most labels, all of which the request
/// carries; of several, the first by name.
pub fn choose<'a>(
    providers: impl IntoIterator<Item = &'a Provider>,
    resource_type: &str,
    labels: &BTreeMap<String, String>,
) -> Option<&'a Provider> {
    let candidates = providers.into_iter().filter(|provider| provider.resource_type.as_str() == resource_type);
    let candidates = candidates.filter(|provider| provider.is_for(labels));
    candidates.min_by_key(|provider| (Reverse(provider.labels.as_map().len()), provider.name.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(labels: &[(&str, &str)]) -> BTreeMap<String, String> {
        labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn provider(resource_type: &str, name: &str, labels: &[(&str, &str)]) -> Provider {
        Provider {
            resource_type: Name::parse("resource_type", resource_type).unwrap(),
            name: Name::parse("name", name).unwrap(),
            labels: Labels::parse("labels", map(labels)).unwrap(),
        }
    }

    #[test]
    fn the_most_telling_labels_decide() {
        let all = [
            provider("Yarn", "default", &[]),
            provider("Yarn", "etl", &[("yarnCluster", "Yarn-etl")]),
            provider("Yarn", "etl-a", &[("yarnCluster", "Yarn-etl"), ("tenant", "a")]),
            provider("Yarn", "b", &[("tenant", "b")]),
            provider("Other", "other", &[("tenant", "c")]),
        ];
        let chosen =
            |labels: &[(&str, &str)]| choose(&all, "Yarn", &map(labels)).map(|provider| provider.name.as_str());
        assert_eq!(chosen(&[]), Some("default"));
        assert_eq!(chosen(&[("tenant", "c"), ("yarnCluster", "Yarn-x")]), Some("default"));
        assert_eq!(chosen(&[("yarnCluster", "Yarn-etl"), ("x", "y")]), Some("etl"));
        assert_eq!(chosen(&[("yarnCluster", "Yarn-etl"), ("tenant", "a")]), Some("etl-a"));
        assert_eq!(chosen(&[("yarnCluster", "Yarn-etl"), ("tenant", "b")]), Some("b"), "the first by name");
        assert_eq!(choose(&all[1..], "Yarn", &map(&[])), None);
    }
}
