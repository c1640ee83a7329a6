//! Amounts in arguments: `memory=20g,cores=4`, and the resource that they make.
//!
//! Callers: commands that set limits, register EMs, request resources or adopt tickets.

use std::collections::BTreeMap;

use rm_edge::convert::resource;
use rm_model::resource::{Dimension, KubernetesAmounts, LoadInstanceAmounts, ResourceParts, YarnAmounts, parse_size};
use rm_proto::v1::Resource;

use super::{error::CommandFailure, output::text};

/// Dimensions of an argument, each with its amount.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Amounts(pub BTreeMap<Dimension, i64>);

/// Dimensions in errors.
const DIMENSIONS: &str = "memory, cores, instances, queue_memory, queue_cores, queue_instances, kubernetes_memory, \
    kubernetes_millicores, special.NAME, or in limits waiting";

/// Parses `DIMENSION=AMOUNT`, several with commas; sizes may have a unit, as in `20g`.
///
/// # Errors
/// The problem: no amount, an unknown or repeated dimension, or a wrong number.
pub fn parse(text: &str) -> Result<Amounts, String> {
    let mut amounts = BTreeMap::new();
    for part in text.split(',') {
        let (key, value) =
            part.split_once('=').ok_or_else(|| format!("{part:?} is not DIMENSION=AMOUNT, like memory=20g"))?;
        let dimension =
            Dimension::parse_key(key).ok_or_else(|| format!("no dimension {key:?}; one of {DIMENSIONS}"))?;
        let amount = if dimension.is_size() {
            parse_size(value).map_err(|error| error.to_string())?
        } else {
            let wrong = || format!("{key}: {value:?} is not a whole number from 0 on");
            value.parse().ok().filter(|amount: &i64| *amount >= 0).ok_or_else(wrong)?
        };
        if amounts.insert(dimension, amount).is_some() {
            return Err(format!("{key} is named twice"));
        }
    }
    Ok(Amounts(amounts))
}

impl Amounts {
    /// Returns the amounts by the keys of the API.
    pub fn by_key(&self) -> BTreeMap<String, i64> {
        self.0.iter().map(|(dimension, amount)| (dimension.key(), *amount)).collect()
    }

    /// Returns the resource with these amounts: of an EM, or together with those of a queue or a namespace.
    ///
    /// # Errors
    /// [`CommandFailure::Usage`] if no type of resource has all the dimensions, or the queue is missing.
    pub fn resource(&self, queue: Option<&str>) -> Result<Resource, CommandFailure> {
        use Dimension as D;
        let of = |dimension: D| self.0.get(&dimension).copied().unwrap_or(0);
        let has = |dimensions: &[D]| dimensions.iter().any(|dimension| self.0.contains_key(dimension));
        let of_em = [D::Memory, D::Cores, D::Instances];
        let of_yarn = [D::QueueMemory, D::QueueCores, D::QueueInstances];
        let of_kubernetes = [D::KubernetesMemory, D::KubernetesMillicores];
        let (yarn, kubernetes) = (has(&of_yarn), has(&of_kubernetes));
        // A dimension of none of these is refused, unless all are custom.
        let is_placed = self.0.keys().all(|dimension| {
            [&of_em[..], &of_yarn, &of_kubernetes].iter().any(|dimensions| dimensions.contains(dimension))
        });
        let custom: BTreeMap<String, i64> = self
            .0
            .iter()
            .filter_map(|(dimension, amount)| match dimension {
                D::Custom(name) => Some((name.to_string(), *amount)),
                _ => None,
            })
            .collect();
        let driver = LoadInstanceAmounts { memory: of(D::Memory), cores: of(D::Cores), instances: of(D::Instances) };
        let place = || {
            let missing =
                || CommandFailure::Usage("--queue: is required for amounts of a queue or a namespace".to_owned());
            queue.map(Into::into).ok_or_else(missing)
        };
        let parts = match (yarn, kubernetes, is_placed) {
            (false, false, true) => ResourceParts::LoadInstance(driver),
            (true, false, true) => {
                let yarn = YarnAmounts {
                    queue_memory: of(D::QueueMemory),
                    queue_cores: of(D::QueueCores),
                    queue_instances: of(D::QueueInstances),
                    queue_name: place()?,
                    application_id: String::new(),
                };
                ResourceParts::DriverAndYarn(driver, yarn)
            }
            (false, true, true) => {
                let kubernetes = KubernetesAmounts {
                    memory: of(D::KubernetesMemory),
                    millicores: of(D::KubernetesMillicores),
                    namespace: place()?,
                };
                ResourceParts::DriverAndKubernetes(driver, kubernetes)
            }
            (false, false, false) if custom.len() == self.0.len() => ResourceParts::Special(custom),
            _ => {
                let amounts = text::amounts_by_key(&self.by_key());
                return Err(CommandFailure::Usage(format!(
                    "no resource has {amounts} together: use memory, cores and instances, with those of one kind of queue, or only special.NAME"
                )));
            }
        };
        Ok(resource::message(parts))
    }
}
