//! Free capacity of each namespace, computed from quotas, nodes and pods. Caller: `fetch`. The module makes no request.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::Arc,
};

use rm_model::queue::{
    CustomAmounts, CustomAmountsByName, DuplicatePath, ExternalQueue, NO_MAXIMUM, QueueAmounts, QueueNaming,
    QueueState, QueueTree, ROOT,
};

use super::{
    KubernetesParseError,
    objects::{PodRequests, Quota, QuotaLimit, keep_first},
};

/// Returns the limit of a dimension that leaves least, over all quotas of a namespace.
fn least(quotas: &[Quota], of: impl Fn(&Quota) -> Option<QuotaLimit>) -> Option<QuotaLimit> {
    quotas.iter().filter_map(of).min_by_key(|limit| (limit.max.saturating_sub(limit.used), limit.max))
}

/// Quotas by namespace.
#[derive(Debug, Default)]
pub(super) struct Quotas(BTreeMap<String, Vec<Quota>>);

impl Quotas {
    pub fn new(all: Vec<Quota>) -> Self {
        let mut quotas = Self::default();
        for quota in all {
            quotas.0.entry(quota.namespace.clone()).or_default().push(quota);
        }
        quotas
    }

    fn of(&self, namespace: &str) -> [Option<QuotaLimit>; 2] {
        let quotas = self.0.get(namespace).map(Vec::as_slice).unwrap_or_default();
        [least(quotas, |quota| quota.memory), least(quotas, |quota| quota.cores)]
    }

    /// Returns the limits of extended resources in a namespace.
    fn custom(&self, namespace: &str) -> CustomAmountsByName {
        let quotas = self.0.get(namespace).map(Vec::as_slice).unwrap_or_default();
        let names: BTreeSet<&Arc<str>> = quotas.iter().flat_map(|quota| quota.extended.keys()).collect();
        let limit = |name: &Arc<str>| {
            let QuotaLimit { max, used } = least(quotas, |quota| quota.extended.get(name).copied())?;
            Some((name.clone(), CustomAmounts { max, used }))
        };
        let mut all: CustomAmountsByName = names.into_iter().filter_map(limit).collect();
        keep_first(&mut all);
        all
    }

    /// Returns whether the quotas of a namespace limit both memory and cores, so that nodes do not matter.
    pub fn decide_alone(&self, namespace: &str) -> bool {
        self.of(namespace).iter().all(Option::is_some)
    }

    fn queue(&self, namespace: &str, goes: bool) -> ExternalQueue {
        let nothing = QuotaLimit { max: NO_MAXIMUM, used: 0 };
        let [memory, cores] = self.of(namespace).map(|limit| limit.unwrap_or(nothing));
        ExternalQueue {
            path: format!("{ROOT}.{namespace}"),
            max: QueueAmounts { memory: memory.max, cores: cores.max },
            used: QueueAmounts { memory: memory.used, cores: cores.used },
            state: if goes { QueueState::Draining } else { QueueState::Running },
            running_applications: None,
            pending_applications: None,
            custom: self.custom(namespace),
        }
    }
}

/// Amounts on a node, with the node name.
type NodeAmounts = (String, PodRequests);

/// Returns the namespaces as queues below the root. The root has the capacity of the schedulable nodes, and the
/// requests of the pods on them as use. The root has no maximum if `nodes` is `None`.
pub(super) fn queues(
    namespaces: &[(String, bool)],
    quotas: &Quotas,
    nodes: Option<(&[NodeAmounts], &[NodeAmounts])>,
) -> Result<QueueTree, KubernetesParseError> {
    let (max, used, custom) = match nodes {
        None => (
            QueueAmounts { memory: NO_MAXIMUM, cores: NO_MAXIMUM },
            QueueAmounts::default(),
            CustomAmountsByName::new(),
        ),
        Some((nodes, pods)) => {
            let names: HashSet<&str> = nodes.iter().map(|(name, _)| name.as_str()).collect();
            let there = pods.iter().filter(|(node, _)| names.contains(node.as_str()));
            let (max, used) = (sum(nodes.iter()), sum(there));
            // The largest number means "no maximum".
            let most = QueueAmounts { memory: NO_MAXIMUM - 1, cores: NO_MAXIMUM - 1 };
            (max.amounts.least(most), used.amounts, custom(&max, &used))
        }
    };
    let root = ExternalQueue {
        path: ROOT.to_owned(),
        max,
        used,
        state: QueueState::Running,
        running_applications: None,
        pending_applications: None,
        custom,
    };
    let all = namespaces.iter().map(|(name, goes)| quotas.queue(name, *goes));
    QueueTree::new(QueueNaming::Namespaces, std::iter::once(root).chain(all))
        .map_err(|DuplicatePath(_)| KubernetesParseError::Malformed { what: "the list of namespaces" })
}

fn sum<'a>(all: impl Iterator<Item = &'a NodeAmounts>) -> PodRequests {
    let mut sum = PodRequests::default();
    all.for_each(|(_, requested)| sum.add(requested));
    sum
}

/// Returns maximum and use of the extended resources on nodes, also of those that no node offers any more.
fn custom(max: &PodRequests, used: &PodRequests) -> CustomAmountsByName {
    let of = |amounts: &PodRequests, name| amounts.extended.get(name).copied().unwrap_or_default();
    let names = max.extended.keys().chain(used.extended.keys());
    let all = names.map(|name| (name.clone(), CustomAmounts { max: of(max, name), used: of(used, name) }));
    let mut all: CustomAmountsByName = all.collect();
    keep_first(&mut all);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quota(namespace: &str, memory: Option<(i64, i64)>, cores: Option<(i64, i64)>) -> Quota {
        let limit = |(max, used)| QuotaLimit { max, used };
        let extended = BTreeMap::new();
        Quota { namespace: namespace.into(), memory: memory.map(limit), cores: cores.map(limit), extended }
    }

    fn amounts(memory: i64, cores: i64) -> QueueAmounts {
        QueueAmounts { memory, cores }
    }

    fn requested(memory: i64, cores: i64) -> PodRequests {
        PodRequests { amounts: amounts(memory, cores), ..PodRequests::default() }
    }

    #[test]
    fn quota_that_leaves_least_decides_per_dimension() {
        let quotas = Quotas::new(vec![
            quota("a", Some((100, 10)), Some((10, 9))),
            quota("a", Some((50, 40)), None),
            quota("a", None, Some((8, 1))),
            quota("b", Some((5, 9)), None),
        ]);
        assert!(quotas.decide_alone("a") && !quotas.decide_alone("b") && !quotas.decide_alone("c"));
        let namespaces = [("a", false), ("b", true), ("c", false)].map(|(name, goes)| (name.to_owned(), goes));
        let node = |name: &str, memory, cores| (name.to_owned(), requested(memory, cores));
        let (nodes, pods) =
            ([node("n1", 1000, 100), node("n2", 10, 1)], [node("n1", 900, 30), node("cordoned", 500, 50)]);
        let queues = queues(&namespaces, &quotas, Some((&nodes, &pods))).unwrap();
        let of = |name: &str| {
            let queue = queues.find(name).unwrap();
            (queues.left(queue), queues.state(queue))
        };
        assert_eq!(of("a"), (amounts(10, 1), QueueState::Running));
        assert_eq!(of("b"), (amounts(-4, 71), QueueState::Draining), "more is used than there may be");
        assert_eq!(of("c"), (amounts(110, 71), QueueState::Running));
        assert_eq!(of("root"), (amounts(110, 71), QueueState::Running));
    }

    #[test]
    fn namespace_listed_twice_is_refused_and_sums_saturate() {
        let twice = [("a".to_owned(), false), ("a".to_owned(), false)];
        assert!(queues(&twice, &Quotas::default(), None).is_err());
        let vast = ["n1", "n2"].map(|name| (name.to_owned(), requested(i64::MAX - 1, 1)));
        let queues = queues(&[("a".to_owned(), false)], &Quotas::default(), Some((&vast, &vast))).unwrap();
        assert_eq!(queues.max_and_used(queues.find("a").unwrap()).0, Some(amounts(i64::MAX - 1, 2)));
    }

    #[test]
    fn extended_resources_of_quotas_precede_nodes() {
        let of = |amounts: &[(&str, i64)]| PodRequests {
            extended: amounts.iter().map(|(name, amount)| (Arc::from(*name), *amount)).collect(),
            ..PodRequests::default()
        };
        let gpus = |max, used| {
            let extended = [(Arc::from("nvidia.com/gpu"), QuotaLimit { max, used })].into();
            Quota { extended, ..quota("a", Some((100, 0)), None) }
        };
        let quotas = Quotas::new(vec![gpus(8, 1), gpus(4, 2), quota("b", None, Some((1, 0)))]);
        let namespaces = ["a", "b"].map(|name| (name.to_owned(), false));
        let nodes = [
            ("n1".to_owned(), of(&[("nvidia.com/gpu", 4), ("example.com/fpga", 1)])),
            ("n2".to_owned(), of(&[("nvidia.com/gpu", 4)])),
        ];
        let pods = [("n2", 3), ("cordoned", 2)].map(|(node, gpus)| (node.to_owned(), of(&[("nvidia.com/gpu", gpus)])));
        let all = queues(&namespaces, &quotas, Some((&nodes, &pods))).unwrap();
        let of = |name: &str| {
            let custom = all.custom(all.find(name).unwrap());
            custom.into_iter().map(|(name, CustomAmounts { max, used })| (name, max, used)).collect::<Vec<_>>()
        };
        assert_eq!(of("a"), [("example.com/fpga", 1, 0), ("nvidia.com/gpu", 4, 2)], "the quota that leaves least");
        assert_eq!(of("b"), [("example.com/fpga", 1, 0), ("nvidia.com/gpu", 8, 3)]);
        assert_eq!(of("root"), of("b"));
        let many: Vec<NodeAmounts> = (10..90).map(|n| (format!("n{n}"), of_one(&format!("example.com/{n}")))).collect();
        let all = queues(&[], &quotas, Some((&many, &[]))).unwrap();
        let names: Vec<_> = all.custom(all.find("root").unwrap()).into_keys().collect();
        assert_eq!((names.len(), names[0], names[63]), (64, "example.com/10", "example.com/73"));
    }

    fn of_one(name: &str) -> PodRequests {
        PodRequests { extended: [(Arc::from(name), 1)].into(), ..PodRequests::default() }
    }
}
