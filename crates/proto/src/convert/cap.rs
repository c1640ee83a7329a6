//! Caps of a request: parses and checks them, and converts them to messages.
//!
//! A parser fails with a [`FieldError`] that names the field and the bound. Callers:
//! `rm_edge::resource_manager`, `answer` and the RM client.

use std::{collections::BTreeSet, sync::Arc};

use crate::v1 as proto;
use rm_model::{
    cap::{CAPS_MAX, Cap},
    limit::LABELS_MAX,
    name::{FieldError, Name, check_at_most},
    resource::Dimension,
    scope::UncountedDimension,
};

use super::limit;

/// Parses the caps in `field`.
///
/// # Errors
/// More than [`CAPS_MAX`] caps, an invalid cap, or two caps with equal labels.
pub fn caps(field: &str, caps: &[proto::Cap]) -> Result<Vec<Arc<Cap>>, FieldError> {
    check_at_most(field, caps.len(), "caps", CAPS_MAX)?;
    let mut read: Vec<Arc<Cap>> = Vec::with_capacity(caps.len());
    for (number, message) in caps.iter().enumerate() {
        let field = format!("{field}[{number}]");
        let cap = cap(&field, message)?;
        if read.iter().any(|other| other.keys == cap.keys) {
            return Err(FieldError::new(format!("{field}.labels"), "are those of another cap; give one for both"));
        }
        read.push(Arc::new(cap));
    }
    Ok(read)
}

fn cap(field: &str, cap: &proto::Cap) -> Result<Cap, FieldError> {
    let in_labels = format!("{field}.labels");
    if cap.labels.is_empty() || cap.labels.len() > LABELS_MAX {
        let problem = format!("names {} labels; must name 1 to {LABELS_MAX}", cap.labels.len());
        return Err(FieldError::new(in_labels, problem));
    }
    let mut keys = BTreeSet::new();
    for key in &cap.labels {
        Name::parse(&in_labels, key)?;
        if !keys.insert(key.clone()) {
            return Err(FieldError::new(in_labels, format!("names {key:?} a second time")));
        }
    }
    let in_max = format!("{field}.max");
    let max = limit::maxima(&in_max, &cap.max, true)?;
    if max.contains_key(&Dimension::Waiting) {
        return Err(FieldError::new(in_max, "names \"waiting\", which only a limit may name; omit it"));
    }
    UncountedDimension::check(max.keys(), |label| keys.contains(label))
        .map_err(|uncounted| FieldError::new(in_max, uncounted.to_string()))?;
    Ok(Cap { keys, max })
}

/// Converts a cap to a message.
pub fn message(cap: &Cap) -> proto::Cap {
    let max = cap.max.iter().map(|(dimension, max)| (dimension.key(), *max)).collect();
    proto::Cap { labels: cap.keys.iter().cloned().collect(), max }
}
