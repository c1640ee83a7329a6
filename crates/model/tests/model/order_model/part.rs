//! Comparisons of `rm_model::order` in each state: the part of the requests that a batch reads, and the bytes of positions.

use std::collections::BTreeSet;

use rm_model::{
    order::{Class, OwnRequests, RankedRequest, TurnKey},
    wait_queue::QueuePosition,
};
use uuid::Uuid;

use super::world::{KeySet, Model, World, ticket_id};

impl Model<'_> {
    /// Applies an event to the part of the requests that a batch reads, and expects the ranks of `all`.
    pub fn check_part(
        &self,
        world: &World,
        request: usize,
        after: KeySet,
        event: &impl Fn(&mut OwnRequests, Uuid),
        all: &OwnRequests,
    ) {
        let ranked = |other: usize| self.ranked(world, other);
        let turn_keys = |ranked: &RankedRequest| -> BTreeSet<TurnKey> {
            ranked.short_at.iter().map(|wait_key| ranked.turn_key(wait_key)).collect()
        };
        // The user's requests in own order, each with its keys.
        let of_user = world.waiting().map(|(other, _)| other).filter(|other| self.user(*other) == self.user(request));
        let mut own: Vec<(RankedRequest, BTreeSet<TurnKey>)> =
            of_user.map(ranked).map(|ranked| (ranked.clone(), turn_keys(&ranked))).collect();
        own.sort_by_key(|(ranked, _)| ranked.own_order());
        let at = |key| own.iter().filter(move |(_, keys)| keys.contains(key)).map(|(ranked, _)| ranked);
        let (subject, own_order) = (ranked(request), ranked(request).own_order());
        let mut keys = turn_keys(&subject);
        keys.extend(after.iter().map(|key| subject.turn_key(&self.setting.keys[key])));
        let mut part = BTreeSet::from([subject.ticket_id]);
        for key in &keys {
            let (mut present, mut later) = (0, 0);
            for other in at(key) {
                let is_later = other.own_order() > own_order;
                if present < 2 || is_later && later < 1 {
                    part.insert(other.ticket_id);
                }
                present += usize::from(!other.is_absent);
                later += usize::from(!other.is_absent && is_later);
            }
        }
        let read = own.iter().filter(|(ranked, _)| part.contains(&ranked.ticket_id));
        let keys: BTreeSet<&TurnKey> = read.flat_map(|(_, keys)| keys).collect();
        part.extend(keys.into_iter().filter_map(|key| at(key).find(|own| !own.is_absent)).map(|own| own.ticket_id));
        let mut requests = OwnRequests::default();
        let read = own.iter().filter(|(ranked, _)| part.contains(&ranked.ticket_id));
        read.for_each(|(ranked, _)| requests.insert(ranked.clone()));
        event(&mut requests, subject.ticket_id);
        for (before, _) in &own {
            let is_read = part.contains(&before.ticket_id);
            let found = if is_read { requests.get(before.ticket_id) } else { Some(before) };
            assert_eq!(found, all.get(before.ticket_id), "an event of {request} reads {part:?}, in {world:?}");
        }
    }

    /// Compares positions with their bytes: class, time and ticket id.
    pub fn check_positions(&self, world: &World, positions: Vec<(usize, QueuePosition)>) {
        for (request, position) in positions {
            let waiting = world.get(request);
            let is_behind = waiting.class == Class::Behind;
            let at = if is_behind { waiting.entered } else { waiting.rank_time };
            let (_, at, _) = self.position_of(request, waiting.class, at);
            let class = [0x3f, 0x7f, 0xbf][waiting.class as usize];
            let mut bytes = vec![class, 0xff];
            bytes.extend(((i64::from(at) * 1_000_000) ^ i64::MIN).to_be_bytes());
            bytes.extend(ticket_id(request).into_bytes());
            assert_eq!(position.as_bytes(), bytes, "{request} in {world:?}");
        }
    }
}
