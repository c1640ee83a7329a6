//! Recorded states: the `before` and `after` of administrative actions in the history, as small JSON documents.
//!
//! Never: contains a secret. Callers: the services and commands that write history lines.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use time::OffsetDateTime;

use super::{
    access::{EmPattern, Rights},
    audit::Difference,
    em_drain::EmDrain,
    limit::Rule,
    order::QueueOrder,
    policy::Policy,
    priority::PriorityRule,
    reclaim::ReclaimPolicy,
    resource::Dimension,
    ticket::{Ticket, TicketState},
    timestamp::rfc3339,
};

/// Maximum length of a document in bytes. Longer documents are replaced by their beginning.
pub const STATE_BYTES_MAX: usize = 4096;

/// Maximum length of the JSON around such a beginning, in bytes.
const FRAME_BYTES: usize = 64;

/// State of an object: a JSON object of at most [`STATE_BYTES_MAX`] bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedState(String);

impl RecordedState {
    fn new(value: &Value) -> Self {
        let text = value.to_string();
        if text.len() <= STATE_BYTES_MAX {
            return Self(text);
        }
        // Each quote and backslash takes two bytes inside a JSON string.
        let (mut room, mut end) = (STATE_BYTES_MAX - FRAME_BYTES, 0);
        for (at, character) in text.char_indices() {
            let bytes = if matches!(character, '"' | '\\') { 2 } else { character.len_utf8() };
            let Some(rest) = room.checked_sub(bytes) else { break };
            (room, end) = (rest, at + character.len_utf8());
        }
        Self(json!({ "beginning": text.get(..end).unwrap_or_default(), "bytes": text.len() }).to_string())
    }

    /// Returns the document.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the document.
    pub fn into_string(self) -> String {
        self.0
    }

    /// Returns the state of a limit.
    pub fn of_rule(rule: &Rule) -> Self {
        let by_key = |amounts: &BTreeMap<Dimension, i64>| -> Map<String, Value> {
            amounts.iter().map(|(dimension, amount)| (dimension.key(), (*amount).into())).collect()
        };
        let mut state = json!({ "max": by_key(&rule.max), "mode": rule.mode.as_str() });
        if !rule.guarantee.is_empty() {
            state["guarantee"] = by_key(&rule.guarantee).into();
        }
        Self::new(&state)
    }

    /// Returns the state of a policy.
    pub fn of_policy(policy: &Policy) -> Self {
        let checks = policy.to_string();
        Self::new(&json!({
            "checks": checks.split(',').collect::<Vec<_>>(),
            "required_labels": policy.required_labels(),
            "placement": policy.placement().as_str(),
            "em_new_after_s": policy.em_new_after().as_secs_f64(),
        }))
    }

    /// Returns the state of the order of waiting requests.
    pub fn of_order(order: &QueueOrder) -> Self {
        let fair_by: Vec<&str> = order.fair_by.labels().collect();
        Self::new(&json!({ "fair_by": fair_by, "position_kept_s": order.position_kept.as_secs_f64() }))
    }

    /// Returns the state of a priority rule.
    pub fn of_priority(rule: &PriorityRule) -> Self {
        Self::new(&json!({ "default": rule.default, "max": rule.max }))
    }

    /// Returns the state of a reclaim policy.
    pub fn of_reclaim_policy(policy: &ReclaimPolicy) -> Self {
        Self::new(&json!({
            "mode": policy.mode.as_str(),
            "idle_after_s": policy.idle_after.as_secs_f64(),
            "grace_s": policy.grace.as_secs_f64(),
            "per_minute": policy.per_minute,
            "busy": policy.busy,
            "min_life_s": policy.min_life.as_secs_f64(),
        }))
    }

    /// Returns the state of a drain: reason, actor and start.
    pub fn of_drain(drain: &EmDrain) -> Self {
        let EmDrain { reason, by, since } = drain;
        Self::new(&json!({ "reason": reason.as_str(), "drained_by": by.as_str(), "drain_time": time(*since) }))
    }

    /// Returns the state of a ticket: amounts and engine.
    pub fn of_ticket(ticket: &Ticket) -> Self {
        let amounts = ticket.resource().amounts().map(|(dimension, amount)| (dimension.key(), amount.into()));
        let resource = Value::Object(amounts.collect());
        Self::new(&match &ticket.state {
            TicketState::Locked { expires_at, .. } => {
                json!({ "state": "locked", "resource": resource, "expire_time": time(*expires_at) })
            }
            TicketState::Used { engine, used_time, .. } => json!({
                "state": "used", "resource": resource, "used_time": time(*used_time),
                "engine": format!("{}/{}", engine.application_name, engine.instance),
            }),
        })
    }

    /// Returns the state of a token: rights, owner, expiry and, if revoked, the time.
    pub fn of_token(
        rights: &Rights,
        owner: &str,
        expire_time: OffsetDateTime,
        revoked: Option<OffsetDateTime>,
    ) -> Self {
        let mut state = json!({
            "roles": rights.roles.iter().map(|role| role.as_str()).collect::<Vec<_>>(),
            "ems": rights.ems.iter().map(EmPattern::to_string).collect::<Vec<_>>(),
            "users": rights.users.as_ref().map(|users| users.iter().map(|user| user.as_str()).collect::<Vec<_>>()),
            "owner": owner,
            "expire_time": time(expire_time),
        });
        if let (Some(revoked), Value::Object(state)) = (revoked, &mut state) {
            state.insert("revoke_time".to_owned(), time(revoked));
        }
        Self::new(&state)
    }

    /// Returns the state of a provider: labels and configuration. `config` is JSON without secrets.
    pub fn of_provider(labels: &BTreeMap<String, String>, config: &str) -> Self {
        let config: Value = serde_json::from_str(config).unwrap_or_default();
        Self::new(&json!({ "labels": labels, "config": config }))
    }

    /// Returns the states before and after a repair, with only the counters that differed.
    pub fn of_repair(differences: &[Difference]) -> (Self, Self) {
        let (mut before, mut after) = (Map::new(), Map::new());
        for Difference { counter, stored, from_tickets, problem, .. } in differences {
            let amounts = |amounts: &BTreeMap<_, i64>| -> Value {
                let pairs = amounts
                    .iter()
                    .map(|(dimension, amount): (&super::resource::Dimension, _)| (dimension.key(), (*amount).into()));
                Value::Object(pairs.collect())
            };
            match problem.as_str() {
                "" => {
                    before.insert(counter.clone(), amounts(stored));
                    after.insert(counter.clone(), amounts(from_tickets));
                }
                problem => drop(before.insert(counter.clone(), problem.into())),
            }
        }
        (Self::new(&Value::Object(before)), Self::new(&Value::Object(after)))
    }
}

fn time(time: OffsetDateTime) -> Value {
    rfc3339(time).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_state_is_truncated_to_valid_json() {
        for text in ["x", "\"", "\\", "ü", "\u{1F980}\""] {
            for length in [1, 1000, 5000, 100_000] {
                let RecordedState(state) = RecordedState::new(&json!({ "reason": text.repeat(length) }));
                assert!(state.len() <= STATE_BYTES_MAX, "{} bytes of {text:?}", state.len());
                let value: Value = serde_json::from_str(&state).unwrap();
                let is_whole = value.get("reason").is_some();
                assert!(is_whole || value["bytes"].as_u64().unwrap() > 4096 && state.len() > 4000, "{state}");
            }
        }
    }
}
