//! Conversion between SQL columns and values of the model.
//!
//! A value that no row of the service can contain becomes [`StoreError::Inconsistent`], which names its table. Callers:
//! the other modules of the crate. The module executes no SQL.

use std::{collections::BTreeMap, fmt};

use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};
use sqlx::{Decode, Postgres, Row as _, Type, postgres::PgRow};

use rm_model::{
    em::EmInstance,
    name::{Labels, Name},
    principal::Principal,
    resource::{Dimension, Resource, ResourceType},
    ticket::EngineInstance,
};

use super::StoreError;

/// A statement with its bound values.
pub(super) type BoundQuery<'q> = sqlx::query::Query<'q, Postgres, sqlx::postgres::PgArguments>;

/// A table name, for errors.
#[derive(Clone, Copy)]
pub(super) struct TableName(pub &'static str);

impl TableName {
    /// Returns a row of the table.
    pub fn row(self, row: &PgRow) -> TableRow<'_> {
        TableRow { table: self, row }
    }

    /// Parses rows of the table.
    pub fn parse<T, C: FromIterator<T>>(
        self,
        rows: &[PgRow],
        parse: impl Fn(TableRow<'_>) -> Result<T, StoreError>,
    ) -> Result<C, StoreError> {
        rows.iter().map(|row| parse(self.row(row))).collect()
    }

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

/// A row of a table, read by the names of its columns.
#[derive(Clone, Copy)]
pub(super) struct TableRow<'r> {
    table: TableName,
    row: &'r PgRow,
}

impl<'r> TableRow<'r> {
    /// Returns the row as one of another table, from which some of its columns are joined.
    pub fn of(self, table: TableName) -> Self {
        Self { table, ..self }
    }

    /// Returns the value of a column.
    pub fn get<T: Decode<'r, Postgres> + Type<Postgres>>(self, column: &str) -> Result<T, StoreError> {
        self.row.try_get(column).map_err(|error| self.wrong(error))
    }

    /// Returns the error for values that no row of the service can contain.
    pub fn wrong(self, what: impl fmt::Display) -> StoreError {
        StoreError::inconsistent(self.table.0, what)
    }

    /// Parses the text of a column by `parse`.
    pub fn parse<T>(self, column: &str, parse: impl FnOnce(&str) -> Option<T>) -> Result<T, StoreError> {
        let text = self.get(column)?;
        parse(text).ok_or_else(|| self.wrong(text))
    }

    /// Parses the JSON text of a column.
    pub fn json<T: DeserializeOwned>(self, column: &str) -> Result<T, StoreError> {
        let text = self.get(column)?;
        serde_json::from_str(text).map_err(|error| self.wrong(format!("{column} {text}: {error}")))
    }

    /// Parses a name.
    pub fn name(self, column: &str) -> Result<Name, StoreError> {
        self.table.name(column, self.get(column)?)
    }

    /// Parses a principal.
    pub fn principal(self, column: &str) -> Result<Principal, StoreError> {
        Principal::parse(column, self.get(column)?).map_err(|error| self.wrong(error))
    }

    /// Parses the key of an EM.
    pub fn em(self) -> Result<EmInstance, StoreError> {
        self.table.em(self.get("em_application_name")?, self.get("em_instance")?)
    }

    /// Parses the resource type.
    pub fn resource_type(self) -> Result<ResourceType, StoreError> {
        self.table.resource_type(self.get("resource_type")?)
    }

    /// Parses amounts of a resource type from JSON.
    pub fn resource(self, column: &str, resource_type: ResourceType) -> Result<Resource, StoreError> {
        self.table.resource(column, resource_type, self.get(column)?)
    }

    /// Parses labels from a JSON object.
    pub fn labels(self, column: &str) -> Result<Labels, StoreError> {
        self.table.labels(self.get(column)?)
    }
}

/// Returns labels as a JSON object.
pub(super) fn labels_json(labels: &Labels) -> String {
    let pairs = labels.as_map().iter().map(|(key, value)| (key.clone(), value.clone().into()));
    serde_json::Value::Object(pairs.collect()).to_string()
}

/// Returns one column of several rows.
pub(super) fn column<'a, T: 'a, V>(rows: impl IntoIterator<Item = &'a T>, value: impl Fn(&'a T) -> V) -> Vec<V> {
    rows.into_iter().map(value).collect()
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
    Dimension::parse_key(key).ok_or_else(|| StoreError::inconsistent(table, key))
}

/// Returns the SHA-256 of `text`, for keys that may exceed the size of an index entry.
pub(super) fn hash(text: &str) -> [u8; 32] {
    Sha256::digest(text).into()
}
