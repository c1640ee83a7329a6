//! Resources: converts amounts between messages and the model.
//!
//! An amount is a non-negative integer: bytes of memory, cores, millicores, or a number of engines. A parser fails with
//! a [`FieldError`] that names the field. Callers: the other converters and the RM client.

use crate::{v1 as proto, v1::resource::Kind};
use rm_model::{
    name::{self, FieldError},
    resource::{KubernetesAmounts, LoadInstanceAmounts, Resource, ResourceError, ResourceParts, YarnAmounts},
};

/// Parses the required resource in `field`.
pub fn required(field: &str, resource: Option<proto::Resource>) -> Result<Resource, FieldError> {
    optional(field, resource)?.ok_or_else(|| FieldError::new(field, "is required"))
}

/// Maximum amount in one dimension. Sums over many tickets stay in range, and every client represents the number
/// exactly.
const AMOUNT_MAX: i64 = (1 << 53) - 1;

/// Parses the resource in `field`; `None` if it is unset.
pub fn optional(field: &str, resource: Option<proto::Resource>) -> Result<Option<Resource>, FieldError> {
    let resource = of_message(field, resource)?;
    let too_large = resource.iter().flat_map(Resource::amounts).find(|(_, amount)| *amount > AMOUNT_MAX);
    match too_large {
        Some((dimension, amount)) => {
            Err(FieldError::new(field, format!("has {amount} of {dimension}; at most {AMOUNT_MAX} can be counted")))
        }
        None => Ok(resource),
    }
}

/// Checks the names in a resource that a call creates: its custom dimensions, and its queue or namespace.
///
/// # Errors
/// A name that is not legal for new objects.
pub fn check_new(field: &str, resource: &Resource) -> Result<(), FieldError> {
    let place = resource.queue_name().or(resource.namespace());
    place.map_or(Ok(()), |place| name::check_new(field, place))?;
    resource.amounts().try_for_each(|(dimension, _)| name::check_new(field, dimension.name()))
}

fn of_message(field: &str, resource: Option<proto::Resource>) -> Result<Option<Resource>, FieldError> {
    let Some(resource) = resource else { return Ok(None) };
    let Some(kind) = resource.kind else {
        return Err(FieldError::new(field, "has no kind; set one, e.g. load_instance"));
    };
    let in_field = |error: ResourceError| FieldError::new(field, error.to_string());
    match parts(kind) {
        Ok(parts) => Resource::from_parts(parts).map(Some).map_err(in_field),
        Err(json) => {
            let resource_type = json.resource_type.parse().map_err(|error: ResourceError| {
                FieldError::new(format!("{field}.json.resource_type"), error.to_string())
            })?;
            Resource::from_json(resource_type, &json.document)
                .map(Some)
                .map_err(|error| FieldError::new(format!("{field}.json.document"), error.to_string()))
        }
    }
}

/// Returns the plain values of a resource, unchecked.
///
/// # Errors
/// The document, if the resource is given as Linkis JSON, which the caller has to parse.
pub fn parts(kind: Kind) -> Result<ResourceParts, proto::LinkisJson> {
    Ok(match kind {
        Kind::Json(json) => return Err(json),
        Kind::Memory(r) => ResourceParts::Memory { memory: r.memory },
        Kind::Cpu(r) => ResourceParts::Cpu { cores: r.cores },
        Kind::Load(r) => ResourceParts::Load { memory: r.memory, cores: r.cores },
        Kind::Instance(r) => ResourceParts::Instance { instances: r.instances },
        Kind::LoadInstance(r) => ResourceParts::LoadInstance(driver(r)),
        Kind::Yarn(r) => ResourceParts::Yarn(yarn(r)),
        Kind::DriverAndYarn(r) => {
            ResourceParts::DriverAndYarn(driver(r.load_instance.unwrap_or_default()), yarn(r.yarn.unwrap_or_default()))
        }
        Kind::Kubernetes(r) => ResourceParts::Kubernetes(kubernetes(r)),
        Kind::DriverAndKubernetes(r) => ResourceParts::DriverAndKubernetes(
            driver(r.load_instance.unwrap_or_default()),
            kubernetes(r.kubernetes.unwrap_or_default()),
        ),
        Kind::Special(r) => ResourceParts::Special(r.resources.into_iter().collect()),
    })
}

fn driver(r: proto::LoadInstanceResource) -> LoadInstanceAmounts {
    LoadInstanceAmounts { memory: r.memory, cores: r.cores, instances: r.instances }
}

fn yarn(r: proto::YarnResource) -> YarnAmounts {
    YarnAmounts {
        queue_memory: r.queue_memory,
        queue_cores: r.queue_cores,
        queue_instances: r.queue_instances,
        queue_name: r.queue_name,
        application_id: r.application_id,
    }
}

fn kubernetes(r: proto::KubernetesResource) -> KubernetesAmounts {
    KubernetesAmounts { memory: r.memory, millicores: r.millicores, namespace: r.namespace }
}

/// Converts a resource to a message.
pub fn message(parts: ResourceParts) -> proto::Resource {
    let driver = |r: LoadInstanceAmounts| proto::LoadInstanceResource {
        memory: r.memory,
        cores: r.cores,
        instances: r.instances,
    };
    let yarn = |r: YarnAmounts| proto::YarnResource {
        queue_name: r.queue_name,
        queue_memory: r.queue_memory,
        queue_cores: r.queue_cores,
        queue_instances: r.queue_instances,
        application_id: r.application_id,
    };
    let kubernetes = |r: KubernetesAmounts| proto::KubernetesResource {
        memory: r.memory,
        millicores: r.millicores,
        namespace: r.namespace,
    };
    let kind = match parts {
        ResourceParts::Memory { memory } => Kind::Memory(proto::MemoryResource { memory }),
        ResourceParts::Cpu { cores } => Kind::Cpu(proto::CpuResource { cores }),
        ResourceParts::Load { memory, cores } => Kind::Load(proto::LoadResource { memory, cores }),
        ResourceParts::Instance { instances } => Kind::Instance(proto::InstanceResource { instances }),
        ResourceParts::LoadInstance(r) => Kind::LoadInstance(driver(r)),
        ResourceParts::Yarn(r) => Kind::Yarn(yarn(r)),
        ResourceParts::DriverAndYarn(d, y) => {
            Kind::DriverAndYarn(proto::DriverAndYarnResource { load_instance: Some(driver(d)), yarn: Some(yarn(y)) })
        }
        ResourceParts::Kubernetes(r) => Kind::Kubernetes(kubernetes(r)),
        ResourceParts::DriverAndKubernetes(d, k) => Kind::DriverAndKubernetes(proto::DriverAndKubernetesResource {
            load_instance: Some(driver(d)),
            kubernetes: Some(kubernetes(k)),
        }),
        ResourceParts::Special(resources) => {
            Kind::Special(proto::SpecialResource { resources: resources.into_iter().collect() })
        }
    };
    proto::Resource { kind: Some(kind) }
}
