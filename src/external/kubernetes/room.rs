//! What quotas, nodes and pods leave each namespace.

use std::collections::{BTreeMap, HashSet};

use crate::domain::queue::{NO_MAXIMUM, Naming, Queue, QueueAmounts, QueueState, Queues, ROOT, SamePath};

use super::{
    ParseError,
    answer::{Limit, Quota},
};

/// What all quotas of a namespace leave in a dimension: what the one leaves that leaves least.
fn least(quotas: &[Quota], of: impl Fn(&Quota) -> Option<Limit>) -> Option<Limit> {
    quotas.iter().filter_map(of).min_by_key(|limit| (limit.max.saturating_sub(limit.used), limit.max))
}

/// The quotas that matter, by namespace.
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

    fn of(&self, namespace: &str) -> [Option<Limit>; 2] {
        let quotas = self.0.get(namespace).map(Vec::as_slice).unwrap_or_default();
        [least(quotas, |quota| quota.memory), least(quotas, |quota| quota.cores)]
    }

    /// Whether they say everything of a namespace.
    pub fn decide_alone(&self, namespace: &str) -> bool {
        self.of(namespace).iter().all(Option::is_some)
    }

    fn queue(&self, namespace: &str, goes: bool) -> Queue {
        let nothing = Limit { max: NO_MAXIMUM, used: 0 };
        let [memory, cores] = self.of(namespace).map(|limit| limit.unwrap_or(nothing));
        Queue {
            path: format!("{ROOT}.{namespace}"),
            max: QueueAmounts { memory: memory.max, cores: cores.max },
            used: QueueAmounts { memory: memory.used, cores: cores.used },
            state: if goes { QueueState::Draining } else { QueueState::Running },
            running_applications: None,
            pending_applications: None,
        }
    }
}

/// So much of a node, by its name.
type OnNode = (String, QueueAmounts);

/// All namespaces, in the nodes that take pods if these were asked for, with what the pods on them asked for.
pub(super) fn queues(
    namespaces: &[(String, bool)],
    quotas: &Quotas,
    nodes: Option<(&[OnNode], &[OnNode])>,
) -> Result<Queues, ParseError> {
    let sum =
        |amounts: &mut dyn Iterator<Item = QueueAmounts>| amounts.fold(QueueAmounts::default(), QueueAmounts::plus);
    let (max, used) = match nodes {
        None => (QueueAmounts { memory: NO_MAXIMUM, cores: NO_MAXIMUM }, QueueAmounts::default()),
        Some((nodes, pods)) => {
            let names: HashSet<&str> = nodes.iter().map(|(name, _)| name.as_str()).collect();
            let there = pods.iter().filter(|(node, _)| names.contains(node.as_str()));
            // The largest number is what there is no maximum by.
            let most = QueueAmounts { memory: NO_MAXIMUM - 1, cores: NO_MAXIMUM - 1 };
            let max = sum(&mut nodes.iter().map(|(_, amounts)| *amounts)).least(most);
            (max, sum(&mut there.map(|(_, amounts)| *amounts)))
        }
    };
    let root = Queue {
        path: ROOT.to_owned(),
        max,
        used,
        state: QueueState::Running,
        running_applications: None,
        pending_applications: None,
    };
    let all = namespaces.iter().map(|(name, goes)| quotas.queue(name, *goes));
    Queues::new(Naming::Namespaces, std::iter::once(root).chain(all))
        .map_err(|SamePath(_)| ParseError::Malformed { what: "a namespace that is there twice, and so one" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quota(namespace: &str, memory: Option<(i64, i64)>, cores: Option<(i64, i64)>) -> Quota {
        let limit = |(max, used)| Limit { max, used };
        Quota { namespace: namespace.into(), memory: memory.map(limit), cores: cores.map(limit) }
    }

    fn amounts(memory: i64, cores: i64) -> QueueAmounts {
        QueueAmounts { memory, cores }
    }

    #[test]
    fn the_quota_that_leaves_least_decides_in_each_dimension() {
        let quotas = Quotas::new(vec![
            quota("a", Some((100, 10)), Some((10, 9))),
            quota("a", Some((50, 40)), None),
            quota("a", None, Some((8, 1))),
            quota("b", Some((5, 9)), None),
        ]);
        assert!(quotas.decide_alone("a") && !quotas.decide_alone("b") && !quotas.decide_alone("c"));
        let namespaces = [("a", false), ("b", true), ("c", false)].map(|(name, goes)| (name.to_owned(), goes));
        let node = |name: &str, memory, cores| (name.to_owned(), amounts(memory, cores));
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
    fn what_is_there_twice_is_refused_and_sums_do_not_overflow() {
        let twice = [("a".to_owned(), false), ("a".to_owned(), false)];
        assert!(queues(&twice, &Quotas::default(), None).is_err());
        let vast = [("n1".to_owned(), amounts(i64::MAX - 1, 1)), ("n2".to_owned(), amounts(i64::MAX - 1, 1))];
        let queues = queues(&[("a".to_owned(), false)], &Quotas::default(), Some((&vast, &vast))).unwrap();
        assert_eq!(queues.told(queues.find("a").unwrap()).0, Some(amounts(i64::MAX - 1, 2)));
    }
}
