//! Where there is more room, as the instances of the service tell each other.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use sqlx::PgExecutor;
use uuid::Uuid;

use crate::{
    domain::{
        em::EmInstance,
        line::{FreedSpots, Spot},
    },
    store::StoreError,
};

use super::{TABLE, spot_hash};

/// Where instances are told that there is more room somewhere.
pub const CHANNEL: &str = "linkis_rm_freed";

/// How many bytes of spots one notification tells: PostgreSQL takes less than 8000 in all.
const PAYLOAD_BYTES_MAX: usize = 7800;

/// What stands around the spots.
const FRAME_BYTES: usize = 150;

/// A spot's key and how many made room there, with what separates them and the EM's name from the next.
const KEY_BYTES: usize = 35;

/// In how many notifications one commit tells where there is more room.
const PARTS_MAX: usize = 8;

/// A short name for a spot. Two spots may share one: then somebody looks in vain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SpotKey(u64);

impl SpotKey {
    /// That of a spot.
    pub fn of(spot: &Spot) -> Self {
        let hash = spot_hash(spot);
        Self(hash.iter().take(8).fold(0, |key, byte| key << 8 | u64::from(*byte)))
    }
}

/// Where there is more room, as instances tell each other.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Freed {
    /// Perhaps everywhere.
    pub anywhere: bool,
    /// The spots, and about how many requests have made room there.
    pub spots: BTreeMap<SpotKey, u32>,
    /// Those of the spots that are EMs, by name: some wait for any.
    pub ems: Vec<(String, String)>,
    /// The keys of these EMs.
    #[serde(skip)]
    em_keys: BTreeSet<SpotKey>,
    /// The instance that has told its own waiters already.
    #[serde(default)]
    from: Option<String>,
}

impl Freed {
    /// At `spots`: in several parts if one notification cannot hold them, and of very many, anywhere.
    pub fn at(spots: &FreedSpots) -> Vec<Self> {
        let (mut parts, mut size) = (vec![Self::default()], 0);
        for (spot, requests) in spots.iter() {
            let em = em_of(spot);
            let bytes = KEY_BYTES + em.as_ref().map_or(0, |em| serde_json::json!(em).to_string().len());
            if size + bytes > PAYLOAD_BYTES_MAX {
                parts.push(Self::default());
                size = 0;
            }
            size += bytes;
            if let Some(part) = parts.last_mut() {
                part.note(spot, requests, em);
            }
        }
        let fits = |part: &Self| part.payload().len() <= PAYLOAD_BYTES_MAX + FRAME_BYTES;
        if parts.len() <= PARTS_MAX && parts.iter().all(fits) { parts } else { vec![Self::anywhere()] }
    }

    /// At `spots`, however many: for those who need not be notified.
    pub fn of(spots: &FreedSpots) -> Self {
        let mut freed = Self::default();
        spots.iter().for_each(|(spot, requests)| freed.note(spot, requests, em_of(spot)));
        freed
    }

    fn note(&mut self, spot: &Spot, requests: u32, em: Option<(String, String)>) {
        let noted = self.spots.entry(SpotKey::of(spot)).or_default();
        *noted = noted.saturating_add(requests);
        if let Some(em) = em {
            self.ems.push(em);
            self.em_keys.insert(SpotKey::of(spot));
        }
    }

    /// Told by an instance whose own waiters know.
    pub fn from(self, instance_id: Uuid) -> Self {
        Self { from: Some(instance_id.to_string()), ..self }
    }

    /// Whether it is told by that instance.
    pub fn is_from(&self, instance_id: Uuid) -> bool {
        self.from.as_ref().is_some_and(|from| *from == instance_id.to_string())
    }

    /// Perhaps everywhere.
    pub fn anywhere() -> Self {
        Self { anywhere: true, ..Self::default() }
    }

    /// As another instance told it; what cannot be understood may be about anything.
    pub fn parse(payload: &str) -> Self {
        let mut freed: Self = serde_json::from_str(payload).unwrap_or_else(|_| Self::anywhere());
        freed.em_keys = freed.em_instances().into_iter().map(|em| SpotKey::of(&Spot::Em(em))).collect();
        freed
    }

    fn payload(&self) -> String {
        serde_json::json!(self).to_string()
    }

    /// Whether a key is that of an EM.
    pub fn is_em(&self, key: &SpotKey) -> bool {
        self.em_keys.contains(key)
    }

    /// The EMs among the spots.
    pub fn em_instances(&self) -> Vec<EmInstance> {
        let parse = |(application_name, instance): &(String, String)| TABLE.em(application_name, instance).ok();
        self.ems.iter().filter_map(parse).collect()
    }
}

fn em_of(spot: &Spot) -> Option<(String, String)> {
    match spot {
        Spot::Em(em) => Some((em.application_name.to_string(), em.instance.to_string())),
        Spot::Scope(_) | Spot::Queue { .. } => None,
    }
}

/// Tells all instances where there is more room, once the transaction commits, if anybody waits.
pub async fn notify(executor: impl PgExecutor<'_>, freed: &[Freed]) -> Result<(), StoreError> {
    // Those who notify commit one after another, in all databases of the server: whoever is slow to write holds up the others, and
    // nobody wants to know after 100 ms that it was somebody else.
    sqlx::query(
        "-- waiting::notify
        SELECT pg_notify($1, part), set_config('lock_timeout', '5s', true) FROM unnest($2::text[]) AS d (part)
        WHERE EXISTS (SELECT FROM linkis_rm_instance WHERE alive_until > clock_timestamp())",
    )
    .bind(CHANNEL)
    .bind(freed.iter().map(Freed::payload).collect::<Vec<_>>())
    .execute(executor)
    .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::line::MUCH;

    #[test]
    fn what_is_told_is_understood() {
        let mut spots = FreedSpots::default();
        let em = |number: u32| EmInstance::parse("em", "ecm", &format!("{}{number}", "h".repeat(200))).unwrap();
        for number in 0..100 {
            spots.note(Spot::Em(em(number)), if number == 0 { MUCH } else { number });
            spots.note(Spot::Em(em(number)), 1);
        }
        let parts = Freed::at(&spots);
        assert!(parts.len() > 1 && parts.iter().all(|part| part.payload().len() < 8000));
        let understood: Vec<Freed> = parts.iter().map(|part| Freed::parse(&part.payload())).collect();
        assert_eq!(understood, parts);
        let told: BTreeMap<SpotKey, u32> = understood.iter().flat_map(|part| part.spots.clone()).collect();
        assert_eq!(told[&SpotKey::of(&Spot::Em(em(0)))], MUCH);
        assert_eq!(told[&SpotKey::of(&Spot::Em(em(7)))], 8);
        assert_eq!(understood.iter().map(|part| part.em_instances().len()).sum::<usize>(), 100);
        assert!(Freed::parse("not so").anywhere);
    }
}
