//! JSON values in their written form, so that an error can name the path of a field.

use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::resource::ResourceError;

/// Name of the whole document in messages.
const DOCUMENT: &str = "(document)";
const WHOLE_NUMBER: &str = "a whole number from 0 to 9223372036854775807";
const OBJECT: &str = "an object";

pub(super) fn parse(json: &str) -> Result<JsonNode, ResourceError> {
    serde_json::from_str(json).map_err(|error| ResourceError::Syntax { reason: error.to_string() })
}

/// A JSON value, as far as resources need it. `serde_json::Value` is not used, because it drops duplicate fields.
pub(super) enum JsonNode {
    Null,
    Integer(i64),
    Text(String),
    Object(Vec<(String, JsonNode)>),
    /// A kind of value that no resource contains, described for messages.
    Useless(&'static str),
}

impl JsonNode {
    pub(super) fn entries(&self, path: &str) -> Result<&[(String, Self)], ResourceError> {
        match self {
            Self::Object(entries) => Ok(entries),
            other => Err(other.invalid(if path.is_empty() { DOCUMENT } else { path }, OBJECT)),
        }
    }

    /// Returns the amount; `None` for null.
    pub(super) fn amount(&self, field: &str) -> Result<Option<i64>, ResourceError> {
        match self {
            Self::Null => Ok(None),
            Self::Integer(amount) if *amount >= 0 => Ok(Some(*amount)),
            other => Err(other.invalid(field, WHOLE_NUMBER)),
        }
    }

    pub(super) fn invalid(&self, field: &str, expected: &'static str) -> ResourceError {
        let found = match self {
            Self::Null => "null".to_owned(),
            Self::Integer(amount) => amount.to_string(),
            Self::Text(_) => "a string".to_owned(),
            Self::Object(_) => OBJECT.to_owned(),
            Self::Useless(what) => (*what).to_owned(),
        };
        ResourceError::InvalidField { field: field.to_owned(), found, expected }
    }
}

impl<'de> Deserialize<'de> for JsonNode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = JsonNode;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<JsonNode, E> {
        Ok(JsonNode::Null)
    }

    fn visit_bool<E>(self, _: bool) -> Result<JsonNode, E> {
        Ok(JsonNode::Useless("a boolean"))
    }

    fn visit_i64<E>(self, value: i64) -> Result<JsonNode, E> {
        Ok(JsonNode::Integer(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<JsonNode, E> {
        Ok(i64::try_from(value).map_or(JsonNode::Useless("out of range"), JsonNode::Integer))
    }

    /// The parser calls this for fractions, exponents and integers beyond 64 bits.
    fn visit_f64<E>(self, value: f64) -> Result<JsonNode, E> {
        let beyond = value.abs() >= 9_223_372_036_854_775_808.0;
        Ok(JsonNode::Useless(if beyond { "out of range" } else { "a fraction or in exponent form" }))
    }

    fn visit_str<E>(self, value: &str) -> Result<JsonNode, E> {
        Ok(JsonNode::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<JsonNode, A::Error> {
        while values.next_element::<IgnoredAny>()?.is_some() {}
        Ok(JsonNode::Useless("an array"))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<JsonNode, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = fields.next_entry()? {
            entries.push(entry);
        }
        Ok(JsonNode::Object(entries))
    }
}
