//! JSON form of resources: writes the newest form of Linkis, and reads it and both older ones.
//!
//! Callers: the store, whose tables share the form with Linkis, and the tests of conformance.
//!
//! - `read`: parser of all forms; `node`: JSON values with their paths.

mod node;
mod read;

use std::collections::BTreeMap;

use super::{KubernetesAmounts, LoadInstanceAmounts, Resource, ResourceParts, YarnAmounts};

impl Resource {
    /// Returns the form that Linkis has written since 1.4, with its fields in its order; without the type. Includes the
    /// fields that Linkis keeps for older readers: `instance`, the `cores` of an Instance, `moduleOperate`. The names of a
    /// Special are sorted.
    #[must_use]
    pub fn to_json(&self) -> String {
        write(&self.parts())
    }
}

pub(super) fn write(parts: &ResourceParts) -> String {
    match parts {
        ResourceParts::Memory { memory } => format!(r#"{{"memory":{memory}}}"#),
        ResourceParts::Cpu { cores } => format!(r#"{{"cores":{cores}}}"#),
        ResourceParts::Load { memory, cores } => format!(r#"{{"memory":{memory},"cores":{cores}}}"#),
        ResourceParts::Instance { instances } => format!(r#"{{"cores":{instances},"instances":{instances}}}"#),
        ResourceParts::LoadInstance(driver) => load_instance(driver),
        ResourceParts::Yarn(amounts) => yarn(amounts),
        ResourceParts::DriverAndYarn(driver, amounts) => {
            format!(r#"{{"loadInstanceResource":{},"yarnResource":{}}}"#, load_instance(driver), yarn(amounts))
        }
        ResourceParts::Kubernetes(amounts) => kubernetes(amounts),
        ResourceParts::DriverAndKubernetes(driver, amounts) => {
            let (driver, kubernetes) = (load_instance(driver), kubernetes(amounts));
            format!(r#"{{"loadInstanceResource":{driver},"kubernetesResource":{kubernetes},"moduleOperate":true}}"#)
        }
        ResourceParts::Special(custom) => special(custom),
    }
}

fn load_instance(amounts: &LoadInstanceAmounts) -> String {
    let LoadInstanceAmounts { memory, cores, instances } = amounts;
    format!(r#"{{"memory":{memory},"cores":{cores},"instances":{instances},"instance":{instances}}}"#)
}

fn yarn(amounts: &YarnAmounts) -> String {
    let YarnAmounts { queue_memory, queue_cores, queue_instances, queue_name, application_id } = amounts;
    let (name, application) = (quoted(queue_name), quoted(application_id));
    format!(
        r#"{{"queueMemory":{queue_memory},"queueCores":{queue_cores},"queueInstances":{queue_instances},"queueName":{name},"applicationId":{application}}}"#
    )
}

fn kubernetes(amounts: &KubernetesAmounts) -> String {
    let KubernetesAmounts { memory, millicores, namespace } = amounts;
    format!(r#"{{"memory":{memory},"cores":{millicores},"namespace":{}}}"#, quoted(namespace))
}

fn special(custom: &BTreeMap<String, i64>) -> String {
    let fields: Vec<_> = custom.iter().map(|(name, amount)| format!("{}:{amount}", quoted(name))).collect();
    format!(r#"{{"resources":{{{}}}}}"#, fields.join(","))
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
