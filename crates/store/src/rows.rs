//! Conversion between SQL columns and values of the model.
//!
//! A value that no row of the service can contain becomes [`StoreError::Inconsistent`], which names its table. Callers:
//! the other modules of the crate. The module executes no SQL.

use std::collections::BTreeMap;

use sha2::{Digest as _, Sha256};

use rm_model::{
    em::EmInstance,
    name::{Labels, Name},
    resource::{Dimension, Resource, ResourceType},
    ticket::EngineInstance,
};

use super::StoreError;

/// Defines a struct that is read from a row by the names of its columns. A field after `..` is read from the same row.
macro_rules! from_row {
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $name:ident {
            $($(#[$field_attribute:meta])* $field_visibility:vis $field:ident: $type:ty,)*
            $(..$nested:ident: $nested_type:ty,)*
        }
    ) => {
        $(#[$attribute])*
        $visibility struct $name {
            $($(#[$field_attribute])* $field_visibility $field: $type,)*
            $($nested: $nested_type,)*
        }

        impl sqlx::FromRow<'_, sqlx::postgres::PgRow> for $name {
            fn from_row(row: &sqlx::postgres::PgRow) -> Result<Self, sqlx::Error> {
                Ok(Self {
                    $($field: sqlx::Row::try_get(row, stringify!($field))?,)*
                    $($nested: sqlx::FromRow::from_row(row)?,)*
                })
            }
        }
    };
}

/// A table name, for errors.
#[derive(Clone, Copy)]
pub(super) struct TableName(pub &'static str);

impl TableName {
    /// Parses a name. `column` names it in the error.
    pub fn name(self, column: &str, text: &str) -> Result<Name, StoreError> {
        Name::parse(column, text).map_err(|error| StoreError::inconsistent(self.0, error))
    }

    /// Parses the key of an EM.
    pub fn em(self, application_name: &str, instance: &str) -> Result<EmInstance, StoreError> {
        EmInstance::parse("em", application_name, instance).map_err(|error| StoreError::inconsistent(self.0, error))
    }

    /// Parses the identity of an engine.
    pub fn engine(self, application_name: &str, instance: &str) -> Result<EngineInstance, StoreError> {
        EngineInstance::parse("engine", application_name, instance)
            .map_err(|error| StoreError::inconsistent(self.0, error))
    }

    /// Parses a resource type.
    pub fn resource_type(self, text: &str) -> Result<ResourceType, StoreError> {
        text.parse().map_err(|error| StoreError::inconsistent(self.0, error))
    }

    /// Parses amounts of a resource type from JSON. `column` names them in the error.
    pub fn resource(self, column: &str, resource_type: ResourceType, json: &str) -> Result<Resource, StoreError> {
        Resource::from_json(resource_type, json)
            .map_err(|error| StoreError::inconsistent(self.0, format!("{column} {json}: {error}")))
    }

    /// Parses labels from a JSON object.
    pub fn labels(self, json: &str) -> Result<Labels, StoreError> {
        if json == "{}" {
            return Ok(Labels::default());
        }
        let map: BTreeMap<String, String> =
            serde_json::from_str(json).map_err(|error| StoreError::inconsistent(self.0, error))?;
        Labels::parse("labels", map).map_err(|error| StoreError::inconsistent(self.0, error))
    }
}

/// Returns labels as a JSON object.
pub(super) fn labels_json(labels: &Labels) -> String {
    let pairs = labels.as_map().iter().map(|(key, value)| (key.clone(), value.clone().into()));
    serde_json::Value::Object(pairs.collect()).to_string()
}

/// Returns the two key columns of several EMs.
pub(super) fn em_columns<'a>(ems: impl IntoIterator<Item = &'a EmInstance>) -> (Vec<&'a str>, Vec<&'a str>) {
    ems.into_iter().map(|em| (em.application_name.as_str(), em.instance.as_str())).unzip()
}

/// Returns amounts by dimension key as a JSON object.
pub(super) fn tally_json<'a>(amounts: impl Iterator<Item = (&'a Dimension, i64)>) -> String {
    let pairs = amounts.map(|(dimension, amount)| (dimension.key(), amount.into()));
    serde_json::Value::Object(pairs.collect()).to_string()
}

/// Returns the dimension that `table` stores as `key`.
pub(super) fn dimension(table: &'static str, key: &str) -> Result<Dimension, StoreError> {
    let known = match key {
        MILLICORES_BEFORE => Some(Dimension::KubernetesMillicores),
        key => Dimension::parse_key(key),
    };
    known.ok_or_else(|| StoreError::inconsistent(table, key))
}

/// Former key of Kubernetes millicores: still read, never written.
const MILLICORES_BEFORE: &str = "kubernetes_cores";

/// Returns the SHA-256 of `text`, for keys that may exceed the size of an index entry.
pub(super) fn hash(text: &str) -> [u8; 32] {
    Sha256::digest(text).into()
}
