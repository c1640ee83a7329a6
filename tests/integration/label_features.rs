//! Conformance with the label features of Apache Linkis: the EMs that its manager allows for a request, and the ranks of its scorer.
//!
//! `tests/fixtures/linkis/labels.json` has the results of Linkis's classes (`clients/java`, `LabelFeaturesTest`). The tests compare them
//! with the placement of requests whose fields docs/LABELS.md maps to the features.

use std::collections::BTreeMap;

use rm_client::{ResourceRequest, ResultResource};
use rm_model::{
    em::EmInstance,
    name::{Labels, Name},
    operation::RegisterEm,
    selector::{EmSelector, Preference},
};
use serde::Deserialize;

use crate::harness::*;

/// Where we choose other EMs than Linkis's manager, and why.
const SELECTED_ELSE: [(&str, &[&str], &str); 2] = [
    ("a host has two values of one core label", &["a"], "a host has one value of a label, and the last counts"),
    ("a core label that is none of a host, asked for", &["dev"], "Linkis drops it before it looks for hosts"),
];

/// Where we rank EMs otherwise than Linkis's scorer, and why.
const RANKED_ELSE: [(&str, &[&str], &str); 2] = [
    ("an optional label that matches is better than none", &["rack2", "plain", "rack1"], OPTIONAL_IS_COUNTED),
    (
        "an optional label counts less than a prioritized one, and more than none",
        &["ssd", "plain", "rack1"],
        OPTIONAL_IS_COUNTED,
    ),
];

const OPTIONAL_IS_COUNTED: &str = "an optional label is counted and does not affect the placement";

/// Weights of the suitable and the prioritized label, as the boosts of Linkis's features (1 and 0.8). All labels of a feature
/// share its weight.
const SUITABLE_WEIGHT: u32 = 100;
const PRIORITIZED_WEIGHT: u32 = 80;

type Pairs = Vec<(String, String)>;

#[derive(Deserialize)]
struct Table {
    features: BTreeMap<String, Feature>,
    selection: Vec<Row<Vec<String>>>,
    scores: Vec<Row<Vec<Vec<String>>>>,
}

#[derive(Deserialize)]
struct Row<Answer> {
    what: String,
    request: Pairs,
    hosts: BTreeMap<String, Pairs>,
    linkis: Answer,
}

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "UPPERCASE")]
enum Feature {
    Core,
    Suitable,
    Prioritized,
    Optional,
}

impl Table {
    fn read() -> Self {
        serde_json::from_str(include_str!("../fixtures/linkis/labels.json")).unwrap()
    }

    fn labels(&self, pairs: &Pairs, of: impl Fn(Feature) -> bool) -> Labels {
        let pairs = pairs.iter().filter(|(key, _)| of(self.features[key])).cloned();
        Labels::parse("labels", pairs.collect::<BTreeMap<_, _>>()).unwrap()
    }

    /// An EM of which so much is free.
    async fn register(&self, rm: &Instance, em: EmInstance, pairs: &Pairs, free: i64) {
        let reserved = self.labels(pairs, |feature| feature == Feature::Core);
        let labels = self.labels(pairs, |feature| feature != Feature::Core);
        let held = load(100 - free, 100 - free, 100 - free);
        let holding = ResourceRequest { labels: reserved.clone(), ..request(&em, "alice", held) };
        rm.client.register(RegisterEm { labels, reserved, ..registration(em, load(100, 100, 100)) }).await.unwrap();
        rm.client.request_resource(&holding).await.granted();
    }

    fn request(&self, kind: &Name, pairs: &Pairs) -> ResourceRequest {
        let weight_of = |feature| {
            let boost = match feature {
                Feature::Suitable => SUITABLE_WEIGHT,
                Feature::Prioritized => PRIORITIZED_WEIGHT,
                Feature::Core | Feature::Optional => return None,
            };
            let sharing = pairs.iter().filter(|(key, _)| self.features[key] == feature).count();
            Some(boost / u32::try_from(sharing).unwrap())
        };
        let preferred = pairs.iter().filter_map(|(key, value)| {
            let weight = weight_of(self.features[key])?;
            Some(Preference { key: key.clone(), value: value.clone(), weight })
        });
        let selector = EmSelector {
            application_name: Some(kind.clone()),
            required: self.labels(pairs, |feature| feature == Feature::Core),
            preferred: preferred.collect(),
            placement: None,
        };
        let labels = self.labels(pairs, |feature| feature == Feature::Optional);
        ResourceRequest { em: None, labels, selector, ..request(&em("any"), "hadoop", load(1, 1, 1)) }
    }
}

/// Each EM has more free capacity than the one before.
async fn chosen(rm: &Instance, table: &Table, kind: &str, request: &Pairs, hosts: &[(&String, &Pairs)]) -> Vec<String> {
    let kind = Name::parse("em", kind).unwrap();
    let em_of = |host: &str| EmInstance::parse("em", kind.as_str(), host).unwrap();
    for (number, (host, pairs)) in (1..).zip(hosts) {
        table.register(rm, em_of(host), pairs, 10 * number).await;
    }
    let anywhere = table.request(&kind, request);
    let mut named = Vec::new();
    for (host, _) in hosts {
        let there = ResourceRequest {
            em: Some(em_of(host)),
            selector: EmSelector { required: anywhere.selector.required.clone(), ..EmSelector::default() },
            ..anywhere.clone()
        };
        match rm.client.dry_run(&there).await {
            Ok(ResultResource::Available(_)) => named.push((*host).clone()),
            Ok(refused) => panic!("there is room: {refused:?}"),
            Err(error) => assert!(["EM_RESERVED", "LABEL_REQUIRED"].contains(&&*error.reason().unwrap()), "{error}"),
        }
    }
    let mut chosen = Vec::new();
    loop {
        match rm.client.request_resource(&anywhere).await {
            Ok(ResultResource::Available(grant)) => {
                rm.client.unregister(&grant.em).await.unwrap();
                chosen.push(grant.em.instance.to_string());
            }
            Ok(refused) => panic!("there is room: {refused:?}"),
            Err(error) => {
                assert_eq!(error.reason().as_deref(), Some("NO_EM_MATCHES"));
                break;
            }
        }
    }
    assert_eq!(sorted(&chosen), sorted(&named), "chosen, and named");
    for host in hosts.iter().filter(|(host, _)| !chosen.contains(host)) {
        rm.client.unregister(&em_of(host.0)).await.unwrap();
    }
    chosen
}

fn sorted(names: &[String]) -> Vec<String> {
    let mut names = names.to_vec();
    names.sort_unstable();
    names
}

/// The expected result: that of Linkis, unless the case is listed as a difference, which must then occur.
fn ours(what: &str, linkis: Vec<String>, differing: &[(&str, &[&str], &str)]) -> Vec<String> {
    let Some((_, answer, because)) = differing.iter().find(|(of, ..)| *of == what) else { return linkis };
    assert_ne!(linkis, *answer, "{what} does not differ: {because}");
    answer.iter().map(|name| (*name).to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn label_features_select_same_ems_as_linkis() {
    let (_database, rm) = start().await;
    let table = Table::read();
    for (number, row) in table.selection.iter().enumerate() {
        let ems: Vec<_> = row.hosts.iter().collect();
        let chosen = chosen(&rm, &table, &format!("kind{number}"), &row.request, &ems).await;
        assert_eq!(sorted(&chosen), ours(&row.what, row.linkis.clone(), &SELECTED_ELSE), "{}", row.what);
    }
    assert!(SELECTED_ELSE.iter().all(|(what, ..)| table.selection.iter().any(|row| row.what == *what)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn label_features_rank_ems_as_linkis_scorer() {
    let (_database, rm) = start().await;
    let table = Table::read();
    for (number, row) in table.scores.iter().enumerate() {
        // The worse an EM is ranked, the more of it is free, and so it is preferred where nothing else decides.
        let ems: Vec<_> = row.linkis.iter().flatten().map(|host| (host, &row.hosts[host])).collect();
        let freest_first = row.linkis.iter().flat_map(|equals| equals.iter().rev().cloned()).collect();
        let chosen = chosen(&rm, &table, &format!("kind{number}"), &row.request, &ems).await;
        assert_eq!(chosen, ours(&row.what, freest_first, &RANKED_ELSE), "{}", row.what);
    }
    assert!(RANKED_ELSE.iter().all(|(what, ..)| table.scores.iter().any(|row| row.what == *what)));
}
