//! Parsing of list pages, and the reduction of each object to the few values that are needed.
//!
//! Objects are reduced one at a time during the parsing. `bounded_list` bounds their lists, names and amounts. An error
//! never contains a value of the response. Callers: `fetch` parses pages; `capacity` uses the reduced objects.

use std::{collections::BTreeMap, sync::Arc};

use serde::{
    Deserialize,
    de::{DeserializeOwned, IgnoredAny},
};

use rm_model::queue::QueueAmounts;

use super::{
    KubernetesParseError,
    quantity::{Quantity, RoundingMode},
};

/// Maximum length of a name, and of the continue token of a list, in bytes.
const NAME_BYTES_MAX: usize = 63;
const CONTINUE_BYTES_MAX: usize = 8192;

/// A page of a list, and the continue token of the next page.
#[derive(Debug)]
pub(super) struct KubernetesPage<T> {
    pub items: Vec<T>,
    pub next: Option<String>,
}

/// Kind of object in a list.
pub(super) trait ListItem: DeserializeOwned {
    /// Reduced form of the object.
    type Kept: Send + 'static;

    /// Kind of the list in the Kubernetes API.
    const KIND: &'static str;

    /// Plural resource name, as in RBAC rules.
    const NAME: &'static str;

    /// Maximum number of reduced objects.
    const MOST: usize;

    /// Reduces an object; `None` if it does not matter.
    ///
    /// # Errors
    /// [`KubernetesParseError::Malformed`] if a value has no valid form.
    fn keep(self) -> Result<Option<Self::Kept>, KubernetesParseError>;
}

/// Parses a page.
pub(super) fn page<T: ListItem>(json: &[u8]) -> Result<KubernetesPage<T::Kept>, KubernetesParseError> {
    let ItemList { kind, metadata, items } =
        serde_json::from_slice::<ItemList<T>>(json).map_err(|error| KubernetesParseError::NotJson {
            kind: T::KIND,
            line: error.line(),
            column: error.column(),
            is_cut: error.is_eof(),
        })?;
    if kind.as_deref() != Some(T::KIND) {
        return Err(KubernetesParseError::Other { kind: T::KIND });
    }
    let next = metadata.and_then(|metadata| metadata.next).filter(|next| !next.is_empty());
    if next.as_ref().is_some_and(|next| next.len() > CONTINUE_BYTES_MAX) {
        return Err(KubernetesParseError::Malformed { what: "the token of the next page" });
    }
    let items = items.unwrap_or_default().into_iter().filter_map(|item| item.keep().transpose());
    let items = items.collect::<Result<Vec<_>, _>>()?;
    if items.len() > T::MOST {
        return Err(KubernetesParseError::TooMany { most: T::MOST, what: T::NAME });
    }
    Ok(KubernetesPage { items, next })
}

#[derive(Deserialize)]
#[serde(bound = "T: ListItem")]
struct ItemList<T: ListItem> {
    kind: Option<String>,
    metadata: Option<ListMetadata>,
    items: Option<Vec<T>>,
}

#[derive(Deserialize)]
struct ListMetadata {
    #[serde(rename = "continue")]
    next: Option<String>,
}

/// Name and namespace of an object.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
    deletion_timestamp: Option<IgnoredAny>,
}

/// Checks a name that becomes a part of a queue path.
fn name(name: Option<String>) -> Result<String, KubernetesParseError> {
    let is_name = |name: &String| {
        !name.is_empty() && name.len() <= NAME_BYTES_MAX && !name.contains(|c: char| c == '.' || c.is_control())
    };
    name.filter(is_name).ok_or(KubernetesParseError::Malformed { what: "the name of a namespace" })
}

/// Amount given as text or number; `None` for anything else.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(from = "RawQuantity")]
struct LenientQuantity(Option<Quantity>);

#[derive(Deserialize)]
#[serde(untagged)]
enum RawQuantity {
    Text(String),
    Number(serde_json::Number),
    Other(IgnoredAny),
}

impl From<RawQuantity> for LenientQuantity {
    fn from(raw: RawQuantity) -> Self {
        Self(match raw {
            RawQuantity::Text(text) => Quantity::parse(&text),
            RawQuantity::Number(number) => Quantity::parse(&number.to_string()),
            RawQuantity::Other(_) => None,
        })
    }
}

/// Amounts by name. Null is an invalid amount, not a missing one.
type NamedQuantities = BTreeMap<String, LenientQuantity>;

fn parts<T>(list: Option<&Vec<T>>) -> &[T] {
    list.map_or(&[], Vec::as_slice)
}

fn quantity(amount: LenientQuantity) -> Result<Quantity, KubernetesParseError> {
    amount.0.ok_or(KubernetesParseError::Malformed { what: "an amount" })
}

fn millicores(amount: LenientQuantity, rounds: RoundingMode) -> Result<i64, KubernetesParseError> {
    Ok(quantity(amount)?.parts(1000, rounds))
}

fn bytes(amount: LenientQuantity, rounds: RoundingMode) -> Result<i64, KubernetesParseError> {
    Ok(quantity(amount)?.parts(1, rounds))
}

/// Maximum length of the name of an extended resource, in bytes: that of a custom dimension.
const EXTENDED_BYTES_MAX: usize = 255;

/// Maximum number of extended resources per object: that of custom dimensions per resource. The first by name are kept.
pub(super) const EXTENDED_MAX: usize = 64;

/// Domains whose names in a quota count objects or storage of a class.
const CLASS_DOMAINS: [&str; 2] = [".storageclass.storage.k8s.io/", ".deviceclass.resource.k8s.io/"];

/// Returns whether a name is an extended resource of Kubernetes: a name in a domain other than Kubernetes's own. After
/// `count/`, object kinds follow.
fn is_extended(name: &str) -> bool {
    name.contains('/')
        && !name.contains("kubernetes.io/")
        && !["requests.", "limits.", "count/"].into_iter().any(|prefix| name.starts_with(prefix))
        && !CLASS_DOMAINS.into_iter().any(|domain| name.contains(domain))
        && name.len() <= EXTENDED_BYTES_MAX
        && !name.contains(char::is_control)
}

/// Amounts of extended resources, by name.
pub(super) type ExtendedResources = BTreeMap<Arc<str>, i64>;

/// Requested or allocatable amounts.
#[derive(Default, Deserialize)]
struct ResourceAmounts(NamedQuantities);

impl ResourceAmounts {
    fn read(&self, rounds: RoundingMode) -> Result<[Option<i64>; 2], KubernetesParseError> {
        let memory = self.0.get("memory").map(|amount| bytes(*amount, rounds)).transpose()?;
        let cpu = self.0.get("cpu").map(|amount| millicores(*amount, rounds)).transpose()?;
        Ok([memory, cpu])
    }

    fn or_nothing(&self, rounds: RoundingMode) -> Result<PodRequests, KubernetesParseError> {
        let [memory, cores] = self.read(rounds)?.map(Option::unwrap_or_default);
        Ok(PodRequests { amounts: QueueAmounts { memory, cores }, extended: self.extended(rounds)? })
    }

    /// Returns extended resources in whole units.
    fn extended(&self, rounds: RoundingMode) -> Result<ExtendedResources, KubernetesParseError> {
        let extended = self.0.iter().filter(|(name, _)| is_extended(name)).take(EXTENDED_MAX);
        extended.map(|(name, amount)| Ok((name.as_str().into(), bytes(*amount, rounds)?))).collect()
    }
}

/// Keeps the first [`EXTENDED_MAX`] entries.
pub(super) fn keep_first<T>(extended: &mut BTreeMap<Arc<str>, T>) {
    while extended.len() > EXTENDED_MAX {
        extended.pop_last();
    }
}

/// Amounts of all dimensions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PodRequests {
    pub amounts: QueueAmounts,
    pub extended: ExtendedResources,
}

impl PodRequests {
    fn plus(mut self, other: &Self) -> Self {
        self.add(other);
        self
    }

    /// Adds amounts, saturating.
    pub fn add(&mut self, other: &Self) {
        self.amounts = self.amounts.plus(other.amounts);
        for (name, more) in &other.extended {
            let amount = self.extended.entry(name.clone()).or_default();
            *amount = amount.saturating_add(*more);
        }
        keep_first(&mut self.extended);
    }

    fn most(mut self, other: &Self) -> Self {
        self.amounts = self.amounts.most(other.amounts);
        for (name, other) in &other.extended {
            let amount = self.extended.entry(name.clone()).or_default();
            *amount = (*amount).max(*other);
        }
        self
    }
}

/// A namespace, reduced to its name and whether it is terminating.
#[derive(Deserialize)]
pub(super) struct Namespace {
    metadata: Metadata,
    status: Option<NamespaceStatus>,
}

#[derive(Deserialize)]
struct NamespaceStatus {
    phase: Option<String>,
}

impl ListItem for Namespace {
    type Kept = (String, bool);

    const KIND: &'static str = "NamespaceList";
    const NAME: &'static str = "namespaces";
    const MOST: usize = 20_000;

    fn keep(self) -> Result<Option<(String, bool)>, KubernetesParseError> {
        let phase = self.status.and_then(|status| status.phase);
        let goes = self.metadata.deletion_timestamp.is_some() || phase.as_deref() == Some("Terminating");
        Ok(Some((name(self.metadata.name)?, goes)))
    }
}

/// Maximum and use of a dimension in a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QuotaLimit {
    pub max: i64,
    pub used: i64,
}

/// Quota of a namespace, reduced to the limits that matter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Quota {
    pub namespace: String,
    pub memory: Option<QuotaLimit>,
    pub cores: Option<QuotaLimit>,
    /// Limits of extended resources, by name.
    pub extended: BTreeMap<Arc<str>, QuotaLimit>,
}

/// A quota as listed.
#[derive(Deserialize)]
pub(super) struct ResourceQuota {
    metadata: Metadata,
    spec: Option<QuotaSpec>,
    status: Option<QuotaStatus>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase")]
struct QuotaSpec {
    hard: Option<NamedQuantities>,
    scopes: Option<Vec<String>>,
    scope_selector: Option<ScopeSelector>,
}

#[derive(Deserialize, Default)]
struct QuotaStatus {
    hard: Option<NamedQuantities>,
    used: Option<NamedQuantities>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ScopeSelector {
    match_expressions: Option<Vec<ScopeExpression>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ScopeExpression {
    scope_name: String,
    operator: String,
}

/// Returns whether a quota scope matches the pods of engines. Engine pods request memory and processor time, run until
/// they are stopped, and have no priority class. Unknown scopes do not match.
fn is_of_engines(scope: &str, operator: &str) -> bool {
    match scope {
        "NotBestEffort" | "NotTerminating" => operator == "Exists",
        "PriorityClass" => matches!(operator, "DoesNotExist" | "NotIn"),
        _ => false,
    }
}

impl QuotaSpec {
    fn is_of_engines(&self) -> bool {
        let selected = self.scope_selector.iter().flat_map(|selector| parts(selector.match_expressions.as_ref()));
        parts(self.scopes.as_ref()).iter().all(|scope| is_of_engines(scope, "Exists"))
            && selected.into_iter().all(|of| is_of_engines(&of.scope_name, &of.operator))
    }
}

impl ListItem for ResourceQuota {
    type Kept = Quota;

    const KIND: &'static str = "ResourceQuotaList";
    const NAME: &'static str = "resourcequotas";
    const MOST: usize = 50_000;

    fn keep(self) -> Result<Option<Quota>, KubernetesParseError> {
        let (spec, status) = (self.spec.unwrap_or_default(), self.status.unwrap_or_default());
        if !spec.is_of_engines() {
            return Ok(None);
        }
        let find = |amounts: &Option<NamedQuantities>, key: &str| amounts.as_ref()?.get(key).copied();
        let limit = |names: [&str; 2], read: fn(LenientQuantity, RoundingMode) -> Result<i64, KubernetesParseError>| {
            // Requests count, and both names mean requests; the explicit name is tried first.
            let hard =
                names.into_iter().find_map(|name| Some((name, find(&status.hard, name).or(find(&spec.hard, name))?)));
            let Some((name, hard)) = hard else { return Ok(None) };
            let max = read(hard, RoundingMode::Down)?;
            // A new quota without status counts as fully used.
            let used = find(&status.used, name).map_or(Ok(max), |used| read(used, RoundingMode::Up))?;
            Ok(Some(QuotaLimit { max, used }))
        };
        let memory = limit(["requests.memory", "memory"], bytes)?;
        let cores = limit(["requests.cpu", "cpu"], millicores)?;
        let named = [&status.hard, &spec.hard].into_iter().flatten().flat_map(|named| named.keys());
        let named = named.map(|key| key.strip_prefix("requests.").unwrap_or(key)).filter(|name| is_extended(name));
        let mut extended = BTreeMap::new();
        for name in named {
            if let Some(limit) = limit([&format!("requests.{name}"), name], bytes)? {
                extended.insert(name.into(), limit);
            }
        }
        keep_first(&mut extended);
        let namespace = name(self.metadata.namespace)?;
        let says_something = memory.is_some() || cores.is_some() || !extended.is_empty();
        Ok(says_something.then_some(Quota { namespace, memory, cores, extended }))
    }
}

/// A node as listed.
#[derive(Deserialize)]
pub(super) struct Node {
    metadata: Metadata,
    spec: Option<NodeSpec>,
    status: Option<NodeStatus>,
}

#[derive(Deserialize, Default)]
struct NodeSpec {
    unschedulable: Option<bool>,
    taints: Option<Vec<Taint>>,
}

#[derive(Deserialize)]
struct Taint {
    effect: Option<String>,
}

#[derive(Deserialize, Default)]
struct NodeStatus {
    allocatable: Option<ResourceAmounts>,
    conditions: Option<Vec<Condition>>,
}

#[derive(Deserialize)]
struct Condition {
    #[serde(rename = "type")]
    kind: Option<String>,
    status: Option<String>,
}

impl Condition {
    /// Returns whether the node is not ready, or has not reported for too long (`Unknown`).
    fn is_not_ready(&self) -> bool {
        self.kind.as_deref() == Some("Ready") && self.status.as_deref() != Some("True")
    }
}

impl ListItem for Node {
    /// Node name and allocatable amounts.
    type Kept = (String, PodRequests);

    const KIND: &'static str = "NodeList";
    const NAME: &'static str = "nodes";
    const MOST: usize = 20_000;

    /// Keeps a node that accepts pods without tolerations. The taint of a node that is not ready follows its condition.
    fn keep(self) -> Result<Option<Self::Kept>, KubernetesParseError> {
        let (spec, status) = (self.spec.unwrap_or_default(), self.status.unwrap_or_default());
        let keeps_out = |taint: &Taint| matches!(taint.effect.as_deref(), Some("NoSchedule" | "NoExecute"));
        let is_not_ready = parts(status.conditions.as_ref()).iter().any(Condition::is_not_ready);
        if spec.unschedulable.unwrap_or(false) || parts(spec.taints.as_ref()).iter().any(keeps_out) || is_not_ready {
            return Ok(None);
        }
        let allocatable = status.allocatable.unwrap_or_default();
        let name = self.metadata.name.ok_or(KubernetesParseError::Malformed { what: "the name of a node" })?;
        Ok(Some((name, allocatable.or_nothing(RoundingMode::Down)?)))
    }
}

/// A pod as listed.
#[derive(Deserialize)]
pub(super) struct Pod {
    spec: Option<PodSpec>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodSpec {
    node_name: Option<String>,
    containers: Option<Vec<Container>>,
    init_containers: Option<Vec<Container>>,
    overhead: Option<ResourceAmounts>,
    resources: Option<Resources>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Container {
    resources: Option<Resources>,
    restart_policy: Option<String>,
}

#[derive(Deserialize)]
struct Resources {
    requests: Option<ResourceAmounts>,
}

fn requested(resources: Option<&Resources>) -> Result<PodRequests, KubernetesParseError> {
    let requests = resources.and_then(|resources| resources.requests.as_ref());
    requests.map_or(Ok(PodRequests::default()), |requests| requests.or_nothing(RoundingMode::Up))
}

impl PodSpec {
    /// Returns the requests as the scheduler counts them: the sum over containers, or the peak of the init containers
    /// if that is larger. Pod-level requests replace both. The overhead of the pod is added.
    fn requested(&self) -> Result<PodRequests, KubernetesParseError> {
        let (mut runs, mut sidecars, mut begins) = <(PodRequests, PodRequests, PodRequests)>::default();
        for container in parts(self.containers.as_ref()) {
            runs.add(&requested(container.resources.as_ref())?);
        }
        for container in parts(self.init_containers.as_ref()) {
            let with = requested(container.resources.as_ref())?.plus(&sidecars);
            begins = begins.most(&with);
            if container.restart_policy.as_deref() == Some("Always") {
                sidecars = with;
            }
        }
        let mut all = runs.plus(&sidecars).most(&begins);
        if let Some(requests) = self.resources.as_ref().and_then(|resources| resources.requests.as_ref()) {
            let [memory, cores] = requests.read(RoundingMode::Up)?;
            let QueueAmounts { memory: of_memory, cores: of_cores } = all.amounts;
            all.amounts = QueueAmounts { memory: memory.unwrap_or(of_memory), cores: cores.unwrap_or(of_cores) };
            all.extended.extend(requests.extended(RoundingMode::Up)?);
        }
        if let Some(overhead) = &self.overhead {
            all.add(&overhead.or_nothing(RoundingMode::Up)?);
        }
        Ok(all)
    }
}

impl ListItem for Pod {
    /// Node name and requests of the pod.
    type Kept = (String, PodRequests);

    const KIND: &'static str = "PodList";
    const NAME: &'static str = "pods";
    const MOST: usize = 300_000;

    fn keep(self) -> Result<Option<Self::Kept>, KubernetesParseError> {
        let Some(spec) = self.spec else { return Ok(None) };
        let requested = spec.requested()?;
        Ok(spec.node_name.filter(|name| !name.is_empty()).map(|name| (name, requested)))
    }
}

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;
