//! Bounded deserialization: memory is bounded for any response.
//!
//! Lists of objects are reduced one object at a time. Lists and maps inside an object have at most [`PARTS_MAX`] parts,
//! because a few bytes of JSON can take a hundred times as much memory. Caller: `objects`.

use std::{collections::BTreeMap, fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

use super::{KubernetesParseError, objects::ListItem, quantity::Quantity};

/// Maximum number of parts in a list or map of an object. An object has at most 1.5 MB, and a container or quota has
/// some hundred bytes.
pub(super) const PARTS_MAX: usize = 10_000;

/// Reduced objects of a list, or the reason why the list is rejected.
pub(super) struct BoundedItems<T: ListItem>(pub Result<Vec<T::Kept>, KubernetesParseError>);

impl<'de, T: ListItem> Deserialize<'de> for BoundedItems<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ItemsVisitor(PhantomData))
    }
}

struct ItemsVisitor<T>(PhantomData<T>);

impl<'de, T: ListItem> Visitor<'de> for ItemsVisitor<T> {
    type Value = BoundedItems<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<BoundedItems<T>, A::Error> {
        let mut kept = Vec::new();
        while let Some(item) = seq.next_element::<T>()? {
            let error = match item.keep() {
                Ok(None) => continue,
                Ok(Some(item)) if kept.len() < T::MOST => {
                    kept.push(item);
                    continue;
                }
                Ok(Some(_)) => KubernetesParseError::TooMany { most: T::MOST, what: T::NAME },
                Err(error) => error,
            };
            drop(kept);
            // The rest is only checked to be JSON.
            while seq.next_element::<IgnoredAny>()?.is_some() {}
            return Ok(BoundedItems(Err(error)));
        }
        Ok(BoundedItems(Ok(kept)))
    }
}

/// List of at most [`PARTS_MAX`] parts.
pub(super) struct BoundedList<T>(pub Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for BoundedList<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(FewVisitor(PhantomData))
    }
}

struct FewVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for FewVisitor<T> {
    type Value = BoundedList<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {PARTS_MAX} parts")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<BoundedList<T>, A::Error> {
        let mut parts = Vec::new();
        while let Some(part) = seq.next_element()? {
            if parts.len() >= PARTS_MAX {
                return Err(A::Error::invalid_length(parts.len() + 1, &self));
            }
            parts.push(part);
        }
        Ok(BoundedList(parts))
    }
}

/// Map from names to amounts, of at most [`PARTS_MAX`] entries.
#[derive(Default)]
pub(super) struct BoundedMap(pub BTreeMap<String, LenientQuantity>);

impl<'de> Deserialize<'de> for BoundedMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(NamedVisitor)
    }
}

struct NamedVisitor;

impl<'de> Visitor<'de> for NamedVisitor {
    type Value = BoundedMap;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {PARTS_MAX} amounts by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<BoundedMap, A::Error> {
        let mut named = BTreeMap::new();
        while let Some((name, amount)) = map.next_entry()? {
            if named.len() >= PARTS_MAX {
                return Err(A::Error::invalid_length(named.len() + 1, &self));
            }
            named.insert(name, amount);
        }
        Ok(BoundedMap(named))
    }
}

/// Amount given as text or number; `None` for anything else, whose content is dropped.
#[derive(Debug, Clone, Copy)]
pub(super) struct LenientQuantity(pub Option<Quantity>);

impl<'de> Deserialize<'de> for LenientQuantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AmountVisitor)
    }
}

struct AmountVisitor;

impl<'de> Visitor<'de> for AmountVisitor {
    type Value = LenientQuantity;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an amount")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<LenientQuantity, E> {
        Ok(LenientQuantity(Quantity::parse(text)))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<LenientQuantity, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<LenientQuantity, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<LenientQuantity, E> {
        // Formatted as JSON, with an exponent if the number is large.
        self.visit_str(&serde_json::Number::from_f64(number).map(|number| number.to_string()).unwrap_or_default())
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<LenientQuantity, E> {
        Ok(LenientQuantity(None))
    }

    fn visit_unit<E: Error>(self) -> Result<LenientQuantity, E> {
        Ok(LenientQuantity(None))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<LenientQuantity, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(LenientQuantity(None))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LenientQuantity, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(LenientQuantity(None))
    }
}
