//! Stored form of positions, wait keys and caps. Caller: the parent module. The module executes no SQL.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use crate::{
    StoreError,
    rows::{dimension, hash},
};
use rm_model::{
    cap::Cap,
    name::Labels,
    order::{AnyEm, TurnKey},
    resource::Dimension,
    scope::Scope,
    selector::EmSelector,
    wait_queue::{QueuePosition, WaitKey},
};

use super::TABLE;

/// Stored form of a cap.
#[derive(Serialize, Deserialize)]
struct CapJson {
    keys: BTreeSet<String>,
    max: BTreeMap<String, i64>,
}

pub(super) fn caps_json(caps: &[Arc<Cap>]) -> String {
    let max = |cap: &Cap| cap.max.iter().map(|(dimension, max)| (dimension.key(), *max)).collect();
    let caps = caps.iter().map(|cap| CapJson { keys: cap.keys.clone(), max: max(cap) });
    serde_json::json!(caps.collect::<Vec<_>>()).to_string()
}

pub(super) fn parse_caps(json: &str) -> Result<Vec<Cap>, StoreError> {
    let caps: Vec<CapJson> = serde_json::from_str(json).map_err(|error| StoreError::inconsistent(TABLE.0, error))?;
    let max = |max: BTreeMap<String, i64>| -> Result<BTreeMap<Dimension, i64>, StoreError> {
        max.into_iter().map(|(key, max)| Ok((dimension(TABLE.0, &key)?, max))).collect()
    };
    caps.into_iter().map(|cap| Ok(Cap { keys: cap.keys, max: max(cap.max)? })).collect()
}

/// Stored form of the conditions on the EM of a request that names none.
#[derive(Serialize, Deserialize)]
struct EmConditionsJson {
    application_name: Option<String>,
    required: BTreeMap<String, String>,
}

pub(super) fn em_conditions_json(selector: &EmSelector) -> String {
    let application_name = selector.application_name.as_ref().map(ToString::to_string);
    serde_json::json!(EmConditionsJson { application_name, required: selector.required.as_map().clone() }).to_string()
}

/// Returns the stored conditions, without preferences.
pub(super) fn parse_em_conditions(json: &str) -> Result<EmSelector, StoreError> {
    let wrong = |error: &dyn std::fmt::Display| StoreError::inconsistent(TABLE.0, error.to_string());
    let EmConditionsJson { application_name, required } = serde_json::from_str(json).map_err(|error| wrong(&error))?;
    let application_name = application_name.map(|name| TABLE.name("em_selector", &name)).transpose()?;
    let required = Labels::parse("em_selector", required).map_err(|error| wrong(&error))?;
    Ok(EmSelector { application_name, required, ..EmSelector::default() })
}

pub(crate) fn parse_position(bytes: &[u8]) -> Result<QueuePosition, StoreError> {
    let wrong = || StoreError::inconsistent(TABLE.0, format!("a position of {} bytes", bytes.len()));
    QueuePosition::from_bytes(bytes).ok_or_else(wrong)
}

/// Stored form of a wait key.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum WaitKeyJson {
    Em(String, String),
    Scope(BTreeMap<String, String>),
    Queue(String, String),
}

pub(super) fn wait_key_json(wait_key: &WaitKey) -> String {
    let json = match wait_key {
        WaitKey::Em(em) => WaitKeyJson::Em(em.application_name.to_string(), em.instance.to_string()),
        WaitKey::Scope(scope) => WaitKeyJson::Scope(scope.labels().clone()),
        WaitKey::Queue { provider, path } => WaitKeyJson::Queue(provider.to_string(), path.clone()),
    };
    serde_json::json!(json).to_string()
}

pub(super) fn parse_wait_key(json: &str) -> Result<WaitKey, StoreError> {
    match serde_json::from_str(json).map_err(|error| StoreError::inconsistent(TABLE.0, error))? {
        WaitKeyJson::Em(application_name, instance) => Ok(WaitKey::Em(TABLE.em(&application_name, &instance)?)),
        WaitKeyJson::Scope(labels) => Ok(WaitKey::Scope(Scope::new(labels))),
        WaitKeyJson::Queue(provider, path) => Ok(WaitKey::Queue { provider: TABLE.name("provider", &provider)?, path }),
    }
}

/// Returns the hash of a key at which the requests of a turn take it.
pub(super) fn turn_key_hash(turn: &str, turn_key: &TurnKey) -> [u8; 32] {
    let key = match turn_key {
        TurnKey::At(wait_key) => wait_key_json(wait_key),
        TurnKey::AnyEm(AnyEm(conditions)) => format!("{conditions:?}"),
    };
    hash(&format!("{key}\n{turn}"))
}

pub(super) fn wait_key_hash(wait_key: &WaitKey) -> [u8; 32] {
    hash(&wait_key_json(wait_key))
}
