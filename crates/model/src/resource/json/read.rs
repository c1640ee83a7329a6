//! Parser of the JSON forms: strict about values, and tolerant only about the forms that Linkis has written.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::node::{JsonNode, parse};
use crate::resource::error::shown;
use crate::resource::{
    Dimension, KubernetesAmounts, LeftResource, LoadInstanceAmounts, Resource, ResourceError, ResourceParts,
    ResourceType, YarnAmounts,
};

/// Maximum length of a document in bytes.
const DOCUMENT_BYTES_MAX: usize = 16 * 1024;

impl Resource {
    /// Parses a resource of a known type from any form that Linkis has written:
    ///
    /// - the form of 1.4 and later, which [`Resource::to_json`] writes;
    /// - the forms of 1.0 to 1.3 and of 0.x, with fields in any order: `instance` for `instances`, an Instance under
    ///   `instance`, `instances` or `cores`, a DriverAndYarn wrapped in `DriverAndYarnResource`, the `resources` of a
    ///   Special as a JSON string.
    ///
    /// Two fields that mean one amount must agree. `queueName` and `namespace` may be absent or null ("default"), and so
    /// may `applicationId` (empty); `moduleOperate` is ignored.
    ///
    /// # Errors
    /// - a field that is missing (Linkis reads it as unlimited), unknown, duplicate or contradicted by another;
    /// - a value that is not an integer in range (Linkis truncates 1.9 and reads "3");
    /// - [`ResourceError::DocumentTooLong`] above 16 KiB, [`ResourceError::Syntax`], and those of [`Resource::from_parts`].
    pub fn from_json(resource_type: ResourceType, json: &str) -> Result<Self, ResourceError> {
        if json.len() > DOCUMENT_BYTES_MAX {
            return Err(ResourceError::DocumentTooLong { bytes: json.len(), max: DOCUMENT_BYTES_MAX });
        }
        Self::from_parts(parts(resource_type, &parse(json)?)?)
    }
}

impl LeftResource {
    /// Parses the amounts, possibly negative, of a document from [`LeftResource::to_json`]; zeros are omitted.
    ///
    /// # Errors
    /// As [`Resource::from_json`].
    pub fn amounts_from_json(
        resource_type: ResourceType,
        json: &str,
    ) -> Result<BTreeMap<Dimension, i64>, ResourceError> {
        let document: Value =
            serde_json::from_str(json).map_err(|error| ResourceError::Syntax { reason: error.to_string() })?;
        // The parser accepts no signs, so the positive and the negative amounts are parsed separately.
        let above = Resource::from_json(resource_type, &signed(&document, false).to_string())?;
        let below = Resource::from_json(resource_type, &signed(&document, true).to_string())?;
        let amount = |(dimension, amount): (Dimension, i64)| {
            let left = amount - below.get(&dimension);
            (left != 0).then_some((dimension, left))
        };
        Ok(above.amounts().filter_map(amount).collect())
    }
}

/// Returns the document with only its negative amounts, without their sign, or only the others; the rest are zero.
fn signed(document: &Value, below: bool) -> Value {
    match document {
        Value::Object(fields) => {
            Value::Object(fields.iter().map(|(name, value)| (name.clone(), signed(value, below))).collect())
        }
        Value::Number(number) => match number.as_i64() {
            Some(amount) if (amount < 0) != below => Value::from(0),
            Some(amount) if below => Value::from(amount.unsigned_abs()),
            _ => document.clone(),
        },
        other => other.clone(),
    }
}

fn parts(resource_type: ResourceType, root: &JsonNode) -> Result<ResourceParts, ResourceError> {
    match resource_type {
        ResourceType::Memory => {
            let fields = ObjectFields::open(root, "", &["memory"])?;
            Ok(ResourceParts::Memory { memory: fields.amount("memory")? })
        }
        ResourceType::Cpu => {
            let fields = ObjectFields::open(root, "", &["cores"])?;
            Ok(ResourceParts::Cpu { cores: fields.amount("cores")? })
        }
        ResourceType::Load => {
            let fields = ObjectFields::open(root, "", &["memory", "cores"])?;
            Ok(ResourceParts::Load { memory: fields.amount("memory")?, cores: fields.amount("cores")? })
        }
        ResourceType::Instance => {
            let names = ["instances", "instance", "cores"];
            Ok(ResourceParts::Instance { instances: ObjectFields::open(root, "", &names)?.agreed(&names)? })
        }
        ResourceType::LoadInstance => Ok(ResourceParts::LoadInstance(load_instance(root, "")?)),
        ResourceType::Yarn => Ok(ResourceParts::Yarn(yarn(root, "")?)),
        ResourceType::DriverAndYarn => driver_and_yarn(root),
        ResourceType::Kubernetes => Ok(ResourceParts::Kubernetes(kubernetes(root, "")?)),
        ResourceType::DriverAndKubernetes => {
            let fields =
                ObjectFields::open(root, "", &["loadInstanceResource", "kubernetesResource", "moduleOperate"])?;
            let driver = fields.part("loadInstanceResource", load_instance)?;
            Ok(ResourceParts::DriverAndKubernetes(driver, fields.part("kubernetesResource", kubernetes)?))
        }
        ResourceType::Special => {
            Ok(ResourceParts::Special(ObjectFields::open(root, "", &["resources"])?.part("resources", custom)?))
        }
    }
}

fn load_instance(node: &JsonNode, path: &str) -> Result<LoadInstanceAmounts, ResourceError> {
    let fields = ObjectFields::open(node, path, &["memory", "cores", "instances", "instance"])?;
    Ok(LoadInstanceAmounts {
        memory: fields.amount("memory")?,
        cores: fields.amount("cores")?,
        instances: fields.agreed(&["instances", "instance"])?,
    })
}

fn yarn(node: &JsonNode, path: &str) -> Result<YarnAmounts, ResourceError> {
    let known = ["queueMemory", "queueCores", "queueInstances", "queueName", "applicationId"];
    let fields = ObjectFields::open(node, path, &known)?;
    Ok(YarnAmounts {
        queue_memory: fields.amount("queueMemory")?,
        queue_cores: fields.amount("queueCores")?,
        queue_instances: fields.amount("queueInstances")?,
        queue_name: fields.text("queueName")?,
        application_id: fields.text("applicationId")?,
    })
}

fn driver_and_yarn(root: &JsonNode) -> Result<ResourceParts, ResourceError> {
    const WRAPPER: &str = "DriverAndYarnResource";
    let wrapped = matches!(root, JsonNode::Object(entries) if entries.iter().any(|(name, _)| name == WRAPPER));
    let both = |node: &JsonNode, path: &str| {
        let fields = ObjectFields::open(node, path, &["loadInstanceResource", "yarnResource"])?;
        let driver = fields.part("loadInstanceResource", load_instance)?;
        Ok(ResourceParts::DriverAndYarn(driver, fields.part("yarnResource", yarn)?))
    };
    if wrapped { ObjectFields::open(root, "", &[WRAPPER])?.part(WRAPPER, both) } else { both(root, "") }
}

fn kubernetes(node: &JsonNode, path: &str) -> Result<KubernetesAmounts, ResourceError> {
    let fields = ObjectFields::open(node, path, &["memory", "cores", "namespace"])?;
    Ok(KubernetesAmounts {
        memory: fields.amount("memory")?,
        millicores: fields.amount("cores")?,
        namespace: fields.text("namespace")?,
    })
}

fn custom(node: &JsonNode, path: &str) -> Result<BTreeMap<String, i64>, ResourceError> {
    // The form of 1.0 to 1.3: JSON in a string.
    let inner;
    let node = match node {
        JsonNode::Text(json) => {
            inner = parse(json)?;
            &inner
        }
        node => node,
    };
    let mut amounts = BTreeMap::new();
    for (name, value) in node.entries(path)? {
        let field = join(path, name);
        let amount = value.amount(&field)?.ok_or_else(|| ResourceError::MissingField { field: field.clone() })?;
        if amounts.insert(name.clone(), amount).is_some() {
            return Err(ResourceError::DuplicateField { field });
        }
    }
    Ok(amounts)
}

/// An object whose fields are all known and occur once.
struct ObjectFields<'a> {
    path: &'a str,
    entries: &'a [(String, JsonNode)],
}

impl<'a> ObjectFields<'a> {
    fn open(node: &'a JsonNode, path: &'a str, known: &[&str]) -> Result<Self, ResourceError> {
        let entries = node.entries(path)?;
        let mut seen = BTreeSet::new();
        for (name, _) in entries {
            let field = || join(path, name);
            if !known.contains(&name.as_str()) {
                return Err(ResourceError::UnknownField { field: field(), known: known.join(", ") });
            }
            if !seen.insert(name) {
                return Err(ResourceError::DuplicateField { field: field() });
            }
        }
        Ok(Self { path, entries })
    }

    fn get(&self, name: &str) -> &JsonNode {
        self.entries.iter().find(|(field, _)| field == name).map_or(&JsonNode::Null, |(_, node)| node)
    }

    fn optional_amount(&self, name: &str) -> Result<Option<i64>, ResourceError> {
        self.get(name).amount(&join(self.path, name))
    }

    fn amount(&self, name: &str) -> Result<i64, ResourceError> {
        self.optional_amount(name)?.ok_or_else(|| self.missing(name))
    }

    /// Returns one amount that has several names. At least one must be present, and all present ones must agree.
    fn agreed(&self, names: &[&'static str]) -> Result<i64, ResourceError> {
        let mut agreed: Option<(&str, i64)> = None;
        for name in names {
            match (agreed, self.optional_amount(name)?) {
                (Some((first, value)), Some(other_value)) if value != other_value => {
                    let (field, other) = (join(self.path, first), join(self.path, name));
                    return Err(ResourceError::Disagreement { field, value, other, other_value });
                }
                (None, Some(value)) => agreed = Some((name, value)),
                _ => {}
            }
        }
        agreed.map(|(_, value)| value).ok_or_else(|| self.missing(names.first().copied().unwrap_or_default()))
    }

    /// Returns a name; absent or null is empty, which means the default.
    fn text(&self, name: &str) -> Result<String, ResourceError> {
        match self.get(name) {
            JsonNode::Null => Ok(String::new()),
            JsonNode::Text(text) => Ok(text.clone()),
            other => Err(other.invalid(&join(self.path, name), "a string")),
        }
    }

    fn part<T>(
        &self,
        name: &str,
        read: impl FnOnce(&JsonNode, &str) -> Result<T, ResourceError>,
    ) -> Result<T, ResourceError> {
        match self.get(name) {
            JsonNode::Null => Err(self.missing(name)),
            node => read(node, &join(self.path, name)),
        }
    }

    fn missing(&self, name: &str) -> ResourceError {
        ResourceError::MissingField { field: join(self.path, name) }
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { shown(name) } else { format!("{path}.{}", shown(name)) }
}

#[cfg(test)]
#[path = "read_tests.rs"]
mod tests;
