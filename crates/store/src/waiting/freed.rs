//! Freed capacity: notifications by which an instance wakes the waiters of the others.
//!
//! A notification names wait keys by hash, with about how many requests freed capacity there. The content is a hint: a
//! spurious or collapsed notification causes a check, never a grant. Callers: the committer sends, the listener parses.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use sqlx::PgExecutor;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::StoreError;
use rm_model::{
    em::EmInstance,
    wait_queue::{FreedKeys, OwnedPosition, QueuePosition, RerankedRequest, WaitKey, WaitKeyHash},
};

use super::{TABLE, wait_key_hash};

/// Notification channel of freed capacity.
pub const CHANNEL: &str = "linkis_rm_freed";

/// Maximum size of the wait keys in one notification, in bytes. PostgreSQL accepts payloads below 8000 bytes.
const PAYLOAD_BYTES_MAX: usize = 7800;

/// Maximum size of the JSON around the wait keys, in bytes.
const FRAME_BYTES: usize = 150;

/// Size of one wait key with its count and the separators, in bytes, without the name of the EM.
const KEY_BYTES: usize = 35;

/// Size of one ticket id and claim with their separators, in bytes.
const CALL_BYTES: usize = 80;

/// Maximum number of ended calls in one notification.
const CALLS_MAX: usize = PAYLOAD_BYTES_MAX / CALL_BYTES;

/// Maximum number of notifications of wait keys per commit. Above it, one notification means *anywhere*.
const PARTS_MAX: usize = 8;

/// Returns the hash of a wait key.
pub fn key_hash(wait_key: &WaitKey) -> WaitKeyHash {
    let hash = wait_key_hash(wait_key);
    WaitKeyHash(hash.iter().take(8).fold(0, |key, byte| key << 8 | u64::from(*byte)))
}

/// Payload of a notification: where capacity was freed.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FreedNotification {
    /// Whether capacity may have been freed anywhere.
    pub anywhere: bool,
    /// Wait keys with about how many requests freed capacity there.
    pub wait_keys: BTreeMap<WaitKeyHash, u32>,
    /// Names of the EMs among the wait keys, for requests that wait for any EM.
    pub ems: Vec<(String, String)>,
    /// Whether the EMs are available again by their reports.
    #[serde(default)]
    pub is_of_conditions: bool,
    /// Ticket ids and claims of waiting calls that end, because an operator removed the request or a later call took its position
    /// over. An earlier release ignores them.
    #[serde(default)]
    calls: Vec<(String, String)>,
    /// Waiting requests with their positions, and the times of the decisions in microseconds.
    #[serde(default)]
    reranked: Vec<(String, Option<i64>)>,
    /// Hashes of these EMs.
    #[serde(skip)]
    em_keys: BTreeSet<WaitKeyHash>,
    /// Instance that has already woken its own waiters.
    #[serde(default)]
    from: Option<String>,
}

impl FreedNotification {
    /// Returns the notifications for calls that end. They precede those of the wait keys, so that no removed request is woken
    /// instead of a waiting one.
    pub fn ended(positions: &[OwnedPosition]) -> Vec<Self> {
        let call = |position: &OwnedPosition| Some((position.ticket_id.to_string(), position.claim?.to_string()));
        let calls: Vec<(String, String)> = positions.iter().filter_map(call).collect();
        calls.chunks(CALLS_MAX).map(|part| Self { calls: part.to_vec(), ..Self::default() }).collect()
    }

    /// Returns the calls that end.
    pub fn ended_calls(&self) -> impl Iterator<Item = OwnedPosition> {
        let call = |(ticket_id, claim): &(String, String)| {
            Some(OwnedPosition {
                ticket_id: Uuid::parse_str(ticket_id).ok()?,
                claim: Some(Uuid::parse_str(claim).ok()?),
            })
        };
        self.calls.iter().filter_map(call)
    }

    /// Returns the notifications of waiting requests with new positions or rank times.
    pub fn reranked(requests: impl IntoIterator<Item = RerankedRequest>) -> Vec<Self> {
        let micros = |at: OffsetDateTime| i64::try_from(at.unix_timestamp_nanos() / 1000).unwrap_or(i64::MAX);
        let request = |request: RerankedRequest| (request.position.to_string(), request.decided_at.map(micros));
        let requests: Vec<_> = requests.into_iter().map(request).collect();
        requests.chunks(CALLS_MAX).map(|part| Self { reranked: part.to_vec(), ..Self::default() }).collect()
    }

    /// Returns the waiting requests with new positions or rank times. An invalid time counts as none.
    pub fn reranked_requests(&self) -> impl Iterator<Item = RerankedRequest> {
        let time = |micros: i64| OffsetDateTime::from_unix_timestamp_nanos(i128::from(micros) * 1000).ok();
        self.reranked.iter().filter_map(move |(position, micros)| {
            let position = QueuePosition::parse(position)?;
            Some(RerankedRequest { position, decided_at: micros.and_then(time) })
        })
    }

    /// Returns the notifications for `wait_keys`: one or more parts, or a single *anywhere* if more than `PARTS_MAX` are
    /// needed.
    pub fn at(wait_keys: &FreedKeys) -> Vec<Self> {
        if wait_keys.is_empty() {
            return Vec::new();
        }
        let (mut parts, mut size) = (vec![Self::default()], 0);
        for (wait_key, requests) in wait_keys.iter() {
            let em = em_of(wait_key);
            let bytes = KEY_BYTES + em.as_ref().map_or(0, |em| serde_json::json!(em).to_string().len());
            if size + bytes > PAYLOAD_BYTES_MAX {
                parts.push(Self::default());
                size = 0;
            }
            size += bytes;
            if let Some(part) = parts.last_mut() {
                part.note(wait_key, requests, em);
            }
        }
        let fits = |part: &Self| part.payload().len() <= PAYLOAD_BYTES_MAX + FRAME_BYTES;
        if parts.len() <= PARTS_MAX && parts.iter().all(fits) { parts } else { vec![Self::anywhere()] }
    }

    fn note(&mut self, wait_key: &WaitKey, requests: u32, em: Option<(String, String)>) {
        let noted = self.wait_keys.entry(key_hash(wait_key)).or_default();
        *noted = noted.saturating_add(requests);
        if let Some(em) = em {
            self.ems.push(em);
            self.em_keys.insert(key_hash(wait_key));
        }
    }

    /// States that the EMs are available again by their reports.
    pub fn of_conditions(self) -> Self {
        Self { is_of_conditions: true, ..self }
    }

    /// Sets the sending instance, which has already woken its own waiters.
    pub fn from(self, instance_id: Uuid) -> Self {
        Self { from: Some(instance_id.to_string()), ..self }
    }

    /// Returns whether `instance_id` is the sender.
    pub fn is_from(&self, instance_id: Uuid) -> bool {
        self.from.as_ref().is_some_and(|from| *from == instance_id.to_string())
    }

    /// Returns the value for capacity freed anywhere.
    pub fn anywhere() -> Self {
        Self { anywhere: true, ..Self::default() }
    }

    /// Parses a notification. An invalid payload counts as *anywhere*.
    pub fn parse(payload: &str) -> Self {
        let mut freed: Self = serde_json::from_str(payload).unwrap_or_else(|_| Self::anywhere());
        freed.em_keys = freed.em_instances().into_iter().map(|em| key_hash(&WaitKey::Em(em))).collect();
        freed
    }

    fn payload(&self) -> String {
        serde_json::json!(self).to_string()
    }

    /// Returns the hashes of the EMs among the wait keys.
    pub fn em_keys(&self) -> &BTreeSet<WaitKeyHash> {
        &self.em_keys
    }

    /// Returns the EMs among the wait keys.
    pub fn em_instances(&self) -> Vec<EmInstance> {
        let parse = |(application_name, instance): &(String, String)| TABLE.em(application_name, instance).ok();
        self.ems.iter().filter_map(parse).collect()
    }
}

fn em_of(wait_key: &WaitKey) -> Option<(String, String)> {
    match wait_key {
        WaitKey::Em(em) => Some((em.application_name.to_string(), em.instance.to_string())),
        WaitKey::Scope(_) | WaitKey::Queue { .. } => None,
    }
}

/// Notifies all instances at the commit of the transaction, unless no instance has waiters.
pub async fn notify(executor: impl PgExecutor<'_>, freed: &[FreedNotification]) -> Result<(), StoreError> {
    // PostgreSQL serializes the commits of notifying transactions over all databases of the server, so a slow writer
    // delays this one. The usual lock timeout of 100 ms is too short for that.
    sqlx::query(
        "-- waiting::notify
        SELECT pg_notify($1, part), set_config('lock_timeout', '5s', true) FROM unnest($2::text[]) AS d (part)
        WHERE EXISTS (SELECT FROM linkis_rm_instance WHERE alive_until > clock_timestamp())",
    )
    .bind(CHANNEL)
    .bind(freed.iter().map(FreedNotification::payload).collect::<Vec<_>>())
    .execute(executor)
    .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rm_model::wait_queue::MUCH;

    #[test]
    fn freed_notification_round_trips_in_bounded_parts() {
        let mut wait_keys = FreedKeys::default();
        let em = |number: u32| EmInstance::parse("em", "ecm", &format!("{}{number}", "h".repeat(200))).unwrap();
        for number in 0..100 {
            wait_keys.add(WaitKey::Em(em(number)), if number == 0 { MUCH } else { number });
            wait_keys.add(WaitKey::Em(em(number)), 1);
        }
        let parts = FreedNotification::at(&wait_keys);
        assert!(parts.len() > 1 && parts.iter().all(|part| part.payload().len() < 8000));
        let understood: Vec<FreedNotification> =
            parts.iter().map(|part| FreedNotification::parse(&part.payload())).collect();
        assert_eq!(understood, parts);
        let counts: BTreeMap<WaitKeyHash, u32> = understood.iter().flat_map(|part| part.wait_keys.clone()).collect();
        assert_eq!(counts[&key_hash(&WaitKey::Em(em(0)))], MUCH);
        assert_eq!(counts[&key_hash(&WaitKey::Em(em(7)))], 8);
        assert_eq!(understood.iter().map(|part| part.em_instances().len()).sum::<usize>(), 100);
        assert!(FreedNotification::parse("not so").anywhere);
    }

    /// An earlier release sends no ticket ids.
    #[test]
    fn ended_calls_are_notified_in_bounded_parts() {
        let owned =
            |number| OwnedPosition { ticket_id: Uuid::from_u128(number), claim: Some(Uuid::from_u128(number + 1)) };
        let calls: Vec<OwnedPosition> = (0..512).map(owned).collect();
        let parts = FreedNotification::ended(&calls);
        assert!(parts.len() > 1 && parts.iter().all(|part| part.payload().len() < 8000));
        let understood: Vec<FreedNotification> =
            parts.iter().map(|part| FreedNotification::parse(&part.payload())).collect();
        assert_eq!(understood.iter().flat_map(FreedNotification::ended_calls).collect::<Vec<_>>(), calls);
        assert!(understood.iter().all(|part| !part.anywhere && part.wait_keys.is_empty()));
        let earlier = FreedNotification::parse(r#"{"anywhere":false,"wait_keys":{"7":1},"ems":[],"from":null}"#);
        assert_eq!((earlier.anywhere, earlier.calls.len(), earlier.wait_keys.len()), (false, 0, 1));
    }
}
