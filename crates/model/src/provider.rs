//! Providers: configured external clusters, and the choice of the cluster for a request.
//!
//! The choice depends only on the labels of the request, so all instances choose the same cluster.
//! Callers: [`crate::external`] and the provider service.

use std::{cmp::Reverse, collections::BTreeMap};

use super::name::{Labels, Name};

/// Maximum number of providers. Each choice compares all of them.
pub const PROVIDERS_MAX: usize = 32;

/// Identity of an external cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Provider {
    /// Provider type, as Linkis names it.
    pub resource_type: Name,
    /// Name of the provider.
    pub name: Name,
    /// Labels that requests must carry to use this cluster.
    pub labels: Labels,
}

impl Provider {
    /// Returns whether `labels` contains all labels of the provider.
    fn is_for(&self, labels: &BTreeMap<String, String>) -> bool {
        self.labels.as_map().iter().all(|(key, value)| labels.get(key) == Some(value))
    }
}

/// Selects the provider of a type for a request with these labels. The provider with the most labels that the request all
/// carries wins; among equals, the first by name.
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
    fn provider_with_most_matching_labels_is_chosen() {
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
