//! Packed form of a resource in few bytes, for observations that are stored in bulk and soon replaced.
//!
//! Caller: [`crate::observation`], which also stores the version of the format. Any bytes are safe to unpack.

use std::sync::Arc;

use super::{Dimension, Resource, ResourceType};

impl Resource {
    /// Appends the packed form, without the application id.
    pub fn pack(&self, to: &mut Vec<u8>) {
        let number = ResourceType::ALL.iter().position(|known| *known == self.resource_type);
        put_number(to, number.unwrap_or(ResourceType::ALL.len()));
        if self.resource_type.has_queue() || self.resource_type.has_namespace() {
            put_text(to, self.place.as_deref().unwrap_or_default());
        }
        put_number(to, self.amounts.custom().count());
        for (name, amount) in self.amounts.custom() {
            put_text(to, name);
            put_amount(to, amount);
        }
        self.resource_type.shape().iter().for_each(|dimension| put_amount(to, self.get(dimension)));
    }

    /// Takes one resource from the front of packed bytes; `None` if they are not valid.
    #[must_use]
    pub fn unpack(from: &mut &[u8]) -> Option<Self> {
        let mut read = Self::zero(*ResourceType::ALL.get(take_number(from)?)?);
        if read.resource_type.has_queue() || read.resource_type.has_namespace() {
            read.place = Some(take_text(from)?).filter(|place| !place.is_empty());
        }
        for _ in 0..take_number(from)? {
            let name = take_text(from)?;
            read.amounts.set(Dimension::Custom(name), take_amount(from)?);
        }
        for dimension in read.resource_type.shape() {
            read.amounts.set(dimension.clone(), take_amount(from)?);
        }
        Some(read)
    }
}

fn put_amount(to: &mut Vec<u8>, amount: i64) {
    // Variable-length encoding: seven bits per byte, the lowest first; the eighth bit marks that another byte follows.
    let mut rest = amount.unsigned_abs();
    while rest >= 0x80 {
        to.push(rest.to_le_bytes()[0] | 0x80);
        rest >>= 7;
    }
    to.push(rest.to_le_bytes()[0]);
}

fn take_amount(from: &mut &[u8]) -> Option<i64> {
    let mut amount = 0_u64;
    for shift in (0..64).step_by(7) {
        let byte = from.split_off_first()?;
        amount |= u64::from(byte & 0x7f).checked_shl(shift)?;
        if byte & 0x80 == 0 {
            return i64::try_from(amount).ok();
        }
    }
    None
}

fn put_number(to: &mut Vec<u8>, number: usize) {
    put_amount(to, i64::try_from(number).unwrap_or(i64::MAX));
}

fn take_number(from: &mut &[u8]) -> Option<usize> {
    usize::try_from(take_amount(from)?).ok()
}

fn put_text(to: &mut Vec<u8>, text: &str) {
    put_number(to, text.len());
    to.extend_from_slice(text.as_bytes());
}

fn take_text(from: &mut &[u8]) -> Option<Arc<str>> {
    let length = take_number(from)?;
    let bytes = from.split_off(..length)?;
    std::str::from_utf8(bytes).ok().map(Arc::from)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{LoadInstanceAmounts, ResourceParts, YarnAmounts};
    use super::*;

    #[test]
    fn packed_resource_round_trips() {
        let driver = LoadInstanceAmounts { memory: i64::MAX, cores: 127, instances: 128 };
        let queue = YarnAmounts { queue_name: "root.é".into(), queue_memory: 1 << 53, ..YarnAmounts::default() };
        let mut all: Vec<Resource> = ResourceType::ALL.into_iter().map(Resource::zero).collect();
        all.push(Resource::from_parts(ResourceParts::DriverAndYarn(driver, queue)).unwrap());
        all.push(Resource::special([("gpu".to_owned(), 7), ("disk".to_owned(), 0)].into()).unwrap());
        let mut bytes = Vec::new();
        all.iter().for_each(|resource| resource.pack(&mut bytes));
        let mut rest = &bytes[..];
        for resource in &all {
            assert_eq!(Resource::unpack(&mut rest).as_ref(), Some(resource));
        }
        assert!(rest.is_empty());
        let small = Resource::load_instance(4 << 30, 4, 1).unwrap();
        let mut bytes = Vec::new();
        small.pack(&mut bytes);
        assert_eq!(bytes.len(), 9);
    }

    proptest! {
        #[test]
        fn packed_random_bytes_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let mut rest = &bytes[..];
            if let Some(resource) = Resource::unpack(&mut rest) {
                prop_assert!(resource.amounts().all(|(_, amount)| amount >= 0));
            }
        }
    }
}
