//! Orders of EMs that are lists of the overview: the fullest first, or those that need a person first.
//!
//! Never: decides a request. Caller: the list of EMs.

use std::cmp::Reverse;

use super::{
    em::EmInstance,
    name::Name,
    overview::{EmState, Overview},
};

/// Order of EMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EmOrder {
    /// The fullest first.
    Fullest,
    /// By [`EmState::urgency`], the most urgent first, and within it the fullest first.
    Urgent,
}

/// Place of an EM in an order; a smaller one comes first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct EmPlace {
    /// Urgency of the EM's state; 0 for all EMs if the order ignores it.
    pub urgency: Reverse<u8>,
    /// Used share in the EM's fullest dimension, in percent up to 255.
    pub percent: Reverse<u8>,
    /// The EM.
    pub em: EmInstance,
}

impl EmOrder {
    /// Returns the first `limit` EMs of `application` (`None` for all) after `after`, in this order.
    pub fn places(
        self,
        overview: &Overview,
        application: Option<&Name>,
        after: Option<&EmPlace>,
        limit: usize,
    ) -> Vec<EmPlace> {
        let place = |((em, state), percent): (&(EmInstance, EmState), &u8)| {
            let urgency = match self {
                Self::Fullest => 0,
                Self::Urgent => state.urgency(),
            };
            EmPlace { urgency: Reverse(urgency), percent: Reverse(*percent), em: em.clone() }
        };
        let ems = overview.states.iter().zip(&overview.held_percent);
        let named = ems.filter(|((em, _), _)| application.is_none_or(|name| *name == em.application_name));
        let mut places: Vec<_> = named.map(place).filter(|place| after.is_none_or(|after| place > after)).collect();
        if limit < places.len() {
            places.select_nth_unstable(limit);
            places.truncate(limit);
        }
        places.sort_unstable();
        places
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overview(ems: &[(&str, EmState, u8)]) -> Overview {
        let em = |name: &str| EmInstance::parse("em", "ecm", name).unwrap();
        Overview {
            at: time::OffsetDateTime::UNIX_EPOCH,
            ems: Default::default(),
            states: ems.iter().map(|(name, state, _)| (em(name), *state)).collect(),
            held_percent: ems.iter().map(|(.., percent)| *percent).collect(),
            tickets: Default::default(),
            line: Default::default(),
            throughput: Default::default(),
            scopes: Default::default(),
        }
    }

    #[test]
    fn em_order_pages_contain_each_em_once() {
        let all = overview(&[
            ("a", EmState::Healthy, 10),
            ("b", EmState::Silent, 0),
            ("c", EmState::Unregistering, 90),
            ("d", EmState::Healthy, 90),
            ("e", EmState::Warn, 50),
            ("f", EmState::Healthy, 90),
        ]);
        for (order, expected) in [(EmOrder::Fullest, "cdfeab"), (EmOrder::Urgent, "becdfa")] {
            for limit in 1..8 {
                let (mut names, mut after) = (String::new(), None);
                loop {
                    let page = order.places(&all, None, after.as_ref(), limit);
                    page.iter().for_each(|place| names.push_str(place.em.instance.as_str()));
                    after = page.last().cloned();
                    if page.len() < limit {
                        break;
                    }
                }
                assert_eq!(names, expected, "{order:?} in pages of {limit}");
            }
        }
        let other = Name::parse("name", "other").unwrap();
        assert!(EmOrder::Fullest.places(&all, Some(&other), None, 9).is_empty());
    }
}
